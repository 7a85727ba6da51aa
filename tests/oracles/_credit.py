"""Methods that change what a completion, or a token of it, is credited with."""

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
from tests.oracles._base import log_ratio
from tests.oracles._base import mean
from tests.oracles._base import z_scores


def mean_of_completions(
  case: Case, advantage: np.ndarray, low: float, high: float
) -> Result:
  """-1/B sum_i 1/L_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)."""
  kept = kept_tokens(case)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      a = float(advantage[p, g])
      objective, slope = clipped(ratio, a, low, high)
      loss -= weight * objective
      gradient[p, g, t] = -weight * slope
  return loss, gradient


def passk(
  case: Case,
  k: int = 4,
  right_reward: float = 1.0,
  low: float = 0.2,
  high: float = 0.2,
) -> Result:
  """Pass@k Training, arXiv:2508.10751, with its analytical advantages.

  loss = -1/B sum_i 1/L_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)

  Of n completions m are wrong (R < right_reward). Of the C(n, k) sets of k, a
  set scores 1 if it holds a right one, so their mean and deviation are
    M = 1 - C(m, k) / C(n, k),  D = sqrt(M (1 - M)).
  A completion gets the mean standardised score of the sets it is in:
    right  A = (1 - M) / D
    wrong  A = (1 - M - C(m - 1, k - 1) / C(n - 1, k - 1)) / D
  and 0 if D = 0 or n < k.
  """
  advantage = np.zeros(case.valid.shape)
  for p, members in groups(case):
    n = len(members)
    wrong = [g for g in members if float(case.reward[p, g]) < right_reward]
    m = len(wrong)
    if n < k or math.comb(m, k) in (0, math.comb(n, k)):
      continue
    average = 1 - math.comb(m, k) / math.comb(n, k)
    deviation = math.sqrt(average * (1 - average))
    fails = math.comb(m - 1, k - 1) / math.comb(n - 1, k - 1)
    for g in members:
      score = 1 - fails if g in wrong else 1.0
      advantage[p, g] = (score - average) / deviation
  return mean_of_completions(case, advantage, low, high)


def gdpo(
  case: Case,
  weights: tuple[float, ...] | None = None,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GDPO, arXiv:2601.05242.

  loss = -1/B sum_i 1/L_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A = z-score over all valid completions of the batch of sum_k w_k Z_k,
  Z_k = z-score over the group of the k-th reward function; w_k = 1 by default.
  """
  parts = case.reward_parts.shape[2]
  w = [1.0] * parts if weights is None else [float(v) for v in weights]
  total = {}
  kept = kept_tokens(case)
  for p, members in groups(case):
    for g in members:
      total[p, g] = 0.0
    for k in range(parts):
      values = [float(case.reward_parts[p, g, k]) for g in members]
      for g, score in zip(members, z_scores(values, ddof, epsilon)):
        total[p, g] += w[k] * score
  advantage = np.zeros(case.valid.shape)
  # An empty completion counts in its group and not in the batch.
  total = {pg: value for pg, value in total.items() if kept[pg].any()}
  scores = z_scores(list(total.values()), ddof, epsilon)
  for completion, score in zip(total, scores):
    advantage[completion] = score
  return mean_of_completions(case, advantage, low, high)


def shared_start(
  ids: dict[int, list[int]], sign: dict[int, float], g: int
) -> int:
  """How many first tokens of g an opponent has at the same place.

  An opponent is a completion whose advantage has the opposite sign. The count
  ends at the first token that no opponent has there; the opponent may be a
  different one at each token.
  """
  shared = 0
  for k, token in enumerate(ids[g]):
    found = False
    for j, others in ids.items():
      if sign[j] * sign[g] < 0 and k < len(others) and others[k] == token:
        found = True
    if not found:
      break
    shared += 1
  return shared


def conflict_weights(case: Case, advantage: np.ndarray) -> np.ndarray:
  """lambda: 0 or 2 on conflict tokens where A < 0 or A > 0, else 1.

  Conflict tokens are those that open a completion, or close it when counted
  from its end, and are shared with opponents of its group.
  """
  kept = kept_tokens(case)
  weight = np.ones(kept.shape)
  chosen_of = {(p, g): chosen for p, g, chosen in completions(kept)}
  for p, members in groups(case):
    ids, reverse, sign = {}, {}, {}
    for g in members:
      chosen = chosen_of.get((p, g), [])
      ids[g] = [int(case.tokens[p, g, t]) for t in chosen]
      reverse[g] = ids[g][::-1]
      sign[g] = float(np.sign(advantage[p, g]))
    for g in members:
      opening = shared_start(ids, sign, g)
      closing = shared_start(reverse, sign, g)
      for k, t in enumerate(chosen_of.get((p, g), [])):
        if k < opening or k >= len(ids[g]) - closing:
          weight[p, g, t] = 2.0 if sign[g] > 0 else 0.0
  return weight


def gtpo_conflict(
  case: Case,
  entropy_coefficient: float = 0.1,
  entropy_limit: float = math.log(2),
) -> Result:
  """GTPO of Simoni et al., arXiv:2508.03772.

  loss = -1/B sum_i 1/L_i sum_t lambda_it r A_i
  A_i = delta_i (C_i - entropy_coefficient H_i), C = R - mean of the group,
  H_i the mean entropy of the completion's tokens under the old policy.
  lambda is that of `conflict_weights`, by the sign of C. delta_i = 0 where
  H_i > entropy_limit, provided that the policy began below ln 2: that the mean
  entropy of all kept tokens of the first rollout, this case, is below it.
  """
  kept = kept_tokens(case)
  centre = centred(case)
  weights = conflict_weights(case, centre)
  batch, _ = count(kept)
  every = []
  for p, g, chosen in completions(kept):
    every += [float(case.entropy_old[p, g, t]) for t in chosen]
  filtering = bool(every) and mean(every) < math.log(2)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    entropy = mean([float(case.entropy_old[p, g, t]) for t in chosen])
    a = float(centre[p, g]) - entropy_coefficient * entropy
    if filtering and entropy > entropy_limit:
      a = 0.0
    for t in chosen:
      weight = float(weights[p, g, t]) / (batch * len(chosen))
      objective = math.exp(log_ratio(case, p, g, t)) * a
      loss -= weight * objective
      gradient[p, g, t] = -weight * objective
  return loss, gradient
