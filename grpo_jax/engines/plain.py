"""An engine for models of which little is known: `models.foreign`.

It needs a call from tokens to logits and, if there is one, a cache of which it
knows nothing. Every completion has a row of its own, which begins with its
prompt, and all rows are drawn in step until the last has ended.

Shapes: `P` prompts of at most `N` tokens, `B = P * G` rows of `S = N + T`
columns, completions of at most `T` tokens.
"""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import sampler
from grpo_jax.engines.local.next_token import Choices
from grpo_jax.engines.local.next_token import Numbers
from grpo_jax.engines.protocol import Capabilities
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampled
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from grpo_jax.models import foreign
from grpo_jax.models import layout

Array = jax.Array


@dataclasses.dataclass
class PlainEngine:
  """Samples with a model of the user's, on the learner's devices.

  Its random numbers are those of `LocalEngine`. So is what it returns, but for
  rounding. What was submitted is drawn in rounds, as there.

  Attributes:
    model: From `foreign.from_nnx`.
    prompt_buckets: Allowed prompt widths, tokens.
    completion_buckets: Allowed completion widths, tokens.
    max_rows: How many completions to draw at once; it is rounded down to whole
      groups, at least one, and up to equally many on each data shard.
    decode: Turns ids into text; needed for stop strings only.
    mesh: The sampler's mesh, over whose data shards the rows are split; see
      `sharding.sampling_mesh`. None for one device.
  """

  model: foreign.Foreign
  prompt_buckets: Sequence[int]
  completion_buckets: Sequence[int]
  max_rows: int = 4096
  decode: Callable[[Any], str] | None = None
  mesh: jax.sharding.Mesh | None = None

  def __post_init__(self):
    self._submitted = arrays.Submitted()
    self._params, self._version = None, -1
    place = None
    if self.mesh is not None:
      # Decoding reads every parameter for every token.
      rules = sharding.DECODING_RULES
      place = sharding.param_shardings(
        self.mesh, self.model.shapes, self.model.logical_axes, rules
      )
    self._prepare = jax.jit(self.model.sampler_params, out_shardings=place)

  @property
  def capabilities(self) -> Capabilities:
    """See `Engine`."""
    return Capabilities(entropy=True, rows=self.max_rows)

  def load(self, params: Any, version: int) -> None:
    """Takes the learner's parameters; see `Engine`."""
    self._params = None  # first, so that memory holds one set at a time
    self._params, self._version = self._prepare(params), version

  def take(self, params: Any, version: int) -> None:
    """See `Engine`; what is being drawn goes on with those that it has."""
    self._params, self._version = params, version

  def unload(self) -> None:
    """Frees the engine's own copy of the parameters; see `Engine`."""
    self._params = None

  def submit(self, request: Request) -> int:
    """See `Engine`."""
    return self._submitted.add(request)

  def forget(self, request: int) -> None:
    """See `Engine`; it keeps nothing."""

  def completed(
    self, every_tokens: int | None = None
  ) -> Generator[list[Sampled], None, None]:
    """See `Engine`; it reports nothing before a completion has finished.

    Raises:
      ValueError: Nothing is loaded, a prompt is empty or too long, or stop
        strings are asked for without `decode`.
    """
    del every_tokens
    return self._submitted.rounds(self._round)

  def _round(self, batch: arrays.Batch) -> Iterator[list[Sampled]]:
    """Draws a batch; see `completed`."""
    # Others may be loaded between two turns.
    params, version = self._params, self._version
    if params is None:
      raise ValueError('PlainEngine has no parameters yet; call load first.')
    vocab_size, group = self.model.vocab_size, batch.group
    prompts = arrays.prompts(batch, self.prompt_buckets, vocab_size)
    number = len(batch.requests)
    shards = 1 if self.mesh is None else sharding.row_shards(self.mesh)
    at_once = min(max(1, self.max_rows // group), number)
    at_once = math.ceil(at_once / shards) * shards
    program = _Program(
      self.model,
      batch.choices(vocab_size),
      group,
      # The exact limit is data, so that only its bucket is compiled for.
      layout.bucket(batch.limit, self.completion_buckets, 'completion'),
      self.mesh,
    )
    for first in range(0, number, at_once):
      taken = min(at_once, number - first)
      some = arrays.padded(prompts, first, taken, at_once)
      if self.mesh is not None:
        some = host_arrays.from_local(some, sharding.rows(self.mesh))
      drawn, length = host_arrays.to_host(_run(program, params, some))
      part = batch.part(first, first + taken)

      def own(row, drawn=drawn, length=length):
        return jax.tree.map(lambda x: x[row, : length[row]], drawn)

      yield [
        arrays.sampled(
          part.asked(row),
          own(row),
          np.full(length[row], version, np.int32),
          self.decode,
        )
        for row in range(taken * group)
      ]


class _Rows(NamedTuple):
  """The state of the loop; the first five are those of `sampler.Rows`.

  Attributes:
    last: i32[B], the newest token of each row.
    age: i32[B], tokens of its completion.
    ended: bool[B].
    key: key[B].
    numbers: How each row is drawn, arrays [B].
    tokens: i32[B,S], the prompt and, without a gap, its completion.
    drawn: Arrays [B,T].
    cache: The model's; None if it has none.
  """

  last: Array
  age: Array
  ended: Array
  key: Array
  numbers: Numbers
  tokens: Array
  drawn: sampler.Drawn
  cache: Any


@dataclasses.dataclass(frozen=True)
class _Program:
  """What is compiled: a static argument of `_run`.

  Attributes:
    model: Of the user.
    choices: Which ways of choosing a token there are.
    group: Completions per prompt, `G`.
    room: Columns of a row for its completion, `T`.
    mesh: Over which rows are split; None: one device.
  """

  model: foreign.Foreign
  choices: Choices
  group: int
  room: int
  mesh: jax.sharding.Mesh | None

  def run(
    self, params: Any, prompts: sampler.Prompts
  ) -> tuple[sampler.Drawn, Array]:
    """Draws all completions of some prompts.

    Args:
      params: From `Foreign.sampler_params`.
      prompts: See `sampler.Prompts`.

    Returns:
      What was drawn, [B,T], 0 behind each completion; and i32[B], its lengths.
    """
    length = jnp.repeat(jnp.asarray(prompts.length), self.group)
    rows = self._begin(prompts)
    if self.model.init_cache is None:
      step = self._whole_rows
    else:
      cache = self.model.empty_cache(params, *rows.tokens.shape)
      rows = rows._replace(cache=cache)
      step = self._next_column
      if self.model.attention == 'mask':
        step = self._behind_prompts
        width = prompts.tokens.shape[1]
        rows, logits = self._prefilled(params, rows, length, width)
        rows = self._drawn(rows, logits, length)

    def body(carry):
      clock, rows = carry
      rows, logits, waits = step(params, rows, length, clock)
      rows = self._drawn(rows, logits, length, waits)
      return clock + 1, rows

    start = jnp.zeros((), jnp.int32), rows
    _, rows = lax.while_loop(
      lambda carry: jnp.any(~carry[1].ended), body, start
    )
    return rows.drawn, rows.age

  def _begin(self, prompts: sampler.Prompts) -> _Rows:
    """The rows before their first token."""
    tokens = jnp.pad(jnp.asarray(prompts.tokens), ((0, 0), (0, self.room)))
    tokens = sharding.constrain_rows(jnp.repeat(tokens, self.group, axis=0))
    zeros = functools.partial(jnp.zeros, (tokens.shape[0], self.room))
    return _Rows(
      **sampler.no_tokens(prompts, self.group),
      tokens=tokens,
      drawn=sampler.Drawn(zeros(jnp.int32), zeros(), zeros(), zeros()),
      cache=None,
    )

  def _whole_rows(self, params, rows: _Rows, length: Array, clock: Array):
    """Without a cache: every row is computed anew for its next token."""
    del clock
    count, columns = rows.tokens.shape
    logits, _ = self.model.logits(
      params,
      rows.tokens,
      jnp.broadcast_to(jnp.arange(columns)[None], (count, columns)),
      None,
      foreign.causal_mask(count, columns),
    )
    last = _column(logits, length + rows.age - 1)
    return rows, last, jnp.zeros((count,), bool)

  def _next_column(self, params, rows: _Rows, length: Array, clock: Array):
    """With a cache that has no gaps: column `clock` of every row is read.

    A row whose prompt goes on behind this column waits: it draws nothing.
    """
    count, columns = rows.tokens.shape
    mask = jnp.arange(columns) <= clock
    logits, cache = self.model.logits(
      params,
      lax.dynamic_slice_in_dim(rows.tokens, clock, 1, axis=1),
      jnp.full((count, 1), clock),
      rows.cache,
      jnp.broadcast_to(mask[None, None], (count, 1, columns)),
    )
    return rows._replace(cache=cache), logits[:, 0], clock < length - 1

  def _prefilled(self, params, rows: _Rows, length: Array, width: int):
    """With a cache and a mask: all prompts at once, into `width` columns."""
    count, columns = rows.tokens.shape
    # Also for the padding behind a prompt: a row of a mask without any key
    # might become NaN.
    mask = foreign.causal_mask(count, columns)[:, :width]
    logits, cache = self.model.logits(
      params,
      rows.tokens[:, :width],
      jnp.broadcast_to(jnp.arange(width)[None], (count, width)),
      rows.cache,
      mask,
    )
    return rows._replace(cache=cache), _column(logits, length - 1)

  def _behind_prompts(self, params, rows: _Rows, length: Array, clock: Array):
    """With a cache and a mask: the newest token of every row is read.

    All rows write the same column, the first behind the widest prompt. The mask
    hides what lies between a prompt and that column.
    """
    count, columns = rows.tokens.shape
    width = columns - self.room
    column = jnp.arange(columns)
    own = (column >= width) & (column <= width + clock)
    logits, cache = self.model.logits(
      params,
      rows.last[:, None],
      (length + clock)[:, None],
      rows.cache,
      ((column[None] < length[:, None]) | own[None])[:, None],
    )
    return rows._replace(cache=cache), logits[:, 0], jnp.zeros((count,), bool)

  def _drawn(self, rows, logits, length, waits: Array | bool = False) -> _Rows:
    """The rows with one more token each, except those that wait or ended."""
    ended = rows.ended
    before, goes = rows.age, ~(ended | waits)
    logits = sharding.constrain_rows(logits)
    rows, new = sampler.draw(rows._replace(ended=~goes), logits, self.choices)
    row = jnp.arange(len(goes))

    def put(to, x, place):
      # One past the last column, which 'drop' leaves out.
      place = jnp.where(goes, place, to.shape[1])
      return to.at[row, place].set(x, mode='drop')

    return rows._replace(
      ended=jnp.where(goes, rows.ended, ended),
      tokens=put(rows.tokens, new.token, length + before),
      drawn=jax.tree.map(lambda to, x: put(to, x, before), rows.drawn, new),
    )


def _column(logits: Array, column: Array) -> Array:
  """For every row b, `logits[b, column[b]]`, f32[B,V]."""
  return jnp.take_along_axis(logits, column[:, None, None], axis=1)[:, 0]


@functools.partial(
  jax.jit,
  static_argnums=(0,),
  # As the learner's programs; otherwise the two would round differently.
  compiler_options=sharding.COMPILER_OPTIONS,
)
def _run(program: _Program, params, prompts):
  with sharding.use(program.mesh):
    return program.run(params, prompts)
