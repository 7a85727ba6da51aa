"""Composable losses for group-based RL: arrays in, arrays out.

Needs jax alone. Read `_base.py` for the types, `_stages.py` for how to write a
transform of your own, `methods/` for the methods of the literature.
"""

from grpo_jax.losses import contrib
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
from grpo_jax.losses._base import with_required
from grpo_jax.losses._conflict import conflict_tokens
from grpo_jax.losses._controllers import Controller
from grpo_jax.losses._controllers import adaptive_kl
from grpo_jax.losses._controllers import entropy_target
from grpo_jax.losses._controllers import first_entropy
from grpo_jax.losses._controllers import scheduled
from grpo_jax.losses._correction import gate_geometric_mean
from grpo_jax.losses._correction import mask_sequence_importance
from grpo_jax.losses._correction import mask_token_importance
from grpo_jax.losses._correction import truncate_sequence_importance
from grpo_jax.losses._correction import truncate_token_importance
from grpo_jax.losses._credit import best_minus_second
from grpo_jax.losses._credit import center_by_batch
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import center_by_length
from grpo_jax.losses._credit import constant_advantage
from grpo_jax.losses._credit import credit_pass_at_k
from grpo_jax.losses._credit import divide_by_group_mean
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import leave_one_out
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import normalize_each_reward
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._credit import use_reward
from grpo_jax.losses._entropy import credit_completions_by_entropy
from grpo_jax.losses._entropy import credit_tokens_by_entropy
from grpo_jax.losses._entropy import mask_low_entropy
from grpo_jax.losses._entropy import silence_uncertain
from grpo_jax.losses._entropy import subtract_entropy
from grpo_jax.losses._gate import detach_covariance
from grpo_jax.losses._gate import gate_binary_kl
from grpo_jax.losses._gate import gate_probability_change
from grpo_jax.losses._gate import mask_off_policy_negatives
from grpo_jax.losses._objective import capped_score_function
from grpo_jax.losses._objective import gamma_weighted_score
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._objective import sigmoid_gate
from grpo_jax.losses._ops import uniform_groups
from grpo_jax.losses._penalty import add_entropy_bonus
from grpo_jax.losses._penalty import add_kl
from grpo_jax.losses._penalty import imitate_positives
from grpo_jax.losses._penalty import penalize_covariance
from grpo_jax.losses._penalty import pull_to_old
from grpo_jax.losses._ratio import average_ratio
from grpo_jax.losses._ratio import clip_log_ratio
from grpo_jax.losses._ratio import pool_log_ratio
from grpo_jax.losses._ratio import sum_log_ratio
from grpo_jax.losses._recenter import recenter_branches
from grpo_jax.losses._recenter import recenter_shared_prefix
from grpo_jax.losses._shaping import clip_advantage
from grpo_jax.losses._shaping import divide_by_batch_deviation
from grpo_jax.losses._shaping import drop_truncated
from grpo_jax.losses._shaping import keep_largest_advantages
from grpo_jax.losses._shaping import normalize_over_completions
from grpo_jax.losses._shaping import normalize_over_tokens
from grpo_jax.losses._shaping import subtract_kl
from grpo_jax.losses._shaping import subtract_kl_to_go
from grpo_jax.losses._stages import CREDIT_METRIC
from grpo_jax.losses._stages import add_penalty
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import on_keep
from grpo_jax.losses._stages import on_log_ratio
from grpo_jax.losses._stages import on_objective
from grpo_jax.losses._stages import on_reward
from grpo_jax.losses._stages import on_weight
from grpo_jax.losses._stages import on_weighted_advantage
from grpo_jax.losses._stages import set_advantage
from grpo_jax.losses._stages import set_objective
from grpo_jax.losses._stages import set_weight
from grpo_jax.losses._weight import gate_small_advantages
from grpo_jax.losses._weight import mean_over_prompts
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import scale_by_informative_groups
from grpo_jax.losses._weight import sum_over_tokens
from grpo_jax.losses._weight import weigh_conflict_tokens

__all__ = (
  'Batch',
  'CREDIT_METRIC',
  'Controller',
  'LossTransform',
  'SurrogateTerms',
  'adaptive_kl',
  'add_entropy_bonus',
  'add_kl',
  'add_penalty',
  'average_ratio',
  'best_minus_second',
  'capped_score_function',
  'center_by_batch',
  'center_by_group',
  'center_by_length',
  'chain',
  'check_batch',
  'clip_advantage',
  'clip_log_ratio',
  'conflict_tokens',
  'constant_advantage',
  'contrib',
  'credit',
  'credit_completions_by_entropy',
  'credit_pass_at_k',
  'credit_tokens_by_entropy',
  'detach_covariance',
  'divide_by_batch_deviation',
  'divide_by_group_mean',
  'drop_truncated',
  'drop_uniform_groups',
  'entropy_target',
  'first_entropy',
  'gamma_weighted_score',
  'gate_binary_kl',
  'gate_geometric_mean',
  'gate_probability_change',
  'gate_small_advantages',
  'imitate_positives',
  'importance_weighted',
  'keep_largest_advantages',
  'leave_one_out',
  'make_batch',
  'mask_low_entropy',
  'mask_off_policy_negatives',
  'mask_sequence_importance',
  'mask_token_importance',
  'mean_over_prompts',
  'mean_over_sequences',
  'mean_over_tokens',
  'methods',
  'normalize_by_group',
  'normalize_each_reward',
  'normalize_over_completions',
  'normalize_over_tokens',
  'on_advantage',
  'on_keep',
  'on_log_ratio',
  'on_objective',
  'on_reward',
  'on_weight',
  'on_weighted_advantage',
  'penalize_covariance',
  'pool_log_ratio',
  'ppo_clip',
  'prepare',
  'pull_to_old',
  'recenter_branches',
  'recenter_shared_prefix',
  'scale_by_informative_groups',
  'scheduled',
  'score_function',
  'set_advantage',
  'set_objective',
  'set_weight',
  'shape_overlong_reward',
  'sigmoid_gate',
  'silence_uncertain',
  'subtract_entropy',
  'subtract_kl',
  'subtract_kl_to_go',
  'sum_log_ratio',
  'sum_over_tokens',
  'surrogate_loss',
  'truncate_sequence_importance',
  'truncate_token_importance',
  'uniform_groups',
  'use_reward',
  'weigh_conflict_tokens',
  'with_required',
)
