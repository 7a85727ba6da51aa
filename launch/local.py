"""Several processes of one command on this machine, as a rehearsal of a pod.

  python launch/local.py --num_processes=4 -- train --config=... --workdir=...

starts `grpo-jax train ...` four times. The processes find each other. Each has
its own devices: CPU devices, unless JAX_PLATFORMS says otherwise. Each line of
output begins with the number of the process that has printed it. After the exit
codes that start_again.sh names, and after no others, all processes are started
again.

Ctrl-C and SIGTERM are passed on to all processes once; a second Ctrl-C kills
them. The launcher ends with the exit code that a single process would have.
"""

import argparse
from collections.abc import Sequence
import contextlib
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import BinaryIO

START_AGAIN = 75  # another process is gone
CTRL_C = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
LAST_SIGNAL = 31  # those after it are of applications, and end nothing
POLL_SECS = 0.05

_printing = threading.Lock()


def starts_again(code: int, asked: bool = False) -> bool:
  """Whether a run that has ended with this code is to be started again.

  `start_again.sh` says the same for shell scripts, and gives the reasons.

  Args:
    code: The exit code; 128 + n, or -n, after signal n.
    asked: Whether the launcher itself was asked to stop.
  """
  code = as_shell(code)
  if asked or code == CTRL_C:
    return False
  return code == START_AGAIN or 128 < code <= 128 + LAST_SIGNAL


def as_shell(code: int) -> int:
  """128 + n after signal n, for which Python has -n."""
  return code if code >= 0 else 128 - code


def joint(codes: Sequence[int]) -> int:
  """The one exit code of several processes: that which matters most.

  If one has failed for good, all have, however the others were ended.

  Args:
    codes: Their exit codes.
  """

  def weight(code: int) -> tuple[int, int]:
    if starts_again(code):
      return (1 if code == TERMINATED else 2), -code
    return {0: 0, CTRL_C: 3}.get(code, 4), -code

  return max(codes, key=weight)


def kills(signals: Sequence[int]) -> bool:
  """Whether a second Ctrl-C has come.

  Another SIGTERM changes nothing: many who end a group of processes send it to
  the launcher and to all.

  Args:
    signals: Those that this process has received.
  """
  return signal.SIGINT in signals[1:]


class Group:
  """Processes that were started together, and end together.

  A context manager, at whose end all of them are killed that still run, with
  the processes that they have started. That is done by another process, the
  guard, once the pipe to it is closed. So it is done too if this process is
  killed.
  """

  def __init__(
    self,
    commands: Sequence[Sequence[str]],
    env: dict[str, str],
    label: str = '%d',
  ):
    """Starts one process for each command, each in a process group.

    Args:
      commands: What to start.
      env: The environment of all.
      label: What begins their lines; may hold their number.
    """
    self._guard = subprocess.Popen(
      [
        'sh',
        '-c',
        'while read -r group; do groups="$groups -$group"; done; '
        'kill -s KILL -- $groups',
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )
    self._processes: list[subprocess.Popen] = []
    self._threads: list[threading.Thread] = []
    try:
      for rank, command in enumerate(commands):
        shown = label % rank if '%' in label else label
        self._start(shown, command, env)
    except BaseException:
      self.__exit__()
      raise

  def _start(self, label: str, command: Sequence[str], env) -> None:
    process = subprocess.Popen(
      command,
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      start_new_session=True,
    )
    self._processes.append(process)
    assert self._guard.stdin and process.stdout and process.stderr
    self._guard.stdin.write(b'%d\n' % process.pid)
    self._guard.stdin.flush()
    for source, target in (
      (process.stdout, sys.stdout.buffer),
      (process.stderr, sys.stderr.buffer),
    ):
      thread = threading.Thread(
        target=copy_lines, args=(source, target, label), daemon=True
      )
      thread.start()
      self._threads.append(thread)

  @property
  def pids(self) -> list[int]:
    """The process ids, by the number of the process."""
    return [process.pid for process in self._processes]

  def codes(self) -> list[int | None]:
    """The exit codes so far; None of a process that runs."""
    return [process.poll() for process in self._processes]

  def send(self, number: int) -> None:
    """Sends a signal to the processes that run."""
    for process in self._processes:
      process.send_signal(number)  # which looks whether it runs

  def __enter__(self) -> 'Group':
    return self

  def __exit__(self, *_) -> None:
    assert self._guard.stdin
    self._guard.stdin.close()
    for process in (self._guard, *self._processes):
      process.wait()
    for thread in self._threads:  # what they have said is printed
      thread.join(10)


def copy_lines(source: BinaryIO, target: BinaryIO, label: str) -> None:
  """Prints what a process prints, line by line, with its label before each."""
  with source:
    for line in source:
      with _printing, contextlib.suppress(OSError):
        # OSError: nobody reads it any more. The process must not wait for that.
        line = line.rstrip(b'\r\n')
        target.write(b'[%s] %s\n' % (label.encode(), line))
        target.flush()


def say(text: str) -> None:
  """Prints a line of the launcher's own."""
  with _printing:
    print(f'local.py: {text}', file=sys.stderr, flush=True)


def run_once(
  commands: Sequence[Sequence[str]],
  env: dict[str, str],
  signals: list[int],
  stop_secs: float,
) -> list[int]:
  """Starts all processes once, and waits until all have ended.

  Args:
    commands: One for each process.
    env: Their environment.
    signals: Those that this process has received; grows meanwhile.
    stop_secs: How long the others may go on once one has ended, and all once a
      signal was passed on to them. Then they are killed.

  Returns:
    Their exit codes; 128 + n after signal n.
  """
  deadline, passed_on, ended, failed = math.inf, False, False, False
  with Group(commands, env) as group:
    say(f'processes {", ".join(map(str, group.pids))}')
    while None in group.codes() and not kills(signals):
      now = time.monotonic()
      if signals and not passed_on:
        group.send(signals[0])
        passed_on, deadline = True, now + stop_secs
      for rank, code in enumerate(group.codes()):
        if code is not None and not ended:
          ended, deadline = True, min(deadline, now + stop_secs)
        if code and not failed:
          say(f'process {rank} has ended with exit code {as_shell(code)}')
          failed = True
      if now > deadline:
        late = [n for n, code in enumerate(group.codes()) if code is None]
        say(f'kills process {late} after {stop_secs:g} s')
        break
      time.sleep(POLL_SECS)
  return [as_shell(code) for code in group.codes() if code is not None]


class Generators:
  """Processes that draw for a run, each of which comes and goes by itself.

  A context manager, at whose end they have `END_SECS` to hear that the run is
  done.
  """

  END_SECS = 20.0

  def __init__(self, given: argparse.Namespace):
    self._given, self._over = given, threading.Event()
    self._ends = math.inf
    self._threads = [
      threading.Thread(target=self._keep, args=(f'g{number}',), daemon=True)
      for number in range(given.generators)
    ]
    for thread in self._threads:
      thread.start()

  def _keep(self, label: str) -> None:
    """Starts a generator, and again by the rules."""
    given = self._given
    command = [
      *shlex.split(given.program), 'generate', f'--learner={given.address}',
    ]  # fmt: skip
    while not self._over.is_set():
      with Group([command], environment(given), label) as group:
        (code,), asked = group.codes(), False
        while code is None and time.monotonic() < self._ends:
          time.sleep(POLL_SECS)
          (code,) = group.codes()
          if time.monotonic() > self._ends - self.END_SECS / 2 and not asked:
            group.send(signal.SIGTERM)
            asked = True
      if code is None or not starts_again(code, self._over.is_set()):
        return
      say(f'{label} has ended with exit code {as_shell(code)}: starts it again')
      self._over.wait(given.pause_secs)

  def __enter__(self) -> 'Generators':
    return self

  def __exit__(self, *_) -> None:
    self._ends = time.monotonic() + self.END_SECS
    self._over.set()
    for thread in self._threads:
      thread.join(self.END_SECS + 30)


def run(given: argparse.Namespace, signals: list[int]) -> int:
  """Starts all processes, and again by the rules; returns the exit code."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    given.address = f'127.0.0.1:{free.getsockname()[1]}'
  with Generators(given):
    return run_all(given, signals)


def run_all(given: argparse.Namespace, signals: list[int]) -> int:
  """As `run`, but for generators."""
  restarts = 0
  while True:
    begun = time.monotonic()
    codes = run_once(
      commands(given), environment(given), signals, given.stop_secs
    )
    code = joint(codes)
    if kills(signals):  # as of one process, after a second Ctrl-C
      return 128 + signals[-1]
    if not starts_again(code, asked=bool(signals)):
      return code
    if time.monotonic() - begun > given.progress_secs:
      restarts = 0
    if restarts >= given.max_restarts:
      say(f'exit codes {codes}: ends, after {restarts} new starts')
      return code
    restarts += 1
    say(
      f'exit codes {codes}: starts all again in {given.pause_secs:g} s, '
      f'{restarts} of {given.max_restarts} times'
    )
    end = time.monotonic() + given.pause_secs
    while time.monotonic() < end:
      if signals:
        return 128 + signals[0]
      time.sleep(POLL_SECS)


def commands(given: argparse.Namespace) -> list[list[str]]:
  """The command of each process, for one start of all."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  jobs = []
  if given.generators:
    jobs = [f'--config.generator.listen={given.address}']
  return [
    [
      *shlex.split(given.program),
      *given.command,
      *jobs,
      f'--coordinator={address}',
      f'--num_processes={given.num_processes}',
      f'--process_id={rank}',
    ]
    for rank in range(given.num_processes)
  ]


def environment(given: argparse.Namespace) -> dict[str, str]:
  """The environment of all processes: devices of the CPU, a number for each."""
  name = '--xla_force_host_platform_device_count'
  kept = re.sub(rf'{name}=\S*', '', os.environ.get('XLA_FLAGS', ''))
  flags = f'{kept} {name}={given.devices_per_process}'.strip()
  # What is printed is to be seen at once, though it goes through a pipe.
  own = {'XLA_FLAGS': flags, 'PYTHONUNBUFFERED': '1'}
  return {'JAX_PLATFORMS': 'cpu', **os.environ, **own}


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The options, and in `command` what follows `--`."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    usage='local.py --num_processes=N [OPTION...] -- COMMAND ARG...',
  )
  for name, default, text in (
    ('num_processes', None, 'Number of processes.'),
    ('devices_per_process', 1, 'CPU devices of each process.'),
    ('generators', 0, 'Processes that draw for the run, beside these.'),
    ('max_restarts', 3, 'How often the processes may be started again.'),
    ('pause_secs', 5.0, 'Seconds to wait before they are started again.'),
    (
      'progress_secs',
      600.0,
      'Restarts are counted from 0 again after a run of so many seconds.',
    ),
    (
      'stop_secs',
      90.0,
      'Seconds until the processes are killed, after a signal or once one '
      'has ended.',
    ),
    (
      'program',
      f'{shlex.quote(sys.executable)} -m grpo_jax',
      'Program to start.',
    ),
  ):
    parser.add_argument(
      f'--{name}',
      type=int if default is None else type(default),
      default=default,
      required=default is None,
      help=text if default is None else f'{text} Default: {default}.',
    )
  end = argv.index('--') if '--' in argv else len(argv)
  given = parser.parse_args(argv[:end])
  given.command = argv[end + 1 :]
  if not given.command:
    parser.error('give the command of grpo-jax after --, as in -- train.')
  for name, least in (
    ('num_processes', 1),
    ('devices_per_process', 1),
    ('generators', 0),
  ):
    if getattr(given, name) < least:
      parser.error(f'--{name}={getattr(given, name)}; give {least} or more.')
  return given


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns the exit code."""
  given = parse(argv)
  signals: list[int] = []

  def receive(number, frame):
    del frame
    signals.append(number)

  signal.signal(signal.SIGINT, receive)
  signal.signal(signal.SIGTERM, receive)
  try:
    return run(given, signals)
  except (FileNotFoundError, PermissionError) as error:
    say(f'{error.filename} cannot be started; give another --program.')
    return 2


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
