"""Records of the objects that a run was given in Python.

A config can name a function of a module, but not a lambda in a notebook. Such
an object is recorded instead: its name, its source where Python still has it,
and a SHA-256 that the next start compares, so that a run does not go on with
another reward by mistake.

The hash of a function covers its source, its default arguments and the values
that it closes over. It does not cover what the function calls or reads from its
module. A record therefore shows most changes, but not all.
"""

import ast
from collections.abc import Callable
from collections.abc import Sequence
import copy
import dataclasses
import functools
import hashlib
import inspect
import json
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


def function_record(function: Callable[..., Any]) -> Record:
  """The qualified name, the source (None if Python has none), a hash."""
  return {
    'name': qualified_name(function),
    'source': source(function),
    'sha256': _sha256(_described(function, ())),
  }


def method_record(method: losses.LossTransform) -> Record:
  """What a chain requires, its scope, and a hash of all that it consists of.

  Unlike a reward, a transform may close over a dict: its hyper-parameters.
  """
  return {
    'name': 'LossTransform',
    'requires': sorted(method.requires),
    'scope': method.scope,
    'sha256': _sha256(_described(tuple(method), (dict, list, set))),
  }


def data_record(records: Sequence[Any]) -> Record:
  """The type and the length of a data set, and a hash of its items.

  Where there are more than a thousand, the first and the last five hundred are
  hashed.
  """
  hashed = [
    _described(records[index], (dict, list, set))
    for index in ends(len(records))
  ]
  return {
    'name': qualified_name(type(records)),
    'length': len(records),
    'items_hashed': len(hashed),
    'sha256': _sha256(hashed),
  }


def tokenizer_record(tokenizer: data.Tokenizer) -> Record:
  """The size of the vocabulary, and a hash of all that the tokenizer does."""
  contents = [
    tokenizer.backend.to_str(),
    list(tokenizer.eos_ids),
    tokenizer.pad_id,
    sorted(tokenizer.alphabet or ()),
  ]
  # Only if there are any: the hashes of older records were made without.
  if tokenizer.bos_ids or tokenizer.chat_template:
    template = tokenizer.chat_template
    contents += [
      list(tokenizer.bos_ids),
      template and dataclasses.asdict(template),
    ]
  if tokenizer.prompt_format != data.PromptFormat():
    contents.append(dataclasses.asdict(tokenizer.prompt_format))
  return {
    'name': qualified_name(type(tokenizer)),
    'vocab_size': tokenizer.vocab_size,
    'sha256': _sha256(contents),
  }


def model_record(model: foreign.Foreign) -> Record:
  """The name, the number of parameters, and a hash of shapes and calls.

  The values are not hashed: a run begins with them, and goes on with those in
  its checkpoint.
  """
  leaves = jax.tree_util.tree_leaves_with_path(model.shapes)
  contents = [
    model.name,
    [[jax.tree_util.keystr(path), list(x.shape)] for path, x in leaves],
    model.attention,
    _described((model.call, model.init_cache), ()),
  ]
  return {
    'name': model.name,
    'parameters': sum(x.size for _, x in leaves),
    'sha256': _sha256(contents),
  }


def ends(length: int) -> list[int]:
  """The indices of a data set that are read: all, or those at both ends."""
  if length <= _MOST_ITEMS:
    return list(range(length))
  half = _MOST_ITEMS // 2
  return [*range(half), *range(length - half, length)]


def qualified_name(function: Any) -> str:
  """'module.Class.function', also of a partial function or an instance."""
  while isinstance(function, functools.partial):
    function = function.func
  if not hasattr(function, '__qualname__'):
    function = type(function)
  return f'{function.__module__}.{function.__qualname__}'


def source(function: Callable[..., Any]) -> str | None:
  """The source of a function, of a lambda alone, or of an instance's class.

  None if Python does not have it, as for a function made by `exec`.
  """
  while isinstance(function, functools.partial):
    function = function.func
  if not hasattr(function, '__qualname__'):
    function = type(function)
  try:
    if getattr(function, '__name__', '') == '<lambda>':
      return _lambda_source(function)
    return textwrap.dedent(inspect.getsource(function))
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
  # Of several on one line, the one whose body was compiled to this code.
  if len(found) > 1:
    compiled = set(code.co_positions())
    placed = [node for node in found if _place(node.body) in compiled]
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


def _place(node: ast.expr) -> tuple[int, int | None, int, int | None]:
  """Where a node is, in the order of `code.co_positions`."""
  return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _sha256(description: Any) -> str:
  return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _described(value: Any, contents: tuple[type, ...], seen=frozenset()) -> Any:
  """A value as nested lists of strings, equal in another process.

  Args:
    value: Anything.
    contents: The mutable types whose contents count. A reward may close over a
      list or a dict in which it counts calls or keeps answers, and is the same
      reward after that.
    seen: The ids of the values around this one, for values that hold
      themselves.
  """
  if value is None or isinstance(value, bool | int | float | complex | str):
    return repr(value)
  if isinstance(value, bytes):
    return value.hex()
  if id(value) in seen:
    return 'itself'
  inner = functools.partial(
    _described, contents=contents, seen=seen | {id(value)}
  )
  kind = qualified_name(type(value))
  if isinstance(value, types.FunctionType):
    return _described_function(value, inner)
  if isinstance(value, types.CodeType):
    return [value.co_code.hex(), list(value.co_names), inner(value.co_consts)]
  if isinstance(value, functools.partial):
    arguments = sorted(value.keywords.items())
    return [kind, inner(value.func), inner(value.args), inner(tuple(arguments))]
  if isinstance(value, types.MethodType):
    return [kind, inner(value.__func__), inner(value.__self__)]
  if isinstance(value, tuple) or list in contents and isinstance(value, list):
    return [kind, *map(inner, value)]
  # Sorted, because the order of a set differs between processes.
  if isinstance(value, frozenset) or set in contents and isinstance(value, set):
    return [kind, *sorted(map(json.dumps, map(inner, value)))]
  if dict in contents and isinstance(value, dict):
    return [kind, *([inner(key), inner(item)] for key, item in value.items())]
  if isinstance(value, np.ndarray | np.generic | jax.Array):
    # A reward may change its arrays, as it may change its lists and dicts.
    numbers = np.asarray(value).tobytes() if contents else b''
    digest = hashlib.sha256(numbers).hexdigest()
    return [str(value.dtype), list(value.shape), digest]
  if hasattr(value, '__wrapped__'):  # of jax.jit, functools.cache
    return [kind, inner(value.__wrapped__)]
  if hasattr(value, '__qualname__'):  # a class, a built-in function
    return qualified_name(value)
  # Not `repr`, which may hold an address that differs in every process.
  fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
  parts = [inner(getattr(value, field.name)) for field in fields]
  return [kind, source(value) if callable(value) else None, parts]


def _described_function(function: types.FunctionType, inner) -> Any:
  """The source, default arguments and closed-over values of a function.

  Where there is no source, it is the bytecode, which differs between versions
  of Python.
  """
  body = qualified_name(function)
  if body.partition('.')[0] not in _BY_NAME:
    body = source(function) or inner(function.__code__)
  cells = []
  for cell in function.__closure__ or ():
    try:
      cells.append(inner(cell.cell_contents))
    except ValueError:  # not assigned yet
      cells.append('empty')
  named = tuple(sorted((function.__kwdefaults__ or {}).items()))
  return [body, inner(function.__defaults__), inner(named), cells]
