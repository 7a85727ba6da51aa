"""Edits of the advantage and of what is trained (once per rollout)."""

import jax.numpy as jnp
import numpy as np

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import on_keep
from grpo_jax.losses._stages import on_reward


def subtract_kl(coefficient) -> LossTransform:
  r"""Subtracts the completion's KL to the reference from the reward, as k1.

  .. math:: r_i \leftarrow r_i - \beta \sum_t
              \bigl(\log \pi_{old}(o_{it}) - \log \pi_{ref}(o_{it})\bigr)

  In the reward the estimator k1 is right: the score function turns it into the
  gradient of KL(policy || reference). As a loss it would only be noise (see
  `add_kl`).

  Args:
    coefficient: :math:`\beta`, per nat.

  Returns:
    A `LossTransform` that edits the reward and requires `logp_old` and
    `logp_ref`.
  """
  _ops.check_number('subtract_kl', 'coefficient', coefficient, least=0)

  def reward(reward, batch, coefficient):
    gap = batch.logp_old - batch.logp_ref
    return reward - coefficient * jnp.sum(gap, axis=-1)

  return on_reward(
    reward, requires=('logp_old', 'logp_ref'), coefficient=coefficient
  )


def subtract_kl_to_go(coefficient) -> LossTransform:
  r"""Charges each token for the KL penalties from it to the end.

  .. math:: A_{it} \leftarrow A_{it} - \beta \sum_{s \ge t}
              \bigl(\log \pi_{old}(o_{is}) - \log \pi_{ref}(o_{is})\bigr)

  Args:
    coefficient: :math:`\beta`, per nat.

  Returns:
    A `LossTransform` that edits the advantage and requires `logp_old` and
    `logp_ref`.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  _ops.check_number('subtract_kl_to_go', 'coefficient', coefficient, least=0)

  def advantage(advantage, batch, coefficient):
    gap = batch.logp_old - batch.logp_ref
    # A cumulative sum from the end. After a completion's end the gap is 0.
    to_go = jnp.flip(jnp.cumsum(jnp.flip(gap, axis=-1), axis=-1), axis=-1)
    return advantage - coefficient * to_go

  return on_advantage(
    advantage, requires=('logp_old', 'logp_ref'), coefficient=coefficient
  )


def divide_by_batch_deviation(
  deviation='population', epsilon=0.0, within_groups=False, under_root=False
) -> LossTransform:
  r"""Divides the advantage by the deviation of all rewards of the rollout.

  .. math:: A \leftarrow A / (\sigma_{rollout}(r) + \epsilon)

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.
    within_groups: Whether the deviation is that of the rewards around the means
      of their groups, which leaves out how the prompts differ.
    under_root: Whether `epsilon` is added to the variance, under the root, and
      not to the deviation: :math:`\sqrt{\sigma^2 + \epsilon}`.

  Returns:
    A `LossTransform` that edits the advantage; it is 0 if deviation and
    `epsilon` are both 0.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Liu et al., `Tricks or Traps? (Lite PPO)
    <https://arxiv.org/abs/2508.08221>`_, 2025; Khatri et al., `ScaleRL
    <https://arxiv.org/abs/2510.13786>`_, 2025 (within groups)
  """
  _ops.check_number('divide_by_batch_deviation', 'epsilon', epsilon, least=0)
  _ops.check_deviation('divide_by_batch_deviation', deviation)
  _ops.check_flag('divide_by_batch_deviation', 'under_root', under_root)
  _ops.check_flag('divide_by_batch_deviation', 'within_groups', within_groups)

  def advantage(advantage, batch, epsilon):
    reward = _ops.centered_reward(batch) if within_groups else batch.reward
    offset = _ops.centered(reward, batch.valid)
    spread = _ops.deviation_of(offset, batch.valid, deviation)
    spread = _ops.with_epsilon(spread, epsilon, under_root)
    return _ops.safe_divide(advantage, _ops.per_token(spread))

  return on_advantage(advantage, epsilon=epsilon)


def divide_by_group_deviation(
  deviation='population', epsilon=0.0, under_root=False
) -> LossTransform:
  r"""Divides the advantage by the deviation of the rewards of its group.

  .. math:: A_i \leftarrow A_i / (\sigma(r) + \epsilon)

  The advantage is not centered here, so any baseline may stand before:
  `leave_one_out`, `best_minus_second`, `center_by_batch` (the mean of the
  rollout), or none. After `center_by_group` this is `normalize_by_group`.

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.
    under_root: Whether `epsilon` is added to the variance, under the root, and
      not to the deviation: :math:`\sqrt{\sigma^2 + \epsilon}`.

  Returns:
    A `LossTransform` that edits the advantage; it is 0 in a group of equal
    rewards.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Tang et al., `Optimizing Language Models for Inference Time Objectives
    <https://arxiv.org/abs/2503.19595>`_, 2025: the lead of the best completion,
    which released code (verl, `grpo_passk`) divides by the deviation. In AReaL
    mean and deviation are chosen apart, each of the group or of the batch.
  """
  _ops.check_number('divide_by_group_deviation', 'epsilon', epsilon, least=0)
  _ops.check_deviation('divide_by_group_deviation', deviation)
  _ops.check_flag('divide_by_group_deviation', 'under_root', under_root)

  def advantage(advantage, batch, epsilon):
    offset = _ops.centered_reward(batch)
    spread = _ops.deviation_of(offset, batch.valid, deviation, axis=1)
    spread = _ops.with_epsilon(spread, epsilon, under_root)
    score = _ops.safe_divide(advantage, _ops.per_token(spread))
    # By `all_equal`, as a z-score has it: the deviation of rewards that differ
    # by rounding alone would blow an advantage up.
    equal = _ops.all_equal(batch.reward, batch.valid, axis=1)
    return jnp.where(_ops.per_token(equal), 0, score)

  return on_advantage(advantage, epsilon=epsilon)


def normalize_over_completions(
  deviation='population', epsilon=0.0, under_root=False
) -> LossTransform:
  r"""Sets the advantage to its z-score among all completions of the rollout.

  Mean and deviation are those of the completions' means. An empty completion
  has no token that could hold its advantage, so it does not count.

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.
    under_root: Whether `epsilon` is added to the variance, under the root, and
      not to the deviation: :math:`\sqrt{\sigma^2 + \epsilon}`.

  Returns:
    A `LossTransform` that edits the advantage.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Liu et al., `GDPO <https://arxiv.org/abs/2601.05242>`_, 2026
  """
  _ops.check_number('normalize_over_completions', 'epsilon', epsilon, least=0)
  _ops.check_deviation('normalize_over_completions', deviation)
  _ops.check_flag('normalize_over_completions', 'under_root', under_root)

  def advantage(advantage, batch, epsilon):
    counted = jnp.any(batch.mask, axis=-1, keepdims=True)
    # The largest value is subtracted before the mean is taken, so that the
    # mean of equal values is exactly their value.
    largest = jnp.max(
      advantage, axis=-1, keepdims=True, where=batch.mask, initial=-jnp.inf
    )
    largest = jnp.where(counted, largest, 0)
    offset = _ops.sequence_mean(advantage - largest, batch)
    mean = largest + _ops.per_token(offset)
    centered = _ops.centered(mean, counted)
    spread = _ops.deviation_of(centered, counted, deviation)
    # Only the means of completions are centered. Differences inside a
    # completion are divided by the deviation and nothing else.
    own = advantage - mean  # 0 unless it varies inside the completion
    spread = _ops.with_epsilon(spread, epsilon, under_root)
    return _ops.safe_divide(own + centered, spread)

  return on_advantage(advantage, epsilon=epsilon)


def normalize_over_tokens(
  deviation='population', epsilon=0.0, under_root=False
) -> LossTransform:
  r"""Sets the advantage to its z-score among all trained tokens of the rollout.

  A completion counts as often as it has tokens.

  Args:
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.
    under_root: Whether `epsilon` is added to the variance, under the root, and
      not to the deviation: :math:`\sqrt{\sigma^2 + \epsilon}`, as in
      the whitening of released code (OpenRLHF, verl).

  Returns:
    A `LossTransform` that edits the advantage.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Hu et al., `REINFORCE++ <https://arxiv.org/abs/2501.03262>`_, 2025
  """
  _ops.check_number('normalize_over_tokens', 'epsilon', epsilon, least=0)
  _ops.check_deviation('normalize_over_tokens', deviation)
  _ops.check_flag('normalize_over_tokens', 'under_root', under_root)

  def advantage(advantage, batch, epsilon):
    return _ops.normalized(
      advantage, batch.keep, deviation, epsilon, under_root=under_root
    )

  return on_advantage(advantage, epsilon=epsilon)


def clip_advantage(minimum=-np.inf, maximum=np.inf) -> LossTransform:
  """Clips the advantage.

  Args:
    minimum: Smallest advantage that is left.
    maximum: Largest advantage that is left.

  Returns:
    A `LossTransform` that edits the advantage.

  Raises:
    ValueError: A bound is no number, or `minimum` is not below `maximum`.
  """

  for name, bound in (('minimum', minimum), ('maximum', maximum)):
    _ops.check_number('clip_advantage', name, bound, least=-np.inf, most=np.inf)
  known = _ops.has_value(minimum) and _ops.has_value(maximum)
  if known and minimum >= maximum:
    raise ValueError(
      f'clip_advantage got minimum={minimum} and maximum={maximum}, so that '
      'all advantages would be the same; give a minimum below the maximum.'
    )

  def advantage(advantage, batch, minimum, maximum):
    del batch
    return jnp.clip(advantage, minimum, maximum)

  return on_advantage(advantage, minimum=minimum, maximum=maximum)


def drop_truncated() -> LossTransform:
  """Stops training on completions that the length limit cut off.

  Their rewards still count in the statistics of their groups.

  Returns:
    A `LossTransform` that edits `keep`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """

  def keep(keep, batch):
    # `on_keep` joins the result with what was kept before.
    del keep
    return ~batch.truncated[:, :, None]

  return on_keep(keep)


def keep_largest_advantages(share=0.5) -> LossTransform:
  r"""Trains only on the completions of largest :math:`|A|` of each group.

  Of the n completions of a group that are still trained, :math:`\max(1, \lfloor
  share \cdot n \rfloor)` are kept. Of equal ones the earlier are kept.
  Denominators then count only these.

  Args:
    share: Share of a group's completions that is kept, in [0, 1].

  Returns:
    A `LossTransform` that edits `keep`; place it after the advantage is set.

  References:
    Lin et al., `CPPO <https://arxiv.org/abs/2503.22342>`_, 2025
  """
  _ops.check_number('keep_largest_advantages', 'share', share, least=0, most=1)

  def keep(keep, batch, share):
    # Completions that are dropped already neither count nor compete.
    counted = jnp.any(keep, axis=-1)
    size = jnp.max(jnp.abs(batch.advantage), axis=-1)
    largest = jnp.max(size, axis=1, keepdims=True)
    # Advantages of equal size and other sign differ by rounding errors, which
    # should not decide which of them is kept.
    size = jnp.round(_ops.safe_divide(size, largest), 5)
    size = jnp.where(counted, size, -1)
    ahead = size[:, None, :] > size[:, :, None]  # [P,i,j]: j before i
    group = size.shape[1]
    earlier = jnp.arange(group)[None, :] < jnp.arange(group)[:, None]
    ahead |= earlier[None] & (size[:, None, :] == size[:, :, None])
    number = _ops.count(counted, axis=1)[:, None]
    # A share of 1 - 0.9 is a bit less than 0.1 in floating point, and `floor`
    # would turn that into one completion less.
    most = jnp.maximum(1, jnp.floor(share * number + 1e-4))
    return _ops.per_token(_ops.count(ahead, axis=-1) < most)

  return on_keep(keep, needs='advantage', share=share)
