"""Which test files are near a file of the package."""

import ast
import collections
from collections.abc import Iterator
from collections.abc import Mapping

# What a module starts as a command, which no import of it shows.
_STARTS = {'tests.cli': 'grpo_jax.commands.main'}


def module(path: str) -> str:
  """The dotted name of a file."""
  return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


class Nearness:
  """The test files that may notice a change of a file, nearest first."""

  def __init__(self, texts: Mapping[str, str]):
    """Takes path -> text of the files of the package and of its tests."""
    self._texts = texts
    names = {module(path) for path in texts}
    self._importers = collections.defaultdict(set)
    for path, text in texts.items():
      for name in _imports(module(path), text, names):
        self._importers[name].add(module(path))

  def tests(self, path: str) -> list[str]:
    """Test files, the nearest first.

    Args:
      path: A file of the package, as `grpo_jax/models/weights/gguf.py`.

    Returns:
      First the file itself if it has doctests, then tests named after it or
      after its folder, then the other tests of its folder, last the tests
      elsewhere that import it, by however many steps. Of these, each time,
      those first that share more folders with it, then those fewer imports
      away.
    """
    steps, folders = self._steps(module(path)), path.split('/')[1:-1]
    names = (path.split('/')[-1].removesuffix('.py').strip('_'), *folders[-1:])
    found = [(0, 0, 0, path)] if '>>> ' in self._texts[path] else []
    for test in self._texts:
      if not test.endswith('_test.py') or test.startswith('tests/mutants'):
        continue
      shared = _shared(folders, test.split('/')[1:-1])
      away = steps.get(module(test))
      if away is None and not shared:
        continue
      own = test.split('/')[-1].startswith(names) and shared == len(folders)
      far = len(steps) if away is None else away
      found.append((1 if own else 2 if shared else 3, -shared, far, test))
    return [test for *_, test in sorted(found)]

  def _steps(self, name) -> dict[str, int]:
    """Module -> the least number of imports from it to the named one."""
    steps, queue = {name: 0}, collections.deque([name])
    while queue:
      near = queue.popleft()
      for importer in sorted(self._importers[near] - set(steps)):
        steps[importer] = steps[near] + 1
        queue.append(importer)
    return steps


def _shared(folders, others):
  """How many folders two paths have in common, from the top."""
  pairs = list(zip(folders, others))
  return next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _imports(name, text, names) -> Iterator[str]:
  """The modules among `names` that a module imports, or starts."""
  if name in _STARTS:
    yield _STARTS[name]
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      dotted = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      dotted = [f'{node.module}.{alias.name}' for alias in node.names]
    else:
      continue
    for one in dotted:
      if one in names:
        yield one
      elif one.rpartition('.')[0] in names:  # something that it defines
        yield one.rpartition('.')[0]
