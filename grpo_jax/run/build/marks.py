"""Marks: what stands in a config for an object that was given in Python.

A config is plain text: it names rewards, data and a method. `grpo_jax.train`
takes the objects themselves too. In the config of such a run a *mark* stands
where a name would be, such as `'<reward brevity given in Python>'`, and a
`Given` holds the object for each mark. `build.py` looks a name up there first.

The config with its marks is still text. It is saved and compared like any
other, so a workdir says what its run was given; `given.json` beside it has a
record of each object. This module compares them. `given.py` makes the marks.
"""

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import NamedTuple

from grpo_jax import config as config_lib
from grpo_jax.config import Config

# The arguments of `grpo_jax.train` that take objects, and the field of the
# config that each replaces.
FIELDS = {
  'rewards': 'rewards',
  'prompts': 'data.train',
  'heldout': 'data.heldout',
  'demonstrations': 'warm_up.demonstrations',
  'method': 'learner.method',
  'tokenizer': 'data.tokenizer',
  'model': 'model.path',
}
_END = ' given in Python>'  # tells a mark from a name


class Given(NamedTuple):
  """The objects of a run by their marks, and what is recorded of each."""

  objects: Mapping[str, Any] = {}
  records: Mapping[str, dict[str, Any]] = {}  # see `provenance.py`


NOTHING = Given()


def mark(what: str) -> str:
  """The mark for 'reward brevity', say."""
  return f'<{what}{_END}'


def _unmarked(mark: str) -> str:
  """What a mark stands for: 'reward brevity'."""
  return mark[1 : -len(_END)]


def in_config(config: Config | Mapping[str, Any]) -> dict[str, list[str]]:
  """The marks in a config, or in one as JSON has it, by argument."""
  if isinstance(config, Config):
    config = dataclasses.asdict(config)
  values = config_lib.flat(config)
  found = {}
  for argument, field in FIELDS.items():
    value = values.get(field)
    names = [value]
    if argument == 'rewards':
      names = [reward['name'] for reward in value or ()]
    # Without a warm-up nothing reads the demonstrations.
    elif argument == 'demonstrations' and not values.get('warm_up.steps'):
      names = []
    names = [name for name in names if is_mark(str(name))]
    if names:
      found[argument] = names
  return found


def require(
  config: Config,
  given: Given,
  arguments: Collection[str],
  purpose: str,
  call: str,
) -> None:
  """Raises a ValueError if a mark of the config has no object.

  Args:
    config: May be that of an earlier start.
    given: What this start has.
    arguments: What is needed for the purpose.
    purpose: How the message begins, such as 'Training this run'.
    call: The call that takes the missing objects, with {} in their place.
  """
  missing = {
    argument: names
    for argument, names in in_config(config).items()
    if argument in arguments and not set(names) <= set(given.objects)
  }
  if missing:
    raise ValueError(
      f'{purpose} needs again what it was given in Python: '
      f'{_listed(missing)}; call {call.format(_in_call(missing))}.'
    )


def refuse_without(
  directory: Any, earlier: Mapping[str, Any], config: Config
) -> None:
  """Raises a ValueError if a start is not given what its run was given.

  Args:
    directory: The workdir.
    earlier: The config of the run in it, as JSON has it.
    config: Of this start.
  """
  now = in_config(config)
  missing = {
    argument: names
    for argument, names in in_config(earlier).items()
    if argument not in now
  }
  if missing:
    call = f'grpo_jax.train(config, workdir, {_in_call(missing)})'
    raise ValueError(
      f'The run in {directory} was given {_listed(missing)} in Python, and '
      f'this start was not; give the same with {call}, or give another workdir.'
    )


def is_mark(name: str) -> bool:
  """Whether a name in a config stands for an object given in Python."""
  return name.endswith(_END)


def field_of(mark: str, config: Config) -> str | None:
  """The field of the config that the mark stands in, or None if in none."""
  for argument, names in in_config(config).items():
    if mark in names:
      return FIELDS[argument]
  return None


def refuse_changed(
  directory: Any, mark: str, recorded: Mapping[str, Any], given: Given
) -> None:
  """Raises a ValueError if an object is no longer what the run was given.

  Args:
    directory: The workdir.
    mark: What the object stands for.
    recorded: What `given.json` in the workdir has of it.
    given: Of this start.
  """
  # An object that this start lacks is no change; `require` asks for it where it
  # is needed.
  record = given.records.get(mark, recorded)
  before, now = recorded.get('sha256'), record.get('sha256')
  if before and now and before != now:
    raise ValueError(
      f'The {_unmarked(mark)} is not the one that the run in {directory} was '
      f'given: in given.json, which has its record, the SHA-256 begins with '
      f'{before[:8]}, and now with {now[:8]}; give the same, or another '
      'workdir. (If you know that the change does not matter, delete '
      'given.json.)'
    )


def _listed(marks_of: Mapping[str, list[str]]) -> str:
  """'rewards (brevity, lambda) and prompts (list of 12 prompts)'."""
  parts = []
  for argument, marks in marks_of.items():
    names = [_unmarked(mark) for mark in marks]
    for kind in ('method ', 'model ', 'reward '):
      names = [name.removeprefix(kind) for name in names]
    parts.append(f'{argument} ({", ".join(names)})')
  *first, last = parts
  return f'{", ".join(first)} and {last}' if first else last


def _in_call(arguments: Collection[str]) -> str:
  """'rewards=[...], prompts=...'."""
  return ', '.join(
    f'{name}=[...]' if name == 'rewards' else f'{name}=...'
    for name in arguments
  )
