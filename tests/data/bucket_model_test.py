"""Models in a bucket: small files are copied, weights read by ranges."""

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax import models
from grpo_jax.data import _models
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.models.weights import ranges
from grpo_jax.models.weights import safetensors
from grpo_jax.run.build import model as build_model
from tests import bucket
from tests.run import export_test

ADDRESS = 'stand://mine/models/tiny'


@pytest.fixture
def place(monkeypatch, tmp_path):
  """The folder that stands for ADDRESS, with a model in it."""
  monkeypatch.setenv(bucket.ROOT_VARIABLE, str(tmp_path / 'far'))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  forget()
  folder = tmp_path / 'far' / 'mine' / 'models' / 'tiny'
  folder.parent.mkdir(parents=True)
  yield pathlib.Path(export_test.pretrained(folder))
  forget()


def in_shards(folder):
  """The same model in several files."""
  found = weights.source(folder)
  arrays = [found.reader.read(x, all_of(x)) for x in found.stored.values()]
  (folder / safetensors.ONE).unlink()
  shapes = [(name, one.shape) for name, one in found.stored.items()]
  safetensors.write(folder, shapes, arrays, arrays[0].dtype, 4000)
  assert len([*folder.glob('*.safetensors')]) > 2


def all_of(stored):
  return tuple(slice(None) for _ in stored.shape)


@pytest.mark.parametrize('shards', [False, True])
def test_it_is_the_model_of_the_folder(place, shards):
  if shards:
    in_shards(place)
  found, here = build_model.source(ADDRESS), weights.source(place)
  assert found.stored.keys() == here.stored.keys()
  for name, one in here.stored.items():
    index = (slice(1, 3), *all_of(one)[1:])
    for part in (all_of(one), index):
      np.testing.assert_array_equal(
        found.read(name, part), here.read(name, part)
      )
  config = found.config()
  assert config == here.config()
  mesh = sharding.make_mesh()
  model = models.Transformer(config)
  places = jax.tree.map(
    lambda x: x.sharding, build_model.abstract(model, mesh).trained
  )
  trees = [weights.load(one, config, places) for one in (found, here)]
  jax.tree.map(np.testing.assert_array_equal, *trees)


def test_its_tokenizer_is_here_and_its_weights_are_not(place):
  tokenizer = data.tokenizer_from('', ADDRESS)
  assert tokenizer.encode('12') == data.tokenizer_from('', str(place)).encode(
    '12'
  )
  folder = pathlib.Path(data.local_model(ADDRESS))
  assert not [*folder.glob('*.safetensors')]
  names = {path.name for path in folder.iterdir()}
  assert {'config.json', 'tokenizer.json', _models.ELSEWHERE} <= names


def test_only_the_rows_that_are_asked_for_are_transferred(place, monkeypatch):
  reader = ranges.Ranges([f'{ADDRESS}/{safetensors.ONE}'])
  one = max(reader.tensors.values(), key=lambda one: np.prod(one.shape))
  read = []

  class Counted:
    def __init__(self, file):
      self.file = file

    def __enter__(self):
      return self

    def __exit__(self, *_):
      self.file.close()

    def seek(self, to):
      self.file.seek(to)

    def read(self, number):
      read.append(number)
      return self.file.read(number)

  backend = type(bucket._BACKEND)
  opened = backend.open
  monkeypatch.setattr(
    backend, 'open', lambda self, path, mode: Counted(opened(self, path, mode))
  )
  monkeypatch.setattr(ranges, 'PIECE_BYTES', 4 * one.shape[1] * 2)
  found = reader.read(one, (slice(1, 6), slice(2, 4)))
  assert found.shape == (5, 2)
  assert read == [4 * one.shape[1] * rows for rows in (2, 2, 1)]


def test_the_copy_follows_the_bucket(place):
  folder = pathlib.Path(data.local_model(ADDRESS))
  config = folder / 'config.json'
  before = config.stat().st_mtime_ns
  forget()
  data.local_model(ADDRESS)
  assert config.stat().st_mtime_ns == before  # what is right stays
  described = json.loads((place / 'config.json').read_text())
  (place / 'config.json').write_text(json.dumps(described | {'more': 1}))
  os.remove(place / 'chat_template.jinja')
  forget()
  data.local_model(ADDRESS)
  assert json.loads(config.read_text())['more'] == 1
  assert not (folder / 'chat_template.jinja').exists()


def forget():
  """As another process."""
  _models._copied.cache_clear()
  build_model._opened.cache_clear()


def refused(words):
  forget()
  with pytest.raises(ValueError, match=words) as error:
    build_model.source(ADDRESS)
  assert '\n' not in str(error.value)


def test_what_is_wrong_there_is_said(place):
  whole = (place / safetensors.ONE).read_bytes()
  for broken, words in (
    (whole[:-4], 'truncated, or no safetensors file .it ends after'),
    (whole[:40], 'it ends after 40 bytes'),
    (b'\xff' * 64, 'a header of'),
    ((9).to_bytes(8, 'little') + b'{"a": 1}}' + b' ' * 9, 'truncated, or no'),
  ):
    (place / safetensors.ONE).write_bytes(broken)
    if broken == whole[:-4]:
      forget()
      found = build_model.source(ADDRESS)
      with pytest.raises(ValueError, match=words):
        for name, one in found.stored.items():
          found.read(name, all_of(one))
    else:
      refused(words)
  (place / safetensors.ONE).unlink()
  refused('lacks model.safetensors; copy the whole model there')
  (place / safetensors.INDEX).write_text('{}')
  refused('is no index of safetensors')
  shutil.rmtree(place)
  refused('is no Hugging Face folder .it has nothing')


def test_a_bucket_that_nobody_knows():
  with pytest.raises(ValueError, match='cannot be reached'):
    data.local_model('nowhere://a/b')
