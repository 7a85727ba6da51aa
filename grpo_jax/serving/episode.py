"""One episode as a service: an agent asks over HTTP, and its policy answers.

Requests come in the event loop of the server, and the policy lives in that of
the episode; what belongs to the episode runs there.
"""

import asyncio
from collections.abc import Callable
from collections.abc import Coroutine
from collections.abc import Mapping
from collections.abc import Sequence
import contextvars
import dataclasses
import hmac
import secrets
from typing import Any

from grpo_jax.environments.base import OVER
from grpo_jax.environments.base import Ended
from grpo_jax.environments.base import Policy
from grpo_jax.environments.base import Reply
from grpo_jax.serving import app
from grpo_jax.serving import wire

MODEL = 'policy'
_SETTLES, _SETTLE_SECS = 500, 0.002
_LIMITS = {
  'turns': 'all turns of its episode',
  'tokens': 'all tokens of its episode',
  'context': 'the context of its episode',
  'length': 'the longest turn',
  'end': 'the end of the whole chat',
}

Trains = Callable[[Sequence[Mapping[str, Any]], Sequence[Any]], bool]


@dataclasses.dataclass(eq=False)
class _Call:
  """A request that is being answered, or whose answer nobody has got yet.

  Attributes:
    id: Of its answer.
    body: What was sent.
    task: Its answer, in the loop of the server.
    waiting: How many clients wait for it.
    sending: To how many it is being sent.
    turn: Of its answer; None before.
  """

  id: str
  body: bytes
  task: asyncio.Future[wire.Answer]
  waiting: int = 0
  sending: int = 0
  turn: int | None = None


class EpisodeService:
  """See `app.Service`. To be made in the event loop of the episode.

  Attributes:
    is_trusted: Whether the agent may reward itself, or leave out turns.
    secret: Allows an agent that is trusted to say what it is worth.
    limit: The limit that the agent has met; '' before. Read by the episode.
    fault: What a function of the run has raised; None if nothing.
    met: Set with either, in the event loop of the episode.

  Args:
    policy: Of the episode.
    is_trusted: Whether the agent may reward itself, or leave out turns.
    trains: Which chats are learned from; None: all of them.
  """

  def __init__(
    self, policy: Policy, is_trusted: bool = False, trains: Trains | None = None
  ):
    self.secret = secrets.token_urlsafe(16)
    self.limit, self.met = '', asyncio.Event()
    self.fault: Exception | None = None
    self.is_trusted = is_trusted
    self._policy, self._trains = policy, trains
    self._loop = asyncio.get_running_loop()
    # Its tasks are those of the episode, and end with it.
    self._context = contextvars.copy_context()
    self._calls: dict[str, _Call] = {}
    self._turns: dict[str, int] = {}  # by the ids of all answers
    self._is_over = False

  async def settle(self) -> None:
    """Waits a while until it is known which answers have been sent."""
    for _ in range(_SETTLES):
      if not any(call.sending for call in [*self._calls.values()]):
        return
      await asyncio.sleep(_SETTLE_SECS)

  def end(self) -> None:
    """The episode is over; called in its event loop.

    What was drawn and has reached nobody is not learned from.
    """
    self._is_over = True
    for call in [*self._calls.values()]:
      if call.turn is not None:
        self._policy.leave_out(call.turn)
        self._policy.count('undelivered')

  def models(self) -> Sequence[str]:
    """See `app.Service`."""
    return (MODEL,)

  async def chat(
    self, request: wire.Chat, client: app.Client, heard: app.Heard | None
  ) -> wire.Answer:
    """See `app.Service`; the answer comes whole."""
    del heard
    self._check_goes_on()
    leaves_out = not client.trains
    if leaves_out:
      self._check_secret(client.secret, 'The header X-Grpo-Train')
    call = self._asked_before(client)
    if call is None:
      number = f'chatcmpl-{secrets.token_hex(12)}'
      task = asyncio.ensure_future(self._ask(number, request, leaves_out))
      task.add_done_callback(lambda one: one.cancelled() or one.exception())
      call = self._calls[number] = _Call(number, client.body, task)
    call.waiting += 1
    try:
      answer = await asyncio.shield(call.task)
      call.sending += 1
      return answer
    except wire.Refused:
      self._calls.pop(call.id, None)
      raise
    finally:
      call.waiting -= 1

  def _asked_before(self, client: app.Client) -> _Call | None:
    """The call that a client asks for once more; None for a new one.

    Equal requests at once are several calls, unless one says that it is sent
    again, or the one before has lost its client.
    """
    equal = [one for one in self._calls.values() if one.body == client.body]
    lost = [one for one in equal if not (one.waiting or one.sending)]
    if lost:
      return lost[0]
    return equal[-1] if equal and client.retry else None

  async def _ask(
    self, number: str, request: wire.Chat, leaves_out: bool
  ) -> wire.Answer:
    """Asks the policy."""
    try:
      reply = await self._in_episode(self._answered(request, leaves_out))
    except Ended as ended:
      raise self._refused(str(ended)) from ended
    except ValueError as error:
      raise wire.Refused(400, str(error), 'invalid_value', 'messages') from None
    self._turns[number] = reply.turn
    finish = 'length' if reply.finish == 'length' else 'stop'
    if number in self._calls:
      self._calls[number].turn = reply.turn
    return wire.Answer(
      text=reply.text,
      reasoning=reply.reasoning,
      calls=reply.calls,
      finish='tool_calls' if reply.calls else finish,
      read=reply.read,
      tokens=reply.tokens,
      model=MODEL,
      id=number,
    )

  async def _answered(self, request: wire.Chat, leaves_out: bool) -> Reply:
    """What the policy answers; in the event loop of the episode."""
    if self.limit:  # an agent may ask as often as it likes
      raise Ended(self.limit)
    overridden = [*request.overridden]
    if request.logprobs is not None:
      overridden.append('logprobs')
    if request.return_token_ids:
      overridden.append('return_token_ids')
    for name in overridden:
      self._policy.count(f'overridden/{name}')
    if self._trains is not None and not leaves_out:
      try:
        leaves_out = not self._trains(request.messages, request.tools)
      except Exception as error:
        self.fault = error
        self.met.set()
        raise
    try:
      reply = await self._policy.chat(
        request.messages, request.tools, request.max_tokens, request.stop
      )
    except Ended as ended:
      if str(ended) != OVER:
        self.limit = self.limit or str(ended)
        self.met.set()
      raise
    if leaves_out:
      self._policy.leave_out(reply.turn)
      self._policy.count('left_out')
    return reply

  async def complete(
    self,
    request: wire.Completion,
    client: app.Client,
    heard: app.HeardOf | None,
  ) -> Sequence[wire.Answer]:
    """Refuses: an episode is a chat."""
    raise wire.Refused(
      400,
      'While a policy is trained, it answers chats alone; use '
      '/chat/completions.',
    )

  def sent(self, answer: wire.Answer, whole: bool) -> None:
    """See `app.Service`."""
    if (call := self._calls.get(answer.id)) is not None:
      call.sending -= 1
      if whole:
        del self._calls[answer.id]

  async def control(
    self, name: str, body: Mapping[str, Any], secret: str
  ) -> Mapping[str, Any]:
    """Rewards a turn, or leaves one out, for an agent that is trusted."""
    self._check_goes_on()
    self._check_secret(secret, f'/{name}')
    turn: Any = self._turn(body)
    value: Any = body.get('value')

    async def do():
      if name == 'reward':
        self._policy.reward(value, turn)
      else:
        self._policy.leave_out(turn)
        self._policy.count('left_out')

    try:
      await self._in_episode(do())
    except Ended as ended:
      raise self._refused(str(ended)) from ended
    except ValueError as error:
      raise wire.Refused(400, str(error)) from None
    return {}

  def _turn(self, body: Mapping[str, Any]) -> int | None:
    """The turn that a body names, by the id of its answer or by its number."""
    turn, answer = body.get('turn'), body.get('id')
    if answer is not None:
      if not isinstance(answer, str) or answer not in self._turns:
        raise wire.Refused(
          400, f'No answer of this episode has the id {answer!r:.60}.'
        )
      return self._turns[answer]
    if isinstance(turn, int | None) and not isinstance(turn, bool):
      return turn
    raise wire.Refused(400, f'turn must be a whole number; it is {turn!r:.40}.')

  def _check_goes_on(self) -> None:
    if self._is_over:
      raise wire.Refused(410, OVER, 'episode_over')

  def _check_secret(self, given: str, what: str) -> None:
    if not self.is_trusted:
      raise wire.Refused(
        403,
        f'{what} would let the agent say what it is worth, and it is not '
        'trusted; set config.agent.trust_agent=True if no code of the policy '
        'runs in it.',
      )
    if not hmac.compare_digest(given.encode(), self.secret.encode()):
      raise wire.Refused(
        403, f'{what} needs the second secret as X-Grpo-Secret.'
      )

  def _refused(self, why: str) -> wire.Refused:
    if why == OVER or self._is_over:
      return wire.Refused(410, OVER, 'episode_over')
    return wire.Refused(
      400,
      f'The policy has used up {_LIMITS.get(why, why)}; the episode ends.',
      'context_length_exceeded',
    )

  async def _in_episode(self, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of something that runs in the loop of the episode."""
    here, found = asyncio.get_running_loop(), asyncio.Future()

    def tell(result: Any, error: BaseException | None) -> None:
      if found.done():
        return
      if error is None:
        found.set_result(result)
      else:
        found.set_exception(error)

    async def run() -> None:
      result, error = None, None
      try:
        result = await work
      except asyncio.CancelledError:
        error = Ended(OVER)
      except Exception as raised:
        error = raised
      here.call_soon_threadsafe(tell, result, error)

    def begin() -> None:
      if self._is_over:
        work.close()
        here.call_soon_threadsafe(tell, None, Ended(OVER))
      else:
        self._loop.create_task(run())

    self._loop.call_soon_threadsafe(begin, context=self._context)
    return await found
