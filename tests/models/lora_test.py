"""Adapters: nothing at first, then a sum; what is trained and what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.models import lora
from tests import tiny

pytestmark = pytest.mark.quick

ROWS = layout.padded_rows(*tiny.ragged(), 16)
ADAPTERS = models.LowRank(rank=3, alpha=6.0)


def logp(model, params):
  return jax.jit(lambda p: models.score(model, p, ROWS).logp)(params)


@pytest.mark.parametrize(
  'changes',
  [pytest.param({}, marks=pytest.mark.long), tiny.FANCY],
  ids=['plain', 'fancy'],
)
def test_merged_weights_are_the_same_function(changes):
  model = tiny.model(**changes, lora=ADAPTERS)
  params = tiny.params(model)  # both factors are off 0
  merged = lora.merge(params, ADAPTERS)
  plain = tiny.model(**changes)
  assert jax.tree.structure(merged) == jax.tree.structure(tiny.params(plain))
  np.testing.assert_allclose(
    logp(model, params), logp(plain, merged), atol=2e-4
  )
  of_layers = lora.merge(model.unstack(params), ADAPTERS)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7),
    of_layers,
    plain.unstack(merged),
  )


def test_merging_keeps_the_dtype_and_its_arguments():
  model = tiny.model(lora=ADAPTERS)
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params(model))
  before = jax.tree.map(np.array, params)
  merged = lora.merge(params, ADAPTERS)
  assert {x.dtype for x in jax.tree.leaves(merged)} == {jnp.dtype('bfloat16')}
  jax.tree.map(np.testing.assert_array_equal, params, before)


def test_a_new_adapter_changes_nothing():
  model = tiny.model(lora=ADAPTERS)
  params = model.init(jax.random.key(0))
  plain = lora.split(params, lambda path: not lora.trains(path))[0]
  np.testing.assert_array_equal(logp(model, params), logp(tiny.model(), plain))


def test_only_adapters_are_trained_and_both_parts_make_the_whole():
  model = tiny.model(**tiny.FANCY, lora=ADAPTERS)
  params = tiny.params(model)
  trained, frozen = lora.split(params, lora.trains)
  names = {
    jax.tree_util.keystr(path).rpartition("['")[2].rstrip("']")
    for path, _ in jax.tree_util.tree_leaves_with_path(trained)
  }
  weights = ('query', 'key', 'value', 'output', 'gate', 'up', 'down')
  assert names == {f'{name}_{part}' for name in weights for part in 'ab'}
  joined = lora.join(trained, frozen)
  jax.tree.map(np.testing.assert_array_equal, joined, params)
  gradient = jax.grad(lambda p: jnp.sum(logp(model, lora.join(p, frozen))))(
    trained
  )
  assert all(np.any(x) for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
  'targets, adapted',
  [
    (('attention/*',), {'query', 'key', 'value', 'output'}),
    (('*/query', 'mlp/down'), {'query', 'down'}),
  ],
)
def test_targets_choose_the_weights(targets, adapted):
  model = tiny.model(lora=models.LowRank(2, 4.0, targets))
  trained, _ = lora.split(
    jax.eval_shape(model.init, jax.random.key(0)), lora.trains
  )
  found = {
    jax.tree_util.keystr(path).rpartition("['")[2][:-4]
    for path, _ in jax.tree_util.tree_leaves_with_path(trained)
  }
  assert found == adapted


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(rank=0), 'rank=0; give 1 or more'),
    (dict(targets=('*', 'atention/*')), "'atention/\\*' matches none of"),
  ],
)
def test_impossible_adapters_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    models.LowRank(**{'rank': 2, 'alpha': 4.0, **changes})
