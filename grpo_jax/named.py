"""What a config names: methods, and functions as `'module:function'`."""

from collections.abc import Mapping
import difflib
import importlib
import inspect
from typing import Any

from grpo_jax import losses


def method(
  name: str, kwargs: Mapping[str, Any], flag: str = '--config.learner.method'
) -> losses.LossTransform:
  """The loss that a config names.

  Args:
    name: Of `losses.methods`, or `'module:function'` for a user's own.
    kwargs: Its arguments.
    flag: Where these come from, for the error message.

  Returns:
    A `LossTransform`.

  Raises:
    ValueError: No such method (the nearest is named), wrong arguments, or a
      function that makes something else.
  """
  if ':' in name:
    make = imported(name, flag)
  elif name in losses.methods.__all__:
    make = getattr(losses.methods, name)
  else:
    near = difflib.get_close_matches(name, losses.methods.__all__, 1)
    meant = f'did you mean {near[0]}?' if near else 'see `grpo-jax methods`.'
    raise ValueError(
      f'{flag}={name!r} is no method; {meant} A method of your own is named '
      "'module:function'."
    )
  try:
    inspect.signature(make).bind(**kwargs)
  except TypeError as error:
    raise ValueError(
      f'{flag}_kwargs={kwargs} do not fit {name}{_arguments(make)}: {error}; '
      f'give all of them anew with {flag}_kwargs="{{...}}".'
    ) from error
  made = make(**kwargs)
  if not isinstance(made, losses.LossTransform):
    raise ValueError(
      f'{flag}={name!r} made {made!r:.80}, which is no LossTransform; return '
      'what losses.chain returns.'
    )
  return made


def imported(name: str, what: str) -> Any:
  """The function that `'module:function'` names.

  Args:
    name: As in a config.
    what: The field, for the error message.

  Raises:
    ValueError: There is none, its module cannot be imported, or it is no
      function.
  """
  module, _, function = name.partition(':')
  try:
    found = getattr(importlib.import_module(module), function)
  except Exception as error:  # a user's module may raise anything
    raise ValueError(
      f'{what}={name!r} cannot be imported ({type(error).__name__}: {error}); '
      "give 'module:function' with the module on the Python path."
    ) from error
  if not callable(found):
    raise ValueError(
      f'{what}={name!r} is {found!r:.80}, which is no function; name one.'
    )
  return found


def _arguments(function) -> str:
  return str(inspect.signature(function)).split(' ->')[0]
