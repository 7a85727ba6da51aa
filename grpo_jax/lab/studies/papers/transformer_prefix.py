"""E6 on a transformer: tokens that a whole group shares, by method.

On such a token the coefficients of a group add up. Weights that are equal in a
group cancel there, others do not. The transformer of `configs/arithmetic.py`
tells what that is worth: how much of the gradient comes from these tokens, and
in which direction 56 updates move them.

A sum of coefficients has a sign, so the movement is measured with a sign too:
it counts as positive if it goes where GRPO's sum on that token pulls. Other
tokens change parameters that the shared tokens use, so a third arm is GRPO
without the coefficients of the shared tokens. What it lacks is their own pull.
"""

import functools
from typing import Any
from typing import NamedTuple

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
from grpo_jax.lab.studies.papers import _arithmetic
from grpo_jax.lab.studies.papers import _settings
from grpo_jax.lab.studies.papers import shared_prefix

_SETS, _ROLLOUTS = 7, 8  # disjoint sets of rollouts, and rollouts of a set
_PASSES = 7  # over a set, after one that warms up Adam's moments
_FALL = 0.01  # of the loss, to first order
_SURE = 0.1  # temperature of the random policy
_UNIFORM = 'dapo', 'dr_grpo', 'rloo'
_METHODS = 'grpo', *_UNIFORM
ARMS = 'grpo', 'without', 'dapo'
OPTIMIZERS = 'AdamW', 'SGD'
_UPDATES = _PASSES * _ROLLOUTS

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
    'With GRPO such tokens give more than a thousandth of the gradient (norm '
    'of their part / norm of the gradient, mean of rollouts).',
    f'{FONTANA}, prop. 1, case 2',
    0.001,
  ),
}
for _name in OPTIMIZERS:
  CLAIMS |= {
    f'own_{_name}': Claim(
      f'{_name}, {_UPDATES} updates: the gradient of the shared tokens '
      "themselves moves them where GRPO's sum pulls (their drift under GRPO "
      'less their drift without that gradient, over the mean |change of log p| '
      'of all tokens).',
      f'derived from {FONTANA}, prop. 1',
      0.0,
    ),
    f'grpo_{_name}': Claim(
      f'{_name}, {_UPDATES} updates: under GRPO the shared tokens drift where '
      'its sum pulls (drift over the mean |change of log p| of all tokens).',
      f'{FONTANA}, prop. 1, case 2, read as drift',
      0.0,
    ),
    f'still_{_name}': Claim(
      f'{_name}, {_UPDATES} updates: equal weights in a group leave the shared '
      "tokens where they are (drift under DAPO toward GRPO's pull, over the "
      'mean |change of log p| of all tokens).',
      f'{FONTANA}, prop. 1, read as no drift',
      -0.02,
      0.02,
    ),
  }


def run(full: bool = False) -> dict[str, Any]:
  """Reads the coefficients of each method, and follows their gradients.

  Args:
    full: Take a policy that is warmed up, and its own rewards and lengths.
      A random policy has rewards that are half random, and half for being
      shorter than the group's mean, so that GRPO's sums have one sign.

  Returns:
    `identity`: largest difference for each rollout; `part[method][rollout]`:
    the norm of the gradient that comes from tokens which the whole group
    shares, over that of all; `tokens`: how many of them a group has, on
    average; `drift[optimizer][arm][set]`: how far they move toward GRPO's pull,
    over the mean absolute change of all tokens.
  """
  given = _arithmetic.rollouts(_SETS * _ROLLOUTS, 1.0 if full else _SURE, full)
  if not full:
    length = given.mask.sum(-1)
    short = length < length.mean(-1, keepdims=True)
    given = given._replace(reward=(given.reward + short) / 2)
  found = _parts(given)
  drift = {name: {arm: [] for arm in ARMS} for name in OPTIMIZERS}
  follow = jax.jit(functools.partial(_follow, given))
  for k in range(_SETS):
    at = slice(k * _ROLLOUTS, (k + 1) * _ROLLOUTS)
    rows = jax.tree.map(lambda x, at=at: x[at], given.layout)
    moved = np.asarray(follow(rows, found.arms[:, at]))
    for i, name in enumerate(OPTIMIZERS):
      for j, arm in enumerate(ARMS):
        drift[name][arm].append(
          _drift(moved[:, i, j], given.mask[at], found.pull[at])
        )
  return {
    'part': found.part,
    'drift': drift,
    'identity': found.identity,
    'tokens': found.tokens,
  }


class _Parts(NamedTuple):
  """What `_parts` finds; see `run`.

  Attributes:
    part: By method.
    identity: By rollout.
    tokens: A number.
    arms: Coefficients of the arms, f32[A,N,P,G,T].
    pull: GRPO's sums on tokens that the whole group shares, 0 on all others,
      f32[N,P,G,T].
  """

  part: dict[str, list[float]]
  identity: list[float]
  tokens: float
  arms: np.ndarray
  pull: np.ndarray


def _parts(given: _arithmetic.Rollouts) -> _Parts:
  """Coefficients, and the part of the gradient from shared tokens."""
  coefficients = {}
  for name in _METHODS:
    method = shared_prefix.METHODS[name]()
    read = functools.partial(_arithmetic.coefficients, method)
    coefficients[name] = np.asarray(
      _settings.jit(jax.vmap(read))(
        given.mask, given.reward, jnp.zeros(given.mask.shape)
      )
    )
  grpo = coefficients['grpo']
  shared = jax.vmap(losses.shared_prefix_weight)(given.tokens, given.mask, grpo)
  group = given.mask.shape[2]
  whole = np.asarray(shared.sharers == group) & given.mask
  weight = np.where(whole, np.asarray(shared.weight), 0)
  share = jax.jit(functools.partial(_share, given))
  part = {name: [] for name in coefficients}
  identity = []
  for k, reward in enumerate(given.reward[:_ROLLOUTS]):
    rows = jax.tree.map(lambda x, k=k: x[k], given.layout)
    for name, c in coefficients.items():
      part[name].append(float(share(rows, c[k], whole[k])))
    predicted = shared_prefix.pull(reward, given.mask[k].sum(-1)) / len(reward)
    off = np.where(whole[k], weight[k] - predicted[:, None, None], 0)
    identity.append(float(np.abs(off).max()))
  arms = {**coefficients, 'without': np.where(whole, 0, grpo)}
  return _Parts(
    part,
    identity,
    float(whole[..., 0, :].sum(-1).mean()),
    np.stack([arms[arm] for arm in ARMS]),
    weight,
  )


def _share(given: _arithmetic.Rollouts, layout, coefficient, whole):
  """Norm of the gradient of some tokens over that of all, f32[]."""

  def norm(coefficient):
    return jnp.linalg.norm(
      _arithmetic.pull_back(given.score, given.params, layout, coefficient)
    )

  return norm(jnp.where(whole, coefficient, 0)) / norm(coefficient)


def _follow(given: _arithmetic.Rollouts, layout, coefficient):
  """The change of log p on the way of the updates, f32[N,O,A,P,G,T].

  The policy stays, so this is the change to first order in the rate. Adam sees
  the rollouts once before its updates count.

  Args:
    given: The policy.
    layout: Of N rollouts.
    coefficient: Of the arms, f32[A,N,P,G,T].
  """

  def gradient(rollout):
    rows, c = rollout
    return jax.vmap(
      lambda c: _arithmetic.pull_back(given.score, given.params, rows, c)
    )(c)

  gradients = jax.lax.map(gradient, (layout, jnp.moveaxis(coefficient, 1, 0)))
  adam = optim.adamw(1.0, b2=0.99, weight_decay=0.0, clip_norm=None)

  def update(carry, gradient):
    way, state = carry
    step, state = adam.update(gradient, state, given.params)
    return (way + step, state), None

  def taken(gradients):
    zero = jnp.zeros_like(given.params)
    (_, warm), _ = jax.lax.scan(
      update, (zero, adam.init(given.params)), gradients
    )
    (way, _), _ = jax.lax.scan(
      update, (zero, warm), jnp.tile(gradients, (_PASSES, 1))
    )
    return way

  ways = jnp.stack(
    [
      jax.lax.map(taken, jnp.moveaxis(gradients, 1, 0)),
      -gradients.sum(0),
    ]
  )
  # Shortened until the loss falls by a little, as the rates differ.
  falls = -jnp.einsum('oad,ad->oa', ways, gradients.mean(0))[..., None]
  ways = _FALL / falls * ways

  def change(way, rows):
    ends = [given.score(given.params + sign * way, rows) for sign in (1, -1)]
    return (ends[0] - ends[1]) / 2

  return jax.lax.map(
    lambda rows: jax.lax.map(
      lambda of_arm: jax.lax.map(lambda way: change(way, rows), of_arm), ways
    ),
    layout,
  )


def _drift(moved, mask, pull) -> float:
  """Mean change of shared tokens toward the pull, over that of all, absolute.

  Args:
    moved: Change of log p, f32[N,P,G,T].
    mask: bool[N,P,G,T], whether there is a token.
    pull: See `_Parts`.
  """
  toward = (np.sign(pull) * moved)[pull != 0]
  return float(toward.mean() / np.abs(moved[mask]).mean())


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  part = numbers['part']
  found = {
    'identity': Measured(max(numbers['identity'])),
    'uniform': Measured(max(max(part[name]) for name in _UNIFORM)),
    'grpo': claims.over_seeds(part['grpo']),
  }
  example = (
    'Smallest case: a token that is shared, and one that is not. The gradient '
    'of the other moves parameters that both use.'
  )
  for name, drift in numbers['drift'].items():
    own = np.subtract(drift['grpo'], drift['without']).tolist()
    found[f'own_{name}'] = claims.over_seeds(own)
    found[f'grpo_{name}'] = claims.over_seeds(drift['grpo'], example)
    found[f'still_{name}'] = claims.over_seeds(drift['dapo'], example)
  return found


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  names = list(numbers['part'])
  values = [numbers['part'][name] for name in names]
  left.barh(names, np.mean(values, 1), color=colors['second'], alpha=0.6)
  for y, of_method in enumerate(values):
    left.plot(of_method, [y] * len(of_method), '.', color=colors['text'])
  left.locator_params(axis='x', nbins=4)
  left.set_xlabel('gradient from tokens that all share / gradient')
  labels = {'grpo': 'GRPO', 'without': 'GRPO without their\ngradient'}
  labels['dapo'] = 'DAPO'
  for k, (name, color) in enumerate(
    zip(numbers['drift'], ('first', 'third'), strict=True)
  ):
    drift = [claims.over_seeds(numbers['drift'][name][arm]) for arm in ARMS]
    right.errorbar(
      [one.mean for one in drift], np.arange(len(ARMS)) + 0.2 * k,
      xerr=[one.half for one in drift], fmt='o', ms=4, color=colors[color],
      label=name,
    )  # fmt: skip
  right.set_yticks(np.arange(len(ARMS)) + 0.1, [labels[arm] for arm in ARMS])
  right.axvline(0, color=colors['text'], lw=1, ls=':')
  right.set_xlabel("drift toward GRPO's pull / |change| of all")
  right.set_ylim(-0.4, len(ARMS))  # with room for the legend
  right.legend(loc='upper right', ncols=2)
  found = measure(numbers)
  moved = ', '.join(
    f'{found[f"{key}_AdamW"].mean:+.2f} under {text}'
    for key, text in (('grpo', 'GRPO'), ('still', 'DAPO'))
  )
  return (
    f'Tokens that a group shares: {found["grpo"].mean:.1%} of the gradient of '
    f'GRPO, at most {found["uniform"].mean:.0e} with equal weights; their '
    f'drift with AdamW is {moved}'
  )


EXPERIMENT = Experiment(
  'E6b', 'tokens that completions share, on a transformer',
  CLAIMS, run, measure, draw,
)  # fmt: skip
