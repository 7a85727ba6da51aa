"""Runs that sample on devices of their own while the others learn."""

import dataclasses
import random
import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax.engines import handover
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.rollouts.sources import Pace
from grpo_jax.run import learning
from grpo_jax.run import loop
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import placing
from grpo_jax.run.keep import objects as objects_lib
from tests import runs
from tests.compilations import counted_before
from tests.run import played
from tests.run import resume_test

pytestmark = pytest.mark.usefixtures('shared_programs')

STEPS = 5
APART = {
  'steps': STEPS,
  'reward': 'tests.judges:even',
  'learner.anchor': 'sampler',
  'optim.warmup_steps': 0,  # else the first update would change nothing
  'optim.lr': 0.01,
  'data.heldout': '',
  'evaluation.every_steps': 0,
}
# Devices that learn, and others that sample.
MESHES = {
  '4+4': {'mesh.fsdp': 4, 'learner.micro_rows': 4, 'generator.devices': 4},
  '6+2': {
    'mesh.data': 3,
    'mesh.fsdp': 2,
    'learner.micro_rows': 6,
    'generator.devices': 2,
    'sampler.tensor': 2,
    'model.num_kv_heads': 2,
  },
  '2+6': {
    'mesh.tensor': 2,
    'generator.devices': 6,
    'sampler.tensor': 2,
    'model.num_kv_heads': 2,
    'model.compute_dtype': 'bfloat16',
  },
}


def apart(meshes='4+4', **changes):
  return runs.small(**{**APART, **MESHES[meshes], **changes})


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  assert not [t for t in threading.enumerate() if t.name == 'ahead']


def in_turn(config, objects=objects_lib.NOTHING):
  """The last parameters of a plain loop, which has nothing of the queue."""
  run = build.run(config, objects)
  with build_environment.player(run.environment) as player:
    return _in_turn(dataclasses.replace(run, player=player), config)


def _in_turn(run, config):
  updater = build.updater(run, build.frozen_params(run))
  state = updater.compiled.init(build.initial_params(run))
  layout, prompts = updater.layout, PromptState()
  everywhere = jax.sharding.NamedSharding(
    run.engine.mesh, jax.sharding.PartitionSpec()
  )
  every, policies = config.generator.every, []
  for k in range(config.steps):
    policies.append(jax.device_get(updater.joined(state.params)))
    version = max(k - config.sampler.ahead, 0)
    while version % every:
      version += 1
    policy = jax.device_put(policies[version], everywhere)
    run.engine.load(policy, version)
    rollout, prompts, _ = sampling.sampled(run, prompts, k)
    learned = learning.learn(updater, layout, state, rollout, k)
    state, layout = learned.state, learned.layouts.spec
  return jax.device_get(state.params)


def assert_last(workdir, params):
  _, arrays, _ = runs.saved(workdir)
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    name = '.params' + jax.tree_util.keystr(path)
    found = arrays.get(name, arrays.get(f"['params']{name[7:]}"))
    np.testing.assert_array_equal(found, x, err_msg=name)


def delayed(monkeypatch, seed):
  """Lets each thread sleep at random where it takes and gives."""
  chance = random.Random(seed)

  def late(function):
    def called(*args, **kwargs):
      time.sleep(chance.choice((0, 0, 0.02, 0.1)))
      return function(*args, **kwargs)

    return called

  for where, name in (
    (sampling, 'sampled'),
    (learning, 'learn'),
    (handover.Put, 'fetch'),
    (handover.Put, 'publish'),
  ):
    monkeypatch.setattr(where, name, late(getattr(where, name)))


@pytest.mark.parametrize(
  'meshes, changes',
  [
    ('2+6', {'sampler.ahead': 3}),
    ('4+4', {'sampler.ahead': 2, 'generator.every': 2, 'lora.rank': 2}),
    *(
      pytest.param(m, {'sampler.ahead': a}, marks=pytest.mark.long)
      for m in MESHES
      for a in range(5)
    ),
    pytest.param(
      '4+4',
      {'sampler.ahead': 2, 'sampler.resample_rounds': 1, 'sampler.top_k': 4}
      | {'learner.anchor': 'learner', 'reward': 'tests.judges:even'},
      marks=pytest.mark.long,
    ),
  ],
)
def test_it_learns_what_a_loop_in_turn_learns(
  meshes, changes, tmp_path, monkeypatch
):
  """Whatever threads do, and however the devices are divided."""
  config = apart(meshes, **changes)
  expected = in_turn(config)
  delayed(monkeypatch, seed=1)
  loop.train(config, tmp_path)
  assert_last(tmp_path, expected)
  pace = Pace(config.sampler.ahead, config.generator.every)
  for k, file in enumerate(parquet.files(tmp_path / 'completions')):
    batch = parquet.read(file).batch
    if not config.sampler.resample_rounds:
      assert set(batch.version[batch.mask]) == {pace.version(k)}


@pytest.mark.parametrize(
  'meshes', ['4+4', pytest.param('2+6', marks=pytest.mark.long)]
)
def test_so_do_episodes_of_several_turns(meshes, tmp_path, monkeypatch):
  changes = {**APART, **MESHES[meshes], **played.SMALL, 'sampler.ahead': 2}
  del changes['reward']
  config = runs.small(**{**changes, 'data.heldout': ''})
  config, objects = placing.place(config, tokenizer=played.tokenizer())
  expected = in_turn(config, objects)
  delayed(monkeypatch, seed=2)
  loop.train(config, tmp_path, objects=objects)
  assert_last(tmp_path, expected)
  assert {x['staleness_steps'] for x in runs.records(tmp_path)[3:]} == {2}


@pytest.fixture(scope='module')
def whole(shared_programs, tmp_path_factory):
  """The run that others are compared with."""
  workdir = tmp_path_factory.mktemp('apart') / 'whole'
  loop.train(apart(**RESUMED), workdir)
  return workdir


RESUMED = {
  'sampler.ahead': 3,
  'steps': 8,
  'checkpoint.every_steps': 1,
  'data.heldout': 'arithmetic',
  'evaluation.every_steps': 4,
}


def older(workdir):
  """How many finished rollouts, and earlier versions, a checkpoint holds."""
  _, arrays, host = runs.saved(workdir)
  receipt = host['receipt']
  assert bool(receipt['versions']) == any('older' in name for name in arrays)
  return len(receipt['finished']), len(receipt['versions'])


@pytest.mark.parametrize(
  'lags', [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_a_run_goes_on_wherever_it_was_stopped(
  lags, whole, tmp_path, monkeypatch
):
  """With what was drawn, or with the versions by which it is still to be."""
  if lags:
    sampled = sampling.sampled

    def slow(*args):
      time.sleep(0.3)
      return sampled(*args)

    monkeypatch.setattr(sampling, 'sampled', slow)
  config, held = apart(**RESUMED), []
  done = {'steps': 0}
  while done['steps'] < config.steps:
    done = loop.train(config, tmp_path / 'pieces', resume_test.After(2))
    held.append(older(tmp_path / 'pieces'))
    assert len(held) < 20
  loop.train(config, tmp_path / 'pieces')  # which may still evaluate
  assert len(held) > 2
  # Ahead there are rollouts, and behind there are versions.
  # Rollouts 3 ahead of the one that is next.
  assert all(sum(some) <= 4 for some in held)
  assert any(some[lags] for some in held)
  runs.assert_equal(whole, tmp_path / 'pieces')


@pytest.mark.parametrize(
  'changes',
  [
    pytest.param(
      {'generator.devices': 6, 'mesh.fsdp': 1, 'mesh.tensor': 2},
      marks=pytest.mark.long,
    ),
    pytest.param(
      {'generator.devices': 3, 'mesh.fsdp': 1}, marks=pytest.mark.long
    ),
    {'generator.devices': 0, 'mesh.fsdp': 1},
  ],
  ids=['others', 'one', 'shared'],
)
def test_what_was_drawn_ahead_is_restored_on_another_mesh(changes, tmp_path):
  config = apart(**RESUMED, **{'model.num_kv_heads': 4})
  changed = apart(**RESUMED, **{'model.num_kv_heads': 4, **changes})
  steps = 0
  while not 0 < steps < config.steps:
    steps = loop.train(config, tmp_path, resume_test.After(3))['steps']
  assert any(older(tmp_path))
  assert loop.train(changed, tmp_path)['steps'] == config.steps
  ages = [x['staleness_steps_max'] for x in runs.records(tmp_path)[1:]]
  assert ages == [0, 1, 2, 3, 3, 3, 3, 3]


@pytest.mark.long
def test_evaluations_are_of_the_newest_version(whole, tmp_path):
  config = apart(**RESUMED, **{'checkpoint.keep_last': 9})
  loop.train(config, tmp_path)
  runs.assert_equal(whole, tmp_path)
  for step in (0, 4, 8):
    kept = parquet.read(parquet.path_of(tmp_path / 'evaluations', step))
    assert set(kept.batch.version[kept.batch.mask]) == {step}


def test_inflight_tokens_are_of_several_versions_and_a_replay_repeats_it(
  tmp_path, monkeypatch
):
  """Of a run that no config determines, the learner is repeated."""
  config = apart(
    **{
      'sampler.ahead': 2,
      'generator.updates': 'inflight',
      'sampler.max_tokens': 60,
      'data.completion_buckets': (64,),
      'steps': 12,
    }
  )
  # Otherwise tiny rollouts are over before a version comes.
  monkeypatch.setattr(build, '_INFLIGHT', 2)
  loop.train(config, tmp_path / 'run')
  files = parquet.files(tmp_path / 'run' / 'completions')
  batches = [parquet.read(file).batch for file in files]
  several = 0
  for k, batch in enumerate(batches):
    versions = batch.version[batch.mask]
    assert versions.min() >= k - 2 and versions.max() <= k
    rows = np.where(batch.mask, batch.version, -1).reshape(-1, 64)
    for row, mask in zip(rows, batch.mask.reshape(-1, 64), strict=True):
      found = row[mask]
      assert (np.diff(found) >= 0).all()
      several += len({*found}) > 1
  assert several
  loop.train(
    config, tmp_path / 'again', replay=tmp_path / 'run' / 'completions'
  )
  (_, arrays, _), (_, others, _) = (
    runs.saved(tmp_path / name) for name in ('run', 'again')
  )
  for name, array in others.items():
    np.testing.assert_array_equal(array, arrays[name], err_msg=name)


@pytest.mark.long
def test_compilations_end_when_the_shapes_have_been_seen(
  own_programs, tmp_path
):
  with counted_before(learning, 'learn') as counts:
    loop.train(apart(**{'sampler.ahead': 2, 'steps': 8}), tmp_path)
  assert counts[0] > 0 and not np.any(np.diff(counts)[3:]), counts


def test_weights_are_sent_once_in_the_compute_dtype(tmp_path, monkeypatch):
  sent, put = [], jax.device_put

  def noted(x, device=None, **kwargs):
    if isinstance(x, list) and x and threading.current_thread().name != 'ahead':
      sent.append(
        sum(
          a.nbytes
          for a, at in zip(x, device, strict=True)
          if not a.devices() & set(jax.devices()[4:])
        )
      )
    return put(x, device, **kwargs)

  config = apart(**{'sampler.ahead': 1, 'model.compute_dtype': 'bfloat16'})
  run = build.run(config)
  updater = build.updater(run, None)
  state = updater.compiled.init(build.initial_params(run))
  weights = handover.Put(
    run.model, state.params, run.mesh, run.engine.mesh, None
  )
  monkeypatch.setattr(jax, 'device_put', noted)
  weights.publish(state.params, 0)
  wanted = sum(x.nbytes for x in jax.tree.leaves(weights.fetch(0)))
  assert sum(sent) == wanted


@pytest.mark.quick
@pytest.mark.parametrize(
  'changes, said',
  [
    ({'generator.devices': 8}, 'there are 8 devices, .*; give at most 7'),
    ({'mesh.fsdp': 8}, 'A mesh of .*fsdp=8'),
    ({'sampler.tensor': 3}, 'generator.devices=4 with 3 shards'),
  ],
)
def test_devices_that_are_not_there_are_refused(changes, said, tmp_path):
  with pytest.raises(ValueError, match=said):
    loop.train(apart(**changes), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_judge_that_fails_is_the_error_of_the_run(tmp_path):
  config = apart(
    **{'sampler.ahead': 3, 'reward': 'tests.judges:raises_late', 'steps': 6}
  )
  with pytest.raises(Exception, match='out of judges'):
    loop.train(config, tmp_path)
  assert runs.saved(tmp_path)[0] == 2
