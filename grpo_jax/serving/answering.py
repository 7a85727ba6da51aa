"""Answers chats and completions from a desk, as a client wants them drawn."""

import asyncio
from collections.abc import Awaitable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import hashlib
import secrets
from typing import Any

import numpy as np

from grpo_jax import engines
from grpo_jax.data import Tokenizer
from grpo_jax.engines.http import dialects
from grpo_jax.environments import formats
from grpo_jax.environments import tools_as_text
from grpo_jax.environments.base import ToolCall
from grpo_jax.serving import desk as desk_lib
from grpo_jax.serving import reading
from grpo_jax.serving import wire
from grpo_jax.serving.app import Client
from grpo_jax.serving.app import Heard
from grpo_jax.serving.app import HeardOf

_USUAL_TOKENS = 16  # of a completion, as OpenAI's API has it
_FINISHES = {
  engines.ENDED: 'stop',
  engines.STOPPED: 'stop',
  engines.TRUNCATED: 'length',
}


def call_format(name: str, tokenizer: Tokenizer) -> formats.Format | None:
  """How a model writes calls of tools; None if nobody knows.

  Args:
    name: Of a format; 'auto': that of the chat template.
    tokenizer: Has the chat template.
  """
  if name != 'auto':
    return formats.find(name)
  if not tokenizer.reads_tools:
    return formats.find(tools_as_text.FORMAT)
  assert tokenizer.chat_template is not None
  found = formats.guess(tokenizer.chat_template.source)
  return formats.find(found) if found else None


@dataclasses.dataclass(frozen=True)
class Answering:
  """A service over a desk; see `app.Service`.

  Attributes:
    desk: Draws and scores.
    tokenizer: Of the model.
    name: Of the model.
    sampling: How tokens are drawn where a client does not say.
    max_tokens: Of an answer of a chat, at most, where a client does not say.
    context_tokens: Of a prompt and its answer, at most.
    call_format: How the model writes calls; None if nobody knows.
  """

  desk: desk_lib.Desk
  tokenizer: Tokenizer
  name: str
  sampling: engines.Sampling
  max_tokens: int
  context_tokens: int
  call_format: formats.Format | None

  def models(self) -> Sequence[str]:
    """See `app.Service`."""
    return [self.name, *self.desk.policies()]

  def policy_of(self, model: str) -> str:
    """The policy that a client names; '' for the first, by whatever name."""
    return model if model in self.desk.policies() else ''

  def sent(self, answer: wire.Answer, whole: bool) -> None:
    """Nothing depends on it here."""

  async def control(
    self, name: str, body: Mapping[str, Any], secret: str
  ) -> Mapping[str, Any]:
    """There is no episode."""
    raise wire.Refused(404, f'No episode is under way, so there is no {name}.')

  async def chat(
    self, request: wire.Chat, client: Client, heard: Heard | None
  ) -> wire.Answer:
    """See `app.Service`."""
    if request.tools and self.call_format is None:
      raise wire.Refused(
        400,
        'The chat template writes calls of tools in a format that is not known '
        'here; ask without tools.',
        param='tools',
      )
    ids = self._chat_ids(request)
    format = self.call_format or formats.find('json_block')
    turns = reading.Turns(self.tokenizer, format, request.tools)
    limit = self._limit(ids, request.max_tokens, self.max_tokens)
    return await _One(self, ids, request, turns, heard).answer(limit, 0)

  async def complete(
    self, request: wire.Completion, client: Client, heard: HeardOf | None
  ) -> Sequence[wire.Answer]:
    """See `app.Service`."""
    texts = reading.Texts(self.tokenizer)
    ones = []
    for n, prompt in enumerate(request.prompt):
      ids = self._prompt_ids(prompt)
      limit = self._limit(ids, request.max_tokens, _USUAL_TOKENS)
      hear = None if heard is None else functools.partial(heard, n)
      ones.append((_One(self, ids, request, texts, hear), limit))
    tasks = [
      asyncio.ensure_future(one.answer(limit, n))
      for n, (one, limit) in enumerate(ones)
    ]
    try:
      return await asyncio.gather(*tasks)
    finally:
      for task in tasks:  # if one has failed, nobody waits for the others
        task.cancel()

  def _chat_ids(self, request: wire.Chat) -> list[int]:
    if not self.tokenizer.prompt_format.chat:
      raise wire.Refused(
        400,
        'The prompts of this model are no chats (data.chat=False); ask '
        '/completions, or serve it with --config.data.chat=True.',
      )
    messages, tools = request.messages, request.tools
    if not self.tokenizer.reads_tools:
      messages, tools = tools_as_text.written(messages, tools), ()
    own = [n for n, x in enumerate(messages) if x['role'] == 'assistant']
    try:
      return self.tokenizer.begin_chat(messages, tools, own)
    except (ValueError, KeyError, TypeError) as error:
      raise wire.Refused(
        400,
        f'The chat template cannot write this chat ({error!s:.300}); give '
        'other messages.',
        param='messages',
      ) from error

  def _prompt_ids(self, prompt: str | tuple[int, ...]) -> list[int]:
    if not isinstance(prompt, str):
      if max(prompt) >= self.tokenizer.vocab_size:
        raise wire.Refused(
          400,
          f'The id {max(prompt)} is none of the tokenizer, which has '
          f'{self.tokenizer.vocab_size}.',
          param='prompt',
        )
      return [*prompt]
    try:
      ids = self.tokenizer.encode(prompt)
    except ValueError as error:
      raise wire.Refused(400, str(error), param='prompt') from error
    bos = [*self.tokenizer.bos_ids]
    # A prompt that spells the tokens out already gets them once.
    return ids if ids[: len(bos)] == bos else bos + ids

  def _limit(self, ids: Sequence[int], wanted: int | None, usual: int) -> int:
    """How many tokens an answer may have: what is wanted, if there is room."""
    most = usual if wanted is None else wanted
    room = self.context_tokens - len(ids)
    if room < min(1, most):
      raise wire.Refused(
        400,
        f'The prompt has {len(ids)} tokens, and with its answer at most '
        f'{self.context_tokens} can be read; give a shorter one.',
        'context_length_exceeded',
      )
    return min(most, room)

  def sampling_of(
    self, request: wire.Chat | wire.Completion
  ) -> engines.Sampling:
    """How a client wants tokens to be drawn."""
    given = request.sampling
    names = 'temperature', 'top_p', 'top_k', 'min_p'
    changes = {name: given[name] for name in names if name in given}
    if 'top_k' in changes:  # -1: all, as vLLM has it
      changes['top_k'] = max(0, changes['top_k'])
    if isinstance(request, wire.Completion):
      own = () if request.ignores_ends else self.sampling.eos_ids
      changes['eos_ids'] = tuple(dict.fromkeys((*own, *request.end_ids)))
    stops = dict.fromkeys((*self.sampling.stop_strings, *request.stop))
    try:
      return dataclasses.replace(
        self.sampling, **changes, stop_strings=(*stops,)
      )
    except ValueError as error:
      raise wire.Refused(400, str(error)) from error


class _One:
  """An answer under way.

  Args:
    service: Who answers.
    ids: Of the prompt.
    request: How it is to be answered.
    read: Reads ids.
    heard: See `app.Service`.
  """

  def __init__(
    self,
    service: Answering,
    ids: list[int],
    request: wire.Chat | wire.Completion,
    read: reading.Turns | reading.Texts,
    heard: Heard | None,
  ):
    self._service, self._ids, self._request = service, ids, request
    self._tokenizer, self._heard = service.tokenizer, heard
    self._sampling = service.sampling_of(request)
    self._policy = service.policy_of(request.model)
    self._parts = reading.Parts(
      read, self._sampling.stop_strings, isinstance(request, wire.Chat)
    )
    self._echoes = isinstance(request, wire.Completion) and request.echo
    self._prefix = self._tokenizer.decode(ids) if self._echoes else ''
    self._offset = 0  # of the next token that is told, in characters

  async def answer(self, limit: int, number: int) -> wire.Answer:
    """Draws it, and says what of it is clear while it is drawn.

    Args:
      limit: The most tokens.
      number: Which of the prompts of its request it goes on from.
    """
    request = self._request
    if self._heard is not None and self._echoes:
      scores = await self._scores(())
      self._hear(wire.Piece(self._prefix), scores or ())
    drawn, logp, finish = np.zeros(0, np.int32), np.zeros(0), engines.TRUNCATED
    version = ''
    if limit:
      key = _key(request.sampling.get('seed'), number)
      asked = engines.Request(self._ids, key, limit, self._sampling)
      one, version = await _known_errors(
        self._service.desk.draw(asked, self._heard and self._part, self._policy)
      )
      drawn, logp, finish = one.ids, one.logp, one.finish
    said = self._parts.whole(drawn, finish == engines.TRUNCATED)
    said = said._replace(calls=_named(said.calls))
    scores = await self._scores(drawn.tolist(), logp.tolist())
    if self._heard is not None:
      piece, before = self._parts.rest(said, drawn)
      new = (scores or [])[len(scores or ()) - len(drawn) :]
      self._hear(piece, new[0 if request.logprobs else before :])
    return wire.Answer(
      text=self._prefix + said.text,
      reasoning=said.reasoning,
      calls=said.calls,
      finish='tool_calls' if said.calls else _FINISHES[finish],
      read=len(self._ids),
      tokens=len(drawn),
      model=self._policy or self._service.name,
      prompt_ids=(*self._ids,) if request.return_token_ids else (),
      ids=(*drawn.tolist(),) if request.return_token_ids else (),
      logprobs=scores,
      version=version,
      **await self._of_prompt(),
    )

  async def _of_prompt(self) -> dict[str, Any]:
    """What an answer to a completion has more."""
    request = self._request
    if not isinstance(request, wire.Completion):
      return {}
    names_ids, names_version = request.names_ids, request.names_version
    found: dict[str, Any] = {
      'names_ids': names_ids, 'names_version': names_version,
    }  # fmt: skip
    if (top := request.prompt_logprobs) is not None:
      known = await self._known(self._ids, top, 1.0)
      tops = [[]] + [
        [*zip(ids.tolist(), logp.tolist())]
        for ids, logp in zip(known.top_ids, known.top_logp, strict=True)
      ]
      values = [None, *known.logp.tolist()]
      found['prompt_logprobs'] = reading.scored(
        self._tokenizer, self._ids, values, tops
      )
    return found

  async def _known(
    self, ids: Sequence[int], top: int, temperature: float
  ) -> Any:
    return await _known_errors(
      self._service.desk.score(ids, top, temperature, self._policy)
    )

  def _part(self, one: engines.Sampled) -> None:
    """Tells what is new of what was drawn so far."""
    piece, before = self._parts.part(one.ids)
    scores = []
    if self._request.logprobs == 0:  # the likeliest are known in the end
      previous = int(one.ids[before - 1]) if before else self._ids[-1]
      scores = reading.scored(
        self._tokenizer,
        piece.ids,
        one.logp[before:].tolist(),
        (),
        previous,
        self._offset,
      )
    self._hear(piece, scores)

  def _hear(self, piece: wire.Piece, scores: Sequence[wire.Scored]) -> None:
    if scores:
      self._offset = scores[-1].offset + len(scores[-1].text)
    piece = piece._replace(logprobs=(*scores,))
    if not self._request.return_token_ids:
      piece = piece._replace(ids=())
    if self._heard is not None and any(piece):
      self._heard(piece)

  async def _scores(
    self, drawn: Sequence[int], logp: Sequence[float] = ()
  ) -> list[wire.Scored] | None:
    """What is known of the tokens of an answer; None if nobody asks.

    Args:
      drawn: Their ids, those of an echoed prompt left out.
      logp: What the engine says of them.
    """
    top = self._request.logprobs
    if top is None:
      return None
    ids = [*self._ids, *drawn]
    values: list[float | None] = [None, *[0.0] * (len(self._ids) - 1), *logp]
    tops: list[Any] = [()] * len(ids)

    def fill(known: Any, first: int, end: int) -> None:
      for n in range(max(1, first), end):
        values[n] = known.logp[n - 1].item()
        tops[n] = [
          *zip(known.top_ids[n - 1].tolist(), known.top_logp[n - 1].tolist())
        ]

    own = self._sampling.temperature or 1.0
    begin = len(self._ids)
    if self._echoes:  # a prompt was drawn by nobody, so at no temperature
      known = await self._known(ids, top, 1.0)
      fill(known, 0, begin if own != 1 or not top else len(ids))
    if top and drawn and (own != 1 or not self._echoes):
      known = await self._known(ids, top, own)
      fill(known, begin, len(ids))
    first = 0 if self._echoes else begin
    previous = ids[first - 1] if first else None
    return reading.scored(
      self._tokenizer, ids[first:], values[first:], tops[first:], previous
    )


def _key(seed: int | None, number: int) -> np.ndarray:
  """The random key of an answer, u32[1,2]; without a seed, any.

  The first answer has that of the bits of the seed, so that who has a key can
  ask for what it draws.
  """
  if seed is not None and not number:
    return dialects.seed_to_key(seed)[None]
  data = secrets.token_bytes(8)
  if seed is not None:
    data = hashlib.sha256(f'{seed} {number}'.encode()).digest()[:8]
  return np.frombuffer(data, np.uint32)[None]


def _named(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
  """Calls with ids that no other answer has."""
  return tuple(
    call._replace(id=f'call_{secrets.token_hex(12)}') for call in calls
  )


async def _known_errors(wanted: Awaitable[Any]) -> Any:
  """What is waited for; errors that a client can be told are refusals."""
  try:
    return await wanted
  except desk_lib.Paused as error:
    raise wire.Refused(
      503, 'Generation is paused; ask again after it resumes.'
    ) from error
  except desk_lib.Closed as error:
    raise wire.Refused(503, wire.ENDING) from error
  except ValueError as error:
    raise wire.Refused(400, str(error)) from error
