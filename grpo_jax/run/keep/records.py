"""What a workdir records of its run: its config, and versions of packages."""

import contextlib
import dataclasses
import datetime
from importlib import metadata
import json
import pathlib
import platform
import subprocess
from typing import TYPE_CHECKING
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax.config import Config
from grpo_jax.config import whole_files

if TYPE_CHECKING:
  from ml_collections import ConfigDict

PACKAGES = (
  'grpo_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
  'numpy',
)  # fmt: skip


def config_of(directory: str | pathlib.Path) -> dict[str, Any]:
  """The config of the run in a workdir, as JSON has it, by any version.

  Raises:
    ValueError: The workdir holds no run.
  """
  config = read(_place(directory) / 'config.json')
  if config is None:
    raise ValueError(
      f'There is no run in {directory} (no config.json); give the workdir of '
      'a run, or --config with a config file.'
    )
  return config


def saved_config(directory: str | pathlib.Path) -> Config:
  """The config of the run in a workdir.

  Raises:
    ValueError: The workdir holds no run, its config cannot be used, or an
      earlier version has written it.
  """
  saved, where = config_of(directory), f'{directory}/config.json'
  config = config_lib.dataclass_from_dict(Config, saved, where)
  before, now = config_lib.flat(saved), flat(config)
  if before != now:
    other = next(name for name in now if before.get(name, ...) != now[name])
    starts = read(_place(directory) / 'versions.json', list) or [{}]
    version = starts[-1].get('packages', {}).get('grpo_jax')
    raise ValueError(
      f'{where} was written by grpo_jax {version}, an earlier version, which '
      f'alone reads it (its {other} is another one); go on with that version, '
      'or give another workdir.'
    )
  return config


def hashes(directory: str | pathlib.Path) -> dict[str, str]:
  """The SHA-256 of the files of each source, as the last start read them.

  By names such as "data.train[0]='a.jsonl'"; none where nothing was recorded.
  """
  try:
    starts = read(_place(directory) / 'versions.json', list) or []
  except (ValueError, OSError):  # no run depends on the file
    return {}
  told = [x['data'] for x in starts if isinstance(x, dict) and x.get('data')]
  return {
    name: one['sha256']
    for name, one in (told[-1] if told else {}).items()
    if isinstance(one, dict) and 'sha256' in one
  }


def get_config(directory: str | pathlib.Path) -> 'ConfigDict':
  """What `saved_config` returns, to be overridden like any other."""
  found = config_lib.default()
  # method_kwargs may hold names that its default, an empty dict, does not have.
  found.unlock()
  found.update(dataclasses.asdict(saved_config(directory)))
  found.lock()
  return found


def holds_run(directory: str | pathlib.Path) -> bool:
  """Whether a workdir holds a run; it may not exist."""
  return (_place(directory) / 'config.json').exists()


def _place(directory: str | pathlib.Path) -> Any:
  """The path of a workdir; of one in a bucket, where single files are read."""
  if '://' not in str(directory):
    return pathlib.Path(directory)
  from etils import epath

  return epath.Path(directory)


def flat(config: Config) -> dict[str, Any]:
  """Every field by its full name, with lists for tuples, as JSON has them."""
  return config_lib.flat(json.loads(json.dumps(dataclasses.asdict(config))))


def differences(earlier: Config, config: Config) -> dict[str, tuple[Any, Any]]:
  """What two configs have for each field in which they differ.

  Of several rewards or sources that are as many as before, each field is one of
  its own, such as `rewards[0].weight`.
  """
  before, now = flat(earlier), flat(config)
  found = {}
  for name, value in now.items():
    found |= _differences(name, before[name], value)
  return found


def _differences(name: str, before: Any, now: Any) -> dict[str, Any]:
  if before == now:
    return {}
  both = before, now
  items = all(
    isinstance(x, list) and x and all(isinstance(one, dict) for one in x)
    for x in both
  )
  if not items or len(before) != len(now):
    return {name: both}
  return {
    f'{name}[{place}].{key}': (one[key], other[key])
    for place, (one, other) in enumerate(zip(before, now))
    for key in other
    if one[key] != other[key]
  }


def versions() -> dict[str, Any]:
  """The packages, devices and so on of this process, for `versions.json`."""
  import jax

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
  """The commit of the current directory, or None outside git.

  It ends in '-dirty' if files differ from the commit.
  """
  # Excluding every tag makes `git describe` print the commit.
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


def read(path: pathlib.Path, kind: type = dict) -> Any:
  """The JSON in a file; None if there is no such file."""
  try:
    value = json.loads(path.read_text())
  except (FileNotFoundError, NotADirectoryError):
    return None
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'{path} is no JSON ({error}); restore it, or give another workdir.'
    ) from error
  if not isinstance(value, kind):
    raise ValueError(
      f'{path} holds {value!r:.40}, no {kind.__name__}; restore it, or give '
      'another workdir.'
    )
  return value


def write(path: pathlib.Path, value: Any) -> None:
  """Writes a file of JSON, which is there whole or not at all."""
  whole_files.write(path, (json.dumps(value, indent=2) + '\n').encode())
