"""The coasting law: how far Adam still moves a parameter without a gradient.

A clipped token has no gradient any more, but Adam's first moment still holds
its former gradients and moves the parameters on. The size of the step after n
such updates, relative to the last step with a gradient, has a closed form. It
depends on the betas, the number of earlier steps and epsilon relative to the
second moment, and otherwise not on the gradients (Fontana et al., `On the
Hidden Objective Biases of Group-based Reinforcement Learning
<https://arxiv.org/abs/2601.05002>`_, 2026, equations 36 and 38).
"""

import math
import warnings

import numpy as np
import numpy.typing as npt

from grpo_jax.optim import _numbers

_CHUNK_STEPS = 1 << 13  # terms added at once: their arrays stay in cache


def coasting_ratio(
  clipped_steps: npt.ArrayLike,
  b1: npt.ArrayLike,
  b2: npt.ArrayLike,
  live_steps: npt.ArrayLike | None = None,
  eps_ratio: npt.ArrayLike = 0.0,
) -> np.ndarray:
  r"""Size of Adam's step after `clipped_steps` steps with zero gradient.

  It is relative to the last step that had a gradient, for the same coordinate:

  .. math::
    C_{T,n} = \frac{b_1^n (1 - b_1^T)}{1 - b_1^{T+n}} \cdot
      \frac{1 + e}{\sqrt{q} + e}, \qquad
    q = \frac{b_2^n (1 - b_2^T)}{1 - b_2^{T+n}}

  for n `clipped_steps` after T `live_steps`, with e the `eps_ratio`. This is
  exact for every history of gradients, because both moments at step T cancel.
  After a long history it lies between :math:`b_1^n` (e large) and
  :math:`\rho^n` (e = 0), with :math:`\rho = b_1/\sqrt{b_2}`.

  The learning rate is taken as constant, and decoupled weight decay is left
  out. All arguments broadcast. The computation is in float64 and in logarithms,
  so that betas next to 1 and long coasts are right to rounding.

  Args:
    clipped_steps: n >= 0, the steps with zero gradient; 0 gives 1.
    b1: Decay of the first moment, in [0, 1).
    b2: Decay of the second moment, in (0, 1).
    live_steps: T >= 1, the steps before them since the moments were zero; None:
      infinitely many.
    eps_ratio: Adam's epsilon over the root of the bias-corrected second moment
      of the coordinate at its last live step, >= 0.

  Returns:
    The ratio, float64 of the broadcast shape (a NumPy scalar for scalars).

  Raises:
    ValueError: An argument outside its range.

  Warns:
    UserWarning: `b2 < b1 ** 2`; see `warn_if_growing`.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
    Learning <https://arxiv.org/abs/2601.05002>`_, 2026, equations 36 and 38 (n
    is their k + 1, T their T - 1).

  >>> coasting_ratio([0, 1, 5], b1=0.9, b2=0.95).round(4)
  array([1.    , 0.9234, 0.6713])
  """
  b1, b2 = _checked_betas(b1, b2)
  steps = np.inf if live_steps is None else live_steps
  n, live, eps = (
    _numbers.reals('coasting_ratio', argument, value)
    for argument, value in (
      ('clipped_steps', clipped_steps),
      ('live_steps', steps),
      ('eps_ratio', eps_ratio),
    )
  )
  if not np.all((n >= 0) & np.isfinite(n)):
    raise ValueError(
      f'coasting_ratio got clipped_steps={clipped_steps}; give a finite number '
      'of steps, 0 or more.'
    )
  _check_history('coasting_ratio', live, eps)
  return _ratio(n, b1, b2, live, eps)


def coasting_steps(
  b1: float,
  b2: float,
  num_steps: int | None = None,
  live_steps: float | None = None,
  eps_ratio: float = 0.0,
) -> float:
  r"""The way that Adam still goes, in units of its last step with a gradient.

  .. math::
    S_{T,N} = \sum_{n=1}^{N} C_{T,n}

  with C from :func:`coasting_ratio`. For infinitely many steps, a long history
  and a small epsilon this is :math:`\rho / (1 - \rho)`, with
  :math:`\rho = b_1/\sqrt{b_2}`: with the usual betas an optimizer still goes as
  far as nine to twelve of its last steps. A log-ratio moves by about S times
  the inner product of its gradient and the last update of the parameters.

  Args:
    b1: Decay of the first moment, in [0, 1).
    b2: Decay of the second moment, in (0, 1).
    num_steps: N >= 0, the steps with zero gradient; None: infinitely many.
    live_steps: T >= 1, the steps before them; None: infinitely many.
    eps_ratio: As for :func:`coasting_ratio`.

  Returns:
    The sum. For infinitely many steps, :math:`\rho \geq 1` and an `eps_ratio`
    of 0 it diverges, and is `math.inf`. Where there is no closed form, terms
    are summed until they no longer matter: this takes about a millisecond for
    the usual betas, and seconds where a beta is within 1e-6 of 1.

  Raises:
    ValueError: An argument outside its range.

  Warns:
    UserWarning: `b2 < b1 ** 2`; see `warn_if_growing`.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
    Learning <https://arxiv.org/abs/2601.05002>`_, 2026, equations 36 and 38
    (the sum is ours).

  >>> round(coasting_steps(0.9, 0.95), 2)
  12.05
  >>> round(coasting_steps(0.9, 0.95, num_steps=8), 2)
  5.68
  """
  _checked_betas(b1, b2)
  end = math.inf if num_steps is None else num_steps
  _numbers.reals('coasting_steps', 'num_steps', end)
  live = math.inf if live_steps is None else live_steps
  if end != math.inf and not (end >= 0 and end == int(end)):
    raise ValueError(
      f'coasting_steps got num_steps={num_steps}; give a whole number of '
      'steps, 0 or more, or None for a coast without end.'
    )
  _check_history('coasting_steps', live, eps_ratio)
  if b1 == 0 or end == 0:
    return 0.0
  if end == math.inf and eps_ratio == 0 and b2 <= b1 * b1:
    return math.inf
  # After a long history without epsilon the series is geometric.
  if live == math.inf and eps_ratio == 0:
    log_rho = math.log(b1) - 0.5 * math.log(b2)
    # rho = 1: all steps are equally long, and the closed form is 0 / 0.
    if log_rho == 0:
      return float(end)
    with np.errstate(over='ignore'):
      # expm1, as rho may be within rounding of 1.
      return float(-np.expm1(end * log_rho) / math.expm1(-log_rho))
  with np.errstate(over='ignore', invalid='ignore'):
    return _summed(b1, b2, end, live, eps_ratio)


def coasting_half_life(b1: float, b2: float) -> float:
  r"""Number of steps until a coasting Adam's step has halved.

  .. math::
    \rho^n = 1/2, \qquad \rho = b_1 / \sqrt{b_2}

  This is the rate after a long history and for a small epsilon.

  Args:
    b1: Decay of the first moment, in [0, 1).
    b2: Decay of the second moment, in (0, 1).

  Returns:
    Steps, not rounded; 0 for `b1 = 0`, `math.inf` for :math:`\rho \geq 1`.

  Raises:
    ValueError: A beta outside its range.

  Warns:
    UserWarning: `b2 < b1 ** 2`; see `warn_if_growing`.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
    Learning <https://arxiv.org/abs/2601.05002>`_, 2026, equation 37.

  >>> round(coasting_half_life(0.9, 0.95), 1)
  8.7
  """
  _checked_betas(b1, b2)
  if b1 == 0:
    return 0.0
  if b2 <= b1 * b1:
    return math.inf
  return math.log(2.0) / (0.5 * math.log(b2) - math.log(b1))


def warn_if_growing(b1: npt.ArrayLike, b2: npt.ArrayLike) -> None:
  r"""Warns if Adam's step grows once the gradient is zero.

  It does for :math:`b_2 < b_1^2`, that is :math:`\rho = b_1/\sqrt{b_2} > 1`.
  The second moment is then forgotten faster than the square of the first, and
  only epsilon ends the growth. The other functions of this file warn by
  themselves.

  Args:
    b1: Decay of the first moment, in [0, 1).
    b2: Decay of the second moment, in (0, 1).

  Raises:
    ValueError: A beta outside its range.

  Warns:
    UserWarning: `b2 < b1 ** 2`.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
    Learning <https://arxiv.org/abs/2601.05002>`_, 2026, equation 37.

  >>> warn_if_growing(0.9, 0.999)
  >>> with warnings.catch_warnings(record=True) as caught:
  ...   warnings.simplefilter('always')
  ...   warn_if_growing(0.9, 0.8)
  >>> 'rho' in str(caught[0].message)
  True
  """
  _checked_betas(b1, b2)


def _checked_betas(b1, b2) -> tuple[np.ndarray, np.ndarray]:
  """The betas in float64; a warning shows the line of the caller's caller."""
  first, second = (
    _numbers.reals('Adam', name, beta)
    for name, beta in (('b1', b1), ('b2', b2))
  )
  if not np.all((first >= 0) & (first < 1)):
    raise ValueError(
      f'Adam got b1={b1}; give the decay of its first moment, in [0, 1).'
    )
  if not np.all((second > 0) & (second < 1)):
    raise ValueError(
      f'Adam got b2={b2}; give the decay of its second moment, in (0, 1).'
    )
  if np.any(second < first * first):
    rho = np.max(first / np.sqrt(second))
    warnings.warn(
      f'Adam with b1={b1} and b2={b2} has rho = b1/sqrt(b2) = {rho:.7g} > 1, '
      'so its update grows after the gradient is gone; give b2 >= b1**2.',
      UserWarning,
      stacklevel=3,
    )
  return first, second


def _check_history(name, live_steps, eps_ratio):
  if not np.all(_numbers.reals(name, 'live_steps', live_steps) >= 1):
    raise ValueError(
      f'{name} got live_steps={live_steps}; give the steps with a gradient, '
      '1 or more, or None for infinitely many.'
    )
  if not np.all(_numbers.reals(name, 'eps_ratio', eps_ratio) >= 0):
    raise ValueError(
      f'{name} got eps_ratio={eps_ratio}; give epsilon over the root of the '
      'second moment, 0 or more.'
    )


def _ratio(n, b1, b2, live, eps):
  """Equations 36 and 38; n, live and eps are checked, arrays or floats."""
  with np.errstate(divide='ignore', invalid='ignore', over='ignore'):
    first = _log_decay(n, live, np.log(b1))
    root = 0.5 * _log_decay(n, live, np.log(b2))
    # log((1 + e) / (sqrt(q) + e)), without an overflow for a large e.
    slack = np.log1p(eps) - np.logaddexp(root, np.log(eps))
    # For e infinite the slack is infinity minus infinity; its limit is 0.
    return np.exp(first + np.where(np.isinf(eps), 0.0, slack))


def _log_decay(n, live, log_b):
  """The log of b**n (1 - b**live) / (1 - b**(live + n))."""
  # expm1, as 1 - b**live loses its digits where b is next to 1.
  start = np.log(-np.expm1(live * log_b))
  power = np.where(n == 0, 0.0, n * log_b)  # 0**0 is 1
  return power + start - np.log(-np.expm1((live + n) * log_b))


def _summed(b1, b2, end, live, eps) -> float:
  """Adds terms until `end`, or until what is left is below rounding."""
  total, done = 0.0, 0
  while done < end:
    count = int(min(_CHUNK_STEPS, end - done))
    terms = _ratio(done + np.arange(1.0, count + 1), b1, b2, live, eps)
    total += float(terms.sum())
    done += count
    if count > 1:
      # If the terms that follow fall geometrically, they add up to term**2 /
      # fall; stop when that is below rounding. A sum that has overflowed ends
      # here too: its fall is not a number.
      fall = terms[-2] - terms[-1]
      if not terms[-1] ** 2 > 1e-17 * total * fall:
        break
  return total
