"""E8b: how tight the lemmas on curvature are, by adversarial search."""

from typing import Any

import numpy as np

from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

_RANDOM = 4000  # instances of each size

CLAIMS = {
  'paper': Claim(
    'L3.1: the norm of the Hessian is at most 4 X^2 V (largest found / X^2 V).',
    f'{GE}, lemma 3.1',
    high=4,
  ),
  'tight': Claim(
    'The best constant is 2: nothing found is above.', 'derived', high=2 + 1e-9
  ),
  'reached': Claim(
    'The best constant is 2: it is reached up to a thousandth.',
    'derived',
    1.999,
  ),
  'absolute': Claim(
    'The norm of the Hessian is at most X^2 / (3 sqrt 3) = 0.1925 X^2.',
    'derived (searched, not proved)',
    high=0.19246,
  ),
  'gradient': Claim(
    'The gradient is at most sqrt(2)/4 X = 0.354 X (paper: 0.5).',
    'derived',
    high=0.35356,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Evaluates random policies, and a family that is bad on purpose.

  Args:
    full: Ten times as many random policies.

  Returns:
    For every instance success probability `p`, `hessian` / (X^2 V),
    `absolute` = hessian / X^2 and `gradient` / X; the bad family comes last.
  """
  random = np.random.default_rng(0)
  parts = []
  for answers, width in ((2, 1), (2, 3), (3, 2), (5, 3), (8, 4)):
    number = _RANDOM * (10 if full else 1)
    x = random.normal(size=(number, answers, width))
    logits = random.normal(size=(number, answers)) * random.uniform(
      0, 6, (number, 1)
    )
    parts.append(_instances(x, logits))
  # Two answers, opposite features: x = (1, -1), and the right one is rare.
  p = np.geomspace(1e-4, 0.5, 60)
  logits = np.stack([np.log(p), np.log(1 - p)], axis=-1)
  bad = np.broadcast_to(np.array([[1.0], [-1.0]]), (len(p), 2, 1))
  parts.append(_instances(bad, logits))
  found = {k: np.concatenate([x[k] for x in parts]).tolist() for k in parts[0]}
  return {**found, 'bad': len(p)}


def _instances(x, logits) -> dict[str, np.ndarray]:
  """Hessians and gradients of policies softmax(logits) with features x.

  The first answer is right. Hess J = p [(x_a - xbar)(x_a - xbar)^T - Cov(x)].
  """
  pi = _settings.softmax(logits)
  p, centred = pi[:, 0], x - np.einsum('nk,nkd->nd', pi, x)[:, None]
  own = centred[:, 0]
  covariance = np.einsum('nk,nkd,nke->nde', pi, centred, centred)
  outer = own[:, :, None] * own[:, None]
  hessian = p[:, None, None] * (outer - covariance)
  size = np.linalg.norm(hessian, 2, axis=(1, 2))
  square = np.linalg.norm(x, 2, axis=(1, 2)) ** 2
  variance = p * pi[:, 1:].sum(-1)
  return {
    'p': p,
    'hessian': size / (square * variance),
    'absolute': size / square,
    'gradient': p * np.linalg.norm(own, axis=-1) / np.sqrt(square),
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  worst = float(np.max(numbers['hessian']))
  at = numbers['p'][-numbers['bad']]  # the rarest success of the bad family
  example = f'Smallest case: two answers, features 1 and -1, p = {at:.2g}.'
  return {
    'paper': Measured(worst),
    'tight': Measured(worst),
    'reached': Measured(worst, example=example),
    'absolute': Measured(float(np.max(numbers['absolute']))),
    'gradient': Measured(float(np.max(numbers['gradient']))),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes, bad = figure.subplots(), numbers['bad']
  p, size = np.array(numbers['p']), np.array(numbers['hessian'])
  axes.plot(
    p[:-bad], size[:-bad], '.', ms=2, color=colors['first'], alpha=0.35,
    label='random policies', rasterized=True,
  )  # fmt: skip
  axes.plot(p[-bad:], size[-bad:], color=colors['second'], label='2 (1 - 2 p)')
  for at, text in ((4, "the paper's constant"), (2, 'the best constant')):
    axes.axhline(at, color=colors['text'], ls=':', lw=1)
    axes.text(1.2e-6, at + 0.06, text, color=colors['text'])
  axes.set(xscale='log', xlim=(1e-6, 1), ylim=(0, 4.5))
  axes.set_xlabel('probability of the right answer')
  axes.set_ylabel('norm of the Hessian / (X² V)')
  axes.legend(loc=(0.72, 0.6), markerscale=5)
  most = measure(numbers)['tight'].mean
  return (
    f'Curvature is at most {most:.3f} X² V in {len(p):,} policies: the '
    f'constant 4 is {4 / most:.3f} times that'
  )


EXPERIMENT = Experiment(
  'E8b', 'the constants of curvature', CLAIMS, run, measure, draw
)
