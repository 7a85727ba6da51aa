"""What a loss is told of the turns of episodes."""

import numpy as np
import pytest

from grpo_jax.episodes import play
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes import types
from grpo_jax.episodes.types import Account
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import turn_fields
from grpo_jax.rollouts.turn_fields import TurnFields
from tests.episodes import made_episodes as made
from tests.rollouts import parquet_test

pytestmark = pytest.mark.quick

BOTH = TurnFields(('turn_reward', 'turn_state'), 6, 0.5)


@pytest.fixture(scope='module')
def rollout():
  """Two turns, a failure, three with a branch behind the first, and four."""
  return made.played(
    made.saying('1', '3'),
    made.saying('8'),
    made.saying('2', '4', '9'),
    made.saying('9', '1', '9', '1'),
  )


@pytest.fixture(scope='module')
def filled(rollout):
  return turn_fields.with_turns(rollout, BOTH)


def said(turn, *context):
  one = {'role': 'assistant', 'content': 'x', 'by': 'policy', 'turn': turn}
  return {**one, 'context': [*context]} if context else one


def heard(text, *context):
  one = {'role': 'user', 'content': text, 'by': 'environment'}
  return {**one, 'context': [*context]} if context else one


def test_rewards_of_turns_have_the_weight_of_the_environment(rollout, filled):
  found = filled.batch.extras['turn_reward']
  assert found.shape == (1, 4, 6) and found.dtype == np.float32
  np.testing.assert_array_equal(found[0, 0], [-0.125, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(found[0, 3], [*[-0.125] * 4, 0, 0])
  # The branch cannot have changed what was before it, but all behind it.
  branched = np.float32([-0.125, 0, 0, -0.25 + 0.05, 0, 0])
  np.testing.assert_allclose(found[0, 2], branched, rtol=1e-6)
  sums = [sum(one.turn_rewards) for one in rollout.accounts[0]]
  np.testing.assert_allclose(found.sum(-1)[0], 0.5 * np.array(sums), rtol=1e-6)


def test_states_are_what_was_said_last(filled):
  states = filled.batch.extras['turn_state']
  assert states.dtype == np.int32
  # 'Guess', 'more'; 'Guess'; 'Guess', 'more', 'less', the branch; and so on.
  np.testing.assert_array_equal(
    states[0],
    [
      [0, 1, 0, 0, 0, 0],
      [0, 0, 0, 0, 0, 0],
      [0, 1, 2, 3, 0, 0],
      [0, 2, 1, 2, 0, 0],
    ],
  )


def test_a_state_is_of_its_group_alone():
  """The number does not depend on what other groups have heard."""
  records = [made.RECORDS[1], {**made.RECORDS[0], 'answer': '2'}]
  rollout = made.played(made.saying('4', '9'), records=records)
  found = turn_fields.with_turns(rollout, BOTH).batch.extras['turn_state']
  assert found[:, 0, :4].tolist() == [[0, 1, 2, 2], [0, 1, 1, 1]]


def test_a_reward_counts_for_whoever_may_have_caused_it():
  """Of branches in branches; a path says behind which turns they are."""
  straight = [heard('a'), said(0), heard('b'), said(1)]
  places = lambda *messages: turn_fields.reward_places(Account(messages))
  assert places(*straight) == [0, 1]
  assert places() == []
  # Two branches behind the first turn, the trunk ends there.
  first = [heard('c', 1, 1), said(1, 1, 1), heard('d', 1, 1), said(2, 1, 1)]
  second = [heard('c', 1, 2), said(3, 1, 2)]
  assert places(*straight[:2], *first, *second) == [0, 3, 3, 3]
  # A branch of the branch, behind its first turn; it is told behind it.
  deeper = [said(3, 1, 1, 1, 1), said(4, 1, 1, 1, 1)]
  assert places(*straight[:2], *first, *deeper) == [0, 1, 4, 3, 4]


def test_it_has_the_shapes_that_were_compiled(rollout, filled):
  shapes = turn_fields.with_zeros(rollout, BOTH).batch.extras
  for name in BOTH.names:
    found = filled.batch.extras[name]
    assert (found.shape, found.dtype) == (
      shapes[name].shape,
      shapes[name].dtype,
    )
    assert not shapes[name].any()


def test_who_does_not_ask_gets_nothing(rollout):
  assert turn_fields.with_turns(rollout, turn_fields.NO_TURNS) is rollout
  assert turn_fields.with_zeros(rollout, turn_fields.NO_TURNS).batch == (
    rollout.batch
  )
  one = turn_fields.with_turns(rollout, BOTH._replace(names=('turn_reward',)))
  assert {*one.batch.extras} - {*rollout.batch.extras} == {'turn_reward'}


def test_more_turns_than_the_run_has_are_refused(rollout):
  with pytest.raises(ValueError, match='has 4 turns, but .*max_turns=3'):
    turn_fields.with_turns(rollout, BOTH._replace(most=3))


def test_files_and_joined_rollouts_keep_them(rollout, filled):
  parquet_test.assert_same(
    parquet.from_bytes(parquet.to_bytes(filled, 5)), filled
  )
  # A file of a run that did not ask tells enough.
  plain = parquet.from_bytes(parquet.to_bytes(rollout, 5))
  again = turn_fields.with_turns(plain, BOTH)
  for name in BOTH.names:
    np.testing.assert_array_equal(
      again.batch.extras[name], filled.batch.extras[name]
    )
  limits = play.Limits(4, 200, 900, 2000)
  wider = made.played(*[made.saying('1' * 150)] * 4, limits=limits)
  assert wider.batch.mask.shape[-1] > rollout.batch.mask.shape[-1]
  wider = turn_fields.with_turns(wider, BOTH)
  both = types.concatenate([filled, wider])
  assert both.batch.extras['turn_reward'].shape == (2, 4, 6)
  some = types.select(both, np.array([0]))
  np.testing.assert_array_equal(
    some.batch.extras['turn_reward'], filled.batch.extras['turn_reward']
  )


def test_shuffled_rewards_take_those_of_their_turns_along(filled):
  """So nothing can be learned of them either."""
  valid = filled.batch.valid
  assert valid.tolist() == [[True, False, True, True]]
  moved = set()
  for seed in range(6):
    rng = np.random.default_rng(seed)
    after = rollout_lib.shuffle_rewards(filled, rng).batch
    again = np.random.default_rng(seed).permutation(filled.batch.reward[valid])
    np.testing.assert_array_equal(after.reward[valid], again)  # as it was
    for g, turns in ((0, 2), (2, 4), (3, 4)):
      (of,) = np.flatnonzero(filled.batch.reward[0] == after.reward[0, g])
      expected = filled.batch.extras['turn_reward'][0, of].copy()
      expected[turns:] = 0  # what is left belongs to the last turn
      found = after.extras['turn_reward'][0, g]
      np.testing.assert_array_equal(found, expected)
      moved.add((g, int(of)))
    np.testing.assert_array_equal(
      after.extras['turn_reward'][~valid],
      filled.batch.extras['turn_reward'][~valid],
    )
  assert len(moved) > 5
