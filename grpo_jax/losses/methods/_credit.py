"""Methods that differ in what a completion is credited for."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import credit_pass_at_k
from grpo_jax.losses._credit import normalize_each_reward
from grpo_jax.losses._entropy import LOG_2
from grpo_jax.losses._entropy import silence_uncertain
from grpo_jax.losses._entropy import subtract_entropy
from grpo_jax.losses._objective import importance_weighted
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._shaping import normalize_over_completions
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import weigh_conflict_tokens


def passk(k=4, right_reward=1.0, low=0.2, high=0.2) -> LossTransform:
  r"""Pass@k training: credit for the success of any k completions.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  with the advantage of `credit_pass_at_k`; groups need more than k completions.

  Args:
    k: Completions that get a chance together.
    right_reward: A completion is right from this reward on.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.

  Returns:
    A `LossTransform`. The method of arXiv 2503.19595, which credits the best
    completion with its lead over the second, has `best_minus_second()` there.

  References:
    Chen et al., `Pass@k Training <https://arxiv.org/abs/2508.10751>`_, 2025
  """
  return chain(
    credit_pass_at_k(k, right_reward),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def gdpo(
  weights=None, low=0.2, high=0.2, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group reward-Decoupled normalization Policy Optimization.

  .. math::
    A_i = \operatorname{z}_{batch}\Bigl(\sum_k w_k
      \frac{r_{ik} - \bar r_k}{\sigma(r_k)}\Bigr), \quad
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  Each of several rewards is normalised by itself, so none drowns in another.

  Args:
    weights: One number per reward function; None: all 1. (A config that names
      this method without them passes the weights of its rewards.)
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    deviation: `'population'` or `'sample'`, of both normalisations.
    epsilon: Added to the deviations.

  Returns:
    A `LossTransform`.

  References:
    Liu et al., `GDPO <https://arxiv.org/abs/2601.05242>`_, 2026
  """
  return chain(
    normalize_each_reward(weights, deviation, epsilon),
    normalize_over_completions(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )


def gtpo_conflict(
  entropy_coefficient=0.1, entropy_limit=LOG_2
) -> LossTransform:
  r"""GTPO of Simoni et al.: conflict tokens are protected, entropy is charged.

  .. math::
    J = \frac{1}{B} \sum_i \frac{\delta_i}{|o_i|} \bigl(r_i - \bar r -
      \gamma \langle H \rangle_i\bigr) \sum_t \lambda_{it} s_{it}

  `lambda` is 0 on conflict tokens of completions below the mean and 2 above it;
  `delta` is 0 for completions of high entropy if training began with little.

  Args:
    entropy_coefficient: `gamma`, per nat; 0 leaves the charge out.
    entropy_limit: Nats; infinite leaves `delta` out.

  Returns:
    A `LossTransform`: meant for one update per rollout, as it has no clip.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025. (Another
    GTPO is `gtpo_entropy`.) Released code divides by the number of conflict
    tokens too, and filters at 0.7 nats from the start.
  """
  entropy = ()
  if entropy_coefficient != 0:
    entropy += (subtract_entropy(entropy_coefficient),)
  if entropy_limit != float('inf'):
    entropy += (silence_uncertain(entropy_limit),)
  return chain(
    center_by_group(),
    *entropy,
    mean_over_sequences(),
    weigh_conflict_tokens(),
    importance_weighted(),
  )
