"""A place where the processes of a run leave words for each other.

It is the key-value store of `jax.distributed`, which lies in the first process.
What goes through it needs no device, so it works while the devices wait, and a
wait can end.
"""

from collections.abc import Callable
import time
from typing import Any

from grpo_jax.config import plain_text

_POLL_SECS = 0.5  # a longer wait would keep signals from Python


class Store:
  """A folder of the store, in which each run has names of its own.

  Args:
    client: That of `jax.distributed`, or one like it.
    folder: Where nothing is yet.
  """

  def __init__(self, client: Any, folder: str):
    self._client, self._folder = client, folder

  def put(self, name: str, value: bytes) -> None:
    """Leaves what is left once and waited for; see `wait`."""
    self._client.key_value_set_bytes(f'{self._folder}/{name}', value)

  def wait(self, name: str, check: Callable[[], None] = lambda: None) -> bytes:
    """What is put under a name, as soon as it is there.

    Args:
      name: The name.
      check: Called again and again meanwhile; what it raises ends the wait.
    """
    while True:
      check()
      try:
        return self._client.blocking_key_value_get_bytes(
          f'{self._folder}/{name}', int(1000 * _POLL_SECS)
        )
      except Exception as error:  # JAX has no type for it
        if 'UNAVAILABLE' in plain_text.said(
          error
        ):  # the watch decides for how long
          time.sleep(_POLL_SECS)
        elif 'DEADLINE_EXCEEDED' not in plain_text.said(error):
          raise

  def write(self, name: str, text: str = '') -> None:
    """Leaves a text in place of what was there."""
    self._client.key_value_set(
      f'{self._folder}/{name}', text, allow_overwrite=True
    )

  def read(self, folder: str) -> dict[str, str]:
    """The texts in a folder, by the last part of their names."""
    found = self._client.key_value_dir_get(f'{self._folder}/{folder}/')
    return {key.rpartition('/')[2]: text for key, text in found}

  def has_other(self, folder: str, name: str) -> bool:
    """Whether there is anything in a folder beside one name."""
    found = self._client.key_value_dir_get(f'{self._folder}/{folder}/')
    mine = f'{self._folder}/{folder}/{name}/'
    return any(not key.startswith(mine) for key, _ in found)

  def delete(self, name: str) -> None:
    """Removes a name, or a folder."""
    self._client.key_value_delete(f'{self._folder}/{name}')
