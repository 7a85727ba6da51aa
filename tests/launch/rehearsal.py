"""A process is lost, and the run ends as if it had not been.

  python -m tests.launch.rehearsal

trains a model of SmolLM2's shape (135M random weights) for three rollouts with
`launch/local.py` and four processes, over which the parameters are split. One
run is left alone. In another a process is killed with `kill -9` after the first
checkpoint; the launcher starts all again. Both must end with the same
parameters, moments, metrics and completions, bit for bit.

`--signal=TERM` is a preemption: the process is told to end, and all save first.
`--small` does the same in half a minute, with two processes of a tiny model.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from tests import cli
from tests import hf_folder
from tests import runs
from tests.launch import smollm2_shape

SMALL = (
  '--config=tests/small_config.py',
  cli.JUDGE,
  '--config.steps=4',
  '--config.mesh.fsdp=2',
  '--config.learner.micro_rows=4',
  '--config.data.heldout=',
  '--config.checkpoint.best_metric=reward',
  '--config.checkpoint.every_steps=1',
)
LIMIT_SECS = 3600.0  # the first start compiles four times, on two cores


def smollm2(place: pathlib.Path) -> tuple[str, ...]:
  """The options of a run of SmolLM2's shape; its tokenizer goes to `place`."""
  folder = place / 'tokenizer'
  hf_folder.write_tokenizer(folder)
  file = folder / 'tokenizer.json'
  told = json.loads(file.read_text())
  # Tokens that no text has, so that there are as many as SmolLM2 has.
  vocab = told['model']['vocab']
  for number in range(len(vocab), smollm2_shape.VOCAB_SIZE):
    vocab[f'<unused{number}>'] = number
  file.write_text(json.dumps(told))
  return (
    '--config=tests/launch/smollm2_shape.py',
    f'--config.data.tokenizer={folder}',
  )


def start(
  workdir: pathlib.Path, options: tuple[str, ...], number: int
) -> subprocess.Popen:
  """The launcher; what it prints goes to `WORKDIR.log`."""
  process = subprocess.Popen(
    [
      sys.executable, 'launch/local.py', f'--num_processes={number}',
      '--pause_secs=0', '--', 'train', *options, f'--workdir={workdir}',
    ],
    cwd=runs.ROOT,
    env={**os.environ, 'PYTHONPATH': str(runs.ROOT)},
    stdout=workdir.with_suffix('.log').open('w'),
    stderr=subprocess.STDOUT,
  )  # fmt: skip
  cli.ends_with_the_test(process)
  return process


def finish(process: subprocess.Popen, workdir: pathlib.Path) -> str:
  """What was printed; the run must have ended well."""
  code = process.wait(LIMIT_SECS)
  said = workdir.with_suffix('.log').read_text()
  assert code == 0, said
  return said


def lose(
  process: subprocess.Popen,
  workdir: pathlib.Path,
  rank: int,
  by: signal.Signals,
) -> None:
  """Ends one process of the run, once a rollout is in a checkpoint."""
  end = time.monotonic() + LIMIT_SECS
  log = workdir.with_suffix('.log')
  while max(runs.checkpoints(workdir), default=0) < 1:
    assert process.poll() is None and time.monotonic() < end, log.read_text()
    time.sleep(0.02)
  (pids,) = re.findall(r'^local.py: processes (.*)$', log.read_text(), re.M)
  os.kill(int(pids.split(', ')[rank]), by)


def compare(
  place: pathlib.Path,
  options: tuple[str, ...],
  number: int,
  rank: int,
  by: signal.Signals = signal.SIGKILL,
) -> str:
  """Runs both, compares them, and returns what the second has printed.

  Args:
    place: An empty folder.
    options: Of the run.
    number: Of processes.
    rank: Of the process that is lost.
    by: What it gets.
  """
  whole, lost = place / 'whole', place / 'lost'
  finish(start(whole, options, number), whole)
  process = start(lost, options, number)
  lose(process, lost, rank, by)
  said = finish(process, lost)
  assert said.count('starts all again') == 1, said
  assert re.search(r'goes on from the checkpoint of rollout [1-9]', said), said
  runs.assert_equal(whole, lost)
  # The parameters have moved after the new start too.
  assert runs.records(whole)[-1]['update_norm'] > 0
  return said


def main() -> None:
  """Prints what the launcher said; fails at the first difference."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--small', action='store_true')
  parser.add_argument('--processes', type=int, default=4)
  parser.add_argument('--rank', type=int, default=1, help='which one is lost')
  parser.add_argument('--signal', choices=('KILL', 'TERM'), default='KILL')
  parser.add_argument('--place', help='where to write 10 GB')
  given, more = parser.parse_known_args()
  begun = time.monotonic()
  with tempfile.TemporaryDirectory(dir=given.place) as name:
    place = pathlib.Path(name)
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(place / 'compiled'))
    options, number = smollm2(place), given.processes
    if given.small:
      options, number = SMALL, 2
    by = signal.Signals[f'SIG{given.signal}']
    said = compare(place, (*options, *more), number, given.rank, by)
  lines = [x for x in said.splitlines() if x.startswith(('local.py', '[0]'))]
  print('\n'.join(lines))
  print(
    f'{number} processes, one lost: the run ends with the bits of the one that '
    f'was left alone ({time.monotonic() - begun:.0f} s)'
  )


if __name__ == '__main__':
  main()
