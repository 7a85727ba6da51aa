"""E6: what methods do to a token that all completions of a group share."""

import itertools
from typing import Any

import jax
import numpy as np

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies.claims import FONTANA
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import _settings

_FIRST = 0.69  # probability of the first token at the start
_LENGTHS = 2, 20, 8  # of: s short, s long, a
_REWARDS = 1.0, 0.0, 0.5
_GROUP, _STEPS, _RATE = 4, 300, 0.15
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
  tables = {name: _tables(method()) for name, method in METHODS.items()}
  flipped = 'grpo', *_BIASED, 'gtpo'
  return {
    'identity': _identity(),
    'tree': {name: _expected(METHODS[name]()) for name in _ENUMERATED},
    'drift': {name: _train(c, seeds) for name, (c, _) in tables.items()},
    'flipped': {name: _train(tables[name][1], seeds) for name in flipped},
  }


def _identity() -> dict[str, list[float]]:
  """W_agg of random groups, and Corr(r, 1/L) std(1/L)."""
  random = np.random.default_rng(0)
  reward = random.uniform(size=(200, 8))
  length = random.integers(1, 17, reward.shape)
  method = METHODS['grpo']()
  c, _ = _settings.of_groups(method, reward, length)
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
  # Ids are equal where the tree shares a token, and nowhere else.
  ids = np.arange(3 * max(_LENGTHS)).reshape(3, -1)
  ids[1, 0] = ids[0, 0]
  tokens = np.tile(ids[leaves], (2, 1, 1))
  c, _ = _settings.of_groups(
    method, np.concatenate(reward), length, tokens=tokens
  )
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


def draw(numbers, figure, colors) -> str:
  """See `Experiment`."""
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
  found = measure(numbers)
  return (
    f'A first token that earns nothing: GRPO takes it from {_FIRST} to '
    f'{found["grpo_drift"].mean:.2f}, RLOO to '
    f'{found["unbiased_drift"].mean:.2f}'
  )


EXPERIMENT = Experiment(
  'E6', 'tokens that completions share', CLAIMS, run, measure, draw
)
