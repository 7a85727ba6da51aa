"""The live display on a terminal that remembers what it was sent."""

import io
import re
import sys
import threading

import pytest
from rich.console import Console

from grpo_jax import monitor
from grpo_jax.monitor import Sample
from grpo_jax.monitor import rich
from grpo_jax.monitor import view as tiles_lib
from grpo_jax.monitor.table import About
from grpo_jax.monitor.table import History

HIDE, SHOW = '\x1b[?25l', '\x1b[?25h'


@pytest.fixture
def terminal():
  return io.StringIO()


@pytest.fixture
def display(terminal):
  console = Console(file=terminal, force_terminal=True, width=100, height=50)
  points = {'reward': [(1, 0.1), (2, 0.5)], 'heldout_accuracy': [(0, 0.25)]}
  made = rich.Rich(About(9), console)
  made.remember(History(lambda: 61.0, lambda name: points.get(name, [])))
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
  last = text_of(terminal).split('rollout 4/9')[-1]
  assert ' 0.750' in last and ' 0.100' in last  # the curve's scale
  assert 'elapsed 1:01' in last and r'p[/b] → c\n[red]' in last
  assert 'stopped' in last and 'best 0.250' in last


def test_the_end_leaves_room_for_the_prompt(display):
  display.write(9, {'reward': 0.5, 'entropy': 0.5}, [])
  display._console.height = 16
  full = display.render().renderables
  display.close()
  last = display.render().renderables
  assert last[1].plain == '  done'
  assert (len(full), len(last)) == (16, 12)


def test_warnings_stay_and_scroll(display, terminal):
  display.write(3, {'reward': 0.5}, [])
  for step in range(4):
    display.warn(step, f'[/red] number {step}')
  display.line('[bold]a line')
  display.close()
  text = text_of(terminal)
  for step in range(4):
    assert text.count(f'warning: rollout {step}: [/red] number {step}') == 1
  assert '[bold]a line' in text
  last = text.split('rollout 3/9')[-1]
  assert [f'! rollout {n}: [/red] number {n}' in last for n in range(4)] == [
    False, True, True, True,
  ]  # fmt: skip


def test_the_frame_follows_the_terminal_and_the_numbers(display):
  def last():
    return display.render().renderables[-2].plain

  samples = [Sample('p', f'completion {n}', 1.0) for n in range(3)]
  display.write(3, {'reward': 0.5, 'entropy': 0.5}, samples)
  assert last().endswith('completion 2')
  display._console.height = 20
  assert last().endswith('completion 2')
  for n in range(3):
    display.warn(n, 'number')
  assert last().endswith('completion 0')


def test_before_the_first_number_there_are_clocks(display, terminal):
  display.line('a')
  display.warn(None, 'b')
  assert text_of(terminal) == 'a\nwarning: b\n'
  display.begin('compiling', True)
  line = display.render().renderables[0]
  assert re.fullmatch(r'  compiling  0.\d s', line.plain)
  display._began -= 61
  assert display.render().renderables[0].plain == '  compiling  1:01'
  display.end('compiling', True, 61.0)
  assert display._live is None, 'the terminal is free for a question'
  display.begin('loading', True)  # and breaks off
  display.close()
  last = text_of(terminal)
  assert re.search(r'  compiling +1:01\n', last)
  assert 'stopped' not in last and 'rollout' not in last


def test_later_phases_are_only_in_the_frame(display, terminal):
  display.write(1, {'reward': 0.5}, [])
  display.begin('sampling', False)
  assert display.render().renderables[1].plain.startswith('  sampling  0.')
  display.end('sampling', False, 3.0)
  assert display.render().renderables[1].plain.strip() == ''
  assert '3.0 s' not in text_of(terminal)


def test_a_long_line_keeps_its_indent(display, terminal):
  display.line('  method    ' + 'word ' * 30)
  first, second, *_ = text_of(terminal).splitlines()
  assert first.startswith('  method    word')
  assert second.startswith(' ' * 12 + 'word') and len(first) <= 100


def test_progress_has_its_own_count_and_curves(display, terminal):
  display.progress('warm-up', 4, 10, {'loss': 1.5})
  display.progress('warm-up', 5, 10, {'loss': 1.25})
  frame = display.render().renderables
  assert 'warm-up 5/10' in frame[0].plain and 'left' in frame[0].plain
  text = '\n'.join(line.plain for line in frame)
  assert 'loss, nats per token' in text and '1.500' in text
  display.write(1, {'reward': 0.5}, [])
  display.close()
  last = text_of(terminal).split('rollout 1/9')[-1]
  assert 'warm-up' not in last and 'left' not in last and 'loss' not in last


def test_a_resumed_run_draws_its_whole_curve(display):
  display.write(7, {'reward': 0.75}, [])
  tiles = {tile.label: tile for tile in display._view.tiles}
  assert tiles['reward'].points == [(1, 0.1), (2, 0.5), (7, 0.75)]
  assert tiles['held-out accuracy'].value == 0.25  # of an earlier start
  assert [*tiles] == ['reward', 'held-out accuracy', 'tokens per second']


def test_the_best_of_a_long_run_is_no_mean(display):
  points = [(n, 0.9 if n == 1234 else 0.5) for n in range(5000)]
  history = {'heldout_accuracy': points}
  display.remember(History(lambda: 0.0, lambda name: history.get(name, [])))
  display.write(5001, {'heldout_accuracy': 0.5}, [])
  (tile,) = (t for t in display._view.tiles if t.label == 'held-out accuracy')
  assert tile.more == 'best 0.900'


def test_one_reward_between_0_and_1_makes_it_a_mean_reward(display):
  display.write(7, {'heldout_accuracy': 0.5, 'heldout_graded': 0.1}, [])
  display.write(8, {'heldout_accuracy': 1.0}, [])
  tiles = {tile.label: tile for tile in display._view.tiles}
  assert 'held-out accuracy' not in tiles
  one = tiles['held-out mean reward']
  assert one.points == [(0, 0.25), (7, 0.5), (8, 1.0)]
  assert one.more == 'best 1.000'


def test_an_earlier_start_may_have_had_such_a_reward(display):
  history = {'heldout_accuracy': [(0, 0.5)], 'heldout_graded': [(0, 1.0)]}
  display.remember(History(lambda: 0.0, lambda name: history.get(name, [])))
  display.write(2, {'heldout_accuracy': 1.0}, [])
  tiles = [tile.label for tile in display._view.tiles]
  assert tiles == ['reward', 'held-out mean reward', 'tokens per second']


def test_a_history_is_not_rebuilt_point_by_point(display, monkeypatch):
  """Each `added` copies the whole curve; a long history would take long."""
  monkeypatch.delattr(tiles_lib.Series, 'added')
  points = [(n, 0.5) for n in range(5000)]
  history = {'reward': points, 'heldout_accuracy': points}
  display.remember(History(lambda: 0.0, lambda name: history.get(name, [])))
  assert {len(curve.points) for curve in display._curves.values()} == {1250}


def test_a_kill_at_any_time_leaves_a_visible_cursor(display, terminal):
  display.write(1, {'reward': 0.5}, [])
  sent = terminal.getvalue()
  assert sent.rindex(SHOW) > sent.rindex(HIDE)


def test_an_exception_gives_everything_back(tmp_path, capsys):
  log = monitor.Options(display='rich', tensorboard=False)
  streams, threads = (sys.stdout, sys.stderr), set(threading.enumerate())
  with pytest.raises(ZeroDivisionError):
    with monitor.Monitor(log, tmp_path, 9, None, {}) as shown:
      shown.write(1, {'reward': 0.5})
      (drawing,) = set(threading.enumerate()) - threads
      print('for a program')
      raise ZeroDivisionError
  drawing.join(timeout=120)
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
  names = ('reward', 'heldout_accuracy', 'entropy', 'loss', 'grad_norm')
  try:
    for step in range(300):
      display.write(step, dict.fromkeys(names[: step % 6], 0.5), [])
  finally:
    done.set()
  thread.join(timeout=120)
  assert not thread.is_alive() and not errors
