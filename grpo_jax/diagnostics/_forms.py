"""The closed forms that weights and advantages are compared with."""

from collections.abc import Iterator
import itertools
from typing import NamedTuple

import numpy as np

from grpo_jax import losses

TOLERANCE = 3e-6
"""Relative; a method that casts to float32 on its way rounds by less."""

_TOLERANCES = 1e-9, TOLERANCE  # float64 first: it can tell an epsilon of 1e-6


class WeightForm(NamedTuple):
  """A weight that is `factor / denominator`."""

  text: str
  factor: float


class AdvantageForm(NamedTuple):
  """An advantage that is `factor * numerator / (spread + epsilon)`."""

  text: str
  factor: float
  epsilon: float


def constant(value: np.ndarray, tolerance: float = TOLERANCE) -> float | None:
  """The value that all entries have up to rounding, or None."""
  return factor_of(value, np.ones_like(value), tolerance)


def factor_of(
  value: np.ndarray, model: np.ndarray, tolerance: float = TOLERANCE
) -> float | None:
  """c of `value = c model` up to rounding of the largest value, or None."""
  if not value.size or not np.isfinite(value).all():
    return None
  factor = float(np.median(value / model))
  off = np.abs(value - factor * model).max()
  return factor if off <= tolerance * np.abs(value).max() else None


def number(value: float) -> str:
  """Four significant digits."""
  return f'{value:.4g}'


def _over(factor: float, symbols: tuple[str, ...]) -> str:
  """`factor / (symbols)`: `'1/N'`, `'1/(3000 B)'`, `'2/(B L_i)'`, `'1/8'`."""
  top, inverse = factor, 1 / factor
  whole = abs(inverse - round(inverse)) < TOLERANCE * abs(inverse)
  if abs(inverse) > 1.5 and whole:
    top, symbols = 1.0, (f'{round(inverse)}', *symbols)
  if not symbols:
    return number(factor)
  below = ' '.join(symbols)
  return (
    f'{number(top)}/{below}'
    if len(symbols) == 1
    else (f'{number(top)}/({below})')
  )


def weight_form(
  weight: np.ndarray, mask: np.ndarray, informed: np.ndarray
) -> WeightForm | None:
  r"""Finds the form of the weights that are not 0.

  With `L_i` the kept tokens of a completion, `N_p` those of a prompt, `N` those
  of the batch, `B` the completions and `P` the prompts that keep any:

  .. math:: \frac{c}{B L_i},\ \frac{c}{N},\ \frac{c}{B},\ \frac{c}{P N_p},\
    \frac{c}{L_i},\ \frac{c}{N_p},\ \frac{c}{P},\ c

  `c` is whatever it comes out as: `c/B` with `c = 1/3000` is '1/(3000 B)'.

  Args:
    weight: f64[N,P,G,T].
    mask: bool[N,P,G,T], tokens of valid completions, kept or not.
    informed: f64[N], the factor `alpha`; see there.

  Returns:
    The form, or None. '(B: all completions)' is added where only the count of
    all completions, not of the kept ones, fits; 'alpha' where the weight is
    larger by that factor.
  """
  kept = weight != 0
  scaled = weight / informed[:, None, None, None]
  for tolerance, (value, note), (counted, who) in itertools.product(
    _TOLERANCES,
    ((weight, ''), (scaled, ', times alpha')),
    ((kept, ''), (mask, ' (B: all completions)')),
  ):
    for symbols, denominator in _denominators(kept, counted).items():
      factor = constant((value * denominator)[kept], tolerance)
      if factor is not None:
        text = _over(factor, symbols)
        text += who if {'B', 'P'} & {*symbols} else ''
        text += '' if symbols else ', whatever the batch'
        return WeightForm(text + note, factor)
  return None


def _denominators(kept, counted) -> dict[tuple[str, ...], np.ndarray]:
  """The denominators by their symbols; B and P count what has `counted`."""
  own = kept.sum(-1)[..., None]
  prompt = kept.sum((-2, -1))[..., None, None]
  batch = kept.sum((-3, -2, -1))[..., None, None, None]
  completions = counted.any(-1).sum((-2, -1))[..., None, None, None]
  prompts = counted.any((-2, -1)).sum(-1)[..., None, None, None]
  return {
    ('B', 'L_i'): completions * own,
    ('N',): batch,
    ('B',): completions,
    ('P', 'N_p'): prompts * prompt,
    ('L_i',): own,
    ('N_p',): prompt,
    ('P',): prompts,
    (): np.ones_like(batch),
  }


class Credited(NamedTuple):
  """What an advantage may be made of; all but `length` are f64[N,P,G]."""

  reward: np.ndarray
  valid: np.ndarray  # bool[N,P,G]
  length: np.ndarray  # i32[N,P,G], 0 where not valid
  entropy: np.ndarray  # the mean over a completion's tokens, nats


def _mean(value, weight, axis):
  """Weighted mean over `axis`, which is kept."""
  total = weight.sum(axis, keepdims=True)
  return (value * weight).sum(axis, keepdims=True) / np.maximum(total, 1)


def _deviation(value, weight, axis, ddof=0):
  """Weighted deviation around the weighted mean over `axis`, kept."""
  centred = value - _mean(value, weight, axis)
  freedom = weight.sum(axis, keepdims=True) - ddof
  square = (weight * centred**2).sum(axis, keepdims=True)
  return np.sqrt(square / np.maximum(freedom, 1))


def credited(batch: losses.Batch) -> Credited:
  """What the advantages of some batches may be made of."""
  mask = np.asarray(batch.mask & batch.valid[..., None])
  length = mask.sum(-1)
  entropy = np.sum(np.asarray(batch.entropy_old) * mask, -1)
  return Credited(
    np.asarray(batch.reward),
    np.asarray(batch.valid),
    length,
    entropy / np.maximum(length, 1),
  )


def alpha(given: Credited) -> np.ndarray:
  """Completions, over those in groups whose rewards differ, f64[N]."""
  high = np.where(given.valid, given.reward, -np.inf).max(-1, keepdims=True)
  low = np.where(given.valid, given.reward, np.inf).min(-1, keepdims=True)
  informative = ((high > low) & given.valid).sum((-2, -1))
  return given.valid.sum((-2, -1)) / np.maximum(informative, 1)


def _candidates(given: Credited) -> Iterator[tuple]:
  """Yields (text, numerator, spread's text, spread); no spread is 1."""
  r, valid, group, batch = given.reward, given.valid, -1, (-2, -1)
  n = valid.sum(group, keepdims=True)
  mean = _mean(r, valid, group)
  centred = np.where(valid, r - mean, 0)
  yield '1', np.ones_like(r), '', 1
  yield 'r', r, '', 1
  yield 'r - mean', centred, '', 1
  std = _deviation(r, valid, group)
  sample = _deviation(r, valid, group, 1)
  yield '(r - mean)', centred, 'std', std
  yield '(r - mean)', centred, 'sample std', sample
  yield '(r - mean)', centred, 'batch std', _deviation(r, valid, batch)
  every = _deviation(r, valid, batch, 1)
  yield '(r - mean)', centred, 'batch sample std', every
  rest = _deviation(centred, valid, batch)
  yield '(r - mean)', centred, 'batch std of r - mean', rest
  yield 'n/(n-1) (r - mean)', n / np.maximum(n - 1, 1) * centred, '', 1
  yield '(r - mean)', centred, 'mean', mean
  yield 'r - sum L r / sum L', r - _mean(r, given.length, group), '', 1
  whole = r - _mean(r, valid, batch)
  yield 'r - batch mean', whole, '', 1
  yield '(r - batch mean)', whole, 'batch std', _deviation(r, valid, batch)
  z = np.divide(centred, std, out=np.zeros_like(r), where=std > 1e-12)
  for text, value, weight, over in (
    ('(r - mean)/std', z, valid, 'batch'),
    ('r - mean', centred, given.length, 'token'),
    ('r', r, given.length, 'token'),
  ):
    whitened = value - _mean(value, weight, batch)
    scale = _deviation(value, weight, batch)
    yield f'({text} - {over} mean)', whitened, f'{over} std', scale
  yield 'alpha (r - mean)', alpha(given)[:, None, None] * centred, '', 1


def advantage_form(
  advantage: np.ndarray, given: Credited, live: np.ndarray
) -> AdvantageForm | None:
  """Finds the form of advantages that are one number per completion.

  Args:
    advantage: f64[N,P,G].
    given: What it may be made of.
    live: bool[N,P,G], the completions to compare.

  Returns:
    The form, or None. `epsilon` is what is added to the spread; a term
    `c <H>_i`, the completion's mean entropy times a constant, is found too.
  """
  for tolerance in _TOLERANCES:
    for candidate in _candidates(given):
      form = _compared(candidate, advantage, given, live, tolerance)
      if form is not None:
        return form
  return None


def _compared(
  candidate, advantage, given, live, tolerance
) -> AdvantageForm | None:
  """The form that one of the `_candidates` takes, or None."""
  text, numerator, spread_text, spread = candidate
  spread = np.broadcast_to(spread, numerator.shape)
  use = live & (np.abs(numerator) > 1e-12) & (spread > 1e-12)
  value, top, below = advantage[use], numerator[use], spread[use]
  size = np.abs(advantage[live]).max(initial=0)
  if np.abs(advantage[live & ~use]).max(initial=0) <= tolerance * size:
    over = f'/{spread_text}' if spread_text else ''
    factor = factor_of(value, top / below, tolerance)
    if factor is not None:
      return AdvantageForm(_times(factor, text) + over, factor, 0.0)
    if spread_text and value.any():
      # Least squares for value (below + epsilon) = top.
      epsilon = float(value @ (top - value * below) / (value @ value))
      off = np.abs(value - top / (below + epsilon)).max()
      if off <= tolerance * size:
        digits = 4 if tolerance < TOLERANCE else 2
        over = f'/({spread_text} + {epsilon:.{digits}g})'
        return AdvantageForm(text + over, 1.0, epsilon)
  if not spread_text:
    more = (advantage - numerator)[live]
    slope = factor_of(more, given.entropy[live], tolerance)
    if slope:
      sign = '+' if slope > 0 else '-'
      return AdvantageForm(
        f'{text} {sign} {number(abs(slope))} <H>_i', 1.0, 0.0
      )
  return None


class Charge(NamedTuple):
  """What is subtracted from each reward, or from it at each token."""

  coefficient: float
  text: str  # of k1 = log pi_old - log pi_ref


def charged(
  advantage: np.ndarray, batch: losses.Batch, live: np.ndarray
) -> Charge | None:
  """Finds a KL to the reference inside the reward.

  Whatever baselines and deviations of its group or batch an advantage has, it
  is `a (r - c K) + b` with `a` and `b` that the group has in common. Which `c`
  and `K` fit is read off by least squares.

  Args:
    advantage: f64[N,P,G,T], off the reference.
    batch: Its batches.
    live: bool[N,P,G,T], the tokens to compare.

  Returns:
    The charge, or None.
  """
  mask = np.asarray(batch.mask & batch.valid[..., None])
  k1 = np.asarray(batch.logp_old) - np.asarray(batch.logp_ref)
  to_go = np.cumsum((k1 * mask)[..., ::-1], -1)[..., ::-1]
  total = np.broadcast_to(to_go[..., :1], to_go.shape)
  reward = np.broadcast_to(np.asarray(batch.reward)[..., None], live.shape)
  for text, charge in (('sum k1', total), ('k1 to go', to_go)):
    found = []
    for at in np.ndindex(live.shape[:2]):
      use = live[at]
      own, value = reward[at][use], advantage[at][use]
      if len(np.unique(own)) < 3:  # a, c and b are three unknowns
        continue
      matrix = np.stack([own, charge[at][use], np.ones_like(own)], axis=1)
      slopes = np.linalg.lstsq(matrix, value, rcond=None)[0]
      off = np.abs(matrix @ slopes - value).max()
      if off > 10 * TOLERANCE * np.abs(value).max() or slopes[0] == 0:
        break
      found.append(-slopes[1] / slopes[0])
    else:
      coefficient = constant(np.array(found), 1e-3)
      if coefficient:
        return Charge(coefficient, text)
  return None


def _times(factor: float, text: str) -> str:
  """`factor text`; a factor of 1 is not written."""
  if text == '1':
    return number(factor)
  if abs(factor - 1) < TOLERANCE:
    return text
  inside = text if text.startswith('(') else f'({text})'
  return f'{number(factor)} {inside}'
