"""An update is the same on every mesh: gradient, log-probabilities, metrics."""

import functools
import math

import jax
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import sharding
from grpo_jax.learner import gradient
from grpo_jax.learner import step
from grpo_jax.learner import updates
from tests import tiny
from tests.learning import METHODS
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import spec

FANCY = {**tiny.FANCY, 'vocab_size': 64}
MESHES = [
  dict(data=8),
  dict(fsdp=8),
  dict(tensor=2),
  dict(context=2),
  dict(context=8),
  dict(data=2, fsdp=2, tensor=2),
  dict(fsdp=2, context=4),
  dict(data=2, context=2, tensor=2),
  dict(fsdp=4, tensor=2),
  dict(fsdp=2, context=2, tensor=2),
]
LAYOUTS = {
  'shared': spec('shared', 8),
  'padded': spec('padded', 8),
  'packed': spec('packed', 8),
  'parts of groups': spec('shared', 8, row_completions=2),
}


@functools.cache
def found(method, layout, mesh=()):
  """The gradient and what else `of_batch` finds, on a mesh."""
  learner = make_learner(METHODS[method](), mesh=dict(mesh), **FANCY)
  params = tiny.params(tiny.model(**FANCY))
  rows = LAYOUTS[layout]
  updater = updates.Updater(learner, params, _spec(rows, learner.mesh))
  rollout = make_rollout()
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  laid, used = updater.layout(rollout, np.arange(4))
  place = step.state_sharding(learner, params).params

  def run(params, batch, laid):
    with sharding.use(learner.mesh):
      return gradient.of_batch(learner, params, state, batch, laid, used)

  params = jax.device_put(params, place)
  result = jax.jit(run)(params, batch, laid)
  for leaf in jax.tree.leaves(result.grads):
    assert len(leaf.sharding.device_set) == math.prod(dict(mesh).values())
  return jax.device_get(result)


def _spec(rows, mesh):
  import dataclasses

  return dataclasses.replace(
    rows, shards=sharding.row_shards(mesh), parts=mesh.shape['context']
  )


def check(given, expected):
  tiny.assert_trees_close(given.grads, expected.grads, 1e-5)
  np.testing.assert_allclose(given.loss, expected.loss, rtol=1e-5, atol=1e-6)
  mask = make_rollout().batch.mask
  for name in ('logp', 'entropy'):
    a, b = (getattr(x.scores, name) for x in (given, expected))
    assert (a is None) == (b is None)
    if a is not None:
      np.testing.assert_allclose(a[mask], b[mask], atol=1e-5)
  np.testing.assert_allclose(given.slope[mask], expected.slope[mask], atol=1e-5)


@pytest.mark.parametrize('layout', ['shared', 'packed'])
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_the_gradient_is_that_of_one_device(mesh, layout):

  given = found('entropy', layout, tuple(mesh.items()))
  check(given, found('entropy', layout))
