"""The desk, with generators that are threads and parts that are numbers."""

import threading

import numpy as np
import pytest

from grpo_jax.run import drawing
from grpo_jax.run.jobs import desk as desk_lib

pytestmark = pytest.mark.quick


class Rollout:
  """As much of one as the desk reads."""

  def __init__(self, *index):
    self.index = np.array(index, np.int64)


def jobs(number=2, version=3):
  return [
    desk_lib.Job('sample', 0, n, number, [{'index': n}], version)
    for n in range(number)
  ]


def drawn(job):
  rollout = Rollout(*[record['index'] for record in job.records])
  return drawing.Collected(rollout, 0.0, 0.0, {})


class Asked:
  """A `Desk.draw` under way in a thread."""

  def __init__(self, desk, wanted, check=lambda: None):
    self.found = self.error = None

    def run():
      try:
        self.found = desk.draw(wanted, check)
      except BaseException as error:
        self.error = error

    self._thread = threading.Thread(target=run, daemon=True)
    self._thread.start()

  def result(self):
    self._thread.join(10)
    assert not self._thread.is_alive()
    if self.error is not None:
      raise self.error
    return self.found


class Clock:
  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


def taken(desk, word):
  """The next part; waits for the learner's thread."""
  for _ in range(1000):
    if found := desk.take(word):
      return found
    threading.Event().wait(0.005)
  raise AssertionError('nothing to take')


def test_parts_come_back_in_their_order():
  desk = desk_lib.Desk()
  one, two = desk.join('one'), desk.join('two')
  asked = Asked(desk, jobs())
  first, second = taken(desk, one), taken(desk, two)
  assert [job.part for _, job in (first, second)] == [0, 1]
  assert desk.bring(two, second[0], drawn(second[1]), 1.0)
  assert desk.bring(one, first[0], drawn(first[1]), 2.0)
  found = asked.result()
  assert [part.rollout.index.tolist() for part in found] == [[0], [1]]
  assert desk.generators() == {'one': (1, 2.0), 'two': (1, 1.0)}
  assert not desk._open and not desk._waiting


def test_the_part_of_a_silent_generator_goes_to_another_one():
  clock = Clock()
  desk = desk_lib.Desk(now=clock)
  one = desk.join('one')
  asked = Asked(desk, jobs(1))
  ticket, job = taken(desk, one)
  two = desk.join('two')
  assert desk.take(two) is None  # one has it, and beats
  clock.now = desk_lib.SILENT_SECS - 1
  assert desk.beat(one) and desk.take(two) is None
  clock.now += desk_lib.SILENT_SECS - 1
  assert desk.take(two) is None
  clock.now += 2
  assert desk.take(two) == (ticket, job)
  assert not desk.beat(one)  # it must join again
  assert desk.bring(two, ticket, drawn(job), 1.0)
  asked.result()
  # A late answer of the dead one changes nothing.
  assert not desk.bring(one, ticket, drawn(job), 1.0)
  assert not desk.fail(one, ticket, 'late', '', False)


def test_one_that_stood_still_may_be_faster_than_the_other():
  clock = Clock()
  desk = desk_lib.Desk(now=clock)
  one, two = desk.join('one'), desk.join('two')
  asked = Asked(desk, jobs(1))
  ticket, job = taken(desk, one)
  clock.now = desk_lib.SILENT_SECS + 1
  assert desk.take(two) == (ticket, job)
  assert desk.bring(one, ticket, drawn(job), 1.0)
  assert len(asked.result()) == 1
  assert not desk.is_open(ticket)
  assert not desk.bring(two, ticket, drawn(job), 1.0)


def test_a_part_that_was_lost_on_its_way_is_given_again():
  desk = desk_lib.Desk()
  one = desk.join('one')
  asked = Asked(desk, jobs(1))
  lost = taken(desk, one)
  assert desk.take(one) == lost
  desk.bring(one, lost[0], drawn(lost[1]), 1.0)
  asked.result()


def test_what_a_generator_leaves_comes_first():
  desk = desk_lib.Desk()
  one, two = desk.join('one'), desk.join('two')
  asked = Asked(desk, jobs(3))
  lost = taken(desk, one)
  desk.leave(one, 'it ends')
  for part in range(3):
    ticket, job = taken(desk, two)
    assert job.part == part and (part or (ticket, job) == lost)
    desk.bring(two, ticket, drawn(job), 1.0)
  asked.result()
  assert desk.take(one) is None


@pytest.mark.parametrize('inside', [False, True])
def test_an_error_of_a_generator_ends_the_wait(inside):
  desk = desk_lib.Desk()
  one = desk.join('one')
  asked = Asked(desk, jobs())
  ticket, _ = taken(desk, one)
  assert desk.fail(one, ticket, 'KeyError: answer', 'a trace', inside)
  kind = desk_lib.FailedInside if inside else desk_lib.Failed
  with pytest.raises(kind, match='^KeyError: answer') as raised:
    asked.result()
  assert 'the generator one:\na trace' in raised.value.__notes__[0]
  assert not desk._open and desk.take(one) is None
  with pytest.raises(kind):  # so does the next wait, such as an evaluation
    Asked(desk, jobs()).result()


def test_without_a_generator_the_wait_ends():
  clock = Clock()
  desk = desk_lib.Desk(wait_secs=50, now=clock)
  asked = Asked(desk, jobs())
  clock.now = 51
  with pytest.raises(desk_lib.Gone, match='for 51 s .*none has come; start'):
    asked.result()
  one = desk.join('one')
  asked = Asked(desk, jobs())
  taken(desk, one)
  clock.now += 49
  desk.beat(one)
  clock.now += 49
  desk.beat(one)
  clock.now += 51
  with pytest.raises(desk_lib.Gone, match='the last is gone'):
    asked.result()


def test_who_gives_up_takes_back_what_was_laid():
  desk, stops = desk_lib.Desk(), threading.Event()

  def check():
    if stops.is_set():
      raise KeyboardInterrupt

  asked = Asked(desk, jobs(), check)
  one = desk.join('one')
  ticket, job = taken(desk, one)
  stops.set()
  with pytest.raises(KeyboardInterrupt):
    asked.result()
  assert not desk.is_open(ticket) and desk.take(one) is None
  assert not desk.bring(one, ticket, drawn(job), 1.0)


def test_a_part_that_takes_much_too_long_is_drawn_by_another_one_too():
  """A device may hang, while its process beats."""
  clock = Clock()
  desk = desk_lib.Desk(now=clock)
  one, two = desk.join('one'), desk.join('two')
  asked = Asked(desk, jobs())
  hangs, quick = taken(desk, one), taken(desk, two)
  desk.bring(two, quick[0], drawn(quick[1]), 30.0)
  for clock.now in (20.0, 40.0, 60.0, 80.0):
    assert desk.beat(one) and desk.take(two) is None
  clock.now = 91.0  # three times as long as the other one took
  desk.beat(one)
  assert desk.take(two) == hangs
  assert desk.beat(one) and desk.take(one) is None
  desk.bring(two, hangs[0], drawn(hangs[1]), 5.0)
  asked.result()
  assert not desk.bring(one, hangs[0], drawn(hangs[1]), 95.0)


def test_completions_of_other_prompts_are_refused():
  desk = desk_lib.Desk()
  one = desk.join('one')
  asked = Asked(desk, jobs(1))
  ticket, job = taken(desk, one)
  wrong = drawing.Collected(Rollout(7), 0.0, 0.0, {})
  with pytest.raises(ValueError, match='of other prompts'):
    desk.bring(one, ticket, wrong, 1.0)
  assert desk.bring(one, ticket, drawn(job), 1.0)
  asked.result()
