"""A method's row in the table of surrogates: weight, ratio, regulariser, A.

The table is that of Fontana et al. (arXiv 2601.05002, table 1). Here a row is
measured: each part is compared with closed forms. A part that fits none of them
is described by what it depends on.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _forms
from grpo_jax.diagnostics import _gradient
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _words

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
    beside.append(f'{_words.number(facts.kl_in_reward)} k1 in the reward')
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
  form = _forms.weight_form(
    np.concatenate([base, read['one prompt']]),
    np.concatenate([probe.mask for probe in both]),
    np.concatenate([_forms.alpha(probe) for probe in both]),
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
    return f'own: {_words.depends(on)}', facts
  text, known = form.text, ['lengths'] + ['the reward'] * ('alpha' in form.text)
  if facts.kept < 1:
    text += f' {_words.percent(facts.kept)}, else 0'
  elif facts.uniform_kept == 0:
    known += ['the reward']
    text += ', groups of equal rewards dropped'
  text += _words.also(facts.depends_on, known)
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
    form = _forms.advantage_form(level[..., 0], probes['base'], compared)
  text = 'per token, ' * facts.per_token
  if form is None:
    power, scale = facts.scale_exponent, 'no power of the scale of r'
    if power is not None:
      # `+ 0.0` makes 0 of -0, which would be printed with its sign.
      scale = f'scales as r^{_words.number(round(power, 9) + 0.0)}'
    text += 'own: ' + 'not ' * (not facts.shift_invariant)
    text += f'shift-invariant, {scale}, {_words.depends(facts.depends_on)}'
    return text, facts
  text += form.text
  known = ['the reward'] + ['the entropy'] * ('<H>' in form.text)
  if any(sign in form.text for sign in ('token', 'L', '<H>')):
    known += ['lengths']
  if not whole:
    text += f' {_words.percent(gated.sum() / mask.sum())}, else 0'
  if 'the reference' in facts.depends_on:
    charge = _forms.charged(base, probes['base'], live)
    if charge:
      text += f', with r - {_words.number(charge.factor)} {charge.text} for r'
      known += ['the reference', 'lengths']
      known += ['the position'] * ('to go' in charge.text)
      facts = facts._replace(kl_in_reward=charge.factor)
  text += _words.also(facts.depends_on, known)
  return text, facts._replace(factor=form.factor, epsilon=form.epsilon)


def _varies(value: np.ndarray, level: np.ndarray, where: np.ndarray) -> bool:
  """Whether some tokens differ from the level of their completion."""
  return _fit.differs(value[where], np.broadcast_to(level, value.shape)[where])
