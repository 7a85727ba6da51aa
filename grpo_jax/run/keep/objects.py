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
from collections.abc import Container
from collections.abc import Mapping
import operator
import re
from typing import Any
from typing import NamedTuple

from grpo_jax.config import Config

# The arguments of `grpo_jax.train` that take objects, and the field of the
# config that each replaces.
FIELDS = {
  'rewards': 'rewards',
  'prompts': 'data.train',
  'heldout': 'data.heldout',
  'demonstrations': 'warm_up.demonstrations',
  'method': 'learner.method',
  'fields': 'learner.fields',
  'tokenizer': 'data.tokenizer',
  'model': 'model.path',
  'environment': 'environment.name',
  'agent': 'agent.function',
}
_END = ' given in Python>'  # tells the words for an object from a name


class Objects(NamedTuple):
  """The objects of a run; None where a name stands in the config."""

  rewards: tuple[Any, ...] = ()  # one for each of the config, or none at all
  prompts: Any = None
  heldout: Any = None
  demonstrations: Any = None
  method: Any = None
  fields: Mapping[str, Any] = {}  # functions by the name of a batch's field
  tokenizer: Any = None
  model: Any = None
  environment: Any = None
  agent: Any = None
  records: Mapping[str, dict[str, Any]] = {}  # by words; see `placing.py`


NOTHING = Objects()


def words(what: str) -> str:
  """What a config says in the place of 'reward brevity'."""
  return f'<{what}{_END}'


def is_object(name: str) -> bool:
  """Whether a config says there that an object stood in its place."""
  return name.endswith(_END)


def standing(config: Config) -> dict[str, str]:
  """The words for objects in a config, and the argument of each."""
  found = {}
  for argument, field in FIELDS.items():
    value = operator.attrgetter(field)(config)
    names = [value]
    if field == 'rewards':
      names = [reward.name for reward in value]
    elif isinstance(value, dict):
      names = [*value.values()]
    # Without a warm-up nothing reads the demonstrations.
    if argument != 'demonstrations' or config.warm_up.steps:
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
  needed = {k: v for k, v in standing(config).items() if v in arguments}
  listed, given = _missing(needed, objects.records)
  if listed:
    raise ValueError(
      f'{purpose} needs again what it was given in Python: {listed}; call '
      f'{call.format(given)}.'
    )


def refuse_without(directory: Any, earlier: Config, config: Config) -> None:
  """Raises a ValueError if a start is not given what its run was given.

  Args:
    directory: The workdir.
    earlier: The config of the run in it.
    config: Of this start.
  """
  now, before = {*standing(config).values()}, standing(earlier)
  listed, given = _missing(before, {k for k, v in before.items() if v in now})
  if listed:
    raise ValueError(
      f'The run in {directory} was given {listed} in Python, and this start '
      f'was not; give the same with grpo_jax.train(config, workdir, {given}), '
      'or give another workdir.'
    )


def _missing(
  needed: Mapping[str, str], there: Container[str]
) -> tuple[str, str]:
  """What is not there, for a person and for a call; '' if all is.

  Args:
    needed: The argument of each object, by its words.
    there: Words.

  Returns:
    Such as 'rewards (brevity, lambda) and prompts (list of 12 prompts)', and
    'rewards=[...], prompts=...'.
  """
  found: dict[str, list[str]] = {}
  for name, argument in needed.items():
    if name not in there:
      short = re.sub(
        '^(agent|environment|field|method|model|reward) ', '', _what(name)
      )
      found.setdefault(argument, []).append(short)
  parts = [f'{name} ({", ".join(names)})' for name, names in found.items()]
  brackets = {'rewards': '[...]', 'fields': '{...}'}
  call = [f'{k}={brackets.get(k, "...")}' for k in found]
  listed = ' and '.join(filter(None, (', '.join(parts[:-1]), *parts[-1:])))
  return listed, ', '.join(call)


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
