"""Saving: what comes out is what went in, in files that others read."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models import weights
from grpo_jax.models.weights import safetensors as safetensors_lib
from tests import tiny
from tests.chosen import chosen
from tests.models.weights import golden

# Experts and fused tensors, also of parts that take turns, norms of one's own,
# biases: the others add nothing.
IN_THE_SUITE = 'gemma3', 'qwen3_moe', 'phi3', 'gpt_oss', 'llama', 'qwen3_next'


def stored(folder):
  """Every tensor of a folder, as the safetensors library reads it."""
  return {
    name: tensor
    for file in folder.glob('*.safetensors')
    for name, tensor in safetensors.load_file(file).items()
  }


@pytest.mark.parametrize(
  'name',
  chosen(golden.NAMES, IN_THE_SUITE),
)
def test_saved_and_loaded_again_it_is_the_same(name, tmp_path):
  one = golden.golden(name)
  config = one.model.config
  weights.save(tmp_path, config, one.params, source=one.source)
  source = weights.source(tmp_path)
  assert source.config() == config
  golden.assert_same_trees(weights.load(source, config), one.params)
  theirs, ours = stored(one.source.path), stored(tmp_path)
  theirs = {  # a language model is written without what it saw images with
    key.replace('model.language_model.', 'model.'): tensor
    for key, tensor in theirs.items()
    if not key.startswith('model.visual.')
  }
  assert theirs.keys() == ours.keys()
  for key, tensor in theirs.items():
    np.testing.assert_allclose(
      ours[key], tensor.astype(np.float32), rtol=0, atol=1e-7
    )


@pytest.mark.parametrize('name', ['llama', 'qwen3_moe'])
def test_bfloat16_comes_back_bit_by_bit(name, tmp_path):
  one = golden.golden(name)
  weights.save(
    tmp_path, one.model.config, one.params, dtype='bfloat16', source=one.source
  )
  theirs, ours = stored(one.source.path), stored(tmp_path)
  assert theirs.keys() == ours.keys()
  for key, tensor in theirs.items():
    assert ours[key].dtype == tensor.dtype
    np.testing.assert_array_equal(ours[key], tensor)


def test_several_files_and_their_index(tmp_path):
  one = golden.golden('gemma2')
  limit = 20_000
  weights.save(tmp_path, one.model.config, one.params, shard_bytes=limit)
  files = sorted(tmp_path.glob('*.safetensors'))
  assert len(files) > 3
  assert files[0].name == f'model-00001-of-{len(files):05}.safetensors'
  sizes = [
    sum(x.nbytes for x in safetensors.load_file(file).values())
    for file in files
  ]
  assert all(size <= limit for size in sizes)
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == sum(sizes)
  where = {
    name: file.name for file in files for name in safetensors.load_file(file)
  }
  assert index['weight_map'] == where
  source = weights.source(tmp_path)
  loaded = weights.load(source, source.config())
  golden.assert_same_trees(loaded, one.params)


def test_from_a_mesh_the_same_files_come(tmp_path):
  one = golden.golden('gemma3')
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  place = sharding.param_shardings(mesh, one.params, one.model.logical_axes)
  params = jax.device_put(one.params, place)
  weights.save(tmp_path / 'mesh', one.model.config, params)
  weights.save(tmp_path / 'one', one.model.config, one.params)
  for file in ('model.safetensors', 'config.json'):
    found, expected = (
      (tmp_path / k / file).read_bytes() for k in ('mesh', 'one')
    )
    assert found == expected


def test_tied_embeddings_are_written_once(tmp_path):
  one = golden.golden('qwen3')
  weights.save(tmp_path, one.model.config, one.params)
  assert 'lm_head.weight' not in stored(tmp_path)


def test_what_is_taken_over_from_the_source(tmp_path):
  one = golden.golden('mistral')
  original = tmp_path / 'original'
  weights.save(original, one.model.config, one.params, source=one.source)
  (original / 'tokenizer.json').write_text('{"a": 1}')
  (original / 'generation_config.json').write_text('{"eos_token_id": [2, 5]}')
  (original / 'README.md').write_text('theirs')
  source = weights.source(original)
  fields = dict(max_position_embeddings=128)
  copy = tmp_path / 'copy'
  weights.save(copy, one.model.config, one.params, source=source, fields=fields)
  assert (copy / 'tokenizer.json').read_text() == '{"a": 1}'
  assert (copy / 'generation_config.json').exists()
  assert not (copy / 'README.md').exists()
  described = json.loads((copy / 'config.json').read_text())
  assert described['architectures'] == ['MistralForCausalLM']
  assert described['eos_token_id'] == 2
  assert described['max_position_embeddings'] == 128
  assert described['torch_dtype'] == 'float32'


def test_a_new_model_is_written_as_the_plainest_family(tmp_path):
  config = tiny.model().config
  params = golden.random_params(config)
  weights.save(tmp_path, config, params)
  source = weights.source(tmp_path)
  assert source.config_json['architectures'] == ['LlamaForCausalLM']
  loaded = weights.load(source, source.config())
  golden.assert_same_trees(loaded, params)


@pytest.mark.long
@pytest.mark.parametrize('name', ['gemma3', 'qwen2_window'])
def test_adapters_are_added_to_their_weights(name, tmp_path):
  """Stacked layers and those behind them, on the host, a device and a mesh."""
  one = golden.golden(name)
  low = models.LowRank(2, 4.0, ('attention/*', 'mlp/up'))
  config = dataclasses.replace(one.model.config, lora=low)
  params = tiny.params(models.Transformer(config))  # both factors are off 0
  merged = lora.merge(params, low)
  plain = dataclasses.replace(config, lora=None)
  weights.save(tmp_path / 'merged', plain, merged)
  weights.save(tmp_path / 'device', config, params)
  weights.save(tmp_path / 'host', config, jax.tree.map(np.asarray, params))
  axes = models.Transformer(config).logical_axes
  place = sharding.param_shardings(sharding.make_mesh(1, 2, 1), params, axes)
  weights.save(tmp_path / 'mesh', config, jax.device_put(params, place))
  expected = stored(tmp_path / 'merged')
  for where in ('device', 'host', 'mesh'):
    found = stored(tmp_path / where)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
      np.testing.assert_allclose(found[key], tensor, atol=1e-6, err_msg=key)


def test_an_export_that_is_cut_off_is_no_model(tmp_path, monkeypatch):
  one = golden.golden('llama_linear')
  written = safetensors_lib.write

  def killed(*args):
    written(*args)
    raise KeyboardInterrupt

  monkeypatch.setattr(safetensors_lib, 'write', killed)
  with pytest.raises(KeyboardInterrupt):
    weights.save(tmp_path, one.model.config, one.params)
  with pytest.raises(ValueError, match='has no config.json'):
    weights.source(tmp_path)


def test_what_is_refused(tmp_path):
  one = golden.golden('mistral')
  config = one.model.config
  with pytest.raises(ValueError, match="dtype='float16' of an export"):
    weights.save(tmp_path, config, one.params, dtype='float16')
  other = golden.golden('qwen2')
  with pytest.raises(ValueError, match='differ from those of the config'):
    weights.save(tmp_path, other.model.config, one.params)
  with pytest.raises(ValueError, match='MistralForCausalLM cannot say'):
    weights.save(tmp_path, other.model.config, other.params, source=one.source)
  adapted = dataclasses.replace(config, lora=models.LowRank(2, 4.0))
  with pytest.raises(ValueError, match='key_a.* has the shape None'):
    weights.save(tmp_path, adapted, one.params)
  with pytest.raises(ValueError, match='no adapters'):
    weights.save_adapter(tmp_path, config, one.params, 'base')
  assert not list(tmp_path.iterdir())
  weights.save(tmp_path, config, one.params)
  with pytest.raises(ValueError, match='holds a model already'):
    weights.save(tmp_path, config, one.params)
