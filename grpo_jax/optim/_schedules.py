"""Schedules that follow a run, and not the updates that an optimizer took."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax
import optax.contrib

# States with a count of a schedule beside other things: its field, what it
# begins with, and whether what is inside takes a step in each update.
_COUNTS = {
  optax.InjectHyperparamsState: ('count', 0, True),
  optax.InjectStatefulHyperparamsState: ('count', 0, True),
  optax.AddNoiseState: ('count', 0, True),
  optax.contrib.ScheduleFreeState: ('step_count', 1, True),
  optax.ConditionallyTransformState: ('step', 0, False),
  optax.ConditionallyMaskState: ('step', 0, False),
}
# Whose steps are several updates long.
_LONG_STEPS = optax.MultiStepsState | optax.contrib.SAMState


def set_schedules(state: Any, count: ArrayLike) -> Any:
  """Moves every schedule in an optimizer's state to a given place.

  optax evaluates a schedule at the number of updates that the optimizer has
  taken. Where a run skips updates (of rollouts without signal, say), that is
  less than the run has done, and a decay to 0 would never get there.

  Moved is what counts and holds nothing else, as the states of
  `optax.scale_by_schedule` and of a scheduled weight decay, and the counts of
  `optax.inject_hyperparams`, `add_noise`, `conditionally_transform`,
  `conditionally_mask` and `optax.contrib.schedule_free`. Moments and their
  counts stay as they are. So do the schedules inside what does not take a step
  in each update (`optax.MultiSteps`, `optax.contrib.sam`, the two
  `conditionally_...`), and those that share a count with moments
  (`optax.contrib.prodigy`, `dadapt_adamw`, `momo`, `momo_adam`, `madgrad`);
  `optax.inject_hyperparams` around these gives them one that is moved.

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
    name, first, goes_on = _place(node)
    if not name:
      return node
    fields = _fields(node)
    changed = {name: jnp.full_like(fields.pop(name), count + first)}
    if goes_on:
      changed |= {k: set_schedules(x, count) for k, x in fields.items()}
    return _replaced(node, changed)

  return jax.tree.map(moved, state, is_leaf=_stops)


def _stops(node) -> bool:
  return isinstance(node, _LONG_STEPS) or bool(_place(node)[0])


def _place(node) -> tuple[str, int, bool]:
  """Where a node counts for a schedule, as in `_COUNTS`; '' if it does not."""
  fields = _fields(node)
  if list(fields) == ['count'] and _is_integer(fields['count']):
    return 'count', 0, False
  return _COUNTS.get(type(node), ('', 0, False))


def _is_integer(x) -> bool:
  # A parameter may have the name, and so its moment.
  return hasattr(x, 'dtype') and jnp.issubdtype(x.dtype, jnp.integer)


def _fields(node) -> dict[str, Any]:
  """The values of a node by name; {} of one that has no names."""
  if isinstance(node, dict):
    return dict(node)
  names = getattr(node, '_fields', ())
  if dataclasses.is_dataclass(node) and not isinstance(node, type):
    names = [field.name for field in dataclasses.fields(node)]
  return {name: getattr(node, name) for name in names}


def _replaced(node: Any, fields: dict[str, Any]) -> Any:
  if isinstance(node, dict):
    return {**node, **fields}
  if hasattr(node, '_replace'):
    return node._replace(**fields)
  return dataclasses.replace(node, **fields)
