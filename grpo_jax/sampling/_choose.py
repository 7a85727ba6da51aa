"""One token from logits: temperature, filters, and the noise."""

import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn and when they end.

  Attributes:
    max_tokens: Length limit of a completion, end token included.
    eos_ids: Token ids that end a completion; the one drawn is part of it.
    temperature: Divides the logits; 0 takes the likeliest token.
    top_k: Keep the k likeliest tokens, and ties with the last; 0 keeps all.
    top_p: Keep the likeliest tokens whose mass reaches this; 1 keeps all.
    min_p: Keep tokens at least this likely relative to the likeliest; 0 keeps
      all.
    min_tokens: End tokens are not drawn before this many others.
    stop_strings: Texts that end a completion; the token that completes one is
      part of it.
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
      ('temperature', self.temperature >= 0, 'at least 0'),
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


def choose(
  logits: Array, uniform: Array, drawn: Array, sampling: Sampling
) -> tuple[Array, Array, Array, Array]:
  """Draws one token per row.

  Args:
    logits: f32[B,V].
    uniform: f32[B] in [0, 1), the noise: one number per token.
    drawn: i32[B], how many tokens each completion has already.
    sampling: See `Sampling`.

  Returns:
    token i32[B]; its `logp` f32[B] under softmax(logits / temperature), the
    policy; `log_kept` f32[B], the log of the policy's mass that the filters
    left, so that the token was drawn with log-probability `logp - log_kept`;
    and the `entropy` f32[B] of the policy before the filters, nats. At
    temperature 0 logp and entropy are those of softmax(logits).
  """
  greedy = sampling.temperature == 0
  scaled = logits if greedy else logits / sampling.temperature
  # Below its largest value, so that one exponential serves everything.
  scaled -= jnp.max(scaled, axis=-1, keepdims=True)
  mass = jnp.exp(scaled)
  total = jnp.sum(mass, axis=-1)
  log_total = jnp.log(total)
  surprise = jnp.sum(jnp.where(mass > 0, mass * scaled, 0), axis=-1)
  entropy = log_total - surprise / total
  kept = _filtered(scaled, drawn, sampling)
  if greedy:
    token = jnp.argmax(kept, axis=-1)
    logp = _pick(scaled, token) - log_total
    return token, logp, logp, entropy
  log_kept = jnp.zeros(uniform.shape, logits.dtype)
  if kept is not scaled:
    log_kept = jax.nn.logsumexp(kept, axis=-1) - log_total
    mass = jnp.exp(kept - jnp.max(kept, axis=-1, keepdims=True))
  token = _inverse_cdf(mass, uniform)
  return token, _pick(scaled, token) - log_total, log_kept, entropy


def _pick(values: Array, place: Array) -> Array:
  """values[b, place[b]], or values[b, place[b], :]."""
  place = place.reshape(-1, *(1,) * (values.ndim - 1))
  return jnp.take_along_axis(values, place, axis=1)[:, 0]


def _filtered(logits: Array, drawn: Array, sampling: Sampling) -> Array:
  """f32[B,V], -inf where dropped; the very input if nothing can be.

  End tokens too early, then top-k, top-p and min-p, each on what the last left.
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
    before = jnp.cumsum(order, axis=-1) - order
    least = jnp.min(
      jnp.where(before < sampling.top_p, order, jnp.inf), axis=-1, keepdims=True
    )
    kept = jnp.where(jax.nn.softmax(kept, axis=-1) >= least, kept, -jnp.inf)
  if sampling.min_p > 0:
    floor = jnp.max(kept, axis=-1, keepdims=True) + jnp.log(sampling.min_p)
    kept = jnp.where(kept >= floor, kept, -jnp.inf)
  return kept


def _inverse_cdf(mass: Array, uniform: Array) -> Array:
  """The token at which the cumulative mass passes `uniform`, i32[B].

  One random number per token, where the Gumbel trick needs V of them. First the
  block of the vocabulary, then the token in it: no running sum over all of it.
  Sums and noise are float32, so a token's probability is off by about 2e-7,
  which for a token rarer than that is all of it.

  Args:
    mass: f32[B,V], not normalised.
    uniform: f32[B].
  """
  rows, vocab = mass.shape
  size = 1 << max(1, math.isqrt(vocab).bit_length())  # of a block
  blocks = math.ceil(vocab / size)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * size - vocab)))
  mass = mass.reshape(rows, blocks, size)
  total = jnp.cumsum(jnp.sum(mass, axis=-1), axis=-1)
  threshold = (uniform * total[:, -1])[:, None]
  # Rounding may leave no block past the threshold: then the last with any mass.
  last = jnp.argmax(total >= total[:, -1:], axis=-1)
  block = jnp.minimum(jnp.sum(total <= threshold, axis=-1), last)
  before = jnp.where(block > 0, _pick(total, jnp.maximum(block - 1, 0)), 0)
  inside = _pick(mass, block)
  running = before[:, None] + jnp.cumsum(inside, axis=-1)
  some = inside > 0
  passed = (running > threshold) & some
  # The same for the tokens of the block.
  end = size - 1 - jnp.argmax(jnp.flip(some, axis=-1), axis=-1)
  token = jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), end)
  return block * size + token
