"""E2: how far past its bound a clipped probability coasts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured

RATES = 0.005, 0.01, 0.02, 0.05
BETAS = (0.9, 0.95), (0.9, 0.99), (0.9, 0.999)
_OLD, _HIGH, _STEPS = 0.3, 1.2, 120

CLAIMS = {
  'law': Claim(
    'A clipped probability ends where the last live step times the coasting '
    'law puts it (largest relative error of the ratio).',
    f'derived from {FONTANA}, eq. 36',
    high=1e-6,
  ),
  'collapse': Claim(
    'The distance that the logit moves after the crossing, over (rate x law), '
    'is the size of the last live step, about 1 for a gradient of one sign '
    '(least over rates and betas).',
    'derived',
    0.9,
    1.1,
  ),
  'adam': Claim(
    'Adam(0.9, 0.95) at rate 0.02 ends beyond the bound of 1.2, at 1.398.',
    'derived',
    1.3975,
    1.3985,
  ),
  'sgd': Claim(
    'SGD stops at its first step across the bound (distance that the logit '
    'moves after that step).',
    f'derived from {FONTANA}, prop. 3',
    0,
    0,
  ),
  'rmsprop': Claim(
    'RMSProp, which has no first moment, stops at its first step across the '
    'bound (distance that the logit moves after that step).',
    'derived',
    0,
    0,
  ),
  'momentum': Claim(
    'With SGD and momentum 0.9 the coast adds up to 9 times the last step '
    'before clipping.',
    'derived',
    8.99,
    9.01,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Pushes one probability up until it is clipped, and 120 updates in all.

  Args:
    full: Not used: the experiment is exact.

  Returns:
    For Adam `ratios[b][r][t]` of betas and rates; for the other optimizers
    `others[name][t]`. The ratio before the first update is the first.
  """
  del full
  with jax.enable_x64(True):
    b1, b2 = (jnp.array(one)[:, None] for one in zip(*BETAS, strict=True))
    adam = jnp.vectorize(
      lambda b1, b2, rate: _path(optax.adam(rate, b1, b2, eps=1e-300)),
      signature='(),(),()->(t)',
    )
    paths = jax.jit(adam)(b1, b2, jnp.array(RATES)[None])
    others = jax.jit(
      lambda: {
        'sgd': _path(optax.sgd(0.02)),
        'rmsprop': _path(optax.rmsprop(0.02, 0.95, eps=1e-300)),
        'momentum': _path(optax.sgd(0.02, momentum=0.9)),
      }
    )()
    paths, others = jax.tree.map(
      lambda x: np.asarray(x).tolist(), (paths, others)
    )
  return {'betas': BETAS, 'rates': RATES, 'ratios': paths, 'others': others}


def _path(optimizer) -> jax.Array:
  """The probability over the old one, before and after every update, f64[T]."""
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_tokens(),
    losses.ppo_clip(0.2, _HIGH - 1),
  )
  one = jnp.ones((1, 1, 1))
  batch = losses.make_batch(one > 0, one[..., 0], logp_old=jnp.log(_OLD) * one)
  batch, state = losses.credit(method, batch, method.init())
  batch = losses.prepare(method, batch, state)

  def loss(logit):
    logp = jax.nn.log_sigmoid(logit) * one
    return losses.surrogate_loss(method, logp, batch, state)[0]

  def step(carry, _):
    logit, memory = carry
    update, memory = optimizer.update(jax.grad(loss)(logit), memory)
    return (logit + update, memory), jax.nn.sigmoid(logit) / _OLD

  start = jnp.log(_OLD / (1 - _OLD))
  return jax.lax.scan(step, (start, optimizer.init(start)), length=_STEPS)[1]


def _logit(ratio):
  p = np.asarray(ratio) * _OLD
  return np.log(p / (1 - p))


def _coast(path) -> tuple[int, float, float]:
  """Live steps, the logit's last live step, and its way after that."""
  live = int(np.argmax(np.array(path) > _HIGH))  # the first that is clipped
  logit = _logit(path)
  return live, logit[live] - logit[live - 1], logit[-1] - logit[live]


def _coasts(numbers):
  """For every beta and rate: predicted ratio, measured ratio, way / law."""
  rows = []
  for betas, paths in zip(numbers['betas'], numbers['ratios'], strict=True):
    for rate, path in zip(numbers['rates'], paths, strict=True):
      live, last, way = _coast(path)
      left = len(path) - 1 - live
      law = optim.coasting_steps(*betas, num_steps=left, live_steps=live)
      end = _logit(path[live]) + last * law
      rows.append(
        (
          1 / (1 + np.exp(-end)) / _OLD,
          path[-1],
          way / (rate * law),
          rate * law,
          way,
        )
      )
  return np.array(rows)


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  rows, others = _coasts(numbers), numbers['others']
  _, last, way = _coast(others['momentum'])
  found = {
    'law': float(np.abs(rows[:, 0] / rows[:, 1] - 1).max()),
    'collapse': float(rows[:, 2].min()),
    'adam': numbers['ratios'][0][2][-1],
    'sgd': float(_coast(others['sgd'])[2]),
    'rmsprop': float(_coast(others['rmsprop'])[2]),
    'momentum': float(way / last),
  }
  return {name: Measured(value) for name, value in found.items()}


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  for path, name, label in (
    (numbers['ratios'][0][2], 'first', 'Adam (0.9, 0.95)'),
    (numbers['ratios'][2][2], 'third', 'Adam (0.9, 0.999)'),
    (numbers['others']['rmsprop'], 'fourth', 'RMSProp'),
    (numbers['others']['sgd'], 'second', 'SGD'),
  ):
    left.plot(path, color=colors[name], label=label)
  left.axhline(_HIGH, color=colors['faint'], ls=':')
  left.text(80, _HIGH - 0.012, 'bound', color=colors['faint'], va='top')
  left.set(xlabel='updates', title='rate 0.02')
  left.set_ylabel('probability / old probability')
  left.legend()
  rows = _coasts(numbers)
  per = len(numbers['rates'])
  for i, (betas, name) in enumerate(
    zip(numbers['betas'], ('first', 'second', 'third'), strict=True)
  ):
    some = rows[i * per : (i + 1) * per]
    right.plot(
      some[:, 3], some[:, 4], 'o', color=colors[name], label=str(tuple(betas))
    )
  most = rows[:, 3].max()
  right.plot([0, most], [0, most], color=colors['faint'], lw=1, zorder=0)
  right.set(xlabel='rate x law', title='4 rates x 3 betas, one line')
  right.set_ylabel('distance of the logit after the crossing')
  right.legend()
  found = measure(numbers)
  return (
    f'Adam carries a clipped probability from 1.2 to {found["adam"].mean:.2f} '
    f'of its old value; the law is off by {found["law"].mean:.0e} at most'
  )


EXPERIMENT = Experiment(
  'E2', 'the distance past the bound', CLAIMS, run, measure, draw
)
