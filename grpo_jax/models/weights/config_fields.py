"""What a field of a `config.json` may hold, before it is read.

A value that means nothing is refused in a sentence that names the field.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_jax.models.weights.families import Fields

GROWTH = 'llama_4_scaling_beta'
"""Of rotary positions: see `RopeScaling.query_growth`."""

LAYER_SIZES = 'head_dim', 'num_key_value_heads'
"""Fields of a layer's own, where `per_layer_config` has some."""

Problem = Callable[[Any], str]
"""From a value to what is needed in its place; '' if it may stay."""

# Sizes of a model are int32.
_MOST = 2**31 - 1
_WHOLE, _REAL = int | np.integer, int | float | np.integer | np.floating
_LEAST_FLOAT, _MOST_FLOAT = 1.2e-38, 3e38


def _needs(fits: Callable[[Any], bool], words: str) -> Problem:
  return lambda value: '' if fits(value) else f'{words} needed'


def _between(kinds: Any, least: float, most: float) -> Callable[[Any], bool]:
  """Whether a value is a number of these kinds, and inside the bounds."""
  return lambda value: (
    isinstance(value, kinds)
    and not isinstance(value, bool)
    and least <= value <= most
  )


def _count(least: int = 1, most: int = _MOST) -> Problem:
  words = f'a whole number from {least} to {most} is'
  return _needs(_between(_WHOLE, least, most), words)


def _number(most: float = _MOST_FLOAT) -> Problem:
  words = '' if most == _MOST_FLOAT else f', at most {most:g},'
  fits = _between(_REAL, _LEAST_FLOAT, most)
  return _needs(fits, f'a finite number above 0{words} is')


def _listed(fits: Callable[[Any], bool], words: str) -> Problem:
  def all_fit(value):
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(map(fits, value))

  return _needs(all_fit, f'a list of {words} is')


def _is_text(value: Any) -> bool:
  return isinstance(value, str)


COUNT, SHARE, ABOVE_0 = _count(), _number(1.0), _number()
TAPS = _count(2, 1_000)
COUNTS = _listed(_between(_WHOLE, 0, _MOST), 'whole numbers, one a layer,')
_FLAG = _needs(lambda value: isinstance(value, bool), 'true or false is')
_TEXT = _needs(_is_text, 'a text is')


def base_problem(value: Any) -> str:
  """The `Problem` of the base of rotary frequencies."""
  needed = 'a number above 1 is needed, so that later entries turn more slowly'
  return ABOVE_0(value) or ('' if value > 1 else needed)


_KINDS = {
  **dict.fromkeys(
    (
      'vocab_size', 'hidden_size', 'intermediate_size',
      'num_attention_heads', 'num_key_value_heads', 'head_dim',
      'max_position_embeddings', 'original_max_position_embeddings',
      'sliding_window_pattern', 'num_experts_per_tok',
      'moe_intermediate_size', 'decoder_sparse_step',
      'no_rope_layer_interval', 'n_group', 'topk_group',
      'block_multiple_of', 'full_attention_interval',
      'linear_key_head_dim', 'linear_value_head_dim',
      'linear_num_key_heads', 'linear_num_value_heads',
      'global_head_dim', 'num_global_key_value_heads',
      'vocab_size_per_layer_input',
    ),
    COUNT,
  ),
  # Lists of this length are made; no model is near.
  'num_hidden_layers': _count(most=10_000),
  'num_experts': _count(0, 1_000_000),
  'linear_conv_kernel_dim': TAPS,
  'max_window_layers': _count(0),
  'sliding_window': _count(0),  # 0 where no layer has one
  'first_k_dense_replace': _count(0),
  'num_nextn_predict_layers': _count(0, 1_000),
  'n_shared_experts': _count(0),
  'num_kv_shared_layers': _count(0),
  'hidden_size_per_layer_input': _count(0),
  'shared_expert_intermediate_size': _count(0),
  # Of the mean square of what a norm reads: with 1 or more it would be most of
  # it.
  'rms_norm_eps': SHARE,
  **dict.fromkeys(
    (
      'query_pre_attn_scalar', 'attn_logit_softcapping',
      'final_logit_softcapping', 'embedding_multiplier',
      'residual_multiplier', 'attention_multiplier', 'logits_scaling',
      'routed_scaling_factor', 'block_ffn_dim_multiplier',
    ),
    ABOVE_0,
  ),
  **dict.fromkeys(('rope_theta', 'rope_local_base_freq'), base_problem),
  **dict.fromkeys(
    (
      'tie_word_embeddings', 'use_sliding_window', 'norm_topk_prob',
      'attention_bias', 'use_qk_norm', 'block_auto_adjust_ff_dim',
      'attention_k_eq_v', 'use_double_wide_mlp', 'enable_moe_block',
    ),
    _FLAG,
  ),
  'partial_rotary_factor': SHARE,
  'no_rope_layers': _listed(
    lambda value: value in (0, 1), 'numbers, 1 for a layer that rotates and 0'
  ),
  'layer_types': _listed(_is_text, 'texts'),
  'per_layer_config': _needs(
    lambda value: isinstance(value, Mapping)
    and all(
      isinstance(sizes, Mapping) and {*sizes} <= {*LAYER_SIZES}
      for sizes in value.values()
    ),
    f'an object from numbers of layers to their {" and ".join(LAYER_SIZES)} is',
  ),
  **dict.fromkeys(
    ('mlp_only_layers', 'full_attn_idxs'),
    _listed(_between(_WHOLE, 0, _MOST), 'numbers of layers, from 0'),
  ),
}  # fmt: skip

_FULL = 'full_attention'

_ROPE = {
  **dict.fromkeys(
    (
      'factor', 'low_freq_factor', 'high_freq_factor',
      'beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim',
    ),
    ABOVE_0,
  ),
  'rope_theta': base_problem,
  'original_max_position_embeddings': COUNT,
  'partial_rotary_factor': SHARE,
  GROWTH: _needs(_between(_REAL, 0, _MOST_FLOAT), 'a finite number from 0 is'),
  'truncate': _FLAG,
  'rope_type': _TEXT,
  'type': _TEXT,
}  # fmt: skip


# Null means something there: as many as heads, say, or no window.
_NULL = {
  'num_key_value_heads', 'head_dim', 'sliding_window', 'max_window_layers',
  'max_position_embeddings', 'original_max_position_embeddings',
  'final_logit_softcapping', 'attn_logit_softcapping', 'mlp_only_layers',
  'layer_types', 'rope_theta', 'rope_local_base_freq', 'no_rope_layers',
  'partial_rotary_factor', 'full_attn_idxs', 'num_global_key_value_heads',
  'per_layer_config',
}  # fmt: skip


def check(fields: Fields, called: Mapping[str, str]) -> None:
  """Raises a ValueError that names a field with a value which means nothing.

  Args:
    fields: Those that are read, with defaults; None is null.
    called: What a `config.json` calls a field, where it has another name.
  """
  for name, value in fields.items():
    if name in _KINDS and (value is not None or name not in _NULL):
      given = f'{called.get(name, name)}={value!r:.60}'
      _refuse(_KINDS[name](value), given)
  for layer, sizes in (fields.get('per_layer_config') or {}).items():
    for name, value in sizes.items():
      _refuse(COUNT(value), f'{name}={value!r:.60} for layer {layer}')
  for name in ('rope_scaling', 'rope_parameters'):
    rope = fields.get(name)
    if rope and not isinstance(rope, Mapping):
      raise ValueError(
        f'config.json has {name}={rope!r:.60}, which is no object with fields; '
        'give one, such as {"rope_type": "linear", "factor": 2.0}.'
      )
  _check_rope(rope_fields(fields))
  for problem in _contradictions(fields):
    raise ValueError(f'config.json has {problem}; correct one of them.')


def _refuse(needed: str, given: str) -> None:
  """Raises a ValueError where something else is needed than what is given."""
  if needed:
    raise ValueError(
      f'config.json has {given}, but {needed}; correct it, or copy the file '
      'again.'
    )


def _check_rope(rope: Fields) -> None:
  """As `check`, of the dict of rotary positions, or of one for each kind."""
  parts = {'': rope}
  for name in ('full_attention', 'sliding_attention'):
    part = rope.get(name)
    if part and not isinstance(part, Mapping):
      raise ValueError(
        f'config.json has {name}={part!r:.60} for rotary positions, which is '
        'no object with fields; correct it.'
      )
    parts[f'{name}.'] = part or {}
  for part, fields in parts.items():
    for name, problem in _ROPE.items():
      if (value := fields.get(name)) is not None:
        given = f'{part}{name}={value!r:.60} for rotary positions'
        _refuse(problem(value), given)
    for low, usual_low, high, usual_high in (
      ('low_freq_factor', 1, 'high_freq_factor', 4),
      ('beta_slow', 1, 'beta_fast', 32),
    ):
      a, b = fields.get(low), fields.get(high)
      if (a, b) != (None, None) and (a or usual_low) >= (b or usual_high):
        raise ValueError(
          f'config.json has {part}{low}={a or usual_low} and {high}='
          f'{b or usual_high} for rotary positions; the first must be below '
          'the second.'
        )


def _contradictions(fields: Fields) -> Iterator[str]:
  """Two fields that cannot both be meant."""
  width, heads = fields['hidden_size'], fields['num_attention_heads']
  if fields.get('head_dim') is None and width % heads:
    yield (
      f'hidden_size={width}, which num_attention_heads={heads} does not divide,'
      ' and no head_dim'
    )
  kv_heads = fields.get('num_key_value_heads')
  if kv_heads is not None and heads % kv_heads:
    yield (
      f'num_attention_heads={heads}, which num_key_value_heads={kv_heads} does '
      'not divide'
    )
  head_dim = fields.get('head_dim') or width // heads
  share = fields.get('partial_rotary_factor') or 1.0
  if head_dim * share % 2:
    yield (
      f'heads of {head_dim} entries (head_dim, or hidden_size over '
      f'num_attention_heads), of which the share {share:g} is rotated, but '
      'rotary positions turn pairs of them'
    )
  keys, values = (
    fields.get(f'linear_num_{one}_heads') for one in ('key', 'value')
  )
  if keys and values % keys:
    yield (
      f'linear_num_value_heads={values}, which linear_num_key_heads={keys} '
      'does not divide'
    )
  number, used = fields.get('num_experts'), fields.get('num_experts_per_tok')
  if number and used > number:
    yield f'num_experts_per_tok={used} of num_experts={number}'
  if (
    fields.get('use_sliding_window')
    and fields.get('max_window_layers', 0) is None
  ):
    yield 'use_sliding_window=True and max_window_layers=None'
  layers = fields['num_hidden_layers']
  shared = fields.get('num_kv_shared_layers', 0)
  if shared >= layers:
    yield (
      f'num_kv_shared_layers={shared} and num_hidden_layers={layers}, but some '
      'have keys and values that are shared'
    )
  if fields.get('hidden_size_per_layer_input'):
    rows, vocab = fields['vocab_size_per_layer_input'], fields['vocab_size']
    if rows != vocab:
      yield f'vocab_size_per_layer_input={rows} and vocab_size={vocab}'
  kinds = fields.get('layer_types')
  if 'num_kv_shared_layers' in fields and kinds and kinds[-1] != _FULL:
    yield f'layer_types, whose last is not {_FULL!r}, as the last layer is'
  listed = fields.get('no_rope_layers')
  if listed is not None and len(listed) < layers:
    yield f'no_rope_layers of {len(listed)} and num_hidden_layers={layers}'
  for name in ('mlp_only_layers', 'full_attn_idxs'):
    for place in fields.get(name) or ():
      if place >= layers:
        yield f'{name} with {place}, and num_hidden_layers={layers}'


def rope_fields(fields: Fields) -> Fields:
  """The dict of rotary positions, perhaps with one for each kind of layer."""
  return fields.get('rope_scaling') or fields.get('rope_parameters') or {}
