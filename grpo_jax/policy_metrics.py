"""What a rollout and the terms of its loss say of the policy, any method.

Inside the compiled steps; what NumPy can say of a rollout is in `measure.py`.
Sums over completions and tokens, so that micro-batches add up.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax import metrics

Measured = dict[str, metrics.Metric]

_MAX_LOG_RATIO = 20.0  # where the losses saturate their ratios too


def of_credit(given: losses.Batch, batch: losses.Batch) -> Measured:
  """Metrics of a rollout, once per rollout.

  Args:
    given: The checked batch before credit, with the rewards as they came.
    batch: The credited batch, [P,G,T].

  Returns:
    Over judged completions `reward`, `length_tokens` and `truncated`, a share;
    over groups `uniform_groups`, the share whose rewards are all equal; over
    tokens `kept_tokens`, the share that is trained, and the sampler's
    `entropy`, nats, if it was given; over trained tokens `advantage_abs`, a
    mean, `advantage_mean`, `advantage_std`, `advantage_min` and
    `advantage_max`, and what the method's own credit measured.
  """
  assert batch.advantage is not None  # losses.credit has set it
  advantage, kept, valid = batch.advantage, batch.keep, given.valid
  measured: Measured = {
    'reward': metrics.masked_mean(given.reward, valid),
    'uniform_groups': metrics.masked_mean(
      losses.uniform_groups(given), jnp.any(valid, axis=1)
    ),
    'length_tokens': metrics.masked_mean(jnp.sum(given.mask, axis=-1), valid),
    'truncated': metrics.masked_mean(given.truncated, valid),
    'kept_tokens': metrics.masked_mean(kept, batch.mask),
    'advantage_abs': metrics.masked_mean(jnp.abs(advantage), kept),
    'advantage': metrics.masked_moments(advantage, kept),
    'advantage_max': metrics.masked_max(advantage, kept),
    'advantage_min': metrics.masked_min(advantage, kept),
  }
  for name, value in batch.extras.items():
    if name.startswith(losses.CREDIT_METRIC):
      short = name.removeprefix(losses.CREDIT_METRIC)
      measured[short] = metrics.masked_mean(value, kept)
  entropy = given.extras.get('entropy_sampler')
  if entropy is not None:
    measured['entropy'] = metrics.masked_mean(entropy, given.mask)
  return measured


def of_terms(terms: losses.SurrogateTerms, batch: losses.Batch) -> Measured:
  r"""Metrics of some completions, once per micro-batch.

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
  trained = batch.valid & jnp.any(kept, axis=-1)
  ratio = jnp.exp(_saturated(terms.log_ratio))
  measured: Measured = {
    name: metrics.masked_mean(value, kept)
    for name, value in terms.metrics.items()
  }
  measured |= {
    **kl_old(logp, batch),
    'log_ratio': metrics.masked_histogram(terms.log_ratio, kept),
    'ratio_max': metrics.masked_max(ratio, kept),
    'ratio_min': metrics.masked_min(ratio, kept),
    'ess_token': metrics.effective_share(gained, kept),
    'ess_sequence': metrics.effective_share(
      jnp.sum(jnp.where(batch.mask, gained, 0), axis=-1), trained
    ),
  }
  if batch.logp_ref is not None:
    measured |= _kl('kl_ref', batch.logp_ref - logp, kept)
  if sampler is not None:
    # Of the whole policy, as the learner's: without what the filters left.
    # Tokens of an earlier policy differ for another reason.
    gap = jnp.abs(gained - batch.extras.get('log_kept', 0))
    fresh = kept & batch.extras.get('fresh', True)
    measured |= {
      'sampler_gap': metrics.masked_mean(gap, fresh),
      'sampler_gap_max': metrics.masked_max(gap, fresh),
      'sampler_gap_exp': metrics.masked_mean(jnp.exp(_saturated(gap)), fresh),
    }
  return measured


def of_prefixes(
  batch: losses.Batch, coefficient: jax.Array, intended: jax.Array
) -> Measured:
  """The gradient's weight on the tokens that a group shares, once per step.

  Args:
    batch: The optimizer batch, [P,G,T].
    coefficient: f32[P,G,T], -d loss / d logp.
    intended: The same with the policy's ratios to the old policy and to the
      sampler at 1: what the method does to shared tokens when nothing has
      moved. (Penalties act at the gap that there is.)

  Returns:
    Over the nodes of the trie of each group's sampled ids, those that the
    `whole` group shares and those that a `part` of at least two shares:
    `prefix_*_tokens`, nodes per group; `prefix_*_weight`, the mean of W_agg,
    the sum of the coefficients of all who share the node;
    `prefix_*_uncancelled`, the mean of |W_agg| over the sum of absolute
    coefficients: 0 where they cancel, 1 where all pull one way. The latter two
    also as `..._expected`, of `intended`.

  References:
    Fontana et al., `On the Hidden Objective Biases of Group-based
    Reinforcement Learning <https://arxiv.org/abs/2601.05002>`_, 2026,
    proposition 1
  """
  both = jnp.stack([coefficient, intended])
  # The tries are searched once for both.
  shared = jax.vmap(diagnostics.shared_prefix_weight, in_axes=(None, None, 0))(
    batch.tokens, batch.mask, both
  )
  measured: Measured = {}
  for k, suffix in enumerate(('', '_expected')):
    one = jax.tree.map(lambda x: x[k], shared)  # noqa: B023
    for name, pair in diagnostics.prefix_summary(one).items():
      if not (suffix and name.endswith('_tokens')):
        measured[f'prefix_{name}{suffix}'] = metrics.Mean(*pair)
  return measured


def kl_old(logp: ArrayLike, batch: losses.Batch) -> Measured:
  """`kl_old_k1` and `kl_old_k3`; see `of_terms`."""
  old = logp if batch.logp_old is None else batch.logp_old
  return _kl('kl_old', jnp.subtract(logp, old), batch.keep)


def _kl(name: str, log_ratio: ArrayLike, kept: ArrayLike) -> Measured:
  """Two estimates; see `of_terms`."""
  gap = _saturated(log_ratio)
  k3 = jnp.expm1(gap) - gap
  return {
    f'{name}_k1': metrics.masked_mean(-gap, kept),
    f'{name}_k3': metrics.masked_mean(k3, kept),
  }


def _saturated(log_ratio: ArrayLike) -> jax.Array:
  return jnp.minimum(log_ratio, _MAX_LOG_RATIO)
