"""Credit by turn: what each turn of an episode has earned.

An episode of several turns is a completion whose tokens say in `turn` which
turn they belong to; what a tool or a user wrote between two turns lies outside
the mask and gets nothing. `turn_reward` has what each turn was rewarded with,
and is a part of the episode's reward. What it leaves of that reward, that of a
verifier or a penalty for length, belongs to the last turn. So the rewards of
all turns add up to that of the episode, and nothing counts twice.

A turn is credited with what comes from it on, its return to go. The baseline is
a mean over all episodes of the group. One that has ended before a turn counts
there with 0. The mean of those that have reached the turn would be biased,
because who is among them depends on what the episode itself has done.

A batch without these fields is one of single turns. Each transform is there
what its neighbour for whole completions is.
"""

from typing import NamedTuple

from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import Batch
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import at_least_float32
from grpo_jax.losses._stages import on_advantage
from grpo_jax.losses._stages import set_advantage
from grpo_jax.losses._stages import set_weight

_READS = 'turn', 'turn_reward'


def leave_one_out_to_go(gamma=1.0) -> LossTransform:
  r"""Sets each turn's advantage to its return minus the mean of the others'.

  .. math::
    A_{ij} = G_{ij} - \frac{1}{n-1} \sum_{k \neq i} G_{kj}, \quad
    G_{ij} = \sum_{l \ge j} \gamma^{l-j} r_{il}

  :math:`r_{il}` is the reward of turn `l` of episode `i`; the last turn has the
  rest of the episode's reward too. :math:`G_{kj} = 0` where episode `k` has
  ended before turn `j`, and it counts among the `n` even so.

  Args:
    gamma: :math:`\gamma`, from 0 to 1.

  Returns:
    A `LossTransform` that sets the advantage. Without turns it is that of
    `leave_one_out`.

  References:
    Williams, `Simple statistical gradient-following algorithms
    <https://doi.org/10.1007/BF00992696>`_, 1992; Ahmadian et al., `Back to
    Basics <https://arxiv.org/abs/2402.14740>`_, 2024, for the baseline

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> batch = losses.make_batch(
  ...   mask=jnp.array([[[1, 0, 1], [1, 0, 0]]], bool),  # a tool wrote the 0
  ...   reward=jnp.array([[1.0, 0.25]]),
  ...   extras={'turn': jnp.array([[[0, 0, 1], [0, 0, 0]]]),
  ...           'turn_reward': jnp.array([[[0.5, 0.5], [0.25, 0.0]]])})
  >>> method = losses.leave_one_out_to_go()
  >>> batch, _ = losses.credit(method, batch, method.init())
  >>> batch.advantage.tolist()
  [[[0.75, 0.0, 0.5], [-0.75, 0.0, 0.0]]]
  """
  _check_gamma('leave_one_out_to_go', gamma)

  def advantage(batch, gamma):
    turns = _turns(batch)
    counted = _counted(turns)
    centered = _ops.centered(_to_go(turns, gamma), counted, axis=1)
    number = _ops.count(turns.valid, axis=1)[:, None, None]
    return _at_tokens(_ops.safe_divide(centered * number, number - 1), turns)

  return set_advantage(advantage, requires=_READS, gamma=gamma)


def center_to_go_by_group(gamma=1.0) -> LossTransform:
  r"""Sets each turn's advantage to its return minus the group's mean return.

  .. math:: A_{ij} = G_{ij} - \frac{1}{n} \sum_k G_{kj}

  :math:`G` is that of `leave_one_out_to_go`: 0 behind the end of an episode.

  Args:
    gamma: :math:`\gamma`, from 0 to 1.

  Returns:
    A `LossTransform` that sets the advantage. Without turns it is that of
    `center_by_group`.
  """
  _check_gamma('center_to_go_by_group', gamma)

  def advantage(batch, gamma):
    turns = _turns(batch)
    to_go = _to_go(turns, gamma)
    return _at_tokens(_ops.centered(to_go, _counted(turns), axis=1), turns)

  return set_advantage(advantage, requires=_READS, gamma=gamma)


def normalize_to_go_by_group(
  gamma=1.0, deviation='population', epsilon=0.0, under_root=False
) -> LossTransform:
  r"""Sets each turn's advantage to the z-score of its return in the group.

  .. math:: A_{ij} = \frac{G_{ij} - \bar G_j}{\sigma(G_j) + \epsilon}

  :math:`G` is that of `leave_one_out_to_go`, and mean and deviation are over
  all episodes of the group, turn by turn. So a late turn, which few episodes
  have, weighs as much as an early one; `center_to_go_by_group` does not change
  the scale.

  Args:
    gamma: :math:`\gamma`, from 0 to 1.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.
    under_root: Whether `epsilon` is added to the variance, under the root, and
      not to the deviation: :math:`\sqrt{\sigma^2 + \epsilon}`.

  Returns:
    A `LossTransform` that sets the advantage. Without turns it is that of
    `normalize_by_group`.

  Raises:
    ValueError: An unknown `deviation`.
  """
  name = 'normalize_to_go_by_group'
  _check_gamma(name, gamma)
  _ops.check_spread(name, deviation, epsilon, under_root)

  def advantage(batch, gamma, epsilon):
    turns = _turns(batch)
    score = _ops.normalized(
      _to_go(turns, gamma),
      _counted(turns),
      deviation,
      epsilon,
      1,
      under_root,
    )
    return _at_tokens(score, turns)

  return set_advantage(advantage, requires=_READS, gamma=gamma, epsilon=epsilon)


def normalize_turns_and_outcome(
  coefficient=1.0, deviation='population', epsilon=0.0
) -> LossTransform:
  r"""Sets the advantage to the outcome's z-score and that of the turn's reward.

  .. math::
    A_{ij} = \operatorname{z}(O_i) + \lambda \operatorname{z}(r_{ij})
      \text{ before the last turn}, \quad
    A_{ij} = \operatorname{z}(O_i) \text{ in the last turn}

  The outcome :math:`O_i` is what the last turn has earned. Each `z` is the
  z-score over all episodes of the group; :math:`r_{ij}` counts there as 0 from
  the last turn of episode `i` on. What a turn has earned is not credited to
  those before it.

  Args:
    coefficient: :math:`\lambda`, without unit.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviations.

  Returns:
    A `LossTransform` that sets the advantage. Without turns it is that of
    `normalize_by_group`.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Zeng et al., `Reinforcing Multi-Turn Reasoning in LLM Agents
    <https://arxiv.org/abs/2505.11821>`_, 2025
  """
  name = 'normalize_turns_and_outcome'
  _ops.check_spread(name, deviation, epsilon)
  _ops.check_numbers(name, coefficient=coefficient)

  def advantage(batch, coefficient, epsilon):
    turns, how = _turns(batch), (deviation, epsilon, 1)
    number = jnp.arange(turns.reward.shape[-1])[None, None]
    is_last = number == turns.last[..., None]
    outcome = jnp.sum(jnp.where(is_last, turns.reward, 0), axis=-1)
    outcome = _settled(outcome, turns.valid, turns.slack, axis=1)
    score = _ops.per_token(_ops.normalized(outcome, turns.valid, *how))
    before = number < turns.last[..., None]
    earned = jnp.where(before, turns.reward, 0)
    own = _ops.normalized(earned, _counted(turns), *how)
    return _at_tokens(score + jnp.where(before, coefficient * own, 0), turns)

  return set_advantage(
    advantage, requires=_READS, coefficient=coefficient, epsilon=epsilon
  )


def add_credit_by_state(
  coefficient=1.0,
  gamma=0.95,
  normalizes=True,
  deviation='population',
  epsilon=0.0,
) -> LossTransform:
  r"""Adds how much better a turn went than others that began in its state.

  .. math::
    A_{ij} \leftarrow A_{ij} + \omega \operatorname{z}_{(k,l): s_{kl} = s_{ij}}
      (G_{ij}), \quad G_{ij} = \sum_{l \ge j} \gamma^{l-j} r_{il}

  The z-score is that among all turns of the group that began in the same state
  (an anchor state), also among several of one episode; it is 0 for a turn that
  is alone in its state. Which turns are compared depends on what the policy has
  done before, so this is no unbiased estimate, unless the state alone decides
  what can still be earned.

  Args:
    coefficient: :math:`\omega`, without unit.
    gamma: :math:`\gamma`, from 0 to 1.
    normalizes: Whether the difference to the mean is divided by the deviation.
    deviation: `'population'` or `'sample'`.
    epsilon: Added to the deviation.

  Returns:
    A `LossTransform` that edits the advantage. It requires `turn_state`,
    i32[P,G,N]: equal numbers where turns of a group began in the same state.
    Without turns the state is the prompt.

  Raises:
    ValueError: An unknown `deviation`.

  References:
    Feng et al., `Group-in-Group Policy Optimization
    <https://arxiv.org/abs/2505.10978>`_, 2025
  """
  name = 'add_credit_by_state'
  _check_gamma(name, gamma)
  _ops.check_spread(name, deviation, epsilon)
  _ops.check_flag(name, 'normalizes', normalizes)
  _ops.check_numbers(name, coefficient=coefficient)

  def compared(value, alike, slack, epsilon):
    value = _settled(value, alike, slack, axis=1)
    if normalizes:
      return _ops.normalized(value, alike, deviation, epsilon, 1)
    return _ops.centered(value, alike, axis=1)

  def advantage(advantage, batch, coefficient, gamma, epsilon):
    turns = _turns(batch)
    shape = turns.reward.shape
    flat = lambda x: jnp.reshape(x, (shape[0], -1))  # [P,G,N] -> [P,G * N]
    value, there = flat(_to_go(turns, gamma)), flat(_reached(turns))
    state = flat(batch.extras['turn_state'])

    def add(n, found):  # one turn after another: no array is [P,G*N,G*N]
      own = lax.dynamic_index_in_dim(state, n, axis=1)
      score = compared(value, there & (state == own), turns.slack, epsilon)
      return jnp.where(jnp.arange(state.shape[1])[None] == n, score, found)

    score = lax.fori_loop(0, state.shape[1], add, jnp.zeros_like(value))
    score = jnp.reshape(score, shape)
    return advantage + coefficient * _at_tokens(score, turns)

  return on_advantage(
    advantage,
    requires=(*_READS, 'turn_state'),
    coefficient=coefficient,
    gamma=gamma,
    epsilon=epsilon,
  )


def mean_over_turns() -> LossTransform:
  r"""Gives every turn the same weight, which its kept tokens share.

  .. math:: w_{it} = \frac{1}{M L_{ij}} \text{ for token t of turn j}

  `M` counts the turns of the batch that keep at least one token,
  :math:`L_{ij}` the kept tokens of one.

  Returns:
    A `LossTransform` that sets the weight. Without turns it is that of
    `mean_over_sequences`.

  >>> import jax.numpy as jnp
  >>> from grpo_jax import losses
  >>> batch = losses.make_batch(
  ...   mask=jnp.array([[[1, 1, 0, 1]]], bool), reward=jnp.zeros((1, 1)),
  ...   extras={'turn': jnp.array([[[0, 0, 0, 1]]]),
  ...           'turn_reward': jnp.zeros((1, 1, 2))})
  >>> method = losses.chain(losses.use_reward(), losses.mean_over_turns())
  >>> batch, state = losses.credit(method, batch, method.init())
  >>> losses.prepare(method, batch, state).weight.tolist()
  [[[0.25, 0.25, 0.0, 0.5]]]
  """

  def weight(batch):
    turn, most = _turn(batch), batch.extras['turn_reward'].shape[-1]
    kept = batch.keep.astype(batch.reward.dtype)

    def add(n, found):  # one turn after another: no array is [P,G,T,N]
      tokens, turns = found
      own = jnp.where(turn == n, kept, 0)
      number = jnp.sum(own, axis=-1, keepdims=True)
      return tokens + own * number, turns + (number > 0)

    nothing = jnp.zeros_like(kept)
    found = lax.fori_loop(0, most, add, (nothing, nothing[..., :1]))
    return _ops.safe_divide(kept, found[0] * jnp.sum(found[1]))

  return set_weight(weight, requires=_READS)


class _Turns(NamedTuple):
  """The turns of a batch.

  Attributes:
    turn: i32[P,G,T], the number of each token's turn; 0 outside the mask.
    last: i32[P,G], the number of the last turn.
    valid: bool[P,G].
    reward: f32[P,G,N], what each turn has earned; the last one also what is
      left of the reward of the episode.
    slack: f32[P,1], by how much sums of these may differ that are equal on
      paper.
  """

  turn: Array
  last: Array
  valid: Array
  reward: Array
  slack: Array


def _turn(batch: Batch) -> Array:
  """i32[P,G,T], the number of each token's turn; 0 outside the mask."""
  return jnp.where(batch.mask, batch.extras['turn'], 0).astype(jnp.int32)


def _turns(batch: Batch) -> _Turns:
  turn = _turn(batch)
  last = jnp.max(turn, axis=-1)
  given = at_least_float32(batch.extras['turn_reward'])
  given = jnp.where(batch.valid[..., None], given, 0)
  # The reward of an episode was summed and rounded by itself, so that what is
  # left of it is off by its rounding. Without rewards of turns it is exact.
  left = batch.reward - jnp.sum(given, axis=-1)
  number = jnp.arange(given.shape[-1])[None, None]
  reward = given + jnp.where(number == last[..., None], left[..., None], 0)
  size = jnp.sum(jnp.abs(given), axis=-1)
  size = jnp.where(size > 0, size + jnp.abs(batch.reward), 0)
  eps = 4 * given.shape[-1] * jnp.finfo(given.dtype).eps
  slack = eps * jnp.max(size, axis=1, keepdims=True)
  return _Turns(turn, last, batch.valid, reward, slack)


def _reached(turns: _Turns) -> Array:
  """bool[P,G,N], the turns that valid episodes have."""
  number = jnp.arange(turns.reward.shape[-1])[None, None]
  return (number <= turns.last[..., None]) & turns.valid[..., None]


def _counted(turns: _Turns) -> Array:
  """bool[P,G,N], who counts in the mean of a turn: every valid episode.

  Also one that has ended before the turn. See the docstring of this module.
  """
  return jnp.broadcast_to(turns.valid[..., None], turns.reward.shape)


def _to_go(turns: _Turns, gamma) -> Array:
  """f32[P,G,N], the return of each turn; 0 behind the end of an episode."""

  def add(later, reward):
    total = reward + gamma * later
    return total, total

  by_turn = jnp.moveaxis(turns.reward, -1, 0)
  nothing = jnp.zeros_like(by_turn[0])
  _, sums = lax.scan(add, nothing, by_turn, reverse=True)
  to_go = jnp.where(_reached(turns), jnp.moveaxis(sums, 0, -1), 0)
  slack = turns.slack[..., None]
  return _settled(to_go, _counted(turns), slack, axis=1)


def _settled(value: Array, mask: Array, slack: Array, axis: int) -> Array:
  """The values, all alike if they differ by no more than `slack`.

  A z-score would blow such differences up to order 1.
  """
  high = jnp.max(value, axis, keepdims=True, where=mask, initial=-jnp.inf)
  low = jnp.min(value, axis, keepdims=True, where=mask, initial=jnp.inf)
  return jnp.where(mask & (high - low <= slack), high, value)


def _at_tokens(value: Array, turns: _Turns) -> Array:
  """f32[P,G,N], a value of each turn, at its tokens: f32[P,G,T].

  NaN at the tokens of a turn that `turn_reward` has no place for.
  """
  return jnp.take_along_axis(value, turns.turn, axis=-1, mode='fill')


def _check_gamma(name: str, gamma) -> None:
  _ops.check_numbers(name, least=0, most=1, gamma=gamma)
