"""Rollouts as Parquet files, for people who read completions and for replay.

A file has one row per completion, in the order p * G + g. pandas, DuckDB and
Polars read its columns as they are:

===================== ======================================================
step, index           which rollout; the global prompt counter
completion_number     0 to G - 1, within the prompt
prompt, completion    text
answer                text: the reference answer, if the prompts have any
length_tokens         of the completion, end token included
reward, reward/NAME   the sum, and each reward function's value; NaN: none
failure/NAME          text: why the function failed in a worker; null if it has
                      not
judged, truncated     `Batch.valid`; ended by the length limit
prompt_ids            list
completion_ids        list, as long as the completion; `Batch.tokens`
mask, version, ...    every other field of `Batch` that is set, by its name
extras/NAME           every array of `Batch.extras`
previous              list: `Rollout.previous`, if completions branch
messages              JSON, if the completions are episodes that were played:
                      who said what; see `Account`. So are the columns below
chosen, turn          lists, in the place of `mask` and `extras/turn`: which
                      tokens the policy wrote, and in which turn
turn_reward           list: what the environment gave for each turn, or null
ended, failure        text: what has ended the episode; why it failed, or null
last_text             text: what the policy has said last
tool_calls, ...       `tool_errors` and `parse_errors`: how many
counted               JSON: what else the environment has counted, or null
coefficient           list, if it was measured: weight times advantage
log_ratio_after       list, likewise: how far the log-probability of each token
                      has moved after the updates of the rollout, nats
===================== ======================================================

A field [P,G] of the batch is a number. A field [P,G,T] is a list, cut at the
completion's length. A field of another shape [P,G,...] is a list of all its
values. What columns cannot say, such as shapes and dtypes, stands in the
metadata of the schema, so that a rollout comes back bit for bit.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from grpo_jax.config import whole_files
from grpo_jax.episodes.types import KNOWN_TO_ALL
from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Batch
from grpo_jax.episodes.types import Rollout

_METADATA = b'grpo_jax.transcript'  # as in files of earlier versions
_EXTRAS, _REWARD, _FAILURE = 'extras/', 'reward/', 'failure/'
_COLUMNS = {'tokens': 'completion_ids', 'valid': 'judged'}  # of fields of Batch
_OF_EPISODES = {
  'mask': 'chosen',
  _EXTRAS + 'turn': 'turn',
}  # if they were played
_FIELDS = {
  column: field for field, column in {**_COLUMNS, **_OF_EPISODES}.items()
}
_COUNTS = 'tool_calls', 'tool_errors', 'parse_errors'
_ANSWER = 'answer'
_PARTS, _PART_ROWS = 64, 1024  # of a file, at most; of a part, at least
_NAME = re.compile(r'step_(\d+)\.parquet')


def to_bytes(
  rollout: Rollout,
  step: int,
  effects: Mapping[str, np.ndarray] | None = None,
) -> bytes:
  """A rollout as the bytes of a Parquet file.

  Args:
    rollout: See `Rollout`; its arrays may lie on a device.
    step: Number of the rollout, for the column `step`.
    effects: f32[P,G,T] by name, what updates did to each token, for people to
      read: a rollout that comes back from the file does not have them.

  Returns:
    The contents of the file.

  Raises:
    ValueError: A field [P,G,T] is not zero past a completion's length, where
      the file keeps nothing; or a field has a dtype that Parquet lacks.
  """
  # Imported here, so that programs which write no rollouts start sooner.
  import pyarrow as pa
  from pyarrow import parquet

  number, group, width = rollout.batch.mask.shape
  length, index = np.asarray(rollout.length), np.asarray(rollout.index)
  repeat = np.repeat(np.arange(number), group)  # the prompt of each row
  inside = np.minimum(length.reshape(-1), width)
  columns = {
    'step': pa.array(np.full(number * group, step, np.int64)),
    'index': pa.array(index[repeat]),
    'completion_number': pa.array(np.tile(np.arange(group), number)),
    'prompt': pa.array(rollout.prompt_texts, pa.string()).take(repeat),
    'completion': pa.array(
      [text for row in rollout.texts for text in row], pa.string()
    ),
    'length_tokens': pa.array(length.reshape(-1)),
    'prompt_ids': pa.array(rollout.prompts, pa.list_(pa.int64())).take(repeat),
  }
  if any(answer is not None for answer in rollout.answers):
    columns[_ANSWER] = pa.array(rollout.answers, pa.string()).take(repeat)
  if rollout.failures is not None:
    for k, name in enumerate(_part_names(rollout)):
      texts = rollout.failures[..., k].reshape(-1)
      columns[_FAILURE + name] = pa.array(
        [x or None for x in texts], pa.string()
      )
  columns |= _accounts(rollout)
  described = {}
  for column, values in _arrays(rollout).items():
    tail = values.shape[2:]
    cut = tail == (width,)  # a field [P,G,T]; all others are stored whole
    counts = inside if cut else np.full(inside.shape, math.prod(tail))
    columns[column] = _column(column, values, counts)
    described[column] = (values.dtype.name, tail, cut)
  for column, values in (effects or {}).items():
    columns[column] = _column(column, values, inside)
  metadata = {
    'shape': (number, group),
    'reward_names': rollout.reward_names,
    'length': length.dtype.name,
    'index': index.dtype.name,
    'arrays': described,
  }
  table = pa.table(columns).replace_schema_metadata(
    {_METADATA: json.dumps(metadata)}
  )
  sink = pa.BufferOutputStream()
  # In parts, of which a process reads those that it needs.
  part = group * max(-(-number // _PARTS), -(-_PART_ROWS // group))
  parquet.write_table(table, sink, row_group_size=part, compression='zstd')
  return sink.getvalue().to_pybytes()


def from_bytes(data: bytes) -> Rollout:
  """The rollout that `to_bytes` was given, bit for bit, with NumPy arrays.

  Args:
    data: What `to_bytes` returned.

  Returns:
    A `Rollout`; its fields [P,G,T] are zero past each completion's length.

  Raises:
    ValueError: These bytes are not what `to_bytes` returns.
  """
  import pyarrow as pa

  return _read(pa.BufferReader(data), 'What from_bytes got')


def write(
  path: str | os.PathLike,
  rollout: Rollout,
  step: int,
  effects: Mapping[str, np.ndarray] | None = None,
) -> None:
  """Writes a rollout to a file, all or nothing.

  See `whole_files.write`: a process that is killed meanwhile leaves no half
  file, and a device such as /dev/null stays a device.

  Args:
    path: The file. Its directory is made if there is none.
    rollout: Its arrays may lie on a device.
    step: Number of the rollout.
    effects: What updates did to each token; see `to_bytes`.

  Raises:
    ValueError: The file cannot hold it; see `to_bytes`.
  """
  path = pathlib.Path(path)
  data = to_bytes(rollout, step, effects)
  path.parent.mkdir(parents=True, exist_ok=True)
  whole_files.write(path, data)


def read(
  path: str | os.PathLike, share: Callable[[int], np.ndarray] | None = None
) -> Rollout:
  """Reads a file that `write` wrote; see `from_bytes`.

  Args:
    path: The file.
    share: From the number of prompts to i64[P], the process that is to know
      each one's completions; see `Rollout.holder`. The others are not read.
      None: all are.

  Raises:
    ValueError: The file was not written by `write`, or has been changed.
  """
  return _read(os.fspath(path), str(path), share)


def extras_in(path: str | os.PathLike) -> set[str]:
  """The names in `Batch.extras` of a file's rollout.

  Raises:
    ValueError: The file cannot be read.
  """
  import pyarrow as pa
  from pyarrow import parquet

  try:
    names = parquet.read_schema(os.fspath(path)).names
  except (pa.ArrowException, OSError) as error:
    raise _no_rollout(str(path)) from error
  fields = [*map(_field, names)]
  marked = [name for name in fields if name.startswith(_EXTRAS)]
  return {name.removeprefix(_EXTRAS) for name in marked}


def path_of(directory: str | os.PathLike, step: int) -> pathlib.Path:
  """The file of one rollout in a directory of rollouts.

  >>> path_of('runs/add/completions', 12).name
  'step_00000012.parquet'
  """
  return pathlib.Path(directory) / f'step_{step:08d}.parquet'


def files(directory: str | os.PathLike) -> list[pathlib.Path]:
  """The files of a directory's rollouts, by step; none without a directory."""
  found = {
    path: _NAME.fullmatch(path.name)
    for path in pathlib.Path(directory).glob('step_*.parquet')
  }
  named = [(int(match[1]), path) for path, match in found.items() if match]
  return [path for _, path in sorted(named)]


def _arrays(rollout: Rollout) -> dict[str, np.ndarray]:
  """Every array of the batch, by column; each reward function has its own."""
  fields: dict[str, Any] = rollout.batch._asdict()
  parts, extras = np.asarray(fields.pop('reward_parts')), fields.pop('extras')
  arrays = {
    name: values for name, values in fields.items() if values is not None
  }
  names = _part_names(rollout)
  arrays |= {_REWARD + name: parts[..., k] for k, name in enumerate(names)}
  arrays |= {_EXTRAS + name: values for name, values in extras.items()}
  if rollout.previous is not None:
    arrays['previous'] = rollout.previous
  columns = {**_COLUMNS, **(_OF_EPISODES if rollout.accounts else {})}
  return {
    columns.get(name, name): np.asarray(values)
    for name, values in arrays.items()
  }


def _accounts(rollout: Rollout) -> dict[str, Any]:
  """What is told of episodes, as columns; none if none was played."""
  import pyarrow as pa

  every = [one for group in rollout.accounts for one in group]
  if not every:
    return {}
  texts = [json.dumps(one.messages) for one in every]
  rewards = [one.turn_rewards for one in every]
  return {
    'messages': pa.array(texts, pa.string()),
    'turn_reward': pa.array(rewards, pa.list_(pa.float32())),
    'ended': pa.array([one.ended for one in every], pa.string()),
    'failure': pa.array([one.failure or None for one in every], pa.string()),
    'last_text': pa.array([one.last_text for one in every], pa.string()),
    **{
      name: pa.array([getattr(one, name) for one in every], pa.int64())
      for name in _COUNTS
    },
    'counted': pa.array(
      [json.dumps(one.counts) if one.counts else None for one in every],
      pa.string(),
    ),
  }


def _read_accounts(table, group: int) -> Sequence[Sequence[Account]]:
  """What `_accounts` has made columns of; none if there are none."""
  if 'messages' not in table.column_names:
    return ()
  names = 'messages', 'turn_reward', 'ended', 'failure', 'last_text', *_COUNTS
  more = [name for name in ('counted',) if name in table.column_names]
  rows = table.select([*names, *more]).to_pylist()
  every = []
  for row in rows:
    rewards, failure = row['turn_reward'], row['failure']
    row['messages'] = tuple(json.loads(row['messages']))
    row['turn_rewards'] = None if rewards is None else tuple(rewards)
    row['failure'] = failure or ''
    row['counts'] = json.loads(row.pop('counted', None) or '{}')
    del row['turn_reward']
    every.append(Account(**row))
  return [every[k : k + group] for k in range(0, len(every), group)]


def _field(column: str) -> str:
  """The field of the batch that a column holds."""
  return _FIELDS.get(column, column)


def _part_names(rollout: Rollout) -> list[str]:
  """A name for the column of each reward function."""
  number, names = rollout.batch.reward_parts.shape[-1], rollout.reward_names
  # Columns need different names. A rollout that was not sampled may have none.
  if len(set(names)) != number:
    return [str(part) for part in range(number)]
  return list(names)


def _column(name: str, values: np.ndarray, counts: np.ndarray):
  """The first `counts` values of each completion, as an Arrow array.

  Args:
    name: Of the column, for errors.
    values: [P,G] or [P,G,...].
    counts: i[P * G].
  """
  import pyarrow as pa

  if values.dtype.kind not in 'biuf':
    raise ValueError(
      f'A Parquet file of a rollout cannot hold {name} of dtype '
      f'{values.dtype.name}; convert it to float32, which holds every shorter '
      'float exactly.'
    )
  if values.ndim == 2:
    return pa.array(values.reshape(-1))
  rows = values.reshape(counts.size, math.prod(values.shape[2:]))
  inside = np.arange(rows.shape[1]) < counts[:, None]
  if np.any(rows[~inside] != 0):
    raise ValueError(
      f'{name} is not zero past the length of every completion, but a Parquet '
      'file of a rollout keeps nothing there; set it to 0 past each length.'
    )
  # An Arrow list array: all values in a row, and where each list begins.
  offsets = np.concatenate([[0], np.cumsum(counts)])
  return pa.ListArray.from_arrays(
    pa.array(offsets, pa.int32()), pa.array(rows[inside])
  )


def _read(source: Any, name: str, share=None) -> Rollout:
  """The rollout in a file of Arrow, or at a path; its name is for errors."""
  import pyarrow as pa
  from pyarrow import parquet

  try:
    with parquet.ParquetFile(source) as file:
      metadata = json.loads((file.schema_arrow.metadata or {})[_METADATA])
      return _rollout(file, metadata, share)
  except (
    pa.ArrowException, OSError, KeyError, ValueError, RecursionError
  ) as error:  # fmt: skip
    raise _no_rollout(name) from error


def _no_rollout(name: str) -> ValueError:
  return ValueError(
    f'{name} does not hold a whole rollout; give a Parquet file as '
    'grpo_jax.rollouts.parquet wrote it, with all its columns and rows.'
  )


def _rollout(file, metadata: dict[str, Any], share) -> Rollout:
  """The rollout of a file that has all its rows, in their order."""
  number, group = metadata['shape']
  holder = share(number) if share else None
  own = np.full(number, True)
  if holder is not None:
    own = holder == jax.process_index()
  own = np.repeat(own, group)
  # What only the holder of a row needs of it.
  held = [
    column
    for column, (_, _, cut) in metadata['arrays'].items()
    if cut and _field(column) not in KNOWN_TO_ALL
  ] + ['completion']
  names = [name for name in file.schema_arrow.names if name not in held]
  table, own_rows = file.read(names), _rows(file, held, own)
  # Somebody may have filtered or sorted the rows with a tool of their own.
  order = table['completion_number'].to_pylist()
  if order != [*range(group)] * number:
    raise ValueError('Rows are missing, or in another order.')
  length = _numbers(table['length_tokens'], metadata['length'])
  width = next(
    tail[0]
    for column, (_, tail, _) in metadata['arrays'].items()
    if _field(column) == 'mask'
  )
  # Past a completion's length the file holds nothing: zeros stay there.
  fields, extras, parts, failures = {}, {}, [], []
  for column, (dtype, tail, cut) in metadata['arrays'].items():
    values = np.zeros((number * group, math.prod(tail)), dtype)
    counts = np.minimum(length, width)[:, None] if cut else values.shape[1]
    inside = np.arange(values.shape[1]) < counts
    if column in held:
      inside = inside & own[:, None]
    arrow = (own_rows if column in held else table)[column].combine_chunks()
    flat = arrow.flatten() if tail else arrow
    values[np.broadcast_to(inside, values.shape)] = _numbers(flat, dtype)
    values = values.reshape(number, group, *tail)
    if column.startswith(_REWARD):
      parts.append(values)
      name = _FAILURE + column.removeprefix(_REWARD)
      if name in table.column_names:
        texts = [text or '' for text in table[name].to_pylist()]
        failures.append(np.array(texts, object))
    elif (field := _field(column)).startswith(_EXTRAS):
      extras[field.removeprefix(_EXTRAS)] = values
    else:
      fields[field] = values
  # The columns of prompts repeat them for each completion: one of G is enough.
  # Prompts may have no answers, and files of earlier versions have none.
  answer = [_ANSWER] if _ANSWER in table.column_names else []
  prompts = table.select(['index', 'prompt', 'prompt_ids', *answer]).take(
    np.arange(0, number * group, group)
  )
  previous = fields.pop('previous', None)
  texts = np.full(number * group, '', object)
  texts[own] = own_rows['completion'].to_pylist()
  return Rollout(
    Batch(**fields, reward_parts=np.stack(parts, -1), extras=extras),
    length.reshape(number, group),
    prompts['prompt_ids'].to_pylist(),
    prompts['prompt'].to_pylist(),
    texts.reshape(number, group).tolist(),
    _numbers(prompts['index'], metadata['index']),
    tuple(metadata['reward_names']),
    prompts[_ANSWER].to_pylist() if answer else (),
    np.stack(failures, -1).reshape(number, group, -1) if failures else None,
    holder=holder,
    previous=previous,
    accounts=_read_accounts(table, group),
  )


def _rows(file, columns: list[str], wanted: np.ndarray):
  """Some columns of the rows bool[P*G] of a file; other parts are not read."""
  parts = range(file.num_row_groups)
  sizes = [file.metadata.row_group(part).num_rows for part in parts]
  if sum(sizes) != len(wanted):
    raise ValueError('Rows are missing.')
  in_parts = np.split(wanted, np.cumsum(sizes)[:-1])
  some = [part for part in parts if in_parts[part].any()]
  table = file.read_row_groups(some, columns)
  return table.take(
    np.flatnonzero([x for part in some for x in in_parts[part]])
  )


def _numbers(arrow, dtype: str) -> np.ndarray:
  """Arrow values as a NumPy array that may be written to."""
  # np.array copies; what Arrow gives without a copy is read-only.
  return np.array(arrow.to_numpy(zero_copy_only=False), dtype)
