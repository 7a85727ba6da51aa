"""Judging and playing that several processes share."""

from collections.abc import Callable
import pickle
from typing import Any
import zlib

import jax
import numpy as np

from grpo_jax import rewards
from grpo_jax.episodes import meeting
from grpo_jax.episodes import rollout
from grpo_jax.episodes import types
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal


def shared(
  peers: processes.Processes, stop: stop_signal.Stop
) -> rollout.Judging:
  """Each process judges some of the prompts, and all get all scores.

  Those whose completions it alone knows; or, if all know all, equally many. So
  a completion is judged once. Different answers of a judge that is no function,
  a person or another model, would otherwise train different policies in
  different processes. A judge that fails in one process fails in all, and a
  signal to any process ends the waiting of all.

  Args:
    peers: The processes.
    stop: Asked by signals.

  Returns:
    For `collect`; it raises what `Processes.exchange` raises.
  """

  def judging(
    judge: rollout.Judge, episodes: rollout.Episodes
  ) -> tuple[rollout.Episodes, rewards.Scores]:
    prompts, group = len(episodes), len(episodes[0])
    holder = types.holders(episodes)
    shares = holder is not None
    if holder is None:
      peers.check_equal({'the rollout': _digest(episodes)})
      holder = np.arange(prompts) * peers.number // prompts
    own, message = np.flatnonzero(holder == peers.rank).tolist(), None
    with peers.together(), peers.patient(), stop.at_once():
      if own:
        scores = judge(own)
        outlines = [[*map(types.outline, episodes[p])] for p in own if shares]
        # Nearly all of it is the same number again and again.
        message = scores, zlib.compress(pickle.dumps(outlines), 1)
    found = [one for one in peers.exchange(message) if one is not None]
    # They lie one process behind the other.
    place = np.argsort(np.argsort(holder, kind='stable'))
    scores = jax.tree.map(
      lambda *x: np.concatenate(x), *(scores for scores, _ in found)
    )
    scores = jax.tree.map(
      lambda x: x.reshape(prompts, group, *x.shape[1:])[place].reshape(x.shape),
      scores,
    )
    if shares:
      outlines = [
        of_group
        for _, packed in found
        for of_group in pickle.loads(zlib.decompress(packed))
      ]
      episodes = [
        [
          one if p in own else types.outlined(one, *outline)
          for one, outline in zip(episodes[p], outlines[at], strict=True)
        ]
        for p, at in enumerate(place)
      ]
    return episodes, scores

  return judging


def hosts(peers: processes.Processes, stop: stop_signal.Stop) -> meeting.Hosts:
  """Each process plays the episodes of some records; see `meeting`.

  One whose environments are slow is waited for as a judge is. One whose player
  fails fails in all, and a signal to any process ends the waiting of all.

  Args:
    peers: The processes.
    stop: Asked by signals.
  """

  def exchange(say: Callable[[], Any]) -> list[Any]:
    with peers.together(), peers.patient(), stop.at_once():
      said = zlib.compress(pickle.dumps(say()), 1)
    return [pickle.loads(zlib.decompress(one)) for one in peers.exchange(said)]

  return meeting.Hosts(peers.rank, peers.number, exchange)


def _digest(episodes: rollout.Episodes) -> int:
  """A number of what was drawn, which is the same in all processes or a fault.

  They would train different policies on different completions.
  """
  ids = [one.ids for group in episodes for one in group]
  return zlib.crc32(np.concatenate([[len(x) for x in ids], *ids]).tobytes())
