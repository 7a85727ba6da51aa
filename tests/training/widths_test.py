"""Widths of prompts and completions follow from the data."""

import builtins
import dataclasses
import json

import pytest

from grpo_jax import data
from grpo_jax.training import marks
from grpo_jax.training import widths
from tests import runs

OPEN = {'data.prompt_buckets': (), 'data.completion_buckets': ()}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return tmp_path / 'cache' / 'grpo_jax' / 'widths'


def written(path, records):
  path.write_text('\n'.join(map(json.dumps, records)))
  return str(path)


class Records(list):
  """A user's own data; only its length and its places are known to work."""

  def __iter__(self):
    raise NotImplementedError


def test_records_of_a_users_own_are_read_by_place():
  asked = Records([{'prompt': '11'}, {'prompt': '1'}])
  config = runs.small(**OPEN, **{'warm_up.steps': 0, 'data.heldout': ''})
  mark = marks.mark('Records of 2 prompts')
  config = dataclasses.replace(
    config, data=dataclasses.replace(config.data, train=mark)
  )
  found = widths.with_widths(
    config, data.character_tokenizer('1'), marks.Given({mark: asked}, {})
  )
  assert found.data.prompt_buckets == (2,)


def test_measuring_opens_a_file_once_and_not_for_each_record(
  tmp_path, monkeypatch
):
  records = [{'prompt': '1' * n, 'answer': '1'} for n in range(1, 20)]
  file = written(tmp_path / 'asked.jsonl', records)
  config = runs.small(
    **OPEN, **{'data.train': file, 'data.heldout': '', 'warm_up.steps': 0}
  )
  opened, tokenizer = [], data.character_tokenizer('0123456789+=')
  open_file = builtins.open
  monkeypatch.setattr(
    builtins, 'open', lambda *a: opened.append(a[0]) or open_file(*a)
  )
  found = widths.with_widths(config, tokenizer, marks.NOTHING)
  assert found.data.prompt_buckets == (19,)
  # For the cache's hash, to check every line, and to measure.
  assert opened == [file] * 3
