"""Plays episodes: what environments ask is drawn, and they are answered.

An engine that `queues` is asked at once, and no episode waits for another. Any
other engine is asked in rounds, in which all calls are one batch: a round
begins when every episode has asked or is over. So are episodes of a single
turn, which are drawn as completions without an environment are.

Devices are used by this thread alone; environments run where their player lets
them run. Several processes tell each other all calls; see `meeting`.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import json
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import engines
from grpo_jax.data import Tokenizer
from grpo_jax.environments import events
from grpo_jax.environments import formats
from grpo_jax.environments import sessions
from grpo_jax.environments import tools_as_text
from grpo_jax.environments.base import Reply
from grpo_jax.episodes import history
from grpo_jax.episodes import meeting as meeting_lib
from grpo_jax.episodes import transcript as transcript_lib
from grpo_jax.episodes.engine_use import EngineUse
from grpo_jax.episodes.meeting import Call
from grpo_jax.episodes.transcript import Path
from grpo_jax.episodes.transcript import Transcript
from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Episode
from grpo_jax.mesh import random_keys


@dataclasses.dataclass(frozen=True)
class Limits:
  """What ends an episode; each in tokens but the first.

  Attributes:
    turns: Of an episode.
    turn_tokens: Of a turn; one that reaches it is the last.
    episode_tokens: Of all turns together.
    context_tokens: Of an episode, what it reads included.
    prompt_tokens: Of what the episodes of a record read first; what is more
      belongs to each of them.
    result_tokens: Of the result of a tool; of a longer one the middle is left
      out.
  """

  turns: int
  turn_tokens: int
  episode_tokens: int
  context_tokens: int
  prompt_tokens: int = 1 << 30
  result_tokens: int = 1 << 30


class Played(NamedTuple):
  """An episode that is over.

  Attributes:
    episode: Its tokens, behind the prompt of its group, and its account.
    reward: Its own, with those of its turns; 0 if a limit has cut it before
      any; None if it failed or has none.
  """

  episode: Episode
  reward: float | None

  @property
  def account(self) -> Account:
    """What is told of it."""
    assert self.episode.account is not None  # it was played
    return self.episode.account

  @property
  def failure(self) -> str:
    """Why it failed; '' if it did not."""
    return self.account.failure


_OVER = events.Done | events.Failed
_FINISHES = {
  engines.ENDED: 'end',
  engines.STOPPED: 'stop',
  engines.TRUNCATED: 'length',
}
_MOST_SECS = 1.0  # of one wait for environments
_MOST_KEPT = 300  # characters of a text that is encoded or read once


@dataclasses.dataclass
class _Live:
  """An episode that is being played, from its last beginning on."""

  transcript: Transcript
  begin: events.Begin
  contexts: dict[int, Path] = dataclasses.field(default_factory=lambda: {0: ()})
  # By the numbers of contexts: the tools that the turn under way reads, and the
  # limit that it meets first.
  tools: dict[int, Sequence[Any]] = dataclasses.field(default_factory=dict)
  limits: dict[int, str] = dataclasses.field(default_factory=dict)
  chats: set[int] = dataclasses.field(default_factory=set)  # of `Policy.chat`
  answered: set[int] = dataclasses.field(default_factory=set)  # turns of those
  rewards: dict[int, float] = dataclasses.field(default_factory=dict)
  reward: float | None = None
  failure: str = ''
  ended: str = ''  # the limit that has ended it
  said: dict[int, str] = dataclasses.field(default_factory=dict)  # by turns
  is_over: bool = False
  attempt: int = 0  # how often it has begun again
  asked: int = 0  # tokens that the calls under way may still draw
  waiting: int = 0  # how many those are
  requests: dict[int, int] = dataclasses.field(default_factory=dict)  # of turns
  counts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def play(
  records: Sequence[Mapping[str, Any]],
  index: Sequence[int],
  engine: engines.Engine,
  tokenizer: Tokenizer,
  player: sessions.Player,
  call_format: formats.Format,
  sampling: engines.Sampling,
  limits: Limits,
  group: int,
  seed: int,
  rollout: int,
  purpose: str = 'sample',
  alike: bool = True,
  environments: Sequence[str] = (),
  check: Callable[[], None] = lambda: None,
  hosts: meeting_lib.Hosts = meeting_lib.ALONE,
  renders: bool = False,
  use: EngineUse | None = None,
  untrusted: Collection[str] = (),
) -> tuple[list[list[int]], list[list[Played]]]:
  """Plays G episodes of each of P records.

  Args:
    records: What environments begin with.
    index: For each record its global counter; see `engines.requests`.
    engine: With parameters; nothing else is submitted to it.
    tokenizer: Turns messages into ids.
    player: Runs the environments.
    call_format: How the model writes calls of tools.
    sampling: How tokens are drawn.
    limits: What ends an episode.
    group: Episodes of a record, `G`.
    seed: Of the run.
    rollout: Its number.
    purpose: See `engines.requests`. What is no sample begins alike in every
      rollout, so that its results can be compared.
    alike: Whether all episodes of a record begin with one seed.
    environments: Which of those that the player knows each record begins; ()
      is the one whose name is ''.
    check: Called between two turns of the engine; what it raises ends it all.
    hosts: The processes that play. Each knows the tokens of the episodes that
      it has played (`Episode.holder`), and of the others how they have ended.
      The engine must give all of them all that it draws.
    renders: Whether each turn reads the whole chat as the template writes it
      then, in the place of what it has read and sampled and what is new.
    use: Is told how the engine is used.
    untrusted: The environments that cannot say what an episode is worth.

  Returns:
    The ids of the prompt of each record's group; and [P][G] episodes.
  """
  own = hosts.players(len(records)) == hosts.rank
  names = list(environments) or [''] * len(records)
  live = {
    number: one
    for number, one in _beginnings(
      records, index, group, seed, rollout, purpose, alike, names
    )
    if own[number // group]
  }
  for one in live.values():
    player.begin(one.begin)
  asking = _Asking(
    live, tokenizer, player, call_format, limits, renders, untrusted
  )
  meeting, number = meeting_lib.Meeting(hosts), len(records) * group
  use = use or EngineUse()
  use.begin(engine, number)
  if engine.capabilities.queues and limits.turns > 1:
    _play_at_once(asking, meeting, engine, number, sampling, check, use)
  else:
    while calls := meeting.calls(asking.asked):
      drawn = _drawn(engine, calls, number, sampling, group, check, use)
      for call, one in zip(calls, drawn, strict=True):
        meeting.note(call, one)
        asking.answer(call, one)
  use.note(0, 0)
  grouped = functools.partial(
    _grouped, live, group, sampling, limits.prompt_tokens
  )
  return _known_to_all(grouped, hosts)


def _beginnings(
  records: Sequence[Mapping[str, Any]],
  index: Sequence[int],
  group: int,
  seed: int,
  rollout: int,
  purpose: str,
  alike: bool,
  environments: Sequence[str],
) -> Iterator[tuple[int, '_Live']]:
  """Every episode by its number, before it has begun; see `play`."""
  keys = random_keys.folded(seed, purpose, rollout, index, range(group))
  name, when = 'environment', rollout
  if purpose != 'sample':
    name, when = f'environment, {purpose}', 0
  starts = random_keys.folded(seed, name, when, index, range(group))[..., 0]
  for p, g in np.ndindex(len(records), group):
    number, start = p * group + g, int(starts[p, 0 if alike else g])
    begin = events.Begin(number, records[p], start, environments[int(p)])
    yield number, _Live(Transcript(keys[p, g]), begin)


class _Asking:
  """What environments ask, and what they are answered."""

  def __init__(
    self,
    live: dict[int, _Live],
    tokenizer: Tokenizer,
    player: sessions.Player,
    call_format: formats.Format,
    limits: Limits,
    renders: bool,
    untrusted: Collection[str] = (),
  ):
    self._renders, self._untrusted = renders, untrusted
    self._live, self._tokenizer, self._player = live, tokenizer, player
    self._format, self._limits = call_format, limits
    self._opened = tokenizer.opens_reasoning()
    added = tokenizer.backend.get_added_tokens_decoder().values()
    self._special = [token.content for token in added]
    self._told_over: set[int] = set()  # episodes
    # What episodes are told, and say, is often the same.
    self._encoded: dict[str, np.ndarray] = {}
    self._turns: dict[tuple[bytes, bool], tuple[str, formats.Parsed]] = {}

  def asked(self) -> list[Call]:
    """The turns that wait, by episode; none once all episodes are over.

    All episodes have asked then.
    """
    calls: list[Call] = []
    is_again = False  # an episode has begun again, and is waited for
    while (is_again or not calls) and not self._are_over():
      news = self._player.wait()
      is_again = any(
        isinstance(one, events.Failed) and one.unavailable for one in news
      )
      over = {one.episode for one in news if isinstance(one, _OVER)}
      # Of the try before, or of a fork that nobody waits for any more.
      for call in [call for call in calls if call.number in over]:
        self._settle(call)
        calls.remove(call)
      calls += self._heard(news)
    return sorted(calls, key=lambda call: call.number)

  def asked_now(self, waits: bool) -> list[Call]:
    """The turns that some episodes have asked for, by episode.

    Args:
      waits: Whether to wait for at least one of them. Then there are none once
        all episodes are over.
    """
    calls = self._heard(self._player.news()) + self._ends()
    while waits and not calls and not self._are_over():
      calls = self._heard(self._player.news(_MOST_SECS)) + self._ends()
    return sorted(calls, key=lambda call: call.number)

  def _ends(self) -> list[Call]:
    """Calls that say of episodes that they are over."""
    over = [
      number
      for number, one in self._live.items()
      if one.is_over and not one.waiting and number not in self._told_over
    ]
    self._told_over.update(over)
    nothing, key = np.zeros(0, np.int32), np.zeros(2, np.uint32)
    return [Call(number, 0, nothing, key, 0, False) for number in over]

  def _heard(self, news: Sequence[Any]) -> list[Call]:
    """Notes what has happened; the turns that were asked for."""
    said: list[events.Say] = []
    for event in news:
      if isinstance(event, events.Say):
        said.append(event)
        continue
      self._take(event)
      if isinstance(event, _OVER):
        said = [one for one in said if one.episode != event.episode]
    # By the tree: whom a limit meets is no matter of who came first.
    calls = [
      self._said(self._live[event.episode], event)
      for event in sorted(said, key=self._place)
    ]
    return [call for call in calls if call is not None]

  def _settle(self, call: Call) -> None:
    """A turn is under way no longer."""
    one = self._live[call.number]
    one.asked -= call.limit
    one.waiting -= 1

  def _are_over(self) -> bool:
    return all(one.is_over for one in self._live.values())

  def _place(self, event: events.Say) -> tuple[int, Path]:
    return event.episode, self._live[event.episode].contexts[event.context]

  def _take(self, event: Any) -> None:
    """Notes what has happened beside what was said."""
    one = self._live[event.episode]
    is_trusted = one.begin.environment not in self._untrusted
    match event:
      case events.Forked():
        path = one.transcript.fork(
          one.contexts[event.of], event.turns, event.branch
        )
        one.contexts[event.context] = path
      case events.Rewarded() if is_trusted:
        before = one.rewards.get(event.turn, 0.0)
        one.rewards[event.turn] = before + event.value
      case events.LeftOut():
        one.transcript.left_out.add(event.turn)
      case events.Done():
        one.is_over = True
        one.transcript.left_out |= one.answered - {*event.heard}
        one.reward = event.reward if is_trusted else None
        names = 'tool_calls', 'tool_errors', 'parse_errors', 'secs', 'counts'
        one.counts = {name: getattr(event, name) for name in names}
      case events.Failed() if event.unavailable:
        key, attempt = one.transcript.key, one.attempt + 1
        fresh = _Live(Transcript(key), one.begin, attempt=attempt)
        self._live[event.episode] = fresh
        self._player.begin(one.begin)
      case events.Failed():
        one.is_over, one.failure = True, one.failure or event.reason

  def _said(self, one: _Live, event: events.Say) -> Call | None:
    """Adds messages to a context; the turn behind them, if it is allowed."""
    path, transcript = one.contexts[event.context], one.transcript
    is_whole = event.known is not None
    tools = one.tools[event.context] = event.tools
    try:
      messages = [self._shortened(message) for message in event.messages]
      ids, kept = self._read(one, path, messages, tools, is_whole)
    except (ValueError, KeyError, TypeError) as error:
      # It may say what no chat template takes.
      kind = type(error).__name__
      reason = f'said what cannot be read ({kind}): {str(error):.300}'
      if event.is_chat:
        self._player.refuse(event.episode, event.context, reason)
        return None
      one.failure = one.failure or reason
    if one.failure:
      self._player.cancel(event.episode, 'failed')
      return None
    limits, drawn = self._limits, transcript.drawn() + one.asked
    whole = np.concatenate([transcript.ids(path)[:kept], ids])
    room = {
      'turns': limits.turns - transcript.turns - one.waiting,
      'tokens': limits.episode_tokens - drawn,
      'context': limits.context_tokens
      - (transcript.size() + one.asked + len(ids)),
    }
    met = [reason for reason, left in room.items() if left <= 0]
    if one.ended or met:
      one.ended = one.ended or met[0]
      self._player.cancel(event.episode, one.ended)
      return None
    chat = messages if is_whole else ()
    transcript.read(path, ids, messages[event.known :], kept, chat)
    if event.is_chat:
      one.chats.add(event.context)
    name, limit = self._limit(event, room)
    one.limits[event.context] = name
    one.asked += limit
    one.waiting += 1
    key, is_first = transcript.contexts[path].key, not transcript.turns
    last = transcript.last(path)
    follows = None if last is None else one.requests.get(last.number)
    return Call(
      event.episode,
      event.context,
      whole,
      key,
      limit,
      is_first,
      follows,
      one.attempt,
      event.stops,
    )

  def _limit(
    self, event: events.Say, room: Mapping[str, int]
  ) -> tuple[str, int]:
    """The limit that a turn meets first, and how many tokens it has then."""
    turn = min(
      self._limits.turn_tokens, event.max_tokens or self._limits.turn_tokens
    )
    most = {name: room[name] for name in ('tokens', 'context')}
    most = {'length': turn, **most}  # which of several equal ones counts
    name = min(most, key=lambda name: most[name])
    is_own = event.is_chat and turn < self._limits.turn_tokens
    return 'own' if name == 'length' and is_own else name, most[name]

  def _read(
    self,
    one: _Live,
    path: Path,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    is_whole: bool,
  ) -> tuple[np.ndarray, int | None]:
    """What a context reads next.

    Args:
      one: The episode.
      path: Of the context.
      messages: What is said in it.
      tools: Those that the policy may call.
      is_whole: Whether the messages are all of its chat, and not only new.

    Returns:
      New ids, i32[n]; and how many of what the context has they follow, None
      for all of them.
    """
    transcript, shown = one.transcript, self._shown(tools)
    last = transcript.last(path)
    if last is None or is_whole:
      written = self._written(messages, tools)
      whole = self._ids(self._tokenizer.begin_chat, written, shown)
      if not transcript.parts(path):
        return whole, None
      kept = transcript.kept(path, whole)
      return whole[kept:], kept
    if self._renders:
      parts = transcript.parts(path)
      whole = history.ids(
        self._tokenizer, parts, messages, tools, self._written, shown
      )
      if whole is not None:
        kept = transcript.kept(path, whole)
        return whole[kept:], kept
    # A stop string ends a turn without an end token, as a limit does.
    cut = last.sampled.finish != engines.ENDED
    is_open = cut and self._tokenizer.reasoning_is_open(last.ids)
    go_on, written = self._tokenizer.continue_chat, self._written(messages)
    return self._ids(go_on, written, shown, cut, is_open), None

  def _ids(self, encode: Callable[..., list[int]], *given: Any) -> np.ndarray:
    """The ids of messages; i32[n], which nobody may change."""
    key = json.dumps([encode.__name__, *given])
    if (ids := self._encoded.get(key)) is not None:
      return ids
    ids = np.array(encode(*given), np.int32)
    if len(key) <= _MOST_KEPT:
      self._encoded[key] = ids
    return ids

  def answer(self, call: Call, sampled: engines.Sampled) -> None:
    """Adds a turn to its context, and tells the environment what was said.

    Nothing, if another process plays it, or it has begun again since.
    """
    one = self._live.get(call.number)
    if one is None or one.attempt != call.attempt:
      return
    self._settle(call)
    tools = one.tools[call.context]
    cut = sampled.finish == engines.TRUNCATED
    text, parsed = self._parsed(sampled.ids, cut, tools)
    path, said = one.contexts[call.context], {}
    if self._renders:
      said = history.message(self._tokenizer, parsed, text, self._shown(tools))
    turn = one.transcript.add(path, sampled, text, said)
    one.said[turn] = parsed.text
    one.requests[turn] = sampled.request
    if one.ended or one.failure or one.is_over:  # by another turn
      if call.context in one.chats:
        one.transcript.left_out.add(turn)  # nobody has heard it
      return
    limit = one.limits[call.context] if cut else 'end'
    if limit != 'own' and (cut or not self._goes_on(tools, sampled)):
      one.ended = limit
      self._player.cancel(call.number, one.ended)
      return
    if call.context in one.chats:
      one.answered.add(turn)
    self._player.answer(
      call.number,
      call.context,
      Reply(
        parsed.text,
        parsed.reasoning,
        parsed.calls,
        parsed.problems,
        _FINISHES[sampled.finish],
        turn,
        len(sampled.ids),
        len(call.ids),
      ),
    )

  def _parsed(
    self, ids: np.ndarray, cut: bool, tools: Sequence[Any]
  ) -> tuple[str, formats.Parsed]:
    """The text of a turn, and what it says."""
    key = ids.tobytes(), cut
    if (found := self._turns.get(key)) is not None:
      return found
    pieces = self._tokenizer.turn_pieces(ids)
    text = ''.join(text for text, _ in pieces)
    parsed = formats.parse(
      self._format, pieces, self._opened, cut, tools, self._special
    )
    # Calls depend on the tools of the episode, which may change its arguments.
    if not parsed.calls and len(text) <= _MOST_KEPT:
      self._turns[key] = text, parsed
    return text, parsed

  def _shortened(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message, without the middle of what a tool says at too great length."""
    said, most = message.get('content'), self._limits.result_tokens
    if message['role'] != 'tool' or not isinstance(said, str):
      return message
    ids = self._tokenizer.encode(said)
    if len(ids) <= most:
      return message
    head, tail = -(-most // 2), most // 2
    mark = f'\n[{len(ids) - most} tokens left out]\n'
    ends = ids[:head], ids[len(ids) - tail :]
    cut = mark.join(self._tokenizer.decode(end) for end in ends)
    return {**message, 'content': cut}

  def _goes_on(self, tools: Sequence[Any], sampled: engines.Sampled) -> bool:
    """Whether a turn has ended as turns do, and not the whole chat."""
    last = int(sampled.ids[-1])
    if last not in self._tokenizer.eos_ids:
      return True  # a stop string
    return last in self._tokenizer.turn_end_ids(self._shown(tools))

  def _shown(self, tools: Sequence[Any]) -> Sequence[Any]:
    """The tools that the chat template is given."""
    return tools if self._tokenizer.reads_tools else ()

  def _written(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] = (),
  ) -> Sequence[Mapping[str, Any]]:
    """The messages that the chat template is given."""
    if self._tokenizer.reads_tools:
      return messages
    return tools_as_text.written(messages, tools)


def _play_at_once(
  asking: _Asking,
  meeting: meeting_lib.Meeting,
  engine: engines.Engine,
  number: int,
  sampling: engines.Sampling,
  check: Callable[[], None],
  use: EngineUse,
) -> None:
  """Draws what is asked for when it comes, until all episodes are over."""
  under_way: dict[int, Call] = {}
  live = number
  known: dict[int, list[int]] = {}  # by episodes, what the engine keeps
  turns = engine.completed()
  try:
    while True:
      # All processes know what is under way, so all wait here, or none.
      asked = functools.partial(asking.asked_now, waits=not under_way)
      calls = meeting.calls(asked)
      if not calls and not under_way:
        return
      check()
      for call in calls:
        if not call.limit:
          live -= 1
          for place in known.pop(call.number, ()):
            engine.forget(place)
          continue
        follows = None if call.follows is None else (call.follows, 0)
        request = _request([call], sampling)
        place = engine.submit(request._replace(calls=number, follows=follows))
        under_way[place] = call
        known.setdefault(call.number, [])
      use.note(live, len(under_way))
      if (turn := next(turns, None)) is None:
        turns = engine.completed()
        continue
      for one in turn:
        call = under_way.pop(one.request)
        use.drew(call, one.read, one.parked)
        meeting.note(call, one)
        asking.answer(call, one)
        if call.number in known:
          known[call.number].append(one.request)
        else:  # of a try before; it is over
          engine.forget(one.request)
      use.note(live, len(under_way))
  finally:
    turns.close()  # gives up what is under way


def _drawn(
  engine: engines.Engine,
  calls: Sequence[Call],
  number: int,
  sampling: engines.Sampling,
  group: int,
  check: Callable[[], None],
  use: EngineUse,
) -> list[engines.Sampled]:
  """What the engine draws for calls, in their order.

  The first calls of a group read the same, and are one request. All others are
  requests of their own, as many in each round as there are episodes, so that
  programs are few.
  """
  asked, places = [], []
  for _, some in itertools.groupby(
    range(len(calls)), lambda n: calls[n].number // group
  ):
    whole = [*some]
    is_one = _are_one([calls[n] for n in whole], group)
    parts = [whole] if is_one else [[n] for n in whole]
    for part in parts:
      asked.append(_request([calls[n] for n in part], sampling))
      places.append(part)
  if any(len(one.keys) == 1 for one in asked):
    blank = asked[0]._replace(keys=asked[0].keys[:1], limit=1)
    asked += [blank] * (number - len(asked))
  # An episode that is over asks nothing.
  live, left = len({call.number for call in calls}), len(calls)

  def finished(p, _):
    nonlocal left
    left -= p < len(places)  # no blank
    use.note(live, left)

  found: list[Any] = [None] * len(calls)
  use.note(live, left)
  sampled = engines.generate(engine, asked, finished, check)
  for part, drawn in zip(places, sampled):
    for n, one in zip(part, drawn, strict=True):
      found[n] = one
      # What a group reads is read once.
      use.drew(calls[n], None if n == part[0] else 0)
  return found


def _are_one(calls: Sequence[Call], group: int) -> bool:
  """Whether some calls are the first of a whole group, and read the same."""
  first = calls[0]
  return [call.number % group for call in calls] == [*range(group)] and all(
    call.is_first
    and np.array_equal(call.ids, first.ids)
    and call.limit == first.limit
    and call.stops == first.stops
    for call in calls
  )


def _request(
  calls: Sequence[Call], sampling: engines.Sampling
) -> engines.Request:
  """One request for calls that read the same."""
  first, keys = calls[0], np.stack([call.key for call in calls])
  if first.stops:
    stops = dict.fromkeys(sampling.stop_strings + first.stops)
    sampling = dataclasses.replace(sampling, stop_strings=(*stops,))
  name = f'a turn of episode {first.number}'
  return engines.Request(first.ids.tolist(), keys, first.limit, sampling, name)


def _grouped(
  live: Mapping[int, _Live],
  group: int,
  sampling: engines.Sampling,
  most: int,
) -> list[tuple[list[int], list[Played]]]:
  """The prompt of each group that was played here, and its episodes behind."""
  found = []
  for first in range(0, len(live), group):
    some = [*live.values()][first : first + group]
    begun = [one.transcript for one in some if one.transcript.turns]
    prompt = transcript_lib.common_ids(begun)[:most] if begun else []
    if begun and not prompt:
      record = some[0].begin.example.get('index')
      raise ValueError(
        f'The episodes of the record {record} share no first token, so that '
        'they have no prompt; let the chat template write the same token '
        "before every chat, or give environment.seed='group' and an "
        'environment that begins alike for one seed.'
      )
    played = [_played(one, len(prompt)) for one in some]
    found.append((prompt or [sampling.eos_ids[0]], played))
  return found


def _known_to_all(
  grouped: Callable[[], list[tuple[list[int], list[Played]]]],
  hosts: meeting_lib.Hosts,
) -> tuple[list[list[int]], list[list[Played]]]:
  """The prompts and episodes of all groups, as far as this process is told."""
  if hosts.number == 1:
    found = grouped()
  else:
    own = []

    def tell():
      own.extend(grouped())
      return [
        (prompt, [_outside(one) for one in group]) for prompt, group in own
      ]

    told = hosts.exchange(tell)
    found = [
      (prompt, [_held(one, rank) for one in group])
      for rank, theirs in enumerate(told)
      for prompt, group in (own if rank == hosts.rank else theirs)
    ]
  prompts, played = zip(*found, strict=True)
  return [*prompts], [*played]


def _outside(one: Played) -> Played:
  """What others are told of an episode: all but its tokens."""
  arrays = {
    name: x[:0]
    for name, x in one.episode._asdict().items()
    if isinstance(x, np.ndarray)
  }
  return one._replace(episode=one.episode._replace(**arrays))


def _held(one: Played, rank: int) -> Played:
  return one._replace(episode=one.episode._replace(holder=rank))


def _played(one: _Live, prompt: int) -> Played:
  """An episode that is over, behind the prompt of its group."""
  is_cut = one.ended not in ('', 'end')
  finish = engines.TRUNCATED if is_cut else engines.ENDED
  found = transcript_lib.episode(one.transcript, prompt, finish)
  by_turn = one.transcript.turn_places()
  if by_turn and one.transcript.left_out.issuperset(by_turn):
    one.failure = one.failure or 'has left out all of its turns'
  rewards = np.zeros(len(by_turn), np.float32)
  for number, value in one.rewards.items():
    rewards[by_turn[number]] = value
  own = [x for x in (one.reward, *one.rewards.values()) if x is not None]
  account = Account(
    transcript_lib.messages(one.transcript),
    tuple(rewards.tolist()) if one.rewards else None,
    'failed' if one.failure else one.ended or 'done',
    one.failure,
    _last_text(one),
    **one.counts,
  )
  return Played(
    found._replace(account=account),
    float(sum(own)) if (own or is_cut) and not one.failure else None,
  )


def _last_text(one: _Live) -> str:
  """What the policy has said last in the first context.

  If that has no turn, in the last one of the tree. Which context was answered
  last depends on the delays of environments.
  """
  last = one.transcript.last(())
  if last is not None:
    return one.said[last.number]
  places = one.transcript.turn_places()
  return one.said[max(places, key=places.__getitem__)] if places else ''
