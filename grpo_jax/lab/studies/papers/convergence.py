"""Experiments on rates of convergence, from the exact gradient of one prompt.

One prompt has K answers and a logit for each, of which one is right: all wrong
answers begin equally likely and stay so, and the gap between the right logit
and the others is all there is (`train`). This is the setting of Ge et al.
(arXiv 2601.23135) with X = identity, where X_max = 1.

- E8, `normalized_rate`: the two forms of the theorem on GRPO's rate.
- E9, `rate_exponents`: how fast failures fall, with a division by the deviation
  and without.
- E11, `threshold`: when the theory says that normalisation helps, and when it
  does.
"""

from typing import Any

import numpy as np

from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured

_ANSWERS = 4  # K
_RATES = {'reinforce': 1.0, 'grpo': 0.5}  # of the theorems


def train(start, method: str, steps: int):
  """Follows the exact gradient of one prompt, every step.

  Args:
    start: Success probabilities to begin with, [S], in (0, 1).
    method: 'grpo', which divides the gradient by the deviation of the reward,
      or 'reinforce', which does not; each at its rate in `_RATES`.
    steps: T.

  Returns:
    The success probability at every step, the first included, f64[T + 1, S].
  """
  start = np.asarray(start, np.float64)
  z = np.log(start / (1 - start)) + np.log(_ANSWERS - 1)
  path = np.empty((steps + 1, *start.shape))
  for t in range(steps + 1):
    wrong = 1 / (1 + np.exp(z) / (_ANSWERS - 1))  # exact where p is next to 1
    path[t] = 1 - wrong
    size = (1 - wrong) * wrong
    if method == 'grpo':
      size = np.sqrt(size)
    z = z + _RATES[method] * size * _ANSWERS / (_ANSWERS - 1)
  return path


def gradient_squared(p):
  """The squared norm of the exact gradient at success probability p."""
  return (p * (1 - p)) ** 2 * _ANSWERS / (_ANSWERS - 1)


def reward_deviation(p):
  """The standard deviation of a binary reward."""
  return np.sqrt(p * (1 - p))


# E8: the two forms of the theorem on GRPO's rate of convergence.

START_RATE = 0.02, 0.1, 0.25, 0.5, 0.9
_STEPS_RATE = 5000

_RATE_CLAIMS = {
  'reinforce': Claim(
    'T3.1: the squared gradients of REINFORCE add up to no more than its bound '
    '(largest sum / bound).',
    f'{GE}, theorem 3.1',
    high=1,
  ),
  'sum_form': Claim(
    'T3.2 as the main text has it: the squared gradients of GRPO add up to no '
    'more than the bound times C(T) (largest sum / bound).',
    f'{GE}, theorem 3.2, main text',
    high=1,
  ),
  'min_form': Claim(
    'T3.2 as the appendix proves it: the least squared gradient is no more '
    'than the bound times C(T) / T (largest ratio).',
    f'{GE}, theorem 3.2, appendix',
    high=1,
  ),
}


def _run_rate() -> dict[str, Any]:
  """Trains one prompt with both methods at the rates of the theorems.

  Returns:
    Success probabilities at every step: `reinforce[t][s]`, `grpo[t][s]`.
  """
  paths = {name: train(START_RATE, name, _STEPS_RATE) for name in _RATES}
  return {
    'start': START_RATE,
    **{name: path.tolist() for name, path in paths.items()},
  }


def _ratios(numbers) -> dict[str, np.ndarray]:
  """What each form bounds over its bound, [T, S], for T = 1, 2, ... steps."""
  start, plain, grpo = (
    np.array(numbers[name]) for name in ('start', 'reinforce', 'grpo')
  )
  bound, steps = 2 * (1 - start), np.arange(1, len(grpo))[:, None]
  squares = [gradient_squared(path[:-1]) for path in (plain, grpo)]
  # C(T) = 8 / (3 T) times the sum of the deviations.
  c = 8 / (3 * steps) * np.cumsum(reward_deviation(grpo[:-1]), axis=0)
  return {
    'reinforce': np.cumsum(squares[0], axis=0) / bound,
    'sum_form': np.cumsum(squares[1], axis=0) / (bound * c),
    'min_form': np.minimum.accumulate(squares[1]) / (bound * c / steps),
  }


def _measure_rate(numbers) -> dict[str, Measured]:
  ratios = _ratios(numbers)
  found = {name: Measured(float(x.max())) for name, x in ratios.items()}
  over = ratios['sum_form'] > 1
  if over.any():
    # The fewest steps, and the start that needs them.
    first = np.where(over.any(0), over.argmax(0) + 1, len(over) + 1)
    at = int(first.argmin())
    found['sum_form'] = found['sum_form']._replace(
      example=f'Smallest case: one prompt, {_ANSWERS} answers, success '
      f'{numbers["start"][at]:g} at the start: broken from step {first[at]} on.'
    )
  return found


def _draw_rate(numbers, found, figure, colors) -> str:
  axes, ratios = figure.subplots(), _ratios(numbers)
  steps = np.arange(1, len(ratios['sum_form']) + 1)
  for name, color, label in (
    ('sum_form', 'second', 'GRPO, sum form (main text)'),
    ('min_form', 'third', 'GRPO, least form (appendix)'),
    ('reinforce', 'first', 'REINFORCE, sum form'),
  ):
    for s, curve in enumerate(ratios[name].T):
      label_of = label if s == 0 else None
      axes.plot(steps, curve, color=colors[color], label=label_of, alpha=0.8)
  axes.axhline(1, color=colors['text'], ls=':', lw=1)
  axes.set(
    xscale='log',
    yscale='log',
    ylim=(1e-4, 100),
    xlabel='steps',
    ylabel='left side / bound (above 1: broken)',
  )
  axes.legend(
    loc='upper left',
    title=f'starts {", ".join(f"{p:g}" for p in numbers["start"])}',
  )
  return (
    'Left side / bound of theorem 3.2, at most: '
    f'{found["sum_form"].mean:.0f}-fold in the sum form, '
    f'{found["min_form"].mean:.2g}-fold in the form with the least gradient'
  )


# E9: normalisation changes the exponent of convergence, not a constant.

START_EXPONENTS = 1e-4, 3e-4, 1e-3, 3e-3
_STEPS_EXPONENTS = 20_000

_EXPONENTS_CLAIMS = {
  'reinforce_tail': Claim(
    'The failure rate (1 - success rate) of REINFORCE falls as 1 / t (slope '
    'of its log against log t).',
    'derived',
    -1.03,
    -0.97,
  ),
  'grpo_tail': Claim(
    'The failure rate of GRPO falls as 1 / t^2 (slope of its log against log '
    't).',
    'derived',
    -2.03,
    -1.97,
  ),
  'reinforce_escape': Claim(
    'REINFORCE leaves a small success rate p after a time ~ 1 / p (slope of '
    'log time against log p).',
    'derived',
    -1.03,
    -0.97,
  ),
  'grpo_escape': Claim(
    'GRPO leaves a small success rate p after a time ~ 1 / sqrt(p) (slope of '
    'log time against log p).',
    'derived',
    -0.53,
    -0.47,
  ),
}


def _run_exponents() -> dict[str, Any]:
  """Trains one prompt from several small success rates, with both methods.

  Returns:
    For each method the steps to a success rate of 1/2 from each start, and
    failures from a start of 1/4 at a few steps.
  """
  at = np.unique(np.geomspace(10, _STEPS_EXPONENTS, 40).astype(int))
  found = {'start': START_EXPONENTS, 'at': at.tolist()}
  for name in _RATES:
    path = train((*START_EXPONENTS, 0.25), name, _STEPS_EXPONENTS)
    found[name] = {
      'escape': np.argmax(path[:, :-1] >= 0.5, axis=0).tolist(),
      'failures': (1 - path[at, -1]).tolist(),
    }
  return found


def _slope(x, y) -> float:
  return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _measure_exponents(numbers) -> dict[str, Measured]:
  at, found = np.array(numbers['at']), {}
  late = at >= at[-1] / 10
  for name in _RATES:
    failures = np.array(numbers[name]['failures'])
    escape = numbers[name]['escape']
    found[f'{name}_tail'] = Measured(_slope(at[late], failures[late]))
    found[f'{name}_escape'] = Measured(_slope(numbers['start'], escape))
  return found


def _draw_exponents(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  for name, color in (('reinforce', 'first'), ('grpo', 'second')):
    text = {'reinforce': 'REINFORCE', 'grpo': 'GRPO'}[name]
    for axes, x, y, of in (
      (left, numbers['at'], numbers[name]['failures'], 'tail'),
      (right, numbers['start'], numbers[name]['escape'], 'escape'),
    ):
      slope = found[f'{name}_{of}'].mean
      label = f'{text}: slope {slope:.2f}'
      axes.plot(x, y, 'o-', ms=3.5, color=colors[color], label=label)
  left.set(xscale='log', yscale='log', xlabel='steps', ylabel='failure rate')
  right.set(
    xscale='log',
    yscale='log',
    xlabel='success rate at the start',
    ylabel='steps until half succeed',
  )
  left.legend()
  right.legend()
  return (
    f'Failures fall as t^{found["grpo_tail"].mean:.2f} with a division by the '
    f'deviation, as t^{found["reinforce_tail"].mean:.2f} without'
  )


# E11: when the theory says that normalisation helps, and when it does.

_STEPS_THRESHOLD = 400
_PROMPTS, _SETS, _ORDERS, _SAMPLED = 8, 40, 10, 800
"""Prompts of a set, sets, random orders of prompts, and steps of each."""
START_THRESHOLD = tuple(np.round(np.linspace(0.02, 0.98, 49), 4).tolist())

_THRESHOLD_CLAIMS = {
  'always': Claim(
    "GRPO's bound is strictly better than REINFORCE's, C(T) < 1 (largest C).",
    f'{GE}, abstract',
    high=1,
  ),
  'start': Claim(
    "At the paper's own start, 0.45 right, C(1) is 1.33: no gain is predicted.",
    f'derived from {GE}, figure 3',
    1.32,
    1.34,
  ),
  'conservative': Claim(
    'Where C(T) > 1 GRPO still has no larger least gradient than REINFORCE '
    '(one prompt; share of these starts and numbers of steps).',
    'derived',
    1,
    1,
  ),
  'start_decides': Claim(
    'In sets of prompts of mixed difficulty, C(T) < 1 where the mean deviation '
    'at the start is below 3/8, and C(T) > 1 where it is above (share of sets '
    f'for which that is so after {_SAMPLED} steps, {_SAMPLED // _PROMPTS} for '
    'each prompt).',
    f'derived from {GE}, C(T)',
    0.95,
  ),
  'flips': Claim(
    'In such sets the methods change places where their bounds do: GRPO has '
    'the smaller least gradient where C(T) < 1, and REINFORCE where C(T) > 1 '
    '(share of sets and numbers of steps for which that is so).',
    f'{GE}, comparison of theorems 3.1 and 3.2',
    0.95,
  ),
}


def _run_threshold() -> dict[str, Any]:
  """Trains with both methods at the rates of the theorems.

  Returns:
    For one prompt: `c[t][s]` and the least squared gradient of each method, for
    steps 1, 2, 4, ... and starts. For sets of prompts, under `sets`: the same,
    means over prompts, and the mean `deviation` of each set at the start.
  """
  at = np.unique(np.geomspace(1, _STEPS_THRESHOLD, 30).astype(int))
  steps = np.arange(1, _STEPS_THRESHOLD + 1)[:, None]
  paths = {
    name: train(START_THRESHOLD, name, _STEPS_THRESHOLD)[:-1] for name in _RATES
  }
  mean = np.cumsum(reward_deviation(paths['grpo']), axis=0) / steps
  return {
    'start': START_THRESHOLD,
    'at': at.tolist(),
    'c': (8 / 3 * mean)[at - 1].tolist(),
    **{
      name: np.minimum.accumulate(gradient_squared(path))[at - 1].tolist()
      for name, path in paths.items()
    },
    'paper': float(reward_deviation(0.45) * 8 / 3),
    'sets': _sets(),
  }


def _sets() -> dict[str, Any]:
  """Trains sets of prompts; every step draws a prompt. See `_run_threshold`.

  No two prompts share a parameter, so how often a prompt was drawn tells its
  policy.
  """
  random = np.random.default_rng(0)
  # From nearly all prompts at 0 or 1, to nearly all of them at a half.
  shape = np.geomspace(0.1, 5, _SETS)[:, None]
  start = np.clip(random.beta(shape, shape, (_SETS, _PROMPTS)), 0.02, 0.98)
  drawn = random.integers(0, _PROMPTS, (_ORDERS, _SAMPLED, 1))
  drawn = drawn == np.arange(_PROMPTS)
  before = np.cumsum(drawn, axis=1) - drawn  # i64[O,T,P], how often by then
  prompt = np.arange(_PROMPTS)
  at = np.unique(np.geomspace(_PROMPTS, _SAMPLED, 20).astype(int))
  count = np.arange(1, _SAMPLED + 1)[:, None]

  def over_orders(values):  # f64[N,P] by draws -> f64[T,P]
    return values[before, prompt].mean(axis=0)

  found = {'c': [], 'reinforce': [], 'grpo': []}
  for prompts in start:
    paths = {name: train(prompts, name, before.max()) for name in _RATES}
    for name, path in paths.items():
      square = over_orders(gradient_squared(path))
      least = np.minimum.accumulate(square).mean(axis=1)
      found[name].append(least[at - 1].tolist())
    deviation = over_orders(reward_deviation(paths['grpo']))
    c = 8 / 3 * (np.cumsum(deviation, axis=0) / count).mean(axis=1)
    found['c'].append(c[at - 1].tolist())
  deviation = reward_deviation(start).mean(axis=1)
  return {'at': at.tolist(), 'deviation': deviation.tolist(), **found}


def _measure_threshold(numbers) -> dict[str, Measured]:
  c = np.array(numbers['c'])
  better = np.array(numbers['grpo']) <= np.array(numbers['reinforce']) + 1e-15
  at = numbers['start'][int(c[0].argmax())]
  example = f'Smallest case: one prompt, success {at:g}, one step.'
  sets = {name: np.array(x) for name, x in numbers['sets'].items()}
  promised = sets['c'] < 1
  smaller = sets['grpo'] < sets['reinforce']
  early = int(np.sum(promised[:, 0] != smaller[:, 0]))
  return {
    'always': Measured(float(c.max()), example=example if c.max() > 1 else ''),
    'start': Measured(numbers['paper']),
    'conservative': Measured(
      float(better[c > 1].mean()) if (c > 1).any() else float('nan')
    ),
    'start_decides': Measured(
      float(np.mean((sets['deviation'] < 3 / 8) == promised[:, -1]))
    ),
    'flips': Measured(
      float(np.mean(promised == smaller)),
      example=f'Smallest case: {sets["at"][0]} steps, where {early} of '
      f'{len(smaller)} sets have another order; in all cases together GRPO has '
      f'the smaller least gradient in {smaller.mean():.0%}, and C(T) < 1 in '
      f'{promised.mean():.0%}.',
    ),
  }


def _draw_threshold(numbers, found, figure, colors) -> str:
  from matplotlib.colors import LinearSegmentedColormap

  (axes, right), c = figure.subplots(1, 2), np.array(numbers['c'])
  gain = np.log10(np.array(numbers['reinforce']) / np.array(numbers['grpo']))
  shades = LinearSegmentedColormap.from_list(
    'gain', [colors['page'], colors['third']]
  )
  grid = axes.pcolormesh(
    numbers['start'],
    numbers['at'],
    gain,
    cmap=shades,
    vmin=0,
    shading='nearest',
  )
  figure.colorbar(
    grid, ax=axes, label='log10: least gradient² of REINFORCE / of GRPO'
  )
  line = axes.contour(
    numbers['start'], numbers['at'], c, [1.0], colors=colors['second']
  )
  axes.clabel(line, fmt='C(T) = 1')
  axes.set(
    yscale='log',
    ylabel='steps',
    xlabel='success rate at the start',
    title='one prompt',
  )
  axes.grid(False)
  sets = {name: np.array(x) for name, x in numbers['sets'].items()}
  right.plot(
    sets['c'], sets['reinforce'] / sets['grpo'], '.', color=colors['first']
  )
  right.axvline(1, color=colors['second'], lw=1)
  right.axhline(1, color=colors['text'], lw=1, ls=':')
  right.set(
    yscale='log',
    xlabel='C(T)',
    title='sets of prompts',
    ylabel='least gradient² of REINFORCE / of GRPO',
  )
  return (
    'Where C(T) > 1 theory promises GRPO no gain; there it was no worse in '
    f'{found["conservative"].mean:.0%} of the cases with one prompt'
  )


EXPERIMENTS = {
  'normalized_rate': Experiment(
    'E8',
    'two forms of the rate of GRPO',
    _RATE_CLAIMS,
    _measure_rate,
    _draw_rate,
    lambda full: _run_rate(),
  ),
  'rate_exponents': Experiment(
    'E9',
    'exponents of convergence',
    _EXPONENTS_CLAIMS,
    _measure_exponents,
    _draw_exponents,
    lambda full: _run_exponents(),
  ),
  'threshold': Experiment(
    'E11',
    'the threshold C(T) = 1',
    _THRESHOLD_CLAIMS,
    _measure_threshold,
    _draw_threshold,
    lambda full: _run_threshold(),
  ),
}
