"""Gates on the objective: tokens and completions that get no gradient."""

import math

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_objective


def _gated(terms, dropped, metric):
  """(objective without the dropped tokens, metric that marks these)."""
  return jnp.where(dropped, 0, terms.objective), {metric: dropped}


def gate_probability_change(low=0.2, high=0.2) -> LossTransform:
  r"""Drops tokens whose probability has moved too far the way it is pushed.

  .. math:: 0 \text{ where } A > 0,\ p - q > h \text{ or } A < 0,\ q - p > l

  `p` is the probability of the token now and `q` that before the update, so
  :math:`|p - q|` is the token's part of the total variation.

  Args:
    low: `l`, the largest fall of the probability.
    high: `h`, the largest rise of the probability.

  Returns:
    A `LossTransform` that edits the objective. Its metric `gated` marks the
    dropped tokens.

  Raises:
    ValueError: A bound is not from 0 to 1.

  References:
    `DPPO <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  _ops.check_distances(
    'gate_probability_change', low, high, 'the old probability', most=1
  )

  def objective(terms, batch, low, high):
    # Only a comparison reads `now`, so its gradient would be wasted work.
    now = jnp.exp(lax.stop_gradient(terms.logp))
    rise = now - jnp.exp(_ops.old_logp(terms, batch))
    dropped = (batch.advantage > 0) & (rise > high)
    dropped |= (batch.advantage < 0) & (-rise > low)
    return _gated(terms, dropped, 'gated')

  return on_objective(
    objective, zero_without_advantage=True, low=low, high=high
  )


def gate_binary_kl(low=0.05, high=0.05) -> LossTransform:
  r"""Drops tokens whose probability has moved too far, by a binary KL.

  The KL is that of two outcomes: this token, or any other.

  .. math:: 0 \text{ where } q \log \frac{q}{p} + (1 - q)
              \log \frac{1 - q}{1 - p} > h
              \text{ and } A > 0,\ p > q

  where `q` is the probability before the update and `p` that of now; with `l`
  in place of `h` where :math:`A < 0` and :math:`p < q`.

  Args:
    low: `l`, bound of the divergence of a token whose probability has fallen,
      in nats.
    high: `h`, bound for one whose probability has risen, in nats.

  Returns:
    A `LossTransform` that edits the objective. Its metric `gated` marks the
    dropped tokens.

  Raises:
    ValueError: A bound is negative.

  References:
    `DPPO <https://arxiv.org/abs/2602.04879>`_, 2026. The paper has one number
    for both sides.
  """
  _ops.check_distances('gate_binary_kl', low, high, 'no divergence')

  def objective(terms, batch, low, high):
    logp, old = lax.stop_gradient(terms.logp), _ops.old_logp(terms, batch)
    chance = jnp.exp(old)
    # Where the probability rounds to 1, that of another token rounds to 0: its
    # log must stay finite.
    least = jnp.finfo(logp.dtype).tiny
    other = jnp.log(jnp.maximum(-jnp.expm1(logp), least))
    other_old = jnp.log(jnp.maximum(-jnp.expm1(old), least))
    # `-expm1(old)` is 1 - q without the loss of digits near q = 1.
    kl = chance * (old - logp) - jnp.expm1(old) * (other_old - other)
    pushed = batch.advantage * (logp - old) > 0
    bound = jnp.where(batch.advantage > 0, high, low)
    return _gated(terms, pushed & (kl > bound), 'gated')

  return on_objective(
    objective, zero_without_advantage=True, low=low, high=high
  )


def mask_off_policy_negatives(threshold=0.5, policy='old') -> LossTransform:
  r"""Drops wrong completions that the policy has already moved away from.

  .. math:: 0 \text{ where } A_i < 0 \text{ and } \frac{1}{|o_i|} \sum_t
              \log \frac{\pi_{old}(o_{it})}{\pi(o_{it})} > \delta

  Args:
    threshold: :math:`\delta`, nats per token.
    policy: `'old'`, or `'sampler'` to measure from what the sampler reported.

  Returns:
    A `LossTransform` that edits the objective. Its metric `off_policy` marks
    the dropped tokens.

  Raises:
    ValueError: An unknown `policy`.

  References:
    DeepSeek-AI, `DeepSeek-V3.2 <https://arxiv.org/abs/2512.02556>`_, 2025
  """
  _ops.check_number(
    'mask_off_policy_negatives', 'threshold', threshold, least=0, most=math.inf
  )
  if policy not in ('old', 'sampler'):
    raise ValueError(
      f"mask_off_policy_negatives got policy={policy!r}; give 'old' or "
      "'sampler'."
    )

  def objective(terms, batch, threshold):
    sampler = policy == 'sampler'
    start = batch.logp_sampler if sampler else _ops.old_logp(terms, batch)
    gone = start - lax.stop_gradient(terms.logp)
    far = _ops.sequence_mean(gone, batch) > threshold
    dropped = (batch.advantage < 0) & _ops.per_token(far)
    return _gated(terms, dropped, 'off_policy')

  requires = ('logp_sampler',) if policy == 'sampler' else ()
  return on_objective(
    objective, requires, zero_without_advantage=True, threshold=threshold
  )


def detach_covariance(
  share=2e-4, low_covariance=1.0, high_covariance=5.0
) -> LossTransform:
  r"""Removes the gradient of some tokens of high covariance, drawn at random.

  .. math::
    1 < (A_{it} - \bar A)(\log \pi_{it} - \overline{\log \pi}) < 5

  Of the tokens inside these bounds (1 and 5 are the defaults), the `k` of least
  `noise` are chosen, :math:`k = \max(1, \lfloor share \cdot N \rfloor)`. `N`
  counts the kept tokens of the optimizer batch. `noise` is an entry of
  `Batch.extras`, uniform in [0, 1), which the learner draws from its seed.
  Chosen tokens keep their value but have no gradient.

  Args:
    share: Share of the optimizer batch's kept tokens, in [0, 1].
    low_covariance: Lower bound, in nats times the unit of the advantage.
    high_covariance: Upper bound, likewise.

  Returns:
    A `LossTransform` of `scope='batch'` that edits the objective. Its metric
    `detached` marks the chosen tokens.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025. The released code also leaves
    out tokens that are clipped anyway, and sets the value of chosen tokens to
    0.
  """
  _ops.check_number('detach_covariance', 'share', share, least=0, most=1)
  bounds = {
    'low_covariance': low_covariance,
    'high_covariance': high_covariance,
  }
  for argument, bound in bounds.items():
    _ops.check_number(
      'detach_covariance', argument, bound, least=-math.inf, most=math.inf
    )
  if all(map(_ops.has_value, bounds.values())):
    if low_covariance >= high_covariance:
      raise ValueError(
        f'detach_covariance got low_covariance={low_covariance} and '
        f'high_covariance={high_covariance}, between which nothing lies; give '
        'a lower bound below the upper one.'
      )

  def objective(terms, batch, share, low_covariance, high_covariance):
    covariance = _ops.covariance(terms, batch)
    inside = (covariance > low_covariance) & (covariance < high_covariance)
    inside &= batch.keep
    # Ranks are descending, so the least noise is the largest of minus noise.
    noise = jnp.where(inside, -batch.extras['noise'], -jnp.inf)
    rank = _ops.rank_descending(noise)
    chosen = inside & (rank < _ops.share_of(share, batch.keep))
    value = terms.objective
    detached = jnp.where(chosen, lax.stop_gradient(value), value)
    return detached, {'detached': chosen}

  return on_objective(
    objective,
    requires=('noise',),
    scope='batch',
    share=share,
    low_covariance=low_covariance,
    high_covariance=high_covariance,
  )
