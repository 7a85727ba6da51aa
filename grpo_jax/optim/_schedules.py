"""Schedules that follow a run, and not the updates that an optimizer took."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax


def set_schedules(state: Any, count: ArrayLike) -> Any:
  """Moves every schedule in an optimizer's state to a given place.

  optax evaluates a schedule at the number of updates that the optimizer has
  taken. Where a run skips updates (of rollouts without signal, say), that is
  less than the run has done, and a decay to 0 would never get there.

  Moved is what counts and holds nothing else, as the states of
  `optax.scale_by_schedule` and of a scheduled weight decay, and the count of
  `optax.inject_hyperparams`. Inside `optax.MultiSteps`, whose steps are several
  updates long, nothing is. Moments and their counts stay as they are.

  Args:
    state: Of any optax transformation.
    count: i32[], at which the next update evaluates schedules.

  Returns:
    The state, in which only these counts are others.

  >>> tx = optax.adam(lambda count: 0.1 * count)
  >>> adam, schedule = set_schedules(tx.init(jnp.ones(2)), 7)
  >>> int(adam.count), int(schedule.count)
  (0, 7)
  """

  def moved(node):
    if not _is_schedule(node):
      return node
    inside = {
      name: set_schedules(getattr(node, name), count)
      for name in node._fields
      if name != 'count'
    }
    place = jnp.asarray(count, jnp.asarray(node.count).dtype)
    return node._replace(count=place, **inside)

  def stops(node):
    return _is_schedule(node) or isinstance(node, optax.MultiStepsState)

  return jax.tree.map(moved, state, is_leaf=stops)


def _is_schedule(node) -> bool:
  injected = optax.InjectHyperparamsState, optax.InjectStatefulHyperparamsState
  fields = getattr(node, '_fields', None)
  return fields == ('count',) or isinstance(node, injected)
