"""A run that ends before its last rollout, and what the same command says."""

import json
import types
from typing import Any

import pytest

from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.learner import programs
from grpo_jax.run import loop
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import watching
from grpo_jax.run.build.specs import EarlyStopSpec
from grpo_jax.run.watching import Waiting
from tests import runs
from tests.hosts import processes_test

pytestmark = pytest.mark.usefixtures('shared_programs')

# Nothing is an improvement by as much, so the third rollout is the last.
CONFIG = {
  'reward': 'tests.judges:even',
  'steps': 6,
  'early_stop.metric': 'reward',
  'early_stop.patience': 2,
  'early_stop.least_improvement': 9.0,
  'evaluation.every_steps': 4,
  'checkpoint.every_steps': 4,
}


NOTHING = Waiting()


class After(stop_signal.Stop):
  """Says stop from the n-th question on."""

  def __init__(self, questions):
    super().__init__()
    self.left = questions

  def __call__(self):
    self.left -= 1
    return self.left < 0


def ends(spec, *values, waiting=NOTHING):
  """Behind which of the values a run ends, counted from 1; 0: behind none."""
  for step, value in enumerate(values, start=1):
    waiting = waiting.counted(spec, step, {'x': value, 'y': 0.0})
    if waiting.reason_to_end(spec):
      return step
  return 0


@pytest.mark.parametrize(
  'mode, patience, least, values, end',
  [
    ('max', 2, 0.0, (1, 2, 2, 2), 4),
    ('max', 2, 0.0, (1, 2, 1, 3, 3, 4), 0),
    ('max', 1, 0.5, (1, 1.4, 2), 2),
    ('max', 1, 0.5, (1, 1.6, 2.1), 3),
    ('max', 2, 0.5, (1, 1.4, 1.8, 2.2), 0),  # against the best, not the last
    ('min', 2, 0.0, (3, 2, 2.5, 2), 4),
    ('min', 2, 0.0, (3, 2, 2.5, 1.9), 0),
    ('min', 1, 0.5, (3, 2.6), 2),
    # What was not measured, or is no number, is no measurement.
    ('max', 2, 0.0, (1, None, float('nan'), 0, None, 0), 6),
    ('max', 1, 0.0, (None, None), 0),
    ('max', 1, 0.0, (-1, -2), 2),
  ],
)
def test_a_run_ends_once_nothing_improves(mode, patience, least, values, end):
  assert ends(EarlyStopSpec('x', mode, patience, least), *values) == end


def test_the_next_start_may_ask_for_something_else():
  spec = EarlyStopSpec('x', 'max', 2, 0.0)
  waiting = Waiting('x', 'max', 1.0, 3, 2)
  assert waiting.reason_to_end(spec) == (
    'The run has ended early: x was 1 after rollout 3, and none of the 2 '
    'measurements since then is better. early_stop.patience=3 or more goes on.'
  )
  one = waiting._replace(since=1).reason_to_end(EarlyStopSpec('x', 'max', 1, 0))
  assert 'and the one measurement since then is not better. early_' in one
  little = EarlyStopSpec('x', 'max', 2, 0.25)
  assert 'is better by more than 0.25.' in waiting.reason_to_end(little)
  for other in (
    EarlyStopSpec('x', 'max', 3, 0.0),
    EarlyStopSpec('y', 'max', 2, 0.0),
    EarlyStopSpec('x', 'min', 2, 0.0),
    EarlyStopSpec('', 'max', 2, 0.0),
  ):
    assert not waiting.reason_to_end(other)
  least = EarlyStopSpec('x', 'min', 2, 0.0)
  assert waiting.counted(least, 6, {'x': 5}) == Waiting('x', 'min', 5.0, 6)
  assert ends(spec, 0, waiting=Waiting('x', 'max', 1.0, 3, 1)) == 1


def test_a_metric_that_the_first_rollout_lacks_is_warned_of():
  spec = EarlyStopSpec('mine', 'max', 2, 0.0)
  text = "early_stop.metric='mine' is none of the metrics"
  assert watching.warning_of_metric(spec, Waiting(), 1).startswith(text)
  assert not watching.warning_of_metric(spec, Waiting(), 0)
  assert not watching.warning_of_metric(spec, Waiting(), 2)
  assert not watching.warning_of_metric(spec, Waiting('mine', 'max'), 1)
  for metric in '', 'heldout_accuracy':
    assert not watching.warning_of_metric(spec_of(metric), Waiting(), 1)


def spec_of(metric):
  return EarlyStopSpec(metric, 'max', 2, 0.0)


def test_a_run_ends_early_and_the_same_command_says_so_again(
  tmp_path, capsys, monkeypatch
):
  config = runs.small(**CONFIG)
  # Stopped once, so that the second start goes on counting.
  first = loop.train(config, tmp_path, on_rollout=lambda step, *_: step == 2)
  assert first['steps'] == 2 and 'ended_early' not in first
  end = loop.train(config, tmp_path)
  reason = str(end['ended_early'])
  assert end['steps'] == end['after_step'] == 3 and json.dumps(end)
  assert reason.startswith('The run has ended early: reward was ')
  assert 'after rollout 1, and none of the 2 measurements' in reason
  assert reason in shown(capsys)
  # Evaluated and saved as behind its last rollout.
  *_, last = runs.records(tmp_path)
  assert last['step'] == 3 and 'heldout_accuracy' in last
  step, _, host = runs.saved(tmp_path)
  assert step == 3 and host['waiting']['since'] == 2
  # The same command leaves it alone, and compiles nothing.
  before = (tmp_path / 'metrics.jsonl').read_bytes()
  monkeypatch.setattr(programs, 'compile_ahead', None)
  again = loop.train(config, tmp_path)
  assert again['ended_early'] == reason and again['steps'] == 3
  assert reason in shown(capsys)
  assert (tmp_path / 'metrics.jsonl').read_bytes() == before


def shown(capsys):
  """What the terminal has, without the ends of its lines."""
  return ' '.join(' '.join(capsys.readouterr()).split())


@pytest.mark.long
def test_a_run_in_pieces_ends_as_the_run_in_one(tmp_path):
  config = runs.small(**CONFIG)
  whole = loop.train(config, tmp_path / 'whole')
  starts = 0
  while 'ended_early' not in loop.train(config, tmp_path / 'parts', After(3)):
    starts += 1
    assert starts < 9
  assert starts > 1
  end = loop.train(config, tmp_path / 'parts')
  assert end['ended_early'] == whole['ended_early']
  runs.assert_equal(tmp_path / 'whole', tmp_path / 'parts')
  waiting = [runs.saved(tmp_path / x)[2]['waiting'] for x in ('whole', 'parts')]
  assert waiting[0] == waiting[1] and waiting[0]['since'] == 2


@pytest.mark.long
def test_more_patience_goes_on_with_what_was_counted(tmp_path):
  loop.train(runs.small(**CONFIG), tmp_path)
  more = {**CONFIG, 'early_stop.patience': 4}
  assert loop.train(runs.small(**more), tmp_path)['steps'] == 5
  never = {**CONFIG, 'early_stop.metric': ''}
  end = loop.train(runs.small(**never), tmp_path)
  assert end['steps'] == 6 and 'ended_early' not in end


@pytest.mark.long
def test_a_metric_that_no_rollout_has_is_warned_of_once(tmp_path, capsys):
  changes = {'early_stop.metric': 'advantage_of_mine', 'steps': 3}
  end = loop.train(runs.small(**CONFIG | changes), tmp_path)
  assert end['steps'] == 3
  text = "early_stop.metric='advantage_of_mine' is none of the metrics"
  assert shown(capsys).count(text) == 1


@pytest.mark.long
def test_held_out_problems_may_end_it(tmp_path):
  changes = {
    'early_stop.metric': 'heldout_accuracy',
    'early_stop.patience': 1,
    'evaluation.every_steps': 2,
  }
  end = loop.train(runs.small(**CONFIG | changes), tmp_path)
  assert end['steps'] == 2 and 'after rollout 0' in str(end['ended_early'])


def test_all_processes_count_what_the_first_has_measured():
  spec = EarlyStopSpec('speed', 'max', 1, 0.0)
  nothing: Any = None
  progress = progress_lib.Progress(4, nothing, nothing, nothing)
  run = types.SimpleNamespace(early_stop=spec, steps=9)

  def body(peers):
    session: Any = types.SimpleNamespace(run=run, peers=peers)
    seen, counted = [], progress
    for step in (1.0, 2.0):
      # The first gets slower, the others faster.
      value = -step if peers.is_first else step
      waiting = progress_lib.waited(session, counted, {'speed': value})
      counted = counted._replace(waiting=waiting)
      seen.append(bool(progress_lib.reason_to_end(session, counted)))
    return seen

  assert processes_test.run(body, 3)[0] == [[False, True]] * 3


def test_a_run_that_is_done_has_not_ended_early():
  run = types.SimpleNamespace(early_stop=spec_of('x'), steps=4)
  session: Any = types.SimpleNamespace(run=run, peers=processes.ALONE)
  nothing: Any = None
  progress = progress_lib.Progress(
    4, nothing, nothing, nothing, waiting=Waiting('x', 'max', 1.0, 1, 3)
  )
  assert not progress_lib.reason_to_end(session, progress)
  earlier = progress._replace(step=3)
  assert progress_lib.reason_to_end(session, earlier)
