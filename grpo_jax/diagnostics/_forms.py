"""The closed forms that weights and advantages are compared with."""

from collections.abc import Iterator
import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _words

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
        text = _words.fraction(factor, symbols)
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
        return Form(_words.multiple(factor, text) + over, factor)
      if divisor and value.any():
        # A method that rounds to float32 gives fewer digits of its epsilon.
        digits = 4 if tolerance < 1e-6 else 2
        for power, spelled in (1, '({} + {})'), (2, 'sqrt({}^2 + {})'):
          # A fit of value^power (below^power + epsilon) = top^power.
          target = top**power - (value * below) ** power
          (epsilon,), _ = _fit.least_squares(target, value**power)
          model = np.maximum(below**power + epsilon, _ROUNDING) ** (1 / power)
          if np.abs(value - top / model).max() <= tolerance * size:
            under = spelled.format(divisor, _words.number(epsilon, digits))
            return Form(f'{text}/{under}', 1.0, float(epsilon))
    if not divisor:
      more = (advantage - numerator)[live]
      slope = _fit.factor_of(more, entropy[live], tolerance)
      if slope:
        sign = '+' if slope > 0 else '-'
        return Form(f'{text} {sign} {_words.number(abs(slope))} <H>_i', 1.0)
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
