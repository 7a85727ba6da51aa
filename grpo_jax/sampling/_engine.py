"""Our engine: samples with the learner's parameters, on its devices."""

import bisect
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from grpo_jax import keys
from grpo_jax import layout
from grpo_jax import sharding
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
  """Samples with the model's own parameters on the learner's devices.

  A prompt is read once for its group. Rows whose completions have ended are
  given to prompts that wait, or dropped; what is drawn does not depend on it.

  Attributes:
    model: Anything with the model protocol.
    seed: The run's seed.
    prompt_buckets: Allowed prompt widths, tokens.
    completion_buckets: Allowed buffer lengths, tokens. The caches begin with
      room for the shortest and grow.
    max_rows: Most rows decoded at once; more wait.
    decode: ids -> text, needed for stop strings only.
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
    if self._prepare is None:
      self._prepare = _sampler.prepare_params(self.model, params, self.mesh)
    self._params = None  # frees the old ones before the new are made
    self._params = self._prepare(params)
    self._version = version

  def generate(self, requests: Requests) -> Completions:
    """Samples `group` completions of every prompt; see `Engine`.

    Raises:
      ValueError: Nothing is loaded, a prompt is empty or too long, or stop
        strings come without `decode`.
    """
    *_, book = self._asked(requests).run()
    return self._completions(book, requests)

  def stream(
    self, requests: Requests, every_tokens: int = 1
  ) -> Iterator[Completions]:
    """Samples like `generate`, and tells how far it has come.

    Args:
      requests: See `generate`.
      every_tokens: Most tokens between two reports.

    Yields:
      The completions so far; the last are those that `generate` returns. A
      completion that goes on says TRUNCATED.
    """
    for book in self._asked(requests).run(every_tokens):
      so_far = self._completions(book, requests)
      yield so_far
      if np.all((so_far.finish != TRUNCATED) & (so_far.length > 0)):
        return  # stop strings are known to the host only

  def _asked(self, requests: Requests) -> _generation.Generation:
    """What `requests` ask for, ready to run."""
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
    at_once = math.ceil(at_once / shards) * shards
    return _generation.Generation(
      # max_tokens and stop strings act outside the compiled programs.
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
        keys.key(self.seed, requests.purpose, requests.rollout),
      ),
      sampling.max_tokens,
      sorted(size for size in set(self.completion_buckets) if size <= buffer),
    )

  def _completions(
    self, book: _generation.Book, requests: Requests
  ) -> Completions:
    """What the book says, in the protocol's words."""
    shape = len(requests.prompts), requests.group
    drawn = jax.tree.map(lambda x: x.reshape(*shape, -1).copy(), book.drawn)
    length = book.length.reshape(shape).copy()
    last = np.take_along_axis(
      drawn.token, np.maximum(length - 1, 0)[..., None], axis=-1
    )[..., 0]
    ended = np.isin(last, requests.sampling.eos_ids) & (length > 0)
    whole = Completions(
      tokens=drawn.token,
      length=length,
      logp=drawn.logp,
      log_kept=drawn.log_kept,
      version=np.full(drawn.token.shape, self._version, np.int32),
      finish=np.where(ended, ENDED, TRUNCATED).astype(np.int32),
      entropy=drawn.entropy,
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

      def stopped(count, ids=ids):  # once True, True for any longer prefix
        return any(stop in decode(ids[:count]) for stop in stops)

      if stopped(len(ids)):
        counts = range(1, len(ids) + 1)
        length[place] = counts[bisect.bisect_left(counts, True, key=stopped)]
        finish[place] = STOPPED
    inside = np.arange(whole.tokens.shape[-1]) < length[..., None]
    cut = {
      name: np.where(inside, getattr(whole, name), 0)
      for name in ('tokens', 'logp', 'log_kept', 'entropy')
    }
    return whole._replace(**cut, length=length, finish=finish)
