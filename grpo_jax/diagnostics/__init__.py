"""What a loss does, measured: arrays in, plain numbers out. See README.md.

Needs jax and optax alone; `plot` needs matplotlib.
"""

from grpo_jax.diagnostics._audit import COLUMNS
from grpo_jax.diagnostics._audit import Audit
from grpo_jax.diagnostics._audit import audit
from grpo_jax.diagnostics._audit import cells
from grpo_jax.diagnostics._audit import describe
from grpo_jax.diagnostics._audit import to_json
from grpo_jax.diagnostics._clipping import clipping
from grpo_jax.diagnostics._clipping import plot
from grpo_jax.diagnostics._prefix import prefix_bias
from grpo_jax.diagnostics._prefix import tree_bias
from grpo_jax.diagnostics._row import surrogate_row
from grpo_jax.diagnostics._scale import reward_scale
from grpo_jax.diagnostics._value import loss_value
from grpo_jax.losses import SharedPrefix
from grpo_jax.losses import prefix_summary
from grpo_jax.losses import shared_prefix_weight

__all__ = (
  'COLUMNS',
  'Audit',
  'SharedPrefix',
  'audit',
  'cells',
  'clipping',
  'describe',
  'loss_value',
  'plot',
  'prefix_bias',
  'prefix_summary',
  'reward_scale',
  'shared_prefix_weight',
  'surrogate_row',
  'to_json',
  'tree_bias',
)
