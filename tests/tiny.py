"""A tiny model and ragged completions, shared by many tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.models import scores as scores_lib

CONFIG = models.ModelConfig(
  vocab_size=40,
  num_layers=4,
  width=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
)
FANCY = dict(
  num_layers=5,  # the last repetition of the pattern is cut short
  qk_norm=True,
  qkv_bias=True,
  tied_embeddings=True,
  pattern=(
    models.LayerKind(window_tokens=3, rope_base=100.0, rope_scaled=False),
    models.LayerKind(),
  ),
  rope_scaling=models.RopeScaling('yarn', 4.0, 8),
  activation='gelu_tanh',
  embedding_scale=3.0,
  post_norms=True,
  attention_scale=0.5,
  attention_cap=2.0,
  logit_cap=4.0,
)
# What else may differ between layers, and between models.
UNEVEN = dict(
  num_layers=5,
  qk_norm=True,
  qk_norm_joint=True,
  pattern=(
    models.LayerKind(rotated=0.5, rope_scaled=False, head_dim=12, mlp_width=20),
    models.LayerKind(
      rotated=0.0, num_kv_heads=1, attention_scale=0.3, window_tokens=4
    ),
    models.LayerKind(head_dim=6, num_kv_heads=4),
  ),
  rope_scaling=models.RopeScaling('yarn', 4.0, 8, query_growth=0.3),
  pre_norms=False,
  post_norms=True,
  residual_scale=0.6,
  logit_divisor=0.7,
)
# Layers with a state, and one without; the last repetition is cut short.
STATES = dict(
  norm_epsilon=0.01,  # outputs behind few tokens are small
  num_layers=4,
  taps=3,
  qk_norm=True,
  head_gates=True,
  pattern=(
    models.LayerKind(mixer='delta'),
    models.LayerKind(mixer='convolution'),
    models.LayerKind(rotated=0.5),
  ),
  delta=models.DeltaHeads(2, 4, 6, 10),
)
# One layer in two has experts, and so has the tail.
EXPERTS = dataclasses.replace(
  CONFIG,
  num_layers=5,
  pattern=(models.LayerKind(experts=True), models.LayerKind()),
  experts=models.Experts(number=8, per_token=2, width=20),
)


# All that routers and experts may have, and what gpt-oss has beside them.
ROUTED = dict(
  num_layers=3,
  output_bias=True,
  sinks=True,
  activation='clamped_swiglu',
  pattern=(models.LayerKind(), models.LayerKind(experts=True)),
  experts=models.Experts(
    number=8,
    per_token=2,
    width=20,
    scores='sigmoid',
    corrected=True,
    groups=4,
    groups_per_token=2,
    scale=1.5,
    shared_width=12,
    shared_gate=True,
    biases=True,
  ),
)


# What Gemma 4 has: layers that read keys and values of others, and inputs of
# each layer.
_LOCAL = models.LayerKind(window_tokens=4, rope_base=100.0)
_WIDE = models.LayerKind(
  rotated=0.5, proportional=True, head_dim=12, num_kv_heads=1
)
_SHARING = [
  dataclasses.replace(kind, shares_kv=True, mlp_width=64)
  for kind in (_LOCAL, _WIDE, _LOCAL)
]
SHARING = dict(
  norm_epsilon=0.02,
  num_layers=7,
  qk_norm=True,
  value_norm=True,
  pattern=(_LOCAL, _WIDE, _LOCAL, _WIDE, *_SHARING),
  activation='gelu_tanh',
  embedding_scale=3.0,
  post_norms=True,
  layer_scales=True,
  layer_inputs=4,
  attention_scale=0.3,
)
# And in its larger models: experts beside the MLP, and no weights of values.
BESIDE = dict(
  SHARING,
  num_layers=3,
  layer_inputs=0,
  pattern=(
    dataclasses.replace(_LOCAL, experts=True),
    dataclasses.replace(_WIDE, experts=True, keys_as_values=True),
  ),
  experts=models.Experts(number=8, per_token=2, width=20, beside_mlp=True),
)


@functools.cache
def model(**changes) -> models.Transformer:
  """The tiny transformer."""
  return models.Transformer(dataclasses.replace(CONFIG, **changes))


def params(transformer, seed=0):
  """Random parameters, biases and scales included; new arrays at every call.

  By NumPy: `init` outside of a compiled program costs a third of a second.
  """
  return jax.tree.map(jnp.array, _params(transformer, seed))


@functools.cache
def _params(transformer, seed):
  shapes = jax.eval_shape(transformer.init, jax.random.key(0))
  rng = np.random.default_rng((seed, 3))
  of_kernels = (0.01 + 1 / transformer.config.width) ** 0.5  # about as `init`

  def leaf(path, x):
    name = jax.tree_util.keystr(path[-1:], simple=True)
    noise = rng.standard_normal(x.shape, np.float32)
    if name.endswith('scale'):
      return 1 + noise / 10
    small = 'bias' in name or name in ('embedding', 'sinks')
    return noise * np.float32(0.1 if small else of_kernels)

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def ragged(seed=0, prompts=3, group=4, tokens=6):
  """(prompts, tokens, length): an empty completion among others."""
  rng = np.random.default_rng(seed)
  ids = [
    rng.integers(0, 40, size).tolist() for size in rng.integers(1, 8, prompts)
  ]
  drawn = rng.integers(0, 40, (prompts, group, tokens)).astype(np.int32)
  length = rng.integers(1, tokens + 1, (prompts, group)).astype(np.int32)
  length[0, 0] = 0
  return ids, drawn, length


score = jax.jit(
  models.score,
  static_argnames=('model', 'temperature', 'chunk_tokens'),
)


def scored_positions(model, rows, monkeypatch):
  """How many positions of a row meet the vocabulary, in each call."""
  seen = []

  def watched(logits, target, wanted):
    seen.append(logits.shape[1])
    return scores_lib.Scores(jnp.zeros(target.shape), None)

  monkeypatch.setattr(scores_lib, 'token_scores', watched)
  params = jax.eval_shape(model.init, jax.random.key(0))
  # Not `score`: it would keep what was traced with the fake.
  jax.eval_shape(lambda params: models.score(model, params, rows), params)
  return seen


def gather(scores, rows: layout.Layout, length):
  """[R,C,T] values as [P,G,T], zero past each completion's length."""
  number, width = length.size, scores.shape[-1]
  flat = jnp.zeros((number, width), scores.dtype)
  flat = flat.at[rows.completion.reshape(-1)].set(
    scores.reshape(-1, width), mode='drop'
  )
  mask = np.arange(width) < length[:, :, None]
  return jnp.where(mask, flat.reshape(*length.shape, width), 0)


def assert_trees_close(actual, expected, tolerance=1e-5):
  """Every leaf within `tolerance` of the largest entry of all leaves."""
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, atol=tolerance * scale),
    actual,
    expected,
  )
