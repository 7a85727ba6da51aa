"""The workdir: the directory that a run writes to and goes on from.

- `config.json` is the resolved config of the last start. A start with another
  config is refused, and the message names the field that differs;
  `config.changes` says which fields may change between two starts.
- `given.json` has a record of each object that the run was given in Python, if
  it was given any; see `placing.py`.
- `versions.json` has one entry per start: packages, Python, git revision,
  devices, the rollouts that were done before, whether it replays others, how
  many records and which hash its data had, and which fields of the config it
  has changed. A start over data that has changed warns.
- `servers.json` says how servers that draw know the versions of the run; see
  `earlier.py`.
- `checkpoints/`, `warm_up/`, `completions/`, `evaluations/` and `exports/` are
  written by `progress.py`, `warm_up.py` and `reports.py`, `metrics.jsonl` and
  `tensorboard/` by `monitor/`.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import pathlib
import re
import shutil
import time
import traceback
from typing import Any
from typing import NamedTuple
import uuid

from grpo_jax import config as config_lib
from grpo_jax.config import Config
from grpo_jax.config.changes import FLAG
from grpo_jax.config.fields import ALLOWED
from grpo_jax.config.fields import FREE
from grpo_jax.hosts.processes import Processes
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.run.keep import records
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects

_TAKEN = errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES  # by another process
SHARED_SECS = 20.0  # until a process sees what another has written


class Source(NamedTuple):
  """What tells a source of prompts from a changed one."""

  name: str  # "data.train[0]='a.jsonl'"
  records: int
  files: tuple[str, ...]  # none if it is in no file


@contextlib.contextmanager
def claimed(
  directory: str | pathlib.Path,
  config: Config,
  objects: Objects = NOTHING,
  allowed: Sequence[str] = (),
) -> Iterator[None]:
  """Locks a workdir for this process, for as long as the context lasts.

  An error that ends the context leaves `traceback.txt`.

  Args:
    directory: Made if it is not there. If it holds a run already, this start
      must be of the same run.
    config: Of this start.
    objects: What this start was given in Python; see `refuse_another`.
    allowed: See `refuse_another`.

  Raises:
    ValueError: The workdir holds another run, another process is running in it,
      or it cannot be written to or locked.
  """
  directory = pathlib.Path(directory)
  if not _is_first():  # the first process writes for all
    yield
    return
  try:
    directory.mkdir(parents=True, exist_ok=True)
    lock_file = (directory / '.lock').open('w')
  except OSError as error:
    raise ValueError(
      f'{directory} cannot be written ({error.strerror}); give a workdir that '
      'can, with --workdir.'
    ) from error
  with lock_file as lock:
    # The kernel releases this lock when the process ends, even by kill -9; a
    # file that is itself the lock would stay behind.
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno in _TAKEN:
        raise ValueError(
          f'Another process is running in {directory}; wait for its end, or '
          'give another workdir.'
        ) from error
      raise ValueError(
        f'{directory} cannot be locked ({error.strerror}); mount its file '
        'system so that flock works, or give a workdir on another one.'
      ) from error
    # Not before: another start may have made its run here meanwhile.
    refuse_another(directory, config, objects=objects, allowed=allowed)
    try:
      yield
    except BaseException as error:
      if isinstance(error, KeyboardInterrupt):
        raise
      with contextlib.suppress(OSError):
        (directory / 'traceback.txt').write_text(traceback.format_exc())
      raise


def record(
  directory: pathlib.Path,
  config: Config,
  anew: bool,
  objects: Objects = NOTHING,
  warn: Callable[[str], None] = lambda text: None,
  contents: Mapping[str, Any] | None = None,
  **more: Any,
) -> dict[str, Any]:
  """Records this start in `config.json`, `given.json` and `versions.json`.

  The workdir must be claimed. `changed` in the new entry of `versions.json` has
  the fields of the config that are not what they were: [before, now] by name.

  Args:
    directory: The workdir.
    config: Of this start; for `config.json`.
    anew: Whether the run begins with this start. Folders of completions and
      of models that an earlier run has left are then renamed to
      `completions.1`, `completions.2` and so on.
    objects: What this start was given in Python; for `given.json`.
    warn: Called with a sentence if `versions.json` cannot be read. It is then
      renamed to `versions.1.json` and begun anew, because no run depends on it.
      Also called for each source that has changed since the run began.
    contents: What `contents` returned, for the entry of `versions.json`.
    **more: What else the entry of `versions.json` is to tell.

  Returns:
    The new entry of `versions.json`.

  Raises:
    ValueError: The config, or the record of what was given, cannot be written.
  """
  now = {**records.versions(), **more}
  if not _is_first():
    return now
  if records.holds_run(directory):
    changed = records.differences(records.saved_config(directory), config)
    now |= {'changed': changed} if changed else {}
  # Left by a process that was killed while it wrote a file, or a folder.
  # They have names of their own; any other `*.tmp` is the user's.
  for leftover in itertools.chain(
    directory.glob('.*.[0-9]*.tmp'), directory.glob('*/.step_*.tmp')
  ):
    leftover.unlink()
  for leftover in directory.glob('exports/.*.tmp'):
    shutil.rmtree(leftover)
  for name in ('completions', 'evaluations', 'exports'):
    if anew and (directory / name).exists():
      _put_aside(directory / name)
  written = {'config.json': dataclasses.asdict(config)}
  standing = objects_lib.standing(config)
  earlier = records.read(directory / 'given.json') or {}
  recorded = {
    # Records of earlier starts are kept, because this start may not need every
    # object: once the warm-up is over, it needs no demonstrations.
    name: record
    for name, record in earlier.items()
    if name in standing
  } | dict(objects.records)
  if recorded:
    written['given.json'] = recorded
  for name, values in written.items():
    # A file that is right already is not written again: the disk may be full,
    # and that must not keep a run from going on.
    if records.read(directory / name) == json.loads(json.dumps(values)):
      continue
    try:
      records.write(directory / name, values)
    except OSError as error:
      raise ValueError(
        f'{directory} cannot be written ({error.strerror}); make room, or give '
        'another workdir.'
      ) from error
  with contextlib.suppress(OSError):  # the disk may be full here too
    starts, file = [], directory / 'versions.json'
    try:
      starts = records.read(file, list) or []
    except ValueError:
      aside = _put_aside(file)
      warn(f'{file} cannot be read; it is now {aside.name}, a new one begins.')
    if not anew:
      for sentence in _changes(starts, contents or {}):
        warn(sentence)
    entry = {**now, 'data': contents} if contents else now
    records.write(file, [*starts, entry])
  return now


def contents(sources: Sequence[Source]) -> dict[str, dict[str, Any]]:
  """What tells the data of a run from changed data, by the name of a source.

  That is the number of its records; and the SHA-256 of its files, if it is in
  files.
  """
  # Not at the top of the file, as in `_is_first`.
  from grpo_jax import data

  found = {}
  for source in sources:
    one: dict[str, Any] = {'records': source.records}
    found[source.name] = one
    if source.files:
      with contextlib.suppress(OSError):  # it is said where the file is read
        one['sha256'] = data.fingerprint([*source.files])
  return found


def _changes(
  starts: list[Any], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
  """A sentence for each source that has changed since the run began."""
  starts = [start for start in starts if isinstance(start, dict)]
  begins = [n for n, one in enumerate(starts) if not one.get('after_step')]
  # Versions of this package that recorded no data may have begun the run.
  since = starts[begins[-1] if begins else 0 :]
  before = next((one['data'] for one in since if 'data' in one), {})
  for name, source in now.items():
    if name not in before or before[name] == source:
      continue
    follows = 'prompts may be repeated or lost'
    if name.startswith('data.heldout'):
      follows = 'accuracies before and after it do not compare'
    yield f'{name} has changed since the run began; {follows}.'


def _put_aside(path: pathlib.Path) -> pathlib.Path:
  """Renames `versions.json` to `versions.1.json`, or the first that is free."""
  names = (
    path.with_name(f'{path.stem}.{n}{path.suffix}') for n in itertools.count(1)
  )
  return path.rename(next(name for name in names if not name.exists()))


def refuse_another(
  directory: str | pathlib.Path,
  config: Config,
  bound: tuple[str, ...] | None = None,
  objects: Objects = NOTHING,
  allowed: Sequence[str] = (),
) -> None:
  """Raises a ValueError if the workdir holds another run than this one.

  Args:
    directory: May not exist.
    config: Of this start.
    bound: The fields and groups of fields that must be equal; None: all. Those
      that are free may differ in any case; see `config.changes`.
    objects: What this start was given in Python. Those that replace a bound
      field must be what the run was given.
    allowed: What `config.check_allowed` returned: further fields that may
      differ.
  """
  directory = pathlib.Path(directory)
  if not records.holds_run(directory):
    return
  earlier = records.saved_config(directory)
  if bound is None:
    objects_lib.refuse_without(directory, earlier, config)
  for name, (before, now) in records.differences(earlier, config).items():
    if bound is not None and not config_lib.within(name, bound):
      continue
    kind = config_lib.kind_of(name, config)
    if kind == FREE or config_lib.is_allowed(name, allowed):
      continue
    why, advice = '', 'give the same, or another workdir'
    if name == 'steps':
      why = f', over which its learning rate decays ({config.optim.decay})'
    if kind == ALLOWED:
      flag = re.sub(r'\[\d*\]', '', name)  # brackets mean something to a shell
      advice += f', or go on with the new value by {FLAG}={flag}'
    raise ValueError(
      f'The run in {directory} has config.{name}={before!r}{why}, and now it '
      f'is {now!r}; {advice}.'
    )
  standing = objects_lib.standing(config)
  for name, recorded in (records.read(directory / 'given.json') or {}).items():
    field = objects_lib.FIELDS.get(standing.get(name, ''))
    if field and (bound is None or config_lib.within(field, bound)):
      objects_lib.refuse_changed(directory, name, recorded, objects)


def with_widths(directory: str | pathlib.Path, config: Config) -> Config:
  """The config with the widths of the workdir's run, where it leaves them open.

  A run so goes on with the widths that it began with.

  Args:
    directory: May not exist.
    config: Of this start.
  """
  if not records.holds_run(directory):
    return config
  earlier = records.saved_config(directory)
  kept = {
    name: getattr(earlier.data, name)
    for name in ('prompt_buckets', 'completion_buckets')
    if not getattr(config.data, name)
  }
  fields = dataclasses.replace(config.data, **kept)
  return dataclasses.replace(config, data=fields) if kept else config


def check_shared(directory: pathlib.Path, peers: Processes) -> None:
  """Raises a ValueError if a process does not see what the first one writes.

  Args:
    directory: The workdir, in all processes.
    peers: The processes of the run.
  """
  if peers.number == 1:
    return
  word = peers.from_first(uuid.uuid4().hex)
  place = bucket.arrays(directory)
  file = place / f'.seen_by_all.{word}'
  with peers.together():
    if peers.is_first:
      for leftover in place.glob('.seen_by_all.*'):  # by a killed start
        leftover.unlink(missing_ok=True)
      file.write_text(word)
  try:
    with peers.together():
      end = time.monotonic() + SHARED_SECS
      while not file.exists():  # a network's file system may take its time
        if time.monotonic() > end:
          raise ValueError(
            f'Process {peers.rank} does not see in {directory} what process 0 '
            'writes; give a workdir that all of them share.'
          )
        time.sleep(0.1)
  finally:
    if peers.is_first:
      file.unlink()


def _is_first() -> bool:
  """Whether this is the first of the processes of a run."""
  # Not at the top of the file: the command line reads this module before it
  # says its first line, and importing JAX takes two seconds.
  import jax

  return jax.process_index() == 0
