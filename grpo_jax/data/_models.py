"""Models by their addresses, as folders of this machine.

A name of the Hub is downloaded. Of a folder in a bucket, `gs://bucket/folder`,
the small files are copied into the user's cache, and the copy says where the
weights are, which are read from there by ranges: a host reads what it needs.
"""

import functools
import hashlib
import json
import pathlib
import re
from typing import Any

from grpo_jax.config import plain_text
from grpo_jax.config import whole_files
from grpo_jax.data import _files
from grpo_jax.data import _folder
from grpo_jax.data import hub

ELSEWHERE = 'weights_elsewhere.json'
"""In a copy: the addresses of the files of weights, a list. It is what
`models.weights.reading.ELSEWHERE` reads, which knows nothing of `data`."""
_INDEX = 'model.safetensors.index.json'
_WEIGHTS = 'model.safetensors'


def local(text: str, needs: hub.Needs = 'weights') -> str:
  """The path here of a model with an address; any other text as it is.

  Args:
    text: A name of the Hub, the address of a folder in a bucket, or a path.
    needs: What will be read.

  Raises:
    ValueError: There is no such model, or it cannot be reached.
    OSError: The disk is too small.
  """
  if hub.parse(text) is None and _is_address(text):
    return _copied(text.rstrip('/'), needs)
  return hub.local_model(text, needs)


def _is_address(text: str) -> bool:
  """Whether a text is the address of something in a bucket.

  >>> [*map(_is_address, ('gs://mine/qwen', 'hf://a/b', 'a/b'))]
  [True, False, False]
  """
  scheme, found, _ = text.partition('://')
  return bool(found) and scheme != 'hf'


@functools.lru_cache(maxsize=16)  # once for all of a process
def _copied(address: str, needs: hub.Needs) -> str:
  """A folder here with the small files of one in a bucket."""
  place = _reached(address)
  if not (place / 'config.json').exists() or (place / 'checkpoints').exists():
    raise ValueError(
      f'{address} is no Hugging Face folder (it has '
      f'{", ".join(_inside(place)) or "nothing"}); give one with a config.json '
      'and safetensors. What a run or a GGUF file holds, `grpo-jax convert` '
      'writes as one.'
    )
  plain = '_'.join(re.findall(r'[\w.-]+', address))[-60:]
  digest = hashlib.sha256(address.encode()).hexdigest()[:16]
  folder = _files.cache_directory() / 'buckets' / f'{plain}-{digest}'
  folder.mkdir(parents=True, exist_ok=True)
  for name in _folder.FILES:
    _copy(place / name, folder / name)
  if needs == 'weights':
    files = [str(place / name) for name in _weights(place, folder, address)]
    _keep(folder / ELSEWHERE, json.dumps(files).encode())
  return str(folder)


def _reached(address: str) -> Any:
  """An address as a path of `etils`."""
  from etils import epath

  if address.startswith(('http://', 'https://')):
    raise ValueError(
      f'{address} is the address of a page, and no model is read from one; '
      'give owner/name of the Hugging Face Hub, gs://bucket/folder, or a path.'
    )
  try:
    place = epath.Path(address)
    place.exists()
  except Exception as error:  # of `etils`, and of whatever it calls
    raise ValueError(
      f'{address} cannot be reached ({plain_text.named(error)}); for gs:// '
      'install grpo_jax[gcs], log in and check the address.'
    ) from error
  return place


def _inside(place: Any) -> list[str]:
  if not place.is_dir():
    return []
  return sorted(path.name for path in place.iterdir())[:5]


def _copy(source: Any, target: pathlib.Path) -> None:
  """Copies a small file, or removes what an earlier one has left."""
  if source.exists():
    _keep(target, source.read_bytes())
  else:
    target.unlink(missing_ok=True)


def _keep(target: pathlib.Path, contents: bytes) -> None:
  """Writes a file, unless it is right: others look at when it was written."""
  if not target.exists() or target.read_bytes() != contents:
    whole_files.write(target, contents)


def _weights(place: Any, folder: pathlib.Path, address: str) -> list[str]:
  """The names of the files with weights."""
  names = [_WEIGHTS]
  if (place / _INDEX).exists():
    _copy(place / _INDEX, folder / _INDEX)
    names = _folder.shards(folder / _INDEX)
    if not names:
      raise ValueError(
        f'{address}/{_INDEX} is no index of safetensors: it names no files; '
        'copy it there again.'
      )
  missing = [name for name in names if not (place / name).exists()]
  if missing:
    raise ValueError(
      f'{address} lacks {", ".join(missing[:3])}; copy the whole model there.'
    )
  return names
