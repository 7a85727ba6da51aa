"""The directory of a run: whose it is, and what made it.

- `config.json`: the resolved config. A run of another one is refused, by the
  field that differs; `config.FREE` lists what may change on the way.
- `versions.json`: one entry per start: packages, Python, git revision, devices.
- `checkpoints/`, `warm_up/`, `metrics.jsonl`, `completions/`, `tensorboard/`:
  written by the modules of these names.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import datetime
import fcntl
from importlib import metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax.config import Config

PACKAGES = (
  'grpo_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
  'numpy',
)  # fmt: skip


@contextlib.contextmanager
def claimed(
  directory: str | pathlib.Path, config: Config
) -> Iterator[dict[str, Any]]:
  """Makes a workdir this run's own, for as long as the context lasts.

  Args:
    directory: Made if it is not there.
    config: Must be that of the run which the workdir holds, if it holds one,
      but for the fields in `config.FREE`.

  Yields:
    What this start runs with: the newest entry of `versions.json`.

  Raises:
    ValueError: It holds a run of another config, or a run that goes on.
    OSError: It cannot be written.
  """
  directory = pathlib.Path(directory)
  refuse_another(directory, config)
  now = versions()
  if jax.process_index():  # the first process writes for all
    yield now
    return
  directory.mkdir(parents=True, exist_ok=True)
  with (directory / '.lock').open('w') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      raise ValueError(
        f'Another process is running in {directory}; wait for its end, or give '
        'another workdir.'
      ) from error
    _replace(directory / 'config.json', dataclasses.asdict(config))
    starts = _read(directory / 'versions.json') or []
    _replace(directory / 'versions.json', [*starts, now])
    yield now


def refuse_another(directory: pathlib.Path, config: Config) -> None:
  """Raises a ValueError if the workdir holds a run of another config."""
  earlier = _read(directory / 'config.json')
  if earlier is None:
    return
  before = {**_flat(Config()), **config_lib.flat(earlier)}
  for name, value in _flat(config).items():
    if before[name] != value and not config_lib.is_free(name, config):
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


def _read(path: pathlib.Path) -> Any:
  """The JSON in a file; None if there is no such file."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except ValueError as error:
    raise ValueError(
      f'{path} is no JSON ({error}); restore it, or give another workdir.'
    ) from error


def _replace(path: pathlib.Path, value: Any) -> None:
  """Writes JSON in one move: a kill leaves the old file or the new one."""
  beside = path.with_suffix('.tmp')
  beside.write_text(json.dumps(value, indent=2) + '\n')
  os.replace(beside, path)
