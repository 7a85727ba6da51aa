"""The records that a repository itself holds: its files by config and split.

They are found as the Hub finds them. The front matter of README.md comes first;
without configs in it, the names of files have words for splits:

    train.jsonl, data/test-00000-of-00001.parquet, validation/part.parquet

Where a file has such a word, files without one hold no records: `all.jsonl`
beside `train.jsonl` and `test.jsonl` would bring the held-out records back.
Files are listed whether or not they can be read here. So one that cannot be
read is refused where its split is asked for, and not left out.

References:
  https://huggingface.co/docs/hub/datasets-data-files-configuration
"""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import pathlib
import re
from typing import Any

from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _repository

READ = ('.parquet', '.jsonl', '.json')  # in the order of what is preferred
_TEXTS = ('.csv', '.tsv', '.json', '.jsonl', '.ndjson', '.parquet')
_PACKED = ('.gz', '.zst', '.xz', '.bz2', '.lz4')
# Other data: some of them hold records, but none can be read here.
_UNREAD = (
  *('.csv', '.tsv', '.ndjson', '.arrow'),
  *(text + packed for text in _TEXTS for packed in _PACKED),
)
# These hold records only where a word for a split, or README.md, says so.
_PERHAPS = ('.zip', '.tar', '.tar.gz', '.tgz', '.h5', '.pkl')
_NAMED = (
  '.txt', '.xml', '.png', '.jpg', '.jpeg', '.webp', '.gif', '.wav', '.mp3',
  '.flac', '.mp4', '.pdf',
)  # fmt: skip
_ENDS = (*READ, *_UNREAD, *_PERHAPS, *_NAMED)
_SPLITS = {  # other words for a split in the names of files
  'train': ('train', 'training'),
  'validation': ('validation', 'valid', 'val', 'dev'),
  'test': ('test', 'testing', 'eval', 'evaluation'),
}
DEFAULT = 'default'
_NOT_RECORDS = {
  'README.md', 'config.json', 'dataset_dict.json', 'dataset_info.json',
  'dataset_infos.json', 'dummy_data.zip', 'state.json',
}  # fmt: skip
_OF_OTHERS = {'metadata.jsonl', 'metadata.csv', 'metadata.parquet'}  # of images
_SHARD = re.compile(r'-\d+-of-(\d+)(?=\.|$)')
_DATA_SHARD = re.compile(r'data/([^/]+)-\d{5}-of-\d{5}[^/]*')

Tables = Mapping[str, Mapping[str, list[str]]]  # files by config and split


def data_files(paths: Iterable[str]) -> list[str]:
  """Those of a repository that may hold records, sorted."""
  return sorted(
    path
    for path in paths
    if path.endswith((*READ, *_UNREAD))
    and path.rpartition('/')[2] not in _NOT_RECORDS | _OF_OTHERS
    and not _is_hidden(path)
  )


def readable(
  repository: _repository.Repository, split: str, paths: Sequence[str]
) -> list[str]:
  """The files to read of a split; those that say the same again are left out.

  Args:
    repository: For the message.
    split: For the message.
    paths: All files of the split.

  Raises:
    HubError: Some of its records would be left out.
  """
  for end in READ:
    found = [path for path in paths if path.endswith(end)]
    # The same records may be there in several formats.
    if found and {*map(_stem, found)} == {*map(_stem, paths)}:
      _require_shards(repository, found)
      return found
  unread = [path for path in paths if not path.endswith(READ)]
  if not paths:
    said = 'the files that its README.md names for it are not there'
  elif unread:
    said = f'{unread[0]} of it is neither Parquet nor JSONL'
  else:
    said = f'its files are of several formats ({", ".join(paths[:3])})'
  raise _asking.HubError(
    f'{repository.name} on the Hub has the split {split!r}, but {said}; name '
    'the files of its records in its README.md (configs, data_files), or write '
    'them to one Parquet or JSONL file, and give that.'
  )


def _require_shards(
  repository: _repository.Repository, paths: Sequence[str]
) -> None:
  """Raises an error if the repository lacks a shard of one of the files."""
  sets = {_set_of(path) for path in paths}
  there = collections.Counter(map(_set_of, repository.files))
  for name, total in sorted(sets):
    if there[name, total] < total:
      raise _asking.HubError(
        f'{repository.name} on the Hub has {there[name, total]} of the {total} '
        f'shards of {name}; add the others there, or give files by their paths.'
      )


def _set_of(path: str) -> tuple[str, int]:
  """What all shards of a file have in common, and how many they are."""
  shard = _SHARD.search(path)
  return (_SHARD.sub('', path), int(shard[1])) if shard else (path, 0)


def by_names(repository: _repository.Repository) -> Tables:
  """The files as their names say; a folder is a config."""
  paths = _named_files(repository.files)
  if any(map(_DATA_SHARD.fullmatch, paths)):
    return {DEFAULT: _splits(paths)}
  of_config: dict[str, list[str]] = {}
  for path in paths:
    *folders, _ = path.split('/')
    folders = [one for one in folders if one != 'data' and not _split_in(one)]
    of_config.setdefault(folders[0] if folders else DEFAULT, []).append(path)
  return {config: _splits(several) for config, several in of_config.items()}


def by_readme(repository: _repository.Repository) -> Tables:
  """The files as the front matter of README.md names them; none if not."""
  tables: dict[str, dict[str, list[str]]] = {}
  configs = _front_matter(repository).get('configs')
  for one in configs if isinstance(configs, list) else ():
    if not isinstance(one, dict):
      continue
    folder = str(one.get('data_dir') or '').removeprefix('./').strip('/')
    base = f'{folder}/' if folder else ''
    inside = {
      path.removeprefix(base): path
      for path in repository.files
      if path.startswith(base)
      and path.endswith(_ENDS)
      and path.rpartition('/')[2] not in _NOT_RECORDS
    }
    config = str(one.get('config_name', DEFAULT))
    if one.get('data_files') is None:
      paths = _named_files(inside)
      splits = _splits(paths) if paths else {}
    else:
      named = _data_files(one['data_files'])
      splits = {split: _matched(inside, patterns) for split, patterns in named}
    for split, paths in splits.items():
      tables.setdefault(config, {})[split] = [inside[path] for path in paths]
  return tables


def _splits(paths: Sequence[str]) -> dict[str, list[str]]:
  """Files by the splits that their names have words for."""
  splits: dict[str, list[str]] = {}
  # As `datasets` writes them: with the split's own name.
  shards = {path: _DATA_SHARD.fullmatch(path) for path in paths}
  for path, shard in shards.items():
    split = shard[1] if shard else ''
    if not any(shards.values()):
      split = _split_in(path)
    if split:
      splits.setdefault(split, []).append(path)
  return splits or {'train': [*paths]}


def _named_files(paths: Iterable[str]) -> list[str]:
  """The files that hold records by their names, sorted."""
  paths = [*paths]
  packed = [x for x in paths if x.endswith(_PERHAPS) and not _is_hidden(x)]
  return sorted({*data_files(paths), *filter(_split_in, packed)})


def _split_in(path: str) -> str:
  """The split that a path has a word for, its last part first; '' if none."""
  for part in reversed(path.split('/')):
    words = set(re.split(r'[^a-z]+', part.lower()))
    for split, others in _SPLITS.items():
      if words & set(others):
        return split
  return ''


def _stem(path: str) -> str:
  """A path without what the format, or the number of shards, adds to it."""
  end = max((end for end in _ENDS if path.endswith(end)), key=len, default='')
  return _SHARD.sub('', path.removesuffix(end))


def _is_hidden(path: str) -> bool:
  return any(part.startswith(('.', '__')) for part in path.split('/'))


def _data_files(named: Any) -> Iterator[tuple[str, list[str]]]:
  """Splits and patterns of a config; the Hub takes four ways to write them."""
  if isinstance(named, str):
    named = [named]
  if isinstance(named, list) and all(isinstance(x, str) for x in named):
    named = {'train': named}
  if isinstance(named, list):
    named = {
      str(one['split']): one.get('path')
      for one in named
      if isinstance(one, dict) and 'split' in one
    }
  for split, path in named.items() if isinstance(named, dict) else ():
    yield str(split), [*map(str, path if isinstance(path, list) else [path])]


def _matched(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
  """The files that patterns name, sorted; none if one names none."""
  paths, found = sorted(paths), set()
  for pattern in patterns:
    pattern = pattern.removeprefix('./')
    expression, shows = re.compile(_expression(pattern)), _is_hidden(pattern)
    named = {
      path
      for path in paths
      if expression.fullmatch(path) and (shows or not _is_hidden(path))
    }
    if not named:
      return []
    found |= named
  return sorted(found)


def _expression(pattern: str) -> str:
  """A pattern of the Hub as a regular expression: `*` stays in its folder.

  >>> bool(re.fullmatch(_expression('data/*.jsonl'), 'data/old/a.jsonl'))
  False
  >>> bool(re.fullmatch(_expression('**/*.jsonl'), 'a.jsonl'))
  True
  """
  found = ''
  token = r'(?:(?<=/)|^)\*\*/|(?:(?<=/)|^)\*\*$|\*+|\?|\[!?\]?[^]/]*\]|.'
  for one in re.findall(token, pattern):
    if one == '**/':
      found += '(?:[^/]+/)*'
    elif one == '**':
      found += '.*'
    elif one.startswith('*'):
      found += '[^/]*'
    elif one == '?':
      found += '[^/]'
    elif len(one) > 1:
      inside = one[1:-1].replace('\\', r'\\').replace('[', r'\[')
      found += f'[^/{inside[1:]}]' if inside[0] == '!' else f'[{inside}]'
    else:
      found += re.escape(one)
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
