"""Logits of every family's shape against a NumPy transformer in float64."""

import functools

import jax
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import LayerKind as Kind
from grpo_jax.models import RopeScaling
from grpo_jax.models import attention
from grpo_jax.models import layout
from tests import tiny
from tests.oracles import transformer as oracle

pytestmark = pytest.mark.quick

# An epsilon and angles that a mistake in them moves the logits by much.
COMMON = dict(num_layers=3, head_dim=16, norm_epsilon=0.02, rope_base=100.0)
WINDOWS = (Kind(window_tokens=4), Kind())
FAMILIES = {
  'llama 3': dict(
    rope_scaling=RopeScaling('llama3', 8.0, 16), tied_embeddings=True
  ),
  'mistral': dict(pattern=(Kind(window_tokens=3),)),
  'qwen 2': dict(qkv_bias=True, rope_scaling=RopeScaling('yarn', 4.0, 64)),
  'qwen 3': dict(
    qk_norm=True,
    num_kv_heads=1,
    rope_scaling=RopeScaling(
      'yarn', 3.0, 40, beta_fast=4.0, attention_factor=1.3, truncate=False
    ),
  ),
  'qwen 3 with experts': dict(
    qk_norm=True,
    pattern=(Kind(experts=True), Kind()),
    experts=models.Experts(6, 2, 20),
  ),
  'mixtral': dict(
    pattern=(Kind(experts=True),),
    experts=models.Experts(4, 3, 20, normalized=False),
  ),
  'gemma 2': dict(
    activation='gelu_tanh',
    embedding_scale=32**0.5,
    tied_embeddings=True,
    post_norms=True,
    attention_scale=0.4,
    attention_cap=1.5,
    logit_cap=3.0,
    pattern=WINDOWS,
  ),
  'gemma 3': dict(
    activation='gelu_tanh',
    embedding_scale=32**0.5,
    post_norms=True,
    qk_norm=True,
    rope_scaling=RopeScaling('linear', 8.0),
    pattern=(Kind(window_tokens=5, rope_base=10.0, rope_scaled=False), Kind()),
  ),
  'smollm 3': dict(pattern=(Kind(), Kind(rotated=0.0)), tied_embeddings=True),
  'olmo 3': dict(
    qk_norm=True,
    qk_norm_joint=True,
    pre_norms=False,
    post_norms=True,
    rope_scaling=RopeScaling('yarn', 4.0, 64),
    pattern=(Kind(window_tokens=4, rope_scaled=False), Kind()),
  ),
  'ministral 3': dict(
    rope_scaling=RopeScaling(
      'yarn', 4.0, 64, attention_factor=1.0, query_growth=0.4
    )
  ),
  'granite': dict(
    embedding_scale=3.0,
    attention_scale=0.2,
    residual_scale=0.4,
    logit_divisor=2.0,
  ),
  'glm 4': dict(
    qkv_bias=True, post_norms=True, pattern=(Kind(rotated=0.5),), num_kv_heads=2
  ),
  'glm 4 with experts': dict(
    pattern=(Kind(), Kind(experts=True), Kind(experts=True)),
    experts=models.Experts(
      6,
      2,
      20,
      scores='sigmoid',
      corrected=True,
      groups=3,
      groups_per_token=2,
      scale=1.5,
      shared_width=12,
    ),
  ),
  'sigmoids as they are': dict(
    pattern=(Kind(experts=True),),
    experts=models.Experts(
      6, 2, 20, normalized=False, scores='sigmoid', corrected=True
    ),
  ),
  'qwen 2 with experts': dict(
    qkv_bias=True,
    pattern=(Kind(experts=True),),
    experts=models.Experts(
      6, 2, 20, normalized=False, shared_width=12, shared_gate=True
    ),
  ),
  'gpt-oss': dict(
    qkv_bias=True,
    output_bias=True,
    sinks=True,
    activation='clamped_swiglu',
    rope_scaling=RopeScaling('yarn', 4.0, 64, truncate=False),
    pattern=(Kind(window_tokens=4, experts=True), Kind(experts=True)),
    experts=models.Experts(6, 2, 20, biases=True),
  ),
  'uneven': tiny.UNEVEN,
  'gemma 4': tiny.SHARING,
  'gemma 4 with experts': tiny.BESIDE,
  'adapters': dict(lora=models.LowRank(3, 5.0), num_kv_heads=4),
}
LENGTHS = (11, 7, 1)
WIDTH = 14  # with padding before and behind every row


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, rows):
  hidden, _ = model.hidden(
    params, rows.tokens, rows.position, attention.over_layout(rows)
  )
  return model.head(params, hidden)


def drawn(model, rng):
  """Parameters; `init` would have to be compiled."""

  def draw(path, leaf):
    x = rng.normal(0, 0.3, leaf.shape)
    return np.float32(x + 1 if 'scale' in str(path[-1]) else x)

  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.mark.parametrize('name', FAMILIES)
def test_logits_are_those_of_the_formulas(name):
  model = tiny.model(**COMMON | FAMILIES[name])
  rng = np.random.default_rng(0)
  params = drawn(model, rng)
  shape = len(LENGTHS), WIDTH
  # Anything may stand in the padding.
  tokens = rng.integers(0, 40, shape).astype(np.int32)
  position, segment = rng.integers(0, 40, shape), np.zeros(shape)
  for row, length in enumerate(LENGTHS):
    position[row, row + 1 : row + 1 + length] = np.arange(length)
    segment[row, row + 1 : row + 1 + length] = 1
  nothing = np.zeros((len(LENGTHS), 1, 1), np.int32)
  rows = layout.Layout(
    tokens,
    position.astype(np.int32),
    segment.astype(np.int32),
    np.zeros(shape, np.int32),
    nothing,
    nothing,
    nothing[..., 0],
  )
  got = np.asarray(logits(model, params, rows))
  assert got.dtype == np.float32
  for row, length in enumerate(LENGTHS):
    real = slice(row + 1, row + 1 + length)
    expected = oracle.logits(
      model.config, params, tokens[row, real], range(length)
    )
    error = np.abs(got[row, real] - expected).max() / np.abs(expected).max()
    assert error < 1e-5, error
