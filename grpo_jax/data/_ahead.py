"""Reading rows before they are needed, in a thread."""

from concurrent import futures
from typing import Any


class ReadAhead:
  """A dataset whose next rows are read while the last ones are being used.

  Rows are the same as without it, in any order: what has been read is kept for
  the row that was asked for, and an error is raised when its row is.

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

  def __len__(self) -> int:
    return len(self._dataset)

  def __getitem__(self, index: int) -> Any:
    if index in self._waiting:
      row = self._waiting.pop(index).result()
    else:  # the first row, or a jump
      for later in self._waiting.values():
        later.cancel()
      self._waiting.clear()
      row = self._dataset[index]
      self._next = index + 1
    end = min(index + self._rows + 1, len(self))
    for place in range(self._next, end):
      self._waiting[place] = self._thread.submit(
        self._dataset.__getitem__, place
      )
    self._next = max(self._next, end)
    return row
