"""Draws the next token from logits: temperature, filters, random number.

Which filters there are is known when a program is compiled (`Choices`). How
strong each is, row by row, is data (`Numbers`). So two temperatures are drawn
by one program, and a program without filters has no trace of them.

On a mesh the output layer leaves the logits split over the axis `tensor`. They
are not gathered: each shard of the vocabulary reduces what it has, and numbers
of rows are all that is sent. The reductions that do this come last. Their last
argument is the mesh axis of the shards; None means that all of the vocabulary
is here.

Shapes: `B` rows, `V` ids, or those of them that are here.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.engines.protocol import Sampling
from grpo_jax.mesh import sharding

Array = jax.Array
Axis = str | None


# Frozen, so that it can be hashed: a static argument of the compiled programs.
@dataclasses.dataclass(frozen=True)
class Choices:
  """Which ways of choosing a token a program has.

  Attributes:
    eos_ids: Ids of the end tokens.
    random: Whether some rows draw at random.
    greedy: Whether some rows take the likeliest token.
    top_k: The largest k of a row; 0: no row has any.
    top_p: Whether some rows have it.
    min_p: Whether some rows have it.
    min_tokens: Whether some rows have it.
  """

  eos_ids: tuple[int, ...] = ()
  random: bool = True
  greedy: bool = False
  top_k: int = 0
  top_p: bool = False
  min_p: bool = False
  min_tokens: bool = False


class Numbers(NamedTuple):
  """The numbers of each row's sampling, arrays [B]; None where no row needs it.

  Attributes:
    limit: i32, the most tokens of the completion; 0: the row draws nothing.
    scale: f32, what logits are multiplied by: 1 over the temperature.
    greedy: bool, whether the row takes the likeliest token, where others do
      not.
    top_k: i32; 0: all.
    top_p: f32; infinity: all.
    log_min_p: f32; minus infinity: all.
    min_tokens: i32.
  """

  limit: Any
  scale: Any = None
  greedy: Any = None
  top_k: Any = None
  top_p: Any = None
  log_min_p: Any = None
  min_tokens: Any = None


def choices_of(samplings: Sequence[Sampling], vocab_size: int) -> Choices:
  """What a program needs that draws by all of these at once.

  Args:
    samplings: With the same end tokens.
    vocab_size: Of the model. A top-k that keeps all ids is none.
  """
  eos_ids = samplings[0].eos_ids
  return Choices(
    eos_ids=eos_ids,
    random=any(one.temperature != 0 for one in samplings),
    greedy=any(one.temperature == 0 for one in samplings),
    top_k=max(_top_k(one, vocab_size) for one in samplings),
    top_p=any(one.top_p < 1 for one in samplings),
    min_p=any(one.min_p > 0 for one in samplings),
    min_tokens=bool(eos_ids) and any(one.min_tokens for one in samplings),
  )


def dtypes(choices: Choices) -> Numbers:
  """The dtypes of the numbers that a program with these choices reads."""
  return Numbers(
    limit=np.int32,
    scale=np.float32 if choices.random else None,
    greedy=np.bool_ if choices.random and choices.greedy else None,
    top_k=np.int32 if choices.top_k else None,
    top_p=np.float32 if choices.top_p else None,
    log_min_p=np.float32 if choices.min_p else None,
    min_tokens=np.int32 if choices.min_tokens else None,
  )


def numbers_of(
  samplings: Sequence[Sampling], limits: Sequence[int], vocab_size: int
) -> Numbers:
  """The numbers of some rows, as NumPy arrays.

  Args:
    samplings: Of each row.
    limits: Of each row, the most tokens of its completion.
    vocab_size: Of the model.
  """

  def log(min_p):
    return math.log(np.float32(min_p)) if min_p else -math.inf

  found = Numbers(
    limit=limits,
    scale=[_scale(one) for one in samplings],
    greedy=[one.temperature == 0 for one in samplings],
    top_k=[_top_k(one, vocab_size) for one in samplings],
    # A running sum may pass 1 by a rounding error.
    top_p=[one.top_p if one.top_p < 1 else math.inf for one in samplings],
    log_min_p=[log(one.min_p) for one in samplings],
    min_tokens=[one.min_tokens for one in samplings],
  )
  kinds = dtypes(choices_of(samplings, vocab_size))
  return Numbers(
    *(kind and np.array(x, kind) for x, kind in zip(found, kinds, strict=True))
  )


def _top_k(sampling: Sampling, vocab_size: int) -> int:
  return sampling.top_k if sampling.top_k < vocab_size else 0


def _scale(sampling: Sampling) -> np.float32:
  # XLA divides by a constant as by this product, and so does the learner: the
  # two agree to the last bit.
  return np.float32(1) / np.float32(sampling.temperature or 1)


def next_token(
  logits: Array,
  uniform: Array,
  drawn: Array,
  numbers: Numbers,
  choices: Choices,
) -> tuple[Array, Array, Array, Array]:
  """Draws one token per row.

  On a mesh whose axis `tensor` divides V, each device works on its own part of
  the vocabulary.

  Args:
    logits: f32[B,V].
    uniform: f32[B] in [0, 1), one random number per row.
    drawn: i32[B], how many tokens each completion has already.
    numbers: How each row is drawn, arrays [B].
    choices: Those that `numbers` are for.

  Returns:
    Four arrays [B]. The policy is softmax(logits / temperature); at temperature
    0 it is softmax(logits).

    - `token`, i32;
    - `logp`, f32: the token's log-probability under the policy, nats;
    - `log_kept`, f32: log of the policy's mass that the filters left. The token
      was drawn with log-probability `logp - log_kept`. At temperature 0 this is
      `logp`, because the token is drawn with certainty;
    - `entropy`, f32: of the policy, before the filters, nats.
  """
  mesh, axis = jax.sharding.get_abstract_mesh(), 'tensor'
  shards = 1 if mesh.empty else mesh.shape[axis]
  if shards == 1 or logits.shape[-1] % shards:
    return _from_shard(logits, uniform, drawn, numbers, choices, None)
  divides = logits.shape[0] % sharding.row_shards(mesh) == 0
  rows = sharding.ROW_AXES if divides else None
  split, whole = PartitionSpec(rows, axis), PartitionSpec(rows)
  # Left to itself, the compiler gathers the logits to sort, to pick and to sum
  # up to a token.
  return jax.shard_map(
    functools.partial(_from_shard, choices=choices, axis=axis),
    in_specs=(split, whole, whole, whole),
    out_specs=whole,
    axis_names={*sharding.ROW_AXES, axis},
  )(logits, uniform, drawn, numbers)


def _from_shard(
  logits: Array,
  uniform: Array,
  drawn: Array,
  numbers: Numbers,
  choices: Choices,
  axis: Axis,
) -> tuple[Array, Array, Array, Array]:
  """`next_token` from the part of the vocabulary that is here.

  Args:
    logits: f32[B,V'], of the ids that are here.
    uniform: f32[B] in [0, 1), the random number of each row.
    drawn: i32[B], tokens that each completion has already.
    numbers: How each row is drawn, arrays [B].
    choices: Those that `numbers` are for.
    axis: The mesh axis over which the vocabulary is split; None: it is not.
  """
  scaled = logits
  if numbers.scale is not None:
    scaled = logits * numbers.scale[:, None]
  # Relative to the largest logit, so that no exponential overflows. Then `mass`
  # serves the normaliser, the entropy and, without filters, the draw.
  scaled -= row_max(scaled, axis)
  mass = jnp.exp(scaled)
  total = row_sum(mass, axis)
  log_total = jnp.log(total)
  # A logit of -inf has no mass; 0 * -inf would be NaN.
  surprise = jnp.where(mass > 0, mass * scaled, 0)
  entropy = log_total - row_sum(surprise, axis) / total
  kept = _filtered(scaled, drawn, numbers, choices, axis)
  if choices.greedy:
    best, logit = likeliest(kept, scaled, axis)
    best_logp = logit - log_total
    if not choices.random:
      return best, best_logp, best_logp, entropy
  log_kept = jnp.zeros(uniform.shape, logits.dtype)
  if kept is not scaled:  # some row has a filter
    log_kept = log_sum_exp(kept, axis) - log_total
    mass = jnp.exp(kept - row_max(kept, axis))
  token, logit = at_random(mass, scaled, uniform, axis)
  logp = logit - log_total
  if choices.greedy:
    token, logp, log_kept = (
      jnp.where(numbers.greedy, x, y)
      for x, y in ((best, token), (best_logp, logp), (best_logp, log_kept))
    )
  return token, logp, log_kept, entropy


def _filtered(
  logits: Array,
  drawn: Array,
  numbers: Numbers,
  choices: Choices,
  axis: Axis,
) -> Array:
  """The logits with -inf for every token that must not be drawn, f32[B,V'].

  Removed are end tokens that would come too early; then what top-k, top-p and
  min-p drop, each from what the filter before it left. If no row has a filter,
  the result is the very array that was given.
  """
  kept = logits
  if choices.min_tokens:
    ids = column_ids(kept, axis)
    ends = jnp.isin(ids, jnp.array(choices.eos_ids))
    early = (drawn < numbers.min_tokens)[:, None] & ends[None]
    kept = jnp.where(early, -jnp.inf, kept)
  if choices.top_k:
    least = kth(kept, numbers.top_k, choices.top_k, axis)
    kept = jnp.where(kept >= least, kept, -jnp.inf)
  if choices.top_p:
    share = softmax(kept, axis)
    least = least_share(share, numbers.top_p[:, None], axis)
    kept = jnp.where(share >= least, kept, -jnp.inf)
  if choices.min_p:
    floor = row_max(kept, axis) + numbers.log_min_p[:, None]
    kept = jnp.where(kept >= floor, kept, -jnp.inf)
  return kept


def column_ids(x: Array, axis: Axis) -> Array:
  """The ids of the columns of f[B,V], i32[V]."""
  here = jnp.arange(x.shape[-1])
  return here if axis is None else here + _first(x, axis)


def row_max(x: Array, axis: Axis) -> Array:
  """The largest number of each row, f32[B,1]."""
  top = jnp.max(x, axis=-1, keepdims=True)
  return top if axis is None else lax.pmax(top, axis)


def row_sum(x: Array, axis: Axis) -> Array:
  """The sum of each row, f32[B]."""
  here = jnp.sum(x, axis=-1)
  return here if axis is None else lax.psum(here, axis)


def log_sum_exp(x: Array, axis: Axis) -> Array:
  """The log of the sum of exponentials of each row, f32[B]."""
  if axis is None:
    return jax.nn.logsumexp(x, axis=-1)
  top = row_max(x, axis)
  return jnp.log(row_sum(jnp.exp(x - top), axis)) + top[:, 0]


def softmax(x: Array, axis: Axis) -> Array:
  """Exponentials over the sum of those of the row, f32[B,V]."""
  if axis is None:
    return jax.nn.softmax(x, axis=-1)
  mass = jnp.exp(x - row_max(x, axis))
  return mass / row_sum(mass, axis)[:, None]


def kth(x: Array, k: Array, most: int, axis: Axis) -> Array:
  """The k-th largest number of each row, f32[B,1]; -inf where k is 0.

  Args:
    x: f32[B,V].
    k: i32[B], at most `most`.
    most: No larger than the vocabulary.
    axis: Of the shards of the vocabulary.
  """
  if axis is not None:
    # The largest of all are among the largest of each shard.
    some = lax.top_k(x, min(most, x.shape[-1]))[0]
    x = lax.all_gather(some, axis, axis=1, tiled=True)
  place = jnp.maximum(k - 1, 0)
  return jnp.where(k > 0, _pick(lax.top_k(x, most)[0], place), -jnp.inf)[
    :, None
  ]


def least_share(share: Array, top_p: Array, axis: Axis) -> Array:
  """The smallest share that top-p keeps, f32[B,1].

  A token stays while those before it do not reach top_p. So the token with
  which they reach it stays too, and at least one token does. The smallest
  probability that stays is a threshold for the unsorted probabilities, so no
  token must be put back in its place.

  Args:
    share: f32[B,V], probabilities.
    top_p: f32[B,1], above 0.
    axis: Of the shards of the vocabulary.
  """
  if axis is None:
    order = jnp.sort(share, axis=-1, descending=True)
    before = jnp.cumsum(order, axis=-1) - order
    return jnp.min(
      jnp.where(before < top_p, order, jnp.inf), axis=-1, keepdims=True
    )

  # To sort, each device would need the whole vocabulary. The threshold is also
  # the smallest number such that all that is larger does not reach top_p.
  # Positive floats are ordered as their bits are, so 30 halvings find it
  # exactly, and each sends one number of a row.
  def halve(_, bounds):
    low, high = bounds  # more than `low` reaches top_p, more than `high` not
    middle = (low + high) // 2
    at = lax.bitcast_convert_type(middle, jnp.float32)
    more = row_sum(jnp.where(share > at[:, None], share, 0), axis)
    short = more < top_p[:, 0]
    return jnp.where(short, low, middle), jnp.where(short, middle, high)

  none = row_sum(share, axis).astype(jnp.int32) * 0  # as varied as the rows are
  one = lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
  _, least = lax.fori_loop(0, 30, halve, (none - 1, none + one))
  return lax.bitcast_convert_type(least, jnp.float32)[:, None]


def likeliest(kept: Array, scaled: Array, axis: Axis) -> tuple[Array, Array]:
  """The likeliest token, the first of several, and its logit.

  Args:
    kept: f32[B,V], the logits that the filters left.
    scaled: f32[B,V], the logits before the filters.
    axis: Of the shards of the vocabulary.

  Returns:
    i32[B] and f32[B].
  """
  place = jnp.argmax(kept, axis=-1)
  if axis is None:
    return place, _pick(scaled, place)
  best, shard = _pick(kept, place), lax.axis_index(axis)
  # Not "best equals the largest of all": where these are NaN, one must answer.
  less = best < lax.pmax(best, axis)
  first = lax.pmin(jnp.where(less, lax.axis_size(axis), shard), axis)
  return _from_owner(place, scaled, shard == first, axis)


def at_random(
  mass: Array, scaled: Array, uniform: Array, axis: Axis
) -> tuple[Array, Array]:
  """The first token at which the cumulative share passes `uniform`.

  This needs one random number per row, where the Gumbel trick needs V. The
  vocabulary is cut into about sqrt(V) blocks: first the block is found, then
  the token in it, so no running sum goes over the whole vocabulary. The shard
  with the block is found in the same way, from the masses of all shards.

  Sums and random numbers are float32. A token's probability is therefore off by
  about 2e-7, and a token that is rarer than this may never be drawn.

  Args:
    mass: f32[B,V], probabilities that need not add up to 1.
    scaled: f32[B,V], logits.
    uniform: f32[B] in [0, 1).
    axis: Of the shards of the vocabulary.

  Returns:
    The token, i32[B], and its logit, f32[B].
  """
  rows, vocab = mass.shape
  width = 1 << math.isqrt(vocab).bit_length()  # of a block
  blocks = math.ceil(vocab / width)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * width - vocab)))
  mass = mass.reshape(rows, blocks, width)
  running = jnp.cumsum(jnp.sum(mass, axis=-1), axis=-1)
  if axis is None:
    threshold = uniform * running[:, -1]
    place = _passing(mass, running, threshold)
    return place, _pick(scaled, place)
  masses = lax.all_gather(running[:, -1], axis, axis=1)
  masses = jnp.cumsum(masses, axis=-1)
  threshold = uniform * masses[:, -1]
  shard, before = _part(masses, threshold[:, None])
  place = _passing(mass, running, threshold - before)
  return _from_owner(place, scaled, shard == lax.axis_index(axis), axis)


def _passing(mass: Array, running: Array, threshold: Array) -> Array:
  """The first place at which the running sum passes a threshold, i32[B].

  Args:
    mass: f32[B,N,W], N blocks of W ids.
    running: f32[B,N], the sum of each block and of those before it.
    threshold: f32[B].
  """
  threshold, width = threshold[:, None], mass.shape[-1]
  block, before = _part(running, threshold)
  inside = _pick(mass, block)
  running = before[:, None] + jnp.cumsum(inside, axis=-1)
  # A filtered token has no mass. Rounding must not let it be drawn.
  some = inside > 0
  passed = (running > threshold) & some
  # Rounding may also leave no token of the block past the threshold. Then it is
  # the last token of the block that has any mass.
  end = width - 1 - jnp.argmax(jnp.flip(some, axis=-1), axis=-1)
  place = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), end)
  return block * width + place


def _part(running: Array, threshold: Array) -> tuple[Array, Array]:
  """The first part whose running sum f32[B,N] passes a threshold f32[B,1].

  Returns:
    The part, i32[B], and the sum of those before it, f32[B].
  """
  # Rounding may leave no part past the threshold. Then it is the last part that
  # has any mass: the first at which the running sum is complete.
  last = jnp.argmax(running >= running[:, -1:], axis=-1)
  part = jnp.minimum(jnp.sum(running <= threshold, axis=-1), last)
  before = jnp.where(part > 0, _pick(running, jnp.maximum(part - 1, 0)), 0)
  return part, before


def _pick(values: Array, place: Array) -> Array:
  """For every row b, `values[b, place[b]]` or `values[b, place[b], :]`."""
  place = place.reshape(-1, *(1,) * (values.ndim - 1))
  return jnp.take_along_axis(values, place, axis=1)[:, 0]


def _first(x: Array, axis: str) -> Array:
  """The id of the first column of f[B,V]."""
  return lax.axis_index(axis) * x.shape[-1]


def _from_owner(
  place: Array, scaled: Array, here: Array, axis: str
) -> tuple[Array, Array]:
  """A token and its logit, sent to all shards by the one that has them.

  Args:
    place: i32[B], the column of the token in this shard.
    scaled: f32[B,V], logits.
    here: bool[B], true in one shard for each row.
    axis: Of the shards of the vocabulary.
  """
  logit = jnp.where(here, _pick(scaled, place), 0)
  token = jnp.where(here, place + _first(scaled, axis), 0)
  return lax.psum((token, logit), axis)
