"""Flat rows to a `Batch` and back: how other training loops use the losses.

Most trainers (TRL, verl, Tunix and others) hold a rollout as arrays `[B,S]`,
with one row per completion and a group id per row. The losses here read
`[P,G,T]`, where the completions of one prompt lie side by side.
`batch_from_rows` makes the `Batch`, once per rollout. It also returns a `Rows`,
which moves arrays from one arrangement to the other, inside `jax.jit` and under
`jax.grad` too.

Axes: `B` rows, `S` columns of a row; `P`, `G`, `T` as in `_base.py`.
"""

import collections
from typing import NamedTuple

import jax
from jax import core
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
from jax.sharding import reshard
import numpy as np

from grpo_jax.losses._base import OF_TURNS
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import check_batch
from grpo_jax.losses._base import make_batch

_PER_TOKEN = (
  'mask', 'tokens', 'keep', 'version', 'logp_old', 'logp_ref', 'logp_sampler',
  'entropy_old', 'advantage',
)  # fmt: skip
_PER_ROW = ('reward', 'valid', 'truncated', 'reward_parts')
_BOOLEAN = {'mask', 'keep', 'valid', 'truncated'}
_INTEGER = {'tokens', 'version'}


class Rows(NamedTuple):
  """Where every token of the rows stands in the `Batch`, and the way back.

  A pytree of index arrays: pass it to a jitted function as an argument. Batches
  of the same shapes then share one compiled program.

  Each row's span, from the first token that the policy chose to the last, is
  one completion's positions `0, 1, ...`. What lies outside the span (prompt,
  padding) is in no completion.

  An index past the end of the other arrangement means: it has no such place.

  Attributes:
    token_in_rows: i32[P,G,T], the token's place in the flattened [B,S].
    token_in_batch: i32[B,S], its place in the flattened [P,G,T].
    row: i32[P,G], the completion's row.
    completion: i32[B], the row's place in the flattened [P,G].
  """

  token_in_rows: Array
  token_in_batch: Array
  row: Array
  completion: Array

  def gather(self, values) -> Array:
    """From rows to completions: `[B,S,...]` -> `[P,G,T,...]`.

    Args:
      values: One value per token of the rows: log-probabilities, entropies.

    Returns:
      The values of each completion from position 0 on, and 0 after its end.

    Raises:
      ValueError: The first axes of `values` are not `[B,S]`.
    """
    axes = self.token_in_batch.shape
    return _take(values, self.token_in_rows, axes, 'Rows.gather')

  def scatter(self, values) -> Array:
    """From completions to rows: `[P,G,T,...]` -> `[B,S,...]`.

    Args:
      values: One value per token of the batch: weights, metrics, the gradient
        of the loss with respect to the log-probabilities.

    Returns:
      Each value in the row and column of its token, and 0 outside the spans.

    Raises:
      ValueError: The first axes of `values` are not `[P,G,T]`.
    """
    axes = self.token_in_rows.shape
    return _take(values, self.token_in_batch, axes, 'Rows.scatter')

  def gather_rows(self, values) -> Array:
    """From rows to completions: `[B,...]` -> `[P,G,...]`, 0 without a row.

    Raises a ValueError if the first axis of `values` is not `[B]`.
    """
    return _take(values, self.row, self.completion.shape, 'Rows.gather_rows')

  def scatter_rows(self, values) -> Array:
    """From completions to rows: `[P,G,...]` -> `[B,...]`.

    Raises a ValueError if the first axes of `values` are not `[P,G]`.
    """
    return _take(values, self.completion, self.row.shape, 'Rows.scatter_rows')

  def scatter_batch(self, batch: Batch) -> Batch:
    """The same batch as `[B,1,S]`: every row alone, its tokens where they were.

    For loops that split a batch into micro-batches of rows: `surrogate_loss`
    takes any rows of the result, with the model's `logp[:, None]` of these
    rows, and the losses of all micro-batches add up to that of the batch.

    Args:
      batch: What `prepare` returned, for a method whose `scope` is `'row'`. The
        groups are lost here, so `credit` and `prepare` come first.

    Returns:
      The `Batch`. Among the extras, arrays whose first axes are `[P,G,T]` are
      moved token by token, others row by row.
    """

    def moved(values):
      per_token = jnp.shape(values)[:3] == self.token_in_rows.shape
      return (self.scatter if per_token else self.scatter_rows)(values)[:, None]

    # By itself: [P,G,K] would pass for per-token values where K equals T.
    parts = self.scatter_rows(batch.reward_parts)[:, None]
    return jax.tree.map(moved, batch)._replace(reward_parts=parts)


def batch_from_rows(
  mask, group, reward, *, shape=None, extras=None, **fields
) -> tuple[Batch, Rows]:
  """Builds a `Batch` from rows that each hold one completion.

  Call it outside `jax.jit`, once per rollout, with NumPy arrays, JAX arrays or
  lists: it decides shapes from the values of `mask` and `group`. The model's
  own log-probabilities, which need a gradient, go through `Rows.gather`.

  The columns may be those of the completions alone, or those of prompt and
  completion in one row, padded on either side. A row's completion begins at the
  first token that its mask marks and ends at the last. Every completion is
  moved to position 0, because the transforms that compare completions
  (`recenter_shared_prefix`, `conflict_tokens`, `credit_tokens_by_entropy`)
  compare equal positions.

  **No shift by one.** `logp_old[b, s]` is the log-probability of
  `tokens[b, s]`, given the columns before `s`. Logits predict the next column,
  so a loop that computes `log_softmax(logits[:, :-1])` at the ids
  `tokens[:, 1:]` has one column less than `tokens`, and its column `s` belongs
  to the token of column `s + 1`. Put one column before it:
  `np.pad(logp, ((0, 0), (1, 0)))`. (TRL, verl and Tunix have done the shift
  already: their arrays are as wide as their completions.)

  Args:
    mask: bool[B,S] or 0 and 1: True where the policy chose the token, end token
      included; False on prompt, padding and the output of tools. It says who
      wrote a token. To leave out some of the policy's own, give `keep`.
    group: [B] integers or strings; rows with equal ones answer the same prompt.
      They need not be neighbours, and groups may differ in size. Prompts are
      numbered in the order in which their groups appear, and completions in
      the order of their rows.
    reward: f[B].
    shape: `(P, G, T)` of the batch, to keep one compiled program while the
      number of groups, the largest group and the longest completion vary. The
      rest of the shape is filled with invalid completions and masked positions.
      None for the smallest shape that holds the rows.
    extras: Dict of your own arrays, and of those of turns: `turn` `[B,S]` and
      `turn_reward` `[B,N]`. One whose first axes are `[B,S]` becomes
      `[P,G,T,...]`, any other of first axis `B` becomes `[P,G,...]`.
    **fields: Any other field of `Batch` but the weight; None counts as not
      given. `[B,S]`: `tokens`, `keep`, `version`, `logp_old`, `logp_ref`,
      `logp_sampler`, `entropy_old`, and `advantage` if your loop has computed
      it and the method sets none. `[B]`: `valid`, `truncated`. `[B,K]`:
      `reward_parts`, NaN where a reward has not judged a row.

  Returns:
    The checked batch and its `Rows`. Groups smaller than the largest are filled
    with invalid completions, which change nothing. A row whose mask marks
    nothing is a valid completion without tokens: its reward counts in its
    group, as in TRL with `mask_truncated_completions`. Give `valid=False` to a
    row that was not judged, and it counts nowhere.

  Raises:
    ValueError: An array has the wrong shape or kind of values, a valid row's
      reward is not finite, or the rows do not fit into `shape`.

  >>> import numpy as np
  >>> from grpo_jax import losses
  >>> tokens = np.array([[9, 5, 6, 0], [0, 8, 5, 7], [9, 5, 7, 7]])
  >>> mask = np.array([[0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 1, 1]])
  >>> batch, rows = losses.batch_from_rows(
  ...   mask, ['a', 'b', 'a'], [1.0, 5.0, 0.0], tokens=tokens)
  >>> batch.tokens.tolist()
  [[[5, 6, 0], [5, 7, 7]], [[5, 7, 0], [0, 0, 0]]]
  >>> batch.valid.tolist()
  [[True, True], [True, False]]
  >>> rows.scatter(batch.tokens).tolist()
  [[0, 5, 6, 0], [0, 0, 5, 7], [0, 5, 7, 7]]
  """
  for name, value in {'mask': mask, 'group': group, 'reward': reward}.items():
    if isinstance(value, core.Tracer):
      raise ValueError(
        f'batch_from_rows got a traced {name}, but it needs values to decide '
        'shapes. Call it outside jax.jit and jax.grad, and use Rows.gather '
        'inside them.'
      )
  given = {'mask': mask, 'reward': reward, **fields}
  given = {k: _array(v) for k, v in given.items() if v is not None}
  own = {name: _array(value) for name, value in (extras or {}).items()}
  size = _check_shapes(given, own)
  given.setdefault('valid', np.ones(size[0], bool))
  _check_values(given)
  rows = _match(
    np.asarray(given['mask'], bool), _group_ids(group, size[0]), shape
  )
  return _fill(rows, given, own), rows


# Compiled as one program, because operation by operation every new shape costs
# about 50 small compilations: 17 s against 3 s for 512 rows of 4096 columns.
@jax.jit
def _fill(rows: Rows, given, extras) -> Batch:
  """Moves fields and extras from rows to completions; checks the batch."""

  def placed(value, per_token):
    return (rows.gather if per_token else rows.gather_rows)(value)

  for names, dtype in ((_BOOLEAN, bool), (_INTEGER, np.int32)):
    given |= {name: given[name].astype(dtype) for name in names & given.keys()}
  size = rows.token_in_batch.shape
  fields = {k: placed(v, k in _PER_TOKEN) for k, v in given.items()}
  # Of each turn, and not of each token, also where there are as many.
  by_turn = OF_TURNS - {'turn'}
  own = {
    k: placed(v, v.shape[:2] == size and k not in by_turn)
    for k, v in extras.items()
  }
  return check_batch(make_batch(**fields, extras=own))


def _array(value) -> Array:
  """A JAX array as it is, anything else as a NumPy array."""
  return value if isinstance(value, jax.Array) else np.asarray(value)


def _take(values, index: Array, axes: tuple[int, ...], caller: str) -> Array:
  """`values`, its first axes flattened, at `index`; 0 past their end.

  Args:
    values: Its first axes must be `axes`.
    index: i32, of any shape; an index past the end means: no such place.
    axes: Lengths of the axes to flatten.
    caller: Name of the method that takes, for the error.
  """
  values = jnp.asarray(values)
  if values.shape[: len(axes)] != axes:
    raise ValueError(
      f'{caller} got an array of shape {values.shape}; its first axes must be '
      f'{axes}, as in the arrays that batch_from_rows got and made.'
    )
  # A sharded axis cannot be indexed under a mesh with Explicit axes. The array
  # is a few MB, so every device gets all of it.
  if AxisType.Explicit in jax.typeof(values).sharding.mesh.axis_types:
    values = reshard(values, PartitionSpec())
  flat = values.reshape((-1, *values.shape[len(axes) :]))
  return flat.at[index].get(mode='fill', fill_value=0)


def _match(mask: np.ndarray, group: list, shape) -> Rows:
  """The `Rows` of a mask bool[B,S] and of one group id per row."""
  # Not np.unique, which would sort the groups: prompts keep the order in which
  # they appear.
  numbers = {name: k for k, name in enumerate(dict.fromkeys(group))}
  sizes = collections.Counter()
  prompt, member = np.zeros((2, len(group)), np.int32)
  for row, name in enumerate(group):
    prompt[row], member[row] = numbers[name], sizes[name]
    sizes[name] += 1
  # argmax finds the first True. In an empty row it finds 0 from either end, so
  # the span would be the whole row.
  columns = mask.shape[1]
  start = np.argmax(mask, axis=1)
  stop = np.where(
    np.any(mask, axis=1), columns - np.argmax(mask[:, ::-1], axis=1), 0
  )
  longest = max(1, int(np.max(stop - start)))
  needed = len(sizes), max(sizes.values()), longest
  shape = needed if shape is None else tuple(shape)
  if len(shape) != 3 or any(np.array(shape) < needed):
    raise ValueError(
      f'batch_from_rows got shape={shape}, but these rows need at least '
      f'{needed}: groups, completions in the largest group, tokens in the '
      'longest completion. Give [P,G,T] that hold them, or shape=None.'
    )
  prompts, group_size, width = shape
  # The first index past the end of each arrangement, which means: no place.
  none = prompts * group_size * width, mask.size
  column = np.arange(columns)
  inside = (start[:, None] <= column) & (column < stop[:, None])
  completion = prompt * group_size + member
  position = column - start[:, None]
  place = np.where(inside, completion[:, None] * width + position, none[0])
  token = np.full(none[0], none[1])
  token[place[inside]] = np.flatnonzero(inside)
  row = np.full(prompts * group_size, len(group))
  row[completion] = np.arange(len(group))
  rows = Rows(token.reshape(shape), place, row.reshape(shape[:2]), completion)
  return jax.tree.map(lambda index: jnp.asarray(index, jnp.int32), rows)


def _group_ids(group, rows: int) -> list:
  """The group ids as a list of integers or strings."""
  if np.shape(group) != (rows,):
    raise ValueError(
      f'batch_from_rows got group of shape {np.shape(group)} and a mask of '
      f'{rows} rows; give one group id per row.'
    )
  # `tolist` makes Python integers and strings of NumPy's and JAX's: an array of
  # JAX could not be a key of a dict.
  ids = group.tolist() if hasattr(group, 'tolist') else list(group)
  for row, name in enumerate(ids):
    if not isinstance(name, int | np.integer | str):
      raise ValueError(
        f'batch_from_rows got the group id {name!r} in row {row}; give '
        'integers or strings, equal for the rows of one prompt.'
      )
  return ids


def _check_shapes(given, extras) -> tuple[int, int]:
  """Raises a ValueError for a wrong name or shape; returns `(B, S)`."""
  size = given['mask'].shape
  if len(size) != 2 or 0 in size:
    raise ValueError(
      f'batch_from_rows got a mask of shape {size}; give [B,S], with at least '
      'one row and one column.'
    )
  known = *_PER_TOKEN, *_PER_ROW
  for name, value in given.items():
    if name not in known:
      raise ValueError(
        f'batch_from_rows got {name!r}, which is none of the fields that rows '
        f'can fill: {", ".join(known)}. Put arrays of your own into extras.'
      )
    want = size if name in _PER_TOKEN else size[:1]
    found = value.shape[:1] if name == 'reward_parts' else value.shape
    if found != want:
      shifted = found == (size[0], size[1] - 1) and name in _PER_TOKEN
      hint = (
        'It has one column less: put one before the first, so that the value '
        f'of column s is that of the token in column s, '
        f'np.pad({name}, ((0, 0), (1, 0))).'
        if shifted
        else f'Give {name} the shape {want}.'
      )
      raise ValueError(
        f'batch_from_rows got {name} of shape {value.shape} and a mask of '
        f'shape {size}. {hint}'
      )
  for name, value in extras.items():
    if value.shape[:1] != size[:1]:
      raise ValueError(
        f'batch_from_rows got extras[{name!r}] of shape {value.shape} and a '
        f'mask of shape {size}. Its first axis must be the {size[0]} rows.'
      )
  return size


def _check_values(given) -> None:
  """Raises a ValueError for a flag that is not 0 or 1, or a bad reward."""
  for name in sorted(_BOOLEAN & given.keys()):
    value = np.asarray(given[name])
    wrong = value[(value != 0) & (value != 1)]
    if wrong.size:
      raise ValueError(
        f'batch_from_rows got {name} with the value {wrong[0]}; give booleans, '
        'or 0 and 1.'
      )
  # Only of valid rows: what an invalid row holds changes nothing.
  valid = np.asarray(given['valid'], bool)
  for name in sorted({'reward', 'reward_parts'} & given.keys()):
    value = np.asarray(given[name]).reshape(valid.size, -1)
    usable = np.isfinite(value)
    if name == 'reward_parts':  # NaN: this reward has not judged the row
      usable |= np.isnan(value)
    finite = np.all(usable, axis=1)
    wrong = np.flatnonzero(valid & ~finite)
    if wrong.size:
      raise ValueError(
        f'batch_from_rows got a {name} that is not finite in the rows '
        f'{wrong.tolist()}; give valid=False to a row that was not judged.'
      )
