"""Credit: shaped rewards, dropped tokens, advantages (once per rollout)."""

import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_keep
from grpo_jax.losses._stages import on_reward
from grpo_jax.losses._stages import set_advantage


def shape_overlong_reward(soft_tokens=4096, max_tokens=20480) -> LossTransform:
  r"""Subtracts a penalty that grows over the last `soft_tokens` of the budget.

  .. math::
    r_i \leftarrow r_i - \operatorname{clip}\Bigl(
      \frac{|o_i| - (L_{max} - L_{soft})}{L_{soft}}, 0, 1\Bigr)

  Args:
    soft_tokens: Width of the ramp, in tokens.
    max_tokens: Length at which the penalty reaches 1, in tokens.

  Returns:
    A `LossTransform` that edits the reward.

  Raises:
    ValueError: `soft_tokens` is not in `(0, max_tokens]`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025, equation 13
  """
  if not 0 < soft_tokens <= max_tokens:
    raise ValueError(
      f'shape_overlong_reward got soft_tokens={soft_tokens} and max_tokens='
      f'{max_tokens}; give 0 < soft_tokens <= max_tokens.'
    )

  def reward(reward, batch):
    start = max_tokens - soft_tokens
    ramp = (_ops.length(batch) - start) / soft_tokens
    return reward - jnp.clip(ramp, 0, 1)

  return on_reward(reward)


def drop_uniform_groups() -> LossTransform:
  """Stops training on groups whose valid rewards are all equal.

  Their advantages are 0 in any case; what changes is the denominator of the
  weight, which then counts informative groups only. This is DAPO's condition
  `0 < #correct < G` without the resampling, which is the rollout's work.

  Returns:
    A `LossTransform` that edits `keep`.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025
  """

  def keep(keep, batch):
    return keep & ~_ops.uniform_groups(batch)[:, None, None]

  return on_keep(keep)


def normalize_by_group(deviation='population', epsilon=0.0) -> LossTransform:
  r"""The advantage is the reward's z-score in its group.

  .. math:: A_i = \frac{r_i - \bar r}{\sigma(r) + \epsilon}

  Args:
    deviation: `'population'` (divides by n; the papers' formula) or `'sample'`
      (divides by n - 1; most released code).
    epsilon: Added to the deviation. The papers have none, and none is needed:
      a group of equal rewards, or of one, has advantage exactly 0.

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
  if deviation not in ('population', 'sample'):
    raise ValueError(
      f"normalize_by_group got deviation={deviation!r}; give 'population' or "
      "'sample'."
    )

  def advantage(batch, epsilon):
    centered = _ops.centered_reward(batch)
    freedom = _ops.count(batch.valid, axis=1) - (deviation == 'sample')
    square = jnp.sum(jnp.square(centered), axis=1)
    spread = jnp.sqrt(_ops.safe_divide(square, freedom))
    return _ops.safe_divide(centered, spread[:, None] + epsilon)

  return set_advantage(advantage, epsilon=epsilon)


def center_by_group() -> LossTransform:
  r"""The advantage is the reward minus its group's mean.

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

  def advantage(batch):
    return _ops.centered_reward(batch)

  return set_advantage(advantage)


def leave_one_out() -> LossTransform:
  r"""The advantage is the reward minus the mean of the group's others.

  .. math:: A_i = r_i - \frac{1}{G-1} \sum_{j \neq i} r_j
                = \frac{G}{G-1} (r_i - \bar r)

  A completion alone in its group has advantage 0.

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
    centered = _ops.centered_reward(batch)
    number = _ops.count(batch.valid, axis=1)[:, None]
    return _ops.safe_divide(centered * number, number - 1)

  return set_advantage(advantage)


def use_reward() -> LossTransform:
  """The advantage is the reward itself, without a baseline.

  Returns:
    A `LossTransform` that sets the advantage.
  """

  def advantage(batch):
    return batch.reward

  return set_advantage(advantage)


def constant_advantage(value=1.0) -> LossTransform:
  """The advantage is the same number for every token: imitation, no reward.

  Args:
    value: The number.

  Returns:
    A `LossTransform` that sets the advantage.
  """

  def advantage(batch, value):
    return jnp.full_like(batch.reward, value)

  return set_advantage(advantage, value=value)
