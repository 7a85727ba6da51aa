"""Log-probabilities of known tokens, by servers of others."""

import asyncio
from collections.abc import Sequence

from grpo_jax.engines.http import dialects
from grpo_jax.engines.http import servers as servers_lib
from grpo_jax.engines.scoring import Known


class TextScores:
  """Scores texts at temperature 1, as servers do whatever is asked.

  Args:
    servers: They score.
    dialect: How they are asked.
    policy: The name of the adapter that scores; '': the model itself.
    top: How many of the likeliest tokens are wanted in each place.
  """

  def __init__(
    self,
    servers: servers_lib.Servers,
    dialect: dialects.Dialect,
    policy: str = '',
    top: int = 0,
  ):
    self._servers, self._dialect, self._policy = servers, dialect, policy
    self._top = top

  def __call__(self, texts: Sequence[Sequence[int]]) -> list[Known]:
    """What is known of each text.

    Raises:
      Away: No server gives them.
    """
    every = self._servers.every

    async def score(opened, server, ids):
      call = self._dialect.score(ids, self._top, self._policy)
      answer = await self._servers.ask(opened, server, call)
      return Known(*self._dialect.scored(answer, ids, self._top))

    async def score_all(opened):
      return await asyncio.gather(
        *(
          self._servers.by_any(
            opened,
            lambda opened, server, ids=ids: score(opened, server, ids),
            'the scores of a text',
            every[number % len(every)],
          )
          for number, ids in enumerate(texts)
        )
      )

    return self._servers.run(score_all)
