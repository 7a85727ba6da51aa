"""What a reward is, and how a config names one."""

from collections.abc import Callable
import dataclasses
import difflib
import importlib
import math
from typing import Any
from typing import TypeVar

from grpo_jax.rewards import _functions

BATCHED_MARK = 'takes_lists'  # the attribute that `batched` sets

_Function = TypeVar('_Function', bound=Callable[..., Any])


class RewardError(ValueError):
  """A reward function failed or returned what is no reward.

  The message names the function and the example; the original exception, if
  there was one, is the cause.
  """


def batched(function: _Function) -> _Function:
  """Marks a reward function that judges all completions in one call.

  For rewards that are cheaper together, such as a reward model. The function
  takes lists of equal length and returns one value per completion, in order.

  >>> @batched
  ... def brevity(prompts, completions, examples):
  ...   return [1.0 / (1 + len(completion)) for completion in completions]

  Args:
    function: `(prompts, completions, examples) -> sequence of float | None`,
      plain or async.

  Returns:
    The same function, marked.
  """
  setattr(function, BATCHED_MARK, True)
  return function


@dataclasses.dataclass(frozen=True)
class WeightedReward:
  """One term of the reward.

  Args:
    name: what metrics and errors call it; unique among the terms.
    function: the reward function; see the package's docstring.
    weight: its factor in the sum; 0 measures without training on it.

  Raises:
    ValueError: an empty name, a function that cannot be called, or a weight
      that is not finite.
  """

  name: str
  function: Callable[..., Any]
  weight: float = 1.0

  def __post_init__(self):
    if not isinstance(self.name, str) or not self.name:
      raise ValueError(
        f'The name of a reward is {self.name!r}, but a string that is not'
        ' empty is required; give it one.'
      )
    if not callable(self.function):
      raise ValueError(
        f'The function of the reward {self.name!r} is {self.function!r}, which'
        ' cannot be called; pass a function, or resolve(name).'
      )
    if not math.isfinite(self.weight):
      raise ValueError(
        f'The weight of the reward {self.name!r} is {self.weight}, but a'
        ' finite number is required; pass one.'
      )


def resolve(name: str) -> Callable[..., Any]:
  """The reward function that a config names.

  >>> resolve('exact_match').__name__
  'exact_match'

  Args:
    name: a function of this package, or 'module.sub:function' of any module
      that Python can import.

  Returns:
    The function.

  Raises:
    ValueError: nothing is found under the name.
  """
  if ':' not in name:
    builtin = {
      key: value
      for key, value in vars(_functions).items()
      if getattr(value, '__module__', None) == _functions.__name__
    }
    if name not in builtin:
      raise ValueError(
        f'There is no reward {name!r}{_nearest(name, builtin)}; pass one of'
        f" {sorted(builtin)}, or 'module:function' for one of your own."
      )
    return builtin[name]
  module_name, _, function_name = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except Exception as error:  # a user's module may raise anything
    raise ValueError(
      f'The reward {name!r} cannot be found, because importing the module'
      f' {module_name!r} failed ({type(error).__name__}: {error}); correct'
      ' the name or the module, or put its folder on PYTHONPATH.'
    ) from error
  function = getattr(module, function_name, None)
  if not callable(function):
    raise ValueError(
      f'The module {module_name!r} has no function {function_name!r}'
      f"{_nearest(function_name, vars(module))}; pass 'module:function'."
    )
  return function


def _nearest(name: str, known: Any) -> str:
  """Half a sentence that names the nearest known name, if one is near."""
  matches = difflib.get_close_matches(name, known, n=1)
  return f' (did you mean {matches[0]!r}?)' if matches else ''
