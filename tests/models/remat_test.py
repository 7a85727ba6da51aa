"""What a backward pass computes again: same gradients, and less is kept."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import models
from grpo_jax.models import attention
from grpo_jax.models import config as config_lib
from grpo_jax.models import layout
from grpo_jax.planning import hlo
from tests import tiny
from tests.learning import METHODS
from tests.learning import PARAMS
from tests.learning import learned
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec

# Deep, and rows are long beside the width.
DEEP = models.ModelConfig(
  vocab_size=64,
  num_layers=8,
  width=64,
  num_heads=4,
  num_kv_heads=4,
  head_dim=16,
  mlp_width=128,
)
ROWS, COLUMNS = 8, 512


@functools.cache
def compiled(remat, layers=DEEP.num_layers):
  """The gradient of what comes out of all layers."""
  changes = {'remat': remat, 'num_layers': layers}
  model = tiny.model(**{**vars(DEEP), **changes})

  def loss(params, tokens):
    position = jnp.broadcast_to(jnp.arange(COLUMNS)[None], tokens.shape)
    everything = attention.over_prompts(jnp.full((ROWS,), COLUMNS))
    return jnp.sum(model.hidden(params, tokens, position, everything)[0])

  params = jax.eval_shape(model.init, jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
  return jax.jit(jax.grad(loss)).lower(params, tokens).compile()


@pytest.mark.long
def test_each_policy_keeps_less_than_the_one_before():
  def temporary(remat, layers):
    memory: Any = compiled(remat, layers).memory_analysis()
    return memory.temp_size_in_bytes

  policies = 'none', 'attention', 'layer'
  whole = [temporary(remat, 8) for remat in policies]
  assert whole == sorted(whole, reverse=True) and whole[0] > 1.2 * whole[1]
  none, kept, layer = (
    (temporary(remat, 16) - temporary(remat, 8)) / 8 for remat in policies
  )
  assert none > 2 * kept
  # Output and log-sum-exp of attention, in float32; and the input of a layer.
  outputs = 4 * ROWS * COLUMNS * DEEP.num_heads * (DEEP.head_dim + 1)
  assert kept - layer == pytest.approx(outputs, rel=0.1)
  assert layer < 1.2 * 4 * ROWS * COLUMNS * DEEP.width


def test_attention_is_computed_once_more_under_layer_alone():
  none, kept, layer = (
    hlo.Program(compiled(remat).as_text() or '').flops()
    for remat in ('none', 'attention', 'layer')
  )
  tokens = ROWS * COLUMNS * DEEP.num_layers
  # The backward pass of attention computes the scores in any case, so only the
  # product with the values is one more.
  heads = DEEP.num_heads * DEEP.head_dim
  assert layer - kept == 2 * tokens * COLUMNS * heads
  # All weights of a layer but the last of the MLP, which no gradient needs.
  assert kept - none == 2 * tokens * 64 * (4 * heads + 2 * DEEP.mlp_width)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    pytest.param(tiny.FANCY, marks=pytest.mark.long),
    pytest.param(tiny.STATES, marks=pytest.mark.long),
    pytest.param(tiny.SHARING, marks=pytest.mark.long),
  ],
  ids=['plain', 'fancy', 'states', 'sharing'],
)
def test_gradients_do_not_depend_on_the_policy(changes):
  rows = layout.shared_prompt(*tiny.ragged(), 8)
  found = []
  for remat in config_lib.REMAT:
    model = tiny.model(**changes, remat=remat)

    def loss(params, model=model):
      scores = models.score(model, params, rows)
      return jnp.sum(scores.logp)

    found.append(jax.jit(jax.grad(loss))(tiny.params(model)))
  for other in found[1:]:
    tiny.assert_trees_close(other, found[0], 1e-6)


@pytest.mark.long
def test_updates_on_eight_devices_do_not_depend_on_the_policy():
  rollout, found = make_rollout(), []
  for remat in config_lib.REMAT:
    # Plain descent: what moves is the gradient.
    learner = make_learner(
      METHODS['grpo'](), (2, 2, 2), optax.sgd(1.0), remat=remat
    )
    made = make_updater(learner, PARAMS, spec('shared', 4))
    state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
    moved = jax.device_get(learned(made, state, rollout, 0)[0].params)
    found.append(jax.tree.map(np.subtract, moved, PARAMS))
  assert max(np.abs(x).max() for x in jax.tree.leaves(found[0])) > 1e-3
  for other in found[1:]:
    # Relative to the gradient; parameters of 1 are rounded to 1e-7.
    tiny.assert_trees_close(other, found[0], 1e-5)


def test_inputs_of_layers_are_kept_on_the_host():
  """The stack of them has another memory than all else."""
  on_host = 'f32<host>[4,12,16,32]'
  rows = layout.padded_rows(*tiny.ragged(), 16)
  for remat in ('layer', 'offload'):
    model = tiny.model(remat=remat)

    def loss(params, model=model):
      return jnp.sum(models.score(model, params, rows).logp)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    program = str(jax.make_jaxpr(jax.grad(loss))(shapes))
    assert (on_host in program) == (remat == 'offload')
