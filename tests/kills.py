"""kill -9 at random moments: `python -m tests.kills --kills=20 --seed=0`.

A short run of the embedded default is left alone once. Then it is started again
and again in new workdirs, killed at a random moment of the time it took, and
started once more by the same command. Every run must end with the checkpoint,
the metrics and the completions of the one that was left alone, bit for bit.

With `--signal=TERM` it is asked to end instead, and the seconds until it has
saved and ended are told.
"""

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from tests import runs

SHORT = (
  '--config=configs/arithmetic.py',
  '--config.steps=12',
  '--config.warm_up.steps=40',
  '--config.evaluation.every_steps=4',
  '--config.evaluation.examples=100',
  '--config.checkpoint.every_steps=3',
  '--config.checkpoint.every_warm_up_steps=10',
  '--config.log.completions_every_steps=1',
)


def start(workdir: pathlib.Path, *more: str) -> subprocess.Popen:
  """The command, in a process group of its own."""
  kept = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return subprocess.Popen(
    [
      sys.executable, '-m', 'grpo_jax', 'train', *SHORT, *more,
      f'--workdir={workdir}',
    ],
    cwd=runs.ROOT,
    env={**kept, 'PYTHONPATH': str(runs.ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
  """What a run printed; it must have ended well."""
  out, _ = process.communicate(timeout=600)
  assert process.returncode == 0, out
  return out


def signal_after(
  process: subprocess.Popen, secs: float, number: signal.Signals
) -> str:
  """Sends a signal to the whole group; says what came of it, and when."""
  try:
    process.wait(timeout=secs)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, number)
  asked = time.monotonic()
  process.communicate()
  took = time.monotonic() - asked
  return f'exit code {process.returncode} in {took:.1f} s'


def where(workdir: pathlib.Path) -> str:
  """What a killed run has left: the moment it was killed at."""
  if not workdir.exists():
    return 'before the workdir'
  lines = workdir / 'metrics.jsonl'
  done = len(lines.read_text().splitlines()) - 1 if lines.exists() else -1
  saved = runs.checkpoints(workdir)
  warm = sorted(path.name for path in workdir.glob('warm_up/[0-9]*'))
  return f'rollouts {done}, checkpoints {saved}, of the warm-up {warm}'


def main() -> None:
  """Prints a line for each kill; fails at the first difference."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--signal', choices=('KILL', 'TERM'), default='KILL')
  given = parser.parse_args()
  rng = random.Random(given.seed)
  with tempfile.TemporaryDirectory() as name:
    place = pathlib.Path(name)
    # What is compiled is kept, so that the time of a run is not compilation.
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(place / 'compiled'))
    finish(start(place / 'first'))  # compiles
    began = time.monotonic()
    finish(start(place / 'whole'))
    whole = time.monotonic() - began
    runs.assert_equal(place / 'first', place / 'whole')
    print(f'one run takes {whole:.1f} s')
    for number in range(given.kills):
      workdir, secs = place / f'killed_{number}', rng.uniform(0, whole)
      number_sent = signal.Signals[f'SIG{given.signal}']
      end = signal_after(start(workdir), secs, number_sent)
      left = where(workdir)
      finish(start(workdir))
      runs.assert_equal(place / 'whole', workdir)
      print(f'{number + 1}: after {secs:.1f} s {end} ({left}): equal')
  print(f'{given.kills} times, every run ends with the same bits')


if __name__ == '__main__':
  main()
