"""Marks on reward functions: attributes that a run reads.

They are no wrappers, so that the name, signature and source of a function stay.
"""

from collections.abc import Callable
import functools
from typing import Any
from typing import TypeVar

BATCHED = 'takes_lists'
BOUNDED = 'is_bounded'
CHECK = 'check_arguments'
IMPORTS = 'imports_first'
LIMITS_ITSELF = 'limits_itself'
CONFINED = 'prepares_confined'
BOUNDS = 'confined_bounds'

is_confined = False  # whether this process is one; `_apart.py` sets it

_Function = TypeVar('_Function', bound=Callable[..., Any])


def batched(function: _Function) -> _Function:
  """Marks a reward function that judges all completions in one call.

  Use it for a reward that is cheaper for many completions together, such as a
  reward model. The function takes lists of equal length and returns a list with
  one value per completion, in the same order.

  >>> @batched
  ... def brevity(prompts, completions, examples):
  ...   return [1.0 / (1 + len(completion)) for completion in completions]

  Args:
    function: `(prompts, completions, examples) -> sequence of float | None`,
      plain or `async`.

  Returns:
    The same function, marked.
  """
  setattr(function, BATCHED, True)
  return function


def bounded(function: _Function) -> _Function:
  """Marks a reward function that no completion can keep busy.

  Its time and memory grow at most linearly with the text, it runs no code that
  it is given, and what waits has a limit of its own. A run calls it in its own
  process, without the limits of workers, unless the config says otherwise.

  >>> @bounded
  ... def polite(prompt, completion, example):
  ...   return float('please' in completion)

  Args:
    function: A reward function.

  Returns:
    The same function, marked.
  """
  setattr(function, BOUNDED, True)
  return function


def _marks(name: str, value: Any) -> Callable[[_Function], _Function]:
  """A decorator that sets an attribute of a function."""

  def mark(function: _Function) -> _Function:
    setattr(function, name, value)
    return function

  return mark


def checked(
  check: Callable[..., Any],
) -> Callable[[_Function], _Function]:
  """Marks a reward function whose arguments can be checked before any call.

  Args:
    check: Called with the keyword arguments that a config gives. It raises a
      ValueError if the function cannot work with them, and may return a
      sentence to warn of; nothing else that it returns counts.

  Returns:
    A decorator, which returns the same function, marked.
  """

  return _marks(CHECK, check)


def imports(
  first: Callable[[], Any],
) -> Callable[[_Function], _Function]:
  """Marks a reward function that imports what takes long when it is needed.

  Args:
    first: Called in a worker before the function, once; its time does not count
      as judging. It imports what the function needs.

  Returns:
    A decorator, which returns the same function, marked.
  """

  return _marks(IMPORTS, first)


def limits_itself(function: _Function) -> _Function:
  """Marks a reward function that ends the programs that it starts.

  Their processor time is not counted in a worker, only time by the clock.
  """
  setattr(function, LIMITS_ITSELF, True)
  return function


def confined(
  prepare: Callable[[dict[str, Any]], Any],
  bounds: tuple[float, float] | None = None,
) -> Callable[[_Function], _Function]:
  """Marks a reward function that must not judge in the process of the trainer.

  It is for a judge that may do what a completion tells it to, such as one that
  calls `eval`. `Workers` run each call of it in a process of its own, which
  cannot write any file, read any but those of Python and of the system, reach
  the network, or change what later calls find.

  >>> @confined(prepare=lambda example: None)
  ... def evaluated(prompt, completion, example):
  ...   return float(eval(completion) == example['answer'])

  Args:
    prepare: Called with the example in the worker, before it is confined: it
      imports and reads what the function needs, and keeps it. It never sees the
      completion, and its time does not count as judging.
    bounds: The least and the most that the function means to return; None for
      any number. The worker checks it outside the confined process, and what
      lies outside has failed: so a completion that talks its judge into a
      reward gets no more than the best one.

  Returns:
    A decorator, which returns the same function, marked.
  """

  def mark(function: _Function) -> _Function:
    setattr(function, CONFINED, prepare)
    setattr(function, BOUNDS, bounds)
    return function

  return mark


def prepare_of(function: Any) -> Callable[[dict[str, Any]], Any] | None:
  """What the mark of a function has; None for a function without the mark."""
  return of(function, CONFINED)


def of(function: Any, mark: str) -> Any:
  """The value of a mark, also of a function with some arguments given."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, mark, None)
