"""The chain: order, requirements, scope, schedules, state, shapes."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import optim
from tests.losses import cases

pytestmark = pytest.mark.quick

CREDIT = losses.normalize_by_group()
WEIGHT = losses.mean_over_tokens()
CLIP = losses.ppo_clip()


def run(method, case=None):
  return cases.loss_and_gradient(method, case or cases.make_case())


@pytest.mark.parametrize(
  'links, words',
  [
    ((CREDIT, losses.shape_overlong_reward(3, 5)), 'shape_overlong_reward'),
    ((CREDIT, losses.center_by_group(), WEIGHT, CLIP), 'center_by_group'),
    ((losses.on_advantage(lambda a, b: a), CREDIT), "sets 'advantage'"),
    ((CREDIT, WEIGHT, losses.drop_uniform_groups(), CLIP), 'drops tokens'),
    ((CREDIT, WEIGHT, losses.mean_over_sequence_sums(), CLIP), "set 'weight'"),
    ((CREDIT, losses.on_weight(lambda w, b: w), WEIGHT), "sets 'weight'"),
    (
      (CREDIT, losses.recenter_branches(), WEIGHT, CLIP),
      "sets 'weight'; place recenter_branches after one that does",
    ),
    ((CREDIT, WEIGHT, CLIP, losses.pool_log_ratio()), 'pool_log_ratio'),
    ((CREDIT, WEIGHT, CLIP, losses.score_function()), "set 'objective'"),
    (
      (CREDIT, WEIGHT, losses.on_objective(lambda t, b: t.objective), CLIP),
      "sets 'objective'",
    ),
    ((WEIGHT, CLIP), 'No transform of this method sets the advantage'),
    ((CREDIT, CLIP), 'No transform of this method sets the weight'),
    ((CREDIT, WEIGHT), 'No transform of this method sets the objective'),
  ],
)
def test_wrong_order_raises_when_traced(links, words):
  with pytest.raises(ValueError, match=words):
    run(losses.chain(*links))


def test_pool_then_clip_differs_from_clip_then_pool():
  first = losses.chain(
    CREDIT, WEIGHT, losses.pool_log_ratio(), losses.clip_log_ratio(0.1, 0.1),
    losses.importance_weighted(),
  )  # fmt: skip
  second = losses.chain(
    CREDIT, WEIGHT, losses.clip_log_ratio(0.1, 0.1), losses.pool_log_ratio(),
    losses.importance_weighted(),
  )  # fmt: skip
  assert abs(run(first)[0] - run(second)[0]) > 1e-3


def test_stages_run_in_their_order_wherever_their_transforms_are_written():
  """An advantage edited behind the weight and the objective is in both."""
  double = losses.on_advantage(lambda advantage, batch: 2 * advantage)
  gate = losses.gate_small_advantages(1.5)
  before = losses.chain(CREDIT, double, WEIGHT, gate, CLIP)
  behind = losses.chain(CLIP, WEIGHT, gate, CREDIT, double)
  for x, y in zip(run(before), run(behind), strict=True):
    np.testing.assert_array_equal(x, y)
  assert np.abs(run(behind)[1]).max() > 0


def test_chains_nest():
  flat = losses.methods.grpo()
  nested = losses.chain(losses.chain(flat), losses.chain())
  assert nested.requires == {'logp_ref'} and nested.scope == 'row'
  assert run(flat)[0] == run(nested)[0]


def test_requires_and_scope_are_joined():
  assert losses.methods.grpo(kl_coefficient=0).requires == frozenset()
  assert losses.methods.grpo(kl_coefficient=0.1).requires == {'logp_ref'}
  assert losses.methods.kl_cov().scope == 'batch'
  needs = losses.add_penalty(
    lambda terms, batch: terms.entropy, requires=('entropy',)
  )
  assert losses.chain(losses.methods.grpo(), needs).requires == {
    'logp_ref',
    'entropy',
  }


def test_a_missing_requirement_is_named():
  case = cases.make_case()
  method = losses.methods.grpo()
  given = cases.to_batch(case)
  with pytest.raises(ValueError, match="'logp_ref'"):
    losses.credit(method, given._replace(logp_ref=None), method.init())
  batch, state = cases.prepared(method, given)
  with pytest.raises(ValueError, match="'logp_ref'"):
    losses.surrogate_loss(
      method, case.logp, batch._replace(logp_ref=None), state
    )


def test_entropy_reaches_the_terms():
  bonus = losses.add_penalty(
    lambda terms, batch: -0.5 * terms.entropy, requires=('entropy',)
  )
  method = losses.chain(losses.constant_advantage(0.0), WEIGHT, CLIP, bonus)
  batch = losses.make_batch(jnp.ones((1, 1, 4), bool), jnp.zeros((1, 1)))
  batch, state = cases.prepared(method, batch)
  entropy = jnp.arange(4.0).reshape(1, 1, 4)
  loss, _ = losses.surrogate_loss(method, entropy, batch, state, entropy)
  np.testing.assert_allclose(loss, -0.5 * 1.5)


def test_without_an_old_policy_the_ratio_is_one_in_every_dtype():
  method = losses.methods.gspo()
  for dtype in (jnp.bfloat16, jnp.float32, jnp.float64):
    batch = cases.to_batch(cases.make_case())._replace(logp_old=None)
    batch, state = cases.prepared(method, batch)
    logp = jnp.asarray(cases.make_case().logp, dtype)
    _, terms = losses.surrogate_loss(method, logp, batch, state)
    assert not np.any(terms.log_ratio)
    assert not np.any(terms.metrics['clipped_high'])


def test_schedules_follow_the_rollouts():
  seen = []

  def reward(reward, batch, scale):
    seen.append(float(scale))
    return reward * scale

  def objective(terms, batch, scale):
    seen.append(float(scale))
    return terms.logp

  method = losses.chain(
    losses.on_reward(reward, scale=lambda rollout: 10.0 + rollout),
    losses.use_reward(),
    WEIGHT,
    losses.set_objective(objective, scale=lambda rollout: 20.0 + rollout),
  )
  case, state = cases.make_case(), method.init()
  for _ in range(2):
    batch, state = losses.credit(method, cases.to_batch(case), state)
    for _ in range(2):  # two optimizer steps on one rollout
      prepared = losses.prepare(method, batch, state)
      losses.surrogate_loss(method, case.logp, prepared, state)
  assert seen == [10, 20, 20, 11, 21, 21]


def test_a_weight_multiplies_objective_and_penalty():
  halved = losses.chain(
    losses.methods.grpo(), losses.on_weight(lambda weight, batch: weight / 2)
  )
  np.testing.assert_allclose(
    run(halved)[1], run(losses.methods.grpo())[1] / 2, rtol=1e-12
  )


def test_dropped_tokens_do_not_come_back():
  everything = losses.on_keep(lambda keep, batch: jnp.ones_like(keep))
  nothing = losses.on_keep(lambda keep, batch: jnp.zeros_like(keep))
  method = losses.chain(CREDIT, nothing, everything, WEIGHT, CLIP)
  loss, gradient = run(method)
  assert loss == 0 and not np.any(gradient)


def test_saturated_ratios_keep_their_slope_and_are_counted():
  method = losses.chain(
    losses.use_reward(),
    losses.mean_over_sequence_sums(),
    losses.importance_weighted(),
  )
  batch = losses.make_batch(
    jnp.ones((1, 1, 2), bool),
    jnp.ones((1, 1), jnp.float32),
    logp_old=jnp.zeros((1, 1, 2), jnp.float32),
  )
  batch, state = cases.prepared(method, batch)
  logp = jnp.array([[[100.0, 1.0]]], jnp.float32)

  def loss(logp):
    return losses.surrogate_loss(method, logp, batch, state)

  (_, terms), gradient = jax.value_and_grad(loss, has_aux=True)(logp)
  np.testing.assert_array_equal(terms.metrics['saturated'], [[[True, False]]])
  np.testing.assert_allclose(gradient[0, 0], -np.exp([20.0, 1.0]), rtol=1e-6)


def test_clip_metrics_by_side_and_sign():
  log_ratio = jnp.log(jnp.array([1.5, 0.5, 1.0]))
  logp = jnp.broadcast_to(log_ratio, (1, 2, 3))
  batch = losses.make_batch(
    jnp.ones((1, 2, 3), bool),
    jnp.array([[1.0, -1.0]]),
    logp_old=jnp.zeros((1, 2, 3)),
  )
  method = losses.chain(losses.use_reward(), WEIGHT, CLIP)
  batch, state = cases.prepared(method, batch)
  _, terms = losses.surrogate_loss(method, logp, batch, state)
  expected = {
    'clipped_high': [[1, 0, 0], [0, 0, 0]],
    'clipped_low': [[0, 0, 0], [0, 1, 0]],
    'outside_high': [[0, 0, 0], [1, 0, 0]],
    'outside_low': [[0, 1, 0], [0, 0, 0]],
  }
  for name, value in expected.items():
    np.testing.assert_array_equal(terms.metrics[name][0], value)


@pytest.mark.parametrize(
  'field, shape',
  [
    ('reward', (4, 5)),
    ('logp_old', (4, 4, 7)),
    ('valid', (3, 4)),
    ('reward_parts', (2, 4, 1)),
    ('mask', (4, 4)),
  ],
)
def test_wrong_shapes_are_named(field, shape):
  batch = cases.to_batch(cases.make_case())
  batch = batch._replace(**{field: jnp.zeros(shape)})
  with pytest.raises(ValueError, match=field):
    losses.check_batch(batch)


def test_a_users_own_transform_is_one_function():
  """Flipped rewards flip the gradient of a method that only centres them."""
  flipped = losses.on_reward(lambda reward, batch: -reward)
  case = cases.make_case()._replace(logp_old=cases.make_case().logp)
  own = losses.chain(flipped, losses.methods.dr_grpo())
  np.testing.assert_allclose(
    run(own, case)[1], -run(losses.methods.dr_grpo(), case)[1], atol=1e-12
  )


def test_without_an_old_policy_the_gradient_is_that_at_ratio_one():
  case, method = cases.make_case(), losses.methods.gspo()
  batch = cases.to_batch(case)._replace(logp_old=None)
  batch, state = cases.prepared(method, batch)
  loss = lambda logp: losses.surrogate_loss(method, logp, batch, state)[0]
  gradient = jax.grad(loss)(jnp.asarray(case.logp))
  expected = run(method, case._replace(logp_old=case.logp))[1]
  np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize('step', range(3))
def test_a_state_of_another_chain_is_refused(step):
  """By credit, by prepare and by surrogate_loss."""
  case, method = cases.make_case(), losses.methods.rloo()
  fresh = losses.check_batch(cases.to_batch(case))
  batch, state = losses.credit(method, fresh, method.init())
  steps = [
    lambda state: losses.credit(method, fresh, state),
    lambda state: losses.prepare(method, batch, state),
    lambda state: losses.surrogate_loss(
      method, case.logp, losses.prepare(method, batch, state[:3]), state
    ),
  ]
  with pytest.raises(ValueError, match='state that is not of this method'):
    steps[step]((*state, ()))


def test_penalties_add_up_and_leave_the_objective_alone():
  """One stands before the objective, one after it."""
  first = losses.add_penalty(lambda terms, batch: jnp.square(terms.logp))
  second = losses.add_penalty(lambda terms, batch: 2 * terms.logp)
  method = losses.chain(first, CREDIT, WEIGHT, CLIP, second)
  case = cases.make_case()
  batch, state = cases.prepared(method, cases.to_batch(case))
  _, terms = losses.surrogate_loss(method, case.logp, batch, state)
  plain = losses.chain(CREDIT, WEIGHT, CLIP)
  _, expected = losses.surrogate_loss(plain, case.logp, batch, plain.init())
  penalty = jnp.square(terms.logp) + 2 * terms.logp
  np.testing.assert_allclose(terms.penalty, penalty, rtol=1e-12)
  np.testing.assert_array_equal(terms.objective, expected.objective)


def test_a_schedule_may_stand_beside_a_constant():
  method = losses.chain(
    losses.on_reward(
      lambda reward, batch, scale, shift: scale * reward + shift,
      scale=lambda rollout: 2.0 + rollout,
      shift=5.0,
    ),
    losses.use_reward(),
  )
  batch, state = losses.make_batch([[[True]]], [[10.0]]), method.init()
  first, state = losses.credit(method, batch, state)
  second, _ = losses.credit(method, batch, state)
  assert [first.reward.item(), second.reward.item()] == [25, 35]


@pytest.mark.parametrize(
  'stage',
  [
    losses.on_log_ratio,
    losses.set_objective,
    losses.on_objective,
    losses.add_penalty,
  ],
)
def test_a_transform_is_row_wise_unless_it_says_otherwise(stage):
  link = stage(lambda terms, batch: terms.logp)
  wide = stage(lambda terms, batch: terms.logp, scope='batch')
  bare = losses.LossTransform(link.init, link.credit, link.prepare, link.apply)
  assert [link.scope, bare.scope, wide.scope] == ['row', 'row', 'batch']


def test_keep_stays_a_mask():
  """One of integers would be summed, and no `where` takes it."""
  batch = losses.make_batch(jnp.ones((2, 3, 4), bool), jnp.ones((2, 3)))
  method = losses.methods.dapo()
  credited, _ = losses.credit(method, losses.check_batch(batch), method.init())
  assert credited.keep.dtype == bool and not credited.keep.any()


@pytest.mark.parametrize(
  'links, words',
  [
    ((CREDIT, WEIGHT, losses.drop_uniform_groups(), CLIP), 'drops tokens'),
    ((CREDIT, WEIGHT, losses.mean_over_sequence_sums(), CLIP), "set 'weight'"),
    ((CREDIT, losses.on_weight(lambda w, b: w), WEIGHT), "sets 'weight'"),
    ((CREDIT, losses.recenter_branches(), WEIGHT), "sets 'weight'; place rece"),
    ((CREDIT, WEIGHT, CLIP, losses.pool_log_ratio()), 'place pool_log_ratio'),
    ((CREDIT, WEIGHT, CLIP, losses.score_function()), "set 'objective'"),
    (
      (CREDIT, losses.on_objective(lambda t, b: t.objective), CLIP),
      "sets 'objective'",
    ),
    ((losses.on_advantage(lambda a, b: a), CREDIT), "sets 'advantage'"),
    (
      (losses.chain(CREDIT, WEIGHT), losses.chain(losses.drop_truncated())),
      'drop_truncated drops tokens',
    ),
  ],
)
def test_credit_refuses_a_chain_out_of_order_at_once(links, words):
  method = losses.chain(*links)
  batch = losses.make_batch(np.ones((1, 2, 3), bool), np.ones((1, 2)))
  with pytest.raises(ValueError, match=words):
    losses.credit(method, batch, method.init())


def test_credit_of_a_part_of_a_chain_is_none_out_of_order():
  part = losses.chain(CREDIT, losses.gate_small_advantages(1.5))
  batch = losses.make_batch(np.ones((1, 2, 3), bool), np.ones((1, 2)))
  losses.credit(part, batch, part.init())


def test_a_transform_of_ones_own_does_not_hide_an_order():
  """It has no place that is known, and may set any field."""
  own = losses.LossTransform(CREDIT.init, *CREDIT[1:4])
  assert own.writes == () and losses.chain(own, WEIGHT).writes == WEIGHT.writes
  batch = losses.make_batch(np.ones((1, 2, 3), bool), np.ones((1, 2)))
  late = losses.chain(own, WEIGHT, losses.drop_uniform_groups(), CLIP)
  with pytest.raises(ValueError, match='drops tokens'):
    losses.credit(late, batch, late.init())
  edited = losses.on_advantage(lambda advantage, batch: 2 * advantage)
  good = losses.chain(own, edited, WEIGHT, CLIP)
  losses.credit(good, batch, good.init())


RECORDS = {
  losses.Batch: '[P,G',
  losses.SurrogateTerms: '[P,G,T',
  losses.SharedContext: '[P,G,N]',
  losses.SharedPrefix: '[P,G,T]',
  losses.Rows: '32[',
  losses.Controller: '',
  losses.LossTransform: '',
  optim.MomentRecord: 'f32[',
  optim.Split: 'Tree like the parameters',
  optim.Coasted: '',
  optim.Matrix: '',
}


@pytest.mark.parametrize('kind', RECORDS)
def test_help_of_a_record_tells_the_shape_of_every_field(kind):
  for name in kind._fields:
    line = re.search(rf'^  {name}: (.*)$', inspect.getdoc(kind), re.M)
    assert line and RECORDS[kind] in line[1], name


def test_no_record_of_these_packages_is_left_out():
  public = [*vars(losses).values(), *vars(optim).values()]
  types = (x for x in public if isinstance(x, type))
  assert {x for x in types if hasattr(x, '_fields')} == {*RECORDS}
