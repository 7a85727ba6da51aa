"""Data sets of the Hub: which of their files hold the records of a split.

The Hub converts public data sets to Parquet, on a branch of its own:

    CONFIG/SPLIT/0000.parquet, ...        the whole split
    CONFIG/partial-SPLIT/0000.parquet     the first 5 GB of it

A part is never taken for the whole: then, and where there is no conversion, the
repository's own files are read, as its README.md names them, or else as files
are usually named.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import fnmatch
import pathlib
import re
from typing import Any

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.data import _files
from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _names
from grpo_jax.data.hub import _repository

_CONVERTED = 'refs/convert/parquet'
_PARTIAL = 'partial-'
_CONVERTED_FILE = re.compile(r'([^/]+)/([^/]+)/\d+\.parquet')
_READ = ('.parquet', '.jsonl', '.json')  # in the order of what is preferred
_SPLITS = {  # other words for a split in the names of files
  'train': ('train', 'training'),
  'validation': ('validation', 'valid', 'val', 'dev'),
  'test': ('test', 'testing', 'eval', 'evaluation'),
}
_DEFAULT = 'default'
_NOT_RECORDS = ('dataset_infos.json', 'dataset_info.json', 'state.json')

Tables = Mapping[str, Mapping[str, list[str]]]  # files by config and split


def files(text: str, config: str, split: str) -> list[str]:
  """The files here that hold one split of a data set on the Hub.

  Args:
    text: A name of the Hub.
    config: As the data set calls it; '': its only one.
    split: 'train', 'test', ...

  Returns:
    Paths, in their order: Parquet, or JSONL. What is missing is downloaded.

  Raises:
    ValueError: There is no such data set, config or split, or no file of it
      can be read; the message lists what there is.
    OSError: The disk is too small.
  """
  name = _names.parse(text)
  if name is None:
    raise ValueError(
      f'{text!r} is no name of a data set on the Hugging Face Hub; give '
      'hf:owner/name.'
    )
  repository, tables = _found(name, config, split)
  ((_, table),) = tables.items()
  paths = table[split]
  folder = _repository.download(repository, paths)
  return [str(folder / path) for path in paths]


def sample(text: str) -> tuple[str, dict[str, str]]:
  """A file here of a data set on the Hub, to look at.

  Args:
    text: A name of the Hub.

  Returns:
    Its path, and the arguments beside the name with which a source reads it:
    'config' where there are several, 'split' if it is not 'train'.

  Raises:
    ValueError: There is no such data set, or no file of it can be read.
    OSError: The disk is too small.
  """
  name = _names.parse(text)
  assert name is not None  # the caller has asked
  repository = _converted(name) if name.at == 'main' else None
  tables = _converted_tables(repository.files)[0] if repository else {}
  if repository is None or not tables:
    repository = _repository.find('dataset', name.repository, name.at)
    tables = _converted_tables(repository.files)[0] or _own_tables(repository)
  if not tables:
    raise _asking.HubError(_nothing(name))
  config = _DEFAULT if _DEFAULT in tables else next(iter(tables))
  split = 'train' if 'train' in tables[config] else next(iter(tables[config]))
  path = tables[config][split][0]
  kwargs = {'split': split} if split != 'train' else {}
  if len(tables) > 1 and config != _DEFAULT:
    kwargs['config'] = config
  return str(_repository.download(repository, [path]) / path), kwargs


def commit(name: _names.Name, config: str, split: str) -> str:
  """The commit that has a split: of the conversion, or of the repository.

  Raises:
    ValueError: As `files`.
  """
  return _found(name, config, split)[0].commit


def _found(
  name: _names.Name, config: str, split: str
) -> tuple[_repository.Repository, Tables]:
  """The repository at the commit that has a split, and its files."""
  converted: Tables = {}
  partial: list[str] = []
  if name.file:
    raise ValueError(
      f"'{name}' names a file of a data set on the Hub; leave it out, and name "
      "the config or the split, as in kwargs={'split': 'train'}."
    )
  if not name.commit and not name.revision:
    repository = _converted(name)
    if repository is not None:
      converted, partial = _converted_tables(repository.files)
      if split in converted.get(_config_in(converted, config), {}):
        return repository, _chosen(name, converted, config, split)
  repository = _repository.find('dataset', name.repository, name.at)
  tables, parts = _converted_tables(repository.files)
  if not tables and not parts:
    # Without any, what was converted says what there is.
    tables = _own_tables(repository) or converted
  try:
    return repository, _chosen(name, tables, config, split)
  except _asking.HubError as error:
    if partial or parts:
      raise _asking.HubError(
        f'{name.repository} on the Hub has been converted to Parquet only in '
        f'part ({", ".join(sorted({*partial, *parts}))}), and of its own files '
        f'none can be read: {plain_text.said(error)}'
      ) from error
    raise


def _converted(name: _names.Name) -> _repository.Repository | None:
  """What the Hub has converted; None if it has not, as of private data."""
  try:
    return _repository.find('dataset', name.repository, _CONVERTED)
  except _asking.Unreachable:
    return None  # the repository itself may be in the cache
  except _asking.HubError:
    return None  # said of the repository, if it is not there either


def _config_in(tables: Tables, config: str) -> str:
  return config or (next(iter(tables)) if len(tables) == 1 else '')


def _chosen(
  name: _names.Name, tables: Tables, config: str, split: str
) -> Tables:
  """The tables of the one config, which has the split.

  Raises:
    HubError: It has not.
  """
  if not tables:
    raise _asking.HubError(_nothing(name))
  chosen = _config_in(tables, config)
  if not config and len(tables) > 1 and _DEFAULT in tables:
    chosen = _DEFAULT
  if chosen not in tables:
    given = f'has no config {config!r}' if config else 'has several configs'
    near = importing.nearest(config, tables) if config else ''
    raise _asking.HubError(
      f'{name.repository} on the Hub {given}; name one of '
      f'{", ".join(sorted(tables))} in its kwargs, as in '
      f"{{'config': {min(tables)!r}}}{near}."
    )
  if split not in tables[chosen]:
    raise _asking.HubError(
      f'{name.repository} on the Hub has no split {split!r}; name one of '
      f'{", ".join(sorted(tables[chosen]))} in its kwargs, as in '
      f"{{'split': {min(tables[chosen])!r}}}."
    )
  return {chosen: tables[chosen]}


def _nothing(name: _names.Name) -> str:
  return (
    f'{name.repository} on the Hub has no Parquet or JSONL files; write it to '
    'one, and give that.'
  )


def _converted_tables(paths: Iterable[str]) -> tuple[Tables, list[str]]:
  """The files of a conversion, and the splits that it has in part."""
  tables: dict[str, dict[str, list[str]]] = {}
  partial = set()
  for path in sorted(paths):
    if found := _CONVERTED_FILE.fullmatch(path):
      config, split = found.groups()
      if split.startswith(_PARTIAL):
        partial.add(f'{config}/{split.removeprefix(_PARTIAL)}')
      else:
        tables.setdefault(config, {}).setdefault(split, []).append(path)
  return tables, sorted(partial)


def _own_tables(repository: _repository.Repository) -> Tables:
  """The files of a repository, as its README.md or their names say."""
  paths = sorted(
    path
    for path in repository.files
    if path.endswith(_READ) and path.rpartition('/')[2] not in _NOT_RECORDS
  )
  named = _named_tables(repository, paths)
  if named:
    return named
  for end in _READ:  # the same records may be there in several formats
    alike = [path for path in paths if path.endswith(end)]
    if alike:
      return _tables_by_name(alike)
  return {}


def _tables_by_name(paths: list[str]) -> Tables:
  tables: dict[str, dict[str, list[str]]] = {}
  for path in paths:
    *folders, _ = path.split('/')
    folders = [one for one in folders if one != 'data' and not _split_in(one)]
    config = folders[0] if folders else _DEFAULT
    split = _split_in(path) or 'train'
    tables.setdefault(config, {}).setdefault(split, []).append(path)
  return tables


def _split_in(path: str) -> str:
  """The split that a path has a word for; '' if it has none."""
  words = re.split(r'[^a-z]+', path.lower())
  for split, others in _SPLITS.items():
    if set(others) & set(words):
      return split
  return ''


def _named_tables(
  repository: _repository.Repository, paths: list[str]
) -> Tables:
  """The files as the front matter of README.md names them; none if not."""
  tables: dict[str, dict[str, list[str]]] = {}
  configs = _front_matter(repository).get('configs')
  for one in configs if isinstance(configs, list) else ():
    if not isinstance(one, dict):
      continue
    config = str(one.get('config_name', _DEFAULT))
    for split, patterns in _data_files(one.get('data_files')):
      matched = [
        path
        for path in paths
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns)
      ]
      if matched and len({_files.format_of(path) for path in matched}) == 1:
        tables.setdefault(config, {})[split] = matched
  return tables


def _data_files(named: Any) -> list[tuple[str, list[str]]]:
  """Splits and patterns of a config; the Hub takes four ways to write them."""
  if isinstance(named, dict):
    named = [{'split': k, 'path': v} for k, v in named.items()]
  entries = named if isinstance(named, list) else [named]
  found = []
  for entry in entries:
    if isinstance(entry, str):
      entry = {'split': _split_in(entry) or 'train', 'path': entry}
    if isinstance(entry, dict) and 'path' in entry:
      path = entry['path']
      patterns = [*map(str, path)] if isinstance(path, list) else [str(path)]
      found.append((str(entry.get('split', 'train')), patterns))
  return found


def _front_matter(repository: _repository.Repository) -> dict[str, Any]:
  """What README.md says of itself; nothing if it cannot be read."""
  import yaml

  if 'README.md' not in repository.files:
    return {}
  folder = _repository.download(repository, ['README.md'])
  text = pathlib.Path(folder / 'README.md').read_text(errors='replace')
  parts = re.split(r'^---\s*$', text, maxsplit=2, flags=re.MULTILINE)
  if len(parts) < 3 or parts[0].strip():
    return {}
  try:
    values = yaml.safe_load(parts[1])
  except (yaml.YAMLError, ValueError, RecursionError):
    return {}
  return values if isinstance(values, dict) else {}
