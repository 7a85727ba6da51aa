"""Weight: how much each token counts (once per optimizer batch).

Denominators run over `keep` and over the whole optimizer batch, so the gradient
does not depend on micro-batches, padding, packing or devices.
"""

import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._conflict import conflict_tokens
from grpo_jax.losses._stages import on_weight
from grpo_jax.losses._stages import set_weight


def mean_over_tokens() -> LossTransform:
  r"""Every kept token of the batch counts the same.

  .. math:: w_{it} = 1 / N, \quad N = \sum_{i,t} \text{keep}_{it}

  Returns:
    A `LossTransform` that sets the weight.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> mask = jnp.array([[[1, 0, 0, 0], [1, 1, 1, 0]]], bool)
  >>> batch = losses.make_batch(mask, jnp.zeros((1, 2)))
  >>> method = losses.mean_over_tokens()
  >>> losses.prepare(method, batch, method.init()).weight.tolist()
  [[[0.25, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.0]]]
  """

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    return _ops.safe_divide(kept, jnp.sum(kept))

  return set_weight(weight)


def mean_over_sequences() -> LossTransform:
  r"""Every completion counts the same, and its kept tokens share its weight.

  .. math:: w_{it} = \frac{1}{B L_i}

  `B` counts completions that keep at least one token, `L_i` kept tokens.

  Returns:
    A `LossTransform` that sets the weight.

  References:
    Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> mask = jnp.array([[[1, 0, 0, 0], [1, 1, 1, 1]]], bool)
  >>> batch = losses.make_batch(mask, jnp.zeros((1, 2)))
  >>> method = losses.mean_over_sequences()
  >>> losses.prepare(method, batch, method.init()).weight.tolist()
  [[[0.5, 0.0, 0.0, 0.0], [0.125, 0.125, 0.125, 0.125]]]
  """

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    tokens = jnp.sum(kept, axis=-1)
    sequences = jnp.sum(tokens > 0).astype(kept.dtype)
    return _ops.safe_divide(kept, _ops.per_token(tokens) * sequences)

  return set_weight(weight)


def sum_over_tokens(budget_tokens=1) -> LossTransform:
  r"""Sums over a completion's tokens, averages over completions.

  .. math:: w_{it} = \frac{1}{B L_{max}}

  Args:
    budget_tokens: The constant `L_max`. 1 gives the plain sum of REINFORCE.
      It is a constant, never the padded width: that one depends on the batch.

  Returns:
    A `LossTransform` that sets the weight.

  Raises:
    ValueError: `budget_tokens` is not positive.

  References:
    Liu et al., `Understanding R1-Zero-Like Training
    <https://arxiv.org/abs/2503.20783>`_, 2025

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> mask = jnp.array([[[1, 0, 0, 0], [1, 1, 1, 1]]], bool)
  >>> batch = losses.make_batch(mask, jnp.zeros((1, 2)))
  >>> method = losses.sum_over_tokens(4)
  >>> losses.prepare(method, batch, method.init()).weight.tolist()
  [[[0.125, 0.0, 0.0, 0.0], [0.125, 0.125, 0.125, 0.125]]]
  """
  if budget_tokens <= 0:
    raise ValueError(
      f'sum_over_tokens got budget_tokens={budget_tokens}; give a positive '
      'number of tokens.'
    )

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    sequences = jnp.sum(jnp.any(batch.keep, axis=-1)).astype(kept.dtype)
    return _ops.safe_divide(kept, sequences * budget_tokens)

  return set_weight(weight)


def mean_over_prompts() -> LossTransform:
  r"""Every prompt counts the same, and its kept tokens share its weight.

  .. math:: w_{it} = \frac{1}{P N_p}

  `P` counts prompts that keep at least one token, `N_p` a prompt's kept tokens.

  Returns:
    A `LossTransform` that sets the weight.

  References:
    Khatri et al., `The Art of Scaling RL Compute (ScaleRL)
    <https://arxiv.org/abs/2510.13786>`_, 2025
  """

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    tokens = jnp.sum(kept, axis=(1, 2), keepdims=True)
    prompts = jnp.sum(tokens > 0).astype(kept.dtype)
    return _ops.safe_divide(kept, tokens * prompts)

  return set_weight(weight)


def gate_small_advantages(threshold=1.0) -> LossTransform:
  r"""Weight 0 for tokens of small advantage; denominators stay.

  .. math:: w_{it} \leftarrow w_{it}\, 1[|A_{it}| \ge \gamma]

  Args:
    threshold: `gamma`, in units of the advantage.

  Returns:
    A `LossTransform` that edits the weight: the penalty goes too.

  References:
    Lin et al., `CPPO <https://arxiv.org/abs/2503.22342>`_, 2025, equation 7
  """

  def weight(weight, batch, threshold):
    return jnp.where(jnp.abs(batch.advantage) >= threshold, weight, 0)

  return on_weight(weight, threshold=threshold)


def scale_by_informative_groups() -> LossTransform:
  r"""Makes up for groups that teach nothing.

  .. math:: w_{it} \leftarrow w_{it} \frac{B}{B - M}

  with `M` of the batch's `B` valid completions in groups of equal rewards.

  Returns:
    A `LossTransform` that edits the weight.

  References:
    Chu et al., `GPG <https://arxiv.org/abs/2504.02546>`_, 2025. (Released code
    of others counts non-zero rewards instead.)
  """

  def weight(weight, batch):
    informative = batch.valid & ~_ops.uniform_groups(batch)[:, None]
    valid = _ops.count(batch.valid).astype(weight.dtype)
    return weight * _ops.safe_divide(valid, _ops.count(informative))

  return on_weight(weight)


def weigh_conflict_tokens(wrong=0.0, right=2.0) -> LossTransform:
  r"""Protects tokens that right and wrong completions of a group share.

  .. math:: w_{it} \leftarrow \lambda_{it} w_{it}

  where `lambda` is 1 except on conflict tokens: `wrong` in completions whose
  centered reward is negative, `right` in those where it is positive.

  Args:
    wrong: Factor in completions below their group's mean.
    right: Factor in completions above it.

  Returns:
    A `LossTransform` that edits the weight.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025. What a
    conflict is says `conflict_tokens`. (Released code multiplies by 2 twice
    where the spans from both ends overlap.)
  """

  def weight(weight, batch, wrong, right):
    above = _ops.per_token(_ops.centered_reward(batch)) > 0
    factor = jnp.where(above, right, wrong)
    return jnp.where(conflict_tokens(batch), factor * weight, weight)

  return on_weight(weight, wrong=wrong, right=right)
