"""Where Orbax waits for other processes while it saves and restores."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from typing import Any

from grpo_jax.hosts import processes

_BARRIER_SECS = 1200


@contextlib.contextmanager
def replaced(
  peers: processes.Processes, barrier: Callable[..., None]
) -> Iterator[None]:
  """In it Orbax meets the other processes at our barriers, which can be left.

  Its own are programs of the devices, which wait for ever for a process that
  has failed.
  """
  if peers.number == 1:
    yield
    return
  from orbax.checkpoint._src.multihost import multihost

  def sync(name: str, *, timeout: int | None = None, **_: Any) -> None:
    barrier(key=name, timeout_ms=1000 * (timeout or _BARRIER_SECS))

  original, multihost.sync_global_processes = (
    multihost.sync_global_processes,
    sync,
  )
  try:
    yield
  finally:
    multihost.sync_global_processes = original
