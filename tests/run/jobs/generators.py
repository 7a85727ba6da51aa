"""Generators with a model, in threads, and runs that they draw for."""

import contextlib
import socket
import threading

import jax

from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import loop
from grpo_jax.run.jobs import generating
from grpo_jax.run.jobs import here
from tests import runs

SMALL = {
  'steps': 4,
  'reward': 'tests.judges:even',
  'optim.lr': 0.01,
  'optim.warmup_steps': 0,  # else the first update would change nothing
  'generator.parts': 2,
}


def free_port():
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


def listening(port, **changes):
  """The config of a run for which jobs draw."""
  address = {'generator.listen': f'127.0.0.1:{port}', 'generator.devices': 0}
  return runs.small(**{**SMALL, **changes, **address})


class Thread:
  """A generator on some devices, as `commands.generate` runs one."""

  def __init__(
    self, port, devices=None, name='one', wait_secs=300.0, draws=None
  ):
    self.stop, self.said = stop_signal.Stop(), []
    self.code = self.error = self.generator = None
    self._port, self._devices = port, devices or jax.devices()[-1:]
    self._name, self._wait_secs = name, wait_secs
    self._draws = draws or (lambda made: made)
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.thread.start()

  def _run(self):
    try:
      learner = generating.learner_at(f'127.0.0.1:{self._port}', '')
      alone = processes.ALONE
      hello = generating.hello(
        learner, self._wait_secs, self.stop, alone, self.said.append
      )
      if hello is None:
        return
      opened = here.opened(learner, hello, alone, self.stop, self._devices)
      with opened as (draws, about):
        self.generator = generating.Generator(
          learner,
          self._draws(draws),
          {'name': self._name, 'about': about},
          self.said.append,
          self.stop,
          self._wait_secs,
        )
        self.code = self.generator.run()
    except BaseException as error:
      self.error = error

  def ended(self, secs=300):
    self.thread.join(secs)
    assert not self.thread.is_alive()
    return self.code if self.error is None else self.error


@contextlib.contextmanager
def some(port, number=1, **options):
  """Generators, which must end well."""
  every = [
    Thread(port, name=f'{n}', devices=[jax.devices()[-1 - n]], **options)
    for n in range(number)
  ]
  try:
    yield every
  finally:
    for one in every:
      one.ended()


def train(workdir, port, *args, **changes):
  return loop.train(listening(port, **changes), workdir, *args)
