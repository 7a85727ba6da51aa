"""What a run was given in Python in the place of names.

A config is plain text: it names rewards, data and a method. `grpo_jax.train`
takes the objects themselves too; `placing.py` checks them, and `build.py` uses
them instead of the names. Where a name would be, the config of such a run says
what stood there, as `'<reward brevity given in Python>'`. Nothing is found by
these words: they are saved and compared like any other, so a workdir says what
its run was given, and `given.json` beside it has a record of each object. This
module compares both with what the next start brings.
"""

from collections.abc import Collection
from collections.abc import Iterable
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
_END = ' given in Python>'  # tells the words for an object from a name


class Objects(NamedTuple):
  """The objects of a run; None where a name stands in the config."""

  rewards: tuple[Any, ...] = ()  # one for each of the config, or none at all
  prompts: Any = None
  heldout: Any = None
  demonstrations: Any = None
  method: Any = None
  tokenizer: Any = None
  model: Any = None
  records: Mapping[str, dict[str, Any]] = {}  # by words; see `provenance.py`


NOTHING = Objects()


def words(what: str) -> str:
  """What a config says in the place of 'reward brevity'."""
  return f'<{what}{_END}'


def is_object(name: str) -> bool:
  """Whether a config says there that an object stood in its place."""
  return name.endswith(_END)


def standing(config: Config | Mapping[str, Any]) -> dict[str, str]:
  """The words for objects in a config, or in its JSON; the argument of each."""
  if isinstance(config, Config):
    config = dataclasses.asdict(config)
  values, found = config_lib.flat(config), {}
  for argument, field in FIELDS.items():
    names = [values.get(field)]
    if argument == 'rewards':
      names = [reward['name'] for reward in values.get(field) or ()]
    # Without a warm-up nothing reads the demonstrations.
    elif argument == 'demonstrations' and not values.get('warm_up.steps'):
      names = []
    found |= {name: argument for name in names if is_object(str(name))}
  return found


def require(
  config: Config,
  objects: Objects,
  arguments: Collection[str],
  purpose: str,
  call: str,
) -> None:
  """Raises a ValueError if an object that a config speaks of is missing.

  Args:
    config: May be that of an earlier start.
    objects: What this start has.
    arguments: What is needed for the purpose.
    purpose: How the message begins, such as 'Training this run'.
    call: The call that takes the missing objects, with {} in their place.
  """
  missing = {
    name: argument
    for name, argument in standing(config).items()
    if argument in arguments and name not in objects.records
  }
  if missing:
    raise ValueError(
      f'{purpose} needs again what it was given in Python: '
      f'{_listed(missing)}; call {call.format(_in_call(missing.values()))}.'
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
  now = {*standing(config).values()}
  missing = {
    name: argument
    for name, argument in standing(earlier).items()
    if argument not in now
  }
  if missing:
    call = f'grpo_jax.train(config, workdir, {_in_call(missing.values())})'
    raise ValueError(
      f'The run in {directory} was given {_listed(missing)} in Python, and '
      f'this start was not; give the same with {call}, or give another workdir.'
    )


def refuse_changed(
  directory: Any, name: str, recorded: Mapping[str, Any], objects: Objects
) -> None:
  """Raises a ValueError if an object is no longer what the run was given.

  Args:
    directory: The workdir.
    name: The words for the object in the config.
    recorded: What `given.json` in the workdir has of it.
    objects: Of this start.
  """
  # An object that this start lacks is no change; `require` asks for it where it
  # is needed.
  record = objects.records.get(name, recorded)
  before, now = recorded.get('sha256'), record.get('sha256')
  if before and now and before != now:
    raise ValueError(
      f'The {_what(name)} is not the one that the run in {directory} was '
      f'given: in given.json, which has its record, the SHA-256 begins with '
      f'{before[:8]}, and now with {now[:8]}; give the same, or another '
      'workdir. (If you know that the change does not matter, delete '
      'given.json.)'
    )


def _what(name: str) -> str:
  """What stood in the place of these words: 'reward brevity'."""
  return name[1 : -len(_END)]


def _listed(missing: Mapping[str, str]) -> str:
  """'rewards (brevity, lambda) and prompts (list of 12 prompts)'."""
  parts = []
  for argument in dict.fromkeys(missing.values()):
    names = [_what(name) for name in missing if missing[name] == argument]
    for kind in ('method ', 'model ', 'reward '):
      names = [name.removeprefix(kind) for name in names]
    parts.append(f'{argument} ({", ".join(names)})')
  *first, last = parts
  return f'{", ".join(first)} and {last}' if first else last


def _in_call(arguments: Iterable[str]) -> str:
  """'rewards=[...], prompts=...'."""
  return ', '.join(
    f'{name}=[...]' if name == 'rewards' else f'{name}=...'
    for name in dict.fromkeys(arguments)
  )
