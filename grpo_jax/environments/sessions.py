"""Where episodes run, and what becomes of those that do not end.

A `Player` plays many episodes at once. It is told `begin`, `answer` and
`cancel`, and `wait` says what the episodes want:

    with sessions.Player({'': 'my_lab.envs:Wordle'}) as player:
      player.begin(Begin(0, example, seed=0, environment=''))
      while player.live:
        for event in player.wait():
          if isinstance(event, Say):
            player.answer(event.episode, event.context, sampled(event))

`where='workers'` plays in new processes, eight episodes in each; `'here'` in a
thread of this process. Both are a `places.Place`, and say the same: what comes
of an episode does not depend on where and beside which others it is played.

Nobody waits for ever. An environment has `episode_secs` of its own time, while
it does not wait for the policy. At the end of it the episode is stopped; if it
does not stop, its process is ended, and the other episodes of that process fail
as `unavailable`, so that they may begin again. A process that ends by itself
fails the episode whose code just ran; the others may begin again.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import itertools
import pickle
import selectors
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.environments import events
from grpo_jax.environments import forms
from grpo_jax.environments import places
from grpo_jax.environments import playing
from grpo_jax.environments import worker
from grpo_jax.environments.base import Reply
from grpo_jax.environments.events import Begin
from grpo_jax.environments.events import Done
from grpo_jax.environments.events import Event
from grpo_jax.environments.events import Failed
from grpo_jax.environments.events import Say
from grpo_jax.rewards import piped

WHERE = 'workers', 'here'
_SESSIONS_HERE = 256  # episodes that are played at once in this process
_GRACE_SECS = 3.0  # until an episode that was stopped counts as stuck
_CLOSE_SECS = 2.0  # that a worker has to close environments
_LOOK_SECS = 0.5  # the longest between two looks at the deadlines


class Options(NamedTuple):
  """Where episodes run, and their limits.

  Attributes:
    where: 'workers' or 'here'.
    processes: How many workers there are, at most.
    sessions: How many episodes one worker plays at once.
    tool_secs: The longest that one call of a tool may take.
    episode_secs: The longest that an environment may take for an episode;
      waiting for the policy is left out.
    start_secs: The longest that a worker may take until it has imported an
      environment.
    memory_limit_bytes: The most memory of a worker and all that it has started.
    most_processes: The most processes of one worker, itself included.
    retries: How often an episode may begin again that failed as `unavailable`.
  """

  where: str = 'workers'
  processes: int = 4
  sessions: int = 8
  tool_secs: float = playing.TOOL_SECS
  episode_secs: float = 600.0
  start_secs: float = 120.0
  memory_limit_bytes: int = 4 << 30
  most_processes: int = 64
  retries: int = 1


def check(options: Options) -> None:
  """Checks the options.

  Raises:
    ValueError: One cannot be used.
  """
  if options.where not in WHERE:
    raise ValueError(
      f'where={options.where!r} of the environments is neither of {WHERE};'
      ' pass one of them.'
    )
  for name in Options._fields[1:]:
    value = getattr(options, name)
    if name == 'retries':
      fits, needed = value >= 0, 'at least 0'
    elif name.endswith('_secs'):
      fits, needed = value > 0, 'a positive number'
    else:
      fits, needed = value >= 1, 'at least 1'
    if not fits:
      raise ValueError(
        f'{name} of the environments is {value}, but {needed} is required; pass'
        ' that.'
      )


class _Live:
  """An episode that was begun in a place.

  Attributes:
    begin: What is played.
    number: Its number in the place. A late word of an earlier try, or of
      another episode with the same number, is none of this one.
    place: Where.
    slot: In which of its slots.
    asked: The contexts that wait for the policy.
    secs: The environment's own time until `since`.
    since: When it went on; None while its time stands still.
    started: When it was given its slot; `start_secs` count from then.
    is_cancelled: Whether a limit has ended it.
    due: Once it is stopped, when it must have ended; None before.
    why: Why it was stopped.
  """

  def __init__(self, begin: Begin, number: int, place: places.Place, slot: int):
    self.begin, self.number, self.place, self.slot = begin, number, place, slot
    self.asked: set[int] = set()
    self.secs = 0.0
    self.since: float | None = None
    self.started = time.monotonic()
    self.is_cancelled = False
    self.due: float | None = None
    self.why = ''

  def deadline(self, options: Options) -> float | None:
    """When it is stopped, or counts as stuck; None while it waits."""
    if self.due is not None:
      return self.due
    if self.since is not None:
      return self.since + options.episode_secs - self.secs
    if self.asked:
      return None
    return self.started + options.start_secs

  def runs(self) -> bool:
    """Whether its own code runs just now, and does not wait for the policy."""
    return not self.asked and self.place.runs(self.slot)

  def pause(self) -> None:
    """Its time stands still."""
    if self.since is not None:
      self.secs += time.monotonic() - self.since
      self.since = None


class Player:
  """Plays episodes; one thread at a time may use it.

  Args:
    environments: What `forms.resolve` takes, by the names that a `Begin` has;
      a pair has the keyword arguments beside it.
    options: Where and how.

  Raises:
    ValueError: An option cannot be used; an environment cannot be sent to a
      worker, or, 'here', is none. In workers one that is none fails its
      episodes; `forms.resolve` tells before.
  """

  def __init__(
    self, environments: Mapping[str, Any], options: Options | None = None
  ):
    self._options = options or Options()
    check(self._options)
    pairs = {
      name: value if _is_pair(value) else (value, {})
      for name, value in environments.items()
    }
    if self._options.where == 'workers':
      instead = "play in this process, with where='here'"
      portable = {
        name: (piped.portable(value, 'The environment', instead), dict(kwargs))
        for name, (value, kwargs) in pairs.items()
      }
      order = worker.Order(portable, self._options.tool_secs)
      self._order = pickle.dumps(order)
    else:
      self._resolved = {
        name: forms.resolve(value, kwargs)
        for name, (value, kwargs) in pairs.items()
      }
    self._names = set(pairs)
    self._selector = selectors.DefaultSelector()
    self._places: list[places.Place] = []
    self._spoiled: set[places.Place] = set()
    self._waiting: dict[int, Begin] = {}
    self._live: dict[int, _Live] = {}
    self._numbered: dict[int, _Live] = {}  # the same by their own numbers
    self._numbers = itertools.count()
    self._news: dict[int, list[Event]] = {}
    self._away: dict[int, int] = {}  # how often each was `unavailable`

  def __enter__(self) -> 'Player':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  @property
  def live(self) -> int:
    """How many episodes are not over, or have something to say."""
    return len({*self._live, *self._waiting, *self._news})

  def begin(self, begin: Begin) -> None:
    """Begins an episode, or lets it wait for a place.

    Raises:
      ValueError: An episode with this number is live, or there is no such
        environment.
    """
    if begin.episode in self._live or begin.episode in self._waiting:
      raise ValueError(
        f'Episode {begin.episode} is live already; give each live episode a'
        ' number of its own.'
      )
    if begin.environment not in self._names:
      raise ValueError(
        f'Episode {begin.episode} is of the environment {begin.environment!r},'
        f' but the player knows {sorted(self._names)}; name one of these.'
      )
    self._waiting[begin.episode] = begin
    self._fill()

  def answer(self, episode: int, context: int, reply: Reply) -> None:
    """Answers a `Say`. Of an episode that is over already, nothing comes.

    Raises:
      ValueError: The context has not asked.
    """
    self._tell('answer', episode, context, reply)

  def refuse(self, episode: int, context: int, why: str) -> None:
    """Answers the `Say` of a chat that cannot be read; see `answer`."""
    self._tell('refuse', episode, context, why)

  def _tell(self, how: str, episode: int, context: int, what: Any) -> None:
    live = self._live.get(episode)
    if live is None or live.due is not None:
      return
    if context not in live.asked:
      raise ValueError(
        f'Context {context} of episode {episode} was answered, but it waits for'
        ' no answer; answer each `Say` once.'
      )
    live.asked.discard(context)
    if not live.asked:
      live.since = time.monotonic()
    live.place.tell(how, live.number, context, what)

  def cancel(self, episode: int, reason: str) -> None:
    """A limit has ended an episode: `policy.say` raises `Ended` in it.

    Its `Done` or `Failed` is still to come; until then `wait` waits for it.
    """
    if self._waiting.pop(episode, None) is not None:
      self._over(Failed(episode, reason))
    live = self._live.get(episode)
    if live is None or live.due is not None:
      return
    live.is_cancelled = True
    if live.asked:
      live.asked.clear()
      live.since = time.monotonic()
    live.place.tell('cancel', live.number, reason)

  def wait(self) -> list[Event]:
    """Waits until every episode under way has asked, or is over.

    Episodes for which there is no place yet wait for the end of others, and are
    not waited for.

    Returns:
      What has happened since the last call, sorted by episode; of one episode,
      in its own order. Empty if there is nothing to wait for.

    Raises:
      ValueError: A worker cannot start at all.
    """
    pause = 0.0
    while True:
      self._hear(pause)
      if all(live.asked for live in self._live.values()):
        return self._said()
      pause = self._pause()

  def news(self, secs: float = 0.0) -> list[Event]:
    """What has happened since the last call, as `wait` returns it.

    Args:
      secs: How long to wait if nothing has.

    Raises:
      ValueError: A worker cannot start at all.
    """
    until = time.monotonic() + secs
    self._hear(0.0)
    while not self._news and (left := until - time.monotonic()) > 0:
      if all(live.asked for live in self._live.values()):
        break
      self._hear(min(self._pause(), left))
    return self._said()

  def _hear(self, pause: float) -> None:
    """Hears what places say, waiting for it at most so many seconds."""
    heard = set()
    for key, _ in self._selector.select(max(0.0, pause)):
      if key.data not in heard:
        heard.add(key.data)
        for word in key.data.hear():
          self._heard(key.data, word)
    self._stop_the_late(heard)
    self._fill()

  def _pause(self) -> float:
    """Until someone has to be looked at again, in seconds."""
    times = [live.deadline(self._options) for live in self._live.values()]
    until = min((one for one in times if one is not None), default=0.0)
    return min(_LOOK_SECS, max(0.0, until - time.monotonic()))

  def _said(self) -> list[Event]:
    news, self._news = self._news, {}
    return list(itertools.chain(*(news[episode] for episode in sorted(news))))

  def close(self) -> None:
    """Ends all episodes, processes and threads; may be called twice.

    What environments have to close, they have two seconds for.
    """
    for place in self._places:
      with contextlib.suppress(ValueError):
        place.tell('close')
    until = time.monotonic() + _CLOSE_SECS
    busy = {one for one in self._places if one.is_process and one.is_ready}
    while busy and time.monotonic() < until:
      for key, _ in self._selector.select(until - time.monotonic()):
        said = key.data.hear() if key.data in busy else []
        if any(isinstance(word, places.Gone) for word in said):
          busy.discard(key.data)
    for place in self._places:
      place.close()  # so that all end at the same time
    for place in self._places:
      self._forget(place)
      place.end()
    self._places.clear()
    for kept in (
      self._live,
      self._numbered,
      self._waiting,
      self._news,
      self._spoiled,
    ):
      kept.clear()
    self._selector.close()

  def _fill(self) -> None:
    """Begins episodes that wait, as long as there is room for them."""
    for place in [*self._spoiled]:
      if not self._of(place):
        self._end(place)
    while self._waiting:
      room = self._room()
      if room is None:
        return
      place, slot = room
      episode = next(iter(self._waiting))
      begin = self._waiting.pop(episode)
      number = next(self._numbers)
      live = _Live(begin, number, place, slot)
      self._live[episode] = self._numbered[number] = live
      try:
        place.tell('begin', begin._replace(episode=number), slot)
      except ValueError as error:
        self._over(Failed(episode, f'its example {error}'))

  def _room(self) -> tuple[places.Place, int] | None:
    """The place with the fewest episodes, or a new one; None: all are full."""
    options = self._options
    most = options.processes if options.where == 'workers' else 1
    found, fewest = None, None
    for place in self._places:
      number = len(self._of(place))
      if place in self._spoiled or number >= place.slots:
        continue
      if fewest is None or number < fewest:
        found, fewest = place, number
    if len(self._places) < most and fewest != 0:
      found = self._start()
    if found is None:
      return None
    taken = {live.slot for live in self._of(found)}
    return found, next(one for one in range(found.slots) if one not in taken)

  def _start(self) -> places.Place:
    options = self._options
    if options.where == 'here':
      place = places.Here(self._resolved, _SESSIONS_HERE, options.tool_secs)
    else:
      limits = {
        'memory_bytes': options.memory_limit_bytes,
        'processes': options.most_processes,
        'file_bytes': 1 << 30,
      }
      place = places.Worker(
        self._order, options.sessions, limits, self._selector
      )
    self._selector.register(place.file, selectors.EVENT_READ, place)
    self._places.append(place)
    return place

  def _of(self, place: places.Place) -> list[_Live]:
    return [live for live in self._live.values() if live.place is place]

  def _heard(
    self, place: places.Place, word: events.Word | places.Gone
  ) -> None:
    if isinstance(word, places.Gone):
      self._gone(place, word.reason)
      return
    if isinstance(word, events.Spoiled):
      self._spoiled.add(place)
      return
    live = self._numbered.get(word.episode)
    if live is None or live.place is not place:
      if isinstance(word, events.Stuck) and place.is_process:
        self._lost(place, [], 'another episode does not end')
      return
    word = word._replace(episode=live.begin.episode)
    match word:
      case events.Began():
        live.since = time.monotonic()
      case events.Stuck() if place.is_process:
        self._lost(place, [live], live.why)
      case events.Stuck():  # what goes on there cannot be ended
        self._over(Failed(word.episode, live.why))
      case Done() | Failed():
        self._over(word)
      case Say() if live.is_cancelled or live.due is not None:
        pass
      case _:
        if isinstance(word, Say):
          live.pause()
          live.asked.add(word.context)
        self._news.setdefault(word.episode, []).append(word)

  def _over(self, event: Done | Failed) -> None:
    episode = event.episode
    live = self._live.pop(episode, None)
    if live is not None:
      self._numbered.pop(live.number)
    if isinstance(event, Failed) and event.unavailable:
      self._away[episode] = self._away.get(episode, 0) + 1
      again = self._away[episode] <= self._options.retries
      event = event._replace(unavailable=again)
    if not (isinstance(event, Failed) and event.unavailable):
      self._away.pop(episode, None)
    self._news.setdefault(episode, []).append(event)

  def _gone(self, place: places.Place, reason: str) -> None:
    """A process has ended, or cannot be spoken to."""
    if not place.is_ready:
      self._end(place)
      raise ValueError(
        f'A worker process for environments has not started ({reason}); see'
        ' whether this Python can import grpo_jax.environments.'
      )
    here = self._of(place)
    guilty = [one for one in here if one.runs()] or here
    self._lost(place, guilty, f'its process has ended ({reason})')

  def _stop_the_late(self, heard: set[Any]) -> None:
    """Stops episodes whose time is over, and ends those that do not stop."""
    now = time.monotonic()
    for live in list(self._live.values()):
      until = live.deadline(self._options)
      # What has been heard of may have more to say than was read.
      if until is None or now < until or live.place in heard:
        continue
      if live.begin.episode not in self._live:  # ended with another one
        continue
      if live.due is not None:
        self._hangs(live)
        continue
      options = self._options
      live.why = f'time limit: more than {options.episode_secs:g} s of its own'
      if live.since is None:
        live.why = f'time limit: not made within {options.start_secs:g} s'
      live.due = now + _GRACE_SECS
      live.place.tell('stop', live.number, live.why)

  def _hangs(self, live: _Live) -> None:
    """Nothing was heard of an episode that was stopped: its loop stands still.

    Code that keeps the loop from running stops all episodes of it; the one to
    blame is that whose code runs.
    """
    here = self._of(live.place)
    run = [one for one in here if one.runs()]
    late = [one for one in run if one.due is not None]
    self._lost(live.place, late or run or [live], live.why)

  def _lost(
    self, place: places.Place, guilty: Sequence[_Live], reason: str
  ) -> None:
    """Ends a place; episodes that are not guilty may begin again."""
    here = self._of(place)
    self._end(place)
    for live in here:
      is_guilty = live in guilty
      why = reason if is_guilty else f'lost with its process: {reason}'
      self._over(Failed(live.begin.episode, why, not is_guilty))

  def _end(self, place: places.Place) -> None:
    self._forget(place)
    self._places.remove(place)
    self._spoiled.discard(place)
    place.end()

  def _forget(self, place: places.Place) -> None:
    if place.file in self._selector.get_map():
      self._selector.unregister(place.file)


def _is_pair(value: Any) -> bool:
  """Whether it is an environment and its keyword arguments."""
  return (
    isinstance(value, tuple)
    and len(value) == 2
    and isinstance(value[1], Mapping)
  )
