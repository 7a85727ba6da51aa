"""The engine protocol, and our engine: host arrays in, host arrays out."""

import bisect
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import keys
from grpo_jax import layout
from grpo_jax import sharding
from grpo_jax.sampling import _sampler
from grpo_jax.sampling._choose import Sampling

ENDED, TRUNCATED, STOPPED = 0, 1, 2  # by end token, length limit, stop string


class Requests(NamedTuple):
  """What to sample. Ids, never text: nothing is encoded twice."""

  prompts: Sequence[Sequence[int]]  # P lists of ids
  index: Sequence[int]  # P global prompt counters
  group: int  # completions per prompt
  rollout: int  # which rollout this is, for the noise
  sampling: Sampling
  purpose: str = 'sample'  # noise of another purpose is independent


class Completions(NamedTuple):
  """What was sampled, as host arrays; zero past each completion's length."""

  tokens: np.ndarray  # i32[P,G,T], the end token included
  length: np.ndarray  # i32[P,G]
  logp: np.ndarray  # f32[P,G,T], under the policy, nats
  log_kept: np.ndarray  # f32[P,G,T], log of the mass the filters left
  version: np.ndarray  # i32[P,G,T], the policy version that drew each token
  finish: np.ndarray  # i32[P,G], ENDED, TRUNCATED or STOPPED
  entropy: np.ndarray | None = None  # f32[P,G,T], nats; None: not known


class Engine(Protocol):
  """Anything that samples: ours, or an adapter to another."""

  def load(self, params: Any, version: int) -> None:
    """Takes the learner's parameters, whose version this is."""
    ...

  def generate(self, requests: Requests) -> Completions:
    """Samples; see `Requests` and `Completions`."""
    ...


@dataclasses.dataclass
class LocalEngine:
  """Samples with the model's own parameters on the learner's devices.

  Attributes:
    model: Anything with the model protocol.
    seed: The run's seed.
    prompt_buckets: Allowed prompt widths, tokens.
    completion_buckets: Allowed buffer lengths, tokens.
    max_rows: Most rows decoded at once; more are done in turns.
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
    number = len(requests.prompts)
    shards = 1 if self.mesh is None else sharding.row_shards(self.mesh)
    turn = min(max(1, self.max_rows // requests.group), number)
    turn = math.ceil(turn / shards) * shards
    parts = []
    for start in range(0, number, turn):
      part = slice(start, start + turn)
      parts.append(
        self._generate_turn(
          requests._replace(
            prompts=requests.prompts[part], index=requests.index[part]
          ),
          turn,
        )
      )
    whole = Completions(*(np.concatenate(x) for x in zip(*parts, strict=True)))
    if requests.sampling.stop_strings:
      return self._stop_at_strings(whole, requests.sampling.stop_strings)
    return whole

  def stream(
    self, requests: Requests, every_tokens: int = 1
  ) -> Iterator[Completions]:
    """Samples like `generate`, and tells how far it has come.

    Args:
      requests: All decoded at once, whatever `max_rows` says.
      every_tokens: Tokens between two reports.

    Yields:
      The completions so far; the last are those that `generate` returns. A
      completion that goes on says TRUNCATED.
    """
    number, stops = len(requests.prompts), requests.sampling.stop_strings
    shards = 1 if self.mesh is None else sharding.row_shards(self.mesh)
    turn = math.ceil(number / shards) * shards
    sampler, prompts = self._prepare_turn(requests, turn)
    state = _sampler.begin(sampler, self._params, prompts)
    going, step = True, 1
    while going:
      so_far = self._completions(jax.device_get(state), sampler, number)
      if stops:
        so_far = self._stop_at_strings(so_far, stops)
      yield so_far
      unfinished = np.any(so_far.finish == TRUNCATED)
      going = unfinished and step < requests.sampling.max_tokens
      step = min(step + every_tokens, requests.sampling.max_tokens)
      if going:
        until = jnp.asarray(step, jnp.int32)
        state = _sampler.advance(sampler, self._params, prompts, state, until)

  def _generate_turn(self, requests: Requests, turn: int) -> Completions:
    """At most `turn` prompts, padded to that many with some that have ended."""
    sampler, prompts = self._prepare_turn(requests, turn)
    state = jax.device_get(_sampler.generate(sampler, self._params, prompts))
    return self._completions(state, sampler, len(requests.prompts))

  def _prepare_turn(self, requests: Requests, turn: int):
    """The sampler and its `Prompts` of one turn."""
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
    tokens = np.zeros((turn, width), np.int32)
    for row, prompt in enumerate(requests.prompts):
      tokens[row, : len(prompt)] = prompt

    def pad(values, filler):
      missing = (0, turn - number)
      return np.pad(
        np.asarray(values, np.int32), missing, constant_values=filler
      )

    rows = {
      'tokens': tokens,
      'length': pad(length, 1),
      'index': pad(requests.index, -1),
    }
    if self.mesh is not None:
      rows = jax.device_put(rows, sharding.rows(self.mesh))
    prompts = _sampler.Prompts(
      **rows,
      key=keys.key(self.seed, requests.purpose, requests.rollout),
      max_tokens=jnp.asarray(sampling.max_tokens, jnp.int32),
    )
    # max_tokens and stop strings act outside the compiled program.
    static = dataclasses.replace(sampling, max_tokens=buffer, stop_strings=())
    sampler = _sampler.Sampler(
      self.model, static, requests.group, buffer, self.mesh
    )
    return sampler, prompts

  def _completions(
    self, state: Any, sampler: _sampler.Sampler, number: int
  ) -> Completions:
    """The first `number` groups of a `SamplingState` on the host."""
    shape = (-1, sampler.group)
    tokens, logp, log_kept, entropy = (
      x.reshape(*shape, sampler.buffer_tokens)[:number]
      for x in (state.tokens, state.logp, state.log_kept, state.entropy)
    )
    finish = np.where(state.ended, ENDED, TRUNCATED).reshape(shape)[:number]
    return Completions(
      tokens=tokens,
      length=state.length.reshape(shape)[:number],
      logp=logp,
      log_kept=log_kept,
      version=np.full(tokens.shape, self._version, np.int32),
      finish=finish.astype(np.int32),
      entropy=entropy,
    )

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
