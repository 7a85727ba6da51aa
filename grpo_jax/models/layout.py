"""Layout: how completions lie in the rows that the model reads.

A `Layout` says what the model reads (tokens, positions, who may attend to whom)
and at which column each completion token is scored. Three functions build one:

- `padded_rows`: one row per completion, with padding behind it;
- `packed_rows`: several completions one after another in a row;
- `shared_prompt`: one row per prompt, which is computed once for its group.

All three give the same log-probabilities; they differ in how much the model
computes. The only readers of a layout are `models.attention` and
`models.scores`. Losses never see a layout, and a layout holds no rewards.

The tokens of a completion lie on T, each once. If what was read before a token
is not simply what lies before it on T, the completion is a tree. It lies in one
slot, every token in one column: `whole_trees`. Where a model cannot read that,
it lies in several: `slots_of_trees`. Such a slot scores a run of its tokens,
behind a copy of their context.

Layouts are built on the host, in NumPy, from what the sampler returned.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import itertools
import math
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = Any  # jax.Array or np.ndarray

Wanted = Callable[[int, int], np.ndarray]
"""From the numbers of rows and columns to bool[R]: which rows to fill. Of
several processes each fills those that lie on its devices."""


class Slot(NamedTuple):
  """A run of a completion's tokens that is scored in one place of a row.

  The position of the first token is the number of tokens that it follows: those
  of the prompt and of the context.

  Attributes:
    completion: The number p * G + g.
    first: The place on T of the first token.
    count: How many tokens follow each other on T and are scored.
    context: i[k], the places on T of what is read between the prompt and the
      first token, in the order in which it is read.
    previous: i[count], of a whole tree: the place on T of the token that each
      token follows; -1: it follows the prompt. None: the one before it.
  """

  completion: int
  first: int
  count: int
  context: np.ndarray
  previous: np.ndarray | None = None


_NOTHING = np.zeros(0, np.int32)


class Tree(NamedTuple):
  """The tokens of a completion, so ordered that each has its own behind it.

  Behind each token come all that have read it, and nothing else before the last
  of them. So it takes one number to say who sees a token.

  Attributes:
    column: i[n], of each token on T its place in this order.
    depth: i[n], of each token on T how many tokens it has read.
    reach: i[n], of each token on T how many tokens have read it.
  """

  column: np.ndarray
  depth: np.ndarray
  reach: np.ndarray


def order_tree(previous: np.ndarray) -> Tree:
  """The order of a completion that may branch.

  Args:
    previous: i[n], the place on T of the token that each token follows; -1: it
      follows the prompt.

  >>> [x.tolist() for x in order_tree(np.array([-1, 0, 0, 1]))]
  [[0, 1, 3, 2], [0, 1, 1, 2], [3, 1, 0, 0]]
  """
  column, depth, reach = np.zeros((3, len(previous)), np.int32)
  begins, runs = _runs(previous) if len(previous) else ((), ())
  inside = np.zeros(len(previous), np.int32)  # in the branches behind a token
  for first, end in reversed(runs):
    own = np.arange(end - first - 1, -1, -1)
    reach[first:end] = own + np.cumsum(inside[first:end][::-1])[::-1]
    if previous[first] >= 0:
      inside[previous[first]] += reach[first] + 1
  free: dict[int, int] = {-1: 0}  # where the next branch behind a token goes
  for first, end in runs:
    last, steps = int(previous[first]), np.arange(end - first)
    if last not in free:  # what goes on with its run is nearest to it
      goes_on = last + 1 < len(previous) and last + 1 not in begins
      free[last] = column[last] + 1 + (reach[last + 1] + 1 if goes_on else 0)
    column[first:end] = free[last] + steps
    depth[first:end] = (depth[last] + 1 if last >= 0 else 0) + steps
    free[last] += reach[first] + 1
  return Tree(column, depth, reach)


def depths(length: np.ndarray, previous: np.ndarray) -> np.ndarray:
  """How many tokens each has read of its completion, i32[P,G,T].

  Args:
    length: i32[P,G], tokens of each completion.
    previous: i32[P,G,T], as in `slots_of_trees`.
  """
  found = np.zeros(previous.shape, np.int32)
  for at in np.ndindex(length.shape):
    size = length[at]
    found[at][:size] = order_tree(previous[at][:size]).depth
  return found


def _runs(previous: np.ndarray) -> tuple[set[int], list[tuple[int, int]]]:
  """The first tokens of runs that follow each other on T, and the runs."""
  place = np.arange(len(previous))
  # A token follows an earlier one, or there would be a circle.
  assert np.all((previous >= -1) & (previous < place)), 'no order of a tree'
  begins = [0, *np.flatnonzero(previous != place - 1).tolist()]
  return {*begins}, [*itertools.pairwise([*begins, len(previous)])]


def whole_trees(length: np.ndarray, previous: np.ndarray) -> list[Slot]:
  """A slot for each completion, which has what its branches share once.

  Args:
    length: i32[P,G], tokens of each completion.
    previous: i32[P,G,T], as in `slots_of_trees`.
  """
  trees, sizes = previous.reshape(-1, previous.shape[-1]), length.reshape(-1)
  return [
    Slot(number, 0, size, _NOTHING, trees[number, :size])
    for number, size in enumerate(sizes.tolist())
  ]


def slots_of_trees(length: np.ndarray, previous: np.ndarray) -> list[Slot]:
  """The slots of trees that are read run by run: as few as there can be.

  Args:
    length: i32[P,G], tokens of each completion.
    previous: i32[P,G,T], the place on T of the token that each token follows;
      -1: it follows the prompt.

  Returns:
    The slots in the order of their completions and places on T. A slot begins
    with each token that does not follow the one before it on T.
  """
  found, trees = [], previous.reshape(-1, previous.shape[-1])
  for number, size in enumerate(length.reshape(-1).tolist()):
    own = trees[number, :size]
    runs: list[Slot] = []
    for first, end in _runs(own)[1]:
      last, context = int(own[first]) if size else -1, _NOTHING
      if last >= 0:
        before = next(run for run in reversed(runs) if run.first <= last)
        since = np.arange(before.first, last + 1)
        context = np.concatenate([before.context, since])
      runs.append(Slot(number, first, end - first, context))
    found += runs
  return found


def check_slots(
  chosen: np.ndarray, length: np.ndarray, slots: Sequence[Slot] | None
) -> None:
  """Asserts that every chosen token is scored in exactly one slot.

  Args:
    chosen: bool[P,G,T], the tokens that the policy chose.
    length: i32[P,G], tokens of each completion.
    slots: None: each completion lies in one, from its first token to its last.
  """
  width = chosen.shape[-1]
  if slots is None:
    once = np.arange(width) < length[..., None]
  else:
    times = np.zeros((length.size, width), np.int32)
    for slot in slots:
      times[slot.completion, slot.first : slot.first + slot.count] += 1
    once = times.reshape(chosen.shape) == 1
  assert once[chosen].all(), 'a token that the policy chose is not scored once'


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How a row is divided into one prompt and equal blocks behind it.

  Attributes:
    prompt_tokens: Columns of the prompt.
    completions: Number of blocks, one slot in each.
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
  continues; if there is a `reach`, to those of them that reach it.

  Shapes: `R` rows, `S` columns, `C` slots for completions in each row, `T`
  completion positions. Any slice of rows is a layout again. A slot's arrays
  [R,C,T] have its tokens at their own places on T.

  Attributes:
    tokens: i32[R,S].
    position: i32[R,S], counted from the start of the prompt.
    segment: i32[R,S], numbered from 1 in each row; 0 is padding.
    parent: i32[R,S], the segment that the token's segment continues, or 0.
    column: i32[R,C,T], the column whose output predicts completion token t.
    target: i32[R,C,T], the id of completion token t.
    completion: i32[R,C], the number p * G + g of the completion in a slot;
      P * G in an empty slot.
    first: i32[R,C], the place on T of the first token of a slot; None: every
      completion lies in one slot, which begins with its token 0.
    count: i32[R,C], how many tokens a slot scores; None like `first`.
    reach: i32[R,S], if completions are trees: how many of the next columns see
      a column; see `reached`. It says all that segments say. None: no branches.
    own: i32[R,C,T], with `reach`: the column of completion token t; without, it
      is the one behind `column`, but for the first token.
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
  first: Array | None = None
  count: Array | None = None
  reach: Array | None = None
  own: Array | None = None
  parents: bool = dataclasses.field(default=False, metadata=dict(static=True))
  blocks: Blocks | None = dataclasses.field(
    default=None, metadata=dict(static=True)
  )

  @property
  def inside(self) -> jax.Array | None:
    """bool[R,C,T], which tokens a slot scores; None: all of its completion."""
    if self.first is None or self.count is None:
      return None
    shape = self.target.shape
    place = jax.lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
    behind = place - jnp.asarray(self.first)[..., None]
    return (behind >= 0) & (behind < jnp.asarray(self.count)[..., None])


@dataclasses.dataclass(frozen=True)
class LayoutSpec:
  """How completions are laid out for the learner.

  Attributes:
    kind: `'shared'`, `'packed'` or `'padded'`, as in the names of the three
      builders; or `'auto'`: `'shared'` or `'packed'`, whichever computes less
      for the lengths at hand; see `stack.decide`.
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
    share: Whether what tokens see can be any part of a row. Then packed
      completions of a group share their prompt, see `packed_rows`, and branches
      of a completion what they have in common, see `whole_trees`.
    branches: Whether completions may be read as whole trees; if not, a branch
      reads a copy of what it has in common with others.
    parts: Into how many equal parts the columns of a row are cut, over devices.
    part_columns: A part, if there are several, has a multiple of this many.
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
  branches: bool = True
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


def reached(reach: Array, queries: int, first: Array | int = 0) -> jax.Array:
  """bool[R,Q,N], which columns see which, by `Layout.reach`.

  Args:
    reach: i32[R,N], of the columns that are seen.
    queries: Q, how many columns see them.
    first: The first of these.

  >>> reached(np.array([[2, 0, 0]]), 3)[0].astype(int).tolist()
  [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
  """
  column = first + jnp.arange(queries)[:, None]
  behind = (column - jnp.arange(reach.shape[1])[None])[None]
  return (behind >= 0) & (behind <= jnp.asarray(reach)[:, None])


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


def _empty(
  rows: int, columns: int, in_row: int, tokens: Array, kind: '_Kind'
) -> dict[str, Any]:
  """The arrays of a layout in which nothing has been written.

  Args:
    rows: `R`.
    columns: `S`.
    in_row: `C`.
    tokens: i32[P,G,T].
    kind: Of the slots.
  """
  number, group, width = tokens.shape
  is_tree, is_cut = kind == 'trees', kind == 'runs'
  of_columns = 'tokens', 'position', 'segment', 'parent'
  of_tokens = 'column', 'target'
  shapes = {
    **dict.fromkeys(of_columns + ('reach',) * is_tree, (rows, columns)),
    **dict.fromkeys(of_tokens + ('own',) * is_tree, (rows, in_row, width)),
    **dict.fromkeys(('first', 'count') if is_cut else (), (rows, in_row)),
  }
  fields = {name: np.zeros(shape, np.int32) for name, shape in shapes.items()}
  # One past the last number, which a scatter with mode='drop' leaves out.
  nobody = np.full((rows, in_row), number * group, np.int32)
  return {**fields, 'completion': nobody}


def _write(fields, row, start, ids, position, segment, parent=0, tree=None):
  """Puts `ids` into columns `start...` of a row, as (part of) a segment."""
  span = slice(start, start + len(ids))
  column, depth = span, np.arange(len(ids))
  if tree is not None:
    column, depth = start + tree.column, tree.depth
    fields['reach'][row, column] = tree.reach
  fields['tokens'][row, column] = ids
  fields['position'][row, column] = position + depth
  fields['segment'][row, span] = segment
  fields['parent'][row, span] = parent


_Kind = Literal['lines', 'runs', 'trees']


def _kind(slots: Sequence[Slot] | None) -> _Kind:
  """What slots hold: whole completions, runs behind contexts, whole trees."""
  if slots is None:
    return 'lines'
  return 'runs' if slots[0].previous is None else 'trees'


class _Piece(NamedTuple):
  """A slot with the ids that are to be written for it."""

  slot: Slot
  prompt: Sequence[int]
  ids: np.ndarray  # those of the context, and then those that are scored
  tree: Tree | None

  @property
  def tokens(self) -> int:
    """How many columns it takes, its prompt included."""
    return len(self.prompt) + len(self.ids)


def _score(fields, row, place, piece: _Piece, last, start):
  """Fills a slot: which completion it holds, and where its tokens are scored.

  Args:
    fields: The arrays.
    row: The row of the slot.
    place: Number of the slot in its row.
    piece: What it holds.
    last: The last column of the prompt, which predicts a token without context.
    start: The first column behind the prompt.
  """
  slot = piece.slot
  before = len(slot.context)
  ids, span = piece.ids[before:], slice(slot.first, slot.first + slot.count)
  fields['completion'][row, place] = slot.completion
  fields['target'][row, place, span] = ids
  column = fields['column'][row, place, span]
  if piece.tree is not None:
    own = start + piece.tree.column
    column[:] = np.append(own, last)[slot.previous]  # -1 is the last of these
    fields['own'][row, place, span] = own
    return
  # A column predicts the token of the next one.
  column[:] = start + before + np.arange(-1, len(ids) - 1)
  if len(ids) and not before:
    column[0] = last
  if 'first' in fields:
    fields['first'][row, place] = slot.first
    fields['count'][row, place] = slot.count


def _pieces(prompts, tokens, length, slots) -> list[list[_Piece]]:
  """What is to be laid out of each prompt, in the order of the slots."""
  tokens, length = np.asarray(tokens), np.asarray(length)
  group, found = tokens.shape[1], [[] for _ in prompts]
  for p, prompt in enumerate(prompts):
    # The first token of a completion is scored at the prompt's last column.
    if not len(prompt):
      raise ValueError(
        f'Prompt {p} is empty; a completion needs at least one prompt token '
        'to be predicted from.'
      )
  if slots is None:
    sizes = enumerate(length.reshape(-1).tolist())
    slots = [Slot(number, 0, size, _NOTHING) for number, size in sizes]
  for slot in slots:
    p, g = divmod(slot.completion, group)
    ids = tokens[p, g, slot.first : slot.first + slot.count]
    if len(slot.context):
      ids = np.concatenate([tokens[p, g, slot.context], ids])
    tree = None if slot.previous is None else order_tree(slot.previous)
    found[p].append(_Piece(slot, prompts[p], ids, tree))
  return found


def _laid_out(
  rows: Sequence[Sequence[Sequence[_Piece]]],
  columns: int,
  in_row: int,
  tokens: Array,
  wanted: Wanted | None,
  share: bool,
  kind: _Kind,
  blocks: Blocks | None = None,
) -> Layout:
  """Writes bundles of completions that lie behind one copy of their prompt.

  Args:
    rows: The bundles of each row.
    columns: `S`.
    in_row: `C`.
    tokens: i32[P,G,T], sampled ids.
    wanted: Which rows to fill; None: all.
    share: Whether a completion is a segment that continues its prompt's.
      Otherwise it is part of the prompt's segment.
    kind: Of the slots.
    blocks: The columns of a prompt and of each completion; None: as many as
      each has tokens.
  """
  fields = _empty(len(rows), columns, in_row, tokens, kind)
  mine = wanted(len(rows), columns) if wanted else np.ones(len(rows), bool)
  for row in np.flatnonzero(mine).tolist():
    start, place, segment = 0, 0, 0
    for bundle in rows[row]:
      prompt = bundle[0].prompt
      segment += 1
      prompt_segment, begin, last = segment, start, start + len(prompt) - 1
      _write(fields, row, start, prompt, 0, prompt_segment)
      start += blocks.prompt_tokens if blocks else len(prompt)
      for piece in bundle:
        segment += share
        parent = prompt_segment if share else 0
        at, tree = (len(prompt), segment, parent), piece.tree
        _write(fields, row, start, piece.ids, *at, tree)
        _score(fields, row, place, piece, last, start)
        start += blocks.completion_tokens if blocks else len(piece.ids)
        place += 1
      if kind == 'trees':  # all that lies behind a prompt has read it
        column = np.arange(begin, last + 1)
        fields['reach'][row, column] = start - 1 - column
  return Layout(**fields, parents=share, blocks=blocks)


def padded_rows(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  row_tokens: int,
  wanted: Wanted | None = None,
  slots: Sequence[Slot] | None = None,
) -> Layout:
  """One row per completion: prompt, completion, padding.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    row_tokens: Width of the rows, `S`.
    wanted: Which rows to fill; None: all.
    slots: Which tokens are scored behind which; None: each completion lies in
      one slot. See `whole_trees` and `slots_of_trees`.

  Returns:
    A `Layout` with a row for each slot, `R = P * G` if none are given, and
    `C = 1`.

  Raises:
    ValueError: A prompt is empty, or a row does not fit.
  """
  pieces = list(itertools.chain(*_pieces(prompts, tokens, length, slots)))
  for piece in pieces:
    bucket(piece.tokens, (row_tokens,), 'prompt and completion')
  rows, kind = [[[piece]] for piece in pieces], _kind(slots)
  return _laid_out(rows, row_tokens, 1, tokens, wanted, False, kind)


def packed_rows(
  prompts: Sequence[Sequence[int]],
  tokens: Array,
  length: Array,
  row_tokens: int,
  share: bool = True,
  row_slots: int = 0,
  wanted: Wanted | None = None,
  slots: Sequence[Slot] | None = None,
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
    wanted: Which rows to fill; None: all.
    slots: Which tokens are scored behind which, as in `padded_rows`.

  Returns:
    A `Layout`; `C` is the largest number of completions in one row.

  Raises:
    ValueError: A prompt is empty, or a completion does not fit into a row.
  """
  pieces_by_prompt = _pieces(prompts, tokens, length, slots)
  most = row_slots or sum(map(len, pieces_by_prompt))
  bundles: list[list[_Piece]] = []
  for pieces in pieces_by_prompt:
    longest = max(piece.tokens for piece in pieces)
    bucket(longest, (row_tokens,), 'prompt and completion')
    sizes = {k: len(piece.ids) for k, piece in enumerate(pieces)}
    # Without room no two completions get into one bundle (but for empty ones).
    room = row_tokens - len(pieces[0].prompt) if share else 0
    fitted = _first_fit(sizes, room, dict.fromkeys(sizes, 1), most)
    bundles += [[pieces[k] for k in bundle] for bundle in fitted]
  # A bundle is put into a row as a whole: apart, its completions would need the
  # prompt twice.
  sizes = {
    k: len(bundle[0].prompt) + sum(len(piece.ids) for piece in bundle)
    for k, bundle in enumerate(bundles)
  }
  counts = {k: len(bundle) for k, bundle in enumerate(bundles)}
  rows = [
    [bundles[k] for k in row]
    for row in _first_fit(sizes, row_tokens, counts, most)
  ]
  most = max(sum(map(len, row)) for row in rows)
  kind = _kind(slots)
  return _laid_out(rows, row_tokens, most, tokens, wanted, share, kind)


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
  slots: Sequence[Slot] | None = None,
) -> Layout:
  """One row per prompt: the prompt once, then its completions as equal blocks.

  Args:
    prompts: `P` lists of ids, none empty.
    tokens: i32[P,G,T], sampled ids.
    length: i32[P,G], tokens of each completion, 0 for an empty one.
    prompt_tokens: Columns for the prompt.
    wanted: Which rows to fill; None: all.
    slots: Which tokens are scored behind which, as in `padded_rows`.

  Returns:
    A `Layout` with `C = G`, `S = prompt_tokens + G * T`, and `blocks`; `R = P`,
    and a further row for every further G slots of a prompt.

  Raises:
    ValueError: A prompt is empty, or does not fit into its columns.
  """
  _, group, most = tokens.shape
  rows = [
    [pieces[first : first + group]]
    for pieces in _pieces(prompts, tokens, length, slots)
    for first in range(0, len(pieces), group)
  ]
  for ((piece, *_),) in rows:
    bucket(len(piece.prompt), (prompt_tokens,), 'prompt')
  # Blocks have the same width, however short their completions are: attention
  # can then be computed block by block, as one array.
  columns, kind = prompt_tokens + group * most, _kind(slots)
  blocks = Blocks(prompt_tokens, group, most)
  return _laid_out(rows, columns, group, tokens, wanted, True, kind, blocks)
