"""The engine of this package: samples on devices of this process."""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from grpo_jax import models
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import calls
from grpo_jax.engines.local import contexts
from grpo_jax.engines.local import generation
from grpo_jax.engines.local import lowered
from grpo_jax.engines.local import prepare
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.engines.local import schedule as schedule_lib
from grpo_jax.engines.local.next_token import Choices
from grpo_jax.engines.local.next_token import choices_of
from grpo_jax.engines.protocol import GOING
from grpo_jax.engines.protocol import Capabilities
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampled
from grpo_jax.engines.protocol import Sampling
from grpo_jax.mesh import sharding
from grpo_jax.models import layout


@dataclasses.dataclass
class LocalEngine:
  """Samples with the model's own code, on the learner's devices or on others.

  A prompt is read once for its whole group. When completions have ended, their
  rows are given to prompts that wait, or dropped. Which tokens are drawn does
  not depend on this: the random number of a token depends on the completion's
  key and the position alone.

  What was submitted is drawn in rounds: all that waits at the beginning of one.
  Requests with `calls` are drawn whenever they come; see `calls.Queue`.

  Attributes:
    model: See `models.transformer`.
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
      its own devices have drawn, and no others; see `Sampled.holder`.
    cores: Into how many pieces, drawn at once, a rollout or the rows of calls
      may be divided; see `generation`. More than 1 is of use on a CPU alone.
    copies: Whether the engine copies all parameters that are loaded. If False,
      some are read where the learner has them: call `unload` before they are
      donated.
    turn_tokens: How many tokens of a row are drawn between two turns, at most;
      None: as many as possible.
    context_tokens: The most that a request with `calls` reads and draws; None:
      as much as the longest prompt and completion.
  """

  model: models.Layered
  prompt_buckets: Sequence[int]
  completion_buckets: Sequence[int]
  max_rows: int = 4096
  decode: Callable[[Any], str] | None = None
  mesh: jax.sharding.Mesh | None = None
  shares: bool = False
  cores: int = 1
  copies: bool = True
  context_tokens: int | None = None
  turn_tokens: int | None = None

  def __post_init__(self):
    self._held: arrays.Held | None = None
    self._prepare: prepare.Preparation | None = None
    self._submitted = arrays.Submitted()
    self._queue: calls.Queue | None = None
    self._tried: set[tuple[int, int]] = set()

  @property
  def capabilities(self) -> Capabilities:
    """See `Engine`."""
    return Capabilities(
      entropy=True,
      routing=self.model.routes,
      shares=self.shares,
      queues=not self.shares,
      rows=self.max_rows,
    )

  def load(self, params: Any, version: int) -> None:
    """Takes the learner's parameters; see `Engine`."""
    # Made from the first parameters, whose shapes all later ones share.
    if self._prepare is None:
      self._prepare = prepare.Preparation(
        self.model, params, self.mesh, self.copies
      )
    self._queue = None  # what it has read was read by other parameters
    self._held = None  # first, so that memory holds one set at a time
    self._held = arrays.Held((self._prepare(params), version))

  def take(self, params: Any, version: int) -> None:
    """See `Engine`."""
    if self._held is None:
      self._held = arrays.Held((params, version))
    self._held.now = params, version

  def unload(self) -> None:
    """Frees the engine's own copy of the parameters; see `Engine`."""
    self._held = self._queue = None

  def submit(self, request: Request) -> int:
    """See `Engine`."""
    if not request.calls:
      return self._submitted.add(request)
    number = self._submitted.number()
    self._calls(request.calls).add(number, request)
    return number

  def forget(self, request: int) -> None:
    """See `Engine`."""
    if self._queue is not None:
      self._queue.forget(request)
      if self._queue.is_empty:
        self._queue = None  # the learner needs the memory

  def completed(
    self, every_tokens: int | None = None
  ) -> Generator[list[Sampled], None, None]:
    """See `Engine`.

    Raises:
      ValueError: Nothing is loaded, a prompt is empty or too long, or stop
        strings are asked for without `decode`.
    """
    rounds = self._submitted.rounds(lambda x: self._round(x, every_tokens))

    def turns():
      try:
        yield []
        yield from rounds
        while self._queue is not None and self._queue.live:
          yield self._queue.turn(every_tokens)
      finally:
        rounds.close()
        if self._queue is not None and self._queue.live:
          self._queue = None  # what was given up

    begun = turns()
    next(begun)  # one that has not begun would give up nothing
    return begun

  def _calls(self, number: int) -> calls.Queue:
    """What draws calls of which so many are drawn at once."""
    if self._held is None:
      raise ValueError('LocalEngine has no parameters yet; call load first.')
    rows, queue = self.rows_of_calls(number), self._queue
    if queue is None or (queue.rows != rows and queue.is_empty):
      self._queue = queue = None  # first, so that memory holds one at a time
      self._queue = queue = calls.Queue(
        self.model,
        self._held,
        self._widths_of_calls,
        rows,
        self._parts_of_calls(rows),
        self.mesh,
        self.decode,
        self._tried,
      )
    return queue

  def _round(
    self, batch: arrays.Batch, every_tokens: int | None
  ) -> Iterator[list[Sampled]]:
    """Draws a batch; see `completed`."""
    # One piece, because a report would not wait for the others.
    cores = 1 if every_tokens else self.cores
    so_far, parts = self._begun(batch, cores)
    reported = np.zeros(len(so_far.ended), bool)
    for _ in generation.side_by_side(
      [part.run(every_tokens or self.turn_tokens) for part in parts]
    ):
      over = so_far.ended & ~reported
      reported |= over
      turn = [self._sampled(batch, so_far, p) for p in np.flatnonzero(over)]
      if every_tokens:
        for place in np.flatnonzero(~reported & (so_far.length > 0)):
          one = self._sampled(batch, so_far, place, goes_on=True)
          reported[place] = one.finish != GOING
          turn.append(one)
      yield turn
      # The device knows nothing of stop strings and would go on.
      if every_tokens and reported.all():
        return

  def _sampled(
    self,
    batch: arrays.Batch,
    so_far: generation.CompletionsSoFar,
    place: int | np.integer,
    goes_on: bool = False,
  ) -> Sampled:
    """A completion of a batch, or what there is of it."""
    length, holder = so_far.length[place], None
    if so_far.holder is not None:
      holder = int(so_far.holder[place // batch.group])
      length *= holder == jax.process_index()
    drawn = jax.tree.map(lambda x: x[place, :length], so_far.drawn)
    return arrays.sampled(
      batch.asked(int(place)),
      drawn,
      so_far.version[place, :length],
      self.decode,
      goes_on,
      holder=holder,
    )

  def _pieces(self, cores: int, prompts: int, group: int) -> int:
    """Into how many pieces to divide prompts that are drawn at once."""
    assert self._held is not None
    config, params = self.model.config, self._held.now[0]
    itemsize = params['embedding'].dtype.itemsize
    head = config.vocab_size * config.width * itemsize
    layers = sum(x.nbytes for x in jax.tree.leaves(params['layers']))
    return generation.pieces(cores, prompts, group, layers, head)

  def _parts_of_calls(self, rows: int) -> int:
    """Into how many equal pools to divide the rows of calls of each width."""
    if self._row_shards > 1 or jax.process_count() > 1:
      return 1  # all must call the same programs in the same order
    most = self._pieces(self.cores, rows, group=1)
    return max(parts for parts in range(1, most + 1) if rows % parts == 0)

  def _begun(
    self, batch: arrays.Batch, cores: int = 1
  ) -> tuple[generation.CompletionsSoFar, list[generation.Generation]]:
    """What will have been drawn, and the generations that will draw it."""
    if self._held is None:
      raise ValueError('LocalEngine has no parameters yet; call load first.')
    number, group = len(batch.requests), batch.group
    vocab_size = self.model.config.vocab_size
    prompts = arrays.prompts(batch, self.prompt_buckets, vocab_size)
    at_once = min(max(1, self.max_rows // group), number)
    pieces = self._pieces(cores, at_once, group)
    most = math.ceil(number / pieces)
    schedule = self.schedule(most, group, prompts.tokens.shape[1], pieces)
    sampler = self._sampler(batch.choices(vocab_size), schedule)
    columns = self._columns(batch.limit)
    so_far = generation.CompletionsSoFar.nothing(
      sampler, number, columns[-1], self.shares
    )
    return so_far, [
      generation.Generation(
        sampler,
        self._held,
        schedule,
        jax.tree.map(lambda x, first=first: x[first : first + most], prompts),
        columns,
        so_far.part(first, first + most, group),
        self.shares,
      )
      for first in range(0, number, most)
    ]

  def _sampler(
    self, choices: Choices, schedule: schedule_lib.Schedule
  ) -> sampler_lib.Sampler:
    """The static part of the programs: another value, another compilation."""
    everywhere = schedule.shards > self._row_shards
    return sampler_lib.Sampler(
      self.model, choices, schedule.group, self.mesh, everywhere
    )

  def _columns(self, limit: int) -> list[int]:
    """The lengths that caches have for completions of at most `limit`."""
    longest = layout.bucket(limit, self.completion_buckets, 'completion')
    return sorted({size for size in self.completion_buckets if size <= longest})

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
      heads, tensor = self.model.kv_heads, self.mesh.shape['tensor']
      shards = self.mesh.size if heads % tensor else shards
    at_once = math.ceil(at_once / shards) * shards  # equally many on each shard
    return schedule_lib.Schedule(group, at_once, prompt_tokens, shards)

  def rows_of_calls(self, number: int) -> int:
    """How many rows a width has, if so many calls are drawn at once."""
    shards = self._row_shards
    return math.ceil(max(1, min(number, self.max_rows)) / shards) * shards

  @property
  def _widths_of_calls(self) -> list[int]:
    """Places of the caches of pools, ascending."""
    prompts, completions = self.prompt_buckets, self.completion_buckets
    # Others hold no prompt with a completion, and a pool for them would wait
    # for a call that is short by chance, and be compiled for it.
    least, longest = (f(prompts) + f(completions) for f in (min, max))
    longest = self.context_tokens or longest
    some = (x for x in completions if least <= x < longest)
    return [*sorted(some), longest]

  def pools(self, params: Any, number: int) -> list[Any]:
    """The caches of all pools that so many calls may need.

    Args:
      params: The learner's, as shapes, dtypes and shardings.
      number: Of calls that are drawn at once.

    Returns:
      For each width, the narrowest first, shapes, dtypes and shardings; as one
      pool, though it may be divided into several.
    """
    read = self.decoding_params(params)
    programs = contexts.Programs(self.model, self.mesh)
    rows = self.rows_of_calls(number)
    return [programs.shapes(read, rows, x) for x in self._widths_of_calls]

  def longest_read(self, params: Any, number: int) -> tuple[int, int]:
    """In how many rows a call reads, and tokens of each; see `pools`."""
    read, rows = self.decoding_params(params), self.rows_of_calls(number)
    assert self.mesh is not None
    return calls.longest_read(read, self.mesh, rows)

  def lowering_of_calls(
    self, params: Any, number: int, sampling: Sampling
  ) -> dict[str, Callable[[], Any]]:
    """What lowers the programs that draw calls; see `lowering`.

    Args:
      params: The learner's, as shapes, dtypes and shardings.
      number: Of calls that are drawn at once.
      sampling: How tokens are drawn.

    Returns:
      For each program a function that lowers it, for the widest caches:
      `prepare`, `read`, by the longest piece, and `decode`.
    """
    return lowered.programs_of_calls(
      contexts.Programs(
        self.model,
        self.mesh,
        choices_of([sampling], self.model.config.vocab_size),
      ),
      self.pools(params, number)[-1],
      params,
    )

  def lowering(
    self, params: Any, prompts: int, group: int, sampling: Sampling, limit: int
  ) -> dict[str, Callable[[], Any]]:
    """What lowers the programs of the largest rollout.

    Nothing is put on a device, so this also works for a mesh whose devices are
    not there.

    Args:
      params: The learner's, as shapes, dtypes and shardings.
      prompts: How many are asked for.
      group: Completions of each.
      sampling: How tokens are drawn.
      limit: The most tokens of a completion.

    Returns:
      For each program a function that lowers it: `prefill`, `decode` with the
      largest caches, `grow` (to longer caches), if they have several lengths,
      and `regroup`, when rows are dropped or make room for prompts that wait,
      if there are enough rows for that. If prompts wait, `prefill` reads some
      while other rows go on. `prepare` (weights to the sampler) is several
      programs; see `prepare.Preparation.lower`.
    """
    vocab_size = self.model.config.vocab_size
    schedule = self.schedule(prompts, group, max(self.prompt_buckets))
    waits = prompts > schedule.prompts
    return lowered.programs(
      self._sampler(choices_of([sampling], vocab_size), schedule),
      schedule,
      params,
      self._columns(limit),
      waits,
    )

  def decoding_params(self, params: Any) -> Any:
    """What decoding reads of the learner's parameters: shapes and shardings."""
    return lowered.decoding_params(self.model, params, self.mesh)
