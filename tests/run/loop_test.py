"""The whole loop: it learns, not from noise, and it repeats itself."""

import dataclasses
import json
import os
import pathlib
import shutil
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.keep.checkpoint import Checkpoints
from tests import tiny
from tests.cli import CONFIG
from tests.cli import command
from tests.compilations import counted_before
from tests.runs import WARM
from tests.runs import records
from tests.runs import saved
from tests.runs import small
from tests.runs import without_times

pytestmark = pytest.mark.usefixtures('shared_programs')


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


@pytest.mark.long
def test_the_embedded_default_learns(warmed_up, tmp_path):
  shutil.copytree(warmed_up, tmp_path / 'checkpoints')
  assert run(tmp_path, '--config.steps=40')['after'] > 0.9
  written = records(tmp_path)
  assert [r['step'] for r in written] == list(range(1, 41))
  assert written[-1]['heldout_accuracy'] > 0.9
  assert max(r['sampler_gap_max'] for r in written) < 1e-4
  assert written[-1]['nonfinite_steps'] == 0


@pytest.mark.long
def test_with_shuffled_rewards_it_does_not(warmed_up, tmp_path):
  """Samples: greedy answers swing between the two modes of the warm-up."""
  shutil.copytree(warmed_up, tmp_path / 'checkpoints')
  run(tmp_path, '--config.steps=20', '--config.shuffle_rewards=True')
  accuracy = accuracies(tmp_path)
  assert np.mean(accuracy[-5:]) < np.mean(accuracy[:5]) + 0.05


def test_compilations_end_when_the_shapes_have_been_seen(
  own_programs, tmp_path
):
  """Nothing is compiled after the first steps, whatever the lengths."""
  with counted_before(sampling, 'sampled') as counts:
    loop.train(small(steps=8), tmp_path)
  assert counts[0] > 0
  later = np.diff(counts)[3:]
  assert not np.any(later), later


@pytest.mark.parametrize(
  'changes',
  [
    WARM,
    pytest.param(
      {
        'learner.method': 'kl_cov',
        'learner.method_kwargs': {},
        'learner.epochs': 2,
        'learner.batches': 2,
        'learner.layout': 'packed',
        'steps': 2,
      },
      marks=pytest.mark.long,
    ),
    pytest.param(
      {
        'learner.method_kwargs': {'kl_coefficient': 0.1},
        'learner.layout': 'padded',
        'learner.anchor': 'sampler',
        'sampler.temperature': 0.8,
      },
      marks=pytest.mark.long,
    ),
  ],
  ids=['default', 'kl_cov', 'kl'],
)
def test_one_seed_gives_bitwise_equal_runs(changes, tmp_path):
  runs = []
  for name in ('a', 'b'):
    loop.train(small(**changes), tmp_path / name)
    runs.append([without_times(r) for r in records(tmp_path / name)])
  assert runs[0] == runs[1]
  if changes is WARM:
    loop.train(small(seed=1, **changes), tmp_path / 'c')
    assert [without_times(r) for r in records(tmp_path / 'c')] != runs[0]


def gradients_by_hand(run):
  """The gradient of GRPO's loss where the ratio is 1, by parameters, rollout.

  - 1/B sum_i 1/|o_i| sum_t A_i logp_it, A_i the reward's z-score in its group.
  """

  @jax.jit
  @jax.grad
  def gradient(params, rows, weight):
    logp = models.score(run.model, params, rows).logp
    everything = np.full(weight.shape[:2], weight.shape[2])
    return -jnp.sum(tiny.gather(logp, rows, everything) * weight)

  return lambda params, rollout: gradient(params, *rows_of(rollout))


def rows_of(rollout):
  """How it is laid out, and what each log-probability counts."""
  batch, length = rollout.batch, np.asarray(rollout.length)
  reward = np.asarray(batch.reward, np.float64)
  centered = reward - reward.mean(1, keepdims=True)
  spread = reward.std(1, keepdims=True)
  advantage = centered / np.where(spread > 0, spread, 1)
  weight = advantage / length / length.size
  rows = layout.padded_rows(rollout.prompts, batch.tokens, length, 16)
  return rows, np.float32(weight[..., None] * batch.mask)


def stepped_by_hand(optim, lr, t, gradient, first, second, p, is_matrix):
  """Step `t` of AdamW, counted from 1: both moments and the parameter."""
  first = optim.b1 * first + (1 - optim.b1) * gradient
  second = optim.b2 * second + (1 - optim.b2) * gradient**2
  root = np.sqrt(second / (1 - optim.b2**t))
  step = first / (1 - optim.b1**t) / (root + optim.epsilon)
  step = step + optim.weight_decay * p * is_matrix
  return first, second, p - lr * step


@pytest.mark.long
def test_two_starts_take_the_steps_of_the_formulas(tmp_path):
  """Three updates of AdamW in float64, from the completions on the disk."""
  config = small(
    **{
      'reward': 'tests.judges:even',
      'steps': 3,
      'warm_up.steps': 0,
      'data.heldout': '',
      'optim.lr': 0.02,
      'optim.warmup_steps': 0,
      'optim.decay': 'linear',
      'optim.b1': 0.8,
      'optim.b2': 0.9,
      'optim.epsilon': 1e-3,
      'optim.weight_decay': 0.5,
      'optim.clip_norm': 0.05,
    }
  )
  begun = time.monotonic()
  first = loop.train(config, tmp_path, on_rollout=lambda step, *_: step == 1)
  assert first['steps'] == 1
  assert 0 < first['secs'] <= time.monotonic() - begun
  assert loop.train(config, tmp_path)['steps'] == 3
  run = build.run(config)
  leaves, tree = jax.tree_util.tree_flatten_with_path(build.initial_params(run))
  names = [jax.tree_util.keystr(path) for path, _ in leaves]
  params = [np.float64(leaf) for _, leaf in leaves]
  gradient = gradients_by_hand(run)
  moments = [(np.zeros_like(p), np.zeros_like(p)) for p in params]
  for t, file in enumerate(parquet.files(tmp_path / 'completions'), start=1):
    rollout, now = parquet.read(file), [np.float32(p) for p in params]
    found = gradient(jax.tree.unflatten(tree, now), rollout)
    found = [np.float64(leaf) for leaf in jax.tree.leaves(found)]
    norm = np.sqrt(sum(np.sum(x**2) for x in found))
    clip = config.optim.clip_norm / norm
    assert clip < 1  # else it would not be at work
    record = records(tmp_path)[t]
    assert record['grad_norm'] == pytest.approx(norm, rel=1e-3)
    assert record['reward'] == pytest.approx(np.mean(rollout.batch.reward))
    lr = config.optim.lr * (1 - (t - 1) / 3)
    for i, name in enumerate(names):
      *moments[i], params[i] = stepped_by_hand(
        config.optim,
        lr,
        t,
        found[i] * clip,
        *moments[i],
        params[i],
        'scale' not in name,
      )
  _, arrays, _ = saved(tmp_path)
  for name, wanted in zip(names, params, strict=True):
    (array,) = [
      array
      for path, array in arrays.items()
      if path.endswith(f"params']{name}")
    ]
    np.testing.assert_allclose(array, wanted, atol=1e-5, err_msg=name)


@pytest.mark.quick
def test_evaluations_fall_at_the_start_every_n_and_the_end(tmp_path):
  loop.train(small(steps=3), tmp_path)
  due = [r['step'] for r in records(tmp_path) if 'heldout_accuracy' in r]
  assert due == [0, 2, 3]


@pytest.mark.quick
@pytest.mark.parametrize(
  'judged, failed, mean, graded',
  [
    ((True, False, True), False, (0.5 + 0.25) / 2, 1.0),
    ((False,) * 3, False, None, None),
    ((True, False, True), True, (0.5 + 0 + 0.25) / 3, 2 / 3),
  ],
)
def test_an_evaluation_is_the_mean_of_the_first_reward_of_greedy_answers(
  judged, failed, mean, graded, monkeypatch
):
  """An answer on which it has failed counts as 0, others that have none not."""
  parts = np.array([[[0.5, 9]], [[7, 9]], [[0.25, 9]]], np.float32)
  valid = np.array(judged)[:, None]
  batch = types.SimpleNamespace(reward_parts=parts, valid=valid)
  failures = np.zeros(parts.shape, bool)
  failures[1, 0, 0] = failed
  number = {'heldout_judged': sum(judged) + failed}
  number |= {'heldout_failed': 1} if failed else {}
  if graded is not None:  # neither 0 nor 1
    number['heldout_graded'] = graded
  asked = []

  def collect(records, engine, tokenizer, rewards, sampling, *more, **_):
    _, group, _, step, _ = more
    asked.append((len(records), sampling.temperature, group, step))
    return types.SimpleNamespace(batch=batch, failed=failures, accounts=())

  monkeypatch.setattr(sampling.rollout_lib, 'collect', collect)
  run = build.run(small(**{'evaluation.examples': 3}))
  assert sampling.evaluated(run, 5) == {'heldout_accuracy': mean, **number}
  few = dataclasses.replace(
    run, heldout=[{'prompt': '1+1=', 'answer': '2'}] * 2
  )
  sampling.evaluated(few, 5)
  assert asked == [(3, 0.0, 1, 5), (2, 0.0, 1, 5)]
  nothing = sampling.evaluated(dataclasses.replace(run, heldout=None), 5)
  assert nothing == {'heldout_accuracy': None}


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


@pytest.mark.long
def test_a_jsonl_file_trains_too(tmp_path, monkeypatch):
  """Files by relative names, and a reward that leaves the directory."""
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.setenv('ELSEWHERE', str(tmp_path / 'elsewhere'))
  monkeypatch.chdir(tmp_path)
  file = pathlib.Path('sums.jsonl')
  rows = [{'question': f'0{i}+01=', 'sum': str(i + 1)} for i in range(9)]
  file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  config = small(
    **{
      'steps': 1,
      'reward': 'tests.judges:wanders',
      'data.train': str(file),
      'data.heldout': str(file),
      'data.prompt_field': 'question',
      'data.answer_field': 'sum',
      'warm_up.steps': 0,
      'evaluation.examples': 9,
    }
  )
  result = loop.train(config, 'run')
  assert 0 <= result['after'] <= 1 and result['after_step'] == 1
  assert os.getcwd() == str(tmp_path / 'elsewhere')
  assert len(records(tmp_path / 'run')) == 2
  monkeypatch.chdir(tmp_path)
  again = loop.train(config, 'again', replay='run/completions')
  assert again['steps'] == 1
  monkeypatch.chdir(tmp_path)
  policy = policies.load(config, 'run', to_evaluate=True)
  policies.evaluate(policy, 2, 2, [1], completions='all.parquet')
  assert (tmp_path / 'all.parquet').exists()
  assert not os.listdir(tmp_path / 'elsewhere')
