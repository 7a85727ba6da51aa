"""The ratio and the regulariser of a method, read off its gradient.

The ratio multiplies the advantage; it is recognised by how coefficients change
with the log-ratios. The regulariser is what moves a token beside the advantage,
per unit of the token's weight.
"""

from typing import NamedTuple

import numpy as np

from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe

_BATCHES = 16  # of each kind
_STEP = 1e-4  # of a log-ratio: inside the clip ranges, above float32's rounding
_CLOSE = 1e-2  # of slopes; a log pi in float32 makes errors of half of it
_NONE = 1e-6  # a smaller slope is rounding
_LOG_PI = 'log pi'


class Slope(NamedTuple):
  """Relative change of an objective's coefficient per nat of a log-ratio."""

  own: float  # of the token's own log-ratio
  cross: float  # of another token's of the same completion
  own_times_length: float  # own * L_i: 1 for a mean over tokens
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


def ratio(subject: _probe.Subject) -> Ratio:
  """Compares the slopes with those of the known ratios."""
  random = np.random.default_rng(2)
  shape = (_BATCHES, *_probe.SHAPE)
  sign = np.where(np.arange(_BATCHES) % 2, -1.0, 1.0)
  reward, advantage = _probe.single_out(sign)
  length = random.integers(3, shape[-1] + 1, shape[:-1])
  # Improbable tokens: no ratio used here makes a probability exceed 1.
  old = -random.uniform(7, 9, shape)
  base = dict(reward=reward, length=length, logp_old=old, advantage=advantage)
  twice = dict(advantage=2 * advantage)

  def of_advantage(changes):
    """`f(2 A) - f(A)` by name: terms that do not depend on A cancel."""
    double = {f'{name} 2A': x | twice for name, x in changes.items()}
    read = subject.read(subject.probes(base, changes | double))
    difference = lambda name: map(np.subtract, read[f'{name} 2A'], read[name])
    return {name: _probe.Reading(*difference(name)) for name in changes}

  at_1 = subject.probe(**base)
  mask = at_1.mask[:, 0, 0]
  trained = of_advantage({'at 1': {}})['at 1'].objective[:, 0, 0] != 0
  # Positions of the first completion, those with a coefficient first.
  rank = np.where(trained, 0, np.where(mask, 1, 2))
  order = np.argsort(rank, axis=-1, kind='stable')
  first, second, third = np.eye(shape[-1])[order.T[:3]]  # one-hot, [N,T] each
  others = (0, 0), (0, shape[1] - 1), (0, shape[2] - 1), (0, 0)
  moved = lambda row: dict(log_ratio=np.pad(row[:, None, None], others))
  changes = {
    'at 1': {},
    'small': moved(_STEP * first),
    'back': moved(_STEP * second),
    # Far enough to close the clip of an arithmetic mean by itself.
    'large': moved(6.0 * second),
    # Ratios of 1.9 and 0.1, whose arithmetic mean is 1 as before.
    'balanced': moved(np.log(1.9) * second + np.log(0.1) * third),
    'shifted': dict(logp_old=old + 0.3 * random.normal(size=shape)),
  }
  found = _compared(of_advantage(changes), order, mask.sum(-1, keepdims=True))
  if found.positive or found.negative:
    return found
  text = 'not measured: no gradient on the probes'
  if subject.read({'at 1': at_1})['at 1'].objective[:, 0, 0].any():
    text = 'own: the gradient does not scale with A'
  return found._replace(text=text)


def _compared(read: _probe.Readings, order, length) -> Ratio:
  """The ratio, read off the first completions.

  Args:
    read: The differences `f(2 A) - f(A)`, by name.
    order: i64[N,T], positions of the first completions, trained ones first.
    length: i64[N,1], tokens of the first completions.
  """
  base = read['at 1'].objective
  change = {name: x.objective - base for name, x in read.items()}
  in_order = lambda x: np.take_along_axis(x[:, 0, 0], order, -1)
  still, moved = in_order(base), {k: in_order(x) for k, x in change.items()}

  def slope(rows):
    """The slopes of some completions, whose trained tokens come first."""
    if not still[rows].any():
      return None

    def shares(name, tokens):
      now, before = moved[name][rows, tokens] / _STEP, still[rows, tokens]
      return [_median_share(now * x, before) for x in (1, length[rows])]

    own, cross = shares('small', np.s_[:1]), shares('small', np.s_[1:])
    back = shares('back', np.s_[:1])
    # With one trained token no other has a coefficient that could change.
    if not still[rows, 1:].any():
      cross = back
    alike = any(abs(x - y) < _CLOSE for x, y in zip(cross, back))
    return Slope(own[0], cross[0], own[1], cross[1], back[0], alike)

  rest = np.ones(base.shape, bool)
  rest[:, 0, 0] = False
  value = np.median(np.abs(read['shifted'].loss - read['at 1'].loss))
  size = np.abs(base).sum((1, 2, 3)).max()
  # Every other batch, those with A > 0.
  share = lambda name: _median_share(moved[name][::2, :1], still[::2, :1])
  found = Ratio(
    text='',
    positive=slope(np.s_[::2]),
    negative=slope(np.s_[1::2]),
    beyond=_median_share(change['small'][rest] / _STEP, base[rest]),
    follows_logp=bool(value > _fit.TOLERANCE * size),
  )
  arithmetic = share('large') != 0 and abs(share('balanced')) < _STEP
  return found._replace(text=_ratio_text(found, arithmetic))


def _median_share(change: np.ndarray, coefficient: np.ndarray) -> float:
  """Median of `change / coefficient` over what has a coefficient."""
  live = coefficient != 0
  if not live.any():
    return 0.0
  value = float(np.median(change[live] / coefficient[live]))
  return 0.0 if abs(value) < _NONE else value


def _ratio_text(found: Ratio, arithmetic: bool) -> str:
  """Names the ratio that has these slopes; see README.md."""
  coupled = found.beyond != 0

  def kind(slope):
    if slope is None:
      return 'own: no gradient at ratio 1'
    own, cross, raw, pooled = *slope[:2], slope[:2], slope[2:4]
    number = lambda x: _fit.number(x, 3)
    text = f'own: slope {number(own)}, to other tokens {number(cross)}'
    if not slope.alike:
      return f'{text}, from the second to the first {number(slope.back)}'
    # Exactly 0: a ratio over the whole batch has small slopes too.
    if not any(raw):
      return 'none'
    for known, measured, wanted in (
      ('arithmetic mean' if arithmetic else 'token', raw, (1, 0)),
      ('sequence mean', pooled, (1, 1)),
      ('sequence product', raw, (1, 1)),
    ):
      if np.allclose(measured, wanted, rtol=0, atol=_CLOSE):
        return known
    if abs(own - cross) < _CLOSE and cross and not coupled:
      return f'sequence product to the power {_fit.number(round(own, 3))}'
    return text

  text, other = kind(found.positive), kind(found.negative)
  if text != other:
    text = f'A > 0 {text}; A < 0 {other}'
  if text == 'none':
    text = 'none (log pi)'
  elif found.follows_logp:
    text = f'stop-gradient weight x log pi ({text})'
  return text + '; coupled to other completions' * coupled


class Regulariser(NamedTuple):
  """What acts beside the advantage."""

  text: str
  terms: tuple[tuple[str, float], ...]  # name and coefficient of each
  share: float  # tokens that the terms act on, of those they could act on
  entropy_bonus: float | None  # coefficient; None if it is not one number
  nonlinear: float  # share of the tokens whose objective is no multiple of A


def regulariser(subject: _probe.Subject) -> Regulariser:
  """Explains the pull per unit of weight by a sum of known terms.

  A part of the objective that does not scale with A belongs to the regulariser.
  That part is `2 f(A) - f(2 A)`. It is added to the pull of the penalty if the
  sum then has a known form.
  """
  probes = _penalty_probes(subject)
  read = subject.read(probes)
  base, double, none = (read[name] for name in ('base', '2A', '0A'))
  live = (base.weight != 0) & (double.weight != 0)
  each = lambda value, weight: _fit.divide(value, weight, live)
  pull = each(base.penalty, base.weight)
  surrogate = each(base.objective, base.weight)
  rounding = _fit.TOLERANCE * np.abs(surrogate).max()
  idle = 2 * surrogate - each(double.objective, double.weight)
  nonlinear = np.abs(idle) > rounding
  # Small values are rounding, unless some values are large: then there is such
  # a part, and the small values belong to it.
  idle[np.abs(idle) <= (1e-6 if nonlinear.any() else 1) * rounding] = 0
  known = _known(probes['base'], base.weight)
  joint = _fitted(pull + idle, known, live)
  found = joint or _fitted(pull, known, live)
  terms, acting = found or ({}, 1.0)
  for name, with_k1 in ((_LOG_PI, 'k1'), ('k2', 'k1 (score function)')):
    if name in terms and _is_k1(name, terms, probes, read):
      terms = {with_k1 if k == name else k: c for k, c in terms.items()}
  penalties = {name: x.penalty for name, x in read.items()}
  moved = _fit.moved_by(penalties, ('2A', '0A'))
  parts = [f'{_fit.number(c)} {name}' for name, c in terms.items()]
  if parts and acting < 1:
    parts[-1] += f' {_fit.percent(acting, 2)}'
    parts[-1] += ', by the reward' * ('the reward' in moved)
  if found is None:
    parts = [f'own: {_fit.depends(moved)}']
  unknown = joint is None and bool(idle.any())
  if np.abs(each(none.objective, base.weight)).max() > rounding:
    parts += ['own: a part of the objective without A'] * unknown
    unknown = False
  bonus = _fit.factor_of(each(base.entropy, base.weight)[live])
  if bonus is None and live.any():
    parts.append('own: a term in the entropy')
  elif bonus:
    parts.append(f'entropy bonus {_fit.number(bonus)}')
  return Regulariser(
    text=' + '.join(parts) or 'none',
    terms=tuple(terms.items()),
    share=acting,
    entropy_bonus=bonus,
    nonlinear=float(np.mean(nonlinear[live])) if unknown else 0.0,
  )


def _penalty_probes(subject: _probe.Subject) -> _probe.Probes:
  """Batches and, by name, the same with one input changed.

  The policy differs from the old policy and from the reference.
  """
  random = np.random.default_rng(3)
  shape = (_BATCHES, *_probe.SHAPE)
  sign = np.where(np.arange(shape[2]) % 2, -1.0, 1.0)
  advantage = np.broadcast_to(sign[:, None], shape)
  length = random.integers(1, shape[-1] + 1, shape[:-1])
  old, new_old = -random.uniform(1, 3, (2, *shape))
  ratio, new_ratio = random.uniform(-0.05, 0.05, (2, *shape))
  gap, new_gap = random.uniform(-1, 1, (2, *shape))
  # A reward of 1 or more is right. No two are equal, or a regulariser with the
  # factor r could be taken for one with a constant.
  reward, new_reward = (sign > 0) + random.uniform(0, 0.9, (2, *shape[:-1]))
  # Above ln 2, where `silence_uncertain` has a threshold.
  entropy, new_entropy = random.uniform(0.8, 2, (2, *shape))
  base = dict(reward=reward, length=length, logp_old=old, log_ratio=ratio)
  base |= dict(gap_ref=gap, entropy=entropy, advantage=advantage)
  changes = {
    'base': {},
    '2A': dict(advantage=2 * advantage),
    '0A': dict(advantage=0 * advantage),
    'the advantage': dict(advantage=-advantage),
    'the reference': dict(gap_ref=new_gap),
    'the ratio': dict(log_ratio=new_ratio),
    'log pi': dict(logp_old=new_old),
    'the reward': dict(reward=new_reward),
    'the entropy': dict(entropy=new_entropy),
  }
  return subject.probes(base, changes)


def _known(probe: _probe.Probe, weight: np.ndarray) -> dict[str, tuple]:
  """Known regularisers R, by name: (-dR / d log pi, R).

  R is used for its change with the reference, so it is 0 where no reference is
  in it.
  """
  x = np.asarray(probe.batch.logp_ref) - probe.logp
  log_ratio = probe.logp - np.asarray(probe.batch.logp_old)
  r, k3 = np.exp(log_ratio), np.expm1(x) - x
  assert probe.advantage is not None  # every penalty probe has one
  right = (weight != 0) & (probe.advantage > 0)
  share = weight * right.sum((1, 2, 3), keepdims=True)
  return {
    'k3': (np.expm1(x), k3),
    'k2': (x, x**2 / 2),
    'r k3': (r * x, r * k3),
    'sg[r] k3': (r * np.expm1(x), r * k3),
    '(log r)^2 / 2': (-log_ratio, 0),
    '|log r|': (-np.sign(log_ratio), 0),
    'NLL of A > 0': (_fit.divide(np.ones_like(x), share, right), 0),
    _LOG_PI: (-np.ones_like(x), -x),  # the value is that of k1
  }


def _fitted(pull, known: dict, live) -> tuple[dict[str, float], float] | None:
  """Coefficients by name and the share of tokens, or None if none fit.

  Only tokens with a pull are fitted: a penalty may act on a chosen few.
  """
  acts = live & (pull != 0)
  target = pull[acts]
  if not target.size:
    return {}, 0.0
  if not np.isfinite(target).all():
    return None
  limit, found = (
    _fit.TOLERANCE * np.abs(target).max(),
    dict.fromkeys(known, 0.0),
  )
  for _ in range(2):  # with all terms, then with those that were needed
    columns = [known[name][0][acts] for name in found]
    fitted, _ = _fit.least_squares(target, *columns)
    found = {
      name: float(c)
      for name, c, slope in zip(found, fitted, columns, strict=True)
      if np.abs(c * slope).max() > 10 * limit
    }
    if not found:
      return None
  model = np.sum([c * known[name][0] for name, c in found.items()], axis=0)
  if np.abs(model[acts] - target).max() > limit:
    return None
  return found, float(acts.sum() / np.sum(live & (model != 0)))


def _is_k1(name: str, terms, probes, read) -> bool:
  """Whether the value of a term is that of k1.

  The gradient does not tell: k1 has that of log pi, and k1 as the weight of a
  score function has that of k2.
  """
  weight = read['base'].weight
  before, after = (_known(probes[k], weight) for k in ('base', 'the reference'))
  total = lambda x: np.sum(weight * x, (1, 2, 3))
  of_k1 = lambda k: _LOG_PI if k == name else k
  wanted = {
    k: c * total(after[of_k1(k)][1] - before[of_k1(k)][1])
    for k, c in terms.items()
  }
  change = read['the reference'].loss - read['base'].loss
  off = np.abs(change - sum(wanted.values())).max()
  return bool(off < 1e-3 * np.abs(wanted[name]).max())
