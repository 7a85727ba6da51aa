"""What a completion is credited with, and what is trained: closed forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases
from tests.losses import one_token

BASELINES = {
  'batch': (losses.center_by_batch(),),
  'length': (losses.center_by_length(),),
  'group mean': (losses.divide_by_group_mean(),),
  'batch deviation': (
    losses.center_by_group(),
    losses.divide_by_batch_deviation(),
  ),
  'deviation within groups': (
    losses.center_by_group(),
    losses.divide_by_batch_deviation(within_groups=True),
  ),
  'group deviation': (
    losses.use_reward(),
    losses.divide_by_group_deviation(),
  ),
  'completions': (losses.use_reward(), losses.normalize_over_completions()),
  'tokens': (losses.use_reward(), losses.normalize_over_tokens()),
  'each': (losses.normalize_each_reward(),),
  'each, then all': (
    losses.normalize_each_reward(),
    losses.normalize_over_completions(),
  ),
  'entropy of completions': (losses.credit_completions_by_entropy(),),
  'best minus second': (losses.best_minus_second(),),
  'pass at k': (losses.credit_pass_at_k(2),),
}


def credited(links, reward, valid=None, length=None, tokens=2, **fields):
  """The batch after `credit`; full completions unless told."""
  reward = jnp.asarray(reward)
  shape = *reward.shape, tokens
  length = np.full(reward.shape, tokens) if length is None else np.array(length)
  batch = losses.make_batch(
    np.arange(tokens) < length[:, :, None],
    reward,
    valid=jnp.ones(reward.shape, bool) if valid is None else jnp.array(valid),
    entropy_old=jnp.full(shape, 0.3, reward.dtype),
    **fields,
  )
  method = losses.chain(*links)
  return losses.credit(method, batch, method.init())[0]


def advantages(links, reward, **fields):
  """One number per completion."""
  return np.asarray(credited(links, reward, **fields).advantage)[:, :, 0]


@pytest.mark.parametrize('name', BASELINES)
def test_equal_rewards_of_a_rollout_give_exactly_zero(name):
  """In float32; dividing a mean's rounding error by itself gives up to 1."""
  for number in (0.1, 1 / 3, 1e6 + 0.1):
    value = advantages(
      BASELINES[name],
      np.full((2, 64), number, np.float32),
      valid=np.arange(64) < [[63], [7]],
    )
    assert not np.any(value), number


def test_equal_rewards_of_any_length_give_exactly_zero():
  """The mean of 3 times 0.1 is not 0.1."""
  for name in ('completions', 'tokens', 'length'):
    value = advantages(
      BASELINES[name], np.full((1, 7), 0.1), length=[range(1, 8)], tokens=7
    )
    assert not np.any(value), name


@pytest.mark.parametrize(
  'links, expected',
  [
    ((losses.center_by_batch(),), [[-2, 0], [2, 0]]),
    ((losses.center_by_group(),), [[-1, 1], [0, 0]]),
    ((losses.best_minus_second(),), [[0, 2], [0, 0]]),
    ((losses.divide_by_group_mean(),), [[-0.5, 0.5], [0, 0]]),
    ((losses.center_by_length(),), [[-0.5, 1.5], [0, 0]]),
  ],
  ids=['batch', 'group', 'best', 'mean', 'length'],
)
def test_closed_forms(links, expected):
  """The fourth completion is not valid; lengths 3, 1, 2, 2."""
  value = advantages(
    links,
    [[1.0, 3.0], [5.0, 99.0]],
    valid=[[True, True], [True, False]],
    length=[[3, 1], [2, 2]],
    tokens=3,
  )
  np.testing.assert_allclose(value, expected, atol=1e-12)


def test_the_best_leads_by_its_distance_to_the_second():
  """A tie has no lead; an invalid one is no rival; alone, there is none."""
  value = advantages(
    (losses.best_minus_second(),),
    [[-5.0, -2.0, -3.0], [1.0, 4.0, 4.0], [1.0, 2.0, 9.0], [7.0, 8.0, 9.0]],
    valid=[[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]],
  )
  np.testing.assert_array_equal(
    value, [[0, 1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]]
  )


def test_edits_of_the_reward_add_up_for_who_reads_the_parts():
  links = (
    losses.on_reward(lambda reward, batch: reward + 2),
    losses.on_reward(lambda reward, batch: 3 * reward),
    losses.use_reward(),
  )
  batch = credited(links, [[0.0, 5.0]])
  np.testing.assert_allclose(batch.reward, [[6, 21]])
  np.testing.assert_allclose(batch.extras['reward_edit'], [[6, 16]])


def test_an_advantage_on_the_threshold_passes_the_gate():
  """What is gated stays in the denominator."""
  batch = credited((losses.use_reward(),), [[1.0, -1.0, 0.99, -5.0]], tokens=1)
  method = losses.chain(
    losses.mean_over_tokens(), losses.gate_small_advantages()
  )
  batch = losses.prepare(method, batch, method.init())
  np.testing.assert_allclose(batch.weight[0, :, 0], [0.25, 0.25, 0, 0.25])


def test_a_gate_that_spares_the_penalty_acts_on_the_objective_alone():
  links = (
    losses.score_function(),
    losses.add_kl(0.5, 'k2'),
    losses.gate_small_advantages(spare_penalty=True),
  )
  now, ref = np.array([-1.0] * 3), jnp.full((1, 3, 1), -3.0)
  terms, gradient = one_token.run(
    links, now, now, [1.0, -0.99, -5.0], logp_ref=ref
  )
  np.testing.assert_allclose(gradient, [-1 + 1, 1, 5 + 1])
  gated = terms.metrics['gated'][0, :, 0]
  np.testing.assert_array_equal(gated, [False, True, False])


def test_a_pruning_rate_leaves_no_penalty_to_spare():
  with pytest.raises(ValueError, match='give one of the two'):
    losses.methods.cppo(pruning_rate=0.5, spare_penalty=True)


@pytest.mark.parametrize(
  'links',
  [
    lambda how: (losses.normalize_by_group(**how),),
    lambda how: (losses.normalize_each_reward(**how),),
    lambda how: (losses.use_reward(), losses.normalize_over_tokens(**how)),
    lambda how: (losses.use_reward(), losses.normalize_over_completions(**how)),
    lambda how: (
      losses.center_by_group(), losses.divide_by_batch_deviation(**how),
    ),
    lambda how: (
      losses.center_by_group(), losses.divide_by_group_deviation(**how),
    ),
  ],
)  # fmt: skip
def test_epsilon_is_added_to_the_deviation_or_under_the_root(links):
  """A deviation of 3: 3 + 16 is 19, and the root of 9 + 16 is 5."""
  reward = [[1.0, 7.0], [7.0, 1.0]]
  value = advantages(links(dict(epsilon=16.0)), reward)
  np.testing.assert_allclose(value, [[-3 / 19, 3 / 19], [3 / 19, -3 / 19]])
  value = advantages(links(dict(epsilon=16.0, under_root=True)), reward)
  np.testing.assert_allclose(value, [[-0.6, 0.6], [0.6, -0.6]])
  none = advantages(links(dict(under_root=True)), reward)
  np.testing.assert_allclose(none, [[-1, 1], [1, -1]])


def test_the_deviation_of_the_group_divides_what_is_not_centered():
  """The third is not valid; the second group has equal rewards."""
  value = advantages(
    (losses.use_reward(), losses.divide_by_group_deviation(epsilon=2.0)),
    [[1.0, 5.0, 99.0], [3.0, 3.0, 3.0]],
    valid=[[True, True, False], [True, True, True]],
  )
  np.testing.assert_allclose(value, [[1 / 4, 5 / 4, 0], [0, 0, 0]])


def test_the_advantage_is_clipped_on_both_sides():
  clip = losses.clip_advantage
  for links, expected in (
    ((clip(-0.5, 0.7),), [-0.5, 0.2, 0.7]),
    ((clip(minimum=0.0),), [0, 0.2, 2]),
    ((clip(maximum=1.0),), [-2, 0.2, 1]),
    ((clip(),), [-2, 0.2, 2]),
  ):
    value = advantages((losses.use_reward(), *links), [[-2.0, 0.2, 2.0]])
    np.testing.assert_allclose(value[0], expected)


def test_truncated_completions_are_dropped_but_count_in_their_group():
  """A peer reshapes what is left: groups out of step (row 6)."""
  reward, truncated = [[0.0, 1.0, 5.0]], jnp.array([[False, False, True]])
  links = losses.drop_truncated(), losses.center_by_group()
  batch = credited(links, reward, truncated=truncated)
  np.testing.assert_allclose(batch.advantage[0, :, 0], [-2, -1, 3])
  np.testing.assert_array_equal(batch.keep[0], [[1, 1], [1, 1], [0, 0]])
  weight = losses.mean_over_tokens()
  batch = losses.prepare(weight, batch, weight.init())
  np.testing.assert_allclose(batch.weight[0, :, 0], [0.25, 0.25, 0])


@pytest.mark.parametrize(
  'links, words',
  [
    (
      (losses.keep_largest_advantages(), losses.center_by_group()),
      "keep_largest_advantages edits 'keep', but no earlier transform of the "
      "chain sets 'advantage'",
    ),
    (
      (losses.clip_advantage(), losses.center_by_group()),
      "clip_advantage edits 'advantage', but no earlier",
    ),
    (
      (losses.use_reward(), losses.subtract_kl(0.1)),
      "subtract_kl writes 'reward', but an earlier",
    ),
    (
      (losses.center_by_group(), losses.gate_small_advantages()),
      "gate_small_advantages edits 'weight', but no earlier",
    ),
    (
      (losses.use_reward(), losses.mean_over_tokens(), losses.drop_truncated()),
      'drop_truncated drops tokens, but an earlier',
    ),
  ],
  ids=[
    'keep_largest',
    'clip_advantage',
    'subtract_kl',
    'small',
    'drop',
  ],
)
def test_the_order_is_checked(links, words):
  case = cases.make_case()
  with pytest.raises(ValueError, match=words):
    cases.prepared(losses.chain(*links), cases.to_batch(case))


def test_the_z_score_over_tokens_counts_a_completion_once_per_token():
  """Values 0 and 6, with 2 tokens and 1: mean 2, deviation sqrt(8)."""
  links = losses.use_reward(), losses.normalize_over_tokens()
  value = credited(links, [[0.0, 6.0]], length=[[2, 1]]).advantage
  root = np.sqrt(8)
  np.testing.assert_allclose(value[0], [[-2 / root] * 2, [4 / root, 0]])
  links = losses.use_reward(), losses.normalize_over_completions()
  value = credited(links, [[0.0, 6.0]], length=[[2, 1]]).advantage
  np.testing.assert_allclose(value[0], [[-1, -1], [1, 0]])


@pytest.mark.parametrize(
  'make',
  [
    losses.normalize_over_tokens,
    losses.normalize_over_completions,
    losses.divide_by_batch_deviation,
  ],
)
def test_the_kind_of_deviation_and_epsilon(make):
  """Of 0 and 2: 1 divided by n, sqrt(2) by n - 1."""
  links = losses.center_by_group(), make()
  np.testing.assert_allclose(
    advantages(links, [[0.0, 2.0]], tokens=1), [[-1, 1]]
  )
  links = losses.center_by_group(), make('sample', 1.0)
  expected = 1 / (1 + np.sqrt(2))
  np.testing.assert_allclose(
    advantages(links, [[0.0, 2.0]], tokens=1), [[-expected, expected]]
  )


@pytest.mark.parametrize(
  'make',
  [
    losses.normalize_over_tokens,
    losses.normalize_over_completions,
    losses.divide_by_batch_deviation,
    losses.normalize_each_reward,
    losses.credit_tokens_by_entropy,
    losses.credit_completions_by_entropy,
  ],
)
def test_an_unknown_deviation_is_refused_by_name(make):
  with pytest.raises(ValueError, match=f"{make.__name__} got deviation='both'"):
    make(deviation='both')


def test_prompts_count_the_same_however_few_tokens_they_keep():
  """Three tokens, one, none: two prompts."""
  length = [[2, 1], [1, 0], [0, 0]]
  batch = credited((losses.use_reward(),), np.ones((3, 2)), length=length)
  weight = losses.mean_over_prompts()
  batch = losses.prepare(weight, batch, weight.init())
  np.testing.assert_allclose(
    batch.weight * 6, [[[1, 1], [1, 0]], [[3, 0], [0, 0]], [[0, 0]] * 2]
  )


def test_the_deviation_within_groups_leaves_out_how_prompts_differ():
  reward = [[0.0, 2.0], [10.0, 12.0]]
  center = losses.center_by_group()
  within = losses.divide_by_batch_deviation(within_groups=True)
  np.testing.assert_allclose(
    advantages((center, within), reward), [[-1, 1]] * 2
  )
  overall = losses.divide_by_batch_deviation()
  spread = np.std(reward)
  np.testing.assert_allclose(
    advantages((center, overall), reward), [[-1 / spread, 1 / spread]] * 2
  )


def test_a_wrong_number_of_reward_weights_is_refused():
  links = (losses.normalize_each_reward((1.0, 2.0)),)
  with pytest.raises(ValueError, match='got 2 weights, but there are 1'):
    credited(links, [[0.0, 1.0]])


@pytest.mark.long
@pytest.mark.parametrize('scale', [1.0, 1e6, 1e-6])
def test_rewards_that_cancel_leave_no_advantage(scale):
  """Z-scores of opposite rewards: rounding errors, which are of their size.

  The errors of a score near 0 are those of the group's largest.
  """
  part = np.random.default_rng(0).random((60, 8))
  each = losses.normalize_each_reward((scale, scale))
  for groups in (part, part.reshape(1, 480)):
    parts = jnp.asarray(np.stack([3.7 * groups, -groups], axis=-1))
    assert not np.any(advantages((each,), groups, reward_parts=parts))
  parts = jnp.asarray(np.stack([part, -part + 1e-9 * part**2], axis=-1))
  some = advantages((each,), part, reward_parts=parts)
  assert np.all(np.any(some, axis=1))  # not so what is more than rounding


def test_an_unknown_way_to_pool_is_refused():
  with pytest.raises(ValueError, match="got gradient='mean'; give 'sequence'"):
    losses.pool_log_ratio('mean')
