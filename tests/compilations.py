"""Which programs XLA compiles."""

from collections.abc import Iterator
import contextlib
import logging
import re
from typing import Any
from unittest import mock

import jax


@contextlib.contextmanager
def counted_before(owner: Any, name: str) -> Iterator[list[int]]:
  """How many programs were compiled by the time of each call of a function.

  Args:
    owner: The module that has the function.
    name: The function's name; within the context its calls are counted.
  """
  compiled, counts, function = [], [], getattr(owner, name)

  def listen(event, secs, **_):
    if event.endswith('backend_compile_duration'):
      compiled.append(event)

  def counting(*args):
    counts.append(len(compiled))
    return function(*args)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    with mock.patch.object(owner, name, counting):
      yield counts
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def compiled_programs() -> Iterator[list[str]]:
  """The names of the programs compiled so far within the context, in order.

  In any thread: a run compiles its update in a thread of its own.

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
  # Not `jax.log_compiles()`, which is of one thread.
  before = jax.config.jax_log_compiles
  jax.config.update('jax_log_compiles', True)
  try:
    yield names
  finally:
    jax.config.update('jax_log_compiles', before)
    logger.removeHandler(handler)
