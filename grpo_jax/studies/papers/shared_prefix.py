"""E6: what methods do to a token that all completions of a group share."""

import itertools
from typing import Any

import jax
import numpy as np

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.studies import claims
from grpo_jax.studies.claims import FONTANA
from grpo_jax.studies.claims import Claim
from grpo_jax.studies.claims import Experiment
from grpo_jax.studies.claims import Measured
from grpo_jax.studies.papers import _coefficients

_FIRST = 0.69  # probability of the first token at the start
_LENGTHS = 2, 20, 8  # of: s short, s long, a
_REWARDS = 1.0, 0.0, 0.5
_GROUP, _STEPS, _RATE = 4, 300, 0.15
METHODS = {
  'grpo': lambda: losses.methods.grpo(kl_coefficient=0),
  'dapo': losses.methods.dapo,
  'dr_grpo': lambda: losses.methods.dr_grpo(max_tokens=1),
  'rloo': losses.methods.rloo,
}
_ENUMERATED, _TRAINED = ('grpo', 'dapo', 'dr_grpo'), ('grpo', 'dapo', 'rloo')

CLAIMS = {
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
    'For GRPO this ratio is 0.51, by exact enumeration.',
    'derived',
    0.5,
    0.52,
  ),
  'dr_grpo': Claim(
    'Dr. GRPO is the true gradient times (G - 1) / G = 0.75.',
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
    'DAPO does so too, though the sum on the token is 0 where all share it.',
    'derived',
    0.7,
  ),
  'unbiased_drift': Claim(
    'RLOO does not: there is a random walk only.', 'derived', 0.64, 0.74
  ),
  'flipped': Claim(
    'With the long completion right instead, GRPO moves the token down.',
    'derived',
    high=0.63,
  ),
}


def run(full: bool = False) -> dict[str, Any]:
  """Checks the identity, enumerates all groups, and trains on the tree.

  Args:
    full: 2,000 seeds in place of 200.

  Returns:
    `identity`: pairs of measured and predicted sums; `tree`: first, second and
    true second gradient by method; `drift[method][seed][t]` and
    `flipped[method][seed][t]`: the probability of the first token.
  """
  seeds = 2000 if full else 200
  tables = {name: _tables(METHODS[name]()) for name in _TRAINED}
  return {
    'identity': _identity(),
    'tree': {name: _expected(METHODS[name]()) for name in _ENUMERATED},
    'drift': {name: _train(c, seeds) for name, (c, _) in tables.items()},
    'flipped': {'grpo': _train(tables['grpo'][1], seeds)},
  }


def _identity() -> dict[str, list[float]]:
  """W_agg of random groups, and Corr(r, 1/L) std(1/L)."""
  random = np.random.default_rng(0)
  reward = random.uniform(size=(200, 8))
  length = random.integers(1, 17, reward.shape)
  method = METHODS['grpo']()
  c, _ = _coefficients.of_groups(method, reward, length)
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
  leaves = np.array(list(itertools.product(range(3), repeat=_GROUP)))
  reward = [
    np.array(_REWARDS)[places][leaves] for places in ([0, 1, 2], [1, 0, 2])
  ]
  length = np.tile(np.array(_LENGTHS)[leaves], (2, 1))
  c, _ = _coefficients.of_groups(method, np.concatenate(reward), length)
  return c[..., 0].reshape(2, *leaves.shape)


def _train(table: np.ndarray, seeds: int) -> list[list[float]]:
  """SGD on the logit of the first token, the second token left at one half.

  So both first tokens are worth the same all the time. The step is scaled to
  the size of the method's coefficients, that methods may be compared.
  """
  random = np.random.default_rng(0)  # the same numbers for all methods
  rate = _RATE / np.abs(table).sum(axis=1).mean()
  z = np.full(seeds, np.log(_FIRST / (1 - _FIRST)))
  path = []
  for _ in range(_STEPS):
    p = 1 / (1 + np.exp(-z))
    path.append(p)
    u = random.uniform(size=(2, seeds, _GROUP))
    leaf = np.where(u[0] < p[:, None], (u[1] < 0.5).astype(int), 2)
    c = table[leaf @ 3 ** np.arange(_GROUP)[::-1]]
    z = z + rate * np.sum(c * ((leaf < 2) - p[:, None]), axis=1)
  return np.transpose(path)[:, ::10].tolist()


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
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
    'unbiased_drift': last(numbers['drift']['rloo']),
    'flipped': last(numbers['flipped']['grpo']),
  }


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
  axes = figure.subplots()
  styles = {
    'grpo': 'second', 'dapo': 'fifth', 'rloo': 'first',
  }  # fmt: skip
  paths = {**numbers['drift'], 'flipped': numbers['flipped']['grpo']}
  for name, color in (*styles.items(), ('flipped', 'fourth')):
    path = np.array(paths[name])
    mean, half = path.mean(axis=0), 1.96 * path.std(axis=0) / len(path) ** 0.5
    t = np.arange(len(mean)) * 10
    label = {'flipped': 'grpo, long is right'}.get(name, name)
    axes.plot(t, mean, color=colors[color], label=label)
    axes.fill_between(
      t, mean - half, mean + half, color=colors[color], alpha=0.18, lw=0
    )
  axes.axhline(_FIRST, color=colors['faint'], ls=':')
  axes.set(xlabel='updates', ylim=(0, 1))
  axes.set_ylabel('probability of the first token')
  axes.legend(ncols=2)
  found = measure(numbers)
  return (
    'A first token that earns nothing: GRPO takes it from 0.69 to '
    f'{found["grpo_drift"].mean:.2f}, RLOO leaves it at '
    f'{found["unbiased_drift"].mean:.2f}'
  )


EXPERIMENT = Experiment(
  'E6', 'tokens that completions share', CLAIMS, run, measure, draw
)
