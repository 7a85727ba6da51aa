"""How engines of others are asked: bodies of requests, and what answers mean.

A completion is asked for by ids and answered by ids: what was sampled is what
is trained on. The log-probability of a token is that of its id, wherever the
answer has it. What an answer lacks, or says twice in different ways, is an
`Unusable`, and never guessed.

vLLM: https://docs.vllm.ai/en/latest/serving/openai_compatible_server/ and, for
weights, https://docs.vllm.ai/en/latest/features/lora/ and .../training/.
SGLang: https://docs.sglang.io/basic_usage/native_api.html and
https://docs.sglang.io/docs/advanced_features/sglang_for_rl.html.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np

from grpo_jax.engines import protocol
from grpo_jax.engines.protocol import Sampling

_LEAST = -9000.0  # nats


class Unusable(Exception):
  """An answer that nothing can be learned from; the message says why."""


class GivenUp(Unusable):
  """The server has given a completion up, and may draw it when asked again."""


class Completion(NamedTuple):
  """One completion that is asked for.

  Attributes:
    ids: Of the prompt.
    seed: From -2**63 to 2**63 - 1, of its random numbers.
    limit: The most tokens.
    sampling: How they are drawn.
    policy: The name by which the server knows the policy.
  """

  ids: Sequence[int]
  seed: int
  limit: int
  sampling: Sampling
  policy: str


class Drawn(NamedTuple):
  """What an answer says: t tokens.

  Attributes:
    ids: i32[t].
    logp: f32[t], log-probability of each under the distribution that drew it.
    finish: ENDED, TRUNCATED or STOPPED of the engine protocol.
    spans: The policies that drew, as the answer names them, each with the place
      behind its last token, ascending; the last is t.
  """

  ids: np.ndarray
  logp: np.ndarray
  finish: int
  spans: tuple[tuple[str, int], ...]


class Call(NamedTuple):
  """A request to a server.

  Attributes:
    path: Behind the server's address.
    body: Posted as JSON; None: the request is a GET.
    fine: Words of an error that is none: what was asked for is so already.
    wanted: A field of the answer that must be true; '': there is none.
    needs: With what a server must be started that knows the path; '': any does.
  """

  path: str
  body: Mapping[str, Any] | None = None
  fine: str = ''
  wanted: str = ''
  needs: str = ''


MODELS = Call('/v1/models')
"""Asks for the models and adapters that a server has; see `names`."""


class Dialect(Protocol):
  """What one kind of server is asked, and how its answers are read."""

  name: str

  def complete(self, asked: Completion) -> Call:
    """Asks for a completion."""
    ...

  def drawn(self, answer: Any, asked: Completion) -> Drawn:
    """Reads the answer to `complete`.

    Raises:
      Unusable: It is no such answer, or lacks something.
    """
    ...

  def score(self, ids: Sequence[int], top: int, policy: str) -> Call:
    """Asks for the log-probabilities of known tokens, at temperature 1.

    Args:
      ids: Of a text.
      top: How many of the likeliest tokens are wanted in each place.
      policy: As of `Completion`.
    """
    ...

  def scored(
    self, answer: Any, ids: Sequence[int], top: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads the answer to `score`.

    Returns:
      f32[n-1], those of each token but the first; and i32[n-1,K] and
      f32[n-1,K], the likeliest.

    Raises:
      Unusable: It is no such answer, or lacks something.
    """
    ...

  def load_adapter(self, policy: str, folder: str) -> Sequence[Call]:
    """Makes an adapter known by a name, and leaves others as they are."""
    ...

  def unload_adapter(self, policy: str) -> Sequence[Call]:
    """Forgets an adapter."""
    ...

  def load_weights(self, policy: str, folder: str) -> Sequence[Call]:
    """Replaces all weights; what is being drawn goes on, or is given up."""
    ...

  def alive(self) -> Call:
    """Is answered by a server that can draw."""
    ...


def key_to_seed(key: np.ndarray) -> int:
  """The seed that has the bits of a threefry key u32[2].

  >>> key_to_seed(np.array([1, 2], np.uint32))
  4294967298
  """
  value = (int(key[0]) << 32) | int(key[1])
  seed = value - (value >> 63 << 64)
  return -2 if seed == -1 else seed  # vLLM takes -1 for no seed


def seed_to_key(seed: int) -> np.ndarray:
  """The key u32[2] that `key_to_seed` has made a seed of.

  >>> seed_to_key(key_to_seed(np.array([2**32 - 1, 7], np.uint32)))
  array([4294967295,          7], dtype=uint32)
  """
  value = seed % 2**64
  return np.array([value >> 32, value % 2**32], np.uint32)


def field(answer: Any, *path: str | int) -> Any:
  """A part of an answer.

  Raises:
    Unusable: There is none.
  """
  found = answer
  for one in path:
    try:
      found = found[one]
    except (KeyError, IndexError, TypeError):
      where = '.'.join(map(str, path))
      shown = f', but with {answer!r:.80}' if isinstance(answer, str) else ''
      raise Unusable(f'an answer without {where}{shown}') from None
  return found


def names(answer: Any) -> list[str]:
  """The names of the models and adapters in the answer to `MODELS`.

  Raises:
    Unusable: It is no such answer.
  """
  listed = field(answer, 'data')
  if not isinstance(listed, list):
    raise Unusable('an answer without a list of models')
  return [str(field(one, 'id')) for one in listed]


def tokens(
  ids: Any, logp: Any, asked: Completion
) -> tuple[np.ndarray, np.ndarray]:
  """The ids and log-probabilities of an answer, checked.

  Raises:
    Unusable: They are no such lists, not as long as each other, longer than
      what was asked for, or no log-probabilities.
  """
  if not isinstance(ids, list) or not ids or not all(map(is_id, ids)):
    raise Unusable('an answer without ids of tokens')
  if len(ids) > asked.limit:
    raise Unusable(
      f'{len(ids)} tokens, though at most {asked.limit} were asked for'
    )
  if not isinstance(logp, list) or len(logp) != len(ids):
    number = len(logp) if isinstance(logp, list) else 'no'
    raise Unusable(f'{len(ids)} tokens and {number} log-probabilities')
  return np.array(ids, np.int32), log_probabilities(logp)


def is_id(value: Any) -> bool:
  """Whether a value may be the id of a token."""
  return type(value) is int and 0 <= value < 2**31  # no bool


def log_probabilities(values: Sequence[Any]) -> np.ndarray:
  """f32[t]; raises `Unusable` for what is none."""
  for value in values:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # What is impossible is said to have -9999 or less: JSON has no infinity.
    # Compared first: not every integer is a float.
    if not number or not _LEAST < value < 1e-3:
      raise Unusable(f'{value!r:.40} as the log-probability of a token')
  return np.minimum(np.array(values, np.float32), 0)


def end(ids: np.ndarray, is_cut: bool, by: Any, asked: Completion) -> int:
  """How a completion has finished.

  Args:
    ids: Of the completion.
    is_cut: Whether the server says that it is as long as it may be.
    by: What has ended it, as the server says: maybe a stop string.
    asked: What was asked for.

  Raises:
    Unusable: It has stopped for no reason that is known, or has not where it
      should have.
  """
  ends = np.isin(ids, asked.sampling.eos_ids)
  if ends[:-1].any():
    raise Unusable('a completion that goes on behind an end token')
  if ends[-1]:
    return protocol.ENDED
  if is_cut:
    if len(ids) < asked.limit:
      raise Unusable(
        f'{len(ids)} tokens, cut at a limit, though {asked.limit} were asked '
        'for; give the server a longer context'
      )
    return protocol.TRUNCATED
  if isinstance(by, str) and by in asked.sampling.stop_strings:
    return protocol.STOPPED
  raise Unusable(
    f'a completion that ends with the id {int(ids[-1])}, which is no end token'
  )


def spans(values: Any, number: int) -> tuple[tuple[str, int], ...]:
  """The policies of the tokens of an answer, as `Drawn` has them.

  Args:
    values: A list of {'version', 'start', 'end'}.
    number: How many tokens there are.

  Raises:
    Unusable: It says nothing of some of them.
  """
  if not isinstance(values, list):
    raise Unusable(
      'an answer that does not name the version of the weights, as newer '
      'releases of the server do'
    )
  found, begin = [], 0
  for one in values:
    name, start, end = (field(one, x) for x in ('version', 'start', 'end'))
    if start != begin or type(end) is not int or end < begin:
      raise Unusable(
        f'versions of the weights that do not join at {start!r:.40}'
      )
    if end > begin:
      found.append((str(name), end))
    begin = end
  if begin != number:
    raise Unusable(f'versions of the weights of {begin} of {number} tokens')
  return tuple(found)


PLAIN = {
  'top_p': 1.0, 'min_p': 0.0, 'repetition_penalty': 1.0,
  'presence_penalty': 0.0, 'frequency_penalty': 0.0,
}  # fmt: skip
"""What changes the distribution where it is left out: servers take some of it
from a file beside the model."""
