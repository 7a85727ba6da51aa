"""Which programs XLA compiles."""

from collections.abc import Iterator
import contextlib
import logging
import re

import jax


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
  """The names of the programs compiled so far within the context, in order.

  The size of a jitted function's cache does not say it: JAX drops entries once
  one process holds many thousands, as a worker of the suite does.
  """
  names = []

  class Handler(logging.Handler):
    def emit(self, record):
      said = record.getMessage()
      if match := re.search(r'Finished XLA compilation of jit\((\w+)\)', said):
        names.append(match[1])

  handler, logger = Handler(), logging.getLogger('jax')
  logger.addHandler(handler)
  try:
    with jax.log_compiles():
      yield names
  finally:
    logger.removeHandler(handler)
