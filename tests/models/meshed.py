"""A gradient of GRPO on eight devices, against that on one."""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax
import numpy as np

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import gradient
from grpo_jax.learner import step
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from tests import cli
from tests import learning
from tests.models.weights.parity_test import EXACT


def errors(model: models.Transformer, params: Any) -> Iterator[float]:
  """The largest difference on each mesh, over the largest entry."""
  expected = differentiated(model, params, {'data': 1})
  second = 'expert' if model.config.experts is not None else 'context'
  scale = max(np.abs(x).max() for x in jax.tree.leaves(expected.grads))
  for mesh in {'fsdp': 2, second: 2, 'tensor': 2}, {'fsdp': 8}:
    given = differentiated(model, params, mesh)
    np.testing.assert_allclose(given.loss, expected.loss, rtol=1e-5, atol=1e-6)
    differences = jax.tree.map(
      lambda a, b: np.abs(a - b).max(), given.grads, expected.grads
    )
    yield float(max(jax.tree.leaves(differences)) / scale)


def differentiated(
  model: models.Transformer,
  params: Any,
  mesh: dict[str, int],
  layout: str = 'shared',
) -> Any:
  """The gradient of one batch, and what else `differentiate` finds."""
  shape = {
    field.name: getattr(model.config, field.name)
    for field in dataclasses.fields(models.ModelConfig)
  }
  frozen = None
  if model.config.lora is not None:
    params, frozen = lora.split(params, model.trains)
  method = learning.METHODS['grpo']()
  learner = learning.make_learner(method, mesh=mesh, **shape)
  rows = dataclasses.replace(
    learning.spec(layout, 8),
    shards=sharding.row_shards(learner.mesh),
    parts=learner.mesh.shape['context'],
  )
  made = learning.make_updater(learner, params, rows)
  rollout = learning.make_rollout(width=8)
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  rows, used = learning.layouts_of(made, rollout).stack(np.arange(4))

  def run(params, frozen, batch, rows):
    with sharding.use(learner.mesh):
      return gradient.differentiate(
        learner, frozen, params, state, batch, rows, used
      )

  params, frozen = (
    jax.device_put(
      tree, sharding.param_shardings(learner.mesh, tree, model.logical_axes)
    )
    for tree in (params, frozen)
  )
  with EXACT():
    result = jax.jit(run, compiler_options=cli.DEFAULT_SCHEDULER)(
      params, frozen, batch, rows
    )
  return jax.device_get(result)
