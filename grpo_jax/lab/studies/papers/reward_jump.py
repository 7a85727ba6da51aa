"""E5: what a jump of the reward's scale does to Adam's step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES

BETAS = (0.9, 0.95), (0.9, 0.999)
FACTORS = 1e-3, 0.1, 10.0, 1e8
_STEPS = 300

CLAIMS = {
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


def run(full: bool = False) -> dict[str, Any]:
  """Takes a step of Adam from a steady state, with another gradient.

  Args:
    full: Not used: the experiment is exact.

  Returns:
    The steps over the one before the jump, `steps[b][f][k]`, k = 1, 2, ....
  """
  del full
  with jax.enable_x64(True):
    b1, b2 = (jnp.array(one)[:, None] for one in zip(*BETAS, strict=True))
    jump = jnp.vectorize(_jump, signature='(),(),()->(k)')
    steps = jax.jit(jump)(b1, b2, jnp.array(FACTORS)[None])
    steps = np.asarray(steps).tolist()
  return {'betas': BETAS, 'factors': FACTORS, 'steps': steps}


def _jump(b1, b2, factor):
  """Steps after the jump over the step before, f64[K]."""
  adam, one = optax.scale_by_adam(b1, b2, eps=0.0), jnp.ones(())
  # After very many gradients of 1 both moments are 1.
  steady = optax.ScaleByAdamState(jnp.asarray(10**7, jnp.int32), one, one)

  def step(state, _):
    update, state = adam.update(factor * one, state)
    return state, update

  return jax.lax.scan(step, steady, length=_STEPS)[1]


def of_equal_gradients(b1, b2, factor, k):
  """The step k after a jump over the step before, if gradients are equal."""
  first = b1**k + factor * (1 - b1**k)
  return first / np.sqrt(b2**k + factor**2 * (1 - b2**k))


def _formula(numbers) -> np.ndarray:
  b1, b2 = np.array(numbers['betas']).T[..., None, None]
  factor = np.array(numbers['factors'])[:, None]
  k = np.arange(1, np.shape(numbers['steps'])[-1] + 1)
  return of_equal_gradients(b1, b2, factor, k)


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  steps = np.array(numbers['steps'])
  return {
    'formula': Measured(float(np.abs(steps / _formula(numbers) - 1).max())),
    'acts': Measured(float(np.abs(steps[:, 2] - 1).max())),
    'first_step': Measured(float(steps[1, 3, 0])),
    'first_step_95': Measured(float(steps[0, 3, 0])),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes, law = figure.subplots(1, 2, sharey=True), _formula(numbers)
  for i, betas in enumerate(numbers['betas']):
    for j, name in zip(range(3), SERIES):
      steps, label = numbers['steps'][i][j], f'x{numbers["factors"][j]:g}'
      k = np.arange(1, len(steps) + 1)
      axes[i].plot(k, law[i, j], color=colors[name], label=label)
      axes[i].plot(k[::6], steps[::6], 'o', ms=3.5, color=colors[name])
    axes[i].axhline(1, color=colors['faint'], lw=1, ls=':')
    axes[i].set(title=f'betas {tuple(betas)}', xlabel='steps after the jump')
    axes[i].set(xscale='log')
  axes[0].set_ylabel('step / step before the jump')
  axes[0].legend(title='gradient\nline: formula, dots: Adam')
  return (
    "After a factor of 10 on the rewards Adam's step changes by up to "
    f'{measure(numbers)["acts"].mean:.0%} before it is as it was'
  )


EXPERIMENT = Experiment(
  'E5', 'a jump of the reward scale', CLAIMS, run, measure, draw
)
