"""The README: its code runs, its commands are those of the gate."""

import pathlib
import re

from grpo_jax import losses
from grpo_jax import options

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()


def blocks(language):
  return re.findall(rf'```{language}\n(.*?)```', README, re.DOTALL)


def test_the_python_example_runs():
  (code,) = blocks('python')
  scope = {}
  exec(compile(code, 'README.md', 'exec'), scope)  # noqa: S102
  gradient = scope['gradient']
  assert gradient.shape == (2, 4, 8) and abs(gradient).max() > 0


def test_the_gate_installs_and_tests_as_the_readme_says():
  gate = (ROOT / '.ci' / 'run').read_text()
  install = next(line for line in blocks('sh') if '[dev]' in line)
  for step in install.replace('.venv/bin/', '').split(' && ')[1:]:
    assert f'\n{step.strip()}\n' in gate + '\n', step


def test_the_list_of_methods_is_complete():
  listed = README.split('The methods: ')[1].split('. Formula')[0]
  assert set(re.findall(r'`(\w+)`', listed)) == set(losses.methods.__all__)


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
