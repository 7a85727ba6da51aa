"""What processes that share the judging tell each other."""

import contextlib
import itertools
import threading

import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import rewards
from grpo_jax.episodes.types import Episode
from grpo_jax.episodes.types import Rollout
from grpo_jax.hosts import stop_signal
from grpo_jax.run import judging
from grpo_jax.run import watching


class Peer:
  """One of two processes, which here are threads."""

  number = 2

  def __init__(self, rank, told, barrier):
    self.rank, self._told, self._barrier = rank, told, barrier

  def together(self):
    return contextlib.nullcontext()

  patient = together

  def check_equal(self, values):
    """They are."""

  def exchange(self, value):
    self._told[self.rank] = value
    self._barrier.wait(timeout=60)
    return list(self._told)


def scores_of(chosen, group):
  """Of each completion: its number; every third has failed."""
  number = np.array([p * group + g for p in chosen for g in range(group)])
  failures = np.full((len(number), 2), '', object)
  failures[number % 3 == 0, 0] = [f'exit {n}' for n in number if n % 3 == 0]
  return rewards.Scores(
    reward=number.astype(np.float32),
    parts=np.stack([number, -number], -1).astype(np.float32),
    judged=number % 3 > 0,
    failures=failures,
    secs=np.stack([number, number], -1).astype(np.float32),
  )


@pytest.mark.parametrize('holder', [None, [1, 0, 1, 0], [1, 1, 0, 0]])
def test_all_processes_get_all_scores_and_reasons(holder):
  prompts, group = 4, 3
  whole = scores_of(range(prompts), group)
  drawn = [[drawn_one(p, g) for g in range(group)] for p in range(prompts)]

  def known_to(rank):
    """What was drawn, as a process knows it."""
    if holder is None:
      return drawn
    own = np.array(holder) == rank
    return [
      [
        (one if own[p] else nothing(one))._replace(holder=holder[p])
        for one in of_prompt
      ]
      for p, of_prompt in enumerate(drawn)
    ]

  told, barrier, got = [None, None], threading.Barrier(2), {}

  def judge(rank):
    shared = judging.shared(Peer(rank, told, barrier), stop_signal.Stop())
    got[rank] = shared(lambda some: scores_of(some, group), known_to(rank))

  threads = [threading.Thread(target=judge, args=(rank,)) for rank in (0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  for rank, (known, scores) in got.items():
    for p, g in itertools.product(range(prompts), range(group)):
      found, wanted = known[p][g], drawn[p][g]
      for name in ('version', 'chosen', 'previous'):
        np.testing.assert_array_equal(
          getattr(found, name), getattr(wanted, name)
        )
      assert found.finish == wanted.finish
      here = holder is None or holder[p] == rank
      for name in ('ids', 'logp', 'log_kept', 'entropy'):
        x, y = getattr(found, name), getattr(wanted, name)
        np.testing.assert_array_equal(x, y if here else np.zeros_like(y))
        assert x.dtype == y.dtype
      assert found.turn is found.routing is None
    for found, wanted in zip(scores, whole, strict=True):
      np.testing.assert_array_equal(found, wanted)


def drawn_one(p, g):
  """An episode of p + 2 * g tokens, of which the policy has chosen some."""
  ids = np.arange(1, 1 + p + 2 * g, dtype=np.int32)
  chosen = ids % 5 > 1
  return Episode(
    ids,
    chosen,
    logp=-ids.astype(np.float32),
    log_kept=ids.astype(np.float32) / 2,
    version=np.where(chosen, 7 + p, 0).astype(np.int32),
    finish=(p + g) % 3,
    entropy=ids.astype(np.float32) / 8,
    previous=ids - 2 if p == 2 else None,
  )


def nothing(one):
  """What a process has of what another has drawn."""
  fields = one._replace(previous=None)._asdict().items()
  none = {k: x[:0] for k, x in fields if isinstance(x, np.ndarray)}
  return one._replace(**none, previous=None, finish=0)


def rollout_with(failures):
  """Two prompts of two completions, and two rewards."""
  failures = np.array(failures, object).reshape(2, 2, 2)
  mask = np.ones((2, 2, 1), bool)
  batch = losses.Batch(
    tokens=mask.astype(np.int32),
    mask=mask,
    keep=mask,
    valid=mask[..., 0],
    reward=np.zeros((2, 2)),
    reward_parts=np.zeros((2, 2, 2)),
    truncated=mask[..., 0],
    version=mask.astype(np.int32),
  )
  length = np.ones((2, 2), np.int32)
  rollout = Rollout(batch, length, [[1]] * 2, [], [], np.arange(2), ('a', 'b'))
  return rollout._replace(failures=failures)


def test_a_reward_that_always_fails_is_told_when_that_begins():
  failures = watching.Failures()
  all_of_a = rollout_with(['memory', ''] * 3 + ['exit 1', 'exit 1'])
  measured = {'reward/a_failed': 1.0, 'reward/b_failed': 0.25}
  (sentence,) = failures.warnings(all_of_a, measured)
  assert 'The reward a has failed on all' in sentence
  assert 'on 3 of 4 by: memory' in sentence
  assert not failures.warnings(all_of_a, measured)
  some = {'reward/a_failed': 0.5, 'reward/b_failed': 1.0}
  both = rollout_with(['', 'exit 1'] * 4)
  assert len(failures.warnings(both, some)) == 1
  assert len(failures.warnings(all_of_a, measured)) == 1  # once more
  assert not watching.Failures().warnings(all_of_a, {})  # nothing was measured
