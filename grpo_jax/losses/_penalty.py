"""Penalty: what is subtracted from the objective, token by token."""

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import add_penalty

_ESTIMATORS = ('k1_score', 'k2', 'k3', 'k3_weighted')
_K1 = 'k1_with_zero_expected_gradient'


def add_kl(coefficient, estimator='k3') -> LossTransform:
  r"""KL(policy || reference) per token, estimated on the sampled token.

  With :math:`x = \log \pi_{ref} - \log \pi` and the ratio `s`:

  .. math:: k_1 = -x, \quad k_2 = x^2 / 2, \quad k_3 = e^x - x - 1

  =============  ================================================
  as a loss      its expected gradient, on policy, is that of
  =============  ================================================
  `k1`           nothing: it is 0
  `k1_score`     KL(policy || reference): this is
                 :math:`sg[k_1]\, \pi / sg[\pi]`
  `k2`           KL(policy || reference)
  `k3`           KL(reference || policy)
  `k3_weighted`  KL(policy || reference): this is :math:`s\, k_3`
  =============  ================================================

  `k1_score` weighs the token's score by the value of :math:`k_1`. It has the
  gradient of `k2` and the value of :math:`k_1`.

  The metric `kl_ref` is the value of the estimator, in nats, before it is
  weighted by `s`. The metric `saturated_ref` marks the tokens with
  :math:`x > 20`, where :math:`e^x` saturates.

  Args:
    coefficient: Factor of the penalty, per nat.
    estimator: `'k1_score'`, `'k2'`, `'k3'`, `'k3_weighted'`, or
      `'k1_with_zero_expected_gradient'` if that is really meant.

  Returns:
    A `LossTransform` that adds a penalty and requires `logp_ref`.

  Raises:
    ValueError: `'k1'`, whose expected gradient is zero, or an unknown name.

  References:
    Schulman, `Approximating KL divergence
    <http://joschu.net/blog/kl-approx.html>`_, 2020; DeepSeek-AI,
    `DeepSeek-V3.2 <https://arxiv.org/abs/2512.02556>`_, 2025 (weighted); Tang
    and Munos, `On a few pitfalls in KL divergence gradient estimation for RL
    <https://arxiv.org/abs/2506.09477>`_, 2025 (score)
  """
  logp_of = lambda batch: batch.logp_ref
  elsewhere = 'reward with subtract_kl'
  return kl_penalty('add_kl', 'ref', logp_of, elsewhere, coefficient, estimator)


def kl_penalty(
  name, other, logp_of, elsewhere, coefficient, estimator
) -> LossTransform:
  """The KL to another policy as a penalty; see `add_kl`.

  Args:
    name: Of the transform.
    other: What its field and metrics call the other policy: 'ref', 'teacher'.
    logp_of: From a `Batch` to that policy's log-probabilities, f32[P,G,T].
    elsewhere: Where else the KL may go, for the error.
    coefficient: Factor of the penalty, per nat.
    estimator: See `add_kl`.

  Raises:
    ValueError: `'k1'`, whose expected gradient is zero, or an unknown name.
  """
  _ops.check_numbers(name, least=0, coefficient=coefficient)
  if estimator == 'k1':
    raise ValueError(
      f"{name} got estimator='k1'; as a loss its expected gradient is zero, so "
      "it does nothing but add noise. Give 'k1_score', 'k2' or 'k3', put the "
      f'KL into the {elsewhere}, or give {_K1!r} if this is what you want.'
    )
  if estimator not in (*_ESTIMATORS, _K1):
    raise ValueError(
      f'{name} got estimator={estimator!r}; give one of {_ESTIMATORS}.'
    )

  def penalty(terms, batch, coefficient):
    gap = logp_of(batch) - terms.logp
    if estimator in (_K1, 'k1_score'):
      kl = -gap
    elif estimator == 'k2':
      kl = jnp.square(gap) / 2
    else:
      # expm1, as e^x - 1 loses its digits near x = 0, where policies start.
      kl = _ops.saturating_expm1(gap) - gap
    metrics = {
      f'kl_{other}': lax.stop_gradient(kl),
      f'saturated_{other}': gap > _ops.MAX_LOG_RATIO,
    }
    if estimator == 'k3_weighted':
      moved = terms.logp - _ops.old_logp(terms, batch)
      # The weighted estimator saturates in its ratio as well.
      metrics['saturated'] = moved > _ops.MAX_LOG_RATIO
      kl = _weighted(moved, kl, gap)
    elif estimator == 'k1_score':
      unmoved = terms.logp - lax.stop_gradient(terms.logp)
      kl = lax.stop_gradient(kl) * (1 + unmoved)
    return coefficient * kl, metrics

  penalty.__qualname__ = name  # for the errors of the stage
  return add_penalty(
    penalty, requires=(f'logp_{other}',), coefficient=coefficient
  )


def _weighted(log_ratio, k3, gap):
  r""":math:`s\, k_3`, with its slope :math:`-s x` written down.

  The slope that autodiff finds is the difference of :math:`s k_3` and
  :math:`s (e^x - 1)`, in which float32 loses `x` from about 16 nats on.
  """
  ratio, gap = lax.stop_gradient((_ops.saturating_exp(log_ratio), gap))
  # 0 in value; it carries the slope.
  unmoved = log_ratio - lax.stop_gradient(log_ratio)
  return lax.stop_gradient(ratio * k3) - ratio * gap * unmoved


def maybe_kl(coefficient, estimator='k3') -> tuple[LossTransform, ...]:
  """A tuple with `add_kl`; empty for the number 0, without a reference."""
  # Only the number 0 leaves the term out, as a schedule may start at 0.
  if isinstance(coefficient, int | float) and coefficient == 0:
    return ()
  return (add_kl(coefficient, estimator),)


def add_entropy_bonus(coefficient) -> LossTransform:
  r"""Rewards the entropy of the whole distribution at each token.

  .. math:: \text{penalty}_{it} = -c\, H_{it}

  Args:
    coefficient: Factor `c`, per nat. `entropy_target` makes one that seeks a
      target.

  Returns:
    A `LossTransform` that adds a penalty and requires `entropy`: that of the
    learner, through which the gradient goes.
  """
  _ops.check_numbers('add_entropy_bonus', coefficient=coefficient)
  return add_penalty(
    lambda terms, batch, coefficient: -coefficient * terms.entropy,
    requires=('entropy',),
    coefficient=coefficient,
  )


def pull_to_old(coefficient=0.05) -> LossTransform:
  r"""A quadratic pull of every token back to the old policy.

  .. math:: \text{penalty}_{it} = \tfrac{c}{2} (\log s_{it})^2

  Args:
    coefficient: Factor `c`, per squared nat.

  Returns:
    A `LossTransform` that adds a penalty.
  """
  _ops.check_numbers('pull_to_old', least=0, coefficient=coefficient)

  def penalty(terms, batch, coefficient):
    moved = terms.logp - _ops.old_logp(terms, batch)
    return coefficient / 2 * jnp.square(moved)

  return add_penalty(penalty, coefficient=coefficient)


def imitate_positives(coefficient=0.1) -> LossTransform:
  r"""Adds the log-likelihood of completions with positive advantage.

  .. math:: J \leftarrow J + \frac{c}{N_+} \sum_{A_{it} > 0} \log \pi(o_{it})

  :math:`N_+` counts the kept tokens of positive advantage in the optimizer
  batch. A token of weight 0 is not imitated.

  Args:
    coefficient: Factor `c`.

  Returns:
    A `LossTransform` that adds a penalty.

  References:
    Yue et al., `VAPO <https://arxiv.org/abs/2504.05118>`_, 2025
  """
  _ops.check_numbers('imitate_positives', least=0, coefficient=coefficient)

  def prepare(batch, state):
    del state
    # Of the whole optimizer batch, which `penalty` never sees: it runs once per
    # micro-batch.
    positive = batch.keep & (batch.advantage > 0)
    share = _ops.safe_divide(
      positive.astype(batch.reward.dtype), _ops.count(positive)
    )
    return batch._replace(extras={**batch.extras, 'positive_share': share})

  def penalty(terms, batch, coefficient):
    # The loss multiplies every penalty by the weight, but this term has a
    # denominator of its own. So the weight is divided out here.
    share = _ops.safe_divide(batch.extras['positive_share'], batch.weight)
    return -coefficient * share * terms.logp

  # A stage constructor writes in one pass; this transform needs two.
  return add_penalty(penalty, coefficient=coefficient)._replace(prepare=prepare)


def penalize_covariance(share=2e-4, coefficient=1.0) -> LossTransform:
  r"""Pulls the tokens of highest covariance back to the old policy.

  .. math::
    \text{penalty}_{it} = c \, |\log s_{it}| \text{ where } it \in
    \operatorname{top}_k \bigl[(A_{it} - \bar A)
    (\log \pi_{it} - \overline{\log \pi})\bigr]

  Means and :math:`k = \max(1, \lfloor share \cdot N \rfloor)` are those of the
  `N` kept tokens of the optimizer batch, hence `scope='batch'`. The metric
  `penalized` marks the chosen tokens.

  Args:
    share: Share of the kept tokens that is penalised, in [0, 1].
    coefficient: Factor `c`, per nat.

  Returns:
    A `LossTransform` that adds a penalty.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025. The paper writes KL(old ||
    policy). The released code has :math:`|\log s|`, and so has this; its
    gradient at :math:`s = 1` is 0.
  """
  _ops.check_numbers('penalize_covariance', least=0, most=1, share=share)
  _ops.check_numbers('penalize_covariance', least=0, coefficient=coefficient)

  def penalty(terms, batch, share, coefficient):
    kept = batch.keep
    # What is not kept never is among the highest.
    covariance = jnp.where(kept, _ops.covariance(terms, batch), -jnp.inf)
    rank = _ops.rank_descending(covariance)
    chosen = kept & (rank < _ops.share_of(share, kept))
    moved = terms.logp - _ops.old_logp(terms, batch)
    # Not jnp.abs, whose slope at 0 is 1 in JAX: it would push down every token
    # that has not moved yet.
    gap = moved * lax.stop_gradient(jnp.sign(moved))
    return jnp.where(chosen, coefficient * gap, 0), {'penalized': chosen}

  return add_penalty(
    penalty, scope='batch', share=share, coefficient=coefficient
  )
