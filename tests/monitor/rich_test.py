"""The live display on a terminal that remembers what it was sent."""

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from grpo_jax import config
from grpo_jax import monitor
from grpo_jax.monitor import Sample
from grpo_jax.monitor import _rich

HIDE, SHOW = '\x1b[?25l', '\x1b[?25h'


@pytest.fixture
def terminal():
  return io.StringIO()


@pytest.fixture
def display(terminal):
  console = Console(file=terminal, force_terminal=True, width=100, height=50)
  series = {'reward': [0.1, 0.5], 'heldout_accuracy': [0.25]}
  made = _rich.Rich(9, lambda: 61.0, lambda name: series[name], console)
  yield made
  made.close()


def text_of(terminal):
  """What was written since the last frame began, without colours."""
  text = re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', terminal.getvalue())
  return text.replace('\r', '')


def test_the_last_frame_stays(display, terminal):
  samples = [Sample('p[/b]', 'c\n[red]', 1.0)]
  display.write(3, {'reward': 0.5}, samples)
  display.write(4, {'reward': 0.75}, [])
  display.close()
  last = text_of(terminal).split('step 4/9')[-1]
  assert re.search(r'reward +0.750', last) and re.search(
    r'held-out +0.25', last
  )
  assert 'elapsed 1:01' in last and r'p[/b] → c\n[red]' in last


def test_warnings_stay_and_scroll(display, terminal):
  display.write(3, {'reward': 0.5}, [])
  for step in range(4):
    display.warn(step, f'[/red] number {step}')
  display.line('[bold]a line')
  display.close()
  text = text_of(terminal)
  for step in range(4):
    assert text.count(f'warning: step {step}: [/red] number {step}') == 1
  assert '[bold]a line' in text
  last = text.split('step 3/9')[-1]
  assert [f'! step {n}: [/red] number {n}' in last for n in range(4)] == [
    False, True, True, True,
  ]  # fmt: skip


def test_before_the_first_number_there_is_no_frame(display, terminal):
  display.line('a')
  display.warn(None, 'b')
  assert text_of(terminal) == 'a\nwarning: b\n'


def test_progress_has_its_own_count(display, terminal):
  display.progress('warm-up', 4, 10, {'loss': 1.5})
  display.progress('warm-up', 5, 10, {'loss': 1.25})
  frame = display.render().renderables
  assert 'warm-up 5/10' in frame[0].plain and 'left' in frame[0].plain
  assert re.search(r'loss +1.250', '\n'.join(line.plain for line in frame))
  display.write(1, {'reward': 0.5}, [])
  display.close()
  last = text_of(terminal).split('step 1/9')[-1]
  assert 'warm-up' not in last and 'left' not in last


def test_a_kill_at_any_time_leaves_a_visible_cursor(display, terminal):
  display.write(1, {'reward': 0.5}, [])
  sent = terminal.getvalue()
  assert sent.rindex(SHOW) > sent.rindex(HIDE)


def test_an_exception_gives_everything_back(tmp_path, capsys):
  log = config.Log(display='rich', tensorboard=False)
  streams, threads = (sys.stdout, sys.stderr), set(threading.enumerate())
  with pytest.raises(ZeroDivisionError):
    with monitor.Monitor(log, tmp_path, 9, None, {}) as shown:
      shown.write(1, {'reward': 0.5})
      (drawing,) = set(threading.enumerate()) - threads
      print('for a program')
      raise ZeroDivisionError
  drawing.join(timeout=10)
  assert not drawing.is_alive() and (sys.stdout, sys.stderr) == streams
  out, error = capsys.readouterr()
  assert error.rindex(SHOW) > error.rindex(HIDE)
  assert out == 'for a program\n'


def test_the_frame_can_be_drawn_while_numbers_come(display):
  """The drawing thread reads what the writing one replaces."""
  errors, done = [], threading.Event()

  def read():
    try:
      while not done.is_set():
        display.render()
    except Exception as error:
      errors.append(error)

  thread = threading.Thread(target=read)
  thread.start()
  for step in range(300):
    display.write(step, {f'name{n}': 0.5 for n in range(step % 7)}, [])
  done.set()
  thread.join()
  assert not errors
