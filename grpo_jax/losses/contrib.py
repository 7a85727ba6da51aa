"""Methods and transforms that no paper has, or that are not yet verified.

A config names them as it names a method of a user's own:
`'grpo_jax.losses.contrib:coasting_grpo'`.

Brakes: trust regions that take into account that the policy goes on moving.

A clip switches the gradient of a token off. But the tokens that share its
parameters go on pulling, and so does Adam's momentum, so the ratio coasts
beyond the bound (proposition 3 of Fontana et al., `On the Hidden Objective
Biases of Group-based Reinforcement Learning
<https://arxiv.org/abs/2601.05002>`_, 2026). `rollback_clip` pulls back the
tokens outside; `coasting_clip` switches the gradient off before the bound is
reached.
"""

import jax.numpy as jnp

from grpo_jax.losses import _objective
from grpo_jax.losses import _ops
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._credit import normalize_by_group
from grpo_jax.losses._from_run import takes_from_run
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._stages import set_objective
from grpo_jax.losses._weight import mean_over_sequences

__all__ = (
  'coasting_clip',
  'coasting_grpo',
  'grpo_without_std',
  'rollback_clip',
  'rollback_grpo',
)


def rollback_clip(low=0.2, high=0.2, slope=0.3) -> LossTransform:
  r"""PPO's clip with the opposite slope outside: it pulls back.

  .. math::
    f(s, A) = \begin{cases}
      \bigl((1 + h) - \alpha (s - 1 - h)\bigr) A & s > 1 + h,\ A > 0 \\
      \bigl((1 - l) + \alpha (1 - l - s)\bigr) A & s < 1 - l,\ A < 0 \\
      s A & \text{else}
    \end{cases}

  At the bound the value is continuous, and its slope in `s` jumps from `A` to
  :math:`-\alpha A`. The metrics `clipped_high` and `clipped_low` mark the
  tokens beyond the bounds, as in `ppo_clip`, although their slope is not 0
  here.

  Args:
    low: `l`, distance of the lower bound from 1.
    high: `h`, distance of the upper bound from 1.
    slope: :math:`\alpha`, per unit of the ratio; 0 is `ppo_clip`.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance or slope.

  References:
    Wang et al., `Truly Proximal Policy Optimization
    <https://arxiv.org/abs/1903.07940>`_, 2019 (PPO-RB)
  """
  _ops.check_range('rollback_clip', low, high)
  _ops.check_numbers('rollback_clip', least=0, slope=slope)

  def objective(terms, batch, low, high, slope):
    ratio, metrics = _ops.importance_ratio(terms)
    held, clip = _objective.hold_outside(ratio, low, high, batch.advantage)
    # Inside the range `held` is the ratio, so the second term is 0.
    value = held - slope * (ratio - held)
    return value * batch.advantage, {**metrics, **clip}

  return set_objective(
    objective, zero_without_advantage=True, low=low, high=high, slope=slope
  )


def coasting_clip(
  low=0.2, high=0.2, updates=1, b1=0.9, b2=0.999
) -> LossTransform:
  r"""PPO's clip, narrowed by how far momentum will carry the ratio.

  A token whose log-ratio is :math:`L` after :math:`k` updates on this rollout
  has moved by :math:`L / k` per update. When its gradient ends, Adam goes on by
  :math:`\rho^n` of the last step in the n-th update after it, with
  :math:`\rho = b_1 / \sqrt{b_2}`. Over the updates that are left, the token
  comes to

  .. math::
    L \Bigl(1 + \frac{S}{k}\Bigr), \qquad
    S = \sum_{n=1}^{\text{updates} - k} \rho^n .

  It is clipped where that lies outside the range: `s` is held as in `ppo_clip`,
  at

  .. math:: (1 + h)^{1 / (1 + S / k)}, \qquad (1 - l)^{1 / (1 + S / k)} .

  Before the first update there is no velocity, and the range is the plain one.
  With one update per rollout this is `ppo_clip`. Two things are assumed: that
  the velocity was constant, and that Adam has taken so many steps that its bias
  corrections are 1 (:math:`T \to \infty`). If :math:`b_2 < b_1^2`, each step
  without a gradient is larger than the one before.

  The metrics are those of `ppo_clip`, and `clip_high`, the narrowed upper
  distance.

  Args:
    low: Distance of the lower bound from 1, for the predicted ratio; at most 1.
    high: Distance of the upper bound from 1, for the predicted ratio.
    updates: Optimizer updates on one rollout, a whole number.
    b1: Adam's decay of the first moment, in [0, 1).
    b2: Adam's decay of the second moment, in (0, 1].

  Returns:
    A `LossTransform` that sets the objective and requires `updates_done`, in
    `Batch.extras`: f32[P,G,T], the updates on this rollout before this one.

  Raises:
    ValueError: A negative distance, a `low` above 1, fewer than one update, or
      a decay outside its range.

  References:
    The prediction is the limit of equation 36 of Fontana et al., `On the Hidden
    Objective Biases of Group-based Reinforcement Learning
    <https://arxiv.org/abs/2601.05002>`_, 2026. The clip is this package's own.
  """
  _ops.check_range('coasting_clip', low, high)
  _ops.check_numbers('coasting_clip', least=1, moves=False, updates=updates)
  _ops.check_numbers('coasting_clip', least=0, moves=False, b1=b1, b2=b2)
  if updates != int(updates):
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
    # Summed and not in closed form, which is 0 / 0 for rho = 1. `updates` is
    # static and small; `done` is traced, so all terms are there.
    coasts = sum(rho**n * (n <= updates - done) for n in range(1, int(updates)))
    share = _ops.safe_divide(done, done + coasts)  # 1 / (1 + S / k)
    # Elsewhere the bounds stay as given, bit for bit as in `ppo_clip`: the
    # formula below may differ from `low` by rounding even for a share of 1.
    narrowed = (done > 0) & (share < 1)
    low = jnp.where(narrowed, 1 - (1 - low) ** share, low)
    high = jnp.where(narrowed, (1 + high) ** share - 1, high)
    ratio, metrics = _ops.importance_ratio(terms)
    value, clip = _objective.hold_outside(ratio, low, high, batch.advantage)
    metrics |= {'clip_high': high}
    return value * batch.advantage, {**metrics, **clip}

  return set_objective(
    objective,
    requires=('updates_done',),
    zero_without_advantage=True,
    low=low,
    high=high,
  )


def rollback_grpo(
  low=0.2, high=0.2, slope=0.3, kl_coefficient=0.0
) -> LossTransform:
  r"""GRPO with `rollback_clip` in place of the clip.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t f(s_{it}, A_i) - \beta\, k_3

  We know of no published method that joins this objective with GRPO.

  Args:
    low, high, kl_coefficient: See `help(losses.methods)`.
    slope: See `rollback_clip`.

  References:
    Wang et al., `Truly Proximal Policy Optimization
    <https://arxiv.org/abs/1903.07940>`_, 2019 (the objective)
  """
  return _grpo(rollback_clip(low, high, slope), kl_coefficient)


@takes_from_run(updates='updates_per_rollout', b1='adam_b1', b2='adam_b2')
def coasting_grpo(
  low=0.2, high=0.2, updates=1, b1=0.9, b2=0.999, kl_coefficient=0.0
) -> LossTransform:
  r"""GRPO with `coasting_clip` in place of the clip; requires `updates_done`.

  .. math::
    J = \frac{1}{B} \sum_i \frac{1}{|o_i|} \sum_t f(s_{it}, A_i) - \beta\, k_3

  In a run, `updates`, `b1` and `b2` are those of the run, unless the config
  gives others.

  Args:
    low, high, kl_coefficient: See `help(losses.methods)`. The bounds are those
      of the predicted ratio.
    updates, b1, b2: See `coasting_clip`.
  """
  return _grpo(coasting_clip(low, high, updates, b1, b2), kl_coefficient)


def _grpo(trust_region, kl_coefficient) -> LossTransform:
  """GRPO with another objective."""
  return chain(
    normalize_by_group(),
    mean_over_sequences(),
    trust_region,
    *maybe_kl(kl_coefficient),
  )


def grpo_without_std(low=0.2, high=0.2, kl_coefficient=0.04) -> LossTransform:
  r"""GRPO whose advantage is :math:`A_i = r_i - \bar r`, and nothing else new.

  The arm "no std" of the second paper, beside `losses.methods.grpo`. Dr. GRPO
  leaves out the division too, but weights tokens differently.

  Args:
    low, high, kl_coefficient: See `help(losses.methods)`.
  """
  return chain(
    center_by_group(),
    mean_over_sequences(),
    ppo_clip(low, high),
    *maybe_kl(kl_coefficient),
  )
