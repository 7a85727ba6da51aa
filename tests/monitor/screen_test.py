"""Which display a run has, and how it is told what is being done."""

import io
import sys

import pytest

from grpo_jax import config as config_lib
from grpo_jax import monitor
from grpo_jax.monitor import _display
from grpo_jax.monitor import _plain
from grpo_jax.monitor import _rich
from grpo_jax.monitor import _screen
from tests import runs


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
    ('auto', True, 'dumb', _plain.Plain),
    ('auto', False, 'xterm-256color', _plain.Plain),
    ('rich', False, 'xterm-256color', _rich.Rich),
    ('plain', True, 'xterm-256color', _plain.Plain),
    ('none', True, 'xterm-256color', _display.Nothing),
  ],
)
def test_mode(monkeypatch, mode, terminal, term, kind):
  monkeypatch.setattr(sys, 'stderr', Terminal(terminal))
  monkeypatch.setenv('TERM', term)
  assert type(_screen.of_mode(mode, _display.About(9))) is kind


def test_none_shows_nothing(tmp_path, capfd):
  with _screen.start(runs.arithmetic(**{'log.display': 'none'}), 'x') as screen:
    screen.remember(_display.History(lambda: 0.0, lambda name: []))
    with screen.phase('a'):
      screen.write(1, {'reward': 0.5}, [])
    screen.line('a')
    screen.fact('a', 'b')
    screen.progress('warm-up', 1, 2, {})
    screen.warn(1, 'a')
  assert capfd.readouterr() == ('', '')


class Recorder(_display.Nothing):
  def __init__(self):
    self.told = []

  def begin(self, doing, first):
    self.told.append(('begin', doing, first))

  def end(self, doing, first, secs):
    self.told.append(('end', doing, first))


@pytest.mark.parametrize('least', [0.0, 100.0])
def test_the_first_time_has_a_name_and_its_seconds_stay(monkeypatch, least):
  monkeypatch.setattr(_screen, '_WORTH_SECS', least)
  recorder = Recorder()
  screen = _screen.Screen(recorder)
  for _ in range(2):
    with screen.phase('sampling', 'compiling and sampling'):
      pass
    with screen.phase('any\x1b[2J'):
      pass
  assert recorder.told == [
    ('begin', 'compiling and sampling', True),
    ('end', 'compiling and sampling', not least),
    ('begin', r'any\x1b[2J', True),
    ('end', r'any\x1b[2J', not least),
    ('begin', 'sampling', False),
    ('end', 'sampling', False),
    ('begin', r'any\x1b[2J', False),
    ('end', r'any\x1b[2J', False),
  ]


def test_what_fails_is_not_done():
  recorder = Recorder()
  with pytest.raises(ZeroDivisionError):
    with _screen.Screen(recorder).phase('dividing'):
      raise ZeroDivisionError
  assert recorder.told == [('begin', 'dividing', True)]


def test_a_pipe_gets_the_facts_as_lines(capsys):
  config = runs.arithmetic(**{'log.display': 'plain'})
  with _screen.start(config, 'runs/x') as screen:
    screen.fact('devices', '1 x cpu')
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == '  run       runs/x' and lines[-1] == '  devices   1 x cpu'
  assert len(lines) == 9


def test_a_monitor_goes_on_with_the_screen(tmp_path, capsys):
  log = config_lib.Log(display='plain', tensorboard=False)
  with _screen.start(runs.arithmetic(), tmp_path) as screen:
    with monitor.Monitor(log, tmp_path, 9, None, {}, screen) as shown:
      with shown.phase('sampling'):
        shown.write(3, {'reward': 0.5, 'kl_old_k3': 0.0, 'entropy': 0.5})
  text = capsys.readouterr().err
  # The screen knows the config, so the KL, which cannot move, is not shown.
  assert 'rollout 3/100  reward 0.500' in text and 'KL' not in text
