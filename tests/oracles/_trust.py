"""Token-level methods with another trust region than the clip of PPO.

sg[x] is x without its gradient: the gradient of sg[w] A logp is w A.
"""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import centred
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import groups
from tests.oracles._base import kept_tokens
from tests.oracles._base import log_ratio
from tests.oracles._base import scaled_by_batch
from tests.oracles._base import standardised


def sapo(
  case: Case,
  positive: float = 1.0,
  negative: float = 1.05,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """SAPO, arXiv:2511.20347.

  loss = -1/B sum_i 1/L_i sum_t (4 / tau) sigmoid(tau (r - 1)) A
  tau = positive where A > 0, else negative; A = (R - mean) / std.
  With y the sigmoid, the derivative in logp is 4 y (1 - y) r A.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    tau = positive if a > 0 else negative
    weight = 1 / (batch * len(chosen))
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      y = 1 / (1 + math.exp(-tau * (ratio - 1)))
      loss -= weight * 4 / tau * y * a
      gradient[p, g, t] = -weight * 4 * y * (1 - y) * ratio * a
  return loss, gradient


def cispo(
  case: Case,
  low: float = 1.0,
  high: float = 4.0,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """CISPO, arXiv:2506.13585.

  loss = -1/N sum_i sum_t sg[clip(r, 1 - low, 1 + high)] A logp
  A = (R - mean) / std. low = 1 is no lower bound.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      held = min(max(ratio, 1 - low), 1 + high)
      loss -= held * a * float(case.logp[p, g, t]) / total
      gradient[p, g, t] = -held * a / total
  return loss, gradient


def prompt_mean(
  case: Case,
  low: float = 1.0,
  high: float = 4.0,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """The loss of ScaleRL, arXiv:2510.13786.

  loss = -1/P' sum_p 1/N_p sum over the kept tokens of prompt p of
           sg[clip(r, 1 - low, 1 + high)] A logp
  A = C / std(C), C = R - mean of the group, std over the whole batch. A group
  of equal rewards is dropped: its tokens are not kept, but its rewards count
  in std.
  N_p is the number of kept tokens of prompt p, P' the number of prompts with
  N_p > 0.
  """
  kept = kept_tokens(case)
  centre = case._replace(reward=centred(case))
  advantage = scaled_by_batch(centre, ddof, epsilon)
  for p, members in groups(case):
    rewards = [float(case.reward[p, g]) for g in members]
    if max(rewards) == min(rewards):
      kept[p] = False
  size: dict[int, int] = {}
  for p, _, chosen in completions(kept):
    size[p] = size.get(p, 0) + len(chosen)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    weight = 1 / (len(size) * size[p])
    for t in chosen:
      ratio = math.exp(log_ratio(case, p, g, t))
      held = min(max(ratio, 1 - low), 1 + high)
      loss -= weight * held * a * float(case.logp[p, g, t])
      gradient[p, g, t] = -weight * held * a
  return loss, gradient


def dppo_tv(
  case: Case,
  low: float = 0.2,
  high: float = 0.2,
  cap: float = 20.0,
) -> Result:
  """DPPO with the binary total variation, arXiv:2602.04879.

  loss = -1/N sum_i sum_t M sg[min(r, cap)] A logp, A = R - mean
  With p = exp(logp) and q = exp(logp_old), M = 0 where A > 0 and
  p - q > high, and where A < 0 and q - p > low, else 1.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      logp = float(case.logp[p, g, t])
      gain = math.exp(logp) - math.exp(float(case.logp_old[p, g, t]))
      if (a > 0 and gain > high) or (a < 0 and -gain > low):
        continue
      held = min(math.exp(log_ratio(case, p, g, t)), cap)
      loss -= held * a * logp / total
      gradient[p, g, t] = -held * a / total
  return loss, gradient


def binary_kl(log_q: float, log_p: float) -> float:
  """KL of two coins: q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

  Without (1 - q) log(1 - q) where q = 1; inf where only p = 1.
  """
  q, rest_q, rest_p = math.exp(log_q), -math.expm1(log_q), -math.expm1(log_p)
  divergence = q * (log_q - log_p)
  if rest_q <= 0:
    return divergence
  if rest_p <= 0:
    return math.inf
  return divergence + rest_q * math.log(rest_q / rest_p)


def dppo_kl(
  case: Case,
  low: float = 0.05,
  high: float = 0.05,
  cap: float = 20.0,
) -> Result:
  """DPPO with the binary KL, arXiv:2602.04879.

  loss = -1/N sum_i sum_t M sg[min(r, cap)] A logp, A = R - mean
  M = 0 where the policy has moved outward and too far, else 1: A > 0, p > q and
  binary_kl(q, p) > high, or A < 0, p < q and binary_kl(q, p) > low. p and q as
  in `dppo_tv`. The paper has one number for low and high.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      logp = float(case.logp[p, g, t])
      change = log_ratio(case, p, g, t)
      distance = binary_kl(float(case.logp_old[p, g, t]), logp)
      if a * change > 0 and distance > (high if a > 0 else low):
        continue
      held = min(math.exp(change), cap)
      loss -= held * a * logp / total
      gradient[p, g, t] = -held * a / total
  return loss, gradient


def dro(case: Case, coefficient: float = 0.05) -> Result:
  """DRO on tokens, after arXiv:2405.19107.

  loss = -1/N sum_i sum_t [A logp - (coefficient / 2) l^2], A = R - mean
  The derivative of the objective in logp is A - coefficient l.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    for t in chosen:
      change = log_ratio(case, p, g, t)
      objective = a * float(case.logp[p, g, t]) - coefficient / 2 * change**2
      loss -= objective / total
      gradient[p, g, t] = -(a - coefficient * change) / total
  return loss, gradient
