"""Data sets of the Hub: which of their files hold the records of a split.

The Hub converts public data sets to Parquet, on a branch of its own:

    CONFIG/SPLIT/0000.parquet, ...        the whole split
    CONFIG/partial-SPLIT/0000.parquet     the first 5 GB of it

A part is never taken for the whole: then, and where there is no conversion, the
repository's own files are read; `_own_files` finds them.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import re

from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _names
from grpo_jax.data.hub import _own_files
from grpo_jax.data.hub import _repository
from grpo_jax.data.hub import _vanished
from grpo_jax.data.hub._own_files import DEFAULT
from grpo_jax.data.hub._own_files import Tables

_CONVERTED = 'refs/convert/parquet'
_PARTIAL = 'partial-'
_CONVERTED_FILE = re.compile(r'([^/]+)/([^/]+)/\d+\.parquet')


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
  other = _vanished.instead(name, config, split)
  at = name.pinned(other) if other else name
  try:
    return _downloaded(*_found(at, config, split))
  except _asking.NoRevision as error:
    if not name.commit:
      raise
    return _found_again(name, config, split, error)


def expect(name: _names.Name, config: str, split: str, sha256: str) -> None:
  """Notes the hash of the files of a split, in case its commit vanishes.

  Args:
    name: With a commit.
    config: As in `files`.
    split: As in `files`.
    sha256: What `fingerprint` said of them.
  """
  _vanished.expect(name, config, split, sha256)


def _downloaded(
  repository: _repository.Repository, paths: Sequence[str]
) -> list[str]:
  folder = _repository.download(repository, paths)
  return [str(folder / path) for path in paths]


def _found_again(
  name: _names.Name, config: str, split: str, gone: _asking.NoRevision
) -> list[str]:
  """The same files at another commit, which stands for the one that is gone.

  Raises:
    NoRevision: There are no such files.
  """
  is_known = False
  for repository in _present(name):
    try:
      paths = _chosen(repository, _tables(repository)[0], config, split)
    except _asking.HubError:
      continue
    same = _lists_same(
      name, config, split, [repository.files[x] for x in paths]
    )
    if same is not False:
      files = _downloaded(repository, paths)
      same = same or _vanished.is_expected(name, config, split, files)
    is_known |= same is not None
    if same:
      _vanished.keep(name, config, split, repository.commit)
      _asking.tell(
        f'{name.repository}: the commit {name.commit[:7]} has vanished from '
        f'the Hub; {repository.commit[:7]} has the same files (SHA-256) of the '
        f'split {split!r}, and is read in its place.'
      )
      return files
  said = 'are others' if is_known else 'may be others (no hash is known here)'
  raise _asking.NoRevision(
    f'{name.repository} on the Hub has no commit {name.commit[:7]} any more, '
    'as when its conversion to Parquet is made anew, and its present files of '
    f'the split {split!r} {said}; go on where the files still are in the cache '
    '(HF_HOME and ~/.cache/grpo_jax), or begin a new run, in another workdir, '
    'with the present ones.'
  ) from gone


def _present(name: _names.Name) -> Iterator[_repository.Repository]:
  """Where the files of a commit may be now that it is gone."""
  if not name.revision and (converted := _converted(name)):
    yield converted
  with contextlib.suppress(_asking.NoRevision):
    newest = name.pinned('').at
    yield _repository.find('dataset', name.repository, newest)


def _lists_same(
  name: _names.Name, config: str, split: str, present: list[_repository.File]
) -> bool | None:
  """Whether the commit that is gone had these files; None if that is not known.

  Its list may be in the cache. In it, small files have no SHA-256.
  """
  before = _repository.kept('dataset', name.repository, name.commit)
  if before is None or not before.is_whole:
    return None
  try:
    paths = _chosen(before, _tables(before)[0], config, split)
  except _asking.HubError:  # as where its README.md is gone
    return None
  listed = [before.files[path] for path in paths]
  if not all(one.sha256 for one in (*listed, *present)):
    return None
  return listed == present


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
  repository = _converted(name) if name.is_newest else None
  tables = _converted_tables(repository.files)[0] if repository else {}
  if repository is None or not tables:
    repository = _repository.find_named('dataset', name.repository, name.at)
    tables, _ = _tables(repository)
  if not tables:
    raise _asking.HubError(_nothing(repository))
  config = DEFAULT if DEFAULT in tables else next(iter(tables))
  split = 'train' if 'train' in tables[config] else next(iter(tables[config]))
  path = _own_files.readable(repository, split, tables[config][split])[0]
  kwargs = {'split': split} if split != 'train' else {}
  if len(tables) > 1 and config != DEFAULT:
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
) -> tuple[_repository.Repository, list[str]]:
  """The repository at the commit that has a split, and its files."""
  converted: Tables = {}
  partial: list[str] = []
  if name.file:
    raise ValueError(
      f"'{name}' names a file of a data set on the Hub; leave it out, and name "
      "the config or the split, as in kwargs={'split': 'train'}."
    )
  if name.is_newest and (repository := _converted(name)):
    converted, partial = _converted_tables(repository.files)
    chosen = _config_in(converted, config)
    if converted and not chosen or split in converted.get(chosen, {}):
      return repository, _chosen(repository, converted, config, split)
  repository = _repository.find_named('dataset', name.repository, name.at)
  tables, parts = _tables(repository)
  tables = tables or converted  # which says what there is
  try:
    return repository, _chosen(repository, tables, config, split)
  except _asking.HubError as error:
    if partial or parts:
      raise _asking.HubError(
        f'{name.repository} on the Hub has been converted to Parquet only in '
        f'part ({", ".join(sorted({*partial, *parts}))}), and of its own files '
        f'none can be read: {plain_text.said(error)}'
      ) from error
    raise


def _converted(name: _names.Name) -> _repository.Repository | None:
  """What the Hub has converted; None if it has not, as of private data.

  Raises:
    HubError: That could not be learned.
  """
  try:
    return _repository.find('dataset', name.repository, _CONVERTED)
  except _asking.NoRevision:
    return None
  except _asking.Unreachable:
    own = _repository.find('dataset', name.repository, 'main')  # in the cache
    _asking.tell(
      f'{own.name}: whether the Hub has converted it cannot be seen now; its '
      'own files are read, from the cache.'
    )
    return None


def _tables(
  repository: _repository.Repository,
) -> tuple[Tables, list[str]]:
  """The files of a repository, and the splits that it has in part.

  A commit does not say whether it is one of a conversion; its files do.
  """
  if not repository.is_whole:
    raise _asking.Unreachable(
      f'Some files of {repository.name} are in the cache ({repository.folder}),'
      ' but whether they are all cannot be seen while HF_HUB_OFFLINE is set; '
      'unset it, or give the files by their paths.'
    )
  if named := _own_files.by_readme(repository):
    return named, []
  paths = _own_files.data_files(repository.files)
  if all(map(_CONVERTED_FILE.fullmatch, paths)):
    return _converted_tables(paths)
  tables = _own_files.by_names(repository)
  return tables if _has_records(tables) else {}, []


def _has_records(tables: Tables) -> bool:
  return any(
    path.endswith(_own_files.READ)
    for splits in tables.values()
    for paths in splits.values()
    for path in paths
  )


def _config_in(tables: Tables, config: str) -> str:
  """The config that is meant; '' if it cannot be told."""
  if config or len(tables) == 1:
    return config or next(iter(tables))
  return DEFAULT if DEFAULT in tables else ''


def _chosen(
  repository: _repository.Repository, tables: Tables, config: str, split: str
) -> list[str]:
  """The files of a split.

  Raises:
    HubError: There is no such split, or it cannot be read as a whole.
  """
  if not tables:
    raise _asking.HubError(_nothing(repository))
  chosen = _config_in(tables, config)
  if chosen not in tables:
    given = f'has no config {config!r}' if config else 'has several configs'
    near = importing.nearest(config, tables) if config else ''
    raise _asking.HubError(
      f'{repository.name} on the Hub {given}; name one of '
      f'{", ".join(sorted(tables))} in its kwargs, as in '
      f"{{'config': {min(tables)!r}}}{near}."
    )
  if split not in tables[chosen]:
    raise _asking.HubError(
      f'{repository.name} on the Hub has no split {split!r}; name one of '
      f'{", ".join(sorted(tables[chosen]))} in its kwargs, as in '
      f"{{'split': {min(tables[chosen])!r}}}."
    )
  return _own_files.readable(repository, split, tables[chosen][split])


def _nothing(repository: _repository.Repository) -> str:
  return (
    f'{repository.name} on the Hub has no Parquet or JSONL files; write it to '
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
