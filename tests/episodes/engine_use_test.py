"""How engines are used while episodes are played, by a clock of the test."""

import pytest

from grpo_jax import engines
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.episodes import engine_use
from grpo_jax.episodes import play as play_lib
from grpo_jax.hosts import stop_signal
from grpo_jax.run import judging
from tests.episodes import meeting_test
from tests.episodes import play_test
from tests.fake_engine import FakeEngine
from tests.hosts import processes_test

pytestmark = pytest.mark.quick


class Clock:
  """Stands still but for `pass_by`."""

  def __init__(self):
    self.secs = 100.0

  def __call__(self):
    return self.secs

  def pass_by(self, secs):
    self.secs += secs


class Slow(FakeEngine):
  """Takes a second for each turn of its own."""

  def __init__(self, clock, **told):
    told = engines.Capabilities(entropy=True, **told)
    super().__init__(play_test.counting, told)
    self.clock = clock
    self.load(None, 3)

  def completed(self, every_tokens=None):
    for turn in super().completed(every_tokens):
      self.clock.pass_by(1)
      yield turn


class Slept(play_test.Scripted):
  """Gives each of its rounds after a number of seconds."""

  def __init__(self, clock, *rounds):
    super().__init__(*rounds)
    self.clock = clock

  def wait(self):
    secs, *events = super().wait()
    self.clock.pass_by(secs)
    return events

  def news(self, secs=0.0):
    if not self.rounds or (not secs and self.rounds[0][0]):
      return []  # who does not wait does not get what is still to come
    return self.wait()


def used(clock, player, engine, group):
  use = engine_use.EngineUse(clock)
  play_lib.play(
    play_test.RECORDS[:1], [7], engine, play_test.TOKENIZER, player,
    play_test.HERMES, play_test.SAMPLING, play_test.LIMITS, group, seed=1,
    rollout=4, use=use,
  )  # fmt: skip
  clock.pass_by(99)  # which belongs to no episode
  use.note(0, 0)
  clock.pass_by(-99)
  return use.metrics()


def both_say(secs, text):
  return secs, play_test.say(0, text), play_test.say(1, text)


def test_in_rounds_rows_wait_for_environments_and_for_each_other():
  clock = Clock()
  one_says = 4, play_test.say(0, 'more'), play_test.done(1)
  player = Slept(
    clock,
    both_say(3, 'a'),
    both_say(2, 'more'),
    one_says,
    (5, play_test.done(0)),
  )
  engine = Slow(clock)
  found = used(clock, player, engine, 2)
  # The first turns are one request of a second, then each is one of its own.
  # In the last round a blank fills the place of the other one.
  wanted, busy = 2 * (3 + 1 + 2 + 2 + 4) + 2 + 5, 2 * 1 + (2 + 1) + (1 + 1)
  assert found['engine_idle_share'] == pytest.approx(1 - busy / wanted)
  first, second, third, fourth, blank = (len(x.ids) for x in engine.requests)
  assert second == third < fourth == blank
  read = first + second + third + fourth
  assert found['engine_read_share'] == read / (read + first)
  assert found['engine_parked_share'] == 0


def test_at_once_a_row_is_busy_while_its_turn_is_under_way():
  clock = Clock()
  player = Slept(
    clock,
    both_say(3, 'a'),
    (0, play_test.say(1, 'b')),  # heard once its first turn is there
    (4, play_test.done(0)),
    (2, play_test.done(1)),
  )
  found = used(clock, player, Slow(clock, queues=True), 2)
  assert clock.secs == 100 + 3 + 3 + 4 + 2
  # Both turns of episode 1 are drawn before the one of 0, which waits for 4.
  # From its end on one row is wanted.
  wanted, busy = 2 * (3 + 3 + 4) + 2, 2 + 2 + 1
  assert found['engine_idle_share'] == 1 - busy / wanted
  assert found['engine_read_share'] == 1


def test_no_more_rows_are_wanted_than_there_are():
  clock = Clock()
  use = engine_use.EngineUse(clock)
  use.begin(Slow(clock, rows=4), 10)
  for live, drawn in ((10, 6), (10, 2), (3, 2), (0, 0)):
    clock.pass_by(1)
    use.note(live, drawn)
  assert use.metrics() == {}  # nothing was drawn
  call = meeting_test.meeting.Call(0, 0, [5] * 8, None, 9, True)
  use.drew(call, None)
  use.drew(call, 2, parked=True)
  wanted, busy = 4 + 4 + 4 + 3, 0 + 4 + 2 + 2
  assert use.metrics() == {
    'engine_idle_share': 1 - busy / wanted,
    'engine_read_share': 10 / 16,
    'engine_parked_share': 0.5,
  }
  clock.pass_by(99)  # until more episodes are played
  use.begin(Slow(clock), 10)
  clock.pass_by(1)
  use.note(0, 0)
  assert use.metrics()['engine_idle_share'] == 1 - busy / (wanted + 10)


def test_more_turns_than_episodes_are_as_many_rows():
  clock = Clock()
  use = engine_use.EngineUse(clock)
  use.begin(Slow(clock), 1)
  for live, drawn in ((1, 3), (1, 0), (0, 0)):
    use.note(live, drawn)
    clock.pass_by(1)
  use.drew(meeting_test.meeting.Call(0, 0, [5], None, 9, True), None)
  assert use.metrics()['engine_idle_share'] == 1 - 3 / 4


@pytest.mark.parametrize('queues', [False, True])
def test_several_count_the_turns_of_all(queues):
  def play(hosts=meeting_test.meeting.ALONE):
    use = engine_use.EngineUse(lambda: 0.0)
    engine = FakeEngine(
      play_test.counting, engines.Capabilities(entropy=True, queues=queues)
    )
    engine.load(None, 3)
    with sessions.Player(
      {'': play_test.guessing}, sessions.Options(where='here')
    ) as player:
      play_lib.play(
        meeting_test.RECORDS, [*range(5)], engine, play_test.TOKENIZER, player,
        formats.find('hermes'), play_test.SAMPLING, play_test.LIMITS, 2,
        seed=1, rollout=4, hosts=hosts, use=use,
      )  # fmt: skip
    return use.metrics(), use._live, use._drawn

  alone = play()
  assert 0 < alone[0]['engine_read_share'] <= 1
  assert (alone[0]['engine_read_share'] == 1) == queues
  body = lambda peers: play(judging.hosts(peers, stop_signal.Stop()))
  found, _ = processes_test.run(body, 3)
  assert found == [alone] * 3
