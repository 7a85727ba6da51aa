"""Rotary position embedding, and how its frequencies are scaled.

References:
  Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
  Peng et al., `YaRN <https://arxiv.org/abs/2309.00071>`_, 2023.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models.config import LayerKind
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.config import RopeScaling

Array = jax.Array


def rotate(
  x: Array, position: Array, frequency: np.ndarray, scale: float = 1.0
) -> Array:
  """Turns pairs of entries by their position: i is paired with i + D / 2.

  Args:
    x: f[B,Q,H,D].
    position: i32[B,Q].
    frequency: f32[D/2], radians per position.
    scale: A factor, put in before the result is rounded to the dtype of `x`.

  Returns:
    f[B,Q,H,D], in the dtype of `x`.
  """
  # In float32: bfloat16 cannot tell position 257 from 256.
  angle = position[:, :, None].astype(jnp.float32) * frequency[None, None]
  cosine, sine = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  wide = x.astype(jnp.float32)
  if scale != 1:
    wide *= scale
  first, second = jnp.split(wide, 2, axis=-1)
  turned = (first * cosine - second * sine, second * cosine + first * sine)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def frequencies(config: ModelConfig, kind: LayerKind) -> np.ndarray:
  """The frequencies of a layer's rotation.

  Args:
    config: The shape of the model.
    kind: Of the layer.

  Returns:
    f32[D/2], radians per position.
  """
  half = config.head_dim // 2
  base = kind.rope_base or config.rope_base
  frequency = base ** (-np.arange(half) / half)
  scaling = config.rope_scaling
  if scaling is not None and kind.rope_scaled:
    kept = _kept(frequency, base, scaling)
    frequency = frequency * (kept + (1 - kept) / scaling.factor)
  return frequency.astype(np.float32)


def query_scale(config: ModelConfig, kind: LayerKind) -> float:
  """What queries are multiplied by, beside the usual `head_dim ** -0.5`.

  YaRN scales queries and keys alike, which is its factor squared here.
  """
  scale = 1.0
  if config.attention_scale is not None:
    scale = config.attention_scale * config.head_dim**0.5
  scaling = config.rope_scaling
  if scaling is None or scaling.kind != 'yarn' or not kind.rope_scaled:
    return scale
  factor = scaling.attention_factor
  if factor is None:
    factor = 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0
  return scale * factor**2


def _kept(frequency: np.ndarray, base: float, scaling: RopeScaling):
  """How much of each frequency is kept; the rest is divided by the factor."""
  if scaling.kind == 'linear':
    return np.zeros_like(frequency)
  turns = scaling.original_tokens * frequency / (2 * math.pi)
  if scaling.kind == 'llama3':
    low, high = scaling.low_factor, scaling.high_factor
    return np.clip((turns - low) / (high - low), 0, 1)
  # YaRN blends over the indices of the frequencies, not over their turns.
  half = len(frequency)

  def index(turns):  # of the frequency that makes so many turns
    reach = scaling.original_tokens / (turns * 2 * math.pi)
    return half * math.log(reach) / math.log(base)

  first, last = index(scaling.beta_fast), index(scaling.beta_slow)
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, 2 * half - 1)
  width = max(last - first, 1e-3)
  return 1 - np.clip((np.arange(half) - first) / width, 0, 1)
