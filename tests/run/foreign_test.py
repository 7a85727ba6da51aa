"""A run of a model that is not ours: learns, repeats, goes on, is refused."""

import jax
import numpy as np
import pytest

import grpo_jax
from grpo_jax.config import Model
from grpo_jax.run.build import build
from grpo_jax.run.keep import objects
from tests import cli
from tests import own_module
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')

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


@pytest.fixture(scope='module')
def own():
  return own_module.made()


@pytest.fixture(scope='module')
def whole(shared_programs, own, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('foreign') / 'run'
  train(workdir, model=own)
  return workdir


@pytest.mark.parametrize(
  'kind',
  [
    pytest.param('mask', marks=pytest.mark.long),
    # What they draw and score is compared in models/foreign_test.py.
    pytest.param('causal', marks=pytest.mark.long),
    pytest.param('no cache', marks=pytest.mark.long),
  ],
)
def test_it_learns(kind, own, whole, tmp_path):
  workdir = whole
  if kind != 'mask':
    own = own_module.made(kind)
    train(workdir := tmp_path, kind, own)
  # Updates donate their parameters, but not the user's.
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(own.params))
  records = runs.records(workdir)[1:]
  rewards = [record['reward'] for record in records]
  assert rewards[0] < 0.2 and rewards[-1] > 0.6, rewards
  assert max(record['sampler_gap'] for record in records) < 1e-4


@pytest.mark.long
def test_a_run_in_two_starts_is_the_run_in_one(whole, tmp_path):
  train(tmp_path, steps=3)
  train(tmp_path)
  runs.assert_equal(tmp_path, whole)


@pytest.mark.long
def test_evaluate_and_sample_take_the_model_again(whole, own):
  workdir = whole
  found = grpo_jax.evaluate(
    workdir, rewards=[fives], model=own, samples=1, ks=[1], temperature=0.0
  )
  last = runs.records(workdir)[-1]['heldout_accuracy']
  assert found['mean'] == pytest.approx(last)
  (answer,) = grpo_jax.sample(workdir, ['12+34='], model=own, temperature=0.0)
  assert answer['completion'] == '33333'  # the token 5
  cli.assert_refused(
    cli.call('sample', '--prompt=01+02=', f'--workdir={workdir}'),
    'Sampling from this run needs again what it was given in Python: model '
    '(Decoder); call grpo_jax.sample(workdir, prompts, model=...).',
  )


@pytest.mark.long
def test_another_module_is_refused(whole):
  with pytest.raises(ValueError, match='The model Decoder is not the one'):
    train(whole, 'no cache')
  with pytest.raises(ValueError, match=r'was given model \(Decoder\) in Py'):
    grpo_jax.train(config(), whole, rewards=[fives])


@pytest.mark.long
def test_a_named_function_on_four_devices(whole, tmp_path):
  """Its first rollout is that of the same module given in Python, on one."""
  four = config(
    **{'model.path': NAMED, 'mesh.data': 2, 'mesh.fsdp': 2, 'steps': 1}
  )
  params = build.initial_params(build.run(four))
  split = params['embed']['embedding'].sharding.spec
  assert tuple(split) == (None, 'fsdp')
  grpo_jax.train(four, tmp_path, rewards=[fives])
  expected, found = runs.records(whole)[1], runs.records(tmp_path)[1]
  for name in ('reward', 'grad_norm', 'entropy'):
    assert found[name] == pytest.approx(expected[name], rel=1e-4), name
  after = config(**{'model.path': str(tmp_path)})
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
      {'mesh.context': 2},
      'config.mesh.context=2, but Decoder, a model of your own, reads whole',
    ),
    (
      {'lora.rank': 4},
      'config.lora.rank=4, but Decoder is a model of your own',
    ),
    ({'model.width': 32}, 'config.model has width=32, which nothing reads'),
    (
      {'data.tokenizer': ''},
      'a model of your own brings none; give tok',
    ),
    ({'model.path': 'tests.own_module:nothing'}, 'has no function'),
    ({'model.path': 'tests.own_module:rotated'}, 'called without arg'),
    ({'model.path': 'tests.own_module:no_model'}, 'returned None of type None'),
  ],
)
def test_what_a_config_cannot_ask_for(changes, words):
  with pytest.raises(ValueError, match=words):
    build.run(config(**{'model.path': NAMED, **changes}))


def test_what_is_given_and_cannot_be_used(tmp_path):
  with pytest.raises(ValueError, match='has 14 token ids, but Decoder has'):
    train(tmp_path, model=own_module.made(vocab_size=9))
  with pytest.raises(ValueError, match='from_nnx'):
    train(tmp_path, model=own_module.Decoder)
  assert not list(tmp_path.iterdir())
  marked = config(**{'model.path': objects.words('model Decoder')})
  with pytest.raises(ValueError, match=r'needs again .*: model \(Decoder\)'):
    build.run(marked)
