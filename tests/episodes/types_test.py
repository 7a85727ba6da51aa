"""Episodes as arrays, and rollouts of them that are cut and joined."""

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import rewards
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes import types
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import rollout_metrics
from tests import drawing
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.quick

# (id, whether the policy chose it, the turn, the place that it follows).
TREE = [
  (5, True, 0, -1), (6, True, 0, 0), (7, False, 1, 1), (8, True, 1, 2),
  (9, False, 2, 0), (4, True, 2, 4),
]  # fmt: skip
STRAIGHT = [(5, True, 0, -1), (3, False, 1, 0), (2, True, 1, 1)]


def episode(tokens, straight=False):
  ids, chosen, turn, previous = map(np.array, zip(*tokens, strict=True))
  return types.Episode(
    ids=ids,
    chosen=chosen,
    logp=np.where(chosen, -ids / 2, 0),
    log_kept=np.where(chosen, -0.25, 0),
    version=np.where(chosen, 3, 0),
    finish=engines.TRUNCATED if straight else engines.ENDED,
    turn=turn,
    previous=None if straight else previous,
  )


def rollout_of(*groups, buckets=(8,)):
  reward = np.arange(sum(map(len, groups)), dtype=np.float32)
  scores = rewards.Scores(reward, reward[:, None], reward >= 0)
  return rollout_lib.make_rollout(
    groups,
    scores,
    buckets,
    prompts=[[1]] * len(groups),
    prompt_texts=['p'] * len(groups),
    texts=[['c'] * len(groups[0])] * len(groups),
    index=np.arange(len(groups)),
    reward_names=('exact',),
  )


def test_a_single_turn_is_an_episode_of_which_all_is_chosen():
  engine = FakeEngine(lambda asked, g: [5, 6, 7, 8][: g + 1])
  engine.load(None, version=3)
  groups = engines.generate(
    engine, drawing.requests([[1], [2]], limit=4, group=2)
  )
  sampled = [[types.episode_of(one) for one in group] for group in groups]
  episodes = [
    [
      types.Episode(ids, np.ones(len(ids), bool), -np.ones(len(ids)),
        np.full(len(ids), -0.25), np.full(len(ids), 3), engines.TRUNCATED)
      for ids in ([5], [5, 6])
    ]
  ] * 2  # fmt: skip
  made, same = (
    rollout_of(*groups, buckets=(4,)) for groups in (sampled, episodes)
  )
  assert made.previous is None and made.batch.extras.keys() == {'log_kept'}
  np.testing.assert_array_equal(made.batch.mask.sum(-1), made.length)
  for x, y in zip(*map(jax.tree.leaves, (made.batch, same.batch)), strict=True):
    np.testing.assert_array_equal(x, y)
    assert x.dtype == y.dtype


def test_the_mask_of_a_batch_has_the_holes_of_its_episodes():
  got = rollout_of([episode(TREE), episode(STRAIGHT, straight=True)])
  batch = got.batch
  np.testing.assert_array_equal(got.length, [[6, 3]])
  np.testing.assert_array_equal(got.drawn, [[4, 2]])
  wanted = [[1, 1, 0, 1, 0, 1, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0]]
  np.testing.assert_array_equal(batch.mask[0], wanted)
  np.testing.assert_array_equal(batch.keep, batch.mask)
  # What others wrote is read, and is nobody's choice.
  np.testing.assert_array_equal(batch.tokens[0, 0], [5, 6, 7, 8, 9, 4, 0, 0])
  for field, value in (
    (batch.version, 3),
    (batch.logp_sampler, -batch.tokens / 2 + 0.25),
    (batch.extras['log_kept'], -0.25),
  ):
    np.testing.assert_array_equal(field, np.where(batch.mask, value, 0))
  np.testing.assert_array_equal(
    batch.extras['turn'][0], [[0, 0, 1, 1, 2, 2, 0, 0], [0, 1, 1, *[0] * 5]]
  )
  np.testing.assert_array_equal(batch.truncated, [[False, True]])
  assert got.previous[0, 0].tolist() == [-1, 0, 1, 2, 0, 4, 0, 0]
  assert got.previous[0, 1].tolist() == [-1, 0, 1, 0, 0, 0, 0, 0]


def test_metrics_count_what_the_policy_chose():
  got = rollout_of([episode(TREE), episode(STRAIGHT, straight=True)])
  measured = rollout_metrics.metrics_of_rollout(got, step=5, right_reward=1)
  assert measured['length_tokens_right'] == 2
  assert measured['length_tokens_wrong'] == measured['length_tokens_max'] == 4
  assert measured['staleness_steps'] == measured['staleness_steps_max'] == 2


def test_rollouts_with_branches_and_without_are_joined():
  tree = rollout_of([episode(TREE)] * 2, [episode(TREE)] * 2)
  plain = rollout_of([episode(STRAIGHT, straight=True)] * 2, buckets=(12,))
  assert plain.previous is None
  both = types.concatenate([tree, plain])
  assert both.previous.shape == both.batch.mask.shape == (3, 2, 12)
  np.testing.assert_array_equal(both.previous[:2, :, :8], tree.previous)
  # Behind its end there is nothing, as a file of it demands.
  assert both.previous[2, 0].tolist() == [-1, 0, 1, *[0] * 9]
  parquet.to_bytes(both, 1)
  some = types.select(both, np.array([2, 0]))
  np.testing.assert_array_equal(some.previous, both.previous[[2, 0]])
  assert types.select(plain, np.array([0])).previous is None
  assert types.concatenate([plain, plain]).previous is None


def test_rollouts_with_turns_and_without_are_joined():
  turns = rollout_of([episode(STRAIGHT, straight=True)] * 2)
  extras = dict(turns.batch.extras)
  del extras['turn']  # as of an engine, each completion of which is one turn
  single = turns._replace(batch=turns.batch._replace(extras=extras))
  both = types.concatenate([single, turns]).batch
  np.testing.assert_array_equal(both.extras['turn'][0], np.zeros((2, 8)))
  np.testing.assert_array_equal(
    both.extras['turn'][1:], turns.batch.extras['turn']
  )
  assert both.extras['turn'].dtype == turns.batch.extras['turn'].dtype
  assert 'turn' not in types.concatenate([single, single]).batch.extras


def test_branches_come_back_from_a_file_in_every_process(tmp_path):
  tree = rollout_of([episode(TREE)] * 2, [episode(TREE)] * 2)
  parquet.write(tmp_path / 'a.parquet', tree, 1)
  for share in None, lambda prompts: np.full(prompts, 7):
    got = parquet.read(tmp_path / 'a.parquet', share)
    np.testing.assert_array_equal(got.previous, tree.previous)
    assert got.previous.dtype == tree.previous.dtype
    np.testing.assert_array_equal(got.batch.mask, tree.batch.mask)
  plain = rollout_of([episode(STRAIGHT, straight=True)])
  written = parquet.to_bytes(plain, 1)
  assert parquet.from_bytes(written).previous is None
  assert b'previous' not in written
