"""E1: how far Adam still moves a coordinate whose gradient has become zero."""

from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import optim
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES

BETAS = (0.9, 0.95), (0.9, 0.99), (0.9, 0.999), (0.9, 0.8)
LIVE = 1, 2, 5, 28, 20_000  # steps with a gradient before the coast
_COORDINATES, _STEPS = 16, 400

CLAIMS = {
  'formula': Claim(
    'Equation 36 is exact for random gradients, for all betas and T '
    '(largest relative error).',
    f'{FONTANA}, eq. 36',
    high=1e-12,
  ),
  'five_steps': Claim(
    'With betas (0.9, 0.95) the step after five clipped ones is 0.66 of the '
    'last live one.',
    f'{FONTANA}, section on momentum',
    0.655,
    0.665,
  ),
  'five_steps_right': Claim(
    'With betas (0.9, 0.95) the step after five clipped ones is 0.6713 of the '
    'last live one.',
    'derived',
    0.67125,
    0.67135,
  ),
  'distance': Claim(
    'With betas (0.9, 0.95) the coast adds up to 12.05 times the last step '
    'before clipping.',
    'derived',
    12.045,
    12.055,
  ),
  'distance_999': Claim(
    'With betas (0.9, 0.999) the coast adds up to 9.05 times the last step '
    'before clipping.',
    'derived',
    9.045,
    9.055,
  ),
  'grows': Claim(
    'If b2 < b1^2 the step grows once the gradient is zero: betas (0.9, 0.8), '
    'step 16 over step 1.',
    'derived',
    1 + 1e-6,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Runs Adam on random gradients, then on zeros.

  Args:
    full: Not used: the experiment is exact.

  Returns:
    The sizes of the steps relative to the last live one, `sizes[b][t][k]`, for
    betas, live steps and k = 1, 2, ... clipped steps.
  """
  del full
  with jax.enable_x64(True):
    b1, b2 = (jnp.array(one)[:, None] for one in zip(*BETAS, strict=True))
    live = jnp.array(LIVE)[None]
    coasts = jax.jit(jnp.vectorize(_coast, signature='(),(),()->(k)'))
    sizes = np.asarray(coasts(b1, b2, live))
  return {'betas': BETAS, 'live': LIVE, 'sizes': sizes.tolist()}


def _coast(b1, b2, live):
  """Sizes of the steps of a coast after `live` random gradients, f64[K]."""
  adam = optax.scale_by_adam(b1, b2, eps=0.0)
  params = jnp.zeros(_COORDINATES)

  def step(i, carry):
    _, state = carry
    # Mean 1 and deviation 1: the sign is not constant.
    key = jax.random.fold_in(jax.random.key(0), i)
    gradient = 1 + jax.random.normal(key, params.shape)
    return adam.update(gradient, state, params)

  last, state = jax.lax.fori_loop(0, live, step, (params, adam.init(params)))
  norms = optim.coast(adam, state, params, _STEPS).norms
  return norms / jnp.linalg.norm(last)


def _law(numbers) -> np.ndarray:
  """Equation 36 at the numbers' betas, live steps and clipped steps."""
  b1, b2 = np.array(numbers['betas']).T[..., None, None]
  live = np.array(numbers['live'])[:, None]
  steps = np.arange(1, np.shape(numbers['sizes'])[-1] + 1)
  with warnings.catch_warnings():
    # The last pair of betas is meant to be one that the law warns of.
    warnings.simplefilter('ignore', UserWarning)
    return optim.coasting_ratio(steps, b1, b2, live)


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  sizes = np.array(numbers['sizes'])
  long = sizes[:, -1]  # after the longest history
  return {
    'formula': Measured(float(np.abs(sizes / _law(numbers) - 1).max())),
    'five_steps': Measured(
      float(long[0, 4]),
      example=f'Smallest case: {0.9**5 / 0.95**2.5:.4f} = 0.9^5 / 0.95^2.5.',
    ),
    'five_steps_right': Measured(float(long[0, 4])),
    'distance': Measured(float(long[0].sum())),
    'distance_999': Measured(float(long[2].sum())),
    'grows': Measured(float(long[3, 15] / long[3, 0])),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes, law = figure.subplots(), _law(numbers)
  steps = np.arange(1, 41)
  for i, (name, betas) in enumerate(zip(SERIES, numbers['betas'])):
    sizes = np.array(numbers['sizes'][i][-1])
    axes.plot(steps, law[i, -1, :40], color=colors[name], label=f'{betas}')
    axes.plot(steps, sizes[:40], 'o', ms=4, color=colors[name])
  axes.axhline(0.66, color=colors['faint'], ls=':', lw=1)
  axes.annotate(
    "the paper's 0.66 at 5 steps",
    (5, 0.66),
    (9, 0.78),
    arrowprops={'arrowstyle': '-', 'color': colors['faint']},
  )
  axes.set(yscale='log', xlabel='steps without a gradient', ylim=(0.01, 2))
  axes.set_ylabel('size of the step / last live step')
  axes.legend(title='betas; line: law, dots: Adam')
  found = measure(numbers)
  return (
    f"Adam's coast is off the law by {found['formula'].mean:.0e}; after five "
    f'clipped steps {found["five_steps"].mean:.4f} of a step is left'
  )


EXPERIMENT = Experiment(
  'E1', 'the closed form of the coast', CLAIMS, run, measure, draw
)
