"""E6 on a transformer: tokens that a whole group shares, by method.

On such a token the coefficients of a group add up. Weights that are equal in a
group cancel there, others do not. The transformer of `configs/arithmetic.py`
tells what that is worth: how much of the gradient comes from these tokens, and
how far an update moves them. Each rollout counts as a seed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.studies import claims
from grpo_jax.studies.claims import FONTANA
from grpo_jax.studies.claims import Claim
from grpo_jax.studies.claims import Experiment
from grpo_jax.studies.claims import Measured
from grpo_jax.studies.papers import _arithmetic
from grpo_jax.studies.papers import _compiling
from grpo_jax.studies.papers import shared_prefix

_ROLLOUTS = 8
_SURE = 0.1  # temperature of the random policy
_RATE = 1e-5  # at this temperature an update moves log p by about 0.1 nats
_UNIFORM = 'dapo', 'dr_grpo', 'rloo'

CLAIMS = {
  'identity': Claim(
    'On a transformer GRPO pulls at a token that the whole group shares by '
    'Corr(r, 1/L) x std(1/L) (largest difference, float32).',
    f'derived from {FONTANA}, prop. 1',
    high=1e-6,
  ),
  'uniform': Claim(
    'With equal weights in a group (DAPO, Dr. GRPO, RLOO) such tokens give no '
    'gradient (largest norm of their part / norm of the gradient).',
    f'{FONTANA}, prop. 1',
    high=1e-4,
  ),
  'grpo': Claim(
    'With GRPO they do (the same, mean of rollouts; above 0.001).',
    f'{FONTANA}, prop. 1, case 2',
    0.001,
  ),
  'still': Claim(
    'So equal weights leave these tokens where they are: mean change of their '
    'log p by an update of AdamW under DAPO / under GRPO.',
    f'{FONTANA}, prop. 1, read as no drift',
    high=0.1,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Reads the coefficients of each method, and pulls them back.

  Args:
    full: Take a policy that is warmed up, and its own rewards and lengths.

  Returns:
    `identity`: largest difference for each rollout; `part[method][rollout]`:
    the norm of the gradient that comes from tokens which the whole group
    shares, over that of all; `moved[method][rollout]`: the mean absolute change
    of their log-probabilities, nats, by one update; `tokens`: how many of them
    a group has, on average.
  """
  temperature = 1.0 if full else _SURE
  given = _arithmetic.rollouts(_ROLLOUTS, temperature, full)
  effect = jax.jit(lambda *rollout: _effect(given, *rollout))
  size, group = given.mask.shape[1:3]
  part, moved, identity, tokens = {}, {}, [], []
  for name, method in shared_prefix.METHODS.items():
    part[name], moved[name] = [], []
    read = _compiling.jit(functools.partial(_arithmetic.coefficients, method()))
    for k in range(_ROLLOUTS):
      mask, reward = given.mask[k], given.reward[k]
      c = read(mask, reward, jnp.zeros(mask.shape))
      shared = losses.shared_prefix_weight(given.tokens[k], mask, c)
      whole = np.asarray(shared.sharers == group)
      rows = jax.tree.map(lambda x, k=k: x[k], given.layout)
      share, drift = effect(rows, c, whole)
      part[name].append(float(share))
      moved[name].append(float(drift))
      if name == 'grpo':
        predicted = shared_prefix.pull(reward, mask.sum(-1)) / size
        off = np.asarray(shared.weight)[:, 0] - predicted[:, None]
        identity.append(float(np.abs(off)[whole[:, 0]].max(initial=0)))
        tokens.append(whole.sum() / whole[..., 0].size)
  return {
    'part': part,
    'moved': moved,
    'identity': identity,
    'tokens': float(np.mean(tokens)),
  }


def _effect(given: _arithmetic.Rollouts, layout, coefficient, whole):
  """Share of the gradient of some tokens, and how far they move, f32[] each."""

  def back(coefficient):
    return _arithmetic.pull_back(given.score, given.params, layout, coefficient)

  gradient, own = back(coefficient), back(jnp.where(whole, coefficient, 0))
  adam = optim.adamw(_RATE, b2=0.99, weight_decay=0.01)
  step, _ = adam.update(gradient, adam.init(given.params), given.params)
  before = given.score(given.params, layout)
  after = given.score(optax.apply_updates(given.params, step), layout)
  way = jnp.sum(jnp.where(whole, jnp.abs(after - before), 0))
  return (
    jnp.linalg.norm(own) / jnp.linalg.norm(gradient),
    way / jnp.maximum(jnp.sum(whole), 1),
  )


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  part, moved = numbers['part'], numbers['moved']
  ratio = np.divide(moved['dapo'], moved['grpo'])
  return {
    'identity': Measured(max(numbers['identity'])),
    'uniform': Measured(max(max(part[name]) for name in _UNIFORM)),
    'grpo': claims.over_seeds(part['grpo']),
    'still': claims.over_seeds(
      ratio.tolist(),
      'Smallest case: one update. The other tokens of the completions move '
      'parameters that the shared tokens use too.',
    ),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  names = list(numbers['part'])
  for axes, key, color in (
    (left, 'part', 'second'),
    (right, 'moved', 'first'),
  ):
    values = [numbers[key][name] for name in names]
    axes.barh(names, np.mean(values, 1), color=colors[color], alpha=0.6)
    for y, of_method in enumerate(values):
      axes.plot(of_method, [y] * len(of_method), '.', color=colors['text'])
  left.set_xlabel('gradient from tokens that all share / gradient')
  right.set_xlabel('their |change of log p| by one update, nats')
  found = measure(numbers)
  return (
    f'Tokens that a group shares: {found["grpo"].mean:.0%} of the gradient of '
    'GRPO, none with equal weights; an update moves them nevertheless, '
    f'{found["still"].mean:.2f} times as far'
  )


EXPERIMENT = Experiment(
  'E6b', 'tokens that completions share, on a transformer',
  CLAIMS, run, measure, draw,
)  # fmt: skip
