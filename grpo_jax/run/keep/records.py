"""What a workdir records of its run: its config, and versions of packages."""

import contextlib
import dataclasses
import datetime
from importlib import metadata
import json
import pathlib
import platform
import subprocess
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax.config import Config
from grpo_jax.config import Reward
from grpo_jax.config import whole_files

PACKAGES = (
  'grpo_jax', 'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain',
  'numpy',
)  # fmt: skip


def saved_config(directory: str | pathlib.Path) -> dict[str, Any] | None:
  """The config of the run in a workdir, in the names of today.

  What an earlier version did without a field is said, where that is not the
  field's default; and arguments of methods have their new names.
  """
  # Of a bucket this file alone is read, for the flags of a command.
  place: Any = pathlib.Path(directory)
  if '://' in str(directory):
    from etils import epath

    place = epath.Path(directory)
  saved = read(place / 'config.json')
  if saved is None:
    return None
  model, learner = saved.get('model'), saved.get('learner')
  if isinstance(model, dict) and 'compute_dtype' in model:
    # Layers added to a sum in the dtype that they compute in.
    model.setdefault('residual_dtype', model['compute_dtype'])
  for place, reward in enumerate(_items(saved, 'rewards')):
    usual = json.loads(json.dumps(dataclasses.asdict(Reward())))
    saved['rewards'][place] = {**usual, **reward}
  # Sources had no arguments.
  fields = saved.get('data')
  for name in ('train', 'heldout') if isinstance(fields, dict) else ():
    for source in _items(fields, name):
      source.setdefault('kwargs', {})
  if isinstance(learner, dict):
    old = _ONE_BOUND.get(str(learner.get('method')))
    kwargs = learner.get('method_kwargs')
    if isinstance(kwargs, dict) and old in kwargs:
      kwargs['low'] = kwargs['high'] = kwargs.pop(old)
  return saved


def _items(saved: dict[str, Any], name: str) -> list[Any]:
  """The dicts in a field of several, if it is as it should be."""
  items = saved.get(name)
  if isinstance(items, list) and all(isinstance(x, dict) for x in items):
    return items
  return []


# Methods that had one argument for both bounds, and its name.
_ONE_BOUND = {'gmpo': 'limit', 'dppo_kl': 'threshold'}


def flat(config: Config) -> dict[str, Any]:
  """Every field by its full name, with lists for tuples, as JSON has them."""
  return config_lib.flat(json.loads(json.dumps(dataclasses.asdict(config))))


def config_of(directory: str | pathlib.Path) -> dict[str, Any]:
  """The resolved config of the run in a workdir, as JSON has it.

  Raises:
    ValueError: The workdir holds no run.
  """
  config = saved_config(directory)
  if config is None:
    raise ValueError(
      f'There is no run in {directory} (no config.json); give the workdir of '
      'a run, or --config with a config file.'
    )
  return config


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
