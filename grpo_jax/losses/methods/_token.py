"""GRPO and the methods that keep its token-level ratio and clip."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import drop_uniform_groups
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._credit import shape_overlong_reward
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._penalty import add_kl
from grpo_jax.losses._weight import mean_over_sequences
from grpo_jax.losses._weight import mean_over_tokens
from grpo_jax.losses._weight import sum_over_tokens


def grpo(
  low=0.2, high=0.2, kl_coefficient=0.04, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Group Relative Policy Optimization.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr) - \beta\, k_3

  Args:
    low: Distance of the lower clip bound from 1; the paper names no number.
    high: Distance of the upper clip bound from 1.
    kl_coefficient: `beta`, per nat. 0 leaves the term out, and with it the
      reference model. The paper has 0.04, DeepSeek-R1 0.001.
    deviation: `'population'` or `'sample'`; the paper says "std" only.
    epsilon: Added to the deviation; released code has 1e-4 or 1e-6.

  Returns:
    A `LossTransform`.

  References:
    Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024
  """
  surrogate = chain(
    normalize_by_group(deviation, epsilon),
    mean_over_sequences(),
    ppo_clip(low, high),
  )
  if isinstance(kl_coefficient, int | float) and kl_coefficient == 0:
    return surrogate
  return chain(surrogate, add_kl(kl_coefficient))


def dr_grpo(max_tokens=3000, low=0.2, high=0.2) -> LossTransform:
  r"""GRPO done right: no division by the deviation or by the length.

  .. math::
    J = \frac{1}{B L_{max}} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr), \quad
    A_i = r_i - \bar r

  Args:
    max_tokens: `L_max`, a constant: the completion budget. It sets the scale of
      the loss and nothing else. 3000 is the released code's.
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.

  Returns:
    A `LossTransform`.

  References:
    Liu et al., `Understanding R1-Zero-Like Training
    <https://arxiv.org/abs/2503.20783>`_, 2025
  """
  return chain(
    center_by_group(), sum_over_tokens(max_tokens), ppo_clip(low, high)
  )


def dapo(
  low=0.2, high=0.28, soft_tokens=4096, max_tokens=20480
) -> LossTransform:
  r"""Decoupled clip and dynamic sampling policy optimization.

  .. math::
    J = \frac{1}{N} \sum_{i,t} \min\bigl(s_{it} A_i,
      \operatorname{clip}(s_{it}, 1 - l, 1 + h) A_i\bigr)

  over groups whose (shaped) rewards differ. Refilling the batch with such
  groups is the rollout's work.

  Args:
    low: Distance of the lower clip bound from 1.
    high: Distance of the upper clip bound from 1.
    soft_tokens: Width of the length penalty's ramp, in tokens.
    max_tokens: Length at which the length penalty reaches 1, in tokens.

  Returns:
    A `LossTransform`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """
  return chain(
    shape_overlong_reward(soft_tokens, max_tokens),
    normalize_by_group(),
    drop_uniform_groups(),
    mean_over_tokens(),
    ppo_clip(low, high),
  )
