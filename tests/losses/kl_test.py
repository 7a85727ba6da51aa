"""KL to a reference: expected gradients, by enumeration of every outcome."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests import oracles
from tests.losses import cases

LOGITS, REF, OLD = np.random.default_rng(0).standard_normal((3, 5))
EXACT = oracles.enumerate_kl(LOGITS, REF)
CLOSE = dict(rtol=1e-9, atol=1e-12)


def expected_loss(*links, drawn_from=None, on_policy=True):
  """Value and gradient in the logits of the loss's mean over all 5 outcomes.

  Five prompts with one token each; the weight is the chance of the outcome,
  held fixed as a sample's is.
  """
  log_softmax = lambda x: jax.nn.log_softmax(jnp.asarray(x))[:, None, None]
  drawn = log_softmax(LOGITS if drawn_from is None else drawn_from)
  method = losses.chain(
    *links, losses.set_weight(lambda batch: jnp.exp(drawn)),
    losses.score_function(),
  )  # fmt: skip
  batch = losses.make_batch(
    jnp.ones((5, 1, 1), bool),
    jnp.zeros((5, 1)),
    logp_ref=log_softmax(REF),
    logp_old=drawn if drawn_from is not None or not on_policy else None,
    extras={'logp_teacher': log_softmax(REF)},
  )

  @jax.jit
  @jax.value_and_grad
  def run(logits):
    ready, state = cases.prepared(method, batch)
    logp = jax.nn.log_softmax(logits)[:, None, None]
    return losses.surrogate_loss(method, logp, ready, state)[0]

  return run(jnp.asarray(LOGITS))


def test_the_expected_gradient_of_a_teacher_is_that_of_the_kl():
  """As an advantage, and as a penalty by each of its estimators."""
  none = losses.constant_advantage(1.0)  # which the factor 0 leaves out
  advantage = none, losses.add_teacher_advantage(1.0, 0.0)
  value, gradient = expected_loss(*advantage, on_policy=False)
  np.testing.assert_allclose(gradient, EXACT.gradient, **CLOSE)
  _, twice = expected_loss(
    none, losses.add_teacher_advantage(2.0, 1.0), on_policy=False
  )
  np.testing.assert_allclose(twice, 2 * EXACT.gradient, **CLOSE)
  for estimator, wanted in (
    ((), EXACT.gradient),
    (('k3',), EXACT.k3),
    (('k3_weighted',), EXACT.gradient),
    (('k1_score',), EXACT.gradient),
  ):
    given, gradient = expected_loss(
      losses.constant_advantage(0.0), losses.add_teacher_kl(1.0, *estimator)
    )
    np.testing.assert_allclose(gradient, wanted, **CLOSE)
    if estimator:
      np.testing.assert_allclose(given, EXACT.kl, **CLOSE)


def test_a_teacher_and_a_reference_are_counted_apart():
  case = cases.make_case()
  method = losses.chain(
    losses.methods.rloo(), losses.add_kl(0.3), losses.add_teacher_kl(0.3)
  )
  batch, state = cases.prepared(method, cases.to_batch(case))
  _, terms = losses.surrogate_loss(method, case.logp, batch, state)
  owned = case.mask & case.valid[:, :, None]
  x = {
    'ref': case.logp_ref - case.logp, 'teacher': case.logp_teacher - case.logp,
  }  # fmt: skip
  for name, wanted in (
    ('ref', np.expm1(x['ref']) - x['ref']),
    ('teacher', x['teacher'] ** 2 / 2),
  ):
    found = np.asarray(terms.metrics[f'kl_{name}'])
    np.testing.assert_allclose(found[owned], wanted[owned], rtol=1e-9)
  assert method.requires >= {'logp_ref', 'logp_teacher'}


def penalty(estimator):
  return losses.constant_advantage(0.0), losses.add_kl(1.0, estimator)


@pytest.mark.parametrize(
  'estimator, value, gradient',
  [
    ('k2', None, EXACT.gradient),
    ('k3', EXACT.kl, EXACT.k3),
    ('k1_score', EXACT.kl, EXACT.gradient),
    ('k3_weighted', EXACT.kl, EXACT.gradient),
    ('k1_with_zero_expected_gradient', EXACT.kl, np.zeros(5)),
  ],
)
def test_expected_gradient_on_policy(estimator, value, gradient):
  """k3 as a loss descends KL(ref || pi), k1 nothing at all."""
  given, slope = expected_loss(*penalty(estimator))
  np.testing.assert_allclose(slope, gradient, **CLOSE)
  if value is not None:
    np.testing.assert_allclose(given, value, **CLOSE)


def test_the_weighted_estimator_is_right_off_policy():
  """E_old[s k3] = E_pi[k3]: value and gradient of KL(pi || ref)."""
  value, gradient = expected_loss(*penalty('k3_weighted'), drawn_from=OLD)
  np.testing.assert_allclose(value, EXACT.kl, **CLOSE)
  np.testing.assert_allclose(gradient, EXACT.gradient, **CLOSE)
  _, unweighted = expected_loss(*penalty('k3'), drawn_from=OLD)
  assert np.abs(unweighted - EXACT.gradient).max() > 0.01


@pytest.mark.parametrize(
  'links',
  [
    (losses.subtract_kl(1.0), losses.use_reward()),
    (losses.use_reward(), losses.subtract_kl_to_go(1.0)),
  ],
  ids=['subtract_kl', 'subtract_kl_to_go'],
)
def test_kl_in_the_reward_has_the_gradient_of_the_kl(links):
  _, gradient = expected_loss(*links, on_policy=False)
  np.testing.assert_allclose(gradient, EXACT.gradient, **CLOSE)


def test_kl_in_the_reward_of_two_tokens():
  """Of the first token, then of a second that depends on it: 3 x 3 outcomes."""
  rng = np.random.default_rng(1)
  theta = {
    'first': rng.standard_normal(3),
    'second': rng.standard_normal((3, 3)),
  }
  ref = {'first': rng.standard_normal(3), 'second': rng.standard_normal((3, 3))}

  def logp(logits):  # [9,1,2]
    first = jax.nn.log_softmax(jnp.asarray(logits['first']))
    second = jax.nn.log_softmax(jnp.asarray(logits['second']))
    pair = jnp.repeat(first, 3), second.ravel()
    return jnp.stack(pair, axis=-1)[:, None]

  old = logp(theta)
  chance = jnp.exp(jnp.sum(old, axis=-1, keepdims=True))

  def kl(logits):
    total = jnp.sum(logp(logits), axis=-1)
    gap = total - jnp.sum(logp(ref), axis=-1)
    return jnp.sum(jnp.exp(total) * gap)

  exact = jax.jit(jax.grad(kl))(jax.tree.map(jnp.asarray, theta))
  batch = losses.make_batch(
    jnp.ones((9, 1, 2), bool),
    jnp.zeros((9, 1)),
    logp_old=old,
    logp_ref=logp(ref),
  )
  for links in (
    (losses.subtract_kl(1.0), losses.use_reward()),
    (losses.use_reward(), losses.subtract_kl_to_go(1.0)),
  ):
    method = losses.chain(
      *links,
      losses.set_weight(lambda batch: jnp.broadcast_to(chance, (9, 1, 2))),
      losses.score_function(),
    )

    @jax.jit
    @jax.grad
    def run(theta, method=method):
      ready, state = cases.prepared(method, batch)
      return losses.surrogate_loss(method, logp(theta), ready, state)[0]

    gradient = run(jax.tree.map(jnp.asarray, theta))
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), gradient, exact
    )


def test_kl_to_go_is_charged_to_a_token_and_those_before_it():
  mask = np.array([[[True, False, True, True], [False] * 4]])
  gap = np.array([1.0, 50.0, 10.0, 100.0])
  batch = losses.make_batch(
    mask,
    jnp.full((1, 2), 7.0),
    logp_old=jnp.broadcast_to(gap, mask.shape),
    logp_ref=jnp.zeros(mask.shape),
  )
  method = losses.chain(losses.use_reward(), losses.subtract_kl_to_go(0.5))
  given, _ = losses.credit(method, batch, method.init())
  np.testing.assert_allclose(
    given.advantage[0], [[7 - 55.5, 0, 7 - 55, 7 - 50], [0] * 4]
  )
  method = losses.chain(losses.subtract_kl(0.5), losses.use_reward())
  batch, _ = losses.credit(method, batch, method.init())
  np.testing.assert_allclose(batch.reward, [[7 - 55.5, 7]])


def test_k1_as_a_loss_is_refused_with_the_reason():
  with pytest.raises(ValueError, match='expected gradient is zero') as caught:
    losses.add_kl(0.1, 'k1')
  message = str(caught.value)
  assert message.endswith('.')
  for advice in ('subtract_kl', 'k1_with_zero_expected_gradient'):
    assert advice in message


def test_k1_to_a_teacher_is_refused_with_other_advice():
  with pytest.raises(ValueError, match='add_teacher_kl got') as caught:
    losses.add_teacher_kl(0.1, 'k1')
  assert 'advantage with add_teacher_advantage' in str(caught.value)


def test_the_saturation_of_ratio_and_of_reference_are_counted_apart():
  """In float32, with log-ratios of +-100: finite, and not flat."""
  log_ratio = jnp.array([[[100.0, 0.0, -100.0, 20.0, 21.0]]], jnp.float32)
  gap = jnp.array([[[0.0, 100.0, 100.0, 20.0, -21.0]]], jnp.float32)
  batch = losses.make_batch(
    jnp.ones((1, 1, 5), bool),
    jnp.zeros((1, 1), jnp.float32),
    logp_old=-log_ratio,
    logp_ref=gap,
  )
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_sequence_sums(),
    losses.score_function(),
    losses.add_kl(1.0, 'k3_weighted'),
  )
  logp = jnp.zeros((1, 1, 5), jnp.float32)
  loss, terms, _, gradient = cases.terms_and_gradient(method, batch, logp)
  assert np.isfinite(loss) and np.all(np.isfinite(gradient))
  np.testing.assert_array_equal(
    terms.metrics['saturated'][0, 0], [1, 0, 0, 0, 1]
  )
  np.testing.assert_array_equal(
    terms.metrics['saturated_ref'][0, 0], [0, 1, 1, 0, 0]
  )


def test_far_from_the_reference_the_pull_stays():
  """Peers clamp x to 10 there: gradient 0 (methods.md 1.8, row 16)."""
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_sequence_sums(),
    losses.score_function(),
    losses.add_kl(1.0),
  )
  batch = losses.make_batch(
    jnp.ones((1, 1, 2), bool),
    jnp.zeros((1, 1), jnp.float32),
    logp_ref=jnp.array([[[100.0, -100.0]]], jnp.float32),
  )
  logp = jnp.zeros((1, 1, 2), jnp.float32)
  *_, gradient = cases.terms_and_gradient(method, batch, logp)
  np.testing.assert_allclose(gradient[0, 0], [-np.exp(20.0), 1], rtol=1e-6)


def test_the_reported_kl_is_the_estimate_without_weight_and_coefficient():
  case = cases.make_case()
  x = case.logp_ref - case.logp
  owned = case.mask & case.valid[:, :, None]
  expected = dict(
    k2=x**2 / 2, k3=np.exp(x) - x - 1, k3_weighted=np.exp(x) - x - 1
  )
  expected['k1_score'] = -x
  expected['k1_with_zero_expected_gradient'] = -x
  for estimator, value in expected.items():
    method = losses.chain(losses.methods.rloo(), losses.add_kl(0.3, estimator))
    batch, state = cases.prepared(method, cases.to_batch(case))
    _, terms = losses.surrogate_loss(method, case.logp, batch, state)
    np.testing.assert_allclose(
      terms.metrics['kl_ref'][owned], value[owned], rtol=1e-9
    )
