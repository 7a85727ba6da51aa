"""The types of a reward, and the function that a config names."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any
from typing import NamedTuple
from typing import TypeVar

from grpo_jax import resolve as import_by_name
from grpo_jax.rewards import verifiers

BATCHED_MARK = 'takes_lists'  # the attribute that `batched` sets

# Judges of this package whose modules import this one, so not at the top.
_JUDGES = {'http_judge': 'grpo_jax.rewards.model_judge:http_judge'}

_Function = TypeVar('_Function', bound=Callable[..., Any])


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
  # An attribute and no wrapper, so that its name, signature and source stay.
  setattr(function, BATCHED_MARK, True)
  return function


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

  Raises:
    ValueError: The name is empty, the function cannot be called, `where` is
      neither, or a number is not finite.
  """

  name: str
  function: Callable[..., Any]
  weight: float = 1.0
  where: str = 'here'
  failed: float | None = None

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
  if ':' in name:
    return import_by_name.imported(name, f'The reward {name!r}')
  if name in _JUDGES:
    return import_by_name.imported(_JUDGES[name], f'The reward {name!r}')
  builtin = {key: getattr(verifiers, key) for key in verifiers.__all__}
  builtin |= _JUDGES
  if name not in builtin:
    raise ValueError(
      f'There is no reward {name!r}{import_by_name.nearest(name, builtin)}; '
      f"pass one of {sorted(builtin)}, or 'module:function' for one of your "
      'own.'
    )
  return builtin[name]
