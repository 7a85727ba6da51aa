"""Which display a run has, and how it is told what is being done."""

import io
import sys
import threading
from typing import Any

import pytest

from grpo_jax import monitor
from grpo_jax.monitor import rich
from grpo_jax.monitor import screen as screen_lib
from grpo_jax.monitor import table
from grpo_jax.monitor import view
from grpo_jax.run.build import about
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
    ('auto', True, 'xterm-256color', rich.Rich),
    ('auto', True, 'dumb', screen_lib.Plain),
    ('auto', False, 'xterm-256color', screen_lib.Plain),
    ('rich', False, 'xterm-256color', rich.Rich),
    ('plain', True, 'xterm-256color', screen_lib.Plain),
    ('none', True, 'xterm-256color', screen_lib.Nothing),
  ],
)
def test_mode(monkeypatch, mode, terminal, term, kind):
  monkeypatch.setattr(sys, 'stderr', Terminal(terminal))
  monkeypatch.setenv('TERM', term)
  assert type(screen_lib.display_for(mode, monitor.About(9))) is kind


def test_none_shows_nothing(tmp_path, capfd):
  with about.start(runs.arithmetic(**{'log.display': 'none'}), 'x') as screen:
    screen.remember(table.History(lambda: 0.0, lambda name: []))
    with screen.phase('a'):
      screen.write(1, {'reward': 0.5}, [])
    screen.line('a')
    screen.fact('a', 'b')
    screen.progress('warm-up', 1, 2, {})
    screen.warn(1, 'a')
  assert capfd.readouterr() == ('', '')


class Recorder(screen_lib.Nothing):
  def __init__(self):
    self.told = []

  def begin(self, doing, first):
    self.told.append(('begin', doing, first))

  def end(self, doing, first, secs):
    self.told.append(('end', doing, first))


@pytest.mark.parametrize('least', [0.0, 100.0])
def test_the_first_time_has_a_name_and_its_seconds_stay(monkeypatch, least):
  monkeypatch.setattr(screen_lib, '_WORTH_SECS', least)
  recorder = Recorder()
  screen = screen_lib.Screen(recorder)
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
    with screen_lib.Screen(recorder).phase('dividing'):
      raise ZeroDivisionError
  assert recorder.told == [('begin', 'dividing', True)]


class Failing:
  """A display that can do nothing; `called` has the names of what was tried."""

  def __init__(self, error):
    self.error, self.called = error, []

  def __getattr__(self, name) -> Any:
    def fail(*_):
      self.called.append(name)
      raise self.error

    return fail


def use_everything(screen):
  with screen.phase('a'):
    pass
  screen.remember(table.History(lambda: 0.0, lambda name: []))
  screen.line('to know')
  screen.progress('warm-up', 1, 1, {})
  screen.write(1, {'reward': 0.5}, [])
  screen.warn(1, 'careful')
  screen.close()


@pytest.mark.parametrize(
  'error', [ValueError('Sign\nnot allowed'), KeyError('x'), RecursionError()]
)
def test_a_display_that_fails_is_reported_once_and_left(capsys, error):
  failing: Any = Failing(error)
  use_everything(screen_lib.Screen(failing))
  assert failing.called == ['begin', 'close']
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1
  name = type(error).__name__
  assert lines[0].startswith(f'warning: the display failed ({name}')
  assert 'the run goes on' in lines[0]


def test_a_live_display_that_fails_becomes_lines(capsys):
  screen = screen_lib.Screen(rich.Rich(monitor.About(9), None))  # no console
  use_everything(screen)
  lines = capsys.readouterr().err.splitlines()
  assert lines[0].startswith('warning: the display failed (AttributeError: ')
  # What could not be drawn is not lost.
  assert lines[1:] == [
    'to know', 'warm-up 1/1', 'rollout 1/9  reward 0.500',
    'warning: rollout 1: careful',
  ]  # fmt: skip


def test_an_error_of_the_drawing_thread_reaches_the_screen(monkeypatch, capsys):
  """That thread would end with a traceback, and the frame would stand still."""
  screen = screen_lib.Screen(
    rich.Rich(monitor.About(9), rich.console(force=True))
  )
  streams, threads = (sys.stdout, sys.stderr), set(threading.enumerate())
  with screen.phase('a'):
    (drawing,) = set(threading.enumerate()) - threads
    failed = threading.Event()

    def fail(*_):
      failed.set()
      raise ValueError('Sign not allowed')

    monkeypatch.setattr(view, 'frame', fail)
    assert failed.wait(timeout=120)
  monkeypatch.undo()
  screen.write(1, {'reward': 0.5}, [])
  screen.close()
  assert (sys.stdout, sys.stderr) == streams
  drawing.join(timeout=120)
  assert not drawing.is_alive()
  error = capsys.readouterr().err
  assert error.count('the display failed (ValueError: Sign not allowed)') == 1
  assert 'Traceback' not in error
  assert error.endswith('rollout 1/9  reward 0.500\n')
  assert error.rindex('\x1b[?25h') > error.rindex('\x1b[?25l')


def test_an_error_of_the_last_frame_is_reported_too(monkeypatch, capsys):
  screen = screen_lib.Screen(
    rich.Rich(monitor.About(9), rich.console(force=True))
  )
  screen.write(1, {'reward': 0.5}, [])
  monkeypatch.setattr(view, 'frame', lambda *_: 1 / 0)
  screen.close()
  assert 'the display failed (ZeroDivisionError' in capsys.readouterr().err


@pytest.mark.parametrize('stop', [KeyboardInterrupt, SystemExit])
def test_a_stop_passes_the_display(stop, capsys):
  for call in ('line', 'close'):
    with pytest.raises(stop):
      failing: Any = Failing(stop())
      getattr(screen_lib.Screen(failing), call)(*['a'] * (call == 'line'))
  assert capsys.readouterr().err == ''


def test_a_broken_terminal_is_left_as_it_is(capsys):
  failing: Any = Failing(BrokenPipeError())
  use_everything(screen_lib.Screen(failing))
  assert len(failing.called) == 8 and capsys.readouterr().err == ''


def test_an_error_inside_a_phase_is_no_error_of_the_display(capsys):
  with pytest.raises(ValueError, match='of the run'):
    with screen_lib.Screen(screen_lib.Nothing()).phase('a'):
      raise ValueError('of the run')
  assert capsys.readouterr().err == ''


def test_a_pipe_gets_the_facts_as_lines(capsys):
  config = runs.arithmetic(**{'log.display': 'plain'})
  with about.start(config, 'runs/x') as screen:
    screen.fact('devices', '1 x cpu')
  lines = capsys.readouterr().err.splitlines()
  assert lines[0] == '  run       runs/x' and lines[-1] == '  devices   1 x cpu'
  assert len(lines) == 9


def test_a_monitor_goes_on_with_the_screen(tmp_path, capsys):
  log = monitor.Options(display='plain', tensorboard=False)
  with about.start(runs.arithmetic(), tmp_path) as screen:
    with monitor.Monitor(log, tmp_path, 9, None, {}, screen) as shown:
      with shown.phase('sampling'):
        shown.write(3, {'reward': 0.5, 'kl_old_k3': 0.0, 'entropy': 0.5})
  text = capsys.readouterr().err
  # The screen knows the config, so the KL, which cannot move, is not shown.
  assert 'rollout 3/100  reward 0.500' in text and 'KL' not in text
