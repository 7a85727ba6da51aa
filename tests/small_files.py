"""A disk that is full, for the files of this process."""

from collections.abc import Iterator
import contextlib
import resource
import sys


@contextlib.contextmanager
def limited(most: int) -> Iterator[None]:
  """No file may grow beyond so many bytes.

  What is imported meanwhile is not compiled into a file: Python would write the
  part that fits, and every later import of the module would fail by it.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  before = sys.dont_write_bytecode
  resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
  sys.dont_write_bytecode = True
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sys.dont_write_bytecode = before
