"""A run asks an engine for no more than the protocol has."""

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax import engines
from grpo_jax.run import loop
from tests import runs
from tests.fake_engine import FakeEngine

TOKENIZER = data.tokenizer_from('arithmetic')
DIGITS = [TOKENIZER.encode(str(digit))[0] for digit in range(10)]


def digits(request, number):
  """Two digits that depend on the key alone."""
  chosen = np.random.default_rng(request.keys[number]).integers(10, size=2)
  return [*np.array(DIGITS)[chosen], TOKENIZER.eos_ids[0]]


def trained(workdir, patch, **changes):
  """The engine, and what the run has left."""
  engine = FakeEngine(digits)
  patch.setattr(engines, 'LocalEngine', lambda *_, **__: engine)
  done = loop.train(runs.small(**changes), workdir)
  assert done['steps'] == 4
  return engine, runs.records(workdir), runs.saved(workdir)[1]


@pytest.mark.quick
@pytest.mark.parametrize('ahead', [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_fake_engine_runs_a_whole_training(ahead, tmp_path, monkeypatch):
  changes = {'sampler.ahead': ahead, 'evaluation.right_reward': 0.0}
  if ahead:
    changes['learner.anchor'] = 'sampler'
  engine, written, _ = trained(tmp_path, monkeypatch, **changes)
  # Ahead, the last rollout is drawn by version 2, and no other needs 3.
  assert {*engine.versions} == {0, 1, 2, 4} | ({3} if not ahead else set())
  assert [record['step'] for record in written] == [0, 1, 2, 3, 4]
  assert all(np.isfinite(record['loss']) for record in written[1:])
  assert written[-1]['nonfinite_steps'] == 0
  assert {record['accuracy'] for record in written[1:]} == {1.0}
  greedy = [one for one in engine.requests if not one.sampling.temperature]
  assert len(greedy) == 3 * 20 and len(engine.requests) == 4 * 4 + 3 * 20
  assert all(len(one.keys) == 1 for one in greedy)


@pytest.mark.long
def test_and_again_bit_for_bit(tmp_path, monkeypatch):
  _, written, arrays = trained(tmp_path / 'a', monkeypatch)
  _, again, others = trained(tmp_path / 'b', monkeypatch)
  assert [*map(runs.without_times, written)] == [
    *map(runs.without_times, again)
  ]
  for name, array in arrays.items():
    np.testing.assert_array_equal(array, others[name], err_msg=name)
