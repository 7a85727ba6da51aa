"""Experiments on the scale of the rewards under Adam.

- E4, `reward_scale`: when a factor on all rewards changes nothing.
- E5, `reward_jump`: what a jump of the scale does to the step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import bandits

# E4: when a factor on all rewards changes nothing under Adam.

FACTORS_SCALE = 1.0, 2.0**10, 2.0**-10, 10.0, 1000.0, 2.0**-13
EPSILONS = 0.0, 1e-15, 1e-8, 1e-5, 1e-3
_STEPS_SCALE, _RATE, _GROUP = 300, 0.05, 8
_NEVER = 1e300  # a norm of the gradient that is never reached
OTHERS = {  # epsilon 0: coefficient of the KL, largest norm, whether SGD
  'kl': (0.05, _NEVER, False),
  'always_clipped': (0.0, 1e-7, False),
  'sometimes_clipped': (0.0, 0.05, False),
  'sgd': (0.0, _NEVER, True),
}

_SCALE_CLAIMS = {
  'powers_of_two': Claim(
    'Without epsilon a factor 2^10 or 2^-10 on the rewards changes no bit of '
    'the parameters after 300 steps (largest change).',
    f'{FONTANA}, prop. 2',
    0,
    0,
  ),
  'other_factors': Claim(
    'Without epsilon factors that are no powers of 2 change the parameters by '
    'rounding alone (largest change after 300 steps).',
    f'{FONTANA}, prop. 2',
    high=1e-9,
  ),
  'strictly': Claim(
    'With epsilon 1e-8 scaling rewards has strictly zero effect (largest '
    'change of a parameter).',
    f'{FONTANA}, prop. 2, read for any epsilon',
    0,
    0,
  ),
  'formula': Claim(
    'A coordinate step changes by (1 + e) / (1 + e / phi), e = epsilon / '
    'sqrt(v), exactly (largest relative error at the first step).',
    'derived',
    high=1e-9,
  ),
  'epsilon': Claim(
    'With epsilon 1e-5 rewards of 2^-13 (1.2e-4) do not learn like rewards of '
    '1 (largest change of a parameter).',
    'derived',
    0.1,
  ),
  'kl': Claim(
    'A KL term makes the parameters depend on the scale of rewards even '
    'without epsilon (largest change of a parameter).',
    f'{FONTANA}, after prop. 2',
    0.1,
  ),
  'always_clipped': Claim(
    'Without epsilon the parameters do not depend on the scale of rewards if '
    'the norm of the gradient is clipped at every step (largest change of a '
    'parameter).',
    'derived',
    high=1e-9,
  ),
  'sometimes_clipped': Claim(
    'Without epsilon the parameters depend on the scale of rewards if the '
    'norm of the gradient is clipped at some steps only (largest change of a '
    'parameter).',
    'derived',
    0.01,
  ),
  'sgd': Claim(
    'With SGD the parameters depend on the scale of rewards (largest change '
    'of a parameter).',
    'derived',
    0.1,
  ),
}


def _run_scale() -> dict[str, Any]:
  """Trains a bandit with the same random numbers under every factor.

  Returns:
    For every epsilon, and for every setting of `OTHERS`, by factor: `change`,
    the largest change of a parameter against factor 1; `value`, the expected
    reward at the end; `step`, the first step of each parameter.
  """
  rows = [(e, 0.0, _NEVER, False) for e in EPSILONS]
  rows += [(0.0, *other) for other in OTHERS.values()]
  with jax.enable_x64(True):
    given = (np.array(column)[:, None] for column in zip(*rows, strict=True))
    train = jnp.vectorize(_train, signature='(),(),(),(),()->(d),(),(d),(d)')
    found = bandits.jit(train)(np.array(FACTORS_SCALE)[None], *given)
    theta, value, step, root = map(np.asarray, found)
  change = np.abs(theta - theta[:, :1]).max(axis=-1)
  names = [f'{e:g}' for e in EPSILONS] + list(OTHERS)
  return {
    'factors': FACTORS_SCALE,
    'change': dict(zip(names, change.tolist(), strict=True)),
    'value': dict(zip(names, value.tolist(), strict=True)),
    'step': step[: len(EPSILONS)].tolist(),
    'gradient': root[0, 0].tolist(),
  }


def _train(factor, epsilon, beta, norm, sgd):
  """One training; see `run`. Last comes the size of the first gradient."""
  random = np.random.default_rng(0)
  # Rewards in eighths, so that advantages add up to exactly 0. Else answers
  # that were not drawn would have gradients of rounding, which Adam without
  # epsilon makes into whole steps.
  bandit = bandits.tabular(random.integers(0, 9, (8, 6)) / 8)
  uniform = random.uniform(size=(_STEPS_SCALE, 8, _GROUP))
  method = losses.chain(
    losses.center_by_group(),
    losses.mean_over_sequences(),
    losses.importance_weighted(),
  )
  clip = optax.clip_by_global_norm(norm)
  # Not 0, as 0 / (0 + epsilon) is to be 0.
  adam = optax.scale_by_adam(eps=jnp.maximum(epsilon, 1e-300))
  theta = jnp.zeros(bandit.reward.size)

  def penalty(theta):  # KL to the policy at the start, which is uniform
    logp = bandits.log_policy(bandit, theta)
    return beta * jnp.mean(jnp.sum(jnp.exp(logp) * logp, axis=-1))

  def step(carry, uniform):
    theta, state = carry
    answer = bandits.sample(bandit, theta, uniform)
    batch, credited = bandits.rollout(method, bandit, theta, answer, factor)
    gradient = bandits.loss_and_gradient(
      method, bandit, theta, answer, batch, credited
    )[1]
    gradient = gradient + jax.grad(penalty)(theta)
    clipped, _ = clip.update(gradient, clip.init(theta))
    update, state = adam.update(clipped, state)
    update = jnp.where(sgd, 20 * jnp.asarray(clipped), jnp.asarray(update))
    return (theta - _RATE * update, state), (update, gradient)

  (theta, _), (updates, gradients) = jax.lax.scan(
    step, (theta, adam.init(theta)), uniform
  )
  return (
    theta,
    bandits.value(bandit, theta),
    updates[0],
    jnp.abs(gradients[0]),
  )


def _collapse(numbers) -> tuple[np.ndarray, np.ndarray]:
  """epsilon / (phi root v), and step / step without epsilon, first step.

  Of the parameters that have a gradient. At the first step the root of the
  corrected second moment is the gradient's size.
  """
  size = np.array(numbers['gradient'])
  steps = np.array(numbers['step'])[..., size > 0]
  factor = np.array(numbers['factors'])[:, None]
  e = np.array(EPSILONS)[:, None, None] / (factor * size[size > 0])
  return e, steps / steps[:1]


def _measure_scale(numbers) -> dict[str, Measured]:
  change, factors = numbers['change'], list(numbers['factors'])
  exact = np.array(change['0'])
  two = [factors.index(one) for one in (2.0**10, 2.0**-10)]
  e, ratio = _collapse(numbers)
  largest = lambda name: Measured(max(change[name]))
  return {
    'powers_of_two': Measured(float(exact[two].max())),
    'other_factors': Measured(float(exact.max())),
    'strictly': largest('1e-08')._replace(
      example='Smallest case: one step with a gradient g moves by '
      'g / (g + epsilon), which depends on the size of g.'
    ),
    'formula': Measured(float(np.abs(ratio * (1 + e) - 1).max())),
    'epsilon': Measured(change['1e-05'][factors.index(2.0**-13)]),
    **{name: largest(name) for name in OTHERS},
  }


def _draw_scale(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  e, ratio = _collapse(numbers)
  for i, name in zip(range(1, len(EPSILONS)), SERIES):
    right.plot(
      e[i].ravel(), 1 - ratio[i].ravel(), '.', ms=4, color=colors[name],
      label=f'epsilon {EPSILONS[i]:g}',
    )  # fmt: skip
  x = np.geomspace(1e-14, 1e5, 200)
  right.plot(x, x / (1 + x), color=colors['faint'], lw=1, zorder=0)
  right.set(
    xscale='log',
    yscale='log',
    xlim=(1e-14, 1e5),
    ylim=(1e-14, 3),
    xlabel='epsilon / (phi sqrt(v))',
    ylabel='what epsilon takes from a step',
  )
  right.legend()
  order = np.argsort(numbers['factors'])
  factors = np.array(numbers['factors'])[order]
  for name, color in (
    ('0', 'first'), ('1e-08', 'second'), ('1e-05', 'third'),
    ('kl', 'fourth'), ('sgd', 'fifth'),
  ):  # fmt: skip
    values = np.array(numbers['value'][name])[order]
    label = {'kl': 'with a KL', 'sgd': 'SGD'}.get(name, f'epsilon {name}')
    left.plot(factors, values, 'o-', ms=4, color=colors[color], label=label)
  left.set(
    xscale='log',
    xlabel='factor on all rewards',
    ylabel='expected reward after training',
  )
  left.legend()
  return (
    'Factors on all rewards under Adam: parameters differ by at most '
    f'{found["other_factors"].mean:.0e} without epsilon, by '
    f'{found["strictly"].mean:.2g} with 1e-8'
  )


# E5: what a jump of the reward's scale does to Adam's step.

BETAS = (0.9, 0.95), (0.9, 0.999)
FACTORS_JUMP = 1e-3, 0.1, 10.0, 1e8
_STEPS_JUMP = 300

_JUMP_CLAIMS = {
  'formula': Claim(
    'After a jump g -> phi g the step k is (b1^k + phi (1 - b1^k)) / '
    'sqrt(b2^k + phi^2 (1 - b2^k)) of the step before (largest relative '
    'error).',
    'derived',
    high=1e-12,
  ),
  'acts': Claim(
    'A change of the scale acts while it is new: largest change of the step '
    'after a factor of 10.',
    f'derived; {FONTANA}, prop. 2 needs one scale for the whole history',
    0.1,
  ),
  'first_step': Claim(
    'A jump to infinity multiplies the first step by 3.16, betas (0.9, 0.999).',
    'derived',
    3.155,
    3.165,
  ),
  'first_step_95': Claim(
    'A jump to infinity leaves 0.447 of the first step, betas (0.9, 0.95).',
    'derived',
    0.4465,
    0.4475,
  ),
}


def _run_jump() -> dict[str, Any]:
  """Takes a step of Adam from a steady state, with another gradient.

  Returns:
    The steps over the one before the jump, `steps[b][f][k]`, k = 1, 2, ....
  """
  steps = bandits.over_betas(_jump, BETAS, FACTORS_JUMP).tolist()
  return {'betas': BETAS, 'factors': FACTORS_JUMP, 'steps': steps}


def _jump(b1, b2, factor):
  """Steps after the jump over the step before, f64[K]."""
  adam, one = optax.scale_by_adam(b1, b2, eps=0.0), jnp.ones(())
  # After very many gradients of 1 both moments are 1.
  steady = optax.ScaleByAdamState(jnp.asarray(10**7, jnp.int32), one, one)

  def step(state, _):
    update, state = adam.update(factor * one, state)
    return state, update

  return jax.lax.scan(step, steady, length=_STEPS_JUMP)[1]


def equal_gradients_step(b1, b2, factor, k):
  """The step k after a jump over the step before, if gradients are equal."""
  first = b1**k + factor * (1 - b1**k)
  return first / np.sqrt(b2**k + factor**2 * (1 - b2**k))


def _formula(numbers) -> np.ndarray:
  b1, b2 = np.array(numbers['betas']).T[..., None, None]
  factor = np.array(numbers['factors'])[:, None]
  k = np.arange(1, np.shape(numbers['steps'])[-1] + 1)
  return equal_gradients_step(b1, b2, factor, k)


def _measure_jump(numbers) -> dict[str, Measured]:
  steps = np.array(numbers['steps'])
  return {
    'formula': Measured(float(np.abs(steps / _formula(numbers) - 1).max())),
    'acts': Measured(float(np.abs(steps[:, 2] - 1).max())),
    'first_step': Measured(float(steps[1, 3, 0])),
    'first_step_95': Measured(float(steps[0, 3, 0])),
  }


def _draw_jump(numbers, found, figure, colors) -> str:
  axes, law = figure.subplots(1, 2, sharey=True), _formula(numbers)
  for i, betas in enumerate(numbers['betas']):
    for j, name in zip(range(3), SERIES):
      steps, label = numbers['steps'][i][j], f'x{numbers["factors"][j]:g}'
      k = np.arange(1, len(steps) + 1)
      axes[i].plot(k, law[i, j], color=colors[name], label=label)
      axes[i].plot(k[::6], steps[::6], 'o', ms=3.5, color=colors[name])
    axes[i].axhline(1, color=colors['faint'], lw=1, ls=':')
    axes[i].set(
      title=f'betas {tuple(betas)}', xlabel='steps after the jump', xscale='log'
    )
  axes[0].set_ylabel('step / step before the jump')
  axes[0].legend(title='gradient\nline: formula, dots: Adam')
  return (
    "After a factor of 10 on the rewards Adam's step changes by up to "
    f'{found["acts"].mean:.0%} before it is as it was'
  )


EXPERIMENTS = {
  'reward_scale': Experiment(
    'E4',
    'the scale of the rewards',
    _SCALE_CLAIMS,
    _measure_scale,
    _draw_scale,
    lambda full: _run_scale(),
  ),
  'reward_jump': Experiment(
    'E5',
    'a jump of the reward scale',
    _JUMP_CLAIMS,
    _measure_jump,
    _draw_jump,
    lambda full: _run_jump(),
  ),
}
