"""Several sources of prompts in one run, by the real command."""

import json

import pytest

from grpo_jax import data
from grpo_jax.rollouts import parquet
from tests.cli import JUDGE
from tests.cli import SMALL
from tests.cli import assert_refused
from tests.cli import call
from tests.cli import command

# Nothing but rollouts: 4 prompts each.
QUICK = (
  SMALL,
  JUDGE,
  '--config.warm_up.steps=0',
  '--config.data.heldout=',
)


@pytest.mark.long
def test_a_mixture_trains_and_goes_on_where_it_was(tmp_path):
  """By `--check`, by `train`, and by `train` again with the saved config."""
  file = tmp_path / 'own.jsonl'
  lines = [{'prompt': f'0{n}+0{n}=', 'answer': 'own'} for n in range(5)]
  file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  weights = ({'name': str(file), 'weight': 3.0}, {'name': 'arithmetic'})
  workdir = tmp_path / 'run'
  given = (*QUICK, f'--config.data.train={weights}', f'--workdir={workdir}')
  checked = command('train', *given, '--check', '--json')
  assert checked.returncode == 0, checked.stderr
  report = json.loads(checked.stdout)
  assert report['config']['data']['train'][0]['weight'] == 3

  first = command('train', *given, '--config.steps=1')
  assert first.returncode == 0, first.stderr
  second = command('train', f'--workdir={workdir}', '--config.steps=3')
  assert second.returncode == 0, second.stderr
  assert 'goes on from the checkpoint of rollout 1' in second.stderr
  rollouts = [
    parquet.read(path) for path in parquet.files(workdir / 'completions')
  ]
  assert [list(one.index) for one in rollouts] == [
    [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
  ]  # fmt: skip
  sources = [data.JsonlSource(file), data.ArithmeticSource('train')]
  stream = data.mixture(sources, [3, 1], seed=0)
  expected = [row['prompt'] for row in data.take(stream, 0, 12)]
  drawn = [text for one in rollouts for text in one.prompt_texts]
  assert drawn == expected
  assert report['first_rollout']['prompts'] == expected[:3]
  own = {line['prompt'] for line in lines}
  assert [sum(t in own for t in one.prompt_texts) for one in rollouts] == [
    3
  ] * 3

  saved = json.loads((workdir / 'config.json').read_text())
  assert saved['data']['train'] == [
    {'name': str(file), 'weight': 3.0, 'kwargs': {}},
    {'name': 'arithmetic', 'weight': 1.0, 'kwargs': {}},
  ]
  other = command('train', *QUICK, f'--workdir={workdir}')
  assert_refused(other, "and now it is 'arithmetic'")


def test_a_mixture_that_cannot_be_is_refused(tmp_path):
  weights = ({'name': 'arithmetic', 'weight': -1.0},)
  done = call(
    'train', *QUICK, f'--config.data.train={weights}', f'--workdir={tmp_path}/r'
  )
  assert_refused(done, 'data.train[0].weight=-1.0; give a number above 0')
