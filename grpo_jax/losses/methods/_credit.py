"""Methods that differ in what a completion is credited for."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import credit_pass_at_k
from grpo_jax.losses._credit import normalize_each_reward
from grpo_jax.losses._entropy import LOG_2
from grpo_jax.losses._entropy import silence_uncertain
from grpo_jax.losses._entropy import subtract_entropy
from grpo_jax.losses._from_run import takes_from_run
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._shaping import normalize_over_completions
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import weigh_conflict_tokens


@takes_from_run(right_reward='right_reward')
def passk(k=4, right_reward=1.0, low=0.2, high=0.2) -> LossTransform:
  r"""Pass@k training: credit for the success of any k completions.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  The advantage is that of `credit_pass_at_k`, which needs groups of more than k
  completions. The method of arXiv 2503.19595 credits the best completion with
  its lead over the second; it has `best_minus_second()` in that place.

  Args:
    k: Size of the subsets, an integer. A subset succeeds if one of its
      completions is right.
    right_reward: The smallest reward of a right completion, a number. A run
      takes its `evaluation.right_reward` times the weight of its first reward.
    low, high: See `help(losses.methods)`.

  References:
    Chen et al., `Pass@k Training <https://arxiv.org/abs/2508.10751>`_, 2025
  """
  return chain(
    credit_pass_at_k(k, right_reward),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


@takes_from_run(weights='reward_weights')
def gdpo(
  weights=None, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group reward-Decoupled normalization Policy Optimization.

  .. math::
    A_i = \operatorname{z}\Bigl(\sum_k w_k
      \frac{r_{ik} - \bar r_k}{\sigma(r_k)}\Bigr), \quad
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  `z` is the z-score among all completions of the rollout. Each of several
  rewards is normalised by itself first, so that none is hidden by another of
  larger scale.

  Args:
    weights: :math:`w_k`, one number per reward function; None: all 1. In a run
      they are the weights of its rewards, unless the config gives others.
    low, high: See `help(losses.methods)`.
    deviation, epsilon: Likewise, of both normalisations.

  References:
    Liu et al., `GDPO <https://arxiv.org/abs/2601.05242>`_, 2026
  """
  return chain(
    normalize_each_reward(weights, deviation, epsilon),
    # The deviation of a sum of z-scores depends on how many there are.
    normalize_over_completions(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def gtpo_conflict(
  entropy_coefficient=0.1, entropy_limit=LOG_2
) -> LossTransform:
  r"""GTPO of Simoni et al.: protects conflict tokens, penalises entropy.

  .. math::
    J = \frac{1}{B} \sum_i \frac{\delta_i}{|o_i|} \bigl(r_i - \bar r -
      \gamma \langle H \rangle_i\bigr) \sum_t \lambda_{it} s_{it}

  A conflict token is one that a right and a wrong completion of the group share
  (`conflict_tokens`). There :math:`\lambda` is 0 in completions below the
  group's mean reward and 2 above it; elsewhere it is 1.
  :math:`\langle H \rangle_i` is the mean entropy of the completion.
  :math:`\delta_i` is 0 where that exceeds the limit, if the mean entropy of the
  first rollout was below :math:`\log 2`; otherwise it is 1.

  The method has no clip, so it is meant for one update per rollout. Released
  code also divides by the number of conflict tokens, and filters at 0.7 nats
  from the start. (Another method called GTPO is `gtpo_entropy`.)

  Args:
    entropy_coefficient: :math:`\gamma`, per nat; 0 leaves the penalty out.
    entropy_limit: Limit for :math:`\delta`, in nats; infinity leaves
      :math:`\delta` out.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  # A transform that is left out does not require the old entropy either.
  entropy = ()
  if entropy_coefficient != 0:
    entropy += (subtract_entropy(entropy_coefficient),)
  if entropy_limit != float('inf'):
    entropy += (silence_uncertain(entropy_limit),)
  return chain(
    center_by_group(),
    *entropy,
    # The mean comes first: its lengths count the tokens of weight 0 as well.
    mean_over_sequences(),
    weigh_conflict_tokens(),
    importance_weighted(),
  )
