"""The coefficient of a completion's tokens against their ratio."""

from typing import NamedTuple

import numpy as np

from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _stack

FINEST, _MIDDLE, WIDEST = 1e-5, 0.05, 6.0  # of the log-ratio


def grid(number: int, probability: float) -> np.ndarray:
  """Log-ratios on both sides of 0, denser towards it.

  Args:
    number: Of points, even.
    probability: Of the old tokens; the policy's stays below 1.

  Returns:
    f64[number], ascending, without 0, where objectives may have kinks.
  """
  half = number // 2
  fine = half * 2 // 5
  top = min(WIDEST, -0.999 * np.log(probability))

  def side(end):
    near = np.geomspace(FINEST, _MIDDLE, fine, endpoint=False)
    return np.concatenate([near, np.geomspace(_MIDDLE, end, half - fine)])

  return np.concatenate([-side(WIDEST)[::-1], side(top)])


class Setting(NamedTuple):
  """Which completion is moved, and with whom."""

  tokens: int  # its length
  probability: float  # of its tokens under the old policy
  size: float = 1.0  # factor of all advantages; -1: against the rewards
  everyone: bool = False  # all completions are moved to its ratio, not it alone


class Curve:
  """The coefficient of one method in one setting, on a grid and on demand."""

  def __init__(self, method, fields, setting: Setting):
    self._given = method, fields
    self.setting = setting
    self.log_ratio = grid(_stack.ROWS // 2, setting.probability)
    sign = np.repeat([1.0, -1.0], len(self.log_ratio))
    on_grid = self(sign, np.tile(self.log_ratio, 2))
    self.values = on_grid.reshape(2, -1)  # for A = +1 and A = -1

  def __call__(self, sign, log_ratio):
    return coefficient(
      *self._given, sign, log_ratio, [self.setting] * len(sign)
    )


def coefficient(method, fields, sign, log_ratio, settings):
  """The coefficient per unit of weight; 0 where there is no weight.

  Args:
    method: A chain.
    fields: A user's generator of fields.
    sign: f64[N], of the moved completion's advantage; N <= ROWS.
    log_ratio: f64[N], of its tokens.
    settings: N `Setting`s.

  Returns:
    f64[N].
  """
  used = len(sign)
  sign, log_ratio = _stack.fill(sign), _stack.fill(log_ratio)
  tokens, probability, size, everyone = np.array(settings).T
  shape = (_stack.ROWS, *_stack.SHAPE)
  random = np.random.default_rng(4)
  length = random.integers(1, shape[-1] + 1, shape[1:-1])
  length = np.broadcast_to(length, shape[:-1]).copy()
  logp_old = -random.uniform(1, 3, shape[1:])
  logp_old = np.broadcast_to(logp_old, shape).copy()
  length[:used, 0, 0] = tokens
  at_row = (slice(None), None, None, None)
  far = np.zeros(shape, bool)  # which tokens are moved
  far[:, 0, 0] = True
  far |= (_stack.fill(everyone) != 0)[at_row]
  logp_old = np.where(far, np.log(_stack.fill(probability))[at_row], logp_old)
  moved = np.where(far, log_ratio[at_row], 0.0)
  reward, advantage = _stack.push(sign)
  advantage = advantage * _stack.fill(size)[at_row]
  probe = _probe.make(reward, length, logp_old, log_ratio=moved, fields=fields)
  reading = _probe.read(method, probe, advantage)
  own = reading.objective[:used, 0, 0].sum(-1)
  weight = reading.weight[:used, 0, 0].sum(-1)
  return np.divide(own, weight, out=np.zeros_like(own), where=weight != 0)
