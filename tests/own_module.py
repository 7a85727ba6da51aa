"""A decoder that is not ours, as people write them in Flax NNX.

It has an attention, a rotary embedding and a cache of its own, and is called as
Tunix calls its models: `(tokens, positions, cache, mask) -> (logits, cache)`.
Its cache is a dict for each layer with keys, values, and the next column.
"""

from flax import nnx
import jax
import jax.numpy as jnp

from grpo_jax.models import foreign

WIDTH, HEADS, SIZE, LAYERS = 32, 2, 16, 2


def rotated(x, positions):
  speed = 100.0 ** -(jnp.arange(SIZE // 2) / (SIZE // 2))
  angle = positions[..., None, None] * speed[None, None, None]
  left, right = jnp.split(x, 2, axis=-1)
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  return jnp.concatenate(
    [left * cos - right * sin, right * cos + left * sin], axis=-1
  )


class Attention(nnx.Module):
  def __init__(self, rngs):
    self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, SIZE), rngs=rngs)
    self.out = nnx.LinearGeneral((HEADS, SIZE), WIDTH, axis=(-2, -1), rngs=rngs)

  def __call__(self, x, positions, cache, mask):
    q, k, v = jnp.moveaxis(self.qkv(x), 2, 0)
    q, k = rotated(q, positions), rotated(k, positions)
    if cache is not None:
      start = (0, cache['end'], 0, 0)
      k = jax.lax.dynamic_update_slice(cache['k'], k, start)
      v = jax.lax.dynamic_update_slice(cache['v'], v, start)
      cache = {'k': k, 'v': v, 'end': cache['end'] + x.shape[1]}
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / SIZE**0.5
    weights = jax.nn.softmax(
      jnp.where(mask[:, None], scores, -jnp.inf), axis=-1
    )
    return self.out(jnp.einsum('bhqk,bkhd->bqhd', weights, v)), cache


class Decoder(nnx.Module):
  """Counts its calls, as a module with dropout does: nothing may keep that."""

  def __init__(self, vocab_size, rngs):
    self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
    self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(5)])
    self.attention = nnx.List([Attention(rngs) for _ in range(LAYERS)])
    self.mlp = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in '12'])
    self.head = nnx.Linear(WIDTH, vocab_size, use_bias=False, rngs=rngs)
    self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

  def __call__(self, tokens, positions, cache, mask):
    self.calls[...] += 1
    x, after = self.embed(tokens) * WIDTH**0.5, []
    for i in range(LAYERS):
      layer = None if cache is None else cache[i]
      new, layer = self.attention[i](
        self.norms[2 * i](x), positions, layer, mask
      )
      x, after = x + new, [*after, layer]
      x += jax.nn.silu(self.mlp[i](self.norms[2 * i + 1](x)))
    logits = self.head(self.norms[-1](x))
    return logits, after if cache is not None else None

  def init_cache(self, rows, columns):
    shape = rows, columns, HEADS, SIZE
    return [
      {
        'k': jnp.zeros(shape),
        'v': jnp.zeros(shape),
        'end': jnp.zeros((), jnp.int32),
      }
      for _ in range(LAYERS)
    ]


def without_mask(module, tokens, positions, cache, mask):
  """A module that makes its own mask: from the cache's end and the columns."""
  columns = mask.shape[-1]
  end = 0 if cache is None else cache[0]['end']
  query = end + jnp.arange(tokens.shape[1])
  own = jnp.arange(columns)[None] <= query[:, None]
  own = jnp.broadcast_to(own[None], (tokens.shape[0], *own.shape))
  return module(tokens, positions, cache, own)


KINDS = {
  'mask': dict(init_cache=Decoder.init_cache),
  'causal': dict(
    call=without_mask, init_cache=Decoder.init_cache, attention='causal'
  ),
  'no cache': dict(),
}


def made(kind='mask', vocab_size=14, seed=0, **options):
  module = Decoder(vocab_size, nnx.Rngs(seed))
  return foreign.from_nnx(module, **{**KINDS[kind], **options})


def arithmetic():
  """For `config.model.path='tests.own_module:arithmetic'`."""
  return made()


def no_model():
  """A function that forgets its return."""
