"""Attention: which tokens see which, in training and in decoding.

A layer of the model calls `attention(query, key, value, cache, window, cap)`
and gets `(output, cache)`. What this function does is decided outside the
model; `window` is of the layer's kind, and `cap` the model's `attention_cap`.
A layer with sinks gives them too, `sinks=` f32[H]; see `softmax.drained`.
Four constructors make one:

- `over_layout`: for the rows of a `Layout`, in scoring and training;
- `over_prompts`: for right-padded prompts, whose keys and values it returns as
  the cache;
- `over_cache`: for one new token of each row that is being decoded;
- `over_contexts`: for new tokens of rows with a whole context of their own.

A layer that keeps a state, and no keys and values, calls `attention.states`,
which knows the same rows; see `states`.

Where rows share a prompt, attention to the prompt and to the row's own tokens
is computed apart, and the two parts are merged; see `softmax`.

Shapes: `Q` queries, `N` keys, `H` query heads, `K` key-value heads, `D` head
size.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import softmax
from grpo_jax.models import states as states_lib
from grpo_jax.models.layout import Blocks
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import reached

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Attention:
  """What layers call to see other tokens.

  Attributes:
    attend: The function that a layer with attention calls.
    make_states: Makes what a layer with a state calls.
  """

  attend: Callable[..., tuple[Array, Any]]
  make_states: Callable[[], states_lib.States]

  def __call__(self, *args: Any, **options: Any) -> tuple[Array, Any]:
    """Calls `attend`."""
    return self.attend(*args, **options)

  @property
  def states(self) -> states_lib.States:
    """Made where a layer asks for it, which may be inside of a scan."""
    return self.make_states()


_BEST = {'tpu': 'splash', 'gpu': 'cudnn'}  # for 'auto'; elsewhere 'xla'


def _recent(query_position, key_position, window: int | None):
  """bool[...,Q,N]: which keys are not in the future and inside the window."""
  distance = query_position[..., :, None] - key_position[..., None, :]
  seen = distance >= 0
  return seen if window is None else seen & (distance < window)


def over_layout(
  layout: Layout,
  implementation: str = 'xla',
  interpret: bool = False,
  forward_mode: bool = False,
) -> Attention:
  """Attention over the rows of a layout, for scoring and training.

  Args:
    layout: If it has `blocks`, no work is done across blocks. Otherwise every
      query of a row is compared with every key, and a mask hides what it must
      not see.
    implementation: Which code computes it:

      - `'xla'`: plain JAX, on any device;
      - `'splash'`: a TPU kernel that keeps no scores. A layer that it cannot
        express is left to `'xla'`; see `kernels.splash_suits`;
      - `'cudnn'`: the same on a GPU, for bfloat16;
      - `'auto'`: the one that suits the device, the dtype and the sizes.
    interpret: Whether to run an accelerator's kernel on any device, slowly, as
      tests do.
    forward_mode: Whether `jax.jvp` will differentiate this. Only `'xla'` allows
      it, so that one is taken whatever `implementation` says.

  Returns:
    The function that a layer calls; it uses no cache.
  """
  make_states = functools.partial(states_lib.over_layout, layout)
  # Rows that are cut have cut blocks.
  if layout.blocks is not None and shards.parts() == 1:
    portable = _over_blocks(layout, layout.blocks, forward_mode)
  else:
    portable = _over_segments(layout, forward_mode)
  chosen = _chosen(implementation)
  if chosen == 'xla' or forward_mode:
    return Attention(portable, make_states)
  from grpo_jax.models import kernels  # Pallas takes a while to import

  def attention(query, key, value, cache, window, cap=None, sinks=None):
    arrays, blocks = (query, key, value), layout.blocks
    uncut = shards.parts() == 1
    if chosen == 'splash' and kernels.splash_suits(layout, window):
      # If the rows are cut, each part attends to the keys of all.
      key, value = map(shards.gather_columns, (key, value))
      output = kernels.splash(
        query,
        key,
        value,
        layout.segment,
        window,
        interpret,
        cap,
        blocks,
        part=None if uncut else shards.part(),
        key_segment=shards.gather_columns(layout.segment),
        sinks=sinks,
      )
      return output, cache
    if chosen == 'cudnn' and uncut:  # it has as many queries as keys
      if sinks is None and _cudnn_takes(implementation, query, cap, blocks):
        return kernels.cudnn(*arrays, layout, window, interpret), cache
    return portable(*arrays, cache, window, cap, sinks)

  return Attention(attention, make_states)


def _cudnn_takes(
  implementation: str,
  query: Array,
  cap: float | None,
  blocks: Blocks | None = None,
) -> bool:
  """Whether a layer's attention is left to cuDNN, where that is chosen."""
  from grpo_jax.models import kernels

  suits = kernels.cudnn_suits(query, blocks) or implementation == 'cudnn'
  return suits and cap is None  # cuDNN's attention has none


def _over_segments(layout: Layout, forward_mode: bool) -> Callable[..., Any]:
  """Attention in rows of any segments, by a mask over the whole row."""
  segment, parent = layout.segment, layout.parent
  # If the rows are cut, each part attends to the keys of all.
  key_segment, key_position = map(
    shards.gather_columns, (layout.segment, layout.position)
  )
  if layout.reach is not None:
    first = shards.first_column(segment.shape[1]) if shards.parts() > 1 else 0
    reach = shards.gather_columns(layout.reach)
    related = reached(reach, segment.shape[1], first)
  else:
    same = segment[:, :, None] == key_segment[:, None, :]
    continued = parent[:, :, None] == key_segment[:, None, :]
    # The last factor hides padding, whose segment is 0: so is the parent of a
    # segment that continues none.
    related = (same | continued) & (key_segment > 0)[:, None, :]

  def attention(query, key, value, cache, window, cap=None, sinks=None):
    recent = _recent(layout.position, key_position, window)
    visible = related & recent
    key, value = map(shards.gather_columns, (key, value))
    found = softmax.attend(query, key, value, visible, forward_mode, cap)
    return softmax.drained(found, sinks), cache

  return attention


def _over_blocks(
  layout: Layout, blocks: Blocks, forward_mode: bool
) -> Callable[..., Any]:
  """Attention in rows of one prompt and equal blocks behind it.

  The prompt attends to itself; each block attends to the prompt and to itself,
  or, of a tree, to what reaches it of itself.
  """
  rows = layout.tokens.shape[0]
  edge = blocks.prompt_tokens
  alone = (rows * blocks.completions, blocks.completion_tokens)

  def own(x):  # [R,S,...] -> the blocks, each a row of its own [R*G,T,...]
    return x[:, edge:].reshape(alone + x.shape[2:])

  position, prompt_position = layout.position, layout.position[:, :edge]
  own_position = own(position)
  used = layout.segment > 0
  prompt_used, related = used[:, None, :edge], own(used)[:, None]
  if layout.reach is not None:
    related = reached(own(layout.reach), blocks.completion_tokens)

  def attention(query, key, value, cache, window, cap=None, sinks=None):
    # To the prompt's keys, all tokens of a row are one long list of queries:
    # one product for the prompt and the whole group.
    output, log_mass = softmax.attend(
      query,
      key[:, :edge],
      value[:, :edge],
      _recent(position, prompt_position, window) & prompt_used,
      forward_mode,
      cap,
    )
    own_part = softmax.attend(
      own(query),
      own(key),
      own(value),
      _recent(own_position, own_position, window) & related,
      forward_mode,
      cap,
    )
    to_prompt = softmax.Partial(output, log_mass)
    merged = softmax.drained(
      softmax.merge(softmax.Partial(own(output), own(log_mass)), own_part),
      sinks,
    )
    merged = merged.reshape(rows, -1, *merged.shape[2:])
    # Put in place: a concatenation is computed twice on a CPU, for the next
    # product and for what is kept of it.
    whole = softmax.drained(to_prompt, sinks)
    whole = lax.dynamic_update_slice_in_dim(whole, merged, edge, axis=1)
    return whole, cache

  return attention


class CacheAxes(NamedTuple):
  """Which axes of a layer's cache are what.

  Attributes:
    positions: The axis of positions in the keys and in the values.
    heads: The axis of heads in both.
  """

  positions: tuple[int, int]
  heads: int


def cache_axes(implementation: str, platform: str | None = None) -> CacheAxes:
  """The order of axes in a cache.

  Keys and values of a cache are f[A,N,K,D] for the kernels of accelerators. For
  XLA, keys are f[A,K,D,N] and values f[A,K,N,D], as its products take them. In
  other orders it copies the whole cache for every token, or attention takes
  longer: with keys f[A,K,N,D] twice as long for 512 rows of SmolLM2 on a CPU.

  Args:
    implementation: Which code computes attention, as in `over_layout`.
    platform: See `sharding.platform`; None: of the mesh in `use`.
  """
  if _chosen(implementation, platform) == 'xla':
    return CacheAxes(positions=(3, 2), heads=1)
  return CacheAxes(positions=(1, 1), heads=2)


def _chosen(implementation: str, platform: str | None = None) -> str:
  """`'auto'` as the implementation for a kind of device."""
  if implementation != 'auto':
    return implementation
  return _BEST.get(platform or sharding.platform(), 'xla')


def over_prompts(
  length: Array, implementation: str = 'xla', interpret: bool = False
) -> Attention:
  """Attention inside right-padded prompts; fills the cache.

  Args:
    length: i32[P], tokens of each prompt.
    implementation: See `over_layout`. Give `over_cache` the same: it decides
      the order of axes in the cache.
    interpret: Whether to run a kernel on any device, slowly.

  Returns:
    The function that a layer calls. Its output is finite but meaningless behind
    a prompt. The cache that it returns consists of the layer's keys and values,
    with axes in the order of `cache_axes`. Under a window shorter than the
    prompts it is a ring of as many places as the window: position p lies at p
    modulo the window.
  """
  axes = cache_axes(implementation).positions
  attend_prompts = _over_prompts(length, implementation, interpret)

  def newest(x, places):
    """The last places of each prompt, f[P,N,...] -> f[P,places,...]."""
    last = length[:, None] - 1
    position = last - (last - jnp.arange(places)[None]) % places
    # Below 0 in a shorter prompt, which does not fill its ring.
    index = jnp.maximum(position, 0)[:, :, None, None]
    return jnp.take_along_axis(x, index, axis=1)

  def attention(query, key, value, cache, window, cap=None, sinks=None):
    del cache  # there is none yet
    output = attend_prompts(query, key, value, window, cap, sinks)
    if window is not None and window < key.shape[1]:
      key, value = newest(key, window), newest(value, window)
    return output, tuple(map(jnp.moveaxis, (key, value), (1, 1), axes))

  return Attention(
    attention, functools.partial(states_lib.over_prompts, length)
  )


def _over_prompts(
  length: Array, implementation: str, interpret: bool
) -> Callable[..., Array]:
  """`over_prompts` without the cache: the output of a layer's attention."""
  chosen = _chosen(implementation)

  def portable(query, key, value, window, cap, sinks):
    place = jnp.arange(key.shape[1])
    used = place[None] < length[:, None]
    visible = _recent(place, place, window)[None] & used[:, None]
    found = softmax.attend(query, key, value, visible, cap=cap)
    return softmax.drained(found, sinks)

  if chosen == 'xla':
    return portable
  from grpo_jax.models import kernels  # Pallas takes a while to import

  # The causal mask hides from a prompt what comes behind it, so the kernels
  # need not know the lengths.
  def attention(query, key, value, window, cap, sinks):
    arrays = query, key, value
    if chosen == 'splash':
      return kernels.splash(*arrays, None, window, interpret, cap, sinks=sinks)
    if sinks is None and _cudnn_takes(implementation, query, cap):
      return kernels.cudnn_causal(*arrays, window, interpret=interpret)
    return portable(*arrays, window, cap, sinks)

  return attention


def over_cache(
  prompt_length: Array, age: Array, clock: Array, implementation: str = 'xla'
) -> Attention:
  """Attention of one new token per row to its prompt and its own past.

  Rows lie in lanes, `W` rows side by side, and the rows of a lane share its
  prompt. The caches of the rows are rings. All rows write the same place at the
  same time, whenever each of them began. So a new row may take over the cache
  of one that has ended: it sees only as many of the newest places as its own
  age.

  Args:
    prompt_length: i32[A], of each lane's prompt.
    age: i32[B], tokens of each row's completion, the new one included.
    clock: i32[], how many tokens the rows' caches have been given.
    implementation: See `over_layout`. All but `'xla'` mean the decoding kernel
      of `kernels`; `'auto'` means it on an accelerator.

  Returns:
    The function that a layer calls. Its cache is a pair: keys and values of the
    prompts, with N positions, and keys and values of the rows, with M
    positions; see `cache_axes`. The new token is written at `clock` modulo M.
    Neither need be longer than the layer's window; see `over_prompts`.
  """
  axes = cache_axes(implementation).positions
  recent: Callable[..., softmax.Partial] = softmax.attend_recent
  if _chosen(implementation) != 'xla':
    from grpo_jax.models import kernels  # Pallas takes a while to import

    recent = kernels.attend_recent

  def attention(query, key, value, cache, window, cap=None, sinks=None):
    prompt, own = cache
    column = clock % own[0].shape[axes[0]]

    def write(buffer, new, axis):
      new = jnp.moveaxis(new.astype(buffer.dtype), 1, axis)
      return lax.dynamic_update_slice_in_dim(buffer, new, column, axis=axis)

    own = tuple(map(write, own, (key, value), axes))
    lanes = prompt_length.shape[0]
    own_count = age
    prompt_count = jnp.repeat(prompt_length, age.shape[0] // lanes)
    if window is not None:
      # The window reaches back over the row's own tokens first, and with what
      # is left of it into the prompt.
      prompt_count = jnp.clip(window - age, 0, prompt_count)
      own_count = jnp.minimum(age, window)
    # The rows of a lane are one list of queries to their prompt's keys.
    by_lane = query.reshape(lanes, -1, *query.shape[2:])
    last = (prompt_length - 1) % prompt[0].shape[axes[0]]
    shared = recent(
      by_lane, *prompt, last, prompt_count.reshape(lanes, -1), cap=cap
    )
    shared = softmax.Partial(*(x.reshape(-1, 1, *x.shape[2:]) for x in shared))
    # All rows write the same column, so it is the newest of every ring.
    newest = jnp.broadcast_to(column, age.shape)
    alone = recent(query, *own, newest, own_count[:, None], cap=cap)
    return softmax.drained(softmax.merge(shared, alone), sinks), (prompt, own)

  return Attention(attention, states_lib.over_cache)


def over_contexts(
  start: Array,
  count: Array,
  rows: Array | None = None,
  implementation: str = 'xla',
) -> Attention:
  """Attention of new tokens to the contexts that they go on.

  Each row has a cache of its whole context, position p at place p. So a row may
  go on after others, or twice from the same place.

  Args:
    start: i32[E], the position of the first new token of each row.
    count: i32[E], how many of the Q tokens are new; the others are padding,
      which is written nowhere, and gets outputs without meaning.
    rows: i32[E], which rows of the caches they go on, numbered on each data
      shard by itself; equally many on each, and none twice unless it is
      padding alone. None: all of them, in their order.
    implementation: As in `over_cache`.

  Returns:
    The function that a layer calls. Its cache are the keys and values of B
    rows; see `cache_axes`. They hold more places than any context has tokens.
  """
  axes = cache_axes(implementation).positions
  is_portable = _chosen(implementation) == 'xla'

  def attention(query, key, value, cache, window, cap=None, sinks=None):
    tokens = query.shape[1]
    position = start[:, None] + jnp.arange(tokens)[None]
    is_new = jnp.arange(tokens)[None] < count[:, None]

    def write(buffer, new, axis):
      # One past the last place is left out.
      place = jnp.where(is_new, position, buffer.shape[axis])
      return sharding.put_rows(
        buffer, new.astype(buffer.dtype), place, axis, rows
      )

    cache = tuple(map(write, cache, (key, value), axes))
    own_key, own_value = cache
    if rows is not None:
      own_key, own_value = (sharding.take_rows([x], rows) for x in cache)
    seen = position + 1
    if window is not None:
      seen = jnp.minimum(seen, window)
    arrays = query, own_key, own_value
    if is_portable:
      found = softmax.attend_recent(*arrays, position, seen, cap)
    elif tokens == 1:
      from grpo_jax.models import kernels  # Pallas takes a while to import

      found = kernels.attend_recent(*arrays, start, seen, cap)
    else:
      places = jnp.arange(own_key.shape[axes[0]])
      visible = _recent(position, places[None], window)
      found = softmax.attend(*arrays, visible, cap=cap)
    return softmax.drained(found, sinks), cache

  return Attention(
    attention, functools.partial(states_lib.over_contexts, start, count, rows)
  )
