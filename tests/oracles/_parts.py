"""Parts that no method has by default, each in a small method."""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import centred
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import groups
from tests.oracles._base import kept_tokens
from tests.oracles._base import mean
from tests.oracles._credit import mean_of_completions


def over_deviation(
  case: Case, value: np.ndarray, ddof: int, epsilon: float
) -> Result:
  """GRPO with A = value / (std + epsilon); 0 in a group of equal rewards.

  std^2 = sum (R - mean)^2 / (n - ddof), over the group.
  """
  advantage = np.zeros(case.valid.shape)
  for p, members in groups(case):
    rewards = [float(case.reward[p, g]) for g in members]
    if max(rewards) == min(rewards):
      continue
    length = math.hypot(*(reward - mean(rewards) for reward in rewards))
    deviation = length / math.sqrt(len(members) - ddof)
    for g in members:
      advantage[p, g] = float(value[p, g]) / (deviation + epsilon)
  return mean_of_completions(case, advantage, 0.2, 0.2)


def lead_over_deviation(
  case: Case, ddof: int = 1, epsilon: float = 0.01
) -> Result:
  """`grpo_passk` of verl, after arXiv:2503.19595.

  value = best R of the group - second best for the best completion, else 0.
  """
  lead = np.zeros(case.valid.shape)
  for p, members in groups(case):
    if len(members) < 2:
      continue
    ranked = sorted(members, key=lambda g: float(case.reward[p, g]))  # noqa: B023
    best, second = ranked[-1], ranked[-2]
    lead[p, best] = float(case.reward[p, best] - case.reward[p, second])
  return over_deviation(case, lead, ddof, epsilon)


def batch_mean_over_deviation(case: Case) -> Result:
  """Mean of the batch, deviation of the group: NormConfig of AReaL.

  value = R - mean of all valid rewards of the batch.
  """
  average = mean(
    [float(case.reward[p, g]) for p, gs in groups(case) for g in gs]
  )
  return over_deviation(case, case.reward - average, 0, 0.0)


def variance_plus_epsilon(case: Case, epsilon: float = 0.05) -> Result:
  """GRPO with A = (R - mean) / sqrt(var + epsilon), all of the group."""
  advantage = centred(case)
  for p, members in groups(case):
    variance = mean([float(advantage[p, g]) ** 2 for g in members])
    for g in members:
      if advantage[p, g] != 0:
        advantage[p, g] /= math.sqrt(variance + epsilon)
  return mean_of_completions(case, advantage, 0.2, 0.2)


def k1_score(case: Case, coefficient: float = 0.3) -> Result:
  """REINFORCE with sg[k1] pi / sg[pi] as penalty, arXiv:2506.09477.

  loss = -1/N sum_i sum_t [A logp - coefficient k1], A = R - mean,
  k1 = logp - logp_ref. Its derivative in logp is not 1: k1 is the weight of
  the token's score, so it is k1 itself.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      logp = float(case.logp[p, g, t])
      k1 = logp - float(case.logp_ref[p, g, t])
      loss -= (a * logp - coefficient * k1) / total
      gradient[p, g, t] = -(a - coefficient * k1) / total
  return loss, gradient
