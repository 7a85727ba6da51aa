"""Rollouts that are drawn while the learner updates the policy."""

import dataclasses
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax import losses
from grpo_jax import rewards
from grpo_jax.config import Config
from grpo_jax.hosts import stop_signal
from grpo_jax.lab.studies import sweeps
from grpo_jax.planning import plan
from grpo_jax.planning import topologies
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import sources
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.run import learning
from grpo_jax.run import loop
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import method as build_method
from grpo_jax.run.keep.checkpoint import Checkpoints
from tests import judges
from tests import runs
from tests.cli import SMALL
from tests.cli import command
from tests.cli import popen
from tests.cli import wait_until
from tests.compilations import counted_before
from tests.run import resume_test

pytestmark = pytest.mark.usefixtures('shared_programs')

AHEAD = {
  'reward': 'tests.judges:even',
  'sampler.ahead': 1,
  'learner.anchor': 'sampler',
  'optim.warmup_steps': 0,  # else the first update would change nothing
  'optim.lr': 0.01,
}


def small(**changes):
  return runs.small(**{**AHEAD, **changes})


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  assert not threads()


def threads():
  return [t for t in threading.enumerate() if t.name == 'ahead']


def corrected(cap=2.0, kl_coefficient=0.0):
  """GRPO whose advantages have importance weights of the sampler."""
  return losses.chain(
    losses.normalize_by_group(),
    losses.truncate_token_importance(cap),
    losses.mean_over_sequences(),
    losses.ppo_clip(0.2, 0.2),
    losses.add_kl(kl_coefficient),
  )


def policies(config, workdir):
  """The run, and a function that gives its engine the policy of a version."""
  run = build.run(config)
  update = build.updater(run, None)
  saves = Checkpoints(workdir / 'checkpoints', read_only=True)

  def load(version):
    saved = saves.restore(update.compiled.abstract.params, version, 'params')
    run.engine.load(saved.state, version)

  return run, load


def assert_same(one, other):
  for x, y in zip(
    jax.tree.leaves(one.batch), jax.tree.leaves(other.batch), strict=True
  ):
    np.testing.assert_array_equal(x, y)
  assert one.texts == other.texts


@pytest.fixture(scope='module')
def whole(shared_programs, tmp_path_factory):
  """The run that others are compared with."""
  workdir = tmp_path_factory.mktemp('ahead') / 'whole'
  loop.train(small(), workdir)
  return workdir


@pytest.mark.long
@pytest.mark.parametrize('ahead', [1, 4])
def test_compilations_end_when_the_shapes_have_been_seen(
  ahead, own_programs, tmp_path
):
  """Before all ages have been: the oldest of 4 come in the fifth rollout.

  The last checkpoints have versions that others have not: a run may get more
  rollouts. What identifies these is compiled once, and not looked at here.
  """
  with counted_before(learning, 'learn') as counts:
    loop.train(small(steps=8 + ahead, **{'sampler.ahead': ahead}), tmp_path)
  assert counts[0] > 0
  later = np.diff(counts)[3:7]
  assert not np.any(later), later


@pytest.mark.long
def test_each_rollout_is_drawn_by_the_policy_before_the_last_updates(
  tmp_path, monkeypatch
):
  """And each evaluation by the newest; all policies are in checkpoints."""
  sampled, paused = sampling.sampled, sources.Ahead.paused
  evaluates = threading.Event()

  def late(run, prompt_state, step):
    if step == 2:  # the evaluation after rollout 2 has to wait for it
      evaluates.wait()
      time.sleep(0.3)
    return sampled(run, prompt_state, step)

  def noted(self):
    if self._newest[1] == 2:
      evaluates.set()
    return paused(self)

  monkeypatch.setattr(sampling, 'sampled', late)
  monkeypatch.setattr(sources.Ahead, 'paused', noted)
  config = small(**{'checkpoint.every_steps': 1, 'checkpoint.keep_last': 9})
  loop.train(config, tmp_path)
  monkeypatch.setattr(sampling, 'sampled', sampled)
  run, load = policies(config, tmp_path)
  for k, file in enumerate(parquet.files(tmp_path / 'completions')):
    version = max(k - 1, 0)
    load(version)
    rollout = parquet.read(file)
    assert set(rollout.batch.version[rollout.batch.mask]) == {version}
    drawn, _, _ = sampling.sampled(run, PromptState(4 * k), k)
    assert_same(rollout, drawn)
    load(k)  # another policy draws other completions
    other, _, _ = sampling.sampled(run, PromptState(4 * k), k)
    assert k < 1 or not np.array_equal(
      other.batch.logp_sampler, drawn.batch.logp_sampler
    )
  for step in (0, 2, 4):
    load(step)
    kept = {}
    sampling.evaluated(
      run, step, lambda rollout, at, to=kept: to.update({at: rollout})
    )
    file = parquet.path_of(tmp_path / 'evaluations', step)
    assert_same(parquet.read(file), kept[step])


def test_metrics_tell_the_age_and_what_was_waited_for(whole, tmp_path):
  loop.train(small(**{'sampler.ahead': 0}), tmp_path / 'in_turn')
  _, *records = runs.records(whole)
  ages = [(r['staleness_steps'], r['staleness_steps_max']) for r in records]
  assert ages == [(0, 0), (1, 1), (1, 1), (1, 1)]
  for record in records:
    waited = record['ahead_wait_secs']
    assert record['step_secs'] == pytest.approx(waited + record['learn_secs'])
  # An older policy: ratios are not 1.
  assert [r['ratio_p99'] != 1 for r in records[1:]] == [True] * 3
  _, *records = runs.records(tmp_path / 'in_turn')
  assert {r['staleness_steps'] for r in records} == {0}
  assert not any('ahead_wait_secs' in r for r in records)
  _, arrays, _ = runs.saved(tmp_path / 'in_turn')
  assert not any('older' in name for name in arrays)


def masked(kl_coefficient=0.0):
  """GRPO that learns nothing from what is two rollouts old."""
  del kl_coefficient
  return losses.chain(
    losses.normalize_by_group(),
    losses.mask_stale(1),
    losses.mean_over_tokens(),
    losses.clip_by_age(0.2, 0.2, -0.5),
  )


def clipped(kl_coefficient=0.0):
  """The same without a look at ages."""
  del kl_coefficient
  return losses.chain(
    losses.normalize_by_group(),
    losses.mean_over_tokens(),
    losses.ppo_clip(0.2, 0.2),
  )


def test_methods_and_metrics_know_the_age_of_each_token(tmp_path):
  changes = {'sampler.ahead': 2, 'learner.method': f'{__name__}:masked'}
  loop.train(small(**changes), tmp_path)
  _, *records = runs.records(tmp_path)
  assert [x['stale_masked'] for x in records] == [0, 0, 1, 1]
  for k, record in enumerate(records):
    assert [record[f'age_{n}_share'] for n in range(3)] == [
      n == min(k, 2) for n in range(3)
    ]
  for k, record in enumerate(records[:2]):
    assert record[f'age_{k}_ess'] == record['ess_token']
    assert record[f'age_{k}_kl'] >= 0
    assert not any(f'age_{n}_kl' in record for n in {0, 1, 2} - {k})
  # What is masked moves nothing but Adam's momentum.
  assert records[1]['grad_norm'] > 0 == records[2]['grad_norm']


def test_nothing_tells_ages_apart_where_all_are_0(tmp_path):
  """But a method that reads the age gets it: here it changes nothing."""
  found = []
  for name in ('masked', 'clipped'):
    method = f'{__name__}:{name}'
    changes = {'sampler.ahead': 0, 'learner.method': method}
    loop.train(small(steps=2, **changes), tmp_path / name)
    found.append(runs.records(tmp_path / name)[1:])
  for one, other in zip(*found, strict=True):
    assert one.pop('stale_masked') == 0
    assert one['loss'] == other['loss'] and one.keys() == other.keys()
    assert one['update_norm'] == other['update_norm'] > 0
    assert not any(name.startswith('age_') for name in one)


def test_by_default_nothing_is_drawn_in_a_thread(tmp_path, monkeypatch):
  monkeypatch.setattr(sampling, 'Ahead', None)
  assert Config().sampler.ahead == 0
  config = small(steps=2, **{'sampler.ahead': 0})
  assert loop.train(config, tmp_path)['steps'] == 2


@pytest.mark.parametrize(
  'changes',
  [
    {},
    pytest.param(
      {
        **resume_test.EVERYTHING,
        'learner.anchor': 'learner',
        'learner.method': 'tests.run.ahead_test:corrected',
        **runs.WARM,
      },
      marks=pytest.mark.long,
    ),
    pytest.param({'lora.rank': 2}, marks=pytest.mark.long),
  ],
  ids=['default', 'everything', 'lora'],
)
def test_a_run_repeats_itself_whole_or_in_pieces(changes, whole, tmp_path):
  """Stopped while a thread draws, and while it does not."""
  config = small(**changes)
  if changes:
    loop.train(config, whole := tmp_path / 'whole')
  loop.train(config, tmp_path / 'again')
  runs.assert_equal(whole, tmp_path / 'again')
  ends = []
  while not ends or ends[-1]['steps'] < config.steps:
    ends.append(loop.train(config, tmp_path / 'pieces', resume_test.After(3)))
    assert len(ends) < 12 and not threads()
  assert len(ends) > 2
  runs.assert_equal(whole, tmp_path / 'pieces')


def test_a_killed_run_goes_on_and_so_do_more_steps(whole, tmp_path):
  """What it has learned since a checkpoint is lost, and learned again."""
  loop.train(small(steps=3), tmp_path / 'killed')
  for path in (tmp_path / 'killed/checkpoints').glob('3'):
    path.rename(tmp_path / 'lost')
  assert runs.checkpoints(tmp_path / 'killed')[-1] == 2
  loop.train(small(), tmp_path / 'killed')
  runs.assert_equal(whole, tmp_path / 'killed')


def test_a_judge_that_fails_in_the_thread_fails_as_in_turn(
  tmp_path, monkeypatch
):
  """What was learned is saved, and the rollout is drawn by the same policy."""
  changes = {
    'reward': 'tests.judges:raises_late',
    'checkpoint.every_steps': 100,
    'data.heldout': '',
    'evaluation.every_steps': 0,
  }
  errors = []
  for value in (0, 1):
    workdir = tmp_path / str(value)
    with pytest.raises(rewards.RewardError, match='out of judges') as error:
      loop.train(small(**changes, **{'sampler.ahead': value}), workdir)
    errors.append(str(error.value))
    assert runs.saved(workdir)[0] == 2 and not threads()
  assert errors[0] == errors[1]
  monkeypatch.setattr(judges, 'raises_late', judges.even)
  loop.train(small(**changes), tmp_path / '1')
  loop.train(small(**changes), tmp_path / 'whole')
  runs.assert_equal(tmp_path / 'whole', tmp_path / '1')


@pytest.mark.parametrize(
  'by_signal', [False, pytest.param(True, marks=pytest.mark.long)]
)
def test_a_stop_ends_what_the_thread_draws(
  by_signal, whole, tmp_path, monkeypatch
):
  sampled, draws, waits = sampling.sampled, threading.Event(), threading.Event()

  def endless(run, prompt_state, step):
    if step < 2:
      return sampled(run, prompt_state, step)
    draws.set()
    if by_signal:
      waits.wait()
      time.sleep(0.3)  # now the main thread waits for this one
      os.kill(os.getpid(), signal.SIGTERM)
    try:
      while True:
        run.check()
        time.sleep(0.01)
    finally:
      time.sleep(1.0)  # the end of the run waits for the end of the thread

  class Asked(stop_signal.Stop):
    def __call__(self):
      return super().__call__() or not by_signal and draws.is_set()

  def told(step, *_):
    if step == 2:
      waits.set()

  config = small(**{'evaluation.every_steps': 0})
  with monkeypatch.context() as patch, Asked() as stop:
    patch.setattr(sampling, 'sampled', endless)
    done = loop.train(config, tmp_path / 'run', stop, on_rollout=told)
  # The thread may be at rollout 2 before the learner is.
  assert done['steps'] in (1, 2) and not threads()
  assert runs.saved(tmp_path / 'run')[0] == done['steps']
  loop.train(small(), tmp_path / 'run')
  (_, arrays, _), (_, others, _) = map(runs.saved, (whole, tmp_path / 'run'))
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize('where', ['workers', 'here'])
def test_nobody_waits_for_a_slow_reward(where, tmp_path, monkeypatch):
  """The judge takes five minutes, in the thread."""
  monkeypatch.setenv('JUDGING', str(tmp_path / 'judging'))
  judge = f'{{"name":"tests.judges:slow_late","weight":1.0,"where":"{where}"}}'
  process = popen(
    'train',
    SMALL,
    f'--config.rewards=({judge},)',
    '--config.steps=100',
    '--config.data.heldout=',
    '--config.sampler.ahead=1',
    '--config.learner.anchor=sampler',
    '--config.workers.time_limit_secs=400',
    f'--workdir={tmp_path}',
  )
  wait_until((tmp_path / 'judging').exists, process)
  process.send_signal(signal.SIGTERM)
  _, err = process.communicate(timeout=120)
  assert process.returncode == 143 and 'Traceback' not in err
  assert runs.saved(tmp_path)[0] in (1, 2)
  assert not runs.processes_with(f'JUDGING={tmp_path / "judging"}')


def test_a_save_that_fails_changes_nothing(whole, tmp_path, monkeypatch):
  with monkeypatch.context() as patch:
    resume_test.fail_saves(patch, [2])
    loop.train(small(), tmp_path / 'full')
  records = [runs.records(path) for path in (whole, tmp_path / 'full')]
  for record in records[1]:
    record.pop('saves_failed', None)
  one, other = ([runs.without_times(r) for r in found] for found in records)
  assert one == other


def test_an_error_while_learning_leaves_no_thread(tmp_path, monkeypatch):
  sampled, draws = sampling.sampled, threading.Event()

  def endless(run, prompt_state, step):
    while step:
      draws.set()
      run.check()
    return sampled(run, prompt_state, step)

  def fails(*_):
    draws.wait()
    raise MemoryError('while learning')

  monkeypatch.setattr(sampling, 'sampled', endless)
  monkeypatch.setattr(learning, 'learn', fails)
  with pytest.raises(MemoryError, match='while learning'):
    loop.train(small(), tmp_path)
  assert not threads()


def test_a_replay_of_it_learns_what_it_learned(whole, tmp_path):
  loop.train(small(), tmp_path / 'again', replay=whole / 'completions')
  (_, arrays, _), (_, others, _) = map(runs.saved, (whole, tmp_path / 'again'))
  assert {name for name in arrays if 'older' not in name} == others.keys()
  arrays = {name: arrays[name] for name in others}
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)


class Noted:
  """Records, and the threads in which they are read."""

  def __init__(self, records, threads):
    self._records, self._threads = records, threads

  def __len__(self):
    return len(self._records)

  def __getitem__(self, index):
    self._threads.add(threading.current_thread())
    return self._records[index]


def test_each_rollout_is_drawn_once_and_its_prompts_are_read_in_one_thread(
  tmp_path, monkeypatch
):
  sampled, drawn, threads = sampling.sampled, [], set()
  ahead = data.MakeAhead

  def noted(run, prompt_state, step):
    drawn.append(step)
    return sampled(run, prompt_state, step)

  monkeypatch.setattr(sampling, 'sampled', noted)
  monkeypatch.setattr(
    data, 'MakeAhead', lambda x, rows: ahead(Noted(x, threads), rows)
  )
  loop.train(small(), tmp_path)
  assert drawn == [0, 1, 2, 3] and threads == {threading.main_thread()}


@pytest.mark.quick
@pytest.mark.parametrize(
  'changes, said',
  [
    ({}, ''),
    ({'sampler.ahead': 0, 'learner.anchor': 'learner'}, ''),
    ({'learner.anchor': 'learner'}, "give learner.anchor='sampler'"),
    ({'learner.anchor': 'learner', 'sampler.resample_rounds': 1}, ''),
    (
      {
        'learner.anchor': 'learner',
        'learner.method': 'tests.run.ahead_test:corrected',
      },
      '',
    ),
    ({'learner.method': 'reinforce'}, "such as 'importance_sampling'"),
    (
      {'learner.method': 'reinforce', 'learner.anchor': 'learner'},
      "such as 'importance_sampling'",
    ),
    (
      {
        'learner.method': 'reinforce',
        'learner.anchor': 'learner',
        'sampler.resample_rounds': 1,
      },
      "such as 'importance_sampling'",
    ),
    ({'learner.method': 'gspo'}, ''),
    ({'learner.method': 'importance_sampling'}, ''),
    ({'learner.method': 'sapo'}, ''),
    ({'learner.method': 'cispo'}, ''),
  ],
)
def test_a_warning_says_where_nothing_corrects(changes, said):
  changes = {'learner.method_kwargs': {}, **changes}
  run = build.run(small(**changes))
  found = build_method.warnings_of_age(run.learn, run.draw, len(run.rewards))
  assert len(found) == bool(said)
  assert all(said in text and 'is biased' in text for text in found)


def unlimited(*links):
  """Importance sampling without a clip, with a correction."""
  return losses.chain(
    losses.center_by_group(),
    *links,
    losses.mean_over_tokens(),
    losses.importance_weighted(),
  )


FRESH = losses.chain(
  losses.center_by_group(), losses.mask_stale(0), losses.mean_over_tokens(),
  losses.ppo_clip(),
)  # fmt: skip
RECENT = losses.chain(
  losses.center_by_group(), losses.mask_stale(1), losses.mean_over_tokens(),
  losses.ppo_clip(),
)  # fmt: skip


@pytest.mark.parametrize(
  'method, anchor, said',
  [
    ('grpo', 'sampler', ''),
    ('deepseek_v3_2', 'sampler', ''),  # whose penalty has the ratio as weight
    ('gspo', 'sampler', ''),
    ('cispo', 'sampler', ''),
    ('sapo', 'sampler', ''),
    ('vespo', 'sampler', ''),
    ('importance_sampling', 'sampler', 'collapse'),
    ('kl_cov', 'sampler', 'collapse'),
    ('gtpo_conflict', 'sampler', 'collapse'),
    (corrected(), 'learner', ''),
    (corrected(20.0), 'learner', ''),
    (unlimited(losses.truncate_token_importance(20)), 'learner', ''),
    (unlimited(losses.truncate_sequence_importance()), 'learner', ''),
    (unlimited(losses.mask_token_importance()), 'learner', ''),
    (unlimited(losses.mask_sequence_importance()), 'learner', ''),
    (unlimited(losses.gate_geometric_mean()), 'learner', ''),
    (unlimited(losses.truncate_token_importance(1e9)), 'learner', 'collapse'),
    (unlimited(losses.mask_stale(2)), 'sampler', 'collapse'),
    (unlimited(losses.mask_stale(0)), 'sampler', ''),
    (FRESH, 'learner', ''),  # learns from nothing that is older
    (RECENT, 'learner', 'biased'),
    ('grpo', 'learner', 'biased'),
    ('importance_sampling', 'learner', 'biased'),
  ],
)
@pytest.mark.parametrize('ahead', [1, 2, 4])
def test_a_warning_says_where_nothing_limits_weights_of_old_tokens(
  ahead, method, anchor, said
):
  """Of tokens one version old it says nothing: they have hardly moved."""
  if not isinstance(method, str):
    made = method
  else:
    made = build_method.make_method(method, {})
  run = build.run(small(**{'sampler.ahead': ahead, 'learner.anchor': anchor}))
  learner = dataclasses.replace(run.learn.learner, method=made)
  learn = dataclasses.replace(run.learn, learner=learner)
  found = build_method.warnings_of_age(learn, run.draw, len(run.rewards))
  if ahead == 1 and said == 'collapse':
    said = ''
  assert len(found) == bool(said)
  for text in found:
    assert said in text and f'sampler.ahead={ahead}' in text
    assert text.endswith('.')


def test_the_warning_is_shown(tmp_path, capsys):
  loop.train(
    small(steps=0, **{'learner.anchor': 'learner', 'data.heldout': ''}),
    tmp_path,
  )
  assert 'which is biased; give' in ''.join(capsys.readouterr())


@pytest.mark.quick
@pytest.mark.parametrize('value, said', [(17, 'at most 16'), (-1, '0 or more')])
def test_other_values_are_refused(value, said):
  with pytest.raises(ValueError, match=f'sampler.ahead={value}; give {said}'):
    small(**{'sampler.ahead': value})


@pytest.mark.quick
def test_several_devices_are_refused(tmp_path):
  message = 'sampler.ahead=1 on 2 devices, .*; give sampler.ahead=0'
  with pytest.raises(ValueError, match=message):
    loop.train(small(**{'mesh.data': 2}), tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  with pytest.raises(ValueError, match=message):
    plan.plan(small(**{'mesh.data': 2}), topologies.named('h100:2'), True)
  with pytest.raises(ValueError, match='sampler.ahead=1 in a study'):
    sweeps.run(None, small(), tmp_path, 1, 1, ())


@pytest.mark.quick
def test_a_plan_counts_what_lies_beside_an_update():
  """A copy of the trained parameters, the sampler's weights, its caches."""
  found = []
  for value in (0, 1):
    config = small(**{'sampler.ahead': value})
    made = plan.plan(config, topologies.named('h100:1'), True)
    found.append({one.name: one.memory for one in made.programs})
  in_turn, before = found
  decoding = in_turn['decode']
  for name, memory in before.items():
    more = {'older parameters': decoding['parameters']}
    if name == 'train_step':
      more |= {k: decoding[k] for k in ('sampler weights', 'cache')}
    assert memory == in_turn[name] | more


@pytest.mark.long
def test_check_says_it_too(tmp_path):
  done = command(
    'train',
    SMALL,
    '--check',
    '--config.sampler.ahead=1',
    f'--workdir={tmp_path}',
  )
  assert done.returncode == 0, done.stderr
  assert 'which is biased' in done.stdout and 'older parameters' in done.stdout
