"""Composable losses for group-based RL: arrays in, arrays out.

Needs jax alone. Read `_base.py` for the types, `_stages.py` for how to write a
transform of your own, `methods/` for the methods of the literature.
"""

from grpo_jax.losses import methods
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import SurrogateTerms
from grpo_jax.losses._base import chain
from grpo_jax.losses._base import check_batch
from grpo_jax.losses._base import credit
from grpo_jax.losses._base import make_batch
from grpo_jax.losses._base import prepare
from grpo_jax.losses._base import surrogate_loss
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import constant_advantage
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import leave_one_out
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._credit import use_reward
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._ops import uniform_groups
from grpo_jax.losses._penalty import add_kl
from grpo_jax.losses._penalty import penalize_covariance
from grpo_jax.losses._ratio import clip_log_ratio
from grpo_jax.losses._ratio import pool_log_ratio
from grpo_jax.losses._stages import add_penalty
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import on_keep
from grpo_jax.losses._stages import on_log_ratio
from grpo_jax.losses._stages import on_objective
from grpo_jax.losses._stages import on_reward
from grpo_jax.losses._stages import on_weight
from grpo_jax.losses._stages import set_advantage
from grpo_jax.losses._stages import set_objective
from grpo_jax.losses._stages import set_weight
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import sum_over_tokens

__all__ = (
  'Batch',
  'LossTransform',
  'SurrogateTerms',
  'add_kl',
  'add_penalty',
  'center_by_group',
  'chain',
  'check_batch',
  'clip_log_ratio',
  'constant_advantage',
  'credit',
  'drop_uniform_groups',
  'importance_weighted',
  'leave_one_out',
  'make_batch',
  'mean_over_sequences',
  'mean_over_tokens',
  'methods',
  'normalize_by_group',
  'on_advantage',
  'on_keep',
  'on_log_ratio',
  'on_objective',
  'on_reward',
  'on_weight',
  'penalize_covariance',
  'pool_log_ratio',
  'ppo_clip',
  'prepare',
  'score_function',
  'set_advantage',
  'set_objective',
  'set_weight',
  'shape_overlong_reward',
  'sum_over_tokens',
  'surrogate_loss',
  'uniform_groups',
  'use_reward',
)
