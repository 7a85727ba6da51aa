"""The ratio of a method, read off the slopes of its objective."""

from typing import NamedTuple

import numpy as np

from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _stack
from grpo_jax.diagnostics._forms import TOLERANCE
from grpo_jax.diagnostics._forms import number

BATCHES = 16  # of each kind
_STEP = 1e-4  # of a log-ratio: inside the clip ranges, above float32's rounding
_CLOSE = 1e-2  # of slopes; log pi in float32 rounds by half of it over a step

Blocks = dict[str, tuple[_probe.Probe, np.ndarray]]  # and their advantages
Readings = dict[str, _probe.Reading]


class Slope(NamedTuple):
  """Relative change of an objective's coefficient per nat of a log-ratio."""

  own: float  # of the token's own log-ratio
  cross: float  # of another token's of the same completion
  own_times_length: float  # own * L_i: 1 where the mean over tokens counts
  cross_times_length: float
  back: float  # cross, but of the second trained token on the first
  alike: bool  # back and cross are the same


class Ratio(NamedTuple):
  """Which ratio multiplies the advantage."""

  text: str
  positive: Slope | None  # for A > 0; None without a gradient at ratio 1
  negative: Slope | None  # for A < 0
  beyond: float  # slope for a log-ratio of another completion
  follows_logp: bool  # the value changes with log pi at ratio 1


def still_blocks(fields) -> Blocks:
  """Ratio 1 with advantages A and, in 'at 1 2A', 2 A.

  Args:
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    `BATCHES` probes by name, and the advantages to put in.
  """
  return _blocks(fields, {'at 1': (None, ())})


def moved_blocks(fields, order: np.ndarray) -> Blocks:
  """Moves from ratio 1, each with A and, in '... 2A', 2 A.

  Args:
    fields: A user's generator of fields; see `_probe.Fields`.
    order: i64[BATCHES,T], what `trained_first` returned: the first is moved by
      a step in 'small', the second in 'back'; the second and the third far.

  Returns:
    `BATCHES` probes by name, and the advantages to put in.
  """
  first, second, third = order.T[:3]
  return _blocks(
    fields,
    {
      'small': (None, ((first, _STEP),)),
      'back': (None, ((second, _STEP),)),
      'large': (None, ((second, 6.0),)),
      'balanced': (
        None, ((second, np.log(1.9)), (third, np.log(0.1))),
      ),  # mean ratio 1
      'shifted': (0.3, ()),
    },
  )  # fmt: skip


def _blocks(fields, moves) -> Blocks:
  """Blocks by name, from (deviation of log pi_old, (positions, step)...)."""
  random = np.random.default_rng(2)
  shape = (BATCHES, *_stack.SHAPE)
  sign = np.where(np.arange(BATCHES) % 2, -1.0, 1.0)
  reward, advantage = _stack.push(sign)
  length = random.integers(3, shape[-1] + 1, shape[:-1])
  # Improbable tokens: no ratio used here makes a probability exceed 1.
  logp_old = -random.uniform(7, 9, shape)
  blocks = {}
  for name, (deviation, steps) in moves.items():
    log_ratio = np.zeros(shape)
    for position, step in steps:
      log_ratio[np.arange(BATCHES), 0, 0, position] = step
    old = logp_old
    if deviation is not None:
      old = old + deviation * random.normal(size=shape)
    probe = _probe.make(reward, length, old, log_ratio=log_ratio, fields=fields)
    blocks[name] = probe, advantage
    blocks[f'{name} 2A'] = probe, 2 * advantage
  return blocks


def _scaling(cut: Readings, name: str, of: str) -> np.ndarray:
  """`f(2 A) - f(A)`, which lacks what does not depend on A."""
  return getattr(cut[f'{name} 2A'], of) - getattr(cut[name], of)


def trained_first(cut: Readings, probe: _probe.Probe) -> np.ndarray:
  """Positions of the first completions, those with a coefficient first.

  Args:
    cut: What was read of `still_blocks`.
    probe: The one of ratio 1.

  Returns:
    i64[BATCHES,T]; the last ones are outside the mask.
  """
  trained = _scaling(cut, 'at 1', 'objective')[:, 0, 0] != 0
  mask = np.asarray(probe.batch.mask)[:, 0, 0]
  rank = np.where(trained, 0, np.where(mask, 1, 2))
  return np.argsort(rank, axis=-1, kind='stable')


def ratio(cut: Readings, probe: _probe.Probe, order: np.ndarray) -> Ratio:
  r"""Compares the slopes with those of the known ratios.

  With :math:`c_t` the coefficient of token t inside every clip range,
  :math:`\partial \log c_t / \partial l_u` is 1 at u = t and 0 elsewhere for a
  token ratio, :math:`1 / L` everywhere for the geometric mean over the
  completion, 1 everywhere for the product and 0 for log pi. The arithmetic mean
  has a token ratio's slopes; what tells it apart is that one far token closes
  the clip of all, and that a pair of tokens whose mean ratio is 1 does not.

  `f(2 A) - f(A)` stands for `f`: it lacks what does not depend on A.

  Args:
    cut: What was read of `still_blocks` and `moved_blocks`.
    probe: The one of ratio 1.
    order: What `trained_first` returned.

  Returns:
    A `Ratio`.
  """

  base = _scaling(cut, 'at 1', 'objective')
  change = {
    name: _scaling(cut, name, 'objective') - base
    for name in ('small', 'back', 'large', 'balanced')
  }
  at_1 = np.take_along_axis(base[:, 0, 0], order, -1)  # trained first
  moved = {
    name: np.take_along_axis(x[:, 0, 0], order, -1)
    for name, x in change.items()
  }
  length = np.asarray(probe.batch.mask)[:, 0, 0].sum(-1)[:, None]
  signs = slice(0, None, 2), slice(1, None, 2)
  positive, negative = (
    _slope({k: x[rows] for k, x in moved.items()}, at_1[rows], length[rows])
    for rows in signs
  )
  rest = np.ones(base.shape, bool)
  rest[:, 0, 0] = False
  beyond = _median_share(change['small'][rest] / _STEP, base[rest])
  value = np.abs(
    _scaling(cut, 'shifted', 'loss') - _scaling(cut, 'at 1', 'loss')
  )
  follows = np.median(value) > TOLERANCE * np.abs(base).sum((1, 2, 3)).max()
  found = Ratio('', positive, negative, beyond, bool(follows))
  pooled = {
    name: _median_share(moved[name][signs[0], :1], at_1[signs[0], :1])
    for name in ('large', 'balanced')
  }
  arithmetic = pooled['large'] != 0 and abs(pooled['balanced']) < _STEP
  if positive is None and negative is None:
    text = 'not measured: no gradient on the probes'
    if cut['at 1'].objective[:, 0, 0].any():
      text = 'own: the gradient does not scale with A'
    return found._replace(text=text)
  return found._replace(text=_ratio_text(found, arithmetic))


def _slope(moved, at_1: np.ndarray, length: np.ndarray) -> Slope | None:
  """The slopes of some completions, whose trained tokens come first."""
  if not at_1.any():
    return None
  own, cross, back = (
    [
      _median_share(moved[name][:, tokens] / _STEP * factor, at_1[:, tokens])
      for factor in (1, length)
    ]
    for name, tokens in (
      ('small', slice(0, 1)),
      ('small', slice(1, None)),
      ('back', slice(0, 1)),
    )
  )
  if not at_1[:, 1:].any():  # one trained token: only the way back is there
    cross = back
  alike = bool(np.any(np.abs(np.subtract(cross, back)) < _CLOSE))
  return Slope(own[0], cross[0], own[1], cross[1], back[0], alike)


def _median_share(change: np.ndarray, coefficient: np.ndarray) -> float:
  """Median of `change / coefficient` over what has a coefficient."""
  live = coefficient != 0
  if not live.any():
    return 0.0
  value = float(np.median(change[live] / coefficient[live]))
  return 0.0 if abs(value) < 1e-6 else value


def _kind(slope: Slope | None, arithmetic: bool, coupled: bool) -> str:
  """The ratio that has these slopes."""
  if slope is None:
    return 'own: no gradient at ratio 1'
  if not slope.alike:
    return (
      f'own: slope {slope.own:.3g}, to other tokens {slope.cross:.3g}, from '
      f'the second to the first {slope.back:.3g}'
    )
  raw, pooled = slope[:2], slope[2:4]
  if not any(raw):  # exactly: a share of the batch is small
    return 'none'
  for text, measured, wanted in (
    ('arithmetic mean' if arithmetic else 'token', raw, (1, 0)),
    ('sequence mean', pooled, (1, 1)),
    ('sequence product', raw, (1, 1)),
  ):
    if np.allclose(measured, wanted, rtol=0, atol=_CLOSE):
      return text
  if abs(slope.own - slope.cross) < _CLOSE and slope.cross and not coupled:
    return f'sequence product to the power {number(round(slope.own, 3))}'
  return f'own: slope {slope.own:.3g}, to other tokens {slope.cross:.3g}'


def _ratio_text(ratio: Ratio, arithmetic: bool) -> str:
  """Joins the kinds for both signs with what the value says."""
  coupled = ratio.beyond != 0
  kinds = [
    _kind(s, arithmetic, coupled) for s in (ratio.positive, ratio.negative)
  ]
  kind = kinds[0]
  if kinds[0] != kinds[1]:
    kind = f'A > 0 {kinds[0]}; A < 0 {kinds[1]}'
  if kind == 'none':
    text = 'none (log pi)'
  elif ratio.follows_logp:
    text = f'stop-gradient weight x log pi ({kind})'
  else:
    text = kind
  return text + '; coupled to other completions' * coupled
