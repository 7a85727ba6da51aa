"""Credit by turn: without bias, over what tools wrote, and nothing twice."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import methods
from tests import oracles
from tests.losses import cases

pytestmark = pytest.mark.quick

GO, GOOD, GROUP = 0.6, 0.3, 4  # probabilities of two choices; episodes
OUTCOMES = {  # the rewards of each turn, and the probability of the outcome
  'stop': ((0.3, 0.0), 1 - GO),
  'good': ((1.0, 1.0), GO * GOOD),
  'bad': ((1.0, 0.0), GO * (1 - GOOD)),
}
# Of .3 (1 - p) + p (1 + q), by the logits of p and of q.
GRADIENT = GO * (1 - GO) * (1 + GOOD - 0.3), GO * GOOD * (1 - GOOD)


@functools.partial(jax.jit, static_argnums=1)
def _credited(batch, transforms):
  return [
    losses.credit(one, batch, one.init())[0].advantage for one in transforms
  ]


def advantages(batch, *transforms):
  """Those of several transforms, from one program."""
  return [np.asarray(x) for x in _credited(batch, transforms)]


def every_group():
  """All 81 groups of outcomes as one batch; a tool writes the second token."""
  drawn = [*itertools.product(OUTCOMES, repeat=GROUP)]
  goes = np.array([[name != 'stop' for name in row] for row in drawn])
  rewards = np.array([[OUTCOMES[name][0] for name in row] for row in drawn])
  mask = np.ones((*goes.shape, 3), bool)
  mask[..., 1], mask[..., 2] = False, goes
  turn = np.broadcast_to([0, 0, 1], mask.shape)
  batch = losses.make_batch(
    mask,
    jnp.asarray(rewards.sum(-1)),
    extras={'turn': turn, 'turn_reward': jnp.asarray(rewards)},
  )
  share = np.array([np.prod([OUTCOMES[x][1] for x in row]) for row in drawn])
  good = np.array([[name == 'good' for name in row] for row in drawn])
  scores = np.stack([goes - GO, np.where(goes, good - GOOD, 0)], -1)
  return batch, share, scores


def expected_gradients(*credits):
  """Of the logits of both choices, over all groups that may be drawn."""
  batch, share, scores = every_group()
  of_turns = [x[..., [0, 2]] for x in advantages(batch, *credits)]
  of_groups = [np.mean(x * scores, axis=1) for x in of_turns]
  return [np.sum(share[:, None] * x, axis=0) for x in of_groups]


def mean_of_those_that_reached():
  """The biased form: the reward of each turn minus their mean, to go."""

  def advantage(batch):
    reached = jnp.stack([batch.mask[..., 0], batch.mask[..., 2]], -1)
    reward = jnp.where(reached, batch.extras['turn_reward'], 0)
    number = jnp.maximum(jnp.sum(reached, axis=1, keepdims=True), 1)
    mean = jnp.sum(reward, axis=1, keepdims=True) / number
    own = jnp.where(reached, reward - mean, 0) * GROUP / (GROUP - 1)
    to_go = jnp.flip(jnp.cumsum(jnp.flip(own, -1), -1), -1)
    return jnp.take_along_axis(to_go, batch.extras['turn'], axis=-1)

  return losses.set_advantage(advantage, requires=('turn', 'turn_reward'))


def scaled(transform):
  """Times G / (G - 1): a mean that holds the episode itself shrinks it."""
  return losses.chain(
    transform, losses.on_advantage(lambda a, batch: a * GROUP / (GROUP - 1))
  )


def test_the_expected_gradient_is_that_of_the_reward():
  """That of the biased form is not, by what was measured elsewhere."""
  assert GRADIENT == pytest.approx((0.24, 0.126))
  *found, biased, discounted = expected_gradients(
    losses.leave_one_out_to_go(),
    scaled(losses.center_to_go_by_group()),
    losses.leave_one_out(),
    mean_of_those_that_reached(),
    losses.leave_one_out_to_go(0.5),
  )
  for gradient in found:
    np.testing.assert_allclose(gradient, GRADIENT, rtol=1e-12)
  np.testing.assert_allclose(biased, (0.168, 0.0998), rtol=1e-3)
  # Of .3 (1 - p) + p (1 + q / 2) for the first choice.
  first = GO * (1 - GO) * (1 + 0.5 * GOOD - 0.3)
  np.testing.assert_allclose(discounted, (first, GRADIENT[1]), rtol=1e-12)


# Episodes of 3, 1, 2 and 2 turns; a tool wrote what stands between two turns.
TURNS = np.array(
  [
    [0, 0, 0, 1, 0, 2],
    [0, 0, 0, 0, 0, 0],
    [0, 0, 1, 1, 0, 0],
    [0, 0, 1, 0, 0, 0],
  ]
)
MASK = np.array(
  [
    [1, 0, 0, 1, 0, 1],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 1, 0, 0],
    [1, 0, 1, 0, 0, 0],
  ],
  bool,
)
EARNED = np.array([[0.25, 0.0, 0.5], [0.5, 0, 0], [0, 1, 0], [0.25, 0.25, 0]])
REWARD = np.array([1.75, 0.0, 1.0, 0.5])  # 1, -.5, 0, 0 more than that


def batch(reward=REWARD, earned=EARNED, dtype=jnp.float64, **fields):
  return losses.make_batch(
    MASK[None],
    jnp.asarray([reward], dtype),
    extras={
      'turn': jnp.asarray([TURNS]),
      'turn_reward': jnp.asarray([earned], dtype),
    },
    **fields,
  )


def by_turn(given, *transforms):
  """The advantages of each turn, [G,N]; NaN where an episode has none."""
  every = []
  for (advantage,) in advantages(given, *transforms):
    assert not advantage[~MASK].any()
    found = np.full((4, 3), np.nan)
    for g, t in np.argwhere(MASK):
      found[g, TURNS[g, t]] = advantage[g, t]
    every.append(found)
  return every


def test_a_group_by_hand():
  """Returns of the turns: those of the README."""
  there = np.arange(3) <= np.array([2, 0, 1, 1])[:, None]
  to_go = np.array([[1.75, 1.5, 1.5], [0, 0, 0], [1, 1, 0], [0.5, 0.25, 0]])
  halved = np.array(
    [[0.625, 0.75, 1.5], [0, 0, 0], [0.5, 1, 0], [0.375, 0.25, 0]]
  )
  centered, half = (
    np.where(there, x - x.mean(0), np.nan) for x in (to_go, halved)
  )
  expected = centered, 4 / 3 * centered, centered / to_go.std(0), half
  found = by_turn(
    batch(),
    losses.center_to_go_by_group(),
    losses.leave_one_out_to_go(),
    losses.normalize_to_go_by_group(),
    losses.center_to_go_by_group(0.5),
  )
  for advantage, wanted in zip(found, expected, strict=True):
    np.testing.assert_allclose(advantage, wanted, rtol=1e-12)


def test_what_is_no_reward_of_a_turn_belongs_to_the_last():
  """And what a transform does to the reward: it counts once, there."""
  plain = losses.center_to_go_by_group()
  late = losses.on_reward(
    lambda reward, batch: reward - jnp.array([[8.0, 4.0, 0.0, 0.0]])
  )
  moved = np.array([8.0, 4.0, 0, 0])[:, None]
  moved = moved * (np.arange(3) <= np.array([[2], [0], [1], [1]]))
  before, after = by_turn(batch(), plain, losses.chain(late, plain))
  there = ~np.isnan(before)
  expected = moved.mean(0) - moved
  np.testing.assert_allclose(
    (after - before)[there], expected[there], atol=1e-12
  )
  # Without a discount the first turn has all that the episode has.
  np.testing.assert_allclose(before[:, 0], REWARD - REWARD.mean(), rtol=1e-12)


def test_the_methods_are_what_loops_in_numpy_find():
  """By one program; the properties of each take long."""
  given = {
    'rloo_to_go': {'gamma': 0.5},
    'grpo_to_go': {'gamma': 0.5},
    'mt_grpo': {'coefficient': 0.5},
    'gigpo': {'coefficient': 2.0},
  }
  case = cases.make_case(2)
  chains = [getattr(methods, name)(**x) for name, x in given.items()]

  @jax.jit
  def slopes(batch, logp):
    def loss(method, logp):
      made, state = cases.prepared(method, batch)
      return losses.surrogate_loss(method, logp, made, state)[0]

    return [jax.grad(functools.partial(loss, one))(logp) for one in chains]

  found = slopes(cases.to_batch(case), jnp.asarray(case.logp))
  for (name, x), slope in zip(given.items(), found, strict=True):
    _, expected = oracles.METHODS[name](case, **x)
    np.testing.assert_allclose(slope, expected, rtol=1e-9, atol=1e-12)


OWN = (
  losses.leave_one_out_to_go(0.5),
  losses.center_to_go_by_group(),
  losses.normalize_to_go_by_group(0.9, 'sample', 0.01, True),
  losses.normalize_turns_and_outcome(3.0),
)
NEIGHBOURS = (
  losses.leave_one_out(),
  losses.center_by_group(),
  losses.normalize_by_group('sample', 0.01, True),
  losses.normalize_by_group(),
)


def single_turns(dtype):
  case = cases.make_case(3, prompts=5, group=7)
  case = case._replace(turn=None, valid=case.valid & (case.reward < 0.9))
  return cases.to_batch(case, dtype)


def test_without_turns_it_is_the_neighbour_bit_for_bit():
  found = advantages(single_turns(jnp.float32), *OWN, *NEIGHBOURS)
  for own, neighbour in zip(found[:4], found[4:], strict=True):
    np.testing.assert_array_equal(own, neighbour)
    assert np.any(own)


@pytest.mark.long
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64])
def test_what_an_environment_of_one_turn_gives_is_a_part_of_the_reward(dtype):
  given = single_turns(dtype)
  earned = {
    'turn': jnp.zeros(given.mask.shape, jnp.int32),
    'turn_reward': 0.5 * given.reward[..., None],
  }
  expected = advantages(given, *NEIGHBOURS)
  given = given._replace(extras=earned)
  for own, wanted in zip(advantages(given, *OWN), expected, strict=True):
    np.testing.assert_array_equal(own, wanted)


@functools.partial(jax.jit, static_argnums=1)
def weights(batch, means):
  """What each weight transform gives the tokens of a batch."""
  methods = [losses.chain(losses.use_reward(), mean) for mean in means]
  return [cases.prepared(method, batch)[0].weight for method in methods]


def test_without_turns_their_mean_is_that_of_completions():
  given = single_turns(jnp.float32)
  both = losses.mean_over_turns(), losses.mean_over_sequences()
  own, neighbour = weights(given, both)
  np.testing.assert_array_equal(own, neighbour)


@pytest.mark.long
def test_turns_share_the_weight_equally():
  ((weight,),) = weights(batch(), (losses.mean_over_turns(),))
  assert not weight[~MASK].any()
  for g, turn in {(g, TURNS[g, t]) for g, t in np.argwhere(MASK)}:
    own = weight[g][MASK[g] & (TURNS[g] == turn)]
    np.testing.assert_allclose(own, 1 / (8 * len(own)), rtol=1e-12)


@pytest.mark.parametrize(
  'credit',
  [
    pytest.param(losses.normalize_to_go_by_group(), id='to_go'),
    pytest.param(
      losses.normalize_turns_and_outcome(),
      id='outcome',
      marks=pytest.mark.long,
    ),
    pytest.param(
      losses.chain(
        losses.constant_advantage(0.0), losses.add_credit_by_state(gamma=1.0)
      ),
      id='states',
      marks=pytest.mark.long,
    ),
  ],
)
def test_returns_that_differ_by_rounding_are_equal(credit):
  """The last turns all earn .6; a z-score would be of order 1 there."""
  rng = np.random.default_rng(0)
  earned = rng.integers(0, 300, (8, 4, 3)) / 10
  earned[..., 2] = 0.1
  shape = 8, 4, 3
  states = np.broadcast_to(np.arange(3, dtype=np.int32), shape)
  made = losses.make_batch(
    np.ones(shape, bool),
    np.float32(earned.sum(-1) + 0.5),
    extras={
      'turn': states,
      'turn_reward': np.float32(earned),
      'turn_state': states,
    },
  )
  (advantage,) = advantages(made, credit)
  assert not np.any(advantage[..., 2]) and np.all(np.any(advantage, -1))


@pytest.mark.long
def test_states_are_compared_within_their_group_and_alone_count_nothing():
  states = jnp.asarray([[[7, 3, 5], [7, 0, 0], [7, 3, 0], [7, 4, 0]]])
  given = batch()
  given.extras['turn_state'] = states
  method = losses.chain(
    losses.constant_advantage(0.0),
    losses.add_credit_by_state(2.0, 1.0, normalizes=False),
  )
  (found,) = by_turn(given, method)
  first = 2 * (np.array([1.75, 0, 1, 0.5]) - 0.8125)
  np.testing.assert_allclose(found[:, 0], first, rtol=1e-12)
  np.testing.assert_allclose(found[[0, 2], 1], [0.5, -0.5], rtol=1e-12)
  assert found[0, 2] == found[3, 1] == 0  # alone
  # Two turns of one episode in one state are compared too.
  given.extras['turn_state'] = states.at[0, 3].set(9)
  (found,) = by_turn(given, method)
  np.testing.assert_allclose(found[3, :2], [0.25, -0.25], rtol=1e-12)


def test_a_turn_without_a_place_for_its_reward_is_not_passed_over():
  given = batch()
  given.extras['turn_reward'] = given.extras['turn_reward'][..., :2]
  (advantage,) = advantages(given, losses.leave_one_out_to_go())
  assert np.isnan(advantage[0, 0, 5])


def test_turns_without_rewards_are_asked_for_them():
  given = batch()
  del given.extras['turn_reward']
  method = losses.leave_one_out_to_go()
  with pytest.raises(ValueError, match="reads 'turn_reward', which was not"):
    losses.credit(method, given, method.init())


@pytest.mark.parametrize('gamma', [-0.1, 1.1, float('nan'), 'x', True])
@pytest.mark.parametrize(
  'make',
  [
    losses.leave_one_out_to_go,
    losses.center_to_go_by_group,
    losses.normalize_to_go_by_group,
    lambda gamma: losses.add_credit_by_state(gamma=gamma),
  ],
)
def test_a_discount_lies_between_0_and_1(make, gamma):
  with pytest.raises(ValueError, match='gamma='):
    make(gamma)


@pytest.mark.long
def test_a_discount_may_be_a_schedule():
  later = losses.center_to_go_by_group(lambda step: 0.5 * (step > 0))

  @jax.jit
  def twice(given):
    first, state = losses.credit(later, given, later.init())
    second, _ = losses.credit(later, given, state)
    return second.advantage - first.advantage

  assert np.abs(twice(batch())).max() > 0.1


def test_it_is_traced_from_fields_that_are_filled():
  method = methods.gigpo()
  plain = losses.make_batch(MASK[None], jnp.zeros((1, 4)))

  def run():
    filled = losses.check_batch(losses.with_required(method, plain))
    return cases.prepared(method, filled)[0]

  made = jax.eval_shape(run)
  assert made.extras['turn'].dtype == jnp.int32
  assert made.extras['turn_reward'].shape == (1, 4, 1)


@pytest.mark.long
def test_rows_of_another_framework_bring_their_turns():
  """As many turns as there are columns: they are no tokens even so."""
  order = [2, 0, 3, 1]
  earned = np.pad(EARNED, ((0, 0), (0, 5)))
  prompt = (0, 0), (2, 0)
  made, _ = losses.batch_from_rows(
    np.pad(MASK, prompt)[order],
    ['a'] * 4,
    REWARD[order],
    extras={
      'turn': np.pad(TURNS, prompt)[order],
      'turn_reward': earned[order],
    },
  )
  np.testing.assert_array_equal(made.mask[0], MASK[order])
  np.testing.assert_array_equal(made.extras['turn_reward'][0], earned[order])
  method = losses.center_to_go_by_group()
  (advantage,), (expected,) = advantages(made, method) + advantages(
    batch(), method
  )
  np.testing.assert_allclose(advantage, expected[order], rtol=1e-6)
