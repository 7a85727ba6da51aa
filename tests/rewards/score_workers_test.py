"""Scores of rewards that are called in worker processes."""

import pathlib
import sys
import time

import pytest

from grpo_jax import rewards
from tests.rewards import bad_judges
from tests.rewards import cases


@pytest.fixture(scope='module')
def workers():
  with rewards.Workers(2, time_limit_secs=600.0) as pool:
    yield pool


def fails_on_one(prompt, completion, example):
  if completion == '1':
    raise SystemExit(0)
  return cases.value(prompt, completion, example)


def term(function, name='remote', **fields):
  return rewards.WeightedReward(name, function, where='workers', **fields)


@pytest.mark.parametrize(
  'function', [cases.value, cases.async_value, cases.batched_value]
)
def test_workers_give_the_scores_of_this_process(workers, function):
  here = cases.score_rows(function, bad_judges.good)
  there = cases.score_rows(
    bad_judges.good, term(function), size=3, workers=workers
  )
  assert there.reward.tolist() == here.reward.tolist()
  assert (there.failures == '').all() and (here.failures == '').all()
  assert there.judged.all()
  assert (there.secs > 0).all() and (here.secs > 0).all()


@pytest.mark.parametrize('failed', [None, -2.0, 0.0])
def test_a_failure_is_counted_and_gets_what_is_stated(workers, failed):
  scores = cases.score_rows(
    cases.value,
    term(fails_on_one, weight=10.0, failed=failed),
    workers=workers,
  )
  assert scores.failures.tolist() == [['', ''], ['', 'exit 0'], ['', '']]
  assert scores.judged.tolist() == [True, failed is not None, True]
  middle = 0 if failed is None else 1 + 10 * failed
  assert scores.reward.tolist() == [0, middle, 22]


def test_a_batch_fails_as_a_whole(workers):
  @rewards.batched
  def exits(prompts, completions, examples):
    raise SystemExit(1)

  pytest.importorskip('cloudpickle')
  scores = cases.score_rows(term(exits), workers=workers)
  assert (scores.failures == 'exit 1').all() and not scores.judged.any()


def test_workers_must_be_there():
  with pytest.raises(
    ValueError, match=r"\['remote'\] are to be called in work"
  ):
    cases.score_rows(term(cases.value))


def test_bad_fields_are_refused():
  with pytest.raises(ValueError, match="called 'there', but one of 'here'"):
    rewards.WeightedReward('x', cases.value, where='there')
  with pytest.raises(ValueError, match='is inf, but a finite number or None'):
    term(cases.value, failed=float('inf'))


def notes_and_waits(prompt, completion, example):
  """Writes a file when it is called; waits for ever on the completion '1'."""
  pathlib.Path(example['folder'], completion).touch()
  while completion == '1':
    time.sleep(0.1)
  return 1.0


def wait_for(path):
  until = time.monotonic() + 120
  while not path.exists():
    assert time.monotonic() < until
    time.sleep(0.01)


def test_workers_judge_before_anybody_asks_for_scores(workers, tmp_path):
  called = []
  here = rewards.WeightedReward(
    'here', lambda p, c, e: called.append(c) or float(c)
  )
  terms = [here, term(notes_and_waits)]
  with rewards.Scoring(terms, workers) as scoring:
    rows = [scoring.add('', c, {'folder': str(tmp_path)}) for c in '023']
    for completion in '023':
      wait_for(tmp_path / completion)
    assert not called
    scores = scoring.scores(rows[::-1])
  assert called == ['3', '2', '0'] and scores.reward.tolist() == [4, 3, 1]


def test_who_leaves_waits_for_no_judge(workers, tmp_path):
  begun = time.monotonic()
  with pytest.raises(ZeroDivisionError):
    with rewards.Scoring([term(notes_and_waits)], workers) as scoring:
      scoring.add('', '1', {'folder': str(tmp_path)})
      wait_for(tmp_path / '1')
      _ = 1 / 0
  assert time.monotonic() - begun < 120  # the limit of the pool is 600
  with rewards.Scoring([term(notes_and_waits)], workers) as scoring:
    row = scoring.add('', '2', {'folder': str(tmp_path)})
    assert scoring.scores([row]).reward.tolist() == [1]


def test_a_worker_that_cannot_start_is_said_when_scores_are_asked_for(
  monkeypatch,
):
  monkeypatch.setattr(sys, 'executable', '/bin/false')
  with rewards.Workers(1) as pool:
    with rewards.Scoring([term(cases.value)], pool) as scoring:
      row = scoring.add('', '2', {})
      with pytest.raises(ValueError, match='has not started'):
        scoring.scores([row])


def test_workers_judge_while_this_process_does(workers, tmp_path):
  """The function here waits for the one there, which has begun before."""
  file = tmp_path / 'touched'

  def waits(prompt, completion, example):
    until = time.monotonic() + 120
    while not file.exists():
      assert time.monotonic() < until
      time.sleep(0.02)
    return 2.0

  there = rewards.WeightedReward(
    'there',
    bad_judges.touches_path,
    where='workers',
    kwargs={'path': str(file)},
  )
  scores = cases.score_rows(waits, there, workers=workers)
  assert scores.parts.tolist() == [[2, 1]] * 3
  assert (scores.failures == '').all()


def test_an_error_here_ends_what_judges_there(workers):
  begun = time.monotonic()
  with pytest.raises(rewards.RewardError, match='returned nan'):
    cases.score_rows(
      lambda *_: float('nan'), term(bad_judges.loop), workers=workers
    )
  assert time.monotonic() - begun < 120  # the limit is 600 seconds
