"""E12: the weight that GRPO gives a prompt when groups are finite."""

import math
from typing import Any

import numpy as np

from grpo_jax import losses
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import _settings

GROUPS = 2, 4, 8, 16, 64
SUCCESS = 0.02, 0.1, 0.5
_BATCHES, _SAMPLES = 20, 2000

CLAIMS = {
  'exact': Claim(
    'The expected gradient is proportional to the mean deviation of a group: '
    'Monte Carlo with `losses.methods.grpo` over the binomial sum.',
    'derived',
    0.99,
    1.01,
  ),
  'weight': Claim(
    'GRPO weighs a prompt by 1 / sqrt(p (1 - p)): real weight over that, '
    'least over p and G.',
    f'{GE}, eq. 5',
    0.99,
    1.01,
  ),
  'limit': Claim(
    'Large groups have the weight 1 / sqrt(p (1 - p)) (real weight over that, '
    'at p = 1/2 and G = 64).',
    'derived',
    0.99,
    1.01,
  ),
  'rare': Claim(
    'For rare success and small groups less than half of the weight 1 / '
    'sqrt(p (1 - p)) is left (share that is left at p = 0.02 and G = 8).',
    'derived',
    high=0.5,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Samples groups, and sums over the binomial distribution.

  Args:
    full: Ten times as many groups.

  Returns:
    `exact[p][g]` and `sampled[p][g]` (a list of means of independent batches):
    the expected gradient over that of GRPO with the exact deviation.
  """
  random, samples = np.random.default_rng(0), _SAMPLES * (10 if full else 1)
  exact, sampled = [], []
  for p in SUCCESS:
    exact.append([expected(p, group) for group in GROUPS])
    sampled.append([])
    for group in GROUPS:
      right = random.binomial(group, p, (_BATCHES, samples))
      gain = _gain(group)[right] / math.sqrt(p * (1 - p))
      sampled[-1].append(gain.mean(axis=1).tolist())
  return {
    'success': SUCCESS,
    'groups': GROUPS,
    'exact': exact,
    'sampled': sampled,
  }


def expected(p: float, group: int) -> float:
  """E[std of a group] / sqrt(p (1 - p)), by the binomial sum."""
  right = np.arange(group + 1)
  chance = [math.comb(group, k) * p**k * (1 - p) ** (group - k) for k in right]
  std = np.sqrt(right * (group - right)) / group
  return float(np.dot(chance, std) / math.sqrt(p * (1 - p)))


def _gain(group: int) -> np.ndarray:
  """sum_i c_i r_i of a group with 0, 1, ..., G right ones, by the loss.

  It is what the gradient of log p - log(1 - p) is multiplied by, since the
  coefficients add up to 0. All G + 1 groups are one program of shape [65,64].
  """
  most = max(GROUPS)
  reward = (np.arange(most) < np.arange(most + 1)[:, None]).astype(float)
  valid = np.broadcast_to(np.arange(most) < group, reward.shape)
  method = losses.methods.grpo(kl_coefficient=0)
  length = np.ones(reward.shape, int)
  c, _ = _settings.of_groups(method, reward, length, valid=valid)
  return np.sum(c[..., 0] * reward, axis=1)[: group + 1]


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  exact, sampled = np.array(numbers['exact']), np.array(numbers['sampled'])
  ratio = (sampled / exact[..., None]).mean(axis=(0, 1))  # [batches]
  p, group = numbers['success'], numbers['groups']
  least = np.unravel_index(exact.argmin(), exact.shape)
  half, last = p.index(0.5), group.index(64)
  return {
    'exact': claims.over_seeds(ratio.tolist()),
    'weight': Measured(
      float(exact.min()),
      example=f'Smallest case: p = 1/2 and G = 2, where '
      f'{exact[half, 0]:.3g} of it is left; least at p = {p[least[0]]:g}.',
    ),
    'limit': Measured(float(exact[half, last])),
    'rare': Measured(float(exact[p.index(0.02), group.index(8)])),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes = figure.subplots()
  for p, exact, sampled, name in zip(
    numbers['success'], numbers['exact'], numbers['sampled'], SERIES
  ):
    axes.plot(numbers['groups'], exact, color=colors[name], label=f'p = {p:g}')
    points = np.mean(sampled, axis=-1)
    axes.plot(numbers['groups'], points, 'o', color=colors[name])
  axes.axhline(1, color=colors['faint'], ls=':')
  axes.set_xscale('log', base=2)
  axes.set(xlabel='completions of a group', ylim=(0, 1.08))
  axes.set_ylabel('weight / (1 / sqrt(p (1 - p)))')
  axes.legend(title='line: binomial sum\ndots: sampled groups')
  rare = measure(numbers)['rare'].mean
  return (
    f'Groups of 8 keep {rare:.0%} of the weight that theory gives a prompt '
    'with 2% success'
  )


EXPERIMENT = Experiment(
  'E12', 'the weight of a prompt for finite groups', CLAIMS, run, measure, draw
)
