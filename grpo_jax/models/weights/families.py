"""The families of models that come in and go out: one row of a table each.

A row says what the `config.json` of a family may hold and what it means, and
under which names its tensors are stored. Nothing else in this package asks
which family it has before it.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from grpo_jax.models.weights.tensors import Fused
from grpo_jax.models.weights.tensors import Layout
from grpo_jax.models.weights.tensors import Tensor
from grpo_jax.models.weights.tensors import Tensors

Fields = Mapping[str, Any]


def _linear(name: str, **layout) -> Tensor:
  """The weight of a linear layer, stored [out, in]."""
  return Tensor(f'{name}.weight', Layout(transposed=True, **layout))


# What Hugging Face calls the norms of a layer: before attention and MLP, behind
# them, or both. GLM has the name of one norm for another.
_BEFORE = {
  'attention_norm': 'input_layernorm',
  'mlp_norm': 'post_attention_layernorm',
}
_BEHIND = {
  'attention_post_norm': 'post_attention_layernorm',
  'mlp_post_norm': 'post_feedforward_layernorm',
}
_BOTH = {
  'attention_norm': 'input_layernorm',
  'mlp_norm': 'pre_feedforward_layernorm',
  **_BEHIND,
}
_BOTH_IN_GLM = {
  **_BEFORE,
  'attention_post_norm': 'post_self_attn_layernorm',
  'mlp_post_norm': 'post_mlp_layernorm',
}


def hugging_face(
  added: float = 0.0,
  norms: Mapping[str, str] = _BEFORE,
  interleaved: float = 0.0,
  shared: str = 'shared_expert',
) -> Tensors:
  """The names that all families share in Hugging Face's folders.

  Args:
    added: To the scale of each norm; see `Layout`.
    norms: From ours to theirs, those of a layer.
    interleaved: Of queries and keys; see `Layout`.
    shared: Their name of the MLP beside experts.
  """
  layer = 'model.layers.{layer}.'
  attention, mlp = f'{layer}self_attn.', f'{layer}mlp.'
  norm = Layout(added=added)
  tensors = {
    ('embedding',): Tensor('model.embed_tokens.weight'),
    ('final_norm', 'scale'): Tensor('model.norm.weight', norm),
    ('head',): _linear('lm_head'),
    ('attention', 'output'): _linear(f'{attention}o_proj', first=2),
    ('attention', 'output_bias'): Tensor(f'{attention}o_proj.bias'),
    ('attention', 'sinks'): Tensor(f'{attention}sinks'),
    ('experts', 'router'): _linear(f'{mlp}gate'),
    ('experts', 'correction_bias'): Tensor(
      f'{mlp}gate.e_score_correction_bias'
    ),
    ('shared', 'shared_gate'): _linear(f'{mlp}{shared}_gate'),
  }
  for ours, name in norms.items():
    tensors[ours, 'scale'] = Tensor(f'{layer}{name}.weight', norm)
  for ours in ('query', 'key', 'value'):
    name = f'{attention}{ours[0]}_proj'
    turned = interleaved if ours != 'value' else 0.0
    tensors['attention', ours] = _linear(name, interleaved=turned)
    bias = Layout(first=2, interleaved=turned)
    tensors['attention', f'{ours}_bias'] = Tensor(f'{name}.bias', bias)
    scale = Tensor(f'{attention}{ours[0]}_norm.weight', norm)
    tensors['attention', f'{ours}_norm', 'scale'] = scale
  for ours in ('gate', 'up', 'down'):
    tensors['mlp', ours] = _linear(f'{mlp}{ours}_proj')
    expert = _linear(f'{mlp}experts.{{expert}}.{ours}_proj', experts=True)
    tensors['experts', ours] = expert
    tensors['shared', ours] = _linear(f'{mlp}{shared}.{ours}_proj')
  return tensors


def _packed_experts(tensors: Tensors) -> Tensors:
  """The names of gpt-oss: experts are an axis, and not transposed.

  What it calls `gate_up_proj` is named by its parts here; see `Fused`.
  """
  mlp = 'model.layers.{layer}.mlp.'
  packed = Layout(experts=True, packed=True)
  names = {
    name + bias: Tensor(f'{mlp}experts.{name}_proj{bias}', packed)
    for name in ('gate', 'up', 'down')
    for bias in ('', '_bias')
  }
  names['router'] = _linear(f'{mlp}router')
  names['router_bias'] = Tensor(f'{mlp}router.bias')
  return {**tensors, **{('experts', ours): x for ours, x in names.items()}}


def _gemma4(tensors: Tensors) -> Tensors:
  """The names of Gemma 4: packed experts, more norms, and inputs of layers."""
  layer = 'model.layers.{layer}.'
  packed = Layout(transposed=True, experts=True, packed=True)
  inputs = 'model.per_layer_'
  names = {
    ('layer_scale',): 'layer_scalar',
    ('experts', 'input_scale'): 'router.scale',
    ('experts', 'output_scale'): 'router.per_expert_scale',
    ('experts_norm', 'scale'): 'pre_feedforward_layernorm_2.weight',
    ('experts_post_norm', 'scale'): 'post_feedforward_layernorm_2.weight',
    ('dense_post_norm', 'scale'): 'post_feedforward_layernorm_1.weight',
    ('inputs_post_norm', 'scale'): 'post_per_layer_input_norm.weight',
  }
  return {
    **tensors,
    **{ours: Tensor(layer + theirs) for ours, theirs in names.items()},
    **{
      ('experts', name): Tensor(f'{layer}experts.{name}_proj', packed)
      for name in ('gate', 'up', 'down')
    },
    ('experts', 'router'): _linear(f'{layer}router.proj'),
    ('inputs', 'input_gate'): _linear(f'{layer}per_layer_input_gate'),
    ('inputs', 'input_down'): _linear(f'{layer}per_layer_projection'),
    ('inputs', 'input_table'): Tensor('model.embed_tokens_per_layer.weight'),
    ('inputs', 'input_projection'): _linear(f'{inputs}model_projection'),
    ('inputs', 'norm', 'scale'): Tensor(f'{inputs}projection_norm.weight'),
  }


def llama_cpp(interleaved: bool) -> Tensors:
  """The names in GGUF files, of which all are read and none written.

  Norms are stored as what they multiply by, those of Gemma too.

  Args:
    interleaved: Of queries and keys; see `Layout`. llama.cpp interleaves those
      of the architecture `llama` alone.
  """
  layer = 'blk.{layer}.'
  tensors = {
    ('embedding',): Tensor('token_embd.weight'),
    ('final_norm', 'scale'): Tensor('output_norm.weight'),
    ('head',): _linear('output'),
    ('attention_norm', 'scale'): Tensor(f'{layer}attn_norm.weight'),
    ('mlp_norm', 'scale'): Tensor(f'{layer}ffn_norm.weight'),
    ('attention_post_norm', 'scale'): Tensor(
      f'{layer}post_attention_norm.weight'
    ),
    ('mlp_post_norm', 'scale'): Tensor(f'{layer}post_ffw_norm.weight'),
    ('attention', 'output'): _linear(f'{layer}attn_output', first=2),
  }
  for ours in ('query', 'key', 'value'):
    name = f'{layer}attn_{ours[0]}'
    turned = float(interleaved and ours != 'value')
    tensors['attention', ours] = _linear(name, interleaved=turned)
    bias = Layout(first=2, interleaved=turned)
    tensors['attention', f'{ours}_bias'] = Tensor(f'{name}.bias', bias)
    norm = Tensor(f'{name}_norm.weight')
    tensors['attention', f'{ours}_norm', 'scale'] = norm
  for ours in ('gate', 'up', 'down'):
    tensors['mlp', ours] = _linear(f'{layer}ffn_{ours}')
  return tensors


def _fused(part: str, name: str, of: str, rows: Any) -> Fused:
  """Linear layers of one part of a layer."""
  prefix = f'model.layers.{{layer}}.{part}.'
  names = tuple(f'{prefix}{one}_proj.weight' for one in of.split())
  return Fused(f'{prefix}{name}.weight', names, rows)


_FUSED_HEADS = _fused(
  'self_attn',
  'qkv_proj',
  'q k v',
  lambda config: (
    config.num_heads * config.head_dim,
    *(config.num_kv_heads * config.head_dim,) * 2,
  ),
)
_FUSED_GATE = _fused(
  'mlp', 'gate_up_proj', 'gate up', lambda config: (config.mlp_width,) * 2
)
_EXPERTS = 'model.layers.{layer}.mlp.experts.'
_FUSED_EXPERTS = tuple(
  Fused(
    f'{_EXPERTS}gate_up_proj{bias}',
    tuple(f'{_EXPERTS}{one}_proj{bias}' for one in ('gate', 'up')),
    rows=None,
  )
  for bias in ('', '_bias')
)


_FUSED_ROWS_OF_EXPERTS = Fused(
  'model.layers.{layer}.experts.gate_up_proj',
  tuple(f'model.layers.{{layer}}.experts.{one}_proj' for one in ('gate', 'up')),
  rows=lambda config: (config.experts.width if config.experts else 0,) * 2,
  axis=1,
)


def _rotates(fields: Fields, layer: int) -> bool:
  """Of SmolLM3, whose field has 1 for a layer that rotates."""
  listed = fields['no_rope_layers']
  if listed is None:
    return (layer + 1) % fields['no_rope_layer_interval'] != 0
  return bool(listed[layer])


def _later_windows(fields: Fields, layer: int) -> bool:
  used = fields['use_sliding_window']
  return used and layer >= fields['max_window_layers']


@dataclasses.dataclass(frozen=True)
class Family:
  """What one architecture of Hugging Face's means to us.

  Attributes:
    architecture: As `config.json` names it.
    model_type: As `config.json` names it.
    defaults: The fields that are read, with the values that a `config.json` may
      leave out; transformers means the same by leaving them out.
    renamed: Other names under which a field may be given.
    called: From a field to what this family calls it, in what is written too.
    fixed: Fields that only this value of can be computed, with the reason.
    windows: Whether a layer, by its number, has a window, where `layer_types`
      does not say.
    layer_types: Whether the field `layer_types` is read at all.
    rotates: Whether a layer, by its number, rotates queries and keys.
    rotated: Which share of a head is rotated; None: as `partial_rotary_factor`
      says.
    features: Fields of our `ModelConfig` that all models of the family share.
    routing: Likewise, of `Experts`.
    quantized: The `quant_method` of a `quantization_config` that is read.
    scaled_embedding: Whether embeddings are multiplied by sqrt(width).
    rope_bases: Base of the rotary frequencies where none is given: of layers
      without a window, and of those with one, None if that is the same.
    proportional: Whether rotary positions may be proportional; see `LayerKind`.
    scales_windows: Whether a scaling of rotary positions that is given for all
      layers is that of layers with a window too.
    tensors: Where parameters are stored in Hugging Face folders.
    fused: Of these, which are stored as one.
    inside: The field of `config.json` that holds all others, if one does.
    inner_type: The model type that is said there.
    grows_queries: Whether rotary positions may have `llama_4_scaling_beta`;
      see `RopeScaling.query_growth`.
    classifier: The architecture of its sequence classifiers, which are read as
      reward models.
    gguf: The name of the architecture in GGUF files, and where tensors are in
      these; None if they are not read.
    written_as: The architecture that is written for such a model, if another.
    prefixes: Pairs of a prefix of stored names and what it stands for.
    left_out: Prefixes of stored names that are no part of the language model.
    modules: Pairs of a prefix in `tensors` and that of the same modules in the
      class of this architecture, where it differs. Files may have other names,
      which transformers changes when it reads them.
  """

  architecture: str
  model_type: str
  defaults: Fields
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  called: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Fields = dataclasses.field(default_factory=dict)
  windows: Callable[[Fields, int], bool] = lambda fields, layer: False
  layer_types: bool = False
  rotates: Callable[[Fields, int], bool] = lambda fields, layer: True
  rotated: float | None = 1.0
  features: Fields = dataclasses.field(default_factory=dict)
  routing: Fields = dataclasses.field(default_factory=dict)
  quantized: str | None = None
  scaled_embedding: bool = False
  rope_bases: tuple[float, float | None] = (10_000.0, None)
  proportional: bool = False
  scales_windows: bool = True
  tensors: Tensors = dataclasses.field(default_factory=hugging_face)
  fused: tuple[Fused, ...] = ()
  inside: str | None = None
  inner_type: str | None = None
  grows_queries: bool = False
  classifier: str | None = None
  gguf: tuple[str, Tensors] | None = None
  written_as: str | None = None
  prefixes: tuple[tuple[str, str], ...] = ()
  left_out: tuple[str, ...] = ()
  modules: tuple[tuple[str, str], ...] = ()

  def module(self, name: str) -> str:
    """What the class of this architecture calls the module of a weight.

    Args:
      name: Of the weight in `tensors`, as 'model.layers.0.mlp.up_proj.weight'.
    """
    name = name.removesuffix('.weight')
    for prefix, theirs in self.modules:
      if name.startswith(prefix):
        return theirs + name.removeprefix(prefix)
    return name


REQUIRED = (
  'vocab_size',
  'hidden_size',
  'intermediate_size',
  'num_hidden_layers',
  'num_attention_heads',
)
"""Fields that must be given, unless a family has defaults for them."""

OF_ALL = (
  'layer_types',
  'rope_parameters',
  'rope_scaling',
  'rope_theta',
  'rope_local_base_freq',
  'original_max_position_embeddings',
  'partial_rotary_factor',
)
"""Fields that are read for every family, and for which few have defaults."""

# What every family reads beside them. None means what it means in Hugging
# Face's: as many key-value heads as heads, and width / heads entries in each.
_COMMON = dict(
  num_key_value_heads=None,
  head_dim=None,
  rms_norm_eps=1e-6,
  tie_word_embeddings=False,
  max_position_embeddings=None,
)
_LLAMA = dict(_COMMON, hidden_act='silu')
_QWEN = dict(
  _LLAMA,
  use_sliding_window=False,
  sliding_window=4096,
  max_window_layers=28,
)
_GEMMA = dict(
  _COMMON,
  num_attention_heads=8,
  num_key_value_heads=4,
  head_dim=256,
  hidden_activation='gelu_pytorch_tanh',
  query_pre_attn_scalar=256,
  tie_word_embeddings=True,
  sliding_window=4096,
)

_NO_OUTPUT_BIAS = 'attention with a bias of its output is not computed here'
_ATTENTION_BIAS = dict(attention_bias=(False, _NO_OUTPUT_BIAS))
_MLP_BIAS = dict(mlp_bias=(False, 'an MLP with biases is not computed here'))
_BOTH_WAYS = dict(
  use_bidirectional_attention=(
    False,
    'attention that looks ahead is not computed here',
  )
)
_GEMMA_TENSORS = hugging_face(added=1.0, norms=_BOTH)

_GEMMA3 = Family(
  'Gemma3ForCausalLM',
  'gemma3_text',
  dict(
    _GEMMA,
    vocab_size=262_208,
    final_logit_softcapping=None,
    sliding_window_pattern=6,
  ),
  fixed=dict(
    **_ATTENTION_BIAS,
    **_BOTH_WAYS,
    attn_logit_softcapping=(
      None,
      'transformers leaves it out in Gemma 3, so it is unclear what is meant',
    ),
  ),
  # What transformers calls `Gemma3ForSequenceClassification` reads images too.
  classifier='Gemma3TextForSequenceClassification',
  gguf=('gemma3', llama_cpp(interleaved=False)),
  windows=lambda fields, layer: (
    (layer + 1) % fields['sliding_window_pattern'] > 0
  ),
  layer_types=True,
  features=dict(qk_norm=True, post_norms=True),
  scaled_embedding=True,
  rope_bases=(1_000_000.0, 10_000.0),
  tensors=_GEMMA_TENSORS,
)

# What transformers calls the modules of a language model inside another, and
# what of that is no part of it.
_INNER = (('model.', 'model.language_model.'),)
_INNER_PREFIXES = (('model.language_model.', 'model.'), ('language_model.', ''))


def _sees(*parts: str) -> tuple[str, ...]:
  """Prefixes of parts that are not of the language model."""
  return tuple(f'{model}{part}.' for part in parts for model in ('', 'model.'))


_QWEN3 = Family(
  'Qwen3ForCausalLM',
  'qwen3',
  dict(_QWEN, head_dim=128),
  classifier='Qwen3ForSequenceClassification',
  gguf=('qwen3', llama_cpp(interleaved=False)),
  fixed=_ATTENTION_BIAS,
  windows=_later_windows,
  layer_types=True,
  features=dict(qk_norm=True),
)
_MINISTRAL3 = Family(
  'Ministral3ForCausalLM',
  'ministral3',
  dict(
    _LLAMA,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    sliding_window=None,
    rope_parameters=dict(
      rope_type='yarn',
      rope_theta=1_000_000.0,
      factor=16.0,
      original_max_position_embeddings=16_384,
      mscale=1.0,
      mscale_all_dim=1.0,
      llama_4_scaling_beta=0.1,
    ),
  ),
  classifier='Ministral3ForSequenceClassification',
  windows=lambda fields, layer: fields['sliding_window'] is not None,
  grows_queries=True,
)

_GEMMA4 = Family(
  'Gemma4ForCausalLM',
  'gemma4_text',
  dict(
    _COMMON,
    vocab_size=262_144,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=30,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    hidden_activation='gelu_pytorch_tanh',
    tie_word_embeddings=True,
    sliding_window=512,
    final_logit_softcapping=None,
    global_head_dim=512,
    num_global_key_value_heads=None,
    per_layer_config=None,
    attention_k_eq_v=False,
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262_144,
    enable_moe_block=False,
    num_experts=None,
    num_experts_per_tok=None,
    moe_intermediate_size=None,
    rope_parameters=dict(
      full_attention=dict(
        rope_type='proportional',
        rope_theta=1_000_000.0,
        partial_rotary_factor=0.25,
      ),
      sliding_attention=dict(rope_type='default', rope_theta=10_000.0),
    ),
  ),
  called=dict(num_experts_per_tok='top_k_experts'),
  fixed=dict(
    **_ATTENTION_BIAS,
    # Images alone look ahead by this.
    use_bidirectional_attention=(
      'vision',
      'attention of texts that looks ahead is not computed here',
    ),
  ),
  windows=lambda fields, layer: (
    (layer + 1) % 6 > 0 and layer + 1 < fields['num_hidden_layers']
  ),
  layer_types=True,
  features=dict(
    qk_norm=True,
    value_norm=True,
    post_norms=True,
    layer_scales=True,
    attention_scale=1.0,
  ),
  routing=dict(beside_mlp=True),
  scaled_embedding=True,
  rope_bases=(1_000_000.0, 10_000.0),
  proportional=True,
  scales_windows=False,
  tensors=_gemma4(hugging_face(norms=_BOTH)),
  fused=(_FUSED_ROWS_OF_EXPERTS,),
)

# Of its models that see and hear.
_OF_GEMMA4 = 'vision_tower', 'embed_vision', 'audio_tower', 'embed_audio'

FAMILIES = (
  Family(
    'LlamaForCausalLM',
    'llama',
    _LLAMA,
    classifier='LlamaForSequenceClassification',
    gguf=('llama', llama_cpp(interleaved=True)),
    fixed=dict(**_ATTENTION_BIAS, **_MLP_BIAS),
  ),
  Family(
    'MistralForCausalLM',
    'mistral',
    dict(_LLAMA, num_key_value_heads=8, sliding_window=4096),
    classifier='MistralForSequenceClassification',
    windows=lambda fields, layer: fields['sliding_window'] is not None,
  ),
  Family(
    'Qwen2ForCausalLM',
    'qwen2',
    _QWEN,
    classifier='Qwen2ForSequenceClassification',
    gguf=('qwen2', llama_cpp(interleaved=False)),
    windows=_later_windows,
    layer_types=True,
    features=dict(qkv_bias=True),
  ),
  _QWEN3,
  # Text with images, or as below: the language model is read, and written by
  # itself.
  dataclasses.replace(
    _QWEN3,
    architecture='Qwen3VLForConditionalGeneration',
    model_type='qwen3_vl',
    defaults=dict(_LLAMA, num_key_value_heads=32, head_dim=128),
    classifier=None,
    gguf=None,
    windows=lambda fields, layer: False,
    layer_types=False,
    rope_bases=(500_000.0, None),
    inside='text_config',
    inner_type='qwen3_vl_text',
    written_as='Qwen3ForCausalLM',
    prefixes=_INNER_PREFIXES,
    left_out=_sees('visual'),
    modules=_INNER,
  ),
  Family(
    'Qwen3MoeForCausalLM',
    'qwen3_moe',
    dict(
      _LLAMA,
      num_key_value_heads=4,
      use_sliding_window=False,
      sliding_window=4096,
      num_experts=128,
      num_experts_per_tok=8,
      moe_intermediate_size=768,
      norm_topk_prob=False,
      decoder_sparse_step=1,
      mlp_only_layers=(),
    ),
    classifier='Qwen3MoeForSequenceClassification',
    renamed=dict(num_local_experts='num_experts'),  # since transformers 5
    fixed=dict(
      **_ATTENTION_BIAS,
      shared_expert_intermediate_size=(
        None,
        'experts that every token passes are not computed here',
      ),
    ),
    windows=lambda fields, layer: fields['use_sliding_window'],
    features=dict(qk_norm=True),
  ),
  Family(
    'Gemma2ForCausalLM',
    'gemma2',
    dict(
      _GEMMA,
      vocab_size=256_000,
      final_logit_softcapping=30.0,
      attn_logit_softcapping=50.0,
    ),
    classifier='Gemma2ForSequenceClassification',
    fixed=dict(**_ATTENTION_BIAS, **_BOTH_WAYS),
    windows=lambda fields, layer: layer % 2 == 0,
    layer_types=True,
    features=dict(post_norms=True),
    scaled_embedding=True,
    tensors=_GEMMA_TENSORS,
  ),
  _GEMMA3,
  dataclasses.replace(
    _GEMMA3,
    architecture='Gemma3ForConditionalGeneration',
    model_type='gemma3',
    classifier=None,
    gguf=None,
    inside='text_config',
    inner_type='gemma3_text',
    written_as='Gemma3ForCausalLM',
    prefixes=_INNER_PREFIXES,
    left_out=_sees('vision_tower', 'multi_modal_projector'),
    # Since transformers 4.52; the language model alone has 'model.layers.'.
    modules=_INNER,
  ),
  Family(
    'SmolLM3ForCausalLM',
    'smollm3',
    dict(
      _LLAMA,
      num_key_value_heads=4,
      tie_word_embeddings=True,
      use_sliding_window=False,
      sliding_window=None,
      no_rope_layers=None,
      no_rope_layer_interval=4,
    ),
    classifier='SmolLM3ForSequenceClassification',
    fixed=dict(**_ATTENTION_BIAS, **_MLP_BIAS),
    windows=lambda fields, layer: (
      fields['use_sliding_window'] and not _rotates(fields, layer)
    ),
    layer_types=True,
    rotates=_rotates,
    rope_bases=(2_000_000.0, None),
  ),
  Family(
    'Olmo3ForCausalLM',
    'olmo3',
    dict(_LLAMA, rms_norm_eps=1e-5, sliding_window=4096),
    classifier='Olmo3ForSequenceClassification',
    fixed=_ATTENTION_BIAS,
    windows=lambda fields, layer: (layer + 1) % 4 > 0,
    layer_types=True,
    features=dict(
      qk_norm=True, qk_norm_joint=True, pre_norms=False, post_norms=True
    ),
    rope_bases=(500_000.0, None),
    scales_windows=False,
    tensors=hugging_face(norms=_BEHIND),
  ),
  _MINISTRAL3,
  dataclasses.replace(
    _MINISTRAL3,
    architecture='Mistral3ForConditionalGeneration',
    model_type='mistral3',
    classifier=None,
    inside='text_config',
    inner_type='ministral3',
    written_as='Ministral3ForCausalLM',
    prefixes=_INNER_PREFIXES,
    left_out=_sees('vision_tower', 'multi_modal_projector'),
    modules=_INNER,
  ),
  Family(
    'Phi3ForCausalLM',
    'phi3',
    dict(
      _LLAMA,
      rms_norm_eps=1e-5,
      sliding_window=None,
    ),
    rotated=None,
    classifier='Phi3ForSequenceClassification',
    fixed=_ATTENTION_BIAS,
    windows=lambda fields, layer: fields['sliding_window'] is not None,
    fused=(_FUSED_HEADS, _FUSED_GATE),
  ),
  Family(
    'GraniteForCausalLM',
    'granite',
    dict(
      _LLAMA,
      embedding_multiplier=1.0,
      attention_multiplier=1.0,
      residual_multiplier=1.0,
      logits_scaling=1.0,
    ),
    fixed=dict(**_ATTENTION_BIAS, **_MLP_BIAS),
  ),
  Family(
    'Glm4ForCausalLM',
    'glm4',
    dict(
      _LLAMA,
      num_key_value_heads=2,
      head_dim=128,
      rms_norm_eps=1.5625e-7,
      attention_bias=True,
    ),
    rotated=0.5,
    classifier='Glm4ForSequenceClassification',
    features=dict(post_norms=True),
    tensors=hugging_face(norms=_BOTH_IN_GLM, interleaved=0.5),
    fused=(_FUSED_GATE,),
  ),
  Family(
    'Glm4MoeForCausalLM',
    'glm4_moe',
    dict(
      _LLAMA,
      num_key_value_heads=8,
      rms_norm_eps=1e-5,
      attention_bias=False,
      use_qk_norm=False,
      num_experts=128,
      num_experts_per_tok=8,
      moe_intermediate_size=1408,
      n_shared_experts=1,
      norm_topk_prob=True,
      routed_scaling_factor=1.0,
      n_group=1,
      topk_group=1,
      first_k_dense_replace=1,
      num_nextn_predict_layers=1,
    ),
    called=dict(num_experts='n_routed_experts'),
    rotated=0.5,
    routing=dict(scores='sigmoid', corrected=True),
    tensors=hugging_face(shared='shared_experts'),
  ),
  Family(
    'Qwen2MoeForCausalLM',
    'qwen2_moe',
    dict(
      _QWEN,
      num_experts=60,
      num_experts_per_tok=4,
      moe_intermediate_size=1408,
      shared_expert_intermediate_size=5632,
      norm_topk_prob=False,
      decoder_sparse_step=1,
      mlp_only_layers=(),
    ),
    fixed=dict(qkv_bias=(True, 'its queries, keys and values have biases')),
    windows=lambda fields, layer: (
      fields['use_sliding_window']
      and layer % 2 == 0
      and layer < fields['max_window_layers']
    ),
    layer_types=True,
    features=dict(qkv_bias=True),
    routing=dict(shared_gate=True),
  ),
  Family(
    'GptOssForCausalLM',
    'gpt_oss',
    dict(
      _LLAMA,
      num_key_value_heads=8,
      head_dim=64,
      rms_norm_eps=1e-5,
      sliding_window=128,
      num_experts=128,
      num_experts_per_tok=4,
      rope_parameters=dict(
        rope_type='yarn',
        factor=32.0,
        original_max_position_embeddings=4096,
        truncate=False,
      ),
    ),
    called=dict(num_experts='num_local_experts'),
    fixed=dict(
      attention_bias=(True, 'all its products of attention have biases'),
      swiglu_alpha=(1.702, 'its experts are built with this number'),
      swiglu_limit=(7.0, 'its experts are built with this number'),
    ),
    windows=lambda fields, layer: layer % 2 == 0,
    layer_types=True,
    features=dict(
      qkv_bias=True,
      output_bias=True,
      sinks=True,
      activation='clamped_swiglu',
    ),
    routing=dict(biases=True),
    rope_bases=(150_000.0, None),
    quantized='mxfp4',
    tensors=_packed_experts(hugging_face()),
    fused=_FUSED_EXPERTS,
  ),
  _GEMMA4,
  dataclasses.replace(
    _GEMMA4,
    architecture='Gemma4ForConditionalGeneration',
    model_type='gemma4',
    inside='text_config',
    inner_type='gemma4_text',
    written_as='Gemma4ForCausalLM',
    prefixes=_INNER_PREFIXES,
    left_out=_sees(*_OF_GEMMA4),
    modules=_INNER,
  ),
  dataclasses.replace(
    _GEMMA4,
    architecture='Gemma4UnifiedForConditionalGeneration',
    model_type='gemma4_unified',
    defaults=dict(
      _GEMMA4.defaults, sliding_window=1024, hidden_size_per_layer_input=0
    ),
    inside='text_config',
    inner_type='gemma4_unified_text',
    written_as='Gemma4ForCausalLM',
    prefixes=_INNER_PREFIXES,
    left_out=_sees(*_OF_GEMMA4, 'vision_embedder'),
    modules=_INNER,
  ),
)
"""All families, the plainest first: what several can express, it is."""


def family(architecture: Any) -> Family:
  """The family of an architecture.

  Raises:
    ValueError: There is none.
  """
  for one in FAMILIES:
    if one.architecture == architecture:
      return one
  known = ', '.join(one.architecture for one in FAMILIES)
  raise ValueError(
    f'config.json names the architecture {architecture!r}, which is not built '
    f'here; give a model of one of these: {known}.'
  )


def written_as(architecture: str) -> str:
  """The architecture that a model is written as, from the one it was read as.

  Raises:
    ValueError: The architecture is not built here.
  """
  return family(architecture).written_as or architecture
