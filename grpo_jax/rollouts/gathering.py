"""Rollouts of which each process knows some groups, made whole.

On several processes a completion's tokens and log-probabilities go to the host
of the devices that have drawn it, and to no other. What all hosts decide on
(rewards, lengths, prompts) they know of all groups. So a `Rollout` has all of
its groups everywhere, and says who holds the rest of each.

The learner gathers the rest on the devices. It comes to a host only if that is
to write or to show it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
import numpy as np

from grpo_jax.episodes.types import KNOWN_TO_ALL
from grpo_jax.episodes.types import Rollout
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import shards


def on_devices(rollout: Rollout, mesh: jax.sharding.Mesh) -> Rollout:
  """A rollout whose tokens, log-probabilities and extras are on the devices.

  All processes must call it. Nothing is done if every process knows all.

  Args:
    rollout: See `Rollout`.
    mesh: The mesh. Positions are split over it; see `shards.positions`.
  """
  width = rollout.batch.mask.shape[2]
  return _gathered(rollout, mesh, shards.positions(mesh, width))


def _gathered(rollout, mesh, of_positions: PartitionSpec) -> Rollout:
  """`on_devices`, with arrays [P,G,T] where they are to lie."""
  if rollout.holder is None:
    return rollout
  batch = rollout.batch
  held = {
    name: value
    for name, value in batch._asdict().items()
    if name == 'extras'
    or np.shape(value) == batch.mask.shape
    and name not in KNOWN_TO_ALL
  }
  specs = shards.specs_of(held, batch.mask.shape, of_positions)
  gathered = host_arrays.gather(held, rollout.holder, mesh, specs)
  return rollout._replace(batch=batch._replace(**gathered))


def whole(
  rollout: Rollout,
  mesh: jax.sharding.Mesh,
  decode: Callable[[Any], str] | None = None,
) -> Rollout:
  """A rollout of which this process knows all.

  All processes must call it.

  Args:
    rollout: See `Rollout`.
    mesh: The mesh.
    decode: Turns ids into text. None in a process that needs no more than it
      knows: it gets the rollout as it was, and saves the time.
  """
  if rollout.holder is None:
    return rollout
  gathered = _gathered(rollout, mesh, PartitionSpec()).batch
  if decode is None:
    return rollout
  batch = jax.tree.map(np.array, gathered)  # arrays that may be written to
  texts = [
    [decode(ids[:n]) for ids, n in zip(*row, strict=True)]
    for row in zip(batch.tokens, rollout.length, strict=True)
  ]
  return rollout._replace(batch=batch, texts=texts, holder=None)
