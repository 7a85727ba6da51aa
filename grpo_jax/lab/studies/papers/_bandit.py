"""Prompts with a few answers each, sampled in groups, for any method.

An answer is a completion whose first token chooses it; its other tokens are
certain. So a method sees tokens, lengths and groups as in a run, and a policy
is a softmax over answers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_jax import losses


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
