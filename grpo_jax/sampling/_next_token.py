"""Draws the next token from logits: temperature, filters, random number."""

import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp

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


def next_token(
  logits: Array, uniform: Array, drawn: Array, sampling: Sampling
) -> tuple[Array, Array, Array, Array]:
  """Draws one token per row.

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
  greedy = sampling.temperature == 0
  scaled = logits if greedy else logits / sampling.temperature
  # Relative to the largest logit, so that no exponential overflows. Then `mass`
  # serves the normaliser, the entropy and, without filters, the draw.
  scaled -= jnp.max(scaled, axis=-1, keepdims=True)
  mass = jnp.exp(scaled)
  total = jnp.sum(mass, axis=-1)
  log_total = jnp.log(total)
  # A logit of -inf has no mass; 0 * -inf would be NaN.
  surprise = jnp.sum(jnp.where(mass > 0, mass * scaled, 0), axis=-1)
  entropy = log_total - surprise / total
  kept = _filtered(scaled, drawn, sampling)
  if greedy:
    token = jnp.argmax(kept, axis=-1)
    logp = _pick(scaled, token) - log_total
    return token, logp, logp, entropy
  log_kept = jnp.zeros(uniform.shape, logits.dtype)
  if kept is not scaled:  # some filter is on, which is known when compiling
    log_kept = jax.nn.logsumexp(kept, axis=-1) - log_total
    mass = jnp.exp(kept - jnp.max(kept, axis=-1, keepdims=True))
  token = _inverse_cdf(mass, uniform)
  return token, _pick(scaled, token) - log_total, log_kept, entropy


def _pick(values: Array, place: Array) -> Array:
  """For every row b, `values[b, place[b]]` or `values[b, place[b], :]`."""
  place = place.reshape(-1, *(1,) * (values.ndim - 1))
  return jnp.take_along_axis(values, place, axis=1)[:, 0]


def _filtered(logits: Array, drawn: Array, sampling: Sampling) -> Array:
  """The logits with -inf for every token that must not be drawn, f32[B,V].

  Removed are end tokens that would come too early; then what top-k, top-p and
  min-p drop, each from what the filter before it left. If no filter is on, the
  result is the very array that was given.
  """
  kept = logits
  if sampling.min_tokens and sampling.eos_ids:
    ends = jnp.isin(jnp.arange(kept.shape[-1]), jnp.array(sampling.eos_ids))
    early = (drawn < sampling.min_tokens)[:, None] & ends[None]
    kept = jnp.where(early, -jnp.inf, kept)
  if 0 < sampling.top_k < logits.shape[-1]:
    kth = lax.top_k(kept, sampling.top_k)[0][:, -1:]
    kept = jnp.where(kept >= kth, kept, -jnp.inf)
  if sampling.top_p < 1:
    order = jnp.sort(jax.nn.softmax(kept, axis=-1), axis=-1, descending=True)
    # A token stays while those before it do not reach top_p. So the token with
    # which they reach it stays too, and at least one token does.
    before = jnp.cumsum(order, axis=-1) - order
    # The smallest probability that stays is a threshold for the unsorted
    # logits, so no token must be put back in its place.
    least = jnp.min(
      jnp.where(before < sampling.top_p, order, jnp.inf), axis=-1, keepdims=True
    )
    kept = jnp.where(jax.nn.softmax(kept, axis=-1) >= least, kept, -jnp.inf)
  if sampling.min_p > 0:
    floor = jnp.max(kept, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
    kept = jnp.where(kept >= floor, kept, -jnp.inf)
  return kept


def _inverse_cdf(mass: Array, uniform: Array) -> Array:
  """The first token at which the cumulative share passes `uniform`, i32[B].

  This needs one random number per row, where the Gumbel trick needs V. The
  vocabulary is cut into about sqrt(V) blocks: first the block is found, then
  the token in it, so no running sum goes over the whole vocabulary.

  Sums and random numbers are float32. A token's probability is therefore off by
  about 2e-7, and a token that is rarer than this may never be drawn.

  Args:
    mass: f32[B,V], probabilities that need not add up to 1.
    uniform: f32[B] in [0, 1).
  """
  rows, vocab = mass.shape
  size = 1 << math.isqrt(vocab).bit_length()  # of a block
  blocks = math.ceil(vocab / size)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * size - vocab)))
  mass = mass.reshape(rows, blocks, size)
  total = jnp.cumsum(jnp.sum(mass, axis=-1), axis=-1)
  threshold = (uniform * total[:, -1])[:, None]
  # Rounding may leave no block past the threshold. Then it is the last block
  # that has any mass: the first at which the running sum is complete.
  last = jnp.argmax(total >= total[:, -1:], axis=-1)
  block = jnp.minimum(jnp.sum(total <= threshold, axis=-1), last)
  before = jnp.where(block > 0, _pick(total, jnp.maximum(block - 1, 0)), 0)
  inside = _pick(mass, block)
  running = before[:, None] + jnp.cumsum(inside, axis=-1)
  # A filtered token has no mass. Rounding must not let it be drawn.
  some = inside > 0
  passed = (running > threshold) & some
  # Rounding may also leave no token of the block past the threshold. Then it is
  # the last token of the block that has any mass.
  end = size - 1 - jnp.argmax(jnp.flip(some, axis=-1), axis=-1)
  token = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), end)
  return block * size + token
