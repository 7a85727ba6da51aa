"""Weight: how much each token counts (once per optimizer batch).

Denominators run over `keep` and over the whole optimizer batch. So the gradient
does not depend on micro-batches, padding, packing or devices.
"""

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_objective
from grpo_jax.losses._stages import on_weight
from grpo_jax.losses._stages import set_weight


def mean_over_tokens() -> LossTransform:
  r"""Gives every kept token of the batch the same weight.

  .. math:: w_{it} = 1 / N, \quad N = \sum_{i,t} \text{keep}_{it}

  Returns:
    A `LossTransform` that sets the weight.

  References:
    Yu et al., `DAPO <https://arxiv.org/abs/2503.14476>`_, 2025

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> mask = jnp.array([[[1, 0, 0, 0], [1, 1, 1, 0]]], bool)
  >>> batch = losses.make_batch(mask, jnp.zeros((1, 2)))
  >>> method = losses.chain(losses.use_reward(), losses.mean_over_tokens())
  >>> batch, state = losses.credit(method, batch, method.init())
  >>> losses.prepare(method, batch, state).weight.tolist()
  [[[0.25, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.0]]]
  """

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    return _ops.safe_divide(kept, jnp.sum(kept))

  return set_weight(weight)


def mean_over_sequences() -> LossTransform:
  r"""Gives every completion the same weight, which its kept tokens share.

  .. math:: w_{it} = \frac{1}{B L_i}

  `B` counts the completions that keep at least one token, :math:`L_i` the kept
  tokens of one.

  Returns:
    A `LossTransform` that sets the weight.

  References:
    Shao et al., `DeepSeekMath <https://arxiv.org/abs/2402.03300>`_, 2024

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> mask = jnp.array([[[1, 0, 0, 0], [1, 1, 1, 1]]], bool)
  >>> batch = losses.make_batch(mask, jnp.zeros((1, 2)))
  >>> method = losses.chain(losses.use_reward(), losses.mean_over_sequences())
  >>> batch, state = losses.credit(method, batch, method.init())
  >>> losses.prepare(method, batch, state).weight.tolist()
  [[[0.5, 0.0, 0.0, 0.0], [0.125, 0.125, 0.125, 0.125]]]
  """

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    tokens = jnp.sum(kept, axis=-1)
    # Completions without a kept token would only shrink the step.
    sequences = jnp.sum(tokens > 0).astype(kept.dtype)
    # One `B` for the batch, as groups may keep different numbers of
    # completions.
    return _ops.safe_divide(kept, _ops.per_token(tokens) * sequences)

  return set_weight(weight)


def mean_over_sequence_sums(budget_tokens=1) -> LossTransform:
  r"""Averages over completions the sums over their tokens.

  .. math:: w_{it} = \frac{1}{B L_{max}}, \quad
    \sum_{it} w_{it} x_{it} = \frac{1}{B} \sum_i
      \frac{1}{L_{max}} \sum_t x_{it}

  `B` counts the completions that keep at least one token.

  Args:
    budget_tokens: The constant :math:`L_{max}`, in tokens. 1 gives the plain
      sum of REINFORCE. Give a constant of the method here and not the padded
      width, which depends on the batch.

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
  >>> weight = losses.mean_over_sequence_sums(4)
  >>> method = losses.chain(losses.use_reward(), weight)
  >>> batch, state = losses.credit(method, batch, method.init())
  >>> losses.prepare(method, batch, state).weight.tolist()
  [[[0.125, 0.0, 0.0, 0.0], [0.125, 0.125, 0.125, 0.125]]]
  """
  _ops.check_numbers(
    'mean_over_sequence_sums', moves=False, budget_tokens=budget_tokens
  )
  if budget_tokens <= 0:
    raise ValueError(
      f'mean_over_sequence_sums got budget_tokens={budget_tokens}; give a '
      'positive number of tokens.'
    )

  def weight(batch):
    kept = batch.keep.astype(batch.reward.dtype)
    sequences = jnp.sum(jnp.any(batch.keep, axis=-1)).astype(kept.dtype)
    return _ops.safe_divide(kept, sequences * budget_tokens)

  return set_weight(weight)


def mean_over_prompts() -> LossTransform:
  r"""Gives every prompt the same weight, which its kept tokens share.

  .. math:: w_{it} = \frac{1}{P N_p}

  `P` counts the prompts that keep at least one token, :math:`N_p` the kept
  tokens of one.

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


def gate_small_advantages(threshold=1.0, spare_penalty=False) -> LossTransform:
  r"""Drops tokens of small advantage; denominators stay.

  .. math:: w_{it} \leftarrow w_{it}\, 1[|A_{it}| \ge \gamma]

  The weight multiplies the penalty too, so these tokens have none either. With
  `spare_penalty` they keep it, and the gate acts on the objective alone:

  .. math:: f_{it} \leftarrow f_{it}\, 1[|A_{it}| \ge \gamma]

  Args:
    threshold: :math:`\gamma`, in units of the advantage.
    spare_penalty: Whether the dropped tokens keep their penalty. The transform
      then stands behind the one that sets the objective.

  Returns:
    A `LossTransform` that edits the weight; with `spare_penalty` one that edits
    the objective, whose metric `gated` marks the dropped tokens.

  References:
    Lin et al., `CPPO <https://arxiv.org/abs/2503.22342>`_, 2025, equation 7
  """
  _ops.check_numbers('gate_small_advantages', least=0, threshold=threshold)
  _ops.check_flag('gate_small_advantages', 'spare_penalty', spare_penalty)

  def weight(weight, batch, threshold):
    # By the weight and not by `keep`: the denominators have been counted, and
    # the paper's `B` contains the pruned completions.
    return jnp.where(jnp.abs(batch.advantage) >= threshold, weight, 0)

  def objective(terms, batch, threshold):
    dropped = jnp.abs(batch.advantage) < threshold
    return jnp.where(dropped, 0, terms.objective), {'gated': dropped}

  if spare_penalty:
    return on_objective(objective, threshold=threshold)
  return on_weight(weight, threshold=threshold)


def scale_by_informative_groups() -> LossTransform:
  r"""Makes up for groups that have no gradient.

  .. math:: w_{it} \leftarrow w_{it} \frac{B}{B - M}

  Of the `B` valid completions of the optimizer batch, `M` are in groups of
  equal rewards.

  Returns:
    A `LossTransform` that edits the weight.

  References:
    Chu et al., `GPG <https://arxiv.org/abs/2504.02546>`_, 2025. (Some released
    implementations count non-zero rewards instead.)
  """

  def weight(weight, batch):
    # Over `valid` and not over `keep`: whether the rewards of a group differ
    # does not depend on which of its tokens are trained.
    informative = batch.valid & ~_ops.uniform_groups(batch)[:, None]
    valid = _ops.count(batch.valid).astype(weight.dtype)
    return weight * _ops.safe_divide(valid, _ops.count(informative))

  return on_weight(weight)


def weigh_conflict_tokens(wrong=0.0, right=2.0) -> LossTransform:
  r"""Protects tokens that right and wrong completions of a group share.

  .. math:: w_{it} \leftarrow \lambda_{it} w_{it}

  :math:`\lambda` is 1, except on conflict tokens (see `conflict_tokens`): there
  it is `wrong` in completions whose centered reward is negative, and `right`
  where that is positive.

  Args:
    wrong: Factor in completions below their group's mean.
    right: Factor in completions above it.

  Returns:
    A `LossTransform` that edits the weight.

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025. (Released
    code multiplies by 2 twice where the spans from both ends overlap.)
  """
  _ops.check_numbers('weigh_conflict_tokens', least=0, wrong=wrong, right=right)

  def weight(weight, batch, wrong, right):
    above = _ops.per_token(_ops.centered_reward(batch)) > 0
    # A conflict token's centered reward is never 0, so `wrong` means negative.
    factor = jnp.where(above, right, wrong)
    return jnp.where(conflict_tokens(batch), factor * weight, weight)

  return on_weight(weight, requires=('tokens',), wrong=wrong, right=right)


def conflict_tokens(batch: Batch) -> Array:
  """Tokens that right and wrong completions of a group share, at either end.

  A token is in conflict if another completion of the group has the same id at
  the same position, and the centered rewards of the two completions differ in
  sign. Only two runs of such tokens count: the unbroken one from the first
  token on, and the unbroken one up to the last token. For the latter, positions
  are counted from each completion's end.

  Args:
    batch: See `Batch`.

  Returns:
    bool[P,G,T].

  References:
    Simoni et al., `GTPO <https://arxiv.org/abs/2508.03772>`_, 2025
  """
  if batch.tokens is None:
    raise ValueError(
      'conflict_tokens compares the ids of completions, but Batch.tokens is '
      'None; give the ids to make_batch.'
    )
  sign = jnp.sign(_ops.centered_reward(batch))
  position = jnp.arange(batch.mask.shape[-1])[None, None]
  length = jnp.max(jnp.where(batch.mask, position + 1, 0), axis=-1)
  # Position t of L is position L - 1 - t from the end, and the other way round,
  # so one map turns completions around and turns the result back.
  turned = jnp.clip(length[..., None] - 1 - position, 0)

  def run(tokens, mask):
    def add(j, found):
      other = [
        lax.dynamic_index_in_dim(x, j, axis=1) for x in (tokens, mask, sign)
      ]
      opposite = _ops.per_token(sign * other[2] < 0)
      return found | ((tokens == other[0]) & mask & other[1] & opposite)

    # One completion after another, so that no array is [P,G,G,T].
    found = lax.fori_loop(0, mask.shape[1], add, jnp.zeros_like(mask))
    return jnp.cumprod(found.astype(jnp.int32), axis=-1).astype(bool)

  leading = run(batch.tokens, batch.mask)
  turn = lambda x: jnp.take_along_axis(x, turned, axis=-1)
  # Behind the end the map is clipped to position 0, whose token must not count
  # once more.
  inside = position < length[..., None]
  trailing = run(turn(batch.tokens), turn(batch.mask) & inside)
  return leading | (turn(trailing) & batch.mask)
