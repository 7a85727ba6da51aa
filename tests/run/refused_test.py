"""Runs that cannot learn say so, and end saved."""

import dataclasses
import json
import types
from typing import Any

import jax
import numpy as np
import pytest

from grpo_jax.config import checks
from grpo_jax.hosts import processes
from grpo_jax.run import loop
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import sampling
from grpo_jax.run import watching
from grpo_jax.run.build import build
from grpo_jax.run.progress import Progress
from grpo_jax.run.progress import Unwritten
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')

QUICK = {
  'warm_up.steps': 0,
  'evaluation.every_steps': 0,
  'log.completions_every_steps': 0,
  'checkpoint.every_steps': 100,
  'learner.method': 'dr_grpo',
  'learner.method_kwargs': {},
}


@pytest.mark.long
def test_a_run_whose_updates_are_all_refused_ends_saved(
  tmp_path, capsys, monkeypatch
):
  config = runs.small(
    **{**QUICK, 'evaluation.every_steps': 2},
    reward='tests.judges:huge',
    steps=6,
    **{'learner.nonfinite_rollouts': 2},
  )
  told = []
  preempted = iter([True, *[False] * 5])

  def on_rollout(step, metrics, rollout):
    told.append(step)
    return next(preempted)

  loop.train(config, tmp_path, on_rollout=on_rollout)
  assert runs.saved(tmp_path)[2]['refused'] == {
    'rollouts': 1,
    'part': 'gradient',
    'ended': 0,
  }

  def interrupted(run, step, keep):
    raise RuntimeError(f'interrupted at {step}')

  with monkeypatch.context() as patch:
    patch.setattr(sampling, 'evaluated', interrupted)
    with pytest.raises(RuntimeError, match='at 2'):
      loop.train(config, tmp_path, on_rollout=on_rollout)
  # The same command counts on, and stops again. Checkpoint 2 has not counted
  # its own rollout, which the next start evaluates.
  for done in (2, 4):
    words = rf'^No update of the last {done} rollouts .* all the gradient'
    with pytest.raises(ValueError, match=words):
      loop.train(config, tmp_path, on_rollout=on_rollout)
    assert runs.checkpoints(tmp_path)[-1] == done == told[-1]
    said = capsys.readouterr()
    assert 'The gradient of 100% of the updates' in said.out + said.err
  for _ in range(2):  # it ends, and once it has ended
    words = '^The run is done, but no update of the last 6 rollouts'
    with pytest.raises(ValueError, match=words):
      loop.train(config, tmp_path, on_rollout=on_rollout)
  assert told == [1, 2, 3, 4, 5, 6]
  step, arrays, host = runs.saved(tmp_path)
  assert step == 6 and all(np.all(np.isfinite(x)) for x in arrays.values())
  written = runs.records(tmp_path)
  assert [r['nonfinite_gradient'] for r in written[1:]] == [1] * 6
  assert json.dumps(host)


def test_after_the_error_a_run_gets_as_many_rollouts_more():
  counted, ends = watching.Refused(), []
  # The limit changes after the first error, and one rollout is fine.
  for rollout, most in enumerate((3, 3, 3, 2, 2, 2, 2, 2, 0), start=1):
    counted = counted.counted({'nonfinite_loss': float(rollout != 6)})
    if counted.reason_to_end(most):
      ends.append((rollout, counted.rollouts))
    counted = counted.for_next_start(most)
  assert ends == [(3, 3), (5, 5), (8, 2)]


def test_a_rollout_with_a_finite_update_starts_the_count_anew():
  counted = watching.Refused()
  rollouts = [
    {'nonfinite_loss': 1 / 3, 'nonfinite_update': 2 / 3},
    {'nonfinite_loss': 1.0},
    {'nonfinite_loss': 0.9},
    {'nonfinite_gradient': 1.0},
  ]
  for measured, rollouts_now, part in zip(
    rollouts, (1, 2, 0, 1), ('update', 'loss', '', 'gradient'), strict=True
  ):
    counted = counted.counted(measured)
    assert (counted.rollouts, counted.part) == (rollouts_now, part)
  assert counted.reason_to_end(2) == counted.at_the_end(0) == ''
  assert 'no update of the last rollout was' in counted.at_the_end(5)


def test_a_stop_in_the_last_evaluation_says_nothing_of_the_last_rollout():
  learn = types.SimpleNamespace(nonfinite_rollouts=5)
  session: Any = types.SimpleNamespace(
    run=types.SimpleNamespace(steps=2, learn=learn),
    peers=processes.ALONE,
  )
  nothing: Any = None
  waits = Progress(
    2,
    nothing,
    nothing,
    nothing,
    Unwritten({}, []),
    refused=watching.Refused(1, 'loss'),
  )
  progress_lib.check_end(session, waits)
  with pytest.raises(ValueError, match='^The run is done'):
    progress_lib.check_end(session, waits._replace(unwritten=None))


@pytest.mark.long
def test_with_0_it_goes_on(tmp_path):
  config = runs.small(
    **QUICK,
    reward='tests.judges:huge',
    steps=2,
    **{'learner.nonfinite_rollouts': 0},
  )
  assert loop.train(config, tmp_path)['steps'] == 2


def test_rewards_that_are_all_none_alarm(tmp_path, capsys):
  config = runs.small(**QUICK, reward='tests.judges:none', steps=1)
  loop.train(config, tmp_path)
  said = capsys.readouterr()
  assert 'No completion was judged' in said.out + said.err
  assert runs.records(tmp_path)[-1]['judged'] == 0


@pytest.mark.long
def test_a_warm_up_without_a_finite_update_ends_the_run(tmp_path, monkeypatch):
  # A config refuses such a rate; here it stands for any that breaks down.
  monkeypatch.delitem(checks._MOST, 'warm_up.lr')
  config = runs.small(
    **QUICK
    | {
      'warm_up.steps': 12,
      'warm_up.lr': 1e38,
      'checkpoint.every_warm_up_steps': 10,
    }
  )
  # The next start goes on from step 10, and does not take it for done.
  for _ in range(2):
    with pytest.raises(
      ValueError, match='10 of the last 10 .*, the gradient.*warm_up.lr'
    ):
      loop.train(config, tmp_path)
  assert not list((tmp_path / 'checkpoints').glob('[0-9]*'))


def test_weights_that_are_not_finite_are_refused(monkeypatch):
  run = build.run(runs.small())
  params = build.initial_params(run)  # drawn at random, so nobody looks
  weights = dataclasses.replace(run.weights, path='a folder')
  run = dataclasses.replace(run, weights=weights)
  spoilt = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.nan), params)
  made = build.build_model
  monkeypatch.setattr(made, 'source', lambda path: None)
  monkeypatch.setattr(made.weights, 'load', lambda *_, **__: spoilt)
  with pytest.raises(ValueError, match='parameter .* NaN or infinite'):
    build.initial_params(run)
