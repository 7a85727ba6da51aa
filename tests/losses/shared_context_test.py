"""Contexts of turns, against a dict of the ids that lie before each."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses

P, G, T, MOST = 6, 5, 17, 3


def trees(seed, forks):
  """Episodes over two ids, so that many of their contexts are the same."""
  random = np.random.default_rng(seed)
  tokens = random.integers(0, 2, (P, G, T)).astype(np.int32)
  previous = np.broadcast_to(np.arange(-1, T - 1, dtype=np.int32), (P, G, T))
  previous = previous.copy()
  turn = np.zeros((P, G, T), np.int32)
  mask = np.zeros((P, G, T), bool)
  for p, g in np.ndindex(P, G):
    end = random.integers(3, T + 1)
    t = number = 0
    while t < end:
      if forks and t and random.random() < 0.6:
        previous[p, g, t] = random.integers(-1, t)
      # What an environment wrote; all of group 3 begin without.
      t += random.integers(0, 2) if number or p != 3 else 0
      own = slice(t, min(t + random.integers(1, 3), end))
      mask[p, g, own], turn[p, g, own] = True, number
      t, number = own.stop, number + 1
  mask[0, 2] = False  # an episode that is not valid
  mask[1, 1:] = False  # one that is alone
  coefficient = random.normal(size=(P, G, T)).astype(np.float32)
  coefficient[2] = 0  # a group that pulls nowhere
  return tokens, previous, mask, turn, coefficient


def contexts(tokens, previous, mask, turn, coefficient):
  """One dict for each group: ids -> [(episode, turn, coefficient)]."""
  groups = []
  for p in range(P):
    found = collections.defaultdict(list)
    for g in range(G):
      seen = set()
      for t in np.flatnonzero(mask[p, g]):
        number = turn[p, g, t]
        if number in seen or number >= MOST:
          continue
        seen.add(number)
        ids, at = [], previous[p, g, t]
        while at >= 0:
          ids.append(int(tokens[p, g, at]))
          at = previous[p, g, at]
        pull = float(coefficient[p, g, t])
        found[tuple(ids)].append((g, int(number), pull))
    groups.append(found)
  return groups


def found_by(given):
  garbage = np.where(given[2], given[4], np.nan)  # read inside the mask only
  count = jax.jit(losses.shared_context_weight, static_argnames='most')
  return count(*given[:4], garbage, most=MOST)


@pytest.mark.parametrize('forks', [False, True])
def test_every_turn_finds_who_shares_its_context(forks):
  given = trees(0, forks)
  want = [np.zeros((P, G, MOST)) for _ in range(4)]
  several = 0
  for p, group in enumerate(contexts(*given)):
    for held in group.values():
      pulls = [c for *_, c in held]
      sharers = {g for g, *_ in held}
      several += forks and len(sharers) != len(held)
      sums = len(held), len(sharers), sum(pulls), sum(map(abs, pulls))
      for g, number, _ in held:
        for array, value in zip(want, sums, strict=True):
          array[p, g, number] = value
  assert want[1].max() == G and want[1][..., 1].max() > 1
  assert bool(several) == forks  # episodes that begin in a context twice
  for got, expected in zip(found_by(given), want, strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize('forks', [False, True])
def test_the_summary_counts_each_context_once(forks):
  given = trees(1, forks)
  want = collections.defaultdict(lambda: [0.0, 0.0])
  for p, group in enumerate(contexts(*given)):
    for n in range(MOST):
      want[f'turn{n}_contexts'][1] += given[2][p].any(-1).sum() >= 2
    for held in group.values():
      if len({g for g, *_ in held}) < 2:
        continue
      pull = sum(c for *_, c in held)
      total = sum(abs(c) for *_, c in held)
      for _, n, _ in held:
        part = 1 / len(held)
        want[f'turn{n}_contexts'][0] += part
        want[f'turn{n}_weight'][0] += part * pull
        want[f'turn{n}_weight'][1] += part
        if total > 0:
          want[f'turn{n}_uncancelled'][0] += part * abs(pull) / total
          want[f'turn{n}_uncancelled'][1] += part
  summary = jax.jit(losses.context_summary)(found_by(given))
  assert set(summary) == set(want)
  for name, pair in summary.items():
    np.testing.assert_allclose(pair, want[name], rtol=1e-5, err_msg=name)


def line(ids, mask, pull):
  """What two episodes of one group share: their ids differ in one place."""
  tokens = jnp.array([ids], jnp.int32)
  shape = tokens.shape
  mask = jnp.broadcast_to(jnp.array(mask), shape)
  turn = jnp.cumsum(~mask, axis=-1)  # a token of the environment between turns
  previous = jnp.broadcast_to(jnp.arange(-1, shape[-1] - 1), shape)
  pull = jnp.broadcast_to(jnp.array([pull])[..., None], shape)
  return losses.shared_context_weight(tokens, previous, mask, turn, pull, 2)


def test_what_an_environment_wrote_is_a_part_of_the_context():
  alike = line([[5, 1, 7], [5, 1, 8]], [True, False, True], [1.0, 2.0])
  other = line([[5, 1, 7], [5, 2, 7]], [True, False, True], [1.0, 2.0])
  assert alike.sharers.tolist() == [[[2, 2], [2, 2]]]
  assert other.sharers.tolist() == [[[2, 1], [2, 1]]]
  assert other.weight.tolist() == [[[3, 1], [3, 2]]]


@pytest.mark.parametrize('place', range(20))
def test_the_oldest_id_counts_as_the_last_does(place):
  """Contexts of every length, 0 included, and a difference anywhere."""
  ids = np.zeros((2, 22), np.int32)
  ids[1, place] = 1
  mask = np.zeros(22, bool)
  mask[21] = True
  shared = line(ids.tolist(), mask, [1.0, 1.0])
  assert not shared.turns.any()  # it is turn 21, and two are looked at
  tokens, one = ids[None], np.ones((1, 2, 1), np.int32)
  straight = np.arange(-1, 21) * one
  alone = losses.shared_context_weight(
    tokens, straight, mask * (one > 0), 0 * straight, 1.0 * straight, 1
  )
  assert alone.sharers.tolist() == [[[1], [1]]]
  for length in range(22):
    # Contexts of the same id that are not equally long.
    mask = np.arange(22) == np.array([[[length], [21]]])
    both = losses.shared_context_weight(
      0 * tokens, straight, mask, 0 * straight, 1.0 * straight, 1
    )
    assert both.sharers[0, 0, 0] == 1 + (length == 21)
