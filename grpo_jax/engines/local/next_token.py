"""Draws the next token from logits: temperature, filters, random number.

Which filters there are is known when a program is compiled (`Choices`). How
strong each is, row by row, is data (`Numbers`). So two temperatures are drawn
by one program, and a program without filters has no trace of them.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.engines.local import vocabulary
from grpo_jax.engines.protocol import Sampling
from grpo_jax.mesh import sharding

Array = jax.Array


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
    vocab_size: See `choices_of`.
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
  the vocabulary; see `vocabulary`.

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
  axis: vocabulary.Axis,
) -> tuple[Array, Array, Array, Array]:
  """`next_token` from the part of the vocabulary that is here.

  Args:
    logits: f32[B,V'], of the ids that are here.
    uniform: See `next_token`.
    drawn: See `next_token`.
    numbers: See `next_token`.
    choices: See `next_token`.
    axis: The mesh axis over which the vocabulary is split; None: it is not.
  """
  scaled = logits
  if numbers.scale is not None:
    scaled = logits * numbers.scale[:, None]
  # Relative to the largest logit, so that no exponential overflows. Then `mass`
  # serves the normaliser, the entropy and, without filters, the draw.
  scaled -= vocabulary.largest(scaled, axis)
  mass = jnp.exp(scaled)
  total = vocabulary.total(mass, axis)
  log_total = jnp.log(total)
  # A logit of -inf has no mass; 0 * -inf would be NaN.
  surprise = jnp.where(mass > 0, mass * scaled, 0)
  entropy = log_total - vocabulary.total(surprise, axis) / total
  kept = _filtered(scaled, drawn, numbers, choices, axis)
  if choices.greedy:
    best, logit = vocabulary.likeliest(kept, scaled, axis)
    best_logp = logit - log_total
    if not choices.random:
      return best, best_logp, best_logp, entropy
  log_kept = jnp.zeros(uniform.shape, logits.dtype)
  if kept is not scaled:  # some row has a filter
    log_kept = vocabulary.log_sum_exp(kept, axis) - log_total
    mass = jnp.exp(kept - vocabulary.largest(kept, axis))
  token, logit = vocabulary.at_random(mass, scaled, uniform, axis)
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
  axis: vocabulary.Axis,
) -> Array:
  """The logits with -inf for every token that must not be drawn, f32[B,V'].

  Removed are end tokens that would come too early; then what top-k, top-p and
  min-p drop, each from what the filter before it left. If no row has a filter,
  the result is the very array that was given.
  """
  kept = logits
  if choices.min_tokens:
    ids = vocabulary.ids(kept, axis)
    ends = jnp.isin(ids, jnp.array(choices.eos_ids))
    early = (drawn < numbers.min_tokens)[:, None] & ends[None]
    kept = jnp.where(early, -jnp.inf, kept)
  if choices.top_k:
    kth = vocabulary.kth(kept, numbers.top_k, choices.top_k, axis)
    kept = jnp.where(kept >= kth, kept, -jnp.inf)
  if choices.top_p:
    share = vocabulary.softmax(kept, axis)
    least = vocabulary.least_share(share, numbers.top_p[:, None], axis)
    kept = jnp.where(share >= least, kept, -jnp.inf)
  if choices.min_p:
    floor = vocabulary.largest(kept, axis) + numbers.log_min_p[:, None]
    kept = jnp.where(kept >= floor, kept, -jnp.inf)
  return kept
