"""Layout: how completions lie in the rows that the model reads.

A `Layout` says what the model reads (tokens, positions, who may attend to whom)
and at which column each completion token is scored. Three functions build one:

- `padded_rows`: one row per completion, with padding behind it;
- `packed_rows`: several completions one after another in a row;
- `shared_prompt`: one row per prompt, which is computed once for its group.

All three give the same log-probabilities; they differ in how much the model
computes. The only readers of a layout are `models.attention` and
`models.scores`. Losses never see a layout, and a layout holds no rewards.

Layouts are built on the host, in NumPy, from what the sampler returned.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

Array = Any  # jax.Array or np.ndarray

Wanted = Callable[[int, int], np.ndarray]
"""From the numbers of rows and columns to bool[R]: which rows to fill. Of
several processes each fills those that lie on its devices."""


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How a row is divided into one prompt and equal blocks behind it.

  Attributes:
    prompt_tokens: Columns of the prompt.
    completions: Number of blocks, one completion in each.
    completion_tokens: Columns of each block.
  """

  prompt_tokens: int
  completions: int
  completion_tokens: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
  """Rows for the model; the first axis of every array is the row.

  A row consists of segments: runs of columns that belong together, such as a
  prompt, or a prompt with its completion. A segment may continue another: a
  completion continues the prompt that it shares with others. A token attends to
  the earlier positions of its own segment and of the segment that this one
  continues.

  Shapes: `R` rows, `S` columns, `C` slots for completions in each row, `T`
  completion positions. Any slice of rows is a layout again.

  Attributes:
    tokens: i32[R,S].
    position: i32[R,S], counted from the start of the prompt.
    segment: i32[R,S], numbered from 1 in each row; 0 is padding.
    parent: i32[R,S], the segment that the token's segment continues, or 0.
    column: i32[R,C,T], the column whose output predicts completion token t.
    target: i32[R,C,T], the id of completion token t.
    completion: i32[R,C], the number p * G + g of the completion in a slot;
      P * G in an empty slot.
    parents: Whether any segment continues another.
    blocks: The equal blocks of every row, if it has such; attention then does
      no work across blocks. None for rows of any segments.
  """

  tokens: Array
  position: Array
  segment: Array
  parent: Array
  column: Array
  target: Array
  completion: Array
  parents: bool = dataclasses.field(default=False, metadata=dict(static=True))
  blocks: Blocks | None = dataclasses.field(
    default=None, metadata=dict(static=True)
  )


@dataclasses.dataclass(frozen=True)
class LayoutSpec:
  """How completions are laid out for the learner.

  Attributes:
    kind: `'shared'`, `'packed'` or `'padded'`, as in the names of the three
      builders; or `'auto'`: `'shared'` or `'packed'`, whichever computes less
      for the lengths at hand; see `stack.decided`.
    micro_rows: Rows of a micro-batch; 0: as many rows as hold `micro_tokens`.
    row_completions: How many completions one row of a shared layout holds; it
      divides the group, and 0 puts the whole group into one row.
    prompt_buckets: Allowed prompt widths, tokens.
    pack_tokens: Least width of a packed row, tokens.
    row_slots: Completions that a packed row holds at most; 0: as many as fit,
      so that the shapes depend on the lengths.
    micro_tokens: Columns of a micro-batch, all rows together; read if
      `micro_rows` is 0.
    shards: Data shards; a micro-batch then has a multiple of this many rows.
    key_cost: Cost of attending to one more key, relative to all else that a
      token costs; `'auto'` compares layouts by it.
    share: Whether packed completions of a group share their prompt; see
      `packed_rows`.
    parts: Into how many equal parts the columns of a row are cut, over devices.
    part_columns: Of what a part, if there are several, has a multiple.
  """

  kind: str
  micro_rows: int
  row_completions: int = 0
  prompt_buckets: Sequence[int] = ()
  pack_tokens: int = 0
  row_slots: int = 0
  micro_tokens: int = 2048
  shards: int = 1
  key_cost: float = 0.0
  share: bool = True
  parts: int = 1
  part_columns: int = 1

  def __post_init__(self):
    if self.kind not in ('auto', 'shared', 'packed', 'padded'):
      raise ValueError(
        f"layout={self.kind!r} is none of 'auto', 'shared', 'packed', "
        "'padded'; set config.learner.layout to one of them."
      )

  @property
  def is_open(self) -> bool:
    """Whether it leaves something to be decided by the first rollout."""
    slots = self.kind == 'packed' and not self.row_slots
    return self.kind == 'auto' or slots

  def rows_of(self, row_tokens: int, rows: int) -> int:
    """Rows of a micro-batch.

    Args:
      row_tokens: Width of the rows.
      rows: How many rows there are in all.
    """
    if self.micro_rows:
      return self.micro_rows
    # Equal parts, rather than full ones and a rest: all micro-batches have one
    # shape, and what the last of them lacks is computed as padding.
    on_each = math.ceil(rows / self.shards)
    columns = math.ceil(row_tokens / self.parts)
    number = math.ceil(on_each * columns / self.micro_tokens)
    most = math.ceil(on_each / number)
    # Equal parts may leave some padding, and somewhat smaller ones less.
    sizes = range(most, most // 2, -1)
    return min(sizes, key=lambda rows: -on_each % rows) * self.shards


def bucket(length: int, sizes: Sequence[int], what: str) -> int:
  """The smallest allowed size that holds `length` tokens.

  A program is compiled for each size, so only a few are allowed.

  Args:
    length: The needed size.
    sizes: The allowed sizes.
    what: What is measured, for the error message.

  Returns:
    A member of `sizes`.

  Raises:
    ValueError: None of the sizes is large enough.

  >>> bucket(5, (4, 8, 16), 'prompt')
  8
  """
  fitting = [size for size in sizes if size >= length]
  if not fitting:
    raise ValueError(
      f'{what} needs {length} tokens, but the largest bucket is {max(sizes)}; '
      'raise the limit in config.data.prompt_buckets or completion_buckets, or '
      "drop such examples with config.data.too_long='drop'."
    )
  return min(fitting)


def _empty(rows, columns, completions, tokens, total) -> dict[str, Any]:
  """The arrays of a layout in which nothing has been written.

  Args:
    rows: `R`.
    columns: `S`.
    completions: `C`.
    tokens: `T`.
    total: `P * G`, which marks a slot as empty.
  """
  model = {
    name: np.zeros((rows, columns), np.int32)
    for name in ('tokens', 'position', 'segment', 'parent')
  }
  scored = {
    name: np.zeros((rows, completions, tokens), np.int32)
    for name in ('column', 'target')
  }
  # One past the last number, which a scatter with mode='drop' leaves out.
  nobody = np.full((rows, completions), total, np.int32)
  return {**model, **scored, 'completion': nobody}


def _write(fields, row, start, ids, position, segment, parent=0):
  """Puts `ids` into columns `start...` of a row, as (part of) a segment."""
  span = slice(start, start + len(ids))
  fields['tokens'][row, span] = ids
  fields['position'][row, span] = position + np.arange(len(ids))
  fields['segment'][row, span] = segment
  fields['parent'][row, span] = parent


def _score(fields, row, slot, index, ids, first, rest):
  """Fills a slot: which completion it holds, and where its tokens are scored.

  Args:
    fields: The arrays.
    row: Of the slot.
    slot: Number of the slot in its row.
    index: Number of the completion.
    ids: Its tokens.
    first: The column that predicts token 0: the last one of the prompt.
    rest: The column of token 0, which predicts token 1, and so on.
  """
  fields['completion'][row, slot] = index
  fields['target'][row, slot, : len(ids)] = ids
  fields['column'][row, slot, : len(ids)] = rest + np.arange(-1, len(ids) - 1)
  if len(ids):
    fields['column'][row, slot, 0] = first


def _flatten(prompts, tokens, length):
  """Yields (number, prompt ids, completion ids) in the order p * G + g."""
  tokens, length = np.asarray(tokens), np.asarray(length)
  for p, prompt in enumerate(prompts):
    # The first token of a completion is scored at the prompt's last column.
    if not len(prompt):
      raise ValueError(
        f'Prompt {p} is empty; a completion needs at least one prompt token '
        'to be predicted from.'
      )
    for g in range(tokens.shape[1]):
      yield p * tokens.shape[1] + g, prompt, tokens[p, g, : length[p, g]]


def _mine(wanted: Wanted | None, rows: int, columns: int) -> np.ndarray:
  return wanted(rows, columns) if wanted else np.ones(rows, bool)


def padded_rows(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  row_tokens: int,
  wanted: Wanted | None = None,
) -> Layout:
  """One row per completion: prompt, completion, padding.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    row_tokens: Width of the rows, `S`.
    wanted: See `Wanted`; None: all.

  Returns:
    A `Layout` with `R = P * G` and `C = 1`.

  Raises:
    ValueError: A prompt is empty, or a row does not fit.
  """
  number = tokens.shape[0] * tokens.shape[1]
  fields = _empty(number, row_tokens, 1, tokens.shape[2], number)
  mine = _mine(wanted, number, row_tokens)
  for index, prompt, ids in _flatten(prompts, tokens, length):
    bucket(len(prompt) + len(ids), (row_tokens,), 'prompt and completion')
    if not mine[index]:
      continue
    _write(fields, index, 0, prompt, 0, 1)
    _write(fields, index, len(prompt), ids, len(prompt), 1)
    _score(fields, index, 0, index, ids, len(prompt) - 1, len(prompt))
  return Layout(**fields)


def packed_rows(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  row_tokens: int,
  share: bool = True,
  row_slots: int = 0,
  wanted: Wanted | None = None,
) -> Layout:
  """Several completions one after another in a row, of any prompts.

  Completions of a group that are to lie behind one copy of their prompt make a
  bundle. First each group is divided into bundles that fit into a row, then the
  bundles are put into rows, the longest first, each into the first row that has
  room. This uses few rows, though not always the fewest.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    row_tokens: Width of the rows, `S`.
    share: Whether a bundle may hold several completions, which then share the
      prompt. Otherwise every completion has a copy of its prompt before it.
    row_slots: Completions in a row at most; 0: as many as fit.
    wanted: See `Wanted`; None: all.

  Returns:
    A `Layout`; `C` is the largest number of completions in one row.

  Raises:
    ValueError: A prompt is empty, or a completion does not fit into a row.
  """
  pieces = list(_flatten(prompts, tokens, length))
  most = row_slots or len(pieces)
  group = np.asarray(tokens).shape[1]
  bundles: list[list[int]] = []  # numbers of completions
  for first in range(0, len(pieces), group):
    prompt_tokens = len(pieces[first][1])
    sizes = {i: len(pieces[i][2]) for i in range(first, first + group)}
    longest = prompt_tokens + max(sizes.values())
    bucket(longest, (row_tokens,), 'prompt and completion')
    # Without room no two completions get into one bundle (but for empty ones).
    room = row_tokens - prompt_tokens if share else 0
    bundles += _first_fit(sizes, room, dict.fromkeys(sizes, 1), most)

  def columns(bundle):
    return len(pieces[bundle[0]][1]) + sum(len(pieces[i][2]) for i in bundle)

  # A bundle is put into a row as a whole: apart, its completions would need the
  # prompt twice.
  sizes = {k: columns(bundle) for k, bundle in enumerate(bundles)}
  counts = {k: len(bundle) for k, bundle in enumerate(bundles)}
  rows = _first_fit(sizes, row_tokens, counts, most)
  most = max(sum(len(bundles[k]) for k in row) for row in rows)
  fields = _empty(len(rows), row_tokens, most, tokens.shape[2], len(pieces))
  for r in np.flatnonzero(_mine(wanted, len(rows), row_tokens)):
    row, start, slot, segment = rows[r], 0, 0, 0
    for bundle in (bundles[k] for k in row):
      prompt = pieces[bundle[0]][1]
      segment += 1
      of_prompt, last = segment, start + len(prompt) - 1
      _write(fields, r, start, prompt, 0, of_prompt)
      start += len(prompt)
      for index, _, ids in (pieces[i] for i in bundle):
        # A completion that shares its prompt is a segment that continues the
        # prompt's; one that does not is part of the prompt's segment.
        segment += share
        parent = of_prompt if share else 0
        _write(fields, r, start, ids, len(prompt), segment, parent)
        _score(fields, r, slot, index, ids, last, start)
        start, slot = start + len(ids), slot + 1
  return Layout(**fields, parents=share)


def _first_fit(
  sizes: dict[int, int], room: int, counts: dict[int, int], most: int
) -> list[list[int]]:
  """Puts keys into bins, the largest first, each into the first with room.

  Args:
    sizes: The size of each key.
    room: How much a bin holds. A key that is larger has a bin of its own.
    counts: How many a key counts for.
    most: How many a bin holds.

  Returns:
    The keys of each bin.

  >>> _first_fit({0: 2, 1: 5, 2: 3}, 6, {0: 1, 1: 1, 2: 1}, 2)
  [[1], [2, 0]]
  """
  bins: list[list[int]] = []
  left: list[tuple[int, int]] = []
  for key in sorted(sizes, key=lambda key: -sizes[key]):
    size, count = sizes[key], counts[key]
    fitting = (
      b
      for b, (free, slots) in enumerate(left)
      if free >= size and slots >= count
    )
    place = next(fitting, None)
    if place is None:
      place = len(bins)
      bins.append([])
      left.append((room, most))
    free, slots = left[place]
    bins[place].append(key)
    left[place] = free - size, slots - count
  return bins


def shared_prompt(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  prompt_tokens: int,
  wanted: Wanted | None = None,
) -> Layout:
  """One row per prompt: the prompt once, then its completions as equal blocks.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    prompt_tokens: Columns for the prompt.
    wanted: See `Wanted`; None: all.

  Returns:
    A `Layout` with `R = P`, `C = G`, `S = prompt_tokens + G * T`, and `blocks`.

  Raises:
    ValueError: A prompt is empty, or does not fit into its columns.
  """
  number, group, most = tokens.shape
  # Blocks have the same width, however short their completions are: attention
  # can then be computed block by block, as one array.
  columns = prompt_tokens + group * most
  fields = _empty(number, columns, group, most, number * group)
  mine = _mine(wanted, number, columns)
  for index, prompt, ids in _flatten(prompts, tokens, length):
    row, slot = divmod(index, group)
    start = prompt_tokens + slot * most
    bucket(len(prompt), (prompt_tokens,), 'prompt')
    if not mine[row]:
      continue
    _write(fields, row, 0, prompt, 0, 1)
    _write(fields, row, start, ids, len(prompt), slot + 2, parent=1)
    _score(fields, row, slot, index, ids, len(prompt) - 1, start)
  blocks = Blocks(prompt_tokens, group, most)
  return Layout(**fields, parents=True, blocks=blocks)
