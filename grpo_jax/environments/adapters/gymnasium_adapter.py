"""Environments of Gymnasium, whose actions are read from texts."""

import functools
import json
import re
from typing import Any

from grpo_jax.config import importing
from grpo_jax.environments import adapters
from grpo_jax.environments.adapters import choices
from grpo_jax.environments.base import Action
from grpo_jax.environments.base import Step


def make(name: str) -> Any:
  """What makes the environment with an id of Gymnasium."""
  return functools.partial(Gymnasium, name)


class Gymnasium:
  """A Gymnasium environment.

  An observation is shown as text: what `render` gives with
  `render_mode='ansi'`, else the value. An action is the last name of `actions`,
  or the last whole number, of a text; of a continuous space the last list of
  numbers in brackets; of a space of texts the whole text.

  Args:
    name: An id, such as 'FrozenLake-v1'.
    task: What the policy is told at the start.
    actions: Names of the actions of a discrete space, in their order.
    invalid_reward: Of a turn that has no action in it.
    most_invalid: So many of them end the episode.
    **kwargs: For `gymnasium.make`.

  Raises:
    ValueError: The package is missing, or it has no such environment.
  """

  def __init__(
    self,
    name: str,
    task: str = '',
    actions: tuple[str, ...] = (),
    invalid_reward: float = 0.0,
    most_invalid: int = 3,
    **kwargs: Any,
  ):
    gymnasium = importing.package('gymnasium', 'gymnasium')
    self._env = adapters.made('Gymnasium', gymnasium.make, name, **kwargs)
    space = self._env.action_space
    self._kind = type(space).__name__
    self._names = list(actions)
    count = getattr(space, 'n', None)
    if self._names and len(self._names) != count:
      self._env.close()
      raise ValueError(
        f'{len(self._names)} names were given for the {count} actions of'
        f' {name!r}; name each action.'
      )
    self._start = int(getattr(space, 'start', 0))
    self._space, self._task = space, task
    self._invalid_reward, self._most_invalid = invalid_reward, most_invalid
    self._invalid = 0

  def reset(self, example: Any, seed: int) -> str:
    """Begins anew by a seed."""
    observation, _ = self._env.reset(seed=seed % 2**31)
    self._invalid = 0
    parts = [self._task, self._how(), self._shown(observation)]
    return '\n\n'.join(filter(None, parts))

  def step(self, action: Action) -> Step:
    """Takes the action that a text says."""
    read = self._read(action.text)
    if read is None:
      self._invalid += 1
      return Step(
        f'That has no action in it. {self._how()}',
        self._invalid_reward,
        self._invalid >= self._most_invalid,
        {'invalid': True},
      )
    seen, reward, ended, cut, _ = self._env.step(read)
    done = bool(ended or cut)
    return Step(self._shown(seen), float(reward), done, {'action': str(read)})

  def close(self) -> None:
    """Closes the environment of Gymnasium."""
    self._env.close()

  def _how(self) -> str:
    if self._names:
      return f'Actions: {", ".join(self._names)}. Answer with one of them.'
    if self._kind == 'Discrete':
      last = self._start + int(self._space.n) - 1
      return f'Answer with an action, a number from {self._start} to {last}.'
    if self._kind == 'Text':
      return ''
    return (
      f'Answer with a list of numbers of shape {self._space.shape}, such as'
      ' [0.5].'
    )

  def _read(self, text: str) -> Any:
    if self._kind == 'Text':
      found = text
    elif self._names:
      place = choices.chosen(text, self._names)
      found = None if place is None else self._start + place
    elif self._kind == 'Discrete':
      found = choices.last_number(text)
    else:
      found = _array(text, self._space)
    if found is None or not self._space.contains(found):
      return None
    return found

  def _shown(self, observation: Any) -> str:
    if self._env.render_mode == 'ansi':
      return str(self._env.render())
    return _text(observation)


def _array(text: str, space: Any) -> Any:
  """The last list of numbers in a text, as an array of a space."""
  import numpy as np

  for written in reversed(re.findall(r'\[[^\[\]]*\]', text[-10_000:])):
    try:
      found = np.asarray(json.loads(written), dtype=space.dtype)
      return found.reshape(space.shape)
    except (ValueError, TypeError, OverflowError, RecursionError):
      continue
  return None


def _text(value: Any) -> str:
  """An observation as a text."""
  if isinstance(value, dict):
    return '\n'.join(f'{key}: {_text(one)}' for key, one in value.items())
  if isinstance(value, tuple):
    return ', '.join(map(_text, value))
  if getattr(value, 'ndim', 0):
    import numpy as np

    return np.array2string(value, precision=4, threshold=10_000)
  return str(value)
