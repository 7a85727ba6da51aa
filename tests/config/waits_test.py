"""A wait that looks up now and then."""

import queue

import pytest

from grpo_jax.config import waits

pytestmark = pytest.mark.quick


def test_it_takes_the_next_one_however_late_it_comes():
  limits, comes = [], iter([False, False, True])

  class Late(queue.SimpleQueue):
    def get(self, *_, timeout):
      limits.append(timeout)
      if not next(comes):
        raise queue.Empty
      return super().get(timeout=timeout)

  late = Late()
  late.put(None)
  assert waits.take(late) is None and late.empty()
  assert len(limits) == 3 and all(0 < one <= 1 for one in limits)
