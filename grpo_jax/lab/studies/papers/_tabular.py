"""A prompt with K answers of which one is right, and a logit for each.

All wrong answers begin equally likely and stay so. So the gap z between the
right logit and the others is all there is. Gradients are exact. This is the
setting of Ge et al. (arXiv 2601.23135) with X = identity, where X_max = 1.
"""

import numpy as np


def train(start, answers: int, rate: float, steps: int, normalized: bool):
  """Follows the exact gradient of one prompt, every step.

  Args:
    start: Success probabilities to begin with, [S], in (0, 1).
    answers: K, at least 2.
    rate: The step size.
    steps: T.
    normalized: Whether the gradient is divided by the deviation of the reward
      (GRPO) or not (REINFORCE).

  Returns:
    The success probability at every step, the first included, f64[T + 1, S].
  """
  start = np.asarray(start, np.float64)
  z = np.log(start / (1 - start)) + np.log(answers - 1)
  path = np.empty((steps + 1, *start.shape))
  for t in range(steps + 1):
    wrong = 1 / (1 + np.exp(z) / (answers - 1))  # exact where p is next to 1
    path[t] = 1 - wrong
    size = (1 - wrong) * wrong
    if normalized:
      size = np.sqrt(size)
    z = z + rate * size * answers / (answers - 1)
  return path


def gradient_squared(p, answers: int):
  """The squared norm of the exact gradient at success probability p."""
  return (p * (1 - p)) ** 2 * answers / (answers - 1)


def deviation(p):
  """The standard deviation of a binary reward."""
  return np.sqrt(p * (1 - p))
