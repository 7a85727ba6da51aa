"""Judging that several processes share."""

from collections.abc import Callable
import zlib

import numpy as np

from grpo_jax import rewards
from grpo_jax.rollouts import rollout
from grpo_jax.sampling import Completions
from grpo_jax.training import processes
from grpo_jax.training import stop_signal


def shared(
  peers: processes.Processes, stop: stop_signal.Stop
) -> rollout.Judging:
  """Each process judges equally many prompts, and all get all scores.

  So a completion is judged once. Different answers of a judge that is no
  function, a person or another model, would otherwise train different policies
  in different processes. A judge that fails in one process fails in all, and a
  signal to any process ends the waiting of all.

  Args:
    peers: The processes.
    stop: Asked by signals.

  Returns:
    For `collect`; it raises what `Processes.exchange` raises.
  """

  def judging(
    judge: Callable[[slice], rewards.Scores], completions: Completions
  ) -> rewards.Scores:
    peers.check_equal({'the rollout': _digest(completions)})
    prompts = len(completions.length)
    first, last = (
      prompts * rank // peers.number for rank in (peers.rank, peers.rank + 1)
    )
    own = None
    with peers.together(), stop.at_once():
      if first < last:
        own = judge(slice(first, last))
    parts = [part for part in peers.exchange(own) if part is not None]
    return rewards.Scores(*map(np.concatenate, zip(*parts, strict=True)))

  return judging


def _digest(completions: Completions) -> int:
  """A number of what was drawn, which is the same in all processes or a fault.

  They would train different policies on different completions.
  """
  lengths = zlib.crc32(completions.length.tobytes())
  return zlib.crc32(completions.tokens.tobytes(), lengths)
