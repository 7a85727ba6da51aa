"""The lines of a log: the same facts that the live display shows."""

import re
import time

import pytest

from grpo_jax.monitor import Sample
from grpo_jax.monitor import screen as plain_lib
from grpo_jax.monitor import table
from grpo_jax.monitor.table import About
from grpo_jax.run.build import about
from tests import runs

SCALARS = {
  'reward': 0.512,
  'accuracy': 0.51,
  'kl_old_k3': 3.2e-4,
  'entropy': 0.81,
  'clipped_high': 0.012,
  'sample_tokens_per_sec': 75_100.0,
  'grad_norm': 0.25,
  'loss': None,
}


def plain(total, **changes):
  return plain_lib.Plain(About(total, about.still(runs.arithmetic(**changes))))


def test_a_line_per_rollout(capsys):
  shown = plain(100, **{'learner.epochs': 2})
  shown.write(1, SCALARS, [Sample('p', 'c', 1.0)])
  capsys.readouterr()
  shown.write(12, SCALARS, [Sample('p', 'c', 1.0)])
  out, line = capsys.readouterr()
  assert out == '' and re.fullmatch(
    r'rollout 12/100  reward 0.512  tokens per second 75.1k  '
    r'entropy 0.810 nats per token  '
    r'KL from sampling policy 3.2e-04 nats per token  '
    r'clipped at high ratios 1.2 %  left 0:0\d\n',
    line,
  )


def test_one_update_hides_what_cannot_move(capsys):
  plain(100).write(12, {**SCALARS, 'kl_old_k3': 0.0, 'clipped_high': 0.0}, [])
  text = capsys.readouterr().err
  assert 'entropy' in text and 'KL' not in text and 'clipped' not in text


def test_first_last_and_evaluations_say_everything(capsys):
  """All that the frame of a terminal shows, in its words."""
  for step in (1, 20, 100):
    shown = plain(100, **{'learner.epochs': 2})
    if step > 1:
      shown.write(1, SCALARS, [])
    capsys.readouterr()
    scalars = {**SCALARS, 'heldout_accuracy': 0.25} if step == 20 else SCALARS
    shown.write(step, scalars, [])
    text = capsys.readouterr().err
    groups = table.groups(SCALARS, {})
    assert len(groups) == 4
    for heading, rows in groups.items():
      assert f'  {heading}: ' in text
      for row in rows:
        assert f'{row.label} {row.value} {row.unit}'.rstrip() in text
    assert ('held-out accuracy 0.250' in text) == (step == 20)


def test_samples_come_with_evaluations(capsys):
  shown = plain(100)
  samples = [Sample('1+1=', 'a\n[/red]\x1b[2J', 0.0), Sample('p', 'c', 0.25)]
  shown.write(3, {'heldout_accuracy': 0.42}, samples)
  assert capsys.readouterr().err.splitlines() == [
    'rollout 3/100  held-out accuracy 0.420',
    r'  sample  reward 0.000  1+1= -> a\n[/red]\x1b[2J',
    '  sample  reward 0.250  p -> c',
  ]
  shown.write(4, {'heldout_accuracy': None}, samples)
  assert len(capsys.readouterr().err.splitlines()) == 3


def test_an_accuracy_is_one_of_rewards_that_are_0_or_1(capsys):
  shown = plain(100)
  shown.write(0, {'heldout_accuracy': 0.0}, [])
  shown.write(3, {'heldout_accuracy': 0.42, 'heldout_graded': 0.5}, [])
  shown.write(6, {'heldout_accuracy': 1.0}, [])  # of the same run
  lines = capsys.readouterr().err.splitlines()
  assert [line.partition('  left')[0] for line in lines] == [
    'rollout 0/100  held-out accuracy 0',
    'rollout 3/100  held-out mean reward 0.420',
    'rollout 6/100  held-out mean reward 1.000',
  ]


def steps_shown(capsys, total, steps, evaluations=()):
  shown = plain(total)
  for step in steps:
    name = 'heldout_accuracy' if step in evaluations else 'reward'
    shown.write(step, {name: 0.5}, [])
  lines = capsys.readouterr().err.splitlines()
  return [int(line.split()[1].split('/')[0]) for line in lines]


def test_short_runs_show_every_rollout(capsys):
  assert steps_shown(capsys, 200, range(201)) == list(range(201))


@pytest.mark.parametrize('total', [201, 1999, 100_003])
def test_long_runs_show_about_200_lines(capsys, total):
  shown = steps_shown(capsys, total, range(total + 1), evaluations=(0, 77))
  assert {0, 1, 77, total} <= set(shown)
  assert 100 <= len(shown) <= 205


def test_a_resumed_run_shows_its_first_rollout(capsys):
  assert steps_shown(capsys, 4000, range(1003, 1030)) == [1003, 1020]


@pytest.mark.parametrize('every', [1, 3, 10])
@pytest.mark.parametrize('total', [1, 4, 25, 150, 250, 300, 307, 1234, 5000])
def test_progress_shows_about_ten_lines(capsys, total, every):
  """However often it is called: the warm-up calls it every tenth step."""
  display = plain(9)
  calls = [*range(every, total, every), total]
  for step in calls:
    display.progress('warm-up', step, total, {'loss': 1.234, 'lr': None})
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == min(10, len(calls))
  assert lines[-1] == f'warm-up {total}/{total}  loss, nats per token 1.234'
  steps = [int(line.split()[1].split('/')[0]) for line in lines]
  # Evenly: no gap is longer than a tenth and what lies between two calls.
  gaps = [after - before for before, after in zip([0, *steps], steps)]
  assert max(gaps) <= total / 10 + every


def test_progress_goes_on_and_begins_again(capsys):
  display = plain(9)
  for step in (210, 220, 230, 240, 250):  # of a warm-up that goes on
    display.progress('warm-up', step, 300, {})
  for step in (1, 2, 3):
    display.progress('another', step, 3, {})
  lines = capsys.readouterr().err.splitlines()
  assert lines == [
    'warm-up 210/300', 'warm-up 240/300', 'another 1/3', 'another 2/3',
    'another 3/3',
  ]  # fmt: skip


def test_warnings_say_when(capsys):
  shown = plain(9)
  shown.warn(None, 'a')
  shown.warn(3, 'b')
  assert capsys.readouterr().err == 'warning: a\nwarning: rollout 3: b\n'


def test_what_is_done_is_said_with_its_seconds(capsys):
  shown = plain(9)
  shown.begin('compiling', True)
  shown.end('compiling', True, 61.0)
  shown.begin('sampling', False)
  shown.end('sampling', False, 61.0)
  assert re.fullmatch(r'  compiling +1:01\n', capsys.readouterr().err)


def test_what_takes_long_is_said_before_it_is_done(capsys, monkeypatch):
  monkeypatch.setattr(plain_lib, '_ANNOUNCED_SECS', 0.01)
  shown = plain(9)
  shown.begin('compiling', True)
  deadline = time.monotonic() + 120
  said = ''
  while 'compiling ...' not in said:
    assert time.monotonic() < deadline
    time.sleep(0.01)
    said += capsys.readouterr().err
  shown.end('compiling', True, 2.5)
  assert said == '  compiling ...\n'
  assert re.fullmatch(r'  compiling +2.5 s\n', capsys.readouterr().err)
  # The thread that announces it has nobody to raise an error to.
  monkeypatch.setattr(shown, 'line', lambda text: 1 / 0)
  shown.begin('breaking', True)
  shown._announcement.join()
  monkeypatch.undo()
  assert capsys.readouterr().err == ''
  monkeypatch.setattr(plain_lib, '_ANNOUNCED_SECS', 600.0)
  shown.begin('closing', True)
  shown.close()
  shown._announcement.join(120)  # at once
  assert not shown._announcement.is_alive()
  assert capsys.readouterr().err == ''
