"""Players: whatever an environment does, each episode ends, and alone."""

import contextlib
import os
import re
import threading
import time

import pytest

from grpo_jax.environments import events
from grpo_jax.environments import sessions
from grpo_jax.environments.base import Reply
from grpo_jax.environments.events import Done
from grpo_jax.environments.events import Failed
from grpo_jax.environments.events import Forked
from grpo_jax.environments.events import Rewarded
from grpo_jax.environments.events import Say
from tests.environments import bad_environments
from tests.environments import playing
from tests.environments.playing import play

NAMES = [
  name
  for name, value in vars(bad_environments).items()
  if getattr(value, '__module__', '') == bad_environments.__name__
  and name[0] != '_'
]
ENVIRONMENTS = {name: playing.MODULE + name for name in NAMES}
HASTY_SECS = 0.4


def options(where, **changes):
  given = dict(
    where=where, processes=1, memory_limit_bytes=800 << 20, most_processes=20
  )
  return sessions.Options(**{**given, **changes})


@pytest.fixture(scope='module')
def players():
  """One for each place, made when it is first needed, for all tests."""
  made = {}

  def get(where):
    if where in made and made[where].live:  # a test has failed before its end
      made.pop(where).close()
    if where not in made:
      made[where] = sessions.Player(ENVIRONMENTS, options(where))
    return made[where]

  yield get
  for player in made.values():
    player.close()


@pytest.fixture(params=sessions.WHERE)
def player(request, players):
  return players(request.param)


@pytest.fixture
def in_workers(players):
  return players('workers')


def test_an_episode_says_the_same_in_every_place(players):
  said = [
    [
      one._replace(secs=0.0) if isinstance(one, Done) else one
      for news in play(players(where), ['good', 'good'], {'text': 'é'}).rounds
      for one in news
      if one.episode == 0
    ]
    for where in sessions.WHERE
  ]
  user = lambda text: ({'role': 'user', 'content': text},)
  assert said[0] == said[1]
  assert said[0] == [
    Say(0, 0, user('one é'), (), None),
    Rewarded(0, 0, 0.25),
    Say(0, 0, user('two'), (), None),
    Rewarded(0, 1, 0.5),
    Done(0, 4.0, secs=0.0),
  ]


@pytest.mark.parametrize(
  'name, reason',
  [
    ('RaisesInReset', "raised KeyError: 'gold'"),
    ('RaisesInStep', 'raised RuntimeError: lost ...'),
    ('RaisesInClose', 'raised OSError: it is in use'),
    ('ExitsInStep', 'raised Stopped: SystemExit: 3'),
    ('StopsIteration', 'raised Stopped: StopIteration'),
    ('raises_what_cannot_be_said', 'raised Unsayable: its text cannot be'),
    ('exits', 'raised Stopped: SystemExit: 3'),
    ('exits_beside', 'raised Stopped: SystemExit: why'),
    ('interrupts', 'raised Stopped: KeyboardInterrupt'),
    ('returns_text', 'raised ValueError: What the environment'),
    ('returns_nan', 'raised ValueError: What the environment'),
    ('rewards_nan', 'raised ValueError: The reward of a turn is nan'),
    ('rewards_too_early', 'raised ValueError: A reward was given before'),
    ('rewards_another_turn', 'raised ValueError: Turn 7 was given a reward'),
    ('says_an_object', 'raised TypeError: A message holds <unlocked'),
    ('says_no_message', 'raised TypeError: `policy.say` was given 7'),
    ('says_nothing', 'raised ValueError: `policy.say` was given no message'),
    ('changes_tools', 'raised ValueError: `policy.say` was given other tools'),
    (
      'says_twice_at_once',
      'raised RuntimeError: `policy.say` was called',
    ),
    ('forks_while_it_waits', 'raised RuntimeError: `policy.fork` was called'),
    ('ends_itself', 'raised Ended: my own'),
  ],
)
def test_a_bad_episode_fails_alone(player, name, reason):
  def text(say, turn):
    return 'done' if name == 'RaisesInClose' else 'ok'

  first, bad, last = play(player, ['good', name, 'good'], text=text).ends
  assert isinstance(bad, Failed) and bad.reason.startswith(reason), bad
  assert not bad.unavailable and '\n' not in bad.reason
  assert isinstance(first, Done) and isinstance(last, Done)


@pytest.mark.parametrize(
  'name, reward',
  [
    ('says_much', 2.0),
    ('says_after_the_end', 1.0),
    ('changes_folder', 1.0),
  ],
)
def test_what_is_odd_and_does_no_harm(in_workers, name, reward):
  (end,) = play(in_workers, [name]).ends
  assert isinstance(end, Done) and end.reward == reward, end
  (end,) = play(in_workers, ['changes_folder']).ends  # it is as it was
  assert end.reward == 1.0


def test_a_thread_keeps_to_its_episode(player):
  text = lambda say, turn: 'done' if turn == 5 else 'ok'
  for found in play(player, ['OneThread'] * 3, text=text).events.values():
    values = [one.value for one in found if isinstance(one, Rewarded)]
    assert values == [1.0] * 6, found


def test_forks_ask_together_and_have_numbers_of_their_own(player):
  played = play(player, ['forks'])
  (end,) = played.ends
  assert end.reward == 2.0
  assert [one for one in played.events[0] if isinstance(one, Forked)] == [
    Forked(0, 1, 0),
    Forked(0, 2, 0),
  ]
  asked = [
    [one.context for one in news if isinstance(one, Say)]
    for news in played.rounds
  ]
  assert asked == [[0], [1, 2], []]
  assert played.events[0][-2] == Rewarded(0, 2, 0.5)


def test_the_order_is_that_of_the_episodes(player):
  """The first ones take longest."""
  text = lambda say, turn: 'done' if turn else 'ok'
  names = ['takes_its_time', 'good', 'OneThread', 'good']
  played = play(player, names, text=text)
  for news in played.rounds:
    numbers = [one.episode for one in news]
    assert numbers == sorted(numbers)
  assert {one.episode for one in played.rounds[1]} == {0, 1, 2, 3}


class TestLimits:
  def test_a_limit_ends_it_and_it_may_still_be_rewarded(self, player):
    names = ['keeps_its_reward', 'lets_it_pass', 'good']
    kept, passed, good = play(player, names, cancel_at=2).ends
    assert (kept.reward, passed.reward, good.reward) == (0.75, None, 4.0)
    assert isinstance(passed, Done)

  def test_who_goes_on_after_the_end_fails(self, player):
    names = ['goes_on_after_its_end', 'catches_all', 'keeps_its_reward']
    played = play(player, names, cancel_at=1)
    for end in played.ends[:2]:
      assert isinstance(end, Failed)
      assert end.reason.startswith('has gone on after its end (turns)'), end
    assert played.ends[2].reward == 0.75
    assert sum(len(news) for news in played.rounds) <= 9

  def test_an_answer_to_an_episode_that_is_over_is_nothing(self, player):
    player.begin(events.Begin(0, {}, 0, 'keeps_its_reward'))
    player.wait()
    player.cancel(0, 'turns')
    (end,) = player.wait()
    assert end.reward == 0.75
    player.answer(0, 0, Reply('x'))
    player.cancel(0, 'again')
    assert player.wait() == [] and not player.live

  def test_waiting_for_the_policy_takes_no_time(self):
    hasty = options('here', episode_secs=1.0)
    with sessions.Player(ENVIRONMENTS, hasty) as player:

      def text(say, turn):
        time.sleep(1.2)
        return 'ok'

      (end,) = play(player, ['takes_its_time'], text=text).ends
    assert isinstance(end, Done) and 0.04 < end.secs < 1.0, end


@pytest.mark.parametrize(
  'where', ['here', pytest.param('workers', marks=pytest.mark.long)]
)
def test_what_sleeps_for_ever_ends_alone(where):
  hasty = options(where, episode_secs=HASTY_SECS)
  with sessions.Player(ENVIRONMENTS, hasty) as player:
    process = play(player, ['says_its_process']).events[0][0]
    names = ['sleeps', 'good', 'outlives_its_time']
    bad, good, late = play(player, names).ends
    assert bad.reason == 'time limit: more than 0.4 s of its own'
    assert late.reason == bad.reason
    assert isinstance(bad, Failed) and not bad.unavailable
    assert good.reward == 4.0
    assert play(player, ['says_its_process']).events[0][0] == process


@pytest.mark.parametrize('name', ['loops', 'LoopsInStep', 'HangsInStep'])
@pytest.mark.parametrize('where', sessions.WHERE)
@pytest.mark.long
def test_what_cannot_be_stopped_is_ended(monkeypatch, where, name):
  """Episodes beside it begin again, where they had to end with it."""
  monkeypatch.setattr(sessions, '_GRACE_SECS', 1.5)
  monkeypatch.setattr(bad_environments, 'release', threading.Event())
  hasty = options(where, episode_secs=HASTY_SECS)
  with contextlib.ExitStack() as ends:
    player = ends.enter_context(sessions.Player(ENVIRONMENTS, hasty))
    ends.callback(bad_environments.release.set)
    played = play(player, [name, 'good'], text='ok')
    bad, good = played.ends
    assert isinstance(bad, Failed)
    assert bad.reason.startswith('time limit: more than 0.4 s'), bad
    assert good.reward == 4.0
    assert play(player, ['good']).ends[0].reward == 4.0


@pytest.mark.long
def test_a_loop_that_holds_the_process_is_blamed_and_no_other(monkeypatch):
  monkeypatch.setattr(sessions, '_GRACE_SECS', 0.2)
  hasty = options('workers', episode_secs=HASTY_SECS)
  with sessions.Player(ENVIRONMENTS, hasty) as player:
    played = play(player, ['sleeps', 'loops', 'good'])
  slept, looped, good = played.ends
  assert looped.reason.startswith('time limit') and played.tries[1] == 1
  assert good.reward == 4.0
  assert isinstance(slept, Failed)  # in its second try, for itself


@pytest.mark.parametrize(
  'name, reasons',
  [
    ('leaves_the_process', ['its process has ended (exit 5)']),
    pytest.param(
      'kills_itself',
      ['its process has ended (signal SIGKILL)'],
      marks=pytest.mark.long,
    ),
    pytest.param(
      'eats',
      ['raised MemoryError', 'memory', 'its process has ended (memory)'],
      marks=pytest.mark.long,
    ),
  ],
)
def test_a_crash_fails_its_episode_and_the_others_begin_again(
  in_workers, name, reasons
):
  played = play(in_workers, ['waits', name, 'good', 'waits'])
  ends = played.ends
  assert isinstance(ends[1], Failed)
  assert any(map(ends[1].reason.startswith, reasons)), ends[1]
  assert played.tries[1] == 1
  assert [ends[k].reward for k in (0, 2, 3)] == [1.0, 4.0, 1.0]


@pytest.mark.long
@pytest.mark.parametrize(
  'name, reason',
  [
    ('closes_all', 'it closed the pipe of answers|exit 1'),
    ('writes_everywhere', 'it wrote to the pipe of answers'),
  ],
)
def test_where_nobody_is_to_blame_all_of_the_process_fail(
  in_workers, name, reason
):
  """It is seen when the code that did it runs no more."""
  played = play(in_workers, ['waits', name, 'waits'])
  reasons = {one.reason for one in played.ends if isinstance(one, Failed)}
  assert len(reasons) == 1
  assert re.fullmatch(rf'its process has ended \(({reason})\)', *reasons)
  assert isinstance(played.ends[1], Failed)
  assert play(in_workers, ['good']).ends[0].reward == 4.0


def test_a_child_that_comes_back_is_no_worker(in_workers):
  played = play(in_workers, ['forks_its_process', 'good'])
  said = [
    one.messages[0]['content']
    for one in played.events[0]
    if isinstance(one, Say)
  ]
  assert said == ['x', 'parent']
  assert [one.reward for one in played.ends] == [1.0, 4.0]


@pytest.mark.parametrize(
  'name',
  [
    'prints',
    pytest.param('leaves_a_thread', marks=pytest.mark.long),
    pytest.param('leaves_a_call', marks=pytest.mark.long),
  ],
)
def test_who_leaves_something_behind_has_the_process_replaced(in_workers, name):
  process = lambda: play(in_workers, ['says_its_process']).events[0][0]
  before = process()
  played = play(in_workers, [name, 'good'])
  assert [one.reward for one in played.ends] == [1.0, 4.0]
  until = time.monotonic() + 20
  while name != 'prints' and process() == before:
    assert time.monotonic() < until
  if name == 'prints':
    assert process() == before


class TestUnavailable:
  def test_once(self, player, tmp_path):
    example = {'mark': str(tmp_path / 'mark')}
    played = play(player, ['is_away_once', 'good'], example)
    assert [one.reward for one in played.ends] == [1.0, 4.0]
    assert played.tries == {0: 2, 1: 1}

  def test_for_ever(self, player):
    played = play(player, ['is_away'])
    assert played.ends == [Failed(0, 'raised Unavailable: no server', False)]
    assert played.tries == {0: 2}

  def test_the_count_begins_anew_with_another_episode(self, player, tmp_path):
    for name in ('a', 'b'):
      example = {'mark': str(tmp_path / name)}
      assert play(player, ['is_away_once'], example).tries == {0: 2}


class TestExamples:
  def test_one_that_cannot_be_sent(self, in_workers):
    (end,) = play(in_workers, ['good'], {'lock': threading.Lock()}).ends
    assert isinstance(end, Failed)
    assert end.reason.startswith('its example cannot be sent to a worker'), end

  def test_one_that_cannot_be_read(self, in_workers):
    (end,) = play(in_workers, ['good'], {'x': bad_environments._Local()}).ends
    assert isinstance(end, Failed)
    assert 'raised ImportError: no such thing here' in end.reason, end


class TestPlayer:
  @pytest.mark.long
  def test_more_episodes_than_places(self):
    few = options('workers', processes=2, sessions=3)
    with sessions.Player(ENVIRONMENTS, few) as player:
      played = play(player, ['good'] * 25)
    assert [one.reward for one in played.ends] == [4.0] * 25
    live = [
      len({one.episode for one in news if isinstance(one, Say)})
      for news in played.rounds
    ]
    assert max(live) == 6

  @pytest.mark.parametrize('where', sessions.WHERE)
  def test_what_is_reusable_is_closed_with_the_player(self, where, tmp_path):
    mark, said = tmp_path / 'closed', set()
    with sessions.Player(ENVIRONMENTS, options(where)) as player:
      for _ in range(3):
        played = play(player, ['Kept'], {'mark': str(mark)}, text='done')
        said.add(played.events[0][0].messages[0]['content'])
        assert isinstance(played.ends[0], Done)
      assert len(said) == 1 and not mark.exists()
    assert mark.exists()

  @pytest.mark.parametrize('where', sessions.WHERE)
  def test_nothing_is_left_after_close(self, where):
    """With an episode that waits, one that was never begun, and one at work."""
    files = lambda: set(os.listdir('/proc/self/fd'))
    children = lambda: set(
      open(f'/proc/self/task/{os.getpid()}/children').read().split()
    )
    before, threads = (files(), children()), {*threading.enumerate()}
    player = sessions.Player(ENVIRONMENTS, options(where, sessions=2))
    for number, name in enumerate(['waits', 'Turns', 'good', 'sleeps']):
      player.begin(events.Begin(number, {}, 0, name))
    for event in player.wait():
      if event.episode == 1:
        player.answer(1, 0, Reply('ok'))
    player.wait()
    player.close()
    player.close()
    assert (files(), children()) == before
    until = time.monotonic() + 120
    while {*threading.enumerate()} - threads:
      assert time.monotonic() < until
      time.sleep(0.001)

  @pytest.mark.parametrize(
    'changes, message',
    [
      ({'where': 'there'}, "where='there' of the environments is neither"),
      ({'sessions': 0}, 'sessions of the environments is 0, but at least 1'),
      ({'tool_secs': 0}, 'tool_secs of the environments is 0, but a positive'),
      ({'retries': -1}, 'retries of the environments is -1, but at least 0'),
    ],
  )
  def test_options_that_cannot_be(self, changes, message):
    with pytest.raises(ValueError, match=message):
      sessions.Player({}, options('here')._replace(**changes))

  def test_begins_that_cannot_be(self, players):
    player = players('here')
    with pytest.raises(ValueError, match="is of the environment 'goood', but"):
      player.begin(events.Begin(0, {}, 0, 'goood'))
    player.begin(events.Begin(0, {}, 0, 'good'))
    with pytest.raises(ValueError, match='Episode 0 is live already'):
      player.begin(events.Begin(0, {}, 0, 'good'))
    player.wait()
    with pytest.raises(ValueError, match='Context 3 of episode 0 was answered'):
      player.answer(0, 3, Reply('x'))
    player.cancel(0, 'turns')
    player.wait()

  @pytest.mark.long
  def test_a_worker_that_cannot_start(self, monkeypatch):
    monkeypatch.setattr(sessions.places.worker, '__name__', 'no.such.module')
    with sessions.Player(ENVIRONMENTS, options('workers')) as player:
      player.begin(events.Begin(0, {}, 0, 'good'))
      with pytest.raises(ValueError, match='has not started .exit 1.; see'):
        player.wait()
