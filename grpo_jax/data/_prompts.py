"""Endless streams of prompts, read by position, and before they are needed."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import math
import sys
import threading
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

if TYPE_CHECKING:
  import grain


def import_grain_alone() -> None:
  """Imports grain without JAX, for a program that needs no JAX.

  grain does without JAX and Orbax where they are not installed, but takes them
  along where they are, which takes a second or two. Streams are the same either
  way. No effect where one of the three is imported already.
  """
  absent = 'jax', 'orbax'
  if {*absent, 'grain'} & set(sys.modules):
    return
  modules: Any = sys.modules
  modules.update(dict.fromkeys(absent))  # where None is, `import` raises
  try:
    import grain  # noqa: F401
  finally:
    for name in absent:
      sys.modules.pop(name, None)


def prompt_stream(source: Any, seed: int) -> 'grain.MapDataset':
  """All records of a source in random order, again and again.

  Each epoch has a new order: rows [k * n, (k + 1) * n) are a permutation of the
  n records. Row i depends on (source, seed, i) alone, so it can be read without
  the rows before it.

  If the source has a method `drawn(index, row)`, it is asked for record `index`
  by that, and told that the record is row i of this stream: a curriculum. In a
  `mixture` each source is told how often it was itself drawn from before. It
  can say its stages in `starts`; see `data.stages`.

  Reading is slow for a small source: grain needs about 2**16 / n tries for a
  row, which takes 5 ms for 3 records and 0.02 ms for 9,000.

  >>> stream = prompt_stream(['a', 'b', 'c'], seed=0)
  >>> sorted(stream[i] for i in range(3, 6))
  ['a', 'b', 'c']

  Args:
    source: anything with `__len__` and `__getitem__(int)`.
    seed: at least 0 and below 2**32.

  Returns:
    An endless grain dataset with random access.

  Raises:
    ValueError: the source is empty, or the seed is outside its range.
  """
  import grain

  _check_seed(seed)
  if not len(source):
    raise ValueError(
      f'The prompt source {source!r} is empty, but a stream needs at least'
      ' one record; pass a source that has some.'
    )
  drawn = getattr(source, 'drawn', None)
  items = source if drawn is None else range(len(source))
  # Shuffled before it is repeated, so that each epoch has its own order.
  rows = grain.MapDataset.source(items).seed(int(seed)).shuffle().repeat(None)
  if drawn is None:
    return rows
  return rows.map_with_index(lambda row, index: drawn(index, row))


def mixture(
  sources: Sequence[Any], weights: Sequence[float], seed: int
) -> 'grain.MapDataset':
  """One stream over several sources, in fixed proportions.

  A source contributes `weight / sum(weights)` of the rows. Which source a row
  comes from follows a fixed rule, not chance, so every stretch of rows holds
  the proportions as nearly as whole rows can.

  Each source is shuffled by itself, as a `prompt_stream` with a seed that
  depends on `seed` and on the source's place in the list. A mixture of a single
  source is the `prompt_stream` of that source.

  >>> stream = mixture([['a'], ['b']], weights=[3, 1], seed=0)
  >>> ''.join(stream[i] for i in range(8))
  'aaabaaab'

  Args:
    sources: sources as `prompt_stream` takes them.
    weights: one positive number for each source. Only their ratios count, and
      they are rounded to a hundredth of the smallest weight.
    seed: at least 0 and below 2**32.

  Returns:
    An endless grain dataset with random access.

  Raises:
    ValueError: there is no source, not one weight for each source, a weight
      that is not positive and finite, or an empty source; or the seed is
      outside its range.
  """
  import grain

  _check_seed(seed)
  parts = _parts(sources, weights)
  if len(sources) == 1:
    return prompt_stream(sources[0], seed)
  streams = []
  for place, source in enumerate(sources):
    # A seed of its own, or two copies of a source would come in the same order.
    words = np.random.SeedSequence([int(seed), place]).generate_state(1)
    streams.append(prompt_stream(source, int(words[0])))
  return grain.MapDataset.mix(streams, [float(part) for part in parts])


def epoch_rows(sources: Sequence[Any], weights: Sequence[float]) -> int:
  """How many rows of a `mixture` hold every record of every source.

  The first `epoch_rows` rows of the stream do, and so do any `2 * epoch_rows`
  rows in a row, wherever they begin. For a single source this is its length.
  For several it is decided by the source that takes longest to go through,
  which is one that is large for its weight.

  >>> epoch_rows([['a', 'b', 'c']], [1])
  3
  >>> epoch_rows([['a'] * 300, ['b'] * 300], [3, 1])
  1204

  Args:
    sources: those of the mixture.
    weights: one positive number for each source.

  Returns:
    A number of rows.

  Raises:
    ValueError: there is no source, not one weight for each source, or a weight
      that is not positive and finite.
  """
  parts = _parts(sources, weights)
  # grain rounds once for each source before this one, so a source may be that
  # many rows behind its share.
  behind = len(sources) - 1
  return max(
    math.ceil((len(source) + behind) * sum(parts) / part)
    for source, part in zip(sources, parts, strict=True)
  )


def _parts(sources: Sequence[Any], weights: Sequence[float]) -> list[int]:
  """The weights of a mixture as whole numbers, the smallest of them 100.

  grain scales weights in the same way but cuts off the fraction: it takes 0.21
  beside 0.07 for 299 to 100. It leaves whole numbers as they are.
  """
  if not sources or len(weights) != len(sources):
    raise ValueError(
      f'A mixture of {len(sources)} sources was given {len(weights)} weights,'
      ' but it needs at least one source and a weight for each; give both lists'
      ' the same length.'
    )
  if not all(math.isfinite(weight) and weight > 0 for weight in weights):
    raise ValueError(
      f'The weights of the mixture are {list(weights)}, but each must be'
      ' positive and finite; leave out a source that is not wanted.'
    )
  return [round(100 * weight / min(weights)) for weight in weights]


def take(dataset: Any, start: int, count: int) -> list[dict[str, Any]]:
  """Rows [start, start + count) of a stream, each with its 'index'.

  How far a run has read is `start` and nothing else. If every rollout takes P
  prompts, it is P * n after n rollouts, on any number of processes.

  >>> take([{'prompt': 'a'}, {'prompt': 'b'}], start=1, count=1)
  [{'prompt': 'b', 'index': 1}]

  Args:
    dataset: a stream, or a finite source of dicts, as for an evaluation.
    start: the global prompt counter of the first row; at least 0.
    count: how many rows to read.

  Returns:
    New dicts: the fields of the record and 'index', its global prompt counter.
    If the record has a field of this name, it is called 'record_index', unless
    the record has a field 'record_index' too, which then stays.

  Raises:
    ValueError: the dataset has no such rows, or a record is not a dict.
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
    # pandas, for example, writes a field of this name.
    own = {'record_index': record['index']} if 'index' in record else {}
    rows.append({**own, **record, 'index': index})
  return rows


def take_fitting(
  dataset: Any,
  start: int,
  count: int,
  fits: Callable[[Mapping[str, Any]], bool] | None,
  within: int | None = None,
) -> list[dict[str, Any]]:
  """The first `count` rows from `start` on that fit; fewer if there are fewer.

  >>> take_fitting([{'prompt': 'long'}, {'prompt': 'a'}], 0, 1,
  ...              lambda row: len(row['prompt']) < 4)
  [{'prompt': 'a', 'index': 1}]

  Args:
    dataset: A stream, or a finite source of dicts.
    start: The first row that is looked at.
    count: How many rows are wanted.
    fits: Whether a row is taken; None: every row.
    within: How many rows are looked at, at most; None: all behind `start`.

  Returns:
    See `take`.
  """
  left = len(dataset) - start
  most = left if within is None else min(left, within)
  if fits is None:
    return take(dataset, start, min(count, most))
  rows: list[dict[str, Any]] = []
  for place in range(start, start + most):
    if len(rows) == count:
      break
    rows += filter(fits, take(dataset, place, 1))
  return rows


def _check_seed(seed: int):
  if not 0 <= seed < 2**32:
    raise ValueError(
      f'The seed of a prompt stream is {seed}, but grain requires a number of'
      ' at least 0 and below 2**32; pass such a number.'
    )


class ReadAhead:
  """A dataset whose next rows are read while the last ones are being used.

  Rows are the same as without it, in any order: what has been read is kept for
  the row that was asked for, and an error is raised when its row is. A program
  that ends waits for one row at most.

  Args:
    dataset: Random access to rows; it is read in another thread.
    rows: How many rows are read ahead.
  """

  def __init__(self, dataset: Any, rows: int):
    self._dataset = dataset
    self._rows = rows
    self._waiting: dict[int, futures.Future[Any]] = {}
    self._next = 0  # the first row that is not being read
    # Its thread starts with the first row that is read.
    self._thread = futures.ThreadPoolExecutor(1, 'grpo_jax_reads_ahead')
    self._lock = threading.Lock()  # of the two below
    # What the thread shall read, as in `_waiting`. The executor would do
    # everything that it was given before the program ends.
    self._queue: collections.deque[tuple[int, futures.Future[Any]]] = (
      collections.deque()
    )
    self._reads = False  # whether the executor has been given something

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, index: int) -> Any:
    if index in self._waiting:
      waiting = self._waiting.pop(index)
      try:
        row = waiting.result()
      except futures.CancelledError:  # the program ends
        row = self._dataset[index]
    else:  # the first row, or a jump
      with self._lock:
        self._queue.clear()
      self._waiting.clear()
      row = self._dataset[index]
      self._next = index + 1
    end = min(index + self._rows + 1, len(self))
    more = {place: futures.Future() for place in range(self._next, end)}
    self._waiting |= more
    self._next = max(self._next, end)
    with self._lock:
      self._queue += more.items()
      if self._queue and not self._reads:
        self._go_on()
    return row

  def _go_on(self) -> None:
    """Lets the thread read one more row."""
    try:
      self._thread.submit(self._read)
      self._reads = True
    except RuntimeError:  # the program ends
      self._reads = False
      while self._queue:
        self._queue.popleft()[1].cancel()

  def _read(self) -> None:
    with self._lock:
      if not self._queue:  # all is read, or a jump has emptied it
        self._reads = False
        return
      place, row = self._queue.popleft()
    try:
      row.set_result(self._dataset[place])
    except BaseException as error:  # is raised where the row is asked for
      row.set_exception(error)
    with self._lock:
      self._go_on()

  def fill(self, first: int = 0) -> None:
    """Nothing: the thread reads whenever there is something to read."""


class MakeAhead:
  """A dataset whose next rows are made when `fill` is called.

  It is for rows that must not be made in another thread: a loop calls `fill`
  while it has nothing to do but wait for its devices. Rows are the same as
  without it, in any order, and an error is raised when its row is asked for.

  >>> ahead = MakeAhead(['a', 'b', 'c'], rows=2)
  >>> ahead[0]
  'a'
  >>> ahead.fill()  # 'b' and 'c'

  Args:
    dataset: Random access to rows.
    rows: How many rows are made ahead.
  """

  def __init__(self, dataset: Any, rows: int):
    self._dataset = dataset
    self._rows = rows
    self._made: dict[int, futures.Future[Any]] = {}
    self._next = 0  # behind the last row that was asked for
    self._lock = threading.RLock()  # another thread may ask while rows are made

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, index: int) -> Any:
    with self._lock:
      self._next = index + 1
      made = self._made.pop(index, None)
      return self._dataset[index] if made is None else made.result()

  def fill(self, first: int = 0) -> None:
    """Makes rows early.

    Args:
      first: The next that is asked for, if none was asked for behind it.
    """
    with self._lock:
      first = max(first, self._next)
      places = range(first, min(first + self._rows, len(self)))
      self._made = {
        place: self._made.get(place) or self._row(place) for place in places
      }

  def _row(self, place: int) -> futures.Future[Any]:
    row: futures.Future[Any] = futures.Future()
    try:
      row.set_result(self._dataset[place])
    except KeyboardInterrupt:  # of a person, and not of the dataset
      raise
    # Also what is no Exception, such as `sys.exit` in a source of the user's:
    # where the row is asked for, a run can still save what it has learned.
    except BaseException as error:
      row.set_exception(error)
    return row
