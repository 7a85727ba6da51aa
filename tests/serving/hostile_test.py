"""Hostile agents: each ends within its limits, alone, and is paid nothing."""

import collections
import io
import json
import os
import pathlib
import re
import shlex
import signal
import sys
import time

import pytest

from grpo_jax.environments import events
from grpo_jax.environments import sessions
from grpo_jax.environments.base import Reply
from grpo_jax.environments.events import Done
from grpo_jax.environments.events import Failed
from grpo_jax.environments.events import LeftOut
from grpo_jax.environments.events import Rewarded
from grpo_jax.environments.events import Say
from grpo_jax.rewards import agent_process
from grpo_jax.serving import agents
from tests.serving import hostile_agents

SCRIPT = str(pathlib.Path(hostile_agents.__file__).resolve())
MINE = f'of-{os.getpid()}'  # other processes of the suite play some too
TURNS = 12
EXAMPLE = {
  'mebibytes': 64, 'turns': TURNS, 'printed': 'nan', 'secs': 1.5,
  'long': 'x' * 300_000,
}  # fmt: skip
TOO_LATE = r'time limit: more than 1 s of its own'


def hostile(name, **options):
  command = shlex.join([sys.executable, '-S', '-E', SCRIPT, name, MINE])
  return agents.PLAY, {'command': command, **options}


class Played:
  """What came of an episode.

  Attributes:
    end: `Done` or `Failed`.
    seen: What the agent has told to have seen; None if it has told nothing.
    tries: How often it was begun.
    turns: How many answers it was given.
    said: All other events, by their type.
    secs: From its begin to its end.
  """

  def __init__(self, name):
    self.name = name
    self.end = self.seen = None
    self.tries = 1
    self.turns, self.secs = 0, time.monotonic()
    self.is_cancelled = False
    self.said = collections.defaultdict(list)

  def take(self, event, player):
    self.said[type(event)].append(event)
    if isinstance(event, Failed) and event.unavailable:
      self.tries, self.turns, self.is_cancelled = self.tries + 1, 0, False
      player.begin(events.Begin(event.episode, EXAMPLE, 7, self.name))
    elif isinstance(event, Done | Failed):
      self.end, self.secs = event, time.monotonic() - self.secs
    if not isinstance(event, Say):
      return ()
    if self.turns == TURNS:
      self.is_cancelled = True
      player.cancel(event.episode, 'turns')
      return ()
    text = event.messages[-1]['content']
    if text.startswith('seen '):
      self.seen = json.loads(text[5:])
    turn, self.turns = self.turns, self.turns + 1
    due = time.monotonic() + EXAMPLE['secs'] * (text.startswith('slowly'))
    return ((due, event.episode, event.context, Reply('ok', turn=turn)),)


def play(names, **options):
  """Plays an episode of each agent, all at once; what came of each."""
  found = {name: Played(name) for name in names}
  given = dict(
    processes=1,
    sessions=64,
    episode_secs=20.0,
    memory_limit_bytes=4 << 30,
    most_processes=1000,
  )
  with sessions.Player(
    {
      name: value if isinstance(value, tuple) else hostile(name, **value)
      for name, value in names.items()
    },
    sessions.Options(**{**given, **options}),
  ) as player:
    for number, name in enumerate(names):
      begin = events.Begin(number, EXAMPLE, 7, name)
      player.begin(begin)
    order, late = [*names], []
    while player.live or late:
      for event in player.news(0.05 if late else 0.5):
        late += found[order[event.episode]].take(event, player)
      now = time.monotonic()
      for due in [one for one in late if one[0] <= now]:
        late.remove(due)
        if not found[order[due[1]]].is_cancelled:  # nobody waits for it
          player.answer(*due[1:])
  return found


def left():
  """The processes of hostile agents that go on."""
  found = []
  for one in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      words = (one / 'cmdline').read_bytes().split(b'\0')
      # What has ended and waits for its parent has no words.
      if SCRIPT.encode() in words and MINE.encode() in words:
        found.append((int(one.name), words[-3].decode()))
    except OSError:
      pass
  return found


def check_nothing_is_left():
  until = time.monotonic() + 5
  while left() and time.monotonic() < until:
    time.sleep(0.05)
  late = left()
  for number, _ in late:
    os.kill(number, signal.SIGKILL)
  assert not late


# By names: how it ends, what it has seen, and what is counted.
DONE = 'done'
ENDS = {
  'good': (DONE, [200, 200]),
  'exits_at_once': (DONE, None),
  'exits_with_3': ('AgentFailed: exited with 3: no such room$', None),
  'exits_without_a_word': ('AgentFailed: exited with 4$', None),
  'raises': ("AgentFailed: exited with 1: KeyError: 'gold'$", None),
  'ends_by_a_signal': ('AgentFailed: was ended by signal SIGTERM$', None),
  'exits_while_it_asks': (DONE, None),
  'prints_much': (DONE, ['printed']),
  'complains_much': ('AgentFailed: exited with 5: .{1,270}$', None),
  'closes_its_input': (DONE, [200]),
  'reads_no_input': (DONE, ['not read']),
  'closes_its_output': (DONE, [200]),
  'leaves_a_child': (DONE, ['left']),
  'rewards_itself': (DONE, [200] + 15 * [403]),
  'guesses_tokens': (
    DONE,
    [404] * 9 + [401] * 2 + [404] + [404, 401, 401, 401] + [404] * 3
    + [401, 404, 404],
  ),
  'other_hosts': (DONE, [403] * 5 + [415] * 3 + [405, False]),
  'sends_garbage': (DONE, [400] * 20),
  'sends_lone_surrogates': (DONE, [True]),
  'sends_too_much': (DONE, [413]),
  'sends_half': (DONE, [200, 4]),
  'hangs_up': (DONE, ['gone']),
  'reads_no_answer': (DONE, [3]),
  'floods': ('turns', None),
  'goes_on_beyond_the_limit': ('turns', None),
  'never_ends_beyond_the_limit': ('turns', None),
  'fails_beyond_the_limit': ('turns', None),
}  # fmt: skip
LATE = 'never_ends', 'busy_for_ever', 'ignores_signals', 'stops_itself'
TRUSTED = {'trust_agent': True}


@pytest.fixture(scope='module', params=sessions.WHERE)
def played(request):
  """All that end by themselves, at once."""
  return play({name: {} for name in ENDS}, where=request.param)


@pytest.mark.parametrize('name', ENDS)
def test_it_ends_by_itself(played, name):
  how, seen = ENDS[name]
  one = played[name]
  assert one.seen == seen, one.end
  assert not one.said[Rewarded]
  if how in (DONE, 'turns'):
    assert isinstance(one.end, Done), one.end
    assert one.end.reward is None
    assert (one.turns == TURNS) == (how == 'turns')
  else:
    assert re.search(how, one.end.reason), one.end.reason
    assert one.end.reason.isprintable()


def test_what_nobody_got_is_left_out(played):
  for name, counts, left_out in (
    ('hangs_up', {'undelivered': 3}, 3),
    ('good', {}, 0),
    ('rewards_itself', {}, 0),
    ('guesses_tokens', {}, 0),
  ):
    one = played[name]
    assert len(one.said[LeftOut]) == left_out
    assert one.end.counts == counts


def test_nothing_goes_on(played):
  check_nothing_is_left()


@pytest.mark.parametrize('where', sessions.WHERE)
def test_one_that_does_not_end_is_ended(where):
  found = play({name: {} for name in LATE}, where=where, episode_secs=1.0)
  for one in found.values():
    assert re.search(TOO_LATE, one.end.reason) and one.secs < 60
  check_nothing_is_left()


@pytest.mark.parametrize('where', sessions.WHERE)
def test_one_that_is_trusted_needs_its_secret_and_says_numbers(where):
  found = play(
    {
      'rewards_itself_with_its_secret': TRUSTED,
      'rewards_itself': TRUSTED,
      'prints_no_number': TRUSTED,
    },
    where=where,
  )
  one = found['rewards_itself_with_its_secret']
  assert one.seen == [200, 403, 200, *[400] * 7, 200]
  assert [event.value for event in one.said[Rewarded]] == [0.5]
  assert [event.turn for event in one.said[LeftOut]] == [0]
  assert one.end.reward == 0.25 and one.end.counts == {'left_out': 1}
  one = found['rewards_itself']
  assert one.seen == [200] + 15 * [403]
  assert not one.said[Rewarded] and one.end.reward == 1000.0
  one = found['prints_no_number']
  assert 'a finite number is required' in one.end.reason


def test_it_is_given_little(monkeypatch):
  monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'gold')
  found = play({'looks_around': {'variables': {'MINE': 'x'}}}, where='workers')
  names, sockets = found['looks_around'].seen
  assert {*names} <= {
    'HOME', 'LANG', 'LC_ALL', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'MINE', 'NO_PROXY',
    'OPENAI_API_BASE', 'OPENAI_API_KEY', 'OPENAI_BASE_URL', 'PATH',
    'SSL_CERT_FILE', 'TMPDIR', 'TZ', 'USER', 'GRPO_JAX_GUARDED',
  }  # fmt: skip
  assert 'MINE' in names and not sockets


@pytest.mark.parametrize(
  'name, options, reason',
  [
    (
      'forks_many',
      {'most_processes': 30, 'episode_secs': 3.0},
      'time limit|has ended|by processes',
    ),
    ('eats_memory', {'memory_limit_bytes': 1 << 30}, 'MemoryError|memory'),
    ('ends_its_parent', {}, 'its process has ended|not permitted'),
    ('daemonises', {}, DONE),
  ],
)
def test_the_worker_ends_with_what_it_has_left(name, options, reason):
  found = play(
    {name: {}, 'good': {}},
    **{'where': 'workers', 'sessions': 1, **options},
  )
  end = found[name].end
  assert re.search(reason, DONE if isinstance(end, Done) else end.reason), end
  assert isinstance(found['good'].end, Done), found['good'].end
  check_nothing_is_left()


def test_one_that_finds_no_room_begins_again(monkeypatch):
  real, tried = agent_process.start, []

  def full(*args, **kwargs):
    tried.append(args)
    if len(tried) == 1:
      raise BlockingIOError(11, 'Resource temporarily unavailable')
    return real(*args, **kwargs)

  monkeypatch.setattr(agent_process, 'start', full)
  one = play({'good': {}}, where='here')['good']
  assert one.tries == 2 and isinstance(one.end, Done)


def test_what_is_kept_of_what_it_prints_is_little():
  tail = agents._Tail()
  tail.read(io.BytesIO(b'x' * (50 << 20) + b'\nlast\n\n'))
  assert tail.last() == 'last'
  assert sum(map(len, tail._kept)) < 3 * agents._MOST_TOLD
