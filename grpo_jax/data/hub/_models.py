"""Models of the Hub as folders of this machine, with only what is needed."""

from typing import Literal

from grpo_jax.config import gguf_files
from grpo_jax.data import _folder
from grpo_jax.data.hub import _asking
from grpo_jax.data.hub import _names
from grpo_jax.data.hub import _repository

Needs = Literal['shape', 'tokenizer', 'weights']

_INDEX = 'model.safetensors.index.json'
_WEIGHTS = 'model.safetensors'
_SHAPE = ('config.json',)
_PICKLES = ('.bin', '.pt', '.pth', '.ckpt')
_MOST_NAMED = 8


def local(text: str, needs: Needs = 'weights') -> str:
  """The path here of a model on the Hub; any other text as it is.

  Files that are missing are downloaded: the folder has no more than
  'config.json' where the shape is needed, than small files where the tokenizer
  is, and the files of weights that the index names. What is written as
  'owner/name:file.gguf' is this one file.

  Args:
    text: A name, or anything else, such as a path.
    needs: What will be read.

  Raises:
    ValueError: It cannot be had, or holds no weights that can be read.
    OSError: The disk is too small.
  """
  name = _names.parse(text)
  if name is None:
    return text
  repository = _repository.find_named('model', name.repository, name.at)
  if name.file:
    _require(repository, name.file)
    return str(_repository.download(repository, [name.file]) / name.file)
  wanted = _SHAPE if needs == 'shape' else _folder.FILES
  here = [path for path in wanted if path in repository.files]
  if not here or needs != 'tokenizer' and 'config.json' not in here:
    raise _lacking(repository, _no_model(repository))
  folder = _repository.download(repository, here)
  if needs == 'weights':
    _repository.download(repository, _weights(repository))
  return str(folder)


def commit(name: _names.Name) -> str:
  """The commit of a model that has a name without one.

  Raises:
    ValueError: There is none.
  """
  repository = _repository.find_named('model', name.repository, name.at)
  if name.file:
    _require(repository, name.file)
  return repository.commit


def _weights(repository: _repository.Repository) -> list[str]:
  """The files with the weights of a model."""
  if _INDEX not in repository.files:
    if _WEIGHTS not in repository.files:
      raise _lacking(repository, _no_weights(repository))
    return [_WEIGHTS]
  index = _repository.download(repository, [_INDEX]) / _INDEX
  shards = _folder.shards(index)
  if not shards:
    raise _asking.HubError(
      f'{_INDEX} of {repository.name} names no files; see whether another '
      'revision does, with @revision behind the name.'
    )
  for shard in shards:
    _require(repository, shard)
  return [_INDEX, *shards]


def _require(repository: _repository.Repository, path: str) -> None:
  """Raises an error if a repository has no such file that can be read."""
  if path in repository.files:
    gguf_files.refuse_part(path)
    return
  end = path.rpartition('.')[2]
  alike = [one for one in repository.files if one.endswith(f'.{end}')]
  has = ', '.join(alike[:_MOST_NAMED]) or f'no .{end} file'
  said = f'{repository.name} on the Hub has no {path!r}; it has {has}.'
  raise _lacking(repository, said)


def _lacking(repository: _repository.Repository, said: str) -> _asking.HubError:
  """The error for a repository without what is needed, or for a part of it."""
  if repository.is_whole:
    return _asking.HubError(said)
  here = ', '.join(sorted(repository.files)[:_MOST_NAMED])
  return _asking.Unreachable(
    f'Only a part of {repository.name} is in the cache ({here} in '
    f'{repository.folder}), and HF_HUB_OFFLINE is set; unset it, or download '
    'the whole model first.'
  )


def _no_model(repository: _repository.Repository) -> str:
  gguf = _gguf(repository)
  if gguf:
    return (
      f'{repository.name} on the Hub has GGUF files; name one of them, as in '
      f"'{repository.name}:{gguf[0]}'{_more(gguf)}."
    )
  if 'adapter_config.json' in repository.files:
    return (
      f'{repository.name} on the Hub is an adapter, not a whole model; add it '
      'to its base with peft (merge_and_unload), and give that folder.'
    )
  return (
    f'{repository.name} on the Hub has no config.json, so it is no model of '
    'transformers; give one that is.'
  )


def _gguf(repository: _repository.Repository) -> list[str]:
  """The GGUF files of a repository that can be read."""
  return [
    path
    for path in repository.files
    if path.endswith('.gguf') and not gguf_files.is_part(path)
  ]


def _more(paths: list[str]) -> str:
  others = paths[1:_MOST_NAMED]
  return f' (or {", ".join(others)})' if others else ''


def _no_weights(repository: _repository.Repository) -> str:
  if _gguf(repository):
    return _no_model(repository)
  pickles = [path for path in repository.files if path.endswith(_PICKLES)]
  has = f'has {pickles[0]}' if pickles else 'has no weights'
  return (
    f'{repository.name} on the Hub {has}, but safetensors are needed; give a '
    'revision that has them, with @refs/pr/NUMBER behind the name, or write '
    'them with transformers, save_pretrained(folder), and give the folder.'
  )
