"""Builds the optimizer of a run from its name, with what is put around it."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax import models
from grpo_jax import optim
from grpo_jax.config import Optim
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.mesh import sharding
from grpo_jax.models import lora

Transform = Any  # an optax transformation

# What a run gives to optimizers, and the field of `config.optim` for it.
_GIVEN = {
  'schedule': 'lr',
  'decays': 'weight_decay',
  'weight_decay': 'weight_decay',
  'b1': 'b1',
  'b2': 'b2',
  'epsilon': 'epsilon',
}
_OWN_GIVEN = {'learning_rate': 'lr', 'weight_decay': 'weight_decay'}


def make_optimizer(
  fields: Optim, model: models.Model, schedule: Any, braked: bool
) -> Transform:
  """The optimizer of updates.

  Args:
    fields: Name it, and what is put around it.
    model: Knows which of its parameters decay, and which axes are a matrix.
    schedule: From the number of an update to the learning rate.
    braked: Whether a brake, the scale of rewards and the record are put around
      it; they are not in the warm-up.

  Raises:
    ValueError: There is no such function, its arguments do not fit, it returns
      no transformation, or it cannot do what another field asks for.
  """
  if fields.name == 'adamw':
    if fields.kwargs:
      raise ValueError(
        f"optim.kwargs={fields.kwargs} with optim.name='adamw', whose "
        'arguments are all fields of optim; set those, as in optim.b2=0.95.'
      )
    made = optim.adamw(
      schedule,
      b1=fields.b1,
      b2=fields.b2,
      epsilon=fields.epsilon,
      weight_decay=fields.weight_decay,
      clip_norm=fields.clip_norm or None,  # the config has 0 for None
      decays=functools.partial(decays, model),
    )
  else:
    found = _named if ':' not in fields.name else _own
    made = found(fields, model, schedule)
    made = optim.clip_first(made, fields.clip_norm or None)
  if braked:
    made = _with_brakes(made, fields)
  if ':' in fields.name:
    _try(made, fields, model)
  return made


def decays(model: models.Model, params: Any) -> Any:
  """Which parameters decay, a tree of bools."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: model.decays(sharding.path_names(path)), params
  )


def matrices(model: models.Model, params: Any) -> Any:
  """The axes of inputs and outputs, a tree of `optim.Matrix`."""

  def one(path, x):
    return optim.Matrix(*model.matrix_axes(sharding.path_names(path), x.ndim))

  return jax.tree_util.tree_map_with_path(one, params)


def _named(fields: Optim, model: models.Model, schedule: Any) -> Transform:
  """An optimizer of `grpo_jax.optim`."""
  make = {
    'adafactor': optim.adafactor,
    'lion': optim.lion,
    'muon': optim.muon,
    'sgd': optim.sgd,
  }[fields.name]
  given = {
    'schedule': schedule,
    'matrices': functools.partial(matrices, model),
    'weight_decay': fields.weight_decay,
    'decays': functools.partial(decays, model),
    'b1': fields.b1,
    'b2': fields.b2,
    'epsilon': fields.epsilon,
  }
  return _called(make, _taken(make, given), fields)


def _own(fields: Optim, model: models.Model, schedule: Any) -> Transform:
  """An optimizer of the user's own, or one of optax."""
  subject = f'config.optim.name={fields.name!r}'
  make = importing.imported(fields.name, subject)
  masked = functools.partial(decays, model)
  given = {
    'learning_rate': schedule,
    'weight_decay': fields.weight_decay,
    # What optax calls it, in several optimizers.
    'mask': masked,
    'weight_decay_mask': masked,
    'matrices': functools.partial(matrices, model),
  }
  taken = _taken(make, given)
  if 'learning_rate' not in taken:
    raise ValueError(
      f"{subject} has no argument 'learning_rate'; give it one, which gets a "
      'function from the count of updates to the rate.'
    )
  if fields.weight_decay and 'weight_decay' not in taken:
    raise ValueError(
      f"{subject} has no argument 'weight_decay', so that optim.weight_decay="
      f'{fields.weight_decay} would do nothing; give it one, or '
      'optim.weight_decay=0.'
    )
  try:
    made = _called(make, taken, fields)
  except ValueError:
    raise
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'{subject} raised {plain_text.named(error)}, when it was called with '
      f'optim.kwargs={fields.kwargs}; correct the function or the arguments.'
    ) from error
  if not (callable(getattr(made, 'init', 0)) and hasattr(made, 'update')):
    raise ValueError(
      f'{subject} made {made!r:.80}, which is no optax transformation; return '
      'one, such as optax.adamw(learning_rate).'
    )
  return made


def _taken(
  make: Callable[..., Transform], given: Mapping[str, Any]
) -> dict[str, Any]:
  """Those of some arguments that a function has."""
  known = inspect.signature(make).parameters
  return {name: value for name, value in given.items() if name in known}


def _called(
  make: Callable[..., Transform], taken: dict[str, Any], fields: Optim
) -> Transform:
  """Calls a function with what a run gives it, and the user's arguments."""
  _check_arguments(make, {**taken, **fields.kwargs}, fields)
  try:
    return make(**{**taken, **fields.kwargs})
  except ValueError as error:
    raise ValueError(
      f'config.optim.name={fields.name!r} with optim.kwargs={fields.kwargs} '
      f'cannot be used: {plain_text.said(error)}'
    ) from error


def _check_arguments(
  make: Callable[..., Transform], kwargs: Mapping[str, Any], fields: Optim
) -> None:
  """Refuses arguments that a function does not have, or that are fields."""
  ours = _OWN_GIVEN if ':' in fields.name else _GIVEN
  for name in fields.kwargs:
    if name in ours:
      raise ValueError(
        f'optim.kwargs has {name!r}, which the run gives; set '
        f'optim.{ours[name]} instead.'
      )
  try:
    inspect.signature(make).bind(**kwargs)
  except TypeError as error:
    arguments = str(inspect.signature(make)).split(' ->')[0]
    raise ValueError(
      f'optim.kwargs={fields.kwargs} do not fit {fields.name}{arguments}: '
      f'{plain_text.said(error)}.'
    ) from error


def _with_brakes(optimizer: Transform, fields: Optim) -> Transform:
  """The optimizer, wrapped in what the config asks for.

  From the inside out: a brake, the scaling of updates by the scale of rewards,
  and the recording of Adam's moments.
  """
  brakes = {
    'none': lambda: optimizer,
    'reset': lambda: optim.reset_moments(optimizer),
    'reset_first': lambda: optim.reset_moments(optimizer, 'first'),
    'decay': lambda: optim.decay_carried(optimizer),
    'project': lambda: optim.project_outward(optimizer, fields.epsilon),
  }
  optimizer = brakes[fields.brake]()
  if fields.reward_scale:
    optimizer = optim.restore_reward_scale(optimizer, fields.reward_scale)
  if fields.moments:
    optimizer = optim.record_adam_moments(optimizer, fields.epsilon)
  return optimizer


def _try(made: Transform, fields: Optim, model: models.Model) -> None:
  """Traces an update of the user's own optimizer, on shapes alone."""

  def update(params):
    extra = {
      'first_of_rollout': jnp.array(True),
      'clipped_share': jnp.zeros(()),
      'advantage_scale': jnp.zeros(()),
      'outward': params,
    }
    state = made.init(params)
    updates, after = made.update(params, state, params, **extra)
    if fields.overshoot_every_steps:
      optim.split_update(
        made, state, after, updates, params, gradient=params, **extra
      )
    return updates

  trained, _ = lora.split(model.abstract(), model.trains)
  try:
    found = jax.eval_shape(update, trained)
  except Exception as error:  # a user's function may raise anything
    raise ValueError(
      f'config.optim.name={fields.name!r} cannot be used: '
      f'{plain_text.named(error)}; correct the optimizer, or what is put '
      'around it (optim.brake, optim.moments, optim.overshoot_every_steps).'
    ) from error
  shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
  if shapes(found) != shapes(trained):
    raise ValueError(
      f'config.optim.name={fields.name!r} makes updates of other shapes than '
      'the parameters; return one array for each parameter.'
    )
