"""A method's row in the table of surrogates: weight, ratio, regulariser, A.

Fontana et al., `On the Hidden Objective Biases of Group-based Reinforcement
Learning <https://arxiv.org/abs/2601.05002>`_, 2026, write every method as
weights, a ratio and a regulariser (table 1). Here a method's row is measured:
each part is evaluated on probes and compared with closed forms, and what fits
none is described by what it depends on. Nothing is looked up by name.
"""

from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _forms
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _regulariser
from grpo_jax.diagnostics import _slopes
from grpo_jax.diagnostics import _stack

_BATCHES = 18  # of each kind
_UNIFORM = slice(12, None)  # batches whose second group has equal rewards
_INVALID = slice(0, 6)  # batches with an invalid completion in each group
_SHIFT = 1.5  # added to all rewards
_FEW = 0.05  # of the tokens: a threshold on A may sort some anew
_NOTHING = '0 on the probes'


class Weight(NamedTuple):
  """What backs the text of the weight."""

  factor: float | None  # c of the closed form; None if none fits
  kept: float  # share of the tokens with a weight, in groups that differ
  uniform_kept: float  # the same in groups of equal rewards
  depends_on: tuple[str, ...]


class Advantage(NamedTuple):
  """What backs the text of the advantage."""

  factor: float | None  # in front of the closed form; None if none fits
  epsilon: float | None  # added to the deviation; None if none fits
  per_token: bool  # varies inside a completion
  shift_invariant: bool  # r + constant changes nothing
  scale_exponent: float | None  # A(2 r) = 2^e A(r); None if it is no power
  depends_on: tuple[str, ...]
  kl_in_reward: float | None  # c of r - c K; None if none, or no known K


class Row(NamedTuple):
  """One row of the table of surrogates, and the numbers behind it."""

  weight: str
  ratio: str
  regulariser: str
  advantage: str
  weight_facts: Weight
  ratio_facts: _slopes.Ratio
  regulariser_facts: _regulariser.Regulariser
  advantage_facts: Advantage


def surrogate_row(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Row:
  r"""Reads a method's weight, ratio, regulariser and advantage off.

  .. math::
    J = \sum_{i,t} w_{it} \bigl(f(s_{it}, A_{it}) - R_{it}\bigr)

  Symbols of the texts: `r` reward and, in a regulariser, ratio; `L_i` kept
  tokens of a completion, `N_p` of a prompt, `N` of the batch; `B` completions
  and `P` prompts that keep any; `n` valid completions of the group; `mean` and
  `std` those of the group, `batch ...` over completions, `token ...` over the
  batch's tokens; `alpha` all completions over those in groups whose rewards
  differ; `<H>_i` the mean entropy of a completion; k1, k2, k3 of x =
  log pi_ref - log pi: -x, x^2 / 2, e^x - x - 1; `sum k1` that of a completion,
  `k1 to go` from a token on. 'own' starts what fits no known form, 'not
  measured' what had no gradient on the probes.

  Args:
    method: A chain. Each batch meets it in the state of `init`.
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    A `Row`.

  >>> row = surrogate_row(losses.methods.grpo())
  >>> row.weight, row.ratio, row.regulariser, row.advantage
  ('1/(B L_i)', 'token', '0.04 k3', '(r - mean)/std')
  """
  blocks = _credit_blocks(fields)
  reading = _probe.read(method, _stack.fill(*blocks.values()))
  weight = _cut(reading.weight, blocks, _BATCHES)
  advantage = _cut(reading.advantage, blocks, _BATCHES)
  batch = blocks['base'].batch
  # Tokens that only the changed lengths cut off say nothing.
  common = np.asarray(blocks['lengths'].batch.mask & batch.mask)
  alone = blocks['one prompt'].batch
  weight_text, weight_facts = _weight(weight, batch, alone, common)
  advantage_text, advantage_facts = _advantage(advantage, batch, common)
  ratio, regulariser = _read_slopes(method, fields)
  return Row(
    weight_text,
    ratio.text + '; not proportional to A' * (regulariser.nonlinear > _FEW),
    _also_in_reward(regulariser.text, advantage_facts),
    advantage_text,
    weight_facts,
    ratio,
    regulariser,
    advantage_facts,
  )


def _read_slopes(method, fields):
  """Ratio and regulariser, with the advantages put in."""
  still = _slopes.still_blocks(fields)
  pulls = _regulariser.penalty_blocks(fields)
  cut = _read_blocks(method, still | pulls)
  order = _slopes.trained_first(cut, still['at 1'][0])
  cut |= _read_blocks(method, _slopes.moved_blocks(fields, order))
  return (
    _slopes.ratio(cut, still['at 1'][0], order),
    _regulariser.regulariser(cut, pulls),
  )


def _read_blocks(method, blocks: _slopes.Blocks) -> _slopes.Readings:
  """Reads blocks off as one stack."""
  probes, advantages = zip(*blocks.values(), strict=True)
  stack = _stack.fill(*probes)
  reading = _probe.read(method, stack, _stack.fill(*advantages))
  columns = [_cut(x, blocks, _slopes.BATCHES) for x in reading]
  return {k: _probe.Reading(*(column[k] for column in columns)) for k in blocks}


def _cut(array, names, batches) -> dict[str, np.ndarray]:
  """The blocks of a stack by name."""
  return {
    name: array[i * batches : (i + 1) * batches] for i, name in enumerate(names)
  }


def _credit_blocks(fields) -> dict[str, _probe.Probe]:
  """Ragged batches at ratio 1 and, by name, the same with one thing changed.

  All are off the reference, so that a KL in the reward acts; 'the reference' is
  where it does not, and where forms are compared.
  """
  random = np.random.default_rng(1)
  shape = (_BATCHES, *_stack.SHAPE)
  reward, new_reward = random.uniform(0.2, 2, (2, *shape[:-1]))
  reward[_UNIFORM, 1] = reward[_UNIFORM, 1, :1]
  valid = np.ones(reward.shape, bool)
  valid[_INVALID, :, -1] = False
  length = random.integers(1, shape[-1] + 1, reward.shape)
  new_length = length.copy()
  new_length[:, 0, 0] = length[:, 0, 0] % shape[-1] + 1
  old, new_old = -random.uniform(0.05, 3, (2, *shape))
  # Above ln 2, a threshold in use, and in the changed batches on both sides.
  entropy = random.uniform(0.8, 2, shape)
  new_entropy = random.uniform(0.05, 2, shape)
  ids = np.broadcast_to(np.arange(shape[-1]), shape)
  late, cut = np.zeros(shape, np.int32), np.zeros(reward.shape, bool)
  late[:, 0, 0], cut[:, 0, 0] = 1, True
  gap = 0.3 * random.normal(size=shape)
  alone = valid & np.array([True, False])[:, None]

  def probe(
    reward=reward, length=length, old=old, entropy=entropy, gap=gap, tokens=None
  ):
    made = _probe.make(
      reward,
      length,
      old,
      gap_ref=gap,
      tokens=tokens,
      entropy=entropy,
      fields=fields,
    )
    return made._replace(batch=made.batch._replace(valid=valid))

  def edit(**changed):
    base = probe()
    return base._replace(batch=base.batch._replace(**changed))

  extras = dict(probe().batch.extras)
  return {
    'base': probe(),
    'shift': probe(reward + _SHIFT),
    'scale': probe(2 * reward),
    'the reward': probe(new_reward),
    'lengths': probe(length=new_length),
    'ids': probe(tokens=ids),
    'the entropy': probe(entropy=new_entropy),
    'log pi_old': probe(old=new_old),
    'the reference': probe(gap=0 * gap),
    'log pi_sampler': edit(logp_sampler=new_old),
    'truncation': edit(truncated=cut),
    'the version': edit(version=late),
    'noise': edit(extras=extras | {'noise': 1 - extras['noise']}),
    'one prompt': edit(valid=alone),  # so that P is no constant
  }


_PROBED = (
  'the reward', 'lengths', 'ids', 'the entropy', 'log pi_old', 'the reference',
  'log pi_sampler', 'truncation', 'the version', 'noise',
)  # fmt: skip


def _differ(changed, base) -> bool:
  """Whether a change is more than rounding."""
  change, size = np.abs(changed - base), np.abs(base)
  return bool(change.max(initial=0) > _forms.TOLERANCE * size.max(initial=0))


def _depends(read: dict[str, np.ndarray], common: np.ndarray) -> list[str]:
  """The probed inputs that change a quantity."""
  base = read['base'][common]
  return [name for name in _PROBED if _differ(read[name][common], base)]


def _also(depends_on, known) -> str:
  """What the closed form does not say."""
  more = [name for name in depends_on if name not in known]
  return f'; also depends on {", ".join(more)}' if more else ''


def _weight(
  read: dict[str, np.ndarray],
  batch: losses.Batch,
  alone: losses.Batch,
  common: np.ndarray,
) -> tuple[str, Weight]:
  """Matches the weight; the first completion's length tells whose counts."""
  base = read['base']
  mask = np.asarray(batch.mask & batch.valid[..., None])
  kept, uniform = base != 0, np.zeros(len(base), bool)
  uniform[_UNIFORM] = True
  in_uniform = mask & uniform[:, None, None, None]
  in_uniform[:, 0] = False
  rest = mask & ~in_uniform
  facts = Weight(
    factor=None,
    kept=float(kept[rest].mean()),
    uniform_kept=float(kept[in_uniform].mean()),
    depends_on=tuple(_depends(read, common)),
  )
  if not base.any():
    return _NOTHING, facts
  batches = batch, alone
  masks = [np.asarray(b.mask & b.valid[..., None]) for b in batches]
  form = _forms.weight_form(
    np.concatenate([base, read['one prompt']]),
    np.concatenate(masks),
    np.concatenate([_forms.alpha(_forms.credited(b)) for b in batches]),
  )
  if form is None:
    longer = read['lengths']
    whose = {
      'own length': np.s_[:, 0, 0, :1],
      "the group's lengths": np.s_[:, 0, 1:],
      "other groups' lengths": np.s_[:, 1],
    }
    on = [k for k, at in whose.items() if _differ(longer[at], base[at])]
    on += [name for name in facts.depends_on if name != 'lengths']
    return 'own: depends on ' + (', '.join(on) or 'none of the probed'), facts
  known = ['lengths']
  text = form.text
  if facts.kept < 1:
    text += f' on {100 * facts.kept:.3g} % of the tokens, else 0'
  elif facts.uniform_kept == 0:
    known += ['the reward']
    text += ', groups of equal rewards dropped'
  known += ['the reward'] * ('alpha' in text)
  text += _also(facts.depends_on, known)
  return text, facts._replace(factor=form.factor)


def _advantage(
  read: dict[str, np.ndarray], batch: losses.Batch, common: np.ndarray
) -> tuple[str, Advantage]:
  """Matches the advantage, or else measures what it does."""
  mask = np.asarray(batch.mask & batch.valid[..., None])
  base, at_reference = read['base'], read['the reference']
  inside = mask & common
  first = np.zeros(common.shape, int)
  per_token = {
    k: _differ(x[inside], np.take_along_axis(x, first, -1)[inside])
    for k, x in read.items()
  }
  live = mask & (base != 0)
  power = _forms.factor_of(read['scale'][live], base[live])
  facts = Advantage(
    factor=None,
    epsilon=None,
    per_token=any(per_token.values()),
    shift_invariant=not _differ(read['shift'], base),
    scale_exponent=float(np.log2(power)) if power and power > 0 else None,
    depends_on=tuple(_depends(read, common)),
    kl_in_reward=None,
  )
  if not base.any():
    return _NOTHING, facts
  gated = mask & (at_reference != 0)
  form, open_share = _level_form(at_reference, gated, mask, batch)
  charge = None
  if 'the reference' in facts.depends_on:
    charge = _forms.charged(base, batch, live)
  prefix = 'per token, ' * facts.per_token
  if form is None:
    return prefix + 'own: ' + _properties(facts), facts
  known = ('the reward', *('lengths' for s in ('token', 'L') if s in form.text))
  known += ('the entropy', 'lengths') * ('<H>' in form.text)
  text = prefix + form.text
  if open_share < 1:
    text += f' on {100 * gated.sum() / mask.sum():.3g} % of the tokens, else 0'
  if charge:
    coefficient = _forms.number(charge.coefficient)
    text += f', with r - {coefficient} {charge.text} for r'
    known += ('the reference', 'lengths')
    facts = facts._replace(kl_in_reward=charge.coefficient)
  text += _also(facts.depends_on, known)
  return text, facts._replace(factor=form.factor, epsilon=form.epsilon)


def _level_form(
  value: np.ndarray, gated: np.ndarray, mask: np.ndarray, batch: losses.Batch
) -> tuple[_forms.AdvantageForm | None, float]:
  """The form of one number per completion, and the share of its tokens.

  A gate may leave some tokens without one: the others are to agree.
  """
  level = np.take_along_axis(value, gated.argmax(-1)[..., None], -1)
  open_share = float(gated.sum() / max(1, (mask & (level != 0)).sum()))
  if _differ(value[gated], np.broadcast_to(level, value.shape)[gated]):
    return None, open_share
  live = mask.any(-1) & ((open_share == 1) | (level[..., 0] != 0))
  given = _forms.credited(batch)
  return _forms.advantage_form(level[..., 0], given, live), open_share


def _also_in_reward(text: str, facts: Advantage) -> str:
  """The regulariser's text with what of the reference is in the advantage."""
  if 'the reference' not in facts.depends_on:
    return text
  inside = 'the reference in A'
  if facts.kl_in_reward is not None:
    inside = f'{_forms.number(facts.kl_in_reward)} k1 in r'
  return inside if text == 'none' else f'{text} + {inside}'


def _properties(facts: Advantage) -> str:
  """The measured properties in words."""
  shift = '' if facts.shift_invariant else 'not '
  power = facts.scale_exponent
  scale = 'no power of the scale of r'
  if power is not None:
    scale = f'scales as r^{_forms.number(round(power, 9) + 0.0)}'
  depends = ', '.join(facts.depends_on) or 'none of the probed'
  return f'{shift}shift-invariant, {scale}, depends on {depends}'
