"""`launch/notebook.ipynb`: how it lies in the repository, and that it runs."""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import tomllib
import types

from packaging import requirements
import pytest

import grpo_jax
from tests import cli

PATH = cli.ROOT / 'launch' / 'notebook.ipynb'
BOOK = json.loads(PATH.read_text())
CODE = {
  cell['id']: ''.join(cell['source'])
  for cell in BOOK['cells']
  if cell['cell_type'] == 'code'
}


@pytest.mark.quick
def test_outputs_are_stripped():
  """In Jupyter: Kernel > Restart Kernel and Clear Outputs, before saving."""
  assert (BOOK['nbformat'], BOOK['nbformat_minor']) == (4, 5)
  assert BOOK['metadata'] == {
    'kernelspec': {
      'display_name': 'Python 3',
      'language': 'python',
      'name': 'python3',
    },
    'language_info': {'name': 'python'},
  }
  for cell in BOOK['cells']:
    is_first = cell['id'] == 'parameters'
    assert cell['metadata'] == ({'tags': ['parameters']} if is_first else {})
    # A name and not a number: it says what the cell does, and stays.
    assert re.fullmatch('[a-z][a-z0-9-]*', cell['id'])
    if cell['cell_type'] == 'code':
      assert (cell['outputs'], cell['execution_count']) == ([], None)
  ids = [cell['id'] for cell in BOOK['cells']]
  assert len(set(ids)) == len(ids) and next(iter(CODE)) == 'parameters'


@pytest.mark.quick
def test_its_runs_are_whole_unless_the_environment_says_otherwise(monkeypatch):
  for value, small in ((None, False), ('1', True), ('0', False)):
    monkeypatch.delenv('GRPO_JAX_NOTEBOOK_SMALL', raising=False)
    if value is not None:
      monkeypatch.setenv('GRPO_JAX_NOTEBOOK_SMALL', value)
    scope = {}
    exec(CODE['parameters'], scope)
    assert (scope['SMALL'], scope['SMOLLM2'], scope['WORKDIR']) == (
      (small, False, '')
    )


@pytest.mark.quick
def test_the_repository_is_that_of_the_package():
  """It has no public address yet. Once it has one, the notebook knows it."""
  project = tomllib.loads((cli.ROOT / 'pyproject.toml').read_text())['project']
  scope = {}
  exec(CODE['parameters'], scope)
  urls = {name.lower(): url for name, url in project.get('urls', {}).items()}
  assert scope['REPOSITORY'] == urls.get('repository', '')


@pytest.mark.quick
def test_only_public_names_are_used():
  """What `grpo_jax` and its libraries list; no module further inside."""
  cells = [ast.parse(code) for code in CODE.values()]
  tree = ast.Module([node for cell in cells for node in cell.body], [])
  modules = {'grpo_jax': grpo_jax}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names = {alias.name for alias in node.names}
      assert not [name for name in names if name.startswith('grpo_jax.')]
    elif isinstance(node, ast.ImportFrom) and 'grpo_jax' in node.module:
      assert node.module == 'grpo_jax'
      for alias in node.names:
        assert alias.name in grpo_jax.__all__
        modules[alias.name] = importlib.import_module(f'grpo_jax.{alias.name}')
  assert {'losses', 'optim', 'diagnostics'} <= set(modules)
  used = [
    (node.value.id, node.attr)
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
  ]
  for owner, name in used:
    if owner in modules:
      assert name in modules[owner].__all__, f'{owner}.{name}'
  assert len([owner for owner, _ in used if owner in modules]) > 10


def installs(tmp_path, monkeypatch):
  """The functions of the cell that installs, as if nothing was installed."""
  monkeypatch.chdir(tmp_path)
  tree = ast.parse(CODE['install'])
  kinds = ast.Import | ast.ImportFrom | ast.FunctionDef
  tree.body = [node for node in tree.body if isinstance(node, kinds)]
  scope = {'os': os, 'REPOSITORY': ''}
  exec(compile(tree, '<install>', 'exec'), scope)
  return types.SimpleNamespace(**scope)


@pytest.mark.quick
@pytest.mark.parametrize(
  'file, driver, wanted',
  [
    (None, None, ''),
    ('/dev/accel0', None, '[tpu]'),
    ('/dev/vfio/0', '580.65.06', '[tpu]'),
    (None, '580.65.06\n580.65.06\n', '[cuda]'),
    (None, '550.54.15\n', '[cuda12]'),
    (None, 'NVIDIA-SMI has failed', ''),
    (None, '', ''),
  ],
)
def test_the_extra_is_that_of_the_machine(
  file, driver, wanted, tmp_path, monkeypatch
):
  cell = installs(tmp_path, monkeypatch)
  monkeypatch.setattr(os.path, 'exists', lambda path: path == file)
  found = None if driver is None else '/usr/bin/nvidia-smi'
  monkeypatch.setattr(shutil, 'which', lambda program: found)
  done = types.SimpleNamespace(stdout=driver)
  monkeypatch.setattr(subprocess, 'run', lambda *_, **__: done)
  assert cell.extra() == wanted
  extras = cli.ROOT.joinpath('pyproject.toml').read_text()
  assert not wanted or f'\n{wanted[1:-1]} = ["jax[' in extras


@pytest.mark.quick
def test_what_lies_beside_the_notebook_is_installed(tmp_path, monkeypatch):
  cell = installs(tmp_path, monkeypatch)
  with pytest.raises(ValueError, match='no checkout .* set REPOSITORY in the'):
    cell.source('[tpu]')
  scope = cell.source.__globals__
  scope['REPOSITORY'] = address = 'https://host/name/grpo_jax'
  named = requirements.Requirement(cell.source('[tpu]'))
  assert (named.name, named.extras) == ('grpo_jax', {'tpu'})
  assert named.url == f'git+{address}'
  wheel = tmp_path / 'grpo_jax-0.1.0-py3-none-any.whl'
  wheel.touch()
  assert cell.source('[tpu]') == f'{wheel}[tpu]'
  (tmp_path / 'grpo_jax').symlink_to(cli.ROOT)  # a clone
  assert cell.source('') == str(tmp_path / 'grpo_jax')
  monkeypatch.chdir(PATH.parent)
  assert cell.source('[cuda]') == f'{cli.ROOT}[cuda]'


@pytest.fixture(scope='module')
def outputs(tmp_path_factory):
  """What each cell shows in the small setting: kinds of outputs, and texts."""
  import nbclient
  import nbformat

  place = tmp_path_factory.mktemp('notebook')
  flags = [*cli.QUICK, '--xla_force_host_platform_device_count=2']
  changes = {
    'GRPO_JAX_NOTEBOOK_SMALL': '1',
    'IPYTHONDIR': str(place / 'ipython'),
    'JAX_PLATFORMS': 'cpu',
    'PIP_NO_INDEX': '1',  # nothing is installed here
    'TMPDIR': str(place),
    'XLA_FLAGS': ' '.join(flags),
  }
  kept = {k: v for k, v in cli.environment().items() if k != 'MPLBACKEND'}
  book = nbformat.read(PATH, as_version=4)
  nbformat.validate(book)
  with pytest.MonkeyPatch.context() as patched:
    for name in ('CONFIG', 'DATA', 'RUNTIME'):  # none of the user's
      patched.setenv(f'JUPYTER_{name}_DIR', str(place / name.lower()))
    client = nbclient.NotebookClient(
      book, timeout=300, resources={'metadata': {'path': str(place)}}
    )
    client.execute(env=kept | changes)  # raises if a cell does
  shown = {}
  for cell in book.cells:
    kinds, text = set(), ''
    for output in cell.get('outputs', ()):
      text += output.get('text', '')
      for kind, value in output.get('data', {}).items():
        kinds.add(kind)
        text += value if kind.startswith('text/') else ''
    shown[cell.id] = kinds, text
  return shown


@pytest.mark.long
def test_every_figure_is_drawn(outputs):
  drawn = {id for id, (kinds, _) in outputs.items() if 'image/png' in kinds}
  assert drawn == {'curves', 'compare', 'adam'}


@pytest.mark.long
@pytest.mark.parametrize(
  'cell, words',
  [
    ('install', r'grpo_jax \d'),
    ('devices', r'2 x cpu, JAX \d'),
    ('train', r'rollout +4  reward [01]\.\d{3}\n'),
    ('train', r'accuracy: 0\.\d{3} before GRPO, 0\.\d{3} after it'),
    ('sample', r'38\+93=\d*\n47\+85=\d*\n'),
    ('audit', r'\| W_agg \| 0 \| 0\.33 \|'),
    ('audit', r'\| weight \| .+ \| 1/N \|'),
    ('compare', r'rollout +4  reward [01]\.\d{3}\n'),
    ('smollm2', 'SmolLM2 is left out, because SMALL is set'),
  ],
)
def test_cells_print_what_is_expected(cell, words, outputs):
  assert re.search(words, outputs[cell][1]), outputs[cell][1]


@pytest.mark.long
def test_the_coasting_law_holds_in_the_loop_of_ones_own(outputs):
  measured, predicted = re.findall(r'0\.\d{3}', outputs['adam'][1])
  assert float(measured) == pytest.approx(float(predicted), abs=0.002)
