"""Infinite prompt streams and reading them by position."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

if TYPE_CHECKING:
  import grain


def prompt_stream(source: Any, seed: int) -> 'grain.MapDataset':
  """All records of a source in a new random order each epoch, without end.

  Row i is a function of (source, seed, i) alone; it needs no earlier row.
  Rows [k * n, (k + 1) * n) are a permutation of the n records. Reading a row
  costs grain about 2**16 / n tries for a source below 2**16 records: 5 ms for
  3 records, 0.02 ms for 9,000.

  >>> stream = prompt_stream(['a', 'b', 'c'], seed=0)
  >>> sorted(stream[i] for i in range(3, 6))
  ['a', 'b', 'c']

  Args:
    source: anything with `__len__` and `__getitem__(int)`.
    seed: at least 0 and below 2**32.

  Returns:
    An infinite grain dataset with random access.

  Raises:
    ValueError: an empty source or a seed out of its range.
  """
  import grain

  _check_seed(seed)
  if not len(source):
    raise ValueError(
      f'The prompt source {source!r} is empty, but a stream needs at least'
      ' one record; pass a source that has some.'
    )
  return grain.MapDataset.source(source).seed(int(seed)).shuffle().repeat(None)


def mixture(
  sources: Sequence[Any], weights: Sequence[float], seed: int
) -> 'grain.MapDataset':
  """One stream over several sources, in fixed proportions.

  Each source is a `prompt_stream` with a seed of its own, from (seed, place
  in the list). Sources take turns by a fixed rule, not by chance: every
  stretch of rows holds the proportions as nearly as whole rows can. grain
  rounds weights down to a hundredth of the smallest.

  >>> stream = mixture([['a'], ['b']], weights=[3, 1], seed=0)
  >>> ''.join(stream[i] for i in range(8))
  'aaabaaab'

  Args:
    sources: sources as `prompt_stream` takes them.
    weights: a positive share per source; they need not sum to 1.
    seed: at least 0 and below 2**32.

  Returns:
    An infinite grain dataset with random access.

  Raises:
    ValueError: no source, not one weight per source, a weight that is not
      positive and finite, an empty source, or a seed out of its range.
  """
  import grain

  _check_seed(seed)
  if not sources or len(weights) != len(sources):
    raise ValueError(
      f'A mixture of {len(sources)} sources was given {len(weights)} weights,'
      ' but at least one source and one weight for each are required; make'
      ' both lists as long.'
    )
  if not all(math.isfinite(weight) and weight > 0 for weight in weights):
    raise ValueError(
      f'The weights of the mixture are {list(weights)}, but each must be'
      ' positive and finite; leave out a source that is not wanted.'
    )
  streams = []
  for place, source in enumerate(sources):
    words = np.random.SeedSequence([int(seed), place]).generate_state(1)
    streams.append(prompt_stream(source, int(words[0])))
  return grain.MapDataset.mix(streams, [float(weight) for weight in weights])


def take(dataset: Any, start: int, count: int) -> list[dict[str, Any]]:
  """Rows [start, start + count) of a stream, each with its 'index'.

  The data position of a run is `start` and nothing else: after step n of P
  prompts it is P * n, on any number of processes.

  >>> take([{'prompt': 'a'}, {'prompt': 'b'}], start=1, count=1)
  [{'prompt': 'b', 'index': 1}]

  Args:
    dataset: a stream, or a finite source of dicts (to evaluate, say).
    start: the global prompt counter of the first row; at least 0.
    count: how many rows.

  Returns:
    New dicts: the record and its global prompt counter, 'index'.

  Raises:
    ValueError: rows outside the dataset, or a record that is not a dict or
      has a field 'index' already.
  """
  if start < 0 or count < 0 or start + count > len(dataset):
    raise ValueError(
      f'Rows {start} to {start + count} were asked of a dataset of'
      f' {len(dataset)} rows; ask for rows that it has, or make it endless'
      ' with prompt_stream.'
    )
  rows = []
  for index in range(int(start), int(start) + int(count)):
    record = dataset[index]
    if not isinstance(record, Mapping):
      raise ValueError(
        f'Row {index} of the dataset is of type {type(record).__name__}, but'
        " a dict with the field 'prompt' is required; let the source return"
        ' dicts.'
      )
    if 'index' in record:
      raise ValueError(
        f"Row {index} of the dataset has a field 'index', which is the name"
        ' of the global prompt counter; rename the field of the source.'
      )
    rows.append({**record, 'index': index})
  return rows


def _check_seed(seed: int):
  if not 0 <= seed < 2**32:
    raise ValueError(
      f'The seed of a prompt stream is {seed}, but grain requires a number of'
      ' at least 0 and below 2**32; pass such a number.'
    )
