"""Generators under random faults: `python -m tests.soak_jobs --minutes=30`.

A run draws its rollouts itself, once. Then it is started again and again in new
workdirs with generators that draw for it, each a process of its own. Until the
run is done, something happens at random moments: a generator is killed, stands
still for a while, is asked to end, or is added; or the learner is killed, and
its command is given again. Every run must end with the checkpoint, the metrics
and the completions of the one that drew by itself, bit for bit; no generator
may end in another way than its fault says; and there must be progress.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

from tests import runs

STEPS = 40
OPTIONS = (
  '--config=tests/small_config.py',
  f'--config.steps={STEPS}',
  "--config.rewards=({'name': 'tests.run.jobs.judges:slow', 'weight': 1.0, "
  "'where': 'here'},)",
  '--config.warm_up.steps=0',
  '--config.optim.lr=0.01',
  '--config.optim.warmup_steps=0',
  '--config.sampler.prompts=8',
  '--config.sampler.resample_rounds=1',
  '--config.sampler.ahead=2',
  '--config.generator.parts=4',
  '--config.evaluation.every_steps=20',
  '--config.checkpoint.every_steps=5',
  '--config.log.completions_every_steps=5',
)
GENERATORS = 3
MOST = 4
KILLED, ASKED = 'is killed', 'is asked to end'
STANDS, ADDED, LEARNER = 'stands still', 'is added', 'learner is killed'
FAULTS = (KILLED,) * 3 + (STANDS,) * 2 + (ASKED, ADDED, LEARNER)
MOST_SECS = 300.0  # without a new rollout, on a busy machine
EVERY_SECS = 4.0, 25.0  # between two faults


class Program:
  """One process of the command; what it says goes to a file."""

  def __init__(self, words, log: pathlib.Path):
    self.log, self.fault = log, ''
    kept = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
    self.process = subprocess.Popen(
      [sys.executable, '-m', 'grpo_jax', *words],
      cwd=runs.ROOT,
      env={**kept, 'PYTHONPATH': str(runs.ROOT), 'JAX_PLATFORMS': 'cpu'},
      stdout=log.open('a'),
      stderr=subprocess.STDOUT,
    )

  @property
  def code(self):
    return self.process.poll()

  def send(self, number):
    self.process.send_signal(number)

  def said(self) -> str:
    return self.log.read_text()[-3000:]


def train(workdir: pathlib.Path, *more: str) -> Program:
  """The learner, or the run that draws by itself."""
  words = ['train', *OPTIONS, f'--workdir={workdir}', *more]
  return Program(words, workdir.with_suffix('.log'))


class Run:
  """A learner and its generators.

  Attributes:
    faults: How often each has happened.
    lines: Rollouts that generators have brought, by their own account.
  """

  def __init__(self, folder: pathlib.Path, rng: random.Random):
    self._folder, self._rng = folder, rng
    self.workdir = folder / 'run'
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      self._address = f'127.0.0.1:{free.getsockname()[1]}'
    self._started = 0
    self.faults = collections.Counter[str]()
    self._all: list[Program] = []
    self._learner = self._learn()
    for _ in range(GENERATORS):
      self._add()
    self._standing: list[tuple[float, Program]] = []

  def _learn(self) -> Program:
    return train(self.workdir, f'--config.generator.listen={self._address}')

  def _add(self) -> None:
    self._started += 1
    log = self._folder / f'generator_{self._started}.log'
    words = ['generate', f'--learner={self._address}', '--wait_secs=240']
    self._all.append(Program(words, log))

  def _living(self) -> list[Program]:
    return [one for one in self._all if one.code is None]

  def _strike(self) -> None:
    fault = self._rng.choice(FAULTS)
    standing = [one for _, one in self._standing]
    able = [one for one in self._living() if one not in standing]
    if fault == LEARNER:
      self._learner.send(signal.SIGKILL)
      self._learner.process.wait()
      self._learner = self._learn()
    elif fault == ADDED:
      if len(self._living()) >= MOST:
        return
      self._add()
    elif not able:
      return
    else:
      one = self._rng.choice(able)
      one.fault = fault
      if fault == STANDS:
        one.send(signal.SIGSTOP)
        until = time.monotonic() + self._rng.choice((1, 5, 40))
        self._standing.append((until, one))
      else:
        one.send(signal.SIGTERM if fault == ASKED else signal.SIGKILL)
    self.faults[fault] += 1
    print(f'    {time.strftime("%H:%M:%S")} {fault}', flush=True)
    if len(self._living()) < GENERATORS and self._rng.random() < 0.7:
      self._add()

  def _wake(self, all_of_them: bool = False) -> None:
    now = time.monotonic()
    for until, one in [*self._standing]:
      if all_of_them or now > until:
        with contextlib.suppress(OSError):
          one.send(signal.SIGCONT)
        self._standing.remove((until, one))

  def _step(self) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
      return runs.records(self.workdir)[-1]['step']
    return -1

  def until_done(self) -> float:
    """Strikes until the learner is done; the longest time without progress."""
    strikes = time.monotonic() + 30  # once the programs are compiled
    step, since, longest = -1, time.monotonic(), 0.0
    try:
      while self._learner.code is None:
        time.sleep(0.1)
        self._wake()
        now, reached = time.monotonic(), self._step()
        if reached != step:
          step, longest, since = reached, max(longest, now - since), now
        if now - since > MOST_SECS:
          raise AssertionError(
            f'no progress after {step}: {self._learner.said()}'
          )
        if now > strikes:
          self._strike()
          strikes = now + self._rng.uniform(*EVERY_SECS)
        if not self._living():
          self._add()
      self._wake(all_of_them=True)
      assert self._learner.code == 0, self._learner.said()
      self._check_codes()
    finally:
      self._wake(all_of_them=True)
      for one in [*self._all, self._learner]:
        one.process.kill()
        one.process.wait()
    return longest

  def _check_codes(self) -> None:
    allowed = {
      KILLED: {-signal.SIGKILL},
      ASKED: {128 + signal.SIGTERM, -signal.SIGTERM, 0},
    }
    end = time.monotonic() + 60
    for one in self._all:
      while one.code is None and time.monotonic() < end:
        time.sleep(0.1)
        # Who was still starting, or stood, waits for a learner that is gone.
        if time.monotonic() > end - 40:
          one.fault = one.fault or 'came too late'
          break
      code = one.code
      if code is None or one.fault in (STANDS, 'came too late'):
        assert code in (None, 0, 75), (code, one.fault, one.said())
      else:
        wanted = allowed.get(one.fault, {0})
        assert code in wanted, (code, one.fault, one.said())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--minutes', type=float, default=30.0)
  parser.add_argument('--seed', type=int, default=0)
  given = parser.parse_args()
  rng, begun = random.Random(given.seed), time.monotonic()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    alone = train(folder / 'alone')
    assert alone.process.wait() == 0, alone.said()
    print(f'alone: {time.monotonic() - begun:.0f} s', flush=True)
    faults, number, longest = collections.Counter[str](), 0, 0.0
    while time.monotonic() - begun < 60 * given.minutes:
      number += 1
      own = folder / f'{number}'
      own.mkdir()
      run, since = Run(own, rng), time.monotonic()
      longest = max(longest, run.until_done())
      runs.assert_equal(folder / 'alone', run.workdir)
      faults += run.faults
      print(
        f'run {number}: {time.monotonic() - since:.0f} s, '
        f'{sum(run.faults.values())} faults, equal bit for bit',
        flush=True,
      )
    said = ', '.join(f'{number} {fault}' for fault, number in faults.items())
    print(
      f'{number} runs of {STEPS} rollouts in '
      f'{(time.monotonic() - begun) / 60:.1f} minutes, all equal; '
      f'{sum(faults.values())} faults ({said}); longest time without a rollout '
      f'{longest:.0f} s'
    )


if __name__ == '__main__':
  main()
