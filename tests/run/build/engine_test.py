"""Every field of `config.engine` reaches the servers."""

import dataclasses
import pathlib
import tempfile

import jax
import pytest

from grpo_jax import config as config_lib
from grpo_jax.mesh import sharding
from grpo_jax.models import foreign
from grpo_jax.models.weights import safetensors
from grpo_jax.run.build import build
from grpo_jax.run.build import engine as build_engine
from tests import runs

ONE = {
  'dialect': 'vllm',
  'urls': ('http://a:1', 'http://b:2/'),
  'model': 'served',
  'dtype': 'float32',
  'key_env': 'KEY_OF_THE_TEST',
  'concurrency': 7,
  'timeout_secs': 3.5,
  'retries': 2,
}
OTHER = {
  'dialect': 'sglang',
  'urls': ('https://c:3',),
  'model': '',
  'dtype': 'bfloat16',
  'key_env': '',
  'concurrency': 9,
  'timeout_secs': 4.5,
  'retries': 0,
}


def built(tmp_path, fields, **changes):
  fields = {'kind': 'http', 'folder': str(tmp_path / 'weights'), **fields}
  engine = {f'engine.{name}': value for name, value in fields.items()}
  return build.sampler(runs.small(**engine, **changes), trains=True)


def test_there_are_no_other_fields():
  fields = {x.name for x in dataclasses.fields(config_lib.Engine)}
  assert fields == {*ONE, 'kind', 'folder'} and fields == {
    *OTHER, 'kind', 'folder',
  }  # fmt: skip


@pytest.mark.parametrize('fields', [ONE, OTHER])
def test_each_field_is_where_it_is_read(fields, tmp_path, monkeypatch):
  monkeypatch.setenv('KEY_OF_THE_TEST', 'of the test')
  run = built(tmp_path, fields)
  engine, servers = run.engine, run.engine._servers
  client = servers._client
  assert [x.url for x in servers.every] == [
    url.rstrip('/') for url in fields['urls']
  ]
  assert engine._dialect.name == fields['dialect']
  assert client.key() == ('of the test' if fields['key_env'] else '')
  assert client.timeout_secs == fields['timeout_secs']
  assert client.retries == fields['retries']
  assert servers._concurrency == fields['concurrency']
  assert client.limits._slots._initial_value == fields['concurrency']
  if fields['model']:
    assert engine._dialect._model == fields['model']
  params = jax.tree.map(
    lambda x: jax.numpy.ones(x.shape, x.dtype),
    build.abstract_params(run).trained,
  )
  engine.versions.publish(params, 3)
  folder = engine.versions.fetch(3)
  assert folder.startswith(str(tmp_path / 'weights'))
  written = safetensors.Safetensors(pathlib.Path(folder)).tensors
  assert {x.dtype.name for x in written.values()} == {fields['dtype']}
  engine.versions.close()
  assert not (tmp_path / 'weights').exists()


def test_a_model_is_named_by_its_path_and_an_adapter_is_written_alone(tmp_path):
  run = built(tmp_path, ONE | {'key_env': ''}, **{'lora.rank': 2})
  params = jax.tree.map(
    lambda x: jax.numpy.ones(x.shape, x.dtype),
    build.abstract_params(run).trained,
  )
  run.engine.versions.publish(params, 0)
  folder = run.engine.versions.fetch(0)
  written = sorted(x.name for x in (tmp_path / 'weights').glob('*/*'))
  assert written == ['adapter_config.json', 'adapter_model.safetensors']
  run.engine.versions.close()
  config = dataclasses.replace(
    run.config, model=dataclasses.replace(run.config.model, path='of/others')
  )
  named = dataclasses.replace(
    config, engine=dataclasses.replace(config.engine, model='')
  )
  assert build_engine.dialect(named, False)._model == 'of/others'
  assert folder


def test_a_folder_of_its_own_is_made_with_the_first_version(
  tmp_path, monkeypatch
):
  """What is built and does not begin leaves none; nobody else may read it."""
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  fields = ONE | {'key_env': '', 'folder': ''}
  run, other = (built(tmp_path, fields, **{'lora.rank': 2}) for _ in range(2))
  assert not [*tmp_path.iterdir()]
  params = jax.tree.map(
    lambda x: jax.numpy.ones(x.shape, x.dtype),
    build.abstract_params(run).trained,
  )
  for one in (run, other):
    one.engine.versions.publish(params, 0)
  folders = [*tmp_path.iterdir()]
  assert len(folders) == 2
  for one in folders:
    assert one.stat().st_mode & 0o777 == 0o700
    assert one.name.startswith('grpo_jax_weights_')
  for one in (run, other):
    one.engine.versions.close()
  assert not [*tmp_path.iterdir()]


def test_what_evaluates_a_run_draws_by_itself(tmp_path):
  config = built(tmp_path, ONE | {'key_env': ''}).config
  run = build.sampler(config)
  assert not hasattr(run.engine, 'versions')


def test_a_missing_key_is_refused_at_the_start(tmp_path, monkeypatch):
  monkeypatch.delenv('KEY_OF_THE_TEST', raising=False)
  with pytest.raises(ValueError, match='KEY_OF_THE_TEST.*is not set'):
    built(tmp_path, ONE)


def test_processes_and_models_of_ones_own_are_refused(tmp_path, monkeypatch):
  run = built(tmp_path, ONE | {'key_env': ''})
  config = run.config
  mesh = sharding.make_mesh()
  with pytest.raises(ValueError, match='with a model of your own'):
    build_engine.http_engine(
      config, foreign.Foreign.__new__(foreign.Foreign), mesh
    )
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(ValueError, match='in a run of 2 processes'):
    build_engine.http_engine(config, run.model, mesh)
