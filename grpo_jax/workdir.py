"""The directory of a run: whose it is, and what made it.

- `config.json`: the resolved config. A run of another one is refused, by the
  field that differs; `config.FREE` lists what may change on the way.
- `versions.json`: one entry per start: packages, Python, git revision, devices.
- `checkpoints/`, `warm_up/` and `completions/` are written by session.py and
  warm_up.py, `metrics.jsonl` and `tensorboard/` by monitor/.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import datetime
import fcntl
from importlib import metadata
import itertools
import json
import os
import pathlib
import platform
import subprocess
import traceback
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax.config import Config

PACKAGES = (
  'grpo_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
  'numpy',
)  # fmt: skip


@contextlib.contextmanager
def claimed(directory: str | pathlib.Path, config: Config) -> Iterator[None]:
  """Makes a workdir this run's own, for as long as the context lasts.

  An error that ends the context leaves `traceback.txt`.

  Args:
    directory: Made if it is not there.
    config: Must be that of the run which the workdir holds, if it holds one,
      but for the fields in `config.FREE`.

  Raises:
    ValueError: It holds a run of another config, or one that goes on in another
      process; or it cannot be written.
  """
  refuse_another(directory, config)
  directory = pathlib.Path(directory)
  if jax.process_index():  # the first process writes for all
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
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(
        f'Another process is running in {directory}; wait for its end, or give '
        'another workdir.'
      ) from error
    try:
      yield
    except Exception:
      with contextlib.suppress(OSError):
        (directory / 'traceback.txt').write_text(traceback.format_exc())
      raise


def record(
  directory: pathlib.Path, config: Config, anew: bool
) -> dict[str, Any]:
  """Writes `config.json` and `versions.json` into a workdir that is claimed.

  Args:
    directory: The workdir.
    config: Of this start.
    anew: The run begins: completions that an earlier one has left are set
      aside, as `completions.1` and so on.

  Returns:
    What this start runs with: the newest entry of `versions.json`.

  Raises:
    ValueError: A new config cannot be written.
  """
  now = versions()
  if jax.process_index():
    return now
  for leftover in (*directory.glob('*.tmp'), *directory.glob('*/.step_*')):
    leftover.unlink()  # of a killed write
  completions = directory / 'completions'
  if anew and completions.exists():
    names = (directory / f'completions.{n}' for n in itertools.count(1))
    completions.rename(next(name for name in names if not name.exists()))
  values = dataclasses.asdict(config)
  if _read(directory / 'config.json') != json.loads(json.dumps(values)):
    try:
      _replace(directory / 'config.json', values)
    except OSError as error:
      raise ValueError(
        f'{directory} cannot be written ({error.strerror}); make room, or give '
        'another workdir.'
      ) from error
  with contextlib.suppress(OSError):  # a run goes on on a full disk
    starts = _read(directory / 'versions.json', list) or []
    _replace(directory / 'versions.json', [*starts, now])
  return now


def refuse_another(
  directory: str | pathlib.Path,
  config: Config,
  bound: tuple[str, ...] | None = None,
) -> None:
  """Raises a ValueError if the workdir holds a run of another config.

  Args:
    directory: May not exist.
    config: The one that is given now.
    bound: Fields and groups of fields that must be equal, but for those of
      `config.FREE`; None: all but these.
  """
  earlier = _read(pathlib.Path(directory) / 'config.json')
  if earlier is None:
    return
  before = {**_flat(Config()), **config_lib.flat(earlier)}
  for name, value in _flat(config).items():
    free = config_lib.is_free(name, config)
    if bound is not None:
      free = free or not config_lib.within(name, bound)
    if before[name] != value and not free:
      raise ValueError(
        f'The run in {directory} has config.{name}={before[name]!r}, and now '
        f'it is {value!r}; give the same, or another workdir.'
      )


def _flat(config: Config) -> dict[str, Any]:
  """Every field by its full name, as JSON has it."""
  return config_lib.flat(json.loads(json.dumps(dataclasses.asdict(config))))


def config_of(directory: str | pathlib.Path) -> dict[str, Any]:
  """The resolved config of the run in a workdir.

  Raises:
    ValueError: There is none.
  """
  config = _read(pathlib.Path(directory) / 'config.json')
  if config is None:
    raise ValueError(
      f'There is no run in {directory} (no config.json); give the workdir of '
      'a run, or --config with a config file.'
    )
  return config


def versions() -> dict[str, Any]:
  """What this process runs with: an entry of `versions.json`."""
  found = {}
  for package in PACKAGES:
    with contextlib.suppress(metadata.PackageNotFoundError):
      found[package] = metadata.version(package)
  return {
    'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'python': platform.python_version(),
    'packages': found,
    'git': git_revision(),
    'devices': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
    'processes': jax.process_count(),
  }


def git_revision() -> str | None:
  """Of the current directory; '-dirty' if files differ; None outside git."""
  try:
    done = subprocess.run(
      ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*'],
      capture_output=True,
      text=True,
      timeout=10,
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.strip() or None


def _read(path: pathlib.Path, kind: type = dict) -> Any:
  """The JSON in a file; None if there is no such file."""
  try:
    value = json.loads(path.read_text())
  except (FileNotFoundError, NotADirectoryError):
    return None
  except ValueError as error:
    raise ValueError(
      f'{path} is no JSON ({error}); restore it, or give another workdir.'
    ) from error
  if not isinstance(value, kind):
    raise ValueError(
      f'{path} holds {value!r:.40}, no {kind.__name__}; restore it, or give '
      'another workdir.'
    )
  return value


def _replace(path: pathlib.Path, value: Any) -> None:
  """Writes JSON in one move: a kill leaves the old file or the new one."""
  beside = path.with_suffix('.tmp')
  try:
    beside.write_text(json.dumps(value, indent=2) + '\n')
    os.replace(beside, path)
  except OSError:
    beside.unlink(missing_ok=True)
    raise
