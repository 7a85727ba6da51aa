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
from grpo_jax.run.build import sources
from grpo_jax.run.build.marks import NOTHING
from grpo_jax.run.build.marks import Given
from grpo_jax.run.keep import workdir

# Of a large file, so that some lie in every layer of a model.
_PARTS = 64


def of(config: Config, given: Given = NOTHING) -> dict[str, Any]:
  """What must be the same in all processes of a run, by name.

  The fields of the config, what the run was given in Python, the versions of
  packages, the git revision, and hashes of files: of each source of prompts, of
  those that models and the tokenizer come from, and of the modules of
  functions that the config names.

  Args:
    config: Of this process.
    given: What this process was given in Python.
  """
  found = workdir.versions()
  flat = workdir.flat(config)
  same = {f'config.{name}': value for name, value in flat.items()}
  same |= {f'the version of {k}': v for k, v in found['packages'].items()}
  same |= {name: found[name] for name in ('python', 'git')}
  same |= {f'what was given for {k}': v for k, v in given.records.items()}
  for name, files in sources.files(config).items():
    if files:
      same[f'the SHA-256 of {name}'] = data.fingerprint(files)
  # One name for each file, so that a difference names the file.
  for file in _model_files(config):
    same[f'the SHA-256 of {file}'] = data.fingerprint([str(file)], _PARTS)
  for name in _functions(config):
    if file := _module_file(name):
      same[f'the SHA-256 of the module of {name}'] = data.fingerprint([file])
  return same


def _model_files(config: Config) -> Iterator[pathlib.Path]:
  """The files of the models and of the tokenizer that the config names."""
  names = [config.model.path, config.data.tokenizer]
  for reward in config.rewards:
    if reward.name == reward_model.NAME:
      names.append(str(reward.kwargs.get('path', '')))
  for name in dict.fromkeys(names):
    if name.startswith(gguf_files.PACKAGE):
      yield gguf_files.find(name)
      continue
    path = pathlib.Path(name).expanduser()
    if not name or not path.exists():  # a mark, a function, or none
      continue
    files = [path, *path.glob('*')]
    if (path / 'checkpoints').is_dir():  # another run, which may go on
      found = (folder.name for folder in (path / 'checkpoints').iterdir())
      steps = [int(name) for name in found if name.isdecimal()]
      newest = path / 'checkpoints' / str(max(steps, default=''))
      # It has fingerprints of all that lies beside it.
      files = [path / 'config.json', newest / 'host' / 'metadata']
    yield from sorted(file for file in files if file.is_file())


def _functions(config: Config) -> list[str]:
  """The functions that the config names as 'module:function'."""
  named = [reward.name for reward in config.rewards]
  named += [config.learner.method, config.evaluation.answer]
  return [*dict.fromkeys(name for name in named if ':' in name)]


def _module_file(name: str) -> str:
  """The source of the module that 'module:function' names; '' if it has none.

  The module itself is not imported: that may be left to workers.
  """
  try:
    spec = util.find_spec(name.partition(':')[0])
  except (ImportError, ValueError):  # such as a mark, or `__main__`
    return ''
  file = spec.origin if spec and spec.has_location else None
  return file if file and os.path.isfile(file) else ''
