"""E5 on a transformer: a jump of the reward's scale, with its own gradients.

The formula of E5 takes the gradient to be the same at every update. Gradients
of rollouts are not: each is a small mean beside much noise. So Adam is given
the gradients of 32 rollouts of one policy, which does not move, one after the
other; or one of them again and again, as the formula has it. Every seed has 32
rollouts of its own, so that seeds are independent.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _arithmetic
from grpo_jax.lab.studies.papers import reward_jump
from grpo_jax.losses import contrib

BETAS = 0.9, 0.99
FACTOR = 10.0
_ROLLOUTS, _BEFORE = 32, 20  # updates in all, and before the jump
_SETS = 5

CLAIMS = {
  'equal': Claim(
    'On a transformer, with the gradient of one rollout at every update, the '
    'norm of the step follows the formula of E5 (largest relative error of 12 '
    'steps after a factor of 10).',
    'derived',
    high=0.01,
  ),
  'fresh': Claim(
    'With a fresh rollout at every update, and rewards that are random, the '
    'norm of the step follows the formula of E5 too (largest relative error '
    'of 12 steps after a factor of 10).',
    'derived',
    high=0.1,
  ),
  'independent': Claim(
    'With a fresh rollout at every update, and rewards that are random, the '
    'formula for gradients that are noise alone, sqrt(b1^2k + phi^2 (1 - '
    'b1^2k)) / sqrt(b2^k + phi^2 (1 - b2^k)), is nearer than that of E5 (its '
    'largest error / that of the formula of E5).',
    'derived',
    high=0.5,
  ),
  'acts': Claim(
    'With a fresh rollout at every update a jump of the scale acts (step '
    'after a factor of 10 over the step without it, largest).',
    'derived',
    1.1,
  ),
}


def of_independent_gradients(b1, b2, factor, k):
  """The norm of step k after a jump over that without, if gradients are noise.

  The first moment is a sum of independent vectors, so their squares add up.
  """
  first = np.sqrt(b1 ** (2 * k) + factor**2 * (1 - b1 ** (2 * k)))
  return first / np.sqrt(b2**k + factor**2 * (1 - b2**k))


def run(full: bool = False) -> dict[str, Any]:
  """Gives Adam gradients of a fixed policy, with and without a jump.

  Args:
    full: Take a policy that is warmed up, and its own rewards.

  Returns:
    `equal[k]` and `fresh[set][k]`, k = 1, 2, ... after the jump: the norm of
    the step over that of the same step without a jump. The sets of rollouts are
    disjoint. `signal[set]`: the squared norm of the mean gradient over the mean
    squared norm.
  """
  given = _arithmetic.rollouts(_SETS * _ROLLOUTS, warm=full)
  method = contrib.grpo_without_std(kl_coefficient=0.0)

  def gradient(rollout):
    layout, mask, reward = rollout
    logp = given.score(given.params, layout)
    c = _arithmetic.coefficients(method, mask, reward, logp)
    return _arithmetic.pull_back(given.score, given.params, layout, c)

  each = (given.layout, given.mask, given.reward)
  gradients = jax.jit(lambda all_of: jax.lax.map(gradient, all_of))
  ratios, equal, fresh, signal = jax.jit(_ratios), [], [], []
  for k in range(_SETS):
    at = slice(k * _ROLLOUTS, (k + 1) * _ROLLOUTS)
    found = gradients(jax.tree.map(lambda x, at=at: x[at], each))
    fresh.append(np.asarray(ratios(found, 0 * found[0])).tolist())
    square = jnp.mean(jnp.sum(found**2, 1))
    signal.append(float(jnp.sum(found.mean(0) ** 2) / square))
    if k == 0:
      one = jnp.tile(found[0], (_ROLLOUTS, 1))
      equal = np.asarray(ratios(one, found[0])).tolist()
  return {'equal': equal, 'fresh': fresh, 'signal': signal}


def _ratios(gradients, first) -> jax.Array:
  """Norms of steps after the jump over those without, f32[K].

  Args:
    gradients: Of all updates, f32[N,D].
    first: The first moment to begin with, f32[D]; the second is that of very
      many updates.
  """
  # Not 0: ids that no rollout holds have no gradient.
  adam = optax.scale_by_adam(*BETAS, eps=1e-30)
  # After very many updates; else Adam weighs new gradients more, by its bias
  # correction.
  steady = optax.ScaleByAdamState(
    jnp.asarray(10**7, jnp.int32), first, (gradients**2).mean(0)
  )

  def norms(scales):
    def step(state, given):
      gradient, scale = given
      update, state = adam.update(scale * gradient, state)
      return state, jnp.linalg.norm(jnp.asarray(update))

    return jax.lax.scan(step, steady, (gradients, scales))[1][_BEFORE:]

  flat = jnp.ones(len(gradients))
  return norms(flat.at[_BEFORE:].set(FACTOR)) / norms(flat)


def _laws(numbers) -> dict[str, np.ndarray]:
  k = np.arange(1, len(numbers['equal']) + 1)
  return {
    'equal': reward_jump.of_equal_gradients(*BETAS, FACTOR, k),
    'independent': of_independent_gradients(*BETAS, FACTOR, k),
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  laws, fresh = _laws(numbers), np.array(numbers['fresh'])

  def off(steps, law):
    return np.abs(steps / laws[law] - 1).max(-1)

  return {
    'equal': Measured(float(off(np.array(numbers['equal']), 'equal'))),
    'fresh': claims.over_seeds(off(fresh, 'equal').tolist()),
    'independent': claims.over_seeds(
      (off(fresh, 'independent') / off(fresh, 'equal')).tolist()
    ),
    'acts': claims.over_seeds(fresh.max(1).tolist()),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes, laws = figure.subplots(), _laws(numbers)
  k = np.arange(1, len(numbers['equal']) + 1)
  for name, color, steps, label in (
    ('equal', 'first', [numbers['equal']], 'one gradient'),
    ('independent', 'second', numbers['fresh'], 'fresh rollouts'),
  ):
    axes.plot(k, laws[name], color=colors[color], label=f'formula: {label}')
    for i, of_set in enumerate(steps):
      label_of = f'Adam: {label}' if i == 0 else None
      axes.plot(k, of_set, 'o', ms=4, color=colors[color], label=label_of)
  axes.axhline(1, color=colors['faint'], lw=1, ls=':')
  axes.set(xlabel='steps after a factor of 10', yscale='log')
  axes.set_ylabel('norm of the step / norm without the jump')
  axes.legend()
  most = measure(numbers)['acts'].mean
  return (
    'A jump of the reward scale on a transformer: for a few updates the step '
    f'is up to {most:.2f} times as long'
  )


EXPERIMENT = Experiment(
  'E5b', 'a jump of the reward scale of a transformer',
  CLAIMS, run, measure, draw,
)  # fmt: skip
