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
