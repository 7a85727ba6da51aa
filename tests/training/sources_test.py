"""What a start reads of its files before it builds anything."""

import json

import pytest

from grpo_jax.training import build
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
