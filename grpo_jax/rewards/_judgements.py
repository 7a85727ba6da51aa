"""Judgements that were paid for, kept so that they are paid for once."""

import collections
import json
import os
import pathlib
import secrets
import threading
from typing import Any
import warnings

_MOST_IN_MEMORY = 50_000
_BEGIN = b'{"key": "'  # of every line; the digits of the key follow


class Judgements:
  """A cache from keys to JSON values.

  In a folder, every process appends to a file of its own, and reads the files
  of all when it starts. A line that was cut by a crash is passed over. Only the
  places of the values are in memory.

  Args:
    where: A local folder, which is made; 'memory' for the newest 50,000 in this
      process; or '' for none.

  Raises:
    ValueError: The folder cannot be used.
  """

  def __init__(self, where: str):
    self.keeps = bool(where)
    self._lock = threading.Lock()
    self._newest: collections.OrderedDict[str, Any] = collections.OrderedDict()
    self._folder = None if where in ('', 'memory') else pathlib.Path(where)
    self._paths: list[pathlib.Path] = []
    self._places: dict[bytes, tuple[int, int]] = {}  # file, and byte in it
    self._own: pathlib.Path | None = None
    if self._folder is not None:
      self._folder = self._folder.expanduser().absolute()
      try:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.glob('*.jsonl')):
          self._read(path)
      except OSError as error:
        raise ValueError(
          f'The cache {where!r} of http_judge cannot be used ({error}); give a'
          " folder on this host that can be written, 'memory' or ''."
        ) from error

  def get(self, key: str) -> Any:
    """The value of a key, or None."""
    with self._lock:
      if self._folder is None:
        return self._newest.get(key)
      place = self._places.get(bytes.fromhex(key))
      if place is None:
        return None
      try:
        with open(self._paths[place[0]], 'rb') as file:
          file.seek(place[1])
          line = json.loads(file.readline())
        return line['value'] if line['key'] == key else None
      except (OSError, ValueError, KeyError, TypeError):
        return None  # removed or changed meanwhile

  def put(self, key: str, value: Any) -> None:
    """Keeps a value.

    Args:
      key: Hexadecimal digits, as many for every key.
      value: JSON.
    """
    with self._lock:
      if self._folder is None:
        if self.keeps:
          self._newest[key] = value
          if len(self._newest) > _MOST_IN_MEMORY:
            self._newest.popitem(last=False)
        return
      line = json.dumps({'key': key, 'value': value}).encode() + b'\n'
      try:
        if self._own is None:
          self._own = self._folder / f'{secrets.token_hex(8)}.jsonl'
          self._paths.append(self._own)
        # Not kept open: nobody says when the last judgement has come.
        with open(self._own, 'ab', buffering=0) as file:
          first = file.seek(0, os.SEEK_END)
          file.write(line)
      except OSError as error:  # the judgement itself is not lost
        warnings.warn(
          f'http_judge cannot keep a judgement: {error}', stacklevel=2
        )
        return
      self._places[bytes.fromhex(key)] = len(self._paths) - 1, first

  def _read(self, path: pathlib.Path) -> None:
    self._paths.append(path)
    first, file_number = 0, len(self._paths) - 1
    with open(path, 'rb') as file:
      for line in file:
        key = line[len(_BEGIN) :].partition(b'"')[0]
        try:
          self._places[bytes.fromhex(key.decode())] = file_number, first
        except ValueError:  # no line of ours
          pass
        first += len(line)
