"""`config.json` becomes a `ModelConfig` and comes back, for every family."""

import copy
import dataclasses
import math

import jax
from jax.sharding import AbstractMesh
import pytest

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from tests.models.weights import golden
from tests.models.weights import real_models

pytestmark = pytest.mark.quick

LLAMA = real_models.MODELS['Llama-3.1-8B']
QWEN2 = real_models.MODELS['Qwen2.5-0.5B']
GEMMA3 = real_models.MODELS['gemma-3-1b']
SMOLLM3 = real_models.MODELS['SmolLM3-3B']
PHI4 = real_models.MODELS['Phi-4']
GLM4 = real_models.MODELS['GLM-4-9B']
GEMMA4 = {
  'architectures': ['Gemma4ForCausalLM'],
  **real_models.MODELS['Gemma-4-E2B']['text_config'],
}
GEMMA4_MOE = {
  'architectures': ['Gemma4ForCausalLM'],
  **real_models.MODELS['Gemma-4-26B-A4B']['text_config'],
}
LFM2 = real_models.MODELS['LFM2-1.2B']
LFM2_MOE = dict(
  LFM2,
  architectures=['Lfm2MoeForCausalLM'],
  intermediate_size=7168,
  layer_types=['conv', 'conv', 'full_attention', 'conv'] * 4,
)
QWEN3_5 = dict(
  real_models.MODELS['Qwen3.5-9B']['text_config'],
  architectures=['Qwen3_5ForCausalLM'],
)


def read(fields, **changes):
  return weights.config_from_huggingface({**fields, **changes})


@pytest.mark.parametrize('name', real_models.MODELS)
def test_a_real_model_has_its_parameters_and_lies_on_a_mesh(name):
  """Abstractly: the largest has 282 GB."""
  model = models.Transformer(read(real_models.MODELS[name]))
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
  assert count == real_models.COUNTS[name]
  sizes = (1, 4, 4, 2) if model.config.experts else (1, 16, 1, 2)
  mesh = AbstractMesh(sizes, ('data', 'fsdp', 'expert', 'tensor'))
  place = sharding.param_shardings(mesh, shapes, model.logical_axes)
  shards = jax.tree.map(lambda s, x: s.shard_shape(x.shape), place, shapes)
  lists = jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, tuple))
  most = sum(map(math.prod, lists))
  # Some are not split: a single head of keys, an odd number of heads, and by
  # the axis of experts all that is not theirs.
  assert most < 1.3 * count / mesh.size


@pytest.mark.parametrize('name', real_models.MODELS)
def test_what_is_written_reads_back_as_the_same_model(name):
  config = read(real_models.MODELS[name])
  assert read(weights.config_to_huggingface(config)) == config
  named = real_models.MODELS[name]['architectures'][0]
  written = weights.config_to_huggingface(config, named)
  assert read(written) == config
  assert written['architectures'] == [weights.written_as(named)]


@pytest.mark.parametrize('name', golden.NAMES)
def test_what_transformers_5_writes_reads_back_too(name):
  config = weights.source(golden.folder(name)).config()
  assert read(weights.config_to_huggingface(config)) == config


@pytest.mark.parametrize(
  'changes',
  [
    {},
    dict(beta_slow=2.0),
    dict(beta_fast=20.0),
    dict(attention_factor=1.2),
    dict(truncate=False),
  ],
)
def test_of_yarn_only_what_is_unusual_is_written(changes):
  scaling = models.RopeScaling('yarn', 4.0, 64, **changes)
  config = models.ModelConfig(vocab_size=16, rope_scaling=scaling)
  written = weights.config_to_huggingface(config)
  assert written['rope_scaling'] == dict(
    rope_type='yarn', factor=4.0, original_max_position_embeddings=64, **changes
  )
  assert read(written) == config


def test_both_forms_of_rotary_positions_mean_the_same():
  scaling = LLAMA['rope_scaling']
  older = read(LLAMA)
  newer = {k: x for k, x in LLAMA.items() if not k.startswith('rope_')}
  newer['rope_parameters'] = dict(scaling, rope_theta=500000.0)
  assert read(newer) == older
  assert older.rope_scaling == models.RopeScaling('llama3', 8.0, 8192)
  assert older.rope_base == 500000.0
  of_layers = dict(GEMMA3)
  for name in ('rope_theta', 'rope_local_base_freq', 'rope_scaling'):
    del of_layers[name]
  of_layers['rope_parameters'] = dict(
    full_attention=dict(rope_theta=1e6, rope_type='default'),
    sliding_attention=dict(rope_theta=1e4, rope_type='default'),
  )
  assert read(of_layers) == read(GEMMA3)


def test_rotary_positions_of_older_releases():
  """`type` for `rope_type`; the trained context outside; none at all."""
  yarn = dict(type='yarn', factor=4.0)
  scaling = read(QWEN2, rope_scaling=yarn).rope_scaling
  assert scaling == models.RopeScaling('yarn', 4.0, 32768)
  yarn = dict(yarn, attention_factor=1.2, beta_fast=20, truncate=False)
  outside = dict(original_max_position_embeddings=8192)
  scaling = read(QWEN2, rope_scaling=yarn, **outside).rope_scaling
  assert scaling == models.RopeScaling(
    'yarn', 4.0, 8192, beta_fast=20.0, attention_factor=1.2, truncate=False
  )
  ratio = dict(type='yarn', factor=4.0, mscale=2.0, mscale_all_dim=0.5)
  scaling = read(QWEN2, rope_scaling=ratio).rope_scaling
  assert scaling.attention_factor == pytest.approx(
    (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
  )
  # transformers scales attention only where the context grows.
  shrunk = dict(ratio, factor=0.5)
  scaling = read(QWEN2, rope_scaling=shrunk).rope_scaling
  assert scaling.attention_factor is None
  plain = {k: x for k, x in LLAMA.items() if not k.startswith('rope_')}
  assert read(plain).rope_base == 10_000.0
  assert read(plain).rope_scaling is None


def test_what_a_scaling_leaves_open():
  yarn = dict(type='yarn', original_max_position_embeddings=8192)
  scaling = read(QWEN2, rope_scaling=yarn).rope_scaling
  assert scaling == models.RopeScaling('yarn', 4.0, 8192)  # 32768 / 8192
  llama3 = dict(rope_type='llama3', factor=8.0)
  scaling = read(LLAMA, rope_scaling=llama3).rope_scaling
  assert scaling == models.RopeScaling('llama3', 8.0, 131072)
  unknown = dict(max_position_embeddings=None)
  with pytest.raises(ValueError, match='needs original_tokens'):
    read(LLAMA, rope_scaling=llama3, **unknown)
  for given in (dict(type='linear'), yarn):
    with pytest.raises(ValueError, match='factor=0'):
      read(QWEN2, rope_scaling=given, **unknown)


def test_layers_with_a_window_have_a_base_of_their_own():
  config = read(GEMMA3, rope_local_base_freq=5000.0)
  assert {k.rope_base for k in config.pattern} == {5000.0, None}
  written = weights.config_to_huggingface(config)
  assert written['rope_local_base_freq'] == 5000.0
  assert read(written) == config
  of_full = dict(full_attention=dict(rope_type='linear', factor=8.0))
  config = read(GEMMA3, rope_scaling=of_full)
  assert config.rope_scaling == models.RopeScaling('linear', 8.0)
  assert 'rope_local_base_freq' not in weights.config_to_huggingface(
    read(QWEN2)
  )


def kinds(config):
  return [kind.window_tokens for kind in config.kinds]


def test_windows_by_every_field_that_may_say_so():
  assert kinds(read(QWEN2)) == [None] * 24
  some = dict(QWEN2, use_sliding_window=True, num_hidden_layers=4)
  assert kinds(read(some, max_window_layers=3)) == [None] * 3 + [32768]
  listed = ['sliding_attention', 'full_attention'] * 2
  alternating = read(some, max_window_layers=3, layer_types=listed)
  assert kinds(alternating) == [32768, None, 32768, None]
  assert len(alternating.pattern) == 2
  mistral = real_models.MODELS['Mistral-7B-v0.1']
  assert kinds(read(mistral)) == [4096] * 32
  assert kinds(read(mistral, sliding_window=None)) == [None] * 32
  gemma2 = real_models.MODELS['gemma-2-2b']
  assert kinds(read(gemma2)) == [4096, None] * 13
  assert kinds(read(GEMMA3)) == ([512] * 5 + [None]) * 4 + [512] * 2
  assert kinds(read(GEMMA3, sliding_window_pattern=2))[:2] == [512, None]


def test_fields_left_out_mean_what_transformers_takes_them_for():
  def few(fields):
    names = 'hidden_size', 'intermediate_size', 'num_hidden_layers'
    return {name: fields[name] for name in ('architectures', *names)}

  gemma2 = real_models.MODELS['gemma-2-2b']  # all else is what is left out
  assert read(few(gemma2)) == read(gemma2)
  mistral = real_models.MODELS['Mistral-7B-v0.1']  # likewise
  left_out = 'num_key_value_heads', 'sliding_window'
  some = {k: v for k, v in mistral.items() if k not in left_out}
  assert len(some) == len(mistral) - 2 and read(some) == read(mistral)
  gemma3 = read(few(GEMMA3))
  assert (gemma3.vocab_size, gemma3.rope_base) == (262_208, 1e6)
  assert (gemma3.attention_cap, gemma3.logit_cap) == (None, None)
  assert kinds(gemma3)[:6] == [4096] * 5 + [None]
  qwen2 = dict(QWEN2, use_sliding_window=True, num_hidden_layers=30)
  del qwen2['sliding_window'], qwen2['max_window_layers']
  assert kinds(read(qwen2)) == [None] * 28 + [4096] * 2


def test_gemma():
  config = read(real_models.MODELS['gemma-3-27b'])
  assert config.embedding_scale == math.sqrt(5376)
  assert config.attention_scale == 168**-0.5
  local, wide = config.pattern[0], config.pattern[5]
  assert (local.rope_base, local.rope_scaled) == (10_000.0, False)
  assert (wide.rope_base, wide.rope_scaled) == (None, True)
  assert config.rope_base == 1e6
  assert config.post_norms and config.qk_norm and config.tied_embeddings
  assert config.activation == 'gelu_tanh'
  config = read(real_models.MODELS['gemma-2-2b'])
  assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
  assert config.attention_scale is None  # the usual one


def test_layers_of_gemma_4():
  config = read(GEMMA4)
  local, wide = config.kinds[3:5]
  assert (local.window_tokens, wide.window_tokens) == (512, None)
  assert (local.rope_base, wide.rope_base) == (10_000.0, None)
  assert (local.head_dim, wide.head_dim) == (None, 512)
  assert (local.rotated, wide.rotated) == (1.0, 0.25)
  assert (local.proportional, wide.proportional) == (False, True)
  assert config.attention_scale == 1.0 and config.rope_base == 1e6
  first, second = config.stacks
  assert (first.first, first.number, len(first.pattern)) == (0, 15, 5)
  assert (second.first, second.number, len(second.pattern)) == (15, 20, 5)
  assert all(k.shares_kv and k.mlp_width == 12288 for k in second.pattern)
  assert config.sources == [*range(15), *([13] * 4 + [14]) * 4]
  narrow = read(GEMMA4, use_double_wide_mlp=False)
  assert all(kind.mlp_width is None for kind in narrow.kinds)
  assert len(read(GEMMA4, num_kv_shared_layers=0).pattern) == 5
  moe = read(GEMMA4_MOE)
  assert moe.experts == models.Experts(128, 8, 704, beside_mlp=True)
  wide = moe.pattern[5]
  assert wide.keys_as_values and wide.num_kv_heads == 2
  assert not any(kind.keys_as_values for kind in moe.pattern[:5])


def test_sizes_of_layers_in_both_forms_mean_the_same():
  for fields in GEMMA4, GEMMA4_MOE:
    newer = dict(fields)
    sizes = {'head_dim': newer.pop('global_head_dim')}
    if heads := newer.pop('num_global_key_value_heads', None):
      sizes['num_key_value_heads'] = heads
    newer['per_layer_config'] = {
      str(layer): sizes
      for layer, kind in enumerate(fields['layer_types'])
      if kind == 'full_attention'
    }
    assert read(newer) == read(fields)
  # transformers would take a null there for all rotary positions.
  written = weights.config_to_huggingface(read(GEMMA4))
  assert written['rope_parameters'] == GEMMA4['rope_parameters']
  assert not {'rope_scaling', 'rope_theta'} & written.keys()
  left_out = {k: x for k, x in GEMMA4.items() if k != 'rope_parameters'}
  assert read(left_out) == read(GEMMA4)
  del left_out['layer_types']  # then every sixth, and the last
  assert kinds(read(left_out))[4:6] == [512, None]
  assert kinds(read(left_out))[-1] is None


def test_which_layers_have_experts():
  moe = dict(real_models.MODELS['Qwen3-30B-A3B'], num_hidden_layers=4)
  assert read(moe).experts == models.Experts(128, 8, 768, normalized=True)
  sparse = lambda **changes: [k.experts for k in read(moe, **changes).kinds]
  assert sparse() == [True] * 4
  assert sparse(decoder_sparse_step=2) == [False, True] * 2
  assert sparse(decoder_sparse_step=3) == [False, False, True, False]
  assert sparse(mlp_only_layers=[0]) == [False] + [True] * 3
  assert sparse(num_experts=0) == [False] * 4
  newer = {k: x for k, x in moe.items() if k != 'num_experts'}
  assert read(newer, num_local_experts=64).experts.number == 64


def test_how_it_is_computed_is_ours():
  config = weights.config_from_huggingface(
    LLAMA, remat='layer', attention='xla'
  )
  assert config.remat == 'layer' and config.attention == 'xla'
  written = weights.config_to_huggingface(config)
  assert read(written) == dataclasses.replace(
    config, remat='none', attention='auto'
  )
  with pytest.raises(ValueError, match='width cannot be given'):
    weights.config_from_huggingface(LLAMA, width=3)


@pytest.mark.parametrize(
  'fields, changes, said',
  [
    (LLAMA, dict(architectures=['GPT2LMHeadModel']), "'GPT2LMHeadModel'"),
    (LLAMA, dict(architectures=['GPT2LMHeadModel']), 'Gemma3ForCausalLM'),
    (LLAMA, dict(architectures=[], model_type='bert'), 'architecture None'),
    (LLAMA, dict(attention_bias=True), 'attention_bias=True'),
    (LLAMA, dict(mlp_bias=True), 'mlp_bias=True'),
    (LLAMA, dict(hidden_act='relu'), "hidden_act='relu'"),
    (LLAMA, dict(partial_rotary_factor=0.5), 'partial_rotary_factor=0.5'),
    (LLAMA, dict(quantization_config={}), 'GGUF files alone'),
    (LLAMA, dict(hidden_size=None), 'has no hidden_size'),
    (LLAMA, dict(rope_scaling=dict(type='longrope')), 'llama3, yarn'),
    (
      LLAMA,
      dict(rope_parameters=dict(partial_rotary_factor=0.5), rope_scaling=None),
      'partial_rotary_factor=0.5',
    ),
    (LLAMA, dict(layer_types=['sliding_attention'] * 32), 'does not read'),
    (QWEN2, dict(layer_types=['full_attention'] * 3), '3 entries'),
    (QWEN2, dict(layer_types=['linear_attention'] * 24), 'linear_attention'),
    (QWEN2, dict(layer_types=['sliding_attention'] * 24), 'sliding window'),
    (GEMMA3, dict(hidden_activation='gelu'), "hidden_activation='gelu'"),
    (GEMMA3, dict(use_bidirectional_attention=True), 'looks ahead'),
    (GEMMA3, dict(attn_logit_softcapping=5.0), 'attn_logit_softcapping=5.0'),
    (
      real_models.MODELS['Qwen3-30B-A3B'],
      dict(shared_expert_intermediate_size=8),
      'every token passes',
    ),
    (SMOLLM3, dict(no_rope_layers=[1, 0]), 'no_rope_layers of 2'),
    (SMOLLM3, dict(no_rope_layers=[2] * 36), '1 for a layer that rotates'),
    (SMOLLM3, dict(attention_bias=True), 'attention_bias=True'),
    (PHI4, dict(rope_scaling=dict(type='longrope')), "rope_type='longrope'"),
    (
      PHI4,
      dict(rope_scaling=dict(type='yarn', factor=4.0, long_factor=[1.0])),
      "rope_type='yarn'",
    ),
    (PHI4, dict(partial_rotary_factor=0.3), 'rotary positions turn pairs'),
    (PHI4, dict(partial_rotary_factor=1.5), 'partial_rotary_factor=1.5'),
    (GLM4, dict(partial_rotary_factor=1.0), 'the share of 0.5 is rotated'),
    (GEMMA4, dict(use_bidirectional_attention='all'), 'looks ahead'),
    (GEMMA4, dict(attention_bias=True), 'attention_bias=True'),
    (GEMMA4, dict(num_kv_shared_layers=35), 'num_kv_shared_layers=35'),
    (GEMMA4, dict(num_kv_shared_layers=32), 'which no layer before it'),
    (GEMMA4, dict(vocab_size_per_layer_input=7), 'per_layer_input=7'),
    (GEMMA4, dict(hidden_size_per_layer_input=-1), 'per_layer_input=-1'),
    (GEMMA4, dict(layer_types=['sliding_attention'] * 35), 'whose last is not'),
    (GEMMA4, dict(per_layer_config={'4': {'mlp': 3}}), "per_layer_config={'4'"),
    (GEMMA4, dict(per_layer_config={'4': {'head_dim': 0}}), 'head_dim=0'),
    (GEMMA4, dict(per_layer_config=[3]), 'per_layer_config=[3]'),
    (GEMMA4, dict(global_head_dim=0), 'global_head_dim=0'),
    (GEMMA4_MOE, dict(top_k_experts=None), 'top_k_experts=None'),
    (GEMMA4_MOE, dict(num_experts=None), 'num_experts=None'),
    (
      LLAMA,
      dict(rope_scaling=dict(rope_type='proportional')),
      "rope_type='proportional'",
    ),
    (
      GEMMA4,
      dict(
        rope_parameters=dict(
          full_attention=dict(rope_type='default', partial_rotary_factor=0.25)
        )
      ),
      'partial_rotary_factor=0.25',
    ),
    (LFM2, dict(conv_bias=True), 'conv_bias=True'),
    (LFM2_MOE, dict(use_expert_bias=False), 'use_expert_bias=False'),
    (LFM2_MOE, dict(num_dense_layers=-1), 'num_dense_layers=-1'),
    (LFM2, dict(conv_L_cache=1), 'conv_L_cache=1, but a whole number from 2'),
    (LFM2, dict(full_attn_idxs=[16]), 'full_attn_idxs with 16'),
    (LFM2, dict(full_attn_idxs=2), 'full_attn_idxs=2, but a list of numbers'),
    (LFM2, dict(full_attn_idxs=[]), 'all layers are of convolution'),
    (LFM2, dict(layer_types=['sliding_attention'] * 16), 'and conv for each'),
    (LFM2, dict(block_multiple_of=0), 'block_multiple_of=0'),
    (LFM2, dict(block_ffn_dim_multiplier=None), 'multiplier=None'),
    (QWEN3_5, dict(attention_bias=True), 'attention_bias=True'),
    (QWEN3_5, dict(attn_output_gate=False), 'attn_output_gate=False'),
    (QWEN3_5, dict(hidden_act='gelu_new'), "hidden_act='gelu_new'"),
    (QWEN3_5, dict(full_attention_interval=0), 'full_attention_interval=0'),
    (QWEN3_5, dict(full_attention_interval=64), 'all layers are of delta'),
    (QWEN3_5, dict(linear_conv_kernel_dim=1), 'linear_conv_kernel_dim=1'),
    (QWEN3_5, dict(linear_num_value_heads=24), 'key_heads=16 does not divide'),
    (QWEN3_5, dict(linear_num_value_heads=0), 'linear_num_value_heads=0'),
    (QWEN3_5, dict(linear_num_key_heads=None), 'linear_num_key_heads=None'),
    (QWEN3_5, dict(linear_key_head_dim=1.5), 'linear_key_head_dim=1.5'),
    (QWEN3_5, dict(linear_value_head_dim='8'), "linear_value_head_dim='8'"),
    (QWEN3_5, dict(layer_types=['conv'] * 32), 'and linear_attention for each'),
    (
      QWEN3_5,
      dict(rope_parameters=dict(rope_type='yarn', factor=4.0)),
      'YaRN scales whole queries',
    ),
    (LFM2, dict(block_auto_adjust_ff_dim=None), 'adjust_ff_dim=None'),
    (
      real_models.MODELS['Granite-3.3-8B'],
      dict(logits_scaling=0),
      'logits_scaling=0',
    ),
    (
      real_models.MODELS['Ministral-3-8B'],
      dict(text_config=dict(model_type='mistral')),
      "model_type='mistral', which is not built here inside another",
    ),
  ],
)
def test_what_cannot_be_computed_is_refused(fields, changes, said):
  with pytest.raises(ValueError) as refused:
    read(fields, **changes)
  assert said in str(refused.value)
  assert str(refused.value).endswith('.')


def test_which_layers_rotate_and_how_much_of_a_head():
  shares = lambda fields, **changes: [
    kind.rotated for kind in read(fields, num_hidden_layers=4, **changes).kinds
  ]
  unsaid = {k: x for k, x in SMOLLM3.items() if not k.startswith('no_rope')}
  assert shares(unsaid) == [1, 1, 1, 0]
  assert shares(unsaid, no_rope_layer_interval=2) == [1, 0, 1, 0]
  assert shares(SMOLLM3, no_rope_layers=[0, 1, 1, 0]) == [0, 1, 1, 0]
  local = read(
    unsaid, num_hidden_layers=4, use_sliding_window=True, sliding_window=8
  )
  assert [kind.window_tokens for kind in local.kinds] == [None] * 3 + [8]
  assert shares(PHI4) == [1] * 4
  assert shares(PHI4, partial_rotary_factor=0.75) == [0.75] * 4
  newer = dict(rope_type='default', partial_rotary_factor=0.75)
  assert shares(PHI4, rope_parameters=newer, rope_scaling=None) == [0.75] * 4
  assert shares(GLM4) == [0.5] * 4
  assert read(GLM4).qkv_bias and not read(GLM4, attention_bias=False).qkv_bias


def test_layers_with_a_state_and_the_width_of_the_mlp_of_lfm2():
  config = read(LFM2)
  conv = models.LayerKind(mixer='convolution')
  attention = models.LayerKind()
  assert [i for i in range(16) if config.kinds[i] == attention] == (
    LFM2['full_attn_idxs']
  )
  assert {*config.kinds} == {conv, attention}
  assert (config.taps, config.mlp_width, config.qk_norm) == (3, 8192, True)
  listed = [
    'full_attention' if k == attention else 'conv' for k in config.kinds
  ]
  assert read({**LFM2, 'full_attn_idxs': None}, layer_types=listed) == config
  # With none of either, all layers have attention.
  plain = read(LFM2, full_attn_idxs=None)
  assert plain.kinds == (attention,) * 16 and plain.taps == 0
  width = lambda **changes: read(LFM2, **changes).mlp_width
  assert width(block_ff_dim=6656) == 4608
  assert width(block_ffn_dim_multiplier=1.1) == 9216
  assert width(block_multiple_of=5) == 8195
  assert width(block_auto_adjust_ff_dim=False) == 12288
  newer = {k: x for k, x in LFM2.items() if k not in ('block_ff_dim',)}
  assert read(newer, intermediate_size=12288) == config
  newer = {k: x for k, x in LFM2.items() if k != 'tie_embedding'}
  assert read(newer) == config
  assert not read(newer, tie_word_embeddings=False).tied_embeddings


def test_experts_beside_layers_with_a_state():
  config = read(LFM2_MOE)
  assert config.experts == models.Experts(
    32, 4, 1792, scores='sigmoid', corrected=True
  )
  assert [kind.experts for kind in config.kinds] == [False] * 2 + [True] * 14
  sparse = read(LFM2_MOE, num_dense_layers=0)
  assert all(kind.experts for kind in sparse.kinds)
  assert config.mlp_width == 7168 and config.tied_embeddings
  shared = dict(shared_width=512, shared_gate=True)
  inner = real_models.MODELS['Qwen3.5-35B-A3B']
  assert read(inner).experts == models.Experts(256, 8, 512, **shared)
  after = real_models.MODELS['Qwen3-Next-80B-A3B']
  assert read(after).experts == models.Experts(512, 10, 512, **shared)
  assert not read(after, norm_topk_prob=False).experts.normalized
  # Which the one reads, and the other does not.
  some = [kind.experts for kind in read(after, mlp_only_layers=[2]).kinds]
  assert some == [True] * 2 + [False] + [True] * 45
  alone = dict(inner['text_config'], architectures=['Qwen3_5MoeForCausalLM'])
  ignored = read(alone, mlp_only_layers=[2], norm_topk_prob=False)
  assert ignored == read(alone) == read(inner)
  assert {kind.rotated for kind in read(after).pattern} == {1.0, 0.25}


def test_layers_with_the_gated_delta_rule_of_qwen():
  config = read(QWEN3_5)
  delta = models.LayerKind(mixer='delta')
  attention = models.LayerKind(rotated=0.25)
  assert config.kinds == (delta, delta, delta, attention) * 8
  assert config.delta == models.DeltaHeads(16, 32, 128, 128)
  assert (config.taps, config.head_dim, config.rope_base) == (4, 256, 1e7)
  assert config.head_gates and config.qk_norm and not config.tied_embeddings
  few = read(QWEN3_5, full_attention_interval=2, num_hidden_layers=3)
  assert few.kinds == (delta, attention, delta)
  listed = ['full_attention', 'linear_attention', 'linear_attention']
  one = read(QWEN3_5, layer_types=listed, num_hidden_layers=3)
  assert one.kinds == (attention, delta, delta)
  # A quarter of each head is rotated where nothing is said.
  plain = dict(rope_type='default', rope_theta=5e5)
  assert read(QWEN3_5, rope_parameters=plain).pattern[3].rotated == 0.25
  half = dict(plain, partial_rotary_factor=0.5)
  assert read(QWEN3_5, rope_parameters=half).pattern[3].rotated == 0.5
  more = ('linear_num_value_heads', 64), ('linear_value_head_dim', 64)
  for name, value in (*more, ('linear_key_head_dim', 32)):
    assert value in dataclasses.astuple(read(QWEN3_5, **{name: value}).delta)
  outside = real_models.MODELS['Qwen3.5-9B']
  assert read(outside) == config


def test_layers_with_windows_of_olmo_have_no_scaling():
  config = read(real_models.MODELS['Olmo-3-7B'])
  assert [kind.rope_scaled for kind in config.pattern] == [False] * 3 + [True]
  assert [kind.window_tokens for kind in config.pattern] == [4096] * 3 + [None]
  newer = weights.config_to_huggingface(config)
  assert newer['rope_parameters']['sliding_attention']['rope_type'] == 'default'
  del newer['rope_theta'], newer['rope_scaling']
  assert read(newer) == config


def test_inside_another_model_the_outer_file_says_what_is_tied():
  outer = real_models.MODELS['Qwen3-VL-4B']
  inner = dict(outer['text_config'], tie_word_embeddings=False)
  assert read(outer, text_config=inner).tied_embeddings
  unsaid = {k: x for k, x in outer.items() if k != 'tie_word_embeddings'}
  assert not read(unsaid).tied_embeddings
  inner['tie_word_embeddings'] = True
  assert read(unsaid, text_config=inner).tied_embeddings


def test_fields_of_other_families_say_nothing():
  strange = dict(
    final_logit_softcapping=3.0,
    query_pre_attn_scalar=7,
    hidden_activation='relu',
    num_experts=4,
    sliding_window=5,
  )
  assert read(LLAMA, **strange) == read(LLAMA)


def test_two_scalings_in_one_model_are_refused():
  fields = copy.deepcopy(GEMMA3)
  del fields['rope_scaling']
  fields['rope_parameters'] = dict(
    full_attention=dict(rope_type='linear', factor=2.0),
    sliding_attention=dict(rope_type='linear', factor=4.0),
  )
  with pytest.raises(ValueError, match='one model has one scaling'):
    read(fields)


@pytest.mark.parametrize(
  'changes, said',
  [
    (dict(qkv_bias=True, qk_norm=True), 'qk_norm=True'),
    (dict(embedding_scale=2.0, qk_norm=True), 'embedding_scale=2.0'),
    (dict(logit_cap=5.0), 'logit_cap=5.0'),
    (
      dict(pattern=(models.LayerKind(3), models.LayerKind(4))),
      'window_tokens=4',
    ),
  ],
)
def test_what_no_config_json_can_say_is_refused(changes, said):
  config = models.ModelConfig(vocab_size=16, **changes)
  with pytest.raises(ValueError) as refused:
    weights.config_to_huggingface(config)
  assert said in str(refused.value)


def test_the_given_architecture_is_written():
  config = models.ModelConfig(vocab_size=16)
  written = weights.config_to_huggingface(config, 'MistralForCausalLM')
  assert written['architectures'] == ['MistralForCausalLM']
  assert written['sliding_window'] is None
  with pytest.raises(ValueError, match='Qwen2ForCausalLM cannot say'):
    weights.config_to_huggingface(config, 'Qwen2ForCausalLM')
