"""Frozen weights in int8 and nf4: what they stand for, and where they are."""

import dataclasses
import sys

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models import lora
from grpo_jax.models import quantized
from tests import tiny
from tests.models import meshed
from tests.oracles import quantized as oracle

ROWS = layout.padded_rows(*tiny.ragged(), 16)
KINDS = 'int8', 'nf4'


def test_without_qwix_a_sentence_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'qwix', None)
  with pytest.raises(ValueError, match=r"pip install 'grpo_jax\[qlora\]'"):
    adapted('nf4').abstract()


def test_the_levels_of_the_oracle_are_quantiles_of_a_normal_distribution():
  np.testing.assert_allclose(oracle.quantiles(), oracle.NF4, atol=2e-7)


def test_experts_are_refused():
  with pytest.raises(ValueError, match='has experts, and nf4 .* is for matri'):
    dataclasses.replace(tiny.EXPERTS, lora=low_rank('nf4'))
  with pytest.raises(ValueError, match="quantized='int4'; give one of"):
    low_rank('int4')


@pytest.fixture
def qwix():
  return pytest.importorskip('qwix', reason='qwix is not installed')


def low_rank(kind):
  return models.LowRank(3, 6.0, ('*',), kind)


def adapted(kind, **changes):
  return tiny.model(**changes, lora=low_rank(kind))


def made(kind, **changes):
  """A model, and parameters of which both factors of adapters are off 0."""
  model = adapted(kind, **changes)
  params = jax.jit(model.init)(jax.random.key(0))

  def off_0(path, x):
    key = jax.random.key(len(str(path)))
    is_b = sharding.path_names(path)[-1].endswith('_b')
    return x + 0.1 * jax.random.normal(key, x.shape) if is_b else x

  return model, jax.tree_util.tree_map_with_path(off_0, params)


def logp(model, params):
  return jax.jit(lambda p: models.score(model, p, ROWS).logp)(params)


@pytest.mark.parametrize(
  'shape, inputs',
  [((192, 5), 1), ((64, 3, 8), 1), ((3, 64, 16), 2), ((48, 4), 1)],
)
@pytest.mark.parametrize('scale', [1.0, 1e-3])
def test_codes_stand_for_what_the_papers_say(qwix, shape, inputs, scale):
  weight = scale * np.random.default_rng(0).standard_normal(shape, np.float32)
  weight[..., 0] = 0  # an output without weights
  found = quantized.quantize(jnp.array(weight), 'int8', inputs)
  codes, scales = oracle.int8(weight, inputs)
  np.testing.assert_allclose(found['scales'], scales, rtol=1e-6)
  differs = found['codes'] != codes
  # Between two codes either may be chosen: the largest are at 127.5.
  between = np.abs(np.abs(weight / scales) % 1 - 0.5) < 1e-4
  assert not np.any(differs & ~between) and differs.mean() < 0.02
  values = quantized.dequantize(**found)
  np.testing.assert_allclose(values, found['codes'] * scales, rtol=1e-6)
  assert np.all(np.abs(values - weight) < 0.501 * scales)

  found = quantized.quantize(jnp.array(weight), 'nf4', inputs)
  assert found['codes'].dtype == jnp.uint8
  assert found['codes'].size == weight.size // 2
  tile = 16 if shape[0] == 48 else 64
  assert found['scales'].size == weight.size // tile
  values = quantized.dequantize(**found)
  expected = oracle.nf4(weight, inputs, tile)
  np.testing.assert_allclose(values, expected, rtol=1e-6)
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), found)
  both = quantized.dequantize(**stacked)
  np.testing.assert_array_equal(both, jnp.stack([values, values]))


def test_inputs_that_no_tile_divides_are_refused(qwix):
  with pytest.raises(ValueError, match="has 36 inputs, .* give 'int8'"):
    quantized.quantize(jnp.ones((36, 4)), 'nf4', 1)
  quantized.quantize(jnp.ones((36, 4)), 'int8', 1)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
  'changes',
  [{}, pytest.param(tiny.FANCY, marks=pytest.mark.long)],
  ids=['plain', 'fancy'],
)
def test_a_model_is_that_with_the_dequantized_weights(qwix, kind, changes):
  model, params = made(kind, **changes)
  plain, dense = adapted(None, **changes), quantized.whole(params)
  wanted = jax.eval_shape(plain.init, jax.random.key(0))
  assert jax.tree.structure(dense) == jax.tree.structure(wanted)
  expected = logp(plain, dense)
  np.testing.assert_allclose(logp(model, params), expected, atol=1e-6)
  merged = logp(tiny.model(**changes), lora.merge(dense, low_rank(None)))
  np.testing.assert_allclose(merged, expected, atol=2e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_only_adapters_are_trained_by_the_gradient_of_dense_weights(qwix, kind):
  model, params = made(kind)
  trained, frozen = lora.split(params, model.trains)
  assert {x.dtype for x in jax.tree.leaves(trained)} == {jnp.dtype('float32')}
  whole = {path[-1] for path in names(frozen)}
  assert {*quantized.PARTS} < whole and 'query' not in whole
  assert not any(
    model.decays(path) for path in names(frozen) if path[-1] in quantized.PARTS
  )

  def slope(model, frozen):
    total = lambda p: jnp.sum(logp(model, lora.join(p, frozen)))
    return jax.jit(jax.grad(total))(trained)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
    slope(model, frozen),
    slope(adapted(None), quantized.whole(frozen)),
  )


def names(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [sharding.path_names(path) for path, _ in leaves]


@pytest.mark.long
@pytest.mark.parametrize('kind', KINDS)
def test_a_gradient_on_eight_devices_is_that_on_one(qwix, kind):
  # Of whole tiles on each of two shards, of a part of one on each of eight.
  model, params = made(kind, width=64)
  assert max(meshed.errors(model, params)) < 2e-5


def test_no_dequantized_model_exists_while_tokens_are_drawn(qwix):
  model = adapted('nf4', width=128, num_layers=6, mlp_width=512)
  params = jax.eval_shape(model.unstack, model.abstract())
  attend = lambda query, key, value, cache, *_: (query, cache)

  def draw(params, token):
    def body(carry):
      step, token = carry
      hidden, _ = model.hidden(params, token, 0 * token, attend, [None] * 6)
      chosen = jnp.argmax(model.head(params, hidden), axis=-1)
      return step + 1, chosen.astype(jnp.int32)

    return lax.while_loop(lambda carry: carry[0] < 4, body, (0, token))

  token = jax.ShapeDtypeStruct((2, 1), jnp.int32)
  found = jax.jit(draw).lower(params, token).compile().memory_analysis()
  layer = 4 * (2 * 128 * 32 + 2 * 128 * 16 + 3 * 128 * 512)
  assert found.temp_size_in_bytes < 2 * layer  # of 6
