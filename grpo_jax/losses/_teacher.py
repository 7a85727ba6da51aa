r"""On-policy distillation: a teacher scores what the policy itself has drawn.

The teacher is a second model that is never updated. It gives the
log-probability of each sampled token, the field `logp_teacher` f32[P,G,T] in
`Batch.extras`. Two transforms descend KL(policy || teacher) by it: one as an
advantage of each token, one as a penalty. A third reads the teacher's likeliest
tokens in the place of each, `teacher_top_logp` f32[P,G,T,K]: its KL is computed
and not estimated, in either direction.
"""

from jax import lax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._penalty import kl_penalty
from grpo_jax.losses._stages import add_penalty
from grpo_jax.losses._stages import on_advantage


def add_teacher_advantage(
  coefficient=1.0, reward_coefficient=1.0
) -> LossTransform:
  r"""Adds to each token's advantage how much likelier the teacher finds it.

  .. math:: A_{it} \leftarrow a A_{it} + c \, \bigl(\log \pi_{teacher}(o_{it})
              - \log \pi_{old}(o_{it})\bigr)

  The score function turns the second term into the gradient of c KL(policy ||
  teacher), token by token: what a token does to the KL of later tokens is left
  out, as in all the papers below. No gradient goes through either
  log-probability.

  MiMo-V2 also drops tokens that the sampler and the learner give too different
  probabilities: put `mask_token_importance` behind this transform.

  Args:
    coefficient: Factor `c`, per nat.
    reward_coefficient: Factor `a` of the advantage so far, which comes from
      rewards.

  Returns:
    A `LossTransform` that edits the advantage and requires `logp_old` and
    `logp_teacher`.

  References:
    Agarwal et al., `On-Policy Distillation of Language Models
    <https://arxiv.org/abs/2306.13649>`_, 2023; Lu et al., `On-Policy
    Distillation <https://thinkingmachines.ai/blog/on-policy-distillation>`_,
    2025; Xiaomi, `MiMo-V2-Flash <https://arxiv.org/abs/2601.02780>`_, 2026
  """
  _ops.check_numbers(
    'add_teacher_advantage',
    least=0,
    coefficient=coefficient,
    reward_coefficient=reward_coefficient,
  )

  def advantage(advantage, batch, coefficient, reward_coefficient):
    gap = batch.extras['logp_teacher'] - batch.logp_old
    return reward_coefficient * advantage + coefficient * gap

  return on_advantage(
    advantage,
    requires=('logp_old', 'logp_teacher'),
    coefficient=coefficient,
    reward_coefficient=reward_coefficient,
  )


def add_teacher_kl(coefficient, estimator='k2') -> LossTransform:
  r"""KL(policy || teacher) per token, estimated on the sampled token.

  As `add_kl`, with the teacher in the place of the reference. The metrics are
  `kl_teacher` and `saturated_teacher`.

  Args:
    coefficient: Factor of the penalty, per nat.
    estimator: As in `add_kl`. A teacher may be far away, where the exponential
      of `'k3'` saturates, so the default is `'k2'`, which has the gradient of
      KL(policy || teacher).

  Returns:
    A `LossTransform` that adds a penalty and requires `logp_teacher`.

  Raises:
    ValueError: `'k1'`, whose expected gradient is zero, or an unknown name.

  References:
    Schulman, `Approximating KL divergence
    <http://joschu.net/blog/kl-approx.html>`_, 2020
  """
  return kl_penalty(
    'add_teacher_kl',
    'teacher',
    lambda batch: batch.extras['logp_teacher'],
    'advantage with add_teacher_advantage',
    coefficient,
    estimator,
  )


_DIRECTIONS = 'reverse', 'forward'


def add_teacher_top_kl(
  coefficient, direction='reverse', number=16
) -> LossTransform:
  r"""The KL between policy and teacher over the teacher's likeliest tokens.

  With :math:`\pi` the policy, `p` the teacher, `S` its `K` likeliest tokens in
  this place, and :math:`\pi_r = 1 - \sum_{v \in S} \pi(v)` and :math:`p_r` the
  probabilities of all others together:

  .. math::
    \text{reverse} = \sum_{v \in S} \pi(v) \log \frac{\pi(v)}{p(v)} + \pi_r
      \log \frac{\pi_r}{p_r}, \quad
    \text{forward} = \sum_{v \in S} p(v) \log \frac{p(v)}{\pi(v)} + p_r
      \log \frac{p_r}{\pi_r}

  This is a KL of K + 1 classes. So it is at most the KL over the vocabulary,
  KL(policy || teacher) or KL(teacher || policy), grows with `K`, and is equal
  to it if `S` is the vocabulary. The gradient goes through the policy's
  log-probabilities of all of `S`; what a token does to the KL of later tokens
  is left out. `add_teacher_kl` estimates the reverse one from the sampled token
  alone.

  The terms of `S` alone would be no KL: their sum can be negative, and the
  reverse one is 0 where the policy has left `S`.

  What a sum leaves of 1 is known to some rounding errors. So all others count
  as none below 64 of these, 7.6e-6 in float32. If the other model has mass
  there, their logarithm stays at that bound: a policy that is surer of `S` than
  that is no longer drawn out of it, but still moved inside.

  The metric `kl_teacher_top` is the KL, in nats, and `teacher_top_mass` the
  teacher's probability of `S`.

  Args:
    coefficient: Factor of the penalty, per nat.
    direction: `'reverse'`, KL(policy || teacher), which avoids what the teacher
      would not say, or `'forward'`, KL(teacher || policy), which wants all that
      it would.
    number: `K`. A run asks the teacher for as many; `teacher_top_mass` tells
      what more would add.

  Returns:
    A `LossTransform` that adds a penalty and requires `teacher_top_logp` and
    `logp_top`.

  Raises:
    ValueError: An unknown direction, or a number that is none.

  References:
    Agarwal et al., `On-Policy Distillation of Language Models
    <https://arxiv.org/abs/2306.13649>`_, 2023 (GKD); Gu et al., `MiniLLM
    <https://arxiv.org/abs/2306.08543>`_, 2023 (reverse)
  """
  name = 'add_teacher_top_kl'
  _ops.check_numbers(name, least=0, coefficient=coefficient)
  if direction not in _DIRECTIONS:
    raise ValueError(
      f'{name} got direction={direction!r}; give one of {_DIRECTIONS}.'
    )
  if isinstance(number, bool) or not isinstance(number, int) or number < 1:
    raise ValueError(
      f"{name} got number={number!r}; give how many of the teacher's likeliest "
      'tokens are compared, a whole number of 1 or more.'
    )

  def penalty(terms, batch, coefficient):
    both = terms.logp_top, batch.extras['teacher_top_logp']
    most = min(x.shape[-1] for x in both)
    if most < number:
      raise ValueError(
        f'{name} got number={number}, but log-probabilities of {most} tokens '
        'in each place; give those of more, or a smaller number.'
      )
    policy, teacher = (_classes(x[..., :number]) for x in both)
    pair = (policy, teacher) if direction == 'reverse' else (teacher, policy)
    kl = _kl(*pair)
    metrics = {
      'kl_teacher_top': lax.stop_gradient(kl),
      'teacher_top_mass': jnp.sum(teacher[0][..., :-1], axis=-1),
    }
    return coefficient * kl, metrics

  penalty.__qualname__ = name  # for the errors of the stage
  return add_penalty(
    penalty, requires=('teacher_top_logp', 'logp_top'), coefficient=coefficient
  )._replace(top_tokens=number)


def _classes(logp):
  """Probabilities and their logarithms, f32[...,K] -> two of f32[...,K+1].

  The last class is all other tokens; it has the probability 0 below 64 rounding
  errors, and the logarithm of these then.
  """
  least = 64 * jnp.finfo(logp.dtype).eps
  # Less than 0 by rounding, where there are no others.
  rest = -jnp.expm1(logsumexp(logp, axis=-1, keepdims=True))
  # With the slope of the rest below the bound too, so that the pull out of the
  # tokens fades with the rest, and has no edge.
  bounded = rest + lax.stop_gradient(jnp.maximum(rest, least) - rest)
  return (
    jnp.concatenate([jnp.exp(logp), jnp.where(rest > least, rest, 0)], axis=-1),
    jnp.concatenate([logp, jnp.log(bounded)], axis=-1),
  )


def _kl(first, second):
  """KL(first || second) of two pairs from `_classes`, f32[...]."""
  (mass, log_first), (_, log_second) = first, second
  return jnp.sum(mass * (log_first - log_second), axis=-1)
