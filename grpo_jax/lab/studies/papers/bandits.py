"""Bandits with exact policies, and the coefficients that methods give groups.

A bandit has P prompts with K answers each, of which a policy, log-linear in its
features, draws one. What methods make of its rollouts is computed with the
losses that runs use.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import losses


def credited(
  method: losses.LossTransform, mask, reward, **fields
) -> tuple[losses.Batch, Any]:
  """A rollout [P,G,T] ready for updates, and the method's state."""
  batch = losses.make_batch(mask, reward, **fields)
  batch, state = losses.credit(method, batch, method.init())
  return losses.prepare(method, batch, state), state


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
  """`jax.jit` without most optimizations, with which compiling takes longer."""
  options = {'xla_backend_optimization_level': 0}
  return jax.jit(function, compiler_options=options)


def over_betas(function: Callable[..., Any], betas, others) -> np.ndarray:
  """`function(b1, b2, other) -> f64[K]` for all pairs of betas and all others.

  Returns:
    What it returns, f64[B,O,K].
  """
  with jax.enable_x64(True):
    b1, b2 = (jnp.array(one)[:, None] for one in zip(*betas, strict=True))
    every = jax.jit(jnp.vectorize(function, signature='(),(),()->(k)'))
    return np.asarray(every(b1, b2, jnp.array(others)[None]))


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


def _chosen(values, answer):
  return jnp.take_along_axis(values, answer, axis=1)


def token_logp(bandit: Bandit, theta, answer) -> jax.Array:
  """Log-probabilities of tokens, f64[P,G,T]; after the first they are 0."""
  first = _chosen(log_policy(bandit, theta), answer)[..., None]
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
  length = _chosen(bandit.length, answer)
  return credited(
    method,
    jnp.arange(bandit.width)[None, None] < length[..., None],
    scale * _chosen(bandit.reward, answer),
    logp_old=token_logp(bandit, theta, answer),
  )


def loss_and_gradient(method, bandit, theta, answer, batch, state):
  """The surrogate loss at theta, f64[], and its gradient, f64[D]."""

  def loss(theta):
    logp = token_logp(bandit, theta, answer)
    return losses.surrogate_loss(method, logp, batch, state)[0]

  return jax.value_and_grad(loss)(theta)


def group_coefficients(
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
    fields = {name: one[None] for name, one in fields.items()}
    batch, state = credited(method, mask[None], reward[None], **fields)

    def loss(logp):
      return losses.surrogate_loss(method, logp, batch, state)[0]

    value, slope = jax.value_and_grad(loss)(-jnp.ones(batch.mask.shape))
    return -slope[0], value

  with jax.enable_x64(True):
    found = jit(jax.vmap(one))(mask, np.asarray(reward, np.float64), fields)
    return np.asarray(found[0]), np.asarray(found[1])
