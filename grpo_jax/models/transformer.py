"""The transformer, and the model protocol behind which it stands.

The sampler and the learner know three functions of a model:

- `init(key) -> params`;
- `hidden(params, tokens, positions, attention, cache) -> (hidden, cache)`, all
  but the output layer;
- `head(params, hidden) -> logits`, the output layer.

`params` is a tree of plain arrays. Layers are NNX modules inside, but they are
split into structure and parameters once, and everything outside is a pure
function of the parameters.

The layers of a model repeat a pattern of layer kinds. In `params` the layers of
one kind are stacked: `params['blocks'][k]` holds kind k of the pattern, with
the repetitions on the first axis of each array. The optimizer and checkpoints
use this tree, and scoring scans over it. For decoding, `unstack` turns it into
a tree of single layers.
"""

import dataclasses
import functools
import math
from typing import Any

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax import sharding
from grpo_jax.models._config import ModelConfig
from grpo_jax.models.attention import Attention as AttentionFunction

Array = jax.Array
Params = dict[str, Any]

# The logical axes of each parameter, by its name; `sharding.RULES` says which
# mesh axis splits each. Scales of norms are not here: every device has them.
_AXES = {
  'embedding': ('vocab', 'width'),
  'head': ('width', 'vocab'),
  'query': ('width', 'heads', None),
  'key': ('width', 'kv_heads', None),
  'value': ('width', 'kv_heads', None),
  'output': ('heads', None, 'width'),
  'query_bias': ('heads', None),
  'key_bias': ('kv_heads', None),
  'value_bias': ('kv_heads', None),
  'gate': ('width', 'mlp'),
  'up': ('width', 'mlp'),
  'down': ('mlp', 'width'),
}


def rotate(x: Array, position: Array, base: float) -> Array:
  """Rotary position embedding: entry i of a head is paired with i + D / 2.

  Args:
    x: f[B,Q,H,D].
    position: i32[B,Q].
    base: Base of the frequencies.

  Returns:
    f[B,Q,H,D], in the dtype of `x`.
  """
  half = x.shape[-1] // 2
  frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  # In float32: bfloat16 cannot tell position 257 from 256.
  angle = position[:, :, None].astype(jnp.float32) * frequency[None, None]
  cosine, sine = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (first * cosine - second * sine, second * cosine + first * sine)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


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


class RMSNorm(nnx.Module):
  """Root-mean-square normalisation over the last axis, computed in float32."""

  def __init__(self, size: int, epsilon: float):
    self.scale = nnx.Param(jnp.ones((size,)))
    self.epsilon = epsilon

  def __call__(self, x: Array) -> Array:
    """f[..., size] -> f[..., size], in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    # With all its axes, because tests make promotion of ranks an error.
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * lax.rsqrt(square + self.epsilon) * scale).astype(x.dtype)


class SelfAttention(nnx.Module):
  """Attention of one layer: everything around a given attention function.

  The projections to queries, keys and values, the norms of queries and keys,
  the rotation by position, and the projection back to the residual stream.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.config = config
    width, size = config.width, config.head_dim
    heads, kv_heads = config.num_heads, config.num_kv_heads
    init = nnx.initializers.lecun_normal(in_axis=0, out_axis=(1, 2))
    self.query = nnx.Param(init(rngs.params(), (width, heads, size)))
    self.key = nnx.Param(init(rngs.params(), (width, kv_heads, size)))
    self.value = nnx.Param(init(rngs.params(), (width, kv_heads, size)))
    # Both axes are summed over, so both count as inputs.
    out = nnx.initializers.lecun_normal(in_axis=(0, 1), out_axis=2)
    self.output = nnx.Param(out(rngs.params(), (heads, size, width)))
    if config.qkv_bias:
      self.query_bias = nnx.Param(jnp.zeros((heads, size)))
      self.key_bias = nnx.Param(jnp.zeros((kv_heads, size)))
      self.value_bias = nnx.Param(jnp.zeros((kv_heads, size)))
    if config.qk_norm:
      self.query_norm = RMSNorm(size, config.norm_epsilon)
      self.key_norm = RMSNorm(size, config.norm_epsilon)

  def __call__(self, x, position, attention, cache, window):
    """f[B,Q,width] -> (f[B,Q,width], cache)."""
    query, key, value = (
      project(x, weight[...]) for weight in (self.query, self.key, self.value)
    )
    if self.config.qkv_bias:
      query += self.query_bias[...].astype(x.dtype)[None, None]
      key += self.key_bias[...].astype(x.dtype)[None, None]
      value += self.value_bias[...].astype(x.dtype)[None, None]
    if self.config.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    query = rotate(query, position, self.config.rope_base)
    key = rotate(key, position, self.config.rope_base)
    mixed, cache = attention(query, key, value, cache, window)
    return project(mixed, self.output[...], axes=2), cache


class SwiGLU(nnx.Module):
  """The gated feed-forward part of a layer: (silu(x gate) * (x up)) down."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    init = nnx.initializers.lecun_normal()
    wide = (config.width, config.mlp_width)
    self.gate = nnx.Param(init(rngs.params(), wide))
    self.up = nnx.Param(init(rngs.params(), wide))
    self.down = nnx.Param(init(rngs.params(), wide[::-1]))

  def __call__(self, x: Array) -> Array:
    """f[B,Q,width] -> f[B,Q,width]."""
    gate, up = (project(x, weight[...]) for weight in (self.gate, self.up))
    return project(jax.nn.silu(gate) * up, self.down[...])


class Block(nnx.Module):
  """One layer: attention, then SwiGLU, each behind a norm and with a skip."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
    self.attention = SelfAttention(config, rngs)
    self.mlp_norm = RMSNorm(config.width, config.norm_epsilon)
    self.mlp = SwiGLU(config, rngs)

  def __call__(self, x, position, attention, cache, window):
    """f[B,Q,width] -> (f[B,Q,width], cache)."""
    mixed, cache = self.attention(
      self.attention_norm(x), position, attention, cache, window
    )
    x = x + mixed
    return x + self.mlp(self.mlp_norm(x)), cache


@dataclasses.dataclass(frozen=True)
class Transformer:
  """A decoder-only transformer; see the module's docstring for its protocol.

  Attributes:
    config: The shape of the model.

  >>> import jax
  >>> from grpo_jax.models import ModelConfig, Transformer
  >>> model = Transformer(ModelConfig(vocab_size=16))
  >>> params = model.init(jax.random.key(0))
  >>> params['embedding'].shape
  (16, 128)
  """

  config: ModelConfig

  @functools.cached_property
  def _block(self):
    """The structure of a layer, the same for all, without parameters."""
    abstract = nnx.eval_shape(lambda: Block(self.config, nnx.Rngs(0)))
    return nnx.split(abstract)[0]

  def init(self, key: Array) -> Params:
    """Random parameters, float32.

    Args:
      key: A jax.random key.

    Returns:
      The parameter tree, with stacked layers.
    """
    config = self.config
    embedding_key, head_key, *block_keys = jax.random.split(
      key, 2 + len(config.pattern)
    )

    def block(key):
      return nnx.to_pure_dict(nnx.state(Block(config, nnx.Rngs(key))))

    params = {
      'embedding': 0.02
      * jax.random.normal(embedding_key, (config.vocab_size, config.width)),
      'blocks': [
        lax.map(block, jax.random.split(key, config.repeats))
        for key in block_keys
      ],
      'final_norm': {'scale': jnp.ones((config.width,))},
    }
    if not config.tied_embeddings:
      init = nnx.initializers.lecun_normal()
      params['head'] = init(head_key, (config.width, config.vocab_size))
    return params

  def hidden(
    self,
    params: Params,
    tokens: Array,
    positions: Array,
    attention: AttentionFunction,
    cache: list[Any] | None = None,
  ) -> tuple[Array, list[Any] | None]:
    """The output of the last layer, behind the final norm.

    Args:
      params: The tree of `init`, whose layers are scanned; or that of
        `unstack`, whose layers come one after another in the program.
      tokens: i32[B,Q].
      positions: i32[B,Q].
      attention: See `models.attention`.
      cache: For each layer the cache that the attention function reads; None if
        it needs none. It must be None for scanned layers.

    Returns:
      f[B,Q,width] in the compute dtype; and for each layer its new cache, or
      None for scanned layers.
    """
    dtype = jnp.dtype(self.config.compute_dtype)
    table = params['embedding'].astype(dtype)
    # In one piece; otherwise XLA might move activations between devices instead
    # of the table.
    table = sharding.gather_fsdp(table, *_AXES['embedding'])
    x = sharding.constrain_rows(jnp.take(table, tokens, axis=0))
    if 'layers' in params:
      caches = cache or [None] * self.config.num_layers
      x, cache = self._unrolled(params, x, positions, attention, caches)
    else:
      x = self._scanned(params, x, positions, attention)
    # The final norm belongs to no layer: a module around its one parameter.
    norm = RMSNorm(self.config.width, self.config.norm_epsilon)
    norm.scale = nnx.Param(params['final_norm']['scale'])
    return norm(x), cache

  def _layer(self, params, x, positions, attention, cache, kind):
    """One layer of a kind, with these parameters."""
    block = nnx.merge(self._block, params)
    x, cache = block(x, positions, attention, cache, kind.window_tokens)
    return sharding.constrain_rows(x), cache

  def _unrolled(self, params, x, positions, attention, caches):
    """All layers one after another, each with its cache."""
    kinds = self.config.pattern * self.config.repeats
    new = []
    for layer, kind, cache in zip(params['layers'], kinds, caches, strict=True):
      x, cache = self._layer(layer, x, positions, attention, cache, kind)
      new.append(cache)
    return x, new

  def _scanned(self, params, x, positions, attention):
    """All layers as a scan over the repetitions of the pattern."""

    def repeat(x, layers):
      for layer, kind in zip(layers, self.config.pattern, strict=True):
        x, _ = self._layer(layer, x, positions, attention, None, kind)
      return x, None

    if self.config.remat:  # keeps the input of each repetition, and no more
      repeat = jax.checkpoint(repeat)
    return lax.scan(repeat, x, params['blocks'], unroll=self.config.unroll)[0]

  def head(self, params: Params, hidden: Array) -> Array:
    """Logits over the vocabulary.

    Args:
      params: The tree of `init` or of `unstack`.
      hidden: f[..., width], as `hidden` returns it.

    Returns:
      f32[..., V].
    """
    # Factors in the compute dtype, sums in float32: the softmax needs them.
    weight = params.get('head')  # absent if tied
    weight = params['embedding'].T if weight is None else weight
    logits = jnp.matmul(
      hidden.reshape(-1, hidden.shape[-1]),
      weight.astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    return logits.reshape(*hidden.shape[:-1], -1)

  def logical_axes(
    self, path: tuple[str, ...], rank: int
  ) -> tuple[str | None, ...]:
    """The names of a parameter's axes, for `sharding.of_params`.

    Args:
      path: Where the parameter is in the tree of `init`.
      rank: Its number of axes.

    Returns:
      A name or None for each axis. The axis over which layers are stacked has
      no name.
    """
    names = _AXES.get(path[-1], ())
    return (None,) * (rank - len(names)) + names

  def decays(self, path: tuple[str, ...]) -> bool:
    """Whether weight decay acts on a parameter: on matrices alone.

    Args:
      path: Where the parameter is in the tree of `init`.

    Returns:
      False for scales of norms and for biases.
    """
    return path[-1] in _AXES and not path[-1].endswith('_bias')

  def unstack(self, params: Params) -> Params:
    """The same parameters with single layers, for decoding.

    Args:
      params: The tree of `init`.

    Returns:
      A tree with `layers`, a list in the order of the layers, in the place of
      `blocks`.
    """
    layers = [
      jax.tree.map(lambda x, i=i: x[i], blocks)
      for i in range(self.config.repeats)
      for blocks in params['blocks']
    ]
    rest = {name: x for name, x in params.items() if name != 'blocks'}
    return {**rest, 'layers': layers}
