"""Hyper-parameters that change during a run: schedules and controllers.

A schedule is a function of the rollout counter (0 for the first rollout), for
example `optax.linear_schedule(0.2, 0.1, 1000)`. A `Controller` computes the
number from what it measures on each rollout. `credit` updates both once per
rollout, before a transform reads the number, so that all updates of a rollout
see the same one.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import State


class Controller(NamedTuple):
  """A hyper-parameter with a state.

  Attributes:
    init: `() -> State`, arrays.
    update: `(State, Batch) -> State`, once per rollout.
    value: `State -> f32[]`, the hyper-parameter for this rollout.
    requires: Optional fields that `update` reads, by name.
  """

  init: Callable[[], State]
  update: Callable[[State, Batch], State]
  value: Callable[[State], Array]
  requires: frozenset[str] = frozenset()


class _Coefficient(NamedTuple):
  """State of a controller that measures now and acts on the next rollout."""

  current: Array  # f32[], of this rollout
  following: Array  # f32[]


def _coefficient(initial) -> _Coefficient:
  """The first state, in two arrays of their own.

  The state of a run is donated to the compiled step, and one buffer cannot be
  donated twice.
  """
  return _Coefficient(*(jnp.array(initial, jnp.float32) for _ in range(2)))


def scheduled(function: Callable[[Array], Any]) -> Controller:
  """Makes a controller of a schedule; every transform does this by itself.

  Args:
    function: From the rollout counter, i32[], 0 for the first, to a number.

  Returns:
    A `Controller` that counts rollouts.
  """

  def update(rollouts, batch):
    del batch
    return rollouts + 1

  # `credit` counts a rollout before anything reads the value, so the counter of
  # the first rollout is 1 by then.
  return Controller(
    lambda: jnp.zeros((), jnp.int32),
    update,
    lambda rollouts: function(jnp.maximum(rollouts - 1, 0)),
  )


def adaptive_kl(initial, target, gain=0.1, limit=0.2) -> Controller:
  r"""A KL coefficient that seeks a target.

  .. math::
    \beta \leftarrow \beta \Bigl(1 + g \operatorname{clip}\bigl(
      \tfrac{KL - target}{target}, -l, l\bigr)\Bigr)

  KL is the mean of `logp_old - logp_ref` over the trained tokens of the
  rollout. As in the paper, it acts on the coefficient of the next rollout.

  Args:
    initial: The first coefficient, per nat.
    target: KL per token, in nats. (The paper's is per completion.)
    gain: `g`, the relative change per relative error.
    limit: `l`, bound of the relative error.

  Returns:
    A `Controller`, for example as the coefficient of `add_kl`.

  Raises:
    ValueError: `target` is not positive.

  References:
    Ziegler et al., `Fine-Tuning Language Models from Human Preferences
    <https://arxiv.org/abs/1909.08593>`_, 2019
  """
  _ops.check_numbers(
    'adaptive_kl',
    least=0,
    moves=False,
    initial=initial,
    gain=gain,
    limit=limit,
  )
  _ops.check_numbers('adaptive_kl', moves=False, target=target)
  if target <= 0:
    raise ValueError(
      f'adaptive_kl got target={target}; give a positive KL per token, in nats.'
    )

  def update(state, batch):
    kl = _ops.masked_mean(batch.logp_old - batch.logp_ref, batch.keep)
    error = jnp.clip(kl / target - 1, -limit, limit)
    # A rollout without trained tokens has measured nothing.
    error = jnp.where(jnp.any(batch.keep), error, 0)
    following = state.following * (1 + gain * error)
    # This rollout gets what the one before has measured.
    return _Coefficient(state.following, following.astype(jnp.float32))

  return Controller(
    lambda: _coefficient(initial),
    update,
    lambda s: s.current,
    frozenset(('logp_old', 'logp_ref')),
  )


def entropy_target(target, step=0.005, initial=0.0) -> Controller:
  r"""An entropy coefficient that rises while the entropy is too low.

  .. math::
    \alpha_k = c_k\, 1[H_k \le target], \quad
    c_{k+1} = \max(0, c_k \pm \Delta)

  :math:`H_k` is the mean of `entropy_old` over the trained tokens of rollout
  `k`. The sign is `+` where :math:`H_k` is below the target, else `-`.

  Args:
    target: Entropy per token, in nats.
    step: :math:`\Delta`, per nat.
    initial: :math:`c_0`, per nat.

  Returns:
    A `Controller`, for example as the coefficient of `add_entropy_bonus`.

  References:
    He et al., `Skywork Open Reasoner 1
    <https://arxiv.org/abs/2505.22312>`_, 2025
  """
  _ops.check_numbers(
    'entropy_target',
    least=0,
    moves=False,
    target=target,
    step=step,
    initial=initial,
  )

  def update(state, batch):
    entropy = _ops.masked_mean(batch.entropy_old, batch.keep)
    sign = jnp.where(entropy < target, 1, -1)
    # A rollout without trained tokens has measured nothing.
    sign = jnp.where(jnp.any(batch.keep), sign, 0)
    # The indicator acts on this rollout, the step of `c` on the next.
    current = jnp.where(entropy <= target, state.following, 0)
    following = jnp.maximum(state.following + sign * step, 0)
    return _Coefficient(
      current.astype(jnp.float32), following.astype(jnp.float32)
    )

  return Controller(
    lambda: _coefficient(initial),
    update,
    lambda s: s.current,
    frozenset(('entropy_old',)),
  )


class _First(NamedTuple):
  """State of `first_entropy`."""

  value: Array  # f32[]
  seen: Array  # bool[]


def first_entropy() -> Controller:
  """The mean entropy of the trained tokens of the first rollout.

  Returns:
    A `Controller` whose value is in nats and stays the same from then on.
  """

  def update(state, batch):
    entropy = _ops.masked_mean(batch.entropy_old, batch.keep)
    value = jnp.where(state.seen, state.value, entropy)
    # A rollout without trained tokens has no mean, so the next one counts as
    # the first.
    seen = state.seen | jnp.any(batch.keep)
    return _First(value.astype(jnp.float32), seen)

  def init():
    return _First(jnp.zeros((), jnp.float32), jnp.zeros((), bool))

  return Controller(
    init, update, lambda s: s.value, frozenset(('entropy_old',))
  )
