"""Where a method's gradient stops: the coefficient against the token's ratio.

A clip sets the gradient of a token to exactly 0, but Adam's momentum keeps
moving the parameters in the last direction, so the ratio coasts beyond the
bound (Fontana et al., arXiv 2601.05002, section 4).
"""

from collections.abc import Sequence
import os
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe

_RARE, _LIKELY = float(np.exp(-7)), 0.3  # old probabilities of the tokens
_TOKENS, _OTHER_TOKENS = 4, 16  # lengths of the completion that is moved
_FINEST, _MIDDLE, _WIDEST = 1e-5, 0.05, 6.0  # of the log-ratio
_ROUNDS, _RELATIVE = 12, 1e-8  # of the bisection: the most, width at its end
_FADED = 1e-9  # of a live coefficient; what gets smaller than this has faded
_POINT = 1e-6  # width in log-ratio below which zeros are no interval

Interval = tuple[int, float, float]
"""(sign of A, low, high): token ratios; low 0 or high inf where it has no end
inside the measured range."""


class Clipping(NamedTuple):
  """How the coefficient of a token depends on its ratio.

  A coefficient is d sum(w f) / d log pi, summed over the completion's tokens
  and divided by the sum of their weights.
  """

  ratio: np.ndarray  # f64[N]
  positive: np.ndarray  # f64[N], coefficients for an advantage of +1
  negative: np.ndarray  # f64[N], for -1
  zeros: tuple[Interval, ...]  # exactly 0 there
  faded: tuple[Interval, ...]  # 0 in float64 only because it got too small
  coasts: bool  # a zero has an end, so momentum goes on beyond it
  tokens: int  # length of the completion that was moved
  depends_on_length: bool  # the zeros do
  old_probability: float  # of the tokens that were moved
  depends_on_probability: bool  # the zeros do
  depends_on_size: bool  # the zeros do, on |A|
  depends_on_others: bool  # the zeros do, on other completions' ratios
  conditions: tuple[str, ...]  # for which the zeros hold, in words
  text: str


def clipping(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Clipping:
  """Measures where the gradient of the objective is exactly 0.

  All tokens of one completion, whose advantage is set to +1 or -1, are moved to
  the same ratio, from e^-6 to e^6. The others stay at ratio 1, unless moving
  them makes a difference. The arguments are those of `audit`.

  >>> clipping(losses.methods.grpo()).text
  'zero above 1.2 for A > 0 and below 0.8 for A < 0'
  >>> clipping(losses.methods.rloo()).text
  'never zero'
  """
  curve = _Curve(_probe.Subject(method, fields), _Setting())
  intervals = _intervals(curve)
  matters = _what_matters(curve, intervals)
  if matters['probability'] or matters['others']:
    probability = _LIKELY if matters['probability'] else _RARE
    setting = _Setting(probability=probability, everyone=matters['others'])
    curve = _Curve(curve.subject, setting)
    intervals = _intervals(curve)
  # If the coefficients do not depend on the sign of A, their zeros are no clip.
  if not matters['advantage']:
    intervals = []
  clips = tuple(interval for interval, hard in intervals if hard)
  faded = tuple(interval for interval, hard in intervals if not hard)
  conditions = _conditions(matters)
  return Clipping(
    np.exp(curve.log_ratio),
    *curve.values,
    zeros=clips,
    faded=faded,
    coasts=any(low > 0 or high < np.inf for _, low, high in clips),
    tokens=_TOKENS,
    depends_on_length=matters['length'],
    old_probability=curve.setting.probability,
    depends_on_probability=matters['probability'],
    depends_on_size=matters['size'],
    depends_on_others=matters['others'],
    conditions=conditions,
    text=_text(clips, faded, matters['advantage'], conditions),
  )


class _Setting(NamedTuple):
  """Which completion is moved to another ratio, and on which batches."""

  tokens: int = _TOKENS  # its length
  probability: float = _RARE  # of its tokens under the old policy
  size: float = 1.0  # factor of all advantages; -1: against the rewards
  everyone: bool = False  # whether all completions are moved to its ratio


class _Curve:
  """The coefficient of one method in one setting, on a grid and on demand."""

  def __init__(self, subject: _probe.Subject, setting: _Setting):
    self.subject, self.setting = subject, setting
    self.log_ratio = _grid(_probe.ROWS // 2, setting.probability)
    sign = np.repeat([1.0, -1.0], len(self.log_ratio))
    on_grid = self(sign, np.tile(self.log_ratio, 2))
    self.values = on_grid.reshape(2, -1)  # for A = +1 and A = -1

  def __call__(
    self,
    sign: np.ndarray,  # f64[N], of the moved completion's advantage
    log_ratio: np.ndarray,  # f64[N], of its tokens
    settings: Sequence[_Setting] = (),  # N; the curve's own if not given
  ) -> np.ndarray:
    """The coefficient per unit of weight, f64[N]; 0 without a weight."""
    shape = (len(sign), *_probe.SHAPE)
    random = np.random.default_rng(4)
    length = random.integers(1, shape[-1] + 1, shape[1:-1])
    length = np.tile(length, (len(sign), 1, 1))
    old = -random.uniform(1, 3, shape[1:])
    tokens, *columns = np.array(settings or [self.setting]).T
    probability, size, everyone = (x[:, None, None, None] for x in columns)
    length[:, 0, 0] = tokens
    far = np.zeros(shape, bool)  # which tokens are moved
    far[:, 0, 0] = True
    far |= everyone != 0
    old = np.where(far, np.log(probability), old)
    moved = np.where(far, log_ratio[:, None, None, None], 0.0)
    reward, advantage = _probe.single_out(sign)
    probe = self.subject.probe(
      reward, length, old, log_ratio=moved, advantage=advantage * size
    )
    read = self.subject.read({'moved': probe})['moved']
    totals = [x[:, 0, 0].sum(-1) for x in (read.objective, read.weight)]
    return _fit.divide(*totals)


def _grid(points: int, probability: float) -> np.ndarray:
  """Log-ratios on both sides of 0, at which no probability reaches 1."""
  half = points // 2
  fine = half * 2 // 5
  near = np.geomspace(_FINEST, _MIDDLE, fine, endpoint=False)
  top = min(_WIDEST, -0.999 * np.log(probability))
  below, above = (
    np.concatenate([near, np.geomspace(_MIDDLE, end, half - fine)])
    for end in (_WIDEST, top)
  )
  return np.concatenate([-below[::-1], above])


def _intervals(curve: _Curve) -> list[tuple[Interval, bool]]:
  """The intervals of zeros, each with whether it is a clip."""
  at, last = curve.log_ratio, len(curve.log_ratio) - 1
  edge = np.diff(curve.values == 0, axis=1, prepend=False, append=False)
  which, index = np.nonzero(edge)  # of each run its first zero and what follows
  sign = np.where(which[::2] == 0, 1, -1)  # of A, for each run
  zero = np.stack([index[::2], index[1::2] - 1])  # both ends of each run
  live = zero + [[-1], [1]]
  inside = (live >= 0) & (live <= last)
  # `%` keeps every index inside the grid. An end outside becomes 0 or infinity
  # below.
  hard, live, zero = np.zeros(zero.shape, bool), at[live % len(at)], at[zero]
  if inside.any():
    ends = live[inside], zero[inside]
    end_sign = np.broadcast_to(sign, zero.shape)[inside]
    live[inside], zero[inside], hard[inside] = _bisect(curve, end_sign, *ends)
  ratio = np.where(inside, np.exp((live + zero) / 2), [[0.0], [np.inf]])
  clips = np.any(hard, axis=0) | ~np.any(inside, axis=0)
  # Narrower zeros are a point at which the coefficient changes its sign.
  wide = zero[1] - zero[0] >= _POINT
  return [
    ((int(sign[k]), *ratio[:, k].tolist()), bool(clips[k]))
    for k in np.flatnonzero(wide)
  ]


def _bisect(curve: _Curve, sign, live, zero) -> tuple:
  """Narrows all ends at once, and says which of them are those of a clip.

  Args:
    curve: The coefficient.
    sign: f64[N], of the advantage, for each end.
    live: f64[N], log-ratio next to the end where the coefficient is not 0.
    zero: f64[N], log-ratio next to the end where it is 0.

  Returns:
    `live` and `zero`, closer together, and bool[N].
  """
  ends, points = np.arange(len(sign)), _probe.ROWS // len(sign)
  inside = np.linspace(0, 1, points + 2)
  for _ in range(_ROUNDS):
    close = _RELATIVE * np.maximum(np.abs(zero), _FINEST)
    if np.all(np.abs(live - zero) <= close):
      break
    path = live[:, None] + inside * (zero - live)[:, None]
    value = curve(np.repeat(sign, points), path[:, 1:-1].ravel())
    is_zero = np.ones((len(ends), points + 1), bool)  # the last is `zero`
    is_zero[:, :-1] = value.reshape(len(ends), -1) == 0
    first = is_zero.argmax(1)
    live, zero = path[ends, first], path[ends, first + 1]
  # A coefficient that is 0 because float64 has no smaller number is tiny before
  # the end already. In front of a clip it is not.
  before = live + 1e-3 * np.sign(live - zero) * np.abs(live)
  distance = np.where(curve.values == 0, np.inf, np.abs(curve.log_ratio))
  nearest = [_fit.leading(-far, 1e-9) for far in distance]  # to ratio 1
  alive = np.abs(curve.values[[0, 1], nearest])[np.where(sign > 0, 0, 1)]
  return live, zero, np.abs(curve(sign, before)) > _FADED * alive


def _what_matters(curve: _Curve, intervals) -> dict[str, bool]:
  """What moves the zeros, by name.

  Looked at on a coarse grid, and a thousandth of the log-ratio around the four
  ends nearest to ratio 1.
  `coupled` says whether moving the other completions changes the gradient at
  all, and `advantage` whether the sign of A does (True without a gradient).
  """
  # Six digits: ends that differ by the bisection's error are one.
  ends = {
    float(_fit.number(np.log(end), 6))
    for (_, *ends), _ in intervals
    for end in ends
    if 0 < end < np.inf
  }
  nearest = sorted(ends, key=lambda end: (abs(end), end))[:4]
  near = [end * factor for end in nearest for factor in (0.999, 1.001)]
  coarse = _grid(_probe.ROWS // 8 - len(near), _LIKELY)
  points = np.concatenate([near, coarse])
  changes = {
    'none': {},
    'length': dict(tokens=_OTHER_TOKENS),
    'probability': dict(probability=_LIKELY),
    'half': dict(size=0.5),
    'double': dict(size=2.0),
    'against': dict(size=-1.0),
    'others': dict(everyone=True),
  }
  settings = [curve.setting._replace(**change) for change in changes.values()]
  value = curve(
    np.tile(np.repeat([1.0, -1.0], len(points)), len(settings)),
    np.tile(points, 2 * len(settings)),
    [setting for setting in settings for _ in range(2 * len(points))],
  )
  read = dict(zip(changes, value.reshape(len(settings), 2, -1), strict=True))
  base = read['none']
  moves = {k: (x == 0) != (base == 0) for k, x in read.items()}
  moves['probability'] &= points < -np.log(_LIKELY)  # else above 1
  moves = {name: bool(move.any()) for name, move in moves.items()}
  same = {k: np.allclose(x, base, rtol=1e-6, atol=0) for k, x in read.items()}
  return dict(
    length=moves['length'],
    probability=moves['probability'],
    size=moves['half'] or moves['double'],
    others=moves['others'],
    coupled=not same['others'],
    advantage=not base.any() or not same['against'],
  )


def spans(intervals, words, number) -> tuple[list[str], list[str]]:
  """The intervals for A > 0 and for A < 0, in the words for each kind."""
  everywhere, below, above, between = words
  found = [], []
  for sign, low, high in intervals:
    kind = (between if low else below) if high < np.inf else above
    ends = [number(end) for end in (low, high) if 0 < end < np.inf]
    found[sign < 0].append(kind.format(*ends) if ends else everywhere)
  return found


def _where(intervals) -> str:
  """The intervals in words, by sign of the advantage."""
  words = 'at every ratio', 'below {}', 'above {}', 'from {} to {}'
  # The distance from 1 has four significant digits.
  number = lambda ratio: f'{1 + float(_fit.number(ratio - 1)):.10g}'
  positive, negative = map(' and '.join, spans(intervals, words, number))
  if positive == negative:
    return f'{positive} for either sign of A'
  sides = (positive, 'A > 0'), (negative, 'A < 0')
  joint = ', ' if ' and ' in positive + negative else ' and '
  return joint.join(f'{text} for {sign}' for text, sign in sides if text)


def _conditions(matters: dict[str, bool]) -> tuple[str, ...]:
  """What the zeros depend on, as the conditions that were measured."""
  if not matters['advantage']:  # nothing was measured
    return ()
  alone = matters['coupled'] and not matters['others']
  notes = {
    f'for a completion of {_TOKENS} tokens': matters['length'],
    f'for tokens of old probability {_LIKELY:g}': matters['probability'],
    'for |A| = 1': matters['size'],
    'for all completions at that ratio': matters['others'],
    'with the other completions at ratio 1, which matters': alone,
  }
  return tuple(note for note, holds in notes.items() if holds)


def bracketed(conditions: tuple[str, ...]) -> str:
  """`' (for |A| = 1)'`; nothing without conditions."""
  return f' ({", ".join(conditions)})' if conditions else ''


def _text(clips, faded, measured: bool, conditions: tuple[str, ...]) -> str:
  """The zeros in one sentence, with the conditions for which they hold."""
  if not measured:
    return 'not measured: the gradient does not depend on A'
  text = f'zero {_where(clips)}' if clips else 'never zero'
  if faded:
    text = text if clips else 'never cut off'
    text += f'; fades until float64 has nothing left {_where(faded)}'
  return text + bracketed(conditions)


def plot(clipping: Clipping, title: str, path: str | os.PathLike) -> None:
  """Draws the coefficients, shaded where they are exactly 0.

  Args:
    clipping: What `clipping` returned.
    title: Of the figure.
    path: File to write; its ending says the format (png, svg, pdf).
  """
  from matplotlib.figure import Figure  # no global state, no display

  figure = Figure(figsize=(7, 4), layout='constrained')
  axes = figure.subplots()
  ends = {1: set(), -1: set()}
  for sign, *interval in clipping.zeros:
    ends[sign] |= {end for end in interval if 0 < end < np.inf}
  # Twice as far as the farthest bound, in log-ratio; without a bound, from 1/4
  # to 4.
  distances = [abs(np.log(end)) for end in ends[1] | ends[-1]]
  reach = 2 * max(distances, default=np.log(2))
  low, high = np.exp(-reach), np.exp(reach)
  colors = {1: '#1b6ca8', -1: '#c8442c'}
  for sign, values in ((1, clipping.positive), (-1, clipping.negative)):
    curve = _with_steps(clipping.ratio, values, ends[sign])
    axes.plot(*curve, label=f'A = {sign:+d}', color=colors[sign])
  for sign, start, stop in clipping.zeros:
    half = (0.5, 1) if sign > 0 else (0, 0.5)  # of the height
    span = max(start, low), min(stop, high)
    axes.axvspan(*span, *half, color=colors[sign], alpha=0.12, lw=0)
  axes.axhline(0, color='0.6', lw=0.8)
  axes.axvline(1, color='0.6', lw=0.8, ls=':')
  seen = (clipping.ratio >= low) & (clipping.ratio <= high)
  height = np.abs([clipping.positive[seen], clipping.negative[seen]]).max()
  height = 1.1 * height or 1.0
  axes.set(xlim=(low, high), ylim=(-height, height), title=title)
  axes.set_xlabel('ratio of the token, policy / old policy')
  axes.set_ylabel('coefficient of its score')
  axes.ticklabel_format(useOffset=False)
  axes.legend(title='shaded: exactly 0')
  figure.savefig(path, dpi=150)


def _with_steps(ratio: np.ndarray, values: np.ndarray, ends):
  """The curve with upright steps at the ends of the intervals of zeros."""
  for end in ends:
    after = int(np.searchsorted(ratio, end))
    zero_after = values[min(after, len(values) - 1)] == 0
    # From the live side, along the last two points there.
    near, far = (after - 1, after - 2) if zero_after else (after, after + 1)
    slope = (values[near] - values[far]) / (ratio[near] - ratio[far])
    live = values[near] + slope * (end - ratio[near])
    ratio = np.insert(ratio, after, (end, end))
    step = (live, 0.0) if zero_after else (0.0, live)
    values = np.insert(values, after, step)
  return ratio, values
