"""Plays an environment without a model, and sees whether it can be repeated.

Each episode is played alone first. Then some are played alone once more, in a
new process, and some beside each other in one process. What an environment says
to the same seed and the same answers must be the same each time: else a run
cannot be repeated, or episodes get into each other's way.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.environments import events
from grpo_jax.environments import forms
from grpo_jax.environments import random_policy
from grpo_jax.environments import sessions
from grpo_jax.environments.base import Message

_HOPELESS = 3  # as many failures before any success end the survey
_AGAIN = 5  # episodes that are played alone once more
_BESIDE = 8  # episodes that are played in one process at once
TURNS = 'turns'
Tell = Callable[[int, int], None]


class Ways(NamedTuple):
  """How episodes are played.

  Attributes:
    episodes: How many.
    seed: Of the first one; the next has the next number.
    max_turns: Episodes are ended after this many.
    episode_secs: The longest that an environment may take for an episode.
    replies: What the policy says; see `random_policy.RandomPolicy`.
    examples: Records; the first episode has the first one, and so on, over and
      over.
    where: In 'workers' or 'here'; see `sessions.Options`.
  """

  episodes: int = 20
  seed: int = 0
  max_turns: int = 16
  episode_secs: float = 60.0
  replies: tuple[str, ...] = ()
  examples: tuple[Mapping[str, Any], ...] = ({},)
  where: str = 'workers'


class Turn(NamedTuple):
  """What an environment has said, and how long it took.

  Attributes:
    context: Where it was said; the first context is 0.
    messages: What was new there.
    secs: Since the answer before; in the first turn, since the beginning.
  """

  context: int
  messages: tuple[Message, ...]
  secs: float


class Played(NamedTuple):
  """An episode.

  Attributes:
    seed: What `reset` was given.
    turns: In their order.
    tools: What the policy could call.
    rewarded: Pairs of a turn and its reward, in the order of the rewards.
    reward: The episode's own; None if it has none beside those.
    limit: The limit that has ended it, or ''.
    failure: Why it has failed, or ''.
    tool_calls: How many calls were made.
    tool_errors: How many of them went wrong.
    last_secs: From the last answer until its end.
    answered: How many turns the policy has had.
  """

  seed: int
  turns: tuple[Turn, ...]
  tools: tuple[Mapping[str, Any], ...] = ()
  rewarded: tuple[tuple[int, float], ...] = ()
  reward: float | None = None
  limit: str = ''
  failure: str = ''
  tool_calls: int = 0
  tool_errors: int = 0
  last_secs: float = 0.0
  answered: int = 0

  @property
  def total(self) -> float | None:
    """Its own reward and those of its turns; None if there is none."""
    given = [value for _, value in self.rewarded]
    given += [] if self.reward is None else [self.reward]
    return sum(given) if given and not self.failure else None


class Difference(NamedTuple):
  """Where two plays of the same seed are not the same.

  Attributes:
    seed: Which one.
    turn: In which turn, from 0; the number of turns for the end.
    first: What was said in the first play.
    other: What was said in the other one.
  """

  seed: int
  turn: int
  first: str
  other: str


class Survey(NamedTuple):
  """What was found.

  Attributes:
    name: Of the environment.
    tools: Their schemas, as the policy reads them.
    alone: Episodes that were played one after another.
    again: Pairs of one of these, and the same in a new process.
    beside: Pairs of one of these, and the same beside others.
  """

  name: str
  tools: tuple[Mapping[str, Any], ...]
  alone: tuple[Played, ...]
  again: tuple[tuple[Played, Played], ...]
  beside: tuple[tuple[Played, Played], ...]

  @property
  def succeeded(self) -> tuple[Played, ...]:
    """The episodes that have not failed."""
    return tuple(one for one in self.alone if not one.failure)

  @property
  def first(self) -> Played | None:
    """The first of these that has asked the policy."""
    return next((one for one in self.succeeded if one.turns), None)

  @property
  def starts(self) -> int:
    """How many different first messages these have."""
    return len({_whole(one, 0) for one in self.succeeded if one.turns})


def survey(
  environment: Any,
  kwargs: Mapping[str, Any],
  ways: Ways,
  tell: Tell = lambda done, planned: None,
) -> Survey:
  """Plays an environment alone, alone again, and beside itself.

  Args:
    environment: What `forms.resolve` takes.
    kwargs: For its constructor.
    ways: How it is played.
    tell: Is told after each episode how many there were, and how many are
      planned.

  Returns:
    See `Survey`. If the first three episodes have failed, no others are played.

  Raises:
    ValueError: There is no such environment, or it cannot be made.
  """
  made = forms.resolve(environment, kwargs)
  options = sessions.Options(
    ways.where, 1, _BESIDE, episode_secs=ways.episode_secs
  )
  player = lambda: sessions.Player({'': (environment, kwargs)}, options)
  alone: list[Played] = []
  with player() as one:
    for number in range(ways.episodes):
      alone += play(one, [number], ways)
      tell(number + 1, ways.episodes)
      if number + 1 == _HOPELESS and all(x.failure for x in alone):
        break
  good = [k for k, played in enumerate(alone) if not played.failure]
  again, beside = [], []
  if good:
    with player() as one:
      for number in good[:_AGAIN]:
        again.append((alone[number], *play(one, [number], ways)))
      # One episode is played beside itself.
      numbers = good[:_BESIDE] if len(good) > 1 else good * 2
      others = play(one, numbers, ways)
      beside = [(alone[k], other) for k, other in zip(numbers, others)]
  tools = next((played.tools for played in alone if played.tools), made.tools)
  return Survey(made.name, tools, tuple(alone), tuple(again), tuple(beside))


def play(
  player: sessions.Player, numbers: Sequence[int], ways: Ways
) -> list[Played]:
  """Plays episodes at the same time.

  Args:
    player: Knows the environment ''.
    numbers: Of the episodes; the seed and the example depend on them.
    ways: How.

  Returns:
    One for each number.
  """
  live = {
    place: _Episode(place, number, ways) for place, number in enumerate(numbers)
  }
  for one in live.values():
    player.begin(one.begin)
  answered = time.monotonic()
  while player.live:
    news = player.wait()
    secs = time.monotonic() - answered
    asks = [event for event in news if live[event.episode].heard(event, secs)]
    answered = time.monotonic()
    for event in asks:
      if isinstance(event, events.Failed):
        player.begin(live[event.episode].begin)
      elif isinstance(event, events.Say):
        live[event.episode].go_on(player, event)
  return [live[place].played for place in range(len(numbers))]


class _Episode:
  """One that is played."""

  def __init__(self, place: int, number: int, ways: Ways):
    example = ways.examples[number % len(ways.examples)]
    self._ways = ways
    self.begin = events.Begin(place, example, ways.seed + number, '')
    self._restart()

  def _restart(self) -> None:
    seed = self.begin.seed
    self.played = Played(seed, ())
    self._policy = random_policy.RandomPolicy(seed, self._ways.replies)

  def heard(self, event: events.Event, secs: float) -> bool:
    """Takes an event; returns whether something is to be done about it."""
    played = self.played
    match event:
      case events.Say():
        turn = Turn(event.context, event.messages, secs)
        turns = (*played.turns, turn)
        self.played = played._replace(turns=turns, tools=event.tools)
        return True
      case events.Rewarded():
        pair = (event.turn, event.value)
        self.played = played._replace(rewarded=(*played.rewarded, pair))
      case events.Done():
        self.played = played._replace(
          reward=event.reward,
          tool_calls=event.tool_calls,
          tool_errors=event.tool_errors,
          last_secs=secs,
        )
      case events.Failed() if event.unavailable:
        self._restart()
        return True
      case events.Failed():
        self.played = played._replace(failure=event.reason, last_secs=secs)
    return False

  def go_on(self, player: sessions.Player, say: events.Say) -> None:
    """Answers, or ends the episode."""
    if self.played.limit:
      return  # another context has asked in the same round
    if len(self.played.turns) > self._ways.max_turns:
      self.played = self.played._replace(limit=TURNS)
      player.cancel(say.episode, TURNS)
      return
    self.played = self.played._replace(answered=self.played.answered + 1)
    player.answer(say.episode, say.context, self._policy.answer(say))


def difference(one: Played, other: Played) -> Difference | None:
  """Where two plays of the same seed first differ; None if they do not."""
  for place in range(max(len(one.turns), len(other.turns))):
    if _whole(one, place) != _whole(other, place):
      said = [_shown(played, place) for played in (one, other)]
      if said[0] == said[1]:  # the same texts, in other messages
        said = [_whole(played, place) for played in (one, other)]
      return Difference(one.seed, place, *said)
  ends = [_end(played) for played in (one, other)]
  if ends[0] != ends[1]:
    return Difference(one.seed, len(one.turns), *ends)
  return None


def _whole(played: Played, place: int) -> str:
  """All that was said in a turn; '' where there is no such turn."""
  if place >= len(played.turns):
    return ''
  turn = played.turns[place]
  return json.dumps([turn.context, turn.messages], sort_keys=True)


def _shown(played: Played, place: int) -> str:
  """The texts of a turn, or the end in its place."""
  if place >= len(played.turns):
    return f'its end ({_end(played)})'
  return '\n'.join(random_policy.texts(played.turns[place].messages))


def _end(played: Played) -> str:
  if played.failure:
    return f'failed: {played.failure}'
  rewards = ', '.join(f'{value:g} in turn {k}' for k, value in played.rewarded)
  own = '' if played.reward is None else f'reward {played.reward:g}'
  return '; '.join(filter(None, [own, rewards, played.limit])) or 'no reward'
