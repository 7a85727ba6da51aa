"""Metrics of an update: of the policy, the loss and the optimizer.

They are measured inside the compiled programs, for any method. Metrics of a
rollout that NumPy can compute are in `rollouts/rollout_metrics.py`. All of them
are sums over completions and tokens (see `metrics.py`), so that the updates of
a rollout add up.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import optax

from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.learner import gradient
from grpo_jax.learner import metrics
from grpo_jax.learner import trust_region
from grpo_jax.learner.types import Gradient
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.types import Update

Array = jax.Array
Measured = dict[str, metrics.Metric]
# Of `metrics.together`: for each name a kind, values and a mask.
Wanted = dict[str, tuple[type[metrics.Metric], ArrayLike, ArrayLike]]
Mean, Max, Min = metrics.Mean, metrics.Max, metrics.Min

TURNS = 3  # how many turns of an episode have metrics of their own
_MAX_LOG_RATIO = 20.0  # where the losses saturate their ratios too


def metrics_of_credit(
  given: losses.Batch,
  batch: losses.Batch,
  uniform: ArrayLike,
  oldest: int = 0,
) -> Measured:
  """Metrics of a rollout, once per rollout.

  Args:
    given: The checked batch before credit, with the rewards as they came.
    batch: The credited batch, [P,G,T].
    uniform: bool[P], groups whose rewards are all equal.
    oldest: The largest age; 0: there is none but 0.

  Returns:
    Over judged completions `reward`, `length_tokens` and `truncated`, a share;
    over groups `uniform_groups`, the share whose rewards are all equal; over
    tokens `kept_tokens`, the share that is trained, and the sampler's
    `entropy`, nats, if it was given; over trained tokens `advantage_abs`, a
    mean, `advantage_mean`, `advantage_std`, `advantage_min` and
    `advantage_max`, and what the method's own credit measured. If ages differ,
    `age_N_share` for each age N up to `oldest`: the share of the trained tokens
    that a policy of this age has drawn.
  """
  assert batch.advantage is not None  # losses.credit has set it
  advantage, kept, valid = batch.advantage, batch.keep, given.valid
  wanted: Wanted = {
    'reward': (Mean, given.reward, valid),
    'uniform_groups': (Mean, uniform, jnp.any(valid, axis=1)),
    'length_tokens': (Mean, jnp.sum(given.mask, axis=-1), valid),
    'truncated': (Mean, given.truncated, valid),
    'kept_tokens': (Mean, kept, batch.mask),
    'advantage_abs': (Mean, jnp.abs(advantage), kept),
    'advantage_max': (Max, advantage, kept),
    'advantage_min': (Min, advantage, kept),
  }
  for name, value in batch.extras.items():
    if name.startswith(losses.CREDIT_METRIC):
      wanted[name.removeprefix(losses.CREDIT_METRIC)] = Mean, value, kept
  if oldest:
    for age in range(oldest + 1):
      drawn = batch.extras['age'] == age
      wanted[f'age_{age}_share'] = Mean, drawn, kept
  entropy = given.extras.get('entropy_sampler')
  if entropy is not None:
    wanted['entropy'] = Mean, entropy, given.mask
  moments = metrics.masked_moments(advantage, kept)
  return {**metrics.together(wanted), 'advantage': moments}


def metrics_of_update(
  learner: Learner,
  state: TrainState,
  found: Gradient,
  update: Update,
  batch: losses.Batch,
  num_micro: Array,
  first: Array,
) -> Measured:
  """Metrics of one update, accepted or not.

  Args:
    learner: What stays the same from update to update.
    state: After the update.
    found: Its gradient.
    update: What the optimizer did.
    batch: The prepared optimizer batch, [P,G,T].
    num_micro: i32[], its micro-batches.
    first: bool[], whether this is the rollout's first update.

  Returns:
    What `metrics_of_terms` returns of completions that are `informative`;
    what `metrics_of_ages` returns of these, if ages differ; what
    `metrics_of_prefixes` and `nonfinite` return; `left_out`, the share of
    micro-batches that were not computed because they hold no such completion;
    `needed_tokens`, the share of tokens in such completions; `loss`,
    `grad_norm`, `update_norm` (0 if the update is not accepted), `param_norm`;
    the counters `nonfinite_steps` and `idle_steps` of the state, which only
    grow; what `optim.record_adam_moments` has recorded, if the optimizer
    records; and what `metrics_of_routers` returns, if the model has experts.
  """
  needed = batch.mask
  if found.needed is not None:
    needed = batch.mask & found.needed[..., None]
  scored = batch._replace(mask=needed, keep=batch.keep & needed)
  measured = nonfinite(update.sound) | metrics_of_terms(found.terms, scored)
  if learner.measuring.ages:
    measured |= metrics_of_ages(found.terms, scored, learner.measuring.ages)
  if found.routed is not None:
    measured |= metrics_of_routers(found.routed, scored)
  for name in measured:
    if name.startswith(('sampler_gap', 'router_disagreement')):
      # From the second update on the policy has moved, and the gap is no longer
      # the sampler's own.
      measured[name] = metrics.only_if(first, measured[name])
  intended = None
  if learner.measuring.expects_prefixes:
    intended = -gradient.slope_at_ratio_one(
      learner, found, batch, state.loss_state
    )
  measured |= metrics_of_prefixes(batch, -found.slope, intended)
  if learner.measuring.records:
    for name, value in optim.moment_metrics(update.opt_state).items():
      measured[name] = metrics.masked_mean(value, update.accepted)
  one = jnp.ones((), jnp.float32)
  total = num_micro.astype(jnp.float32)
  return measured | {
    'left_out': metrics.Mean(total - found.computed, total),
    'needed_tokens': metrics.masked_mean(needed, batch.mask),
    'loss': metrics.masked_mean(found.loss, update.sound['loss']),
    'grad_norm': metrics.masked_mean(
      update.grad_norm, update.sound['gradient']
    ),
    'update_norm': metrics.Mean(update.norm, one),
    'param_norm': metrics.Mean(optax.tree.norm(state.params), one),
    # These only grow, so the maximum over a rollout's updates is the last.
    'nonfinite_steps': metrics.Max(state.nonfinite.astype(jnp.float32)),
    'idle_steps': metrics.Max(state.idle.astype(jnp.float32)),
  }


def metrics_of_schedule(learning_rate: ArrayLike) -> Measured:
  """The learning rate of an update; of a rollout its mean and both ends.

  Args:
    learning_rate: f32[], also where the update is not taken.

  Returns:
    `learning_rate`, `learning_rate_max` and `learning_rate_min`.
  """
  rate = jnp.asarray(learning_rate, jnp.float32)
  return {
    'learning_rate': metrics.Mean(rate, jnp.ones_like(rate)),
    'learning_rate_max': metrics.Max(rate),
    'learning_rate_min': metrics.Min(rate),
  }


def nonfinite(sound: dict[str, Array]) -> Measured:
  """Which part of an update is the first that is not finite.

  The parts after it are not finite for no other reason, and do not count.

  Args:
    sound: See `types.Update`, in the order in which the parts are computed.

  Returns:
    `nonfinite_loss`, `nonfinite_gradient` and `nonfinite_update`, shares of
    updates.
  """
  measured, before = {}, jnp.array(True)
  for name, fine in sound.items():
    share = (before & ~fine).astype(jnp.float32)
    measured[f'nonfinite_{name}'] = metrics.Mean(share, jnp.ones_like(share))
    before &= fine
  return measured


def metrics_of_terms(
  terms: losses.SurrogateTerms, batch: losses.Batch
) -> Measured:
  r"""Metrics of some completions.

  With :math:`d` the log-probability under one policy minus that under another,
  `k1` is the mean of :math:`-d` and `k3` that of :math:`e^d - 1 - d`: with
  tokens drawn from the second policy both estimate its KL divergence to the
  first, and k3 is never negative. Log-ratios saturate at 20.

  Args:
    terms: What `losses.surrogate_loss` returned.
    batch: What it was given, any arrangement [P,G,T] of completions.

  Returns:
    Over trained tokens:

    - the terms' own metrics, clipping by side and sign among them;
    - `kl_old_k1` and `kl_old_k3`, of KL(old || policy), nats;
    - `kl_ref_k1` and `kl_ref_k3`, of KL(policy || reference), nats, as far as
      the tokens are the policy's own, if there is a reference;
    - `kl_teacher_k1` and `kl_teacher_k3`, likewise of a teacher;
    - `log_ratio`, a histogram, `ratio_max` and `ratio_min`, of the ratio that
      the objective takes: pooled over the completion, say;
    - `ess_token` and `ess_sequence`, effective sample size over sample size, of
      the importance weights that turn what drew the tokens (the sampler with
      its filters, or the old policy where no sampler is known) into the policy:
      of each token, and of each whole completion that is trained;
    - `sampler_gap`, the mean of |log-probability of the learner minus that of
      the sampler|, without filters, nats; `sampler_gap_max`, its maximum;
      `sampler_gap_exp`, the mean of its exponential, if a sampler is known.

  References:
    Schulman, `Approximating KL divergence
    <http://joschu.net/blog/kl-approx.html>`_, 2020
  """
  kept, logp = batch.keep, terms.logp
  old = logp if batch.logp_old is None else batch.logp_old
  sampler = batch.logp_sampler
  gained = logp - (old if sampler is None else sampler)
  # A completion that is trained in part has a weight all the same: the ratio of
  # all its tokens.
  trained = batch.valid & jnp.any(kept, axis=-1)
  ratio = jnp.exp(_saturated(terms.log_ratio))
  wanted: Wanted = {
    name: (Mean, value, kept) for name, value in terms.metrics.items()
  }
  wanted |= {
    **_kl('kl_old', logp - old, kept),
    'ratio_max': (Max, ratio, kept),
    'ratio_min': (Min, ratio, kept),
  }
  if batch.logp_ref is not None:
    wanted |= _kl('kl_ref', batch.logp_ref - logp, kept)
  if (teacher := batch.extras.get('logp_teacher')) is not None:
    wanted |= _kl('kl_teacher', teacher - logp, kept)
  if sampler is not None:
    # `logp_sampler` is of the policy after the filters, but the learner scores
    # the whole policy. Tokens that an earlier policy drew differ for another
    # reason.
    gap = jnp.abs(gained - batch.extras.get('log_kept', 0))
    fresh = kept & batch.extras.get('fresh', True)
    wanted |= {
      'sampler_gap': (Mean, gap, fresh),
      'sampler_gap_max': (Max, gap, fresh),
      'sampler_gap_exp': (Mean, jnp.exp(_saturated(gap)), fresh),
    }
  return metrics.together(wanted) | {
    'log_ratio': metrics.masked_histogram(terms.log_ratio, kept),
    'ess_token': metrics.effective_share(gained, kept),
    'ess_sequence': metrics.effective_share(
      jnp.sum(jnp.where(batch.mask, gained, 0), axis=-1), trained
    ),
  }


def metrics_of_ages(
  terms: losses.SurrogateTerms, batch: losses.Batch, oldest: int
) -> Measured:
  """Metrics of some completions by the age of the policy that drew each token.

  Args:
    terms: See `metrics_of_terms`.
    batch: Likewise, with the field `age`. Tokens that are older than `oldest`
      (dynamic sampling may keep groups for long) are in none of the metrics.
    oldest: The largest age.

  Returns:
    For each age N from 0 to `oldest`, over the trained tokens of this age:
    `age_N_log_ratio`, the mean of |log-probability of the policy minus that of
    the sampler|, nats; `age_N_kl`, the estimate k3 of KL(sampler || policy);
    `age_N_clipped`, the share that a trust region has switched off; and
    `age_N_ess`, effective sample size over sample size, see `metrics_of_terms`.
  """
  kept, logp = batch.keep, terms.logp
  old = logp if batch.logp_old is None else batch.logp_old
  gained = logp - (old if batch.logp_sampler is None else batch.logp_sampler)
  saturated = _saturated(gained)
  distance, k3 = jnp.abs(gained), jnp.expm1(saturated) - saturated
  clipped = trust_region.clipped(terms)
  wanted: Wanted = {}
  shares: Measured = {}
  for age in range(oldest + 1):
    own = kept & (batch.extras['age'] == age)
    wanted |= {
      f'age_{age}_log_ratio': (Mean, distance, own),
      f'age_{age}_kl': (Mean, k3, own),
      f'age_{age}_clipped': (Mean, clipped, own),
    }
    shares[f'age_{age}_ess'] = metrics.effective_share(gained, own)
  return metrics.together(wanted) | shares


def metrics_of_routers(routed: models.Routed, batch: losses.Batch) -> Measured:
  """Metrics of the routers of a model with experts.

  Args:
    routed: Of the optimizer batch, [P,G,T].
    batch: The optimizer batch.

  Returns:
    Over the tokens of completions `expert_balance`, see `routing.balance`, and
    `expert_load_max`, the largest load of an expert in any layer: both are 1 if
    all experts are used alike. And `router_disagreement`, if the sampler has
    said which experts it chose: the share of layers, averaged over tokens, in
    which the learner chose others.
  """
  some = jnp.any(batch.mask)
  measured: Measured = {
    'expert_balance': metrics.masked_mean(
      models.balance(routed.statistics), some
    ),
    'expert_load_max': metrics.masked_max(
      models.load_max(routed.statistics), some
    ),
  }
  if routed.disagreement is not None:
    # Tokens that an earlier policy drew differ for another reason.
    fresh = batch.keep & batch.extras.get('fresh', True)
    measured['router_disagreement'] = metrics.masked_mean(
      routed.disagreement, fresh
    )
  return measured


def metrics_of_prefixes(
  batch: losses.Batch, coefficient: Array, intended: Array | None = None
) -> Measured:
  """The gradient's weight on the tokens that a group shares.

  Args:
    batch: The optimizer batch, [P,G,T].
    coefficient: f32[P,G,T], -d loss / d logp.
    intended: The same with the policy's ratios to the old policy and to the
      sampler at 1: what the method does to shared tokens before anything has
      moved. (A penalty keeps its true log-ratio to the reference.) None: it is
      not measured, which saves a second evaluation of the loss.

  Returns:
    Metrics of the nodes of the trie of each group's sampled ids. In a name, `*`
    is `whole` for nodes that all completions of a group share, and `part` for
    nodes that two or more share, but not all.

    - `prefix_*_tokens`: nodes per group;
    - `prefix_*_weight`: per node, W_agg, the sum of the coefficients of all
      completions that share the node;
    - `prefix_*_uncancelled`: per node, |W_agg| over the sum of the absolute
      coefficients: 0 where they cancel, 1 where all have one sign;
    - the latter two also with `_expected` behind the name, from `intended`.

    Of episodes also metrics of the contexts in which turns of two or more
    episodes of a group begin, for the first `TURNS` turns `n`. The coefficient
    of a turn is that of its first token.

    - `prefix_turn{n}_contexts`: such contexts per group;
    - `prefix_turn{n}_weight` and `prefix_turn{n}_uncancelled`: per context, as
      above, also with `_expected`.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based
    Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026,
    proposition 1
  """
  coefficients = {'': coefficient}
  if intended is not None:
    coefficients['_expected'] = intended
  tokens, previous = batch.tokens, batch.extras.get('previous')
  assert tokens is not None  # a rollout has them

  def summary(of_one):
    found = losses.prefix_summary(
      losses.shared_prefix_weight(tokens, batch.mask, of_one)
    )
    if previous is None:  # completions that are no episodes
      return found
    turn = batch.extras['turn']
    shared = losses.shared_context_weight(
      tokens, previous, batch.mask, turn, of_one, TURNS
    )
    return found | losses.context_summary(shared)

  # Counts of nodes do not depend on coefficients, so they are reported once.
  # One vmap, so that the tries are searched once for all coefficients.
  found = jax.vmap(summary)(jnp.stack(list(coefficients.values())))
  return {
    f'prefix_{name}{suffix}': metrics.Mean(total[k], count[k])
    for k, suffix in enumerate(coefficients)
    for name, (total, count) in found.items()
    if not (suffix and name.endswith(('_tokens', '_contexts')))
  }


def kl_old(logp: ArrayLike, batch: losses.Batch) -> Measured:
  """`kl_old_k1` and `kl_old_k3`; see `metrics_of_terms`."""
  old = logp if batch.logp_old is None else batch.logp_old
  wanted = _kl('kl_old', jnp.subtract(logp, old), batch.keep)
  return metrics.together(wanted)


def _kl(name: str, log_ratio: ArrayLike, kept: ArrayLike) -> Wanted:
  """Two estimates; see `metrics_of_terms`."""
  gap = _saturated(log_ratio)
  # expm1, because exp(gap) - 1 loses most of its digits for a small gap.
  k3 = jnp.expm1(gap) - gap
  return {
    f'{name}_k1': (Mean, -gap, kept),
    f'{name}_k3': (Mean, k3, kept),
  }


def _saturated(log_ratio: ArrayLike) -> Array:
  return jnp.minimum(log_ratio, _MAX_LOG_RATIO)
