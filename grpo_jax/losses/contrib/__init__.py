"""Methods and transforms that no paper has, or that are not yet verified.

A config names them as it names a method of a user's own:
`'grpo_jax.losses.contrib:coasting_grpo'`.
"""

from grpo_jax.losses.contrib._brakes import coasting_clip
from grpo_jax.losses.contrib._brakes import coasting_grpo
from grpo_jax.losses.contrib._brakes import rollback_clip
from grpo_jax.losses.contrib._brakes import rollback_grpo
from grpo_jax.losses.contrib._normalization import grpo_without_std

__all__ = (
  'coasting_clip',
  'coasting_grpo',
  'grpo_without_std',
  'rollback_clip',
  'rollback_grpo',
)
