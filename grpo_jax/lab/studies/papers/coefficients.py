"""Experiments on what methods make of groups, at exact policies.

- E6, `shared_prefix`: what methods do to a token that a whole group shares.
- E7, `surrogate_value`: whether the value of a surrogate loss says how training
  goes.
- E12, `finite_group`: the weight that GRPO gives a prompt when groups are
  finite.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.figures import SERIES
from grpo_jax.lab.studies.papers import bandits

# E6: what methods do to a token that all completions of a group share.

_FIRST = 0.69  # probability of the first token at the start
_LENGTHS = 2, 20, 8  # of: s short, s long, a
_REWARDS = 1.0, 0.0, 0.5
_GROUP_SHARED, _STEPS_SHARED, _RATE_SHARED = 4, 300, 0.15
METHODS = {
  'grpo': lambda: losses.methods.grpo(kl_coefficient=0),
  'dapo': losses.methods.dapo,
  'dr_grpo': lambda: losses.methods.dr_grpo(max_tokens=1),
  'rloo': losses.methods.rloo,
  'gspo': losses.methods.gspo,
  'cppo': lambda: losses.methods.cppo(kl_coefficient=0),
  # The rule for shared tokens alone, without what it does about entropy.
  'gtpo': lambda: losses.methods.gtpo_conflict(0.0, float('inf')),
}
_ENUMERATED, _BIASED = ('grpo', 'dapo', 'dr_grpo'), ('gspo', 'cppo', 'dapo')
_NAMES = {
  'grpo': 'GRPO', 'gspo': 'GSPO', 'cppo': 'CPPO', 'gtpo': 'GTPO',
  'dapo': 'DAPO', 'dr_grpo': 'Dr. GRPO', 'rloo': 'RLOO',
}  # fmt: skip

_SHARED_CLAIMS = {
  'identity': Claim(
    'Where the whole group shares a token, GRPO moves it by Corr(r, 1/L) x '
    'std(1/L) (largest difference, 200 groups).',
    f'derived from {FONTANA}, prop. 1',
    high=1e-12,
  ),
  'cancels': Claim(
    'Proposition 1: with equal weights in a group (DAPO) the sum on a token '
    'that all share is 0, so the token is not biased: expected gradient of the '
    'first token / that of the second, where the true one is 0.',
    f'{FONTANA}, prop. 1, read as unbiasedness',
    -1e-9,
    1e-9,
  ),
  'grpo_bias': Claim(
    'For GRPO the expected gradient of the first token is 0.51 of that of the '
    'second, by exact enumeration, where the true one is 0.',
    'derived',
    0.5,
    0.52,
  ),
  'dr_grpo': Claim(
    'The expected gradient of Dr. GRPO is (G - 1) / G = 0.75 of the true one, '
    'on the tree.',
    'derived',
    0.75 - 1e-9,
    0.75 + 1e-9,
  ),
  'grpo_drift': Claim(
    'Trained on the tree, GRPO moves the first token up though its true '
    'gradient is 0: probability after 300 steps, 0.69 before.',
    f'derived from {FONTANA}, prop. 1',
    0.75,
  ),
  'dapo_drift': Claim(
    'Trained on the tree, DAPO moves the first token up, though the sum on '
    'the token is 0 where all share it (probability after 300 steps).',
    'derived',
    0.7,
  ),
  'gspo_drift': Claim(
    'Trained on the tree, GSPO moves the first token up as GRPO does, as its '
    'coefficients are those of GRPO at the first update of a rollout '
    '(probability after 300 steps).',
    f'derived from {FONTANA}, table 1',
    0.75,
  ),
  'cppo_drift': Claim(
    'Trained on the tree, CPPO moves the first token up (probability after '
    '300 steps).',
    f'derived from {FONTANA}, table 1',
    0.75,
  ),
  'gtpo_drift': Claim(
    'Trained on the tree, GTPO (Simoni et al.), by its rule for tokens that '
    'right and wrong completions share, moves the first token up (probability '
    'after 300 steps).',
    f'derived from {FONTANA}, table 1',
    0.75,
  ),
  'unbiased_drift': Claim(
    'Trained on the tree, RLOO does not move the first token: there is a '
    'random walk only (probability after 300 steps).',
    'derived',
    0.64,
    0.74,
  ),
  'dr_grpo_drift': Claim(
    'Trained on the tree, Dr. GRPO does not move the first token: there is a '
    'random walk only (probability after 300 steps).',
    'derived',
    0.64,
    0.74,
  ),
  'flipped': Claim(
    'With the long completion right instead, GRPO moves the first token down '
    '(probability after 300 steps, 0.69 before).',
    'derived',
    high=0.63,
  ),
  'flipped_others': Claim(
    'With the long completion right instead, GSPO, CPPO and DAPO move the '
    'first token down too (probability after 300 steps, largest of the '
    'three).',
    'derived',
    high=0.68,
  ),
  'flipped_gtpo': Claim(
    'With the long completion right instead, GTPO still does not move the '
    'first token down (probability after 300 steps, 0.69 before).',
    'derived',
    0.66,
  ),
}


def _run_shared(full: bool = False) -> dict[str, Any]:
  """Checks the identity, enumerates all groups, and trains on the tree.

  Args:
    full: 2,000 seeds in place of 200.

  Returns:
    `identity`: pairs of measured and predicted sums; `tree`: first, second and
    true second gradient by method; `drift[method][seed][t]` and
    `flipped[method][seed][t]`: the probability of the first token.
  """
  seeds = 2000 if full else 200
  tables = {name: _tables(method()) for name, method in METHODS.items()}
  flipped = 'grpo', *_BIASED, 'gtpo'
  return {
    'identity': _identity(),
    'tree': {name: _expected(METHODS[name]()) for name in _ENUMERATED},
    'drift': {name: _train_shared(c, seeds) for name, (c, _) in tables.items()},
    'flipped': {
      name: _train_shared(tables[name][1], seeds) for name in flipped
    },
  }


def _identity() -> dict[str, list[float]]:
  """W_agg of random groups, and Corr(r, 1/L) std(1/L)."""
  random = np.random.default_rng(0)
  reward = random.uniform(size=(200, 8))
  length = random.integers(1, 17, reward.shape)
  method = METHODS['grpo']()
  c, _ = bandits.group_coefficients(method, reward, length)
  tokens = np.arange(c.size).reshape(c.shape)
  tokens[..., 0] = 0  # all share the first token
  mask = np.arange(c.shape[-1]) < length[..., None]
  with jax.enable_x64(True):
    shared = diagnostics.shared_prefix_weight(tokens, mask, c)
    measured = np.asarray(shared.weight)[:, 0, 0]
  predicted = pull(reward, length)
  return {'measured': measured.tolist(), 'predicted': predicted.tolist()}


def pull(reward: np.ndarray, length: np.ndarray) -> np.ndarray:
  """Corr(r, 1/L) std(1/L) of groups, f[N], from rewards and lengths [N,G].

  A group of equal rewards has 0.
  """
  spread = reward.std(axis=1)
  centred = reward - reward.mean(1, keepdims=True)
  off = np.mean(centred / length, axis=1)
  return np.where(spread > 0, off / np.where(spread > 0, spread, 1), 0)


def _expected(method) -> dict[str, float]:
  """First and second expected gradient on the tree, all groups enumerated."""
  bias = diagnostics.tree_bias(method)
  return {
    'first': bias.first,
    'second': bias.second,
    'true_second': bias.true_second,
  }


def _tables(method) -> np.ndarray:
  """The first token's coefficients for each group of leaves, f64[2,3^G,G].

  First with the short completion right, then with the long one right.
  """
  leaves = np.array(list(itertools.product(range(3), repeat=_GROUP_SHARED)))
  reward = [
    np.array(_REWARDS)[places][leaves] for places in ([0, 1, 2], [1, 0, 2])
  ]
  length = np.tile(np.array(_LENGTHS)[leaves], (2, 1))
  # Ids are equal where the tree shares a token, and nowhere else.
  ids = np.arange(3 * max(_LENGTHS)).reshape(3, -1)
  ids[1, 0] = ids[0, 0]
  tokens = np.tile(ids[leaves], (2, 1, 1))
  c, _ = bandits.group_coefficients(
    method, np.concatenate(reward), length, tokens=tokens
  )
  return c[..., 0].reshape(2, *leaves.shape)


def _train_shared(table: np.ndarray, seeds: int) -> list[list[float]]:
  """SGD on the logit of the first token, the second token left at one half.

  So both first tokens are worth the same all the time. The step is scaled to
  the size of the method's coefficients, that methods may be compared.
  """
  random = np.random.default_rng(0)  # the same numbers for all methods
  rate = _RATE_SHARED / np.abs(table).sum(axis=1).mean()
  z = np.full(seeds, np.log(_FIRST / (1 - _FIRST)))
  path = []
  for _ in range(_STEPS_SHARED):
    p = 1 / (1 + np.exp(-z))
    path.append(p)
    u = random.uniform(size=(2, seeds, _GROUP_SHARED))
    leaf = np.where(u[0] < p[:, None], (u[1] < 0.5).astype(int), 2)
    c = table[leaf @ 3 ** np.arange(_GROUP_SHARED)[::-1]]
    z = z + rate * np.sum(c * ((leaf < 2) - p[:, None]), axis=1)
  return np.transpose(path)[:, ::10].tolist()


def _measure_shared(numbers) -> dict[str, Measured]:
  pairs, tree = numbers['identity'], numbers['tree']
  off = np.subtract(pairs['measured'], pairs['predicted'])
  last = lambda paths: claims.over_seeds([path[-1] for path in paths])
  ratio = {k: x['first'] / x['second'] for k, x in tree.items()}
  exact = tree['dr_grpo']['second'] / tree['dr_grpo']['true_second']
  return {
    'identity': Measured(float(np.abs(off).max())),
    'cancels': Measured(
      ratio['dapo'],
      example='Smallest case: a group of 4 on a tree of three completions.',
    ),
    'grpo_bias': Measured(ratio['grpo']),
    'dr_grpo': Measured(exact),
    'grpo_drift': last(numbers['drift']['grpo']),
    'dapo_drift': last(numbers['drift']['dapo']),
    **{
      f'{name}_drift': last(numbers['drift'][name])
      for name in ('gspo', 'cppo', 'gtpo', 'dr_grpo')
    },
    'unbiased_drift': last(numbers['drift']['rloo']),
    'flipped': last(numbers['flipped']['grpo']),
    'flipped_others': claims.furthest(
      last(numbers['flipped'][name]) for name in _BIASED
    ),
    'flipped_gtpo': last(numbers['flipped']['gtpo']),
  }


def _draw_shared(numbers, found, figure, colors) -> str:
  panels = figure.subplots(1, 2, sharey=True)
  styles = {
    'grpo': ('second', '-'), 'gspo': ('second', ':'), 'cppo': ('fourth', '-'),
    'gtpo': ('third', '-'), 'dapo': ('fifth', '-'), 'rloo': ('first', '-'),
    'dr_grpo': ('first', ':'),
  }  # fmt: skip
  for axes, key, title in (
    (panels[0], 'drift', 'the short completion is right'),
    (panels[1], 'flipped', 'the long completion is right'),
  ):
    for name, paths in numbers[key].items():
      color, style = styles[name]
      path = np.array(paths)
      mean = path.mean(axis=0)
      half = 1.96 * path.std(axis=0) / len(path) ** 0.5
      t = np.arange(len(mean)) * 10
      axes.plot(t, mean, style, color=colors[color], label=_NAMES[name])
      axes.fill_between(
        t, mean - half, mean + half, color=colors[color], alpha=0.18, lw=0
      )
    axes.axhline(_FIRST, color=colors['faint'], ls=':')
    axes.set(xlabel='updates', ylim=(0, 1), title=title)
  panels[0].set_ylabel('probability of the first token')
  panels[0].legend(ncols=2)
  return (
    f'A first token that earns nothing: GRPO takes it from {_FIRST} to '
    f'{found["grpo_drift"].mean:.2f}, RLOO to '
    f'{found["unbiased_drift"].mean:.2f}'
  )


# E7: whether the value of a surrogate loss says how training goes.

_STEPS_VALUE, _GROUP_VALUE, _RATE_VALUE, _LONGEST, _SEEDS = 150, 8, 20.0, 12, 5
_METHODS = {
  'grpo': lambda: losses.methods.grpo(kl_coefficient=0),
  'dr_grpo': lambda: losses.methods.dr_grpo(_LONGEST),
}
WORLDS = 'right is long', 'right is short'

_VALUE_CLAIMS = {
  'grpo_zero': Claim(
    'The loss of GRPO is 0 at the first update of every rollout (largest '
    'absolute value of a training).',
    f'{FONTANA}, prop. 4, case 1',
    high=1e-12,
  ),
  'grpo_learns': Claim(
    'While the loss of GRPO is 0, the expected reward rises (least rise of a '
    'training).',
    'derived',
    0.1,
  ),
  'lengths': Claim(
    'The loss of Dr. GRPO at the first update of every rollout is '
    '-Cov(r, L) / L_max (largest |difference|, over the largest |loss|).',
    f'{FONTANA}, prop. 4, case 2',
    high=1e-9,
  ),
  'long_right': Claim(
    'Where right answers are long, the loss of Dr. GRPO rises while the '
    'policy improves (correlation of loss and expected reward).',
    'derived',
    0.3,
  ),
  'short_right': Claim(
    'Where right answers are short, the loss of Dr. GRPO falls while the '
    'policy improves (correlation of loss and expected reward).',
    'derived',
    high=-0.3,
  ),
}


def _run_value() -> dict[str, Any]:
  """Trains a bandit whose answers differ in length, one update a rollout.

  Returns:
    By method, for worlds, seeds and steps: `loss`, `value` (expected reward),
    `covariance` (of reward and length, mean over groups).
  """
  names = 'loss', 'value', 'covariance'
  with jax.enable_x64(True):
    train = bandits.jit(
      lambda sign, seed: {
        name: _train_value(name, sign, seed) for name in _METHODS
      }
    )
    each = jax.vmap(jax.vmap(train, (None, 0)), (0, None))
    found = each(np.array([1.0, -1.0]), np.arange(_SEEDS))
    return {
      method: {
        name: np.asarray(one).tolist()
        for name, one in zip(names, found[method], strict=True)
      }
      for method in _METHODS
    }


def _train_value(name, sign, seed):
  """Loss, value and covariance at every step, f64[T] each."""
  method = _METHODS[name]()
  reward = np.random.default_rng(0).uniform(size=(8, 6))
  middle = _LONGEST / 2
  long = jnp.round(middle + sign * (middle - 1) * (2 * reward - 1))
  bandit = bandits.tabular(reward, long.astype(jnp.int32), _LONGEST)
  key = jax.random.key(seed)

  def step(theta, t):
    uniform = jax.random.uniform(jax.random.fold_in(key, t), (8, _GROUP_VALUE))
    answer = bandits.sample(bandit, theta, uniform)
    batch, state = bandits.rollout(method, bandit, theta, answer)
    loss, gradient = bandits.loss_and_gradient(
      method, bandit, theta, answer, batch, state
    )
    length = jnp.take_along_axis(bandit.length, answer, 1)
    earned = jnp.take_along_axis(bandit.reward, answer, 1)
    centred = earned - earned.mean(1, keepdims=True)
    seen = loss, bandits.value(bandit, theta), jnp.mean(centred * length)
    return theta - _RATE_VALUE * gradient, seen

  start = jnp.zeros(bandit.reward.size)
  return jax.lax.scan(step, start, jnp.arange(_STEPS_VALUE))[1]


def _correlations(numbers, method, one, other):
  """Correlations over the steps, f64[worlds, seeds]."""
  x, y = (np.array(numbers[method][name]) for name in (one, other))
  x, y = (z - z.mean(-1, keepdims=True) for z in (x, y))
  return np.sum(x * y, -1) / np.sqrt(np.sum(x * x, -1) * np.sum(y * y, -1))


def _measure_value(numbers) -> dict[str, Measured]:
  value = np.array(numbers['grpo']['value'])
  loss, covariance = (
    np.array(numbers['dr_grpo'][name]) for name in ('loss', 'covariance')
  )
  off = np.abs(loss + covariance / _LONGEST).max() / np.abs(loss).max()
  progress = _correlations(numbers, 'dr_grpo', 'loss', 'value')
  return {
    'grpo_zero': Measured(float(np.abs(numbers['grpo']['loss']).max())),
    'grpo_learns': Measured(float((value[..., -1] - value[..., 0]).min())),
    'lengths': Measured(float(off)),
    'long_right': claims.over_seeds(progress[0].tolist()),
    'short_right': claims.over_seeds(progress[1].tolist()),
  }


def _draw_value(numbers, found, figure, colors) -> str:
  left, right = figure.subplots(1, 2)
  for world, (text, name) in enumerate(zip(WORLDS, ('second', 'fourth'))):
    loss = np.array(numbers['dr_grpo']['loss'])[world].T
    right.plot(loss, color=colors[name], alpha=0.25, lw=1)
    right.plot(loss.mean(1), color=colors[name], label=f'Dr. GRPO, {text}')
  zero = np.array(numbers['grpo']['loss'])[0].mean(0)
  right.plot(zero, color=colors['first'], label='GRPO')
  for method, name in (('grpo', 'first'), ('dr_grpo', 'second')):
    value = np.array(numbers[method]['value'])[0].mean(0)
    left.plot(value, color=colors[name], label=method)
  left.set(xlabel='rollouts', ylabel='expected reward')
  right.set(xlabel='rollouts', ylabel='value of the loss', ylim=(-0.08, 0.11))
  left.legend(loc='lower right')
  right.legend(loc='upper right')
  return (
    f"GRPO's loss is at most {found['grpo_zero'].mean:.0e} while its reward "
    f"rises by {found['grpo_learns'].mean:.2f}; Dr. GRPO's correlates with the "
    f'reward by {found["long_right"].mean:+.2f} or '
    f'{found["short_right"].mean:+.2f}'
  )


# E12: the weight that GRPO gives a prompt when groups are finite.

GROUPS = 2, 4, 8, 16, 64
SUCCESS = 0.02, 0.1, 0.5
_BATCHES, _SAMPLES = 20, 2000

_GROUP_CLAIMS = {
  'exact': Claim(
    'The expected gradient is proportional to the mean deviation of a group: '
    'Monte Carlo with `losses.methods.grpo` over the binomial sum.',
    'derived',
    0.99,
    1.01,
  ),
  'weight': Claim(
    'GRPO weighs a prompt by 1 / sqrt(p (1 - p)): real weight over that, '
    'least over p and G.',
    f'{GE}, eq. 5',
    0.99,
    1.01,
  ),
  'limit': Claim(
    'Large groups have the weight 1 / sqrt(p (1 - p)) (real weight over that, '
    'at p = 1/2 and G = 64).',
    'derived',
    0.99,
    1.01,
  ),
  'rare': Claim(
    'For rare success and small groups less than half of the weight 1 / '
    'sqrt(p (1 - p)) is left (share that is left at p = 0.02 and G = 8).',
    'derived',
    high=0.5,
  ),
}


def _run_group(full: bool = False) -> dict[str, Any]:
  """Samples groups, and sums over the binomial distribution.

  Args:
    full: Ten times as many groups.

  Returns:
    `exact[p][g]` and `sampled[p][g]` (a list of means of independent batches):
    the expected gradient over that of GRPO with the exact deviation.
  """
  random, samples = np.random.default_rng(0), _SAMPLES * (10 if full else 1)
  exact, sampled = [], []
  for p in SUCCESS:
    exact.append([expected(p, group) for group in GROUPS])
    sampled.append([])
    for group in GROUPS:
      right = random.binomial(group, p, (_BATCHES, samples))
      gain = _gain(group)[right] / math.sqrt(p * (1 - p))
      sampled[-1].append(gain.mean(axis=1).tolist())
  return {
    'success': SUCCESS,
    'groups': GROUPS,
    'exact': exact,
    'sampled': sampled,
  }


def expected(p: float, group: int) -> float:
  """E[std of a group] / sqrt(p (1 - p)), by the binomial sum."""
  right = np.arange(group + 1)
  chance = [math.comb(group, k) * p**k * (1 - p) ** (group - k) for k in right]
  std = np.sqrt(right * (group - right)) / group
  return float(np.dot(chance, std) / math.sqrt(p * (1 - p)))


def _gain(group: int) -> np.ndarray:
  """sum_i c_i r_i of a group with 0, 1, ..., G right ones, by the loss.

  It is what the gradient of log p - log(1 - p) is multiplied by, since the
  coefficients add up to 0. All G + 1 groups are one program of shape [65,64].
  """
  most = max(GROUPS)
  reward = (np.arange(most) < np.arange(most + 1)[:, None]).astype(float)
  valid = np.broadcast_to(np.arange(most) < group, reward.shape)
  method = losses.methods.grpo(kl_coefficient=0)
  length = np.ones(reward.shape, int)
  c, _ = bandits.group_coefficients(method, reward, length, valid=valid)
  return np.sum(c[..., 0] * reward, axis=1)[: group + 1]


def _measure_group(numbers) -> dict[str, Measured]:
  exact, sampled = np.array(numbers['exact']), np.array(numbers['sampled'])
  ratio = (sampled / exact[..., None]).mean(axis=(0, 1))  # [batches]
  p, group = numbers['success'], numbers['groups']
  least = np.unravel_index(exact.argmin(), exact.shape)
  half, last = p.index(0.5), group.index(64)
  return {
    'exact': claims.over_seeds(ratio.tolist()),
    'weight': Measured(
      float(exact.min()),
      example=f'Smallest case: p = 1/2 and G = 2, where '
      f'{exact[half, 0]:.3g} of it is left; least at p = {p[least[0]]:g}.',
    ),
    'limit': Measured(float(exact[half, last])),
    'rare': Measured(float(exact[p.index(0.02), group.index(8)])),
  }


def _draw_group(numbers, found, figure, colors) -> str:
  axes = figure.subplots()
  for p, exact, sampled, name in zip(
    numbers['success'], numbers['exact'], numbers['sampled'], SERIES
  ):
    axes.plot(numbers['groups'], exact, color=colors[name], label=f'p = {p:g}')
    points = np.mean(sampled, axis=-1)
    axes.plot(numbers['groups'], points, 'o', color=colors[name])
  axes.axhline(1, color=colors['faint'], ls=':')
  axes.set_xscale('log', base=2)
  axes.set(
    xlabel='completions of a group',
    ylim=(0, 1.08),
    ylabel='weight / (1 / sqrt(p (1 - p)))',
  )
  axes.legend(title='line: binomial sum\ndots: sampled groups')
  rare = found['rare'].mean
  return (
    f'Groups of 8 keep {rare:.0%} of the weight that theory gives a prompt '
    'with 2% success'
  )


EXPERIMENTS = {
  'shared_prefix': Experiment(
    'E6',
    'tokens that completions share',
    _SHARED_CLAIMS,
    _measure_shared,
    _draw_shared,
    _run_shared,
  ),
  'surrogate_value': Experiment(
    'E7',
    'the value of the loss',
    _VALUE_CLAIMS,
    _measure_value,
    _draw_value,
    lambda full: _run_value(),
  ),
  'finite_group': Experiment(
    'E12',
    'the weight of a prompt for finite groups',
    _GROUP_CLAIMS,
    _measure_group,
    _draw_group,
    _run_group,
  ),
}
