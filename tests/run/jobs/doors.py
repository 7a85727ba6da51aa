"""A door that is open, and generators that draw without a model."""

import contextlib
import threading

import numpy as np

from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.hosts import stop_signal
from grpo_jax.run import drawing
from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import door as door_lib
from grpo_jax.run.jobs import generating
from grpo_jax.run.jobs import wire
from grpo_jax.serving import listening

SECRET = b'of the test'


@contextlib.contextmanager
def opened(desk, secret=SECRET, port=0, run='a run', hello=None, **options):
  """The address of a learner's door over a desk."""
  signer = wire.Signer(secret)
  door = door_lib.Door(desk, signer, hello or {'run': run}, **options)
  with listening.Listening(door, listening.bound(port=port)) as it:
    try:
      yield f'127.0.0.1:{it.address[1]}'
    finally:
      door.is_closing = True


def rollout_of(index, length=3):
  """A rollout of zeros, of prompts with these numbers."""
  blank = rollout_lib.blank(len(index), 2, 4, length, 1, (4, 8))
  return blank._replace(
    index=np.array(index, np.int64),
    texts=[[f'{n} {g}' for g in range(2)] for n in index],
    reward_names=('judge',),
  )


class Draws:
  """Draws nothing but numbers; may wait, or fail."""

  def __init__(self, before=lambda job, check: None):
    self.before, self.versions, self.jobs = before, [], []

  def fetch(self, version, start):
    self.versions.append(version)

  def load(self, version, start):
    assert self.versions[-1] == version

  def draw(self, job, check, newest):
    self.jobs.append(job)
    self.before(job, check)
    index = [record['index'] for record in job.records]
    use = dict.fromkeys(
      ('wanted_secs', 'busy_secs', 'turns', 'tokens', 'read', 'parked'), 1.0
    )
    return drawing.Collected(rollout_of(index), 0.5, 1.5, use)


class Job:
  """A generator in a thread, as if it were a job."""

  def __init__(
    self, address, draws=None, secret=SECRET, wait_secs=20.0, name='one',
    begins=True,
  ):  # fmt: skip
    self.draws, self.stop, self.said = draws or Draws(), stop_signal.Stop(), []
    self.code = self.error = None
    learner = calls.Learner(address, wire.Signer(secret))

    def run():
      try:
        learner.hello()
        self.generator = generating.Generator(
          learner, self.draws, {'name': name, 'about': {}}, self.said.append,
          self.stop, wait_secs,
        )  # fmt: skip
        self.code = self.generator.run()
      except BaseException as error:
        self.error = error

    self.thread = threading.Thread(target=run, daemon=True)
    if begins:
      self.thread.start()

  def ended(self, secs=60):
    self.thread.join(secs)
    assert not self.thread.is_alive()
    return self.code if self.error is None else self.error


def jobs(number=2, version=3, step=0):
  return [
    desk_lib.Job('sample', step, n, number, [{'index': n}], version)
    for n in range(number)
  ]
