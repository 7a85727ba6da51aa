"""Who may import whom; read from the syntax tree, not from what runs."""

import ast
import functools
import importlib
import pathlib
import subprocess
import sys

import pytest

import grpo_jax

PACKAGE = pathlib.Path(__file__).parent.parent / 'grpo_jax'

# What each folder, or module beside the folders, may import of ours. The order
# is that of a rollout's way: nothing imports what stands above it.
_RUN = {
  'config', 'data', 'diagnostics', 'engines', 'environments', 'episodes',
  'hosts', 'learner', 'losses', 'mesh', 'models', 'monitor', 'optim', 'rewards',
  'rollouts', 'serving',
}  # fmt: skip
ALLOWED = {
  '__main__': {'commands'},
  '__init__': set(),  # it imports what is asked for, by its name
  'commands': {
    'config', 'data', 'environments', 'hosts', 'lab', 'planning', 'run',
    'serving',
  },
  'lab': {
    'config', 'diagnostics', 'losses', 'models', 'monitor', 'optim', 'rollouts',
    'run',
  },
  'planning': {'config', 'hosts', 'learner', 'mesh', 'models', 'run'},
  'run': _RUN,
  'serving': {'config', 'data', 'engines', 'environments', 'rewards'},
  'learner': {'episodes', 'losses', 'mesh', 'models', 'optim'},
  'rollouts': {'config', 'data', 'episodes', 'mesh'},
  'episodes': {
    'data', 'engines', 'environments', 'losses', 'mesh', 'models', 'rewards',
  },
  'engines': {'config', 'mesh', 'models'},
  'hosts': {'config'},
  'environments': {'config', 'rewards'},
  'data': {'config'},
  'diagnostics': {'losses'},
  'models': {'config', 'mesh'},
  'monitor': {'config'},
  'rewards': {'config'},
  'config': set(),
  'losses': set(),
  'mesh': set(),
  'optim': set(),
}  # fmt: skip
# Where a folder may not import all of another: what reads names, files and
# texts knows nothing of the fields of a config.
_SMALL = {
  'config.http_client', 'config.importing', 'config.gguf_files',
  'config.plain_text', 'config.waits', 'config.whole_files',
}  # fmt: skip
ONLY = {
  ('learner', 'episodes'): {'episodes.types'},
  **{
    (folder, 'config'): _SMALL
    for folder in (
      'data',
      'engines',
      'environments',
      'models',
      'monitor',
      'rewards',
      'hosts',
      'rollouts',
      'serving',
    )
  },
}
NO_JAX = 'rewards', 'data', 'config', 'environments'

# Third-party packages that take long to import, and which folders may do so at
# the top of a file. All others import them in the function that needs them.
HEAVY = {
  'ml_collections': set(),
  'absl': {'commands'},
  'grain': set(),
  'tokenizers': set(),
  'jinja2': set(),
  'safetensors': set(),
  'gguf': set(),
  'math_verify': set(),
  'reasoning_gym': set(),
  'sympy': set(),
  'jsonschema': set(),
  'gymnasium': set(),
  'httpx2': set(),
  'mcp': set(),
  'pyspiel': set(),
  'referencing': set(),
  'starlette': set(),
  'textarena': set(),
  'uvicorn': set(),
  'orbax': set(),
  'pyarrow': set(),
  'array_record': set(),
  'tensorflow_datasets': {'data'},  # its builders are classes of it
  'rich': {'monitor'},  # by the live display, which `screen` imports
  'tensorboardX': set(),
  'wandb': set(),
  'mlflow': set(),
  'scipy': set(),
  'flax': {'models'},
  'optax': {'optim', 'learner', 'diagnostics', 'lab'},
  'matplotlib': set(),
}

FILES = sorted(PACKAGE.rglob('*.py'))


def module(path: pathlib.Path) -> str:
  """`losses/_base.py` is losses._base, `losses/__init__.py` is losses."""
  parts = path.relative_to(PACKAGE).with_suffix('').parts
  return '.'.join(
    parts[:-1] if parts[1:] and parts[-1] == '__init__' else parts
  )


MODULES = {module(path): path for path in FILES}


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text())


def names(path: pathlib.Path, top_only: bool = False) -> list[str]:
  """Dotted names of every import in a file."""
  tree = parsed(path)
  found = []
  for node in tree.body if top_only else ast.walk(tree):
    if isinstance(node, ast.Import):
      found += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      found += [f'{node.module}.{alias.name}' for alias in node.names]
  return found


@functools.cache
def imports(name: str) -> frozenset[str]:
  """The modules of ours that a module imports, anywhere in its file."""
  found = set()
  for dotted in names(MODULES[name]):
    words = dotted.split('.')
    if words[0] == 'grpo_jax':
      tried = ['.'.join(words[1:k]) for k in range(len(words), 1, -1)]
      # `from grpo_jax import __version__` is of the package itself.
      found.add(next((one for one in tried if one in MODULES), '__init__'))
  return frozenset(found)


def folder(name: str) -> str:
  return name.split('.')[0]


def test_every_folder_is_in_the_table():
  assert {folder(name) for name in MODULES} == set(ALLOWED)


@pytest.mark.parametrize('mine', ALLOWED)
def test_imports_go_one_way(mine):
  for name in MODULES:
    if folder(name) == mine:
      check_imports(name, mine)


def check_imports(name, mine):
  for other in imports(name) - {'__init__'}:
    theirs = folder(other)
    assert theirs in ALLOWED[mine] | {mine}, f'{name} imports {other}'
    some = ONLY.get((mine, theirs), {other})
    assert other in some, f'{name} imports {other}; {mine} may import {some}'
    private = any(word.startswith('_') for word in other.split('.')[1:])
    assert theirs == mine or not private, f'{name} imports {other}'
  for dotted in names(MODULES[name]):
    if mine in NO_JAX:
      assert dotted.split('.')[0] != 'jax', f'{name} imports jax'
  for dotted in names(MODULES[name], top_only=True):
    package = dotted.split('.')[0]
    assert mine in HEAVY.get(package, {mine}), f'{name} imports {package}'


def circle(edges) -> list[str]:
  """The modules along a circle of imports; none if there is no circle."""
  done, path = set(), []

  def visit(name):
    if name in path:
      return [*path[path.index(name) :], name]
    if name in done:
      return []
    path.append(name)
    for other in sorted(edges(name)):
      if found := visit(other):
        return found
    path.pop()
    done.add(name)
    return []

  return next((found for name in sorted(MODULES) if (found := visit(name))), [])


def test_no_imports_run_in_a_circle():
  """Inside a folder too, and whether at the top of a file or in a function."""
  assert not circle(lambda name: imports(name) - {'__init__', name})


def test_a_circle_is_found():
  """As if `mesh.sharding`, which imports nothing, imported the loop."""

  def edges(name):
    return {'run.loop'} if name == 'mesh.sharding' else imports(name)

  assert 'mesh.sharding' in circle(edges)


HEAVIER = (
  'flax', 'orbax', 'grain', 'ml_collections', 'tokenizers',
  'tensorflow_datasets', 'array_record', 'transformers', 'rich', 'pyarrow',
  'tensorboardX',
)  # fmt: skip


@pytest.mark.parametrize(
  'imported, absent',
  [
    (
      {
        'losses': {'losses'},
        'optim': {'optim'},
        'diagnostics': {'diagnostics', 'losses'},
      },
      HEAVIER,
    ),
    (
      {
        'data': {'data', 'config'},
        'environments.forms': {'environments', 'config'},
        'serving.app': {'serving', 'environments', 'config'},
        'rewards': {'rewards', 'config'},
        'monitor': {'monitor', 'config'},
      },
      ('jax', *HEAVIER),
    ),
  ],
  ids=['with jax', 'without jax'],
)
def test_what_others_import_is_light(imported, absent):
  """In a process of its own, with everything heavy made unimportable."""
  code = f"""
import importlib, sys
for heavy in {absent}:
  sys.modules[heavy] = None
for name, allowed in {imported}.items():
  importlib.import_module(f'grpo_jax.{{name}}')
  mine = [m for m in sys.modules if m.partition('.')[0] == 'grpo_jax']
  ours = {{m.split('.')[1] for m in mine if '.' in m}}
  assert name.split('.')[0] in ours and ours <= allowed, (name, ours)
  for one in mine:  # the next finds nothing of ours
    del sys.modules[one]
"""
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


def test_the_package_imports_what_is_asked_for():
  code = """
import sys, grpo_jax
assert set(grpo_jax.__all__) <= set(dir(grpo_jax))
assert not [name for name in sys.modules if name.startswith('grpo_jax.')]
assert callable(grpo_jax.load_config)
assert not {'jax', 'grpo_jax.run'} & set(sys.modules)
"""
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


def test_type_checkers_are_told_where_each_name_is():
  told = ast.parse((PACKAGE / '__init__.pyi').read_text())
  places = {
    node.names[0].name: str(node.module)
    for node in told.body
    if isinstance(node, ast.ImportFrom)
  }
  assert sorted(places) == grpo_jax.__all__
  for name, place in places.items():
    assert getattr(grpo_jax, name) is getattr(
      importlib.import_module(place), name
    )


@pytest.mark.parametrize('mine', ALLOWED)
def test_no_function_is_too_long(mine):
  for name in MODULES:
    if folder(name) == mine:
      check_lengths(name)


def check_lengths(name):
  for node in ast.walk(parsed(MODULES[name])):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      said = ast.get_docstring(node, clean=False) or ''
      lines = node.end_lineno - node.lineno + 1 - len(said.splitlines())
      assert lines <= 80, (
        f'{name}.{node.name}: {lines} lines without its docstring'
      )
