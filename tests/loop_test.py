"""The whole loop: it learns, not from noise, and it repeats itself."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import build
from grpo_jax import loop
from grpo_jax import monitor
from grpo_jax import warm_up
from tests.runs import arithmetic
from tests.runs import records
from tests.runs import small
from tests.runs import without_times


@pytest.fixture(scope='module')
def warmed_up(tmp_path_factory):
  """The warm-up of the embedded default, once for both runs: host arrays."""
  config = arithmetic()
  workdir = tmp_path_factory.mktemp('warm_up')
  with monitor.Monitor(config.log, workdir, 0, None, {}) as shown:
    params = warm_up.run(build.run(config), workdir, shown, lambda: False)
  return jax.device_get(params)


@pytest.fixture
def after_the_warm_up(warmed_up, monkeypatch):
  monkeypatch.setattr(
    loop.warm_up, 'run', lambda *_: jax.tree.map(jnp.array, warmed_up)
  )


def test_the_embedded_default_learns(tmp_path, after_the_warm_up):
  result = loop.train(arithmetic(steps=40), tmp_path)
  assert 0.25 <= result['before'] < 0.5
  assert result['after'] > 0.9
  written = records(tmp_path)
  assert [r['step'] for r in written] == list(range(41))
  assert written[0]['heldout_accuracy'] == result['before']
  assert written[-1]['heldout_accuracy'] == result['after']
  assert max(r['sampler_gap_max'] for r in written[1:]) < 1e-4
  assert written[-1]['nonfinite_steps'] == 0


def test_with_shuffled_rewards_it_does_not(tmp_path, after_the_warm_up):
  result = loop.train(arithmetic(steps=20, shuffle_rewards=True), tmp_path)
  assert result['before'] > 0.25
  assert result['after'] < 0.5


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


def test_evaluations_fall_at_the_start_every_n_and_the_end(tmp_path):
  loop.train(small(steps=3), tmp_path)
  due = [r['step'] for r in records(tmp_path) if 'heldout_accuracy' in r]
  assert due == [0, 2, 3]


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
  assert counts[0] > 0  # the first step compiles: the counter counts
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
