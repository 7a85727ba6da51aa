"""What `save_adapter` has written, `load_adapter` reads back."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models import weights
from tests.chosen import chosen
from tests.models.weights import class_names_test
from tests.models.weights import golden

NAMES = class_names_test.NAMES
FILE = 'adapter_model.safetensors'
# Grouped heads; fused and in pairs; states beside attention; experts.
IN_THE_SUITE = (
  'LlamaForCausalLM', 'Glm4ForCausalLM', 'Qwen3NextForCausalLM',
  'Qwen3MoeForCausalLM',
)  # fmt: skip


def abstract(trained):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trained)


def written(folder, architecture, targets=None, dtype='float32'):
  """A folder with an adapter; the config and what was written."""
  config, params = class_names_test.adapted(architecture)
  if targets:
    low = dataclasses.replace(config.lora, targets=targets)
    config = dataclasses.replace(config, lora=low)
    params = golden.random_params(config)
  trained, _ = lora.split(params, lora.trains)
  weights.save_adapter(
    folder, config, trained, 'base', dtype=dtype, architecture=architecture
  )
  return config, trained


def assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  named = jax.tree_util.tree_leaves_with_path(expected)
  for (path, leaf), other in zip(named, jax.tree.leaves(found), strict=True):
    name = jax.tree_util.keystr(path)
    assert other.dtype == leaf.dtype, name
    np.testing.assert_array_equal(other, leaf, err_msg=name)


def check_the_way_back(tmp_path, architecture, targets=None):
  config, trained = written(tmp_path, architecture, targets)
  assert all(np.abs(x).min() > 0 for x in jax.tree.leaves(trained))
  found = weights.load_adapter(
    tmp_path, config, abstract(trained), architecture
  )
  assert_equal(found, trained)
  return config


@pytest.mark.parametrize('architecture', chosen([*NAMES], IN_THE_SUITE))
def test_the_way_back_is_the_identity(architecture, tmp_path):
  check_the_way_back(tmp_path, architecture)


@pytest.mark.parametrize(
  'architecture, targets',
  [
    ('LlamaForCausalLM', ('attention/output',)),
    ('Phi3ForCausalLM', ('attention/key', 'mlp/up')),  # two of three, of two
    ('Glm4ForCausalLM', ('attention/*', 'mlp/gate')),
    ('Qwen3NextForCausalLM', ('attention/head_gate', 'delta/value')),
  ],
)
def test_the_way_back_of_some_weights(architecture, targets, tmp_path):
  check_the_way_back(tmp_path, architecture, targets)


@pytest.mark.parametrize('name', ['gemma2', 'smollm3', 'qwen3_next'])
def test_the_way_back_with_grouped_heads_and_a_tail(name, tmp_path):
  source = weights.source(golden.folder(name))
  config = class_names_test.low_rank(source.config())
  assert config.tail and 1 < config.num_kv_heads < config.num_heads
  trained, _ = lora.split(golden.random_params(config), lora.trains)
  assert trained['blocks'] and trained['tail']
  named = source.architecture
  weights.save_adapter(tmp_path, config, trained, 'base', architecture=named)
  found = weights.load_adapter(tmp_path, config, abstract(trained), named)
  assert_equal(found, trained)


def test_what_was_rounded_is_read_as_it_was_rounded(tmp_path):
  config, trained = written(tmp_path, 'LlamaForCausalLM', dtype='bfloat16')
  found = weights.load_adapter(tmp_path, config, abstract(trained))
  rounded = jax.tree.map(
    lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(x.dtype), trained
  )
  assert_equal(found, rounded)


def check_a_mesh(tmp_path, architecture):
  config, trained = written(tmp_path, architecture)
  mesh = sharding.make_mesh(2, 2, 2)
  axes = models.Transformer(config).logical_axes
  params = golden.random_params(config)
  place, _ = lora.split(
    sharding.param_shardings(mesh, params, axes), lora.trains
  )
  like = jax.tree.map(
    lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
    trained,
    place,
  )
  found = weights.load_adapter(tmp_path, config, like, architecture)
  assert_equal(found, trained)
  for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(place)):
    assert leaf.sharding == wanted
  assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(found))


def test_each_device_gets_its_share(tmp_path):
  check_a_mesh(tmp_path, 'LlamaForCausalLM')


@pytest.mark.long
@pytest.mark.parametrize('architecture', IN_THE_SUITE)
def test_each_device_gets_its_share_of_each_family(architecture, tmp_path):
  check_a_mesh(tmp_path, architecture)


def changed(change):
  """Changes what the file of an adapter's description says."""

  def do(folder):
    path = folder / 'adapter_config.json'
    path.write_text(json.dumps(change(json.loads(path.read_text()))))

  return do


def tensors(change):
  """Changes the tensors of a file, in place."""

  def do(folder):
    found = safetensors.load_file(folder / FILE)
    change(found)
    safetensors.save_file(found, folder / FILE)

  return do


KEY = 'base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight'
A, B = map(KEY.format, 'AB')


def renamed(found):
  found['base_model.model.lm_head.lora_A.weight'] = found[A]


def wide(found):
  found[A] = np.pad(found[A], ((0, 0), (0, 1)))


def tall(found):
  found[B] = np.pad(found[B], ((0, 1), (0, 0)))


def unequal(found):  # in all numbers alike, so that only the shape tells
  found[B] = found[B].T.copy()


REFUSED = {
  'no description': (
    lambda folder: (folder / 'adapter_config.json').write_text('{'),
    'FOLDER has no adapter of peft; give the folder of one.',
  ),
  'a list': (
    changed(lambda told: [told]),
    'FOLDER has no adapter of peft; give the folder of one.',
  ),
  'without a rank': (
    changed(lambda told: {'lora_alpha': 4.0}),
    'FOLDER has no adapter of peft; give the folder of one.',
  ),
  'another rank': (
    changed(lambda told: {**told, 'r': 3}),
    'The adapter in FOLDER has rank and alpha (3, 4.0), and the model has '
    '(2, 4.0); give the same.',
  ),
  'another alpha': (
    changed(lambda told: {**told, 'lora_alpha': 8}),
    'The adapter in FOLDER has rank and alpha (2, 8), and the model has '
    '(2, 4.0); give the same.',
  ),
  'another scale': (
    changed(lambda told: {**told, 'use_rslora': True}),
    'The adapter in FOLDER is one of use_rslora, which counts otherwise than '
    'those of the model; give one without.',
  ),
  'a magnitude': (
    changed(lambda told: {**told, 'use_dora': True}),
    'The adapter in FOLDER is one of use_dora, which counts otherwise than '
    'those of the model; give one without.',
  ),
  'no A': (
    tensors(lambda found: found.pop(A)),
    f'FOLDER lacks {A}; give an adapter of this model.',
  ),
  'no B': (
    tensors(lambda found: found.pop(B)),
    f'FOLDER lacks {B}; give an adapter of this model.',
  ),
  'more': (
    tensors(renamed),
    'FOLDER has 1 tensors for which the model has no adapters '
    '(base_model.model.lm_head.lora_A.weight); give an adapter of this model.',
  ),
  'a wide A': (
    tensors(wide),
    'The adapter of model.layers.0.self_attn.q_proj.weight has the shapes '
    '(2, 13) and (16, 2), and (2, 12) and (16, 2) are needed; give an adapter '
    'of this model.',
  ),
  'a tall B': (
    tensors(tall),
    'The adapter of model.layers.0.self_attn.q_proj.weight has the shapes '
    '(2, 12) and (17, 2), and (2, 12) and (16, 2) are needed; give an adapter '
    'of this model.',
  ),
  'B as A': (
    tensors(unequal),
    'The adapter of model.layers.0.self_attn.q_proj.weight has the shapes '
    '(2, 12) and (2, 16), and (2, 12) and (16, 2) are needed; give an adapter '
    'of this model.',
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED)
def test_what_is_no_adapter_of_the_model_is_refused(name, tmp_path):
  spoil, said = REFUSED[name]
  config, trained = written(tmp_path, 'LlamaForCausalLM')
  spoil(tmp_path)
  with pytest.raises(ValueError, match='.') as caught:
    weights.load_adapter(tmp_path, config, abstract(trained))
  assert str(caught.value) == said.replace('FOLDER', str(tmp_path))


def test_one_product_for_several_weights_is_refused(tmp_path):
  """Others adapt a module of several weights as one."""
  name = 'Phi3ForCausalLM'
  config, trained = written(tmp_path, name)
  read = lambda: weights.load_adapter(tmp_path, config, abstract(trained), name)
  read()
  key = 'base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight'

  def mix(found):
    found[key][0, -1] = 1.0  # of a query, by the adapter of values

  tensors(mix)(tmp_path)
  with pytest.raises(ValueError, match='.') as caught:
    read()
  assert str(caught.value) == (
    'The adapter of model.layers.0.self_attn.qkv_proj.weight adds one product '
    'to several weights of the model, which has an adapter for each; give a '
    'folder with the whole model.'
  )


def test_a_folder_that_is_not_there_is_told(tmp_path):
  config, trained = written(tmp_path / 'there', 'LlamaForCausalLM')
  with pytest.raises(OSError, match=re.escape(str(tmp_path / 'nowhere'))):
    weights.load_adapter(tmp_path / 'nowhere', config, abstract(trained))
  (tmp_path / 'there' / FILE).write_bytes(b'no tensors')
  with pytest.raises(ValueError, match=FILE):
    weights.load_adapter(tmp_path / 'there', config, abstract(trained))
