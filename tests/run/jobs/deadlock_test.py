"""The rules of `tests.run.deadlock_test`, where jobs draw."""

import threading
import time

import jax
import pytest

from grpo_jax.engines import fetching
from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import door as door_lib
from tests.run.deadlock_test import programs as programs
from tests.run.jobs import generators

pytestmark = pytest.mark.usefixtures('shared_programs')

LEARN = {0, 1}


@pytest.fixture(autouse=True)
def beats_fast(monkeypatch):
  monkeypatch.setattr(calls, 'BEAT_SECS', 0.2)
  monkeypatch.setattr(door_lib, 'TAKE_SECS', 0.5)


def test_1_and_2_each_device_has_one_thread_and_each_program_one_side(
  programs, tmp_path
):
  """Whoever hands out weights starts no program."""
  port = generators.free_port()
  changes = {'mesh.fsdp': 2, 'learner.micro_rows': 4, 'sampler.ahead': 2}
  with generators.some(port, 2) as every:
    generators.train(tmp_path, port, **changes)
  drawing = {one.thread.name: one for one in every}
  assert len(drawing) == 2
  threads = {}
  for thread, devices, _ in programs:
    assert devices <= LEARN or len(devices) == 1 and min(devices) >= 6, devices
    for device in devices:
      threads.setdefault(device, set()).add(thread.name)
  main = threading.main_thread().name
  assert all(threads[device] == {main} for device in LEARN)
  for device, names in threads.items():
    assert len(names) == 1
    assert device in LEARN or names <= {*drawing}


class Never:
  """Asks for weights, and does not take what it is offered."""

  def __init__(self, draws):
    self._draws = draws

  def fetch(self, *args):
    self._draws._fetch._pulled = self._stands
    self._draws.fetch(*args)

  def _stands(self, told, wanted):
    assert told['uuid'] and wanted  # it was offered
    time.sleep(3)  # and beats
    raise fetching.Late('It has stood.')

  def load(self, *args):
    self._draws.load(*args)

  def draw(self, *args):
    return self._draws.draw(*args)


def test_3_and_5_the_learner_does_not_wait_for_one_that_never_fetches(
  tmp_path, monkeypatch
):
  """Nor does a rollout: another generator draws what takes too long."""
  monkeypatch.setattr(desk_lib, 'SLOW_SECS', 0.5)
  port = generators.free_port()
  stands = generators.Thread(port, [jax.devices()[-1]], 'stands', draws=Never)
  end = time.monotonic() + 300

  def run():
    generators.train(tmp_path, port, **{'sampler.ahead': 1})

  learner = threading.Thread(target=run)
  learner.start()
  while stands.generator is None and time.monotonic() < end:
    time.sleep(0.02)
  other = generators.Thread(port, [jax.devices()[-2]], 'draws')
  learner.join(400)
  assert not learner.is_alive()
  assert other.ended() == 0 and other.generator.parts
  assert stands.ended() == 0 and not stands.generator.parts
