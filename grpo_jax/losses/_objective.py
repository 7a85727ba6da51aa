"""Ratio, objective f(s, A) and its gates: the trust region, token by token."""

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from grpo_jax.losses import _ops
from grpo_jax.losses._base import Array
from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._stages import on_log_ratio
from grpo_jax.losses._stages import on_objective
from grpo_jax.losses._stages import set_objective

# What happens to the log-ratio before the objective reads it.


def pool_log_ratio(gradient='sequence') -> LossTransform:
  r"""Replaces each token's log-ratio by its completion's mean.

  .. math:: \log s_i = \frac{1}{|o_i|} \sum_t \log s_{it}

  The mean runs over `mask`: a token that is not trained still counts in the
  ratio of its completion.

  Args:
    gradient: `'sequence'` takes the gradient through the mean. `'token'` keeps
      the mean as value, with the slope of the token itself:
      :math:`sg[s_i]\, \pi_{it} / sg[\pi_{it}]`. The two differ where advantages
      differ inside a completion.

  Returns:
    A `LossTransform` that edits the log-ratio.

  Raises:
    ValueError: An unknown `gradient`.

  References:
    Zheng et al., `Group Sequence Policy Optimization
    <https://arxiv.org/abs/2507.18071>`_, 2025
  """
  if gradient not in ('sequence', 'token'):
    raise ValueError(
      f"pool_log_ratio got gradient={gradient!r}; give 'sequence' or 'token'."
    )

  def log_ratio(terms, batch):
    own = terms.log_ratio
    mean = _ops.per_token(_ops.sequence_mean(own, batch))
    if gradient == 'token':
      # The value is `mean`, and the slope that of `own`.
      return own + lax.stop_gradient(mean - own)
    return mean

  return on_log_ratio(log_ratio)


def sum_log_ratio() -> LossTransform:
  r"""Replaces each token's log-ratio by the sum over its completion.

  .. math:: \log S_i = \sum_t \log s_{it}

  Returns:
    A `LossTransform` that edits the log-ratio.
  """
  # Log-ratios are 0 outside the mask.
  return on_log_ratio(
    lambda terms, batch: _ops.per_token(jnp.sum(terms.log_ratio, axis=-1))
  )


def average_ratio() -> LossTransform:
  r"""Replaces each token's ratio by its completion's arithmetic mean.

  .. math:: s_i = \frac{1}{|o_i|} \sum_t s_{it}

  Returns:
    A `LossTransform` that edits the log-ratio.

  References:
    Tan et al., `GTPO and GRPO-S <https://arxiv.org/abs/2508.04349>`_, 2025
  """

  def log_ratio(terms, batch):
    # Not minus infinity, which makes the slope of an empty completion NaN.
    own = jnp.where(batch.mask, terms.log_ratio, -1e30)
    # In logarithms, as a single large ratio may overflow.
    total = jax.nn.logsumexp(own, axis=-1)
    length = jnp.maximum(_ops.length(batch), 1).astype(own.dtype)
    mean = total - jnp.log(length)
    return _ops.per_token(mean)

  return on_log_ratio(log_ratio)


def clip_log_ratio(low=0.4, high=0.4) -> LossTransform:
  r"""Clips each token's log-ratio on the side its advantage pushes it to.

  .. math:: \min(\log s, h) \text{ if } A > 0, \quad
            \max(\log s, -l) \text{ if } A < 0

  Args:
    low: `l`, distance of the lower bound from a log-ratio of 0, in nats.
    high: `h`, distance of the upper bound, likewise.

  Returns:
    A `LossTransform` that edits the log-ratio.

  Raises:
    ValueError: A negative distance.

  References:
    Zhao et al., `Geometric-Mean Policy Optimization
    <https://arxiv.org/abs/2507.20673>`_, 2025. The paper has one number for
    both sides.
  """
  _ops.check_distances('clip_log_ratio', low, high, 'log-ratio 0')

  def log_ratio(terms, batch, low, high):
    above, below = terms.log_ratio > high, terms.log_ratio < -low
    metrics = _ops.clip_metrics(above, below, batch.advantage)
    # Not jnp.clip, which would also hold tokens that the advantage pulls back.
    value = jnp.where(metrics['clipped_high'], high, terms.log_ratio)
    return jnp.where(metrics['clipped_low'], -low, value), metrics

  return on_log_ratio(log_ratio, low=low, high=high)


# The objective.


def ppo_clip(low=0.2, high=0.2, cap=None) -> LossTransform:
  r"""The clipped surrogate.

  .. math:: \min\bigl(s A, \operatorname{clip}(s, 1 - l, 1 + h) A\bigr)

  The gradient is exactly 0 where :math:`s > 1 + h` and :math:`A > 0`, or
  :math:`s < 1 - l` and :math:`A < 0`. The metrics `clipped_high` and
  `clipped_low` mark these tokens.

  A cap `c` replaces the ratio by :math:`\min(s, c)` where :math:`A < 0`, so the
  objective there is at least :math:`c A`. This is the dual clip, and at the
  same time the two-sided clip, which caps the ratio of the unclipped branch.
  The metric `clipped_cap` marks the tokens above it.

  Args:
    low: `l`, distance of the lower bound from 1.
    high: `h`, distance of the upper bound from 1.
    cap: `c`, the largest ratio that acts where :math:`A < 0`: an absolute ratio
      above `1 + high`. None is no cap.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance, a `low` of 1 or more, bounds in the place
      of distances, or a `cap` inside the clip range.

  References:
    Schulman et al., `Proximal Policy Optimization Algorithms
    <https://arxiv.org/abs/1707.06347>`_, 2017; Ye et al., `Mastering Complex
    Control in MOBA Games <https://arxiv.org/abs/1912.09729>`_, 2020
  """
  _check_clip('ppo_clip', low, high)
  if cap is not None:
    _ops.check_numbers('ppo_clip', least=0, most=math.inf, cap=cap)
  # A schedule or a controller has no value yet that could be checked.
  if isinstance(cap, int | float) and isinstance(high, int | float):
    if cap <= 1 + high:
      raise ValueError(
        f'ppo_clip got cap={cap} and high={high}; give a cap above 1 + high.'
      )

  def objective(terms, batch, low, high, **capped):
    ratio, ratio_metrics = _ops.importance_ratio(terms)
    advantage = batch.advantage
    value, clip = hold_outside(ratio, low, high, advantage)
    if capped:
      beyond = (ratio > capped['cap']) & (advantage < 0)
      value = jnp.where(beyond, capped['cap'], value)
      clip['clipped_cap'] = beyond
      # A capped token is held, and no longer pulled back.
      clip['outside_high'] &= ~beyond
    return value * advantage, {**ratio_metrics, **clip}

  # Without a cap there is no metric `clipped_cap` either.
  capped: dict[str, Any] = {} if cap is None else {'cap': cap}
  return set_objective(
    objective, zero_without_advantage=True, low=low, high=high, **capped
  )


def clip_by_age(low=0.2, high=0.2, growth=0.0) -> LossTransform:
  r"""The clipped surrogate, in a range that depends on a token's age.

  .. math:: \min\bigl(s A, \operatorname{clip}(s, 1 - l\, c, 1 + h\, c)
              A\bigr), \quad c = \max(0, 1 + g\, a)

  The age :math:`a` of a token is the number of rollouts that the policy has
  learned from since the version that drew it. With a negative growth older
  tokens have a narrower range, at last the ratio 1 alone. Tokens of age 0 have
  the range of `ppo_clip`, bit for bit, and so have all if `growth` is 0.

  Args:
    low: `l`, distance of the lower bound from 1, at age 0.
    high: `h`, distance of the upper bound from 1, at age 0.
    growth: `g`, by how much the range grows with each version, in units of that
      at age 0.

  Returns:
    A `LossTransform` that sets the objective and requires `age`, in
    `Batch.extras`: f32[P,G,T]. Its metrics are those of `ppo_clip`.

  Raises:
    ValueError: A negative distance, a `low` of 1 or more, or bounds in the
      place of distances.
  """
  _check_clip('clip_by_age', low, high)
  _ops.check_numbers('clip_by_age', growth=growth)

  def objective(terms, batch, low, high, growth):
    ratio, ratio_metrics = _ops.importance_ratio(terms)
    more = growth * jnp.asarray(batch.extras['age'], ratio.dtype)
    scale = jnp.maximum(1 + more, 0)
    # In float32 1 + high * scale is for a scale of 1 not always 1 + high, which
    # Python adds in float64.
    most = jnp.where(more == 0, 1 + high, 1 + high * scale)
    least = jnp.where(more == 0, 1 - low, 1 - low * scale)
    value, clip = hold_between(ratio, least, most, batch.advantage)
    return value * batch.advantage, {**ratio_metrics, **clip}

  return set_objective(
    objective,
    ('age',),
    zero_without_advantage=True,
    low=low,
    high=high,
    growth=growth,
  )


def _check_clip(name: str, low, high) -> None:
  """Raises a ValueError if these are no distances of a clip range from 1."""
  _ops.check_range(name, low, high)
  if isinstance(low, int | float) and low >= 1:
    raise ValueError(
      f'{name} got low={low}, so that the lower bound of the ratio is '
      f'{1 - low:g}, below which no ratio lies; give a distance below 1.'
    )


def hold_outside(
  ratio: Array, low, high, advantage: Array
) -> tuple[Array, dict[str, Array]]:
  """The ratio, held at a bound where the advantage would push it further.

  Args:
    ratio: f[P,G,T].
    low: Distance of the lower bound from 1, a number or f[P,G,T].
    high: Distance of the upper bound from 1, likewise.
    advantage: f[P,G,T].

  Returns:
    See `hold_between`.
  """
  return hold_between(ratio, 1 - low, 1 + high, advantage)


def hold_between(
  ratio: Array, least, most, advantage: Array
) -> tuple[Array, dict[str, Array]]:
  """The ratio, held at a bound where the advantage would push it further.

  Args:
    ratio: f[P,G,T].
    least: The lower bound, a number or f[P,G,T].
    most: The upper bound, likewise.
    advantage: f[P,G,T].

  Returns:
    The ratio, constant on the side where the advantage points out of the range,
    and the metrics of `_ops.clip_metrics`.
  """
  clip = _ops.clip_metrics(ratio > most, ratio < least, advantage)
  # Not jnp.clip, which would also hold tokens that the advantage pulls back.
  held = jnp.where(clip['clipped_high'], most, ratio)
  return jnp.where(clip['clipped_low'], least, held), clip


def importance_weighted() -> LossTransform:
  """The ratio times the advantage, without a trust region: :math:`s A`.

  Returns:
    A `LossTransform` that sets the objective.
  """

  def objective(terms, batch):
    ratio, metrics = _ops.importance_ratio(terms)
    return ratio * batch.advantage, metrics

  return set_objective(objective, zero_without_advantage=True)


def score_function() -> LossTransform:
  r"""The advantage times the log-probability: :math:`A \log \pi`.

  Its gradient is that of REINFORCE. There is no ratio in it, so the policy
  before the update is not needed, and a second update on the same rollout is
  biased.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Williams, `Simple statistical gradient-following algorithms for
    connectionist reinforcement learning
    <https://doi.org/10.1007/BF00992696>`_, 1992
  """
  return set_objective(
    lambda terms, batch: batch.advantage * terms.logp,
    zero_without_advantage=True,
  )


def capped_score_function(low=1.0, high=4.0) -> LossTransform:
  r"""The score function, weighted by the clipped ratio.

  .. math:: sg\bigl[\operatorname{clip}(s, 1 - l, 1 + h)\bigr]\, A \log \pi

  No token loses its gradient. The metrics `capped_high` and `capped_low` mark
  the tokens whose weight is clipped.

  Args:
    low: `l`, distance of the lower bound from 1. 1 is no bound, as ratios are
      positive.
    high: `h`, distance of the upper bound from 1.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: A negative distance, or bounds in the place of distances.

  References:
    MiniMax, `MiniMax-M1 <https://arxiv.org/abs/2506.13585>`_, 2025 (CISPO)
  """
  _ops.check_range('capped_score_function', low, high)

  def objective(terms, batch, low, high):
    ratio, metrics = _ops.importance_ratio(terms)
    weight = lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    metrics |= {'capped_high': ratio > 1 + high, 'capped_low': ratio < 1 - low}
    return weight * batch.advantage * terms.logp, metrics

  return set_objective(
    objective, zero_without_advantage=True, low=low, high=high
  )


def sigmoid_gate(positive=1.0, negative=1.05) -> LossTransform:
  r"""A soft gate around ratio 1, with one width for each sign of the advantage.

  .. math:: \frac{4}{\tau} \sigma\bigl(\tau (s - 1)\bigr) A

  Its slope in `s` is `A` at ratio 1 and falls off smoothly on both sides.

  Args:
    positive: :math:`\tau` where :math:`A > 0`.
    negative: :math:`\tau` elsewhere.

  Returns:
    A `LossTransform` that sets the objective.

  References:
    Gao et al., `Soft Adaptive Policy Optimization
    <https://arxiv.org/abs/2511.20347>`_, 2025
  """
  _ops.check_numbers(
    'sigmoid_gate', above=True, least=0, positive=positive, negative=negative
  )

  def objective(terms, batch, positive, negative):
    ratio, metrics = _ops.importance_ratio(terms)
    tau = jnp.where(batch.advantage > 0, positive, negative)
    # 4 / tau makes the slope 1 at ratio 1, where that of the sigmoid is 1 / 4.
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio - 1))
    return gate * batch.advantage, metrics

  return set_objective(
    objective, zero_without_advantage=True, positive=positive, negative=negative
  )


def gamma_weighted_score(
  positive=(2.0, 3.0), negative=(3.0, 2.0)
) -> LossTransform:
  r"""The score function, weighted by the ratio in the shape of a gamma density.

  .. math:: sg\bigl[s^k e^{\lambda (1 - s)}\bigr]\, A \log \pi

  Args:
    positive: :math:`(k, \lambda)` where :math:`A \ge 0`: two numbers, each of
      which may be a schedule or a `Controller`.
    negative: :math:`(k, \lambda)` where :math:`A < 0`, likewise.

  Returns:
    A `LossTransform` that sets the objective.

  Raises:
    ValueError: An argument is no pair.

  References:
    Shen et al., `VESPO <https://arxiv.org/abs/2602.10693>`_, 2026
  """

  for name, pair in (('positive', positive), ('negative', negative)):
    if not isinstance(pair, tuple | list) or len(pair) != 2:
      raise ValueError(
        f'gamma_weighted_score got {name}={pair!r}; give a pair (k, lambda) of '
        'numbers or schedules.'
      )
    for value in pair:
      _ops.check_numbers('gamma_weighted_score', least=0, **{name: value})
  names = 'power', 'decay', 'power_negative', 'decay_negative'

  def objective(terms, batch, power, decay, power_negative, decay_negative):
    ratio, metrics = _ops.importance_ratio(terms)
    above = batch.advantage >= 0
    power = jnp.where(above, power, power_negative)
    decay = jnp.where(above, decay, decay_negative)
    # `ratio` saturates, so its logarithm has to as well.
    log_ratio = jnp.minimum(terms.log_ratio, _ops.MAX_LOG_RATIO)
    # One exp of a sum: each factor alone may overflow.
    log_weight = power * log_ratio + decay * (1 - ratio)
    weight = lax.stop_gradient(jnp.exp(log_weight))
    return weight * batch.advantage * terms.logp, metrics

  return set_objective(
    objective,
    zero_without_advantage=True,
    **dict(zip(names, (*positive, *negative))),
  )


# Gates on the objective: tokens and completions that get no gradient.


def _gated(terms, dropped, metric):
  """(objective without the dropped tokens, metric that marks these)."""
  return jnp.where(dropped, 0, terms.objective), {metric: dropped}


def gate_probability_change(low=0.2, high=0.2) -> LossTransform:
  r"""Drops tokens whose probability has moved too far the way it is pushed.

  .. math:: 0 \text{ where } A > 0,\ p - q > h \text{ or } A < 0,\ q - p > l

  `p` is the probability of the token now and `q` that before the update, so
  :math:`|p - q|` is the token's part of the total variation.

  Args:
    low: `l`, the largest fall of the probability.
    high: `h`, the largest rise of the probability.

  Returns:
    A `LossTransform` that edits the objective. Its metric `gated` marks the
    dropped tokens.

  Raises:
    ValueError: A bound is not from 0 to 1.

  References:
    `DPPO <https://arxiv.org/abs/2602.04879>`_, 2026
  """
  _ops.check_distances(
    'gate_probability_change', low, high, 'the old probability', most=1
  )

  def objective(terms, batch, low, high):
    # Only a comparison reads `now`, so its gradient would be wasted work.
    now = jnp.exp(lax.stop_gradient(terms.logp))
    rise = now - jnp.exp(_ops.old_logp(terms, batch))
    dropped = (batch.advantage > 0) & (rise > high)
    dropped |= (batch.advantage < 0) & (-rise > low)
    return _gated(terms, dropped, 'gated')

  return on_objective(
    objective, zero_without_advantage=True, low=low, high=high
  )


def gate_binary_kl(low=0.05, high=0.05) -> LossTransform:
  r"""Drops tokens whose probability has moved too far, by a binary KL.

  The KL is that of two outcomes: this token, or any other.

  .. math:: 0 \text{ where } q \log \frac{q}{p} + (1 - q)
              \log \frac{1 - q}{1 - p} > h
              \text{ and } A > 0,\ p > q

  where `q` is the probability before the update and `p` that of now; with `l`
  in place of `h` where :math:`A < 0` and :math:`p < q`.

  Args:
    low: `l`, bound of the divergence of a token whose probability has fallen,
      in nats.
    high: `h`, bound for one whose probability has risen, in nats.

  Returns:
    A `LossTransform` that edits the objective. Its metric `gated` marks the
    dropped tokens.

  Raises:
    ValueError: A bound is negative.

  References:
    `DPPO <https://arxiv.org/abs/2602.04879>`_, 2026. The paper has one number
    for both sides.
  """
  _ops.check_distances('gate_binary_kl', low, high, 'no divergence')

  def objective(terms, batch, low, high):
    logp, old = lax.stop_gradient(terms.logp), _ops.old_logp(terms, batch)
    chance = jnp.exp(old)
    # Where the probability rounds to 1, that of another token rounds to 0: its
    # log must stay finite.
    least = jnp.finfo(logp.dtype).tiny
    other = jnp.log(jnp.maximum(-jnp.expm1(logp), least))
    other_old = jnp.log(jnp.maximum(-jnp.expm1(old), least))
    # `-expm1(old)` is 1 - q without the loss of digits near q = 1.
    kl = chance * (old - logp) - jnp.expm1(old) * (other_old - other)
    pushed = batch.advantage * (logp - old) > 0
    bound = jnp.where(batch.advantage > 0, high, low)
    return _gated(terms, pushed & (kl > bound), 'gated')

  return on_objective(
    objective, zero_without_advantage=True, low=low, high=high
  )


def mask_off_policy_negatives(threshold=0.5, policy='old') -> LossTransform:
  r"""Drops wrong completions that the policy has already moved away from.

  .. math:: 0 \text{ where } A_i < 0 \text{ and } \frac{1}{|o_i|} \sum_t
              \log \frac{\pi_{old}(o_{it})}{\pi(o_{it})} > \delta

  Args:
    threshold: :math:`\delta`, nats per token.
    policy: `'old'`, or `'sampler'` to measure from what the sampler reported.

  Returns:
    A `LossTransform` that edits the objective. Its metric `off_policy` marks
    the dropped tokens.

  Raises:
    ValueError: An unknown `policy`.

  References:
    DeepSeek-AI, `DeepSeek-V3.2 <https://arxiv.org/abs/2512.02556>`_, 2025
  """
  _ops.check_numbers(
    'mask_off_policy_negatives', least=0, most=math.inf, threshold=threshold
  )
  if policy not in ('old', 'sampler'):
    raise ValueError(
      f"mask_off_policy_negatives got policy={policy!r}; give 'old' or "
      "'sampler'."
    )

  def objective(terms, batch, threshold):
    sampler = policy == 'sampler'
    start = batch.logp_sampler if sampler else _ops.old_logp(terms, batch)
    gone = start - lax.stop_gradient(terms.logp)
    far = _ops.sequence_mean(gone, batch) > threshold
    dropped = (batch.advantage < 0) & _ops.per_token(far)
    return _gated(terms, dropped, 'off_policy')

  requires = ('logp_sampler',) if policy == 'sampler' else ()
  return on_objective(
    objective, requires, zero_without_advantage=True, threshold=threshold
  )


def detach_covariance(
  share=2e-4, low_covariance=1.0, high_covariance=5.0
) -> LossTransform:
  r"""Removes the gradient of some tokens of high covariance, drawn at random.

  .. math::
    1 < (A_{it} - \bar A)(\log \pi_{it} - \overline{\log \pi}) < 5

  Of the tokens inside these bounds (1 and 5 are the defaults), the `k` of least
  `noise` are chosen, :math:`k = \max(1, \lfloor share \cdot N \rfloor)`. `N`
  counts the kept tokens of the optimizer batch. `noise` is an entry of
  `Batch.extras`, uniform in [0, 1), which the learner draws from its seed.
  Chosen tokens keep their value but have no gradient.

  Args:
    share: Share of the optimizer batch's kept tokens, in [0, 1].
    low_covariance: Lower bound, in nats times the unit of the advantage.
    high_covariance: Upper bound, likewise.

  Returns:
    A `LossTransform` of `scope='batch'` that edits the objective. Its metric
    `detached` marks the chosen tokens.

  References:
    Cui et al., `The Entropy Mechanism of Reinforcement Learning
    <https://arxiv.org/abs/2505.22617>`_, 2025. The released code also leaves
    out tokens that are clipped anyway, and sets the value of chosen tokens to
    0.
  """
  _ops.check_numbers('detach_covariance', least=0, most=1, share=share)
  _ops.check_numbers(
    'detach_covariance',
    least=-math.inf,
    most=math.inf,
    low_covariance=low_covariance,
    high_covariance=high_covariance,
  )
  if _ops.has_value(low_covariance) and _ops.has_value(high_covariance):
    if low_covariance >= high_covariance:
      raise ValueError(
        f'detach_covariance got low_covariance={low_covariance} and '
        f'high_covariance={high_covariance}, between which nothing lies; give '
        'a lower bound below the upper one.'
      )

  def objective(terms, batch, share, low_covariance, high_covariance):
    covariance = _ops.covariance(terms, batch)
    inside = (covariance > low_covariance) & (covariance < high_covariance)
    inside &= batch.keep
    # Ranks are descending, so the least noise is the largest of minus noise.
    noise = jnp.where(inside, -batch.extras['noise'], -jnp.inf)
    rank = _ops.rank_descending(noise)
    chosen = inside & (rank < _ops.share_of(share, batch.keep))
    value = terms.objective
    detached = jnp.where(chosen, lax.stop_gradient(value), value)
    return detached, {'detached': chosen}

  return on_objective(
    objective,
    requires=('noise',),
    scope='batch',
    share=share,
    low_covariance=low_covariance,
    high_covariance=high_covariance,
  )
