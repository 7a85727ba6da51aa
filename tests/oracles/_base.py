"""What the loop oracles share: cases, counts, advantages, the clip.

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
  logp_sampler: np.ndarray  # f64[P, G, T], as the sampler reported it
  entropy_old: np.ndarray  # f64[P, G, T], of the old policy, nats
  entropy: np.ndarray  # f64[P, G, T], of the policy being trained, nats
  reward_parts: np.ndarray  # f64[P, G, K], each reward function's value
  truncated: np.ndarray  # bool[P, G], ended by the length limit
  tokens: np.ndarray  # i64[P, G, T], the sampled ids
  noise: np.ndarray  # f64[P, G, T], uniform in [0, 1)
  turn: np.ndarray | None = None  # i64[P, G, T]; None: there is one turn
  turn_reward: np.ndarray | None = None  # f64[P, G, N], parts of the reward
  turn_state: np.ndarray | None = None  # i64[P, G, N], what each began in
  logp_teacher: np.ndarray | None = None  # f64[P, G, T], of a second model
  # f64[P, G, T, K], log-probabilities of the teacher's likeliest tokens.
  teacher_top: np.ndarray | None = None
  # f64[P, G, T, K-1], the policy's of all but the first; that has `logp` - 3.
  others: np.ndarray | None = None


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


def scaled_by_batch(case: Case, ddof: int, epsilon: float) -> np.ndarray:
  """A = (R - mean over the group) / (std + epsilon); 0 where std = 0.

  std is one number, over all valid rewards of the batch around their own mean:
  std^2 = sum (R - batch mean)^2 / (n - ddof).
  """
  advantage = centred(case)
  every = [float(case.reward[p, g]) for p, gs in groups(case) for g in gs]
  if not every or max(every) == min(every):
    return np.zeros(advantage.shape)
  average = mean(every)
  spread = math.hypot(*(reward - average for reward in every))
  deviation = spread / math.sqrt(len(every) - ddof)
  return advantage / (deviation + epsilon)


def z_scores(values: list[float], ddof: int, epsilon: float) -> list[float]:
  """(v - mean) / (std + epsilon), std^2 = sum (v - mean)^2 / (n - ddof).

  All 0 where the values are equal.
  """
  if not values or max(values) == min(values):
    return [0.0] * len(values)
  centre = mean(values)
  length = math.hypot(*(v - centre for v in values))
  deviation = length / math.sqrt(len(values) - ddof)
  return [(v - centre) / (deviation + epsilon) for v in values]


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


def k3(case: Case, p: int, g: int, t: int) -> tuple[float, float]:
  """e^x - x - 1, x = logp_ref - logp, and its derivative in logp, 1 - e^x."""
  x = float(case.logp_ref[p, g, t]) - float(case.logp[p, g, t])
  return math.expm1(x) - x, -math.expm1(x)
