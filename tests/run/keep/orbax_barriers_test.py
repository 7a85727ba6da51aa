"""Orbax waits at our barriers, for as long as it says, and then at its own."""

import types

from orbax.checkpoint._src.multihost import multihost
import pytest

from grpo_jax.run.keep import orbax_barriers

pytestmark = pytest.mark.quick


def test_orbax_waits_at_our_barriers_as_long_as_it_says():
  own, met = multihost.sync_global_processes, []
  barrier = lambda **how: met.append(how)
  two = types.SimpleNamespace(number=2)
  with orbax_barriers.replaced(two, barrier):
    multihost.sync_global_processes('a save', timeout=7, processes={0, 1})
    multihost.sync_global_processes('a read')
  assert met == [
    {'key': 'a save', 'timeout_ms': 7_000},
    {'key': 'a read', 'timeout_ms': 1_200_000},
  ]
  assert multihost.sync_global_processes is own
  with orbax_barriers.replaced(types.SimpleNamespace(number=1), barrier):
    assert multihost.sync_global_processes is own
