"""Whether a server of others answers as `HttpEngine` needs it.

Each check asks the server, and none needs to know its weights: what it says of
one and the same text is compared with itself. `grpo-jax doctor --engine=URL`
prints them.
"""

import asyncio
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax.config import http_client
from grpo_jax.engines import protocol
from grpo_jax.engines.http import dialects
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.engines.protocol import Sampling

PASSED, FAILED, NOTED = 'ok', 'FAILED', 'note'
_PROMPT = 3, 7, 4, 9, 5, 8, 6, 10, 4, 7, 3, 5  # ids that every vocabulary has
_TOKENS = 8
_MOST_GAP = 0.05  # nats, in the mean; that of bfloat16 is below
_AT_ONCE = 32


class Check(NamedTuple):
  """What a check has found.

  Attributes:
    name: Of the check.
    verdict: PASSED, FAILED, or NOTED for what some runs can do without.
    said: What was measured, or what to do.
  """

  name: str
  verdict: str
  said: str


class _Failed(Exception):
  """A check has failed; the message says what to do."""


class _Noted(Exception):
  """Some runs can do without; the message says which cannot."""


class Suite:
  """The checks of one server.

  Args:
    servers: Has the one.
    dialect: How it is asked; policies are named as adapters.
    versioned: How it is asked where all weights are replaced.
    policy: The name of the model; '' where a server has one alone.
  """

  def __init__(
    self,
    servers: servers_lib.Servers,
    dialect: dialects.Dialect,
    versioned: dialects.Dialect,
    policy: str,
  ):
    self._servers, self._dialect, self._policy = servers, dialect, policy
    self._versioned = versioned

  def examine(self, tell: Callable[[Check], None]) -> bool:
    """Makes all checks, and tells of each; whether none has failed."""

    async def every(opened: Any) -> bool:
      fine = True
      for name, check in self._checks():
        found = await self._checked(name, check, opened)
        tell(found)
        fine &= found.verdict != FAILED
        if name == 'answers' and found.verdict == FAILED:
          break
      return fine

    return self._servers.run(every)

  def _checks(self) -> Sequence[tuple[str, Callable[[Any], Awaitable[str]]]]:
    return (
      ('answers', self._alive),
      ('ids in, ids and log-probabilities out', self._ids),
      ('limit of tokens', self._limit),
      ('end tokens', self._ends),
      ('log-probabilities are those of the ids', self._scores),
      ('log-probabilities are those at the temperature', self._temperature),
      ('greedy tokens are the likeliest', self._greedy),
      ('seeds', self._seeds),
      (f'{_AT_ONCE} completions at once', self._many),
      ('an unknown policy is refused', self._unknown),
      ('version of the weights', self._versions),
      ('likeliest tokens of a text', self._likeliest),
    )

  async def _checked(self, name: str, check: Any, opened: Any) -> Check:
    try:
      return Check(name, PASSED, await check(opened))
    except _Noted as noted:
      return Check(name, NOTED, str(noted))
    except (
      _Failed,
      dialects.Unusable,
      http_client.NotAnswered,
      servers_lib.Away,
    ) as error:
      return Check(name, FAILED, str(error))

  async def _ask(self, opened: Any, call: dialects.Call) -> Any:
    return await self._servers.ask(opened, self._servers.every[0], call)

  async def _draw(
    self,
    opened: Any,
    seed: int = 1,
    temperature: float = 1.0,
    limit: int = _TOKENS,
    ends: tuple[int, ...] = (),
    policy: str | None = None,
    dialect: dialects.Dialect | None = None,
  ) -> dialects.Drawn:
    dialect = dialect or self._dialect
    asked = dialects.Completion(
      _PROMPT,
      seed,
      limit,
      Sampling(temperature=temperature, eos_ids=ends),
      self._policy if policy is None else policy,
    )
    return dialect.drawn(
      await self._ask(opened, dialect.complete(asked)), asked
    )

  async def _score(self, opened: Any, ids: Sequence[int], top: int = 0) -> Any:
    call = self._dialect.score(ids, top, self._policy)
    return self._dialect.scored(await self._ask(opened, call), ids, top)

  async def _alive(self, opened: Any) -> str:
    await self._ask(opened, self._dialect.alive())
    return self._servers.every[0].url

  async def _ids(self, opened: Any) -> str:
    drawn = await self._draw(opened)
    return f'{len(drawn.ids)} tokens'

  async def _limit(self, opened: Any) -> str:
    await self._draw(opened, limit=1)  # more, or less, is no answer
    return '1 of 1'

  async def _ends(self, opened: Any) -> str:
    whole = await self._draw(opened, temperature=0.0)
    end = int(whole.ids[2])
    place = whole.ids.tolist().index(end)
    cut = await self._draw(opened, temperature=0.0, ends=(end,))
    if cut.finish != protocol.ENDED or len(cut.ids) != place + 1:
      raise _Failed(
        f'{len(cut.ids)} tokens, though an end token stands at place {place}, '
        'and belongs to a completion'
      )
    return 'an end token ends a completion, and belongs to it'

  async def _scores(self, opened: Any) -> str:
    drawn = await self._draw(opened, seed=2)
    text = [*_PROMPT, *drawn.ids.tolist()]
    logp, *_ = await self._score(opened, text)
    gap = float(np.abs(logp[-len(drawn.ids) :] - drawn.logp).mean())
    if not gap <= _MOST_GAP:
      raise _Failed(
        f'they differ by {gap:.3g} nats from those of the same text as a '
        'prompt; start the server without top-k, top-p and penalties of its own'
      )
    return f'{gap:.2g} nats from those of the same text as a prompt'

  async def _temperature(self, opened: Any) -> str:
    drawn = [await self._draw(opened, seed, 2.0) for seed in range(4)]
    at_two = np.concatenate([one.logp for one in drawn])
    at_one = []
    for one in drawn:
      logp, *_ = await self._score(opened, [*_PROMPT, *one.ids.tolist()])
      at_one.append(logp[-len(one.ids) :])
    gap = float(np.abs(np.concatenate(at_one) - at_two).mean())
    if gap < _MOST_GAP:
      raise _Noted(
        f'at temperature 2 they are those at 1 ({gap:.2g} nats), so only runs '
        'at 1 can learn from them; start vLLM with '
        '--logprobs-mode=processed_logprobs, and SGLang without '
        'SGLANG_RETURN_ORIGINAL_LOGPROB'
      )
    return f'at 2 they differ by {gap:.2g} nats from those at 1'

  async def _greedy(self, opened: Any) -> str:
    drawn = await self._draw(opened, temperature=0.0)
    text = [*_PROMPT, *drawn.ids.tolist()]
    _, likeliest, logp = await self._score(opened, text, 2)
    number = len(drawn.ids)
    other = likeliest[-number:, 0] != drawn.ids
    # What is as likely as the likeliest may be taken in its place.
    close = np.diff(-logp[-number:], axis=1)[:, 0] < _MOST_GAP
    if (other & ~close).any():
      raise _Failed(f'{int(other.sum())} of {number} are not')
    return f'{number - int(other.sum())} of {number}'

  async def _seeds(self, opened: Any) -> str:
    first, again, other = [
      await self._draw(opened, seed) for seed in (11, 11, 12)
    ]
    if np.array_equal(first.ids, other.ids):
      raise _Failed(
        'two seeds draw the same, so a group would have equal completions; '
        'start SGLang without --enable-deterministic-inference, or in a '
        'release that reads sampling_seed'
      )
    if not np.array_equal(first.ids, again.ids):
      raise _Noted('one seed draws different tokens, so runs differ')
    return 'one seed draws the same again, and another one something else'

  async def _many(self, opened: Any) -> str:
    found = await asyncio.gather(
      *(self._draw(opened, seed) for seed in range(_AT_ONCE))
    )
    different = len({one.ids.tobytes() for one in found})
    return f'{different} are different'

  async def _unknown(self, opened: Any) -> str:
    try:
      drawn = await self._draw(opened, policy='grpo_jax-unknown')
    except http_client.NotAnswered as error:
      if error.status is not None and error.status < 500:
        return str(error)[:60]
      raise
    except dialects.Unusable:
      return 'by the name in its answer'
    if drawn.spans[0][0] != 'grpo_jax-unknown':
      return 'by the name in its answer'
    raise _Failed(
      'it answers for a policy that it does not have, so a lost adapter would '
      'not be noticed'
    )

  async def _versions(self, opened: Any) -> str:
    try:
      drawn = await self._draw(opened, dialect=self._versioned)
    except dialects.Unusable as error:
      raise _Noted(
        f'{error}: runs with adapters need none, but the weights of others '
        'cannot be told apart'
      ) from error
    return ', '.join(name for name, _ in drawn.spans)

  async def _likeliest(self, opened: Any) -> str:
    try:
      _, ids, logp = await self._score(opened, _PROMPT, 3)
    except (dialects.Unusable, http_client.NotAnswered) as error:
      raise _Noted(f'{error}: it cannot be a teacher') from error
    if (np.diff(logp, axis=1) > 1e-3).any():
      raise _Failed('they are not in the order of their probability')
    return f'{ids.shape[1]} at each of {ids.shape[0]} places'
