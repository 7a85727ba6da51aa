"""Who may import whom; read off the source, not off what happens to run."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / 'grpo_jax'

# Every module or sub-package, and what of ours it may import.
ALLOWED = {
  'losses': set(),
  'optim': set(),
  'layout': set(),
  'keys': set(),
  'sharding': set(),
  'metrics': set(),
  'rewards': set(),
  'data': set(),
  'models': {'layout', 'sharding'},
  'sampling': {'models', 'keys', 'layout', 'sharding'},
  'diagnostics': {'losses', 'optim'},
  'policy_metrics': {'diagnostics', 'losses', 'metrics'},
  'method_audit': {'diagnostics', 'losses', 'named'},
  'micro': {'layout'},
  'overshoot': {'layout', 'losses', 'metrics', 'micro'},
  'gradient': {
    'layout', 'losses', 'metrics', 'micro', 'overshoot', 'policy_metrics',
  },
  'learner': {
    'gradient', 'layout', 'losses', 'metrics', 'optim', 'overshoot',
    'policy_metrics', 'sharding',
  },
  'rollout': {'sampling', 'rewards', 'data', 'layout', 'losses'},
  'measure': {'models', 'rollout'},
  'transcript': {'losses', 'rollout'},
  'resample': {'data', 'rollout', 'transcript'},
  'update': {
    'keys', 'learner', 'losses', 'metrics', 'rollout', 'sharding',
  },
  'config': set(),
  'named': {'losses'},
  'options': {'config'},
  'saved_config': {'config', 'workdir'},
  'workdir': {'config'},
  'checkpoint': set(),
  'monitor': {'config'},
  'signals': set(),
  'build': {
    'config', 'data', 'learner', 'losses', 'measure', 'models', 'named',
    'optim', 'rewards', 'rollout', 'sampling', 'sharding', 'update',
  },
  'replayed': {'build', 'resample', 'transcript'},
  'session': {
    'build', 'checkpoint', 'config', 'learner', 'monitor', 'resample',
    'rollout', 'signals', 'transcript', 'update', 'warm_up', 'workdir',
  },
  'warm_up': {
    'build', 'checkpoint', 'data', 'keys', 'metrics', 'monitor', 'rollout',
    'sharding',
  },
  'loop': {
    'build', 'config', 'data', 'keys', 'learner', 'measure', 'metrics',
    'replayed', 'resample', 'rollout', 'session', 'signals', 'update',
    'warm_up',
  },
  'evaluate': {'keys', 'rollout'},
  'inference': {
    'build', 'checkpoint', 'config', 'data', 'evaluate', 'named', 'rollout',
    'sampling', 'transcript', 'workdir',
  },
  'check': {'build', 'config', 'data', 'rollout', 'warm_up', 'workdir'},
  'arguments': {'options', 'workdir'},
  'studies': {
    'build', 'config', 'loop', 'monitor', 'resample', 'warm_up', 'workdir',
  },
  'main': {
    'arguments', 'check', 'config', 'inference', 'loop', 'method_audit',
    'options', 'signals', 'studies',
  },
  '__main__': {'main'},
  '__init__': set(),
}  # fmt: skip

# Third-party packages that only some may import at the top of a file.
HEAVY = {
  'ml_collections': {'config', 'main', 'saved_config'},
  'absl': {'main'},
  'grain': set(),
  'tokenizers': set(),
  'orbax': set(),
  'pyarrow': set(),
  'rich': set(),
  'tensorboardX': set(),
  'wandb': set(),
  'flax': {'models'},
  'optax': {'optim', 'learner', 'diagnostics'},
  'matplotlib': set(),
}


def part(path: pathlib.Path) -> str:
  return path.relative_to(PACKAGE).parts[0].removesuffix('.py')


def imported(path: pathlib.Path, top_only: bool = False):
  """Dotted names of every import in a file."""
  tree = ast.parse(path.read_text())
  nodes = tree.body if top_only else ast.walk(tree)
  for node in nodes:
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative import'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


FILES = sorted(PACKAGE.rglob('*.py'))


def test_every_part_is_in_the_table():
  assert {part(path) for path in FILES} == set(ALLOWED)


@pytest.mark.parametrize(
  'path', FILES, ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_one_way(path):
  mine = part(path)
  for name in imported(path):
    words = name.split('.')
    if words[0] == 'grpo_jax':
      assert words[1] in ALLOWED[mine] | {mine}, f'{mine} imports {name}'
    if words[0] == 'jax':
      assert mine not in ('rewards', 'data', 'config'), f'{path} imports jax'
  for name in imported(path, top_only=True):
    heavy = name.split('.')[0]
    if heavy in HEAVY:
      assert mine in HEAVY[heavy], f'{path} imports {heavy} at its top'


HEAVIER = (
  'flax', 'orbax', 'grain', 'ml_collections', 'tokenizers',
  'tensorflow_datasets', 'transformers', 'rich', 'pyarrow', 'tensorboardX',
)  # fmt: skip


@pytest.mark.parametrize(
  'name, absent',
  [
    ('losses', HEAVIER),
    ('optim', HEAVIER),
    ('data', ('jax', *HEAVIER)),
    ('rewards', ('jax', *HEAVIER)),
  ],
)
def test_what_others_import_is_light(name, absent):
  """In a process of its own, with everything heavy made unimportable."""
  code = f"""
import sys
for heavy in {absent}:
  sys.modules[heavy] = None
import grpo_jax.{name}
ours = {{m.split('.')[1] for m in sys.modules if m.startswith('grpo_jax.')}}
assert ours == {{'{name}'}}, ours
"""
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


def test_no_file_is_too_long():
  for path in FILES:
    assert len(path.read_text().splitlines()) <= 500, path
  assert len((PACKAGE / 'loop.py').read_text().splitlines()) < 250
