"""Contexts of turns, against a dict of the ids that lie before each."""

import collections

import jax
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


def test_what_an_environment_wrote_is_a_part_of_the_context():
  """It stands between two turns of two episodes."""
  mask = np.broadcast_to([True, False, True], (1, 2, 3))
  turn = np.broadcast_to([0, 0, 1], (1, 2, 3))
  previous = np.broadcast_to(np.arange(-1, 2), (1, 2, 3))
  pull = np.array([[[1.0] * 3, [2.0] * 3]], np.float32)

  def shared(*heard):
    tokens = np.array([[[5, one, 7] for one in heard]])
    return losses.shared_context_weight(tokens, previous, mask, turn, pull, 2)

  assert shared(1, 1).sharers.tolist() == [[[2, 2], [2, 2]]]
  assert shared(1, 2).sharers.tolist() == [[[2, 1], [2, 1]]]
  assert shared(1, 2).weight.tolist() == [[[3, 1], [3, 2]]]


def test_each_id_of_a_context_counts_and_so_does_its_length():
  """A group for each place in which the ids of two contexts differ."""
  places = np.arange(21)[:, None, None]
  one = np.array([0, 1])[None, :, None]
  at = np.arange(22)[None, None]
  shape = 21, 2, 22
  zero, straight = np.zeros(shape, np.int32), np.broadcast_to(at - 1, shape)
  last, pull = np.broadcast_to(at == 21, shape), np.ones(shape, np.float32)

  def sharers(tokens, mask):
    given = tokens, straight, mask, zero, pull
    return losses.shared_context_weight(*given, most=1).sharers[..., 0]

  differ = ((at == places) & (one == 1)).astype(np.int32)
  np.testing.assert_array_equal(sharers(differ, last), 1)
  np.testing.assert_array_equal(sharers(zero, last), 2)
  # The same id everywhere, but one context is shorter.
  shorter = np.where(one == 1, at == places, at == 21)
  np.testing.assert_array_equal(sharers(zero, shorter), 1)
