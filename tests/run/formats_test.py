"""Runs through every format of data: the same, and resumed in an epoch."""

import importlib.util

import pytest

from grpo_jax import data
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from tests import runs
from tests.data import formats

needs_tfds = pytest.mark.skipif(
  importlib.util.find_spec('tensorflow_datasets') is None,
  reason='tensorflow-datasets is not installed',
)
# Two updates, by the default's own prompts.
RUN = {'steps': 2, 'evaluation.examples': 4}


@pytest.fixture(scope='module')
def sums():
  source = data.ArithmeticSource('train')
  return [source[n] for n in range(len(source))]


@pytest.fixture(scope='module')
def builtin(tmp_path_factory):
  """The run through the built-in source."""
  workdir = tmp_path_factory.mktemp('builtin')
  loop.train(runs.small(**RUN), workdir)
  return workdir


def source_of(form, place, sums):
  """The records in files of a format, as a config names them."""
  if form == 'tfds':
    formats.tfds(place / 'tfds', sums)
    kwargs = {'split': 'train', 'data_dir': str(place / 'tfds')}
    kwargs |= {'prompt_field': 'question'}
    return {'name': 'tfds:gsm8k', 'kwargs': kwargs}
  if form == 'arrow':
    return {'name': str(formats.arrow(place / 'folder', sums, 1000))}
  if form == 'shards':
    for n in range(2):
      part = sums[4500 * n : 4500 * (n + 1)]
      name = f'a.array_record-0000{n}-of-00002'
      formats.array_record(place / name, part)
    return {'name': str(place / 'a.array_record-*-of-00002')}
  if form == 'jsonl parts':
    formats.jsonl(place / '0.jsonl', sums[:10])
    formats.jsonl(place / '1.jsonl', sums[10:])
    return {'name': str(place / '*.jsonl')}
  path = place / f'sums.{form}'
  return {'name': str(getattr(formats, form)(path, sums))}


LONG = ('arrow', 'shards', 'jsonl parts')


@pytest.mark.long
@pytest.mark.parametrize(
  'form',
  [
    'jsonl',
    'parquet',
    'array_record',
    pytest.param('tfds', marks=needs_tfds),
    *(pytest.param(form, marks=pytest.mark.long) for form in LONG),
  ],
)
def test_the_default_is_the_same_run_in_every_format(
  tmp_path, form, sums, builtin
):
  named = (source_of(form, tmp_path, sums),)
  loop.train(runs.small(**RUN, **{'data.train': named}), tmp_path / 'run')
  runs.assert_equal(tmp_path / 'run', builtin)


@pytest.mark.long
@needs_tfds
def test_gsm8k_resumes_in_the_middle_of_an_epoch(tmp_path):
  """10 problems, 4 in a rollout: the first stop is within the first epoch."""
  train = [
    {'question': f'{n}0+0{n}=', 'answer': f'It is {n}{n}.\n#### {n}{n}'}
    for n in range(10)
  ]
  from grpo_jax.data import tfds_builders

  folder = formats.gsm8k(tmp_path / 'official', train, train[:4])
  tfds_builders.build('gsm8k', folder, tmp_path / 'data')
  kwargs = {'data_dir': str(tmp_path / 'data')}
  config = {
    'reward': 'gsm8k',
    'data.train': ({'name': 'tfds:gsm8k', 'kwargs': kwargs},),
    'data.heldout': (
      {'name': 'tfds:gsm8k', 'kwargs': {**kwargs, 'split': 'test'}},
    ),
    'data.prompt_field': 'question',
    'evaluation.every_steps': 0,
  }
  for steps in (1, 5):
    loop.train(runs.small(**{**config, 'steps': steps}), tmp_path / 'stops')
  drawn = []
  for file in parquet.files(tmp_path / 'stops' / 'completions'):
    rollout = parquet.read(file)
    drawn += zip(rollout.index, rollout.prompt_texts)
  asked = sorted(record['question'] for record in train)
  assert [index for index, _ in drawn] == [*range(20)]
  for epoch in drawn[:10], drawn[10:]:
    assert sorted(prompt for _, prompt in epoch) == asked
  loop.train(runs.small(**{**config, 'steps': 5}), tmp_path / 'whole')
  (_, arrays, _), (_, others, _) = (
    runs.saved(tmp_path / name) for name in ('stops', 'whole')
  )
  assert all((arrays[name] == others[name]).all() for name in arrays)
