"""Requests as arrays for the device, and what was drawn as `Completions`.

Every engine of this package begins with `prompts` and ends with `completions`.
"""

import bisect
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax import random_keys
from grpo_jax.engines.local import sampler
from grpo_jax.engines.local.next_token import Sampling
from grpo_jax.engines.protocol import ENDED
from grpo_jax.engines.protocol import STOPPED
from grpo_jax.engines.protocol import TRUNCATED
from grpo_jax.engines.protocol import Completions
from grpo_jax.engines.protocol import Requests
from grpo_jax.models import layout


def prompts(
  requests: Requests, buckets: Sequence[int], seed: int
) -> sampler.Prompts:
  """The prompts of a request, padded on the right to one of the buckets.

  Args:
    requests: See `Requests`.
    buckets: Allowed prompt widths, tokens.
    seed: The run's seed.

  Returns:
    `Prompts` on the host.

  Raises:
    ValueError: A prompt is empty, or longer than the largest bucket.
  """
  length = np.array([len(prompt) for prompt in requests.prompts])
  if not length.all():
    raise ValueError(
      f'Prompt {int(np.argmin(length))} of this request is empty; give at '
      'least one token.'
    )
  longest = int(np.argmax(length))
  width = layout.bucket(
    length[longest], buckets, f'the prompt with index {requests.index[longest]}'
  )
  tokens = np.zeros((len(length), width), np.int32)
  for row, prompt in enumerate(requests.prompts):
    tokens[row, : len(prompt)] = prompt
  return sampler.Prompts(
    tokens,
    length.astype(np.int32),
    np.asarray(requests.index, np.int32),
    random_keys.key(seed, requests.purpose, requests.rollout),
  )


def completions(
  drawn: sampler.Drawn,
  length: np.ndarray,
  version: int,
  requests: Requests,
  decode: Callable[[Any], str] | None,
  holder: np.ndarray | None = None,
) -> Completions:
  """What has been drawn, in the order of the prompts.

  Args:
    drawn: Arrays [P*G,T] on the host, which are copied.
    length: i32[P*G], tokens of each completion.
    version: Of the policy.
    requests: What was asked for.
    decode: Turns ids into text; needed for stop strings only.
    holder: See `Completions`.

  Raises:
    ValueError: There are stop strings and no `decode`.
  """
  shape = len(requests.prompts), requests.group
  drawn = jax.tree.map(lambda x: x.reshape(*shape, -1).copy(), drawn)
  length = length.reshape(shape).copy()
  last = np.take_along_axis(
    drawn.token, np.maximum(length - 1, 0)[..., None], axis=-1
  )[..., 0]
  # A completion without tokens has no last one; 0 may be an end token's id.
  ended = np.isin(last, requests.sampling.eos_ids) & (length > 0)
  whole = Completions(
    tokens=np.asarray(drawn.token),
    length=length,
    logp=np.asarray(drawn.logp),
    log_kept=np.asarray(drawn.log_kept),
    version=np.full(drawn.token.shape, version, np.int32),
    finish=np.where(ended, ENDED, TRUNCATED).astype(np.int32),
    entropy=np.asarray(drawn.entropy),
    routing=None if drawn.routing is None else np.asarray(drawn.routing),
    holder=holder,
  )
  if requests.sampling.stop_strings:
    return _stop_at_strings(whole, requests.sampling.stop_strings, decode)
  return whole


def end_of(
  ids: np.ndarray, sampling: Sampling, decode: Callable[[Any], str] | None
) -> tuple[int, int]:
  """How many tokens of a whole completion count, and its `finish`."""
  count = _stopped_after(ids, sampling.stop_strings, decode)
  if count:
    return count, STOPPED
  return len(ids), ENDED if ids[-1] in sampling.eos_ids else TRUNCATED


def _stopped_after(
  ids: np.ndarray, stops: Sequence[str], decode: Callable[[Any], str] | None
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

  if not stopped(len(ids)):
    return 0
  # A prefix that holds a stop string is part of every longer prefix, so
  # bisection finds the shortest one in a few decodings.
  counts = range(1, len(ids) + 1)
  return counts[bisect.bisect_left(counts, True, key=stopped)]


def _stop_at_strings(whole: Completions, stops, decode) -> Completions:
  """Cuts each completion after the token that completes a stop string."""
  length, finish = whole.length.copy(), whole.finish.copy()

  for place in np.ndindex(length.shape):
    if place[0] in whole.known:
      ids = whole.tokens[place][: length[place]]
      if count := _stopped_after(ids, stops, decode):
        length[place], finish[place] = count, STOPPED
  inside = np.arange(whole.tokens.shape[-1]) < length[..., None]
  cut = {
    name: np.where(inside, getattr(whole, name), 0)
    for name in ('tokens', 'logp', 'log_kept', 'entropy', 'routing')
    if getattr(whole, name) is not None
  }
  return whole._replace(**cut, length=length, finish=finish)
