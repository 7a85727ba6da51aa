r"""Where a method's gradient stops: the coefficient against the token's ratio.

A clip sets the gradient of a token to exactly 0, but Adam's momentum keeps
moving the parameters in the last direction, so the ratio coasts beyond the
bound (section 4 of Fontana et al., `On the Hidden Objective Biases of
Group-based Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026).
A method whose coefficient only fades has no such place.
"""

from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _curve
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _stack

_RARE, _LIKELY = float(np.exp(-7)), 0.3  # old probabilities of the tokens
_TOKENS, _OTHER_TOKENS = 4, 16  # lengths of the completion that is moved
_ROUNDS, _RELATIVE = 12, 1e-8
_FADED = 1e-9
_POINT = 1e-6  # width in log-ratio below which zeros are no interval

Interval = tuple[int, float, float]
"""(sign of A, low, high): token ratios; low 0 or high inf where it has no end
inside the measured range."""


class Clipping(NamedTuple):
  """How the coefficient of a token depends on its ratio.

  Arrays are f64[N]. The coefficients are d sum(w f) / d log pi, summed over the
  completion's tokens and divided by the sum of their weights, for an advantage
  of +1 and of -1.
  """

  ratio: np.ndarray
  positive: np.ndarray
  negative: np.ndarray
  zeros: tuple[Interval, ...]  # exactly 0 there
  faded: tuple[Interval, ...]  # 0 in float64 only because it got too small
  coasts: bool  # a zero has an end, so momentum goes on beyond it
  tokens: int  # length of the completion that was moved
  depends_on_length: bool  # the zeros do
  old_probability: float  # of the tokens that were moved
  depends_on_probability: bool  # the zeros do
  depends_on_size: bool  # the zeros do, on |A|
  depends_on_others: bool  # the zeros do, on other completions' ratios
  text: str


def clipping(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Clipping:
  """Measures where the gradient of the objective is exactly 0.

  All tokens of one completion, whose advantage is set to +1 or -1, are moved to
  the same ratio, from e^-6 to e^6, while all others stay at ratio 1; all are
  moved if that makes a difference. Ends are then bisected to a relative 1e-8 of
  the log-ratio. An interval that lies between two points of the grid (the array
  `ratio`) is missed.

  A gate may also be 0 because float64 has no smaller number or because
  `1 - sigmoid` rounds to 0. That is no clip, and is told by its approach: a
  thousandth of the log-ratio before the end, the coefficient must still be
  above 1e-9 of the live one nearest to ratio 1.

  Args:
    method: A chain. Each batch meets it in the state of `init`.
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    A `Clipping`. The old tokens are improbable (e^-7), so that every ratio can
    be had; if their probability matters, they have 0.3 and the ratios end at
    1 / 0.3.

  >>> clipping(losses.methods.grpo()).text
  'zero above 1.2 for A > 0 and below 0.8 for A < 0'
  >>> clipping(losses.methods.rloo()).text
  'never zero'
  """
  setting = _curve.Setting(_TOKENS, _RARE)
  curve = _curve.Curve(method, fields, setting)
  intervals = _intervals(curve)
  matters = _what_matters(method, fields, setting, intervals)
  if matters.probability or matters.others:
    setting = setting._replace(
      probability=_LIKELY if matters.probability else _RARE,
      everyone=matters.others,
    )
    curve = _curve.Curve(method, fields, setting)
    intervals = _intervals(curve)
  if not matters.advantage:
    intervals = []
  clips = tuple(i for i, hard in intervals if hard)
  faded = tuple(i for i, hard in intervals if not hard)
  return Clipping(
    ratio=np.exp(curve.log_ratio),
    positive=curve.values[0],
    negative=curve.values[1],
    zeros=clips,
    faded=faded,
    coasts=any(low > 0 or high < np.inf for _, low, high in clips),
    tokens=_TOKENS,
    depends_on_length=matters.length,
    old_probability=setting.probability,
    depends_on_probability=matters.probability,
    depends_on_size=matters.size,
    depends_on_others=matters.others,
    text=_text(clips, faded, matters),
  )


class _End(NamedTuple):
  """An end of a run of zeros, between two log-ratios."""

  sign: float
  live: float
  zero: float


def _intervals(curve: _curve.Curve) -> list[tuple[Interval, bool]]:
  """The intervals of zeros, each with whether it is a clip."""
  runs = []  # (sign, index of the first zero, index after the last)
  for sign, values in zip((1, -1), curve.values, strict=True):
    edge = np.diff(np.concatenate([[0], values == 0, [0]]))
    starts, stops = np.flatnonzero(edge == 1), np.flatnonzero(edge == -1)
    runs += [(sign, int(a), int(b)) for a, b in zip(starts, stops)]
  at = curve.log_ratio.tolist()
  ends = []
  for sign, start, stop in runs:
    if start > 0:
      ends.append(_End(sign, at[start - 1], at[start]))
    if stop < len(at):
      ends.append(_End(sign, at[stop], at[stop - 1]))
  ends = _bisect(curve, ends)
  hard = iter(zip(ends, _are_hard(curve, ends), strict=True))
  found = []
  for sign, start, stop in runs:
    low, first = next(hard) if start > 0 else (None, False)
    high, second = next(hard) if stop < len(at) else (None, False)
    if (high.zero if high else at[-1]) - (low.zero if low else at[0]) < _POINT:
      continue  # the coefficient changes its sign there
    interval = (
      sign,
      float(np.exp((low.live + low.zero) / 2)) if low else 0.0,
      float(np.exp((high.live + high.zero) / 2)) if high else float('inf'),
    )
    found.append((interval, first or second or not (low or high)))
  return found


def _bisect(curve: _curve.Curve, ends: list[_End]) -> list[_End]:
  """Narrows all brackets at once, each by some hundred points per round."""
  for _ in range(_ROUNDS):
    close = [_RELATIVE * max(abs(e.zero), _curve.FINEST) for e in ends]
    if all(abs(e.live - e.zero) <= x for e, x in zip(ends, close)):
      return ends
    points = _stack.ROWS // len(ends)
    sign = np.repeat([e.sign for e in ends], points)
    inside = np.linspace(0, 1, points + 2)
    path = np.array([e.live + inside * (e.zero - e.live) for e in ends])
    zero = curve(sign, path[:, 1:-1].ravel()).reshape(len(ends), -1) == 0
    first = np.where(zero.any(1), zero.argmax(1), points) + 1
    ends = [
      _End(e.sign, row[i - 1], row[i])
      for e, row, i in zip(ends, path, first, strict=True)
    ]
  return ends


def _are_hard(curve: _curve.Curve, ends: list[_End]) -> list[bool]:
  """Whether the coefficient is alive right before each end; see `clipping`."""
  if not ends:
    return []
  sign, live, zero = np.array(ends).T
  before = live + 1e-3 * np.sign(live - zero) * np.abs(live)
  value = np.abs(curve(sign, before))
  scale = {}
  for own, values in zip((1, -1), curve.values, strict=True):
    alive = np.flatnonzero(values)
    if alive.size:
      nearest = alive[np.abs(curve.log_ratio[alive]).argmin()]
      scale[own] = abs(values[nearest])
  return [v > _FADED * scale[e.sign] for v, e in zip(value, ends, strict=True)]


class _Matters(NamedTuple):
  """What moves the zeros."""

  length: bool
  probability: bool
  size: bool  # of the advantages
  others: bool  # whether the other completions are moved too
  coupled: bool  # whether these change the gradient, though no zero
  advantage: bool  # its sign acts at all; True if there is no gradient


def _what_matters(method, fields, setting, intervals) -> _Matters:
  """Compares the zeros with those of other settings.

  On a coarse grid and a thousandth on either side of every end.
  """
  ends = {
    np.log(end)
    for interval, _ in intervals
    for end in interval[1:]
    if 0 < end < np.inf
  }
  near = [x * f for x in sorted(ends, key=abs)[:4] for f in (0.999, 1.001)]
  coarse = _curve.grid(_stack.ROWS // 8 - len(near), _LIKELY)
  points = np.concatenate([near, coarse])

  def values(*changes):  # [setting,sign,point]
    settings = [setting._replace(**change) for change in changes]
    each = 2 * len(points)
    value = _curve.coefficient(
      method,
      fields,
      np.tile(np.repeat([1.0, -1.0], len(points)), len(settings)),
      np.tile(points, 2 * len(settings)),
      [s for s in settings for _ in range(each)],
    )
    return value.reshape(len(settings), 2, -1)

  base, long, likely = values(
    {}, {'tokens': _OTHER_TOKENS}, {'probability': _LIKELY}
  )
  small, large, against, all_moved = values(
    {'size': 0.5}, {'size': 2.0}, {'size': -1.0}, {'everyone': True}
  )
  possible = points < -np.log(_LIKELY)

  def differ(other, where=slice(None)):
    return bool(np.any((other == 0)[:, where] != (base == 0)[:, where]))

  return _Matters(
    length=differ(long),
    probability=differ(likely, possible),
    size=differ(small) or differ(large),
    others=differ(all_moved),
    coupled=not np.allclose(all_moved, base, rtol=1e-6, atol=0),
    advantage=not base.any() or not np.array_equal(base, against),
  )


def _round(ratio: float) -> str:
  """A ratio whose distance from 1 has four significant digits."""
  distance = float(f'{ratio - 1:.4g}')
  return f'{1 + distance:.10g}'


def _sides(intervals, sign: int) -> str:
  """Where the coefficient is 0 for one sign of the advantage."""
  parts = []
  for own, low, high in intervals:
    if own != sign:
      continue
    if low == 0 and high == np.inf:
      parts.append('at every ratio')
    elif low == 0:
      parts.append(f'below {_round(high)}')
    elif high == np.inf:
      parts.append(f'above {_round(low)}')
    else:
      parts.append(f'from {_round(low)} to {_round(high)}')
  return ' and '.join(parts)


def _where(intervals) -> str:
  """The intervals in words, by sign of the advantage."""
  sides = {'A > 0': _sides(intervals, 1), 'A < 0': _sides(intervals, -1)}
  if sides['A > 0'] == sides['A < 0']:
    return f'{sides["A > 0"]} for either sign of A'
  parts = [f'{text} for {sign}' for sign, text in sides.items() if text]
  joint = ', ' if any(' and ' in text for text in sides.values()) else ' and '
  return joint.join(parts)


def _text(clips, faded, matters: _Matters) -> str:
  """One sentence."""
  if not matters.advantage:
    return 'not measured: the gradient does not depend on A'
  text = f'zero {_where(clips)}' if clips else 'never zero'
  if faded:
    text = f'zero {_where(clips)}' if clips else 'never cut off'
    text += f'; fades until float64 has nothing left {_where(faded)}'
  notes = []
  if matters.length:
    notes.append(f'for a completion of {_TOKENS} tokens')
  if matters.probability:
    notes.append(f'for tokens of old probability {_LIKELY:g}')
  if matters.size:
    notes.append('for |A| = 1')
  if matters.others:
    notes.append('for all completions at that ratio')
  elif matters.coupled:
    notes.append('with the other completions at ratio 1, which matters')
  return text + (f' ({", ".join(notes)})' if notes else '')
