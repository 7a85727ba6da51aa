"""Environments of other packages, by names such as 'gymnasium:FrozenLake-v1'.

Each file has `make(rest)`, which returns a class or a function that makes
instances; `kwargs` of the environment are theirs. The packages are imported
when an environment is made.
"""

from collections.abc import Callable
import importlib
from typing import Any

from grpo_jax.config import plain_text

NAMES = 'gymnasium', 'mcp', 'open_spiel', 'reasoning_gym', 'textarena'


def is_name(name: str) -> bool:
  """Whether a name is one of an adapter.

  >>> is_name('textarena:GuessTheNumber-v0-raw'), is_name('my_lab.envs:Wordle')
  (True, False)
  """
  return name.partition(':')[0] in NAMES


def find(name: str) -> Any:
  """What makes the environment of a name.

  Args:
    name: 'adapter:what', see `NAMES`.

  Returns:
    A class, or a function that makes instances.

  Raises:
    ValueError: The rest of the name is missing.
  """
  adapter, _, rest = name.partition(':')
  if not rest:
    raise ValueError(
      f"The environment {name!r} names nothing of {adapter}; give '{adapter}:'"
      ' and what is to be played.'
    )
  module = importlib.import_module(f'{__name__}.{adapter}_adapter')
  return module.make(rest)


def made(of: str, make: Callable[..., Any], name: str, /, **kwargs: Any) -> Any:
  """What a package makes by a name.

  Args:
    of: The package, for people.
    make: Its function.
    name: Of the environment.
    **kwargs: For `make`.

  Raises:
    ValueError: It makes none.
  """
  try:
    return make(name, **kwargs)
  except Exception as error:
    raise ValueError(
      f'{of} cannot make {name!r} ({plain_text.named(error)}); correct the id'
      ' or the arguments.'
    ) from error
