r"""Brakes: trust regions that reckon with a policy that goes on moving.

A clip switches a token's gradient off, but neither the tokens that share its
parameters nor Adam's momentum stop there: the ratio coasts beyond the bound
(proposition 3 of Fontana et al., `On the Hidden Objective Biases of Group-based
Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026). One of these
pulls back what is outside, the other lets go before the bound is reached.
"""

import jax.numpy as jnp

from grpo_jax.losses import _objective
from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._stages import set_objective
from grpo_jax.losses._weight import mean_over_sequences


def rollback_clip(low=0.2, high=0.2, slope=0.3) -> LossTransform:
  r"""PPO's clip with the opposite slope outside: it pulls back.

  .. math::
    f(s, A) = \begin{cases}
      \bigl((1 + h) - \alpha (s - 1 - h)\bigr) A & s > 1 + h,\ A > 0 \\
      \bigl((1 - l) + \alpha (1 - l - s)\bigr) A & s < 1 - l,\ A < 0 \\
      s A & \text{else}
    \end{cases}

  The slope in `s` jumps from `A` to :math:`-\alpha A` at the bound, where the
  value is continuous. The metrics `clipped_high` and `clipped_low` are those of
  `ppo_clip`: the tokens beyond, although their slope is not 0 here.

  Args:
    low: Distance of the lower bound from 1.
    high: Distance of the upper bound from 1.
    slope: `alpha`, per unit of the ratio; 0 is `ppo_clip`.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance or slope.

  References:
    Wang et al., `Truly Proximal Policy Optimization
    <https://arxiv.org/abs/1903.07940>`_, 2019 (PPO-RB)
  """
  _ops.check_range('rollback_clip', low, high)
  if isinstance(slope, int | float) and slope < 0:
    raise ValueError(
      f'rollback_clip got slope={slope}, which would push further out; give a '
      'slope that is not negative.'
    )

  def objective(terms, batch, low, high, slope):
    ratio, metrics = _ops.importance_ratio(terms)
    held, clip = _objective.hold_outside(ratio, low, high, batch.advantage)
    value = held - slope * (ratio - held)  # inside, the two are equal
    return value * batch.advantage, {**metrics, **clip}

  return set_objective(objective, low=low, high=high, slope=slope)


def coasting_clip(
  low=0.2, high=0.2, updates=1, b1=0.9, b2=0.999
) -> LossTransform:
  r"""PPO's clip, narrowed by how far momentum will carry the ratio.

  A token whose log-ratio is :math:`L` after :math:`k` updates on this rollout
  has moved by :math:`L / k` per update. When its gradient ends, Adam goes on by
  :math:`\rho^n` of the last step, :math:`\rho = b_1 / \sqrt{b_2}`, in the n-th
  update after it, so that over the updates that are left the token comes to

  .. math::
    L \Bigl(1 + \frac{S}{k}\Bigr), \qquad
    S = \sum_{n=1}^{\text{updates} - k} \rho^n .

  It is clipped where that leaves the range: `s` is held as in `ppo_clip` at

  .. math:: (1 + h)^{1 / (1 + S / k)}, \qquad (1 - l)^{1 / (1 + S / k)} .

  Before the first update there is no velocity and the range is the plain one;
  with one update per rollout this is `ppo_clip`. That the velocity was constant
  and that Adam has forgotten its start (:math:`T \to \infty`) are assumptions.
  If :math:`b_2 < b_1^2`, each step that coasts is larger than the one before.

  Metrics: `ppo_clip`'s, and `clip_high`, the narrowed upper distance.

  Args:
    low: Distance of the lower bound from 1, for the predicted ratio; at most 1.
    high: Distance of the upper bound from 1, for the predicted ratio.
    updates: Optimizer updates on one rollout.
    b1: Adam's decay of the gradient.
    b2: Adam's decay of its square.

  Returns:
    A `LossTransform` that sets the objective and requires `updates_done`, in
    `Batch.extras`: f32[P,G,T], the updates on this rollout before this one.

  Raises:
    ValueError: A bound that is none, fewer than one update, or a decay outside
      its range.

  References:
    The prediction is the limit of equation 36 of Fontana et al., `On the Hidden
    Objective Biases of Group-based Reinforcement Learning
    <https://arxiv.org/abs/2601.05002>`_, 2026. The clip is this package's own.
  """
  _ops.check_range('coasting_clip', low, high)
  if isinstance(low, int | float) and low > 1:
    raise ValueError(
      f'coasting_clip got low={low}; give a distance of at most 1, as no ratio '
      'is negative.'
    )
  if updates < 1 or updates != int(updates):
    raise ValueError(
      f'coasting_clip got updates={updates}; give the number of optimizer '
      'updates on one rollout, a whole number of at least 1.'
    )
  if not (0 <= b1 < 1 and 0 < b2 <= 1):
    raise ValueError(
      f"coasting_clip got b1={b1} and b2={b2}; give Adam's, with 0 <= b1 < 1 "
      'and 0 < b2 <= 1.'
    )
  rho = b1 / b2**0.5

  def objective(terms, batch, low, high):
    done = batch.extras['updates_done']
    coasts = sum(  # exact for rho >= 1 too
      rho**n * (n <= updates - done) for n in range(1, int(updates))
    )
    share = _ops.safe_divide(done, done + coasts)  # 1 / (1 + S / k)
    narrowed = (done > 0) & (share < 1)  # else to the bit what was given
    low = jnp.where(narrowed, 1 - (1 - low) ** share, low)
    high = jnp.where(narrowed, (1 + high) ** share - 1, high)
    ratio, metrics = _ops.importance_ratio(terms)
    value, clip = _objective.hold_outside(ratio, low, high, batch.advantage)
    metrics |= {'clip_high': high}
    return value * batch.advantage, {**metrics, **clip}

  return set_objective(
    objective, requires=('updates_done',), low=low, high=high
  )


def rollback_grpo(
  low=0.2, high=0.2, slope=0.3, kl_coefficient=0.0
) -> LossTransform:
  r"""GRPO with `rollback_clip` in place of the clip.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t f(s_{it}, A_i) - \beta\, k_3

  Args:
    low: Distance of the lower bound from 1.
    high: Distance of the upper bound from 1.
    slope: See `rollback_clip`.
    kl_coefficient: `beta`, per nat. 0 leaves the term out, and with it the
      reference model.

  Returns:
    A `LossTransform`.

  References:
    Wang et al., `Truly Proximal Policy Optimization
    <https://arxiv.org/abs/1903.07940>`_, 2019, has the objective; nobody is
    known to have joined it with GRPO.
  """
  return _grpo(rollback_clip(low, high, slope), kl_coefficient)


def coasting_grpo(
  low=0.2, high=0.2, updates=1, b1=0.9, b2=0.999, kl_coefficient=0.0
) -> LossTransform:
  r"""GRPO with `coasting_clip` in place of the clip.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t f(s_{it}, A_i) - \beta\, k_3

  Args:
    low: Distance of the lower bound from 1, for the predicted ratio.
    high: Distance of the upper bound from 1, for the predicted ratio.
    updates: Optimizer updates on one rollout, as the learner makes them.
    b1: The optimizer's.
    b2: The optimizer's.
    kl_coefficient: `beta`, per nat. 0 leaves the term out, and with it the
      reference model.

  Returns:
    A `LossTransform`; requires `updates_done`, see `coasting_clip`.
  """
  return _grpo(coasting_clip(low, high, updates, b1, b2), kl_coefficient)


def _grpo(trust_region, kl_coefficient) -> LossTransform:
  """GRPO around another objective."""
  return chain(
    normalize_by_group(),
    mean_over_sequences(),
    trust_region,
    *maybe_kl(kl_coefficient),
  )
