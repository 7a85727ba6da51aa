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
  reward = np.broadcast_to(sign > 0, length.shape)
  old, new_old = -random.uniform(1, 3, (2, *shape))
  ratio, new_ratio = random.uniform(-0.05, 0.05, (2, *shape))
  gap, new_gap = random.uniform(-1, 1, (2, *shape))

  def probe(old=old, ratio=ratio, gap=gap):
    return _probe.make(
      reward, length, old, log_ratio=ratio, gap_ref=gap, fields=fields
    )

  return {
    'penalty': (probe(), advantage),
    'penalty 2A': (probe(), 2 * advantage),
    'the advantage': (probe(), -advantage),
    'the reference': (probe(gap=new_gap), advantage),
    'the ratio': (probe(ratio=new_ratio), advantage),
    'log pi': (probe(old=new_old), advantage),
  }


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
    _Term('k1', -np.ones_like(x)),
  ]


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
    needed = size > 1e-7 * np.abs(target).max()
    chosen = [t for t, need in zip(chosen, needed, strict=True) if need]
    if not chosen:
      return None
  names = [t.name for t in chosen]
  coefficients = coefficients[needed]
  slopes = np.stack([t.slope for t in chosen], axis=-1)
  model = slopes @ coefficients
  off = np.abs(model[acts] - target).max()
  if off > 1e-7 * np.abs(target).max():
    return None
  share = acts.sum() / np.sum(live & (model != 0))
  found = zip(names, map(float, coefficients), strict=True)
  return tuple(found), float(share)


def regulariser(
  cut: Readings, probe: _probe.Probe, advantage: np.ndarray
) -> Regulariser:
  """Explains the pull per unit of weight by a sum of known terms.

  What is in the objective but does not scale with A belongs to it:
  `2 f(A) - f(2 A)` is taken along where the sum then has a known form.

  Args:
    cut: What was read of `penalty_blocks`.
    probe: The one that the others are changes of.
    advantage: What was put in there.

  Returns:
    A `Regulariser`.
  """
  base, double = cut['penalty'], cut['penalty 2A']
  live = (base.weight != 0) & (double.weight != 0)

  def each(value, weight):
    return np.divide(value, weight, out=np.zeros_like(value), where=live)

  pull = each(base.penalty, base.weight)
  surrogate = each(base.objective, base.weight)
  idle = 2 * surrogate - each(double.objective, double.weight)
  idle[np.abs(idle) <= TOLERANCE * np.abs(surrogate).max()] = 0
  terms = _terms(probe, advantage, base.weight)
  found = _fit(pull + idle, terms, live) or _fit(pull, terms, live)
  bonus = constant(each(base.entropy, base.weight)[live])
  parts = []
  if found is None:
    inputs = ('the advantage', 'the reference', 'the ratio', 'log pi')
    size = TOLERANCE * np.abs(base.penalty).max()
    on = [
      name
      for name in inputs
      if np.abs(cut[name].penalty - base.penalty).max() > size
    ]
    parts.append('own: depends on ' + (', '.join(on) or 'none of the probed'))
  elif found[0]:
    parts += [f'{number(c)} {name}' for name, c in found[0]]
    if found[1] < 1:
      parts[-1] += f' on {100 * found[1]:.2g} % of the tokens'
  if bonus is None and live.any():
    parts.append('own: a term in the entropy')
  elif bonus:
    parts.append(f'entropy bonus {number(bonus)}')
  text = ' + '.join(parts) or 'none'
  return Regulariser(text, *(found or ((), 1.0)), bonus)
