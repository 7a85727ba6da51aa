"""A run that stops and goes on is the run that never stopped, bit for bit."""

from contextlib import nullcontext
import json

import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import programs
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import sources
from grpo_jax.run import loop
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import sampling
from grpo_jax.run import session
from grpo_jax.run.keep.checkpoint import Checkpoints
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')


class After(stop_signal.Stop):
  """Says stop from the n-th question on."""

  def __init__(self, questions):
    super().__init__()
    self.left = questions

  def __call__(self):
    self.left -= 1
    return self.left < 0


# KL to a reference that moves, several steps, resampling with a surplus.
EVERYTHING = {
  'reward': 'tests.judges:even',
  'learner.method_kwargs': {'kl_coefficient': 0.1},
  'learner.batches': 2,
  'learner.epochs': 2,
  'reference.refresh_steps': 3,
  'reference.refresh_weight': 0.5,
  'sampler.resample_rounds': 4,
  'sampler.retire_solved': True,
  'sampler.group': 2,
  'optim.decay': 'cosine',
}


@pytest.mark.long
def test_a_run_in_pieces_is_the_run_in_one(tmp_path):
  """Stopped in the warm-up, while sampling, in an evaluation, between steps."""
  config = runs.small(**EVERYTHING, **runs.WARM)
  whole = loop.train(config, tmp_path / 'whole')
  ends, stocks = [], 0
  while not ends or ends[-1]['steps'] < config.steps:
    ends.append(loop.train(config, tmp_path / 'pieces', After(3)))
    assert len(ends) < 12
    if ends[-1]['steps']:
      stocks += 'surplus' in runs.saved(tmp_path / 'pieces')[2]['sha256']
  assert len(ends) > 4
  assert stocks  # once at least there were groups in stock
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'pieces')
  for name in ('before', 'after', 'after_step', 'steps'):
    assert whole[name] == ends[-1][name]
  # A run that was stopped says of which rollout its last evaluation is.
  assert whole['after_step'] == 4
  assert {(end['steps'], end['after_step']) for end in ends} >= {(3, 2)}
  assert not (tmp_path / 'pieces' / 'warm_up').exists()


@pytest.mark.long
def test_more_steps_go_on_and_a_finished_run_is_left_alone(
  tmp_path, monkeypatch
):
  compiled = []  # for which rollout an update was compiled ahead

  def start(updater, layout, example, step):
    compiled.append(step)
    return programs.NOTHING

  monkeypatch.setattr(programs, 'compile_ahead', start)
  loop.train(runs.small(steps=4), tmp_path / 'whole')
  loop.train(runs.small(steps=2), tmp_path / 'parts')
  loop.train(runs.small(steps=4), tmp_path / 'parts')
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'parts')
  before = (tmp_path / 'parts' / 'metrics.jsonl').read_bytes()
  again = loop.train(runs.small(steps=4), tmp_path / 'parts')
  assert again['steps'] == 4 and compiled == [0, 0, 2]
  assert (tmp_path / 'parts' / 'metrics.jsonl').read_bytes() == before


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
  """As after a kill: lines that no checkpoint covers, the last one half."""
  config = runs.small(**{'reward': 'tests.judges:even', 'steps': 3})
  loop.train(config, tmp_path / 'whole')
  loop.train(config, tmp_path / 'killed', After(7))
  metrics = tmp_path / 'killed' / 'metrics.jsonl'
  kept = metrics.read_bytes()
  number = len(kept.splitlines())
  assert 1 < number < 4
  metrics.write_bytes(kept + b'{"step": 3, "reward": 9}\n{"step": 4, "rew')
  loop.train(config, tmp_path / 'killed')
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'killed')


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh(tmp_path):
  changes = {
    'reward': 'tests.judges:even',
    'warm_up.steps': 0,
    'data.heldout': '',
    'learner.micro_rows': 4,
  }
  loop.train(runs.small(steps=3, **changes), tmp_path / 'one')
  loop.train(runs.small(steps=2, **changes), tmp_path / 'two')
  spread = {'mesh.data': 2, 'mesh.fsdp': 2}
  loop.train(runs.small(steps=3, **changes, **spread), tmp_path / 'two')
  (_, arrays, _), (step, others, _) = (
    runs.saved(tmp_path / 'one'),
    runs.saved(tmp_path / 'two'),
  )
  parameters = [name for name in arrays if 'params' in name]
  assert step == 3 and len(parameters) > 5
  for name in parameters:
    np.testing.assert_allclose(
      arrays[name], others[name], atol=2e-4, err_msg=name
    )


@pytest.mark.long
def test_a_replay_learns_what_the_run_learned(tmp_path, capsys):
  config = runs.small(
    **{'reward': 'tests.judges:even', 'log.sampler_gap_alarm': 0.0}
  )
  loop.train(config, tmp_path / 'run')
  assert 'Sampler and learner differ' in ''.join(capsys.readouterr())
  loop.train(config, tmp_path / 'again', replay=tmp_path / 'run/completions')
  # Of another method or learning rate the two policies would differ.
  assert 'Sampler and learner differ' not in ''.join(capsys.readouterr())
  (_, arrays, _), (_, others, _) = (
    runs.saved(tmp_path / 'run'),
    runs.saved(tmp_path / 'again'),
  )
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)
  with pytest.raises(ValueError, match='4 prompts with 4.*sampler.group=2'):
    loop.train(
      runs.small(**{'reward': 'tests.judges:even', 'sampler.group': 2}),
      tmp_path / 'other',
      replay=tmp_path / 'run/completions',
    )
  with pytest.raises(ValueError, match='no completions to replay in .*run;'):
    loop.train(config, tmp_path / 'none', replay=tmp_path / 'run')
  with pytest.raises(ValueError, match='--replay is empty; give the folder'):
    loop.train(config, tmp_path / 'none', replay='')
  assert not (tmp_path / 'none').exists()
  (tmp_path / 'run/completions/step_00000003.parquet').unlink()
  with pytest.raises(ValueError, match='of rollout 3 in .*step_00000003'):
    loop.train(config, tmp_path / 'b', replay=tmp_path / 'run/completions')


def test_what_was_learned_is_saved_before_an_error_ends_the_run(tmp_path):
  config = runs.small(
    **{
      'reward': 'tests.judges:raises_late',
      'checkpoint.every_steps': 100,
      'evaluation.every_steps': 0,
      'data.heldout': '',
    }
  )
  with pytest.raises(rewards.RewardError, match='out of judges'):
    loop.train(config, tmp_path)
  assert runs.saved(tmp_path)[0] == 2


@pytest.mark.parametrize(
  'failing', ['raises', pytest.param('stops', marks=pytest.mark.long)]
)
def test_an_evaluation_that_fails_loses_nothing(failing, tmp_path, monkeypatch):
  """Three rollouts after the last checkpoint; the next start evaluates."""
  config = runs.small(
    **{
      'reward': 'tests.judges:even',
      'steps': 3,
      'checkpoint.every_steps': 100,
      'evaluation.every_steps': 3,
    }
  )
  loop.train(config, tmp_path / 'whole')
  real = sampling.evaluated

  def fail(run, step, *keep):
    if step:
      raise (
        ValueError('no judge') if failing == 'raises' else stop_signal.Stopped
      )
    return real(run, step, *keep)

  with monkeypatch.context() as patch:
    patch.setattr(sampling, 'evaluated', fail)
    with pytest.raises(ValueError) if failing == 'raises' else nullcontext():
      loop.train(config, tmp_path / 'failed')
  assert runs.saved(tmp_path / 'failed')[0] == 3
  assert len(runs.records(tmp_path / 'failed')) == 3  # 0, 1, 2
  evaluated = []

  def count(run, step, *keep):
    evaluated.append(step)
    return real(run, step, *keep)

  monkeypatch.setattr(sampling, 'evaluated', count)
  for _ in range(2):  # the second start finds a finished run
    loop.train(config, tmp_path / 'failed')
    runs.assert_equal(tmp_path / 'whole', tmp_path / 'failed')
  assert evaluated == [3]
  found = [runs.saved(tmp_path / name)[2] for name in ('failed', 'whole')]
  for name in 'unwritten', 'metric', 'saves', 'refused':
    assert found[0][name] == found[1][name]
  assert found[0]['metric'] is not None


@pytest.mark.parametrize(
  'failing', [(sources.AtOnce, 'publish'), (parquet, 'write')]
)
def test_a_failure_behind_an_update_loses_no_rollout(
  failing, tmp_path, monkeypatch
):
  config = runs.small(
    **{
      'steps': 3,
      'checkpoint.every_steps': 100,
      'evaluation.every_steps': 0,
      'data.heldout': '',
    }
  )
  owner, name = failing
  real, left = getattr(owner, name), [1, 1, 0][name == 'write' :]

  def fail(*given):
    if not left.pop(0):
      raise RuntimeError('no memory')
    return real(*given)

  with monkeypatch.context() as patch:
    patch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match='no memory'):
      loop.train(config, tmp_path)
  assert runs.saved(tmp_path)[0] == 2
  loop.train(config, tmp_path)
  written = runs.records(tmp_path)
  assert [one['step'] for one in written] == [0, 1, 2, 3]
  assert all(np.isfinite(one['loss']) for one in written[1:])


def test_the_warm_up_is_kept_until_the_run_is_saved(tmp_path, monkeypatch):
  full = [0]
  fail_saves(monkeypatch, full, keep=True)
  with pytest.raises(ValueError, match='rollout 0 could not be saved'):
    loop.train(runs.small(**runs.WARM), tmp_path, After(4 + 2))
  assert (tmp_path / 'warm_up' / '4').is_dir()
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))
  full.clear()
  done = loop.train(runs.small(steps=0, **runs.WARM), tmp_path)
  assert done['steps'] == 0
  assert not (tmp_path / 'warm_up').exists()


def test_nothing_left_to_learn_is_saved_and_said(tmp_path):
  """For a data set of three prompts, every one of which is always right."""
  file = tmp_path / 'three.jsonl'
  file.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
  config = runs.small(
    **{
      'reward': 'tests.judges:always',
      'sampler.resample_rounds': 1,
      'data.train': str(file),
    }
  )
  with pytest.raises(dynamic_sampling.NothingToLearn, match='solved by all'):
    loop.train(config, tmp_path / 'run')
  assert runs.saved(tmp_path / 'run')[0] == 0


def test_fewer_steps_than_done_and_another_way_are_refused(tmp_path):
  config = runs.small(reward='tests.judges:even', steps=2)
  loop.train(config, tmp_path)
  with pytest.raises(ValueError, match='has done 2 rollouts.*config.steps=1'):
    loop.train(runs.small(reward='tests.judges:even', steps=1), tmp_path)
  with pytest.raises(ValueError, match='has sampled its rollouts'):
    loop.train(config, tmp_path, replay=tmp_path / 'completions')
  assert json.loads((tmp_path / 'config.json').read_text())['steps'] == 2


def fail_saves(monkeypatch, steps, keep=False):
  """The disk is full for these steps of the run, once or always."""
  real = Checkpoints._open

  def open_failing(self):
    manager = real(self)
    save = manager.save

    def save_or_fail(step, **kwargs):
      if step in steps and self._directory.name == 'checkpoints':
        if not keep:
          steps.remove(step)
        raise OSError(28, 'No space left on device')
      return save(step, **kwargs)

    manager.save = save_or_fail
    return manager

  monkeypatch.setattr(Checkpoints, '_open', open_failing)


def test_a_save_that_fails_is_tried_at_the_next_step(tmp_path, monkeypatch):
  """The disk is full for the first save after the start."""
  fail_saves(monkeypatch, [2])
  said = []
  real_warn = session.Monitor.warn
  monkeypatch.setattr(
    session.Monitor,
    'warn',
    lambda self, text: (said.append(text), real_warn(self, text)),
  )
  steps = []
  real_save = progress_lib.save
  monkeypatch.setattr(
    progress_lib,
    'save',
    lambda session, progress: (
      steps.append(progress.step),
      real_save(session, progress),
    )[1],
  )
  loop.train(runs.small(), tmp_path)
  assert steps == [0, 2, 3, 4, 4]  # the last one finds itself saved
  assert sum('checkpoint 2 has failed' in text for text in said) == 1
  written = runs.records(tmp_path)
  assert [r.get('saves_failed') for r in written] == [None] * 3 + [1, 1]


@pytest.mark.long
def test_a_decay_ends_with_the_run_across_rollouts_without_signal(tmp_path):
  """Stopped before, between and after rollouts whose updates are skipped."""
  steps, peak = 12, 0.01
  config = runs.small(
    **{
      'reward': 'tests.judges:even_of_odd',
      'steps': steps,
      'sampler.prompts': 1,
      'optim.lr': peak,
      'optim.warmup_steps': 2,
      'optim.decay': 'linear',
      'data.heldout': '',
      'log.completions_every_steps': 0,
    }
  )
  loop.train(config, tmp_path / 'whole')
  records = runs.records(tmp_path / 'whole')[1:]  # without the start
  skipped = np.diff([0, *(record['idle_steps'] for record in records)])
  assert 3 <= skipped.sum() <= steps - 3
  np.testing.assert_allclose(
    [record['learning_rate'] for record in records],
    peak * np.array([0, 0.5, *np.arange(10, 0, -1) / 10]),
    rtol=1e-6,
  )
  for last in (2, 5, 6, 9, None):
    loop.train(
      config,
      tmp_path / 'pieces',
      on_rollout=lambda step, *_, last=last: step == last,
    )
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'pieces')
