"""What must be the same in all processes of a run.

Each host reads its own files. If one of them has another revision of a model or
of a reward function, every process would train on what the others do not have,
and nothing would say so.
"""

from collections.abc import Iterator
from importlib import util
import os
import pathlib
from typing import Any

from grpo_jax import data
from grpo_jax.config import Config
from grpo_jax.config import gguf_files
from grpo_jax.episodes import reward_model
from grpo_jax.run.build import data as build_data
from grpo_jax.run.keep import records
from grpo_jax.run.keep.objects import NOTHING
from grpo_jax.run.keep.objects import Objects

# That are hashed of a large file, so that some lie in every layer of a model.
_PARTS = 64


def compared(config: Config, objects: Objects = NOTHING) -> dict[str, Any]:
  """What must be the same in all processes of a run, by name.

  The fields of the config, what the run was given in Python, the versions of
  packages, the git revision, and hashes of files: of each source of prompts, of
  those that models and the tokenizer come from, and of the modules of
  functions that the config names.

  Args:
    config: Of this process.
    objects: What this process was given in Python.
  """
  found = records.versions()
  flat = records.flat(config)
  same = {f'config.{name}': value for name, value in flat.items()}
  same |= {f'the version of {k}': v for k, v in found['packages'].items()}
  same |= {name: found[name] for name in ('python', 'git')}
  same |= {f'what was given for {k}': v for k, v in objects.records.items()}
  # One name for each file of a model, so that a difference names the file.
  for file in _model_files(config):
    same[f'the SHA-256 of {file}'] = data.fingerprint([str(file)], _PARTS)
  names = [reward.name for reward in config.rewards]
  names += [
    config.learner.method,
    config.optim.name,
    config.evaluation.answer,
  ]
  names += config.learner.fields.values()
  files = build_data.files(config) | {
    f'the module of {name}': _module_files(name)
    for name in names
    if ':' in name
  }
  for name, paths in files.items():
    if paths:
      same[f'the SHA-256 of {name}'] = data.fingerprint(paths)
  return same


def _model_files(config: Config) -> Iterator[pathlib.Path]:
  """The files of the models and of the tokenizer that the config names."""
  names = [config.model.path, config.teacher.path, config.data.tokenizer]
  for reward in config.rewards:
    if reward.name == reward_model.NAME:
      names.append(str(reward.kwargs.get('path', '')))
  for name in dict.fromkeys(names):
    if name.startswith(gguf_files.PACKAGE):
      yield gguf_files.find(name)
      continue
    path = pathlib.Path(name).expanduser()
    if not name or not path.exists():  # words, a function, or none
      continue
    files = [path, *path.glob('*')]
    if (path / 'checkpoints').is_dir():  # another run, which may go on
      found = (folder.name for folder in (path / 'checkpoints').iterdir())
      steps = [int(name) for name in found if name.isdecimal()]
      newest = path / 'checkpoints' / str(max(steps, default=''))
      # It has fingerprints of all that lies beside it.
      files = [path / 'config.json', newest / 'host' / 'metadata']
    yield from sorted(file for file in files if file.is_file())


def _module_files(name: str) -> list[str]:
  """The source of the module that 'module:function' names, if it has one.

  The module itself is not imported: that may be left to workers.
  """
  try:
    spec = util.find_spec(name.partition(':')[0])
  except (ImportError, ValueError):  # such as `__main__`
    return []
  file = spec.origin if spec and spec.has_location else None
  return [file] if file and os.path.isfile(file) else []
