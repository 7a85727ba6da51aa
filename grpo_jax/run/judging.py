"""Judging that several processes share."""

import pickle
import zlib

import jax
import numpy as np

from grpo_jax import rewards
from grpo_jax.engines import Completions
from grpo_jax.episodes import rollout
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal

# What all processes decide on, though one has drawn it.
_KNOWN_TO_ALL = 'length', 'finish', 'version', 'chosen', 'previous'


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
    judge: rollout.Judge, completions: Completions
  ) -> tuple[Completions, rewards.Scores]:
    prompts, group = completions.length.shape
    holder, names = completions.holder, _KNOWN_TO_ALL
    if holder is None:
      peers.check_equal({'the rollout': _digest(completions)})
      holder, names = np.arange(prompts) * peers.number // prompts, ()
    arrays = {name: getattr(completions, name) for name in names}
    own, told = np.flatnonzero(holder == peers.rank), None
    with peers.together(), peers.patient(), stop.at_once():
      if len(own):
        scores = judge(own.tolist())
        mine = jax.tree.map(lambda x: x[own], arrays)
        # Nearly all of it is the same number again and again.
        told = scores, zlib.compress(pickle.dumps(mine), 1)
    of_each = [
      (told[0], pickle.loads(zlib.decompress(told[1])))
      for told in peers.exchange(told)
      if told is not None
    ]
    # They lie one process behind the other.
    place = np.argsort(np.argsort(holder, kind='stable'))
    scores, arrays = jax.tree.map(lambda *x: np.concatenate(x), *of_each)
    scores = jax.tree.map(
      lambda x: x.reshape(prompts, group, *x.shape[1:])[place].reshape(x.shape),
      scores,
    )
    arrays = jax.tree.map(lambda x: x[place], arrays)
    return completions._replace(**arrays), scores

  return judging


def _digest(completions: Completions) -> int:
  """A number of what was drawn, which is the same in all processes or a fault.

  They would train different policies on different completions.
  """
  lengths = zlib.crc32(completions.length.tobytes())
  return zlib.crc32(completions.tokens.tobytes(), lengths)
