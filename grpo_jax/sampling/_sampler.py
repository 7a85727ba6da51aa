"""The compiled sampler: prompts read once, rows decoded together, in lanes.

A lane is a prompt with `W` rows that continue it. What a program is compiled
for is the number of lanes, their width and the room in the caches; which
completion a row draws, and from when on, is data. So rows that have ended can
be dropped or replaced between two calls of `decode`, by `regroup`; the plan for
that is made on the host, in `_schedule.py`.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from grpo_jax import sharding
from grpo_jax.models import attention
from grpo_jax.sampling._choose import Sampling
from grpo_jax.sampling._choose import choose

Array = jax.Array
AnyArray = jax.Array | np.ndarray


class Prompts(NamedTuple):
  """Right-padded prompts and where their noise comes from."""

  tokens: AnyArray  # i32[P,N]
  length: AnyArray  # i32[P]
  index: AnyArray  # i32[P], the global prompt counter; -1 for padding
  key: Array  # of (seed, rollout)


class Rows(NamedTuple):
  """What is being decoded: `A` lanes, `B = A * W` rows."""

  last: Array  # i32[B], the newest token, not yet in the cache
  age: Array  # i32[B], tokens of the row's completion
  ended: Array  # bool[B], nothing more is drawn
  key: Array  # key[B], of (seed, rollout, prompt, completion)
  clock: Array  # i32[], tokens that the rows' caches have been given
  prompt_length: Array  # i32[A]
  # Per layer, key and value; see `attention.cache_axis`.
  prompt_cache: Any  # f[A,...], room for N tokens
  cache: Any  # f[B,...], rings, room for M


class Drawn(NamedTuple):
  """What one call has drawn; column c of a row that had ended is 0."""

  token: AnyArray  # i32[B,C]
  logp: AnyArray  # f32[B,C], under the policy, nats
  log_kept: AnyArray  # f32[B,C], log of the mass that the filters left
  entropy: AnyArray  # f32[B,C], of the policy, nats


@dataclasses.dataclass(frozen=True)
class Sampler:
  """The static part of a generation; hashable, so jit keys on it.

  The noise of a token is a function of (seed, rollout, prompt index,
  completion, position) alone.

  Attributes:
    model: Anything with the model protocol.
    sampling: How tokens are drawn. Its `max_tokens` is not read.
    group: Completions per prompt.
    mesh: Where rows are split over devices; None without one.
  """

  model: Any
  sampling: Sampling
  group: int
  mesh: jax.sharding.Mesh | None = None

  def prefill(
    self, params, prompts: Prompts, max_tokens: Array, columns: int
  ) -> tuple[Rows, Drawn]:
    """Reads prompts, and draws the first token of every completion.

    Args:
      params: What `sampler_params` returned.
      prompts: See `Prompts`.
      max_tokens: i32[], length limit of a completion.
      columns: `M`, the room in the rows' caches, in tokens.

    Returns:
      A lane of `group` rows for each prompt, and their first tokens (C = 1).
    """
    number, width = prompts.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (number, width))
    hidden, cache = self.model.hidden(
      params,
      prompts.tokens,
      positions,
      attention.over_prompts(
        jnp.asarray(prompts.length), self.model.config.attention
      ),
    )
    last = jnp.take_along_axis(
      hidden, (prompts.length - 1)[:, None, None], axis=1
    )[:, 0]
    logits = self.model.head(params, last)
    count = number * self.group

    def room(x):
      shape = [count, *x.shape[1:]]
      shape[self._axis] = columns
      return self._placed(jnp.zeros(shape, x.dtype))

    rows = Rows(
      last=jnp.zeros((count,), jnp.int32),
      age=jnp.zeros((count,), jnp.int32),
      ended=jnp.repeat(prompts.index < 0, self.group),
      key=self._row_keys(prompts),
      clock=jnp.zeros((), jnp.int32),
      prompt_length=jnp.asarray(prompts.length),
      prompt_cache=jax.tree.map(self._placed, cache),
      cache=jax.tree.map(room, cache),
    )
    logits = jnp.repeat(logits, self.group, axis=0)
    rows, drawn = self._draw(rows, logits, max_tokens)
    return rows, jax.tree.map(lambda x: x[:, None], drawn)

  def decode(
    self, params, rows: Rows, max_tokens: Array, limit: Array, floor: Array
  ) -> tuple[Rows, Drawn]:
    """Draws a token for every row that goes on, again and again.

    Args:
      params: What `sampler_params` returned.
      rows: See `Rows`.
      max_tokens: i32[], length limit of a completion.
      limit: i32[], how many tokens at most, not above M.
      floor: i32[]; it stops when no more rows than this go on.

    Returns:
      The rows, and what they have drawn (C = M, from column 0 on).
    """
    columns = jax.tree.leaves(rows.cache)[0].shape[self._axis]
    shape = rows.last.shape[0], columns
    nothing = Drawn(
      jnp.zeros(shape, jnp.int32), *(jnp.zeros(shape) for _ in range(3))
    )

    prompt_length = self._prompt_length(rows)

    def going(carry):
      step, rows, _ = carry
      alive = jnp.sum(~rows.ended, dtype=jnp.int32)
      return (step < limit) & (alive > floor)

    def body(carry):
      step, rows, drawn = carry
      hidden, caches = self.model.hidden(
        params,
        rows.last[:, None],
        (prompt_length + rows.age - 1)[:, None],
        attention.over_cache(
          rows.prompt_length,
          rows.age,
          rows.clock,
          self.model.config.attention,
        ),
        list(zip(rows.prompt_cache, rows.cache, strict=True)),
      )
      own = jax.tree.map(self._placed, [own for _, own in caches])
      rows = rows._replace(cache=own, clock=rows.clock + 1)
      logits = self.model.head(params, hidden[:, 0])
      rows, new = self._draw(rows, logits, max_tokens)
      put = lambda to, x: lax.dynamic_update_slice_in_dim(
        to, x[:, None], step, axis=1
      )
      return step + 1, rows, jax.tree.map(put, drawn, new)

    start = jnp.zeros((), jnp.int32), rows, nothing
    _, rows, drawn = lax.while_loop(going, body, start)
    return rows, drawn

  def regroup(
    self, parts: Sequence[Rows], lane: Array, row: Array, columns: int
  ) -> Rows:
    """Other rows in other lanes, with more room.

    Args:
      parts: Some `Rows`; those after the first have no tokens in their caches.
      lane: i32[A'], which lane of the parts, counted through, to copy.
      row: i32[B'], which of their rows; -1 for none.
      columns: `M'`, at least that of the first part. More than that only if
        the first part's rings have not been around.

    Returns:
      The `Rows`, at the clock of the first part.
    """
    # A cache has four axes: rows, heads and positions in either order, size.

    def pick(part, index):
      joined = jnp.concatenate(part)[index]
      place = self._placed if joined.ndim == 4 else sharding.constrain_rows
      return place(joined)

    def grown(x):
      widths = [(0, 0)] * 4
      widths[self._axis] = 0, columns - x.shape[self._axis]
      return jnp.pad(x, widths)

    def joined(name, index):
      trees = [getattr(part, name) for part in parts]
      return jax.tree.map(lambda *x: pick(x, index), *trees)

    some = jnp.maximum(row, 0)
    first = parts[0]
    parts = [p._replace(cache=jax.tree.map(grown, p.cache)) for p in parts]
    return Rows(
      **{name: joined(name, some) for name in ('last', 'age', 'key', 'cache')},
      ended=joined('ended', some) | (row < 0),
      clock=first.clock,
      prompt_length=joined('prompt_length', lane),
      prompt_cache=joined('prompt_cache', lane),
    )

  def _placed(self, cache: Array) -> Array:
    """A cache split over rows and heads, as it is on every device."""
    return sharding.constrain_cache(cache, heads=3 - self._axis)

  @property
  def _axis(self) -> int:
    """Of the positions in a cache."""
    return attention.cache_axis(self.model.config.attention)

  def _prompt_length(self, rows: Rows) -> Array:
    """i32[B]."""
    width = rows.last.shape[0] // rows.prompt_length.shape[0]
    return jnp.repeat(rows.prompt_length, width)

  def _row_keys(self, prompts: Prompts) -> Array:
    fold = jax.random.fold_in
    by_prompt = jax.vmap(functools.partial(fold, prompts.key))(prompts.index)
    completion = jnp.arange(self.group)
    rows = jax.vmap(lambda k: jax.vmap(lambda g: fold(k, g))(completion))
    return rows(by_prompt).reshape(-1)

  def _draw(self, rows: Rows, logits, max_tokens) -> tuple[Rows, Drawn]:
    """One more token for every row that has not ended."""
    at_age = jax.vmap(jax.random.fold_in)(rows.key, rows.age)
    uniform = jax.vmap(jax.random.uniform)(at_age)
    drawn = Drawn(*choose(logits, uniform, rows.age, self.sampling))
    going, end = ~rows.ended, jnp.array(self.sampling.eos_ids, jnp.int32)
    drawn = drawn._replace(token=drawn.token.astype(jnp.int32))
    drawn = jax.tree.map(lambda x: jnp.where(going, x, 0), drawn)
    is_end = jnp.any(drawn.token[:, None] == end[None], axis=-1)
    age = rows.age + going
    rows = rows._replace(
      last=drawn.token,
      age=age,
      ended=rows.ended | is_end | (age >= max_tokens),
    )
    return rows, drawn


def _compiled(name: str, static: tuple[int, ...], donated: tuple[int, ...]):
  """A method of `Sampler` as a jitted function of it, on its mesh."""

  def call(sampler, *args):
    with sharding.use(sampler.mesh):
      return getattr(sampler, name)(*args)

  call.__name__ = name
  return jax.jit(
    call,
    static_argnums=(0, *static),
    donate_argnums=donated,
    compiler_options=sharding.COMPILER_OPTIONS,
  )


prefill = _compiled('prefill', static=(4,), donated=())
decode = _compiled('decode', static=(), donated=(2,))
regroup = _compiled('regroup', static=(4,), donated=())


def sampler_params(model, params):
  """A training tree made ready to decode: unstacked, in the compute dtype.

  Args:
    model: Anything with the model protocol and `unstack`.
    params: The training tree.

  Returns:
    The tree that `Sampler` and other engines read; vectors (norms) stay
    float32, as in training. Copies: the learner may donate its own.
  """
  dtype = jnp.dtype(model.config.compute_dtype)
  return jax.tree.map(
    lambda x: jnp.copy(x.astype(dtype) if x.ndim > 1 else x),
    model.unstack(params),
  )


def prepare_params(model, params, mesh: jax.sharding.Mesh | None = None):
  """`sampler_params` compiled, and resharded: the road to any engine.

  Args:
    model: Anything with the model protocol, `unstack` and `logical_axes`.
    params: The training tree, or its shapes.
    mesh: Its mesh, if any; the result is not split over `fsdp`, because
      decoding reads every parameter for every token.

  Returns:
    A function of the training tree, to be called once per rollout.
  """
  place = None
  if mesh is not None:
    shapes = jax.eval_shape(model.unstack, params)
    rules = sharding.DECODING_RULES
    place = sharding.of_params(mesh, shapes, model.logical_axes, rules)
  return jax.jit(functools.partial(sampler_params, model), out_shardings=place)
