"""Edits of the advantage and of what is trained (once per rollout)."""

import jax.numpy as jnp
import numpy as np

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import on_keep
from grpo_jax.losses._stages import on_reward


def subtract_kl(coefficient) -> LossTransform:
  r"""KL to the reference in the reward, as k1 summed over the completion.

  .. math:: r_i \leftarrow r_i - \beta \sum_t
              \bigl(\log \pi_{old}(o_{it}) - \log \pi_{ref}(o_{it})\bigr)

  In the reward the estimator k1 is right: the score function turns it into the
  gradient of KL(policy || reference). As a loss it would be noise.

  Args:
    coefficient: `beta`, per nat.

  Returns:
    A `LossTransform` that edits the reward.
  """

  def reward(reward, batch, coefficient):
    gap = batch.logp_old - batch.logp_ref
    return reward - coefficient * jnp.sum(gap, axis=-1)

  return on_reward(
    reward, requires=('logp_old', 'logp_ref'), coefficient=coefficient
  )


def subtract_kl_to_go(coefficient) -> LossTransform:
  r"""Per-token KL penalties, each charged to its token and those before it.

  .. math:: A_{it} \leftarrow A_{it} - \beta \sum_{s \ge t}
              \bigl(\log \pi_{old}(o_{is}) - \log \pi_{ref}(o_{is})\bigr)

  Args:
    coefficient: `beta`, per nat.

  Returns:
    A `LossTransform` that edits the advantage.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """

  def advantage(advantage, batch, coefficient):
    gap = batch.logp_old - batch.logp_ref
    to_go = jnp.flip(jnp.cumsum(jnp.flip(gap, axis=-1), axis=-1), axis=-1)
    return advantage - coefficient * to_go

  return on_advantage(
    advantage, requires=('logp_old', 'logp_ref'), coefficient=coefficient
  )


def divide_by_batch_deviation(
  deviation='population', epsilon=0.0, within_groups=False
) -> LossTransform:
  r"""Divides the advantage by the deviation of all rewards of the rollout.

  .. math:: A \leftarrow A / (\sigma_{batch}(r) + \epsilon)

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.
    within_groups: Whether the deviation is that of the rewards around their
      groups' means, which leaves out how the prompts differ.

  Returns:
    A `LossTransform` that edits the advantage; 0 if the deviation is.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Liu et al., `Tricks or Traps? (Lite PPO)
    <https://arxiv.org/abs/2508.08221>`_, 2025; Khatri et al., `ScaleRL
    <https://arxiv.org/abs/2510.13786>`_, 2025 (within groups)
  """
  _ops.check_deviation('divide_by_batch_deviation', deviation)

  def advantage(advantage, batch, epsilon):
    reward = _ops.centered_reward(batch) if within_groups else batch.reward
    offset = _ops.centered(reward, batch.valid)
    spread = _ops.deviation_of(offset, batch.valid, deviation)
    return _ops.safe_divide(advantage, _ops.per_token(spread) + epsilon)

  return on_advantage(advantage, epsilon=epsilon)


def normalize_over_completions(
  deviation='population', epsilon=0.0
) -> LossTransform:
  """The advantage's z-score among all completions of the rollout.

  Mean and deviation are those of the completions' means. An empty completion
  has no token to hold its advantage; it does not count.

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that edits the advantage.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Liu et al., `GDPO <https://arxiv.org/abs/2601.05242>`_, 2026
  """
  _ops.check_deviation('normalize_over_completions', deviation)

  def advantage(advantage, batch, epsilon):
    counted = jnp.any(batch.mask, axis=-1, keepdims=True)
    # Around a completion's largest, so that equal values have exactly one mean.
    largest = jnp.max(
      advantage, axis=-1, keepdims=True, where=batch.mask, initial=-jnp.inf
    )
    largest = jnp.where(counted, largest, 0)
    offset = _ops.sequence_mean(advantage - largest, batch)
    mean = largest + _ops.per_token(offset)
    centered = _ops.centered(mean, counted)
    spread = _ops.deviation_of(centered, counted, deviation)
    own = advantage - mean  # 0 unless it varies inside the completion
    return _ops.safe_divide(own + centered, spread + epsilon)

  return on_advantage(advantage, epsilon=epsilon)


def normalize_over_tokens(deviation='population', epsilon=0.0) -> LossTransform:
  """The advantage's z-score among all trained tokens of the rollout.

  A completion counts as often as it has tokens.

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that edits the advantage.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  _ops.check_deviation('normalize_over_tokens', deviation)

  def advantage(advantage, batch, epsilon):
    return _ops.normalized(advantage, batch.keep, deviation, epsilon)

  return on_advantage(advantage, epsilon=epsilon)


def clip_advantage(minimum=-np.inf, maximum=np.inf) -> LossTransform:
  """Clips the advantage.

  Args:
    minimum: Least advantage.
    maximum: Largest advantage.

  Returns:
    A `LossTransform` that edits the advantage.
  """

  def advantage(advantage, batch, minimum, maximum):
    del batch
    return jnp.clip(advantage, minimum, maximum)

  return on_advantage(advantage, minimum=minimum, maximum=maximum)


def drop_truncated() -> LossTransform:
  """Stops training on completions that the length limit cut off.

  Their rewards still count in their groups' statistics.

  Returns:
    A `LossTransform` that edits `keep`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """

  def keep(keep, batch):
    del keep
    return ~batch.truncated[:, :, None]

  return on_keep(keep)


def keep_largest_advantages(share=0.5) -> LossTransform:
  r"""Trains on the completions of largest :math:`|A|` of each group.

  Keeps :math:`\max(1, \lfloor share \cdot n \rfloor)` of the n completions of
  a group; of equal ones the earlier. Denominators then count these.

  Args:
    share: Share of a group's completions that is kept.

  Returns:
    A `LossTransform` that edits `keep`; place it after the advantage is set.

  References:
    Lin et al., `CPPO <https://arxiv.org/abs/2503.22342>`_, 2025
  """

  def keep(keep, batch, share):
    counted = jnp.any(keep, axis=-1)  # not what is dropped already
    size = jnp.max(jnp.abs(batch.advantage), axis=-1)
    largest = jnp.max(size, axis=1, keepdims=True)
    # Rounded: advantages of equal size and other sign differ by rounding.
    size = jnp.round(_ops.safe_divide(size, largest), 5)
    size = jnp.where(counted, size, -1)
    ahead = size[:, None, :] > size[:, :, None]  # [P,i,j]: j before i
    group = size.shape[1]
    earlier = jnp.arange(group)[None, :] < jnp.arange(group)[:, None]
    ahead |= earlier[None] & (size[:, None, :] == size[:, :, None])
    number = _ops.count(counted, axis=1)[:, None]
    # A share such as 1 - 0.9 must not lose one to rounding.
    most = jnp.maximum(1, jnp.floor(share * number + 1e-4))
    return _ops.per_token(_ops.count(ahead, axis=-1) < most)

  return on_keep(keep, needs='advantage', share=share)
