"""What a start reads of its files before it builds anything."""

import builtins
import dataclasses
import json

import pytest

from grpo_jax import data
from grpo_jax.training import build
from grpo_jax.training import marks
from grpo_jax.training import sources
from tests import runs

OPEN = {'data.prompt_buckets': (), 'data.completion_buckets': ()}


def written(path, records):
  path.write_text('\n'.join(map(json.dumps, records)))
  return str(path)


@pytest.mark.parametrize('widths', [{}, OPEN])
def test_demonstrations_without_answers_are_refused(tmp_path, widths):
  file = tmp_path / 'shown.jsonl'
  config = runs.small(
    **widths,
    **{'data.answer_field': '', 'warm_up.demonstrations': str(file)},
  )
  answered = {'prompt': '01+02=', 'answer': '03'}
  written(file, [answered])
  assert build.demonstrations(build.run(config))[0] == answered
  written(file, [answered, {'prompt': '01+02='}])
  words = r"^Record 2 of warm_up.demonstrations=.*'prompt'\], but the warm-up"
  with pytest.raises(ValueError, match=words):
    build.demonstrations(build.run(config))
  written(file, [answered, {'prompt': '01+02=', 'answer': float('nan')}])
  words = "^Line 2 of .* has the number nan in the field 'answer'"
  with pytest.raises(ValueError, match=words):
    build.demonstrations(build.run(config))


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
  found = sources.with_widths(
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
  found = sources.with_widths(config, tokenizer, marks.NOTHING)
  assert found.data.prompt_buckets == (19,)
  assert opened == [file, file]  # to check every line, and to measure
