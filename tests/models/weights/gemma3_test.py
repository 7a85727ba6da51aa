"""Gemma 3 from GGUF files against NumPy, which reads llama.cpp's names too."""

import jax
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax import models
from grpo_jax.config import gguf_files
from grpo_jax.models import weights
from tests import gemma3
from tests.models.weights import golden
from tests.models.weights import parity_test
from tests.oracles import gemma3_gguf as oracle

gguf = pytest.importorskip('gguf', reason="needs `pip install '.[gguf]'`")

Kind = gguf.GGMLQuantizationType
# The kinds of the real file that have at least 32 entries in a block and that
# the package can write; of K kinds a block has 256.
KINDS = {'attn_q': Kind.Q5_0, 'ffn_up': Kind.Q8_0, 'token_embd': Kind.Q8_0}
SIZES = {
  'context_length': 64,
  'embedding_length': 32,
  'block_count': 8,
  'feed_forward_length': 64,
  'attention.head_count': 4,
  'attention.head_count_kv': 2,
  'attention.key_length': 16,
  'attention.value_length': 16,
  'attention.sliding_window': 4,
}


def write(path, change=None):
  """A file of eight layers, two of them without a window."""
  writer = gguf.GGUFWriter(path, 'gemma3')
  for name, value in SIZES.items():
    writer.add_uint32(f'gemma3.{name}', value)
  writer.add_layer_norm_rms_eps(0.02)
  writer.add_rope_freq_base(300.0)
  rng = np.random.default_rng(0)
  shapes = {'token_embd': (48, 32), 'output_norm': (32,)}
  for layer in range(8):
    shapes |= {
      f'blk.{layer}.{name}': shape
      for name, shape in {
        'attn_norm': (32,), 'ffn_norm': (32,), 'post_attention_norm': (32,),
        'post_ffw_norm': (32,), 'attn_q_norm': (16,), 'attn_k_norm': (16,),
        'attn_q': (64, 32), 'attn_k': (32, 32), 'attn_v': (32, 32),
        'attn_output': (32, 64), 'ffn_gate': (64, 32), 'ffn_up': (64, 32),
        'ffn_down': (32, 64),
      }.items()
    }  # fmt: skip
  tensors = {}
  for name, shape in shapes.items():
    weight = rng.normal(size=shape).astype(np.float32) / shape[-1] ** 0.5
    if 'norm' in name:
      weight = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    kind = KINDS.get(name.split('.')[-1], Kind.F32)
    stored = gguf.quantize(weight, kind)
    tensors[f'{name}.weight'] = gguf.dequantize(stored, kind).astype(float)
    writer.add_tensor(f'{name}.weight', stored, raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  metadata = {f'gemma3.{name}': value for name, value in SIZES.items()}
  metadata['gemma3.attention.layer_norm_rms_epsilon'] = 0.02
  metadata['gemma3.rope.freq_base'] = 300.0
  return tensors, metadata


def log_probs(source, tokens):
  """Those of the product, f32[N,V]."""
  config = source.config()
  model = models.Transformer(config)
  row = golden.padded([np.asarray(tokens, np.int32)], 'right')
  params = weights.load(source, config)
  logits = parity_test.logits(model, params, row)[0]
  return np.asarray(jax.nn.log_softmax(logits))


def test_log_probs_of_a_small_file(tmp_path):
  tensors, metadata = write(tmp_path / 'a.gguf')
  tokens = np.random.default_rng(1).integers(48, size=24)
  expected = oracle.log_probs(tensors, metadata, tokens)
  got = log_probs(weights.source(tmp_path / 'a.gguf'), tokens)
  np.testing.assert_allclose(got, expected, atol=2e-5)


TEXT = (
  'The history of the city begins in the early Middle Ages, when a small group'
  ' of merchants settled on the banks of the river. Over time, the settlement'
  ' grew into an important trading town.'
)


@gemma3.needed
def test_log_probs_of_gemma_3():
  path = gguf_files.find(gemma3.PATH)
  reader = gguf.GGUFReader(path)
  tensors = {
    one.name: gguf.dequantize(one.data, one.tensor_type)
    for one in reader.tensors
  }
  metadata = {
    name: field.contents()
    for name, field in reader.fields.items()
    if not name.startswith('tokenizer.')
  }
  # A norm that was stored as w, and not 1 + w, would have scales around 0.
  assert tensors['blk.0.attn_norm.weight'].min() > 1
  ids = data.Tokenizer.from_gguf(path).encode_prompt(TEXT)
  expected = oracle.log_probs(tensors, metadata, ids)
  got = log_probs(weights.source(gemma3.PATH), ids)
  np.testing.assert_allclose(got, expected, atol=1e-3)
  said = got[np.arange(len(ids) - 1), ids[1:]]
  assert 3 < np.exp(-said.mean()) < 12  # perplexity
