"""What may change of a config when a run goes on, and what may not."""

from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import functools
import re
import typing
from typing import Any

from grpo_jax.config.fields import ALLOWED
from grpo_jax.config.fields import FIXED
from grpo_jax.config.fields import FREE
from grpo_jax.config.fields import Config
from grpo_jax.config.importing import nearest

FLAG = '--allow_changed'


@functools.cache
def kinds() -> dict[str, str]:
  """`FREE`, `ALLOWED` or `FIXED` for each field, as it is in its metadata.

  >>> kinds()['log.samples'], kinds()['rewards.weight'], kinds()['seed']
  ('free', 'allowed', 'fixed')
  """
  return dict(_kinds(Config, ''))


def _kinds(kind: Any, path: str) -> Iterator[tuple[str, str]]:
  hints = typing.get_type_hints(kind)
  for one in dataclasses.fields(kind):
    name, hint = f'{path}{one.name}', hints[one.name]
    if dataclasses.is_dataclass(hint):
      yield from _kinds(hint, f'{name}.')
      continue
    yield name, one.metadata['change']
    # The items of a tuple, as in `tuple[Reward, ...]` or in a union with it.
    inner = typing.get_args(hint)
    inner += tuple(x for part in inner for x in typing.get_args(part))
    for item in filter(dataclasses.is_dataclass, inner):
      yield from _kinds(item, f'{name}.')


def kind_of(name: str, config: Config) -> str:
  """Whether a field may change when a run goes on.

  Args:
    name: As in `rewards[0].weight`.
    config: Of the run. Its `steps` are free while its learning rate is the same
      in all of them.
  """
  if name == 'steps' and config.optim.decay == 'constant':
    return FREE
  return kinds().get(_without_places(name), FIXED)


def is_free(name: str, config: Config) -> bool:
  """Whether the field `name` may change when a run goes on, unasked."""
  return kind_of(name, config) == FREE


def is_allowed(name: str, allowed: Iterable[str]) -> bool:
  """Whether a field is among those that a start says may have changed."""
  return _without_places(name) in map(_without_places, allowed)


def check_allowed(names: Iterable[str]) -> tuple[str, ...]:
  """The fields that a start says may have changed, if they ever may.

  Args:
    names: As in 'optim.lr'; of all rewards 'rewards.weight'.

  Raises:
    ValueError: One of them is no field, or is fixed for as long as a run lasts.
  """
  names = tuple(names)
  may = [name for name, kind in kinds().items() if kind == ALLOWED]
  for name in names:
    kind = kinds().get(_without_places(name))
    if kind is None:
      near = nearest(name, kinds())
      inside = [x for x in kinds() if x.startswith(f'{name}.')]
      what = 'is a group' if inside else 'is no field of the config'
      raise ValueError(
        f'{FLAG} names {name!r}, which {what}{near}; name fields one by one, '
        f'of {", ".join(may)}.'
      )
    if kind == FIXED:
      raise ValueError(
        f'{FLAG} names {name!r}, which stays as it is for as long as a run '
        'lasts, because what the run has done depends on it; begin another run '
        'with it, in another workdir, from these weights if you like '
        f'(config.model.path names a workdir too). {FLAG} takes '
        f'{", ".join(may)}.'
      )
  return names


def _without_places(name: str) -> str:
  """'rewards.weight' for 'rewards[0].weight' and for 'rewards[].weight'."""
  return re.sub(r'\[\d*\]', '', name)
