"""What the warm-up learns from, shows and saves, and who removes that."""

import contextlib
import json
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.hosts import processes
from grpo_jax.learner import metrics
from grpo_jax.learner import updates
from grpo_jax.run import warm_up
from grpo_jax.run.build import build
from grpo_jax.run.keep import checkpoint
from tests import runs
from tests.hosts import processes_test

TOTAL = 23


class Monitor:
  """Keeps what is shown."""

  def __init__(self):
    self.shown, self.warned = [], []
    self.warn = self.warned.append

  def line(self, text):
    del text

  def phase(self, doing):
    del doing
    return contextlib.nullcontext()

  def progress(self, *told):
    self.shown.append(told)


class Update:
  """Counts in the parameters; some updates are not finite."""

  def __init__(self, bad):
    self.bad, self.read = bad, []

  def init(self, params):
    return types.SimpleNamespace(params=params, nonfinite=0)

  def updater(self, run, frozen):
    """Of which nothing but the state is read."""
    nothing: Any = None
    compiled: Any = types.SimpleNamespace(abstract=None, init=self.init)
    return updates.Updater(compiled, nothing, nothing, frozen)

  def credit(self, updater, layout, state, batch, step):
    del updater, layout, state
    return batch, step

  def learn(self, updater, state, credited):
    del updater
    batch, step = credited
    self.read += batch.index.tolist()
    measured = {'grad_norm': metrics.Max(jnp.float32(step))}
    if bad := step + 1 in self.bad:
      measured['nonfinite_loss'] = metrics.Max(jnp.float32(1))
    else:
      measured['loss'] = metrics.Max(jnp.float32(100 - step))
    state = types.SimpleNamespace(
      params=state.params + 1, nonfinite=state.nonfinite + bad
    )
    return state, measured


class Saves:
  """Checkpoints in memory; the last of them is restored."""

  owed = False

  def __init__(self, saved):
    self.saved = saved

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass

  def save(self, step, state, host):
    host = json.loads(json.dumps(host))
    self.saved.append(checkpoint.Restored(step, state, host))

  def restore(self, *_):
    return self.saved[-1] if self.saved else None

  def insist(self, save, *_):
    """The first try is written."""
    save()

  def wait(self, check=None):
    """Nothing is being written."""

  def steps(self):
    return [one.step for one in self.saved]


def prepared(monkeypatch, update, **changes):
  """The parts of a run whose warm-up has fakes, and what is saved."""
  config = runs.small(
    **{
      'warm_up.steps': TOTAL,
      'warm_up.examples': 2,
      'checkpoint.every_warm_up_steps': 9,
      **changes,
    }
  )
  saved = []
  monkeypatch.setattr(warm_up, 'Checkpoints', lambda *_, **__: Saves(saved))
  monkeypatch.setattr(build, 'warm_up_updater', update.updater)
  monkeypatch.setattr(updates, 'credit_rollout', update.credit)
  monkeypatch.setattr(updates, 'take_updates', update.learn)
  monkeypatch.setattr(build, 'initial_params', lambda run: 0)
  return build.run(config), saved


def warmed_up(monkeypatch, workdir, stop=lambda: False):
  """What comes out, what was shown, the steps saved, the places read."""
  update = Update({20})
  monitor: Any = Monitor()
  parts, saved = prepared(monkeypatch, update)
  params = warm_up.run(parts, workdir, monitor, stop, None)
  steps = [one.step for one in saved]
  return params, monitor.shown, steps, update.read


def test_the_loss_is_shown_every_tenth_step_and_after_the_last(
  monkeypatch, tmp_path
):
  params, shown, saved, read = warmed_up(monkeypatch, tmp_path)
  assert params == TOTAL and saved == [9, 18]
  assert shown == [
    ('warm-up', 10, TOTAL, {'loss': 91, 'grad_norm': 9}),
    ('warm-up', 20, TOTAL, {'grad_norm': 19}),
    ('warm-up', 23, TOTAL, {'loss': 78, 'grad_norm': 22}),
  ]
  assert read == list(range(2 * TOTAL))  # each demonstration once


def test_a_warm_up_that_is_stopped_is_saved(monkeypatch, tmp_path):
  answers = iter([False] * 12 + [True])
  params, shown, saved, _ = warmed_up(
    monkeypatch, tmp_path, lambda: next(answers)
  )
  assert params is None and saved == [9, 12]
  assert [step for _, step, *_ in shown] == [10]


def test_a_stop_whose_save_fails_is_no_success(monkeypatch, tmp_path):
  class Full(Saves):
    owed = True  # also after the second try
    insist = checkpoint.Checkpoints.insist
    _peers = processes.ALONE

  parts, saved = prepared(monkeypatch, Update({}))
  monkeypatch.setattr(warm_up, 'Checkpoints', lambda *_, **__: Full(saved))
  monitor: Any = Monitor()
  answers = iter([False] * 5 + [True])
  with pytest.raises(ValueError, match='of warm-up step 5 could not be saved'):
    warm_up.run(parts, tmp_path, monitor, lambda: next(answers), None)


@pytest.mark.parametrize('why', ['3 of the last 3', 'Nearly all'])
def test_an_error_that_all_processes_raise_is_of_none_alone(
  why, monkeypatch, tmp_path
):
  parts, _ = prepared(monkeypatch, Update({1, 2, 3}), **{'warm_up.steps': 3})
  if why == 'Nearly all':
    monkeypatch.setattr(warm_up.data, 'take_fitting', lambda *_: [])

  def body(peers):
    monitor: Any = Monitor()
    try:
      warm_up.run(parts, tmp_path, monitor, lambda: False, None, peers)
    except ValueError as error:
      return str(error), peers.knows(error)

  for said, is_known in processes_test.run(body, 2)[0]:
    assert re.match(why, said) and is_known


@pytest.mark.parametrize(
  'steps, bad, most, said',
  [
    (20, {10}, 5, ['1 of the last 10']),
    (21, {21}, 5, ['1 of the last 1']),
    (22, {20, 22}, 5, ['1 of the last 10', '1 of the last 2']),
    (3, {2, 3}, 5, ['2 of the last 3']),
    (3, {1, 2, 3}, 5, ['ends: 3 of the last 3']),
    (3, {1, 2, 3}, 0, ['3 of the last 3']),
    (23, range(15, 24), 5, ['6 of the last 10', '3 of the last 3']),
    (23, range(14, 24), 5, ['7 of the last 10', 'ends: 10 of the last 10']),
    (30, range(11, 21), 5, ['ends: 10 of the last 10']),
  ],
)
def test_ten_refused_updates_in_a_row_end_it_from_wherever_it_goes_on(
  steps, bad, most, said, monkeypatch, tmp_path
):
  parts, saved = prepared(
    monkeypatch,
    Update(bad),
    **{'warm_up.steps': steps, 'learner.nonfinite_rollouts': most},
  )
  for start in {0, 1, 8, 9, 10, 16, 20, 21} & set(range(steps)):
    saved.clear()
    monitor: Any = Monitor()
    found = monitor.warned
    try:
      if start:
        answers = iter([False] * start)
        stop = lambda a=answers: next(a, True)
        warm_up.run(parts, tmp_path, monitor, stop, None)
      warm_up.run(parts, tmp_path, monitor, lambda: False, None)
    except ValueError as error:
      found.append(f'ends: {error}')
    assert len(found) == len(said), start
    for sentence, words in zip(found, said, strict=True):
      assert sentence.startswith(f'{words} updates of the warm-up'), start


@pytest.mark.parametrize('process', [0, 1])
def test_one_process_of_several_removes_what_was_saved(
  process, monkeypatch, tmp_path
):
  (tmp_path / 'warm_up' / '4').mkdir(parents=True)
  (tmp_path / 'checkpoints').mkdir()
  monkeypatch.setattr(jax, 'process_index', lambda: process)
  warm_up.forget(tmp_path)
  left = {path.name for path in tmp_path.iterdir()}
  assert left == {'checkpoints', *(['warm_up'] if process else [])}
  warm_up.forget(tmp_path)  # there may be nothing
