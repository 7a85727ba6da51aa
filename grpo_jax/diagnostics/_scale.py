"""What a factor on the reward does to a method's step: r -> phi r.

Adam undoes a factor on the whole gradient, up to its epsilon, but not one on a
part of it (Fontana et al., arXiv 2601.05002, proposition 2). Each cause is
measured by taking it away.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax.diagnostics import _fit
from grpo_jax.diagnostics import _probe

_SETTINGS = 1e-5, 0.05  # deviation of log-ratios: on policy, off policy
_STEPS, _PARAMETERS = 24, 16
_EPSILON, _NO_EPSILON = 1e-8, 1e-300  # not 0, as 0 / (0 + epsilon) is to be 0
_NOISE = 3e-6  # relative; below it lies rounding, of float32 too
_POWER = 0.01  # relative; a factor this far from phi ** e is no power of phi


class StepChange(NamedTuple):
  """What the factors change in one setting; tuples have one entry per factor.

  A change of the step is max |D(phi) - D(1)| / max |D(1)|, with D the sum of 24
  Adam steps. The maxima run over the parameters.
  """

  log_ratio: float  # deviation of the policy's log-ratios, nats
  size: float  # root mean square of a parameter's gradient at phi = 1
  gradient: tuple[float, ...]  # norm at phi over norm at 1
  exponent: float | None  # gradient ~ phi ** exponent; None: see `_exponent`
  step: tuple[float, ...]  # change of the step
  kl: tuple[float, ...]  # the part of it that goes without the penalty
  thresholds: tuple[float, ...]  # what is left without penalty and epsilon
  epsilon: tuple[float, ...]  # the part of it that goes without Adam's epsilon
  turn: tuple[float, ...]  # of the objective's coefficients, see `_turn`


class Scale(NamedTuple):
  """What `reward_scale` measures."""

  factors: tuple[float, ...]
  deviation: bool  # the advantage does not change at all
  exponent: float | None  # advantage ~ phi ** exponent, likewise
  turn: tuple[float, ...]  # of the advantages, see `_turn`; 0: homogeneous
  settings: tuple[StepChange, ...]
  text: str


def reward_scale(
  method: losses.LossTransform,
  fields: _probe.Fields | None = None,
  factors: tuple[float, ...] = (1e-2, 0.1, 10.0, 100.0),
) -> Scale:
  """Measures how gradient and Adam step change when rewards are scaled.

  A fixed random linear map makes gradients of 16 parameters from the
  coefficients of 24 random batches, once with the policy near the old policy
  and once away from it. Adam (b1 = 0.9, b2 = 0.999, epsilon = 1e-8) starts from
  zero moments.

  Args:
    method: Any chain; see `audit`.
    fields: See `audit`.
    factors: The factors phi, positive.

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
  reading = _read(_probe.Subject(method, fields), phi)  # [S,F,K,P*G*T]
  shape = reading.objective.shape[-1], _PARAMETERS
  # The entropy depends on the parameters in another way than the
  # log-probabilities do, so it has a map of its own.
  maps = [np.random.default_rng(seed).normal(size=shape) for seed in (1, 2)]
  gradient = reading.objective @ maps[0]
  rest = reading.penalty @ maps[0] + reading.entropy @ maps[1]
  gradients = np.stack([gradient + rest, gradient])  # [2,S,F,K,D]
  norm = np.linalg.norm(gradients[0], axis=(-2, -1))  # [S,F]
  # [S,F-1] each: with and without the penalty, and both without an epsilon.
  both, no_kl = _step_change(gradients, _EPSILON)
  no_epsilon, neither = _step_change(gradients, _NO_EPSILON)
  changes = dict(
    gradient=_fit.divide(norm[:, 1:], norm[:, :1]),
    step=both,
    kl=no_epsilon - neither,
    thresholds=neither,
    epsilon=no_kl - neither,
    turn=_turn(reading.objective),
  )
  settings = tuple(
    StepChange(
      log_ratio=log_ratio,
      size=float(norm[s, 0] / np.sqrt(_STEPS * _PARAMETERS)),
      exponent=_exponent(norm[s], phi),
      **{name: tuple(x[s].tolist()) for name, x in changes.items()},
    )
    for s, log_ratio in enumerate(_SETTINGS)
  )
  advantage = reading.advantage
  scale = Scale(
    factors=tuple(phi[1:].tolist()),
    deviation=bool(np.abs(advantage - advantage[:, :1]).max() <= _NOISE),
    exponent=_exponent(np.sqrt(np.sum(advantage**2, axis=(0, 2, 3))), phi),
    turn=tuple(_turn(advantage).max(axis=0).tolist()),
    settings=settings,
    text='',
  )
  return scale._replace(text=_text(scale))


def _read(subject: _probe.Subject, phi: np.ndarray) -> _probe.Reading:
  """Evaluates the batches for all factors; arrays become [S,F,K,P*G*T].

  `S` settings, `F` factors (1 comes first), `K` batches.
  """
  shape = (_STEPS, *_probe.SHAPE)
  random = np.random.default_rng(1)
  reward = random.uniform(0, 1.5, shape[:-1])
  right = np.arange(shape[2]) < random.integers(1, shape[2], (_STEPS, 1))
  reward[:, 0] = random.permuted(right, axis=-1)  # right or wrong
  length = random.integers(2, shape[-1] + 1, reward.shape)
  old, entropy = -random.uniform(0.05, 3, shape), random.uniform(0, 1.5, shape)
  shift, gap = random.normal(size=(2, *shape))
  base = dict(length=length, logp_old=old, gap_ref=0.3 * gap, entropy=entropy)
  changes = {
    f'{spread} {k}': dict(reward=factor * reward, log_ratio=spread * shift)
    for spread in _SETTINGS
    for k, factor in enumerate(phi)
  }
  read = subject.read(subject.probes(base, changes)).values()
  grid = len(_SETTINGS), len(phi), _STEPS, -1
  return _probe.Reading(*(np.stack(x).reshape(grid) for x in zip(*read)))


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
  """Relative change of the total step, [2,S,F-1]; see `StepChange`."""
  with jax.enable_x64(True):
    total = np.asarray(_total_step(np.moveaxis(gradients, 3, 0), epsilon))
  change = np.abs(total[:, :, 1:] - total[:, :, :1]).max(-1)
  size = np.abs(total).max(-1)  # [2,S,F]
  # Without a step at phi = 1 the change is relative to the step at phi.
  before = size[..., :1]
  return _fit.divide(change, np.where(before > 0, before, size[..., 1:]))


def _turn(vectors: np.ndarray) -> np.ndarray:
  """Distance of the directions at phi and at 1, [S,F-1], for [S,F,K,...]."""
  flat = vectors.reshape(*vectors.shape[:2], -1)
  unit = _fit.divide(flat, np.linalg.norm(flat, axis=-1, keepdims=True))
  return np.linalg.norm(unit[:, 1:] - unit[:, :1], axis=-1)


def _exponent(size: np.ndarray, phi: np.ndarray) -> float | None:
  """The e of size ~ phi ** e, through the size at phi = 1, which comes first.

  None if a size is 0, or if no e has all sizes up to 1 %: four factors always
  have a slope of best fit, and it says nothing of a size that jumps.
  """
  if not size.all() or (phi == 1).all():
    return None
  change, log_phi = size / size[0], np.log(phi)
  exponent = float(_fit.least_squares(np.log(change), log_phi)[0][0])
  off = np.abs(change / phi**exponent - 1).max()
  return exponent if off <= _POWER else None


def cell(change: StepChange) -> str:
  """The exponent of the gradient, or the factors that are no power law."""
  if change.size == 0 or change.exponent is not None:
    return _fit.short(change.exponent, 2)
  return 'none: ' + ', '.join(f'x{_fit.short(x)}' for x in change.gradient)


def _law(change: StepChange, factors: tuple[float, ...]) -> str:
  """The power law of the gradient, or its factors where there is none."""
  if change.exponent is not None:
    return f'gradient ~ phi ** {_fit.number(change.exponent, 2)}'
  given = ', '.join(f'x {_fit.short(x)}' for x in change.gradient)
  at = ', '.join(f'{phi:g}' for phi in factors)
  return f'no power law: gradient {given} at phi = {at}'


def _text(scale: Scale) -> str:
  """Says in words which causes act, the one with the larger change first."""
  if all(s.size == 0 for s in scale.settings):
    return 'no gradient on these batches'
  ratio = np.array([s.gradient for s in scale.settings])
  if np.allclose(ratio, 1, 0, _NOISE):
    text = 'scale-free before Adam'
    text += ': the advantage does not change' if scale.deviation else ''
  elif np.allclose(ratio / np.array(scale.factors), 1, 0, _NOISE):
    left = _fit.number(max(max(s.epsilon) for s in scale.settings), 0, 'e')
    text = f'linear, which Adam undoes up to {left} (its epsilon)'
  elif ratio.any():
    live = [s for s in scale.settings if s.size > 0]
    first, *_, text = [_law(s, scale.factors) for s in (live[0], *live)]
    # Where neither is a power law, the factors of one of them are enough.
    if first != text and any(s.exponent is not None for s in live):
      text = f'on policy {first}; off policy {text}'
  else:
    text = 'gradient at phi = 1 only'
  kept = max(scale.turn) <= _NOISE
  pair = ('coefficient', 'advantage') if kept else ('advantage', 'reward')
  threshold = 'the {} is not proportional to the {}'.format(*pair)
  causes = {'kl': 'the penalty is not scaled', 'thresholds': threshold}
  parts = []
  for name, cause in causes.items():
    change = np.max([getattr(s, name) for s in scale.settings], axis=0)
    largest = float(change.max())
    if largest > _NOISE:
      size = _fit.number(largest, 2)
      phi = scale.factors[_fit.leading(change, _NOISE)]
      said = f'; {cause}: the step changes by {size} at phi = {phi:g}'
      parts.append((largest, said))
  if len(parts) == 2 and _fit.leading([size for size, _ in parts], _NOISE):
    parts.reverse()  # the larger one first
  return text + ''.join(said for _, said in parts)
