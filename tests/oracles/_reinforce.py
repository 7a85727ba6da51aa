"""Score-function methods, and PPO with the advantages of REINFORCE++."""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import centred
from tests.oracles._base import clipped
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import groups
from tests.oracles._base import kept_tokens
from tests.oracles._base import leave_one_out
from tests.oracles._base import log_ratio
from tests.oracles._base import mean
from tests.oracles._base import standardised
from tests.oracles._base import z_scores


def score_function(case: Case, advantage: np.ndarray) -> Result:
  """loss = -1/B sum_i A_i sum_t logp."""
  kept = kept_tokens(case)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      loss -= a * float(case.logp[p, g, t]) / batch
      gradient[p, g, t] = -a / batch
  return loss, gradient


def rloo(case: Case) -> Result:
  """RLOO, arXiv:2402.14740.

  loss = -1/B sum_i [R_i - mean over j != i of R_j] sum_t logp
  """
  return score_function(case, leave_one_out(case))


def reinforce(case: Case) -> Result:
  """REINFORCE without a baseline, Williams (1992); see arXiv:2402.14740.

  loss = -1/B sum_i R_i sum_t logp
  """
  return score_function(case, case.reward)


def supervised(case: Case) -> Result:
  """Negative log-likelihood of the kept tokens: loss = -1/N sum logp."""
  kept = kept_tokens(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      loss -= float(case.logp[p, g, t]) / total
      gradient[p, g, t] = -1 / total
  return loss, gradient


def gpg(case: Case) -> Result:
  """GPG, arXiv:2504.02546, with F_norm = 1.

  loss = -alpha/N sum_i A_i sum_t logp, A = R - mean
  alpha = valid completions / valid completions of groups whose rewards are not
  all equal: the groups that teach nothing dilute the mean, alpha undoes it.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  valid, informative = 0, 0
  for p, members in groups(case):
    rewards = [float(case.reward[p, g]) for g in members]
    valid += len(members)
    if max(rewards) > min(rewards):
      informative += len(members)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  if informative == 0:
    return loss, gradient
  alpha = valid / informative
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      loss -= alpha * a * float(case.logp[p, g, t]) / total
      gradient[p, g, t] = -alpha * a / total
  return loss, gradient


def opo(case: Case) -> Result:
  """OPO, arXiv:2505.23585.

  loss = -1/B sum_i [R_i - sum_j L_j R_j / sum_j L_j] sum_t logp
  over the valid completions j of the group, L the tokens the policy chose.
  """
  advantage = np.zeros(case.valid.shape)
  tokens = case.mask.shape[2]
  for p, members in groups(case):
    length = {
      g: sum(1 for t in range(tokens) if case.mask[p, g, t]) for g in members
    }
    total = sum(length.values())
    if total == 0:
      continue
    first = float(case.reward[p, members[0]])
    weighted = 0.0
    for g in members:
      weighted += length[g] * (float(case.reward[p, g]) - first)
    for g in members:
      advantage[p, g] = float(case.reward[p, g]) - first - weighted / total
  return score_function(case, advantage)


def maxrl(case: Case) -> Result:
  """MaxRL, arXiv:2602.02710.

  loss = -1/B sum_i [(R_i - mean) / mean] sum_t logp
  and an advantage of 0 in a group whose mean reward is not positive.
  """
  advantage = centred(case)
  for p, members in groups(case):
    average = mean([float(case.reward[p, g]) for g in members])
    for g in members:
      advantage[p, g] = advantage[p, g] / average if average > 0 else 0.0
  return score_function(case, advantage)


def whitened(
  kept: np.ndarray, advantage: np.ndarray, ddof: int, epsilon: float
) -> np.ndarray:
  """The z-scores of f64[P, G, T] over all kept tokens; 0 elsewhere."""
  tokens = [(p, g, t) for p, g, chosen in completions(kept) for t in chosen]
  scores = z_scores([float(advantage[at]) for at in tokens], ddof, epsilon)
  result = np.zeros(kept.shape)
  for token, score in zip(tokens, scores):
    result[token] = score
  return result


def reinforce_pp(
  case: Case,
  kl_coefficient: float = 0.01,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """REINFORCE++, arXiv:2501.03262.

  loss = -1/B sum_i 1/L_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A_it = z-score over the kept tokens of the batch of
         R_i - kl_coefficient sum_{s >= t} (logp_old - logp_ref)_is
  """
  kept = kept_tokens(case)
  advantage = np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      divergence = 0.0
      for s in chosen:
        if s >= t:
          divergence += float(case.logp_old[p, g, s])
          divergence -= float(case.logp_ref[p, g, s])
      advantage[p, g, t] = (
        float(case.reward[p, g]) - kl_coefficient * divergence
      )
  advantage = whitened(kept, advantage, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      a = float(advantage[p, g, t])
      objective, slope = clipped(ratio, a, low, high)
      loss -= weight * objective
      gradient[p, g, t] = -weight * slope
  return loss, gradient


def reinforce_pp_baseline(
  case: Case,
  kl_coefficient: float = 0.01,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """REINFORCE++-baseline, arXiv:2501.03262.

  loss = -1/B sum_i 1/L_i sum_t
           [min(r A, clip(r, 1 - low, 1 + high) A) - kl_coefficient x^2 / 2]
  A = z-score over the kept tokens of the batch of R - mean of the group,
  x = logp_ref - logp. d (x^2 / 2) / d logp = -x.
  """
  kept = kept_tokens(case)
  centre = centred(case)
  advantage = np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      advantage[p, g, t] = centre[p, g]
  advantage = whitened(kept, advantage, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      a = float(advantage[p, g, t])
      objective, slope = clipped(ratio, a, low, high)
      x = float(case.logp_ref[p, g, t]) - float(case.logp[p, g, t])
      penalty, penalty_slope = kl_coefficient * x * x / 2, -kl_coefficient * x
      loss -= weight * (objective - penalty)
      gradient[p, g, t] = -weight * (slope - penalty_slope)
  return loss, gradient


def positive_nll(
  case: Case,
  coefficient: float = 0.1,
  low: float = 0.2,
  high: float = 0.28,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """PPO with the positive-example loss of VAPO, arXiv:2504.05118.

  loss = -1/N sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
         - coefficient/N+ sum_{i: A_i > 0} sum_t logp
  A = (R - mean) / std, N+ the kept tokens of completions with A > 0.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  positive = 0
  for p, g, chosen in completions(kept):
    if advantage[p, g] > 0:
      positive += len(chosen)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      loss -= objective / total
      gradient[p, g, t] = -slope / total
      if a > 0:
        loss -= coefficient * float(case.logp[p, g, t]) / positive
        gradient[p, g, t] -= coefficient / positive
  return loss, gradient
