"""Records of the objects that a run was given in Python.

A config can name a function of a module, but not a lambda in a notebook. Such
an object is recorded instead: its name, its source where Python still has it,
and a SHA-256 that the next start compares, so that a run does not go on with
another reward by mistake.

The hash of a function covers its source, its default arguments and the values
that it closes over. It does not cover what the function calls or reads from its
module, nor where that module lies: a run goes on after a module has moved. A
record therefore shows most changes, but not all.
"""

import ast
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import sys
import textwrap
import tokenize
import types
from typing import Any

import jax
import numpy as np

from grpo_jax import data
from grpo_jax import losses
from grpo_jax.models import foreign

Record = dict[str, Any]  # what JSON can hold

# Items of a data set that are hashed at most; a user's class may take a
# millisecond to return one.
_MOST_ITEMS = 1000

# Functions of these packages are identified by name. Their source changes from
# release to release, and an update must not end a run.
_BY_NAME = {'grpo_jax', 'jax', 'jaxlib', 'numpy', 'optax'}
_BY_NAME |= sys.stdlib_module_names - {'__main__'}


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
