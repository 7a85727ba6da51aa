"""Each family in all layouts, by the sampler, and on eight devices.

The models are the golden ones, whose logits are those of transformers; see
`weights/parity_test.py`.
"""

import dataclasses

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import gradient
from grpo_jax.learner import step
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import drawing
from tests import learning
from tests import tiny
from tests.chosen import chosen
from tests.models.weights import golden
from tests.models.weights.parity_test import EXACT

# What only one of them has of all that is computed otherwise.
IN_THE_SUITE = ('olmo3', 'phi3')
LAYOUTS = {
  'shared': lambda *rollout: layout.shared_prompt(*rollout, 4),
  'packed': lambda *rollout: layout.packed_rows(*rollout, 24),
  'padded': lambda *rollout: layout.padded_rows(*rollout, 12),
}
UNEVEN = {**tiny.UNEVEN, 'vocab_size': 64}


def uneven():
  """What no family of the table has: layers of several sizes."""
  model = tiny.model(**UNEVEN)
  return model, tiny.params(model)


def found(name):
  """A model, and its parameters."""
  if name == 'uneven':
    return uneven()
  one = golden.golden(name)
  return one.model, one.params


@pytest.mark.parametrize('name', chosen(golden.NAMES, IN_THE_SUITE))
def test_log_probabilities_are_those_of_transformers_in_all_layouts(name):
  one = golden.golden(name)
  row = one.rows[0]
  tokens = np.stack([row[4:], row[4:]])[None]
  length = np.full((1, 2), 8)
  logits = one.expected['right'][3:11]
  expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(8), row[4:]]
  for make in LAYOUTS.values():
    rows = make([row[:4].tolist()], tokens, length)
    with EXACT():
      score = tiny.score(one.model, one.params, rows)
    scores = np.asarray(tiny.gather(score.logp, rows, length))
    scale = np.abs(logits).max()
    for completion in scores[0]:
      np.testing.assert_allclose(completion, expected, atol=1e-5 * scale)


@pytest.mark.parametrize(
  'name', chosen([*golden.NAMES, 'uneven'], ('uneven', 'ministral3'))
)
def test_the_sampler_draws_by_the_probabilities_of_the_learner(name):
  model, params = found(name)
  prompts = [[5, 9, 11, 30, 8], [7, 12]]
  made = engines.LocalEngine(model, (8,), (4, 16))
  made.load(params, version=0)
  with EXACT():
    drawn = drawing.completions(made, prompts, engines.Sampling(), 12)
    rows = layout.shared_prompt(prompts, drawn.tokens, drawn.length, 8)
    scores = tiny.score(model, params, rows)
  logp = tiny.gather(scores.logp, rows, drawn.length)
  np.testing.assert_allclose(drawn.logp, logp, atol=2e-5)


@pytest.mark.parametrize(
  'name', [*golden.NAMES, 'uneven'], ids=[*golden.NAMES, 'uneven']
)
@pytest.mark.long
def test_one_gradient_on_one_device_and_on_eight(name):
  model, params = found(name)
  expected = differentiated(model, params, {})
  second = 'expert' if model.config.experts is not None else 'context'
  for mesh in {'fsdp': 2, second: 2, 'tensor': 2}, {'fsdp': 8}:
    given = differentiated(model, params, mesh)
    tiny.assert_trees_close(given.grads, expected.grads, 2e-5)
    np.testing.assert_allclose(given.loss, expected.loss, rtol=1e-5, atol=1e-6)


def differentiated(model, params, mesh):
  """The gradient of one batch of GRPO."""
  shape = {
    field.name: getattr(model.config, field.name)
    for field in dataclasses.fields(models.ModelConfig)
  }
  method = learning.METHODS['grpo']()
  learner = learning.make_learner(method, mesh=mesh or {'data': 1}, **shape)
  rows = dataclasses.replace(
    learning.spec('shared', 8),
    shards=sharding.row_shards(learner.mesh),
    parts=learner.mesh.shape['context'],
  )
  made = learning.make_updater(learner, params, rows)
  rollout = learning.make_rollout(width=8)
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  rows, used = learning.layouts_of(made, rollout).stack(np.arange(4))

  def run(params, batch, rows):
    with sharding.use(learner.mesh):
      return gradient.differentiate(
        learner, None, params, state, batch, rows, used
      )

  place = step.state_sharding(learner, params).params
  with EXACT():
    result = jax.jit(run)(jax.device_put(params, place), batch, rows)
  return jax.device_get(result)
