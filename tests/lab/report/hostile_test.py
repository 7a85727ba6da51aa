"""Metrics and configs that no run writes: told of, and never a traceback."""

import json
import re

import pytest

from grpo_jax.lab import report
from grpo_jax.run.keep import metrics_file
from tests.cli import call
from tests.lab.report import made_runs
from tests.lab.report.pages import page_of

pytestmark = pytest.mark.usefixtures('quick_audit')
LARGE = '1' + '0' * 400
LINES = {
  'a whole number beyond floats': f'{{"step": 41, "reward": {LARGE}}}',
  'a number that is nearly infinite': '{"step": 41, "grad_norm": 1e308}',
  'the same below 0': '{"step": 41, "grad_norm": -1e308}',
  'a step beyond 64 bits': f'{{"step": {2**63}, "reward": 1.0}}',
  'a step beyond floats': f'{{"step": {LARGE}, "reward": 1.0}}',
  'a step below 0': '{"step": -1, "reward": 1.0}',
  'digits without end': f'{{"step": 41, "reward": {"1" * 5000}}}',
}


@pytest.mark.parametrize('name', LINES)
def test_a_line_with_a_number_that_no_run_measures_is_broken(name, tmp_path):
  folder = made_runs.run(tmp_path / 'a')
  with (folder / 'metrics.jsonl').open('a') as file:
    file.write(LINES[name] + '\n')
  assert metrics_file.read(folder / 'metrics.jsonl').broken == 1
  text = page_of(folder)
  assert 'A line of metrics.jsonl could not be read and is left out' in text
  assert 'Reward rose' in text


@pytest.mark.parametrize(
  'values', [(1e100, -1e100), (5e-324, 0.0), (5e-324, 1.0)]
)
def test_all_numbers_that_are_not_broken_can_be_drawn(values, tmp_path):
  def metrics(step):
    value = values[step % 2]
    return {'loss': value, 'reward': value, 'uniform_groups': value}

  text = page_of(made_runs.run(tmp_path / 'a', 30, metrics=metrics))
  assert 'could not be read' not in text
  assert not re.search(r'(left|bottom):-?(inf|nan)', text)


def test_numbers_that_are_not_finite_are_no_broken_line(tmp_path):
  file = tmp_path / 'metrics.jsonl'
  file.write_text('{"step": 1, "a": Infinity, "b": NaN, "c": 1e999, "d": 2}')
  found = metrics_file.read(file)
  assert found.broken == 0 and list(found.values) == ['d']


@pytest.mark.parametrize('seed', [[1, 2], {'a': 1}, 'one', None, 1.5])
def test_a_seed_that_is_no_number_leaves_a_page(seed, tmp_path):
  folder = made_runs.run(tmp_path / 'a')
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps({**config, 'seed': seed}))
  text = page_of(folder, made_runs.run(tmp_path / 'b'))
  assert '<h3>Reward ' in text


def test_a_folder_in_place_of_metrics_is_refused_in_a_sentence(tmp_path):
  folder = made_runs.run(tmp_path / 'a', None)
  (folder / 'metrics.jsonl').mkdir()
  with pytest.raises(ValueError, match='metrics.jsonl cannot be read'):
    report.make_page([str(folder)])
  out = tmp_path / 'page.html'
  done = call('report', f'--workdir={folder}', f'--out={out}')
  assert done.returncode and not out.exists()
  assert 'metrics.jsonl cannot be read' in done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.parametrize(
  'saved',
  [
    {},
    {'optim': 5},
    {'learner': None, 'steps': [1]},
    {'data': [], 'steps': True, 'log': 'x'},
    {'model': {'compute_dtype': []}, 'seed': [[]]},
  ],
)
def test_a_config_of_the_wrong_kinds_leaves_a_page(saved, tmp_path):
  folder = made_runs.run(tmp_path / 'a')
  (folder / 'config.json').write_text(json.dumps(saved))
  assert 'Reward' in page_of(folder)
