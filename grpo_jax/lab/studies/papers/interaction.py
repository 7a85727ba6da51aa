"""E13: whether gradients of different prompts agree, as assumption A4 wants."""

from typing import Any

import numpy as np

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

_PROMPTS, _ANSWERS, _WIDTH, _STEPS, _RATE = 24, 6, 32, 301, 4.0
_PAPER = {'0': 50.5, '260': 72.7, '500': 66.4}
"""Table 3 of the paper: % of pairs with a positive cosine, by training step."""
_PAPER_M = {'0': 89, '260': 250, '500': 418}
"""Table 3 of the paper: the bound M, by training step."""

CLAIMS = {
  'own_data': Claim(
    'A4: all pairs of prompts have gradients with a product of at least 0 '
    "(largest share of pairs in the paper's own table 3).",
    f'{GE}, assumption A4 and table 3',
    1,
  ),
  'here': Claim(
    'A4 on a log-linear policy with shared features: least share of pairs with '
    'a positive product during training.',
    f'{GE}, assumption A4',
    1,
  ),
  'two_prompts': Claim(
    'A4 on two prompts that share one feature (product of their gradients).',
    f'{GE}, assumption A4',
    0,
  ),
  'm_own_data': Claim(
    "M < 10 (section 4.2), in the paper's own table 3 (least M of its three "
    'steps).',
    f'{GE}, section 4.2 and table 3',
    high=10,
  ),
  'm': Claim(
    'M < 10 on our log-linear policy with random shared features, which is not '
    "the paper's model (the least M that the pairs with a positive product "
    'need at the start).',
    f'derived from {GE}, section 4.2',
    high=10,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains on all prompts, and looks at all pairs of their gradients.

  Args:
    full: 40 seeds in place of 10.

  Returns:
    For seeds, then steps: the share `positive` of the pairs, the `mean` and
    `std` of their cosines, the least `m` of the positive pairs, and the mean
    `success`; and the product of the smallest example.
  """
  seeds = [_run(seed) for seed in range(40 if full else 10)]
  found = {
    name: [[at[name] for at in run] for run in seeds]
    for name in ('positive', 'mean', 'std', 'm', 'success')
  }
  # Two answers each; the features of the right answers are 1 and -1.
  x = np.array([[[1.0], [0.0]], [[-1.0], [0.0]]])
  first, second = _settings.gradients(x, _settings.policy(x, np.zeros(1)))
  return {
    **found,
    'steps': list(range(0, _STEPS, 10)),
    'two_prompts': float(first @ second),
    'paper': dict(_PAPER),
    'paper_m': dict(_PAPER_M),
  }


def _run(seed: int) -> list[dict[str, float]]:
  """What `_pairs` finds at every tenth step of a training."""
  x = _settings.features(seed, _PROMPTS, _ANSWERS, _WIDTH, 0.3)
  theta, found = np.zeros(_WIDTH), []
  for step in range(_STEPS):
    pi = _settings.policy(x, theta)
    gradient = _settings.gradients(x, pi)
    if step % 10 == 0:
      found.append({**_pairs(x, gradient), 'success': float(pi[:, 0].mean())})
    theta = theta + _RATE * gradient.mean(axis=0)
  return found


def _pairs(x, gradient) -> dict[str, float]:
  """Statistics over the ordered pairs of different prompts."""
  other = ~np.eye(len(x), dtype=bool)
  product = (gradient @ gradient.T)[other]
  norm = np.linalg.norm(gradient, axis=1)
  cosine = product / np.outer(norm, norm)[other]
  # A4: M <g_i, g_j> >= |X_i g_j|^2 / |X_i|^2.
  moved = np.sum(np.einsum('ikd,jd->ijk', x, gradient) ** 2, axis=-1)
  moved = moved / np.linalg.norm(x, 2, axis=(1, 2))[:, None] ** 2
  positive = product > 0
  return {
    'positive': float(positive.mean()),
    'mean': float(cosine.mean()),
    'std': float(cosine.std()),
    'm': float(np.max(moved[other][positive] / product[positive])),
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  least = [min(run) for run in numbers['positive']]
  best = max(numbers['paper'], key=numbers['paper'].get)
  least_m = min(numbers['paper_m'], key=numbers['paper_m'].get)
  return {
    'own_data': Measured(
      numbers['paper'][best] / 100,
      example=f'Smallest case: its best step, {best}.',
    ),
    'here': claims.over_seeds(least),
    'two_prompts': Measured(
      numbers['two_prompts'],
      example='Smallest case: two answers each, the right ones with features '
      '1 and -1, the wrong ones 0, theta = 0.',
    ),
    'm_own_data': Measured(
      float(numbers['paper_m'][least_m]),
      example=f'Smallest case: its step {least_m}.',
    ),
    'm': claims.over_seeds([run[0] for run in numbers['m']]),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  t = numbers['steps']
  for run in numbers['positive']:
    left.plot(t, run, color=colors['first'], alpha=0.3, lw=1)
  mean = np.mean(numbers['positive'], axis=0)
  left.plot(t, mean, color=colors['first'], label='here, mean of seeds')
  steps = [int(step) * t[-1] / 500 for step in numbers['paper']]
  shares = [share / 100 for share in numbers['paper'].values()]
  left.plot(
    steps, shares, 's', color=colors['second'], label="the paper's table 3"
  )
  left.axhline(1, color=colors['text'], ls=':')
  left.text(t[-1], 1.005, 'what A4 needs', va='bottom', ha='right')
  left.set(xlabel="steps (the paper's 500 scaled)", ylim=(0.3, 1.05))
  left.set_ylabel('share of pairs with a positive product')
  left.legend(loc='lower right')
  for name, color in (('mean', 'third'), ('std', 'fourth')):
    curve = np.mean(numbers[name], axis=0)
    right.plot(t, curve, color=colors[color], label=f'{name} of the cosines')
  right.set(xlabel='steps')
  right.legend()
  found = measure(numbers)
  return (
    'A4 wants all pairs of prompts to agree: in the paper at best '
    f'{found["own_data"].mean:.0%} do, here at worst {found["here"].mean:.0%}'
  )


EXPERIMENT = Experiment(
  'E13', 'do gradients of prompts agree', CLAIMS, run, measure, draw
)
