"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib


def write(path: str | os.PathLike[str], contents: bytes) -> None:
  """Writes a file so that a kill leaves either the old file or the new one.

  A new file takes the place of the old one in one step, once it is on the disk.
  Where `path` is a link, this is the file that it leads to. What is no regular
  file, such as /dev/null or a pipe, is written to and stays what it is.

  Args:
    path: The file. Its directory must be there. A process that is killed may
      leave a file beside it, whose name begins with a dot and ends in .tmp.
    contents: All that the file is to hold.

  Raises:
    OSError: It cannot be written; an old file is then as it was.
  """
  path = pathlib.Path(path)
  if path.exists() and not path.is_file():
    path.write_bytes(contents)
    return
  path = path.resolve()
  beside = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  try:
    with beside.open('wb') as file:
      file.write(contents)
      file.flush()
      os.fsync(file.fileno())
    os.replace(beside, path)
  finally:
    with contextlib.suppress(OSError):
      beside.unlink(missing_ok=True)
