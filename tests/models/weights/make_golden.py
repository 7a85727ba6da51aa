"""Writes `golden/`: what transformers computes with a model of each family.

Run it with torch 2.13 and transformers 5.23 installed; the suite needs neither:

  python -m tests.models.weights.make_golden [NAME ...]

writes those that are named, or all of them. Each folder is what
`save_pretrained` writes, and `expected.npz`: the tokens of two rows, the logits
at each of them with padding behind the shorter row and with padding before it,
and the likeliest tokens to follow each row.
"""

import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers

from tests.models.weights import class_names

FOLDER = pathlib.Path(__file__).parent / 'golden'
LENGTHS = (12, 7)
NEW_TOKENS = 8

# Odd on purpose: heads of another size than width / heads, fewer key-value
# heads, a window shorter than the rows, layers that no pattern divides.
SMALL = dict(
  vocab_size=70,
  hidden_size=24,
  intermediate_size=40,
  num_hidden_layers=3,
  num_attention_heads=4,
  num_key_value_heads=2,
  head_dim=8,
  max_position_embeddings=64,
  pad_token_id=0,
  bos_token_id=1,
  eos_token_id=2,
)
GEMMA = dict(
  SMALL,
  sliding_window=4,
  query_pre_attn_scalar=20,
  head_dim=10,
)
# Smaller still: layers with a state have many matrices.
STATES = dict(SMALL, vocab_size=40, hidden_size=16, intermediate_size=20)
DELTA = dict(
  STATES,
  num_hidden_layers=4,
  layer_types=['linear_attention', 'full_attention'] + ['linear_attention'] * 2,
  linear_num_key_heads=2,
  linear_num_value_heads=4,
  linear_key_head_dim=8,
  linear_value_head_dim=4,
  # Outputs of the first tokens may be near 0, and are then all rounding.
  rms_norm_eps=0.1,
)
EXPERTS = dict(
  num_experts=5,
  num_experts_per_tok=2,
  moe_intermediate_size=8,
  shared_expert_intermediate_size=8,
)
VISION = dict(
  depth=1,
  hidden_size=8,
  intermediate_size=8,
  num_heads=1,
  patch_size=2,
  num_position_embeddings=4,
)

GEMMA4 = dict(
  STATES,
  num_attention_heads=2,
  num_key_value_heads=2,
  global_head_dim=16,
  sliding_window=4,
  final_logit_softcapping=5.0,
  rms_norm_eps=0.01,
  rope_parameters=dict(
    full_attention=dict(
      rope_type='proportional', rope_theta=50.0, partial_rotary_factor=0.5
    ),
    sliding_attention=dict(rope_type='default', rope_theta=20.0),
  ),
)

CASES = {
  'llama': transformers.LlamaConfig(
    **SMALL,
    rope_parameters=dict(
      rope_type='llama3',
      rope_theta=100.0,
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position_embeddings=16,
    ),
  ),
  'llama_linear': transformers.LlamaConfig(
    **SMALL | dict(num_attention_heads=3, num_key_value_heads=3),
    tie_word_embeddings=True,
    rope_parameters=dict(rope_type='linear', rope_theta=500.0, factor=4.0),
  ),
  'mistral': transformers.MistralConfig(**SMALL, sliding_window=5),
  'qwen2': transformers.Qwen2Config(
    **SMALL | dict(head_dim=6),
    tie_word_embeddings=True,
    rope_parameters=dict(
      rope_type='yarn',
      rope_theta=50.0,
      factor=4.0,
      original_max_position_embeddings=16,
    ),
  ),
  'qwen2_window': transformers.Qwen2Config(
    **SMALL | dict(num_attention_heads=6, head_dim=4),
    use_sliding_window=True,
    sliding_window=4,
    max_window_layers=1,
  ),
  'qwen3': transformers.Qwen3Config(
    **SMALL | dict(head_dim=12), tie_word_embeddings=True
  ),
  'qwen3_moe': transformers.Qwen3MoeConfig(
    **SMALL | dict(num_hidden_layers=4),
    decoder_sparse_step=2,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    norm_topk_prob=True,
  ),
  'gemma2': transformers.Gemma2Config(
    **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
  ),
  'gemma3': transformers.Gemma3TextConfig(
    **GEMMA | dict(num_hidden_layers=7, intermediate_size=16),
    sliding_window_pattern=3,
    rope_parameters=dict(
      full_attention=dict(rope_type='linear', rope_theta=200.0, factor=2.0),
      sliding_attention=dict(rope_type='default', rope_theta=20.0),
    ),
  ),
  'smollm3': transformers.SmolLM3Config(
    **SMALL | dict(num_hidden_layers=5, intermediate_size=16),
    tie_word_embeddings=True,
    no_rope_layers=[1, 0, 1, 1, 0],
    use_sliding_window=True,
    sliding_window=5,
    rope_parameters=dict(rope_type='default', rope_theta=100.0),
  ),
  'olmo3': transformers.Olmo3Config(
    **SMALL | dict(num_hidden_layers=5, intermediate_size=16),
    sliding_window=4,
    rope_parameters=dict(
      full_attention=dict(
        rope_type='yarn',
        rope_theta=50.0,
        factor=4.0,
        original_max_position_embeddings=16,
      ),
      sliding_attention=dict(rope_type='default', rope_theta=50.0),
    ),
  ),
  'ministral3': transformers.Ministral3Config(
    **SMALL,
    tie_word_embeddings=True,
    rope_parameters=dict(
      rope_type='yarn',
      rope_theta=50.0,
      factor=8.0,
      original_max_position_embeddings=4,
      beta_fast=1.0,
      beta_slow=0.1,
      mscale=1.0,
      mscale_all_dim=1.0,
      llama_4_scaling_beta=0.5,
    ),
  ),
  'phi3': transformers.Phi3Config(
    **SMALL,
    sliding_window=5,
    rope_parameters=dict(
      rope_type='default', rope_theta=100.0, partial_rotary_factor=0.5
    ),
  ),
  'granite': transformers.GraniteConfig(
    **SMALL,
    tie_word_embeddings=True,
    embedding_multiplier=12.0,
    attention_multiplier=0.2,
    residual_multiplier=0.4,
    logits_scaling=3.0,
  ),
  'glm4': transformers.Glm4Config(**SMALL, rms_norm_eps=0.01),
  'glm4_moe': transformers.Glm4MoeConfig(
    **SMALL | dict(num_hidden_layers=4),
    attention_bias=True,
    use_qk_norm=True,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    n_shared_experts=2,
    n_group=3,
    topk_group=2,
    routed_scaling_factor=1.5,
    num_nextn_predict_layers=0,
  ),
  'qwen2_moe': transformers.Qwen2MoeConfig(
    **SMALL | dict(head_dim=6),
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=20,
    mlp_only_layers=[1],
  ),
  'gpt_oss': transformers.GptOssConfig(
    **SMALL | dict(intermediate_size=12),
    sliding_window=4,
    num_local_experts=6,
    num_experts_per_tok=2,
    rope_parameters=dict(
      rope_type='yarn',
      rope_theta=50.0,
      factor=4.0,
      beta_fast=4.0,
      original_max_position_embeddings=16,
      truncate=False,
    ),
  ),
  'lfm2': transformers.Lfm2Config(
    **STATES | dict(num_hidden_layers=5, head_dim=6),
    conv_L_cache=4,
    layer_types=['conv', 'conv', 'full_attention', 'conv', 'conv'],
    block_multiple_of=4,
    rope_parameters=dict(rope_type='default', rope_theta=100.0),
  ),
  'qwen3_5': transformers.Qwen3_5Config(
    text_config=dict(
      DELTA,
      rope_parameters=dict(
        rope_type='default',
        rope_theta=100.0,
        partial_rotary_factor=0.5,
        mrope_section=[1, 1, 0],
      ),
    ),
    vision_config=dict(VISION, out_hidden_size=16),
    tie_word_embeddings=True,
  ),
  'lfm2_moe': transformers.Lfm2MoeConfig(
    **STATES | dict(head_dim=6),
    conv_L_cache=3,
    layer_types=['conv', 'full_attention', 'conv'],
    rope_parameters=dict(rope_type='default', rope_theta=100.0),
    num_dense_layers=1,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    routed_scaling_factor=1.5,
  ),
  'qwen3_5_moe': transformers.Qwen3_5MoeTextConfig(
    **DELTA | dict(num_hidden_layers=3, layer_types=DELTA['layer_types'][:3]),
    **EXPERTS,
    rope_parameters=dict(
      rope_type='default', rope_theta=100.0, partial_rotary_factor=0.5
    ),
  ),
  'qwen3_next': transformers.Qwen3NextConfig(
    **DELTA
    | dict(
      num_hidden_layers=3,
      layer_types=DELTA['layer_types'][:3],
      linear_key_head_dim=6,
    ),
    **EXPERTS,
    mlp_only_layers=[1],
    rope_parameters=dict(
      rope_type='default', rope_theta=100.0, partial_rotary_factor=0.25
    ),
  ),
  # Two stacks of layers, each with a last repetition that is cut short.
  'gemma4': transformers.Gemma4TextConfig(
    **GEMMA4 | dict(num_hidden_layers=8, intermediate_size=14),
    layer_types=['sliding_attention', 'full_attention', 'sliding_attention']
    + ['full_attention', 'sliding_attention'] * 2
    + ['full_attention'],
    num_kv_shared_layers=5,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=40,
  ),
  'gemma4_moe': transformers.Gemma4TextConfig(
    **GEMMA4,
    layer_types=['sliding_attention', 'full_attention', 'full_attention'],
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=40,
    enable_moe_block=True,
    num_experts=5,
    top_k_experts=2,
    moe_intermediate_size=8,
  ),
  'qwen3_vl': transformers.Qwen3VLConfig(
    text_config=dict(
      SMALL,
      head_dim=16,
      rope_parameters=dict(
        rope_type='default',
        rope_theta=300.0,
        mrope_section=[4, 2, 2],
        mrope_interleaved=True,
      ),
    ),
    vision_config=dict(
      VISION, out_hidden_size=24, deepstack_visual_indexes=[0]
    ),
  ),
}
# Of the choice of experts: they are buffers.
CORRECTIONS = 'e_score_correction_bias', 'expert_bias'
# Stored as bfloat16, in several files.
HALVED = ('llama', 'qwen3_moe')


def randomize(model: torch.nn.Module) -> None:
  """Weights that make every part of a model count in its logits."""
  for name, weight in model.named_parameters():
    if name.endswith(('bias', 'sinks')):
      torch.nn.init.normal_(weight, std=0.5)
    elif 'norm' in name:  # around what the fresh norm has, 1 or 0
      weight.data += 0.3 * torch.randn_like(weight)
    elif 'embed' in name:
      torch.nn.init.normal_(weight, std=0.5)
    else:
      torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
  for name, buffer in model.named_buffers():
    if name.endswith(CORRECTIONS):
      torch.nn.init.normal_(buffer, std=0.2)
    if name.endswith('layer_scalar'):
      buffer += torch.randint(-4, 5, (1,)) / 16


def round_weights(model: torch.nn.Module) -> None:
  """To few numbers, about 3 bits of each, so that files can be compressed.

  All are small multiples of a power of two, and exact in bfloat16 too.
  """
  buffers = {k: x for k, x in model.named_buffers() if k.endswith(CORRECTIONS)}
  for weight in [*model.parameters(), *buffers.values()]:
    if weight.numel() > 1 and weight.std() > 0:
      step = 2.0 ** torch.round(torch.log2(weight.std() / 2))
      weight.data = torch.round(weight.data / step) * step


def logits(model, tokens: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
  """f32[N,V], at the N tokens that are no padding, row by row."""
  position = dict(position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
  if hasattr(model.config, 'vision_config'):  # it finds them by itself
    position = {}
  with torch.no_grad():
    out = model(input_ids=tokens, attention_mask=mask, **position)
  return out.logits[mask.bool()].float().numpy()


def likeliest(model, row: np.ndarray, number: int):
  """The tokens that follow a row at temperature 0, and their logp, nats."""
  tokens, logp = torch.tensor(row)[None], []
  for _ in range(number):
    with torch.no_grad():
      last = model(input_ids=tokens).logits[0, -1].float().log_softmax(-1)
    logp.append(float(last.max()))
    tokens = torch.cat([tokens, last.argmax().reshape(1, 1)], dim=1)
  return tokens[0, len(row) :].numpy(), np.array(logp, np.float32)


def write(name: str, config) -> None:
  """One folder."""
  torch.manual_seed(len(name))
  folder = FOLDER / name
  loader = class_names.loader(config)
  model = loader.from_config(config, attn_implementation='eager')
  model.eval()
  with torch.no_grad():
    randomize(model)
    round_weights(model)
  if name in HALVED:
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size='16KB')
  else:
    model.save_pretrained(folder)
  # Read again: `to` has rounded the rotary frequencies too.
  model = loader.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  (folder / 'generation_config.json').unlink(missing_ok=True)
  rng = np.random.default_rng(0)
  vocab = config.get_text_config().vocab_size
  rows = [rng.integers(3, vocab, size) for size in LENGTHS]
  width = max(LENGTHS)
  expected = {}
  for side in ('right', 'left'):
    tokens, mask = np.zeros((2, len(rows), width), np.int64)
    for i, row in enumerate(rows):
      span = slice(len(row)) if side == 'right' else slice(-len(row), None)
      tokens[i, span], mask[i, span] = row, 1
    expected[side] = logits(model, torch.tensor(tokens), torch.tensor(mask))
  greedy, logp = zip(*(likeliest(model, row, NEW_TOKENS) for row in rows))
  expected.update(greedy=np.stack(greedy), greedy_logp=np.stack(logp))
  np.savez(folder / 'expected.npz', tokens=np.concatenate(rows), **expected)
  spread = np.abs(expected['right'] - expected['left']).max()
  print(name, 'logits', expected['right'].std(), 'sides differ by', spread)


if __name__ == '__main__':
  for case in sys.argv[1:] or CASES:
    shutil.rmtree(FOLDER / case, ignore_errors=True)
    write(case, CASES[case])
