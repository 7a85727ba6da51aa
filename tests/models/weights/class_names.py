"""The names that classes of transformers have, of tiny models of every family.

  python -m tests.models.weights.class_names

writes `class_names.json`, and needs torch and transformers (5.24 was used). For
each architecture it has:

- `config`: its `config.json`;
- `modules`: the linear layers of what `AutoModelForCausalLM` makes of a folder
  with it, by name: what `peft` can adapt, with the shapes of their weights;
- `files`: the tensors that `save_pretrained` writes, as files have them.
"""

import json
import pathlib
from typing import Any

FILE = pathlib.Path(__file__).with_suffix('.json')

_SMALL = dict(
  vocab_size=20,
  hidden_size=12,
  intermediate_size=10,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  head_dim=8,
  max_position_embeddings=32,
  pad_token_id=0,
  bos_token_id=1,
  eos_token_id=2,
)
_GEMMA = dict(_SMALL, sliding_window=4, query_pre_attn_scalar=8)
_GEMMA4 = dict(
  _SMALL,
  num_hidden_layers=4,
  layer_types=['sliding_attention', 'full_attention'] * 2,
  sliding_window=4,
  global_head_dim=16,
  num_kv_shared_layers=2,
  use_double_wide_mlp=True,
  hidden_size_per_layer_input=4,
  vocab_size_per_layer_input=20,
)
_DELTA = dict(
  _SMALL,
  layer_types=['linear_attention', 'full_attention'],
  linear_num_key_heads=1,
  linear_num_value_heads=2,
  linear_key_head_dim=4,
  linear_value_head_dim=6,
  rope_parameters=dict(
    rope_type='default',
    rope_theta=500.0,
    partial_rotary_factor=0.5,
    mrope_section=[1, 1, 0],
  ),
)
_EXPERTS = dict(
  num_experts=3,
  num_experts_per_tok=2,
  moe_intermediate_size=8,
  shared_expert_intermediate_size=10,
)
_QWEN_VISION = dict(
  depth=1,
  hidden_size=8,
  intermediate_size=8,
  num_heads=1,
  out_hidden_size=12,
  patch_size=2,
  num_position_embeddings=4,
)
_VISION = dict(
  hidden_size=8,
  intermediate_size=8,
  num_hidden_layers=1,
  num_attention_heads=1,
  image_size=4,
  patch_size=2,
)
CASES: dict[str, dict[str, Any]] = {
  'LlamaForCausalLM': dict(_SMALL, model_type='llama'),
  'MistralForCausalLM': dict(_SMALL, model_type='mistral'),
  'Qwen2ForCausalLM': dict(_SMALL, model_type='qwen2', head_dim=6),
  'Qwen3ForCausalLM': dict(_SMALL, model_type='qwen3'),
  # A dense layer, whose MLP can be adapted, and one of experts.
  'Qwen3MoeForCausalLM': dict(
    _SMALL,
    model_type='qwen3_moe',
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    mlp_only_layers=[0],
  ),
  'Gemma2ForCausalLM': dict(_GEMMA, model_type='gemma2'),
  'Gemma3ForCausalLM': dict(_GEMMA, model_type='gemma3_text'),
  'Gemma3ForConditionalGeneration': dict(
    model_type='gemma3',
    text_config=dict(_GEMMA, model_type='gemma3_text'),
    vision_config=_VISION,
    mm_tokens_per_image=1,
    tie_word_embeddings=True,
  ),
  'Qwen3VLForConditionalGeneration': dict(
    model_type='qwen3_vl',
    text_config=dict(
      _SMALL,
      model_type='qwen3_vl_text',
      rope_parameters=dict(
        rope_type='default', rope_theta=500.0, mrope_section=[2, 1, 1]
      ),
    ),
    vision_config=dict(_QWEN_VISION, deepstack_visual_indexes=[0]),
  ),
  'SmolLM3ForCausalLM': dict(_SMALL, model_type='smollm3', num_hidden_layers=4),
  'Olmo3ForCausalLM': dict(
    _SMALL, model_type='olmo3', num_hidden_layers=4, sliding_window=4
  ),
  'Ministral3ForCausalLM': dict(_SMALL, model_type='ministral3'),
  'Mistral3ForConditionalGeneration': dict(
    model_type='mistral3',
    text_config=dict(_SMALL, model_type='ministral3'),
    vision_config=dict(_VISION, model_type='pixtral', head_dim=8),
    tie_word_embeddings=False,
  ),
  'Phi3ForCausalLM': dict(_SMALL, model_type='phi3'),
  'GraniteForCausalLM': dict(
    _SMALL,
    model_type='granite',
    embedding_multiplier=12.0,
    attention_multiplier=0.25,
    residual_multiplier=0.5,
    logits_scaling=4.0,
  ),
  'Glm4ForCausalLM': dict(_SMALL, model_type='glm4'),
  'Glm4MoeForCausalLM': dict(
    _SMALL,
    model_type='glm4_moe',
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    num_nextn_predict_layers=0,
  ),
  'Qwen2MoeForCausalLM': dict(
    _SMALL,
    model_type='qwen2_moe',
    head_dim=6,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=10,
    mlp_only_layers=[0],
  ),
  'GptOssForCausalLM': dict(
    _SMALL,
    model_type='gpt_oss',
    hidden_size=16,  # torch multiplies rows of whole 16 bytes there
    intermediate_size=16,
    num_local_experts=3,
    num_experts_per_tok=2,
  ),
  'Lfm2ForCausalLM': dict(
    _SMALL,
    model_type='lfm2',
    layer_types=['conv', 'full_attention'],
    block_auto_adjust_ff_dim=False,
  ),
  'Qwen3_5ForCausalLM': dict(_DELTA, model_type='qwen3_5_text'),
  'Qwen3_5ForConditionalGeneration': dict(
    model_type='qwen3_5',
    text_config=dict(_DELTA, model_type='qwen3_5_text'),
    vision_config=_QWEN_VISION,
  ),
  'Lfm2MoeForCausalLM': dict(
    _SMALL,
    model_type='lfm2_moe',
    layer_types=['conv', 'full_attention'],
    num_dense_layers=1,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
  ),
  'Qwen3_5MoeForCausalLM': dict(
    _DELTA, **_EXPERTS, model_type='qwen3_5_moe_text'
  ),
  'Qwen3_5MoeForConditionalGeneration': dict(
    model_type='qwen3_5_moe',
    text_config=dict(_DELTA, **_EXPERTS, model_type='qwen3_5_moe_text'),
    vision_config=_QWEN_VISION,
  ),
  'Qwen3NextForCausalLM': dict(
    _DELTA, **_EXPERTS, model_type='qwen3_next', mlp_only_layers=[1]
  ),
  # One with experts beside its MLPs, and one with inputs of layers.
  'Gemma4ForCausalLM': dict(
    _GEMMA4,
    model_type='gemma4_text',
    num_hidden_layers=2,
    layer_types=['sliding_attention', 'full_attention'],
    num_kv_shared_layers=0,
    hidden_size_per_layer_input=0,
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=3,
    top_k_experts=2,
    moe_intermediate_size=8,
  ),
  'Gemma4ForConditionalGeneration': dict(
    model_type='gemma4',
    text_config=dict(_GEMMA4, model_type='gemma4_text'),
    vision_config=dict(
      hidden_size=8,
      intermediate_size=8,
      num_hidden_layers=1,
      num_attention_heads=1,
      num_key_value_heads=1,
      head_dim=8,
      patch_size=2,
      position_embedding_size=4,
    ),
    audio_config=None,
    tie_word_embeddings=True,
  ),
  'Gemma4UnifiedForConditionalGeneration': dict(
    model_type='gemma4_unified',
    text_config=dict(
      {
        name: value
        for name, value in _GEMMA4.items()
        if 'per_layer' not in name and 'double' not in name
      },
      model_type='gemma4_unified_text',
      num_kv_shared_layers=0,
      attention_k_eq_v=True,
    ),
    vision_config=dict(
      patch_size=2,
      pooling_kernel_size=1,
      mm_embed_dim=12,
      mm_posemb_size=4,
      output_proj_dims=12,
    ),
    audio_config=dict(audio_embed_dim=8),
    tie_word_embeddings=True,
  ),
}


def their_model(architecture: str) -> Any:
  """A random model of transformers."""
  import transformers

  fields = dict(CASES[architecture])
  config = transformers.AutoConfig.for_model(**fields)
  return loader(config).from_config(config)


def loader(config: Any) -> Any:
  """What loads a model with this config: some see images too."""
  import transformers

  if hasattr(config, 'vision_config'):
    return transformers.AutoModelForImageTextToText
  return transformers.AutoModelForCausalLM


def names(architecture: str, folder: pathlib.Path) -> dict[str, Any]:
  """What the file has for an architecture.

  Args:
    architecture: One of `CASES`.
    folder: An empty one.
  """
  import safetensors
  import torch

  model = their_model(architecture)
  model.save_pretrained(folder)
  with safetensors.safe_open(folder / 'model.safetensors', 'pt') as file:
    stored = sorted(file.keys())
  config = json.loads((folder / 'config.json').read_text())
  assert config['architectures'] == [architecture]
  return {
    'config': config,
    'modules': {
      name: list(module.weight.shape)
      for name, module in model.named_modules()
      if isinstance(module, torch.nn.Linear)
    },
    'files': stored,
  }


def main() -> None:
  """Writes the file."""
  import tempfile

  found = {}
  for architecture in CASES:
    with tempfile.TemporaryDirectory() as folder:
      found[architecture] = names(architecture, pathlib.Path(folder))
  lines = ',\n'.join(
    f'{json.dumps(name)}: {json.dumps(one)}' for name, one in found.items()
  )
  FILE.write_text(f'{{\n{lines}\n}}\n')


if __name__ == '__main__':
  main()
