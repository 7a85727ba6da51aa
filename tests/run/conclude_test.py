"""Behind each rollout a run evaluates, saves and writes what its specs say.

Nothing is trained: the metrics of each rollout are given, and a session notes
what it is asked to do.
"""

import contextlib
import pathlib
import types
from typing import Any

import pytest

from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.learner.types import TrainState
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.rollouts.sources import Receipt
from grpo_jax.run import loop
from grpo_jax.run.build import specs
from grpo_jax.run.progress import Progress
from grpo_jax.run.progress import Unwritten

pytestmark = pytest.mark.quick

NEVER = specs.EarlyStopSpec('', 'max', 1, 0.0)
STATE = TrainState('policy', (), (), None, step=0, nonfinite=0, idle=0)


class Noted:
  """A session of a run of seven rollouts, and what it has done.

  Attributes:
    evaluated: The rollouts done at each evaluation.
    saved: The rollouts done at each checkpoint, with its metric and with what
      it holds beside arrays.
    exported: Those behind which the policy was written.
  """

  workdir, origin, on_rollout, push = pathlib.Path('gone'), {}, None, None
  peers, stop = processes.ALONE, stop_signal.Stop()
  owed, failed = False, 0  # of the saves

  def __init__(self, save=9, best='', evaluate=0, export=0, nonfinite=0):
    keep = specs.KeepSpec(save, 0.0, 1, best, 0, 0)
    self.run = types.SimpleNamespace(
      steps=7,
      evaluation=specs.EvaluationSpec(evaluate, 5, ''),
      keep=keep,
      export=specs.ExportSpec(export, 'float32', False, '', False),
      early_stop=NEVER,
      learn=types.SimpleNamespace(nonfinite_rollouts=nonfinite),
      heldout=None,
    )
    self.saves = self.monitor = self.source = self.updater = self
    self.evaluated, self.saved, self.exported = [], {}, []
    self.step = 0

  def phase(self, doing, first=''):
    del first
    if doing == 'evaluating':
      self.evaluated.append(self.step)
    return contextlib.nullcontext()

  def save(self, step, arrays, host, metric=None):
    assert arrays.params == STATE.params
    self.saved[step] = metric, host

  def export(self, folder, params):
    assert params == STATE.params
    self.exported.append(int(folder.name))

  def insist(self, save, *_):
    save()

  def is_due(self):
    return False

  def whole(self, rollout):
    return rollout

  def joined(self, params):
    return params

  def paused(self):
    return contextlib.nullcontext()

  def receipt(self):
    return Receipt()

  def _nothing(self, *_):
    """Of what else a session is asked."""

  wait = check = write = warn = line = _nothing

  def concluded(self, **measured):
    """All rollouts, with these metrics and their number in the loss."""
    session: Any = self
    progress = Progress(0, STATE, Receipt(), LayoutSpec('auto', 1))
    for step in range(self.run.steps + 1):
      numbers = {'loss': 10.0 + step, **(measured if step else {})}
      unwritten, self.step = Unwritten(numbers, []), step
      progress = progress._replace(step=step, unwritten=unwritten)
      progress, ends = loop.conclude(session, progress)
      assert not ends
    return self


@pytest.mark.parametrize(
  'every, steps', [(0, [0, 7]), (2, [0, 2, 4, 6, 7]), (3, [0, 3, 6, 7])]
)
def test_it_evaluates_as_often_as_its_spec_says(every, steps):
  """And saves then: only what is measured behind a checkpoint can be best."""
  done = Noted(evaluate=every).concluded()
  assert done.evaluated == [*done.saved] == steps


@pytest.mark.parametrize('every', [2, 3, 5])
def test_it_saves_as_often_as_its_spec_says(every):
  done = Noted(save=every).concluded()
  assert [*done.saved] == sorted({0, *range(every, 7, every), 7})


@pytest.mark.parametrize('best', ['', 'loss'])
def test_a_checkpoint_has_the_metric_by_which_it_may_be_the_best(best):
  for step, (metric, _) in Noted(save=2, best=best).concluded().saved.items():
    assert metric == (10.0 + step if best else None)


@pytest.mark.parametrize(
  'every, steps', [(0, []), (1, [2, 4, 6, 7]), (2, [4, 7]), (3, [6])]
)
def test_every_so_many_saves_it_writes_the_policy(every, steps):
  assert Noted(save=2, export=every).concluded().exported == steps


@pytest.mark.parametrize('most', [0, 2, 3])
def test_it_ends_behind_so_many_rollouts_without_a_finite_update(most):
  run = Noted(nonfinite=most)
  broken = {'nonfinite_loss': 1.0}
  if not most:
    run.concluded(**broken)
    return
  with pytest.raises(ValueError, match=f'of the last {most} rollouts was fin'):
    run.concluded(**broken)
  assert max(run.saved) == most
  # The next start gets as many more.
  assert run.saved[most][1]['refused']['ended'] == most
