"""Several processes under random faults: `python -m tests.soak --minutes=30`.

A run on several processes is left alone once. Then it is started again and
again in new workdirs, and until its end something happens to it at random
moments: one process is killed, stands still or is asked to end; or all are
killed at once. Half of the kills wait for the next save, and come while it is
being written. All processes must then end within their bounds and with their
exit codes, and the same command must go on from the newest checkpoint there
was. Every run must end with the checkpoint, the metrics and the completions of
the one that was left alone, bit for bit.
"""

import argparse
from collections.abc import Sequence
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

from grpo_jax.hosts import processes
from tests import runs

STEPS = 60
OPTIONS = (
  '--config=tests/small_config.py',
  f'--config.steps={STEPS}',
  '--config.warm_up.steps=20',
  '--config.mesh.data=-1',
  '--config.sampler.prompts=8',
  '--config.sampler.resample_rounds=1',
  '--config.learner.micro_rows=8',
  '--config.evaluation.every_steps=20',
  '--config.checkpoint.every_steps=5',
  '--config.log.completions_every_steps=10',
)
AGAIN, ENDED = processes.START_AGAIN, 128 + signal.SIGTERM
KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT  # by JAX, without process 0
IN_A_SAVE, ALL = ' in a save', ', like all others'
# Exit codes that the others may have after each fault of one. JAX may be faster
# than the watch where the first process, which has the store, is gone.
FAULTS = {
  'is killed': {AGAIN},
  f'is killed{IN_A_SAVE}': {AGAIN},
  'stands still': {AGAIN},
  'is asked to end': {ENDED},
  f'is killed{ALL}': {KILLED},
  f'is killed{IN_A_SAVE}{ALL}': {KILLED},
}
SAVE_SECS = 0.2  # that a save takes, which is struck within them
MOST_SECS = 90.0  # in which all must have ended, on a busy machine


def start(
  workdir: pathlib.Path, number: int, log: pathlib.Path
) -> list[subprocess.Popen]:
  """One process of the command for each rank; what they say goes to `log`."""
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  kept = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return [
    subprocess.Popen(
      [
        sys.executable, '-m', 'grpo_jax', 'train', *OPTIONS,
        f'--workdir={workdir}', f'--coordinator={address}',
        f'--num_processes={number}', f'--process_id={rank}',
      ],
      cwd=runs.ROOT,
      env={**kept, 'PYTHONPATH': str(runs.ROOT), 'JAX_PLATFORMS': 'cpu'},
      stdout=subprocess.DEVNULL,
      stderr=log.with_suffix(f'.{rank}').open('w'),
    )
    for rank in range(number)
  ]  # fmt: skip


def codes(every: Sequence[subprocess.Popen]) -> list[int]:
  """The exit codes; all processes must end in time."""
  end = time.monotonic() + MOST_SECS
  try:
    return [one.wait(max(0.1, end - time.monotonic())) for one in every]
  finally:
    for one in every:
      one.kill()


def strike(
  every: Sequence[subprocess.Popen], fault: str, rank: int
) -> list[int]:
  """Lets a fault happen to a process, and says how all have ended.

  All must end by themselves, but for one that stands still: it is killed once
  the others have ended.
  """
  number = {
    'stands still': signal.SIGSTOP,
    'is asked to end': signal.SIGTERM,
  }.get(fault, signal.SIGKILL)
  struck = every if fault.endswith(ALL) else [every[rank]]
  for one in struck:
    one.send_signal(number)
  stands = struck if number == signal.SIGSTOP else []
  codes([one for one in every if one not in stands])
  for one in every:
    one.kill()
    one.wait()
  return [one.returncode for one in every]


def check_codes(
  ended: Sequence[int], fault: str, rank: int, is_done: bool
) -> None:
  """Checks with which codes all have ended; `rank` was struck."""
  own = {ENDED} if fault == 'is asked to end' else {KILLED}
  others = set(FAULTS[fault])
  if rank == 0 and fault != 'is asked to end':
    others.add(ABORTED)
  for each, code in enumerate(ended):
    # It may have come too late for some.
    allowed = (own if each == rank else others) | ({0} if is_done else set())
    assert code in allowed, (each, list(ended), fault, rank)


def half_saved(workdir: pathlib.Path) -> list[pathlib.Path]:
  """The folders of checkpoints that are not whole yet."""
  return [*(workdir / 'checkpoints').glob('*.orbax-checkpoint-tmp')]


def wait_for_fault(
  every: Sequence[subprocess.Popen],
  workdir: pathlib.Path,
  fault: str,
  secs: float,
  rng: random.Random,
) -> bool:
  """Waits for the moment of a fault; False if the processes end before it."""

  def run_until(happened) -> bool:
    while not happened():
      if any(one.poll() is not None for one in every):
        return False
      time.sleep(0.005)
    return True

  end = time.monotonic() + secs
  later = rng.uniform(0, SAVE_SECS)
  if not run_until(lambda: time.monotonic() > end):
    return False
  if IN_A_SAVE not in fault:
    return True
  # Not one that an earlier start has left, nor one that is nearly done.
  if not run_until(lambda: not half_saved(workdir)):
    return False
  if not run_until(lambda: half_saved(workdir)):
    return False
  end = time.monotonic() + later
  return run_until(lambda: time.monotonic() > end)


def through(
  workdir: pathlib.Path,
  number: int,
  rng: random.Random,
  secs: float,
  faults: Sequence[str],
) -> tuple[int, int]:
  """One run to its end, under faults.

  Args:
    workdir: Of the run; the logs of its starts lie beside it.
    number: Of processes.
    rng: Chooses faults and moments.
    secs: What a run takes that is left alone.
    faults: What may happen.

  Returns:
    How many faults there were, and how many have left half a checkpoint.
  """
  halves = 0
  for fault_number in range(100):
    log = workdir.with_suffix(f'.{fault_number}')
    every, wait = start(workdir, number, log), rng.uniform(0.1, 1) * secs
    fault, rank = rng.choice(faults), rng.randrange(number)
    saved = max(runs.checkpoints(workdir), default=None)
    if not wait_for_fault(every, workdir, fault, wait, rng):
      ended = codes(every)
      assert set(ended) == {0}, log.with_suffix('.0').read_text()
      went_on(log.with_suffix('.0').read_text(), saved, STEPS, ended)
      return fault_number, halves
    asked, ended = time.monotonic(), strike(every, fault, rank)
    done, half = runs.checkpoints(workdir), bool(half_saved(workdir))
    halves += half
    print(
      f'  after {wait:.0f} s process {rank} {fault}: exit codes {ended} in '
      f'{time.monotonic() - asked:.0f} s, checkpoints {done}'
      f'{" and half of one" if half else ""}',
      flush=True,
    )
    check_codes(ended, fault, rank, STEPS in done)
    said = log.with_suffix('.0').read_text()
    went_on(said, saved, max(done, default=None), ended)
  raise AssertionError('a run does not come to its end')


def went_on(
  said: str, saved: int | None, newest: int | None, ended: Sequence[int]
) -> None:
  """Checks that a start went on from the newest checkpoint there was.

  Args:
    said: The log of its first process.
    saved: The newest checkpoint when it was started.
    newest: The newest one at its end.
    ended: Its exit codes.
  """
  assert 'cannot be read' not in said, said
  told = re.findall(r'goes on from the checkpoint of rollout (\d+)', said)
  if saved is None or told:
    assert [*map(int, told)] == ([] if saved is None else [saved]), said
    return
  # It may have been lost before it said so, and then it has done nothing.
  assert not set(ended) <= {0, ENDED}, said
  assert newest == saved, said
  assert not re.search(r'^(warm-up|rollout) ', said, re.MULTILINE), said


def main() -> None:
  """Prints a line for each fault; fails at the first difference."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--minutes', type=float, default=30)
  parser.add_argument('--processes', type=int, default=4)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--faults', default='', help='those alone whose names have this in them'
  )
  given = parser.parse_args()
  chosen = [fault for fault in FAULTS if given.faults in fault]
  rng, faults, halves, done = random.Random(given.seed), 0, 0, 0
  with tempfile.TemporaryDirectory() as name:
    place = pathlib.Path(name)
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(place / 'compiled'))
    begun = time.monotonic()
    for whole in ('compiles', 'whole'):
      begun_whole = time.monotonic()
      ended = start(place / whole, given.processes, place / f'{whole}.log')
      assert {one.wait(900) for one in ended} == {0}
      secs = time.monotonic() - begun_whole
    print(f'one run takes {secs:.0f} s', flush=True)
    while time.monotonic() - begun < 60 * given.minutes:
      workdir = place / f'run_{done}'
      more = through(workdir, given.processes, rng, secs, chosen)
      faults, halves = faults + more[0], halves + more[1]
      runs.assert_equal(place / 'whole', workdir)
      done += 1
      print(f'run {done} ends with the same bits', flush=True)
  print(
    f'{done} runs of {given.processes} processes, {faults} faults, of which '
    f'{halves} have left half a checkpoint, '
    f'{(time.monotonic() - begun) / 60:.0f} minutes: every run ends with the '
    'bits of the one that was left alone'
  )


if __name__ == '__main__':
  main()
