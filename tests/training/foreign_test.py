"""A run of a model that is not ours: learns, repeats, goes on, is refused."""

import pathlib

import numpy as np
import pytest

import grpo_jax
from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.config import Model
from grpo_jax.training import build
from grpo_jax.training import marks
from tests import cli
from tests import own_module
from tests import runs

NAMED = 'tests.own_module:arithmetic'


def fives(prompt, completion, example):
  """The share of the token 5; a random model gets about 1/14."""
  ids = example['completion_ids']
  return float(np.mean(np.asarray(ids) == 5)) if len(ids) else 0.0


def config(**changes):
  usual = {
    f'model.{name}': value
    for name, value in vars(Model()).items()
    if name != 'path'
  }
  return runs.small(
    **{
      **usual,
      'steps': 6,
      'sampler.prompts': 8,
      'sampler.group': 8,
      'learner.micro_rows': 0,
      'warm_up.steps': 0,
      'optim.lr': 1e-2,
      'optim.warmup_steps': 0,
      'evaluation.every_steps': 3,
      **changes,
    }
  )


def train(workdir, kind='mask', model=None, **changes):
  model = model or own_module.made(kind)
  return grpo_jax.train(
    config(**changes), workdir, rewards=[fives], model=model
  )


@pytest.fixture(scope='module', params=own_module.KINDS)
def whole(request, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('foreign') / 'run'
  train(workdir, request.param)
  return request.param, workdir


def test_it_learns(whole):
  _, workdir = whole
  records = runs.records(workdir)[1:]
  rewards = [record['reward'] for record in records]
  assert rewards[0] < 0.2 and rewards[-1] > 0.6, rewards
  assert max(record['sampler_gap'] for record in records) < 1e-4


def test_a_run_in_two_starts_is_the_run_in_one(whole, tmp_path):
  kind, workdir = whole
  train(tmp_path, kind, steps=3)
  train(tmp_path, kind)
  runs.assert_equal(tmp_path, workdir)


def test_evaluate_and_sample_take_the_model_again(whole):
  kind, workdir = whole
  own = own_module.made(kind)
  found = grpo_jax.evaluate(
    workdir, rewards=[fives], model=own, samples=1, ks=[1], temperature=0.0
  )
  last = runs.records(workdir)[-1]['heldout_accuracy']
  assert found['mean_reward'] == pytest.approx(last)
  (answer,) = grpo_jax.sample(workdir, ['12+34='], model=own, temperature=0.0)
  assert answer['completion'].count(data.ALPHABET[3]) >= 0
  cli.assert_refused(
    cli.command('sample', '--prompt=01+02=', f'--workdir={workdir}'),
    'Sampling from this run needs again what it was given in Python: model '
    '(Decoder); call grpo_jax.sample(workdir, prompts, model=...).',
  )


def test_another_module_is_refused(whole):
  kind, workdir = whole
  other = 'no cache' if kind != 'no cache' else 'mask'
  with pytest.raises(ValueError, match='The model Decoder is not the one that'):
    train(workdir, other)
  with pytest.raises(
    ValueError, match=r'was given model \(Decoder\) in Python'
  ):
    grpo_jax.train(config(), workdir, rewards=[fives])


def test_a_function_that_the_config_names(tmp_path):
  """The same run, on four devices, for one rollout; and its warm-up."""
  found = [
    build.run(config(**{'model.path': NAMED, **mesh}))
    for mesh in ({}, {'mesh.data': 2, 'mesh.fsdp': 2})
  ]
  assert {run.model.name for run in found} == {'Decoder'}
  params = build.initial_params(found[1])
  split = params['embed']['embedding'].sharding.spec
  assert tuple(split) == (None, 'fsdp')
  changes = {'model.path': NAMED, 'steps': 1, 'warm_up.steps': 2}
  for index, mesh in enumerate(({}, {'mesh.data': 2, 'mesh.fsdp': 2})):
    grpo_jax.train(
      config(**changes, **mesh), tmp_path / str(index), rewards=[fives]
    )
  one, four = (runs.records(tmp_path / name)[-1] for name in '01')
  assert four['reward'] == pytest.approx(one['reward'], abs=1e-6)
  assert four['grad_norm'] == pytest.approx(one['grad_norm'], rel=1e-4)
  after = config(**{'model.path': str(pathlib.Path(tmp_path) / '0')})
  with pytest.raises(ValueError, match='trained a model of your own'):
    build.run(after)


@pytest.mark.parametrize(
  'changes, words',
  [
    (
      {'learner.layout': 'packed'},
      "layout='packed', but Decoder, a model of y",
    ),
    (
      {'lora.rank': 4},
      'config.lora.rank=4, but Decoder is a model of your own',
    ),
    ({'model.width': 32}, 'config.model has width=32, which nothing reads'),
    (
      {'data.tokenizer': ''},
      'a model of your own brings none; give tokenizer=',
    ),
    ({'model.path': 'tests.own_module:nothing'}, 'has no function'),
    ({'model.path': 'tests.own_module:rotated'}, 'rotated'),
  ],
)
def test_what_a_config_cannot_ask_for(changes, words):
  with pytest.raises(ValueError, match=words):
    build.run(config(**{'model.path': NAMED, **changes}))


def test_what_is_given_and_cannot_be_used(tmp_path):
  with pytest.raises(
    ValueError, match='13 token ids|14 token ids, but Decoder'
  ):
    train(tmp_path, model=own_module.made(vocab_size=9))
  with pytest.raises(ValueError, match='from_nnx'):
    train(tmp_path, model=own_module.Decoder)
  assert not list(tmp_path.iterdir())
  resolved = config_lib.resolve(config_lib.default())
  with pytest.raises(ValueError, match='Training this run needs again'):
    marked = config(**{'model.path': marks.mark('model Decoder')})
    build.run(marked)
  assert resolved.model.path == ''
