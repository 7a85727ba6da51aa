"""What the updates of one rollout do to each of its tokens, for people to see.

It takes a forward pass after the updates, and one before them if the method
needs no `logp_old`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from grpo_jax import losses
from grpo_jax.learner import updates
from grpo_jax.learner.instruments.hook import Findings
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Credited
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding


class Before(NamedTuple):
  """What is known before the first update."""

  coefficient: np.ndarray  # f32[P,G,T], weight times advantage
  logp: ArrayLike  # f32[P,G,T], log-probabilities of the old policy


class TokenEffects:
  """Measures how far each token is pushed, and how far it has moved.

  Args:
    updater: What takes the updates.
    every_steps: The rollouts are measured after which a multiple of this many
      are done; 0: none is.
  """

  def __init__(self, updater: Updater, every_steps: int):
    self._updater, self._every_steps = updater, every_steps
    learner = updater.compiled.learner

    def coefficient(batch, loss_state, prompts):
      with sharding.use(learner.mesh):
        batch = jax.tree.map(lambda x: x[prompts], batch)
        ready = losses.prepare(learner.method, batch, loss_state)
        weight, advantage = ready.weight, ready.advantage
        assert weight is not None and advantage is not None  # `prepare` sees to
        return jnp.where(ready.keep, weight * advantage, 0)

    self._coefficient = jax.jit(coefficient)

  def is_due(self, step: int) -> bool:
    """Whether a rollout is measured."""
    return self._every_steps > 0 and (step + 1) % self._every_steps == 0

  def before(self, state: TrainState, credited: Credited) -> Before:
    """What `after` needs.

    The weight of a token is that in the optimizer batches of the first epoch.
    Without a penalty, and while the policy has not moved, the coefficient is
    the derivative of the objective by the log-probability.
    """
    logp = credited.logp_old
    if logp is None:  # the method takes the ratio as exactly 1
      logp = updates.logp_now(self._updater, state, credited)
    parts = [
      self._coefficient(credited.batch, credited.loss_state, chosen)
      for chosen in credited.layouts.first_epoch()
    ]
    return Before(np.concatenate(host_arrays.to_host(parts)), logp)

  def after(
    self, state: TrainState, credited: Credited, before: Before
  ) -> Findings:
    """What the updates have done.

    Returns:
      For the tokens `coefficient`, and `log_ratio_after`, the log-probability
      after the last update minus that of the old policy, nats.
    """
    logp = updates.logp_now(self._updater, state, credited)
    moved = host_arrays.to_host(logp) - host_arrays.to_host(before.logp)
    found = {'coefficient': before.coefficient, 'log_ratio_after': moved}
    mask = credited.rollout.batch.mask
    return Findings(
      tokens={
        name: np.where(mask, values, 0).astype(np.float32)
        for name, values in found.items()
      }
    )
