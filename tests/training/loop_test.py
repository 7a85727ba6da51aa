"""The whole loop: it learns, not from noise, and it repeats itself."""

import json
import shutil

import jax
import numpy as np
import pytest

from grpo_jax.training import loop
from grpo_jax.training.checkpoint import Checkpoints
from tests.cli import CONFIG
from tests.cli import command
from tests.runs import records
from tests.runs import small
from tests.runs import without_times


def run(workdir, *more):
  """The real command on the embedded default; what it says at the end."""
  done = command('train', CONFIG, f'--workdir={workdir}', *more, quick=False)
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


@pytest.fixture(scope='module')
def warmed_up(tmp_path_factory):
  """The checkpoints after the warm-up, from which both runs go on."""
  workdir = tmp_path_factory.mktemp('warm_up')
  assert 0.25 <= run(workdir, '--config.steps=0')['before'] < 0.5
  return workdir / 'checkpoints'


def accuracies(workdir):
  """Shares of right samples, rollout by rollout."""
  return [record['accuracy'] for record in records(workdir)[1:]]


def test_the_embedded_default_learns(warmed_up, tmp_path):
  shutil.copytree(warmed_up, tmp_path / 'checkpoints')
  assert run(tmp_path, '--config.steps=40')['after'] > 0.9
  written = records(tmp_path)
  assert [r['step'] for r in written] == list(range(1, 41))
  assert written[-1]['heldout_accuracy'] > 0.9
  assert max(r['sampler_gap_max'] for r in written) < 1e-4
  assert written[-1]['nonfinite_steps'] == 0


def test_with_shuffled_rewards_it_does_not(warmed_up, tmp_path):
  """Samples: greedy answers swing between the two modes of the warm-up."""
  shutil.copytree(warmed_up, tmp_path / 'checkpoints')
  run(tmp_path, '--config.steps=20', '--config.shuffle_rewards=True')
  accuracy = accuracies(tmp_path)
  assert np.mean(accuracy[-5:]) < np.mean(accuracy[:5]) + 0.05


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {
      'learner.method': 'kl_cov',
      'learner.method_kwargs': {},
      'learner.epochs': 2,
      'learner.batches': 2,
      'learner.layout': 'packed',
    },
    {
      'learner.method_kwargs': {'kl_coefficient': 0.1},
      'learner.layout': 'padded',
      'learner.anchor': 'sampler',
      'sampler.temperature': 0.8,
    },
  ],
  ids=['default', 'kl_cov', 'kl'],
)
def test_one_seed_gives_bitwise_equal_runs(changes, tmp_path):
  runs = []
  for name in ('a', 'b'):
    loop.train(small(**changes), tmp_path / name)
    runs.append([without_times(r) for r in records(tmp_path / name)])
  assert runs[0] == runs[1]
  if not changes:
    loop.train(small(seed=1), tmp_path / 'c')
    assert [without_times(r) for r in records(tmp_path / 'c')] != runs[0]


@pytest.mark.quick
def test_evaluations_fall_at_the_start_every_n_and_the_end(tmp_path):
  loop.train(small(steps=3), tmp_path)
  due = [r['step'] for r in records(tmp_path) if 'heldout_accuracy' in r]
  assert due == [0, 2, 3]


@pytest.mark.quick
def test_on_a_cpu_a_checkpoint_is_written_before_the_next_update(
  tmp_path, monkeypatch
):
  """A copy of the state beside an update takes memory that both need."""
  happened = []

  def noted(owner, name):
    function = getattr(owner, name)

    def call(*args, **kwargs):
      happened.append(name)
      return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)

  noted(Checkpoints, 'save')
  noted(Checkpoints, 'wait')
  noted(loop, 'learn')
  loop.train(small(steps=3), tmp_path)
  begun = [i for i, name in enumerate(happened) if name == 'save']
  rest = [happened[i + 1 :] for i in begun]
  assert any('learn' in names for names in rest)
  for names in rest:
    if 'learn' in names:
      # Saving waits too, for the save before.
      assert 'wait' in names[names.index('wait') + 1 : names.index('learn')]


def test_compilations_end_when_the_shapes_have_been_seen(tmp_path, monkeypatch):
  """Nothing is compiled after the first steps, whatever the lengths."""
  compiled, per_step = [], []
  jax.monitoring.register_event_duration_secs_listener(
    lambda name, secs, **_: (
      compiled.append(name)
      if name.endswith('backend_compile_duration')
      else None
    )
  )
  sampled = loop.sampled

  def counting(*args):
    per_step.append(len(compiled))
    return sampled(*args)

  monkeypatch.setattr(loop, 'sampled', counting)
  loop.train(small(steps=8), tmp_path)
  assert per_step[0] > 0
  counts = np.diff(per_step)
  assert not np.any(counts[3:]), counts


def test_a_jsonl_file_trains_too(tmp_path):
  file = tmp_path / 'sums.jsonl'
  rows = [{'question': f'0{i}+01=', 'sum': str(i + 1)} for i in range(9)]
  file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = small(
    **{
      'steps': 1,
      'data.train': str(file),
      'data.heldout': str(file),
      'data.prompt_field': 'question',
      'data.answer_field': 'sum',
      'warm_up.steps': 0,
      'evaluation.examples': 9,
    }
  )
  result = loop.train(config, tmp_path / 'run')
  assert 0 <= result['after'] <= 1
