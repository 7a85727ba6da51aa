"""The types of a reward, the marks on functions, and functions by name."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import inspect
import math
from typing import Any
from typing import NamedTuple
from typing import TypeVar

from grpo_jax.config import importing as import_by_name
from grpo_jax.config import plain_text

BATCHED = 'takes_lists'
BOUNDED = 'is_bounded'
CHECK = 'check_arguments'
IMPORTS = 'imports_first'
LIMITS_ITSELF = 'limits_itself'
CONFINED = 'prepares_confined'
BOUNDS = 'confined_bounds'
REWARD_MODEL = 'reward_model'  # a run makes it; see `episodes/reward_model.py`

is_confined = False  # whether this process is one; `_worker.py` sets it

_Function = TypeVar('_Function', bound=Callable[..., Any])


def _marking(marks: Mapping[str, Any]) -> Callable[[_Function], _Function]:
  """A decorator that sets attributes of a function.

  It makes no wrapper, so that the name, signature and source of a function
  stay.
  """

  def mark(function: _Function) -> _Function:
    for name, value in marks.items():
      setattr(function, name, value)
    return function

  return mark


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
  return _marking({BATCHED: True})(function)


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
  return _marking({BOUNDED: True})(function)


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

  return _marking({CHECK: check})


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

  return _marking({IMPORTS: first})


def limits_itself(function: _Function) -> _Function:
  """Marks a reward function that ends the programs that it starts.

  Their processor time is not counted in a worker, only time by the clock.
  """
  return _marking({LIMITS_ITSELF: True})(function)


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

  return _marking({CONFINED: prepare, BOUNDS: bounds})


def mark_of(function: Any, mark: str) -> Any:
  """The value of a mark, also of a function with some arguments given."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, mark, None)


class RewardError(ValueError):
  """A reward function raised an error, or returned something that is no reward.

  The message names the function and the example. If the function raised, its
  exception is the `__cause__` of this one.
  """


class Outcome(NamedTuple):
  """What came of judging one completion.

  A reward function may return it in the place of a number, to say why it has
  failed.

  Attributes:
    reward: What the judge returned: a number, or None for 'not judged'. None
      too if the judge failed.
    failure: '' if the judge returned; otherwise why not. In a worker: 'time
      limit', 'memory', 'processes', 'exit 1', 'signal SIGSEGV', 'raised
      ValueError: ...', 'returned nan, ...' or 'start limit' (importing it took
      too long).
    secs: How long the judge took.
  """

  reward: float | None
  failure: str = ''
  secs: float = 0.0


@dataclasses.dataclass(frozen=True)
class WeightedReward:
  """One term of the reward.

  Args:
    name: What metrics and errors call this reward. No other reward of the run
      may have the same name.
    function: The reward function; see `help(grpo_jax.rewards)`.
    weight: The factor of this reward in the sum. A reward of weight 0 is
      measured and not trained on.
    where: 'here' to call it in this process, or 'workers' to call it in the
      worker processes that `score` is given, under their limits.
    failed: What a completion gets on which it failed, in a worker by being
      late, say, or as an `Outcome` with a failure tells; None makes the
      completion count as not judged.
    required: Whether a completion for which it returns None counts as not
      judged. Otherwise the sum is over the rewards that have judged it.
    kwargs: Keyword arguments of the function.
    imported_as: The name for `resolve` under which a worker finds the function;
      '' sends the function itself.

  Raises:
    ValueError: The name is empty, the function cannot be called, `where` is
      neither, or a number is not finite.
  """

  name: str
  function: Callable[..., Any]
  weight: float = 1.0
  where: str = 'here'
  failed: float | None = None
  required: bool = False
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  imported_as: str = ''

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
    if self.where not in ('here', 'workers'):
      raise ValueError(
        f'The reward {self.name!r} is to be called {self.where!r}, but one of'
        " 'here' and 'workers' is required; pass one."
      )
    if self.failed is not None and not math.isfinite(self.failed):
      raise ValueError(
        f'What failing gets of the reward {self.name!r} is {self.failed}, but'
        ' a finite number or None is required; pass one.'
      )


def resolve(name: str) -> Callable[..., Any]:
  """The reward function that a config names.

  >>> resolve('exact_match').__name__
  'exact_match'

  Args:
    name: A function of this package, or 'module.sub:function' of any module
      that Python can import.

  Returns:
    The function.

  Raises:
    ValueError: Nothing is found under the name.
  """
  return import_by_name.imported(_place(name), f'The reward {name!r}')


def find(name: str) -> None:
  """Raises the error of `resolve` that is seen without importing a module.

  Args:
    name: See `resolve`; or `REWARD_MODEL`.

  Raises:
    ValueError: Nothing can be found under the name.
  """
  if name != REWARD_MODEL:
    import_by_name.find(_place(name), f'The reward {name!r}')


def _place(name: str) -> str:
  """The 'module:function' of a reward.

  Raises:
    ValueError: This package has no such reward.
  """
  if name in _OWN:
    return f'grpo_jax.rewards:{name}'
  if ':' in name:
    return name
  raise ValueError(
    f'There is no reward {name!r}{import_by_name.nearest(name, _OWN)}; '
    f"pass one of {sorted(_OWN)}, or 'module:function' for one of your own."
  )


# The reward functions of this package. They are imported by name, because
# their modules import this one.
_OWN = (
  'boxed_text', 'completion_length', 'environment', 'exact_match',
  'format_tags', 'gsm8k', 'http_judge', 'json_schema', 'last_number',
  'math_equivalence', 'multiple_choice', 'number', 'reasoning_gym',
  'regular_expression',
)  # fmt: skip


def check_arguments(
  function: Callable[..., Any], kwargs: Mapping[str, Any], where: str
) -> str:
  """Checks what a config gives a reward function besides the completion.

  Args:
    function: Called as `function(prompt, completion, example, **kwargs)`.
    kwargs: By name.
    where: The field of the config, for the error message.

  Returns:
    A sentence to warn of, or ''.

  Raises:
    ValueError: The function does not take these arguments, or refuses them; see
      `checked`.
  """
  try:
    signature = inspect.signature(function)
  except (TypeError, ValueError):  # some functions written in C have none
    signature = None
  if signature is not None:
    try:
      signature.bind('prompt', 'completion', 'example', **kwargs)
    except TypeError as error:
      name = getattr(function, '__name__', type(function).__name__)
      raise ValueError(
        f'{where}={dict(kwargs)} does not fit the reward function'
        f' {name}{str(signature).split(" ->")[0]}: {plain_text.said(error)};'
        ' give arguments that it has besides the first three.'
      ) from error
  check = getattr(function, CHECK, None)
  try:
    said = check(**kwargs) if check else None
  except ValueError:  # a sentence about the arguments
    raise
  except Exception as error:
    raise ValueError(
      f'{where}={dict(kwargs)} cannot be used ({plain_text.named(error)});'
      ' give values of the kind that the function needs.'
    ) from error
  return said if isinstance(said, str) else ''


def is_bounded(function: Callable[..., Any]) -> bool:
  """Whether a function is marked by `bounded`."""
  return bool(mark_of(function, BOUNDED))


def takes_lists(function: Callable[..., Any]) -> bool:
  """Whether a function is marked by `batched`."""
  return bool(mark_of(function, BATCHED))
