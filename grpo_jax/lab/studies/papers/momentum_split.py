"""E3: what moves clipped samples outward, old momentum or the new gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

UPDATES = 4, 16  # per rollout
_RATE, _ROLLOUTS, _GROUP, _LOW, _HIGH = 0.03, 60, 8, 0.8, 1.2

CLAIMS = {
  'carried': Claim(
    'Momentum carries clipped samples outward (mean change of the log-ratio by '
    'the carried part of a step, 16 updates a rollout).',
    f'{FONTANA}, prop. 3',
    0,
  ),
  'fresh': Claim(
    'The fresh gradient does not carry clipped samples outward (mean change '
    'of the log-ratio by the fresh part of a step, 16 updates a rollout).',
    'derived',
    high=0,
  ),
  'carried_4': Claim(
    'With 4 updates a rollout too, momentum carries clipped samples outward '
    '(mean change of the log-ratio by the carried part of a step).',
    f'{FONTANA}, prop. 3',
    0,
  ),
  'fresh_4': Claim(
    'With 4 updates a rollout too, the fresh gradient does not carry clipped '
    'samples outward (mean change of the log-ratio by the fresh part of a '
    'step).',
    'derived',
    high=0,
  ),
  'outward': Claim(
    'Most clipped samples go on outward (share of them, 16 updates a rollout).',
    'derived',
    0.5,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Trains a policy with shared features, several updates per rollout.

  Args:
    full: 20 seeds in place of 5.

  Returns:
    By the number of updates, for every seed, over all steps of already clipped
    samples: mean outward change of the log-ratio by the `carried` and the
    `fresh` part of Adam's step, and the share that moved `outward`.
  """
  found, seeds = {}, np.arange(20 if full else 5)
  with jax.enable_x64(True):
    for updates in UPDATES:
      train = _settings.jit(jax.vmap(lambda seed, n=updates: _train(seed, n)))
      sums, count = train(seeds)
      found[str(updates)] = {
        name: np.asarray(total / count).tolist() for name, total in sums.items()
      }
  return found


def _train(seed, updates):
  """Sums over clipped samples and steps, f64[] each, and their number."""
  key = jax.random.key(seed)
  features = jax.random.normal(key, (8, 10, 24)) / 24**0.5
  reward = jax.random.uniform(jax.random.fold_in(key, 1), (8, 10))
  ones = jnp.ones(reward.shape, jnp.int32)
  bandit = _settings.Bandit(features, reward, ones, 1)
  method = losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_sequences(),
    losses.ppo_clip(1 - _LOW, _HIGH - 1),
  )
  adam = optim.adamw(_RATE, 0.9, 0.95, epsilon=1e-12, clip_norm=None)

  def rollout(carry, t):
    theta, _ = carry
    uniform = jax.random.uniform(jax.random.fold_in(key, 2 + t), (8, _GROUP))
    answer = _settings.sample(bandit, theta, uniform)
    batch, credited = _settings.rollout(method, bandit, theta, answer)
    logp = lambda theta: _settings.token_logp(bandit, theta, answer)

    def update(carry, _):
      theta, state = carry
      _, gradient = _settings.loss_and_gradient(
        method, bandit, theta, answer, batch, credited
      )
      step, after = adam.update(gradient, state, theta)
      parts = optim.split_update(adam, state, after, step, theta)
      advantage, old = batch.advantage, batch.logp_old
      assert advantage is not None and old is not None  # credit has set them
      way = jnp.sign(advantage)
      moved = {
        name: way * jax.jvp(logp, (theta,), (part,))[1]
        for name, part in (('carried', parts.carried), ('fresh', parts.fresh))
      }
      ratio = jnp.exp(logp(theta) - old)
      clipped = ((way > 0) & (ratio > _HIGH)) | ((way < 0) & (ratio < _LOW))
      total = moved['carried'] + moved['fresh']
      moved['outward'] = jnp.where(total > 0, 1.0, 0.0)
      sums = {k: jnp.sum(jnp.where(clipped, v, 0)) for k, v in moved.items()}
      return (theta + step, after), (sums, jnp.sum(clipped))

    return jax.lax.scan(update, carry, length=updates)

  theta = jnp.zeros(features.shape[-1])
  _, seen = jax.lax.scan(
    rollout, (theta, adam.init(theta)), jnp.arange(_ROLLOUTS)
  )
  return jax.tree.map(jnp.sum, seen)


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  many = numbers['16']
  return {
    'carried': claims.over_seeds(many['carried']),
    'fresh': claims.over_seeds(many['fresh']),
    'carried_4': claims.over_seeds(numbers['4']['carried']),
    'fresh_4': claims.over_seeds(numbers['4']['fresh']),
    'outward': claims.over_seeds(many['outward']),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes = figure.subplots()
  for i, (part, name) in enumerate((('carried', 'second'), ('fresh', 'first'))):
    for j, found in enumerate(numbers.values()):
      x = 3 * j + i
      mean, half, _ = claims.over_seeds(found[part])
      label = f'{part} part' if j == 0 else None
      axes.bar(x, mean, 0.8, color=colors[name], label=label, alpha=0.8)
      axes.errorbar(x, mean, half, color=colors['text'], capsize=4)
      axes.plot(
        [x] * len(found[part]), found[part], '.', color=colors['text'], ms=4
      )
  axes.axhline(0, color=colors['text'], lw=1)
  axes.set_xticks([0.5, 3.5], [f'{n} updates a rollout' for n in numbers])
  axes.set_ylabel('outward change of the log-ratio, per step')
  axes.grid(False, axis='x')
  axes.legend()
  found = measure(numbers)
  return (
    'A step moves clipped samples outward by '
    f'{found["carried"].mean:+.3f} through old momentum, and by '
    f'{found["fresh"].mean:+.3f} through the new gradient'
  )


EXPERIMENT = Experiment(
  'E3', 'momentum beyond the clip', CLAIMS, run, measure, draw
)
