"""The engine of this package: samples on the learner's own devices."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import generation
from grpo_jax.engines.local import lowered
from grpo_jax.engines.local import prepare
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.engines.local import schedule as schedule_lib
from grpo_jax.engines.local import side_by_side
from grpo_jax.engines.local.next_token import Sampling
from grpo_jax.engines.protocol import TRUNCATED
from grpo_jax.engines.protocol import Completions
from grpo_jax.engines.protocol import Requests
from grpo_jax.mesh import sharding
from grpo_jax.models import layout


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
    mesh: The sampler's mesh, over whose data shards the prompts are split; see
      `sharding.sampling_mesh`. None for one device.
    shares: With several processes, whether each returns the completions that
      its own devices have drawn, and no others; see `Completions.holder`.
    between: Called before every call of the devices; what it raises ends the
      generation. Several processes agree there whether to stop.
    cores: Into how many pieces a rollout may be divided that are drawn at once;
      see `side_by_side`. More than 1 is of use on a CPU alone.
    copies: Whether the engine copies all parameters that are loaded. If False,
      some are read where the learner has them: call `unload` before they are
      donated.
  """

  model: Any
  seed: int
  prompt_buckets: Sequence[int]
  completion_buckets: Sequence[int]
  max_rows: int = 4096
  decode: Callable[[Any], str] | None = None
  mesh: jax.sharding.Mesh | None = None
  between: Callable[[], None] = lambda: None
  shares: bool = False
  cores: int = 1
  copies: bool = True

  def __post_init__(self):
    self._params, self._version, self._prepare = None, -1, None

  def load(self, params: Any, version: int) -> None:
    """Takes the learner's parameters; see `Engine`."""
    # Made from the first parameters, whose shapes all later ones share.
    if self._prepare is None:
      self._prepare = prepare.Preparation(
        self.model, params, self.mesh, self.copies
      )
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
    so_far, parts = self._asked(requests, self.cores)
    told = np.zeros(len(so_far.ended), bool)
    for _ in side_by_side.run([part.run() for part in parts]):
      if requests.finished is not None:
        self._tell(requests, so_far, told)
    return self._completions(so_far, requests)

  def _tell(
    self,
    requests: Requests,
    so_far: generation.CompletionsSoFar,
    told: np.ndarray,
  ):
    """Tells of what has ended; `told` bool[P*G] says of what it was told."""
    assert requests.finished is not None
    new = so_far.ended & ~told
    told |= new
    if so_far.holder is not None:
      here = so_far.holder == jax.process_index()
      new &= np.repeat(here, requests.group)
    for place in np.flatnonzero(new).tolist():
      ids = np.asarray(so_far.drawn.token)[place, : so_far.length[place]]
      count, finish = arrays.end_of(ids, requests.sampling, self.decode)
      requests.finished(*divmod(place, requests.group), ids[:count], finish)

  def stream(self, requests: Requests) -> Iterator[Completions]:
    """Samples like `generate`, and reports after every token.

    Args:
      requests: See `generate`.

    Yields:
      The completions so far; the last are those that `generate` returns. The
      `finish` of a completion that still goes on is TRUNCATED.
    """
    _, (asked,) = self._asked(requests)
    for drawn in asked.run(every_tokens=1):
      so_far = self._completions(drawn, requests)
      yield so_far
      # The device knows nothing of stop strings and would go on.
      if np.all((so_far.finish != TRUNCATED) & (so_far.length > 0)):
        return

  def _pieces(self, params: Any, requests: Requests, cores: int) -> int:
    """Into how many pieces to divide the prompts of a request."""
    config, layers = self.model.config, jax.tree.leaves(params['layers'])
    head = config.vocab_size * config.width * layers[0].dtype.itemsize
    layers, group = sum(x.nbytes for x in layers), requests.group
    at_once = min(max(1, self.max_rows // group), len(requests.prompts))
    return side_by_side.pieces(cores, at_once, group, layers, head)

  def _asked(
    self, requests: Requests, cores: int = 1
  ) -> tuple[generation.CompletionsSoFar, list[generation.Generation]]:
    """What will have been drawn, and the generations that will draw it."""
    if self._params is None:
      raise ValueError('LocalEngine has no parameters yet; call load first.')
    sampling, number = requests.sampling, len(requests.prompts)
    prompts = arrays.prompts(requests, self.prompt_buckets, self.seed)
    pieces = self._pieces(self._params, requests, cores)
    most, group = math.ceil(number / pieces), requests.group
    schedule = self.schedule(most, group, prompts.tokens.shape[1], pieces)
    sampler, columns = self._compiled_for(sampling, schedule)
    so_far = generation.CompletionsSoFar.nothing(
      sampler, number, columns[-1], self.shares
    )

    def some(first):
      each = slice(first, first + most)
      return prompts._replace(
        tokens=prompts.tokens[each],
        length=prompts.length[each],
        index=prompts.index[each],
      )

    return so_far, [
      generation.Generation(
        sampler,
        self._params,
        schedule,
        some(first),
        sampling.max_tokens,
        columns,
        self.between,
        so_far.part(first, first + most, group),
        self.shares,
      )
      for first in range(0, number, most)
    ]

  def _compiled_for(
    self, sampling: Sampling, schedule: schedule_lib.Schedule
  ) -> tuple[sampler_lib.Sampler, list[int]]:
    """The static part of the programs, and the lengths of their caches."""
    buffer = layout.bucket(
      sampling.max_tokens, self.completion_buckets, 'completion'
    )
    # The sampler is a static argument, so another value in it means another
    # compilation. The exact length limit is therefore passed as an array, and
    # stop strings are looked for on the host, in what was drawn.
    drawing = dataclasses.replace(sampling, max_tokens=buffer, stop_strings=())
    sizes = {size for size in self.completion_buckets if size <= buffer}
    everywhere = schedule.shards > self._row_shards
    sampler = sampler_lib.Sampler(
      self.model, drawing, schedule.group, self.mesh, everywhere
    )
    return sampler, sorted(sizes)

  @property
  def _row_shards(self) -> int:
    return 1 if self.mesh is None else sharding.row_shards(self.mesh)

  def schedule(
    self, number: int, group: int, prompt_tokens: int, pieces: int = 1
  ) -> schedule_lib.Schedule:
    """The numbers of rows for so many prompts of at most so many tokens.

    If they are one of several pieces that are drawn at once, it has its share
    of `max_rows`.
    """
    shards = self._row_shards
    at_once = min(max(1, self.max_rows // pieces // group), number)
    if self.mesh is not None and at_once >= self.mesh.size:
      # Caches that cannot be split by heads are split by rows; where there are
      # too few prompts for that, the devices of `tensor` have copies.
      heads, tensor = self.model.config.num_kv_heads, self.mesh.shape['tensor']
      shards = self.mesh.size if heads % tensor else shards
    at_once = math.ceil(at_once / shards) * shards  # equally many on each shard
    return schedule_lib.Schedule(group, at_once, prompt_tokens, shards)

  def lowering(
    self, params: Any, prompts: int, group: int, sampling: Sampling
  ) -> dict[str, Callable[[], Any]]:
    """What lowers the programs of the largest rollout.

    Nothing is put on a device, so this also works for a mesh whose devices are
    not there.

    Args:
      params: The learner's, as shapes, dtypes and shardings.
      prompts: How many are asked for.
      group: Completions of each.
      sampling: How tokens are drawn.

    Returns:
      For each program a function that lowers it: `prefill`, `decode` with the
      largest caches, `grow` (to longer caches), if they have several lengths,
      and `regroup`, when rows are dropped or make room for prompts that wait,
      if there are enough rows for that. If prompts wait, `prefill` reads some
      while other rows go on. `prepare` (weights to the sampler) is several
      programs; see `prepare.Preparation.lower`.
    """
    schedule = self.schedule(prompts, group, max(self.prompt_buckets))
    sampler, columns = self._compiled_for(sampling, schedule)
    waits = prompts > schedule.prompts
    return lowered.programs(sampler, schedule, params, columns, waits)

  def abstract_rows(
    self, params: Any, prompts: int, group: int, sampling: Sampling
  ) -> Any:
    """The rows of the largest rollout, as shapes; see `lowering`."""
    schedule = self.schedule(prompts, group, max(self.prompt_buckets))
    sampler, columns = self._compiled_for(sampling, schedule)
    return lowered.abstract_rows(sampler, schedule, params, columns[-1])

  def decoding_params(self, params: Any) -> Any:
    """What decoding reads of the learner's parameters: shapes and shardings."""
    return lowered.decoding_params(self.model, params, self.mesh)

  def _completions(
    self, so_far: generation.CompletionsSoFar, requests: Requests
  ) -> Completions:
    """What has been drawn so far, as the protocol's `Completions`."""
    return arrays.completions(
      so_far.drawn,
      so_far.length,
      self._version,
      requests,
      self.decode,
      so_far.holder,
    )
