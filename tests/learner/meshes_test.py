"""An update is the same on every mesh: gradient, log-probabilities, metrics."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.learner import gradient
from grpo_jax.learner import step
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import layout as layouts
from grpo_jax.run import loop
from tests import bigram
from tests import runs
from tests import tiny
from tests.learning import METHODS
from tests.learning import layouts_of
from tests.learning import lowered_gradient
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec
from tests.learning import with_top

FANCY = {**tiny.FANCY, 'vocab_size': 64, 'num_layers': 4}
CASES = [
  (dict(fsdp=2, context=2, tensor=2), 'shared'),
  pytest.param(dict(context=4), 'packed', marks=pytest.mark.long),
]
MORE = [
  (dict(data=8), 'shared'),
  (dict(fsdp=8), 'packed'),
  (dict(context=8), 'padded'),
  (dict(data=2, fsdp=2, tensor=2), 'parts of groups'),
  (dict(fsdp=2, context=4), 'parts of groups'),
  (dict(fsdp=4, tensor=2), 'padded'),
]
WIDTH = 8  # positions, which data shards have between them
LAYOUTS = {
  'shared': spec('shared', 8),
  'padded': spec('padded', 8),
  'packed': spec('packed', 8),
  'parts of groups': spec('shared', 8, row_completions=2),
}


def transformer(method, mesh):
  """A learner, and its parameters."""
  learner = make_learner(method, mesh=mesh, **FANCY)
  return learner, tiny.params(tiny.model(**FANCY))


def of_bigram(method, mesh):
  params = dict(bigram.params())
  params['position'] = jnp.pad(params['position'], ((0, 2), (0, 0)))
  learner = bigram.make_learner(method)
  mesh = sharding.make_mesh(**mesh)
  return bigram.changed(learner, mesh=mesh), params


def found(method, layout, mesh=None, make=transformer):
  """The gradient of a batch, and what else `differentiate` finds."""
  learner, params = make(METHODS[method](), mesh or {})
  rows = dataclasses.replace(
    LAYOUTS[layout],
    shards=sharding.row_shards(learner.mesh),
    parts=learner.mesh.shape['context'],
  )
  made = make_updater(learner, params, rows)
  rollout = make_rollout(width=WIDTH, of_bigram=make is of_bigram)
  if method == 'top':
    rollout = with_top(rollout, FANCY['vocab_size'])
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  rows, used = layouts_of(made, rollout).stack(np.arange(4))

  def run(params, batch, rows):
    with sharding.use(learner.mesh):
      return gradient.differentiate(
        learner, None, params, state, batch, rows, used
      )

  place = step.state_sharding(learner, params).params
  result = jax.jit(run)(jax.device_put(params, place), batch, rows)
  for leaf in jax.tree.leaves(result.grads):
    assert len(leaf.sharding.device_set) == math.prod((mesh or {}).values())
  return jax.device_get(result)


@functools.cache
def on_one_device(method):
  """Which is the same in every layout."""
  return found(method, 'shared')


def check(given, expected):
  tiny.assert_trees_close(given.grads, expected.grads, 1e-5)
  np.testing.assert_allclose(given.loss, expected.loss, rtol=1e-5, atol=1e-6)
  mask = make_rollout(width=WIDTH).batch.mask
  for name in ('logp', 'entropy', 'top_logp'):
    got, wanted = (getattr(one.scores, name) for one in (given, expected))
    assert (got is None) == (wanted is None)
    if got is not None:
      np.testing.assert_allclose(got[mask], wanted[mask], atol=1e-5)
  np.testing.assert_allclose(given.slope[mask], expected.slope[mask], atol=1e-5)


@pytest.mark.parametrize('mesh, layout', CASES, ids=str)
def test_the_gradient_is_that_of_one_device(mesh, layout):
  check(found('entropy', layout, mesh), on_one_device('entropy'))


@pytest.mark.long
@pytest.mark.parametrize('mesh, layout', MORE, ids=str)
def test_the_gradient_on_more_meshes_is_that_of_one_device(mesh, layout):
  check(found('entropy', layout, mesh), on_one_device('entropy'))


@pytest.mark.parametrize(
  'mesh, layout',
  [
    *CASES,
    *(pytest.param(*one, marks=pytest.mark.long) for one in MORE),
  ],
  ids=str,
)
def test_the_likeliest_tokens_are_those_of_one_device(mesh, layout):
  check(found('top', layout, mesh), on_one_device('top'))


@pytest.mark.long
def test_rows_that_are_coupled_know_the_whole_batch():
  """KL-Cov compares tokens of all rows, which lie on four shards."""
  mesh = dict(fsdp=2, data=2, context=2)
  check(found('kl_cov', 'shared', mesh), on_one_device('kl_cov'))


def test_two_stages_gather_and_sum_the_same(monkeypatch):
  """As for whole slices of TPUs: neighbours, and across their groups."""
  monkeypatch.setattr(shards, '_STAGED', {'cpu': (8, 8)})
  stages = []
  groups = shards._stages

  def seen(name, which):
    stages.append(len(groups(name, which)))
    return groups(name, which)

  monkeypatch.setattr(shards, '_stages', seen)
  given = found('entropy', 'shared', dict(fsdp=8), of_bigram)
  check(given, found('entropy', 'shared', make=of_bigram))
  assert set(stages) == {2}


COLUMNS = 1024  # of the one long row


def temporaries(context=1, tensor=1, **changes):
  """Bytes that the gradient of one long row needs on a device."""
  changes = dict(vocab_size=64, num_layers=8, remat='none') | changes
  mesh = dict(context=context, tensor=tensor)
  learner = make_learner(METHODS['grpo'](), mesh=mesh, **changes)
  params = jax.eval_shape(tiny.model(**changes).init, jax.random.key(0))
  rows = layouts.LayoutSpec('padded', 1, prompt_buckets=(64,), parts=context)
  example = rollout_lib.blank(1, 1, 64, COLUMNS - 64, 1, (COLUMNS - 64,))
  lowered = lowered_gradient(learner, params, rows, example)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_the_memory_of_activations_falls_with_the_parts_of_rows():
  """At least .8 of what cutting could save."""
  whole, quarters = (temporaries(parts) for parts in (1, 4))
  assert whole / quarters > 0.8 * 4, (whole, quarters)


@pytest.mark.long
def test_the_memory_of_the_residual_stream_falls_with_tensor():
  """What of it is kept of each further layer, at least .8 of what it could."""

  few, many = (
    temporaries(remat='layer', num_layers=number, tensor=2)
    for number in (8, 72)
  )
  halves = (many - few) / 64
  whole = COLUMNS * tiny.CONFIG.width * 4  # float32
  assert whole / halves > 0.8 * 2, (whole, halves)


@pytest.mark.long
def test_a_run_is_the_same_with_rows_that_are_cut(tmp_path):
  """Three rollouts, with warm-up: metrics to 1e-3."""
  results = {}
  for name, mesh in {
    'one': {},
    'cut': {'mesh.context': 2, 'mesh.fsdp': 2, 'mesh.tensor': 2},
  }.items():
    config = runs.small(
      **{'steps': 3, 'learner.micro_rows': 4, 'sampler.prompts': 4, **mesh}
    )
    loop.train(config, tmp_path / name)
    results[name] = runs.records(tmp_path / name)
  for one, cut in zip(*results.values(), strict=True):
    one, cut = map(runs.without_times, (one, cut))
    assert one.keys() == cut.keys()
    for key, value in one.items():
      if isinstance(value, float):
        np.testing.assert_allclose(
          cut[key], value, rtol=1e-3, atol=1e-4, err_msg=key
        )
  assert len(one) > 30
