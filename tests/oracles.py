"""Loop oracles of nine reinforcement-learning losses, in NumPy float64.

Every oracle walks over prompts p, completions g and tokens t, computes one
method straight from its paper, and returns

  loss      float, to be minimised: -sum of weight * (objective - penalty)
  gradient  f64[P, G, T], d loss / d logp, derived by hand

with a gradient of zero on every token that does not take part.

Notation: l = logp - logp_old, r = exp(l), A the advantage of a completion.
A token is kept when the policy chose it (mask), its completion was judged
(valid) and the method does not drop its group. L is the number of kept tokens
of a completion, B the number of completions with L > 0, and N the number of
kept tokens in the batch. A denominator of 0 gives loss 0 and gradient 0.

Only kept entries of the arrays are ever read, apart from the rewards of valid
completions without tokens, so the rest may hold nan or inf.
"""

from collections.abc import Callable
from collections.abc import Iterator
import math
from typing import NamedTuple

import numpy as np

Result = tuple[float, np.ndarray]


class Case(NamedTuple):
  """A batch: G completions of up to T tokens for each of P prompts."""

  logp: np.ndarray  # f64[P, G, T], the policy being trained
  logp_old: np.ndarray  # f64[P, G, T], the policy that sampled
  logp_ref: np.ndarray  # f64[P, G, T], the reference policy
  mask: np.ndarray  # bool[P, G, T], the policy chose this token
  valid: np.ndarray  # bool[P, G], the completion exists and was judged
  reward: np.ndarray  # f64[P, G]


# Which tokens take part, and how many.


def kept_tokens(case: Case) -> np.ndarray:
  """kept(p, g, t) = mask(p, g, t) and valid(p, g)."""
  kept = np.zeros(case.mask.shape, bool)
  prompts, group, tokens = kept.shape
  for p in range(prompts):
    for g in range(group):
      for t in range(tokens):
        kept[p, g, t] = bool(case.mask[p, g, t]) and bool(case.valid[p, g])
  return kept


def completions(kept: np.ndarray) -> Iterator[tuple[int, int, list[int]]]:
  """Yields (p, g, kept positions t) of each completion with L > 0."""
  prompts, group, tokens = kept.shape
  for p in range(prompts):
    for g in range(group):
      chosen = [t for t in range(tokens) if kept[p, g, t]]
      if chosen:
        yield p, g, chosen


def count(kept: np.ndarray) -> tuple[int, int]:
  """(B, N): completions with a kept token, kept tokens."""
  lengths = [len(chosen) for _, _, chosen in completions(kept)]
  return len(lengths), sum(lengths)


# Advantages. A group is the list of the valid completions of one prompt.


def mean(values: list[float]) -> float:
  """The mean, exact when all values are equal."""
  first = values[0]
  return first + math.fsum(v - first for v in values) / len(values)


def groups(case: Case) -> Iterator[tuple[int, list[int]]]:
  """Yields (p, valid completions g) of each prompt that has any."""
  prompts, group = case.valid.shape
  for p in range(prompts):
    members = [g for g in range(group) if case.valid[p, g]]
    if members:
      yield p, members


def centred(case: Case) -> np.ndarray:
  """A = R - mean over the group; 0 in a group of equal rewards."""
  advantage = np.zeros(case.valid.shape)
  for p, members in groups(case):
    rewards = [float(case.reward[p, g]) for g in members]
    if max(rewards) == min(rewards):
      continue
    for g, reward in zip(members, rewards):
      advantage[p, g] = reward - mean(rewards)
  return advantage


def standardised(case: Case, ddof: int, epsilon: float) -> np.ndarray:
  """A = (R - mean) / (std + epsilon), std^2 = sum (R - mean)^2 / (n - ddof)."""
  advantage = centred(case)
  for p, members in groups(case):
    length = math.hypot(*(float(advantage[p, g]) for g in members))
    if length == 0:
      continue
    deviation = length / math.sqrt(len(members) - ddof)
    for g in members:
      advantage[p, g] /= deviation + epsilon
  return advantage


def leave_one_out(case: Case) -> np.ndarray:
  """A_i = R_i - mean of the other rewards of the group; 0 when alone."""
  advantage = np.zeros(case.valid.shape)
  for p, members in groups(case):
    for g in members:
      others = [float(case.reward[p, j]) for j in members if j != g]
      if others:
        advantage[p, g] = float(case.reward[p, g]) - mean(others)
  return advantage


# Pieces shared by the methods.


def log_ratio(case: Case, p: int, g: int, t: int) -> float:
  """l = logp - logp_old."""
  return float(case.logp[p, g, t]) - float(case.logp_old[p, g, t])


def clipped(
  ratio: float, advantage: float, low: float, high: float
) -> tuple[float, float]:
  """min(r A, clip(r, 1 - low, 1 + high) A) and its derivative in log r.

  The derivative is r A while r A is the smaller, or equal; 0 otherwise.
  PPO, arXiv:1707.06347.
  """
  raw = ratio * advantage
  bound = min(max(ratio, 1 - low), 1 + high) * advantage
  return (raw, raw) if raw <= bound else (bound, 0.0)


# Methods.


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
  A = (R' - mean) / std of the shaped rewards R'. A group whose shaped rewards
  are all equal is dropped: its tokens are not kept and not counted in N.
  """
  case = case._replace(reward=shaped(case, soft_tokens, max_tokens))
  kept = kept_tokens(case)
  for p, members in groups(case):
    rewards = [float(case.reward[p, g]) for g in members]
    if max(rewards) == min(rewards):
      kept[p] = False
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
  case: Case, limit: float = 0.4, ddof: int = 0, epsilon: float = 0.0
) -> Result:
  """GMPO, arXiv:2507.20673.

  loss = -1/B sum_i A exp(mean_t c), A = (R - mean) / std
  c = min(l, limit) where A > 0, max(l, -limit) where A < 0.
  The derivative of the objective in logp_t is A exp(mean_t c) / L where c = l
  (the limit itself included), and 0 where the limit cut l off.
  """
  kept = kept_tokens(case)
  advantage = standardised(case, ddof, epsilon)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    a = float(advantage[p, g])
    if a == 0:
      continue
    sign = math.copysign(1.0, a)
    free, cut = {}, []
    for t in chosen:
      value = log_ratio(case, p, g, t)
      free[t] = sign * value <= limit
      cut.append(value if free[t] else sign * limit)
    objective = math.exp(mean(cut)) * a
    loss -= objective / batch
    for t in chosen:
      if free[t]:
        gradient[p, g, t] = -objective / (batch * len(chosen))
  return loss, gradient


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


METHODS: dict[str, Callable[..., Result]] = {
  'grpo': grpo,
  'dr_grpo': dr_grpo,
  'dapo': dapo,
  'gspo': gspo,
  'gmpo': gmpo,
  'rloo': rloo,
  'reinforce': reinforce,
  'kl_cov': kl_cov,
  'supervised': supervised,
}


# KL(pi || ref) of one categorical, and what its sample estimators descend.


class Enumeration(NamedTuple):
  """KL(pi || ref) and gradients with respect to the logits of pi, f64[V]."""

  kl: float
  gradient: np.ndarray  # of the KL itself
  k1: np.ndarray  # expected gradient of k1 used as a loss
  k2: np.ndarray
  k3: np.ndarray


def log_softmax(logits: np.ndarray) -> list[float]:
  """log pi(v) = logit(v) - log sum_j exp(logit(j))."""
  values = [float(value) for value in logits]
  top = max(values)
  total = math.log(math.fsum(math.exp(value - top) for value in values))
  return [value - top - total for value in values]


def enumerate_kl(
  theta_logits: np.ndarray, ref_logits: np.ndarray
) -> Enumeration:
  """The exact KL, and the expected gradients of k1, k2 and k3.

  With x = log ref - log pi: k1 = -x, k2 = x^2 / 2, k3 = e^x - x - 1
  (Schulman 2020, http://joschu.net/blog/kl-approx.html). The expectation is
  sum_v pi(v) d k(v) / d logit_j, pi(v) held fixed, and
    d log pi(v) / d logit_j = 1{v = j} - pi(j)
    d k1 / d log pi = 1,  d k2 / d log pi = -x,  d k3 / d log pi = 1 - e^x
    d KL / d logit_j = pi(j) (log pi(j) - log ref(j) - KL).
  Hence k1 gives 0, k2 the gradient of KL(pi || ref), and k3 that of
  KL(ref || pi), which is pi(j) - ref(j).
  """
  log_pi, log_ref = log_softmax(theta_logits), log_softmax(ref_logits)
  size = len(log_pi)
  pi = [math.exp(value) for value in log_pi]
  kl = math.fsum(pi[v] * (log_pi[v] - log_ref[v]) for v in range(size))
  exact, k1, k2, k3 = (np.zeros(size) for _ in range(4))
  for j in range(size):
    exact[j] = pi[j] * (log_pi[j] - log_ref[j] - kl)
    for v in range(size):
      x = log_ref[v] - log_pi[v]
      score = (1.0 if v == j else 0.0) - pi[j]
      k1[j] += pi[v] * score
      k2[j] += pi[v] * -x * score
      k3[j] += pi[v] * -math.expm1(x) * score
  return Enumeration(kl, exact, k1, k2, k3)
