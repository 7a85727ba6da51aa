"""Reading rows before they are needed."""

import collections
from concurrent import futures
import threading
from typing import Any


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

  def fill(self) -> None:
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

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, index: int) -> Any:
    self._next = index + 1
    made = self._made.pop(index, None)
    return self._dataset[index] if made is None else made.result()

  def fill(self) -> None:
    """Makes the rows behind the last one that was asked for."""
    places = range(self._next, min(self._next + self._rows, len(self)))
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
