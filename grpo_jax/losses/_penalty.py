"""Penalty: what is subtracted from the objective, token by token."""

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import add_penalty


def add_kl(coefficient, estimator='k3') -> LossTransform:
  r"""KL(policy || reference) per token, estimated on the sampled token.

  With :math:`x = \log \pi_{ref} - \log \pi`:

  .. math:: k_2 = x^2 / 2, \qquad k_3 = e^x - x - 1

  The expected gradient of k2 is that of KL(policy || reference), the one of k3
  is that of KL(reference || policy).

  Args:
    coefficient: Factor of the penalty, per nat.
    estimator: `'k2'` or `'k3'`.

  Returns:
    A `LossTransform` that adds a penalty and requires `logp_ref`.

  Raises:
    ValueError: `'k1'`, whose expected gradient is zero, or an unknown name.

  References:
    Schulman, `Approximating KL divergence
    <http://joschu.net/blog/kl-approx.html>`_, 2020
  """
  if estimator == 'k1':
    raise ValueError(
      "add_kl got estimator='k1'; as a loss its expected gradient is zero, so "
      "it does nothing but add noise: give 'k2' or 'k3'."
    )
  if estimator not in ('k2', 'k3'):
    raise ValueError(f"add_kl got estimator={estimator!r}; give 'k2' or 'k3'.")

  def penalty(terms, batch, coefficient):
    gap = batch.logp_ref - terms.logp
    if estimator == 'k2':
      kl = jnp.square(gap) / 2
    else:
      kl = _ops.saturating_expm1(gap) - gap
    metrics = {
      'kl_ref': lax.stop_gradient(kl),
      'saturated_ref': gap > _ops.MAX_LOG_RATIO,
    }
    return coefficient * kl, metrics

  return add_penalty(penalty, requires=('logp_ref',), coefficient=coefficient)


def penalize_covariance(share=2e-4, coefficient=1.0) -> LossTransform:
  r"""Pulls the tokens of highest covariance back to the old policy.

  .. math::
    \text{penalty}_{it} = c \, |\log s_{it}| \text{ where } it \in
    \operatorname{top}_k \bigl[(A_{it} - \bar A)
    (\log \pi_{it} - \overline{\log \pi})\bigr]

  with :math:`k = \max(1, \lfloor share \cdot N \rfloor)` and the means over the
  `N` kept tokens of the optimizer batch; hence `scope='batch'`.

  Args:
    share: Share of the kept tokens that is penalised.
    coefficient: Factor `c`, per nat.

  Returns:
    A `LossTransform` that adds a penalty.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025. The paper writes KL(old ||
    policy); the released code, and this, take |log s|, whose gradient at s = 1
    is 0.
  """

  def penalty(terms, batch, share, coefficient):
    logp, kept = lax.stop_gradient(terms.logp), batch.keep
    covariance = (batch.advantage - _ops.masked_mean(batch.advantage, kept)) * (
      logp - _ops.masked_mean(logp, kept)
    )
    covariance = jnp.where(kept, covariance, -jnp.inf)
    number = jnp.maximum(1, jnp.floor(share * _ops.count(kept)))
    chosen = kept & (_ops.rank_descending(covariance) < number)
    gap = jnp.abs(terms.log_ratio)
    return jnp.where(chosen, coefficient * gap, 0), {'penalized': chosen}

  return add_penalty(
    penalty, scope='batch', share=share, coefficient=coefficient
  )
