"""Reads what was typed: a command, its flags, and fields of the config."""

import ast
from collections.abc import Sequence
import dataclasses
import os
import sys
import types
import typing
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax.commands import options
from grpo_jax.commands import printing
from grpo_jax.commands import table
from grpo_jax.config import Config
from grpo_jax.config import dataclass_from_dict
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.config.from_dict import converted
from grpo_jax.config.load import load_config
from grpo_jax.run.keep import records

_IN_BUCKETS = 'train', 'eval', 'sample', 'doctor', 'report'
_WORDS = {
  **{'true': True, 'false': False, 'none': None},
  **{f'{s}{x}': float(s + x) for s in ('', '+', '-') for x in ('inf', 'nan')},
}
# What is chosen by its name, and its arguments in a config.
_OWN_ARGUMENTS = (
  ('learner', 'method', 'method_kwargs', 'method'),
  ('optim', 'name', 'kwargs', 'optimizer'),
)
_BOOLS = {
  **dict.fromkeys(('true', 't', '1'), True),
  **dict.fromkeys(('false', 'f', '0'), False),
}


class Arguments(types.SimpleNamespace):
  """What was typed, read: each flag of the command is an attribute.

  Besides there are `command`, its name; `words`, all that follows it, in one
  form; and `config` is a `Config`, or None where the command was given none.
  """


def read(typed: Sequence[str]) -> Arguments:
  """Reads a command line.

  `-name value` and the like are `--name=value`. Without `--config`, the config
  is that of the run in the workdir.

  Args:
    typed: The command and what follows it.

  Raises:
    ValueError: Something cannot be read, is not known to the command, or is
      missing; or the config cannot be used.
    OSError: A file cannot be read.
  """
  name = typed[0] if typed and not typed[0].startswith('-') else ''
  if name not in table.COMMANDS:
    raise ValueError(
      f'got {name!r}; the commands are: {", ".join(table.COMMANDS)} '
      '(grpo-jax --help tells more).'
    )
  command = table.COMMANDS[name]
  words = _with_names(_joined(typed[1:], command.flags), command.takes)
  flags = _flags_of_study(words) if name == 'study' else command.flags
  _refuse_unread(name, words, flags)
  values = {flag: table.FLAGS[flag].default for flag in command.flags}
  fields = {}
  for word in words:
    flag, _, text = word.removeprefix('--').partition('=')
    if flag.startswith('config.'):
      fields[flag.removeprefix('config.')] = text
    elif table.FLAGS[flag].kind == table.REPEATED:
      values[flag] = [*values[flag], text]
    else:
      kind = table.FLAGS[flag].kind
      values[flag] = converted(value_of(text, kind), kind, f'--{flag}')
  _require(name, values, flags)
  if 'config' in flags:
    workdir, model = values.get('workdir'), values.get('source') or ''
    if is_run(model):
      workdir, model = model, ''
    values['config'] = _config(values['config'], workdir, fields, model)
  return Arguments(command=name, words=words, **values)


def _joined(typed: Sequence[str], flags: Sequence[str]) -> list[str]:
  """Every flag as `--name=value`; a switch is true, and false after `no`."""
  switches = {flag for flag in flags if table.FLAGS[flag].kind is bool}
  truths = switches | {
    f'config.{o.name}' for o in options.describe() if o.type == 'bool'
  }
  words, rest = [], list(typed)
  while rest:
    word = rest.pop(0)
    if word.startswith('-') and word != '-':
      name = word.lstrip('-')
      word = f'--{name}'
      if name.startswith('no') and name[2:] in truths:
        word = f'--{name[2:]}=false'
      elif name in switches:
        word += '=true'
      # A value may begin with one dash: a negative number, or `-` for standard
      # input.
      elif '=' not in name and rest and not rest[0].startswith('--'):
        word += f'={rest.pop(0)}'
      elif name in truths:
        word += '=true'
    words.append(word)
  return words


def _with_names(words: list[str], takes: Sequence[str]) -> list[str]:
  """Gives values that stand alone the names that they are taken for."""
  named = {word.partition('=')[0] for word in words}
  free = [name for name in takes if f'--{name.lstrip("?")}' not in named]
  found = []
  for word in words:
    if not word.startswith('-') and free:
      name = free[0] if free[0].startswith('*') else free.pop(0)
      word = f'--{name.lstrip("*?")}={word}'
    found.append(word)
  return found


def _flags_of_study(words: Sequence[str]) -> tuple[str, ...]:
  """The flags that the study of a command line reads."""
  from grpo_jax.lab import studies

  flags = table.COMMANDS['study'].flags
  names = [x.partition('=')[2] for x in words if x.startswith('--study=')]
  if not any(names):
    return flags
  is_experiment = studies.is_experiment(names[-1])
  others = table.TRAINING_FLAGS if is_experiment else table.EXPERIMENT_FLAGS
  return tuple(flag for flag in flags if flag not in others)


def _refuse_unread(
  command: str, words: Sequence[str], flags: Sequence[str]
) -> None:
  """Raises a ValueError about words that a command does not read."""
  has_config = 'config' in flags
  known = {f'--{name}' for name in flags}
  shown = [word.partition('=')[0] for word in words]
  unread = [
    name
    for name in shown
    if name not in known and not (has_config and name.startswith('--config.'))
  ]
  if unread:
    near = importing.nearest(unread[0], known)
    field = options.suggest(unread[0])
    if not near and has_config and field and unread[0].startswith('--'):
      near = f' (did you mean --config.{field}?)'
    own = ', '.join(f'--{name}' for name in flags)
    raise ValueError(
      f'{command} got {" ".join(unread)}, which it does not read{near}; its '
      f'flags are {own}{", --config.FIELD" if has_config else ""}.'
    )
  for word in words:
    if '=' not in word:
      raise ValueError(f'{word} has no value; give one, as in {word}=VALUE.')


def _require(
  command: str, values: dict[str, Any], flags: Sequence[str]
) -> None:
  """Raises if the command lacks a flag that it needs, or has one in vain."""
  workdir = values.get('workdir') or ''
  if '://' in workdir and command not in _IN_BUCKETS:
    raise ValueError(
      f'--workdir={workdir} is in a bucket, where {command} cannot write; give '
      'a directory.'
    )
  examples = f'As in:\n{options.EXAMPLES}'
  for wanted in table.COMMANDS[command].takes:
    if not wanted.startswith(('*', '?')) and not values[wanted]:
      raise ValueError(f'{command} needs a {wanted}. {examples}')
  if command == 'study' and 'out' in flags and not values['out']:
    raise ValueError(
      f'study {values["study"]} needs --out, a folder for its tables and '
      'figures, as in --out=claims.'
    )
  if {'workdir', 'config'} <= {*flags} and not workdir:
    raise ValueError(
      f'{command} needs --workdir, and --config for a new run. {examples}'
    )


def _config(
  file: str | None,
  workdir: str | None,
  fields: dict[str, str],
  model: str = '',
) -> Config | None:
  """The config of a file, of a run or for a model, with what was typed.

  None if there is neither.
  """
  if file is None and not workdir and not model:
    if fields:
      raise ValueError(
        f'--config.{min(fields)} changes a config, but there is none; give '
        '--config, as in --config=configs/arithmetic.py.'
      )
    return None
  try:
    if file is not None:
      found = load_config(file)
    elif workdir:
      found = records.get_config(str(workdir))
    else:
      found = _of_model(model)
  except (ValueError, OSError):
    raise
  except Exception as error:  # a config file may raise anything
    raise ValueError(
      f'The config file cannot be used ({plain_text.named(error)}); correct it.'
    ) from error
  if not hasattr(found, 'to_dict'):
    raise ValueError(
      f'get_config returned {found!r:.80}, which is no ConfigDict; return '
      'grpo_jax.config.default() with your changes.'
    )
  tree, warning = with_fields(found.to_dict(), fields)
  if warning:
    printing.say(f'warning: {warning}', file=sys.stderr)
  return dataclass_from_dict(Config, tree, 'config')


def is_run(path: str) -> bool:
  """Whether a path is the workdir of a run."""
  return bool(path) and (
    '://' in path or os.path.exists(os.path.join(path, 'versions.json'))
  )


def _of_model(path: str) -> Any:
  """A config for asking a chat model."""
  found: Any = config_lib.default()
  found.model.path, found.data.tokenizer = path, ''
  found.data.chat, found.sampler.max_tokens = True, 512
  return found


def with_fields(
  tree: dict[str, Any], fields: dict[str, str]
) -> tuple[dict[str, Any], str]:
  """A config with fields as they were typed.

  Arguments that the config has for its own method, or its own optimizer, are
  dropped if another one is chosen.

  Args:
    tree: Nested dicts.
    fields: Texts by name, as in `--config.NAME=TEXT`.

  Returns:
    Nested dicts, and a sentence about arguments that were dropped, or ''.

  Raises:
    ValueError: There is no such field, or no such place in one; the nearest
      field is named.
  """
  said = []
  for group, chosen, arguments, noun in _OWN_ARGUMENTS:
    part = tree.get(group, {})
    before, kwargs = part.get(chosen), part.get(arguments)
    after = fields.get(f'{group}.{chosen}', before)
    if not kwargs or before in (None, after):
      continue
    tree = {**tree, group: {**part, arguments: {}}}
    if f'{group}.{arguments}' not in fields:
      dropped = ', '.join(f'{name}={value}' for name, value in kwargs.items())
      said.append(
        f'the config has arguments for the {noun} {before}, which are left out '
        f'({dropped}), because the command line chooses {after}; give its own '
        f'with --config.{group}.{arguments}.NAME=VALUE.'
      )
  for name, text in fields.items():
    try:
      tree = _changed(tree, Config, name.replace('[', '.[').split('.'), text)
    except IndexError as error:
      field, _, _ = name.partition('[')
      raise ValueError(
        f'config.{field} has no such place; give all of them at once, as in '
        f"--config.{field}=\"({{'name': 'exact_match', 'weight': 1.0}},)\"."
      ) from error
    except KeyError as error:
      near = options.suggest(name)
      advice = f'the nearest is config.{near}' if near else 'see --help'
      raise ValueError(
        f'config.{name} is no field of the config; {advice}.'
      ) from error
    except TypeError as error:
      group = name.rpartition('.')[0]
      raise ValueError(
        f'config.{name} cannot be set, because {error}; give all of it at '
        f'once, as in --config.{group}="{{...}}".'
      ) from error
  return tree, ' '.join(said)


def _changed(value: Any, kind: Any, path: Sequence[str], text: str) -> Any:
  """A value of some type with what was typed at a path in it.

  Raises:
    KeyError: The type has no such part.
    IndexError: The value has no such place.
    TypeError: The value has no parts at all.
  """
  if not path:
    return value_of(text, kind, value)
  (first, *rest), value = path, {} if value is None else value
  if first.startswith('['):
    several = [x for x in (kind, *typing.get_args(kind)) if _is(x, tuple)]
    if not several or not first[1:-1].isdecimal():
      raise KeyError(first)
    inner, place = typing.get_args(several[0])[0], int(first[1:-1])
    items = list(value)
    items[place] = _changed(items[place], inner, rest, text)
    return tuple(items)
  if dataclasses.is_dataclass(kind):
    inner = typing.get_type_hints(kind)[first]
  elif kind is Any or _is(kind, dict):
    inner = Any
  else:
    raise KeyError(first)
  if not isinstance(value, dict):
    raise TypeError(f'{value!r:.60} is no group of fields')
  return {**value, first: _changed(value.get(first), inner, rest, text)}


def _is(kind: Any, origin: Any) -> bool:
  return typing.get_origin(kind) is origin


def value_of(text: str, kind: Any, before: Any = None) -> Any:
  """A text as a value of an annotated type, or as itself if it is none.

  Args:
    text: What was typed.
    kind: The type.
    before: What stood there; its type is kept where `kind` is `Any`.

  >>> value_of('8', tuple[int, ...]), value_of('a,b', tuple[str, ...])
  ((8,), ('a', 'b'))
  >>> value_of('.2', Any), value_of('1', Any, 0.5), value_of('1', Any, 'x')
  (0.2, 1.0, '1')
  """
  if kind is str or (kind is Any and isinstance(before, str)):
    return text
  try:
    value = ast.literal_eval(text)
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    words = _WORDS if kind in (Any, float) else {}
    value = words.get(text.lower(), text)
  if kind is bool:
    return _BOOLS.get(text.lower(), text)
  if _is(kind, types.UnionType):  # a text, or a tuple
    return value if isinstance(value, list | tuple) else text
  if _is(kind, tuple) and not isinstance(value, list | tuple):
    if value is not text:
      return (value,)
    if not text.startswith(('(', '[', '{')):
      inner = typing.get_args(kind)[0]
      return tuple(value_of(x.strip(), inner) for x in text.split(',') if x)
  if isinstance(before, float) and type(value) is int:
    return float(value)
  return value
