"""Transcripts: every sampled token once, and no id that drifts."""

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.episodes import transcript as transcript_lib
from grpo_jax.episodes.transcript import Transcript
from grpo_jax.mesh import random_keys

KEY = np.array([3, 4], np.uint32)


def sampled(ids, finish=engines.ENDED):
  ids = np.asarray(ids, np.int32)
  return engines.Sampled(
    0, 0, ids, -ids / 10, ids * 0.0, ids * 0 + 7, finish, entropy=ids / 4
  )


def test_a_key_is_folded_as_jax_folds_it():
  key = jax.random.wrap_key_data(KEY, impl='threefry2x32')
  for number in (0, 1, 2**31):
    expected = jax.random.key_data(jax.random.fold_in(key, number))
    np.testing.assert_array_equal(random_keys.fold(KEY, number), expected)


def test_a_line_of_turns():
  one = Transcript(KEY)
  one.read((), [1, 2, 3])
  np.testing.assert_array_equal(one.contexts[()].key, KEY)  # that of today
  assert one.add((), sampled([4, 5])) == 0
  one.read((), [6])
  one.add((), sampled([7, 8, 9]))
  assert one.ids(()).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
  assert one.drawn() == 5
  found = transcript_lib.episode(one, 2, engines.ENDED)
  assert found.ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
  assert found.chosen.tolist() == [False, True, True, False, True, True, True]
  assert found.turn.tolist() == [0, 0, 0, 0, 1, 1, 1]  # 0 where it is read
  np.testing.assert_allclose(
    found.logp, [0, -0.4, -0.5, 0, -0.7, -0.8, -0.9], rtol=1e-6
  )
  assert found.version.tolist() == [0, 7, 7, 0, 7, 7, 7]
  assert found.previous is None and found.routing is None
  assert found.entropy is not None and found.entropy.dtype == np.float32


def test_an_episode_without_a_turn_or_a_prompt_is_a_line():
  one = Transcript(KEY)
  one.read((), [1, 2])
  found = transcript_lib.episode(one, 0, engines.ENDED)
  assert found.ids.tolist() == [1, 2] and not found.chosen.any()
  assert found.previous is None and found.turn.tolist() == [0, 0]


def forked(order):
  """Two forks behind the first turn, and one of the second, in some order."""
  one = Transcript(KEY)
  one.read((), [1])
  one.add((), sampled([2, 3]))
  paths = one.fork(()), one.fork(())
  one.read((), [4])
  said = {(): [5], paths[0]: [6, 7], paths[1]: [8]}
  for place in order:
    path = ((), *paths)[place]
    one.read(path, [10 + place])
    one.add(path, sampled(said[path]))
  last = one.fork(paths[1])
  one.add(last, sampled([9]))
  return one, paths, last


def test_forks_lie_in_the_order_of_the_tree_whatever_came_first():
  one, paths, last = forked((0, 1, 2))
  assert one.ids(paths[0]).tolist() == [1, 2, 3, 11, 6, 7]
  assert one.ids(last).tolist() == [1, 2, 3, 12, 8, 9]
  first = transcript_lib.episode(one, 1, engines.ENDED)
  assert first.ids.tolist() == [2, 3, 4, 10, 5, 11, 6, 7, 12, 8, 9]
  assert first.previous is not None
  assert first.previous.tolist() == [-1, 0, 1, 2, 3, 1, 5, 6, 1, 8, 9]
  assert first.turn[first.chosen].tolist() == [0, 0, 1, 2, 2, 3, 4]
  for order in ((2, 1, 0), (1, 0, 2)):
    other, _, _ = forked(order)
    again = transcript_lib.episode(other, 1, engines.ENDED)
    for name in ('ids', 'chosen', 'logp', 'turn', 'previous'):
      np.testing.assert_array_equal(getattr(again, name), getattr(first, name))
    for path, context in one.contexts.items():
      np.testing.assert_array_equal(other.contexts[path].key, context.key)


def test_a_context_is_forked_behind_an_earlier_turn_as_it_was_then():
  grown = []
  for is_late in (False, True):
    one = Transcript(KEY)
    one.read((), [1, 2])
    one.add((), sampled([3]))
    early = one.fork((), 1, 9) if not is_late else None
    one.read((), [4])
    one.add((), sampled([5]))
    one.read((), [6])
    path = early or one.fork((), 1, 9)
    assert path == (1, 9) and one.ids(path).tolist() == [1, 2, 3]
    assert one.ids(one.fork((), 0, 9)).tolist() == []
    grown.append(one.contexts[path].key.tolist())
  assert grown[0] == grown[1]


def test_no_two_calls_have_one_key():
  one, _, _ = forked((0, 1, 2))
  keys = [KEY, *(context.key for context in one.contexts.values())]
  one.fork(())
  keys.append(one.contexts[max(one.contexts)].key)
  assert len({tuple(key.tolist()) for key in keys}) == len(keys)


def test_something_new_is_always_read():
  one = Transcript(KEY)
  one.read((), [1, 2])
  one.add((), sampled([3]))
  for ids, kept in (([1, 2, 3, 4], 3), ([1, 2, 3], 2), ([1, 2], 1), ([1], 0)):
    assert one.kept((), np.array(ids)) == kept


def random_transcript(rng):
  """Contexts that grow at random, and what each has read, kept beside it."""
  one = Transcript(KEY)
  one.read((), [1, 2])
  kept, turns = {(): [1, 2]}, {(): [0, 0]}
  chosen = []
  for token in range(10, 10 + int(rng.integers(3, 25))):
    path = list(kept)[rng.integers(len(kept))]
    match rng.integers(4):
      case 0:
        fork = one.fork(path)
        kept[fork], turns[fork] = [*kept[path]], [*turns[path]]
      case 1:
        ids = [token] * int(rng.integers(1, 3))
        one.read(path, ids)
        kept[path] += ids
        turns[path] += [0] * len(ids)
      case 2:  # the template writes it otherwise from some place on
        same = int(rng.integers(2, len(kept[path]) + 1))
        ids = [*kept[path][:same], *[token] * int(rng.integers(1, 3))]
        start = one.kept(path, np.array(ids, np.int32))
        before = [*turns[path], 0]
        # What is the same stays, but for a turn that would be cut.
        is_cut = before[same] and before[same] == before[same - 1]
        assert start == (before.index(before[same]) if is_cut else same)
        one.read(path, ids[start:], kept=start)
        kept[path] = ids
        turns[path] = before[:start] + [0] * (len(ids) - start)
      case _:
        ids = [token + 100] * int(rng.integers(1, 4))
        one.add(path, sampled(ids))
        kept[path] += ids
        turns[path] += [token] * len(ids)
        chosen += ids
  return one, kept, chosen


@pytest.mark.parametrize(
  'number', [300, pytest.param(10_000, marks=pytest.mark.long)]
)
def test_random_trees(number):
  for seed in range(number):
    one, kept, chosen = random_transcript(np.random.default_rng(seed))
    for path, ids in kept.items():
      assert one.ids(path).tolist() == ids
    found = transcript_lib.episode(one, 2, engines.ENDED)
    assert sorted(found.ids[found.chosen].tolist()) == sorted(chosen)
    # Behind each token, what it follows, down to the prompt: a context's ids.
    previous = found.previous
    if previous is None:
      previous = np.arange(-1, len(found.ids) - 1)
    assert (previous < np.arange(len(previous))).all()
    ways = set()
    for place in range(len(previous)):
      way, at = [], place
      while at >= 0:
        way.append(int(found.ids[at]))
        at = int(previous[at])
      ways.add((1, 2, *way[::-1]))
    for ids in kept.values():
      assert tuple(ids) in ways or ids == [1, 2]


def test_a_group_has_the_prompt_that_all_of_it_read():
  group = []
  for more in ([5, 6], [5, 7], [5, 6, 8]):
    one = Transcript(KEY)
    one.read((), [1, 2])
    one.read((), more)
    one.add((), sampled([9]))
    one.read((), [5])
    group.append(one)
  assert transcript_lib.common_ids(group) == [1, 2, 5]
  assert transcript_lib.common_ids(group[:1]) == [1, 2, 5, 6]


def test_forks_are_counted_anew_behind_every_turn():
  one = Transcript(KEY)
  one.read((), [1])
  one.add((), sampled([2]))
  last = [one.last(())]
  assert [one.fork(()), one.fork(())] == [(1, 1), (1, 2)]
  one.add((), sampled([3]))
  assert one.fork(()) == (2, 1)
  last += [one.last(()), one.last((1, 1))]
  assert [turn and turn.number for turn in last] == [0, 1, 0]


def test_who_forks_first_changes_no_order():
  found = []
  for order in ((1, 2), (2, 1)):
    one = Transcript(KEY)
    one.read((), [1])
    one.add((), sampled([2]))
    paths = one.fork(()), one.fork(())
    for n in order:
      path = one.fork(paths[n - 1])
      one.read(path, [n])
      one.add(path, sampled([n + 10]))
    found.append(transcript_lib.episode(one, 1, engines.ENDED).ids.tolist())
  assert found[0] == found[1] == [2, 1, 11, 2, 12]
