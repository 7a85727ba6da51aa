"""The families of models that come in and go out: one row of a table each.

A row says what the `config.json` of a family may hold and what it means, and
under which names its tensors are stored. Nothing else in this package asks
which family it has before it.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from grpo_jax.models.config import DeltaHeads
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.weights.tensors import Fused
from grpo_jax.models.weights.tensors import Layout
from grpo_jax.models.weights.tensors import Tensor
from grpo_jax.models.weights.tensors import Tensors
from grpo_jax.models.weights.tensors import Tiled

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


def _lfm2() -> Tensors:
  """The names of LFM2; see `_FUSED_CONVOLUTION`."""
  layer = 'model.layers.{layer}.'
  attention, mlp = f'{layer}self_attn.', f'{layer}feed_forward.'
  norms = {'attention_norm': 'operator_norm', 'mlp_norm': 'ffn_norm'}
  tensors = {
    **hugging_face(norms=norms),
    ('final_norm', 'scale'): Tensor('model.embedding_norm.weight'),
    ('attention', 'output'): _linear(f'{attention}out_proj', first=2),
    ('convolution', 'taps'): Tensor(
      f'{layer}conv.conv.weight', Layout(transposed=True, depthwise=True)
    ),
    ('convolution', 'outward'): _linear(f'{layer}conv.out_proj'),
    ('experts', 'router'): _linear(f'{mlp}gate'),
    ('experts', 'correction_bias'): Tensor(f'{mlp}expert_bias'),
  }
  for ours in ('query', 'key'):
    scale = Tensor(f'{attention}{ours[0]}_layernorm.weight')
    tensors['attention', f'{ours}_norm', 'scale'] = scale
  for ours in ('before', 'behind', 'inward'):
    tensors['convolution', ours] = _linear(f'{layer}conv.in_proj.{ours}')
  for ours, name in dict(gate='w1', up='w3', down='w2').items():
    tensors['mlp', ours] = _linear(f'{mlp}{name}')
    expert = _linear(f'{mlp}experts.{{expert}}.{name}', experts=True)
    tensors['experts', ours] = expert
  return tensors


def _gated_delta(**names: str) -> Tensors:
  """The names of models with the gated delta rule; see `_HEADS_IN_TURN`.

  Args:
    **names: From the matrices that such a layer reads by to their names.
  """
  layer = 'model.layers.{layer}.'
  attention, delta = f'{layer}self_attn.', f'{layer}linear_attn.'
  tensors = {
    **hugging_face(added=1.0),
    ('attention', 'query'): _linear(f'{attention}q_proj.query'),
    ('attention', 'head_gate'): _linear(f'{attention}q_proj.head_gate'),
    ('delta', 'log_decay'): Tensor(f'{delta}A_log'),
    ('delta', 'decay_bias'): Tensor(f'{delta}dt_bias'),
    ('delta', 'norm', 'scale'): Tensor(f'{delta}norm.weight'),
    ('delta', 'output'): _linear(f'{delta}out_proj', first=2),
  }
  for ours, name in names.items():
    tensors['delta', ours] = _linear(f'{delta}{name}')
  for ours in ('query', 'key', 'value'):
    tensors['delta', f'{ours}_taps'] = Tensor(
      f'{delta}conv1d.{ours}.weight', Layout(transposed=True, depthwise=True)
    )
  return tensors


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


def _llama_cpp_lfm2() -> Tensors:
  """The names of LFM2 in GGUF files; taps have two axes there."""
  conv = 'blk.{layer}.shortconv.'
  taps = Tensor(f'{conv}conv.weight', Layout(transposed=True))
  tensors = {
    **llama_cpp(interleaved=False),
    ('final_norm', 'scale'): Tensor('token_embd_norm.weight'),
    ('convolution', 'taps'): taps,
    ('convolution', 'outward'): _linear(f'{conv}out_proj'),
  }
  for ours in ('before', 'behind', 'inward'):
    tensors['convolution', ours] = _linear(f'{conv}in_proj.{ours}')
  return tensors


def _llama_cpp_delta() -> Tensors:
  """The names of Qwen 3.5 in GGUF files; see `_LLAMA_CPP_DELTA`."""
  layer = 'blk.{layer}.'
  query = f'{layer}attn_q'
  tensors = {
    **llama_cpp(interleaved=False),
    ('mlp_norm', 'scale'): Tensor(f'{layer}post_attention_norm.weight'),
    ('attention', 'query'): _linear(f'{query}.query'),
    ('attention', 'head_gate'): _linear(f'{query}.head_gate'),
    ('delta', 'head_gate'): _linear(f'{layer}attn_gate.heads'),
    ('delta', 'rate'): _linear(f'{layer}ssm_beta.heads'),
    ('delta', 'decay'): _linear(f'{layer}ssm_alpha.heads'),
    ('delta', 'log_decay'): Tensor(f'{layer}ssm_a.heads', Layout(is_log=True)),
    ('delta', 'decay_bias'): Tensor(f'{layer}ssm_dt.heads'),
    ('delta', 'norm', 'scale'): Tensor(f'{layer}ssm_norm.weight'),
    ('delta', 'output'): _linear(f'{layer}ssm_out.heads', first=2),
  }
  taps = Layout(transposed=True)
  for ours in ('query', 'key', 'value'):
    tensors['delta', ours] = _linear(f'{layer}attn_qkv.{ours}')
    name = f'{layer}ssm_conv1d.{ours}.weight'
    tensors['delta', f'{ours}_taps'] = Tensor(name, taps)
  return tensors


def _fused(module: str, names: str, sizes: Any, **turns: Any) -> Fused:
  """A linear layer that stands for several.

  Args:
    module: Its name in a layer.
    names: Those of what it stands for, there too.
    sizes: See `Fused`.
    **turns: Likewise.
  """
  layer = 'model.layers.{layer}.'
  parts = tuple(f'{layer}{name}.weight' for name in names.split())
  return Fused(f'{layer}{module}.weight', parts, sizes, **turns)


_FUSED_HEADS = _fused(
  'self_attn.qkv_proj',
  'self_attn.q_proj self_attn.k_proj self_attn.v_proj',
  lambda config: (
    config.num_heads * config.head_dim,
    *(config.num_kv_heads * config.head_dim,) * 2,
  ),
)
_FUSED_GATE = _fused(
  'mlp.gate_up_proj',
  'mlp.gate_proj mlp.up_proj',
  lambda config: (config.mlp_width,) * 2,
)


def _expert_width(config: ModelConfig) -> int:
  assert config.experts is not None
  return config.experts.width


_EXPERTS = 'model.layers.{layer}.mlp.experts.'
_FUSED_EXPERTS = tuple(
  Fused(
    f'{_EXPERTS}gate_up_proj{bias}',
    tuple(f'{_EXPERTS}{one}_proj{bias}' for one in ('gate', 'up')),
    sizes=lambda config: (1, 1),
    turns=_expert_width,
    axis=-1,
  )
  for bias in ('', '_bias')
)
# Experts that are an axis of one tensor, as the files of Qwen 3.5 have them.
_PACKED = {
  ('experts', ours): Tensor(
    f'{_EXPERTS}{ours}_proj',
    Layout(transposed=True, experts=True, packed=True),
  )
  for ours in ('gate', 'up', 'down')
}
_PACKED_GATE = Fused(
  f'{_EXPERTS}gate_up_proj',
  (f'{_EXPERTS}gate_proj', f'{_EXPERTS}up_proj'),
  sizes=lambda config: (_expert_width(config),) * 2,
  axis=-2,
)

_FUSED_CONVOLUTION = _fused(
  'conv.in_proj',
  'conv.in_proj.before conv.in_proj.behind conv.in_proj.inward',
  lambda config: (config.width,) * 3,
)
_FUSED_SHORTCONV = Fused(
  'blk.{layer}.shortconv.in_proj.weight',
  tuple(
    f'blk.{{layer}}.shortconv.in_proj.{one}.weight'
    for one in ('before', 'behind', 'inward')
  ),
  _FUSED_CONVOLUTION.sizes,
)


_FUSED_ROWS_OF_EXPERTS = Fused(
  'model.layers.{layer}.experts.gate_up_proj',
  tuple(f'model.layers.{{layer}}.experts.{one}_proj' for one in ('gate', 'up')),
  sizes=lambda config: (_expert_width(config),) * 2,
  axis=-2,
)


def _rotates(fields: Fields, layer: int) -> bool:
  """Of SmolLM3, whose field has 1 for a layer that rotates."""
  listed = fields['no_rope_layers']
  if listed is None:
    return (layer + 1) % fields['no_rope_layer_interval'] != 0
  return bool(listed[layer])


def _delta(config: ModelConfig) -> DeltaHeads:
  assert config.delta is not None
  return config.delta


def _all_heads(config: ModelConfig) -> tuple[int, int, int]:
  """Rows of the queries, keys and values of the gated delta rule."""
  heads = _delta(config)
  keys = heads.num_heads * heads.key_dim
  return keys, keys, heads.num_value_heads * heads.value_dim


_HEADS_IN_TURN = _fused(
  'self_attn.q_proj',
  'self_attn.q_proj.query self_attn.q_proj.head_gate',
  lambda config: (config.head_dim,) * 2,
  turns=lambda config: config.num_heads,
)
_FUSED_TAPS = _fused(
  'linear_attn.conv1d',
  'linear_attn.conv1d.query linear_attn.conv1d.key linear_attn.conv1d.value',
  _all_heads,
)


def _of_one_key_head(config: ModelConfig) -> tuple[int, ...]:
  heads = _delta(config)
  values = heads.num_value_heads // heads.num_heads * heads.value_dim
  return heads.key_dim, heads.key_dim, values, values


_KEY_HEADS_IN_TURN = (
  _fused(
    'linear_attn.in_proj_qkvz',
    'linear_attn.in_proj_qkvz.query linear_attn.in_proj_qkvz.key '
    'linear_attn.in_proj_qkvz.value linear_attn.in_proj_qkvz.head_gate',
    _of_one_key_head,
    turns=lambda config: _delta(config).num_heads,
  ),
  _fused(
    'linear_attn.in_proj_ba',
    'linear_attn.in_proj_ba.rate linear_attn.in_proj_ba.decay',
    lambda config: (
      (_delta(config).num_value_heads // _delta(config).num_heads,) * 2
    ),
    turns=lambda config: _delta(config).num_heads,
  ),
)
_FUSED_DELTA = _fused(
  'linear_attn.in_proj_qkv',
  'linear_attn.in_proj_qkv.query linear_attn.in_proj_qkv.key '
  'linear_attn.in_proj_qkv.value',
  _all_heads,
)


def _llama_cpp_heads(
  name: str, part: str, of_head: Callable[[DeltaHeads], int], axis: int = 0
) -> Tiled:
  """A tensor of value heads, each with so many rows."""
  return Tiled(
    f'blk.{{layer}}.{name}',
    (f'blk.{{layer}}.{part}',),
    lambda config: (_delta(config).num_value_heads * of_head(_delta(config)),),
    axis=axis,
  )


_LLAMA_CPP_DELTA = (
  Fused(
    'blk.{layer}.attn_q.weight',
    ('blk.{layer}.attn_q.query.weight', 'blk.{layer}.attn_q.head_gate.weight'),
    _HEADS_IN_TURN.sizes,
    _HEADS_IN_TURN.turns,
  ),
  *(
    Tiled(
      f'blk.{{layer}}.{name}.weight',
      tuple(
        f'blk.{{layer}}.{name}.{one}.weight'
        for one in ('query', 'key', 'value')
      ),
      _all_heads,
    )
    for name in ('attn_qkv', 'ssm_conv1d')
  ),
  _llama_cpp_heads(
    'attn_gate.weight', 'attn_gate.heads.weight', lambda heads: heads.value_dim
  ),
  _llama_cpp_heads(
    'ssm_out.weight', 'ssm_out.heads.weight', lambda heads: heads.value_dim, 1
  ),
  *(
    _llama_cpp_heads(name, part, lambda heads: 1)
    for name, part in (
      ('ssm_beta.weight', 'ssm_beta.heads.weight'),
      ('ssm_alpha.weight', 'ssm_alpha.heads.weight'),
      ('ssm_a', 'ssm_a.heads'),
      ('ssm_dt.bias', 'ssm_dt.heads'),
    )
  ),
)


def _is_not_listed(fields: Fields, layer: int) -> bool:
  """Of LFM2, whose field has the numbers of layers with attention."""
  listed = fields['full_attn_idxs']
  return listed is not None and layer not in listed


def _is_between(fields: Fields, layer: int) -> bool:
  """Of Qwen, whose field has how many layers there are to one attention."""
  return (layer + 1) % fields['full_attention_interval'] != 0


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
    state: What that calls a layer with a state, and which of our mixers that
      is; None: there are none.
    has_state: Whether a layer, by its number, has a state, where `layer_types`
      does not say.
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
    packed: Where experts are in other files of the family, which are read too.
    inside: The field of `config.json` that holds all others, if one does.
    inner_type: The model type that is said there.
    grows_queries: Whether rotary positions may have `llama_4_scaling_beta`;
      see `RopeScaling.query_growth`.
    classifier: The architecture of its sequence classifiers, which are read as
      reward models.
    gguf: The name of the architecture in GGUF files, where tensors are in
      these, and which are stored as one; None if they are not read.
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
  state: tuple[str, str] | None = None
  has_state: Callable[[Fields, int], bool] = lambda fields, layer: False
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
  packed: Tensors = dataclasses.field(default_factory=dict)
  inside: str | None = None
  inner_type: str | None = None
  grows_queries: bool = False
  classifier: str | None = None
  gguf: tuple[str, Tensors, tuple[Fused, ...]] | None = None
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
  gguf=('gemma3', llama_cpp(interleaved=False), ()),
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


def _inside(
  row: Family, architecture: str, model_type: str, **changes: Any
) -> Family:
  """The family of models that see images, of which the text is one of `row`.

  The language model is read, and written by itself.
  """
  return dataclasses.replace(
    row,
    architecture=architecture,
    model_type=model_type,
    classifier=None,
    gguf=None,
    inside='text_config',
    written_as=row.architecture,
    prefixes=_INNER_PREFIXES,
    # Since transformers 4.52; the language model alone has 'model.layers.'.
    modules=_INNER,
    **{'inner_type': row.model_type, **changes},
  )


_QWEN3 = Family(
  'Qwen3ForCausalLM',
  'qwen3',
  dict(_QWEN, head_dim=128),
  classifier='Qwen3ForSequenceClassification',
  gguf=('qwen3', llama_cpp(interleaved=False), ()),
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
_LFM2 = Family(
  'Lfm2ForCausalLM',
  'lfm2',
  dict(
    _COMMON,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    full_attn_idxs=None,
    linear_conv_kernel_dim=3,
    block_auto_adjust_ff_dim=True,
    block_ffn_dim_multiplier=1.0,
    block_multiple_of=256,
  ),
  renamed=dict(
    block_ff_dim='intermediate_size', tie_embedding='tie_word_embeddings'
  ),
  called=dict(rms_norm_eps='norm_eps', linear_conv_kernel_dim='conv_L_cache'),
  fixed=dict(
    conv_bias=(False, 'a convolution with biases is not computed here')
  ),
  layer_types=True,
  gguf=('lfm2', _llama_cpp_lfm2(), (_FUSED_SHORTCONV,)),
  state=('conv', 'convolution'),
  has_state=_is_not_listed,
  features=dict(qk_norm=True),
  rope_bases=(1_000_000.0, None),
  tensors=_lfm2(),
  fused=(_FUSED_CONVOLUTION,),
)
_DELTA = dict(
  _LLAMA,
  head_dim=256,
  partial_rotary_factor=0.25,
  full_attention_interval=4,
  linear_conv_kernel_dim=4,
  linear_key_head_dim=128,
  linear_value_head_dim=128,
  linear_num_key_heads=16,
  linear_num_value_heads=32,
)
_QWEN3_5 = Family(
  'Qwen3_5ForCausalLM',
  'qwen3_5_text',
  dict(_DELTA, num_key_value_heads=4),
  fixed=dict(
    **_ATTENTION_BIAS,
    hidden_act=('silu', 'its convolutions are built with this one'),
    attn_output_gate=(True, 'its attention is built with gates'),
  ),
  layer_types=True,
  state=('linear_attention', 'delta'),
  has_state=_is_between,
  rotated=None,
  features=dict(qk_norm=True, head_gates=True),
  tensors=_gated_delta(
    query='in_proj_qkv.query',
    key='in_proj_qkv.key',
    value='in_proj_qkv.value',
    head_gate='in_proj_z',
    rate='in_proj_b',
    decay='in_proj_a',
  ),
  fused=(_HEADS_IN_TURN, _FUSED_DELTA, _FUSED_TAPS),
  classifier='Qwen3_5TextForSequenceClassification',
  gguf=('qwen35', _llama_cpp_delta(), _LLAMA_CPP_DELTA),
  # It may be read from the files of a model that sees images too.
  prefixes=_INNER_PREFIXES,
  left_out=('mtp.', *_sees('visual')),
)
_QWEN3_5_MOE = dataclasses.replace(
  _QWEN3_5,
  architecture='Qwen3_5MoeForCausalLM',
  model_type='qwen3_5_moe_text',
  defaults=dict(
    _DELTA,
    num_key_value_heads=2,
    intermediate_size=512,  # of no layer
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
  ),
  classifier=None,
  gguf=None,
  routing=dict(shared_gate=True),
  fused=(*_QWEN3_5.fused, _PACKED_GATE),
  packed=_PACKED,
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
    gguf=('llama', llama_cpp(interleaved=True), ()),
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
    gguf=('qwen2', llama_cpp(interleaved=False), ()),
    windows=_later_windows,
    layer_types=True,
    features=dict(qkv_bias=True),
  ),
  _QWEN3,
  _inside(
    _QWEN3,
    'Qwen3VLForConditionalGeneration',
    'qwen3_vl',
    inner_type='qwen3_vl_text',
    defaults=dict(_LLAMA, num_key_value_heads=32, head_dim=128),
    windows=lambda fields, layer: False,
    layer_types=False,
    rope_bases=(500_000.0, None),
    left_out=_sees('visual'),
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
  _inside(
    _GEMMA3,
    'Gemma3ForConditionalGeneration',
    'gemma3',
    left_out=_sees('vision_tower', 'multi_modal_projector'),
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
  _inside(
    _MINISTRAL3,
    'Mistral3ForConditionalGeneration',
    'mistral3',
    left_out=_sees('vision_tower', 'multi_modal_projector'),
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
  _LFM2,
  dataclasses.replace(
    _LFM2,
    architecture='Lfm2MoeForCausalLM',
    model_type='lfm2_moe',
    defaults=dict(
      _COMMON,
      num_key_value_heads=8,
      rms_norm_eps=1e-5,
      tie_word_embeddings=True,
      linear_conv_kernel_dim=3,
      num_experts=32,
      num_experts_per_tok=4,
      moe_intermediate_size=1792,
      norm_topk_prob=True,
      routed_scaling_factor=1.0,
      first_k_dense_replace=2,
    ),
    renamed=dict(tie_embedding='tie_word_embeddings'),
    called=dict(_LFM2.called, first_k_dense_replace='num_dense_layers'),
    fixed=dict(
      _LFM2.fixed,
      use_expert_bias=(True, 'its routers are built with a correction'),
    ),
    gguf=None,
    has_state=lambda fields, layer: False,
    routing=dict(scores='sigmoid', corrected=True),
  ),
  _QWEN3_5,
  _inside(
    _QWEN3_5,
    'Qwen3_5ForConditionalGeneration',
    'qwen3_5',
    left_out=_QWEN3_5.left_out,
  ),
  _QWEN3_5_MOE,
  _inside(
    _QWEN3_5_MOE,
    'Qwen3_5MoeForConditionalGeneration',
    'qwen3_5_moe',
    left_out=_QWEN3_5.left_out,
  ),
  dataclasses.replace(
    _QWEN3_5,
    architecture='Qwen3NextForCausalLM',
    model_type='qwen3_next',
    defaults=dict(
      _DELTA,
      num_key_value_heads=2,
      num_experts=512,
      num_experts_per_tok=10,
      moe_intermediate_size=512,
      shared_expert_intermediate_size=512,
      norm_topk_prob=True,
      decoder_sparse_step=1,
      mlp_only_layers=(),
    ),
    classifier='Qwen3NextForSequenceClassification',
    gguf=None,
    routing=dict(shared_gate=True),
    tensors=_gated_delta(
      query='in_proj_qkvz.query',
      key='in_proj_qkvz.key',
      value='in_proj_qkvz.value',
      head_gate='in_proj_qkvz.head_gate',
      rate='in_proj_ba.rate',
      decay='in_proj_ba.decay',
    ),
    fused=(_HEADS_IN_TURN, *_KEY_HEADS_IN_TURN, _FUSED_TAPS),
    prefixes=(),
    left_out=('mtp.',),
  ),
  _GEMMA4,
  _inside(
    _GEMMA4,
    'Gemma4ForConditionalGeneration',
    'gemma4',
    left_out=_sees(*_OF_GEMMA4),
  ),
  dataclasses.replace(
    _inside(
      _GEMMA4,
      'Gemma4UnifiedForConditionalGeneration',
      'gemma4_unified',
      left_out=_sees(*_OF_GEMMA4, 'vision_embedder'),
    ),
    defaults=dict(
      _GEMMA4.defaults, sliding_window=1024, hidden_size_per_layer_input=0
    ),
    inner_type='gemma4_unified_text',
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
