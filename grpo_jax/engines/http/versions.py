"""Trained parameters as folders that servers of others read."""

from collections.abc import Callable
from collections.abc import Collection
import contextlib
import pathlib
import secrets
import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp


class Versions:
  """A folder for each version; see `handover.Weights`.

  The thread that publishes writes, because only it may use the devices that
  learn.

  Args:
    folder: Where the folders lie. Servers read them by the same path.
    write: `(folder, params)`: writes parameters.
    trained: Shapes, dtypes and shardings of the trained parameters.
    keeps: Whether a checkpoint may ask for a version that is not the newest, so
      that copies of its parameters are kept.
    mode: Of the folder, if it is made, less what the process masks.

  Attributes:
    folder: Holds that of each version.
    run: Begins the names of all versions of a run, whichever start of it has
      made them.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    write: Callable[[pathlib.Path, Any], None],
    trained: Any = None,
    keeps: bool = False,
    mode: int = 0o777,
  ):
    self.folder, self._write, self._trained = folder, write, trained
    # Another start may make other parameters of the same version.
    self.run, self._start = secrets.token_hex(4), secrets.token_hex(4)
    self._keeps, self._mode = keeps, mode
    self._params: dict[int, Any] = {}
    self._paths: dict[int, pathlib.Path] = {}
    self._lock = threading.Lock()

  def publish(self, params: Any, version: int) -> None:
    """See `Weights`; a version that is there is not written again.

    Raises:
      OSError: The folder cannot be written.
    """
    if version not in self._paths:
      self._make(params, version)
    if self._keeps:
      with self._lock:
        self._params[version] = jax.tree.map(jnp.copy, params)

  def fetch(self, version: int) -> str:
    """The folder of a version."""
    with self._lock:
      return str(self._paths[version])

  def drop(self, needed: Collection[int]) -> None:
    """See `Weights`; the newest stays, for servers that come back."""
    with self._lock:
      newest = max(self._paths, default=-1)
      kept = {*needed, newest}
      old = [
        path for version, path in self._paths.items() if version not in kept
      ]
      for known in (self._paths, self._params):
        for version in [one for one in known if one not in kept]:
          del known[version]
    for path in old:
      shutil.rmtree(path, ignore_errors=True)

  def snapshot(self, version: int) -> Any:
    """See `Weights`."""
    with self._lock:
      return self._params[version]

  def restore(self, version: int, snapshot: Any) -> None:
    """See `Weights`."""
    self.publish(snapshot, version)

  def abstract(self) -> Any:
    """See `Weights`."""
    return self._trained

  def clear(self, folder: pathlib.Path) -> None:
    """Removes what earlier starts of the run have left in a folder.

    Nothing of this start has been published.
    """
    for path in folder.glob(f'{self.run}-*'):
      shutil.rmtree(path, ignore_errors=True)
    if folder != self.folder:
      with contextlib.suppress(OSError):
        folder.rmdir()

  def close(self) -> None:
    """Removes all folders."""
    with self._lock:
      paths, self._paths = [*self._paths.values()], {}
      self._params = {}
    for path in paths:
      shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
      self.folder.rmdir()

  def _make(self, params: Any, version: int) -> None:
    """Writes a folder, all or nothing."""
    path = self.folder / f'{self.run}-{self._start}-{version}'
    beside = path.with_name(path.name + '.tmp')
    try:
      self.folder.mkdir(self._mode, parents=True, exist_ok=True)
      self._write(beside, params)
      shutil.rmtree(path, ignore_errors=True)
      beside.rename(path)
    except OSError as error:
      raise OSError(
        f'Version {version} cannot be written to {self.folder}: {error}. Make '
        'room there, or give another config.engine.folder.'
      ) from error
    finally:
      shutil.rmtree(beside, ignore_errors=True)
    with self._lock:
      self._paths[version] = path
