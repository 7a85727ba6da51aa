"""The audit of a method: six readings, each of which stands alone too."""

import math
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import losses
from grpo_jax.diagnostics import _clipping
from grpo_jax.diagnostics import _prefix
from grpo_jax.diagnostics import _probe
from grpo_jax.diagnostics import _row
from grpo_jax.diagnostics import _scale
from grpo_jax.diagnostics import _tree
from grpo_jax.diagnostics import _value


class Audit(NamedTuple):
  """What a method does, read off by evaluating it."""

  requires: tuple[str, ...]  # optional fields that it reads
  scope: str  # 'row', or 'batch' if it couples completions
  row: _row.Row  # its row in the table of surrogates
  prefix: _prefix.PrefixBias  # what is left of W_agg on shared tokens
  tree: _tree.TreeBias  # the exact bias of a first token's gradient
  scale: _scale.Scale  # what r -> phi r does to gradient and Adam step
  clipping: _clipping.Clipping  # where the gradient is exactly 0
  value: _value.Value  # what the loss's value says at ratio 1


def audit(
  method: losses.LossTransform, fields: _probe.Fields | None = None
) -> Audit:
  """Reads a method off by evaluating it; nothing is known of its name.

  Args:
    method: Any chain, one of a user's own too.
    fields: For a method that requires fields of its own: takes the batch of a
      probe, arrays [P,G,...], and returns these fields by name.

  Returns:
    An `Audit`; see the types of its fields.

  Raises:
    ValueError: The method requires a field that nobody supplies.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based
    Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026

  >>> from grpo_jax import losses
  >>> result = audit(losses.methods.dapo())
  >>> result.row.weight, result.row.advantage
  ('1/N, groups of equal rewards dropped', '(r - mean)/std')
  >>> result.clipping.text
  'zero above 1.28 for A > 0 and below 0.8 for A < 0'
  """
  return Audit(
    tuple(sorted(method.requires)),
    method.scope,
    _row.surrogate_row(method, fields),
    _prefix.prefix_bias(method, fields),
    _tree.tree_bias(method, fields),
    _scale.reward_scale(method, fields),
    _clipping.clipping(method, fields),
    _value.loss_value(method, fields),
  )


def to_json(value: Any) -> Any:
  """NamedTuples, tuples and arrays as what `json.dumps` takes.

  Args:
    value: An `Audit`, or any part of one.

  Returns:
    Dicts, lists, strings, booleans and numbers; None for what is not finite.
  """
  if hasattr(value, '_asdict'):
    return {name: to_json(part) for name, part in value._asdict().items()}
  if isinstance(value, np.ndarray | np.generic):
    return to_json(value.tolist())
  if isinstance(value, list | tuple):
    return [to_json(part) for part in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
