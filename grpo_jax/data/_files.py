"""Which files a name of data stands for, and whether they have changed."""

from collections.abc import Sequence
import glob
import hashlib
import os
import pathlib
import re
import stat

_WHOLE_BYTES = 2**26  # a file up to this size is hashed as a whole
_READ_BYTES = 2**24  # of a larger one, in parts at even distances
_PARTS = 16
_FORMATS = {
  'jsonl': 'jsonl',
  'json': 'jsonl',
  'parquet': 'parquet',
  'array_record': 'array_record',
  'arrayrecord': 'array_record',
}
_SHARD = re.compile(r'-(\d+)-of-(\d+)')
_SUFFIX = re.compile(r'\.(\w+?)(-[\d*]+(-of-[\d*]+)?)?$')


def cache_directory() -> pathlib.Path:
  """Where this user keeps what can be made again; it may not exist."""
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(cache) / 'grpo_jax'


def format_of(name: str) -> str | None:
  """The format that the end of a name says, None if it says none.

  >>> format_of('a.jsonl'), format_of('b.array_record-00000-of-00004')
  ('jsonl', 'array_record')
  >>> format_of('data/*.parquet'), format_of('arithmetic')
  ('parquet', None)
  """
  found = _SUFFIX.search(name)
  return _FORMATS.get(found.group(1)) if found else None


def files(name: str) -> list[str]:
  """The files that a name stands for, in the order of their names.

  Args:
    name: A file; a pattern with *, ? or [...]; a file in shards without their
      numbers, as 'a.parquet' for 'a.parquet-00000-of-00002' and its sibling; or
      a folder, for all the files in it.

  Returns:
    Paths; none if there are no such files.

  Raises:
    ValueError: Some of the shards are there, but not all of one set.
  """
  if os.path.isfile(name):
    return [name]
  if os.path.isdir(name):
    inside = pathlib.Path(name).rglob('*')
    return sorted(str(path) for path in inside if path.is_file())
  if found := glob.glob(name):
    return sorted(path for path in found if os.path.isfile(path))
  return _shards(name)


def is_pattern(name: str) -> bool:
  """Whether a name is a pattern, and not that of one file."""
  return glob.has_magic(name) and not os.path.exists(name)


def _shards(name: str) -> list[str]:
  """All shards of a file, in their order; none if there is none of them."""
  shards: dict[tuple[int, int], str] = {}
  for path in sorted(glob.glob(glob.escape(name) + '-[0-9]*-of-[0-9]*')):
    if found := _SHARD.fullmatch(path.removeprefix(name)):
      shards[int(found[1]), int(found[2])] = path
  totals = {total for _, total in shards}
  there = {number for number, _ in shards}
  if len(totals) > 1:
    raise ValueError(
      f'{name!r} stands for all its shards, but some are of {min(totals)} and'
      f' others of {max(totals)}; remove those that are not wanted, or give a'
      f" pattern, as in '{name}-*-of-{max(totals):05}'."
    )
  if shards and there != set(range(total := totals.pop())):
    wrong = sorted(there ^ set(range(total)))
    raise ValueError(
      f'{name!r} stands for all its {total} shards, counted from 0, but'
      f' {", ".join(map(str, wrong[:8]))} {"is" if len(wrong) == 1 else "are"}'
      f' {"too many" if wrong[0] in there else "missing"}; add what is missing,'
      f" or give a pattern, as in '{name}-*', for those that are there."
    )
  return [shards[place] for place in sorted(shards)]


def refuse_special(path: str | os.PathLike[str]) -> None:
  """Raises an error if a path is nothing that can be read as a file.

  Opening a named pipe waits until somebody writes to it, and a device such as
  /dev/zero has no end.

  Raises:
    OSError: There is no such file, or it is a folder.
    ValueError: It is a pipe, a device or a socket.
  """
  mode = os.stat(path).st_mode
  if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
    kind = 'pipe' if stat.S_ISFIFO(mode) else 'device or a socket'
    raise ValueError(
      f'{str(path)!r} is a {kind} and no regular file, but records are read in'
      ' any order; write the data to a file, and name that.'
    )


def fingerprint(paths: Sequence[str], parts: int = _PARTS) -> str:
  """A SHA-256 of the names, the sizes and the contents of files.

  16 MiB of a file of more than 64 MiB are read, so that a large data set costs
  no more than a small one: parts of equal size, at equal distances from the
  head to the tail. A change that keeps the size and lies between these parts is
  not seen.

  Args:
    paths: The files, in order.
    parts: How many parts of a large file are read.
  """
  whole = hashlib.sha256()
  for path in paths:
    refuse_special(path)
    size = os.path.getsize(path)
    whole.update(f'{os.path.basename(path)} {size}\n'.encode())
    with open(path, 'rb') as file:
      if size <= _WHOLE_BYTES:
        whole.update(hashlib.file_digest(file, 'sha256').digest())
        continue
      length = _READ_BYTES // parts
      for part in range(parts):
        file.seek((size - length) * part // (parts - 1))
        whole.update(file.read(length))
  return whole.hexdigest()
