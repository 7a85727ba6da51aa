"""One token from logits: temperature, filters, and the noise."""

import dataclasses

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
  logits: Array, uniform: Array, step: Array, sampling: Sampling
) -> tuple[Array, Array, Array, Array]:
  """Draws one token per row.

  Args:
    logits: f32[B,V].
    uniform: f32[B] in [0, 1), the noise: one number per token.
    step: i32[], how many tokens the completions have already.
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
  log_policy = jax.nn.log_softmax(scaled, axis=-1)
  entropy = _entropy(log_policy)
  kept = _filtered(log_policy, step, sampling)
  if greedy:
    token = jnp.argmax(kept, axis=-1)
    logp = _pick(log_policy, token)
    return token, logp, logp, entropy
  token = _inverse_cdf(kept, uniform)
  log_kept = jnp.zeros(token.shape, logits.dtype)
  if kept is not log_policy:
    log_kept = jax.nn.logsumexp(kept, axis=-1)
  return token, _pick(log_policy, token), log_kept, entropy


def _entropy(log_policy: Array) -> Array:
  """f32[B]; impossible tokens add nothing."""
  policy = jnp.exp(log_policy)
  return -jnp.sum(jnp.where(policy > 0, policy * log_policy, 0), axis=-1)


def _pick(values: Array, token: Array) -> Array:
  return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


def _filtered(log_policy: Array, step: Array, sampling: Sampling) -> Array:
  """f32[B,V], -inf where dropped; the very input if nothing can be.

  End tokens too early, then top-k, top-p and min-p, each on what the last left.
  """
  kept = log_policy
  if sampling.min_tokens and sampling.eos_ids:
    ends = jnp.isin(jnp.arange(kept.shape[-1]), jnp.array(sampling.eos_ids))
    early = (step < sampling.min_tokens) & ends
    kept = jnp.where(early[None], -jnp.inf, kept)
  if 0 < sampling.top_k < log_policy.shape[-1]:
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


def _inverse_cdf(log_mass: Array, uniform: Array) -> Array:
  """The token at which the cumulative mass passes `uniform`, i32[B].

  One random number per token, where the Gumbel trick needs V of them. Sums and
  noise are float32, so a token's probability is off by about 2e-7, which for a
  token rarer than that is all of it.
  """
  top = jnp.max(log_mass, axis=-1, keepdims=True)
  mass = jnp.exp(log_mass - top)
  total = jnp.cumsum(mass, axis=-1)
  passed = (total > uniform[:, None] * total[:, -1:]) & (mass > 0)
  # Rounding in a parallel sum may leave no token past the threshold.
  return jnp.where(
    jnp.any(passed, axis=-1),
    jnp.argmax(passed, axis=-1),
    jnp.argmax(log_mass, axis=-1),
  )
