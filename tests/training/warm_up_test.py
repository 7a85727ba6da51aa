"""What the warm-up learns from, shows and saves, and who removes that."""

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest

from grpo_jax import metrics
from grpo_jax.training import build
from grpo_jax.training import build_updater
from grpo_jax.training import warm_up
from tests import runs
from tests.training import wiring

TOTAL = 23


class Monitor:
  """Keeps what is shown."""

  warn = print

  def __init__(self):
    self.shown = []

  def phase(self, doing):
    del doing
    return contextlib.nullcontext()

  def progress(self, *told):
    self.shown.append(told)


class Update:
  """Counts in the parameters; the gradient of step 20 is not finite."""

  abstract = None

  def __init__(self):
    self.read = []

  def init(self, params):
    return types.SimpleNamespace(params=params, nonfinite=0)

  def __call__(self, state, batch, step):
    self.read += batch.index.tolist()
    measured = {'grad_norm': metrics.Max(jnp.float32(step))}
    if step != 19:
      measured['loss'] = metrics.Max(jnp.float32(100 - step))
    return self.init(state.params + 1), measured


def warmed_up(monkeypatch, workdir, stop=lambda: False):
  """What comes out, what was shown, the steps saved, the places read."""
  config = runs.small(
    **{
      'warm_up.steps': TOTAL,
      'warm_up.examples': 2,
      'checkpoint.every_warm_up_steps': 9,
    }
  )
  seen, update, monitor = wiring.Seen(config), Update(), Monitor()
  monkeypatch.setattr(
    warm_up, 'Checkpoints', lambda where, *_, **__: wiring.Saves(seen, where)
  )
  monkeypatch.setattr(build_updater, 'warm_up_updater', lambda run: update)
  monkeypatch.setattr(build, 'initial_params', lambda run: 0)
  params = warm_up.run(build.run(config), workdir, monitor, stop)
  return params, monitor.shown, seen.at('save warm_up', 'step'), update.read


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
