"""Widths of prompts and completions follow from the data."""

import builtins
import dataclasses
import json
import os

import pytest

from grpo_jax import data
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build.specs import WidthSpec
from grpo_jax.run.keep import objects
from grpo_jax.run.keep.objects import Objects
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
  name = objects.words('Records of 2 prompts')
  config = dataclasses.replace(
    config, data=dataclasses.replace(config.data, train=name)
  )
  found = build_data.with_widths(
    config, data.character_tokenizer('1'), Objects(prompts=asked)
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
  found = build_data.with_widths(config, tokenizer)
  assert found.data.prompt_buckets == (19,)
  # For the cache's hash, to check every line, and to measure.
  assert opened == [file] * 3


def config_of(file, **changes):
  return runs.small(
    **{
      **OPEN,
      'data.train': file,
      'data.heldout': '',
      'warm_up.steps': 0,
      **changes,
    }
  )


TOKENIZER = data.character_tokenizer('0123456789+=')


def test_many_records_are_sampled_and_get_a_margin(tmp_path, monkeypatch):
  monkeypatch.setattr(build_data, 'MOST_RECORDS', 50)
  monkeypatch.setattr(build_data, '_SAMPLE', 20)
  monkeypatch.setattr(build_data, '_LEAST_SAMPLE', 5)
  encoded = []

  class Counting(data.Tokenizer):
    def encode_prompt(self, prompt):
      encoded.append(prompt)
      return super().encode_prompt(prompt)

  counting = Counting(
    **{
      field.name: getattr(TOKENIZER, field.name)
      for field in dataclasses.fields(TOKENIZER)
      if field.init
    }
  )
  records = [{'prompt': '1' * 30, 'answer': '1'}] * 50
  for number, width in ((50, 30), (51, 40)):  # 30 * 5 / 4, as a multiple of 8
    encoded.clear()
    records = records[:1] * number
    file = written(tmp_path / f'{number}.jsonl', records)
    found = build_data.with_widths(config_of(file), counting)
    assert found.data.prompt_buckets == (width,)
    assert len(encoded) == (50 if number == 50 else 20)


class Grows:
  """A curriculum whose prompts get shorter, and then longest."""

  starts = (0, 20, 50)

  def __init__(self, number, read=None):
    self.number, self.read = number, [] if read is None else read

  def __len__(self):
    return self.number

  def __getitem__(self, index):
    return self.drawn(index, 10**9)

  def drawn(self, index, number):
    self.read.append((index, number))
    length = 7 if number < 20 else 2 if number < 50 else 4
    return {'prompt': '1' * length, 'answer': '1'}


def widths_of_objects(train, heldout):
  config = runs.small(**OPEN, **{'warm_up.steps': 0})
  names = {
    'train': objects.words('Prompts'),
    'heldout': objects.words('Held-out prompts'),
  }
  config = dataclasses.replace(
    config, data=dataclasses.replace(config.data, **names)
  )
  found = Objects(prompts=train, heldout=heldout)
  found = build_data.with_widths(config, TOKENIZER, found)
  return found.data.prompt_buckets


def test_widths_hold_every_stage_of_a_curriculum():
  asked = [{'prompt': '1', 'answer': '1'}]
  assert widths_of_objects(Grows(9), asked) == (7,)
  # Held-out problems are those of the last stage.
  assert widths_of_objects(asked, Grows(9)) == (4,)


def test_few_records_are_read_of_those_that_a_program_makes():
  train, heldout = Grows(10_000), Grows(1_000)
  assert widths_of_objects(train, heldout) == (16,)  # with a margin
  assert len(train.read) == 3 * 96 and len(heldout.read) == 30
  assert {number for _, number in train.read} == {0, 20, 50}
  # Records in memory are read whole, and so are few made ones.
  asked = [{'prompt': '1' * (9 if n == 777 else 1)} for n in range(1_000)]
  assert widths_of_objects(asked, Grows(300)) == (9,)


def test_widths_are_cached_until_something_changes(tmp_path, cache):
  records = [{'prompt': '11', 'answer': '1'}, {'prompt': '1', 'answer': '1'}]
  file = written(tmp_path / 'a.jsonl', records)

  def found(tokenizer=TOKENIZER, **changes):
    config = config_of(file, **changes)
    return build_data.with_widths(config, tokenizer).data

  assert found().prompt_buckets == (2,)
  (kept,) = cache.iterdir()
  assert json.loads(kept.read_text()) == {'prompt': 2, 'completion': 0}
  kept.write_text('{"prompt": 9, "completion": 0}')
  assert found().prompt_buckets == (9,)  # so it is read
  # max_tokens is no part of what is kept.
  assert found(**{'sampler.max_tokens': 7}).completion_buckets == (7,)
  for damage in ('', '[]', '{"prompt": 3}', '{"prompt": "9", "completion": 0}',
                 '{"prompt": 0, "completion": 0}', '\0'):  # fmt: skip
    kept.write_text(damage)
    assert found().prompt_buckets == (2,)
    assert json.loads(kept.read_text())['prompt'] == 2
  kept.write_text('{"prompt": 9, "completion": 0}')
  other = data.character_tokenizer('0123456789+=-')
  assert found(other).prompt_buckets == (2,)
  assert found(**{'data.answer_field': ''}).prompt_buckets == (2,)
  # Of the same size, and as old.
  modified, size = os.stat(file).st_mtime_ns, os.path.getsize(file)
  written(tmp_path / 'a.jsonl', [{'prompt': '111', 'answer': ''}, records[1]])
  os.utime(file, ns=(modified, modified))
  assert os.path.getsize(file) == size
  assert found().prompt_buckets == (3,)


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
  file = written(tmp_path / 'a.jsonl', [{'prompt': '11', 'answer': '1'}])
  monkeypatch.setenv('XDG_CACHE_HOME', file)  # no folder
  found = build_data.with_widths(config_of(file), TOKENIZER)
  assert found.data.prompt_buckets == (2,)


def test_what_fits():
  spec = WidthSpec((2, 4), (6,), drops=False)
  assert build_data.fits(spec, TOKENIZER) is None
  assert build_data.shown_fits(spec, TOKENIZER) is None
  spec = WidthSpec((2, 4), (6,), drops=True)
  fits = build_data.fits(spec, TOKENIZER)
  assert [fits({'prompt': '1' * n}) for n in (3, 4, 5)] == [True, True, False]
  shown = build_data.shown_fits(spec, TOKENIZER)
  # The end token takes one.
  assert [shown({'prompt': '1', 'answer': '1' * n}) for n in (5, 6)] == [
    True,
    False,
  ]
  assert not shown({'prompt': '11111', 'answer': '1'})
