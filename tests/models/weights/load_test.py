"""Loading: onto a mesh, one tensor at a time, and what bad files are told."""

import dataclasses
import json
import math
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models import weights
from grpo_jax.models.weights import safetensors as safetensors_lib
from tests import tiny
from tests.models.weights import golden


@pytest.fixture
def folder(tmp_path):
  """A copy of a golden folder, to be changed."""

  def copy(name):
    return shutil.copytree(golden.folder(name), tmp_path / name)

  return copy


def place(model, **axes):
  mesh = sharding.make_mesh(**axes)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  return sharding.param_shardings(mesh, shapes, model.logical_axes)


def change(folder, edit):
  """Edits the tensors of a folder with one file."""
  tensors = safetensors.load_file(folder / 'model.safetensors')
  edit(tensors)
  safetensors.save_file(tensors, folder / 'model.safetensors')


def load(folder, **options):
  source = weights.source(folder)
  return weights.load(source, source.config(), **options)


@pytest.mark.parametrize(
  'name',
  [
    'qwen2',
    'qwen3_moe',
    pytest.param('gemma3', marks=pytest.mark.long),
    pytest.param('llama', marks=pytest.mark.long),
    pytest.param('olmo3', marks=pytest.mark.long),
    pytest.param('phi3', marks=pytest.mark.long),
    pytest.param('glm4', marks=pytest.mark.long),
    'lfm2',
    pytest.param('qwen3_5', marks=pytest.mark.long),
    pytest.param('qwen3_5_moe', marks=pytest.mark.long),
    'qwen3_next',
    pytest.param('lfm2_moe', marks=pytest.mark.long),
  ],
)
def test_on_a_mesh_the_arrays_are_the_same(name):
  one = golden.golden(name)
  first = 'expert' if one.model.config.experts else 'data'
  where = place(one.model, fsdp=2, tensor=2, **{first: 2})
  loaded = weights.load(one.source, one.model.config, where)
  golden.assert_same_trees(loaded, one.params)
  for leaf, expected in zip(jax.tree.leaves(loaded), jax.tree.leaves(where)):
    assert leaf.sharding == expected


class Recorded:
  """A reader that remembers how much is read at once."""

  def __init__(self, reader):
    self.tensors, self.reader, self.sizes = reader.tensors, reader, []

  def read(self, stored, index):
    part = self.reader.read(stored, index)
    self.sizes.append(part.size)
    return part


@pytest.mark.parametrize(
  'name, axes',
  [
    ('llama', dict(fsdp=4, tensor=2)),
    ('llama', dict(data=4, tensor=2)),
    ('phi3', dict(fsdp=4, tensor=2)),  # some tensors hold several
    ('lfm2', dict(fsdp=4, tensor=2)),
  ],
)
def test_each_device_reads_its_part_and_no_part_is_read_twice(name, axes):
  one = golden.golden(name)
  reader = Recorded(one.source.reader)
  source = dataclasses.replace(one.source, reader=reader)
  weights.load(source, one.model.config, place(one.model, **axes))
  assert sum(reader.sizes) == sum(x.size for x in jax.tree.leaves(one.params))
  config = one.model.config
  parts = axes.get('fsdp', 1) * axes['tensor']
  assert max(reader.sizes) == config.vocab_size * config.width // parts


def test_pieces_are_as_large_as_allowed(monkeypatch):
  """Each costs a new opening of its file."""
  reader = golden.golden('llama').source.reader
  stored = reader.tensors['model.embed_tokens.weight']
  rows, width = stored.shape
  expected = reader.read(stored, (slice(None), slice(None)))
  opened, unwatched = [], safetensors_lib.opened

  def watched(path):
    opened.append(path)
    return unwatched(path)

  monkeypatch.setattr(safetensors_lib, 'opened', watched)
  for size in (0, 1, 7, rows - 1, rows):  # 0: one row has too many bytes
    piece = size * width * stored.dtype.itemsize + 1
    monkeypatch.setattr(safetensors_lib, 'PIECE_BYTES', piece)
    for part in (slice(None), slice(3, rows - 2)):
      opened.clear()
      found = reader.read(stored, (part, slice(2, None)))
      np.testing.assert_array_equal(found, expected[part, 2:])
      assert len(opened) == math.ceil(len(found) / max(1, size))


def test_a_large_tensor_is_read_piece_by_piece(monkeypatch):
  one = golden.golden('gemma2')
  monkeypatch.setattr(safetensors_lib, 'PIECE_BYTES', 7 * 4 * 24)
  where = place(one.model, fsdp=2)
  loaded = weights.load(one.source, one.model.config, where)
  golden.assert_same_trees(loaded, one.params)


def test_the_host_holds_one_tensor_at_a_time(tmp_path):
  """Arrays of NumPy, that is; `tracemalloc` sees nothing of those of JAX."""
  config = models.ModelConfig(
    vocab_size=256, num_layers=6, width=256, mlp_width=4096
  )
  weights.save(tmp_path / 'x', config, golden.random_params(config))
  source = weights.source(tmp_path / 'x')
  weights.load(source, config)  # compiles, which takes memory too
  largest = 4 * 256 * 4096
  tracemalloc.start()
  loaded = weights.load(source, config)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert sum(x.nbytes for x in jax.tree.leaves(loaded)) > 15 * largest
  assert largest < peak < 1.5 * largest


def test_bfloat16_is_for_what_is_stored_so_or_on_request():
  one = golden.golden('llama')
  halved = weights.load(one.source, one.model.config, dtype='bfloat16')
  attention, norms = halved['blocks'][0]['attention'], halved['final_norm']
  assert attention['query'].dtype == jnp.bfloat16
  assert halved['embedding'].dtype == jnp.bfloat16
  assert norms['scale'].dtype == jnp.float32
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), halved)
  golden.assert_same_trees(wide, one.params)
  one = golden.golden('gemma2')
  config = one.model.config
  with pytest.raises(ValueError, match='loses bits'):
    weights.load(one.source, config, dtype='bfloat16')
  with pytest.raises(ValueError, match="neither 'float32' nor"):
    weights.load(one.source, config, dtype='float16')
  halved = weights.load(one.source, config, dtype='bfloat16', rounded=True)
  rounded = one.params['embedding'].astype(jnp.bfloat16)
  np.testing.assert_array_equal(halved['embedding'], rounded)
  # Of 1 + w nothing is rounded.
  golden.assert_same_trees(halved['final_norm'], one.params['final_norm'])


@pytest.mark.parametrize('name', ['lfm2_moe', 'qwen3_5'])
def test_of_layers_with_a_state_matrices_alone_are_rounded(name):
  """Those that decay: not taps, and not how fast a state is forgotten."""
  one = golden.golden(name)
  loaded = weights.load(
    one.source, one.model.config, dtype='bfloat16', rounded=True
  )
  for path, leaf in jax.tree_util.tree_leaves_with_path(loaded):
    decays = one.model.decays(sharding.path_names(path))
    assert leaf.dtype == (jnp.bfloat16 if decays else jnp.float32), path


def test_a_text_model_is_found_inside_a_model_with_images(tmp_path):
  one = golden.golden('gemma3')
  text = json.loads((one.source.path / 'config.json').read_text())
  text.pop('architectures')
  described = dict(
    architectures=['Gemma3ForConditionalGeneration'],
    model_type='gemma3',
    text_config=text,
  )
  stored = safetensors.load_file(one.source.path / 'model.safetensors')
  image = {'vision_tower.patches.weight': np.ones((2, 2), np.float32)}
  for prefix in ('language_model.model.', 'model.language_model.'):
    folder = tmp_path / prefix
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(described))
    renamed = {
      name.replace('model.', prefix, 1): x for name, x in stored.items()
    }
    safetensors.save_file(renamed | image, folder / 'model.safetensors')
    assert weights.source(folder).config() == one.model.config
    golden.assert_same_trees(load(folder), one.params)


def test_what_sees_hears_or_is_read_by_nobody_is_left_out(tmp_path):
  one = golden.golden('gemma4')
  text = json.loads((one.source.path / 'config.json').read_text())
  text.pop('architectures')
  described = dict(
    architectures=['Gemma4ForConditionalGeneration'],
    model_type='gemma4',
    text_config=text,
  )
  stored = safetensors.load_file(one.source.path / 'model.safetensors')
  more = dict.fromkeys(
    [
      'model.vision_tower.patch_embedder.input_proj.weight',
      'model.audio_tower.layers.0.norm.weight',
      'model.embed_vision.embedding_projection.weight',
      'model.embed_audio.embedding_projection.weight',
      # Of layers that share keys and values.
      'model.language_model.layers.3.self_attn.k_proj.weight',
      'model.language_model.layers.7.self_attn.v_proj.weight',
      'model.language_model.layers.7.self_attn.k_norm.weight',
    ],
    np.ones((2, 2), np.float32),
  )
  inner = {
    name.replace('model.', 'model.language_model.', 1): x
    for name, x in stored.items()
  }
  (tmp_path / 'config.json').write_text(json.dumps(described))
  safetensors.save_file(inner | more, tmp_path / 'model.safetensors')
  assert weights.source(tmp_path).config() == one.model.config
  golden.assert_same_trees(load(tmp_path), one.params)
  # Layer 2 has its own.
  name = 'model.language_model.layers.2.self_attn.k_proj.weight'
  inner.pop(name)
  safetensors.save_file(inner, tmp_path / 'model.safetensors')
  with pytest.raises(ValueError, match='layers.2.self_attn.k_proj.weight'):
    load(tmp_path)


def test_only_what_has_a_place_is_read():
  one = golden.golden('gemma4')
  where = place(one.model, fsdp=2)
  table = ('inputs', 'input_table')
  parts = lora.split(where, lambda path: path == table)
  found = [weights.load(one.source, one.model.config, part) for part in parts]
  assert len(jax.tree.leaves(found[0])) == 1
  golden.assert_same_trees(lora.join(*found), one.params)


def test_tensors_that_repeat_what_is_known_are_passed_over(folder):
  tied = folder('qwen3')

  def add(tensors):
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight']
    name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
    tensors[name] = np.ones(6, np.float32)

  change(tied, add)
  golden.assert_same_trees(load(tied), golden.golden('qwen3').params)


def test_rows_of_the_vocabulary_beyond_the_tokenizer_are_kept():
  """Nothing here asks a tokenizer how many ids it has."""
  one = golden.golden('qwen2')
  assert (
    one.params['embedding'].shape[0] == one.source.config_json['vocab_size']
  )


def refusal(folder, **options) -> str:
  with pytest.raises(ValueError) as refused:
    load(folder, **options)
  said = str(refused.value)
  assert str(folder) in said and said.endswith('.')
  return said


def test_missing_and_truncated_files(folder):
  source = folder('llama')
  file = source / 'model-00002-of-00003.safetensors'
  whole = file.read_bytes()
  file.write_bytes(whole[:-100])
  assert f'{file} (16,700 bytes) is truncated' in refusal(source)
  file.write_bytes(b'<html>no such file</html>')
  assert 'no safetensors file' in refusal(source)
  file.unlink()
  assert 'lacks 1 of the 3 files' in refusal(source)
  assert file.name in refusal(source)
  (source / 'model.safetensors.index.json').write_text('{"metadata": {}}')
  assert "is no index of safetensors ('weight_map')" in refusal(source)
  for text in (
    '[' * 100_000,
    '[]',
    '{"weight_map": []}',
    '{"weight_map": {"a": ["b"]}}',
    '{"weight_map": {"a": 5}}',
  ):
    (source / 'model.safetensors.index.json').write_text(text)
    assert 'is no index of safetensors' in refusal(source)
  (source / 'config.json').write_text('[' * 100_000)
  assert 'config.json is no JSON' in refusal(source)


def test_pickles_are_refused(folder, tmp_path):
  source = folder('mistral')
  (source / 'model.safetensors').rename(source / 'pytorch_model.bin')
  assert 'may run any code' in refusal(source)
  with pytest.raises(ValueError, match='may run any code'):
    weights.source(source / 'pytorch_model.bin')


def test_what_is_no_model(folder, tmp_path):
  source = folder('mistral')
  (source / 'model.safetensors').unlink()
  assert 'config.json, expected.npz' in refusal(source)
  (source / 'config.json').write_text('{')
  assert 'is no JSON' in refusal(source)
  (source / 'config.json').write_text('[]')
  assert 'holds no object with fields, but []' in refusal(source)
  (source / 'config.json').unlink()
  assert 'has no config.json' in refusal(source)
  with pytest.raises(ValueError, match='There is no .*nowhere; give'):
    weights.source(tmp_path / 'nowhere')
  (tmp_path / 'notes.txt').write_text('')
  with pytest.raises(ValueError, match='is no .gguf file'):
    weights.source(tmp_path / 'notes.txt')


def test_layers_behind_the_last_are_left_out(folder):
  """Which draw several tokens at once, and are no part of the model."""
  source = folder('glm4_moe')
  described = json.loads((source / 'config.json').read_text())
  layers = described['num_hidden_layers']
  name = f'model.layers.{layers}.eh_proj.weight'
  change(source, lambda x: x.update({name: np.ones((2, 2), np.float32)}))
  assert f'has no place for ({name})' in refusal(source)
  described['num_nextn_predict_layers'] = 1
  (source / 'config.json').write_text(json.dumps(described))
  golden.assert_same_trees(load(source), golden.golden('glm4_moe').params)


def pack(tensors):
  """Experts as an axis of one tensor, as the files of Qwen 3.5 have them."""
  for layer in range(3):
    start = f'model.layers.{layer}.mlp.experts.'
    gate, up, down = (
      np.stack([tensors.pop(f'{start}{i}.{one}_proj.weight') for i in range(5)])
      for one in ('gate', 'up', 'down')
    )
    tensors[f'{start}gate_up_proj'] = np.concatenate([gate, up], axis=1)
    tensors[f'{start}down_proj'] = down


@pytest.mark.parametrize('axes', [{}, dict(fsdp=2, tensor=2)])
def test_experts_of_one_tensor_are_those_of_many(folder, axes):
  one, source = golden.golden('qwen3_5_moe'), folder('qwen3_5_moe')
  change(source, pack)
  where = place(one.model, **axes) if axes else None
  golden.assert_same_trees(load(source, place=where), one.params)


def test_experts_of_one_tensor_have_the_rows_of_both(folder):
  source = folder('qwen3_5_moe')
  name = 'model.layers.1.mlp.experts.gate_up_proj'

  def cut(tensors):
    pack(tensors)
    tensors[name] = tensors[name][:, 1:].copy()

  change(source, cut)
  assert f'{name} in ' in refusal(source)
  assert '15 rows, but its parts have 8 + 8 by' in refusal(source)


def test_what_draws_several_tokens_at_once_in_qwen_is_left_out(folder):
  source = folder('qwen3_5')
  name = 'mtp.layers.0.self_attn.q_proj.weight'
  change(source, lambda x: x.update({name: np.ones((2, 2), np.float32)}))
  golden.assert_same_trees(load(source), golden.golden('qwen3_5').params)


def test_heads_that_take_turns_have_the_rows_of_all(folder):
  source = folder('qwen3_5')
  name = 'model.language_model.layers.1.self_attn.q_proj.weight'

  def cut(tensors):
    tensors[name] = tensors[name][:-1].copy()

  change(source, cut)
  assert '63 rows, but its parts have 8 + 8, 4 times, by' in refusal(source)


def test_a_tensor_of_several_has_the_rows_of_all(folder):
  source = folder('phi3')
  name = 'model.layers.1.self_attn.qkv_proj.weight'

  def cut(tensors):
    tensors[name] = tensors[name][:-1].copy()

  change(source, cut)
  said = refusal(source)
  assert f'{name} in ' in said and '63 rows' in said and '32 + 16 + 16' in said
  change(source, lambda tensors: tensors.pop(name))
  missing = ', '.join(
    f'model.layers.1.self_attn.{one}_proj.weight' for one in 'kqv'
  )
  assert f'lacks 3 of the 30 tensors of the model ({missing})' in refusal(
    source
  )


def test_tensors_that_do_not_fit_the_model(folder):
  source = folder('mistral')
  name = 'model.layers.1.self_attn.k_proj.weight'

  def cut(tensors):
    tensors[name] = tensors[name][:-1].copy()

  change(source, cut)
  said = refusal(source)
  assert f'{name} in ' in said and '(15, 24)' in said and '(16, 24)' in said

  change(source, lambda tensors: tensors.pop(name))
  assert f'lacks 1 of the 30 tensors of the model ({name})' in refusal(source)

  source = folder('gemma2')
  extra = 'model.layers.0.self_attn.q_proj.bias'

  def add(tensors):
    tensors[extra] = np.ones(40, np.float32)

  change(source, add)
  assert f'has 1 tensors that the model has no place for ({extra})' in refusal(
    source
  )

  def widen(tensors):
    del tensors[extra]
    tensors['model.norm.weight'] = tensors['model.norm.weight'].astype(float)

  change(source, widen)
  assert 'model.norm.weight' in refusal(source) and 'F64' in refusal(source)


def test_a_config_of_another_model_is_refused():
  source = golden.golden('mistral').source
  config = tiny.model(post_norms=True).config
  with pytest.raises(ValueError, match='of the model has no place'):
    weights.load(source, config)


def test_the_path_stands_before_what_its_config_json_is_told(folder):
  source = folder('qwen2')
  described = json.loads((source / 'config.json').read_text())
  described['hidden_act'] = 'relu'
  (source / 'config.json').write_text(json.dumps(described))
  assert "hidden_act='relu'" in refusal(source)
  described |= {'hidden_act': 'silu', 'rope_scaling': 'linear'}
  (source / 'config.json').write_text(json.dumps(described))
  assert "rope_scaling='linear', which is no object" in refusal(source)
