r"""What a factor on the reward does to a method's step: r -> phi r.

Adam divides by its own measure of the gradient's size, so a factor on the whole
gradient, kept over the whole run, changes its step only through its epsilon, by
about :math:`(\epsilon / \sqrt{\hat v}) |1 - 1/\phi|` (proposition 2 of Fontana
et al., `On the Hidden Objective Biases of Group-based Reinforcement Learning
<https://arxiv.org/abs/2601.05002>`_, 2026; the size is derived here). That is
not so where only a part of the gradient is scaled (a KL term), or where the
reward meets a constant (a threshold, an epsilon beside a deviation). And it
says nothing of methods whose advantage does not change with the factor at all,
since they divide by a deviation.

Each cause is measured by taking it away.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax.diagnostics import _probe

_SETTINGS = 1e-5, 0.05  # log-ratios' deviation: nothing clipped, off-policy
_STEPS = 24
_PARAMETERS = 16
_EPSILON = 1e-8
_NO_EPSILON = 1e-300  # 0, but 0 / 0 is 0
_NOISE = 3e-6  # relative; below it lies rounding, of float32 too


class StepChange(NamedTuple):
  """One setting; the tuples run over the factors.

  A change of the step is max abs(dtheta(phi) - dtheta(1)) / max
  abs(dtheta(1)) over the parameters, dtheta being the sum of 24 Adam steps.
  """

  log_ratio: float  # deviation of the policy's log-ratios, nats
  size: float  # root mean square of a parameter's gradient at phi = 1
  gradient: tuple[float, ...]  # norm at phi over norm at 1
  exponent: float | None  # gradient ~ phi ** exponent; None without gradient
  step: tuple[float, ...]  # change of the step
  kl: tuple[float, ...]  # the part that goes without the penalty
  thresholds: tuple[float, ...]  # what is left without penalty and epsilon
  epsilon: tuple[float, ...]  # the part that goes without Adam's epsilon
  turn: tuple[float, ...]  # change of the objective's coefficients' direction


class Scale(NamedTuple):
  """What `reward_scale` measures."""

  factors: tuple[float, ...]
  deviation: bool  # the advantage does not change at all
  exponent: float | None  # advantage ~ phi ** exponent
  turn: tuple[float, ...]  # change of the advantages' direction; 0: homogeneous
  settings: tuple[StepChange, ...]
  text: str


def reward_scale(
  method: losses.LossTransform,
  fields: _probe.Fields | None = None,
  factors: tuple[float, ...] = (1e-2, 0.1, 10.0, 100.0),
) -> Scale:
  r"""Measures how gradient and Adam step change when rewards are scaled.

  24 random batches in turn, of two groups of 8, are pulled back to 16
  parameters by a fixed random linear map, once on the policy that sampled and
  once off it. Each goes through the method for every factor; Adam (b1 = 0.9, b2
  = 0.999, epsilon = 1e-8) starts from zero moments. The causes add up only if
  one of them is much larger than the others.

  Args:
    method: A chain. Each batch meets it in the state of `init`.
    fields: A user's generator of fields; see `_probe.Fields`.
    factors: The :math:`\phi`, positive.

  Returns:
    A `Scale`.

  Raises:
    ValueError: A factor is not positive, or there is none.

  >>> reward_scale(losses.methods.gspo()).text
  'scale-free before Adam: the advantage does not change'
  """
  if not factors or min(factors) <= 0:
    raise ValueError(
      f'reward_scale got factors={factors}; give one or more positive numbers.'
    )
  phi = np.array((1.0, *factors))
  reading = _read(method, fields, phi)
  gradient = reading.objective @ _linear_map(1)
  rest = reading.penalty @ _linear_map(1) + reading.entropy @ _linear_map(2)
  gradients = np.stack([gradient + rest, gradient])  # [2,F,S,K,D]
  change = [_step_change(gradients, e) for e in (_EPSILON, _NO_EPSILON)]
  norm = np.linalg.norm(gradients[0], axis=(-2, -1))  # [F,S]
  turn = _turn(reading.objective)
  advantage = reading.advantage
  settings = tuple(
    StepChange(
      log_ratio=log_ratio,
      size=float(norm[0, s] / np.sqrt(_STEPS * _PARAMETERS)),
      gradient=_floats(_divide(norm[1:, s], norm[0, s])),
      exponent=_exponent(norm[:, s], phi),
      step=_floats(change[0][0, :, s]),
      kl=_floats(change[1][0, :, s] - change[1][1, :, s]),
      thresholds=_floats(change[1][1, :, s]),
      epsilon=_floats(change[0][1, :, s] - change[1][1, :, s]),
      turn=_floats(turn[:, s]),
    )
    for s, log_ratio in enumerate(_SETTINGS)
  )
  size = np.linalg.norm(advantage.reshape(len(phi), -1), axis=1)
  scale = Scale(
    factors=_floats(phi[1:]),
    deviation=bool(np.max(np.abs(advantage - advantage[:1])) <= _NOISE),
    exponent=_exponent(size, phi),
    turn=_floats(np.max(_turn(advantage), axis=1)),
    settings=settings,
    text='',
  )
  return scale._replace(text=_describe(scale))


def _read(
  method: losses.LossTransform, fields: _probe.Fields | None, phi: np.ndarray
) -> _probe.Reading:
  """Reads the batches off for all factors; arrays become [F,S,K,P*G*T]."""
  number, *batch = _probe.PROBE_SHAPE
  prompts, group, width = batch
  random = np.random.default_rng(1)
  reward = random.uniform(0, 1.5, (_STEPS, prompts, group))
  reward[:, 0] = random.permuted(
    np.arange(group) < random.integers(1, group, (_STEPS, 1)), axis=-1
  )  # the first group is right or wrong
  length = random.integers(2, width + 1, reward.shape)
  logp_old = -random.uniform(0.05, 3, (_STEPS, *batch))
  entropy = random.uniform(0, 1.5, logp_old.shape)
  shift, gap_ref = random.normal(size=(2, *logp_old.shape))
  grid = len(phi), len(_SETTINGS), _STEPS
  used = int(np.prod(grid))
  # Filled up with repetitions: a shape that is compiled already costs less.
  which = np.resize(np.arange(used), max(number, used))
  factor, setting, step = np.unravel_index(which, grid)
  column = (slice(None), None, None, None)
  probe = _probe.make(
    reward[step] * phi[factor][column[:3]],
    length[step],
    logp_old[step],
    log_ratio=shift[step] * np.array(_SETTINGS)[setting][column],
    gap_ref=0.3 * gap_ref[step],
    entropy=entropy[step],
    fields=fields,
  )
  reading = _probe.read(method, probe)
  return _probe.Reading(*(x[:used].reshape(*grid, -1) for x in reading))


def _linear_map(seed: int) -> np.ndarray:
  """f64[P*G*T,D], of unit variance: from tokens to parameters."""
  tokens = int(np.prod(_probe.PROBE_SHAPE[1:]))
  return np.random.default_rng(seed).normal(size=(tokens, _PARAMETERS))


@jax.jit
def _total_step(gradients: jax.Array, epsilon: float) -> jax.Array:
  """Sum of the Adam steps [...] for gradients [K,...]."""
  adam = optax.scale_by_adam(0.9, 0.999, epsilon)

  def step(carry, gradient):
    total, state = carry
    update, state = adam.update(gradient, state)
    return (total + update, state), None

  start = jnp.zeros_like(gradients[0])
  return jax.lax.scan(step, (start, adam.init(start)), gradients)[0][0]


def _step_change(gradients: np.ndarray, epsilon: float) -> np.ndarray:
  """Relative change of the total step, [2,F-1,S]; see `StepChange`."""
  with jax.enable_x64(True):
    total = _total_step(np.moveaxis(gradients, 3, 0), epsilon)
  total = np.asarray(total)  # [2,F,S,D]
  change = np.max(np.abs(total[:, 1:] - total[:, :1]), axis=-1)
  size = np.max(np.abs(total), axis=-1)
  return _divide(change, np.where(size[:, :1] > 0, size[:, :1], size[:, 1:]))


def _turn(vectors: np.ndarray) -> np.ndarray:
  """Distance of the directions at phi and at 1, [F-1,S], for [F,S,K,...]."""
  flat = vectors.reshape(*vectors.shape[:2], -1)
  unit = _divide(flat, np.linalg.norm(flat, axis=-1, keepdims=True))
  return np.linalg.norm(unit[1:] - unit[:1], axis=-1)


def _exponent(size: np.ndarray, phi: np.ndarray) -> float | None:
  """Slope of log size over log phi, through phi = 1, where size is not 0."""
  live = size[1:] > 0
  if size[0] == 0 or not np.any(live & (phi[1:] != 1)):
    return None
  x, y = np.log(phi[1:][live]), np.log(size[1:][live] / size[0])
  return float(x @ y / (x @ x))


def _divide(x, y) -> np.ndarray:
  return np.where(y == 0, 0, x / np.where(y == 0, 1, y))


def _floats(x) -> tuple[float, ...]:
  return tuple(float(v) for v in x)


def _describe(scale: Scale) -> str:
  """Says in words which cause acts, from the numbers alone."""
  if all(s.size == 0 for s in scale.settings):
    return 'no gradient on these batches'
  ratio = np.array([s.gradient for s in scale.settings])
  exponents = [s.exponent for s in scale.settings if s.exponent is not None]
  if np.allclose(ratio, 1, 0, _NOISE):
    text = 'scale-free before Adam'
    text += ': the advantage does not change' if scale.deviation else ''
  elif np.allclose(ratio / np.array(scale.factors), 1, 0, _NOISE):
    left = max(max(s.epsilon) for s in scale.settings)
    text = f'linear, which Adam undoes to {left:.0e} (its epsilon)'
  elif exponents:
    text = f'gradient ~ phi ** {np.mean(exponents):.2g}'
  else:
    text = 'gradient at phi = 1 only'
  mixed = max(scale.turn) > _NOISE
  causes = (
    ('kl', 'the penalty is not scaled'),
    (
      'thresholds',
      'the advantage is not proportional to the reward'
      if mixed
      else 'the coefficient is not proportional to the advantage',
    ),
  )
  parts = []
  for name, cause in causes:
    change = np.array([getattr(s, name) for s in scale.settings])
    size, phi = np.max(change), scale.factors[np.argmax(np.max(change, axis=0))]
    if size > _NOISE:
      where = f'the step changes by {size:.2g} at phi = {phi:g}'
      parts.append((-size, f'; {cause}: {where}'))
  return text + ''.join(part for _, part in sorted(parts))
