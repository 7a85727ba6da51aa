"""The mark of a reward function that runs in confined workers only."""

from collections.abc import Callable
import functools
from typing import Any
from typing import TypeVar

CONFINED_MARK = 'prepares_confined'  # the attribute that `confined` sets
is_confined = False  # whether this process is one; `_apart.py` sets it

_Function = TypeVar('_Function', bound=Callable[..., Any])


def confined(
  prepare: Callable[[dict[str, Any]], Any],
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

  Returns:
    A decorator, which returns the same function, marked.
  """

  def mark(function: _Function) -> _Function:
    setattr(function, CONFINED_MARK, prepare)
    return function

  return mark


def prepare_of(function: Any) -> Callable[[dict[str, Any]], Any] | None:
  """What the mark of a function has; None for a function without the mark."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, CONFINED_MARK, None)
