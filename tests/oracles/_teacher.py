"""On-policy distillation: the teacher's log-probability credits each token."""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import centred
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import kept_tokens
from tests.oracles._base import log_ratio


def opd(
  case: Case, coefficient: float = 1.0, reward_coefficient: float = 0.0
) -> Result:
  """arXiv:2306.13649 with the credit of arXiv:2601.02780.

  loss = -1/N sum_i sum_t r A, and for each token
  A = reward_coefficient (R - mean) + coefficient (logp_teacher - logp_old).
  Its derivative in logp is that of r alone: A is a number.
  """
  assert case.logp_teacher is not None
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      gap = float(case.logp_teacher[p, g, t]) - float(case.logp_old[p, g, t])
      a = reward_coefficient * float(advantage[p, g]) + coefficient * gap
      ratio = math.exp(log_ratio(case, p, g, t))
      loss -= ratio * a / total
      gradient[p, g, t] = -ratio * a / total
  return loss, gradient


def kl_penalty(
  case: Case, coefficient: float = 0.3, estimator: str = 'k2'
) -> Result:
  """REINFORCE with a KL to the teacher as penalty, of one sample per token.

  loss = -1/N sum_i sum_t [A logp - coefficient k], A = R - mean, and with
  x = logp_teacher - logp: k2 = x^2 / 2 and k3 = e^x - x - 1, of which the
  derivatives in logp are -x and 1 - e^x.
  """
  assert case.logp_teacher is not None
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      logp = float(case.logp[p, g, t])
      x = float(case.logp_teacher[p, g, t]) - logp
      k, slope = x * x / 2, -x
      if estimator == 'k3':
        k, slope = math.expm1(x) - x, -math.expm1(x)
      loss -= (a * logp - coefficient * k) / total
      gradient[p, g, t] = -(a - coefficient * slope) / total
  return loss, gradient


def _classes(logp: list[float]) -> tuple[list[float], list[float]]:
  """(probabilities, logarithms) of K tokens and of all others as one class.

  That of the others is 1 - sum; as a sum of float64 knows it to 64 units in the
  last place, it is 0 below, and its logarithm is that of 64 units.
  """
  least = 64 * 2.0**-52
  mass = [math.exp(x) for x in logp]
  rest = 1 - math.fsum(mass)
  log_rest = math.log(max(rest, least))
  return [*mass, rest if rest > least else 0.0], [*logp, log_rest]


def _top_kl(
  case: Case, place: tuple[int, int, int], direction: str, number: int
) -> tuple[float, float]:
  """The KL of K + 1 classes, and its derivative in the first log-probability.

  With q the policy, p the teacher and r the class of all others, whose
  probability falls by q_1 for each nat of log q_1:

  reverse: q_1 (log q_1/p_1 + 1) - q_1 (log q_r/p_r + 1), the second only where
  the class has a probability; forward: -p_1 + p_r q_1 / q_r.
  """
  assert case.teacher_top is not None and case.others is not None
  first = float(case.logp[place]) - 3
  policy = [first, *map(float, case.others[place][: number - 1])]
  q, log_q = _classes(policy)
  p, log_p = _classes([float(x) for x in case.teacher_top[place][:number]])
  if direction == 'forward':
    kl = math.fsum(a * (x - y) for a, x, y in zip(p, log_p, log_q))
    return kl, -p[0] + p[-1] * q[0] / math.exp(log_q[-1])
  kl = math.fsum(b * (y - x) for b, x, y in zip(q, log_p, log_q))
  slope = q[0] * (log_q[0] - log_p[0] + 1)
  if q[-1]:
    slope -= q[0] * (log_q[-1] - log_p[-1] + 1)
  return kl, slope


def gkd(case: Case, direction: str = 'reverse', number: int = 16) -> Result:
  """arXiv:2306.13649 with completions of the policy alone, over top tokens.

  loss = 1/B sum_i 1/L_i sum_t KL, as its equation 2.
  """
  kept = kept_tokens(case)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      kl, slope = _top_kl(case, (p, g, t), direction, number)
      loss += weight * kl
      gradient[p, g, t] = weight * slope
  return loss, gradient


def top_kl_penalty(
  case: Case,
  coefficient: float = 0.3,
  direction: str = 'reverse',
  number: int = 16,
) -> Result:
  """REINFORCE with that KL as penalty: loss = -1/N sum (A logp - c KL)."""
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      kl, slope = _top_kl(case, (p, g, t), direction, number)
      loss -= (a * float(case.logp[p, g, t]) - coefficient * kl) / total
      gradient[p, g, t] = -(a - coefficient * slope) / total
  return loss, gradient
