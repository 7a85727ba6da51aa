"""A method's row in the table of surrogates: weight, ratio, regulariser, A.

The table is that of Fontana et al. (arXiv 2601.05002, table 1). Here a row is
measured: each part is compared with closed forms. A part that fits none of them
is described by what it depends on.
"""

from collections.abc import Callable
from collections.abc import Iterator
import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _gradient
from grpo_jax.diagnostics import _probe

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
  ratio_facts: _gradient.Ratio
  regulariser_facts: _gradient.Regulariser
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
  ratio, regulariser = _gradient.ratio(subject), _gradient.regulariser(subject)
  beside = [regulariser.text] * (regulariser.text != 'none')
  if facts.kl_in_reward is not None:
    beside.append(f'{_fit.number(facts.kl_in_reward)} k1 in the reward')
  elif 'the reference' in facts.depends_on:
    beside.append('the reference in A')
  nonlinear = '; not proportional to A' * (regulariser.nonlinear > _FEW)
  beside = ' + '.join(beside) or 'none'
  texts = weight, ratio.text + nonlinear, beside, advantage
  return Row(*texts, weight_facts, ratio, regulariser, facts)


def _probes(subject: _probe.Subject) -> _probe.Probes:
  """Batches at ratio 1 and, by name, the same with one input changed.

  The policy differs from the reference, so that a KL in the reward acts. Only
  in 'the reference' the two are equal. There the advantages are compared with
  known forms, because such a KL is 0. In 'the position' every token stands one
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
  known = ['the reward'] + ['the entropy'] * ('<H>' in form.text)
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
