"""A metric that stops having numbers is told of; one with pauses is not."""

import pathlib

import numpy as np
import pytest

from grpo_jax.lab import report
from grpo_jax.lab.report import read
from grpo_jax.run.keep import metrics_file
from tests.lab.report import made_runs
from tests.lab.report.html_tree import Tree
from tests.lab.report.pages import page_of
from tests.lab.report.pages import parts_of

pytestmark = pytest.mark.usefixtures('quick_audit')
BROKEN = 'reward', 'entropy', 'kl_old_k3', 'grad_norm'
SAID = (
  'There is no number after rollout 30 of 100 of: reward, entropy, KL from '
  'sampling policy and gradient norm. It was not finite'
)


def breaks(step):
  return dict.fromkeys(BROKEN) if step > 30 else {}


def title_of(page, section, key):
  (title,) = [
    part.title
    for part in parts_of(page, section)
    if isinstance(part, report.Chart) and part.key == key
  ]
  return title


def test_a_run_that_breaks_is_warned_of_marked_and_titled(tmp_path):
  folder = made_runs.run(tmp_path / 'a', 100, metrics=breaks)
  page = report.make_page([str(folder)])
  warnings = [
    part.text
    for part in parts_of(page, 'Summary')
    if isinstance(part, report.Text) and part.kind == 'warning'
  ]
  assert len(warnings) == 1 and warnings[0].startswith(f'a: {SAID}')
  title = title_of(page, 'What was learned', 'reward')
  assert title.startswith('Reward rose from ')
  assert title.endswith(' until rollout 30')
  timeline, table = parts_of(page, 'Alarms')[:2]
  assert timeline.rows == [('no more numbers', [31])]
  assert len(table.rows) == 1 and table.rows[0][2].startswith(SAID)
  text = report.as_html(page)
  assert 'no metric was beyond its limit' not in text
  marks = [e[1]['title'] for e in Tree(text).of('i') if 'title' in e[1]]
  assert marks == ['rollout 31']
  held_out = title_of(page, 'What was learned', 'heldout_accuracy')
  assert 'until' not in held_out


def test_a_chart_of_seeds_says_how_many_of_them_break(tmp_path):
  made_runs.run(tmp_path / 'a', 100, metrics=breaks)
  made_runs.run(tmp_path / 'b', 100, seed=1)
  page = report.make_page([str(tmp_path / 'a'), str(tmp_path / 'b')])
  title = title_of(page, 'What was learned', 'reward')
  assert title.endswith('; 1 of 2 runs until rollout 30')


def test_an_alarm_and_silence_stand_beside_each_other(tmp_path):
  def metrics(step):
    return breaks(step) | ({'entropy': 0.001} if step == 30 else {})

  made_runs.run(tmp_path / 'a', 100, metrics=metrics)
  text = page_of(tmp_path / 'a')
  assert '2 alarms, by rollout' in text and 'below log.entropy_alarm' in text


def run_of(known, number):
  """A run with a metric that has numbers at some of its rollouts."""
  values = np.full(number, np.nan)
  values[known] = 1.0
  steps = np.arange(number)
  measured = metrics_file.Metrics(steps, {'m': values}, 0)
  return read.Run('a', pathlib.Path(), {}, None, measured, [], [])


@pytest.mark.parametrize('every', [1, 2, 4, 7, 10, 50])
@pytest.mark.parametrize('first', [0, 1])
def test_a_metric_that_is_measured_now_and_then_is_not_silent(every, first):
  for number in range(2, 300):
    run = run_of(np.arange(first, number, every), number)
    assert not read.find_silences(run)


def test_a_metric_that_is_measured_now_and_then_may_fall_silent():
  run = run_of(np.arange(0, 101, 10), 300)
  assert read.find_silences(run) == [read.Silence(100, 101, ['m'])]
  assert read.silent_after(run, 'm') == 100
  assert read.silent_after(run, 'of no run') is None


@pytest.mark.parametrize('share', [0.1, 0.5, 0.9])
def test_a_metric_that_is_measured_at_random_is_rarely_silent(share):
  """As cosines are, of rollouts in which two prompts have gradients."""
  false = 0
  for seed in range(500):
    known = np.random.default_rng(seed).random(150) < share
    false += bool(read.find_silences(run_of(known, len(known))))
  assert false <= 10


def test_the_pages_of_sound_runs_have_no_word_of_it(tmp_path):
  """Evaluations, cosines and overshoot of every few rollouts among them."""

  def metrics(step):
    return {'geometry_cosine_std': 0.1 + step if step % 7 == 0 else None}

  for rollouts in (1, 9, 39, 66):
    folder = made_runs.run(tmp_path / f'{rollouts}', rollouts, metrics=metrics)
    text = page_of(folder)
    assert 'There is no number after' not in text
    assert 'until rollout' not in text
