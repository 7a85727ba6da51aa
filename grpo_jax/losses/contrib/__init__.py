"""Methods and transforms that no paper has, or that are not yet verified.

A config names them `'grpo_jax.losses.contrib:coasting_grpo'`, as it does a
user's own.
"""

from grpo_jax.losses.contrib._brakes import coasting_clip
from grpo_jax.losses.contrib._brakes import coasting_grpo
from grpo_jax.losses.contrib._brakes import rollback_clip
from grpo_jax.losses.contrib._brakes import rollback_grpo

__all__ = (
  'coasting_clip',
  'coasting_grpo',
  'rollback_clip',
  'rollback_grpo',
)
