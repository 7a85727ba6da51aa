"""The engine of this package: samples on the learner's own devices."""

import bisect
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from grpo_jax import random_keys
from grpo_jax import sharding
from grpo_jax.models import layout
from grpo_jax.sampling import _generation
from grpo_jax.sampling import _sampler
from grpo_jax.sampling import _schedule
from grpo_jax.sampling._protocol import ENDED
from grpo_jax.sampling._protocol import STOPPED
from grpo_jax.sampling._protocol import TRUNCATED
from grpo_jax.sampling._protocol import Completions
from grpo_jax.sampling._protocol import Requests


@dataclasses.dataclass
class LocalEngine:
  """Samples with the model's own code, on the learner's devices.

  A prompt is read once for its whole group. When completions have ended, their
  rows are given to prompts that wait, or dropped. Which tokens are drawn does
  not depend on this: the random number of a token depends on the seed, the
  purpose, the rollout, the prompt's index, the completion and the position
  alone.

  Attributes:
    model: Anything with the model protocol; see `models.transformer`.
    seed: The run's seed.
    prompt_buckets: Allowed prompt widths, tokens.
    completion_buckets: Allowed lengths of the caches, tokens. A cache begins
      with the shortest and grows to the next when it is full.
    max_rows: How many completions to decode at once; further prompts wait. It
      is rounded down to whole groups, at least one, and then up to equally many
      groups on each data shard.
    decode: Turns ids into text; needed for stop strings only.
    mesh: The learner's mesh, over whose data shards the prompts are split; None
      for one device.
  """

  model: Any
  seed: int
  prompt_buckets: Sequence[int]
  completion_buckets: Sequence[int]
  max_rows: int = 4096
  decode: Callable[[Any], str] | None = None
  mesh: jax.sharding.Mesh | None = None

  def __post_init__(self):
    self._params, self._version, self._prepare = None, -1, None

  def load(self, params: Any, version: int) -> None:
    """Takes the learner's parameters; see `Engine`."""
    # Made from the first parameters, whose shapes all later ones share.
    if self._prepare is None:
      self._prepare = _sampler.prepare_params(self.model, params, self.mesh)
    self._params = None  # first, so that memory holds one set at a time
    self._params = self._prepare(params)
    self._version = version

  def unload(self) -> None:
    """Frees the engine's own copy of the parameters; see `Engine`."""
    self._params = None

  def generate(self, requests: Requests) -> Completions:
    """Samples `group` completions of every prompt; see `Engine`.

    Raises:
      ValueError: Nothing is loaded, a prompt is empty or too long, or stop
        strings are asked for without `decode`.
    """
    *_, so_far = self._asked(requests).run()
    return self._completions(so_far, requests)

  def stream(self, requests: Requests) -> Iterator[Completions]:
    """Samples like `generate`, and reports after every token.

    Args:
      requests: See `generate`.

    Yields:
      The completions so far; the last are those that `generate` returns. The
      `finish` of a completion that still goes on is TRUNCATED.
    """
    for drawn in self._asked(requests).run(every_tokens=1):
      so_far = self._completions(drawn, requests)
      yield so_far
      # The device knows nothing of stop strings and would go on.
      if np.all((so_far.finish != TRUNCATED) & (so_far.length > 0)):
        return

  def _asked(self, requests: Requests) -> _generation.Generation:
    """The generation that `requests` ask for, ready to run."""
    if self._params is None:
      raise ValueError('LocalEngine has no parameters yet; call load first.')
    sampling, number = requests.sampling, len(requests.prompts)
    length = np.array([len(prompt) for prompt in requests.prompts])
    if not length.all():
      raise ValueError(
        f'Prompt {int(np.argmin(length))} of this request is empty; give at '
        'least one token.'
      )
    longest = int(np.argmax(length))
    width = layout.bucket(
      length[longest],
      self.prompt_buckets,
      f'the prompt with index {requests.index[longest]}',
    )
    buffer = layout.bucket(
      sampling.max_tokens, self.completion_buckets, 'completion'
    )
    tokens = np.zeros((number, width), np.int32)
    for row, prompt in enumerate(requests.prompts):
      tokens[row, : len(prompt)] = prompt
    shards = 1 if self.mesh is None else sharding.row_shards(self.mesh)
    at_once = min(max(1, self.max_rows // requests.group), number)
    at_once = math.ceil(at_once / shards) * shards  # equally many on each shard
    return _generation.Generation(
      # The sampler is a static argument, so another value in it means another
      # compilation. The exact length limit is therefore passed as an array, and
      # stop strings are looked for on the host, in what was drawn.
      _sampler.Sampler(
        self.model,
        dataclasses.replace(sampling, max_tokens=buffer, stop_strings=()),
        requests.group,
        self.mesh,
      ),
      self._params,
      _schedule.Schedule(requests.group, at_once, width, shards),
      _sampler.Prompts(
        tokens,
        length.astype(np.int32),
        np.asarray(requests.index, np.int32),
        random_keys.key(self.seed, requests.purpose, requests.rollout),
      ),
      sampling.max_tokens,
      sorted(size for size in set(self.completion_buckets) if size <= buffer),
    )

  def _completions(
    self, so_far: _generation.CompletionsSoFar, requests: Requests
  ) -> Completions:
    """What has been drawn so far, as the protocol's `Completions`.

    The arrays are copies: a generation goes on writing into its own.
    """
    shape = len(requests.prompts), requests.group
    drawn = jax.tree.map(lambda x: x.reshape(*shape, -1).copy(), so_far.drawn)
    length = so_far.length.reshape(shape).copy()
    last = np.take_along_axis(
      drawn.token, np.maximum(length - 1, 0)[..., None], axis=-1
    )[..., 0]
    # A completion without tokens has no last one; 0 may be an end token's id.
    ended = np.isin(last, requests.sampling.eos_ids) & (length > 0)
    whole = Completions(
      tokens=drawn.token,
      length=length,
      logp=drawn.logp,
      log_kept=drawn.log_kept,
      version=np.full(drawn.token.shape, self._version, np.int32),
      finish=np.where(ended, ENDED, TRUNCATED).astype(np.int32),
      entropy=drawn.entropy,
      routing=drawn.routing,
    )
    if requests.sampling.stop_strings:
      return self._stop_at_strings(whole, requests.sampling.stop_strings)
    return whole

  def _stop_at_strings(self, whole: Completions, stops) -> Completions:
    """Cuts each completion after the token that completes a stop string."""
    if self.decode is None:
      raise ValueError(
        f'Stop strings {stops} need LocalEngine(decode=...), a function from '
        'ids to text.'
      )
    length, finish = whole.length.copy(), whole.finish.copy()
    decode = self.decode

    for place in np.ndindex(length.shape):
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
