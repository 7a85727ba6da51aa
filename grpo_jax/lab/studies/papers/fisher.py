"""E14: whether a Fisher information without the reward follows its variance."""

from typing import Any

import numpy as np

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

_PROMPTS, _ANSWERS, _WIDTH, _SAMPLES = 40, 6, 32, 64

CLAIMS = {
  'weighted': Claim(
    'The Fisher information weighted with the square of the centred reward '
    'follows the variance of the reward (Pearson over prompts).',
    f'derived from {GE}, lemma 3.1',
    0.5,
  ),
  'paper': Claim(
    "The paper's proxy, B g_B^2 with g_B the mean score of sampled answers, "
    'which knows no reward, follows the variance of the reward as in the '
    'paper (Pearson over prompts, r = 0.34 there).',
    f'{GE}, table 1',
    0.2,
    0.5,
  ),
  'other': Claim(
    "The paper's proxy does not follow the reward variance of another prompt "
    '(Pearson over prompts).',
    f'{GE}, table 1',
    -0.1,
    0.1,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Samples answers of policies with prompts of all difficulties.

  Args:
    full: 200 seeds in place of 40.

  Returns:
    For every seed the Pearson correlations `weighted`, `paper` and `other`,
    and one seed's pairs to draw.
  """
  runs = [_run(seed) for seed in range(200 if full else 40)]
  names = 'weighted', 'paper', 'other'
  found = {name: [run[0][name] for run in runs] for name in names}
  return {**found, 'pairs': runs[0][1]}


def _run(seed: int):
  """The correlations of a seed, and what they correlate, by prompt."""
  random = np.random.default_rng(1000 + seed)
  x = _settings.features(seed, _PROMPTS, _ANSWERS, _WIDTH, 0.0)
  # Along the features of some right answers, so that difficulties differ.
  aim = x[:, 0] * random.normal(1, 4, (_PROMPTS, 1))
  pi = _settings.policy(x, aim.sum(axis=0))
  score = x - np.einsum('ik,ikd->id', pi, x)[:, None]  # [I,K,D]
  right = np.arange(_ANSWERS) == 0
  p = pi[:, 0]
  variance = p * (1 - p)
  square = np.sum(score**2, axis=-1)
  weighted = np.sum(pi * (right - p[:, None]) ** 2 * square, axis=1)
  drawn = np.stack([random.multinomial(_SAMPLES, one) for one in pi])
  mean = np.einsum('ik,ikd->id', drawn / _SAMPLES, score)
  proxy = _SAMPLES * np.sum(mean**2, axis=-1)
  pearson = lambda a, b: float(np.corrcoef(a, b)[0, 1])
  found = {
    'weighted': pearson(weighted, variance),
    'paper': pearson(proxy, variance),
    'other': pearson(proxy, np.roll(variance, 1)),
  }
  pairs = {'variance': variance, 'weighted': weighted, 'paper': proxy}
  return found, {name: value.tolist() for name, value in pairs.items()}


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  return {name: claims.over_seeds(numbers[name]) for name in CLAIMS}


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes, found = figure.subplots(1, 2), measure(numbers)
  pairs = numbers['pairs']
  for one, name, color, title in (
    (axes[0], 'weighted', 'third', 'weighted with the reward'),
    (axes[1], 'paper', 'second', "the paper's proxy, without it"),
  ):
    one.plot(pairs['variance'], pairs[name], 'o', ms=4, color=colors[color])
    text = f'{title}: r = {found[name].mean:.2f} ± {found[name].half:.2f}'
    one.set(title=text, xlabel='variance of the reward, p (1 - p)')
  axes[0].set_ylabel('trace of the Fisher information')
  return (
    'Correlation of Fisher information and variance of the reward: '
    f'{found["weighted"].mean:.2f} if weighted with the reward, '
    f'{found["paper"].mean:.2f} if not'
  )


EXPERIMENT = Experiment(
  'E14', 'Fisher information and reward variance', CLAIMS, run, measure, draw
)
