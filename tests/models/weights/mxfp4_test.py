"""Experts in MXFP4: read as the numbers that they stand for."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.models.weights import mxfp4
from tests.models.weights import golden

WIDTH, HIDDEN, EXPERTS = 64, 32, 6


def number(code, exponent):
  """A sign, two bits of an exponent over 1 and one of a mantissa."""
  sign, high, low = code >> 3, (code >> 1) & 3, code & 1
  value = low * 0.5 if high == 0 else (1 + low * 0.5) * 2.0 ** (high - 1)
  return (-1) ** sign * value * 2.0 ** (exponent - 127)


def drawn(rng, outputs, inputs):
  """Blocks, scales, and the numbers f32[E,inputs,outputs]."""
  shape = EXPERTS, outputs, inputs // 32
  blocks = rng.integers(0, 256, (*shape, 16)).astype(np.uint8)
  scales = rng.integers(122, 127, shape).astype(np.uint8)
  found = np.zeros((EXPERTS, outputs, inputs), np.float32)
  for place in np.ndindex(*shape):
    for i in range(32):
      byte = int(blocks[place][i // 2])
      code = byte & 15 if i % 2 == 0 else byte >> 4
      column = place[2] * 32 + i
      found[(*place[:2], column)] = number(code, int(scales[place]))
  return blocks, scales, np.ascontiguousarray(found.swapaxes(1, 2))


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A model with its experts in MXFP4, and the same in bfloat16."""
  one = golden.golden('gpt_oss').model.config
  config = dataclasses.replace(
    one,
    width=WIDTH,
    mlp_width=HIDDEN,
    experts=dataclasses.replace(one.experts, width=HIDDEN),
  )
  rng = np.random.default_rng(0)
  both = [tmp_path_factory.mktemp(name) for name in ('packed', 'plain')]
  plain = both[1]
  weights.save(plain, config, golden.random_params(config))
  tensors = safetensors.load_file(plain / 'model.safetensors')
  packed = dict(tensors)
  for layer in range(config.num_layers):
    prefix = f'model.layers.{layer}.mlp.experts.'
    for name, sizes in (
      ('gate_up_proj', (2 * HIDDEN, WIDTH)), ('down_proj', (WIDTH, HIDDEN)),
    ):  # fmt: skip
      blocks, scales, values = drawn(rng, *sizes)
      assert tensors[prefix + name].shape == values.shape
      tensors[prefix + name] = values
      del packed[prefix + name]
      packed[f'{prefix}{name}_blocks'] = blocks
      packed[f'{prefix}{name}_scales'] = scales
  safetensors.save_file(tensors, plain / 'model.safetensors')
  safetensors.save_file(packed, both[0] / 'model.safetensors')
  described = json.loads((plain / 'config.json').read_text())
  described['quantization_config'] = dict(quant_method='mxfp4')
  (both[0] / 'config.json').write_text(json.dumps(described))
  return both


def loaded(folder, **options):
  source = weights.source(folder)
  return weights.load(source, source.config(), **options)


def test_codes_are_the_numbers_that_they_stand_for():
  blocks = np.arange(16, dtype=np.uint8)[None] * 17
  found = mxfp4.decode(blocks, np.array([130], np.uint8))
  expected = [number(code, 130) for code in range(16) for _ in range(2)]
  np.testing.assert_array_equal(found, np.float32(expected))


def test_experts_are_read_as_what_they_stand_for(folders):
  packed, plain = map(loaded, folders)
  golden.assert_same_trees(packed, plain)
  halved = loaded(folders[0], dtype='bfloat16', rounded=True)
  gate = halved['blocks'][0]['experts']['gate']
  assert gate.dtype == jnp.bfloat16
  expected = plain['blocks'][0]['experts']['gate']
  np.testing.assert_array_equal(gate.astype(np.float32), expected)


def test_each_device_reads_its_part(folders):
  source = weights.source(folders[0])
  model = golden.models.Transformer(source.config())
  mesh = sharding.make_mesh(fsdp=2, tensor=2, expert=2)
  place = sharding.param_shardings(mesh, model.abstract(), model.logical_axes)
  given = weights.load(source, model.config, place)
  for leaf, where in zip(jax.tree.leaves(given), jax.tree.leaves(place)):
    assert leaf.sharding == where
  golden.assert_same_trees(given, loaded(folders[1]))


def test_what_was_read_so_is_written_in_full(folders, tmp_path):
  source = weights.source(folders[0])
  params = weights.load(source, source.config())
  weights.save(tmp_path, source.config(), params, source=source)
  assert 'quantization_config' not in (tmp_path / 'config.json').read_text()
  golden.assert_same_trees(loaded(tmp_path), params)


@pytest.mark.parametrize(
  'change, said',
  [
    (lambda name, x: x[..., :8], 'blocks of 16 bytes'),
    (lambda name, x: None if 'scales' in name else x, 'blocks of 16 bytes'),
  ],
)
def test_blocks_without_their_scales_are_refused(
  change, said, folders, tmp_path
):
  tensors = safetensors.load_file(folders[0] / 'model.safetensors')
  changed = {name: change(name, x) for name, x in tensors.items()
             if name.endswith(('_blocks', '_scales'))}  # fmt: skip
  kept = {name: x for name, x in (tensors | changed).items() if x is not None}
  kept = {name: np.ascontiguousarray(x) for name, x in kept.items()}
  safetensors.save_file(kept, tmp_path / 'model.safetensors')
  described = (folders[0] / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(described)
  with pytest.raises(ValueError, match=said):
    loaded(tmp_path)


def test_elsewhere_bytes_are_no_weights(tmp_path):
  folder = golden.folder('qwen3')
  tensors = safetensors.load_file(folder / 'model.safetensors')
  tensors['model.norm.weight'] = np.zeros(24, np.uint8)
  safetensors.save_file(tensors, tmp_path / 'model.safetensors')
  described = json.loads((folder / 'config.json').read_text())
  (tmp_path / 'config.json').write_text(json.dumps(described))
  with pytest.raises(ValueError, match='has the dtype U8; give weights in one'):
    loaded(tmp_path)
  described['quantization_config'] = dict(quant_method='mxfp4')
  (tmp_path / 'config.json').write_text(json.dumps(described))
  with pytest.raises(ValueError, match='read from GGUF files alone'):
    loaded(tmp_path)


@pytest.mark.reference
def test_transformers_reads_the_same_numbers():
  torch = pytest.importorskip('torch', reason='needs torch')
  theirs = pytest.importorskip('transformers.integrations.mxfp4')
  blocks, scales, _ = drawn(np.random.default_rng(1), 8, 64)
  expected = theirs.convert_moe_packed_tensors(
    torch.tensor(blocks), torch.tensor(scales)
  )
  found = mxfp4.decode(blocks, scales).swapaxes(1, 2)
  np.testing.assert_array_equal(found, expected.float().numpy())
