"""`config.json` of a Hugging Face folder, and the `ModelConfig` that it means.

Reading knows the fields from the table of families. Writing tries the families
one after another, and takes the first whose `config.json` reads back as the
model: so what is written is never a neighbour of the model that was meant.
What a file may not say is checked first; see `config_fields`.

Rotary positions have an older and a newer form. The older one has `rope_theta`
and `rope_scaling` beside each other. Since transformers 5 both are in
`rope_parameters`, which may hold one such dict for each kind of layer. We read
both, and write the older one: transformers 4 and 5, and what is built on
either, read it.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import NamedTuple

from grpo_jax.models import config as config_lib
from grpo_jax.models.config import DeltaHeads
from grpo_jax.models.config import Experts
from grpo_jax.models.config import LayerKind
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.weights import config_fields
from grpo_jax.models.weights import families
from grpo_jax.models.weights.families import Family

Fields = Mapping[str, Any]

COMPUTED = (
  'compute_dtype',
  'residual_dtype',
  'remat',
  'unroll',
  'attention',
  'lora',
  'unused_ids',
)
"""Fields of `ModelConfig` that say how a model is computed, not which it is."""

_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
}
_WRITTEN = {
  'silu': 'silu',
  'gelu_tanh': 'gelu_pytorch_tanh',
  'clamped_swiglu': 'silu',
}
# From fields of `DeltaHeads` to those of a config.json.
_DELTA = dict(
  num_heads='linear_num_key_heads',
  num_value_heads='linear_num_value_heads',
  key_dim='linear_key_head_dim',
  value_dim='linear_value_head_dim',
)
_WIDE, _LOCAL = 'full_attention', 'sliding_attention'


def config_from_huggingface(config_json: Fields, **computed) -> ModelConfig:
  """The model that a `config.json` describes.

  Args:
    config_json: Its content.
    **computed: What no `config.json` says: `compute_dtype`, `residual_dtype`,
      `remat`, `unroll`, `attention`, `lora` and `unused_ids` of `ModelConfig`.

  Returns:
    A `ModelConfig`.

  Raises:
    ValueError: The architecture is unknown, or a field has a value that cannot
      be computed here.

  >>> llama = dict(
  ...   architectures=['LlamaForCausalLM'], vocab_size=100, hidden_size=32,
  ...   intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
  ...   rope_theta=5e5,
  ... )
  >>> config_from_huggingface(llama).rope_base
  500000.0
  """
  strange = set(computed) - set(COMPUTED)
  if strange:
    raise ValueError(
      f'{", ".join(sorted(strange))} cannot be given beside a config.json, '
      f'which says so itself; give some of {", ".join(COMPUTED)}.'
    )
  row = family_of(config_json)
  fields = _fields(row, config_json)
  width, heads = fields['hidden_size'], fields['num_attention_heads']
  head_dim = fields['head_dim'] or width // heads
  wide, local = _ropes(row, fields)
  scaling = wide.scaling or local.scaling
  kinds = _kinds(row, fields, wide, local)
  experts = None
  if any(kind.experts for kind in kinds):
    experts = _experts(row, fields)
  features = dict(
    activation=_activation(fields),
    attention_scale=_attention_scale(fields, head_dim),
    **_norms_and_biases(fields),
    **_states(fields, kinds),
  )
  return ModelConfig(
    vocab_size=fields['vocab_size'],
    num_layers=fields['num_hidden_layers'],
    width=width,
    num_heads=heads,
    num_kv_heads=fields['num_key_value_heads'] or heads,
    head_dim=head_dim,
    mlp_width=_mlp_width(fields),
    rope_base=wide.base,
    norm_epsilon=fields['rms_norm_eps'],
    tied_embeddings=fields['tie_word_embeddings'],
    pattern=config_lib.shortest_pattern(kinds),
    rope_scaling=scaling,
    embedding_scale=math.sqrt(width)
    if row.scaled_embedding
    else fields.get('embedding_multiplier', 1.0),
    residual_scale=fields.get('residual_multiplier', 1.0),
    attention_cap=fields.get('attn_logit_softcapping'),
    layer_inputs=fields.get('hidden_size_per_layer_input', 0),
    logit_divisor=fields.get('logits_scaling', 1.0),
    logit_cap=fields.get('final_logit_softcapping'),
    experts=experts,
    **{**features, **row.features},
    **computed,
  )


def _norms_and_biases(fields: Fields) -> dict[str, bool]:
  """Those that are a model's own, and not of all in its family."""
  ours = dict(attention_bias='qkv_bias', use_qk_norm='qk_norm')
  return {ours[name]: True for name in ours if fields.get(name)}


def _states(fields: Fields, kinds: Sequence[LayerKind]) -> dict[str, Any]:
  """What layers with a state have, if there are any."""
  mixers = {kind.mixer for kind in kinds}
  found: dict[str, Any] = {}
  if mixers - {'attention'}:
    found['taps'] = fields['linear_conv_kernel_dim']
  if 'delta' in mixers:
    found['delta'] = DeltaHeads(
      **{ours: fields[theirs] for ours, theirs in _DELTA.items()}
    )
  return found


def _mlp_width(fields: Fields) -> int:
  """Hidden units of the MLP; of some families, a round number near 2/3."""
  width = fields['intermediate_size']
  if not fields.get('block_auto_adjust_ff_dim'):
    return width
  width = int(fields['block_ffn_dim_multiplier'] * int(2 * width / 3))
  step = fields['block_multiple_of']
  return -(-width // step) * step


def _experts(row: Family, fields: Fields) -> Experts:
  width = fields.get('moe_intermediate_size') or fields['intermediate_size']
  shared = fields.get('shared_expert_intermediate_size')
  return Experts(
    number=fields['num_experts'],
    per_token=fields['num_experts_per_tok'],
    width=width,
    normalized=fields.get('norm_topk_prob', True),
    groups=fields.get('n_group', 1),
    groups_per_token=fields.get('topk_group', 1),
    scale=fields.get('routed_scaling_factor', 1.0),
    shared_width=shared or width * fields.get('n_shared_experts', 0),
    **row.routing,
  )


def _attention_scale(fields: Fields, head_dim: int) -> float | None:
  """Factor of the product of query and key; None: the usual one."""
  if 'attention_multiplier' in fields:
    scale = fields['attention_multiplier']
    return None if scale == head_dim**-0.5 else scale
  scalar = fields.get('query_pre_attn_scalar', head_dim)
  return None if scalar == head_dim else scalar**-0.5


def context_tokens(config_json: Fields) -> int | None:
  """How many tokens a model was made for, prompt and completion together.

  `max_position_embeddings` includes what rotary positions are scaled by, but
  for YaRN, which is often switched on in a `config.json` that says no more than
  the trained length: there it is the factor times that length.

  Returns:
    Tokens; None if the `config.json` does not say.

  Raises:
    ValueError: See `config_from_huggingface`.
  """
  fields = _fields(family_of(config_json), config_json)
  most = fields.get('max_position_embeddings')
  both = config_fields.rope_fields(fields)
  parts = [both, *(part for part in both.values() if isinstance(part, Mapping))]
  for given in parts:
    kind, factor = _rope_kind(given), given.get('factor')
    trained = _trained(given, fields)
    scales = kind == 'yarn' or (most is None and kind in _SCALED)
    if scales and trained and factor:
      return int(trained * factor)
  return most


def architecture_of(config_json: Fields) -> Any:
  """The architecture that a `config.json` names; None if it names none."""
  named = config_json.get('architectures') or [None]
  if not isinstance(named, list | tuple):
    raise ValueError(
      f'config.json has architectures={named!r:.60}; give a list of one name, '
      'such as ["LlamaForCausalLM"].'
    )
  return named[0]


def family_of(config_json: Fields) -> Family:
  """The family that a `config.json` names, as architecture or as model type."""
  kind = config_json.get('model_type')
  by_type = (r.architecture for r in families.FAMILIES if r.model_type == kind)
  return families.family(architecture_of(config_json) or next(by_type, None))


def _fields(row: Family, config_json: Fields) -> dict[str, Any]:
  """The fields that count, with what a `config.json` leaves out filled in."""
  given = dict(config_json)
  if row.inside:
    inner = given.get(row.inside) or {}
    if not isinstance(inner, Mapping):
      raise ValueError(
        f'config.json has {row.inside}={inner!r:.60}, which is no object with '
        'fields; copy the file again.'
      )
    kind = inner.get('model_type', row.inner_type)
    if kind != row.inner_type:
      raise ValueError(
        f'config.json of a {row.architecture} has {row.inside} of '
        f'model_type={kind!r}, which is not built here inside another; give a '
        f'model with {row.inner_type!r}.'
      )
    tied = config_json.get('tie_word_embeddings')
    given = {**inner, **({} if tied is None else {'tie_word_embeddings': tied})}
  fixed = dict(
    row.fixed,
    quantization_config=(
      None,
      'quantized weights are read from GGUF files alone',
    ),
  )
  quantized = given.get('quantization_config')
  if row.quantized and isinstance(quantized, Mapping):
    if quantized.get('quant_method') == row.quantized:
      del fixed['quantization_config']
  for name, (wanted, why) in fixed.items():
    value = given.get(name)
    if value not in (None, wanted):
      raise ValueError(
        f'config.json of a {row.architecture} has {name}={value!r}, but {why}; '
        f'give a model with {name}={wanted}.'
      )
  called: dict[str, str] = {}
  others = {theirs: ours for ours, theirs in row.called.items()}
  for name, meant in {**row.renamed, **others}.items():
    if name in given:
      given[meant], called[meant] = given.pop(name), name
  # No others: transformers passes over a field that is not the family's too.
  names = {*row.defaults, *families.REQUIRED, *families.OF_ALL}
  known = {name: given[name] for name in names if name in given}
  if known.get('rope_parameters', '') is None:
    del known['rope_parameters']
  fields = {**row.defaults, **known}
  if not fields.get('enable_moe_block', True):
    fields = {k: x for k, x in fields.items() if k not in _ROUTING}
  for name in families.REQUIRED:
    if fields.get(name) is None:
      raise ValueError(
        f'config.json of a {row.architecture} has no {name}; give a complete '
        'one.'
      )
  config_fields.check(fields, called)
  return fields


def left_out(config_json: Fields) -> tuple[str, ...]:
  """Prefixes of stored names that are no part of the model.

  Layers behind the last draw several tokens at once. Where a layer shares keys
  and values of another, those that are stored of its own are read by nothing.
  """
  row = family_of(config_json)
  fields = _fields(row, config_json)
  layers = fields['num_hidden_layers']
  number = fields.get('num_nextn_predict_layers', 0)
  unread = [
    f'model.layers.{layer}.self_attn.{name}'
    for layer in sharing_layers(fields)
    for name in ('k_proj.', 'v_proj.', 'k_norm.', 'v_norm.')
  ]
  further = [f'model.layers.{i}.' for i in range(layers, layers + number)]
  return *row.left_out, *further, *unread


# Fields that say nothing where `enable_moe_block` is false.
_ROUTING = 'num_experts', 'num_experts_per_tok', 'moe_intermediate_size'


class _Rope(NamedTuple):
  """The rotary positions of one kind of layer."""

  base: float
  scaling: RopeScaling | None
  rotated: float
  proportional: bool = False


def _kinds(
  row: Family, fields: Fields, wide: _Rope, local: _Rope
) -> list[LayerKind]:
  """The kind of each layer, in their order."""
  types = _layer_types(row, fields)
  sparse = _sparse(fields)
  scaling = wide.scaling or local.scaling
  if (
    None not in (wide.scaling, local.scaling) and wide.scaling != local.scaling
  ):
    raise ValueError(
      'config.json scales the rotary positions of layers with a window by '
      f'{local.scaling} and those of other layers by {wide.scaling}, but here '
      'one model has one scaling; give a model with one.'
    )

  def kind(called: str, experts: bool, rotates: bool) -> LayerKind:
    if row.state and called == row.state[0]:
      return LayerKind(experts=experts, mixer=row.state[1])
    rope = local if called == _LOCAL else wide
    return LayerKind(
      window_tokens=fields['sliding_window'] if called == _LOCAL else None,
      rope_base=None if rope.base == wide.base else rope.base,
      rope_scaled=rope.scaling == scaling,
      experts=experts,
      rotated=rope.rotated if rotates else 0.0,
      proportional=rope.proportional,
    )

  rotates = [row.rotates(fields, i) for i in range(len(types))]
  kinds = [kind(*layer) for layer in zip(types, sparse, rotates, strict=True)]
  return [_own(fields, i, kind) for i, kind in enumerate(kinds)]


def _own(fields: Fields, layer: int, kind: LayerKind) -> LayerKind:
  """A layer with what fields of Gemma 4 say of it alone."""
  full = kind.window_tokens is None
  same = full and fields.get('attention_k_eq_v', False)
  shares = layer in sharing_layers(fields)
  sizes = fields.get('per_layer_config')
  if sizes is not None:
    sizes = sizes.get(str(layer), {})
  else:
    sizes = {'head_dim': fields.get('global_head_dim') if full else None}
    if same:
      sizes['num_key_value_heads'] = fields['num_global_key_value_heads']
  usual = {name: fields[name] for name in config_fields.LAYER_SIZES}
  sizes = {k: x for k, x in sizes.items() if x not in (None, usual[k])}
  wide = shares and fields['use_double_wide_mlp']
  return dataclasses.replace(
    kind,
    head_dim=sizes.get('head_dim'),
    num_kv_heads=sizes.get('num_key_value_heads'),
    mlp_width=2 * fields['intermediate_size'] if wide else None,
    keys_as_values=same and not shares,
    shares_kv=shares,
  )


def sharing_layers(fields: Fields) -> range:
  """The numbers of the layers that have no keys and values of their own."""
  layers = fields['num_hidden_layers']
  return range(layers - fields.get('num_kv_shared_layers', 0), layers)


# Kinds of scaling that are computed here, and their fields beside the factor
# and the trained tokens: our names, and those in a config.json.
_SCALED: dict[str, dict[str, str]] = {
  'linear': {},
  'llama3': {
    'low_factor': 'low_freq_factor',
    'high_factor': 'high_freq_factor',
  },
  'yarn': {
    name: name
    for name in ('attention_factor', 'beta_slow', 'beta_fast', 'truncate')
  },
}


def _rope_kind(given: Fields) -> str:
  return given.get('rope_type') or given.get('type') or 'default'


def _ropes(row: Family, fields: Fields) -> tuple[_Rope, _Rope]:
  """The rotary positions of layers without a window, and of those with one."""
  base, local_base = row.rope_bases
  both = config_fields.rope_fields(fields)
  full = both.get('full_attention') or {}
  local = both.get('sliding_attention') or {}
  if not full and not local:  # one dict for all kinds of layers
    shared = local_base is None and row.scales_windows
    full, local = both, both if shared else {}
  base = fields.get('rope_theta') or base
  local_base = fields.get('rope_local_base_freq') or local_base or base
  return _rope(row, full, base, fields), _rope(row, local, local_base, fields)


def _rope(row: Family, given: Fields, base: float, fields: Fields) -> _Rope:
  """One kind of layer, from the dict that is written for it."""
  base, kind = float(given.get('rope_theta') or base), _rope_kind(given)
  said = given.get('partial_rotary_factor')
  said = said or fields.get('partial_rotary_factor')
  if kind == 'proportional' and row.proportional and not given.get('factor'):
    return _Rope(base, None, said or 1.0, proportional=True)
  rotated = (said or 1.0) if row.rotated is None else row.rotated
  if said not in (None, rotated):
    raise ValueError(
      f'config.json has partial_rotary_factor={said}, but of a head of a '
      f'{row.architecture} the share of {rotated} is rotated here; give a '
      'model with that.'
    )
  if kind == 'default':
    return _Rope(base, None, rotated)
  if kind not in _SCALED or given.get('long_factor') is not None:
    raise ValueError(
      f'config.json scales rotary positions by rope_type={kind!r}, which is '
      'not built here; give a model with one of these: default, '
      f'{", ".join(_SCALED)}.'
    )
  trained, factor = _trained(given, fields), given.get('factor')
  if factor is None and trained:
    factor = (fields.get('max_position_embeddings') or 0) / trained
  factor = float(factor or 0)
  if kind == 'linear':
    return _Rope(base, RopeScaling(kind, factor), rotated)
  more: dict[str, Any] = {
    ours: value if isinstance(value, bool) else float(value)
    for ours, theirs in _SCALED[kind].items()
    if (value := given.get(theirs)) is not None
  }
  over, under = given.get('mscale'), given.get('mscale_all_dim')
  if kind == 'yarn' and over and under and factor > 1:  # as DeepSeek gives it
    attention = (0.1 * over * math.log(factor) + 1) / (
      0.1 * under * math.log(factor) + 1
    )
    more.setdefault('attention_factor', attention)
  if row.grows_queries:
    more['query_growth'] = float(given.get(config_fields.GROWTH) or 0)
  return _Rope(base, RopeScaling(kind, factor, trained, **more), rotated)


def _trained(given: Fields, fields: Fields) -> int:
  """The tokens that a model was trained on before it was scaled; 0: unsaid."""
  trained = fields.get('original_max_position_embeddings')
  trained = trained or given.get('original_max_position_embeddings')
  return trained or fields.get('max_position_embeddings') or 0


def _written_ropes(row: Family, config: ModelConfig) -> dict[str, Any]:
  """The fields of the rotary positions."""
  fields: dict[str, Any] = dict(rope_theta=config.rope_base, rope_scaling=None)
  local = [k.rope_base for k in config.pattern if k.window_tokens is not None]
  if row.rope_bases[1] is not None and local and local[0] is not None:
    fields['rope_local_base_freq'] = local[0]
  if config.rope_scaling is not None:
    fields['rope_scaling'] = _written_scaling(row, config.rope_scaling)
  if not row.scales_windows:
    # transformers 5 takes the older `rope_theta` for some layers alone there.
    plain = dict(rope_type='default', rope_theta=config.rope_base)
    full = {**plain, **(fields['rope_scaling'] or {})}
    shares = {kind.rotated for kind in config.pattern if kind.proportional}
    if shares:
      share = dict(partial_rotary_factor=max(shares))
      full = {**full, 'rope_type': 'proportional', **share}
    base = fields.get('rope_local_base_freq', config.rope_base)
    fields['rope_parameters'] = dict(
      full_attention=full, sliding_attention={**plain, 'rope_theta': base}
    )
  if row.proportional:  # it never had the older form
    return dict(rope_parameters=fields['rope_parameters'])
  return fields


def _written_scaling(row: Family, scaling: RopeScaling) -> dict[str, Any]:
  kind, tokens = scaling.kind, scaling.original_tokens
  written: dict[str, Any] = dict(rope_type=kind, factor=scaling.factor)
  if kind != 'linear':
    written['original_max_position_embeddings'] = tokens
  # Of YaRN's, only what is not meant without them.
  usual = RopeScaling(kind, scaling.factor, tokens)
  for ours, theirs in _SCALED[kind].items():
    value = getattr(scaling, ours)
    if kind == 'llama3' or value != getattr(usual, ours):
      written[theirs] = value
  if row.grows_queries:
    written[config_fields.GROWTH] = scaling.query_growth
  return written


def _layer_types(row: Family, fields: Fields) -> list[str]:
  """By what each layer sees other tokens, as `layer_types` says it."""
  number = fields['num_hidden_layers']
  said = fields.get('layer_types')
  known = (_WIDE, _LOCAL) if row.state is None else (_WIDE, row.state[0])

  def usual(layer: int) -> str:
    if row.state and row.has_state(fields, layer):
      return row.state[0]
    return _LOCAL if row.windows(fields, layer) else _WIDE

  types = [usual(i) for i in range(number)]
  if said is not None:
    if set(said) - set(known) or len(said) != number:
      raise ValueError(
        f'config.json has layer_types with {len(said)} entries of the kinds '
        f'{", ".join(sorted(set(said)))} for {number} layers; give one of '
        f'{" and ".join(known)} for each layer.'
      )
    if not row.layer_types and list(said) != types:
      raise ValueError(
        f'config.json has layer_types, which a {row.architecture} does not '
        'read, and they differ from its sliding_window; remove them, or name '
        'an architecture that reads them.'
      )
    types = list(said)
  tokens = fields.get('sliding_window')
  if _LOCAL in types and not (
    tokens and fields.get('use_sliding_window', True)
  ):
    raise ValueError(
      'config.json gives layers a sliding window, but has sliding_window='
      f'{tokens} and use_sliding_window={fields.get("use_sliding_window")}; '
      'correct one of them.'
    )
  return types


def _sparse(fields: Fields) -> list[bool]:
  """Which layers have experts."""
  dense = fields.get('mlp_only_layers') or ()
  step = fields.get('decoder_sparse_step', 1)
  first = fields.get('first_k_dense_replace', 0)
  return [
    fields.get('num_experts', 0) > 0
    and i not in dense
    and i >= first
    and (i + 1) % step == 0
    for i in range(fields['num_hidden_layers'])
  ]


def _activation(fields: Fields) -> str:
  """Ours, from the field that the family has for it."""
  name = 'hidden_activation' if 'hidden_activation' in fields else 'hidden_act'
  given = fields.get(name, 'silu')
  if not isinstance(given, str) or given not in _ACTIVATIONS:
    raise ValueError(
      f'config.json has {name}={given!r}, which is not built here; give a '
      f'model with one of these: {", ".join(_ACTIVATIONS)}.'
    )
  return _ACTIVATIONS[given]


def config_to_huggingface(
  config: ModelConfig, architecture: str | None = None
) -> dict[str, Any]:
  """The `config.json` that describes a model: the inverse of reading one.

  Args:
    config: The model. How it is computed is not written.
    architecture: Which to write; None: the first that can express the model.

  Returns:
    The fields that describe the model. Others that a `config.json` may have,
    such as end tokens and `max_position_embeddings`, are not known here.

  Raises:
    ValueError: No architecture can express the model, or not that which is
      given.

  >>> config_to_huggingface(ModelConfig(vocab_size=16))['architectures']
  ['LlamaForCausalLM']
  """
  computed = {name: getattr(config, name) for name in COMPUTED}
  shortest = config_lib.shortest_pattern(config.kinds)
  meant = dataclasses.replace(config, pattern=shortest)
  rows = families.FAMILIES
  if architecture is not None:
    rows = (families.family(architecture),)
  unsaid, contradiction = [], None
  for row in rows:
    if row.written_as:
      row = families.family(row.written_as)
    written = _written(row, meant)
    try:
      read = config_from_huggingface(written, **computed)
    except ValueError as error:  # one field contradicts another there
      contradiction = error
      continue
    if read == meant:
      return written
    differ = [
      f'{field.name}={value!r}'
      for field in dataclasses.fields(meant)
      if (value := getattr(meant, field.name)) != getattr(read, field.name)
    ]
    unsaid.append((differ, row.architecture))
  if not unsaid and contradiction is not None:
    raise contradiction
  fields, nearest = min(unsaid, key=lambda one: len(one[0]))
  raise ValueError(
    f'The config.json of a {nearest} cannot say {", ".join(fields)}'
    + ('' if architecture else ', and that of any other family neither')
    + '; change the model, or give another architecture.'
  )


def _written(row: Family, config: ModelConfig) -> dict[str, Any]:
  """What the `config.json` of a family can say of a model."""
  windows = [kind.window_tokens for kind in config.kinds]
  local = [window is not None for window in windows]
  activation = _WRITTEN[config.activation]
  # A field that the family does not read is left out again below.
  fields = dict(
    vocab_size=config.vocab_size,
    hidden_size=config.width,
    intermediate_size=config.mlp_width,
    num_hidden_layers=config.num_layers,
    num_attention_heads=config.num_heads,
    num_key_value_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    hidden_act=activation,
    hidden_activation=activation,
    rms_norm_eps=config.norm_epsilon,
    tie_word_embeddings=config.tied_embeddings,
    query_pre_attn_scalar=_scalar(config),
    partial_rotary_factor=row.rotated or _attention(config).rotated,
    attention_bias=config.qkv_bias,
    use_qk_norm=config.qk_norm,
    no_rope_layers=[int(kind.rotated > 0) for kind in config.kinds],
    embedding_multiplier=config.embedding_scale,
    residual_multiplier=config.residual_scale,
    attention_multiplier=config.attention_scale or config.head_dim**-0.5,
    logits_scaling=config.logit_divisor,
    attn_logit_softcapping=config.attention_cap,
    final_logit_softcapping=config.logit_cap,
    use_sliding_window=any(local),
    sliding_window=next(filter(None, windows), None),
    # The next two are for transformers before 4.53, without `layer_types`.
    max_window_layers=(*local, True).index(True),
    sliding_window_pattern=len(config.pattern),
    linear_conv_kernel_dim=config.taps or 2,
    block_auto_adjust_ff_dim=False,
    **_written_delta(config),
    **_written_sizes(config),
    **_written_experts(config),
  )
  read = {*families.REQUIRED, *row.defaults}
  if row.rotated != 1:
    read.add('partial_rotary_factor')
  return {
    'architectures': [row.architecture],
    'model_type': row.model_type,
    **{
      row.called.get(name, name): value
      for name, value in fields.items()
      if name in read
    },
    **(
      {'layer_types': [_layer_type(row, kind) for kind in config.kinds]}
      if row.layer_types
      else {}
    ),
    **_written_ropes(row, config),
  }


def _written_sizes(config: ModelConfig) -> dict[str, Any]:
  """What fields of Gemma 4 say of some layers alone."""
  kinds = config.kinds
  full = next((k for k in kinds if k.window_tokens is None), kinds[0])
  return dict(
    global_head_dim=config.of(full).head_dim,
    num_global_key_value_heads=config.of(full).num_kv_heads,
    attention_k_eq_v=any(kind.keys_as_values for kind in kinds),
    num_kv_shared_layers=sum(kind.shares_kv for kind in kinds),
    use_double_wide_mlp=any(kind.mlp_width for kind in kinds),
    hidden_size_per_layer_input=config.layer_inputs,
    vocab_size_per_layer_input=config.vocab_size,
    enable_moe_block=config.experts is not None,
  )


def _layer_type(row: Family, kind: LayerKind) -> str:
  """What `layer_types` calls a layer."""
  if row.state and kind.mixer == row.state[1]:
    return row.state[0]
  return _WIDE if kind.window_tokens is None else _LOCAL


def _attention(config: ModelConfig) -> LayerKind:
  """The first kind of layer with attention."""
  return next(kind for kind in config.pattern if kind.mixer == 'attention')


def _written_delta(config: ModelConfig) -> dict[str, int]:
  if config.delta is None:
    return {}
  return {name: getattr(config.delta, ours) for ours, name in _DELTA.items()}


def _written_experts(config: ModelConfig) -> dict[str, Any]:
  if config.experts is None:
    return dict(num_experts=0)
  experts = config.experts
  dense = [i for i, kind in enumerate(config.kinds) if not kind.experts]
  return dict(
    num_experts=experts.number,
    num_experts_per_tok=experts.per_token,
    moe_intermediate_size=experts.width,
    shared_expert_intermediate_size=experts.shared_width,
    n_shared_experts=experts.shared_width // experts.width,
    norm_topk_prob=experts.normalized,
    routed_scaling_factor=experts.scale,
    n_group=experts.groups,
    topk_group=experts.groups_per_token,
    decoder_sparse_step=1,
    mlp_only_layers=dense,
    first_k_dense_replace=len(dense),
    num_nextn_predict_layers=0,
  )


def _scalar(config: ModelConfig) -> float:
  """`query_pre_attn_scalar`: a whole number wherever it was one."""
  if config.attention_scale is None:
    return config.head_dim
  scalar = config.attention_scale**-2
  whole = round(scalar)
  return whole if whole**-0.5 == config.attention_scale else scalar
