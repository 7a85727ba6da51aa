"""Methods that watch the entropy."""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import clipped
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import groups
from tests.oracles._base import kept_tokens
from tests.oracles._base import log_ratio
from tests.oracles._base import mean
from tests.oracles._base import standardised
from tests.oracles._base import z_scores


def largest_covariance(
  case: Case, kept: np.ndarray, advantage: np.ndarray, share: float
) -> set[tuple[int, int, int]]:
  """The k kept tokens of the largest (A - mean A)(logp - mean logp).

  k = min(N, max(1, floor(share N))); means over the kept tokens; of equal
  covariances the earliest (p, g, t) goes first.
  """
  tokens = [(p, g, t) for p, g, chosen in completions(kept) for t in chosen]
  if not tokens:
    return set()
  mean_a = mean([float(advantage[p, g]) for p, g, _ in tokens])
  mean_logp = mean([float(case.logp[token]) for token in tokens])
  ranked = []
  for p, g, t in tokens:
    difference = float(case.logp[p, g, t]) - mean_logp
    covariance = (float(advantage[p, g]) - mean_a) * difference
    ranked.append((-covariance, (p, g, t)))
  k = min(len(tokens), max(1, math.floor(share * len(tokens))))
  return {token for _, token in sorted(ranked)[:k]}


def kl_cov(
  case: Case,
  share: float = 2e-4,
  coefficient: float = 1.0,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """KL-Cov, arXiv:2505.22617.

  loss = -1/N sum_i sum_t [r A - coefficient |l| 1{selected}]
  A = (R - mean) / std. Selected are the tokens of largest covariance, a
  choice without gradient; the gradient of |l| is sign(l), 0 at l = 0.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  selected = largest_covariance(case, kept, advantage, share)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      value = log_ratio(case, p, g, t)
      objective, penalty, penalty_slope = math.exp(value) * a, 0.0, 0.0
      slope = objective
      if (p, g, t) in selected:
        penalty = coefficient * abs(value)
        penalty_slope = coefficient * float(np.sign(value))
      loss -= (objective - penalty) / total
      gradient[p, g, t] = -(slope - penalty_slope) / total
  return loss, gradient


def drawn_covariance(
  case: Case,
  kept: np.ndarray,
  advantage: np.ndarray,
  share: float,
  low_covariance: float,
  high_covariance: float,
) -> set[tuple[int, int, int]]:
  """Up to k = max(1, floor(share N)) tokens drawn from a covariance band.

  Candidates are the kept tokens with
  low_covariance < (A - mean A)(logp - mean logp) < high_covariance, means over
  the kept tokens; those of the least noise are drawn.
  """
  tokens = [(p, g, t) for p, g, chosen in completions(kept) for t in chosen]
  if not tokens:
    return set()
  mean_a = mean([float(advantage[p, g]) for p, g, _ in tokens])
  mean_logp = mean([float(case.logp[token]) for token in tokens])
  candidates = []
  for p, g, t in tokens:
    difference = float(case.logp[p, g, t]) - mean_logp
    covariance = (float(advantage[p, g]) - mean_a) * difference
    if low_covariance < covariance < high_covariance:
      candidates.append((float(case.noise[p, g, t]), (p, g, t)))
  k = max(1, math.floor(share * len(tokens)))
  return {token for _, token in sorted(candidates)[:k]}


def clip_cov(
  case: Case,
  share: float = 2e-4,
  low_covariance: float = 1.0,
  high_covariance: float = 5.0,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """Clip-Cov, arXiv:2505.22617.

  loss = -1/N sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A = (R - mean) / std. The objective of the drawn tokens is detached: it keeps
  its value and has no gradient. The draw has no gradient either.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  detached = drawn_covariance(
    case, kept, advantage, share, low_covariance, high_covariance
  )
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      loss -= objective / total
      if (p, g, t) not in detached:
        gradient[p, g, t] = -slope / total
  return loss, gradient


def forking_tokens(
  case: Case,
  share: float = 0.2,
  low: float = 0.2,
  high: float = 0.28,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """Policy gradient on forking tokens only, arXiv:2506.01939.

  loss = -1/N sum_i sum_t 1{H >= tau} min(r A, clip(r, 1 - low, 1 + high) A)
  A = (R - mean) / std, H the entropy of the old policy, and tau the k-th
  largest H of the N kept tokens, k = max(1, floor(share N)).
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  entropies = []
  for p, g, chosen in completions(kept):
    entropies += [float(case.entropy_old[p, g, t]) for t in chosen]
  loss, gradient = 0.0, np.zeros(kept.shape)
  if not entropies:
    return loss, gradient
  k = max(1, math.floor(share * total))
  tau = sorted(entropies, reverse=True)[k - 1]
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      if float(case.entropy_old[p, g, t]) < tau:
        continue
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      loss -= objective / total
      gradient[p, g, t] = -slope / total
  return loss, gradient


FLOOR = 1e-6  # nats; a smaller entropy counts as this one


def weighted_reward(
  reward: float, entropy: float, peers: list[float], alpha: float
) -> float:
  """The entropy-weighted reward of a token or completion, arXiv:2508.04349.

  right (R > 0)  alpha R + (1 - alpha) n H / sum H
  wrong          -alpha - (1 - alpha) n (1 / H) / sum (1 / H)

  with sums over the n peers of the same side, itself among them.
  """
  if reward > 0:
    share = entropy / sum(peers)
    return alpha * reward + (1 - alpha) * len(peers) * share
  share = 1 / entropy / sum(1 / peer for peer in peers)
  return -alpha - (1 - alpha) * len(peers) * share


def nearly_equal(values: list[float]) -> bool:
  """Equal but for rounding: then their z-scores would be noise."""
  return max(values) - min(values) <= 1e-9 * max(abs(v) for v in values)


def gtpo_entropy(
  case: Case,
  alpha: float = 0.9,
  low: float = 0.2,
  high: float = 0.28,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GTPO of Tan et al., arXiv:2508.04349, eq. 3 to 7.

  loss = -1/N sum_i sum_t min(r A, clip(r, 1 - low, 1 + high) A)
  A_it = z-score of `weighted_reward` over all kept tokens of the right
  completions of the group, or over those of the wrong ones. The peers of a
  token are the kept tokens at its position in completions of its side.
  """
  kept = kept_tokens(case)
  advantage = np.zeros(kept.shape)
  for p, members in groups(case):
    for right in (True, False):
      entropy = {}
      for g in members:
        for t in range(kept.shape[2]):
          if kept[p, g, t] and (case.reward[p, g] > 0) == right:
            entropy[g, t] = max(float(case.entropy_old[p, g, t]), FLOOR)
      rewards = []
      for (g, t), own in entropy.items():
        peers = [other for (_, s), other in entropy.items() if s == t]
        rewards.append(
          weighted_reward(float(case.reward[p, g]), own, peers, alpha)
        )
      if not rewards or nearly_equal(rewards):
        continue
      scores = z_scores(rewards, ddof, epsilon)
      for (g, t), score in zip(entropy, scores):
        advantage[p, g, t] = score
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      a = float(advantage[p, g, t])
      objective, slope = clipped(ratio, a, low, high)
      loss -= objective / total
      gradient[p, g, t] = -slope / total
  return loss, gradient


def grpo_s(
  case: Case,
  alpha: float = 0.9,
  low: float = 0.2,
  high: float = 0.28,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GRPO-S, arXiv:2508.04349, eq. 8 to 11.

  loss = -1/B sum_i min(s A, clip(s, 1 - low, 1 + high) A)
  s = 1/L sum_t r, the arithmetic mean, so d s / d logp_t = r_t / L.
  A = z-score over the whole group, right and wrong, of `weighted_reward`, where
  an entropy is the mean over a completion and the peers are the completions of
  its side. One without tokens has no entropy, and no part in the group.
  """
  kept = kept_tokens(case)
  chosen_of = {(p, g): chosen for p, g, chosen in completions(kept)}
  advantage = np.zeros(case.valid.shape)
  for p, members in groups(case):
    entropy = {}
    for g in members:
      chosen = chosen_of.get((p, g), [])
      values = [max(float(case.entropy_old[p, g, t]), FLOOR) for t in chosen]
      if values:
        entropy[g] = mean(values)
    rewards = []
    for g, own in entropy.items():
      reward = float(case.reward[p, g])
      peers = []
      for j, other in entropy.items():
        if (case.reward[p, j] > 0) == (reward > 0):
          peers.append(other)
      rewards.append(weighted_reward(reward, own, peers, alpha))
    if not rewards or nearly_equal(rewards):
      continue
    for g, score in zip(entropy, z_scores(rewards, ddof, epsilon)):
      advantage[p, g] = score
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    ratios = [math.exp(log_ratio(case, p, g, t)) for t in chosen]
    s = sum(ratios) / len(chosen)
    a = float(advantage[p, g])
    objective, slope = clipped(s, a, low, high)
    loss -= objective / batch
    for t, ratio in zip(chosen, ratios):
      # `slope` is d objective / d log s, and d log s / d logp = r / (L s).
      gradient[p, g, t] = -slope * ratio / (len(chosen) * s) / batch
  return loss, gradient
