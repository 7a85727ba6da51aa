"""The regulariser of a method, read off its pull per unit of weight."""

from typing import NamedTuple

import numpy as np

from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _stack
from grpo_jax.diagnostics._forms import TOLERANCE
from grpo_jax.diagnostics._forms import constant
from grpo_jax.diagnostics._forms import number
from grpo_jax.diagnostics._slopes import BATCHES
from grpo_jax.diagnostics._slopes import Blocks
from grpo_jax.diagnostics._slopes import Readings


class Regulariser(NamedTuple):
  """What acts beside the advantage."""

  text: str
  terms: tuple[tuple[str, float], ...]  # name and coefficient of each
  share: float  # of the probes' tokens on which these terms could act
  entropy_bonus: float | None  # coefficient; None if it is not one number
  nonlinear: float  # share of the tokens whose objective is no multiple of A


def penalty_blocks(fields) -> Blocks:
  """Batches off the old policy and the reference, and one change each.

  Args:
    fields: A user's generator of fields; see `_probe.Fields`.

  Returns:
    `BATCHES` probes by name, and the advantages to put in.
  """
  random = np.random.default_rng(3)
  shape = (BATCHES, *_stack.SHAPE)
  sign = np.where(np.arange(shape[2]) % 2, -1.0, 1.0)
  advantage = np.broadcast_to(sign[:, None], shape)
  length = random.integers(1, shape[-1] + 1, shape[:-1])
  old, new_old = -random.uniform(1, 3, (2, *shape))
  ratio, new_ratio = random.uniform(-0.05, 0.05, (2, *shape))
  gap, new_gap = random.uniform(-1, 1, (2, *shape))
  # Right from 1 on, and no two alike: a factor r is no constant.
  reward, new_reward = (sign > 0) + random.uniform(0, 0.9, (2, *shape[:-1]))
  # Above ln 2, a threshold in use.
  entropy, new_entropy = random.uniform(0.8, 2, (2, *shape))

  def probe(old=old, ratio=ratio, gap=gap, reward=reward, entropy=entropy):
    return _probe.make(
      reward,
      length,
      old,
      log_ratio=ratio,
      gap_ref=gap,
      entropy=entropy,
      fields=fields,
    )

  return {
    'penalty': (probe(), advantage),
    'penalty 2A': (probe(), 2 * advantage),
    'penalty 0A': (probe(), 0 * advantage),
    'the advantage': (probe(), -advantage),
    'the reference': (probe(gap=new_gap), advantage),
    'the ratio': (probe(ratio=new_ratio), advantage),
    'log pi': (probe(old=new_old), advantage),
    'the reward': (probe(reward=new_reward), advantage),
    'the entropy': (probe(entropy=new_entropy), advantage),
  }


_PROBED = (
  'the advantage', 'the reference', 'the ratio', 'log pi', 'the reward',
  'the entropy',
)  # fmt: skip


_LOG_PI = 'log pi'


class _Term(NamedTuple):
  """A known regulariser R: its name and -dR / d log pi, f64[N,P,G,T]."""

  name: str
  slope: np.ndarray


def _terms(probe, advantage, weight) -> list[_Term]:
  r"""The dictionary; x = log pi_ref - log pi, r = pi / pi_old.

  k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1.
  """
  x = np.asarray(probe.batch.logp_ref) - probe.logp
  log_ratio = probe.logp - np.asarray(probe.batch.logp_old)
  r, k3 = np.exp(log_ratio), np.expm1(x)
  live = weight != 0
  right = live & (advantage > 0)
  share = weight * right.sum((1, 2, 3), keepdims=True)
  nll = np.divide(1, share, out=np.zeros_like(x), where=right)
  return [
    _Term('k3', k3),
    _Term('k2', x),
    _Term('r k3', r * x),
    _Term('sg[r] k3', r * k3),
    _Term('(log r)^2 / 2', -log_ratio),
    _Term('|log r|', -np.sign(log_ratio)),
    _Term('NLL of A > 0', nll),
    _Term(_LOG_PI, -np.ones_like(x)),
  ]


def _value_of_kl(name: str, probe: _probe.Probe) -> np.ndarray | float:
  """The regulariser of that name; 0 for one that has no reference in it."""
  x = np.asarray(probe.batch.logp_ref) - probe.logp
  r = np.exp(probe.logp - np.asarray(probe.batch.logp_old))
  k3 = np.expm1(x) - x
  values = {'k2': x**2 / 2, 'k3': k3, 'r k3': r * k3, 'sg[r] k3': r * k3}
  return values.get(name, 0.0)


def _is_k1(terms, weight, cut: Readings, blocks: Blocks) -> bool:
  """Whether what has the slope of log pi is k1: by its value off another ref.

  Args:
    terms: Names and coefficients.
    weight: f64[N,P,G,T].
    cut: What was read.
    blocks: What was read of.
  """
  before, after = (blocks[name][0] for name in ('penalty', 'the reference'))
  moved = cut['the reference'].loss - cut['penalty'].loss
  for name, c in terms:
    change = _value_of_kl(name, after) - _value_of_kl(name, before)
    moved = moved - np.sum(c * weight * change, (1, 2, 3))
  # -x: it falls with log pi_ref.
  change = np.asarray(before.batch.logp_ref) - np.asarray(after.batch.logp_ref)
  k1 = dict(terms)[_LOG_PI] * np.sum(weight * change, (1, 2, 3))
  return bool(np.abs(moved - k1).max() < 1e-3 * np.abs(k1).max())


def _fit(pull: np.ndarray, terms: list[_Term], live: np.ndarray):
  """Coefficients by name and the share of tokens, or None if none fit.

  Only tokens with a pull are fitted: a penalty may act on a chosen few.
  """
  acts = live & (pull != 0)
  if not acts.any():
    return (), 0.0
  target, chosen = pull[acts], terms
  if not np.isfinite(target).all():
    return None
  coefficients = np.zeros(0)
  for _ in range(2):  # all terms, then those that are needed
    matrix = np.stack([term.slope[acts] for term in chosen], axis=1)
    coefficients = np.linalg.lstsq(matrix, target, rcond=None)[0]
    size = np.abs(coefficients * np.abs(matrix).max(0))
    needed = size > 10 * TOLERANCE * np.abs(target).max()
    chosen = [t for t, need in zip(chosen, needed, strict=True) if need]
    if not chosen:
      return None
  names = [t.name for t in chosen]
  coefficients = coefficients[needed]
  slopes = np.stack([t.slope for t in chosen], axis=-1)
  model = slopes @ coefficients
  off = np.abs(model[acts] - target).max()
  if off > TOLERANCE * np.abs(target).max():
    return None
  share = acts.sum() / np.sum(live & (model != 0))
  found = zip(names, map(float, coefficients), strict=True)
  return tuple(found), float(share)


def regulariser(cut: Readings, blocks: Blocks) -> Regulariser:
  """Explains the pull per unit of weight by a sum of known terms.

  What is in the objective but does not scale with A belongs to it:
  `2 f(A) - f(2 A)` is taken along where the sum then has a known form.

  Args:
    cut: What was read of `penalty_blocks`.
    blocks: These.

  Returns:
    A `Regulariser`.
  """
  base, double, none = (cut[f'penalty{a}'] for a in ('', ' 2A', ' 0A'))
  live = (base.weight != 0) & (double.weight != 0)

  def each(value, weight):
    return np.divide(value, weight, out=np.zeros_like(value), where=live)

  pull = each(base.penalty, base.weight)
  surrogate = each(base.objective, base.weight)
  rounding = TOLERANCE * np.abs(surrogate).max()
  idle = 2 * surrogate - each(double.objective, double.weight)
  nonlinear = np.abs(idle) > rounding
  # Where there is any, its small values belong to it.
  idle[np.abs(idle) <= (1e-6 if nonlinear.any() else 1) * rounding] = 0
  share = float(np.mean(nonlinear[live])) if live.any() else 0.0
  terms = _terms(*blocks['penalty'], base.weight)
  joint = _fit(pull + idle, terms, live)
  found = joint or _fit(pull, terms, live)
  unknown = joint is None and bool(idle.any())
  without = bool(np.abs(each(none.objective, base.weight)).max() > rounding)
  if found and _LOG_PI in dict(found[0]):
    if _is_k1(found[0], base.weight, cut, blocks):
      named = {_LOG_PI: 'k1'}
      found = tuple((named.get(t, t), c) for t, c in found[0]), found[1]
  parts = _parts(cut, found)
  parts += ['own: a part of the objective without A'] * (unknown and without)
  bonus = constant(each(base.entropy, base.weight)[live])
  if bonus is None and live.any():
    parts.append('own: a term in the entropy')
  elif bonus:
    parts.append(f'entropy bonus {number(bonus)}')
  text = ' + '.join(parts) or 'none'
  return Regulariser(
    text, *(found or ((), 1.0)), bonus, share * (unknown and not without)
  )


def _parts(cut: Readings, found) -> list[str]:
  """The terms in words, or what moves a penalty of no known form."""
  base = cut['penalty'].penalty
  size = TOLERANCE * np.abs(base).max()
  on = [k for k in _PROBED if np.abs(cut[k].penalty - base).max() > size]
  if found is None:
    return ['own: depends on ' + (', '.join(on) or 'none of the probed')]
  parts = [f'{number(c)} {name}' for name, c in found[0]]
  if parts and found[1] < 1:
    parts[-1] += f' on {100 * found[1]:.2g} % of the tokens'
    parts[-1] += ', by the reward' * ('the reward' in on)
  return parts
