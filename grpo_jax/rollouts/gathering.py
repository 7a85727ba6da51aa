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

from grpo_jax import sharding
from grpo_jax.rollouts.types import Rollout


def on_devices(rollout: Rollout, mesh: jax.sharding.Mesh) -> Rollout:
  """A rollout whose tokens, log-probabilities and extras are on every device.

  All processes must call it. Nothing is done if every process knows all.

  Args:
    rollout: See `Rollout`.
    mesh: The mesh.
  """
  if rollout.holder is None:
    return rollout
  batch = rollout.batch
  known = {
    name: getattr(batch, name) for name in ('tokens', 'logp_sampler', 'extras')
  }
  gathered = sharding.gather(known, rollout.holder, mesh)
  return rollout._replace(batch=batch._replace(**gathered))


def whole(
  rollout: Rollout,
  mesh: jax.sharding.Mesh,
  decode: Callable[[Any], str] | None = None,
) -> Rollout:
  """A rollout that every process knows.

  All processes must call it.

  Args:
    rollout: See `Rollout`.
    mesh: The mesh.
    decode: Turns ids into text. None: only texts that were known are there,
      which saves the time in processes that need none.
  """
  if rollout.holder is None:
    return rollout
  texts, batch = rollout.texts, jax.device_get(on_devices(rollout, mesh).batch)
  if decode:
    texts = [
      [decode(ids[:n]) for ids, n in zip(*row, strict=True)]
      for row in zip(batch.tokens, rollout.length, strict=True)
    ]
  return rollout._replace(batch=batch, texts=texts, holder=None)
