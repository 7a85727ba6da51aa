"""Array helpers that the transforms share; an empty mask gives no NaN."""

import math
from numbers import Real
from typing import Any

import jax
from jax import core
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
from jax.sharding import reshard

from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import SurrogateTerms
from grpo_jax.losses._base import at_least_float32

MAX_LOG_RATIO = 20.0  # nats; `saturating_exp` stops here, at e^20 = 4.9e8
_MOST_FLOAT = 3e38  # of float32


def per_token(value: Array) -> Array:
  """f32[P,G] -> f32[P,G,1], to broadcast over tokens."""
  return value[:, :, None]


def safe_divide(numerator: Array, denominator: Array) -> Array:
  """`numerator / denominator`; 0, with gradient 0, where the denominator is 0.

  >>> safe_divide(jnp.array([1.0, 2.0]), jnp.array([0.0, 4.0])).tolist()
  [0.0, 0.5]
  """
  # Two `where`: with the outer one alone the gradient would be NaN, which is 0
  # times the infinite slope of x / 0.
  empty = denominator == 0
  return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))


def count(mask: Array, axis=None) -> Array:
  """Number of True entries, f32."""
  return jnp.sum(mask, axis=axis, dtype=jnp.float32)


def masked_mean(value: Array, mask: Array, axis=None) -> Array:
  """Mean of `value` where `mask`; 0 where the mask is empty."""
  total = jnp.sum(jnp.where(mask, value, 0), axis=axis)
  return safe_divide(total, count(mask, axis))


def has_value(value: Any) -> bool:
  """Whether an argument has its value now, whatever that is.

  A schedule or a controller gets one in each rollout, and what `jit` traces
  when the program runs.
  """
  # A controller is a tuple with names.
  moves = callable(value) or hasattr(value, '_fields')
  return not moves and not isinstance(value, core.Tracer)


def _number(bound: Any) -> float:
  """A number as a float; NaN for what has no value yet."""
  return float(bound) if has_value(bound) else math.nan


def check_numbers(
  name: str,
  *,
  least: float = -_MOST_FLOAT,
  most: float = _MOST_FLOAT,
  above: bool = False,
  moves: bool = True,
  **arguments: Any,
) -> None:
  """Raises a ValueError if an argument is no number, or outside its range.

  Args:
    name: Of the function that was called.
    least: The smallest number that means anything.
    most: The largest; infinity where it stands for no limit.
    above: Whether the numbers must be above `least`.
    moves: Whether they may be schedules or controllers.
    **arguments: What the function was given, perhaps as arrays. What has no
      value yet passes.
  """
  low, high = least > -_MOST_FLOAT, most < _MOST_FLOAT
  needed = 'a finite number' if most < math.inf else 'a number'
  if above:
    needed = f'a number above {least:g}'
  elif low and high:
    needed = f'a number from {least:g} to {most:g}'
  elif low:
    needed = f'a number that is {least:g} or more'
  for argument, value in arguments.items():
    if not has_value(value) and (moves or isinstance(value, core.Tracer)):
      continue
    given: Any = value.item() if getattr(value, 'shape', None) == () else value
    if not isinstance(given, Real) or isinstance(given, bool):
      raise ValueError(f'{name} got {argument}={given!r:.60}; give a number.')
    if not _is_inside(given, least, most, above):
      raise ValueError(f'{name} got {argument}={given!r:.60}; give {needed}.')


def _is_inside(number: Any, least: float, most: float, above: bool) -> bool:
  size = abs(number)
  fits = size <= _MOST_FLOAT or size == math.inf
  # False for NaN as well.
  return fits and least <= number <= most and not (above and number == least)


def check_spread(
  name: str, deviation: str, epsilon: Any, under_root: Any = False
) -> None:
  """Raises a ValueError if advantages cannot be divided by such a spread."""
  check_numbers(name, least=0, epsilon=epsilon)
  if deviation not in ('population', 'sample'):
    raise ValueError(
      f"{name} got deviation={deviation!r}; give 'population' (divides by n) "
      "or 'sample' (divides by n - 1)."
    )
  check_flag(name, 'under_root', under_root)


def check_flag(name: str, argument: str, value: Any) -> None:
  """Raises a ValueError unless an argument is True or False."""
  given = value.item() if getattr(value, 'shape', None) == () else value
  if not isinstance(given, bool):
    raise ValueError(
      f'{name} got {argument}={given!r:.60}; give True or False.'
    )


def check_range(name: str, low: Any, high: Any) -> None:
  """Raises a ValueError if these are no distances of two bounds from 1."""
  check_numbers(name, least=-math.inf, most=math.inf, low=low, high=high)
  least, most = _number(low), _number(high)
  # As TRL's and verl's users have them in mind: 0.8 and 1.28. A large `high`
  # alone is a wide range, such as the 10 of DeepSeek-R1.
  if 0.5 <= least < 1 < most < 1.6:
    raise ValueError(
      f'{name} got low={low} and high={high}, which look like the bounds '
      'themselves; give their distances from 1, that is, '
      f'low={1 - least:.6g} and high={most - 1:.6g}.'
    )
  if least > 1:
    raise ValueError(
      f'{name} got low={low}, so that the lower bound of the ratio is '
      f'{1 - least:g}, below which no ratio lies; give a distance of at most 1.'
    )
  check_distances(name, low, high, 'ratio 1')


def check_distances(
  name: str, low: Any, high: Any, center: str, most: float = math.inf
) -> None:
  """Raises a ValueError if a distance from `center` is not in [0, most]."""
  check_numbers(name, least=-math.inf, most=math.inf, low=low, high=high)
  for side, bound in (('low', low), ('high', high)):
    if _number(bound) < 0 or _number(bound) > most:
      wanted = 'not negative' if most == math.inf else f'from 0 to {most}'
      raise ValueError(
        f'{name} got {side}={bound}; give the distance of the bound from '
        f'{center}, which is {wanted}.'
      )


def centered(value: Array, mask: Array, axis=None) -> Array:
  """Value minus its mean where `mask`; exactly 0 for equal values.

  Values that are equal by `all_equal` become exactly 0. `x - mean(x)` would
  leave the rounding error of the mean, which a later division by the deviation
  blows up to order 1 (seen in released code).

  Args:
    value: Any shape.
    mask: bool, which values count; the result is 0 elsewhere.
    axis: Of the mean; None for all.

  Returns:
    An array like `value`.
  """
  return jnp.ldexp(*_centered(value, mask, axis))


def _centered(value: Array, mask: Array, axis) -> tuple[Array, Array]:
  """What `centered` returns over a power of two, and its exponent.

  The power is about the largest size of a value, so that small values are not
  lost and the difference of two large ones is finite. It rounds nothing.
  """
  equal = all_equal(value, mask, axis)
  size = jnp.max(
    jnp.abs(value), axis=axis, keepdims=True, where=mask, initial=0
  )
  exponent = _exponent(size)
  value = jnp.ldexp(value, -exponent)
  # The largest is subtracted before the mean is taken, so that a difference is
  # rounded by its own size. Minus infinity for an empty mask, which is dropped.
  largest = jnp.max(
    value, axis=axis, keepdims=True, where=mask, initial=-jnp.inf
  )
  offset = jnp.where(mask, value - largest, 0)
  number = jnp.sum(mask, axis=axis, keepdims=True, dtype=value.dtype)
  mean = safe_divide(jnp.sum(offset, axis=axis, keepdims=True), number)
  return jnp.where(mask & ~equal, offset - mean, 0), exponent


def _exponent(size: Array) -> Array:
  """The exponent of a power of two near a size; its inverse exists too."""
  return jnp.clip(jnp.frexp(size)[1], -126, 126)


def deviation_of(value: Array, mask: Array, deviation: str, axis=None) -> Array:
  """Standard deviation of what `centered` returned, with its axes kept.

  Args:
    value: Centered; 0 where not `mask`.
    mask: bool, which values count.
    deviation: `'population'` divides by n, `'sample'` by n - 1.
    axis: Of the sum; None for all.

  Returns:
    The deviation; 0 where too few values count.
  """
  number = jnp.sum(mask, axis=axis, keepdims=True, dtype=value.dtype)
  # Divided by a power of two, which rounds nothing: squares of values of 1e-20
  # or 1e20 would be 0 or infinite.
  largest = jnp.max(jnp.abs(value), axis=axis, keepdims=True)
  exponent = _exponent(largest)
  scaled = jnp.ldexp(value, -exponent)
  square = jnp.sum(jnp.square(scaled), axis=axis, keepdims=True)
  # n - 1 is 0 for a single value and -1 for none; the squares are 0 then.
  spread = jnp.sqrt(safe_divide(square, number - (deviation == 'sample')))
  return jnp.ldexp(spread, exponent)


def with_epsilon(
  spread: Array, epsilon: Array | float, under_root: bool
) -> Array:
  """`spread + epsilon`, or `sqrt(spread^2 + epsilon)` if `under_root`."""
  # Not by way of the square, which is 0 for a spread of 1e-30 in float32.
  return jnp.hypot(spread, epsilon**0.5) if under_root else spread + epsilon


def normalized(
  value: Array,
  mask: Array,
  deviation: str,
  epsilon: Array | float,
  axis=None,
  under_root: bool = False,
) -> Array:
  """The z-score of each value where `mask`; exactly 0 for equal values.

  Which values count as equal says `all_equal`, and where `epsilon` is added
  says `with_epsilon`.
  """
  offset, exponent = _centered(value, mask, axis)
  spread = deviation_of(offset, mask, deviation, axis)
  unit = jnp.ldexp(jnp.ones_like(spread), -exponent)
  epsilon = epsilon * unit * (unit if under_root else 1)
  return safe_divide(offset, with_epsilon(spread, epsilon, under_root))


def all_equal(value: Array, mask: Array, axis=None) -> Array:
  """Whether the values differ by no more than rounding, bool, axes kept.

  Values that are computed (a weighted sum of rewards, shares of an entropy) may
  be equal on paper only. So values count as equal if the largest and the
  smallest differ by at most 8 eps times the largest size among them, which is
  9.5e-7 of it in float32. No value at all counts as equal too.
  """
  reduced: dict[str, Any] = dict(axis=axis, keepdims=True, where=mask)
  high = jnp.max(value, **reduced, initial=-jnp.inf)
  low = jnp.min(value, **reduced, initial=jnp.inf)
  size = jnp.max(jnp.abs(value), **reduced, initial=0)
  return high - low <= 8 * jnp.finfo(value.dtype).eps * size


def centered_reward(batch: Batch) -> Array:
  """Reward minus its group's mean, f32[P,G]; exactly 0 if all are equal."""
  return centered(batch.reward, batch.valid, axis=1)


def uniform_groups(batch: Batch) -> Array:
  """Groups whose valid rewards are all equal, or that have no valid completion.

  Args:
    batch: See `Batch`.

  Returns:
    bool[P]; what counts as equal is what a z-score makes 0, see `all_equal`.
  """
  return all_equal(at_least_float32(batch.reward), batch.valid, axis=1)[:, 0]


def length(batch: Batch) -> Array:
  """f32[P,G]: tokens that the policy chose, end token included."""
  return count(batch.mask, axis=-1)


def sequence_mean(value: Array, batch: Batch) -> Array:
  """Mean over each completion's `mask`, f32[P,G]; pooled ratios use this."""
  return masked_mean(value, batch.mask, axis=-1)


def _saturate(log_value: Array) -> Array:
  """`min(x, MAX_LOG_RATIO)` in value, `x` in slope."""
  # The slope is that of `log_value`: no gradient flows through the excess.
  excess = jnp.maximum(log_value - MAX_LOG_RATIO, 0)
  return log_value - lax.stop_gradient(excess)


def saturating_exp(log_value: Array) -> Array:
  """`exp(min(x, 20))`, but its derivative is its value everywhere.

  A hard clamp has gradient 0 exactly where the policy has moved furthest, and
  an exp without a clamp overflows float32 at 88.

  >>> float(jax.grad(saturating_exp)(100.0)) == float(jnp.exp(20.0))
  True
  """
  return jnp.exp(_saturate(log_value))


def saturating_expm1(log_value: Array) -> Array:
  """`saturating_exp(x) - 1` without cancellation at small x."""
  return jnp.expm1(_saturate(log_value))


def rank_descending(value: Array) -> Array:
  """The rank of each entry among all of them, i32; 0 is the largest.

  Ties go to the earlier entry. Under a mesh with Explicit axes a sharded axis
  cannot be sorted, so the array (a few MB at most) is gathered for the sort.
  """
  sharding = jax.typeof(value).sharding
  explicit = AxisType.Explicit in sharding.mesh.axis_types
  flat = reshard(value, PartitionSpec()) if explicit else value
  # Stable, so that ties and with them the gradient do not depend on the device.
  order = jnp.argsort(-flat.ravel(), stable=True)
  # Sorting the order of the entries gives the place of each.
  rank = jnp.argsort(order, stable=True).reshape(value.shape)
  return reshard(rank, sharding) if explicit else rank


def kth_largest(value: Array, mask: Array, k: Array) -> Array:
  """The k-th largest of the values where `mask`, f[]; inf if it is empty."""
  # By rank, because `lax.top_k` needs a static k and this k counts tokens.
  rank = rank_descending(jnp.where(mask, value, -jnp.inf))
  chosen = mask & (rank < k)
  return jnp.min(value, where=chosen, initial=jnp.inf)


def share_of(share: Array | float, mask: Array) -> Array:
  """`max(1, floor(share * N))` of the N entries of `mask`, f32[]."""
  return jnp.maximum(1, jnp.floor(share * count(mask)))


def covariance(terms: SurrogateTerms, batch: Batch) -> Array:
  """`(A - mean A)(logp - mean logp)` of kept tokens, no gradient; f32[P,G,T].

  Cui et al., `The Entropy Mechanism of Reinforcement Learning
  <https://arxiv.org/abs/2505.22617>`_, 2025.
  """
  assert batch.advantage is not None  # `credit` has set it
  logp, kept = lax.stop_gradient(terms.logp), batch.keep
  advantage = batch.advantage - masked_mean(batch.advantage, kept)
  return advantage * (logp - masked_mean(logp, kept))


def old_logp(terms: SurrogateTerms, batch: Batch) -> Array:
  """Log-probability before the update, nats, f32[P,G,T].

  If the batch has none, this is the current log-probability without its
  gradient.
  """
  if batch.logp_old is None:
    return lax.stop_gradient(terms.logp)
  return batch.logp_old


def importance_ratio(terms: SurrogateTerms) -> tuple[Array, dict[str, Array]]:
  """The policy ratio, f32[P,G,T], and its metrics.

  The metrics are the value of the ratio, and `saturated`: the tokens whose
  log-ratio lies above the bound of `saturating_exp`.
  """
  saturated = terms.log_ratio > MAX_LOG_RATIO
  ratio = saturating_exp(terms.log_ratio)
  return ratio, {'saturated': saturated, 'ratio': lax.stop_gradient(ratio)}


def clip_metrics(above: Array, below: Array, advantage: Array):
  """Where the ratio lies outside its range, by side and sign of the advantage.

  `clipped_*` marks tokens without a gradient. `outside_*` marks tokens that are
  out of the range on the side from which the objective still pulls them back.
  All are bool[P,G,T].
  """
  return {
    'clipped_high': above & (advantage > 0),
    'clipped_low': below & (advantage < 0),
    'outside_high': above & (advantage < 0),
    'outside_low': below & (advantage > 0),
  }
