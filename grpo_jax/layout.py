"""Layout: how completions lie in the rows that the model reads.

A `Layout` says what the model reads (tokens, positions, who may attend to whom)
and where each completion token is scored. Padded rows, packed rows, and a
prompt computed once for its whole group are three builders of this one type;
its only readers are `models.attention` and `models.scores`. Losses never see
it, and it never sees a reward.

Builders run on the host, in NumPy, on what the sampler returned.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

Array = Any  # jax.Array or np.ndarray


@dataclasses.dataclass(frozen=True)
class Blocks:
  """The columns of a row made of one prompt and `completions` equal blocks."""

  prompt_tokens: int
  completions: int
  completion_tokens: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layout:
  """Rows for the model; every field's first axis is the row.

  A token attends to the earlier positions of its own segment and of the segment
  that its own continues. `R` rows, `S` columns, `C` completions per row at
  most, `T` completion positions. Any leading slice of rows is a layout again.

  Attributes:
    tokens: i32[R,S].
    position: i32[R,S], counted from the start of the prompt.
    segment: i32[R,S], from 1; 0 is padding.
    parent: i32[R,S], the segment that a token's segment continues, or 0.
    column: i32[R,C,T], the column whose output predicts completion token t.
    target: i32[R,C,T], that token's id.
    completion: i32[R,C], which completion (p * G + g) this is; P * G if none.
    parents: Whether any segment continues another.
    blocks: Equal blocks, when the rows have them: the attention then does no
      work across blocks. None: any segments.
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


def bucket(length: int, sizes: Sequence[int], what: str) -> int:
  """The smallest of `sizes` that holds `length`; few sizes, few compilations.

  Args:
    length: Needed size.
    sizes: Allowed sizes.
    what: What is measured, for the error message.

  Returns:
    A member of `sizes`.

  Raises:
    ValueError: None is large enough.

  >>> bucket(5, (4, 8, 16), 'prompt')
  8
  """
  fitting = [size for size in sizes if size >= length]
  if not fitting:
    raise ValueError(
      f'{what} needs {length} tokens, but the largest bucket is {max(sizes)}; '
      'raise the limit in the config, or filter such examples.'
    )
  return min(fitting)


def _empty(rows, columns, completions, tokens, total) -> dict[str, Any]:
  model = {
    name: np.zeros((rows, columns), np.int32)
    for name in ('tokens', 'position', 'segment', 'parent')
  }
  scored = {
    name: np.zeros((rows, completions, tokens), np.int32)
    for name in ('column', 'target')
  }
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
  """Token 0 is scored at column `first`, token t at `rest + t - 1`."""
  fields['completion'][row, slot] = index
  fields['target'][row, slot, : len(ids)] = ids
  fields['column'][row, slot, : len(ids)] = rest + np.arange(-1, len(ids) - 1)
  if len(ids):
    fields['column'][row, slot, 0] = first


def _flatten(prompts, tokens, length):
  """Yields (index, prompt ids, completion ids) in the order p * G + g."""
  tokens, length = np.asarray(tokens), np.asarray(length)
  for p, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(
        f'Prompt {p} is empty; a completion needs at least one prompt token '
        'to be predicted from.'
      )
    for g in range(tokens.shape[1]):
      yield p * tokens.shape[1] + g, prompt, tokens[p, g, : length[p, g]]


def padded_rows(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  row_tokens: int,
) -> Layout:
  """One row per completion: prompt, completion, padding.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    row_tokens: `S`.

  Returns:
    A `Layout` with `R = P * G` and `C = 1`.

  Raises:
    ValueError: A prompt is empty, or a row does not fit.
  """
  number = tokens.shape[0] * tokens.shape[1]
  fields = _empty(number, row_tokens, 1, tokens.shape[2], number)
  for index, prompt, ids in _flatten(prompts, tokens, length):
    bucket(len(prompt) + len(ids), (row_tokens,), 'prompt and completion')
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
) -> Layout:
  """Several completions, of one prompt or more, one after another in a row.

  Longest first, each behind its prompt in the first place that has room.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    row_tokens: `S`.
    share: Completions of a group that lie in one row share its prompt there;
      otherwise every completion has a copy before it.

  Returns:
    A `Layout` with as few rows as this finds, and `C` the most completions
    that lie in one row.

  Raises:
    ValueError: A prompt is empty, or one completion does not fit into a row.
  """
  pieces = list(_flatten(prompts, tokens, length))
  group = np.asarray(tokens).shape[1]
  bundles: list[list[int]] = []  # completions behind one copy of their prompt
  for first in range(0, len(pieces), group):
    prompt_tokens = len(pieces[first][1])
    sizes = {i: len(pieces[i][2]) for i in range(first, first + group)}
    longest = prompt_tokens + max(sizes.values())
    bucket(longest, (row_tokens,), 'prompt and completion')
    room = row_tokens - prompt_tokens if share else 0
    bundles += _first_fit(sizes, room)

  def columns(bundle):
    return len(pieces[bundle[0]][1]) + sum(len(pieces[i][2]) for i in bundle)

  sizes = {k: columns(bundle) for k, bundle in enumerate(bundles)}
  rows = _first_fit(sizes, row_tokens)
  most = max(sum(len(bundles[k]) for k in row) for row in rows)
  fields = _empty(len(rows), row_tokens, most, tokens.shape[2], len(pieces))
  for r, row in enumerate(rows):
    start = slot = segment = 0
    for bundle in (bundles[k] for k in row):
      prompt = pieces[bundle[0]][1]
      segment += 1
      of_prompt, last = segment, start + len(prompt) - 1
      _write(fields, r, start, prompt, 0, of_prompt)
      start += len(prompt)
      for index, _, ids in (pieces[i] for i in bundle):
        segment += share
        parent = of_prompt if share else 0
        _write(fields, r, start, ids, len(prompt), segment, parent)
        _score(fields, r, slot, index, ids, last, start)
        start, slot = start + len(ids), slot + 1
  return Layout(**fields, parents=share)


def _first_fit(sizes: dict[int, int], room: int) -> list[list[int]]:
  """The keys in bins of `room`, longest first; what is longer lies alone.

  >>> _first_fit({0: 2, 1: 5, 2: 3}, 6)
  [[1], [2, 0]]
  """
  bins: list[list[int]] = []
  left: list[int] = []
  for key in sorted(sizes, key=lambda key: -sizes[key]):
    place = next((b for b, free in enumerate(left) if free >= sizes[key]), None)
    if place is None:
      place = len(bins)
      bins.append([])
      left.append(room)
    bins[place].append(key)
    left[place] -= sizes[key]
  return bins


def shared_prompt(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  prompt_tokens: int,
) -> Layout:
  """One row per prompt: the prompt once, then its G completions as blocks.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    prompt_tokens: Columns of the prompt's block.

  Returns:
    A `Layout` with `R = P`, `C = G`, `S = prompt_tokens + G * T`, and `blocks`.

  Raises:
    ValueError: A prompt is empty, or does not fit into its block.
  """
  number, group, most = tokens.shape
  columns = prompt_tokens + group * most
  fields = _empty(number, columns, group, most, number * group)
  for index, prompt, ids in _flatten(prompts, tokens, length):
    row, slot = divmod(index, group)
    start = prompt_tokens + slot * most
    bucket(len(prompt), (prompt_tokens,), 'prompt')
    _write(fields, row, 0, prompt, 0, 1)
    _write(fields, row, start, ids, len(prompt), slot + 2, parent=1)
    _score(fields, row, slot, index, ids, len(prompt) - 1, start)
  blocks = Blocks(prompt_tokens, group, most)
  return Layout(**fields, parents=True, blocks=blocks)


def pad_to(
  layout: Layout, rows: int, completions: int, num_completions: int
) -> Layout:
  """Adds empty rows and empty completion slots, to reach a compiled shape.

  Args:
    layout: A layout with at most `rows` rows and `completions` slots in each.
    rows: `R` of the result.
    completions: `C` of the result.
    num_completions: `P * G`, which marks a slot as empty.

  Returns:
    A `Layout`; the added rows are padding for the model.
  """
  more_rows = rows - layout.tokens.shape[0]
  more_slots = completions - layout.completion.shape[1]

  def pad(x, *slots, value=0):
    widths = [(0, more_rows), *slots] + [(0, 0)] * (x.ndim - 1 - len(slots))
    return np.pad(x, widths, constant_values=value)

  return Layout(
    tokens=pad(layout.tokens),
    position=pad(layout.position),
    segment=pad(layout.segment),
    parent=pad(layout.parent),
    column=pad(layout.column, (0, more_slots)),
    target=pad(layout.target, (0, more_slots)),
    completion=pad(layout.completion, (0, more_slots), value=num_completions),
    parents=layout.parents,
    blocks=layout.blocks,
  )


def split_rows(layout: Layout, micro_rows: int) -> Layout:
  """[R, ...] -> [R / micro_rows, micro_rows, ...]: a stack of micro-batches."""
  rows = layout.tokens.shape[0]
  if rows % micro_rows:
    raise ValueError(
      f'{rows} rows do not split into micro-batches of {micro_rows}; pad the '
      'layout to a multiple with pad_to.'
    )
  return jax.tree.map(
    lambda x: x.reshape(rows // micro_rows, micro_rows, *x.shape[1:]), layout
  )
