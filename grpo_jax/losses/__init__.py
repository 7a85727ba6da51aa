r"""Composable losses for group-based RL: arrays in, arrays out.

The package needs jax alone and knows no model, tokenizer or config. A method is
a `chain` of transforms, and every transform fills in or edits one part of

.. math:: J(\theta) = \sum_{i,t} w_{it} \bigl(f(s_{it}(\theta), A_{it})
                       - R_{it}(\theta)\bigr)

=====  =============================  ======================================
`A`    advantage (credit)             from the reward, once per rollout
`w`    weight (aggregation)           from the kept tokens, once per optimizer
                                      batch
`s`    ratio policy / old policy      differentiated, in every micro-batch
`f`    objective (trust region)       likewise
`R`    penalty (KL, entropy, ...)     likewise
=====  =============================  ======================================

`methods` has the methods of the literature by name, `_base.py` the types and
the three functions that run a chain: `credit`, `prepare`, `surrogate_loss`.

A transform of your own
-----------------------

Take the stage constructor of the part that you want to change, and give it one
array function:

- once per rollout: `on_reward`, `set_advantage`, `on_advantage`, `on_keep`;
- once per optimizer batch: `set_weight`, `on_weight`, `on_weighted_advantage`;
- differentiated: `on_log_ratio`, `set_objective`, `on_objective`,
  `add_penalty`.

>>> from grpo_jax import losses
>>> def favour_short(strength=0.1):
...   def reward(reward, batch, strength):
...     return reward - strength * batch.mask.sum(-1) / batch.mask.shape[-1]
...   return losses.on_reward(reward, strength=strength)
>>> method = losses.chain(favour_short(), losses.methods.dr_grpo())

All stage constructors share these arguments:

- `function` gets arrays and returns the new value of its field. Axes are
  `[P,G,T]`: prompts, completions per prompt, completion positions. It may also
  return a pair `(value, metrics)`. `metrics` is a dict of arrays `[P,G,T]`, of
  which the learner shows the mean over the trained tokens; a boolean array says
  which tokens something happened to. (The learner does not show metrics of the
  constructors that run once per optimizer batch.) The fields of an invalid
  completion are zero, and so is every per-token field but `tokens` outside the
  mask. What the function returns is set to zero in the same places. So the
  function needs no guards against padding.
- `requires` names the optional fields that the function reads: fields of
  `Batch` that may be None (`'logp_ref'`, `'entropy_old'`, ...), keys of
  `Batch.extras`, `'entropy'` for `terms.entropy`, or `'logp_top'` for
  `terms.logp_top` (see `LossTransform.top_tokens`). The learner computes such
  a field only if some transform of the chain requires it. A name that it does
  not know is one of your own, which `grpo-jax train` takes from the records of
  the prompts (see the README of this folder).
- `scope`, of the differentiated constructors, is `'batch'` if the function
  couples completions, as a rank or a mean over the optimizer batch does; the
  learner then makes a forward pass of the whole batch first. Otherwise it is
  `'row'`, and the learner may split the batch anywhere.
- `zero_without_advantage`, of the constructors that write the objective or the
  penalty, says that the value, its derivatives and every mark of clipped tokens
  are 0 where the advantage is 0. If it is true of the whole chain, the learner
  leaves out completions without an advantage.
- `**hyper` are the hyper-parameters, which the function gets by name. Each is a
  number, a schedule (a function of the rollout counter, which is 0 for the
  first rollout) or a `Controller`, which computes the number from what it
  measures on each rollout. All updates of one rollout see the same values.

Every constructor returns a `LossTransform`. `credit` refuses a chain in which
one stands in the wrong place, with a ValueError: the field that it edits is not
set yet, or what it writes has been read already.
"""

from grpo_jax.losses import contrib
from grpo_jax.losses import methods
from grpo_jax.losses._base import OF_TEACHER
from grpo_jax.losses._base import OF_TURNS
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
from grpo_jax.losses._contexts import SharedContext
from grpo_jax.losses._contexts import context_summary
from grpo_jax.losses._contexts import shared_context_weight
from grpo_jax.losses._controllers import Controller
from grpo_jax.losses._controllers import adaptive_kl
from grpo_jax.losses._controllers import entropy_target
from grpo_jax.losses._controllers import first_entropy
from grpo_jax.losses._controllers import scheduled
from grpo_jax.losses._correction import gate_geometric_mean
from grpo_jax.losses._correction import mask_sequence_importance
from grpo_jax.losses._correction import mask_stale
from grpo_jax.losses._correction import mask_token_importance
from grpo_jax.losses._correction import truncate_sequence_importance
from grpo_jax.losses._correction import truncate_token_importance
from grpo_jax.losses._credit import best_minus_second
from grpo_jax.losses._credit import center_by_batch
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import center_by_length
from grpo_jax.losses._credit import clip_advantage
from grpo_jax.losses._credit import constant_advantage
from grpo_jax.losses._credit import credit_pass_at_k
from grpo_jax.losses._credit import divide_by_batch_deviation
from grpo_jax.losses._credit import divide_by_group_deviation
from grpo_jax.losses._credit import divide_by_group_mean
from grpo_jax.losses._credit import drop_truncated
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import keep_largest_advantages
from grpo_jax.losses._credit import leave_one_out
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import normalize_each_reward
from grpo_jax.losses._credit import normalize_over_completions
from grpo_jax.losses._credit import normalize_over_tokens
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._credit import subtract_kl
from grpo_jax.losses._credit import subtract_kl_to_go
from grpo_jax.losses._credit import use_reward
from grpo_jax.losses._entropy import credit_completions_by_entropy
from grpo_jax.losses._entropy import credit_tokens_by_entropy
from grpo_jax.losses._entropy import mask_low_entropy
from grpo_jax.losses._entropy import silence_uncertain
from grpo_jax.losses._entropy import subtract_entropy
from grpo_jax.losses._from_run import arguments_from_run
from grpo_jax.losses._from_run import takes_from_run
from grpo_jax.losses._objective import average_ratio
from grpo_jax.losses._objective import capped_score_function
from grpo_jax.losses._objective import clip_by_age
from grpo_jax.losses._objective import clip_log_ratio
from grpo_jax.losses._objective import detach_covariance
from grpo_jax.losses._objective import gamma_weighted_score
from grpo_jax.losses._objective import gate_binary_kl
from grpo_jax.losses._objective import gate_probability_change
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import mask_off_policy_negatives
from grpo_jax.losses._objective import pool_log_ratio
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._objective import score_function
from grpo_jax.losses._objective import sigmoid_gate
from grpo_jax.losses._objective import sum_log_ratio
from grpo_jax.losses._ops import uniform_groups
from grpo_jax.losses._penalty import add_entropy_bonus
from grpo_jax.losses._penalty import add_kl
from grpo_jax.losses._penalty import imitate_positives
from grpo_jax.losses._penalty import penalize_covariance
from grpo_jax.losses._penalty import pull_to_old
from grpo_jax.losses._rows import Rows
from grpo_jax.losses._rows import batch_from_rows
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
from grpo_jax.losses._teacher import add_teacher_advantage
from grpo_jax.losses._teacher import add_teacher_kl
from grpo_jax.losses._teacher import add_teacher_top_kl
from grpo_jax.losses._trie import SharedPrefix
from grpo_jax.losses._trie import prefix_summary
from grpo_jax.losses._trie import recenter_branches
from grpo_jax.losses._trie import recenter_shared_prefix
from grpo_jax.losses._trie import shared_prefix_weight
from grpo_jax.losses._turns import add_credit_by_state
from grpo_jax.losses._turns import center_to_go_by_group
from grpo_jax.losses._turns import leave_one_out_to_go
from grpo_jax.losses._turns import mean_over_turns
from grpo_jax.losses._turns import normalize_to_go_by_group
from grpo_jax.losses._turns import normalize_turns_and_outcome
from grpo_jax.losses._weight import conflict_tokens
from grpo_jax.losses._weight import gate_small_advantages
from grpo_jax.losses._weight import mean_over_prompts
from grpo_jax.losses._weight import mean_over_sequence_sums
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import scale_by_informative_groups
from grpo_jax.losses._weight import weigh_conflict_tokens

__all__ = (
  'Batch',
  'CREDIT_METRIC',
  'Controller',
  'LossTransform',
  'OF_TEACHER',
  'OF_TURNS',
  'Rows',
  'SharedContext',
  'SharedPrefix',
  'SurrogateTerms',
  'adaptive_kl',
  'add_credit_by_state',
  'add_entropy_bonus',
  'add_kl',
  'add_penalty',
  'add_teacher_advantage',
  'add_teacher_kl',
  'add_teacher_top_kl',
  'arguments_from_run',
  'average_ratio',
  'batch_from_rows',
  'best_minus_second',
  'capped_score_function',
  'center_by_batch',
  'center_by_group',
  'center_by_length',
  'center_to_go_by_group',
  'chain',
  'check_batch',
  'clip_advantage',
  'clip_by_age',
  'clip_log_ratio',
  'conflict_tokens',
  'constant_advantage',
  'contrib',
  'context_summary',
  'credit',
  'credit_completions_by_entropy',
  'credit_pass_at_k',
  'credit_tokens_by_entropy',
  'detach_covariance',
  'divide_by_batch_deviation',
  'divide_by_group_deviation',
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
  'leave_one_out_to_go',
  'make_batch',
  'mask_low_entropy',
  'mask_off_policy_negatives',
  'mask_sequence_importance',
  'mask_stale',
  'mask_token_importance',
  'mean_over_prompts',
  'mean_over_sequence_sums',
  'mean_over_sequences',
  'mean_over_tokens',
  'mean_over_turns',
  'methods',
  'normalize_by_group',
  'normalize_each_reward',
  'normalize_over_completions',
  'normalize_over_tokens',
  'normalize_to_go_by_group',
  'normalize_turns_and_outcome',
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
  'prefix_summary',
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
  'shared_context_weight',
  'shared_prefix_weight',
  'sigmoid_gate',
  'silence_uncertain',
  'subtract_entropy',
  'subtract_kl',
  'subtract_kl_to_go',
  'sum_log_ratio',
  'surrogate_loss',
  'takes_from_run',
  'truncate_sequence_importance',
  'truncate_token_importance',
  'uniform_groups',
  'use_reward',
  'weigh_conflict_tokens',
  'with_required',
)
