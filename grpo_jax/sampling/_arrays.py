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
from grpo_jax.models import layout
from grpo_jax.sampling import _sampler
from grpo_jax.sampling._protocol import ENDED
from grpo_jax.sampling._protocol import STOPPED
from grpo_jax.sampling._protocol import TRUNCATED
from grpo_jax.sampling._protocol import Completions
from grpo_jax.sampling._protocol import Requests


def prompts(
  requests: Requests, buckets: Sequence[int], seed: int
) -> _sampler.Prompts:
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
  return _sampler.Prompts(
    tokens,
    length.astype(np.int32),
    np.asarray(requests.index, np.int32),
    random_keys.key(seed, requests.purpose, requests.rollout),
  )


def completions(
  drawn: _sampler.Drawn,
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


def _stop_at_strings(whole: Completions, stops, decode) -> Completions:
  """Cuts each completion after the token that completes a stop string."""
  if decode is None:
    raise ValueError(
      f'Stop strings {stops} need an engine with decode=..., a function '
      'from ids to text.'
    )
  length, finish = whole.length.copy(), whole.finish.copy()

  for place in np.ndindex(length.shape):
    if place[0] not in whole.known:
      continue
    ids = whole.tokens[place][: length[place]]

    # `ids` is a default, which is bound now and not when it is called.
    def stopped(count, ids=ids):
      return any(stop in decode(ids[:count]) for stop in stops)

    if stopped(len(ids)):
      # A prefix that holds a stop string is part of every longer prefix, so
      # bisection finds the shortest one in a few decodings.
      counts = range(1, len(ids) + 1)
      length[place] = counts[bisect.bisect_left(counts, True, key=stopped)]
      finish[place] = STOPPED
  inside = np.arange(whole.tokens.shape[-1]) < length[..., None]
  cut = {
    name: np.where(inside, getattr(whole, name), 0)
    for name in ('tokens', 'logp', 'log_kept', 'entropy', 'routing')
    if getattr(whole, name) is not None
  }
  return whole._replace(**cut, length=length, finish=finish)
