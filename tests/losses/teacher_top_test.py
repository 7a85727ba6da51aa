"""The KL over a teacher's likeliest tokens: bounds, extremes, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

KL = {
  'reverse': lambda policy, teacher: jnp.exp(policy) * (policy - teacher),
  'forward': lambda policy, teacher: jnp.exp(teacher) * (teacher - policy),
}
both = pytest.mark.parametrize('direction', KL)


def of_logits(direction, number, logits, teacher, dtype=jnp.float64):
  """(KL, d KL / d logits, metrics) at T places, by the loss of `gkd`.

  Args:
    direction: Of the KL.
    number: Of the teacher's likeliest tokens.
    logits: f[T,V], of the policy.
    teacher: f[T,V], logits likewise.
    dtype: Of all that is computed.
  """
  teacher = jax.nn.log_softmax(jnp.asarray(teacher, dtype))
  ids = jnp.argsort(-teacher, axis=-1)[:, :number]
  top = jnp.take_along_axis(teacher, ids, axis=-1)[None, None]
  method = losses.methods.gkd(direction, number)
  mask = jnp.ones((1, 1, len(teacher)), bool)
  batch = losses.make_batch(
    mask, jnp.zeros((1, 1), dtype), extras={'teacher_top_logp': top}
  )

  @jax.jit
  def run(logits):
    ready, state = cases.prepared(method, batch)

    def loss(logits):
      policy = jax.nn.log_softmax(logits)
      given = jnp.take_along_axis(policy, ids, axis=-1)[None, None]
      value, terms = losses.surrogate_loss(
        method, jnp.zeros(mask.shape, dtype), ready, state, None, given
      )
      return value, terms.metrics

    return jax.value_and_grad(loss, has_aux=True)(logits)

  (value, metrics), slope = run(jnp.asarray(logits, dtype))
  return value, slope * len(teacher), metrics


@both
def test_over_all_tokens_it_is_the_exact_kl(direction):
  """Also in float32, where the class of all others is a rounding error."""
  logits, teacher = 2 * np.random.default_rng(0).standard_normal((2, 4, 5))

  @jax.value_and_grad
  def exact(logits):
    policy, other = map(jax.nn.log_softmax, (logits, jnp.asarray(teacher)))
    return KL[direction](policy, other).sum(-1).mean()

  value, slope = exact(jnp.asarray(logits))
  found = of_logits(direction, 5, logits, teacher)
  np.testing.assert_allclose(found[0], value, rtol=1e-12)
  np.testing.assert_allclose(found[1], 4 * slope, rtol=1e-9, atol=1e-12)
  narrow = of_logits(direction, 5, logits, teacher, jnp.float32)
  np.testing.assert_allclose(narrow[0], value, rtol=1e-5)
  np.testing.assert_allclose(narrow[1], 4 * slope, atol=1e-5)


@both
def test_fewer_tokens_are_a_lower_bound_that_grows(direction):
  logits, teacher = 2 * np.random.default_rng(1).standard_normal((2, 6, 12))
  found = [
    of_logits(direction, number, logits, teacher)[2]['kl_teacher_top'][0, 0]
    for number in (1, 2, 5, 11, 12)
  ]
  assert np.all(np.diff(found, axis=0)[:-1] > 0) and np.all(found[0] >= 0)
  # One token and eleven are as good as twelve: the other is the class itself.
  np.testing.assert_allclose(found[-1], found[-2], rtol=1e-9)


@both
def test_equal_policies_have_no_kl_and_no_slope(direction):
  logits = np.random.default_rng(2).standard_normal((3, 8))
  value, slope, metrics = of_logits(direction, 3, logits, logits)
  np.testing.assert_allclose(value, 0, atol=1e-15)
  np.testing.assert_allclose(slope, 0, atol=1e-15)
  mass = np.sort(jax.nn.softmax(logits), axis=-1)[:, -3:].sum(-1)
  np.testing.assert_allclose(metrics['teacher_top_mass'][0, 0], mass)


@both
@pytest.mark.parametrize('number', [1, 3, 6])
def test_extremes_are_finite_in_float32(direction, number):
  """A sure teacher, a sure policy, both sure of one or of different tokens."""
  sure, other = np.eye(6)[0] * 200, np.eye(6)[5] * 200
  never = np.where(np.arange(6) == 1, -1e30, 0.0)
  flat = np.zeros(6)
  pairs = [
    (flat, sure), (sure, flat), (sure, sure), (sure, other), (other, sure),
    (never, flat), (flat, never), (never, sure), (sure, never),
    (np.arange(6) * 5.0, -np.arange(6) * 5.0), (sure / 10, flat),
  ]  # fmt: skip
  logits, teacher = map(np.array, zip(*pairs))
  value, slope, metrics = of_logits(
    direction, number, logits, teacher, jnp.float32
  )
  assert value.dtype == slope.dtype == jnp.float32
  assert np.isfinite(value) and np.all(np.isfinite(slope))
  assert np.all(np.abs(slope) < 2000), slope
  kl = np.asarray(metrics['kl_teacher_top'][0, 0])
  assert np.all(kl > -1e-4) and np.all(kl < 1100), kl
  assert abs(kl[2]) < 1e-4 and kl[3] > 5


def test_a_sum_above_one_is_no_class_of_others():
  """As rounding may leave it: then the KL is that of the tokens."""
  policy, teacher = np.log([0.5, 0.5 + 3e-7]), np.log([0.25, 0.75 + 2e-7])
  penalty = losses.add_teacher_top_kl(1.0, 'reverse', 2)
  batch = losses.make_batch(
    jnp.ones((1, 1, 1), bool),
    jnp.zeros((1, 1), jnp.float32),
    extras={
      'teacher_top_logp': jnp.asarray(teacher, jnp.float32)[None, None, None]
    },
  )
  method = losses.chain(losses.methods.reinforce(), penalty)
  batch, state = cases.prepared(method, batch)

  def loss(policy):
    return losses.surrogate_loss(
      method, jnp.zeros((1, 1, 1), jnp.float32), batch, state, None,
      policy[None, None, None],
    )[0]  # fmt: skip

  value, slope = jax.value_and_grad(loss)(jnp.asarray(policy, jnp.float32))
  expected = np.exp(policy) * (policy - teacher)
  np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)
  np.testing.assert_allclose(slope, expected + np.exp(policy), rtol=1e-5)


def test_a_policy_that_is_sure_feels_the_others_as_far_as_they_are_known():
  """The slope of one token against all others is policy minus teacher.

  In float32, down to the bound of what a sum tells of its rest; there it fades.
  """
  rest = np.array([1e-2, 1e-3, 1e-4, 2e-5, 1e-9, 5e-6])
  logits = np.zeros((6, 64))
  logits[:, 0] = np.log((1 - rest) / rest * 63)
  teacher = np.broadcast_to(np.log([0.5, *[0.5 / 63] * 63]), (6, 64))
  slope = of_logits('forward', 1, logits, teacher, jnp.float32)[1]
  np.testing.assert_allclose(slope[:4, 0], 0.5 - rest[:4], rtol=0.03)
  assert 0 <= slope[4, 0] < 0.01 and 0.2 < slope[5, 0] < 0.45
  # Among the tokens themselves it does not.
  ids = np.argsort(-teacher[4])[:2]
  two = of_logits('forward', 2, logits[4:5], teacher[4:5], jnp.float32)[1]
  np.testing.assert_allclose(two[0, ids[1]], -0.5 / 63, rtol=0.03)


def test_the_parts_of_a_chain_may_read_different_numbers():
  few = losses.add_teacher_top_kl(0.1, 'forward', 2)
  many = losses.add_teacher_top_kl(0.1, 'reverse', 7)
  chain = losses.chain(losses.methods.rloo(), few, many)
  assert chain.top_tokens == 7 and losses.methods.rloo().top_tokens == 0
  assert chain.requires == {'teacher_top_logp', 'logp_top'}
  batch = losses.make_batch(jnp.ones((1, 2, 3), bool), jnp.zeros((1, 2)))
  filled = losses.with_required(chain, batch)
  assert filled.extras['teacher_top_logp'].shape == (1, 2, 3, 7)
  assert filled.extras.keys() == {'teacher_top_logp'}
  case = cases.make_case()
  found = [
    cases.loss_and_gradient(losses.chain(losses.methods.rloo(), *links), case)
    for links in ((few, many), (few,), (many,), ())
  ]
  for whole, one, other, none in zip(*found, strict=True):
    np.testing.assert_allclose(whole, one + other - none, atol=1e-12)


def test_a_coefficient_is_a_factor_and_may_be_a_schedule():
  case = cases.make_case()
  schedule = lambda rollout: 0.3 + 0 * rollout
  once, scheduled, twice, none = (
    cases.loss_and_gradient(
      losses.chain(
        losses.methods.rloo(), losses.add_teacher_top_kl(coefficient)
      ),
      case,
    )[1]
    for coefficient in (0.3, schedule, 0.6, 0.0)
  )
  np.testing.assert_allclose(scheduled, once, rtol=1e-12)
  np.testing.assert_allclose(twice - none, 2 * (once - none), atol=1e-12)
  assert np.abs(once - none).max() > 1e-3


def test_what_a_batch_has_beyond_the_number_is_not_read():
  found = [
    given((*SHAPE, size), losses.methods.gkd(number=4)) for size in (4, 9)
  ]
  values = [
    losses.surrogate_loss(
      *(method, jnp.zeros(SHAPE), batch, state, None),
      jnp.full(batch.extras['teacher_top_logp'].shape, -3.0),
    )[0]
    for method, batch, state in found
  ]
  assert values[0] == values[1] > 0


SHAPE = 1, 2, 3


def given(top=(*SHAPE, 4), method=None):
  method = losses.methods.gkd(number=4) if method is None else method
  batch = losses.make_batch(
    jnp.ones(SHAPE, bool),
    jnp.zeros(SHAPE[:2]),
    extras={'teacher_top_logp': jnp.full(top, -2.0)},
  )
  return method, *cases.prepared(method, batch)


@pytest.mark.parametrize(
  'top, policy, said',
  [
    ((1, 2, 2, 4), (*SHAPE, 4), r'Batch.teacher_top_logp has shape \(1, 2, 2'),
    (SHAPE, (*SHAPE, 4), r'give teacher_top_logp the shape \(1, 2, 3, .K.\)'),
    ((*SHAPE, 3), (*SHAPE, 4), 'number=4, but log-probabilities of 3 tokens'),
    ((*SHAPE, 4), (*SHAPE, 3), 'number=4, but log-probabilities of 3 tokens'),
    ((*SHAPE, 4), (1, 2, 2, 4), r'got logp_top of shape \(1, 2, 2, 4\), but'),
    ((*SHAPE, 4), SHAPE, r'got logp_top of shape \(1, 2, 3\), but'),
    ((*SHAPE, 4), None, 'logp_top'),
  ],
)
def test_other_shapes_are_refused(top, policy, said):
  with pytest.raises(ValueError, match=said) as refused:
    method, batch, state = given(top)
    losses.surrogate_loss(
      method,
      jnp.zeros(SHAPE),
      batch,
      state,
      None,
      None if policy is None else jnp.zeros(policy),
    )
  assert str(refused.value).endswith('.')


def test_padding_may_hold_anything():
  mask = jnp.array([[[True, False, False], [True, True, True]]])
  valid = jnp.array([[True, False]])
  top = jnp.where(mask[..., None] & valid[..., None, None], -2.0, jnp.nan)
  batch = losses.make_batch(
    mask, jnp.zeros((1, 2)), valid=valid,
    extras={'teacher_top_logp': top.at[0, 0, 0, 0].set(-jnp.inf)},
  )  # fmt: skip
  found = losses.check_batch(batch).extras['teacher_top_logp']
  assert found[0, 0, 0].tolist() == [-1000.0]
  assert found.shape == (1, 2, 3, 1) and not found.ravel()[1:].any()
