r"""On-policy distillation: a teacher scores what the policy itself has drawn.

The teacher is a second model that is never updated. It gives the
log-probability of each sampled token, the field `logp_teacher` f32[P,G,T] in
`Batch.extras`. Two transforms descend KL(policy || teacher) by it: one as an
advantage of each token, one as a penalty.
"""

from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._penalty import kl_penalty
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
