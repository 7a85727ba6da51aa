"""What a method needs to know of the run that it trains in.

A method is a function of hyper-parameters. Some of these are already settled
elsewhere in a run, for example the weights of the rewards. `takes_from_run`
marks such an argument, so that a config does not have to say it twice, and
`arguments_from_run` fills it in.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import inspect
import math
import numbers
from typing import Any
from typing import TypeVar

FACTS = (
  'adam_b1', 'adam_b2', 'max_tokens', 'reward_weights', 'right_reward',
  'soft_tokens', 'updates_per_rollout',
)  # fmt: skip

_Make = TypeVar('_Make', bound=Callable[..., Any])


def takes_from_run(**arguments: str) -> Callable[[_Make], _Make]:
  """Marks the arguments of a method that a run may fill in.

  The facts of a run are

  - `reward_weights`: tuple of floats, the weight of each reward function, in
    the order of the last axis of `Batch.reward_parts`;
  - `updates_per_rollout`: int, optimizer steps on one rollout;
  - `max_tokens`: int, the tokens that a completion may have;
  - `soft_tokens`: int, a fifth of these (DAPO's 4096 of 20480), at least 1, or
    of the `max_tokens` that the user gives;
  - `right_reward`: float, the least reward of a right completion: that of its
    first reward function, times the weight of that;
  - `adam_b1`, `adam_b2`: floats, the decays of Adam's first and second moment.

  The decorator does nothing but set the attribute `from_run` of the function, a
  dict from arguments to facts. Called by hand, the method keeps its defaults. A
  method of your own is marked in the same way.

  Args:
    **arguments: The name of a fact for each argument that is marked.

  Returns:
    A decorator that returns the function it is given.

  Raises:
    ValueError: When the decorator is applied: a fact is unknown, or the
      function has no such argument.

  >>> @takes_from_run(weights='reward_weights')
  ... def first_reward_only(weights=(1.0,)):
  ...   return weights[0]
  >>> first_reward_only.from_run
  {'weights': 'reward_weights'}
  """

  def mark(make: _Make) -> _Make:
    name = getattr(make, '__qualname__', repr(make))
    unknown = sorted(set(arguments.values()) - set(FACTS))
    if unknown:
      raise ValueError(
        f'{name} takes {_listed(unknown)} from the run, which knows no such '
        f'fact; take one of {_listed(FACTS)}.'
      )
    signature = inspect.signature(make)
    # Binding fails for a name that the function does not have. The values are
    # not used.
    try:
      signature.bind_partial(**arguments)
    except TypeError as error:
      raise ValueError(
        f'{name} marks arguments that it does not have ({error}); mark some of '
        f'{_listed(signature.parameters)}.'
      ) from error
    # Not `make.from_run = ...`, which type checkers refuse for a function.
    vars(make)['from_run'] = dict(arguments)
    return make

  return mark


def arguments_from_run(
  make: Callable[..., Any], facts: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
  """The arguments for a method: those that are given, and those from the run.

  Args:
    make: The method, marked by `takes_from_run` or not, or a
      `functools.partial` of it; what that gives, the user gives.
    facts: The facts of the run, by name; the method need not take all.
    kwargs: What the user gives. It wins over what the run says.

  Returns:
    The keyword arguments to call the method with.

  Raises:
    ValueError: The method takes a fact that is neither in `facts` nor replaced
      in `kwargs`; or it takes both limits of tokens, and with what is given no
      completion is long enough for it to act.

  >>> @takes_from_run(b1='adam_b1', b2='adam_b2')
  ... def method(b1=0.9, b2=0.999, low=0.2): ...
  >>> arguments_from_run(method, {'adam_b1': 0.8, 'adam_b2': 0.99}, {'b2': 0.5})
  {'b1': 0.8, 'b2': 0.5}
  """
  marked = _marked(make)
  bound = {**getattr(make, 'keywords', {}), **kwargs}
  taken = {a: fact for a, fact in marked.items() if a not in bound}
  by_fact = {fact: a for a, fact in marked.items()}
  most: Any = bound.get(by_fact.get('max_tokens'))
  if _is_number(most):
    facts = {**facts, 'soft_tokens': max(1, int(most // 5))}
  missing = sorted(set(taken.values()) - set(facts))
  if missing:
    # Its own default would do, but then a run would train with another number
    # than the one it is configured with.
    name = getattr(make, '__qualname__', repr(make))
    raise ValueError(
      f'{name} takes {_listed(missing)} from the run, but the facts of this '
      f'run are {_listed(facts) or "none"}; add {_listed(missing)} to them, or '
      'give the arguments yourself.'
    )
  filled = {**{a: facts[fact] for a, fact in taken.items()}, **kwargs}
  _check_limits(marked, facts, {**bound, **filled})
  return filled


def _marked(make) -> dict[str, str]:
  """The marked arguments that a caller can still give, and their facts."""
  function = make
  while isinstance(function, functools.partial):
    function = function.func
  marks = getattr(function, 'from_run', {})
  if function is make:
    return marks
  # Without those that a partial function has filled by their position.
  try:
    left = inspect.signature(make).parameters
  except ValueError as error:
    name = getattr(function, '__qualname__', repr(function))
    raise ValueError(
      f'functools.partial gives {name}{inspect.signature(function)} arguments '
      f'that it does not have: {_listed(make.args)} and {make.keywords}; '
      'correct them.'
    ) from error
  return {a: fact for a, fact in marks.items() if a in left}


def _check_limits(marked, facts, filled) -> None:
  """Refuses a ramp of lengths that begins where completions end."""
  by_fact = {fact: a for a, fact in marked.items()}
  if 'max_tokens' not in facts or not {'max_tokens', 'soft_tokens'} <= {
    *by_fact
  }:
    return
  names = [by_fact['max_tokens'], by_fact['soft_tokens']]
  most, soft = (filled[name] for name in names)
  if not (_is_number(most) and _is_number(soft)):
    return  # the method says what it wants
  if most - soft >= facts['max_tokens']:
    raise ValueError(
      f'{names[0]}={most} and {names[1]}={soft} begin to act after '
      f'{most - soft} tokens, but completions of this run have at most '
      f'{facts["max_tokens"]} (sampler.max_tokens); leave both out, to take '
      'them from the run, or give smaller ones.'
    )


def _is_number(x) -> bool:
  return isinstance(x, numbers.Real) and math.isfinite(x)


def _listed(names) -> str:
  return ', '.join(map(repr, names))
