"""Draws the next token from logits: temperature, filters, random number."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from grpo_jax.engines.local import vocabulary
from grpo_jax.mesh import sharding

Array = jax.Array


# Float32 cannot divide logits by less: quotients overflow, and rounding errors
# become differences of whole nats.
LEAST_TEMPERATURE = 1e-3


# Frozen, so that it can be hashed: a static argument of the compiled programs.
@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn and when they end.

  Attributes:
    max_tokens: Length limit of a completion, its end token included.
    eos_ids: Ids of the end tokens. An end token is part of its completion.
    temperature: Divides the logits; 0 takes the likeliest token. Numbers
      between 0 and `LEAST_TEMPERATURE` are refused.
    top_k: Draws from the k likeliest tokens, and from any as likely as the last
      of them; 0 draws from all.
    top_p: Draws from the likeliest tokens that together reach this probability;
      1 draws from all.
    min_p: Draws from the tokens that are at least this likely relative to the
      likeliest; 0 draws from all.
    min_tokens: No end token is drawn before a completion has this many tokens.
    stop_strings: Texts that end a completion. The token that completes such a
      text is part of the completion.
  """

  max_tokens: int
  eos_ids: tuple[int, ...] = ()
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  min_tokens: int = 0
  stop_strings: tuple[str, ...] = ()

  def __post_init__(self):
    for name, ok, need in (
      ('max_tokens', self.max_tokens > 0, 'positive'),
      (
        'temperature',
        self.temperature == 0
        or LEAST_TEMPERATURE <= self.temperature < math.inf,
        f'0, which is greedy, or a number from {LEAST_TEMPERATURE} up',
      ),
      ('top_k', self.top_k >= 0, 'at least 0'),
      ('top_p', 0 < self.top_p <= 1, 'in (0, 1]'),
      ('min_p', 0 <= self.min_p <= 1, 'in [0, 1]'),
      (
        'min_tokens',
        0 <= self.min_tokens < self.max_tokens,
        'in [0, max_tokens)',
      ),
    ):
      if not ok:
        raise ValueError(
          f'Sampling got {name}={getattr(self, name)}; it must be {need}.'
        )
    stops = self.stop_strings
    whole = (isinstance(stop, str) and stop for stop in stops)
    if isinstance(stops, str) or not all(whole):
      raise ValueError(
        f'Sampling got stop_strings={stops!r}; it must be a tuple of texts, '
        'none of them empty, because the empty text is in every text.'
      )


def next_token(
  logits: Array, uniform: Array, drawn: Array, sampling: Sampling
) -> tuple[Array, Array, Array, Array]:
  """Draws one token per row.

  On a mesh whose axis `tensor` divides V, each device works on its own part of
  the vocabulary; see `vocabulary`.

  Args:
    logits: f32[B,V].
    uniform: f32[B] in [0, 1), one random number per row.
    drawn: i32[B], how many tokens each completion has already.
    sampling: See `Sampling`.

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
    return _from_shard(logits, uniform, drawn, sampling, None)
  divides = logits.shape[0] % sharding.row_shards(mesh) == 0
  rows = sharding.ROW_AXES if divides else None
  split, whole = PartitionSpec(rows, axis), PartitionSpec(rows)
  # Left to itself, the compiler gathers the logits to sort, to pick and to sum
  # up to a token.
  return jax.shard_map(
    functools.partial(_from_shard, sampling=sampling, axis=axis),
    in_specs=(split, whole, whole),
    out_specs=whole,
    axis_names={*sharding.ROW_AXES, axis},
  )(logits, uniform, drawn)


def _from_shard(
  logits: Array,
  uniform: Array,
  drawn: Array,
  sampling: Sampling,
  axis: vocabulary.Axis,
) -> tuple[Array, Array, Array, Array]:
  """`next_token` from the part of the vocabulary that is here.

  Args:
    logits: f32[B,V'], of the ids that are here.
    uniform: See `next_token`.
    drawn: See `next_token`.
    sampling: See `next_token`.
    axis: The mesh axis over which the vocabulary is split; None: it is not.
  """
  greedy = sampling.temperature == 0
  scaled = logits if greedy else logits / sampling.temperature
  # Relative to the largest logit, so that no exponential overflows. Then `mass`
  # serves the normaliser, the entropy and, without filters, the draw.
  scaled -= vocabulary.largest(scaled, axis)
  mass = jnp.exp(scaled)
  total = vocabulary.total(mass, axis)
  log_total = jnp.log(total)
  # A logit of -inf has no mass; 0 * -inf would be NaN.
  surprise = jnp.where(mass > 0, mass * scaled, 0)
  entropy = log_total - vocabulary.total(surprise, axis) / total
  kept = _filtered(scaled, drawn, sampling, axis)
  if greedy:
    token, logit = vocabulary.likeliest(kept, scaled, axis)
    logp = logit - log_total
    return token, logp, logp, entropy
  log_kept = jnp.zeros(uniform.shape, logits.dtype)
  if kept is not scaled:  # some filter is on, which is known when compiling
    log_kept = vocabulary.log_sum_exp(kept, axis) - log_total
    mass = jnp.exp(kept - vocabulary.largest(kept, axis))
  token, logit = vocabulary.at_random(mass, scaled, uniform, axis)
  return token, logit - log_total, log_kept, entropy


def _filtered(
  logits: Array, drawn: Array, sampling: Sampling, axis: vocabulary.Axis
) -> Array:
  """The logits with -inf for every token that must not be drawn, f32[B,V'].

  Removed are end tokens that would come too early; then what top-k, top-p and
  min-p drop, each from what the filter before it left. If no filter is on, the
  result is the very array that was given.
  """
  kept = logits
  if sampling.min_tokens and sampling.eos_ids:
    ids = vocabulary.ids(kept, axis)
    ends = jnp.isin(ids, jnp.array(sampling.eos_ids))
    early = (drawn < sampling.min_tokens)[:, None] & ends[None]
    kept = jnp.where(early, -jnp.inf, kept)
  if 0 < sampling.top_k < vocabulary.size(kept, axis):
    kth = vocabulary.kth(kept, sampling.top_k, axis)
    kept = jnp.where(kept >= kth, kept, -jnp.inf)
  if sampling.top_p < 1:
    share = vocabulary.softmax(kept, axis)
    least = vocabulary.least_share(share, sampling.top_p, axis)
    kept = jnp.where(share >= least, kept, -jnp.inf)
  if sampling.min_p > 0:
    floor = vocabulary.largest(kept, axis) + jnp.log(sampling.min_p)
    kept = jnp.where(kept >= floor, kept, -jnp.inf)
  return kept
