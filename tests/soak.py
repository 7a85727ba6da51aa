"""Several processes under random faults: `python -m tests.soak --minutes=30`.

A run on several processes is left alone once. Then it is started again and
again in new workdirs, and until its end something happens to it at random
moments: one process is killed, stands still or is asked to end; or all are
killed at once. All processes must then end within their bounds and with their
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

from grpo_jax.training import processes
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
# Exit codes that the others may have after each fault of one. JAX may be faster
# than the watch where the first process, which has the store, is gone.
FAULTS = {
  'is killed': {AGAIN},
  'stands still': {AGAIN},
  'is asked to end': {ENDED},
  'is killed, like all others': {KILLED},
}
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
  """Lets a fault happen to a process, and says how the others have ended."""
  number = {
    'stands still': signal.SIGSTOP,
    'is asked to end': signal.SIGTERM,
  }.get(fault, signal.SIGKILL)
  struck = every if fault.endswith('all others') else [every[rank]]
  for one in struck:
    one.send_signal(number)
  rest = [one for one in every if one not in struck]
  ended = codes(rest or every)
  for one in every:
    one.kill()
    one.wait()
  return ended


def through(
  workdir: pathlib.Path, number: int, rng: random.Random, secs: float
) -> int:
  """One run to its end, under faults; how many there were.

  Args:
    workdir: Of the run; the logs of its starts lie beside it.
    number: Of processes.
    rng: Chooses faults and moments.
    secs: What a run takes that is left alone.
  """
  for fault_number in range(100):
    log = workdir.with_suffix(f'.{fault_number}')
    every, wait = start(workdir, number, log), rng.uniform(0.1, 1) * secs
    fault, rank = rng.choice(list(FAULTS)), rng.randrange(number)
    saved = max(runs.checkpoints(workdir), default=None)
    end = time.monotonic() + wait
    while time.monotonic() < end and all(one.poll() is None for one in every):
      time.sleep(0.1)
    if any(one.poll() is not None for one in every):
      assert set(codes(every)) == {0}, log.with_suffix('.0').read_text()
      went_on(log, saved)
      return fault_number
    ended, asked = strike(every, fault, rank), time.monotonic()
    print(
      f'  after {wait:.0f} s process {rank} {fault}: exit codes {ended}, '
      f'checkpoints {runs.checkpoints(workdir)}',
      flush=True,
    )
    expected = FAULTS[fault] | ({ABORTED} if rank == 0 else set())
    if STEPS in runs.checkpoints(workdir):  # it came too late for the others
      expected = expected | {0}
    assert set(ended) <= expected, (ended, log.with_suffix('.0'))
    assert time.monotonic() - asked < MOST_SECS
    went_on(log, saved)
  raise AssertionError('a run does not come to its end')


def went_on(log: pathlib.Path, saved: int | None) -> None:
  """Checks that a start went on from the newest checkpoint there was."""
  said = log.with_suffix('.0').read_text()
  from_steps = re.findall(r'goes on from the checkpoint of rollout (\d+)', said)
  if from_steps:  # else it was ended before it said so, or there was none
    assert int(from_steps[0]) == saved, said
  assert 'cannot be read' not in said, said


def main() -> None:
  """Prints a line for each fault; fails at the first difference."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--minutes', type=float, default=30)
  parser.add_argument('--processes', type=int, default=4)
  parser.add_argument('--seed', type=int, default=0)
  given = parser.parse_args()
  rng, faults, done = random.Random(given.seed), 0, 0
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
      faults += through(workdir, given.processes, rng, secs)
      runs.assert_equal(place / 'whole', workdir)
      done += 1
      print(f'run {done} ends with the same bits', flush=True)
  print(
    f'{done} runs of {given.processes} processes, {faults} faults, '
    f'{(time.monotonic() - begun) / 60:.0f} minutes: every run ends with the '
    'bits of the one that was left alone'
  )


if __name__ == '__main__':
  main()
