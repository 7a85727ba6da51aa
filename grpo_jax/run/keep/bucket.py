"""A workdir in a bucket, such as `gs://name/run`.

Objects in a bucket can be neither appended to nor locked. So the first process
of a run has a copy of the workdir on its own disk, writes to it as to any, and
a thread uploads what has changed:

- What only grows, `metrics.jsonl` and the files of TensorBoard, in parts: the
  object `FILE.parts/000000012345` holds what came after that many bytes. At the
  end of the run, or at the next start, they become one object.
- Other files as one object. Completions, exports and profiles leave the disk
  once they are uploaded.
- Checkpoints are not in the copy: Orbax writes them to the bucket; see
  `arrays`.

In place of a lock there is the object `claim.json`. Its owner counts in it, so
that others see that it is alive, whatever their clocks say.
"""

import atexit
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from typing import Any
import uuid

from grpo_jax.config import plain_text
from grpo_jax.hosts import processes

UPLOAD_SECS = 15.0
BEAT_SECS = 10.0
SILENT_SECS = 60.0  # after which the owner of a claim counts as gone
SETTLE_SECS = 2.0  # in which another start would write its own claim
TRIES = 5  # of the last upload

_PLACE = '.bucket'  # in a copy: where the workdir is
_CLAIM = 'claim.json'
_GROWING = re.compile(r'metrics\.jsonl|tensorboard/.*')
_LEAVING = re.compile(r'(completions|evaluations|exports|profile)/.*')
_HIDDEN = re.compile(r'(.*/)?\.|.*\.tmp$')


def is_bucket(workdir: Any) -> bool:
  """Whether a workdir is in a bucket, and not on a disk of this machine."""
  return '://' in os.fspath(workdir)


def arrays(workdir: pathlib.Path) -> Any:
  """Where the folders of checkpoints are: in the workdir, or in its bucket.

  Args:
    workdir: A directory, or the copy that `opened` or `read_only` has made.

  Returns:
    A `pathlib.Path`, or one like it.
  """
  place = workdir / _PLACE
  return place_of(place.read_text()) if place.is_file() else workdir


@contextlib.contextmanager
def opened(
  workdir: str | os.PathLike[str], peers: processes.Processes = processes.ALONE
) -> Iterator[pathlib.Path]:
  """A directory of this machine that stands for a workdir, for one run.

  For a workdir that is no bucket it is the workdir itself. Of several processes
  the first alone claims and uploads.

  Args:
    workdir: Where the run is to be, as it was typed.
    peers: The processes of the run.

  Raises:
    ValueError: Another process is running there, or the bucket cannot be read,
      or at the end the last files could not be uploaded.
  """
  peers.check_equal({'a workdir in a bucket': is_bucket(workdir)})
  if not is_bucket(workdir):
    yield pathlib.Path(workdir).absolute()
    return
  with contextlib.ExitStack() as stack:
    with peers.together():
      if peers.is_first:
        owns = stack.enter_context(_claimed(place_of(workdir)))
        _join_parts(place_of(workdir))
    with peers.together():
      local = _copied(workdir) if peers.is_first else read_only(workdir)
    if peers.is_first:
      stack.enter_context(_uploaded(local, place_of(workdir), owns))
    yield local
    with peers.together():  # the others wait for the last upload
      stack.close()


def push(workdir: pathlib.Path) -> None:
  """Uploads now what has changed.

  Call it before a checkpoint: if the process is killed, the metrics in the
  bucket reach as far as the checkpoint. What cannot be uploaded is warned of
  and tried again later: a checkpoint is worth more than lines of metrics.
  Nothing is done for a directory that stands for no workdir in a bucket.

  Args:
    workdir: What `opened` has given.
  """
  if upload := _OPEN.get(workdir):
    upload()


def push_folder(workdir: pathlib.Path, folder: pathlib.Path) -> None:
  """Uploads a folder of a process whose copy no thread uploads.

  Of several processes only the first has such a thread. Nothing is done in the
  first, and for a workdir that is in no bucket.

  Args:
    workdir: What `opened` has given.
    folder: A folder in it, with files that no other process has.
  """
  place = arrays(workdir)
  if place is workdir or workdir in _OPEN:
    return
  for path in folder.rglob('*'):
    if path.is_file():
      target = place / path.relative_to(workdir).as_posix()
      target.parent.mkdir(parents=True, exist_ok=True)
      target.write_bytes(path.read_bytes())


# What uploads each copy that is open in this process.
_OPEN: dict[pathlib.Path, Callable[[], None]] = {}


def read_only(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """A directory from which a run can be read; see `opened`."""
  if not is_bucket(workdir):
    return pathlib.Path(workdir)
  local = _copied(workdir)
  atexit.register(shutil.rmtree, local.parent, ignore_errors=True)
  return local


def place_of(workdir: str | os.PathLike[str]) -> Any:
  """A workdir in a bucket as a path of `etils`.

  Raises:
    ValueError: The bucket cannot be reached.
  """
  from etils import epath  # only now: it takes a moment, at every command

  text = os.fspath(workdir)
  try:
    place = epath.Path(text)
    place.exists()
    return place
  except Exception as error:  # of `etils`, and of whatever it calls
    raise ValueError(
      f'{text} cannot be reached ({plain_text.named(error)}); for gs:// '
      'install gcsfs, log in and check the name, or give a directory.'
    ) from error


def _copied(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """A new directory with the files that lie at the top of a workdir."""
  place = place_of(workdir)
  name = '_'.join(re.findall(r'[\w.-]+', os.fspath(workdir)))
  local = pathlib.Path(tempfile.mkdtemp(prefix='grpo_jax_')) / name
  local.mkdir()
  (local / _PLACE).write_text(os.fspath(workdir))
  for name in _names(place):
    if name != _CLAIM and not (place / name).is_dir():
      (local / name).write_bytes((place / name).read_bytes())
    elif name.endswith('.parts'):  # of a run that may be going on
      whole = name.removesuffix('.parts')
      (local / whole).write_bytes(_whole(place / whole))
  return local


def _names(place: Any) -> list[str]:
  return sorted(path.name for path in place.iterdir()) if place.exists() else []


def _parts(file: Any) -> Any:
  return file.with_name(f'{file.name}.parts')


def _whole(file: Any) -> bytes:
  """A file that was uploaded in parts, as far as they join."""
  whole = file.read_bytes() if file.exists() else b''
  for name in _names(_parts(file)):
    # Parts that are in the file already are left where the process was killed
    # between writing it and removing them.
    if int(name) == len(whole):
      whole += (_parts(file) / name).read_bytes()
  return whole


def _join_parts(place: Any) -> None:
  """Makes one object of each file whose parts an earlier start has left."""
  for folder in (place, place / 'tensorboard'):
    for name in _names(folder):
      if name.endswith('.parts'):
        file = folder / name.removesuffix('.parts')
        file.write_bytes(_whole(file))
        (folder / name).rmtree()


class _Uploads:
  """What has been uploaded of a directory, and what has not yet."""

  def __init__(self, local: pathlib.Path, place: Any):
    self._local, self._place = local, place
    self._lock = threading.Lock()  # the thread's turn, or that of the end
    self._seen: dict[str, tuple[int, int]] = {}  # size and time of each file
    # Of what has been uploaded of a file that grows: how much, and its digest.
    self._sent: dict[str, tuple[int, str]] = {}
    for name in self._files():  # they have just been downloaded
      self._seen[name] = self._stamp(name)
      if _GROWING.fullmatch(name):
        self._note(name, (local / name).read_bytes())

  def _files(self) -> list[str]:
    found = (
      path.relative_to(self._local).as_posix()
      for path in self._local.rglob('*')
      if path.is_file()
    )
    names = [name for name in found if not _HIDDEN.match(name)]
    # The file that makes a model of a folder comes last, when it is whole.
    return sorted(names, key=lambda name: (name.endswith('config.json'), name))

  def _stamp(self, name: str) -> tuple[int, int]:
    stat = (self._local / name).stat()
    return stat.st_size, stat.st_mtime_ns

  def _note(self, name: str, data: bytes) -> None:
    self._sent[name] = len(data), hashlib.sha256(data).hexdigest()

  def push(self) -> None:
    """Uploads all that has changed."""
    with self._lock:
      there = self._files()
      for name in there:
        with contextlib.suppress(FileNotFoundError):  # it has gone meanwhile
          stamp = self._stamp(name)
          if self._seen.get(name) == stamp:
            continue
          self._upload(name)
          self._seen[name] = stamp  # what came meanwhile is of the next time
          if _LEAVING.match(name) and self._stamp(name) == stamp:
            (self._local / name).unlink()
      for name in [*self._seen]:
        if name not in there and not _LEAVING.match(name):
          self._remove(name)

  def _upload(self, name: str) -> None:
    file, target = self._local / name, self._place / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not _GROWING.fullmatch(name):
      with file.open('rb') as source, target.open('wb') as written:
        shutil.copyfileobj(source, written)
      return
    data, (size, digest) = file.read_bytes(), self._sent.get(name, (0, ''))
    if hashlib.sha256(data[:size]).hexdigest() == digest:
      _parts(target).mkdir(parents=True, exist_ok=True)
      (_parts(target) / f'{size:012d}').write_bytes(data[size:])
    else:  # it is new, or was cut back
      _parts(target).rmtree(missing_ok=True)
      target.write_bytes(data)
    self._note(name, data)

  def _remove(self, name: str) -> None:
    del self._seen[name]
    self._sent.pop(name, None)
    (self._place / name).unlink(missing_ok=True)
    _parts(self._place / name).rmtree(missing_ok=True)


@contextlib.contextmanager
def _uploaded(
  local: pathlib.Path, place: Any, owns: Callable[[], bool]
) -> Iterator[None]:
  """Uploads a directory while the body runs, and after it for the last time.

  Nothing is uploaded any more once the claim is another process's.
  """
  uploads, is_said = _Uploads(local, place), False

  def push():
    nonlocal is_said
    try:
      uploads.push()
      is_said = False
    except Exception as error:  # of whatever `etils` calls
      if not is_said:
        _warn(f'{place} takes no files ({error}); it is tried again.')
      is_said = True

  _OPEN[local] = push
  try:
    with _every(UPLOAD_SECS, push):
      yield
  except BaseException:
    # The run's own error is the one to raise.
    if problem := _push_at_the_end(uploads, local, place, owns):
      _warn(str(problem))
    raise
  else:
    if problem := _push_at_the_end(uploads, local, place, owns):
      raise problem
  finally:
    del _OPEN[local]


def _push_at_the_end(
  uploads: _Uploads, local: pathlib.Path, place: Any, owns: Callable[[], bool]
) -> ValueError | None:
  """Uploads for the last time, and removes the copy; why it could not."""
  for left in reversed(range(TRIES)):
    try:
      if owns():
        uploads.push()
        _join_parts(place)
      break
    except Exception as error:  # as above
      if not left:
        return ValueError(
          f'The last files of the run could not be uploaded to {place} '
          f'({error}); they are in {local}.'
        )
      time.sleep(2.0 ** (TRIES - left))
  shutil.rmtree(local.parent, ignore_errors=True)


@contextlib.contextmanager
def _claimed(place: Any) -> Iterator[Callable[[], bool]]:
  """Claims a workdir in a bucket for this process; see `_wait_for_owner`.

  Yields:
    A function that tells whether the claim is still this process's.
  """
  file, mine = place / _CLAIM, uuid.uuid4().hex
  beats = 0

  def beat():
    nonlocal beats
    beats += 1
    if beats > 1 and (_claim(file) or {}).get('owner', mine) != mine:
      # This process stood still for so long that another one took it for dead.
      _warn(f'Another process has taken {place}; this one ends.')
      for local in _OPEN:  # nobody needs the copy
        shutil.rmtree(local.parent, ignore_errors=True)
      os._exit(2)
    claim = {'owner': mine, 'beats': beats, 'host': socket.gethostname()}
    own = {'pid': os.getpid(), 'pids': _pids()}
    file.write_text(json.dumps(claim | own))

  def owns():
    return (_claim(file) or {}).get('owner', mine) == mine

  _wait_for_owner(file, place)
  place.mkdir(parents=True, exist_ok=True)
  beat()
  time.sleep(SETTLE_SECS)
  if not owns():
    raise _taken(place, _claim(file) or {})
  try:
    with _every(BEAT_SECS, beat):
      yield owns
  finally:
    with contextlib.suppress(Exception):  # it is taken for dead in a minute
      if owns():
        file.unlink(missing_ok=True)


def _wait_for_owner(file: Any, place: Any) -> None:
  """Raises a ValueError if the owner of a claim is alive.

  It counts as gone if it does not count for a minute, or at once if it was a
  process of this machine that is there no more.
  """
  first, end = _claim(file), time.monotonic() + SILENT_SECS
  if first is None or _is_dead(first):
    return
  _warn(
    f'{place} belongs to {_owner(first)}; waiting whether it is alive, '
    f'{SILENT_SECS:.0f} s at most.'
  )
  while time.monotonic() < end:
    time.sleep(BEAT_SECS / 4)
    claim = _claim(file)
    if claim is None:  # it has ended
      return
    if claim and claim != first:  # {}: read while it was written
      raise _taken(place, claim)


def _taken(place: Any, claim: dict[str, Any]) -> ValueError:
  return ValueError(
    f'{place} belongs to {_owner(claim)}, which is running; wait for its end, '
    'or give another workdir.'
  )


def _owner(claim: dict[str, Any]) -> str:
  if not claim:  # it could not be read
    return 'another process'
  return f'process {claim.get("pid")} on {claim.get("host")}'


def _claim(file: Any) -> dict[str, Any] | None:
  """What a claim says; None if there is none, {} if it cannot be read."""
  try:
    claim = json.loads(file.read_text())
  except FileNotFoundError:
    return None
  except ValueError:
    return {}
  return claim if isinstance(claim, dict) else {}


def _pids() -> str:
  """Where numbers of processes are unique: a start of Linux, a container."""
  with contextlib.suppress(OSError):
    start = pathlib.Path('/proc/sys/kernel/random/boot_id').read_text()
    return f'{start.strip()} {os.readlink("/proc/self/ns/pid")}'
  return ''


def _is_dead(claim: dict[str, Any]) -> bool:
  """Whether it is of a process of this machine that is there no more."""
  here = socket.gethostname(), _pids()
  if (claim.get('host'), claim.get('pids')) != here:
    return False
  try:
    os.kill(int(claim['pid']), 0)
  except ProcessLookupError:
    return True
  except (KeyError, TypeError, ValueError, OSError):
    return False
  return False


@contextlib.contextmanager
def _every(secs: float, function: Callable[[], None]) -> Iterator[None]:
  """Calls a function every few seconds in a thread, while the body runs.

  An error of it is no reason to end.
  """
  over = threading.Event()

  def loop():
    while not over.wait(secs):
      with contextlib.suppress(Exception):
        function()

  thread = threading.Thread(target=loop, name='bucket', daemon=True)
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()


def _warn(text: str) -> None:
  shown = plain_text.printable(text)
  print(f'warning: {shown}', file=sys.stderr, flush=True)
