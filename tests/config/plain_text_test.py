"""Text of others is told in a sentence, and never reaches a terminal raw."""

import io
import logging
import re
import subprocess
import sys
import types
import warnings

import pytest
from rich import console
from rich import table

from grpo_jax import monitor
from grpo_jax import rewards
from grpo_jax.commands import convert
from grpo_jax.commands import doctor
from grpo_jax.commands import main
from grpo_jax.commands import printing
from grpo_jax.commands import report
from grpo_jax.commands import train
from grpo_jax.config import plain_text
from grpo_jax.hosts import processes
from grpo_jax.hosts import watch
from grpo_jax.lab.studies import sweeps
from grpo_jax.monitor import screen as screen_lib
from grpo_jax.rewards import _worker
from grpo_jax.run import export
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import checkpoint
from tests import cli

EVIL = '\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x7f\u202egnp.exe\u2028'
RAW = set('\x1b\x07\x9b\r\x08\x7f\u202e\u2028')


class Lying(type):
  __name__ = property(lambda cls: EVIL)  # pyright: ignore


class Silent(ValueError, metaclass=Lying):
  def __str__(self):
    raise SystemExit(1)

  __repr__ = __str__


class Unsayable(Exception):
  def __str__(self):
    raise RuntimeError

  __repr__ = __str__


class Loud(ValueError):
  def __str__(self):
    return EVIL


@pytest.mark.parametrize(
  'text, shown',
  [
    ('a\tb\nc é 日本 🎉 👩\u200d🔬', 'a\tb\nc é 日本 🎉 👩\u200d🔬'),
    ('\x1b[31mred', '\\x1b[31mred'),
    ('\x9b31m', '\\x9b31m'),
    ('50 %\rdone', '50 %\\rdone'),
    ('a\x00\x07\x08\x0b\x7f', 'a\\x00\\x07\\x08\\x0b\\x7f'),
    ('\u202etxt\u2066\u200f', '\\u202etxt\\u2066\\u200f'),
    ('a\u2028b\u2029', 'a\\u2028b\\u2029'),
    ('\ud800', '\\ud800'),
    ('', ''),
    ('C:\\new', 'C:\\new'),
  ],
)
def test_what_commands_a_terminal_is_escaped(text, shown):
  assert plain_text.printable(text) == shown


def test_an_exception_that_cannot_speak_is_told():
  told = 'Silent: its text cannot be shown, because SystemExit is raised'
  assert plain_text.named(Silent()) == told
  told = 'Unsayable: its text cannot be shown, because RuntimeError is raised'
  assert plain_text.named(Unsayable()) == told
  assert plain_text.named(KeyError('gold')) == "KeyError: 'gold'"
  assert plain_text.shown(Silent()) == 'a Silent that cannot be shown'
  assert plain_text.shown([1, 'a']) == "[1, 'a']"


@pytest.mark.parametrize('kind', [Silent, Unsayable, Loud])
def test_every_way_from_an_exception_to_a_text_holds(kind):
  error = kind()
  for told in (
    processes.first_line(error),
    checkpoint._first_line(error),
    _worker._failure(error),
    processes._sentence(error),
  ):
    assert told and isinstance(told, str)
  assert _worker._failure(SystemExit(Unsayable())).startswith('exit a Unsay')
  sentence = printing.sentence(error)
  assert bool(sentence) == isinstance(error, ValueError)


def raising(error):
  def judge(prompt, completion, example):
    raise error

  return judge


@pytest.mark.parametrize('kind', [Silent, Unsayable])
def test_a_reward_that_raises_it_is_a_sentence(kind):
  term = rewards.WeightedReward('mine', raising(kind()))
  with pytest.raises(rewards.RewardError, match='its text cannot be shown'):
    rewards.score([term], ['p'], ['c'], [{}])


def test_a_reward_that_returns_what_cannot_be_shown_is_a_sentence():
  for value in Silent(), [Unsayable()]:
    term = rewards.WeightedReward('mine', lambda *_, value=value: value)
    with pytest.raises(rewards.RewardError, match='that cannot be shown'):
      rewards.score([term], ['p'], ['c'], [{}])
  failed = rewards.Outcome(None, Unsayable())  # pyright: ignore
  term = rewards.WeightedReward('mine', lambda *_: failed)
  scores = rewards.score([term], ['p'], ['c'], [{}])
  assert scores.failures is not None
  assert scores.failures[0, 0] == 'a Unsayable that cannot be shown'


def test_arguments_that_a_check_cannot_speak_of_are_refused():
  def check(**_):
    raise Unsayable()

  function = rewards.checked(check)(lambda prompt, completion, example: 1.0)
  with pytest.raises(ValueError, match='its text cannot be shown'):
    rewards.check_arguments(function, {}, 'config.rewards[0].kwargs')


def told_by(capsys, function, *given):
  """What a function prints, and that it holds no command."""
  function(*given)
  out, err = capsys.readouterr()
  assert out + err and not RAW & {*out, *err}, ascii(out + err)
  assert 'x1b' in out + err
  return out + err


def test_no_place_prints_it_raw(capsys, monkeypatch, tmp_path):
  def left(code):
    raise SystemExit(code)

  monkeypatch.setattr(watch.os, '_exit', left)
  cells = table.Table(EVIL)
  cells.add_row(EVIL)
  screen = screen_lib.Screen(screen_lib.Plain(monitor.About(total_steps=1)))
  sample = monitor.Sample(EVIL, EVIL, 1.0)
  scalars = {f'reward/{EVIL}': 0.5, 'heldout_accuracy': 0.5, 'reward': 0.5}

  def refused():
    assert main._refuse(Loud()) == 2

  error = Loud()
  gone = types.SimpleNamespace(
    exc_type=Loud, exc_value=error, exc_traceback=None, thread=None, object=EVIL
  )
  logged = logging.LogRecord('asyncio', logging.ERROR, '', 1, EVIL, (), None)
  written = export.Written(EVIL, '', 1, None, 1)
  page = {'warnings': [EVIL], 'bytes': 1, 'secs': 1.0, 'out': EVIL}
  file = tmp_path / f'{EVIL}.jsonl'
  file.write_text('{"half')

  def devices_fail():
    monkeypatch.setattr(processes, 'is_of_the_runtime', lambda _: True)
    monkeypatch.setattr(processes.time, 'sleep', lambda _: None)
    monkeypatch.setattr(processes, '_NETWORK', re.compile('owned'))
    with pytest.raises(SystemExit):
      processes.ALONE._wait_if_lost(error)

  def leaves():
    with pytest.raises(SystemExit):
      watch.leave(EVIL)

  def warned():
    with warnings.catch_warnings():
      warnings.simplefilter('always')
      print(main._warning(EVIL, UserWarning, 'a.py', 1))

  def a_line():
    doctor_line = doctor.Line('devices', doctor.FAILED, EVIL, EVIL)
    print(plain_text.printable(doctor.text(doctor_line, 80)))

  for function in (
    refused,
    leaves,
    warned,
    a_line,
    lambda: main._print_trace(Loud()),
    lambda: main._tell_of_thread(gone),
    lambda: main._hide_orbax(gone),
    lambda: print(main._Plain().format(logged)),
    lambda: convert.show(written),
    lambda: report.show(page),
    devices_fail,
    lambda: sweeps._end_last_line(file),
    lambda: bucket._warn(EVIL),
    lambda: printing.show(cells, EVIL),
    lambda: screen.warn(1, EVIL),
    lambda: screen.line(EVIL),
    lambda: screen.write(1, scalars, [sample]),
  ):
    told_by(capsys, function)


def test_a_guarded_console_keeps_its_own_colours():
  out = io.StringIO()
  made = plain_text.guarded(
    console.Console(
      file=out, force_terminal=True, color_system='standard', highlight=False
    )
  )
  made.print(f'[red]{EVIL}[/red]x')
  text = out.getvalue()
  assert text.startswith('\x1b[31m\\x1b]0;owned')
  assert '\x1b[2J' not in text and '\x9b' not in text and '\u202e' not in text


def test_the_first_rollout_is_shown_escaped(capsys):
  report = {
    'config': {},
    'shapes': {},
    'memory_gib': {},
    'warnings': [EVIL],
    'workdir': EVIL,
    'first_rollout': {
      'prompts': [EVIL],
      'completions': [EVIL],
      'rewards': [1.0],
      'failed': {EVIL: (1, EVIL)},
      'mean reward': 1.0,
      'not judged': 0,
      'truncated': 0.0,
    },
  }
  told_by(capsys, train.show_check, report)


@pytest.mark.parametrize(
  'raises, words',
  [
    ('ValueError(EVIL)', 'x1b]0;owned'),
    ('Silent()', 'its text cannot be shown, because SystemExit is raised'),
    ('Unsayable()', 'its text cannot be shown'),
    ('KeyError(EVIL)', 'KeyError'),
  ],
)
def test_a_config_file_that_raises_it_is_refused(tmp_path, raises, words):
  path = tmp_path / 'evil.py'
  path.write_text(
    'from tests.config.plain_text_test import EVIL, Silent, Unsayable\n'
    f'def get_config():\n  raise {raises}\n'
  )
  done = cli.call('train', f'--config={path}', f'--workdir={tmp_path / "w"}')
  cli.assert_refused(done, words)
  assert not RAW & {*done.stderr}


def test_a_fault_of_ours_is_traced_without_commands():
  """An exception that is no refusal ends in a traceback of Python."""
  program = (
    'import sys\n'
    'from grpo_jax.commands import audit, main\n'
    'def run(arguments):\n'
    f'  raise RuntimeError({EVIL!r})\n'
    'audit.run = run\n'
    "sys.argv = ['grpo-jax', 'audit', 'dapo']\n"
    'main.run()\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    capture_output=True,
    text=True,
    env=cli.environment(),
    cwd=cli.ROOT,
  )
  assert done.returncode == 1 and 'Traceback' in done.stderr
  assert 'x1b]0;owned' in done.stderr and not RAW & {*done.stderr}
