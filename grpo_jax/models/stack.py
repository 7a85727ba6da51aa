"""The rows of an optimizer batch, cut into micro-batches of fixed shape.

A stack is a `Layout` with a leading axis `N` of micro-batches. How many of the
N hold anything is a number that the compiled update is given, so that batches
of different lengths run the same program.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.models import layout
from grpo_jax.models.layout import Layout
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.models.layout import Slot

# `'auto'` takes packed rows, in which attention is not computed block by block,
# only where they are at most this share of the work.
_WORTHWHILE = 0.75


def micro_batches(
  prompts: Sequence[Sequence[int]],
  tokens: np.ndarray,
  length: np.ndarray,
  spec: LayoutSpec,
  shards: np.ndarray | None = None,
  slots: Sequence[Slot] | None = None,
) -> tuple[Layout, int]:
  """The layout of one optimizer batch, as a stack of micro-batches.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion.
    spec: See `LayoutSpec`.
    shards: bool[S], the data shards whose rows are filled; None: all.
    slots: See `layout.padded_rows`.

  Returns:
    A `Layout` [N, micro_rows, ...], and how many of the N hold anything. The
    shapes depend on the buckets, and on nothing else once `spec` is a result of
    `decide`; of trees that lie in several slots also on the number of rows, up
    to a power of two.
  """
  spec = decide(prompts, tokens, length, spec, slots)
  number, group, _ = tokens.shape

  def wanted(rows: int, columns: int) -> np.ndarray:
    if shards is None:
      return np.ones(rows, bool)
    # Each micro-batch is split over the shards by itself.
    micro_rows = spec.rows_of(columns, number)
    return shards[np.arange(rows) % micro_rows * len(shards) // micro_rows]

  built, most_rows = _built(prompts, tokens, length, spec, wanted, slots)
  in_row = spec.row_slots or built.completion.shape[1]
  # No more than there are prompts, if not given: how many packed rows there are
  # depends on the lengths, which the shape of a micro-batch must not.
  micro_rows = spec.rows_of(built.tokens.shape[1], number)
  used = math.ceil(built.tokens.shape[0] / micro_rows)
  whole = math.ceil(most_rows / micro_rows)
  cut = spec.parts * spec.part_columns if spec.parts > 1 else 1
  padded = pad_to(built, whole * micro_rows, in_row, number * group, cut)
  # One micro-batch after another, on a new first axis.
  stacked = jax.tree.map(
    lambda x: x.reshape(whole, micro_rows, *x.shape[1:]), padded
  )
  return stacked, used


def number_tokens(
  prompts: Sequence[Sequence[int]], shape: tuple[int, ...], chosen: np.ndarray
) -> tuple[list[list[int]], np.ndarray]:
  """Prompts and completions as numbers, for who does not know the ids.

  A token of a completion is its place among those of the chosen prompts, from
  1; that of a prompt is -1 less its id. `fill` turns a layout of such numbers
  into one of ids.

  Args:
    prompts: `P` lists of ids.
    shape: (P, G, T) of the completions.
    chosen: i[P'], which prompts.

  Returns:
    The chosen prompts, and i32[P',G,T].
  """
  shape = len(chosen), *shape[1:]
  place = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
  return [[-1 - token for token in prompts[p]] for p in chosen], place


def fill(rows: Layout, ids: jax.Array) -> Layout:
  """The layout of `number_tokens`, with the ids in their place.

  Args:
    rows: A layout, on the devices.
    ids: i32[R,C,T], those of the completions in its slots.
  """
  width = ids.shape[-1]
  # In which slot of its row a token's completion is.
  token_completion = (rows.tokens - 1) // width  # [R,S]
  here = rows.completion[:, None] == token_completion[..., None]  # [R,S,C]
  slot, column = jnp.argmax(here, axis=-1), (rows.tokens - 1) % width
  row = jnp.arange(len(ids))[:, None]
  prompt_ids = jnp.where(rows.tokens < 0, -1 - rows.tokens, 0)
  tokens = jnp.where(rows.tokens > 0, ids[row, slot, column], prompt_ids)
  target = jnp.where(rows.target > 0, ids, 0)
  return dataclasses.replace(rows, tokens=tokens, target=target)


def decide(
  prompts: Sequence[Sequence[int]],
  tokens: np.ndarray,
  length: np.ndarray,
  spec: LayoutSpec,
  slots: Sequence[Slot] | None = None,
) -> LayoutSpec:
  """What a spec leaves open, decided by the lengths of one optimizer batch.

  A run decides once, by its first rollout: every other layout would be compiled
  when it is first chosen, in the midst of the run.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion.
    spec: See `LayoutSpec`.
    slots: See `layout.padded_rows`.

  Returns:
    The spec with a kind that is not `'auto'`, and with `row_slots` if that is
    `'packed'`: the most completions in one row, rounded up to a power of two.
  """

  def laid_out(spec: LayoutSpec) -> Layout:
    return _built(prompts, tokens, length, spec, slots=slots)[0]

  if spec.kind == 'auto':
    share = dataclasses.replace(spec, kind='shared')
    built = laid_out(share)
    needed = sum(map(len, prompts)) + int(length.sum())
    if slots is not None:  # contexts are read again
      needed += sum(len(slot.context) for slot in slots)
    if needed >= _WORTHWHILE * built.tokens.size:
      return share
    pack = dataclasses.replace(spec, kind='packed')
    works = [
      _work(rows, len(prompts), spec) for rows in (laid_out(pack), built)
    ]
    spec = pack if works[0] < _WORTHWHILE * works[1] else share
  if spec.kind == 'packed' and not spec.row_slots:
    most = laid_out(spec).completion.shape[1]
    return dataclasses.replace(spec, row_slots=_power_of_two(most))
  return spec


def _built(
  prompts,
  tokens,
  length,
  spec: LayoutSpec,
  wanted: layout.Wanted | None = None,
  slots: Sequence[Slot] | None = None,
) -> tuple[Layout, int]:
  """A layout of a kind, and the most rows it has for any lengths."""
  kind, (number, group, width) = spec.kind, tokens.shape
  prompt_width = layout.bucket(
    max(map(len, prompts)), spec.prompt_buckets, 'prompt'
  )
  row_tokens, most = prompt_width + width, number * group
  if kind == 'padded':
    rows = layout.padded_rows(
      prompts, tokens, length, row_tokens, wanted, slots
    )
  elif kind == 'packed':
    row_tokens = max(row_tokens, spec.pack_tokens)
    rows = layout.packed_rows(
      prompts,
      tokens,
      length,
      row_tokens,
      spec.share,
      spec.row_slots,
      wanted,
      slots,
    )
  else:
    per_row = spec.row_completions or group
    if group % per_row:
      raise ValueError(
        f'row_completions={per_row} does not divide the group of {group}; set '
        'config.learner.row_completions to a divisor.'
      )
    most //= per_row
    rows = layout.shared_prompt(
      [prompt for prompt in prompts for _ in range(group // per_row)],
      tokens.reshape(most, per_row, width),
      length.reshape(most, per_row),
      prompt_width,
      wanted,
      slots,
    )
  # There may be more if trees lie in several slots, and few shapes are compiled
  # for them.
  here = rows.tokens.shape[0]
  return rows, most if here <= most else _power_of_two(here)


def _work(rows: Layout, prompts: int, spec: LayoutSpec) -> float:
  """What a layout costs the model, in tokens without attention."""
  number, columns = rows.tokens.shape
  micro_rows = spec.rows_of(columns, prompts)
  number = math.ceil(number / micro_rows) * micro_rows
  keys, key_cost = columns, spec.key_cost
  if rows.blocks is not None:
    keys = rows.blocks.prompt_tokens + rows.blocks.completion_tokens
  return number * columns * (1 + key_cost * keys)


def _power_of_two(number: int) -> int:
  """The next one, `number` included."""
  return 1 << (number - 1).bit_length()


def pad_to(
  rows: Layout, number: int, slots: int, num_completions: int, columns: int
) -> Layout:
  """Adds empty rows, slots and columns, so that a compiled program fits.

  Args:
    rows: A layout with at most `number` rows and `slots` slots in each.
    number: `R` of the result.
    slots: `C` of the result.
    num_completions: `P * G`, which marks a slot as empty.
    columns: The result has a multiple of this many.

  Returns:
    A `Layout`. The model takes what was added for padding, and no one reads
    what is scored in the added slots.
  """
  more_rows = number - rows.tokens.shape[0]
  more_slots = 0, slots - rows.completion.shape[1]
  more_columns = 0, -rows.tokens.shape[1] % columns

  def pad(x, more, value=0):
    widths = [(0, more_rows), more] + [(0, 0)] * (x.ndim - 2)
    return np.pad(x, widths, constant_values=value)

  columns_of = 'tokens', 'position', 'segment', 'parent', 'reach'
  slots_of = 'column', 'target', 'first', 'count', 'own'
  fields = {
    name: pad(x, more_columns if name in columns_of else more_slots)
    for name in (*columns_of, *slots_of)
    if (x := getattr(rows, name)) is not None
  }
  nobody = pad(rows.completion, more_slots, value=num_completions)
  return dataclasses.replace(rows, **fields, completion=nobody)
