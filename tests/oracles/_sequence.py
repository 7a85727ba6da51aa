"""Methods whose ratio belongs to the completion."""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import centred
from tests.oracles._base import clipped
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import kept_tokens
from tests.oracles._base import log_ratio
from tests.oracles._base import mean
from tests.oracles._base import standardised


def gspo(
  case: Case,
  low: float = 3e-4,
  high: float = 4e-4,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GSPO, arXiv:2507.18071.

  loss = -1/B sum_i min(s A, clip(s, 1 - low, 1 + high) A)
  s_i = exp(mean_t l), A = (R - mean) / std.
  d s_i / d logp_t = s_i / L_i.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    pooled = mean([log_ratio(case, p, g, t) for t in chosen])
    ratio, a = math.exp(pooled), float(advantage[p, g])
    objective, slope = clipped(ratio, a, low, high)
    loss -= objective / batch
    for t in chosen:
      gradient[p, g, t] = -slope / (batch * len(chosen))
  return loss, gradient


def gmpo(
  case: Case,
  low: float = 0.4,
  high: float = 0.4,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GMPO, arXiv:2507.20673.

  loss = -1/B sum_i A exp(mean_t c), A = (R - mean) / std
  c = min(l, high) where A > 0, max(l, -low) where A < 0. The paper has one
  number for low and high.
  The derivative of the objective in logp_t is A exp(mean_t c) / L where c = l
  (the bound itself included), and 0 where the bound cut l off.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    if a == 0:
      continue
    sign, bound = (1.0, high) if a > 0 else (-1.0, low)
    free, cut = {}, []
    for t in chosen:
      value = log_ratio(case, p, g, t)
      free[t] = sign * value <= bound
      cut.append(value if free[t] else sign * bound)
    objective = math.exp(mean(cut)) * a
    loss -= objective / batch
    for t in chosen:
      if free[t]:
        gradient[p, g, t] = -objective / (batch * len(chosen))
  return loss, gradient


def gspo_token(
  case: Case,
  low: float = 3e-4,
  high: float = 4e-4,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GSPO-token, arXiv:2507.18071, section 4.3.

  loss = -1/B sum_i 1/L_i sum_t min(s_t A, clip(s_t, 1 - low, 1 + high) A)
  s_t = sg[s_i] pi / sg[pi], s_i = exp(mean_t l), A = (R - mean) / std.
  In value s_t = s_i; d s_t / d logp_t = s_i, which is A s_i / (B L_i) in the
  gradient: with one advantage per completion, GSPO's loss and gradient.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    held = math.exp(mean([log_ratio(case, p, g, t) for t in chosen]))
    a = float(advantage[p, g])
    for t in chosen:
      objective, slope = clipped(held, a, low, high)
      loss -= objective / (batch * len(chosen))
      gradient[p, g, t] = -slope / (batch * len(chosen))
  return loss, gradient


def luspo(
  case: Case,
  low: float = 2e-3,
  high: float = 2.5e-3,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """LUSPO, arXiv:2602.05261.

  loss = -1/B sum_i L_i min(s A, clip(s, 1 - low, 1 + high) A)
  s_i = exp(mean_t l), A = (R - mean) / std.
  d s_i / d logp_t = s_i / L_i, so that the lengths cancel in the gradient.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    pooled = mean([log_ratio(case, p, g, t) for t in chosen])
    ratio, a = math.exp(pooled), float(advantage[p, g])
    objective, slope = clipped(ratio, a, low, high)
    loss -= len(chosen) * objective / batch
    for t in chosen:
      gradient[p, g, t] = -slope / batch
  return loss, gradient


def gcpo(
  case: Case,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GCPO, arXiv:2510.07790, without its reference answers.

  loss = -1/B sum_i min(S A, clip(S, 1 - low, 1 + high) A)
  S_i = exp(sum_t l), the ratio of the whole completion, not its L-th root;
  A = (R - mean) / std. d S_i / d logp_t = S_i.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    total = math.fsum(log_ratio(case, p, g, t) for t in chosen)
    ratio, a = math.exp(total), float(advantage[p, g])
    objective, slope = clipped(ratio, a, low, high)
    loss -= objective / batch
    for t in chosen:
      gradient[p, g, t] = -slope / batch
  return loss, gradient


def vespo(
  case: Case,
  positive: tuple[float, float] = (2.0, 3.0),
  negative: tuple[float, float] = (3.0, 2.0),
) -> Result:
  """VESPO, arXiv:2602.10693.

  loss = -1/N sum_i sum_t sg[W^k e^(lam (1 - W))] A logp
  W_i = exp(sum_t l), A = R - mean (version 3, equation 20), and (k, lam) =
  positive where A >= 0, negative where A < 0.
  """
  kept = kept_tokens(case)
  advantage = centred(case)
  _, total = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    power, rate = positive if a >= 0 else negative
    pooled = math.fsum(log_ratio(case, p, g, t) for t in chosen)
    held = math.exp(power * pooled - rate * math.expm1(pooled))
    for t in chosen:
      loss -= held * a * float(case.logp[p, g, t]) / total
      gradient[p, g, t] = -held * a / total
  return loss, gradient
