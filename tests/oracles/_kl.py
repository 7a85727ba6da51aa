"""KL(pi || ref) of one categorical, and what its sample estimators descend."""

import math
from typing import NamedTuple

import numpy as np


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
