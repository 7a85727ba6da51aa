"""Objects that a user gives in Python: checked, recorded, named in a config.

A name goes into the config as it is, and so does the name of a function of this
package: such a run needs no object to go on. See `objects.py` for the rest.

A config can name a function of a module, but not a lambda in a notebook. Such
an object is recorded instead: its name, its source where Python still has it,
and a SHA-256 that the next start compares, so that a run does not go on with
another reward by mistake. The hash of a function covers its source, its default
arguments and the values that it closes over. It does not cover what the
function calls or reads from its module, nor where that module lies: a run goes
on after a module has moved. A record therefore shows most changes, but not all.
"""

import ast
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import math
import sys
import textwrap
import tokenize
import types
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import losses
from grpo_jax import rewards as rewards_lib
from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.models import foreign
from grpo_jax.rewards import WeightedReward
from grpo_jax.run.keep.objects import FIELDS
from grpo_jax.run.keep.objects import Objects
from grpo_jax.run.keep.objects import words

Record = dict[str, Any]  # what JSON can hold

# Items of a data set that are hashed at most; a user's class may take a
# millisecond to return one.
_MOST_ITEMS = 1000

# Functions of these packages are identified by name. Their source changes from
# release to release, and an update must not end a run.
_BY_NAME = {'grpo_jax', 'jax', 'jaxlib', 'numpy', 'optax'}
_BY_NAME |= sys.stdlib_module_names - {'__main__'}

_EXAMPLE = {'prompt': '1+2=', 'answer': '3'}
_DATA_ADVICE = (
  'a list of dicts, or any object with __len__ and __getitem__ that returns '
  "dicts, or a name as in a config: 'arithmetic' or the path of a JSONL file"
)


def _is_data(value: Any) -> bool:
  # A dict has both too, but its keys are no positions.
  sized = hasattr(value, '__len__') and hasattr(value, '__getitem__')
  return sized and not isinstance(value, Mapping)


def _is_method(value: Any) -> bool:
  return isinstance(value, losses.LossTransform) or callable(value)


def _count(noun: str) -> Callable[[Any], str]:
  return lambda records: f'{type(records).__name__} of {len(records)} {noun}'


class _Kind(NamedTuple):
  """What an argument may be beside a name."""

  fits: Callable[[Any], bool]
  advice: str  # where to get one
  what: Callable[[Any], str]  # how it is called in the config


_KINDS = {
  'prompts': _Kind(_is_data, _DATA_ADVICE, _count('prompts')),
  'heldout': _Kind(_is_data, _DATA_ADVICE, _count('held-out prompts')),
  'demonstrations': _Kind(_is_data, _DATA_ADVICE, _count('demonstrations')),
  'method': _Kind(
    _is_method,
    'a LossTransform such as losses.methods.grpo(high=0.3), a function without '
    "arguments that returns one, or a name such as 'dapo'",
    lambda method: f'method {_short_name(method)}',
  ),
  'tokenizer': _Kind(
    lambda value: isinstance(value, data.Tokenizer),
    'a grpo_jax.data.Tokenizer, which character_tokenizer and '
    'Tokenizer.from_folder return, or a name as in config.data.tokenizer',
    lambda tokenizer: f'tokenizer of {tokenizer.vocab_size} tokens',
  ),
  'model': _Kind(
    lambda value: isinstance(value, foreign.Pretrained),
    'what grpo_jax.models.foreign.from_nnx(module) returns, or a name as in '
    'config.model.path',
    lambda own: f'model {own.model.name}',
  ),
  'environment': _Kind(
    lambda value: (
      callable(value)
      or isinstance(value, list | tuple)
      or hasattr(value, 'reset')
    ),
    'an async function (policy, example), a class with reset and step, a list '
    "of typed functions as tools, or a name such as 'my_lab.envs:Wordle'",
    lambda value: f'environment {_names(value)}',
  ),
  'agent': _Kind(
    callable,
    'a function (example, base_url, api_key), or a name such as '
    "'my_lab.agents:solve'",
    lambda value: f'agent {_short_name(value)}',
  ),
}


class _Placed(NamedTuple):
  """What stands in the config for an argument."""

  name: str  # the name that was given, or words for the object
  value: Any = None  # the object
  record: Record | None = None  # of the object


def place(
  config: Config, rewards: Any = None, fields: Any = None, **arguments: Any
) -> tuple[Config, Objects]:
  """The config with names, or words, for what a user gives; and the objects.

  Args:
    config: What the objects are put into.
    rewards: As `grpo_jax.train` takes them; None leaves the config as it is.
    fields: Likewise.
    **arguments: The same for `prompts`, `heldout`, `demonstrations`, `method`,
      `tokenizer`, `model`, `environment` and `agent`.

  Raises:
    ValueError: An argument is of the wrong kind.
  """
  arguments = {k: v for k, v in arguments.items() if v is not None}
  if {'environment', 'agent'} <= {*arguments}:
    raise ValueError(
      'environment and agent were both given, but one of them plays the '
      'episodes; give one.'
    )
  builtin = config.data.train == config.data.heldout == 'arithmetic'
  if 'prompts' in arguments and builtin:
    # Built-in sums would say nothing about the user's prompts.
    arguments.setdefault('heldout', '')
  found = {
    argument: _placed(argument, value, config.data.last_turn)
    for argument, value in arguments.items()
  }
  if 'model' in found:
    # The shape in the config belongs to the model that is replaced.
    config = dataclasses.replace(config, model=config_lib.Model())
  changes: dict[str, Any] = {
    FIELDS[argument]: one.name for argument, one in found.items()
  }
  if 'method' in found:  # and so do the arguments of the method
    changes['learner.method_kwargs'] = {}
  if 'agent' in found:
    changes['environment.name'] = 'agent'
  # Tools alone have no reward.
  plays = not isinstance(
    arguments.get('environment'), str | list | tuple | None
  )
  if plays and config.rewards == Config().rewards:
    changes['rewards'] = (config_lib.Reward('environment'),)
  judges = list(_rewards(rewards)) if rewards is not None else []
  if judges:
    changes['rewards'] = tuple(reward for _, reward in judges)
  filled = _fields(fields) if fields is not None else {}
  if fields is not None:
    changes['learner.fields'] = {k: one.name for k, one in filled.items()}
  every = *found.values(), *(one for one, _ in judges), *filled.values()
  objects = Objects(
    tuple(one.value for one, _ in judges),
    fields={k: one.value for k, one in filled.items() if one.value is not None},
    **{argument: one.value for argument, one in found.items()},
    records={one.name: one.record for one in every if one.record is not None},
  )
  return _with_fields(config, changes), objects


def _with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
  """The config with other values of fields such as 'data.train'."""
  groups: dict[str, dict[str, Any]] = {}
  for name, value in fields.items():
    group, _, field = name.rpartition('.')
    groups.setdefault(group, {})[field] = value
  changed = groups.pop('', {})
  for group, values in groups.items():
    changed[group] = dataclasses.replace(getattr(config, group), **values)
  return dataclasses.replace(config, **changed)  # all at once: it is checked


def _placed(argument: str, value: Any, last_turn: str) -> _Placed:
  """What stands in the config for one argument but the rewards."""
  kind = _KINDS[argument]
  if isinstance(value, str):
    return _Placed(value)
  if not kind.fits(value):
    raise ValueError(
      f'{argument}={value!r:.60} is of type {type(value).__name__}; give '
      f'{kind.advice}.'
    )
  record_value = record
  if kind.fits is _is_data:
    if argument == 'heldout' and not len(value):
      return _Placed('')
    _check_data(argument, value, last_turn)
    record_value = record_of_data
  elif argument == 'environment':
    record_value = record_of_environment
  elif argument == 'method':
    # By name where there is one: such a run needs no object to go on.
    name = _short_name(value)
    if name in losses.methods.__all__ and (
      getattr(losses.methods, name) is value
    ):
      return _Placed(name)
  is_made = isinstance(value, losses.LossTransform)
  stands = (lambda: value) if is_made else value
  return _Placed(words(kind.what(value)), stands, record_value(value))


def _check_data(argument: str, records: Any, last_turn: str) -> None:
  """Raises a ValueError if a run cannot use these records."""
  if not len(records):
    raise ValueError(f'{argument} is empty; give at least one record.')
  if len(records) >= sys.maxsize:  # what grain says of a repeated dataset
    raise ValueError(
      f'{argument} has no end; give finite data, which the run shuffles and '
      'repeats itself.'
    )
  needed = ['prompt', *(['answer'] if argument == 'demonstrations' else [])]
  # Not all records of a large data set, because reading one may take a while.
  for index in ends(len(records)):
    _check_record(f'{argument}[{index}]', records[index], needed, last_turn)


def _check_record(
  where: str, record: Any, needed: list[str], last_turn: str
) -> None:
  """Raises a ValueError if a record cannot be used.

  Args:
    where: How messages name the record.
    record: What the data set returned.
    needed: The fields that must be there.
    last_turn: `data.last_turn`, what becomes of an answer in a chat.
  """
  if not isinstance(record, Mapping):
    raise ValueError(
      f'{where} is {record!r:.60}, but a dict is needed, such as {_EXAMPLE}.'
    )
  if last_turn == 'answer' and 'prompt' in record:
    try:
      record = data.without_last_turn(record)
    except ValueError as error:
      raise ValueError(f'{where} cannot be used: {error}') from error
  for field in needed:
    if field not in record:
      raise ValueError(
        f'{where} has the fields {list(record)}, but the field {field!r} is '
        f'needed; give records such as {_EXAMPLE}.'
      )
  if problem := data.prompt_problem(record['prompt']):
    raise ValueError(
      f"{where}['prompt'] must be a text or a list of messages, but {problem}; "
      'correct the record.'
    )


def _rewards(items: Any) -> Iterator[tuple[_Placed, config_lib.Reward]]:
  """Each reward, a `WeightedReward` if it is an object; and in the config."""
  if not isinstance(items, list | tuple) or not items:
    raise ValueError(
      f'rewards={items!r:.60} is no list of rewards; give one or more in a '
      'list, as in rewards=[my_reward].'
    )
  names = set()
  for index, item in enumerate(items):
    where, name, more = f'rewards[{index}]', '', {}
    function, weight = item, 1.0
    if isinstance(item, WeightedReward):
      function, weight, name = item.function, item.weight, item.name
      more = _more(where, item)
    elif isinstance(item, list | tuple) and len(item) == 2:
      function, weight = item
    if not _is_reward(function, weight):
      raise ValueError(
        f'{where} is {item!r:.60}; give a function (prompt, completion, '
        'example) -> float, a pair (function, weight), a WeightedReward, or a '
        "name such as 'exact_match'."
      )
    if callable(function):
      judged = ('prompt', 'completion', 'example')
      _check_arguments(where, function, judged, more.get('kwargs', {}))
      # By name where there is one, as a config would have it.
      if not name and _is_builtin(function):
        function = function.__name__
    if isinstance(function, str):
      name, one = function, _Placed(function)
    else:
      short = _short_name(function)  # two lambdas, for example, have the same
      several = (f'{short}_{n}' for n in itertools.count(2))
      every = itertools.chain([name or short], several)
      name = name or next(one for one in every if one not in names)
      judge = WeightedReward(name, function)
      one = _Placed(words(f'reward {name}'), judge, record(function))
    if name in names:
      raise ValueError(
        f'{where} is a second reward with the name {name!r}; give it another, '
        'as in WeightedReward(name, function, weight).'
      )
    names.add(name)
    yield one, config_lib.Reward(one.name, float(weight), **more)


def _fields(functions: Any) -> dict[str, _Placed]:
  """What stands in the config for the function of each field of a batch."""
  if not isinstance(functions, Mapping):
    raise ValueError(
      f'fields={functions!r:.60} is no dict; give functions (record, ids) -> a '
      "number for each id by their names, as in fields={'my_weight': by_token}."
    )
  found = {}
  for name, function in functions.items():
    where = f'fields[{name!r}]'
    if isinstance(function, str):
      found[name] = _Placed(function)
    elif not callable(function):
      raise ValueError(
        f'{where} is {function!r:.60}; give a function (record, ids) -> a '
        "number for each id, or its name 'module:function'."
      )
    else:
      _check_arguments(where, function, ('record', 'ids'))
      found[name] = _Placed(words(f'field {name}'), function, record(function))
  return found


def _is_reward(function: Any, weight: Any) -> bool:
  try:
    # A bool would pass for a number, and is a mistake in this place.
    finite = math.isfinite(weight) and not isinstance(weight, bool)
  except (TypeError, OverflowError):  # no float holds an integer of 400 digits
    return False
  return finite and (isinstance(function, str) or callable(function))


def _is_builtin(function: Callable[..., Any]) -> bool:
  """Whether a config can name the function as one of `grpo_jax.rewards`."""
  try:
    return rewards_lib.resolve(_short_name(function)) is function
  except ValueError:
    return False


def _more(where: str, judge: WeightedReward) -> dict[str, Any]:
  """The fields of `config.Reward` beside its name and its weight."""
  try:
    kwargs = json.loads(json.dumps(dict(judge.kwargs)))
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{where} has kwargs={dict(judge.kwargs)!r:.80}, which the config of a '
      f'run cannot hold ({plain_text.said(error)}); give numbers, texts, '
      'lists and dicts, or functools.partial(function, ...).'
    ) from error
  more: dict[str, Any] = {'kwargs': kwargs, 'required': judge.required}
  if judge.where == 'workers':
    more['where'] = 'workers'
  if judge.failed is not None:
    more |= {'on_failure': 'reward', 'failed_reward': float(judge.failed)}
  return more


def _short_name(function: Callable[..., Any]) -> str:
  """The name of a function, as 'brevity'; of an instance, that of its class."""
  # A lambda is called '<lambda>'.
  return called(function).__name__.strip('<>')


def _names(environment: Any) -> str:
  """The names of an environment, or of its tools."""
  if isinstance(environment, list | tuple):
    return ', '.join(map(_short_name, environment))
  return _short_name(environment)


def _check_arguments(
  where: str,
  function: Callable[..., Any],
  arguments: tuple[str, ...],
  kwargs: Mapping[str, Any] = {},
) -> None:
  """Raises a ValueError if a function cannot be called with the arguments."""
  try:
    inspect.signature(function).bind(*arguments, **kwargs)
  except TypeError as error:
    named = [f'{name}={value!r:.40}' for name, value in kwargs.items()]
    called = ', '.join([*arguments, *named])
    raise ValueError(
      f'{where} is {_short_name(function)}{inspect.signature(function)}, but '
      f'it will be called with ({called}); let it take these '
      f'{len(arguments) + len(named)}.'
    ) from error
  except ValueError:  # some functions written in C have no signature
    pass


def check_callback(on_rollout: Any) -> None:
  """Raises a ValueError if this cannot be called after a rollout."""
  if not callable(on_rollout):
    raise ValueError(
      f'on_rollout={on_rollout!r:.60} is no function; give one that takes '
      '(step, metrics, rollout).'
    )
  _check_arguments('on_rollout', on_rollout, ('step', 'metrics', 'rollout'))


def record(value: Any) -> Record:
  """The name of an object, what a person may want to know, and a hash.

  Args:
    value: A function or what can be called like one: `source` is None if Python
      has none. A `LossTransform`: unlike a reward, a transform may close over a
      dict, its hyper-parameters. A tokenizer. Or a `Pretrained`, whose values
      are not hashed: a run begins with them, and goes on with those in its
      checkpoint.
  """
  if isinstance(value, losses.LossTransform):
    facts = {'requires': sorted(value.requires), 'scope': value.scope}
    return _record(value, tuple(value), **facts)
  if isinstance(value, data.Tokenizer):
    fields = dataclasses.fields(value)
    hashed = {x.name: getattr(value, x.name) for x in fields if x.init}
    hashed['backend'] = value.backend.to_str()
    return _record(value, hashed, vocab_size=value.vocab_size)
  if isinstance(value, foreign.Pretrained):
    model, leaves = value.model, []
    for path, x in jax.tree_util.tree_leaves_with_path(value.model.shapes):
      leaves.append((jax.tree_util.keystr(path), x.shape))
    calls = [_describe(x, False) for x in (model.call, model.init_cache)]
    hashed = model.name, leaves, model.attention, calls
    size = sum(math.prod(shape) for _, shape in leaves)
    return _record(value, hashed, name=model.name, parameters=size)
  return _record(value, None, source=source(value))


def record_of_data(records: Sequence[Any]) -> Record:
  """The type and the length of a data set, and a hash of its items.

  Where there are more than a thousand, the first and the last five hundred are
  hashed.
  """
  hashed = [records[index] for index in ends(len(records))]
  counts = {'length': len(records), 'items_hashed': len(hashed)}
  return _record(records, hashed, **counts)


def record_of_environment(environment: Any) -> Record:
  """The names of a class, a function or tools, their source, and a hash.

  Args:
    environment: As `grpo_jax.train` takes it. Of a class all of its source is
      hashed, but not that of the classes that it inherits from.
  """
  parts = [environment]
  if isinstance(environment, list | tuple):
    parts = [*environment]
  sources = [source(part) for part in parts]
  return _record(
    environment,
    [*zip(parts, sources, strict=True)],
    name=', '.join(map(qualified_name, parts)),
    source='\n\n'.join(filter(None, sources)) or None,
  )


def _record(value: Any, hashed: Any, **facts: Any) -> Record:
  """The record of a value, of which `hashed` is hashed; None: itself."""
  counted = hashed is not None
  described = _describe(hashed if counted else value, counted)
  digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
  return {'name': qualified_name(value), **facts, 'sha256': digest}


def ends(length: int) -> list[int]:
  """The indices of a data set that are read: all, or those at both ends."""
  if length <= _MOST_ITEMS:
    return list(range(length))
  half = _MOST_ITEMS // 2
  return [*range(half), *range(length - half, length)]


def called(function: Any) -> Any:
  """The function that a partial one calls; of an instance, its class."""
  while isinstance(function, functools.partial):
    function = function.func
  return function if hasattr(function, '__qualname__') else type(function)


def qualified_name(function: Any) -> str:
  """'module.Class.function', also of a partial function or an instance."""
  found = called(function)
  return f'{found.__module__}.{found.__qualname__}'


def source(function: Callable[..., Any]) -> str | None:
  """The source of a function, of a lambda alone, or of an instance's class.

  None if Python does not have it, as for a function made by `exec`.
  """
  found = called(function)
  try:
    if found.__name__ == '<lambda>':
      return _lambda_source(found)
    return textwrap.dedent(inspect.getsource(found))
  except (OSError, TypeError, SyntaxError, tokenize.TokenError):
    return None


def _lambda_source(function: Callable[..., Any]) -> str | None:
  """The text of a lambda.

  `inspect.getsource` returns the whole statement that holds the lambda, often
  the very call of `train`. Then an edit of another argument would look like an
  edit of the reward.
  """
  code = inspect.unwrap(function).__code__
  text = ''.join(inspect.findsource(function)[0])
  found = [
    node
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno
  ]
  # If several are on one line, the one whose body was compiled to this code.
  if len(found) > 1:
    compiled = {(line, column) for line, _, column, _ in code.co_positions()}
    placed = [
      node
      for node in found
      if (node.body.lineno, node.body.col_offset) in compiled
    ]
    # For a body that is a single constant, Python 3.12 records no position.
    found = placed or [node for node in found if _compiles_to(node, code)]
  return ast.get_source_segment(text, found[0]) if len(found) == 1 else None


def _compiles_to(node: ast.Lambda, code: types.CodeType) -> bool:
  """Whether a lambda alone, out of its surroundings, has this code."""
  # Compiled and not evaluated, and without its default arguments: they are no
  # part of its code, and may hold other lambdas.
  alone = copy.deepcopy(node)
  alone.args.defaults = []
  alone.args.kw_defaults = [None] * len(alone.args.kwonlyargs)
  around = compile(ast.Expression(alone), '<lambda>', 'eval', dont_inherit=True)
  (found,) = (c for c in around.co_consts if isinstance(c, types.CodeType))
  return (found.co_code, found.co_consts) == (code.co_code, code.co_consts)


def _describe(value: Any, counted: bool, seen=frozenset()) -> Any:
  """A value as nested lists of strings, equal in another process.

  Args:
    value: Anything.
    counted: Whether the contents of lists, dicts, sets and arrays count. A
      reward may close over a list or a dict in which it counts calls or keeps
      answers, and is the same reward after that.
    seen: The ids of the values around this one, for values that hold
      themselves.
  """
  if value is None or isinstance(value, bool | int | float | complex | str):
    return repr(value)
  if isinstance(value, bytes):
    return value.hex()
  if id(value) in seen:
    return 'itself'
  around = seen | {id(value)}
  parts = [_describe(x, counted, around) for x in _parts(value, counted)]
  if isinstance(value, set | frozenset):
    # Their order differs between processes.
    parts = sorted(map(json.dumps, parts))
  return [type(value).__qualname__, *parts]


def _parts(value: Any, counted: bool) -> Iterable[Any]:
  """What tells a value from others of its type."""
  match value:
    case dict() | list() | set() if not counted:
      return ()
    case dict():
      return value.items()
    case list() | tuple() | set() | frozenset():
      return value
    case functools.partial():
      return value.func, value.args, tuple(sorted(value.keywords.items()))
    case types.MethodType():
      return value.__func__, value.__self__
    case types.CodeType():
      return value.co_code, value.co_names, value.co_consts
    case types.FunctionType():
      return _parts_of_function(value)
    case np.ndarray() | np.generic() | jax.Array():
      numbers = np.asarray(value).tobytes() if counted else b''
      digest = hashlib.sha256(numbers).hexdigest()
      return str(value.dtype), value.shape, digest
  if hasattr(value, '__wrapped__'):  # of jax.jit, functools.cache
    return (value.__wrapped__,)
  if hasattr(value, '__qualname__'):  # a class, a built-in function
    return (value.__qualname__,)
  # Not `repr`, which may hold an address that differs in every process.
  fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
  text = source(value) if callable(value) else None
  return text, *(getattr(value, field.name) for field in fields)


def _parts_of_function(function: types.FunctionType) -> Iterable[Any]:
  """The source, default arguments and closed-over values of a function.

  Where there is no source, it is the bytecode, which differs between versions
  of Python.
  """
  body = function.__qualname__
  if qualified_name(function).partition('.')[0] not in _BY_NAME:
    body = source(function) or function.__code__
  cells = []
  for cell in function.__closure__ or ():
    with contextlib.suppress(ValueError):  # not assigned yet
      cells.append(cell.cell_contents)
  named = tuple(sorted((function.__kwdefaults__ or {}).items()))
  return body, function.__defaults__, named, tuple(cells)
