"""Corrections for the sampler against loops, and at weights beyond float32."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

LIMIT = 20.0  # a log weight beyond it saturates
DEFAULTS = {
  'token': losses.truncate_token_importance(),
  'token-normalized': losses.truncate_token_importance(self_normalized=True),
  'sequence': losses.truncate_sequence_importance(),
  'mask': losses.mask_token_importance(),
  'mask-normalized': losses.mask_token_importance(self_normalized=True),
  'mask-sequence': losses.mask_sequence_importance(),
  'geometric': losses.gate_geometric_mean(),
}


def corrected(correction, batch):
  """The factor of the advantage, with the credited batch."""
  method = losses.chain(
    losses.constant_advantage(1.0), losses.drop_truncated(), correction
  )
  return losses.credit(method, batch, method.init())[0]


def truncate(cap):
  return lambda w: (min(w, cap), w > cap)


def keep_between(low, high):
  return lambda w: (w, False) if low <= w <= high else (0.0, True)


def gate_between(low, high):
  return lambda w: (1.0, False) if low <= w <= high else (0.0, True)


def loop(case, level, factor, normalize):
  """(factors, where they acted): a walk over completions and tokens."""
  factors, acted = np.zeros((2, *case.mask.shape))
  trained = []
  prompts, group, tokens = case.mask.shape
  for p in range(prompts):
    for g in range(group):
      chosen = [t for t in range(tokens) if case.mask[p, g, t]]
      if not case.valid[p, g] or not chosen:
        continue
      logs = [
        case.logp_old[p, g, t] - case.logp_sampler[p, g, t] for t in chosen
      ]
      for t, own in zip(chosen, logs):
        mean = sum(logs) / len(logs)
        log_w = dict(token=own, sequence=sum(logs), mean=mean)[level]
        factors[p, g, t], acted[p, g, t] = factor(math.exp(log_w))
        if not case.truncated[p, g]:  # what `drop_truncated` leaves
          trained.append(factors[p, g, t])
  if normalize:
    factors /= sum(trained) / len(trained)
  return factors, acted


@pytest.mark.parametrize('normalize', [False, True])
@pytest.mark.parametrize(
  'make, level, factor, metric',
  [
    (losses.truncate_token_importance, 'token', truncate(2.0), 'truncated'),
    (
      lambda **kw: losses.truncate_token_importance(1.2, **kw),
      'token',
      truncate(1.2),
      'truncated',
    ),
    (
      losses.truncate_sequence_importance,
      'sequence',
      truncate(2.0),
      'truncated',
    ),
    (losses.mask_token_importance, 'token', keep_between(0.5, 5.0), 'masked'),
    (
      lambda **kw: losses.mask_token_importance(0.2, 0.4, **kw),
      'token',
      keep_between(0.8, 1.4),
      'masked',
    ),
    (
      losses.mask_sequence_importance,
      'sequence',
      keep_between(0.0, 3.0),
      'masked',
    ),
  ],
  ids=['tis', 'tis-1.2', 'sequence', 'icepop', 'icepop-near', 'mask-sequence'],
)
def test_against_a_loop(make, level, factor, metric, normalize):
  case = cases.make_case(1, spread=0.8)
  batch = corrected(make(self_normalized=normalize), cases.to_batch(case))
  expected, acted = loop(case, level, factor, normalize)
  metric = f'{losses.CREDIT_METRIC}importance_{metric}'
  np.testing.assert_allclose(batch.advantage, expected, rtol=1e-9)
  np.testing.assert_array_equal(
    np.where(batch.mask, batch.extras[metric], 0), acted
  )
  assert acted.any() and not acted.all() and case.truncated.any()


@pytest.mark.parametrize('low, high', [(0.2, 0.1), (0.01, 0.01)])
def test_the_geometric_gate_against_a_loop(low, high):
  case = cases.make_case(1, spread=0.5 if low == 0.2 else 0.02)
  batch = corrected(losses.gate_geometric_mean(low, high), cases.to_batch(case))
  expected, acted = loop(
    case, 'mean', gate_between(1 - low, 1 + high), normalize=False
  )
  np.testing.assert_array_equal(batch.advantage, expected)
  gated = batch.extras[losses.CREDIT_METRIC + 'geometric_gated']
  np.testing.assert_array_equal(np.where(batch.mask, gated, 0), acted)
  assert expected.any() and acted.any()


def test_the_geometric_gate_has_narrow_defaults():
  ratios = [0.989, 0.991, 1.009, 1.011]
  value = factor_of(losses.gate_geometric_mean(), np.log(ratios))
  np.testing.assert_array_equal(value, [0, 1, 1, 0])


def factor_of(correction, log_weights, dtype=jnp.float32):
  """The factor of one-token completions with these log weights."""
  log_w = jnp.asarray(log_weights, dtype)[None, :, None]
  batch = losses.make_batch(
    jnp.ones(log_w.shape, bool),
    jnp.ones(log_w.shape[:2], dtype),
    logp_old=log_w,
    logp_sampler=jnp.zeros_like(log_w),
  )
  return np.asarray(corrected(correction, batch).advantage)[0, :, 0]


@pytest.mark.parametrize(
  'name, expected',
  [
    ('token', [0.1, 0.9, 1.9, 2.0, 2.0]),
    ('sequence', [0.1, 0.9, 1.9, 2.0, 2.0]),
    ('mask', [0.0, 0.9, 1.9, 3.1, 0.0]),
    ('mask-sequence', [0.1, 0.9, 1.9, 0.0, 0.0]),
  ],
)
def test_defaults(name, expected):
  """Not normalised; caps of 2, a range of 0.5 to 5, a bound of 3."""
  value = factor_of(DEFAULTS[name], np.log([0.1, 0.9, 1.9, 3.1, 5.1]))
  np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize(
  'correction',
  [
    losses.mask_token_importance(0.0, 0.0),
    losses.mask_sequence_importance(1.0),
    losses.gate_geometric_mean(0.0, 0.0),
  ],
)
def test_a_weight_on_the_bound_stays(correction):
  np.testing.assert_array_equal(factor_of(correction, [0.0]), [1])


def test_a_weight_on_its_cap_is_not_counted_as_truncated():
  for correction, metric in (
    (losses.truncate_token_importance(1.0), 'importance_truncated'),
    (losses.mask_sequence_importance(1.0), 'importance_masked'),
  ):
    batch = cases.to_batch(cases.make_case())
    batch = corrected(correction, batch._replace(logp_sampler=batch.logp_old))
    assert not np.any(batch.extras[losses.CREDIT_METRIC + metric])


def test_the_bounds_act_on_the_ratio_and_not_on_its_inverse():
  """A peer's `token_k1` drops the mirror image (methods.md 1.8, row 7)."""
  ratios = np.array([0.55, 0.65, 1.35, 1.5])
  for correction in (
    losses.mask_token_importance(0.4, 0.4),
    losses.gate_geometric_mean(0.4, 0.4),
  ):
    kept = factor_of(correction, np.log(ratios)) != 0
    np.testing.assert_array_equal(kept, [False, True, True, False])


@pytest.mark.parametrize('name', DEFAULTS)
def test_extreme_weights_are_finite_and_counted(name):
  """Of tokens, e^60, e^-60 and e^+-100; of completions, more still."""
  log_w = np.array([60.0, -60.0, 100.0, -100.0, LIMIT, LIMIT + 1, 0.0])
  shape = (1, 7, 3)
  old = jnp.broadcast_to(jnp.asarray(log_w, jnp.float32)[:, None], shape)
  batch = losses.make_batch(
    jnp.ones(shape, bool),
    jnp.linspace(0, 1, 7, dtype=jnp.float32)[None],
    logp_old=old,
    logp_sampler=jnp.zeros_like(old),
  )
  method = losses.chain(
    losses.center_by_group(),
    DEFAULTS[name],
    losses.mean_over_tokens(),
    losses.importance_weighted(),
  )
  batch, state = cases.prepared(method, batch)
  assert batch.advantage.dtype == jnp.float32
  assert np.all(np.isfinite(batch.advantage))

  def loss(logp):
    return losses.surrogate_loss(method, logp, batch, state)[0]

  value, gradient = jax.value_and_grad(loss)(old + 0.5)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))
  assert np.any(gradient)
  (saturated,) = (
    metric for key, metric in batch.extras.items() if 'saturated' in key
  )
  total = 3 * log_w if 'sequence' in name else log_w
  np.testing.assert_array_equal(
    saturated, np.broadcast_to((total > LIMIT)[:, None], shape)
  )


def test_a_correction_leaves_penalty_and_denominator_alone():
  """As a weight, a factor of 2 would double the KL term."""
  case = cases.make_case()
  plain = losses.chain(
    losses.constant_advantage(0.0),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
    losses.add_kl(1.0),
  )
  with_correction = losses.chain(
    losses.constant_advantage(0.0),
    losses.mask_token_importance(0.1, 0.1),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
    losses.add_kl(1.0),
  )
  assert (
    cases.loss_and_gradient(plain, case)[0]
    == cases.loss_and_gradient(with_correction, case)[0]
  )


def test_what_a_correction_reads():
  for correction in DEFAULTS.values():
    assert correction.requires == {'logp_old', 'logp_sampler'}
    assert correction.scope == 'row'
