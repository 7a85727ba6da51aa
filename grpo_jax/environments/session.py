"""One episode as it is played: the contexts of its policy, and its end."""

import asyncio
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextvars
import ctypes
import itertools
import os
import threading
import time
import types
from typing import Any

from grpo_jax.environments import chats as chats_lib
from grpo_jax.environments import episode_threads
from grpo_jax.environments import events
from grpo_jax.environments import playing
from grpo_jax.environments import threads
from grpo_jax.environments import tools as tools_lib
from grpo_jax.environments.base import OVER
from grpo_jax.environments.base import Ended
from grpo_jax.environments.base import Message
from grpo_jax.environments.base import Reply
from grpo_jax.environments.base import Unavailable

_MOST_SWALLOWED = 3  # times that an episode may go on after it was ended
Ready = tuple[tuple[Mapping[str, Any], ...], playing.Playing]


class Context:
  """A `base.Policy`: one context of an episode."""

  def __init__(
    self,
    session: 'Session',
    number: int = 0,
    tools: tuple[Mapping[str, Any], ...] | None = None,
    turn: int | None = None,
  ):
    self._session, self._number = session, number
    self._tools, self._turn = tools, turn
    self._asked = False  # until the answer is there
    self._answer: asyncio.Future[Reply] | None = None

  async def say(
    self,
    *new: Message | str,
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
  ) -> Reply:
    """See `base.Policy.say`.

    Raises:
      Ended: A limit of the episode has been met, or it is over.
      RuntimeError: This context waits for an answer.
      TypeError: What is said is no message.
      ValueError: Nothing is said, or the tools are others than before.
    """
    session = self._session
    await session.check_may_ask('policy.say', max_tokens)
    self._check_idle('policy.say')
    messages = events.messages(new)
    schemas = session.tools if tools is None else tuple(events.plain(tools))
    if self._tools is None:
      self._tools = schemas
    elif tools is not None and schemas != self._tools:
      raise ValueError(
        '`policy.say` was given other tools than in the first turn of this'
        ' context, and what a policy has read cannot change; pass them in the'
        ' first turn, or none.'
      )
    return await self.ask(messages, self._tools, max_tokens)

  async def chat(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
  ) -> Reply:
    """See `base.Policy.chat`."""
    return await self._session.chat(messages, tools, max_tokens, stop)

  async def ask(
    self,
    messages: tuple[Message, ...],
    tools: tuple[Mapping[str, Any], ...],
    max_tokens: int | None,
    **options: Any,
  ) -> Reply:
    """Lets the policy answer; see `events.Say`."""
    session = self._session
    self._asked, self._tools = True, tools
    self._answer = session.loop.create_future()
    session.say(
      events.Say(
        session.episode, self._number, messages, tools, max_tokens, **options
      )
    )
    return await self._answer

  def fork(self) -> 'Context':
    """See `base.Policy.fork`."""
    session = self._session
    if session.is_over:
      raise Ended(OVER)
    self._check_idle('policy.fork')
    return self.forked()

  def forked(
    self, turns: int | None = None, branch: int | None = None
  ) -> 'Context':
    """Another context; see `events.Forked`."""
    session = self._session
    made = Context(session, session.number(), self._tools, self._turn)
    session.contexts[made._number] = made
    session.emit(
      events.Forked(session.episode, made._number, self._number, turns, branch)
    )
    return made

  def reward(self, value: float, turn: int | None = None) -> None:
    """See `base.Policy.reward`."""
    session = self._session
    if session.is_over:
      raise Ended(OVER)
    value = playing.number(value, 'The reward of a turn')
    turn = self._turn if turn is None else turn
    if turn is None:
      raise ValueError(
        'A reward was given before the first turn; say something first.'
      )
    session.check_turn(turn, 'given a reward')
    session.emit(events.Rewarded(session.episode, turn, value))

  def leave_out(self, turn: int) -> None:
    """See `base.Policy.leave_out`."""
    session = self._session
    if session.is_over:
      raise Ended(OVER)
    session.check_turn(turn, 'left out')
    session.emit(events.LeftOut(session.episode, turn))

  def count(self, name: str, number: int = 1) -> None:
    """See `base.Policy.count`."""
    counts = self._session.counts
    counts[str(name)] = counts.get(str(name), 0) + int(number)

  def answer(self, reply: Reply) -> None:
    """The policy has answered."""
    self._asked, waits = False, self._answer
    self._turn = reply.turn
    if waits is not None and not waits.done():
      waits.set_result(reply)

  def end(self, error: Exception) -> None:
    """The policy will not answer what it was asked."""
    waits = self._answer
    if self._asked and waits is not None and not waits.done():
      waits.set_exception(error)
    self._asked = False

  @property
  def number(self) -> int:
    """Of the context, in its episode."""
    return self._number

  @property
  def is_new(self) -> bool:
    """Whether nothing was said in it."""
    return self._answer is None

  def _check_idle(self, what: str) -> None:
    if self._asked:
      raise RuntimeError(
        f'`{what}` was called while this context waits for an answer; await it'
        ' first, or make a context for each with `policy.fork()` before.'
      )


_session: contextvars.ContextVar['Session | None'] = contextvars.ContextVar(
  'session', default=None
)


def current() -> 'Session | None':
  """The session whose code runs now; None outside of all."""
  return _session.get()


class Session:
  """An episode under way.

  Attributes:
    episode: Its number.
    loop: The event loop that plays it.
    tools: The schemas that its policy reads.
    contexts: Those of its policy, by their numbers.
    turns: The numbers of its turns so far.
    counts: What was counted, by names.
    is_over: Whether it has said `Done` or `Failed`.
    is_parked: Whether it waits for an answer that will never come.
    why_stopped: Why it was ended with no regard for what it does; or ''.
    tasks: What it has started in the loop and is not done.
    threads: For what it calls by `asyncio.to_thread`.
    kept: What has played it, once it has ended well; None before.

  Args:
    begin: What to play.
    slot: Its place in `running`.
    running: A bytearray or the like: how many pieces of code run just now, for
      each slot. Who looks at a process that has ended or hangs, sees there
      whose code it was.
    emit: Takes its events.
    stopping: Called when it is stopped, to see whether it does.
  """

  loop: asyncio.AbstractEventLoop

  def __init__(
    self,
    begin: events.Begin,
    slot: int,
    running: Any,
    emit: Callable[[events.Word], None],
    stopping: Callable[['Session'], None],
  ):
    self.episode = begin.episode
    self.tools: tuple[Mapping[str, Any], ...] = ()
    self.contexts = {0: Context(self)}
    self.turns: set[int] = set()
    self.counts: dict[str, int] = {}
    self.kept: playing.Playing | None = None
    self.is_over = self.is_parked = False
    self.why_stopped = ''
    self.tasks: set[asyncio.Task[Any]] = set()
    self._marks = _Marks(running, slot)
    self._calls = _Marks(running, slot)
    self.threads = episode_threads.Threads(self._calls)
    self._begin, self._emit, self._stopping = begin, emit, stopping
    self._numbers = itertools.count(1)
    self._lock = threading.Lock()
    self._is_left = False
    self._secs, self._since, self._asked = 0.0, time.monotonic(), 0
    self._why_ended, self._swallowed, self._parse_errors = '', 0, 0
    self._chats: chats_lib.Chats | None = None

  async def play(self, ready: Callable[[], Ready]) -> None:
    """Plays it from its begin to its end; never raises.

    Args:
      ready: The schemas of the tools, and what plays.
    """
    _session.set(self)
    threads.watch.set(self._calls)
    self.loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    self._know(task)
    await self._mark(self._play(ready))

  async def _play(self, ready: Callable[[], Ready]) -> None:
    try:
      self.tools, play = ready()
      self._since = time.monotonic()
      self._emit(events.Began(self.episode))
      with tools_lib.counted() as counts:
        try:
          value = await play(
            self.contexts[0], self._begin.example, self._begin.seed
          )
        except Ended:
          if not self._why_ended:  # it is the environment's own
            raise
          value = None  # beside the rewards of its turns
      if self.why_stopped:  # it has swallowed that it was cancelled
        raise asyncio.CancelledError
      event = events.Done(
        self.episode,
        value,
        counts.calls,
        counts.errors,
        self._parse_errors,
        self._own_secs(),
        self.counts,
        tuple(sorted(self.turns)) if self._chats is not None else (),
      )
      self.kept = play
    except BaseException as error:
      event = self._failed(error)
    self.end(event)

  def _failed(self, error: BaseException) -> events.Failed:
    if self.why_stopped:
      return events.Failed(self.episode, self.why_stopped)
    is_away = isinstance(error, Unavailable)
    return events.Failed(self.episode, events.reason(error), is_away)

  def emit(self, event: events.Word) -> None:
    """Says what has happened, as long as the episode is not over."""
    with self._lock:
      if not self.is_over:
        self._emit(event)

  def say(self, event: events.Say) -> None:
    """Asks the policy; the environment's own time stands still from now on."""
    if not self._asked:
      self._secs += time.monotonic() - self._since
    self._asked += 1
    self.emit(event)

  async def chat(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    max_tokens: int | None,
    stop: Sequence[str],
  ) -> Reply:
    """See `base.Policy.chat`."""
    await self.check_may_ask('policy.chat', max_tokens)
    whole = events.messages(messages)
    schemas = self.tools if tools is None else tuple(events.plain(tools))
    if self._chats is None:
      self._chats = chats_lib.Chats(self.contexts[0].is_new)
    chats = self._chats
    place = chats.find(whole, schemas)
    context, number = self.contexts[place.context], place.context
    if place.turns is not None:
      context = context.forked(place.turns, place.branch)
      number = context.number
    chats.ask(number, whole, schemas)
    said = whole if place.known is not None else whole[-place.new :]
    try:
      reply = await context.ask(
        tuple(map(chats.native, said)),
        schemas,
        max_tokens,
        is_chat=True,
        known=place.known,
        stops=tuple(map(str, stop)),
      )
    except ValueError:
      chats.give_up(number)
      raise
    return chats.answer(number, reply)

  def answer(self, context: int, reply: Reply) -> None:
    """The policy has answered in a context."""
    if self._goes_on_from():
      self.turns.add(reply.turn)
      self._parse_errors += len(reply.problems)
      self.contexts[context].answer(reply)

  def refuse(self, context: int, why: str) -> None:
    """What a context was asked cannot be read."""
    if self._goes_on_from():
      self.contexts[context].end(ValueError(why))

  def _goes_on_from(self) -> bool:
    """Something that was asked is over; whether the episode goes on."""
    if self._why_ended or self.is_over:
      return False
    self._asked -= 1
    if not self._asked:
      self._since = time.monotonic()
    return True

  async def check_may_ask(self, what: str, max_tokens: int | None) -> None:
    """Checks what asks the policy; see `check_goes_on`.

    Raises:
      RuntimeError: It is asked in another event loop.
      ValueError: `max_tokens` is no number of tokens.
    """
    if asyncio.get_running_loop() is not self.loop:
      raise RuntimeError(
        f'`{what}` was called in another event loop than that of the episode;'
        ' make no loop of your own.'
      )
    await self.check_goes_on()
    if max_tokens is not None and (
      not isinstance(max_tokens, int) or max_tokens < 1
    ):
      raise ValueError(
        f'`{what}` was given max_tokens={max_tokens!r}, but a whole number of'
        ' at least 1 is required, or None.'
      )

  def check_turn(self, turn: int, done: str) -> None:
    """Raises a ValueError if there is no such turn so far."""
    if turn not in self.turns:
      raise ValueError(
        f'Turn {turn} was {done}, but the turns of this episode so far are'
        f' {sorted(self.turns)}; say something first.'
      )

  async def check_goes_on(self) -> None:
    """Raises `Ended` if a limit has ended the episode, or it is over.

    What goes on all the same is failed, and then gets no answer at all: a loop
    that lets nothing pass would keep the event loop for ever.
    """
    if not self.is_over and not self._why_ended:
      return
    self._swallowed += 1
    if self._swallowed > _MOST_SWALLOWED:
      self.stop(
        f'has gone on after its end ({self._why_ended}): let `Ended` pass'
      )
      self.end(events.Failed(self.episode, self.why_stopped))
      self.is_parked = True
      await self.loop.create_future()
    raise Ended(OVER if self.is_over else self._why_ended)

  def cancel(self, why: str) -> None:
    """A limit has ended it: whatever it says from now on raises `Ended`."""
    if self._why_ended or self.is_over:
      return
    self._why_ended = why or 'a limit'
    if self._asked:
      self._asked, self._since = 0, time.monotonic()
    for context in list(self.contexts.values()):
      context.end(Ended(self._why_ended))

  def stop(self, why: str) -> None:
    """Ends it with no regard for what it does."""
    if not self.is_over and not self.why_stopped:
      self.why_stopped = why
      self._stopping(self)
      for task in list(self.tasks):
        task.cancel()

  def end(self, event: events.Done | events.Failed) -> None:
    """Says how it ended; the first one counts."""
    with self._lock:
      if self.is_over:
        return
      self.is_over = True
      self._emit(event)
    for context in self.contexts.values():
      context.end(Ended(OVER))

  def is_busy(self) -> bool:
    """Whether code of it still runs in a thread."""
    return self._calls.count > 0

  def number(self) -> int:
    """A number for another context."""
    return next(self._numbers)

  def _own_secs(self) -> float:
    own = 0.0 if self._asked else time.monotonic() - self._since
    return self._secs + own

  async def _mark(self, coroutine: Any) -> Any:
    return await _steps(coroutine, self._marks)

  def task(
    self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any
  ) -> asyncio.Task[Any]:
    """A task of this episode, which ends with it."""
    if not self.is_over:
      coroutine = self._mark(coroutine)
    return self._know(asyncio.Task(coroutine, loop=loop, **kwargs))

  def leave(self, but: asyncio.Task[Any] | None = None) -> None:
    """Gives up its tasks that have not ended: they are kept for ever.

    Args:
      but: One that goes on.
    """
    self._is_left = True
    for task in self.tasks - {but}:
      _keep(task)

  def _know(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
    if self._is_left:
      _keep(task)
    self.tasks.add(task)
    task.add_done_callback(self.tasks.discard)
    return task


def _keep(waiting: Any) -> None:
  """Keeps a task or a coroutine that never goes on, for as long as Python runs.

  If Python collected it, the code that waits in it would run once more, in any
  thread, at any time, and might never return. No list of ours keeps it: lists
  are emptied when Python ends.
  """
  ctypes.pythonapi.Py_IncRef(ctypes.py_object(waiting))


_counting = threading.Lock()


class _Marks:
  """Counts in a slot how many pieces of an episode's code run.

  Attributes:
    count: How many of those that were entered here.
  """

  def __init__(self, running: Any, slot: int):
    self.count = 0
    self._running, self._slot = running, slot
    self._process = os.getpid()

  def __enter__(self) -> None:
    with _counting:
      self.count += 1
      self._running[self._slot] = min(self._running[self._slot] + 1, 255)

  def __exit__(self, *_: Any) -> None:
    if os.getpid() != self._process:  # the code has forked; this is the child
      os._exit(0)
    with _counting:
      self.count -= 1
      self._running[self._slot] = max(self._running[self._slot] - 1, 0)


@types.coroutine
def _steps(coroutine: Any, marks: _Marks) -> Any:
  """Runs a coroutine, and marks each step of it."""
  step, sent = coroutine.send, None
  while True:
    try:
      with marks:
        wanted = step(sent)
    except StopIteration as end:
      return end.value
    try:
      step, sent = coroutine.send, (yield wanted)
    except GeneratorExit:
      _keep(coroutine)
      raise
    except BaseException as error:
      step, sent = coroutine.throw, error
