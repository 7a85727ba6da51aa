"""Rotary positions as `config.json` writes them, in its older and newer form.

The older form has `rope_theta` and `rope_scaling` beside each other. Since
transformers 5 both are in `rope_parameters`, which may hold one such dict for
each kind of layer. We read both, and write the older one: transformers 4 and 5,
and what is built on either, read it.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from grpo_jax.models.config import ModelConfig
from grpo_jax.models.config import RopeScaling
from grpo_jax.models.weights.families import Family

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Rope:
  """The rotary positions of one kind of layer."""

  base: float
  scaling: RopeScaling | None


def read(row: Family, fields: Fields) -> tuple[Rope, Rope]:
  """The rotary positions of layers without a window, and of those with one.

  Args:
    row: The family.
    fields: Of `config.json`.

  Raises:
    ValueError: They are scaled in a way that is not built here.
  """
  base, local_base = row.rope_bases
  both = fields.get('rope_scaling') or fields.get('rope_parameters') or {}
  full = both.get('full_attention') or {}
  local = both.get('sliding_attention') or {}
  if not full and not local:  # one dict for all kinds of layers
    full, local = both, both if local_base is None else {}
  base = fields.get('rope_theta') or base
  if local_base is None:
    local_base = base
  local_base = fields.get('rope_local_base_freq') or local_base
  return _rope(full, base, fields), _rope(local, local_base, fields)


def _rope(given: Fields, base: float, fields: Fields) -> Rope:
  """One kind of layer, from the dict that is written for it."""
  base = float(given.get('rope_theta') or base)
  rotated = given.get('partial_rotary_factor', 1.0)
  if rotated not in (None, 1.0):
    raise ValueError(
      f'config.json has partial_rotary_factor={rotated}, but here all entries '
      'of a head are rotated; give a model with 1.'
    )
  kind = given.get('rope_type') or given.get('type') or 'default'
  if kind == 'default':
    return Rope(base, None)
  if kind not in _SCALED:
    raise ValueError(
      f'config.json scales rotary positions by rope_type={kind!r}, which is '
      'not built here; give a model with one of these: default, '
      f'{", ".join(_SCALED)}.'
    )
  trained, factor = _trained(given, fields), given.get('factor')
  if factor is None and trained:
    factor = (fields.get('max_position_embeddings') or 0) / trained
  return Rope(base, _SCALED[kind](given, float(factor or 0), trained))


def context_tokens(fields: Fields) -> int | None:
  """How many tokens a model was made for, prompt and completion together.

  `max_position_embeddings` includes what rotary positions are scaled by, but
  for YaRN, which is often switched on in a `config.json` that says no more than
  the trained length: there it is the factor times that length.

  Args:
    fields: Of `config.json`.

  Returns:
    Tokens; None if the `config.json` does not say.
  """
  most = fields.get('max_position_embeddings')
  both = fields.get('rope_scaling') or fields.get('rope_parameters') or {}
  if not isinstance(both, Mapping):  # `read` refuses it
    return most
  for given in (both, *both.values()):
    if not isinstance(given, Mapping):
      continue
    kind = given.get('rope_type') or given.get('type') or 'default'
    factor, trained = given.get('factor'), _trained(given, fields)
    scales = kind == 'yarn' or (most is None and kind in _SCALED)
    if scales and trained and factor:
      return int(trained * factor)
  return most


def _trained(given: Fields, fields: Fields) -> int:
  """The tokens that a model was trained on before it was scaled; 0: unsaid."""
  trained = fields.get('original_max_position_embeddings')
  trained = trained or given.get('original_max_position_embeddings')
  return trained or fields.get('max_position_embeddings') or 0


def _linear(given: Fields, factor: float, trained: int) -> RopeScaling:
  del given, trained
  return RopeScaling('linear', factor)


def _llama3(given: Fields, factor: float, trained: int) -> RopeScaling:
  return RopeScaling(
    'llama3',
    factor,
    trained,
    low_factor=float(given.get('low_freq_factor') or 1),
    high_factor=float(given.get('high_freq_factor') or 4),
  )


def _yarn(given: Fields, factor: float, trained: int) -> RopeScaling:
  attention = given.get('attention_factor')
  over, under = given.get('mscale'), given.get('mscale_all_dim')
  if attention is None and over and under and factor > 1:
    # As DeepSeek gives it. Both None means RopeScaling's own default.
    attention = (0.1 * over * math.log(factor) + 1) / (
      0.1 * under * math.log(factor) + 1
    )
  return RopeScaling(
    'yarn',
    factor,
    trained,
    beta_slow=float(given.get('beta_slow') or 1),
    beta_fast=float(given.get('beta_fast') or 32),
    attention_factor=attention,
    truncate=given.get('truncate') is not False,
  )


_SCALED = {'linear': _linear, 'llama3': _llama3, 'yarn': _yarn}


def write(row: Family, config: ModelConfig) -> dict[str, Any]:
  """The fields of the rotary positions, for `config.json`.

  Args:
    row: The family.
    config: The model.
  """
  fields: dict[str, Any] = dict(rope_theta=config.rope_base)
  local = [k.rope_base for k in config.pattern if k.window_tokens is not None]
  if row.rope_bases[1] is not None and local and local[0] is not None:
    fields['rope_local_base_freq'] = local[0]
  fields['rope_scaling'] = _written(config.rope_scaling)
  return fields


def _written(scaling: RopeScaling | None) -> dict[str, Any] | None:
  if scaling is None:
    return None
  written: dict[str, Any] = dict(rope_type=scaling.kind, factor=scaling.factor)
  if scaling.kind == 'linear':
    return written
  written['original_max_position_embeddings'] = scaling.original_tokens
  if scaling.kind == 'llama3':
    return dict(
      written,
      low_freq_factor=scaling.low_factor,
      high_freq_factor=scaling.high_factor,
    )
  # The others only where they are not what is meant without them.
  usual = RopeScaling('yarn', scaling.factor, scaling.original_tokens)
  for name in ('attention_factor', 'beta_slow', 'beta_fast', 'truncate'):
    if getattr(scaling, name) != getattr(usual, name):
      written[name] = getattr(scaling, name)
  return written
