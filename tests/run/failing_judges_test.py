"""Runs whose judges fail: each failure is counted, and the run goes on."""

import dataclasses
import math

import numpy as np
import pytest

from grpo_jax import config as config_lib
from grpo_jax.commands import train
from grpo_jax.planning import dry_run
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run.build import rewards as build_rewards
from tests import judges
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')

UNRULY = 'tests.judges:unruly'
FAILURES = {
  '': '',
  'hangs': 'time limit',
  'exits': 'exit 3',
  'segfaults': 'signal SIGSEGV',
  'eats': 'memory',
  'raises': "raised KeyError: 'gold'",
}
LIMITS = {
  'workers.number': 2,
  # Long enough for what does not hang, on any machine.
  'workers.time_limit_secs': 5.0,
  'workers.wall_limit_secs': 5.0,
  'workers.memory_limit_gib': 0.6,
  'data.heldout': '',
  'log.tensorboard': False,
}


def config(*rewards, **changes):
  """A run of two rollouts with these rewards."""
  made = runs.small(**{**LIMITS, 'steps': 2, **changes})
  rewards = tuple(config_lib.Reward(**reward) for reward in rewards)
  return dataclasses.replace(made, rewards=rewards)


def rollouts(workdir):
  return [parquet.read(file) for file in parquet.files(workdir / 'completions')]


def kinds(rollout):
  """[P,G]: what the judge was to do with each completion."""
  return np.array(
    [
      [judges.kind(ids[:n].tolist()) for ids, n in zip(*row, strict=True)]
      for row in zip(rollout.batch.tokens, rollout.length, strict=True)
    ]
  )


WHOLE = (dict(name=UNRULY, label='out'), dict(name='tests.judges:always'))


@pytest.fixture(scope='module')
def whole(shared_programs, tmp_path_factory):
  """The workdir of a run one of whose judges fails in every way."""
  workdir = tmp_path_factory.mktemp('whole')
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('JUDGES_OF', str(workdir))
    loop.train(config(*WHOLE), workdir)
  return workdir


@pytest.mark.long
def test_each_failure_is_counted_with_its_reason(whole):
  limit = LIMITS['workers.time_limit_secs']
  found = set()
  for record, rollout in zip(
    runs.records(whole)[1:], rollouts(whole), strict=True
  ):
    does = kinds(rollout)
    found |= {*does.flat}
    assert rollout.failures is not None
    wanted = np.vectorize(FAILURES.get, otypes=[object])(does)
    np.testing.assert_array_equal(rollout.failures[..., 0], wanted)
    # Those that failed are not trained on, and their reward is no 0 of a judge.
    np.testing.assert_array_equal(rollout.batch.valid, does == '')
    assert record['reward/out_failed'] == np.mean(does != '')
    assert record['rewards_failed'] == np.sum(does != '')
    assert record['judged'] == np.mean(does == '')
    even = rollout.batch.reward_parts[does == ''][:, 0]
    assert record['reward/out'] == pytest.approx(even.mean())
    assert not np.any(rollout.failures[..., 1])
    # A call ends at its limit, and not when it likes to.
    assert 0 < record['reward/out_secs_p50'] < record['reward/out_secs_max']
    assert record['reward/out_secs_max'] < limit + 120
    if 'hangs' in does:
      assert limit <= record['reward/out_secs_max']
    assert record['judge_secs'] > 0
    assert 0 < does.size / record['judged_per_sec'] < record['step_secs']
  assert found == {*FAILURES}  # so that the test says something


def test_no_process_is_left(whole):
  assert not runs.processes_with(f'JUDGES_OF={whole}')


def test_the_transcript_says_what_became_of_each_completion(whole):
  pyarrow_parquet = pytest.importorskip('pyarrow.parquet')
  table = pyarrow_parquet.read_table(parquet.files(whole / 'completions')[0])
  for row in table.to_pylist():
    failure = FAILURES[judges.kind(row['completion_ids'])]
    assert row['failure/out'] == (failure or None)
    assert row['judged'] == (not failure)
    assert row['answer'].isdigit()
    if failure:
      assert math.isnan(row['reward/out'])
    else:
      assert row['reward/out'] == float(sum(row['completion_ids']) % 2 == 0)


@pytest.mark.long
def test_a_run_in_pieces_is_the_run_in_one(whole, tmp_path):
  for ends in (1, 2):
    loop.train(
      config(*WHOLE),
      tmp_path,
      on_rollout=lambda step, *_, ends=ends: step == ends,
    )
  runs.assert_equal(whole, tmp_path)


@pytest.mark.long
def test_a_failure_may_get_a_reward_and_a_function_may_come_twice(tmp_path):
  stated = dict(on_failure='reward', failed_reward=-2.0)
  rewards = (
    dict(name=UNRULY, **stated),
    dict(
      name=UNRULY, label='half', kwargs={'worth': 0.5}, weight=3.0, **stated
    ),
  )
  loop.train(config(*rewards, steps=1), tmp_path)
  (rollout,) = rollouts(tmp_path)
  assert rollout.reward_names == (UNRULY, 'half')
  failed = kinds(rollout) != ''
  assert failed.any() and rollout.batch.valid.all()
  assert rollout.failures is not None
  assert (rollout.failures[failed] != '').all()
  assert (rollout.failures[~failed] == '').all()
  one, half = np.moveaxis(rollout.batch.reward_parts, -1, 0)
  even = rollout.batch.tokens.sum(-1) % 2 == 0  # 0 after an end
  np.testing.assert_array_equal(one, np.where(failed, -2.0, even))
  np.testing.assert_array_equal(half, np.where(failed, -2.0, even / 2))
  np.testing.assert_allclose(rollout.batch.reward, one + 3 * half)


@pytest.mark.long
def test_a_judge_that_always_fails_is_told_once(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('JUDGES_OF', str(tmp_path))
  monkeypatch.setattr(build_rewards, 'warnings', lambda *_: ['Look out.'])
  heldout = {'data.heldout': 'arithmetic', 'evaluation.examples': 4}
  rewards = dict(name='tests.judges:raises'), dict(name='tests.judges:even')
  told = config(*rewards, **heldout)
  loop.train(told, tmp_path)
  said = capsys.readouterr().err
  sentence = (
    'The reward tests.judges:raises has failed on all completions of this '
    "rollout, on 16 of 16 by: raised KeyError: 'gold'; look at"
  )
  assert said.count('has failed on all') == said.count(sentence) == 1, said
  assert 'or failed on it' in said  # nothing is left to learn from
  assert 'warning: Look out.' in said
  for record in runs.records(tmp_path):
    if record['step']:
      assert record['reward/tests.judges:raises_failed'] == 1
      assert record['reward/tests.judges:even_failed'] == 0
      assert record['rewards_failed'] == 16
  before = runs.records(tmp_path)[0]
  # A failure is no right answer, and is not left out as if nobody had asked.
  assert before['heldout_accuracy'] == 0 and before['heldout_failed'] == 4
  # The other commands judge in processes too.
  policy = policies.load(told, tmp_path, to_evaluate=True)
  summary = policies.evaluate(policy, 4, 1, [1])
  assert summary['failed'] == 4 and summary['not_judged'] == 0
  assert summary['accuracy'] == summary['pass@1'] == 0
  report = dry_run.inspect(told, tmp_path)
  failed = {'tests.judges:raises': (16, "raised KeyError: 'gold'")}
  assert report['first_rollout']['failed'] == failed
  train.show_check(report)
  shown = ' '.join(capsys.readouterr().out.split())
  assert "16, most often by: raised KeyError: 'gold'" in shown
  assert 'warning: Look out.' in shown
  # The processes have lived to the end of each command, and not longer.
  assert not runs.processes_with(f'JUDGES_OF={tmp_path}')


def test_no_process_is_left_after_an_error(tmp_path, monkeypatch):
  monkeypatch.setenv('JUDGES_OF', str(tmp_path))
  rewards = dict(name=UNRULY), dict(name='tests.judges:nan', where='here')
  with pytest.raises(ValueError, match='returned nan'):
    loop.train(config(*rewards), tmp_path)
  assert not runs.processes_with(f'JUDGES_OF={tmp_path}')
