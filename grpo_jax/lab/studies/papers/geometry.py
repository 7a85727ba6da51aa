"""Experiments on the gradients of log-linear policies.

Several prompts share their parameters: pi(k | i) is the softmax over k of
x_ik . theta, and answer 0 is right (Ge et al., arXiv 2601.23135, equation 6).

- E8b, `curvature`: how tight the lemmas on curvature are, by adversarial
  search.
- E13, `interaction`: whether gradients of different prompts agree, as
  assumption A4 wants.
- E14, `fisher`: whether a Fisher information without the reward follows its
  variance.
"""

from typing import Any

import numpy as np

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured


def features(seed: int, prompts: int, answers: int, width: int, shared: float):
  """Random features f64[I,K,D] of norm about 1.

  Args:
    seed: Of the random numbers.
    prompts: I.
    answers: K.
    width: D.
    shared: Part of the variance, in [0, 1], that an answer's features have in
      common over prompts.
  """
  random = np.random.default_rng(seed)
  own = random.normal(size=(prompts, answers, width))
  common = random.normal(size=(1, answers, width))
  mixed = np.sqrt(1 - shared) * own + np.sqrt(shared) * common
  return mixed / np.sqrt(width)


def softmax(logits):
  """Probabilities f64[...,K] of logits."""
  pi = np.exp(logits - logits.max(-1, keepdims=True))
  return pi / pi.sum(-1, keepdims=True)


def policy(x, theta):
  """Probabilities f64[I,K]."""
  return softmax(x @ theta)


def gradients(x, pi):
  """Exact gradients of each prompt's success probability, f64[I,D]."""
  mean = np.einsum('ik,ikd->id', pi, x)
  return pi[:, :1] * (x[:, 0] - mean)


# E8b: how tight the lemmas on curvature are, by adversarial search.

_RANDOM = 4000  # instances of each size

_CURVATURE_CLAIMS = {
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


def _run_curvature(full: bool = False) -> dict[str, Any]:
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
  pi = softmax(logits)
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


def _measure_curvature(numbers) -> dict[str, Measured]:
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


def _draw_curvature(numbers, found, figure, colors) -> str:
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
  axes.set(
    xscale='log',
    xlim=(1e-6, 1),
    ylim=(0, 4.5),
    xlabel='probability of the right answer',
    ylabel='norm of the Hessian / (X² V)',
  )
  axes.legend(loc=(0.72, 0.6), markerscale=5)
  most = found['tight'].mean
  return (
    f'Curvature is at most {most:.3f} X² V in {len(p):,} policies: the '
    f'constant 4 is {4 / most:.3f} times that'
  )


# E13: whether gradients of different prompts agree, as assumption A4 wants.

(
  _PROMPTS_INTERACTION,
  _ANSWERS_INTERACTION,
  _WIDTH_INTERACTION,
  _STEPS,
  _RATE,
) = 24, 6, 32, 301, 4.0
_PAPER = {'0': 50.5, '260': 72.7, '500': 66.4}
"""Table 3 of the paper: % of pairs with a positive cosine, by training step."""
_PAPER_M = {'0': 89, '260': 250, '500': 418}
"""Table 3 of the paper: the bound M, by training step."""

_INTERACTION_CLAIMS = {
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


def _run_interaction(full: bool = False) -> dict[str, Any]:
  """Trains on all prompts, and looks at all pairs of their gradients.

  Args:
    full: 40 seeds in place of 10.

  Returns:
    For seeds, then steps: the share `positive` of the pairs, the `mean` and
    `std` of their cosines, the least `m` of the positive pairs, and the mean
    `success`; and the product of the smallest example.
  """
  seeds = [_seed_interaction(seed) for seed in range(40 if full else 10)]
  found = {
    name: [[at[name] for at in _run_interaction] for _run_interaction in seeds]
    for name in ('positive', 'mean', 'std', 'm', 'success')
  }
  # Two answers each; the features of the right answers are 1 and -1.
  x = np.array([[[1.0], [0.0]], [[-1.0], [0.0]]])
  first, second = gradients(x, policy(x, np.zeros(1)))
  return {
    **found,
    'steps': list(range(0, _STEPS, 10)),
    'two_prompts': float(first @ second),
    'paper': dict(_PAPER),
    'paper_m': dict(_PAPER_M),
  }


def _seed_interaction(seed: int) -> list[dict[str, float]]:
  """What `_pairs` finds at every tenth step of a training."""
  x = features(
    seed, _PROMPTS_INTERACTION, _ANSWERS_INTERACTION, _WIDTH_INTERACTION, 0.3
  )
  theta, found = np.zeros(_WIDTH_INTERACTION), []
  for step in range(_STEPS):
    pi = policy(x, theta)
    gradient = gradients(x, pi)
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


def _measure_interaction(numbers) -> dict[str, Measured]:
  least = [min(_run_interaction) for _run_interaction in numbers['positive']]
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
    'm': claims.over_seeds(
      [_run_interaction[0] for _run_interaction in numbers['m']]
    ),
  }


def _draw_interaction(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  t = numbers['steps']
  for _run_interaction in numbers['positive']:
    left.plot(t, _run_interaction, color=colors['first'], alpha=0.3, lw=1)
  mean = np.mean(numbers['positive'], axis=0)
  left.plot(t, mean, color=colors['first'], label='here, mean of seeds')
  steps = [int(step) * t[-1] / 500 for step in numbers['paper']]
  shares = [share / 100 for share in numbers['paper'].values()]
  left.plot(
    steps, shares, 's', color=colors['second'], label="the paper's table 3"
  )
  left.axhline(1, color=colors['text'], ls=':')
  left.text(t[-1], 1.005, 'what A4 needs', va='bottom', ha='right')
  left.set(
    xlabel="steps (the paper's 500 scaled)",
    ylim=(0.3, 1.05),
    ylabel='share of pairs with a positive product',
  )
  left.legend(loc='lower right')
  for name, color in (('mean', 'third'), ('std', 'fourth')):
    curve = np.mean(numbers[name], axis=0)
    right.plot(t, curve, color=colors[color], label=f'{name} of the cosines')
  right.set(xlabel='steps')
  right.legend()
  return (
    'A4 wants all pairs of prompts to agree: in the paper at best '
    f'{found["own_data"].mean:.0%} do, here at worst {found["here"].mean:.0%}'
  )


# E14: whether a Fisher information without the reward follows its variance.

_PROMPTS_FISHER, _ANSWERS_FISHER, _WIDTH_FISHER, _SAMPLES = 40, 6, 32, 64

_FISHER_CLAIMS = {
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


def _run_fisher(full: bool = False) -> dict[str, Any]:
  """Samples answers of policies with prompts of all difficulties.

  Args:
    full: 200 seeds in place of 40.

  Returns:
    For every seed the Pearson correlations `weighted`, `paper` and `other`,
    and one seed's pairs to draw.
  """
  runs = [_seed_fisher(seed) for seed in range(200 if full else 40)]
  names = 'weighted', 'paper', 'other'
  found = {
    name: [_run_fisher[0][name] for _run_fisher in runs] for name in names
  }
  return {**found, 'pairs': runs[0][1]}


def _seed_fisher(seed: int):
  """The correlations of a seed, and what they correlate, by prompt."""
  random = np.random.default_rng(1000 + seed)
  x = features(seed, _PROMPTS_FISHER, _ANSWERS_FISHER, _WIDTH_FISHER, 0.0)
  # Along the features of some right answers, so that difficulties differ.
  aim = x[:, 0] * random.normal(1, 4, (_PROMPTS_FISHER, 1))
  pi = policy(x, aim.sum(axis=0))
  score = x - np.einsum('ik,ikd->id', pi, x)[:, None]  # [I,K,D]
  right = np.arange(_ANSWERS_FISHER) == 0
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


def _measure_fisher(numbers) -> dict[str, Measured]:
  return {name: claims.over_seeds(numbers[name]) for name in _FISHER_CLAIMS}


def _draw_fisher(numbers, found, figure, colors) -> str:
  axes = figure.subplots(1, 2)
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


EXPERIMENTS = {
  'curvature': Experiment(
    'E8b',
    'the constants of curvature',
    _CURVATURE_CLAIMS,
    _measure_curvature,
    _draw_curvature,
    _run_curvature,
  ),
  'interaction': Experiment(
    'E13',
    'do gradients of prompts agree',
    _INTERACTION_CLAIMS,
    _measure_interaction,
    _draw_interaction,
    _run_interaction,
  ),
  'fisher': Experiment(
    'E14',
    'Fisher information and reward variance',
    _FISHER_CLAIMS,
    _measure_fisher,
    _draw_fisher,
    _run_fisher,
  ),
}
