"""What the updates of one rollout do to each of its tokens, for people to see.

The updates themselves neither need nor change by it. It takes a forward pass
after them, and what `Updater` scores before its first update once more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from grpo_jax import losses
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import token_shards
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding


class Before(NamedTuple):
  """What is known before the first update."""

  coefficient: np.ndarray  # f32[P,G,T], weight times advantage
  logp: ArrayLike  # f32[P,G,T], log-probabilities of the old policy


class TokenEffects:
  """Measures rollouts that an updater learns from.

  Args:
    updater: See `Updater`.
  """

  def __init__(self, updater: Updater):
    self._updater = updater

    def coefficient(batch, loss_state, prompts):
      learner = updater.learner
      with sharding.use(learner.mesh):
        batch = jax.tree.map(lambda x: x[prompts], batch)
        ready = losses.prepare(learner.method, batch, loss_state)
        weight, advantage = ready.weight, ready.advantage
        assert weight is not None and advantage is not None  # `prepare` sees to
        return jnp.where(ready.keep, weight * advantage, 0)

    self._coefficient = jax.jit(coefficient)

  def before(self, state: TrainState, rollout: Rollout, step: int) -> Before:
    """To be called before the updater, which donates the state.

    Args:
      state: See `TrainState`.
      rollout: As the updater gets it.
      step: Number of the rollout.

    Returns:
      What `after` needs. The weight of a token is that in the optimizer batches
      of the first epoch. Without a penalty, and while the policy has not moved,
      the coefficient is the derivative of the objective by the log-probability.
    """
    updater = self._updater
    updater.wait()
    batch = updater.with_policies(state, rollout, step)
    logp = batch.logp_old
    if logp is None:  # the method takes the ratio as exactly 1
      logp = updater.score(state.params, rollout).logp
    batch = token_shards.placed(updater.learner.mesh, batch)
    batch, loss_state, _ = updater.credit(batch, state.loss_state)
    parts = [
      self._coefficient(batch, loss_state, chosen)
      for chosen in np.split(np.arange(len(rollout.prompts)), updater.batches)
    ]
    return Before(np.concatenate(host_arrays.to_host(parts)), logp)

  def after(
    self, state: TrainState, rollout: Rollout, before: Before
  ) -> dict[str, np.ndarray]:
    """What the updates have done.

    Args:
      state: After the last update of the rollout.
      rollout: As in `before`.
      before: What `before` returned.

    Returns:
      f32[P,G,T] by name, 0 outside the mask: `coefficient`, and
      `log_ratio_after`, the log-probability after the last update minus that of
      the old policy, nats.
    """
    logp = self._updater.score(state.params, rollout).logp
    moved = host_arrays.to_host(logp) - host_arrays.to_host(before.logp)
    found = {'coefficient': before.coefficient, 'log_ratio_after': moved}
    return {
      name: np.where(rollout.batch.mask, values, 0).astype(np.float32)
      for name, values in found.items()
    }
