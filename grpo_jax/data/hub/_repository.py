"""A repository of the Hub at one commit: its files, and those that are here.

Files lie in the usual cache (HF_HOME), where other programs find them, and
which several processes of a host may fill at once. Beside it the list of files
of a commit is kept in the cache of this package, so that a start that has all
it needs asks nobody.

`huggingface_hub` compares the size of a file with what was announced, and not
its contents; here the SHA-256 of large files is compared, once.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import contextlib
import functools
import hashlib
import io
import json
import os
import pathlib
import shutil
from typing import Any
from typing import NamedTuple

from grpo_jax.config import whole_files
from grpo_jax.data import _files
from grpo_jax.data.hub import _asking
from grpo_jax.data.hub._names import is_commit

_SHOWN_SECS = 10.0  # between two sentences of a download
_MOST_NAMED = 8  # revisions in a message


class File(NamedTuple):
  """What the Hub says of a file."""

  nbytes: int
  sha256: str = ''  # '' of a small one, which it stores in another way


class Repository(NamedTuple):
  """A repository at a commit.

  Attributes:
    kind: 'model' or 'dataset'.
    name: 'owner/name'.
    commit: Of 40 digits.
    files: All of them, by their paths in it.
    is_whole: Whether that is known: offline, what another program has
      downloaded may be a part.
  """

  kind: str
  name: str
  commit: str
  files: Mapping[str, File]
  is_whole: bool = True

  @property
  def folder(self) -> pathlib.Path:
    """Where its files lie here; it may not exist."""
    return _cache(self.kind, self.name) / 'snapshots' / self.commit


@functools.lru_cache(maxsize=64)  # one commit for all of a process
def find(kind: str, name: str, revision: str) -> Repository:
  """A repository at a revision.

  The Hub is not asked if the revision is a commit whose list of files is here.
  If it cannot be reached, a revision is what it was the last time.

  Args:
    kind: 'model' or 'dataset'.
    name: 'owner/name'.
    revision: A branch, a tag or a commit.

  Raises:
    HubError: There is no such repository, or it may not be read.
    NoRevision: It has no such revision.
    Unreachable: Nobody has answered, and it is not in the cache.
  """
  seen = kept(kind, name, revision)
  if seen is not None and (is_commit(revision) or _asking.is_offline()):
    return seen

  def ask() -> Any:
    import huggingface_hub

    return huggingface_hub.HfApi().repo_info(
      name, repo_type=kind, revision=revision, files_metadata=True
    )

  try:
    info = _asking.ask(ask, name, kind)
  except _asking.Unreachable:
    if seen is None:
      raise
    _asking.tell(f'{name} is read from the cache: the Hub cannot be reached.')
    return seen
  files = {
    one.rfilename: File(one.size or 0, one.lfs.sha256 if one.lfs else '')
    for one in info.siblings or ()
    if '..' not in one.rfilename.split('/') and one.rfilename[:1] != '/'
  }
  found = Repository(kind, name, info.sha, files)
  _keep(found, revision)
  return found


def find_named(kind: str, name: str, revision: str) -> Repository:
  """As `find`; the error lists the revisions that there are."""
  try:
    return find(kind, name, revision)
  except _asking.NoRevision as error:
    no = f'no revision {revision!r}'
    if is_commit(revision):
      no = (
        f'no commit {revision[:7]} (its history, or its conversion to Parquet, '
        'may have been made anew)'
      )
    listed = ', '.join(_revisions(kind, name))
    give = f'{listed}, or a commit' if listed else 'a branch or a commit'
    raise _asking.NoRevision(
      f'{name} on the Hub has {no}; give {give}, see '
      f'{_asking.page(name, kind)}.'
    ) from error


def _revisions(kind: str, name: str) -> list[str]:
  """Branches and tags of a repository; none if they cannot be learned."""

  def ask() -> Any:
    import huggingface_hub

    return huggingface_hub.HfApi().list_repo_refs(name, repo_type=kind)

  try:
    found = _asking.ask(ask, name, kind)
  except _asking.HubError:  # it is only a help
    return []
  several = [one.name for one in (*found.branches, *found.tags)]
  return [*several[:_MOST_NAMED], *['...'][: len(several) > _MOST_NAMED]]


def download(repository: Repository, paths: Iterable[str]) -> pathlib.Path:
  """The folder of a repository, with these files in it.

  `_asking.tell` hears what is downloaded and to where, and how far it is.

  Args:
    repository: From `find`.
    paths: Files that it has.

  Returns:
    The folder. It may hold other files, which other programs have downloaded.

  Raises:
    HubError: A file cannot be had, or its contents are not what they should be.
    OSError: The disk is too small, or fails.
  """
  paths = list(paths)
  missing = [path for path in paths if not (repository.folder / path).exists()]
  nbytes = sum(repository.files[path].nbytes for path in missing)
  if missing:
    _require_room(repository, nbytes)
  if nbytes > 10**6:  # the others take no time
    files = 'a file' if len(missing) == 1 else f'{len(missing)} files'
    _asking.tell(
      f'Downloading {files} of {repository.name}, '
      f'{nbytes / 1e9:.3g} GB, to {_cache_root()}.'
    )
  for path in paths:
    if path in missing:
      _fetch(repository, path)
    if not _is_right(repository, path):
      again = 'is damaged; it is downloaded again.'
      _asking.tell(f'{repository.name}: {path} {again}')
      _remove(repository.folder / path)
      _fetch(repository, path)
      if not _is_right(repository, path):
        _remove(repository.folder / path)
        raise _asking.HubError(
          f'{path} of {repository.name} has come twice with other contents '
          'than the Hub announces (SHA-256); see what stands between this '
          'machine and the Hub, such as a proxy.'
        )
  return repository.folder


def _fetch(repository: Repository, path: str) -> None:
  import huggingface_hub

  def fetch() -> str:
    return huggingface_hub.hf_hub_download(
      repository.name,
      path,
      repo_type=repository.kind,
      revision=repository.commit,
      tqdm_class=_progress(f'{repository.name}: {path}'),
    )

  _asking.ask(fetch, repository.name, repository.kind)


def _progress(name: str) -> Any:
  """A bar that says now and then how far it has come."""
  from huggingface_hub.utils import tqdm

  class Progress(tqdm):
    """Draws nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
      kwargs |= dict(
        disable=False, file=io.StringIO(), mininterval=_SHOWN_SECS, delay=1
      )
      super().__init__(*args, **kwargs)

    def display(self, *_: Any, **__: Any) -> None:
      if self.total and self.n < self.total and self.n:
        said = f'{self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB'
        _asking.tell(f'{name}: {said}')

  return Progress


def _require_room(repository: Repository, nbytes: int) -> None:
  """Raises an OSError if the disk has no room for so many bytes."""
  place = _cache_root()
  while not place.exists():
    place = place.parent
  free = shutil.disk_usage(place).free
  if nbytes > free:
    raise OSError(
      f'{repository.name} needs {nbytes / 1e9:.3g} GB more in {_cache_root()}, '
      f'which has {free / 1e9:.3g} GB free; make room, or set HF_HOME to a '
      'folder on a larger disk.'
    )


def _is_right(repository: Repository, path: str) -> bool:
  """Whether a large file has the contents that the Hub has announced."""
  file, told = repository.folder / path, repository.files[path]
  if not told.sha256:
    return True
  blob = file.resolve()
  state = blob.stat()
  if state.st_size != told.nbytes:
    return False
  key = f'{blob} {state.st_size} {state.st_mtime_ns} {told.sha256}'
  mark = _notes() / 'right' / hashlib.sha256(key.encode()).hexdigest()[:32]
  if mark.exists():
    return True
  with blob.open('rb') as opened:
    if hashlib.file_digest(opened, 'sha256').hexdigest() != told.sha256:
      return False
  with contextlib.suppress(OSError):  # without it, the next start hashes
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
  return True


def _remove(file: pathlib.Path) -> None:
  blob = file.resolve()
  file.unlink(missing_ok=True)
  blob.unlink(missing_ok=True)


def _cache_root() -> pathlib.Path:
  from huggingface_hub import constants

  return pathlib.Path(constants.HF_HUB_CACHE)


def _cache(kind: str, name: str) -> pathlib.Path:
  """The folder of a repository in the cache, as `huggingface_hub` names it."""
  return _cache_root() / '--'.join((f'{kind}s', *name.split('/')))


def _notes() -> pathlib.Path:
  return _files.cache_directory() / 'hub'


def note(*words: str) -> pathlib.Path:
  """A file of the cache of this package, for what these words say."""
  from huggingface_hub import constants

  key = json.dumps([constants.ENDPOINT, *words])
  return _notes() / f'{hashlib.sha256(key.encode()).hexdigest()[:32]}.json'


def _keep(found: Repository, revision: str) -> None:
  """Keeps the list of files for a start that asks nobody."""
  data = json.dumps([found.commit, found.files]).encode()
  for at in {revision, found.commit}:
    file = note(found.kind, found.name, at)
    with contextlib.suppress(OSError):  # without it, the next start asks
      file.parent.mkdir(parents=True, exist_ok=True)
      whole_files.write(file, data)


def kept(kind: str, name: str, revision: str) -> Repository | None:
  """The repository at a revision, as far as it is known here."""
  try:
    commit, files = json.loads(note(kind, name, revision).read_text())
    listed = {path: File(*file) for path, file in files.items()}
    return Repository(kind, name, commit, listed)
  except (OSError, ValueError, TypeError, AttributeError):
    return _downloaded(kind, name, revision)


def _downloaded(kind: str, name: str, revision: str) -> Repository | None:
  """What another program has downloaded; None if the Hub can be asked."""
  if not _asking.is_offline():
    return None
  folder = _cache(kind, name)
  commit = revision
  if not is_commit(revision):
    try:
      commit = (folder / 'refs' / revision).read_text().strip()
    except OSError:
      return None
  snapshot = folder / 'snapshots' / commit
  paths = [path for path in snapshot.rglob('*') if path.is_file()]
  if not paths:
    return None
  files = {
    path.relative_to(snapshot).as_posix(): File(os.path.getsize(path))
    for path in paths
  }
  return Repository(kind, name, commit, files, is_whole=False)
