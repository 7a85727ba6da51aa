"""What the values in a `config.json` must be.

Without these checks a wrong value is an error of some function far from here,
which names no field, or a model that computes nonsense.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import numpy as np

Fields = Mapping[str, Any]

# Sizes of a model are int32.
_MOST = 2**31 - 1
_REAL = int | float | np.integer | np.floating
_LEAST_FLOAT, _MOST_FLOAT = 1.2e-38, 3e38


class _Count(NamedTuple):
  """A whole number, from `least` to `most`."""

  least: int = 1
  most: int = _MOST

  def problem(self, value: Any) -> str:
    """What is needed, if it is another value; else ''."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if whole and self.least <= value <= self.most:
      return ''
    return f'a whole number from {self.least} to {self.most} is needed'


class _Number(NamedTuple):
  """A finite number above 0."""

  most: float = _MOST_FLOAT

  def problem(self, value: Any) -> str:
    """See `_Count`."""
    real = isinstance(value, _REAL) and not isinstance(value, bool)
    if real and _LEAST_FLOAT <= value <= self.most:
      return ''
    most = '' if self.most == _MOST_FLOAT else f', at most {self.most:g},'
    return f'a finite number above 0{most} is needed'


class _Base(NamedTuple):
  """The base of rotary frequencies."""

  def problem(self, value: Any) -> str:
    """See `_Count`."""
    needed = (
      'a number above 1 is needed, so that later entries turn more slowly'
    )
    return _Number().problem(value) or ('' if value > 1 else needed)


class _Flag(NamedTuple):
  """True or false."""

  def problem(self, value: Any) -> str:
    """See `_Count`."""
    return '' if isinstance(value, bool) else 'true or false is needed'


class _Text(NamedTuple):
  """A text."""

  def problem(self, value: Any) -> str:
    """See `_Count`."""
    return '' if isinstance(value, str) else 'a text is needed'


class _Listed(NamedTuple):
  """A list."""

  of: Any
  words: str

  def problem(self, value: Any) -> str:
    """See `_Count`."""
    fits = isinstance(value, Sequence) and not isinstance(value, str)
    if fits and all(map(self.of, value)):
      return ''
    return f'a list of {self.words} is needed'


def _is_count(value: Any) -> bool:
  return not _Count(0).problem(value)


COUNT, SHARE, ABOVE_0, BASE = _Count(), _Number(1.0), _Number(), _Base()
_KINDS = {
  **dict.fromkeys(
    (
      'vocab_size', 'hidden_size', 'intermediate_size',
      'num_attention_heads', 'num_key_value_heads', 'head_dim',
      'max_position_embeddings', 'original_max_position_embeddings',
      'sliding_window', 'sliding_window_pattern', 'num_experts_per_tok',
      'moe_intermediate_size', 'decoder_sparse_step',
    ),
    _Count(),
  ),
  # Lists of this length are made; no model is near.
  'num_hidden_layers': _Count(most=10_000),
  'num_experts': _Count(0, 1_000_000),
  'max_window_layers': _Count(0),
  # Of the mean square of what a norm reads: with 1 or more it would be most of
  # it.
  'rms_norm_eps': _Number(1.0),
  **dict.fromkeys(
    (
      'query_pre_attn_scalar', 'attn_logit_softcapping',
      'final_logit_softcapping',
    ),
    _Number(),
  ),
  **dict.fromkeys(('rope_theta', 'rope_local_base_freq'), _Base()),
  **dict.fromkeys(
    ('tie_word_embeddings', 'use_sliding_window', 'norm_topk_prob'), _Flag()
  ),
  'layer_types': _Listed(lambda kind: isinstance(kind, str), 'texts'),
  'mlp_only_layers': _Listed(_is_count, 'numbers of layers, from 0'),
}  # fmt: skip

_ROPE = {
  **dict.fromkeys(
    (
      'factor', 'low_freq_factor', 'high_freq_factor',
      'beta_fast', 'beta_slow', 'attention_factor', 'mscale', 'mscale_all_dim',
    ),
    _Number(),
  ),
  'rope_theta': _Base(),
  'original_max_position_embeddings': _Count(),
  'truncate': _Flag(),
  'rope_type': _Text(),
  'type': _Text(),
}  # fmt: skip


# Null means something there: as many as heads, say, or no window.
_NULL = {
  'num_key_value_heads', 'head_dim', 'sliding_window', 'max_window_layers',
  'max_position_embeddings', 'original_max_position_embeddings',
  'final_logit_softcapping', 'attn_logit_softcapping', 'mlp_only_layers',
  'layer_types', 'rope_theta', 'rope_local_base_freq',
}  # fmt: skip


def check(fields: Fields, called: Mapping[str, str]) -> None:
  """Raises a ValueError that names a field with a value which means nothing.

  Args:
    fields: Those that are read, with defaults; None is null.
    called: What a `config.json` calls a field, where it has another name.
  """
  for name, value in fields.items():
    kind = _KINDS.get(name)
    if kind is not None and (value is not None or name not in _NULL):
      given = f'{called.get(name, name)}={value!r:.60}'
      _require(not kind.problem(value), given, kind, value)
  for name in ('rope_scaling', 'rope_parameters'):
    rope = fields.get(name)
    if rope and not isinstance(rope, Mapping):
      raise ValueError(
        f'config.json has {name}={rope!r:.60}, which is no object with fields; '
        'give one, such as {"rope_type": "linear", "factor": 2.0}.'
      )
  _check_rope(fields.get('rope_scaling') or fields.get('rope_parameters') or {})
  for problem in _contradictions(fields):
    raise ValueError(f'config.json has {problem}; correct one of them.')


def _require(ok: bool, given: str, kind: Any, value: Any) -> None:
  if not ok:
    raise ValueError(
      f'config.json has {given}, but {kind.problem(value)}; correct it, or '
      'copy the file again.'
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
    for name, kind in _ROPE.items():
      value = fields.get(name)
      given = f'{part}{name}={value!r:.60} for rotary positions'
      _require(value is None or not kind.problem(value), given, kind, value)
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
  if head_dim % 2:
    yield (
      f'heads of {head_dim} entries (head_dim, or hidden_size over '
      'num_attention_heads), but rotary positions turn pairs of them'
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
  for place in fields.get('mlp_only_layers') or ():
    if place >= layers:
      yield f'mlp_only_layers with {place}, and num_hidden_layers={layers}'
