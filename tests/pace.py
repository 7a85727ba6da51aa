"""Bounds of time that hold on slow machines and on busy ones."""

import functools
import time


@functools.cache
def counting_secs() -> float:
  """The processor time in which Python counts to ten million, on this machine.

  .15 to .3 s on those that were tried.
  """
  took = []
  for _ in range(3):
    start = time.process_time()
    for _ in range(10_000_000):
      pass
    took.append(time.process_time() - start)
  return min(took)


def assert_ends_at(limit_secs, call, late_secs=1.0, tries=5):
  """`call()` takes that time, and little more in one of several tries.

  A busy machine delays some of them; a limit that is wrong delays all.
  """
  for _ in range(tries):
    start = time.monotonic()
    call()
    took = time.monotonic() - start
    assert took >= limit_secs
    if took < limit_secs + late_secs:
      return
  raise AssertionError(f'{took:.1f} s, and {limit_secs} is the limit')
