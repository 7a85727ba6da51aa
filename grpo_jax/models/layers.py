"""The parts of a decoder layer, as NNX modules.

A layer is a mixer, by which it sees other tokens, and a gated MLP, or experts
in its place; each stands behind a norm, before one, or between two, and has a
skip connection around it. A mixer is attention, whose queries and keys are
rotated by their position, or one of two that keep a state.

References:
  Su et al., `RoFormer <https://arxiv.org/abs/2104.09864>`_, 2021.
  Peng et al., `YaRN <https://arxiv.org/abs/2309.00071>`_, 2023.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import axes as axes_lib
from grpo_jax.models import quantized
from grpo_jax.models.config import LayerKind
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.experts import LayerRouting
from grpo_jax.models.experts import RoutedMLP
from grpo_jax.models.softmax import CHECKPOINT_NAME

Array = jax.Array


def _clamped_swiglu(gate: Array, up: Array) -> Array:
  """g sigmoid(1.702 g) (u + 1), with g at most 7 and u from -7 to 7."""
  gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
  return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


GATES = {
  'silu': lambda gate, up: jax.nn.silu(gate) * up,
  'gelu_tanh': lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
  'clamped_swiglu': _clamped_swiglu,
}
"""From both inner products of an MLP to what the last one reads."""


# The primitives whose results `keep_products` keeps: products, and activations
# that other devices have sent. `shards.gather` of weights is none of them.
_KEPT = {
  'dot_general', 'ragged_dot_general', 'all_gather', 'psum', 'reduce_scatter',
}  # fmt: skip


def project(x: Array, weight: Array, axes: int = 1) -> Array:
  """Multiplies `x` by a weight, summing over the last `axes` axes of `x`.

  Args:
    x: f[B,Q,...].
    weight: f[..., ...]; its first `axes` axes are the last ones of `x`.
    axes: How many axes are summed over.

  Returns:
    f[B,Q,...]; the other axes of the weight come last.
  """
  # As a product of two matrices. Of a product with more axes, XLA computes the
  # weight's gradient from a transposed copy of the larger factor; on a CPU the
  # copy takes three times as long as the product.
  size = math.prod(weight.shape[:axes])
  flat = x.reshape(-1, size) @ weight.astype(x.dtype).reshape(size, -1)
  return flat.reshape(*x.shape[:-axes], *weight.shape[axes:])


def keep_products(
  function: Callable[..., Any], keeps_gathered: bool = False
) -> Callable[..., Any]:
  """The same function, which keeps little for its backward pass.

  Its arguments and its matrix products are kept. Norms, rotations and
  activations are computed again, which halves what SmolLM2 keeps of a token and
  makes its updates faster.

  Args:
    function: A function of arrays; the parameters in it may be any tracers.
    keeps_gathered: Whether what `shards.whole` has made is kept too, and not
      gathered again.
  """
  kept = _KEPT | {'sharding_constraint'} if keeps_gathered else _KEPT
  return jax.checkpoint(
    function, policy=lambda primitive, *_, **__: primitive.name in kept
  )


class Turns(NamedTuple):
  """By what a layer turns queries and keys, and scales queries.

  All layers of a kind share it. Computed in each of them, sines and cosines
  take a CPU as long as a product of matrices does.

  Attributes:
    cosine: f32[B,Q,F], of the angle of each pair of entries.
    sine: f32[B,Q,F].
    scale: See `query_scale`.
  """

  cosine: Array
  sine: Array
  scale: float | Array = 1.0


def turns(config: ModelConfig, kind: LayerKind, position: Array) -> Turns:
  """The `Turns` of the layers of a kind, at the positions i32[B,Q]."""
  scale = query_scale(config, kind, position)
  return Turns(*_circle(position, frequencies(config, kind)), scale)


def _circle(position: Array, frequency: np.ndarray) -> tuple[Array, Array]:
  """Cosines and sines f32[B,Q,F] of i32[B,Q] times f32[F] radians."""
  # In float32: bfloat16 cannot tell position 257 from 256.
  angle = position[:, :, None].astype(jnp.float32) * frequency[None, None]
  return jnp.cos(angle), jnp.sin(angle)


def rotate(
  x: Array, cosine: Array, sine: Array, scale: float | Array = 1.0
) -> Array:
  """Turns pairs of entries: i is paired with i + F.

  Args:
    x: f[B,Q,H,D].
    cosine: f32[B,Q,F], of the angles by which the first 2 F entries of a head
      are turned; the others are not.
    sine: f32[B,Q,F].
    scale: A factor, one for all or f32[B,Q], put in before the result is
      rounded to the dtype of `x`.

  Returns:
    f[B,Q,H,D], in the dtype of `x`.
  """
  wide = x.astype(jnp.float32)
  if isinstance(scale, Array):
    wide *= scale[:, :, None, None]
  elif scale != 1:
    wide *= scale
  if half := cosine.shape[-1]:
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    wide = jnp.concatenate((*turned, rest), axis=-1)
  return wide.astype(x.dtype)


def frequencies(config: ModelConfig, kind: LayerKind) -> np.ndarray:
  """The frequencies of a layer's rotation.

  Args:
    config: The shape of the model.
    kind: The kind of the layer.

  Returns:
    f32[F], radians per position; 2 F is the rotated share of a head, or all of
    it where it is rotated proportionally.
  """
  size = config.of(kind).head_dim
  turned = int(size * kind.rotated) // 2
  half = size // 2 if kind.proportional else turned
  base = kind.rope_base or config.rope_base
  frequency = base ** (-np.arange(half) / max(half, 1))
  frequency[turned:] = 0
  scaling = config.rope_scaling
  if scaling is not None and kind.rope_scaled and half:
    kept = _kept(frequency, base, scaling)
    frequency = frequency * (kept + (1 - kept) / scaling.factor)
  return frequency.astype(np.float32)


def query_scale(
  config: ModelConfig, kind: LayerKind, position: Array
) -> float | Array:
  """What queries are multiplied by, beside the usual `head_dim ** -0.5`.

  YaRN scales queries and keys alike, which is its factor squared here.

  Args:
    config: The shape of the model.
    kind: The kind of the layer.
    position: i32[B,Q], of the queries.

  Returns:
    One factor for all of them, or f32[B,Q].
  """
  scale, scaling = _query_scale(config.of(kind), kind), config.rope_scaling
  if scaling is None or not scaling.query_growth or not kind.rope_scaled:
    return scale
  grown = jnp.log1p((position // scaling.original_tokens).astype(jnp.float32))
  return scale * (1 + scaling.query_growth * grown)


def _query_scale(config: ModelConfig, kind: LayerKind) -> float:
  scale = 1.0
  if config.attention_scale is not None:
    scale = config.attention_scale * config.head_dim**0.5
  scaling = config.rope_scaling
  if scaling is None or scaling.kind != 'yarn' or not kind.rope_scaled:
    return scale
  if not kind.rotated:
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


def normalized(x: Array, epsilon: float) -> Array:
  """f[..., size] over its root mean square, f32[..., size]."""
  wide = x.astype(jnp.float32)
  square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  return wide * lax.rsqrt(square + epsilon)


class RMSNorm(nnx.Module):
  """Root-mean-square normalisation over the last axis, computed in float32.

  Args:
    size: The size of the axis.
    epsilon: Added to the mean square.
    dtype: The dtype of the result; None: that of the input.
  """

  def __init__(self, size: int, epsilon: float, dtype: str | None = None):
    self.scale = nnx.Param(jnp.ones((size,)))
    self.epsilon, self.dtype = epsilon, dtype

  def __call__(self, x: Array) -> Array:
    """f[..., size] -> f[..., size]."""
    # With all its axes, because tests make promotion of ranks an error.
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    normal = normalized(x, self.epsilon) * scale
    return normal.astype(self.dtype or x.dtype)


class Projections(nnx.Module):
  """Weights that multiply an input, some with a low-rank adapter beside them.

  Args:
    config: The shape of the model.
    part: What `LowRank.NAMES` calls this part of a layer.
  """

  def __init__(self, config: ModelConfig, part: str):
    self.config = config
    self.part = part

  def add(
    self, name: str, shape: tuple[int, ...], rngs: nnx.Rngs, axes: int = 1
  ) -> None:
    """Adds a weight.

    Args:
      name: The name of the attribute.
      shape: The shape of the weight, inputs first.
      rngs: Random keys.
      axes: How many of its axes are summed over.
    """

    def init(shape):
      before, after = tuple(range(axes)), tuple(range(axes, len(shape)))
      normal = nnx.initializers.lecun_normal(in_axis=before, out_axis=after)
      return normal(rngs.params(), shape)

    lora = self.config.lora
    kind = lora and lora.quantized
    weight = init(shape)
    parameter = (
      quantized.Weight(weight, kind, axes) if kind else nnx.Param(weight)
    )
    setattr(self, name, parameter)
    if lora is not None and lora.adapts(f'{self.part}/{name}'):
      a = init((*shape[:axes], lora.rank))
      setattr(self, name + '_a', nnx.Param(a))
      # So that it changes nothing yet.
      b = jnp.zeros((lora.rank, *shape[axes:]))
      setattr(self, name + '_b', nnx.Param(b))

  def project(self, x: Array, name: str, axes: int = 1) -> Array:
    """`x` times a weight, with its adapter; see `project`."""

    def weight(name):
      parameter = getattr(self, name)[...]
      return axes_lib.gather(parameter, (name,), self.config.width, x.dtype)

    frozen = getattr(self, name)
    if isinstance(frozen, quantized.Weight):
      product = project(*frozen.beside(x, name), axes)
    else:
      product = project(x, weight(name), axes)
    if not hasattr(self, name + '_a'):
      return product
    assert self.config.lora is not None
    narrow = project(x, weight(name + '_a'), axes)
    wide = project(narrow, weight(name + '_b'))
    return product + self.config.lora.scale * wide


_TO_HEADS = 'query', 'key', 'value'


class SelfAttention(Projections):
  """What stands around the attention function of a layer.

  `heads` projects to queries, keys and values, normalises the first two and
  rotates them by position; `mix` projects back to the residual stream.

  Args:
    config: The shape of the model, with the sizes of the layer.
    kind: The kind of the layer.
    rngs: Random keys.
  """

  def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs):
    super().__init__(config, 'attention')
    width, size = config.width, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    self.names = _TO_HEADS[: 1 + kind.kv_weights]
    for name in self.names:
      number = heads if name == 'query' else kv_heads
      self.add(name, (width, number, size), rngs)
      if config.qkv_bias:
        setattr(self, f'{name}_bias', nnx.Param(jnp.zeros((number, size))))
    self.add('output', (heads, size, width), rngs, axes=2)
    if config.output_bias:
      self.output_bias = nnx.Param(jnp.zeros((width,)))
    if config.sinks:
      self.sinks = nnx.Param(jnp.zeros((heads,)))
    if config.head_gates:
      self.add('head_gate', (width, heads, size), rngs)
    if config.qk_norm:
      joint, epsilon = config.qk_norm_joint, config.norm_epsilon
      self.query_norm = RMSNorm(size * (heads if joint else 1), epsilon)
      if kind.kv_weights:
        self.key_norm = RMSNorm(size * (kv_heads if joint else 1), epsilon)

  def read(self, x: Array, turns: Turns, kind: LayerKind) -> Any:
    """What `run` and `mix` need of f[B,Q,width]: `heads`, and the gate."""
    del kind
    gate = None
    if self.config.head_gates:
      gate = self.project(x, 'head_gate')
    return self.heads(x, turns), gate

  def heads(
    self, x: Array, turns: Turns
  ) -> tuple[Array, Array | None, Array | None]:
    """f[B,Q,width] -> queries f[B,Q,H,D], keys and values f[B,Q,K,D].

    The last two are None in a layer that shares those of another.
    """
    query, *rest = (self._projected(x, name) for name in self.names)
    if self.config.qk_norm:
      query = self._normal(query, self.query_norm)
    # Attention functions divide by sqrt(D); what else there is goes in here.
    query = rotate(query, *turns)
    if not rest:
      return query, None, None
    key, value = rest[0], rest[-1]
    if self.config.qk_norm:
      key = self._normal(key, self.key_norm)
    if self.config.value_norm:
      value = normalized(value, self.config.norm_epsilon).astype(x.dtype)
    return query, rotate(key, turns.cosine, turns.sine), value

  def _projected(self, x: Array, name: str) -> Array:
    """One of the projections to heads, with its bias."""
    y = self.project(x, name)
    if not self.config.qkv_bias:
      return y
    return y + getattr(self, f'{name}_bias')[...].astype(x.dtype)[None, None]

  def _normal(self, x: Array, norm: RMSNorm) -> Array:
    """Each head of f[B,Q,H,D] through a norm, or all of them together."""
    if not self.config.qk_norm_joint:
      return norm(x)
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)

  def run(self, read: Any, cache: Any, attention: Any, kind: LayerKind) -> Any:
    """What `mix` needs, and the new cache; see `attention`."""
    heads, gate = read
    sinks = {'sinks': self.sinks[...]} if self.config.sinks else {}
    output, cache = attention(
      *heads, cache, kind.window_tokens, self.config.attention_cap, **sinks
    )
    return (output, gate), cache

  def mix(self, found: tuple[Array, Array | None]) -> Array:
    """Back from the heads and their gates, f[B,Q,H,D] -> f[B,Q,width]."""
    x, gate = found
    if gate is not None:
      wide = x.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))
      x = wide.astype(x.dtype)
    mixed = self.project(x, 'output', axes=2)
    if not self.config.output_bias:
      return mixed
    width = self.config.width
    bias = axes_lib.gather(self.output_bias[...], ('output_bias',), width, None)
    return mixed + bias.astype(x.dtype)[None, None]


class Convolution(Projections):
  """A short convolution over time between two gates, as LFM2 has it.

  Each channel is convolved by itself, with the tokens before it alone.

  References:
    Liquid AI, `LFM2 Technical Report <https://arxiv.org/abs/2511.23404>`_,
    2025.
  """

  def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs):
    super().__init__(config, 'convolution')
    del kind
    width = config.width
    for name in ('before', 'behind', 'inward'):
      self.add(name, (width, width), rngs)
    self.taps = nnx.Param(_init_taps(rngs, (config.taps, width)))
    self.add('outward', (width, width), rngs)

  def read(self, x: Array, turns: None, kind: LayerKind) -> Any:
    """What is convolved of f[B,Q,width], and the gate behind it."""
    del turns, kind
    before, inward, behind = (
      self.project(x, name) for name in ('before', 'inward', 'behind')
    )
    return before * inward, behind

  def run(self, read: Any, cache: Any, attention: Any, kind: LayerKind) -> Any:
    """What `mix` needs, and the new cache; see `states`."""
    del kind
    states, (x, behind) = attention.states, read
    kept = states.load(cache) or (None,)
    # Kept for the backward pass is x, and not what was at each tap.
    convolve = jax.checkpoint(states.convolve)
    convolved, last = convolve(x, self.taps[...], *kept)
    return (convolved, behind), states.store([last], cache)

  def mix(self, found: tuple[Array, Array]) -> Array:
    """Back from the channels, f[B,Q,width] -> f[B,Q,width]."""
    convolved, behind = found
    gated = (behind.astype(jnp.float32) * convolved).astype(behind.dtype)
    return self.project(gated, 'outward')


class GatedDelta(Projections):
  """The gated delta rule, as Qwen3-Next and Qwen3.5 have it; see `delta`.

  Queries, keys and values pass a short convolution and a SiLU. The outputs of
  each value head pass a norm, and then a gate.

  References:
    Yang et al., `Gated Delta Networks <https://arxiv.org/abs/2412.06464>`_,
    2024.
  """

  def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs):
    super().__init__(config, 'delta')
    del kind
    assert config.delta is not None
    width, heads = config.width, config.delta
    number, size = heads.num_value_heads, heads.value_dim
    keys = heads.num_heads, heads.key_dim
    shapes = dict(query=keys, key=keys, value=(number, size))
    for name, shape in shapes.items():
      self.add(name, (width, *shape), rngs)
      taps = nnx.Param(_init_taps(rngs, (config.taps, *shape)))
      setattr(self, f'{name}_taps', taps)
    self.add('head_gate', (width, number, size), rngs)
    self.add('rate', (width, number), rngs)
    self.add('decay', (width, number), rngs)
    # Spread over heads, from one that forgets little to one that forgets much.
    self.log_decay = nnx.Param(jnp.log(jnp.linspace(1.0, 16.0, number)))
    self.decay_bias = nnx.Param(jnp.full((number,), -2.0))
    self.norm = RMSNorm(size, config.norm_epsilon)
    self.add('output', (number, size, width), rngs, axes=2)

  def read(self, x: Array, turns: None, kind: LayerKind) -> Any:
    """All products of f[B,Q,width]."""
    del turns, kind
    names = *_TO_HEADS, 'rate', 'decay', 'head_gate'
    return tuple(self.project(x, name) for name in names)

  def run(self, read: Any, cache: Any, attention: Any, kind: LayerKind) -> Any:
    """What `mix` needs, and the new cache; see `states`."""
    del kind
    states, (*inputs, rate, decay, gate) = attention.states, read
    *kept, state = states.load(cache) or (None,) * 4

    def prepare(inputs, rate, decay, kept):
      found, new = [], []
      for name, x, one in zip(_TO_HEADS, inputs, kept, strict=True):
        taps = getattr(self, f'{name}_taps')[...]
        convolved, last = states.convolve(x, taps, one)
        found.append(jax.nn.silu(convolved).astype(x.dtype))
        new.append(last)
      rate = jax.nn.sigmoid(rate.astype(jnp.float32))
      decay = decay.astype(jnp.float32) + self.decay_bias[...][None, None]
      size = -jnp.exp(self.log_decay[...].astype(jnp.float32))[None, None]
      return (*found, rate, size * jax.nn.softplus(decay)), new

    # Kept for the backward pass is what the products gave.
    arrays, new = jax.checkpoint(prepare)(inputs, rate, decay, kept)
    output, state = states.recur(arrays, state)
    output = checkpoint_name(output, CHECKPOINT_NAME)
    return (output, gate), states.store([*new, state], cache)

  def mix(self, found: tuple[Array, Array]) -> Array:
    """Back from the heads and their gates, [B,Q,H,E] -> f[B,Q,width]."""
    output, gate = found
    normal = self.norm(output.astype(jnp.float32))
    gated = normal * jax.nn.silu(gate.astype(jnp.float32))
    return self.project(gated.astype(gate.dtype), 'output', axes=2)


def _init_taps(rngs: nnx.Rngs, shape: tuple[int, ...]) -> Array:
  """Taps such that channels keep their size; the first axis is summed over."""
  return jax.random.normal(rngs.params(), shape) * shape[0] ** -0.5


# By what a layer sees other tokens; each reads, runs and mixes.
_MIXERS: dict[str, Callable[..., Any]] = {
  'attention': SelfAttention,
  'convolution': Convolution,
  'delta': GatedDelta,
}


class GatedMLP(Projections):
  """The feed-forward part of a layer: (act(x gate) * (x up)) down.

  Args:
    config: The shape of the model.
    rngs: Random keys.
    part: What `LowRank.NAMES` calls this part of a layer, if it is there.
    hidden: Number of hidden units; None: the config's.
  """

  def __init__(
    self,
    config: ModelConfig,
    rngs: nnx.Rngs,
    part: str = 'mlp',
    hidden: int | None = None,
  ):
    super().__init__(config, part)
    hidden = config.mlp_width if hidden is None else hidden
    self.add('gate', (config.width, hidden), rngs)
    self.add('up', (config.width, hidden), rngs)
    self.add('down', (hidden, config.width), rngs)

  def __call__(self, x: Array) -> Array:
    """f[B,Q,width] -> f[B,Q,width]."""
    gated = GATES[self.config.activation]
    inner = gated(self.project(x, 'gate'), self.project(x, 'up'))
    return self.project(inner, 'down')


class SharedMLP(GatedMLP):
  """The MLP beside experts, which every token passes; it has no adapters."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    assert config.experts is not None
    super().__init__(config, rngs, 'shared', config.experts.shared_width)
    if config.experts.shared_gate:
      self.add('shared_gate', (config.width, 1), rngs)

  def __call__(self, x: Array) -> Array:
    """f[B,Q,width] -> f[B,Q,width]."""
    output = super().__call__(x)
    if not hasattr(self, 'shared_gate'):
      return output
    return jax.nn.sigmoid(self.project(x, 'shared_gate')) * output


class TokenInputs(Projections):
  """What a layer adds of its own inputs of a token; it has no adapters."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    super().__init__(dataclasses.replace(config, lora=None), 'inputs')
    self.add('input_gate', (config.width, config.layer_inputs), rngs)
    self.add('input_down', (config.layer_inputs, config.width), rngs)

  def __call__(self, x: Array, inputs: Array) -> Array:
    """f[B,Q,width], and inputs f[B,Q,layer_inputs] -> f[B,Q,width]."""
    gated = GATES[self.config.activation]
    return self.project(
      gated(self.project(x, 'input_gate'), inputs), 'input_down'
    )


class Block(nnx.Module):
  """One layer: a mixer, then the MLP or the experts in its place."""

  def __init__(self, config: ModelConfig, kind: LayerKind, rngs: nnx.Rngs):
    config = config.of(kind)
    self.config, self.kind = config, kind
    setattr(self, kind.mixer, _MIXERS[kind.mixer](config, kind, rngs))
    if config.pre_norms:
      self.attention_norm = self._norm()
      self.mlp_norm = self._norm()
    if kind.experts:
      self.experts = RoutedMLP(config, GATES[config.activation], rngs)
      if config.experts is not None and config.experts.shared_width:
        self.shared = SharedMLP(config, rngs)
    if config.has_mlp(kind):
      self.mlp = GatedMLP(config, rngs)
    if kind.experts and config.has_mlp(kind):
      self.experts_norm = self._norm()
      self.experts_post_norm = self._norm()
      self.dense_post_norm = self._norm()
    if config.post_norms:
      self.attention_post_norm = self._norm()
      self.mlp_post_norm = self._norm()
    if config.layer_inputs:
      self.inputs = TokenInputs(config, rngs)
      self.inputs_post_norm = self._norm()
    if config.layer_scales:
      self.layer_scale = nnx.Param(jnp.ones((1,)))

  def _norm(self) -> RMSNorm:
    config = self.config
    return RMSNorm(config.width, config.norm_epsilon, config.compute_dtype)

  def __call__(
    self, x, turns, attention, cache, counted=None, inputs=None
  ) -> tuple[Array, Any, LayerRouting | None]:
    """f[B,Q,width] -> (f[B,Q,width], cache, what the router did if any).

    Both are of the residual stream, in its dtype.
    """
    config, kind = self.config, self.kind
    # Under 'none' it would be kept of all layers at once.
    once = config.remat != 'none'
    reads = functools.partial(self._reads, turns=turns)
    read = keep_products(reads, once)(x)
    found, cache = self.mixer.run(read, cache, attention, kind)
    # A shard would keep the weights that it gathers here for the backward pass.
    gathers = sharding.on_shard() and config.remat == 'none'
    # So would anyone keep those that are dequantized.
    gathers |= config.lora is not None and config.lora.quantized is not None
    again = keep_products if gathers else lambda function: function
    mixed = shards.summed(again(self.mixer.mix)(found))
    x = self._added(x, mixed, 'attention')
    routed = None
    if kind.experts and config.has_mlp(kind):
      told = normalized(x, config.norm_epsilon)
      read = self._read(x, 'experts')
      mixed, routed = again(self.experts)(read, counted, told)
      dense = shards.summed(keep_products(self._mlp, once)(x))
      mixed = self.experts_post_norm(shards.summed(mixed))
      mixed = mixed + self.dense_post_norm(dense)
    elif kind.experts:
      # Not computed twice, because experts may lie on other devices.
      read = self._read(x, 'mlp')
      mixed, routed = again(self.experts)(read, counted)
      if hasattr(self, 'shared'):
        mixed = mixed + keep_products(self._shared, once)(read)
      mixed = shards.summed(mixed)
    else:
      mixed = shards.summed(keep_products(self._mlp, once)(x))
    x = self._added(x, mixed, 'mlp')
    if config.layer_inputs:
      x = self._added(x, keep_products(self._inputs, once)(x, inputs), 'inputs')
    if config.layer_scales:
      factor = lax.stop_gradient(self.layer_scale[...])
      x = x * factor.astype(x.dtype)[None, None]
    return x, cache, routed

  @property
  def mixer(self) -> Any:
    """One of `_MIXERS`, under its name."""
    return getattr(self, self.kind.mixer)

  def _reads(self, x, turns):
    x = shards.whole(self._read(x, 'attention'))
    return self.mixer.read(x, turns, self.kind)

  def _mlp(self, x):
    return self.mlp(shards.whole(self._read(x, 'mlp')))

  def _inputs(self, x, inputs):
    return self.inputs(x.astype(self.config.compute_dtype), inputs)

  def _shared(self, read):
    return self.shared(shards.whole(read))

  def _read(self, x, part):
    """What a part of the layer reads of the residual stream."""
    if self.config.pre_norms:
      return getattr(self, f'{part}_norm')(x)
    return x.astype(self.config.compute_dtype)

  def _added(self, x, mixed, part):
    """The residual stream with the output of a part of the layer."""
    if hasattr(self, f'{part}_post_norm'):
      mixed = getattr(self, f'{part}_post_norm')(mixed)
    if self.config.residual_scale != 1:
      mixed = mixed * self.config.residual_scale
    return x + mixed
