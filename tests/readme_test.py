"""The README: its code runs, its commands are those of the gate."""

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import method_audit
from grpo_jax import options
from tests import commands

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()


def blocks(language):
  return re.findall(rf'```{language}\n(.*?)```', README, re.DOTALL)


def run(code):
  scope = {}
  exec(compile(code, 'README.md', 'exec'), scope)  # noqa: S102
  return scope


def test_the_example_of_a_loss_runs():
  gradient = run(blocks('python')[0])['gradient']
  assert gradient.shape == (2, 4, 8) and abs(gradient).max() > 0


@pytest.mark.parametrize('number, loop', [(1, 'optax'), (2, 'nnx')])
def test_the_examples_of_the_record_run(number, loop, capsys):
  """They use nothing of ours but `optim`, and print a norm."""
  code = blocks('python')[number]
  assert len(blocks('python')) == 3 and f'{loop}.' in code
  assert re.findall(r'from grpo_jax.*', code) == ['from grpo_jax import optim']
  run(code)
  assert float(capsys.readouterr().out) > 0


def test_the_gate_installs_and_tests_as_the_readme_says():
  gate = (ROOT / '.ci' / 'run').read_text()
  install = next(line for line in blocks('sh') if '[dev]' in line)
  for step in install.replace('.venv/bin/', '').split(' && ')[1:]:
    assert f'\n{step.strip()}\n' in gate + '\n', step


def test_the_table_of_methods_is_the_one_computed():
  """`python -m grpo_jax.method_audit` prints what it should be."""
  audits = method_audit.every()
  rows = method_audit.table(audits)
  assert {row['method'] for row in rows} == set(losses.methods.__all__)
  assert all(cell for row in rows for cell in row.values())
  for name, audit in audits.items():
    answer = method_audit.to_json(name, audit)
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer
  assert method_audit.markdown(rows).strip() in README
  assert method_audit.columns_markdown() in README


def test_a_method_of_a_users_own_trains_and_is_audited(tmp_path):
  """The README's lines, with a smaller run, and no edit to the package."""
  lines = next(block for block in blocks('sh') if 'my_lab' in block)
  lines = lines.replace('.venv/bin/grpo-jax', f'{sys.executable} -m grpo_jax')
  lines = lines.replace('PYTHONPATH=.', f'PYTHONPATH=.:{ROOT}')
  lines = lines.replace('configs/', f'{ROOT}/configs/').strip()
  smaller = (
    '--config.steps=2 --config.warm_up.steps=0 --config.evaluation.examples=16 '
    '--config.sampler.group=4 --config.sampler.temperature=0.3 '
    f"'{commands.JUDGE}'"
  )
  done = subprocess.run(
    ['bash', '-ec', f'{lines} {smaller}'],
    cwd=tmp_path,
    env=commands.environment(),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert 'W_agg| is 0.333 of the sum' in done.stdout
  assert json.loads(done.stdout.splitlines()[-1])['steps'] == 2
  metrics = tmp_path / 'runs' / 'flipped' / 'metrics.jsonl'
  last = json.loads(metrics.read_text().splitlines()[-1])
  np.testing.assert_allclose(
    last['prefix_whole_uncancelled_expected'], 1 / 3, rtol=1e-5
  )
  assert last['update_norm'] > 0


def test_the_file_map_is_complete():
  tree = README.split('grpo_jax/\n')[1].split('tests/ ')[0]
  named = {line.split()[0].rstrip('/') for line in tree.splitlines() if line}
  present = {
    path.name
    for path in (ROOT / 'grpo_jax').iterdir()
    if not path.name.startswith(('_', '.', 'py.typed'))
  }
  assert named == present


def test_the_tables_of_options_are_those_of_the_code():
  """`python -m grpo_jax.options` prints what they should be."""
  assert options.markdown().strip() in README
  assert options.peers_markdown().strip() in README
