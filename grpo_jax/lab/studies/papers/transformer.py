"""Experiments on the gradients of a transformer, held at one policy.

A policy of the transformer of `configs/arithmetic.py` that does not change
samples rollouts, and each experiment asks what optimizers and methods make of
them. Unless the policy is warmed up, its parameters are random. Such a policy
is never right and hardly ever ends, so its rewards, in eighths, and its lengths
are random too.

- E4b, `transformer_scale`: how nearly AdamW is blind to the scale of rewards.
- E5b, `transformer_jump`: what a jump of that scale does, with its own
  gradients.
- E6b, `transformer_prefix`: tokens that a whole group shares, by method.

All of it is one file, because all three ask the same policy and its rollouts.
"""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import tempfile
from typing import Any
from typing import NamedTuple

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import bandits
from grpo_jax.lab.studies.papers import coefficients
from grpo_jax.lab.studies.papers import scales
from grpo_jax.losses import contrib
from grpo_jax.models import layout as layout_lib
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import bare
from grpo_jax.run import sampling
from grpo_jax.run.build import build

PROMPTS, GROUP = 8, 8
_PROMPT_TOKENS, _MOST_TOKENS = 6, 5  # of a sum of two numbers below 100


class Rollouts(NamedTuple):
  """What one policy has sampled, N rollouts of P prompts with G completions.

  Attributes:
    params: Of the policy, one vector f32[D].
    score: `(vector, layout) -> logp`, f32[P,G,T].
    unflatten: `vector -> params`, the tree of the model.
    model: The policy.
    layout: Rows of each rollout, arrays [N,P*G,...].
    tokens: i32[N,P,G,T], ids.
    mask: bool[N,P,G,T], whether there is a token.
    reward: f32[N,P,G].
  """

  params: jax.Array
  score: Callable[..., jax.Array]
  unflatten: Callable[..., Any]
  model: models.Model
  layout: layout_lib.Layout
  tokens: np.ndarray
  mask: np.ndarray
  reward: np.ndarray


def _config(temperature: float, warm: bool) -> config_lib.Config:
  """The model, task and warm-up of `configs/arithmetic.py`.

  Args:
    temperature: Of the policy. A low one makes a random policy sure of some
      tokens, as a trained policy is, so that completions of a group share them.
    warm: Whether the policy is warmed up on demonstrations.
  """
  base = config_lib.Config()
  change = dataclasses.replace
  return change(
    base,
    model=change(base.model, rope_base=100.0, unroll=True),
    data=change(
      base.data,
      prompt_buckets=(_PROMPT_TOKENS,),
      completion_buckets=(_MOST_TOKENS,),
    ),
    sampler=change(
      base.sampler,
      prompts=PROMPTS,
      group=GROUP,
      max_tokens=_MOST_TOKENS,
      temperature=temperature,
    ),
    warm_up=change(base.warm_up, steps=300 if warm else 0),
  )


@functools.cache
def sample_rollouts(
  number: int, temperature: float = 1.0, warm: bool = False
) -> Rollouts:
  """Samples from the policy; the same rollouts at every call.

  Args:
    number: N, how many.
    temperature: See `_config`.
    warm: Whether the policy is warmed up (half a minute) and judged, instead of
      random with random rewards.
  """
  resolved = _config(temperature, warm)
  run = build.run(resolved)
  if warm:
    with tempfile.TemporaryDirectory() as folder:
      params = bare.warmed_up(resolved, pathlib.Path(folder))
  else:
    params = build.initial_params(run)
  run.engine.load(params, version=0)
  drawn = [sampling.sampled(run, PromptState(), k)[0] for k in range(number)]
  tokens = np.stack([np.asarray(one.batch.tokens) for one in drawn])
  reward = np.stack([np.asarray(one.batch.reward) for one in drawn])
  length = np.stack([one.length for one in drawn])
  if not warm:
    random = np.random.default_rng(0)
    reward = random.integers(0, 9, reward.shape).astype(np.float32) / 8
    drawn_length = random.integers(2, _MOST_TOKENS + 1, length.shape)
    length = np.minimum(length, drawn_length)
  width = _PROMPT_TOKENS + _MOST_TOKENS
  layouts = [
    layout_lib.padded_rows(one.prompts, tokens[k], length[k], width)
    for k, one in enumerate(drawn)
  ]
  mask = np.arange(tokens.shape[-1]) < length[..., None]
  vector, unflatten = jax.flatten_util.ravel_pytree(params)

  def score(vector, layout):
    found = run.model.score(unflatten(vector), layout, temperature)
    return found.logp.reshape(PROMPTS, GROUP, -1)

  stacked = jax.tree.map(lambda *x: np.stack(x), *layouts)
  return Rollouts(
    vector, score, unflatten, run.model, stacked, tokens, mask, reward
  )


def loss_value(method: losses.LossTransform, logp, batch, state) -> jax.Array:
  """The surrogate loss of log-probabilities, f32[]."""
  return jnp.asarray(losses.surrogate_loss(method, logp, batch, state)[0])


def read_coefficients(method: losses.LossTransform, mask, reward, logp):
  """Coefficients -d loss / d logp at ratio 1, f32[P,G,T]."""
  batch, state = bandits.credited(method, mask, reward)
  slope = jax.grad(lambda logp: loss_value(method, logp, batch, state))(logp)
  return -slope


def pull_back(score, vector, layout, coefficient):
  """The gradient of `-sum(coefficient * logp)`, f32[D]."""
  logp, back = jax.vjp(lambda x: score(x, layout), vector)
  return back(-jnp.asarray(coefficient, logp.dtype))[0]


# E4 on a transformer: how nearly AdamW is blind to the scale of rewards.
#
# From one policy the transformer of `configs/arithmetic.py` takes the same four
# updates under every factor on its rewards: on the same rollouts, with AdamW as
# in that config. What differs is the factor, Adam's epsilon, and whether the
# norm of the gradient is clipped. Everything is float32, as in a run.

FACTORS = 1e-4, 1e-2, 1.0, 1e2, 1e4
_TAKEN = 4
_NEVER = 1e30  # a norm of the gradient that is never reached
ARMS_SCALE = {  # epsilon, largest norm
  '1e-15': (1e-15, _NEVER),
  '1e-08': (1e-8, _NEVER),
  '1e-05': (1e-5, _NEVER),
  'clipped': (1e-15, 1.0),
}

_SCALE_CLAIMS = {
  'tiny': Claim(
    'On a transformer, with epsilon 1e-15, factors of 1e-4 to 1e4 on the '
    'rewards do not change the distance the parameters move in 4 updates, nor '
    'its direction (largest change / distance).',
    f'{FONTANA}, prop. 2',
    high=0.01,
  ),
  'usual_up': Claim(
    'On a transformer, with epsilon 1e-8, factors up to 1e4 on the rewards do '
    'not change the distance the parameters move, nor its direction (largest '
    'change / distance).',
    f'{FONTANA}, prop. 2',
    high=0.01,
  ),
  'usual_down': Claim(
    'On a transformer, with epsilon 1e-8, factors down to 1e-4 on the rewards '
    'do not change the distance the parameters move, nor its direction '
    '(largest change / distance).',
    f'{FONTANA}, prop. 2',
    high=0.01,
  ),
  'large': Claim(
    'On a transformer, with epsilon 1e-5, a factor of 1e-4 on the rewards '
    'takes more than half of the distance the parameters move (what is left / '
    'distance).',
    'derived',
    high=0.5,
  ),
  'clipped': Claim(
    'On a transformer, with epsilon 1e-15 and the norm of the gradient '
    'clipped at 1, which acts at some scales only, factors of 1e-4 to 1e4 on '
    'the rewards do not change the distance the parameters move, nor its '
    'direction (largest change / distance).',
    f'{FONTANA}, prop. 2, which has no clipping',
    high=0.01,
  ),
}


def _run_scale(full: bool = False) -> dict[str, Any]:
  """Takes the updates under every factor and arm.

  Args:
    full: Begin with a policy that is warmed up, and with its own rewards.

  Returns:
    For every arm, by factor: `change`, the norm of the difference between where
    the parameters move under this factor and under 1, over the distance under
    1; `way`, the distance over the same. `gradient`: quantiles of the absolute
    entries that are not 0 of the first gradient, at factor 1.
  """
  given = sample_rollouts(_TAKEN, warm=full)
  take = jax.jit(lambda *arm: _take(given, *arm))
  first = np.abs(np.asarray(take(1.0, *ARMS_SCALE['1e-08'])[1]))
  change, way = {}, {}
  for name, arm in ARMS_SCALE.items():
    moved = [np.asarray(take(factor, *arm)[0]) for factor in FACTORS]
    one = moved[FACTORS.index(1.0)]
    size = np.linalg.norm(one)
    change[name] = [float(np.linalg.norm(x - one) / size) for x in moved]
    way[name] = [float(np.linalg.norm(x) / size) for x in moved]
  shares = (0.05, 0.25, 0.5, 0.75, 0.95)
  return {
    'factors': FACTORS,
    'change': change,
    'way': way,
    'shares': shares,
    'gradient': np.quantile(first[first > 0], shares).tolist(),
  }


def _take(given: Rollouts, factor, epsilon, norm):
  """Where `_TAKEN` updates move, f32[D], and the first gradient, f32[D]."""
  method = contrib.grpo_without_std(kl_coefficient=0.0)
  adam = optim.adamw(
    3e-4, b2=0.99, epsilon=epsilon, weight_decay=0.01, clip_norm=norm
  )

  def update(carry, rollout):
    theta, state = carry
    layout, mask, reward = rollout
    # All rollouts were drawn by the first policy, so that every factor sees the
    # same tokens.
    old = given.score(given.params, layout)
    batch, credited = bandits.credited(
      method, mask, factor * reward, logp_old=old
    )

    gradient = jax.grad(
      lambda theta: loss_value(
        method, given.score(theta, layout), batch, credited
      )
    )(theta)
    step, state = adam.update(gradient, state, theta)
    return (optax.apply_updates(theta, step), state), gradient

  rollouts = given.layout, given.mask, given.reward
  (theta, _), gradients = jax.lax.scan(
    update, (given.params, adam.init(given.params)), rollouts
  )
  return jnp.asarray(theta) - given.params, gradients[0]


def _measure_scale(numbers) -> dict[str, Measured]:
  change, factors = numbers['change'], np.array(numbers['factors'])
  usual = np.array(change['1e-08'])
  least = int(factors.argmin())
  e = 1e-8 / (factors[least] * np.array(numbers['gradient']))
  return {
    'tiny': Measured(max(change['1e-15'])),
    'usual_up': Measured(float(usual[factors > 1].max())),
    'usual_down': Measured(
      float(usual[factors < 1].max()),
      example='Smallest case: the first step, where epsilon / (phi sqrt(v)) is '
      f'{e[2]:.2g} for the median entry.',
    ),
    'large': Measured(numbers['way']['1e-05'][least]),
    'clipped': Measured(
      max(change['clipped']),
      example=f'Smallest case: {_TAKEN} updates; a norm below 1 keeps how '
      'large the gradients are beside each other.',
    ),
  }


def _draw_scale(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  labels = {'clipped': 'epsilon 1e-15, norm clipped at 1'}
  for (name, change), color in zip(numbers['change'].items(), SERIES):
    given = dict(color=colors[color], label=labels.get(name, f'epsilon {name}'))
    left.plot(numbers['factors'], np.maximum(change, 1e-9), 'o-', ms=4, **given)
    right.plot(numbers['factors'], numbers['way'][name], 'o-', ms=4, **given)
  for axes in (left, right):
    axes.set(xscale='log', xlabel='factor on all rewards')
  left.set(yscale='log', ylabel='change / distance (factor 1)')
  right.set_ylabel('distance / distance (factor 1)')
  right.legend()
  return (
    'AdamW on a transformer: rewards of 1e-4 change where the parameters move '
    f'by {found["usual_down"].mean:.1%} of that distance at epsilon 1e-8, and '
    f'leave {found["large"].mean:.1%} of it at 1e-5'
  )


# E5 on a transformer: a jump of the reward's scale, with its own gradients.
#
# The formula of E5 takes the gradient to be the same at every update. Gradients
# of rollouts are not: each is a small mean beside much noise. So Adam is given
# the gradients of 32 rollouts of one policy, which does not move, one after the
# other; or one of them again and again, as the formula has it. Every seed has
# 32 rollouts of its own, so that seeds are independent.

BETAS = 0.9, 0.99
FACTOR = 10.0
_ROLLOUTS_JUMP, _BEFORE = 32, 20  # updates in all, and before the jump
_SETS_JUMP = 5

_JUMP_CLAIMS = {
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


def independent_gradients_step(b1, b2, factor, k):
  """The norm of step k after a jump over that without, if gradients are noise.

  The first moment is a sum of independent vectors, so their squares add up.
  """
  first = np.sqrt(b1 ** (2 * k) + factor**2 * (1 - b1 ** (2 * k)))
  return first / np.sqrt(b2**k + factor**2 * (1 - b2**k))


def _run_jump(full: bool = False) -> dict[str, Any]:
  """Gives Adam gradients of a fixed policy, with and without a jump.

  Args:
    full: Take a policy that is warmed up, and its own rewards.

  Returns:
    `equal[k]` and `fresh[set][k]`, k = 1, 2, ... after the jump: the norm of
    the step over that of the same step without a jump. The sets of rollouts are
    disjoint. `signal[set]`: the squared norm of the mean gradient over the mean
    squared norm.
  """
  given = sample_rollouts(_SETS_JUMP * _ROLLOUTS_JUMP, warm=full)
  method = contrib.grpo_without_std(kl_coefficient=0.0)

  def gradient(rollout):
    layout, mask, reward = rollout
    logp = given.score(given.params, layout)
    c = read_coefficients(method, mask, reward, logp)
    return pull_back(given.score, given.params, layout, c)

  each = (given.layout, given.mask, given.reward)
  gradients = jax.jit(lambda some: jax.lax.map(gradient, some))
  ratios, equal, fresh, signal = jax.jit(_ratios), [], [], []
  for k in range(_SETS_JUMP):
    at = slice(k * _ROLLOUTS_JUMP, (k + 1) * _ROLLOUTS_JUMP)
    found = gradients(jax.tree.map(lambda x, at=at: x[at], each))
    fresh.append(np.asarray(ratios(found, 0 * found[0])).tolist())
    square = jnp.mean(jnp.sum(found**2, 1))
    signal.append(float(jnp.sum(found.mean(0) ** 2) / square))
    if k == 0:
      one = jnp.tile(found[0], (_ROLLOUTS_JUMP, 1))
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
    'equal': scales.equal_gradients_step(*BETAS, FACTOR, k),
    'independent': independent_gradients_step(*BETAS, FACTOR, k),
  }


def _measure_jump(numbers) -> dict[str, Measured]:
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


def _draw_jump(numbers, found, figure, colors) -> str:
  axes, laws = figure.subplots(), _laws(numbers)
  k = np.arange(1, len(numbers['equal']) + 1)
  for name, color, steps, label in (
    ('equal', 'first', [numbers['equal']], 'one gradient'),
    ('independent', 'second', numbers['fresh'], 'fresh rollouts'),
  ):
    axes.plot(k, laws[name], color=colors[color], label=f'formula: {label}')
    axes.plot(
      k, np.transpose(steps), 'o', ms=4, color=colors[color],
      label=[f'Adam: {label}', *[None] * (len(steps) - 1)],
    )  # fmt: skip
  axes.axhline(1, color=colors['faint'], lw=1, ls=':')
  axes.set(
    xlabel='steps after a factor of 10',
    yscale='log',
    ylabel='norm of the step / norm without the jump',
  )
  axes.legend()
  most = found['acts'].mean
  return (
    'A jump of the reward scale on a transformer: for a few updates the step '
    f'is up to {most:.2f} times as long'
  )


# E6 on a transformer: tokens that a whole group shares, by method.
#
# On such a token the coefficients of a group add up. Weights that are equal in
# a group cancel there, others do not. The transformer of
# `configs/arithmetic.py` tells what that is worth: how much of the gradient
# comes from these tokens, and in which direction 56 updates move them.
#
# A sum of coefficients has a sign, so the movement is measured with a sign too:
# it counts as positive if it goes where GRPO's sum on that token pulls. Other
# tokens change parameters that the shared tokens use, so a third arm is GRPO
# without the coefficients of the shared tokens. What it lacks is their own
# pull.

# Disjoint sets of rollouts, and rollouts of a set.
_SETS_PREFIX, _ROLLOUTS_PREFIX = 7, 8
_PASSES = 7  # over a set, after one that warms up Adam's moments
_FALL = 0.01  # of the loss, to first order
_SURE = 0.1  # temperature of the random policy
_UNIFORM = 'dapo', 'dr_grpo', 'rloo'
_METHODS = 'grpo', *_UNIFORM
ARMS_PREFIX = 'grpo', 'without', 'dapo'
OPTIMIZERS = 'AdamW', 'SGD'
_UPDATES = _PASSES * _ROLLOUTS_PREFIX

_PREFIX_CLAIMS = {
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
  _PREFIX_CLAIMS |= {
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


def _run_prefix(full: bool = False) -> dict[str, Any]:
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
  given = sample_rollouts(
    _SETS_PREFIX * _ROLLOUTS_PREFIX, 1.0 if full else _SURE, full
  )
  if not full:
    length = given.mask.sum(-1)
    short = length < length.mean(-1, keepdims=True)
    given = given._replace(reward=(given.reward + short) / 2)
  part, identity, tokens, arms, pull = _parts(given)
  drift = {name: {arm: [] for arm in ARMS_PREFIX} for name in OPTIMIZERS}
  follow = jax.jit(functools.partial(_follow, given))
  for k in range(_SETS_PREFIX):
    at = slice(k * _ROLLOUTS_PREFIX, (k + 1) * _ROLLOUTS_PREFIX)
    rows = jax.tree.map(lambda x, at=at: x[at], given.layout)
    moved = np.asarray(follow(rows, arms[:, at]))
    for i, name in enumerate(OPTIMIZERS):
      for j, arm in enumerate(ARMS_PREFIX):
        drift[name][arm].append(
          _drift(moved[:, i, j], given.mask[at], pull[at])
        )
  return {
    'part': part,
    'drift': drift,
    'identity': identity,
    'tokens': tokens,
  }


def _parts(given: Rollouts):
  """The part of the gradient from shared tokens, and coefficients.

  Returns:
    `part`, `identity` and `tokens` of `_run_prefix`; the coefficients of the
    arms, f32[A,N,P,G,T]; and the pull: GRPO's sums on tokens that the whole
    group shares, 0 on all others, f32[N,P,G,T].
  """
  by_method = {}
  for name in _METHODS:
    read = functools.partial(read_coefficients, coefficients.METHODS[name]())
    by_method[name] = np.asarray(
      bandits.jit(jax.vmap(read))(
        given.mask, given.reward, jnp.zeros(given.mask.shape)
      )
    )
  grpo = by_method['grpo']
  shared = jax.vmap(losses.shared_prefix_weight)(given.tokens, given.mask, grpo)
  group = given.mask.shape[2]
  whole = np.asarray(shared.sharers == group) & given.mask
  weight = np.where(whole, np.asarray(shared.weight), 0)
  share = jax.jit(functools.partial(_share, given))
  part = {name: [] for name in by_method}
  identity = []
  for k, reward in enumerate(given.reward[:_ROLLOUTS_PREFIX]):
    rows = jax.tree.map(lambda x, k=k: x[k], given.layout)
    for name, c in by_method.items():
      part[name].append(float(share(rows, c[k], whole[k])))
    predicted = coefficients.pull(reward, given.mask[k].sum(-1)) / len(reward)
    off = np.where(whole[k], weight[k] - predicted[:, None, None], 0)
    identity.append(float(np.abs(off).max()))
  arms = {**by_method, 'without': np.where(whole, 0, grpo)}
  return (
    part,
    identity,
    float(whole[..., 0, :].sum(-1).mean()),
    np.stack([arms[arm] for arm in ARMS_PREFIX]),
    weight,
  )


def _share(given: Rollouts, layout, coefficient, whole):
  """Norm of the gradient of some tokens over that of all, f32[]."""

  def norm(coefficient):
    return jnp.linalg.norm(
      pull_back(given.score, given.params, layout, coefficient)
    )

  return norm(jnp.where(whole, coefficient, 0)) / norm(coefficient)


def _follow(given: Rollouts, layout, coefficient):
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
    return jax.vmap(lambda c: pull_back(given.score, given.params, rows, c))(c)

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
      lambda arm: jax.lax.map(lambda way: change(way, rows), arm), ways
    ),
    layout,
  )


def _drift(moved, mask, pull) -> float:
  """Mean change of shared tokens toward the pull, over that of all, absolute.

  Args:
    moved: Change of log p, f32[N,P,G,T].
    mask: bool[N,P,G,T], whether there is a token.
    pull: See `_parts`.
  """
  toward = (np.sign(pull) * moved)[pull != 0]
  return float(toward.mean() / np.abs(moved[mask]).mean())


def _measure_prefix(numbers) -> dict[str, Measured]:
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


def _draw_prefix(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  names = list(numbers['part'])
  values = [numbers['part'][name] for name in names]
  left.barh(names, np.mean(values, 1), color=colors['second'], alpha=0.6)
  for y, shares in enumerate(values):
    left.plot(shares, [y] * len(shares), '.', color=colors['text'])
  left.locator_params(axis='x', nbins=4)
  left.set_xlabel('gradient from tokens that all share / gradient')
  labels = {
    'grpo': 'GRPO',
    'without': 'GRPO without their\ngradient',
    'dapo': 'DAPO',
  }
  for k, (name, color) in enumerate(
    zip(numbers['drift'], ('first', 'third'), strict=True)
  ):
    drift = [
      claims.over_seeds(numbers['drift'][name][arm]) for arm in ARMS_PREFIX
    ]
    right.errorbar(
      [one.mean for one in drift], np.arange(len(ARMS_PREFIX)) + 0.2 * k,
      xerr=[one.half for one in drift], fmt='o', ms=4, color=colors[color],
      label=name,
    )  # fmt: skip
  right.set_yticks(
    np.arange(len(ARMS_PREFIX)) + 0.1, [labels[arm] for arm in ARMS_PREFIX]
  )
  right.axvline(0, color=colors['text'], lw=1, ls=':')
  right.set_xlabel("drift toward GRPO's pull / |change| of all")
  right.set_ylim(-0.4, len(ARMS_PREFIX))  # with room for the legend
  right.legend(loc='upper right', ncols=2)
  moved = ', '.join(
    f'{found[f"{key}_AdamW"].mean:+.2f} under {text}'
    for key, text in (('grpo', 'GRPO'), ('still', 'DAPO'))
  )
  return (
    f'Tokens that a group shares: {found["grpo"].mean:.1%} of the gradient of '
    f'GRPO, at most {found["uniform"].mean:.0e} with equal weights; their '
    f'drift with AdamW is {moved}'
  )


EXPERIMENTS = {
  'transformer_scale': Experiment(
    'E4b',
    'the scale of the rewards of a transformer',
    _SCALE_CLAIMS,
    _measure_scale,
    _draw_scale,
    _run_scale,
  ),
  'transformer_jump': Experiment(
    'E5b',
    'a jump of the reward scale of a transformer',
    _JUMP_CLAIMS,
    _measure_jump,
    _draw_jump,
    _run_jump,
  ),
  'transformer_prefix': Experiment(
    'E6b',
    'tokens that completions share, on a transformer',
    _PREFIX_CLAIMS,
    _measure_prefix,
    _draw_prefix,
    _run_prefix,
  ),
}
