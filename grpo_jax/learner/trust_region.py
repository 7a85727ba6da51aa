"""Which tokens a trust region has switched off, and on which side.

The clipping transforms mark every token in `terms.metrics`; this module alone
knows the names of the marks.
"""

import jax
import jax.numpy as jnp

from grpo_jax import losses

Array = jax.Array

# Marks of tokens without a gradient: above the range of the ratio, below it,
# and where the transform does not say on which side.
_ABOVE = ('clipped_high', 'clipped_cap')
_BELOW = ('clipped_low', 'off_policy')
_EITHER = ('gated', 'detached')
# Marks of tokens outside the range that still have a gradient: their advantage
# pulls them back.
_PULLED_BACK = ('outside_high', 'outside_low')


def clipped(terms: losses.SurrogateTerms) -> Array:
  """bool[P,G,T], the tokens whose gradient a trust region has switched off."""
  return _marked(terms, _ABOVE + _BELOW + _EITHER)


def outside(terms: losses.SurrogateTerms) -> Array:
  """bool[P,G,T], the tokens outside their range, with a gradient or without."""
  return clipped(terms) | _marked(terms, _PULLED_BACK)


def outward(terms: losses.SurrogateTerms, batch: losses.Batch) -> Array:
  """The direction in which each clipped token leaves its range, f32[P,G,T].

  Args:
    terms: What `losses.surrogate_loss` returned.
    batch: What `losses.surrogate_loss` was given.

  Returns:
    1 where a trained token is clipped above its range and -1 where it is
    clipped below, whatever ratio the range is about (the token's own, or its
    completion's). The sign of the token's own log-ratio where the method does
    not name a side. 0 for all other tokens.
  """
  old = terms.logp if batch.logp_old is None else batch.logp_old
  # Later lines overrule: a side that the method names counts more than a sign.
  direction = jnp.where(_marked(terms, _EITHER), jnp.sign(terms.logp - old), 0)
  direction = jnp.where(_marked(terms, _BELOW), -1, direction)
  direction = jnp.where(_marked(terms, _ABOVE), 1, direction)
  return jnp.where(batch.keep, direction, 0).astype(jnp.float32)


def _marked(terms: losses.SurrogateTerms, names: tuple[str, ...]) -> Array:
  """bool[P,G,T], whether a token bears any of some marks."""
  found = jnp.zeros(terms.log_ratio.shape, bool)
  for name in names:
    if name in terms.metrics:
      found |= terms.metrics[name].astype(bool)
  return found
