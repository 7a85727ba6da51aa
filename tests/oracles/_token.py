"""GRPO and the methods with its token-level ratio, most with its clip."""

from fractions import Fraction
import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import centred
from tests.oracles._base import clipped
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import groups
from tests.oracles._base import k3
from tests.oracles._base import kept_tokens
from tests.oracles._base import log_ratio
from tests.oracles._base import mean
from tests.oracles._base import scaled_by_batch
from tests.oracles._base import standardised


def grpo(
  case: Case,
  low: float = 0.2,
  high: float = 0.2,
  kl_coefficient: float = 0.04,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GRPO, arXiv:2402.03300.

  loss = -1/B sum_i 1/L_i sum_t
           [min(r A, clip(r, 1 - low, 1 + high) A) - kl_coefficient k3]
  A = (R - mean) / std, k3 = e^x - x - 1, x = logp_ref - logp.
  d k3 / d logp = 1 - e^x.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      x = float(case.logp_ref[p, g, t]) - float(case.logp[p, g, t])
      penalty = kl_coefficient * (math.expm1(x) - x)
      penalty_slope = -kl_coefficient * math.expm1(x)
      loss -= weight * (objective - penalty)
      gradient[p, g, t] = -weight * (slope - penalty_slope)
  return loss, gradient


def dr_grpo(
  case: Case, max_tokens: int = 3000, low: float = 0.2, high: float = 0.2
) -> Result:
  """Dr. GRPO, arXiv:2503.20783.

  loss = -1/(B max_tokens) sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A = R - mean: no standard deviation, no length of the completion, no KL.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  if max_tokens == 0:
    return loss, gradient
  weight = 1 / (max(batch, 1) * max_tokens)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      loss -= weight * objective
      gradient[p, g, t] = -weight * slope
  return loss, gradient


def shaped(case: Case, soft_tokens: int, max_tokens: int) -> np.ndarray:
  """R' = R - clip((len - (max_tokens - soft_tokens)) / soft_tokens, 0, 1).

  The soft overlong punishment of DAPO, arXiv:2503.14476, where len counts the
  tokens the policy chose. Invalid completions keep a reward of 0, unread.
  """
  reward = np.zeros(case.valid.shape)
  tokens = case.mask.shape[2]
  for p, members in groups(case):
    for g in members:
      length = sum(1 for t in range(tokens) if case.mask[p, g, t])
      excess = (length - (max_tokens - soft_tokens)) / soft_tokens
      reward[p, g] = float(case.reward[p, g]) - min(max(excess, 0.0), 1.0)
  return reward


def dapo(
  case: Case,
  low: float = 0.2,
  high: float = 0.28,
  soft_tokens: int = 4096,
  max_tokens: int = 20480,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """DAPO, arXiv:2503.14476.

  loss = -1/N sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A = (R' - mean) / std of the shaped rewards R'. A group whose rewards R are
  all equal is dropped: its tokens are not kept and not counted in N.
  """
  kept = kept_tokens(case)
  for p, members in groups(case):
    rewards = [float(case.reward[p, g]) for g in members]
    if max(rewards) == min(rewards):
      kept[p] = False
  case = case._replace(reward=shaped(case, soft_tokens, max_tokens))
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      loss -= objective / total
      gradient[p, g, t] = -slope / total
  return loss, gradient


def deepseek_v3_2(
  case: Case,
  threshold: float = 0.5,
  low: float = 0.2,
  high: float = 0.2,
  kl_coefficient: float = 0.001,
  policy: str = 'old',
) -> Result:
  """GRPO of DeepSeek-V3.2, arXiv:2512.02556.

  loss = -1/B sum_i 1/L_i sum_t
           [min(r A, clip(r, 1 - low, 1 + high) A) M_i - kl_coefficient r k3]
  A = R - mean. M_i = 0 where A_i < 0 and mean_t (logp_old - logp) > threshold
  (logp_sampler in place of logp_old if policy says so), else 1; it has no
  gradient and does not touch the penalty. r k3 is weighted to estimate
  KL(pi || ref) without bias, and descended through r as well:
  d (r k3) / d logp = r k3 + r (1 - e^x) = r (logp - logp_ref).
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    start = case.logp_old if policy == 'old' else case.logp_sampler
    drift = mean([float(start[p, g, t] - case.logp[p, g, t]) for t in chosen])
    gate = 0.0 if a < 0 and drift > threshold else 1.0
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      divergence, _ = k3(case, p, g, t)
      distance = float(case.logp[p, g, t]) - float(case.logp_ref[p, g, t])
      penalty = kl_coefficient * ratio * divergence
      penalty_slope = kl_coefficient * ratio * distance
      loss -= weight * (gate * objective - penalty)
      gradient[p, g, t] = -weight * (gate * slope - penalty_slope)
  return loss, gradient


def strongest(
  case: Case, advantage: np.ndarray, pruning_rate: float
) -> set[tuple[int, int]]:
  """The k completions of each group with the largest |A|.

  Of the n valid ones that have a token k = max(1, floor(n (1 - pruning_rate)))
  are chosen, the rate taken as the decimal
  fraction it is written as; of equal |A| the earlier completion goes first,
  and |A| that differ by rounding alone (nine decimals) are equal.
  """
  chosen = set()
  kept = kept_tokens(case)
  for p, valid in groups(case):
    members = [g for g in valid if kept[p, g].any()]
    share = 1 - Fraction(str(pruning_rate))
    k = max(1, math.floor(len(members) * share))
    ranked = sorted(
      (-round(abs(float(advantage[p, g])), 9), g) for g in members
    )
    chosen.update((p, g) for _, g in ranked[:k])
  return chosen


def cppo(
  case: Case,
  threshold: float = 1.0,
  pruning_rate: float | None = None,
  low: float = 0.2,
  high: float = 0.2,
  kl_coefficient: float = 0.04,
  ddof: int = 0,
  epsilon: float = 0.0,
  spare_penalty: bool = False,
) -> Result:
  """CPPO, arXiv:2503.22342.

  loss = -1/B sum_i 1{|A_i| >= threshold} 1/L_i sum_t
           [min(r A, clip(r, 1 - low, 1 + high) A) - kl_coefficient k3]
  A = (R - mean) / std, B counts the completions below the threshold too.
  With a pruning_rate the threshold is not used. Kept are instead only the
  tokens of the completions of largest |A| of each group, see `strongest`, and
  B counts these alone.
  With spare_penalty the indicator multiplies the minimum only, and k3 acts on
  the tokens of all completions.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  active = np.abs(advantage) >= threshold
  if pruning_rate is not None:
    active[:] = False
    for p, g in strongest(case, advantage, pruning_rate):
      active[p, g] = True
    kept[~active] = False
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    if not (active[p, g] or spare_penalty):
      continue
    a = float(advantage[p, g])
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      if not active[p, g]:
        objective = slope = 0.0
      divergence, divergence_slope = k3(case, p, g, t)
      loss -= weight * (objective - kl_coefficient * divergence)
      gradient[p, g, t] = -weight * (slope - kl_coefficient * divergence_slope)
  return loss, gradient


def dual_clip_grpo(
  case: Case,
  low: float = 0.2,
  high: float = 0.2,
  cap: float = 3.0,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GRPO with the dual clip of arXiv:1912.09729.

  loss = -1/B sum_i 1/L_i sum_t f
  f = min(r A, clip(r, 1 - low, 1 + high) A)  where A >= 0
  f = max(the same, cap A)                    where A < 0
  A = (R - mean) / std. Where cap A is the larger, f has no gradient.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      if a < 0 and objective < cap * a:
        objective, slope = cap * a, 0.0
      loss -= weight * objective
      gradient[p, g, t] = -weight * slope
  return loss, gradient


def two_sided_grpo(
  case: Case,
  low: float = 0.2,
  high: float = 0.2,
  cap: float = 4.0,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """Two-sided GRPO of INTELLECT-2, arXiv:2505.07291.

  loss = -1/N sum_i sum_t min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)
  A = (R - mean) / std. The derivative in logp is r A where what the outer min
  takes is r A, cut off by neither the cap nor the clip; 0 otherwise.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      capped = min(ratio, cap) * a
      bound = min(max(ratio, 1 - low), 1 + high) * a
      objective = min(capped, bound)
      slope = objective if objective == ratio * a else 0.0
      loss -= objective / total
      gradient[p, g, t] = -slope / total
  return loss, gradient


def lite_ppo(
  case: Case,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """Lite PPO, arXiv:2508.08221.

  loss = -1/N sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A = (R - mean of the group) / std of the whole batch.
  """
  kept = kept_tokens(case)
  advantage = scaled_by_batch(case, ddof, epsilon)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      loss -= objective / total
      gradient[p, g, t] = -slope / total
  return loss, gradient


def importance_sampling(case: Case) -> Result:
  """Importance-weighted policy gradient, without a trust region.

  loss = -1/N sum_i sum_t r A, A = R - mean. The token-level surrogate of
  conservative policy iteration (Kakade and Langford 2002), eq. 6 of
  arXiv:1707.06347.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      weighted = math.exp(log_ratio(case, p, g, t)) * a
      loss -= weighted / total
      gradient[p, g, t] = -weighted / total
  return loss, gradient
