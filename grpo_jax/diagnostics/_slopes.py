"""The ratio of a method, read off the slopes of its objective."""

from typing import NamedTuple

import numpy as np

from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _stack
from grpo_jax.diagnostics._forms import TOLERANCE
from grpo_jax.diagnostics._forms import number

BATCHES = 16  # of each kind
_STEP = 1e-6  # of a log-ratio, inside every clip range
_CLOSE = 1e-3  # of slopes; the curvature over a step is of order 1e-6

Blocks = dict[str, tuple[_probe.Probe, np.ndarray]]  # and their advantages
Readings = dict[str, _probe.Reading]


class Slope(NamedTuple):
  """Relative change of an objective's coefficient per nat of a log-ratio."""

  own: float  # of the token's own log-ratio
  cross: float  # of another token's of the same completion
  own_times_length: float  # own * L_i: 1 where the mean over tokens counts
  cross_times_length: float


class Ratio(NamedTuple):
  """Which ratio multiplies the advantage."""

  text: str
  positive: Slope | None  # for A > 0; None without a gradient at ratio 1
  negative: Slope | None  # for A < 0
  beyond: float  # slope for a log-ratio of another completion
  follows_logp: bool  # the value changes with log pi at ratio 1


def ratio_blocks(fields) -> Blocks:
  """Ratio 1 and moves from it, each with advantages A and, in '... 2A', 2 A.

  Args:
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    `BATCHES` probes by name, and the advantages to put in.
  """
  random = np.random.default_rng(2)
  shape = (BATCHES, *_stack.SHAPE)
  sign = np.where(np.arange(BATCHES) % 2, -1.0, 1.0)
  reward, advantage = _stack.push(sign)
  length = random.integers(2, shape[-1] + 1, shape[:-1])
  # Improbable tokens: no ratio used here makes a probability exceed 1.
  logp_old = -random.uniform(7, 9, shape)
  blocks = {}
  for name, steps, shift in (
    ('at 1', (), 0.0),
    ('small', (_STEP,), 0.0),
    ('large', (6.0,), 0.0),
    ('balanced', (np.log(1.9), np.log(0.1)), 0.0),  # mean ratio 1
    ('shifted', (), 0.3),
  ):
    log_ratio = np.zeros(shape)
    log_ratio[:, 0, 0, : len(steps)] = steps
    old = logp_old + shift * random.normal(size=shape)
    probe = _probe.make(reward, length, old, log_ratio=log_ratio, fields=fields)
    blocks[name] = probe, advantage
    blocks[f'{name} 2A'] = probe, 2 * advantage
  return blocks


def ratio(cut: Readings, probe: _probe.Probe) -> Ratio:
  r"""Compares the slopes with those of the known ratios.

  With :math:`c_t` the coefficient of token t inside every clip range,
  :math:`\partial \log c_t / \partial l_u` is 1 at u = t and 0 elsewhere for a
  token ratio, :math:`1 / L` everywhere for the geometric mean over the
  completion, 1 everywhere for the product and 0 for log pi. The arithmetic mean
  has a token ratio's slopes; what tells it apart is that one far token closes
  the clip of all, and that a pair of tokens whose mean ratio is 1 does not.

  `f(2 A) - f(A)` stands for `f`: it lacks what does not depend on A.

  Args:
    cut: What was read of `ratio_blocks`.
    probe: The one of ratio 1.

  Returns:
    A `Ratio`.
  """

  def part(name, of):
    return getattr(cut[f'{name} 2A'], of) - getattr(cut[name], of)

  base = part('at 1', 'objective')
  change = {
    name: (part(name, 'objective') - base)
    for name in ('small', 'large', 'balanced')
  }
  slope = change['small'] / _STEP
  length = probe.batch.mask[:, 0, 0].sum(-1)[:, None]

  def slopes(rows):
    mine, at_1 = slope[rows, 0, 0], base[rows, 0, 0]
    if not at_1.any():
      return None
    return Slope(
      *(
        _median_share((mine * factor)[:, tokens], at_1[:, tokens])
        for factor in (1, length[rows])
        for tokens in (slice(0, 1), slice(1, None))
      )
    )

  positive, negative = slopes(slice(0, None, 2)), slopes(slice(1, None, 2))
  rest = np.ones(base.shape, bool)
  rest[:, 0, 0] = False
  beyond = _median_share(slope[rest], base[rest])
  value = np.abs(part('shifted', 'loss') - part('at 1', 'loss'))
  follows = np.median(value) > TOLERANCE * np.abs(base).sum((1, 2, 3)).max()
  found = Ratio('', positive, negative, beyond, bool(follows))
  pooled = {
    name: _median_share(change[name][::2, 0, 0, 2:], base[::2, 0, 0, 2:])
    for name in ('large', 'balanced')
  }
  arithmetic = pooled['large'] != 0 and pooled['balanced'] == 0
  return found._replace(text=_ratio_text(found, arithmetic))


def _median_share(change: np.ndarray, coefficient: np.ndarray) -> float:
  """Median of `change / coefficient` over what has a coefficient."""
  live = coefficient != 0
  if not live.any():
    return 0.0
  value = float(np.median(change[live] / coefficient[live]))
  return 0.0 if abs(value) < 1e-6 else value


def _kind(slope: Slope | None, arithmetic: bool) -> str:
  """The ratio that has these slopes."""
  if slope is None:
    return 'own: no gradient at ratio 1'
  raw, pooled = slope[:2], slope[2:]
  for text, measured, wanted in (
    ('none', raw, (0, 0)),
    ('arithmetic mean' if arithmetic else 'token', raw, (1, 0)),
    ('sequence mean', pooled, (1, 1)),
    ('sequence product', raw, (1, 1)),
  ):
    if np.allclose(measured, wanted, rtol=0, atol=_CLOSE):
      return text
  if abs(slope.own - slope.cross) < _CLOSE and slope.cross:
    return f'sequence product to the power {number(round(slope.own, 3))}'
  return f'own: slope {slope.own:.3g}, to other tokens {slope.cross:.3g}'


def _ratio_text(ratio: Ratio, arithmetic: bool) -> str:
  """Joins the kinds for both signs with what the value says."""
  kinds = [_kind(s, arithmetic) for s in (ratio.positive, ratio.negative)]
  kind = kinds[0]
  if kinds[0] != kinds[1]:
    kind = f'A > 0 {kinds[0]}; A < 0 {kinds[1]}'
  if kind == 'none':
    text = 'none (log pi)'
  elif ratio.follows_logp:
    text = f'stop-gradient weight x log pi ({kind})'
  else:
    text = kind
  return text + '; coupled to other completions' * (ratio.beyond != 0)
