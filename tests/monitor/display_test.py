"""Which display a run has, and the lines of plain logs."""

import io
import re
import sys

import pytest

from grpo_jax.monitor import Sample
from grpo_jax.monitor import _display
from grpo_jax.monitor import _rich

SCALARS = {
  'reward': 0.512,
  'accuracy': 0.51,
  'kl_old_k3': 3.2e-4,
  'entropy': 0.81,
  'clipped_high': 0.012,
  'clipped_low': 0.008,
  'sample_tokens_per_sec': 75_100.0,
  'loss': None,
}


class Terminal(io.StringIO):
  def __init__(self, is_terminal):
    super().__init__()
    self.is_terminal = is_terminal

  def isatty(self):
    return self.is_terminal


@pytest.mark.parametrize(
  'mode, terminal, term, kind',
  [
    ('auto', True, 'xterm-256color', _rich.Rich),
    ('auto', True, 'dumb', _display.Plain),
    ('auto', False, 'xterm-256color', _display.Plain),
    ('rich', False, 'xterm-256color', _rich.Rich),
    ('plain', True, 'xterm-256color', _display.Plain),
    ('none', True, 'xterm-256color', _display.Nothing),
  ],
)
def test_mode(monkeypatch, mode, terminal, term, kind):
  monkeypatch.setattr(sys, 'stderr', Terminal(terminal))
  monkeypatch.setenv('TERM', term)
  display = _display.make(mode, 9, lambda: 0.0, lambda name: [])
  assert type(display) is kind


def test_none_shows_nothing(capfd):
  display = _display.make('none', 9, lambda: 0.0, lambda name: [])
  display.write(1, SCALARS, [])
  display.line('a')
  display.progress('warm-up', 1, 2, {})
  display.warn(1, 'a')
  display.close()
  assert capfd.readouterr() == ('', '')


def test_a_line_per_step(capsys):
  plain = _display.Plain(100)
  plain.write(12, SCALARS, [Sample('p', 'c', 1.0)])
  assert capsys.readouterr() == (
    '',
    'step 12/100  reward 0.512  accuracy 0.510  kl 3.2e-04  entropy 0.810  '
    'clip 0.0200  tokens/s 75.1k\n',
  )
  plain.write(13, {'reward': 1.0, 'clipped_low': 0.5}, [])
  line = capsys.readouterr().err
  assert re.fullmatch(
    r'step 13/100  reward 1.000  clip 0.500  left 0:0\d\n', line
  )


def test_samples_come_with_evaluations(capsys):
  plain = _display.Plain(100)
  samples = [Sample('1+1=', 'a\n[/red]\x1b[2J', 0.0), Sample('p', 'c', 0.25)]
  plain.write(3, {'heldout_accuracy': 0.42}, samples)
  assert capsys.readouterr().err.splitlines() == [
    'step 3/100  held-out 0.420',
    r'  sample  reward 0.000  1+1= -> a\n[/red]\x1b[2J',
    '  sample  reward 0.250  p -> c',
  ]
  plain.write(4, {'heldout_accuracy': None}, samples)
  assert len(capsys.readouterr().err.splitlines()) == 3


def steps_shown(capsys, total, steps, evaluations=()):
  plain = _display.Plain(total)
  for step in steps:
    name = 'heldout_accuracy' if step in evaluations else 'reward'
    plain.write(step, {name: 0.5}, [])
  lines = capsys.readouterr().err.splitlines()
  return [int(line.split()[1].split('/')[0]) for line in lines]


def test_short_runs_show_every_step(capsys):
  assert steps_shown(capsys, 200, range(201)) == list(range(201))


@pytest.mark.parametrize('total', [201, 1999, 100_003])
def test_long_runs_show_about_200_lines(capsys, total):
  shown = steps_shown(capsys, total, range(total + 1), evaluations=(0, 77))
  assert {0, 1, 77, total} <= set(shown)
  assert 100 <= len(shown) <= 205


def test_a_resumed_run_shows_its_first_step(capsys):
  assert steps_shown(capsys, 4000, range(1003, 1030)) == [1003, 1020]


@pytest.mark.parametrize(
  'total, shown', [(300, 10), (25, 13), (4, 4), (1, 1), (307, 11)]
)
def test_progress_shows_about_ten_lines(capsys, total, shown):
  plain = _display.Plain(9)
  for step in range(1, total + 1):
    plain.progress('warm-up', step, total, {'loss': 1.234, 'lr': None})
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == shown
  assert lines[-1] == f'warm-up {total}/{total}  loss 1.234'


def test_warnings_say_when(capsys):
  plain = _display.Plain(9)
  plain.warn(None, 'a')
  plain.warn(3, 'b')
  assert capsys.readouterr().err == 'warning: a\nwarning: step 3: b\n'
