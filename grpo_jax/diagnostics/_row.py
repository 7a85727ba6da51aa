"""A method's row in the table of surrogates: weight, ratio, regulariser, A.

The table is that of Fontana et al. (arXiv 2601.05002, table 1). Here a row is
measured: each part is compared with closed forms. A part that fits none of them
is described by what it depends on.

The ratio multiplies the advantage; it is recognised by how coefficients change
with the log-ratios. The regulariser is what moves a token beside the advantage,
per unit of the token's weight.
"""

from collections.abc import Callable
from collections.abc import Iterator
import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe

# Ratio and regulariser, read off the gradient.


_GRADIENT_BATCHES = 16  # of each kind
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


def _read_ratio(subject: _probe.Subject) -> Ratio:
  """Compares the slopes with those of the known ratios."""
  random = np.random.default_rng(2)
  shape = (_GRADIENT_BATCHES, *_probe.SHAPE)
  sign = np.where(np.arange(_GRADIENT_BATCHES) % 2, -1.0, 1.0)
  reward, advantage = _probe.single_out(sign)
  length = random.integers(3, shape[-1] + 1, shape[:-1])
  # Improbable tokens: no ratio used here makes a probability exceed 1.
  old = -random.uniform(7, 9, shape)
  base = dict(reward=reward, length=length, logp_old=old, advantage=advantage)
  twice = dict(advantage=2 * advantage)

  def differences(changes):
    """`f(2 A) - f(A)` by name: terms that do not depend on A cancel."""
    double = {f'{name} 2A': x | twice for name, x in changes.items()}
    read = subject.read(subject.probes(base, changes | double))
    difference = lambda name: map(np.subtract, read[f'{name} 2A'], read[name])
    return {name: _probe.Reading(*difference(name)) for name in changes}

  at_1 = subject.probe(**base)
  mask = at_1.mask[:, 0, 0]
  trained = differences({'at 1': {}})['at 1'].objective[:, 0, 0] != 0
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
  found = _compared(differences(changes), order, mask.sum(-1, keepdims=True))
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


def _read_regulariser(subject: _probe.Subject) -> Regulariser:
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
  shape = (_GRADIENT_BATCHES, *_probe.SHAPE)
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
  base['gap_teacher'] = gap  # a KL to the teacher is known by the same forms
  changes = {
    'base': {},
    '2A': dict(advantage=2 * advantage),
    '0A': dict(advantage=0 * advantage),
    'the advantage': dict(advantage=-advantage),
    'the reference': dict(gap_ref=new_gap, gap_teacher=new_gap),
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
  # A teacher differs by the same x. Of its likeliest tokens one counts, and all
  # others are one class: see `_probe.top_of`.
  q, p = np.exp(probe.logp - 1), np.exp(probe.logp - 1 + x)
  away = np.log1p(-q) - np.log1p(-p)
  right = (weight != 0) & (probe.advantage > 0)
  share = weight * right.sum((1, 2, 3), keepdims=True)
  return {
    'k3': (np.expm1(x), k3),
    'k2': (x, x**2 / 2),
    'r k3': (r * x, r * k3),
    'sg[r] k3': (r * np.expm1(x), r * k3),
    '(log r)^2 / 2': (-log_ratio, 0),
    '|log r|': (-np.sign(log_ratio), 0),
    'KL(pi, teacher)': (q * (x + away), (1 - q) * away - q * x),
    'KL(teacher, pi)': (p - (1 - p) * q / (1 - q), p * x - (1 - p) * away),
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
  k1_name = lambda k: _LOG_PI if k == name else k
  wanted = {
    k: c * total(after[k1_name(k)][1] - before[k1_name(k)][1])
    for k, c in terms.items()
  }
  change = read['the reference'].loss - read['base'].loss
  off = np.abs(change - sum(wanted.values())).max()
  return bool(off < 1e-3 * np.abs(wanted[name]).max())


# Weight and advantage, and the row.


_BATCHES = 18  # of each kind
_UNIFORM = np.s_[12:, 1]  # groups of equal rewards
_INVALID = np.s_[:6, :, -1]  # completions that are not valid
# Of the tokens. Doubling A may move so few across a threshold on A.
_FEW = 0.05
_NOTHING = '0 on the probes'


class Weight(NamedTuple):
  """The numbers behind the text of the weight."""

  factor: float | None  # c of the closed form; None if none fits
  kept: float  # share of the tokens with a weight, in groups that differ
  uniform_kept: float  # the same in groups of equal rewards
  depends_on: tuple[str, ...]


class Advantage(NamedTuple):
  """The numbers behind the text of the advantage."""

  factor: float | None  # in front of the closed form; None if none fits
  epsilon: (
    float | None
  )  # added to the deviation or, under a root, to its square
  per_token: bool  # varies inside a completion
  shift_invariant: bool  # r + constant changes nothing
  scale_exponent: float | None  # A(2 r) = 2^e A(r); None if it is no power
  depends_on: tuple[str, ...]
  kl_in_reward: float | None  # c of r - c K in place of r; None if none fits


class Row(NamedTuple):
  """One row of the table of surrogates, and the numbers behind it."""

  weight: str
  ratio: str
  regulariser: str
  advantage: str
  weight_facts: Weight
  ratio_facts: Ratio
  regulariser_facts: Regulariser
  advantage_facts: Advantage


def surrogate_row(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Row:
  """Measures a method's weight, ratio, regulariser and advantage.

  The symbols of the texts are explained in this folder's README. A text begins
  with 'own' if no known form fits, and with 'not measured' if there was no
  gradient on the probes. The arguments are those of `audit`.

  >>> row = surrogate_row(losses.methods.grpo())
  >>> row.weight, row.ratio, row.regulariser, row.advantage
  ('1/(B L_i)', 'token', '0.04 k3', '(r - mean)/std')
  """
  subject = _probe.Subject(method, fields)
  probes = _probes(subject)
  read = subject.read(probes)
  back = _moved(probes['base'].mask, -1)
  moved = read['the position']
  read['the position'] = moved._replace(
    weight=back(moved.weight), advantage=back(moved.advantage)
  )
  weight, weight_facts = _weight(probes, {k: x.weight for k, x in read.items()})
  advantages = {k: x.advantage for k, x in read.items()}
  advantage, facts = _advantage(probes, advantages)
  ratio, regulariser = _read_ratio(subject), _read_regulariser(subject)
  beside = [regulariser.text] * (regulariser.text != 'none')
  if facts.kl_in_reward is not None:
    beside.append(f'{_fit.number(facts.kl_in_reward)} k1 in the reward')
  elif 'the reference' in facts.depends_on:
    beside.append('the reference in A')
  beside += ['the teacher in A'] * ('the teacher' in facts.depends_on)
  nonlinear = '; not proportional to A' * (regulariser.nonlinear > _FEW)
  beside = ' + '.join(beside) or 'none'
  texts = weight, ratio.text + nonlinear, beside, advantage
  return Row(*texts, weight_facts, ratio, regulariser, facts)


def _probes(subject: _probe.Subject) -> _probe.Probes:
  """Batches at ratio 1 and, by name, the same with one input changed.

  The policy differs from the reference, so that a KL in the reward acts. Only
  in 'the reference' the two are equal. There the advantages are compared with
  known forms, because such a KL is 0. The teacher differs from the policy only
  in 'the teacher'. In 'the position' every token stands one
  place later in its completion, the last one first.
  """
  random = np.random.default_rng(1)
  shape = (_BATCHES, *_probe.SHAPE)
  reward, new_reward = random.uniform(0.2, 2, (2, *shape[:-1]))
  reward[_UNIFORM] = reward[_UNIFORM][:, :1]
  valid = np.ones(reward.shape, bool)
  valid[_INVALID] = False
  length = random.integers(1, shape[-1] + 1, reward.shape)
  new_length = length.copy()
  new_length[:, 0, 0] = length[:, 0, 0] % shape[-1] + 1
  old, new_old = -random.uniform(0.05, 3, (2, *shape))
  # `silence_uncertain` has a threshold at ln 2: these entropies lie above it,
  # the changed ones on both sides.
  entropy = random.uniform(0.8, 2, shape)
  new_entropy = random.uniform(0.05, 2, shape)
  gap = 0.3 * random.normal(size=shape)
  base = dict(reward=reward, length=length, logp_old=old, gap_ref=gap)
  base |= dict(entropy=entropy, valid=valid)
  on = _moved(np.arange(shape[-1]) < length[..., None], 1)
  ids = np.broadcast_to(np.arange(np.prod(shape[1:])).reshape(shape[1:]), shape)
  changes = {
    'base': {},
    'shift': dict(reward=reward + 1.5),
    'scale': dict(reward=2 * reward),
    'the reward': dict(reward=new_reward),
    'lengths': dict(length=new_length),
    'the position': dict(
      logp_old=on(old), gap_ref=on(gap), entropy=on(entropy), tokens=on(ids)
    ),
    'ids': dict(tokens=np.arange(shape[-1])),
    'the entropy': dict(entropy=new_entropy),
    'log pi_old': dict(logp_old=new_old),
    'the reference': dict(gap_ref=0.0),
    'the teacher': dict(gap_teacher=gap),
  }
  probes = subject.probes(base, changes)
  probe, late = probes['base'], np.zeros(shape, np.int32)
  late[:, 0, 0] = 1
  noise = np.asarray(probe.batch.extras['noise'])
  with_noise = lambda probe, noise: probe.edited(
    extras={**probe.batch.extras, 'noise': noise}
  )
  # Edited last, because a user's function may have set these fields as well.
  return probes | {
    'log pi_sampler': probe.edited(logp_sampler=new_old),
    'truncation': probe.edited(truncated=late[..., 0] > 0),
    'the version': probe.edited(version=late),
    'noise': with_noise(probe, 1 - noise),
    'the position': with_noise(probes['the position'], on(noise)),
    # With two prompts everywhere, 1 / P would be taken for a constant.
    'one prompt': probe.edited(valid=valid & [[True], [False]]),
  }


def _moved(mask: np.ndarray, places: int) -> Callable[[np.ndarray], np.ndarray]:
  """Moves values [N,P,G,T] on by some places inside each completion."""
  at, length = np.arange(mask.shape[-1]), mask.sum(-1, keepdims=True)
  source = np.where(at < length, (at - places) % np.maximum(length, 1), at)
  return lambda value: np.take_along_axis(value, source, axis=-1)


def _depends(probes: _probe.Probes, read: dict) -> tuple[str, ...]:
  """The inputs that change a quantity when they are changed."""
  # Compared where both batches have a token. A quantity that is 0 elsewhere
  # because the completion is shorter does not depend on lengths.
  common = np.asarray(probes['lengths'].batch.mask & probes['base'].batch.mask)
  seen = {name: value[common] for name, value in read.items()}
  return tuple(_fit.moved_by(seen, ('shift', 'scale', 'one prompt')))


def _weight(probes: _probe.Probes, read: dict) -> tuple[str, Weight]:
  """Matches the weight with known forms, or says what it depends on.

  Only the first completion's length was changed. Which weights that changes
  tells whose length counts: the completion's own, its group's, another group's.
  """
  base, both = read['base'], (probes['base'], probes['one prompt'])
  mask, kept, uniform = both[0].mask, base != 0, np.zeros(base.shape, bool)
  uniform[_UNIFORM] = True
  facts = Weight(
    factor=None,
    kept=float(kept[mask & ~uniform].mean()),
    uniform_kept=float(kept[mask & uniform].mean()),
    depends_on=_depends(probes, read),
  )
  if not base.any():
    return _NOTHING, facts
  form = weight_form(
    np.concatenate([base, read['one prompt']]),
    np.concatenate([probe.mask for probe in both]),
    np.concatenate([alpha(probe) for probe in both]),
  )
  if form is None:
    whose = {
      'own length': np.s_[:, 0, 0, :1],
      "the group's lengths": np.s_[:, 0, 1:],
      "other groups' lengths": np.s_[:, 1],
    }
    longer = read['lengths']
    on = [k for k, at in whose.items() if _fit.differs(longer[at], base[at])]
    on += [name for name in facts.depends_on if name != 'lengths']
    return f'own: {_fit.depends(on)}', facts
  text, known = form.text, ['lengths'] + ['the reward'] * ('alpha' in form.text)
  if facts.kept < 1:
    text += f' {_fit.percent(facts.kept)}, else 0'
  elif facts.uniform_kept == 0:
    known += ['the reward']
    text += ', groups of equal rewards dropped'
  text += _fit.also(facts.depends_on, known)
  return text, facts._replace(factor=form.factor)


def _advantage(probes: _probe.Probes, read: dict) -> tuple[str, Advantage]:
  """Matches the advantage with known forms, or says what it depends on."""
  base, value = read['base'], read['the reference']
  mask = probes['base'].mask
  live, common = mask & (base != 0), mask & probes['lengths'].mask
  # A gate may set the advantage of some tokens to 0, if only up to rounding.
  gated = mask & (np.abs(value) > _fit.TOLERANCE * np.abs(value).max())
  power = _fit.factor_of(read['scale'][live], base[live])
  facts = Advantage(
    factor=None,
    epsilon=None,
    per_token=any(_varies(x, x[..., :1], common) for x in read.values()),
    shift_invariant=not _fit.differs(read['shift'], base),
    scale_exponent=float(np.log2(power)) if power and power > 0 else None,
    depends_on=_depends(probes, read),
    kl_in_reward=None,
  )
  if not base.any():
    return _NOTHING, facts
  # A completion's advantage is read at its first token that no gate drops.
  level = np.take_along_axis(value, gated.argmax(-1)[..., None], -1)
  has_level = mask & gated.any(-1, keepdims=True)
  whole, form = 0 < gated.sum() == has_level.sum(), None
  if not _varies(value, level, gated):
    compared = (mask if whole else has_level).any(-1)
    form = advantage_form(level[..., 0], probes['base'], compared)
  text = 'per token, ' * facts.per_token
  if form is None:
    power, scale = facts.scale_exponent, 'no power of the scale of r'
    if power is not None:
      # `+ 0.0` makes 0 of -0, which would be printed with its sign.
      scale = f'scales as r^{_fit.number(round(power, 9) + 0.0)}'
    text += 'own: ' + 'not ' * (not facts.shift_invariant)
    text += f'shift-invariant, {scale}, {_fit.depends(facts.depends_on)}'
    return text, facts
  text += form.text
  known = ['the reward', 'the teacher']  # which stands beside the regulariser
  known += ['the entropy'] * ('<H>' in form.text)
  if any(sign in form.text for sign in ('token', 'L', '<H>')):
    known += ['lengths']
  if not whole:
    text += f' {_fit.percent(gated.sum() / mask.sum())}, else 0'
  if 'the reference' in facts.depends_on:
    charge = charged(base, probes['base'], live)
    if charge:
      text += f', with r - {_fit.number(charge.factor)} {charge.text} for r'
      known += ['the reference', 'lengths']
      known += ['the position'] * ('to go' in charge.text)
      facts = facts._replace(kl_in_reward=charge.factor)
  text += _fit.also(facts.depends_on, known)
  return text, facts._replace(factor=form.factor, epsilon=form.epsilon)


def _varies(value: np.ndarray, level: np.ndarray, where: np.ndarray) -> bool:
  """Whether some tokens differ from the level of their completion."""
  return _fit.differs(value[where], np.broadcast_to(level, value.shape)[where])


# First that of float64, which tells an epsilon of 1e-6 from none.
_TOLERANCES = 1e-9, _fit.TOLERANCE
_ROUNDING = 1e-12  # of rewards; a smaller spread counts as 0


class Form(NamedTuple):
  """A closed form that fits."""

  text: str
  factor: float  # in front of it
  epsilon: float = 0.0  # added to the spread that divides, or to its square


def weight_form(weight: np.ndarray, mask, informed) -> Form | None:
  """Finds the form c / denominator of the weights f64[N,P,G,T] that are not 0.

  `c` may be any number: 1/3000 over `B` is '1/(3000 B)'. The text says '(B: all
  completions)' where the denominator counts all completions of `mask`, not only
  the kept ones. It says 'alpha' where the weight is larger by the factor
  `informed`, f64[N], which `alpha` computes.
  """
  kept = weight != 0
  own = kept.sum(-1, keepdims=True)
  prompt = kept.sum((-2, -1), keepdims=True)
  batch = kept.sum((-3, -2, -1), keepdims=True)
  scaled = weight / informed[:, None, None, None]
  # The plainest text comes first: where all completions are kept, or alpha is
  # 1, the texts with a note would fit as well.
  for (value, note), (counted, who) in itertools.product(
    ((weight, ''), (scaled, ', times alpha')),
    ((kept, ''), (mask, ' (B: all completions)')),
  ):
    completions = counted.any(-1, keepdims=True).sum((1, 2), keepdims=True)
    prompts = counted.any((2, 3), keepdims=True).sum(1, keepdims=True)
    for symbols, denominator in (
      (('B', 'L_i'), completions * own),
      (('N',), batch),
      (('B',), completions),
      (('P', 'N_p'), prompts * prompt),
      (('L_i',), own),
      (('N_p',), prompt),
      (('P',), prompts),
      ((), 1),
    ):
      factor = _fit.factor_of((value * denominator)[kept])
      if factor is not None:
        text = _fit.fraction(factor, symbols)
        text += who if {'B', 'P'} & {*symbols} else ''
        text += '' if symbols else ', whatever the batch'
        return Form(text + note, factor)
  return None


def alpha(probe: _probe.Probe) -> np.ndarray:
  """Valid completions over those in groups whose rewards differ, f64[N]."""
  reward, valid = np.asarray(probe.batch.reward), np.asarray(probe.batch.valid)
  first = np.take_along_axis(reward, valid.argmax(-1)[..., None], -1)
  differ = ((reward != first) & valid).any(-1, keepdims=True) & valid
  return valid.sum((-2, -1)) / np.maximum(differ.sum((-2, -1)), 1)


def _moments(value, weight, axis) -> tuple[np.ndarray, np.ndarray]:
  """Weighted mean and deviation over `axis`, which is kept."""
  total = np.maximum(weight.sum(axis, keepdims=True), 1)
  mean = (value * weight).sum(axis, keepdims=True) / total
  square = (weight * (value - mean) ** 2).sum(axis, keepdims=True) / total
  return mean, np.sqrt(square)


def _candidates(probe: _probe.Probe) -> Iterator[tuple]:
  """Yields (text, numerator, text of the spread, spread); 1 for no spread."""
  r, valid = np.asarray(probe.batch.reward), np.asarray(probe.batch.valid)
  length, group, batch = probe.mask.sum(-1), -1, (-2, -1)
  n, total = (valid.sum(axis, keepdims=True) for axis in (group, batch))
  mean, std = _moments(r, valid, group)
  batch_mean, batch_std = _moments(r, valid, batch)
  centred = np.where(valid, r - mean, 0)
  sample, batch_sample = (x / np.maximum(x - 1, 1) for x in (n, total))
  yield '1', np.ones_like(r), '', 1
  yield 'r', r, '', 1
  yield 'r - mean', centred, '', 1
  for text, spread in (
    ('std', std),
    ('sample std', std * np.sqrt(sample)),
    ('batch std', batch_std),
    ('batch sample std', batch_std * np.sqrt(batch_sample)),
    ('batch std of r - mean', _moments(centred, valid, batch)[1]),
    ('mean', mean),
  ):
    yield '(r - mean)', centred, text, spread
  yield 'n/(n-1) (r - mean)', sample * centred, '', 1
  yield 'r - sum L r / sum L', r - _moments(r, length, group)[0], '', 1
  yield 'r - batch mean', r - batch_mean, '', 1
  yield '(r - batch mean)', r - batch_mean, 'batch std', batch_std
  z = _fit.divide(centred, std, std > _ROUNDING)
  for text, value, weight, over in (
    ('(r - mean)/std', z, valid, 'batch'),
    ('r - mean', centred, length, 'token'),
    ('r', r, length, 'token'),
  ):
    middle, spread = _moments(value, weight, batch)
    yield f'({text} - {over} mean)', value - middle, f'{over} std', spread
  yield 'alpha (r - mean)', alpha(probe)[:, None, None] * centred, '', 1


def advantage_form(advantage, probe: _probe.Probe, live) -> Form | None:
  """Finds the form of advantages, one number per completion, f64[N,P,G].

  Compares the completions `live`, bool[N,P,G]. A term `c <H>_i`, the
  completion's mean entropy times a constant, is found too.
  """
  mask, entropy = probe.mask, np.asarray(probe.batch.entropy_old)
  entropy = (entropy * mask).sum(-1) / np.maximum(mask.sum(-1), 1)
  size = np.abs(advantage[live]).max(initial=0)
  candidates = itertools.product(_TOLERANCES, _candidates(probe))
  for tolerance, (text, numerator, divisor, spread) in candidates:
    use = live & (np.abs(numerator) > _ROUNDING) & (spread > _ROUNDING)
    below = np.broadcast_to(spread, numerator.shape)[use]
    value, top = advantage[use], numerator[use]
    # Where the form is 0 or 0 / 0, the advantage has to be 0 as well.
    if np.abs(advantage[live & ~use]).max(initial=0) <= tolerance * size:
      factor = _fit.factor_of(value, top / below, tolerance)
      if factor is not None:
        over = f'/{divisor}' if divisor else ''
        return Form(_fit.multiple(factor, text) + over, factor)
      if divisor and value.any():
        # A method that rounds to float32 gives fewer digits of its epsilon.
        digits = 4 if tolerance < 1e-6 else 2
        for power, spelled in (1, '({} + {})'), (2, 'sqrt({}^2 + {})'):
          # A fit of value^power (below^power + epsilon) = top^power.
          target = top**power - (value * below) ** power
          (epsilon,), _ = _fit.least_squares(target, value**power)
          model = np.maximum(below**power + epsilon, _ROUNDING) ** (1 / power)
          if np.abs(value - top / model).max() <= tolerance * size:
            under = spelled.format(divisor, _fit.number(epsilon, digits))
            return Form(f'{text}/{under}', 1.0, float(epsilon))
    if not divisor:
      more = (advantage - numerator)[live]
      slope = _fit.factor_of(more, entropy[live], tolerance)
      if slope:
        sign = '+' if slope > 0 else '-'
        return Form(f'{text} {sign} {_fit.number(abs(slope))} <H>_i', 1.0)
  return None


def charged(advantage, probe: _probe.Probe, live) -> Form | None:
  """Finds a KL to the reference that is subtracted from the reward.

  Whatever baselines and deviations of its group or batch an advantage has, it
  is `a (r - c K) + b` with `a` and `b` that the group has in common. Which `c`
  and `K` fit the tokens `live`, bool[N,P,G,T], is read off by least squares.
  The form is `K`, a sum of k1 = log pi_old - log pi_ref, and its factor `c`.
  """
  k1 = np.asarray(probe.batch.logp_old) - np.asarray(probe.batch.logp_ref)
  to_go = np.cumsum((k1 * probe.mask)[..., ::-1], -1)[..., ::-1]
  total = np.broadcast_to(to_go[..., :1], to_go.shape)
  reward = np.broadcast_to(probe.batch.reward[..., None], live.shape)
  for text, charge in (('sum k1', total), ('k1 to go', to_go)):
    found = []
    for at in np.ndindex(live.shape[:2]):
      own, paid, value = (x[at][live[at]] for x in (reward, charge, advantage))
      if len(np.unique(own)) < 3:  # a, c and b are three unknowns
        continue
      slopes, off = _fit.least_squares(value, own, paid, np.ones_like(own))
      if off > 10 * _fit.TOLERANCE * np.abs(value).max() or slopes[0] == 0:
        break
      found.append(-slopes[1] / slopes[0])
    else:
      coefficient = _fit.factor_of(np.array(found), tolerance=1e-3)
      if coefficient:
        return Form(text, coefficient)
  return None
