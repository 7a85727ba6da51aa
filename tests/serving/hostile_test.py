"""Hostile agents: each ends within its limits, alone, and is paid nothing."""

import collections
import json
import os
import pathlib
import re
import shlex
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
from grpo_jax.serving import agents
from tests.serving import hostile_agents

SCRIPT = str(pathlib.Path(hostile_agents.__file__).resolve())
TURNS = 12
EXAMPLE = {'mebibytes': 64, 'turns': TURNS, 'printed': 'nan', 'secs': 0.4}
TOO_LATE = r'time limit: more than 1 s of its own'


def hostile(name, **options):
  command = shlex.join([sys.executable, '-S', '-E', SCRIPT, name])
  return agents.PLAY, {'command': command, **options}


class Played:
  """What came of an episode.

  Attributes:
    end: `Done` or `Failed`.
    seen: What the agent has told to have seen; None if it has told nothing.
    turns: How many answers it was given.
    said: All other events, by their type.
    secs: From its begin to its end.
  """

  def __init__(self):
    self.end = self.seen = None
    self.turns, self.secs = 0, time.monotonic()
    self.is_cancelled = False
    self.said = collections.defaultdict(list)

  def take(self, event, player):
    self.said[type(event)].append(event)
    if isinstance(event, Done | Failed):
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


def play(names, example=None, **options):
  """Plays an episode of each agent, all at once; what came of each."""
  found = {name: Played() for name in names}
  given = dict(
    processes=1, sessions=64, episode_secs=20.0,
    memory_limit_bytes=1500 << 20, most_processes=300,
  )
  with sessions.Player(
    {
      name: value if isinstance(value, tuple) else hostile(name, **value)
      for name, value in names.items()
    },
    sessions.Options(**{**given, **options}),
  ) as player:
    for number, name in enumerate(names):
      begin = events.Begin(number, {**EXAMPLE, **(example or {})}, 7, name)
      player.begin(begin)
    order, late = [*names], []
    while player.live or late:
      for event in player.news(0.05 if late else 0.5):
        late += found[order[event.episode]].take(event, player)
      now = time.monotonic()
      for due in [one for one in late if one[0] <= now]:
        late.remove(due)
        if not found[order[due[1]]].is_cancelled:
          player.answer(*due[1:])
  return found


def left():
  """The processes of hostile agents that go on."""
  found = []
  for one in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      words = (one / 'cmdline').read_bytes().split(b'\0')
      # What has ended and waits for its parent has no words.
      if SCRIPT.encode() in words:
        found.append((int(one.name), words[-2].decode()))
    except OSError:
      pass
  return found


def check_nothing_is_left():
  until = time.monotonic() + 5
  while left() and time.monotonic() < until:
    time.sleep(0.05)
  assert not left()


# By names: how it ends, what it has seen, and what is counted.
DONE = 'done'
ENDS = {
  'good': (DONE, [200, 200]),
  'exits_at_once': (DONE, None),
  'exits_with_3': ('AgentFailed: exited with 3: no such room$', None),
  'exits_without_a_word': ('AgentFailed: exited with 4$', None),
  'raises': ("AgentFailed: exited with 1: KeyError: 'gold'$", None),
  'ends_by_a_signal': ('AgentFailed: was ended by signal 15$', None),
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
LATE = [
  'never_ends', 'busy_for_ever', 'ignores_signals', 'stops_itself'
]  # fmt: skip


@pytest.fixture(scope='module', params=sessions.WHERE)
def played(request):
  """All that end by themselves, at once."""
  return play({name: {} for name in ENDS}, where=request.param)


@pytest.mark.parametrize('name', ENDS)
def test_it_ends_by_itself(played, name):
  how, seen = ENDS[name]
  one = played[name]
  assert one.seen == seen
  assert not one.said[Rewarded]
  if how in (DONE, 'turns'):
    assert isinstance(one.end, Done), one.end
    assert one.end == Done(
      one.end.episode, None, secs=one.end.secs, counts=one.end.counts
    )
    assert (one.turns == TURNS) == (how == 'turns')
  else:
    assert re.search(how, one.end.reason), one.end.reason
    assert one.end.reason.isprintable()


def test_what_nobody_got_is_left_out(played):
  for name, counts, turns in (
    ('hangs_up', {'undelivered': 3}, 3),
    ('exits_while_it_asks', {}, 0),
    ('good', {}, 0),
    ('rewards_itself', {}, 0),
  ):
    one = played[name]
    assert len(one.said[LeftOut]) == turns
    assert one.end.counts == counts


def test_nothing_goes_on(played):
  check_nothing_is_left()
