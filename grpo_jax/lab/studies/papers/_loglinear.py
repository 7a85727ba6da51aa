"""Log-linear policies on several prompts that share their parameters.

pi(k | i) is the softmax over k of x_ik . theta, and answer 0 is right. This is
the setting of Ge et al. (arXiv 2601.23135, equation 6), with exact gradients.
"""

import numpy as np


def features(seed: int, prompts: int, answers: int, width: int, shared: float):
  """Random features f64[I,K,D] of norm about 1.

  Args:
    seed: Of the random numbers.
    prompts: I.
    answers: K.
    width: D.
    shared: Part of the variance, in [0, 1], that an answer's features have in
      common over prompts.
  """
  random = np.random.default_rng(seed)
  own = random.normal(size=(prompts, answers, width))
  common = random.normal(size=(1, answers, width))
  mixed = np.sqrt(1 - shared) * own + np.sqrt(shared) * common
  return mixed / np.sqrt(width)


def softmax(logits):
  """Probabilities f64[...,K] of logits."""
  pi = np.exp(logits - logits.max(-1, keepdims=True))
  return pi / pi.sum(-1, keepdims=True)


def policy(x, theta):
  """Probabilities f64[I,K]."""
  return softmax(x @ theta)


def gradients(x, pi):
  """Exact gradients of each prompt's success probability, f64[I,D]."""
  mean = np.einsum('ik,ikd->id', pi, x)
  return pi[:, :1] * (x[:, 0] - mean)
