"""Finds the function that `'module:function'` in a config names.

Names of this package, such as `'grpo'` or `'exact_match'`, are looked up
elsewhere: methods in `run/build/build.py`, rewards in `rewards/_base.py`.
"""

from collections.abc import Callable
from collections.abc import Iterable
import difflib
import importlib
from typing import Any

from grpo_jax.config import plain_text


def imported(name: str, subject: str) -> Callable[..., Any]:
  """The function that `'module:function'` names.

  >>> imported('math:sqrt', 'The name').__name__
  'sqrt'

  Args:
    name: The module, as Python imports it, and a function in it.
    subject: The first words of an error message: the option, and the name that
      it was given.

  Returns:
    The function.

  Raises:
    ValueError: The module cannot be imported, or it has no such function; the
      message names the nearest one.
  """
  module_name, _, function_name = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except (Exception, SystemExit) as error:  # a user's module may do anything
    raise ValueError(
      f'{subject} cannot be imported, because importing the module '
      f'{module_name!r} failed ({plain_text.named(error)}); correct the '
      'name or the module, or put its folder on PYTHONPATH.'
    ) from error
  found = getattr(module, function_name, None)
  if callable(found):
    return found
  near = nearest(function_name, vars(module))
  if found is not None:
    near = f': {found!r:.60} is no function'
  raise ValueError(
    f'{subject} cannot be imported, because the module {module_name!r} has no '
    f"function {function_name!r}{near}; give 'module:function'."
  )


def nearest(name: str, known: Iterable[str]) -> str:
  """' (did you mean ...?)' with the known name that is most like this one.

  '' if no known name is like it.

  >>> nearest('exact_mach', ['exact_match', 'score'])
  " (did you mean 'exact_match'?)"
  >>> nearest('x', ['exact_match'])
  ''
  """
  matches = difflib.get_close_matches(name, known, n=1)
  return f' (did you mean {matches[0]!r}?)' if matches else ''
