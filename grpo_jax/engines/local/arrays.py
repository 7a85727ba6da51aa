"""Requests as arrays for the device, and what was drawn as `Sampled`.

Every engine of this package draws a `Batch` at a time: it begins with `prompts`
and ends with `sampled`.
"""

import bisect
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.engines.local import next_token
from grpo_jax.engines.local import sampler
from grpo_jax.engines.protocol import ENDED
from grpo_jax.engines.protocol import GOING
from grpo_jax.engines.protocol import STOPPED
from grpo_jax.engines.protocol import TRUNCATED
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampled
from grpo_jax.engines.protocol import Sampling
from grpo_jax.models import layout

Decode = Callable[[Any], str]


class Batch(NamedTuple):
  """Requests that are drawn together: `P` prompts with `G` completions each.

  Attributes:
    numbers: What `submit` has returned for each.
    requests: With equally many completions and the same end tokens.
  """

  numbers: Sequence[int]
  requests: Sequence[Request]

  @property
  def group(self) -> int:
    """Completions per prompt, `G`."""
    return len(self.requests[0].keys)

  def asked(self, completion: int) -> tuple[int, Request, int]:
    """What was asked for by the completion p * G + g; see `sampled`."""
    p, g = divmod(completion, self.group)
    return self.numbers[p], self.requests[p], g

  @property
  def limit(self) -> int:
    """The most tokens that a completion may have."""
    return max(one.limit for one in self.requests)

  def part(self, first: int, end: int) -> 'Batch':
    """Some of the requests."""
    return Batch(self.numbers[first:end], self.requests[first:end])

  def choices(self, vocab_size: int) -> next_token.Choices:
    """Which ways of choosing a token the requests need."""
    samplings = [one.sampling for one in self.requests]
    return next_token.choices_of(samplings, vocab_size)


@dataclasses.dataclass
class Held:
  """The parameters by which something is drawn; others may take their place.

  Attributes:
    now: What `sampler_params` returned, and the version of the policy.
  """

  now: tuple[Any, int]


class Submitted:
  """The requests that an engine has not begun to draw."""

  def __init__(self):
    self._count, self._waiting = 0, {}

  def add(self, request: Request) -> int:
    """Takes a request, and returns its number."""
    number = self.number()
    self._waiting[number] = request
    return number

  def number(self) -> int:
    """The number of a request that waits elsewhere."""
    self._count += 1
    return self._count

  def take(self) -> Batch | None:
    """The first request, and those that can be drawn with it; None: no more."""

    def kind(request):
      return len(request.keys), request.sampling.eos_ids

    if not self._waiting:
      return None
    first = kind(next(iter(self._waiting.values())))
    numbers = [n for n, one in self._waiting.items() if kind(one) == first]
    return Batch(numbers, [self._waiting.pop(n) for n in numbers])

  def rounds(
    self, draw: Callable[[Batch], Iterator[list[Sampled]]]
  ) -> Generator[list[Sampled], None, None]:
    """What `draw` yields of one batch after the other, until nothing waits.

    Whoever leaves it gives up what waits, also before the first turn.
    """

    def turns():
      try:
        yield []
        while batch := self.take():
          yield from draw(batch)
      finally:
        self._waiting.clear()

    begun = turns()
    next(begun)  # one that has not begun would clear nothing when it is closed
    return begun


def prompts(
  batch: Batch, buckets: Sequence[int], vocab_size: int
) -> sampler.Prompts:
  """The prompts of a batch, padded on the right to one of the buckets.

  Args:
    batch: See `Batch`.
    buckets: Allowed prompt widths, tokens.
    vocab_size: Of the model.

  Returns:
    `Prompts` on the host.

  Raises:
    ValueError: A prompt is empty, or longer than the largest bucket.
  """
  ids, keys, limits, samplings, names = (
    [getattr(one, name) for one in batch.requests]
    for name in ('ids', 'keys', 'limit', 'sampling', 'name')
  )
  length = np.array([len(prompt) for prompt in ids], np.int32)
  if not length.all():
    name = names[int(np.argmin(length))]
    raise ValueError(
      f'The request for {name} is empty; give at least one token.'
    )
  longest = int(np.argmax(length))
  width = layout.bucket(int(length[longest]), buckets, names[longest])
  tokens = np.zeros((len(length), width), np.int32)
  for row, prompt in enumerate(ids):
    tokens[row, : len(prompt)] = prompt
  return sampler.Prompts(
    tokens,
    length,
    np.stack(keys),
    next_token.numbers_of(samplings, limits, vocab_size),
  )


def padded(
  prompts: sampler.Prompts, first: int, taken: int, number: int
) -> sampler.Prompts:
  """Some of the prompts, filled up by padding, which draws nothing.

  Args:
    prompts: On the host.
    first: The first of them.
    taken: How many of them.
    number: How many there are with the padding.
  """

  def part(x):
    widths = [(0, number - taken)] + [(0, 0)] * (x.ndim - 1)
    return np.pad(x[first : first + taken], widths)

  some = jax.tree.map(part, prompts)
  some.length[taken:] = 1  # a prompt needs a last token
  return some


def sampled(
  asked: tuple[int, Request, int],
  drawn: sampler.Drawn,
  version: np.ndarray,
  decode: Decode | None,
  goes_on: bool = False,
  **known: Any,
) -> Sampled:
  """A completion, or what there is of it.

  Args:
    asked: The request's number, the request, and which of its completions.
    drawn: Arrays [t] on the host, which are copied; t is 0 if this process does
      not know it.
    version: i32[t], of the policy that has drawn each token.
    decode: Turns ids into text; needed for stop strings only.
    goes_on: Whether more is drawn, unless it has come to a stop string.
    **known: Other attributes of `Sampled`.

  Raises:
    ValueError: There are stop strings and no `decode`.
  """
  number, request, place = asked
  count, finish = end_of(drawn.token, request.sampling, decode)
  if goes_on and finish != STOPPED:
    finish = GOING
  one = jax.tree.map(lambda x: np.array(x[:count]), drawn)
  return Sampled(
    request=number,
    number=place,
    ids=one.token,
    logp=one.logp,
    log_kept=one.log_kept,
    version=np.array(version[:count], np.int32),
    finish=finish,
    entropy=one.entropy,
    routing=one.routing,
    **known,
  )


def end_of(
  ids: Any, sampling: Sampling, decode: Decode | None
) -> tuple[int, int]:
  """How many tokens of a whole completion count, and its `finish`."""
  count = _stopped_after(ids, sampling.stop_strings, decode)
  if count:
    return count, STOPPED
  ends = len(ids) > 0 and ids[-1] in sampling.eos_ids
  return len(ids), ENDED if ends else TRUNCATED


def _stopped_after(
  ids: Any, stops: Sequence[str], decode: Decode | None
) -> int:
  """After how many tokens a completion has its first stop string; 0: never.

  Args:
    ids: i32[n], the completion.
    stops: The stop strings.
    decode: Turns ids into text.

  Raises:
    ValueError: There are stop strings and no `decode`.
  """
  if not stops:
    return 0
  if decode is None:
    raise ValueError(
      f'Stop strings {stops} need an engine with decode=..., a function '
      'from ids to text.'
    )

  def stopped(count: int) -> bool:
    return any(stop in decode(ids[:count]) for stop in stops)

  if not len(ids) or not stopped(len(ids)):
    return 0
  # A prefix that holds a stop string is part of every longer prefix, so
  # bisection finds the shortest one in a few decodings.
  counts = range(1, len(ids) + 1)
  return counts[bisect.bisect_left(counts, True, key=stopped)]
