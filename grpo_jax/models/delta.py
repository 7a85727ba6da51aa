r"""The gated delta rule: attention whose memory is a matrix of one size.

Each head has a state S, which maps keys to values. A token fades it by
:math:`e^g`, corrects what it answers to the token's key towards the token's
value, by the rate :math:`\beta`, and reads it at the token's query:

.. math:: S \leftarrow e^g S, \quad
  S \leftarrow S + k \, \beta (v - S^\top k)^\top, \quad o = S^\top q

Queries and keys come in as they are projected: their norms become 1 here, and
queries are multiplied by D ** -0.5. All is computed in float32.

`step` is this for one token, for decoding. `recur` computes many tokens in
chunks of 64: inside a chunk by products of matrices, and a loop passes the
states from one chunk to the next.

Shapes: `B` rows, `Q` columns, `K` key heads, `H` value heads, `D` size of a
key, `E` size of a value; `r = H / K` value heads read the same queries and
keys. In chunks: `n` chunks of `C` columns, `S` states that a row carries.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax.models.config import CHUNK_TOKENS

Array = jax.Array

_EPSILON = 1e-6  # added to the square of a norm


class Path(NamedTuple):
  """Which earlier columns of its row a token has read, as in a `Layout`.

  These are the earlier columns of its own segment, and all of the segment that
  this one continues. That one continues none itself, and behind it come those
  that continue it, before any other.

  Attributes:
    segment: i32[B,Q], numbered from 1 in the order of columns; 0 is padding.
    parent: i32[B,Q], the segment that the token's segment continues, or 0.
  """

  segment: Array
  parent: Array


def step(
  query: Array,
  key: Array,
  value: Array,
  rate: Array,
  decay: Array,
  state: Array,
) -> tuple[Array, Array]:
  """Passes one token of every row.

  Args:
    query: f[B,K,D].
    key: f[B,K,D].
    value: f[B,H,E].
    rate: f[B,H], in [0, 1].
    decay: f[B,H], the logarithm g of what is left of the state, at most 0.
    state: f32[B,H,D,E].

  Returns:
    The output f[B,H,E], in the dtype of `value`, and the new state
    f32[B,H,D,E].
  """
  query, key = _normalised(query, key)
  by_key = *key.shape[:2], -1
  old = state.reshape(*by_key, *state.shape[2:])
  rate, kept = (
    x.astype(jnp.float32).reshape(by_key)[..., None]
    for x in (rate, jnp.exp(decay.astype(jnp.float32)))
  )
  # The old state is read once, for key and query together: to pass over it is
  # most of what a step costs.
  read = _product('bkid,bkrde->ibkre', jnp.stack([key, query], 2), old)
  predicted, answered = kept * read[0], kept * read[1]
  fix = rate * (value.reshape(predicted.shape) - predicted)
  new = kept[..., None] * old + key[:, :, None, :, None] * fix[..., None, :]
  along = jnp.sum(key * query, axis=-1)[:, :, None, None]
  output = (answered + along * fix).reshape(value.shape)
  return output.astype(value.dtype), new.reshape(state.shape)


def recur(
  query: Array,
  key: Array,
  value: Array,
  rate: Array,
  decay: Array,
  state: Array | None = None,
  path: Path | None = None,
  chunk: int = CHUNK_TOKENS,
) -> tuple[Array, Array]:
  """Passes the columns of every row, one after another, in chunks.

  Between the passes only the arguments are kept. The backward pass computes the
  rest again: for a moment it has the states before all chunks, and some arrays
  of `chunk` numbers for each token and head.

  Args:
    query: f[B,Q,K,D].
    key: f[B,Q,K,D].
    value: f[B,Q,H,E].
    rate: f[B,Q,H], in [0, 1]. A column with rate 0 and decay 0 leaves the state
      as it is, to the bit.
    decay: f[B,Q,H], the logarithm g of what is left of the state, at most 0.
    state: f32[B,H,D,E], which the first column finds; None: zeros.
    path: Where rows hold several segments; each that continues none begins with
      zeros, and `state` is not read. None: a column has read all before it.
    chunk: Columns that are computed together, a power of two; fewer where a row
      has fewer.

  Returns:
    The output f[B,Q,H,E], in the dtype of `value`, and the state f32[B,H,D,E]
    behind the last column; with a `path`, it is that of the last segment.
    Columns of padding have the output 0 if there is a `path`.
  """
  assert chunk & (chunk - 1) == 0, 'halves of a chunk are halved again'
  chunk = min(chunk, 1 << (value.shape[1] - 1).bit_length())
  if state is None:
    shape = len(value), value.shape[2], key.shape[3], value.shape[3]
    state = jnp.zeros(shape, jnp.float32)
  # Arrays of C numbers for each token and head are large: computed again, they
  # take memory for one layer at a time.
  run = jax.checkpoint(functools.partial(_recur, chunk))
  return run(query, key, value, rate, decay, state, path)


def _recur(chunk, query, key, value, rate, decay, state, path):
  r"""What `recur` does, by its arguments.

  With c the sum of g along the path of column i inside its chunk, S the state
  that the path finds before the chunk, and sums over the columns j < i of the
  path in the chunk:

  .. math::
    f_i = \beta_i \bigl(v_i - e^{c_i} S^\top k_i
      - \sum_j e^{c_i - c_j} (k_j \cdot k_i) f_j\bigr), \quad
    S_i = e^{c_i} S + k_i f_i^\top + \sum_j e^{c_i - c_j} k_j f_j^\top

  The first is solved for f by the inverse of a triangular matrix. That does not
  depend on S, so it is done for all chunks at once, and the loop over chunks
  does only what needs S.
  """
  (rows, columns, heads, _), dtype = value.shape, value.dtype
  # No factor of a product of matrices has more than five axes: XLA's CPU ends
  # in a segmentation fault while it packs some with six.
  query, key, value, rate, decay = (
    jnp.moveaxis(_cut(x.astype(jnp.float32), chunk), 2, 3)
    for x in (
      *_normalised(query, key),
      value,
      rate[..., None],
      decay[..., None],
    )
  )  # n B K C D, n B H C E, n B H C 1
  seen, source = _readers(path, (rows, columns), chunk)
  # Sums of a few decays each, and never differences of long sums: those lose
  # digits where a head forgets fast.
  each = jnp.ones((1, 1, 1, chunk, chunk + 1), jnp.float32)
  later = decay * jnp.tril(each)
  since = _product('nbij,nbhjm->nbhim', seen.astype(jnp.float32), later)
  kept, since = jnp.exp(since[..., :1]), since[..., 1:]
  fade = jnp.exp(jnp.where(seen[:, :, None], since, -jnp.inf))
  fade, fade_last = jnp.split(fade, [chunk], axis=3)
  both = jnp.concatenate([query, key], axis=3)
  alike = _product('nbkid,nbkjd->nbkij', both, key)
  repeats = heads // key.shape[2]
  asked, alike = jnp.split(jnp.repeat(alike, repeats, axis=2), 2, axis=3)
  inverse = _inverse(rate * alike * fade)
  after, (read, fix) = jax.lax.scan(
    jax.checkpoint(_pass_chunk),
    jnp.repeat(state[:, :, None], source.shape[-1], axis=2),
    (both, value, rate, kept, fade_last, inverse, source),
  )
  output = read + _product('nbhij,nbhje->nbhie', asked * fade, fix)
  output = jnp.moveaxis(output, (0, 3), (1, 2))  # B n C H E
  output = output.reshape(rows, -1, heads, output.shape[-1])[:, :columns]
  return output.astype(dtype), after[:, :, 0]


def _pass_chunk(before, chunk):
  """Passes one chunk, where its states are known.

  Args:
    before: f32[B,H,S,D,E], the states in front of it.
    chunk: Of this chunk, and all in float32:
      both: [B,K,2C,D], queries, and then keys.
      value: [B,H,C,E].
      rate: [B,H,C,1].
      kept: [B,H,C+S,1], what is left of its state at each reader.
      fade: [B,H,S,C], what is left of each column in the states behind it.
      inverse: [B,H,C,C].
      source: [B,C+S,S], 1 where a reader goes on from a state.

  Returns:
    The states behind it, and f32[B,H,C,E]: what its queries read of the states
    in front of it, and by how much its tokens correct their states.
  """
  both, value, rate, kept, fade, inverse, source = chunk
  (rows, heads, columns, size), keys = value.shape, both.shape[1]
  # The states lie behind one another as the rows of one matrix.
  own = jnp.tile(source[:, :columns], (1, 2, 1))[:, None, ..., None]
  own = (own * both[..., None, :]).reshape(*both.shape[:3], -1)
  rest = heads // keys, own.shape[-1], size
  read = _product('bkix,bkrxe->bkrie', own, before.reshape(rows, keys, *rest))
  read = read.reshape(rows, heads, -1, size)
  read, predicted = jnp.split(read, 2, axis=2)
  kept, kept_last = jnp.split(kept, [columns], axis=2)
  fix = rate * (value - kept * predicted)
  fix = _product('bhij,bhje->bhie', inverse, fix)
  key = jnp.repeat(both[:, :, columns:], heads // keys, axis=1)
  key = jnp.moveaxis(fade, 2, 3)[..., None] * key[..., None, :]
  key = key.reshape(rows, heads, columns, -1)
  written = _product('bhjx,bhje->bhxe', key, fix).reshape(before.shape)
  # A choice: what stays is the same to the bit on every device, and a sum of
  # products with 0 and 1 takes twice the time of a backward pass on a CPU.
  is_from = source[:, None, columns:, :, None, None] > 0
  found = jnp.zeros_like(before)
  for state in range(found.shape[2]):
    one = before[:, :, state : state + 1]
    found = jnp.where(is_from[:, :, :, state], one, found)
  return kept_last[..., None] * found + written, (kept * read, fix)


def _readers(path, shape, chunk):
  """Who reads what in each chunk: its C columns, then the S states behind it.

  Without a path a row carries one state, that behind its last column. With one
  it carries a second, that behind the last column of the newest segment that
  continues none: those that continue it find it there.

  Args:
    path: A `Path`, or None.
    shape: (B, Q).
    chunk: C.

  Returns:
    bool[n,B,C+S,C], which columns of its chunk a reader has read, and
    f32[n,B,C+S,S], 1 at the state that it goes on from, 0 at others.
  """
  # Columns that fill the last chunk have the segment 0, so nobody reads them.
  line = jnp.ones(shape, jnp.int32)
  segment, parent = (line, 0 * line) if path is None else path
  segment, parent = (_cut(jnp.asarray(x), chunk) for x in (segment, parent))
  same = segment[..., None] == segment[..., None, :]
  above = parent[..., None] == segment[..., None, :]
  earlier = jnp.tril(jnp.ones((chunk, chunk), bool))[None, None]
  live = segment > 0
  seen = earlier & live[..., None, :] & (same | above)
  if path is None:
    ends, source = [live], [live]
  else:
    head = jnp.where(parent == 0, segment, 0)
    ends = [live, head > 0]
    runs, begins = segment == _newest(segment), parent == _newest(head)
    source = [live & runs, (parent > 0) & begins & ~runs]
  source = jnp.stack(source, axis=-1).astype(jnp.float32)
  # The last column of which each state is the end; -1: it stays as it is.
  place = jnp.arange(chunk)[None, None]
  last = jnp.stack(
    [jnp.max(jnp.where(x, place, -1), axis=-1) for x in ends], axis=-1
  )[..., None]
  row = functools.partial(jnp.take_along_axis, indices=last.clip(0), axis=2)
  stays = jnp.eye(len(ends), dtype=jnp.float32)[None, None]
  return (
    jnp.concatenate([seen, row(seen) & (last >= 0)], axis=2),
    jnp.concatenate([source, jnp.where(last >= 0, row(source), stays)], axis=2),
  )


def _newest(segment):
  """The newest segment in front of each chunk, i32[n,B,1]; 0: there is none.

  Args:
    segment: i32[n,B,C].
  """
  until = jax.lax.cummax(jnp.max(segment, axis=-1), axis=0)
  return jnp.pad(until[:-1], ((1, 0), (0, 0)))[..., None]


def _inverse(x):
  """The inverse of one plus what `x` f32[n,B,H,C,C] has below its diagonal.

  By halves: of a matrix with the blocks A and B on its diagonal and X below, it
  has the inverses of A and B there, and -B^-1 X A^-1. The powers of `x`, of
  which the inverse is a sum too, are no way: they reach 1e17 where keys are
  alike, and cancel.
  """
  half = x.shape[-1] // 2
  if not half:
    return jnp.ones_like(x)
  halves = jnp.stack([x[..., :half, :half], x[..., half:, half:]], axis=3)
  # Of one head behind one another, so that heads stay on their devices.
  inverses = _inverse(halves.reshape(*x.shape[:2], -1, half, half))
  top, bottom = jnp.moveaxis(inverses.reshape(halves.shape), 3, 0)
  below = _product('nbhij,nbhjk->nbhik', bottom, x[..., half:, :half])
  below = -_product('nbhij,nbhjk->nbhik', below, top)
  top = jnp.concatenate([top, jnp.zeros_like(top)], axis=-1)
  bottom = jnp.concatenate([below, bottom], axis=-1)
  return jnp.concatenate([top, bottom], axis=-2)


def _normalised(query, key):
  """Both in float32 with the norm 1, and queries over sqrt(D)."""
  query, key = (
    x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
    for x in (query.astype(jnp.float32), key.astype(jnp.float32))
  )
  return query * query.shape[-1] ** -0.5, key


def _cut(x, chunk):
  """Chunks [n,B,C,...] of columns [B,Q,...], with zeros behind the last."""
  rows, columns, *rest = x.shape
  fill = [(0, 0), (0, -columns % chunk)] + [(0, 0)] * len(rest)
  x = jnp.pad(x, fill).reshape(rows, -1, chunk, *rest)
  return jnp.moveaxis(x, 1, 0)


def _product(axes, *arrays):
  """A product of arrays of float32, in full precision on every device."""
  return jnp.einsum(axes, *arrays, precision=jax.lax.Precision.HIGHEST)
