"""The rules by which samplers and learners do not wait for each other forever.

1. A device gets programs from one thread alone.
2. A program spans one mesh.
3. Who offers weights does not wait for who fetches them, and keeps few.
4. Waits go one way.
5. An error ends the wait of the other side.
6. Prompts have no end.
7. A straggler is bounded by its own limits, and not by its group.
"""

import asyncio
import json
import threading

import jax
from jax._src import pjit
from jax._src.interpreters import pxla
import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.engines import handover
from grpo_jax.rollouts.sources import Pace
from grpo_jax.run import loop
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import placing
from tests import runs
from tests.run import generator_test
from tests.run import played

pytestmark = pytest.mark.usefixtures('shared_programs')

LEARN, SAMPLE = set(range(4)), set(range(4, 8))


@pytest.fixture
def programs(monkeypatch):
  """All programs that are started: the thread, and on which devices."""
  found, call = [], pxla.ExecuteReplicated.__call__

  def noted(self, *arguments):
    devices = {device.id for device in self._local_devices}
    found.append((threading.current_thread(), frozenset(devices), self.name))
    return call(self, *arguments)

  # Otherwise only the first start of a program passes through Python.
  monkeypatch.setattr(pjit, '_get_fastpath_data', lambda *_, **__: None)
  monkeypatch.setattr(pxla.ExecuteReplicated, '__call__', noted)
  jax.clear_caches()
  yield found
  jax.clear_caches()


@pytest.mark.parametrize(
  'updates', ['inflight', pytest.param('between', marks=pytest.mark.long)]
)
def test_1_and_2_each_device_has_one_thread_and_each_program_one_mesh(
  updates, programs, tmp_path
):
  config = generator_test.apart(
    **{'sampler.ahead': 2, 'generator.updates': updates, 'steps': 4}
  )
  loop.train(config, tmp_path)
  spans = {devices for _, devices, _ in programs}
  assert all(x <= LEARN or x <= SAMPLE for x in spans), spans
  threads = {
    name: {thread.name for thread, devices, _ in programs if devices & of}
    for name, of in (('learn', LEARN), ('sample', SAMPLE))
  }
  assert threads['sample'] == {'ahead'}
  # XLA compiles in another, which starts nothing.
  assert threads['learn'] == {threading.main_thread().name}
  assert {frozenset(LEARN), frozenset(SAMPLE)} <= spans


def test_3_publishing_waits_for_nobody_and_keeps_what_is_needed():
  config = generator_test.apart(**{'sampler.ahead': 3})
  run = build.run(config)
  updater = build.updater(run, None)
  params = updater.compiled.init(build.initial_params(run)).params
  weights = handover.Put(run.model, params, run.mesh, run.sampling_mesh)
  weights.publish(params, 0)
  jax.block_until_ready(weights.snapshot(0))
  before, pace = len(jax.live_arrays()), Pace(3)
  each = len(jax.tree.leaves(weights.snapshot(0)))
  for version in range(50):  # nobody fetches any
    weights.publish(params, version)
    weights.drop(pace.needed(version, version) | {version})
    kept = len(jax.live_arrays()) - before
    assert kept <= 3 * each  # a + 1 of them, of which one was there before


def test_4_no_rollout_waits_for_a_version_that_waits_for_it():
  for ahead in range(8):
    for every in range(1, ahead + 2):
      pace = Pace(ahead, every)
      for rollout in range(100):
        # Version v is there once the rollouts before v are.
        assert rollout - ahead <= pace.version(rollout) <= rollout


def test_5_an_error_while_sampling_ends_the_wait_of_the_learner(tmp_path):
  config = generator_test.apart(
    **{'sampler.ahead': 2, 'reward': 'tests.judges:raises_late'}
  )
  with pytest.raises(rewards.RewardError, match='out of judges'):
    loop.train(config, tmp_path)
  assert not [t for t in threading.enumerate() if t.name == 'ahead']


def test_5_an_error_while_learning_ends_the_wait_of_the_sampler(
  tmp_path, monkeypatch
):
  from grpo_jax.run import learning

  def fails(*_):
    raise MemoryError('while learning')

  monkeypatch.setattr(learning, 'learn', fails)
  with pytest.raises(MemoryError, match='while learning'):
    loop.train(generator_test.apart(**{'sampler.ahead': 1}), tmp_path)
  assert not [t for t in threading.enumerate() if t.name == 'ahead']


def test_6_prompts_have_no_end(tmp_path):
  """Three problems, of which each rollout asks four."""
  file = tmp_path / 'three.jsonl'
  lines = [{'prompt': f'{n}+1=', 'answer': str(n + 1)} for n in range(3)]
  file.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  config = generator_test.apart(
    **{'sampler.ahead': 3, 'data.train': str(file), 'steps': 6}
  )
  assert loop.train(config, tmp_path / 'run')['steps'] == 6


async def hangs(policy, example, seed):
  """Says nothing more, in one episode of each group."""
  reply = await policy.say(example['prompt'])
  if seed % 2 and len(reply.text) % 2:
    await asyncio.sleep(1000)
  return float(len(reply.text))


def test_7_an_episode_that_hangs_is_ended_by_its_own_limit(tmp_path):
  changes = {**generator_test.APART, **generator_test.MESHES['4+4']}
  changes |= {**played.SMALL, 'sampler.ahead': 2, 'steps': 3}
  del changes['reward']
  changes |= {
    'environment.name': f'{__name__}:hangs',
    'environment.seed': 'episode',
    'environment.episode_secs': 0.5,
    'environment.retries': 0,
    'data.heldout': '',
  }
  config = runs.small(**changes)
  config, objects = placing.place(config, tokenizer=played.tokenizer())
  assert loop.train(config, tmp_path, objects=objects)['steps'] == 3
  _, *records = runs.records(tmp_path)
  failed = [record['env_failed'] for record in records]
  assert 0 < np.mean(failed) < 1
  # Of their groups the others are learned from.
  assert all(record['judged'] == 1 - f for record, f in zip(records, failed))


@pytest.mark.long
def test_the_thread_that_draws_evaluates_too(programs, tmp_path):
  """Or nobody else draws meanwhile: evaluations wait for what is drawn."""
  config = generator_test.apart(**generator_test.RESUMED)
  drawing, sampled = threading.Lock(), sampling.sampled
  evaluated = sampling.evaluated

  def alone(function):
    def called(*arguments):
      assert drawing.acquire(blocking=False), 'two threads draw at once'
      try:
        return function(*arguments)
      finally:
        drawing.release()

    return called

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampling, 'sampled', alone(sampled))
    patch.setattr(sampling, 'evaluated', alone(evaluated))
    loop.train(config, tmp_path)
