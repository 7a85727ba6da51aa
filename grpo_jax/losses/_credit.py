"""Credit: shaped rewards, dropped tokens, advantages (once per rollout)."""

import jax.numpy as jnp
import numpy as np

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import on_keep
from grpo_jax.losses._stages import on_reward
from grpo_jax.losses._stages import set_advantage


def shape_overlong_reward(soft_tokens=4096, max_tokens=20480) -> LossTransform:
  r"""Subtracts a penalty that grows over the last `soft_tokens` of the budget.

  .. math::
    r_i \leftarrow r_i - \operatorname{clip}\Bigl(
      \frac{|o_i| - (L_{max} - L_{soft})}{L_{soft}}, 0, 1\Bigr)

  Args:
    soft_tokens: :math:`L_{soft}`, width of the ramp, in tokens.
    max_tokens: :math:`L_{max}`, length at which the penalty reaches 1, in
      tokens.

  Returns:
    A `LossTransform` that edits the reward.

  Raises:
    ValueError: `soft_tokens` is not in `(0, max_tokens]`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025, equation 13
  """
  _ops.check_numbers(
    'shape_overlong_reward',
    moves=False,
    soft_tokens=soft_tokens,
    max_tokens=max_tokens,
  )
  if not 0 < soft_tokens <= max_tokens:
    raise ValueError(
      f'shape_overlong_reward got soft_tokens={soft_tokens} and max_tokens='
      f'{max_tokens}; give 0 < soft_tokens <= max_tokens.'
    )

  # `max_tokens` is the budget and never the padded width, which depends on the
  # batch.
  def reward(reward, batch):
    start = max_tokens - soft_tokens
    ramp = (_ops.length(batch) - start) / soft_tokens
    return reward - jnp.clip(ramp, 0, 1)

  start = max_tokens - soft_tokens
  return on_reward(reward)._replace(acts_after_tokens=start)


def drop_uniform_groups() -> LossTransform:
  """Stops training on groups whose valid rewards are all equal.

  The advantages of such a group are 0 in any case. What changes is the
  denominator of the weight, which then counts informative groups only. This is
  DAPO's condition `0 < #correct < G`. The paper also samples other groups in
  their place, which is no part of a loss.

  Returns:
    A `LossTransform` that edits `keep`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """

  def keep(keep, batch):
    return keep & ~_ops.uniform_groups(batch)[:, None, None]

  return on_keep(keep)


def normalize_by_group(
  deviation='population', epsilon=0.0, under_root=False
) -> LossTransform:
  r"""Sets the advantage to the reward's z-score in its group.

  .. math:: A_i = \frac{r_i - \bar r}{\sigma(r) + \epsilon}

  Args:
    deviation: `'population'` (divides by n; the papers' formula) or `'sample'`
      (divides by n - 1; most released code).
    epsilon: Added to the deviation. The papers have none, and none is needed: a
      group of equal rewards, or of a single one, has advantage exactly 0.
    under_root: Whether `epsilon` is added to the variance, under the root, and
      not to the deviation: :math:`\sqrt{\sigma^2 + \epsilon}`.

  Returns:
    A `LossTransform` that sets the advantage.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> reward = jnp.array([[3.0, 1.0, 1.0, 3.0]])
  >>> batch = losses.make_batch(jnp.ones((1, 4, 1), bool), reward)
  >>> method = losses.normalize_by_group()
  >>> batch, _ = losses.credit(method, batch, method.init())
  >>> batch.advantage.ravel().tolist()
  [1.0, -1.0, -1.0, 1.0]
  """
  _ops.check_spread('normalize_by_group', deviation, epsilon, under_root)
  return set_advantage(
    lambda batch, epsilon: _ops.normalized(
      batch.reward, batch.valid, deviation, epsilon, 1, under_root
    ),
    epsilon=epsilon,
  )


def center_by_group() -> LossTransform:
  r"""Sets the advantage to the reward minus its group's mean.

  .. math:: A_i = r_i - \bar r

  Returns:
    A `LossTransform` that sets the advantage.

  References:
    Liu et al., `Understanding R1-Zero-Like Training
    <https://arxiv.org/abs/2503.20783>`_, 2025

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> reward = jnp.array([[3.0, 1.0, 1.0, 3.0]])
  >>> batch = losses.make_batch(jnp.ones((1, 4, 1), bool), reward)
  >>> method = losses.center_by_group()
  >>> batch, _ = losses.credit(method, batch, method.init())
  >>> batch.advantage.ravel().tolist()
  [1.0, -1.0, -1.0, 1.0]
  """
  return set_advantage(lambda batch: _ops.centered_reward(batch))


def leave_one_out() -> LossTransform:
  r"""Sets the advantage to the reward minus the mean of the group's others.

  .. math:: A_i = r_i - \frac{1}{G-1} \sum_{j \neq i} r_j
                = \frac{G}{G-1} (r_i - \bar r)

  A completion that is alone in its group has advantage 0.

  Returns:
    A `LossTransform` that sets the advantage.

  References:
    Ahmadian et al., `Back to Basics <https://arxiv.org/abs/2402.14740>`_, 2024

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> reward = jnp.array([[3.0, 1.0, 1.0, 3.0]])
  >>> batch = losses.make_batch(jnp.ones((1, 4, 1), bool), reward)
  >>> method = losses.leave_one_out()
  >>> batch, _ = losses.credit(method, batch, method.init())
  >>> [round(float(a), 2) for a in batch.advantage.ravel()]
  [1.33, -1.33, -1.33, 1.33]
  """

  def advantage(batch):
    # By way of the centered reward, which is exactly 0 for equal rewards.
    centered = _ops.centered_reward(batch)
    number = _ops.count(batch.valid, axis=1)[:, None]
    return _ops.safe_divide(centered * number, number - 1)

  return set_advantage(advantage)


def center_by_batch() -> LossTransform:
  r"""Sets the advantage to the reward minus the mean reward of the rollout.

  .. math:: A_i = r_i - \frac{1}{B} \sum_j r_j

  `B` counts the valid completions of the rollout.

  Returns:
    A `LossTransform` that sets the advantage.
  """
  return set_advantage(lambda batch: _ops.centered(batch.reward, batch.valid))


def center_by_length() -> LossTransform:
  r"""Sets the advantage to the reward minus a mean weighted by length.

  .. math:: A_i = r_i - \frac{\sum_j L_j r_j}{\sum_j L_j}

  The sums run over the group, and :math:`L_j` is the length of a completion in
  tokens. This baseline has the least variance if the squared norm of a
  completion's score is proportional to its length.

  Returns:
    A `LossTransform` that sets the advantage; it is 0 in a group without
    tokens.

  References:
    Hao et al., `On-Policy RL with Optimal Reward Baseline
    <https://arxiv.org/abs/2505.23585>`_, 2025
  """

  def advantage(batch):
    offset = _ops.centered_reward(batch)  # exactly 0 for equal rewards
    tokens = _ops.length(batch)
    total = jnp.sum(tokens, axis=1, keepdims=True)
    weighted = jnp.sum(tokens * offset, axis=1, keepdims=True)
    baseline = _ops.safe_divide(weighted, total)
    return offset - baseline

  return set_advantage(advantage)


def divide_by_group_mean() -> LossTransform:
  r"""Sets the advantage to the centered reward over the group's mean reward.

  .. math:: A_i = \frac{r_i - \bar r}{\bar r} \text{ if } \bar r > 0
                  \text{ else } 0

  With rewards of 0 and 1 it estimates the gradient of :math:`\log p`, the
  log-likelihood of success. A group with a negative mean has advantage 0, since
  the division would turn its sign around (as it does in released code).

  Returns:
    A `LossTransform` that sets the advantage.

  References:
    `Maximum Likelihood Reinforcement Learning
    <https://arxiv.org/abs/2602.02710>`_, 2026
  """

  def advantage(batch):
    mean = _ops.masked_mean(batch.reward, batch.valid, axis=1)[:, None]
    offset = _ops.centered_reward(batch)
    # `safe_divide` gives 0 where the mean is not positive.
    return _ops.safe_divide(offset, jnp.maximum(mean, 0))

  return set_advantage(advantage)


def normalize_each_reward(
  weights=None, deviation='population', epsilon=0.0, under_root=False
) -> LossTransform:
  r"""Sets the advantage to the weighted sum of each reward's z-score.

  .. math:: A_i = \sum_k w_k \frac{r_{ik} - \bar r_k}{\sigma(r_k) + \epsilon}

  Means and deviations are those of the group, for each reward function by
  itself and over the completions that it has judged; the others get 0 for it.
  What earlier transforms did to the reward (a penalty for length, say)
  counts as one more reward function, of weight 1.

  Args:
    weights: One number per reward function; None: all 1.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviations.
    under_root: Whether `epsilon` is added to the variances, under the root, and
      not to the deviations: :math:`\sqrt{\sigma^2 + \epsilon}`.

  Returns:
    A `LossTransform` that sets the advantage from `reward_parts`.

  Raises:
    ValueError: An unknown `deviation`; when traced, a wrong number of weights.

  References:
    Liu et al., `GDPO <https://arxiv.org/abs/2601.05242>`_, 2026
  """
  _ops.check_spread('normalize_each_reward', deviation, epsilon, under_root)
  if weights is not None:
    if np.ndim(weights) != 1:
      raise ValueError(
        f'normalize_each_reward got weights={weights!r:.60}; give one number '
        'for each reward function, or None.'
      )
    for weight in weights:
      _ops.check_numbers('normalize_each_reward', moves=False, weights=weight)

  def advantage(batch, epsilon):
    number = batch.reward_parts.shape[-1]
    given = (1.0,) * number if weights is None else tuple(weights)
    if len(given) != number:
      raise ValueError(
        f'normalize_each_reward got {len(given)} weights, but there are '
        f'{number} reward functions; give one weight for each.'
      )
    parts = [batch.reward_parts[..., k] for k in range(number)]
    # `on_reward` keeps the sum of all edits under this name.
    if 'reward_edit' in batch.extras:
      parts.append(batch.extras['reward_edit'])
    # Not strict: without an edit there is one part less than weights.
    how = deviation, epsilon, 1, under_root
    scores = [
      weight * _normalized_where_known(part, batch.valid, how)
      for weight, part in zip((*given, 1.0), parts, strict=False)
    ]
    total = jnp.sum(jnp.stack(scores), axis=0)
    size = jnp.sum(jnp.abs(jnp.stack(scores)), axis=0)
    # The largest score of a group sets the size of its rounding errors.
    size = jnp.max(size, axis=1, keepdims=True)
    # Scores that cancel leave rounding errors, which a later division by their
    # deviation would blow up to order 1.
    return jnp.where(
      jnp.abs(total) <= 8 * jnp.finfo(total.dtype).eps * size, 0, total
    )

  return set_advantage(advantage, epsilon=epsilon)


def _normalized_where_known(part, valid, how):
  """The z-scores of a reward; 0 for completions that it has not judged."""
  known = ~jnp.isnan(part)
  part = jnp.where(known, part, 0)
  return jnp.where(known, _ops.normalized(part, valid & known, *how), 0)


def credit_pass_at_k(k=4, right_reward=1.0) -> LossTransform:
  r"""Sets the advantage for the success of any k completions of the group.

  With `n` valid completions of which `m` are wrong,

  .. math::
    \bar R = 1 - \binom{m}{k} / \binom{n}{k}, \quad
    \sigma = \sqrt{\bar R (1 - \bar R)}, \quad
    A_{right} = \frac{1 - \bar R}{\sigma}, \quad
    A_{wrong} = \frac{1 - \bar R - \binom{m-1}{k-1} / \binom{n-1}{k-1}}{\sigma}

  These are the means over all subsets of size k, in closed form.

  Args:
    k: Size of the subsets, an integer. A subset succeeds if one of its
      completions is right.
    right_reward: The smallest reward of a right completion, a number.

  Returns:
    A `LossTransform` that sets the advantage; it is 0 in a group with no more
    than k valid completions.

  Raises:
    ValueError: `k` is no whole number of at least 1; when traced, groups of no
      more than k.

  References:
    Chen et al., `Pass@k Training <https://arxiv.org/abs/2508.10751>`_, 2025
  """
  _ops.check_numbers(
    'credit_pass_at_k', moves=False, k=k, right_reward=right_reward
  )
  if k < 1 or k != int(k):
    raise ValueError(
      f'credit_pass_at_k got k={k}; give a k of at least 1, a whole number.'
    )
  k = int(k)

  def none_right(wrong, number, draws):
    """Probability that `draws` without replacement are all wrong."""
    share = jnp.ones_like(number)
    # A product of quotients, because the binomials of large groups are too
    # large for a float to hold all their digits.
    for drawn in range(draws):
      share *= _ops.safe_divide(jnp.maximum(wrong - drawn, 0), number - drawn)
    return share

  def advantage(batch):
    group = batch.valid.shape[1]
    if group <= k:
      raise ValueError(
        f'credit_pass_at_k got k={k} and groups of {group}, in which it never '
        'gives any credit; give groups of more than k completions.'
      )
    right = batch.valid & (batch.reward >= right_reward)
    number = _ops.count(batch.valid, axis=1)[:, None].astype(batch.reward.dtype)
    wrong = number - _ops.count(right, axis=1)[:, None]
    failure = none_right(wrong, number, k)
    # 0 if success or failure is certain; the division below then gives 0.
    deviation = jnp.sqrt(failure * (1 - failure))
    others = none_right(wrong - 1, number - 1, k - 1)
    value = failure - jnp.where(right, 0, others)
    return _ops.safe_divide(value, deviation)

  return set_advantage(advantage)


def best_minus_second() -> LossTransform:
  r"""Credits the group's best completion with its lead over the second.

  .. math:: A_i = \max_j r_j - \max_{j \neq i} r_j

  This is the leave-one-out advantage for the maximum of the group. A completion
  that is alone in its group has advantage 0.

  Returns:
    A `LossTransform` that sets the advantage.

  References:
    Tang et al., `Optimizing Language Models for Inference Time Objectives
    <https://arxiv.org/abs/2503.19595>`_, 2025
  """

  def advantage(batch):
    # An invalid completion is never the best, whatever its reward.
    rewards = jnp.where(batch.valid, batch.reward, -jnp.inf)
    group = rewards.shape[1]
    others = jnp.where(
      jnp.eye(group, dtype=bool)[None], -jnp.inf, rewards[:, None]
    )
    best_other = jnp.max(others, axis=-1)
    # Only the best has a lead; for all others the formula gives 0.
    lead = jnp.maximum(batch.reward - best_other, 0)
    return jnp.where(jnp.isfinite(best_other), lead, 0)

  return set_advantage(advantage)


def use_reward() -> LossTransform:
  """Sets the advantage to the reward itself, without a baseline.

  Returns:
    A `LossTransform` that sets the advantage.
  """
  return set_advantage(lambda batch: batch.reward)


def constant_advantage(value=1.0) -> LossTransform:
  """Sets the advantage of every token to one number, for imitation.

  Args:
    value: The number.

  Returns:
    A `LossTransform` that sets the advantage.
  """
  _ops.check_numbers('constant_advantage', value=value)
  return set_advantage(
    lambda batch, value: jnp.full_like(batch.reward, value), value=value
  )


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
  _ops.check_numbers('subtract_kl', least=0, coefficient=coefficient)

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
  _ops.check_numbers('subtract_kl_to_go', least=0, coefficient=coefficient)

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
  _ops.check_spread('divide_by_batch_deviation', deviation, epsilon, under_root)
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
  _ops.check_spread('divide_by_group_deviation', deviation, epsilon, under_root)

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
  _ops.check_spread(
    'normalize_over_completions', deviation, epsilon, under_root
  )

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
  _ops.check_spread('normalize_over_tokens', deviation, epsilon, under_root)
  return on_advantage(
    lambda advantage, batch, epsilon: _ops.normalized(
      advantage, batch.keep, deviation, epsilon, under_root=under_root
    ),
    epsilon=epsilon,
  )


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

  _ops.check_numbers(
    'clip_advantage',
    least=-np.inf,
    most=np.inf,
    minimum=minimum,
    maximum=maximum,
  )
  known = _ops.has_value(minimum) and _ops.has_value(maximum)
  if known and minimum >= maximum:
    raise ValueError(
      f'clip_advantage got minimum={minimum} and maximum={maximum}, so that '
      'all advantages would be the same; give a minimum below the maximum.'
    )
  return on_advantage(
    lambda advantage, _, minimum, maximum: jnp.clip(
      advantage, minimum, maximum
    ),
    minimum=minimum,
    maximum=maximum,
  )


def drop_truncated() -> LossTransform:
  """Stops training on completions that the length limit cut off.

  Their rewards still count in the statistics of their groups.

  Returns:
    A `LossTransform` that edits `keep`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """
  # `on_keep` joins the result with what was kept before.
  return on_keep(lambda keep, batch: ~batch.truncated[:, :, None])


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
  _ops.check_numbers('keep_largest_advantages', least=0, most=1, share=share)

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
