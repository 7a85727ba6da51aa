"""The small settings that several experiments share, with exact gradients.

- One prompt with K answers and a logit for each, of which one is right: all
  wrong answers begin equally likely and stay so, and the gap between the right
  logit and the others is all there is (`train`). This is the setting of Ge et
  al. (arXiv 2601.23135) with X = identity, where X_max = 1.
- Log-linear policies on several prompts that share their parameters: pi(k | i)
  is the softmax over k of x_ik . theta, and answer 0 is right (Ge et al.,
  equation 6).
- Bandits, and the coefficients that a method gives to whole groups.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
  """`jax.jit` without most optimizations, with which compiling takes longer."""
  options = {'xla_backend_optimization_level': 0}
  return jax.jit(function, compiler_options=options)


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


class Bandit(NamedTuple):
  """What is to be learned."""

  features: jax.Array  # f64[P,K,D]; logits are features @ theta
  reward: jax.Array  # f64[P,K]
  length: jax.Array  # i64[P,K], tokens of an answer
  width: int  # the longest answer that a batch has room for


def tabular(reward, length=None, width: int = 1) -> Bandit:
  """A bandit with a logit of its own for every answer."""
  reward = jnp.asarray(reward)
  own = jnp.eye(reward.size).reshape(*reward.shape, reward.size)
  ones = jnp.ones(reward.shape, jnp.int32)
  return Bandit(own, reward, ones if length is None else length, width)


def log_policy(bandit: Bandit, theta) -> jax.Array:
  """Log-probabilities f64[P,K]."""
  return jax.nn.log_softmax(bandit.features @ theta, axis=-1)


def value(bandit: Bandit, theta) -> jax.Array:
  """The expected reward, f64[]."""
  pi = jnp.exp(log_policy(bandit, theta))
  return jnp.mean(jnp.sum(pi * bandit.reward, axis=-1))


def sample(bandit: Bandit, theta, uniform) -> jax.Array:
  """Answers i64[P,G] for uniform numbers [P,G], by the inverse distribution."""
  reached = jnp.cumsum(jnp.exp(log_policy(bandit, theta)), axis=-1)
  answer = jnp.sum(uniform[..., None] > reached[:, None], axis=-1)
  return jnp.minimum(answer, bandit.reward.shape[-1] - 1)


def _of(values, answer):
  return jnp.take_along_axis(values, answer, axis=1)


def token_logp(bandit: Bandit, theta, answer) -> jax.Array:
  """Log-probabilities of tokens, f64[P,G,T]; after the first they are 0."""
  first = _of(log_policy(bandit, theta), answer)[..., None]
  return jnp.pad(first, ((0, 0), (0, 0), (0, bandit.width - 1)))


def rollout(
  method: losses.LossTransform, bandit: Bandit, theta, answer, scale=1.0
):
  """A rollout of the policy at theta, ready for updates.

  Args:
    method: The method that credits and weighs it.
    bandit: What is to be learned.
    theta: The policy that sampled, f64[D].
    answer: What it sampled, i64[P,G].
    scale: Factor on the rewards.

  Returns:
    The batch, and the method's state.
  """
  length = _of(bandit.length, answer)
  batch = losses.make_batch(
    jnp.arange(bandit.width)[None, None] < length[..., None],
    scale * _of(bandit.reward, answer),
    logp_old=token_logp(bandit, theta, answer),
  )
  batch, state = losses.credit(method, batch, method.init())
  return losses.prepare(method, batch, state), state


def loss_and_gradient(method, bandit, theta, answer, batch, state):
  """The surrogate loss at theta, f64[], and its gradient, f64[D]."""

  def loss(theta):
    logp = token_logp(bandit, theta, answer)
    return losses.surrogate_loss(method, logp, batch, state)[0]

  return jax.value_and_grad(loss)(theta)


def of_groups(
  method: losses.LossTransform,
  reward: np.ndarray,
  length: np.ndarray,
  **fields: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Coefficients -d loss / d logp at ratio 1, each group a batch of its own.

  Args:
    method: Any method that needs no entropy of the policy.
    reward: f64[N,G].
    length: i64[N,G], tokens of each completion, at least 1.
    **fields: Other fields of `losses.Batch`, `[N,G,...]`.

  Returns:
    The coefficients f64[N,G,T] and the value of the loss f64[N].
  """
  mask = np.arange(length.max()) < length[..., None]

  def one(mask, reward, fields):
    batch = losses.make_batch(
      mask[None], reward[None], **{k: v[None] for k, v in fields.items()}
    )
    batch, state = losses.credit(method, batch, method.init())
    batch = losses.prepare(method, batch, state)

    def loss(logp):
      return losses.surrogate_loss(method, logp, batch, state)[0]

    value, slope = jax.value_and_grad(loss)(-jnp.ones(batch.mask.shape))
    return -slope[0], value

  with jax.enable_x64(True):
    found = jit(jax.vmap(one))(mask, np.asarray(reward, np.float64), fields)
    return np.asarray(found[0]), np.asarray(found[1])
