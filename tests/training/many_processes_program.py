"""One of several processes that train together, case after case.

  many_processes_program.py COORDINATOR NUMBER RANK FOLDER

Writes what each case has ended with to `FOLDER/CASE.RANK.json`.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys

from grpo_jax.training import loop
from grpo_jax.training import processes
from grpo_jax.training import stop_signal
from tests import judges
from tests import runs

LATE = 20  # a call of the judge in the second rollout
# The way of a rollout with everything in it that several processes decide on.
EVERYTHING = {
  'reward': 'tests.training.many_processes_program:judge',
  'mesh.data': 2,
  'mesh.fsdp': 2,
  'learner.method_kwargs': {'kl_coefficient': 0.1},
  'learner.batches': 2,
  'learner.epochs': 2,
  'learner.micro_rows': 4,
  'reference.refresh_steps': 3,
  'reference.refresh_weight': 0.5,
  'sampler.prompts': 8,
  'sampler.resample_rounds': 2,
  'sampler.retire_solved': True,
  'sampler.group': 2,
  'optim.decay': 'cosine',
}


_calls, _at_call = 0, {}


def judge(prompt, completion, example):
  """`even`; in the call of that number something else happens first."""
  global _calls
  _calls += 1
  _at_call.get(_calls, lambda: None)()
  return judges.even(prompt, completion, example)


def train(folder, stop, at_call=None, **changes):
  """One start of a run; `at_call` is for this process alone."""
  global _calls, _at_call
  _calls, _at_call = 0, at_call or {}
  return loop.train(runs.small(**EVERYTHING, **changes), folder, stop)


def whole(folder, rank, stop):
  return train(folder, stop)


def stopped(folder, rank, stop):
  """A signal to process 1 in the second rollout."""
  at_call = {LATE: lambda: os.kill(os.getpid(), signal.SIGTERM)}
  return train(folder, stop, at_call if rank == 1 else {})


def goes_on(folder, rank, stop):
  del stop
  with stop_signal.Stop() as another:
    return train(folder.parent / 'stopped', another)


def raises(folder, rank, stop):
  def fail():
    raise KeyError('no such answer')

  return train(folder, stop, {LATE: fail} if rank == 1 else {})


def goes_on_after_it(folder, rank, stop):
  return train(folder.parent / 'raises', stop)


def started_differently(folder, rank, stop):
  return train(folder, stop, seed=rank)


def disk_full(folder, rank, stop):
  """The first save of process 1 after the warm-up fails."""
  with full_disk() if rank == 1 else contextlib.nullcontext():
    return train(folder, stop)


@contextlib.contextmanager
def full_disk():
  """Orbax cannot write arrays, two times."""
  from orbax.checkpoint._src.serialization import serialization

  write, left = serialization.async_serialize_from_host, [2]

  async def failing(*args, **kwargs):
    left[0] -= 1
    if left[0] >= 0:
      raise OSError(28, 'No space left on device')
    return await write(*args, **kwargs)

  serialization.async_serialize_from_host = failing
  try:
    yield
  finally:
    serialization.async_serialize_from_host = write


CASES = {
  case.__name__: case
  for case in (
    whole,
    stopped,
    goes_on,
    raises,
    goes_on_after_it,
    started_differently,
    disk_full,
  )
}


def main(coordinator, number, rank, folder):
  processes.initialize(coordinator, int(number), int(rank))
  for name, case in CASES.items():
    with stop_signal.Stop() as stop:
      try:
        told = case(pathlib.Path(folder) / name, int(rank), stop)
      except ValueError as error:
        told = {'raised': type(error).__name__, 'text': str(error)}
      told['signal'] = stop.signal and stop.signal.name
    file = pathlib.Path(folder) / f'{name}.{rank}.json'
    file.write_text(json.dumps(told))
    if name == 'stopped' and rank == '0':  # for other numbers of processes
      for copy in 'one', 'four':
        shutil.copytree(pathlib.Path(folder) / name, f'{folder}/{copy}')


if __name__ == '__main__':
  main(*sys.argv[1:])
