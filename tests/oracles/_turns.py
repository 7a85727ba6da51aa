"""Methods that credit the turns of an episode.

An episode is a completion. Turn j of it is the list of its kept tokens whose
`turn` is j; `last` is the largest j that has a token. Its rewards are r_j, as
`turn_reward` has them, and r_last has what is left of R beside:

  r_last += R - sum of all turn_reward

G_j = r_j + gamma G_{j+1} up to the end of `turn_reward`, and G_j = 0 for
j > last. A case without turns is one of single turns.
"""

import math

import numpy as np

from tests.oracles._base import Case
from tests.oracles._base import Result
from tests.oracles._base import clipped
from tests.oracles._base import completions
from tests.oracles._base import count
from tests.oracles._base import groups
from tests.oracles._base import k3
from tests.oracles._base import kept_tokens
from tests.oracles._base import log_ratio
from tests.oracles._base import mean
from tests.oracles._base import z_scores

Key = tuple[int, int, int]  # prompt, completion, turn


def turn_of(case: Case, p: int, g: int, t: int) -> int:
  """The turn of a kept token."""
  return 0 if case.turn is None else int(case.turn[p, g, t])


def last_turn(case: Case, p: int, g: int) -> int:
  """The largest turn that has a token; 0 without any."""
  kept = np.flatnonzero(kept_tokens(case)[p, g]).tolist()
  return max([turn_of(case, p, g, t) for t in kept], default=0)


def rewards(case: Case, p: int, g: int) -> list[float]:
  """r_0, r_1, ... of an episode."""
  given = [0.0]
  if case.turn_reward is not None:
    given = [float(r) for r in case.turn_reward[p, g]]
  left = float(case.reward[p, g]) - math.fsum(given)
  given[last_turn(case, p, g)] += left
  return given


def returns(case: Case, p: int, g: int, gamma: float) -> list[float]:
  """G_0, G_1, ... of an episode."""
  found, later = [], 0.0
  for reward in reversed(rewards(case, p, g)):
    later = reward + gamma * later
    found.append(later)
  found.reverse()
  last = last_turn(case, p, g)
  return [G if j <= last else 0.0 for j, G in enumerate(found)]


def scores(values: list[float], ddof: int, epsilon: float) -> list[float]:
  """`z_scores`, all 0 where the values differ by rounding."""
  if max(values) - min(values) < 1e-12:
    return [0.0] * len(values)
  return z_scores(values, ddof, epsilon)


def differences(values: list[float]) -> list[float]:
  """v - mean, all 0 where the values differ by rounding."""
  if max(values) - min(values) < 1e-12:
    return [0.0] * len(values)
  return [v - mean(values) for v in values]


def by_turn(case: Case, gamma: float, compare) -> dict[Key, float]:
  """Of each turn what `compare` makes of the returns of the whole group."""
  found: dict[Key, float] = {}
  for p, members in groups(case):
    every = [returns(case, p, g, gamma) for g in members]
    for j in range(len(every[0])):
      compared = compare([G[j] for G in every])
      for g, value in zip(members, compared, strict=True):
        found[p, g, j] = value
  return found


def others(values: list[float]) -> list[float]:
  """v - mean of all others; 0 alone."""
  n = len(values)
  if n == 1:
    return [0.0]
  return [v - (math.fsum(values) - v) / (n - 1) for v in values]


def clip_with_kl(
  case: Case,
  advantage: dict[Key, float],
  weights: np.ndarray,
  low: float,
  high: float,
  kl_coefficient: float,
) -> Result:
  """-sum w [min(r A, clip(r, 1 - low, 1 + high) A) - kl_coefficient k3]."""
  kept = kept_tokens(case)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      a = advantage[p, g, turn_of(case, p, g, t)]
      ratio = math.exp(log_ratio(case, p, g, t))
      objective, slope = clipped(ratio, a, low, high)
      penalty, penalty_slope = (
        k3(case, p, g, t) if kl_coefficient else (0.0, 0.0)
      )
      weight = float(weights[p, g, t])
      loss -= weight * (objective - kl_coefficient * penalty)
      gradient[p, g, t] = -weight * (slope - kl_coefficient * penalty_slope)
  return loss, gradient


def weights_of_completions(case: Case) -> np.ndarray:
  """w = 1 / (B L_i)."""
  kept = kept_tokens(case)
  weights, (batch, _) = np.zeros(kept.shape), count(kept)
  for p, g, chosen in completions(kept):
    weights[p, g, chosen] = 1 / (batch * len(chosen))
  return weights


def weights_of_turns(case: Case) -> np.ndarray:
  """w = 1 / (M L_ij), M turns with a kept token, L_ij of them in turn j."""
  kept = kept_tokens(case)
  places: dict[Key, list[int]] = {}
  for p, g, chosen in completions(kept):
    for t in chosen:
      places.setdefault((p, g, turn_of(case, p, g, t)), []).append(t)
  weights = np.zeros(kept.shape)
  for (p, g, _), tokens in places.items():
    weights[p, g, tokens] = 1 / (len(places) * len(tokens))
  return weights


def rloo_to_go(case: Case, gamma: float = 1.0) -> Result:
  """RLOO by turn.

  loss = -1/B sum_i sum_j [G_ij - mean over k != i of G_kj] sum_{t in j} logp
  """
  advantage = by_turn(case, gamma, others)
  kept = kept_tokens(case)
  batch, _ = count(kept)
  loss, gradient = 0.0, np.zeros(kept.shape)
  for p, g, chosen in completions(kept):
    for t in chosen:
      a = advantage[p, g, turn_of(case, p, g, t)]
      loss -= a * float(case.logp[p, g, t]) / batch
      gradient[p, g, t] = -a / batch
  return loss, gradient


def grpo_to_go(
  case: Case,
  gamma: float = 1.0,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """loss = -1/B sum_i 1/L_i sum_t min(r A, clip(r, 1 - low, 1 + high) A).

  A_ij = (G_ij - mean_k G_kj) / (std_k G_kj + epsilon)
  """
  advantage = by_turn(case, gamma, lambda v: scores(v, ddof, epsilon))
  weights = weights_of_completions(case)
  return clip_with_kl(case, advantage, weights, low, high, 0.0)


def mt_grpo(
  case: Case,
  coefficient: float = 1.0,
  kl_coefficient: float = 0.04,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """MT-GRPO, arXiv:2505.11821.

  loss = -1/B sum_i 1/L_i sum_t
           [min(r A, clip(r, 1 - low, 1 + high) A) - kl_coefficient k3]
  A_ij = z(O_i) + coefficient z(r_ij) for j < last, z(O_i) for j = last,
  O_i = r_last of episode i; r_ij = 0 in the z-score of j where j >= last_i.
  """
  advantage: dict[Key, float] = {}
  for p, members in groups(case):
    every = [rewards(case, p, g) for g in members]
    last = [last_turn(case, p, g) for g in members]
    outcome = [r[end] for r, end in zip(every, last, strict=True)]
    final = scores(outcome, ddof, epsilon)
    for j in range(len(every[0])):
      earned = [
        r[j] if j < end else 0.0 for r, end in zip(every, last, strict=True)
      ]
      own = scores(earned, ddof, epsilon)
      for n, g in enumerate(members):
        advantage[p, g, j] = final[n]
        if j < last[n]:
          advantage[p, g, j] += coefficient * own[n]
  weights = weights_of_completions(case)
  return clip_with_kl(case, advantage, weights, low, high, kl_coefficient)


def gigpo(
  case: Case,
  coefficient: float = 1.0,
  gamma: float = 0.95,
  normalizes: bool = True,
  kl_coefficient: float = 0.01,
  low: float = 0.2,
  high: float = 0.2,
  ddof: int = 0,
  epsilon: float = 0.0,
) -> Result:
  """GiGPO, arXiv:2505.10978.

  loss = -1/M sum_ij 1/L_ij sum_{t in j}
           [min(r A, clip(r, 1 - low, 1 + high) A) - kl_coefficient k3]
  A_ij = F(R_i) + coefficient F(G_ij), F a z-score (or the difference to the
  mean, if not `normalizes`): of R over the group, of G over all turns of the
  group that have the state of turn j.
  """

  def compare(values):
    if normalizes:
      return scores(values, ddof, epsilon)
    return differences(values)

  advantage: dict[Key, float] = {}
  for p, members in groups(case):
    whole = compare([float(case.reward[p, g]) for g in members])
    alike: dict[int, list[tuple[int, int, float]]] = {}
    for g in members:
      G = returns(case, p, g, gamma)
      for j in range(last_turn(case, p, g) + 1):
        state = 0 if case.turn_state is None else int(case.turn_state[p, g, j])
        alike.setdefault(state, []).append((g, j, G[j]))
    for some in alike.values():
      compared = compare([G for _, _, G in some])
      for (g, j, _), value in zip(some, compared, strict=True):
        advantage[p, g, j] = whole[members.index(g)] + coefficient * value
  weights = weights_of_turns(case)
  return clip_with_kl(case, advantage, weights, low, high, kl_coefficient)


def centred_to_go(case: Case, gamma: float = 0.5) -> Result:
  """loss = -1/B sum_i 1/L_i sum_t min(r A, clip(r, .8, 1.2) A).

  A_ij = G_ij - mean_k G_kj
  """
  advantage = by_turn(case, gamma, differences)
  weights = weights_of_completions(case)
  return clip_with_kl(case, advantage, weights, 0.2, 0.2, 0.0)


def mean_of_turns(case: Case) -> Result:
  """loss = -1/M sum_ij 1/L_ij sum_{t in j} min(r R_i, clip(r, .8, 1.2) R_i)."""
  advantage = {
    (p, g, j): float(case.reward[p, g])
    for p, members in groups(case)
    for g in members
    for j in range(last_turn(case, p, g) + 1)
  }
  weights = weights_of_turns(case)
  return clip_with_kl(case, advantage, weights, 0.2, 0.2, 0.0)
