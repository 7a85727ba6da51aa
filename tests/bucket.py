"""A stand-in for a bucket: `stand://NAME/...` is a folder of this machine.

As in a bucket, an object is there once it is whole, nothing is appended to it,
and what `open` returns has no descriptor that could be locked. `ROOT_VARIABLE`
names the environment variable with the folder.
"""

import io
import os
import posixpath
import tempfile

from etils import epath
from etils.epath import backend
from etils.epath import gpath

ROOT_VARIABLE = 'GRPO_JAX_STAND_IN'
opened = []  # paths and modes


class _Object(io.BytesIO):
  """An object that is being written; it is there when it is closed."""

  def __init__(self, path):
    super().__init__()
    self._path = path

  def close(self):
    if not self.closed:
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      with tempfile.NamedTemporaryFile(
        dir=os.environ[ROOT_VARIABLE], delete=False
      ) as file:
        file.write(self.getvalue())
      os.replace(file.name, self._path)
    super().close()


class _Backend(backend._OsPathBackend):
  """Objects of the stand-in."""

  def open(self, path, mode):
    opened.append((path, mode))
    if set(mode) & set('a+'):
      raise OSError(f'{path} is an object: nothing is appended to it')
    if 'w' not in mode:
      with open(path, 'rb') as file:
        contents = io.BytesIO(file.read())
      return contents if 'b' in mode else io.TextIOWrapper(contents)
    written = _Object(path)
    return written if 'b' in mode else io.TextIOWrapper(written)


_BACKEND = _Backend()


@epath.register_path_cls('stand://')
class StandIn(gpath._GPath):
  """A path in the stand-in."""

  _PATH = posixpath

  @property
  def _backend(self):
    return _BACKEND

  @property
  def _path_str(self):
    parts = self.parts
    if parts and parts[0] == 'stand:':
      parts = (os.environ[ROOT_VARIABLE], *parts[1:])
    return posixpath.join(*parts)
