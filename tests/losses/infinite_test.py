"""Probabilities of 0, rewards of any size: a bounded formula stays finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import methods
from tests.losses import cases

METHODS = {
  'grpo': methods.grpo(kl_coefficient=0),
  'dapo': methods.dapo(),
  'gspo': methods.gspo(),
  'cispo': methods.cispo(),
  'sapo': methods.sapo(),
  'gmpo': methods.gmpo(),
  'dppo_tv': methods.dppo_tv(),
  'truncated': losses.chain(
    losses.center_by_group(),
    losses.truncate_token_importance(2.0),
    losses.mean_over_tokens(),
    losses.importance_weighted(),
  ),
}
FIELDS = ('logp_old', 'logp_sampler')


def loss_and_slope(method, **impossible):
  """Of two completions of three tokens; some could not have been drawn."""
  logp = jnp.full((1, 2, 3), -1.0, jnp.float32)
  fields = {name: impossible.get(name, logp) for name in FIELDS}
  batch = losses.make_batch(
    logp < 0, jnp.array([[1.0, 0.0]], jnp.float32), **fields
  )
  batch, state = cases.prepared(method, batch)

  def loss(logp):
    return losses.surrogate_loss(method, logp, batch, state)

  logp = impossible.get('logp', logp)
  (value, terms), slope = jax.value_and_grad(loss, has_aux=True)(logp)
  return value, slope, terms, batch


@pytest.mark.parametrize(
  'completion', [pytest.param(0, marks=pytest.mark.long), 1]
)
@pytest.mark.parametrize('field', ['logp', *FIELDS])
@pytest.mark.parametrize('name', METHODS)
def test_a_token_of_probability_zero(name, field, completion):
  given = np.full((1, 2, 3), -1.0, np.float32)
  given[0, completion, 1] = -np.inf
  value, slope, terms, batch = loss_and_slope(
    METHODS[name], **{field: jnp.asarray(given)}
  )
  assert np.isfinite(value) and np.all(np.isfinite(slope))
  # A ratio that is too large is counted. One of 0 is the policy's own.
  if field == 'logp_old':
    counted = [
      np.any(terms.metrics[metric][0, completion])
      for metric in ('saturated', 'clipped_high', 'outside_high', 'gated')
      if metric in terms.metrics
    ]
    assert any(counted)
  if field == 'logp_sampler' and name == 'truncated':
    marked = batch.extras[losses.CREDIT_METRIC + 'importance_truncated']
    assert marked.tolist() == [
      [[i == completion and t == 1 for t in range(3)] for i in range(2)]
    ]


@pytest.mark.parametrize('size', [1e-30, 1e-19, 1.0, 1e20, 3e38])
@pytest.mark.parametrize('deviation', ['population', 'sample'])
def test_the_z_score_does_not_depend_on_the_size_of_rewards(size, deviation):
  method = losses.normalize_by_group(deviation, epsilon=0)
  reward = jnp.array([[1.0, 0.0, 0.0, 0.5]], jnp.float32)
  of = lambda reward: (
    losses.credit(
      method,
      losses.make_batch(jnp.ones((1, 4, 1), bool), reward),
      method.init(),
    )[0].advantage
  )
  np.testing.assert_allclose(
    of(jnp.float32(size) * reward), of(reward), rtol=1e-5
  )
  assert np.all(np.abs(of(reward)) > 0.1)


@pytest.mark.parametrize(
  'reward, equal',
  [
    ([1e6, 1e6 + 0.0625, 1e6 + 0.125, 1e6], True),
    ([1e6, 1e6 + 1, 1e6 + 2, 1e6], False),
    ([0.0, 0, 0, 1e-30], False),
    ([3e38, 3e38, 3e38, -3e38], False),
    ([0.1 + 0.2, 0.3, 0.3, 0.3], True),
  ],
)
def test_a_group_is_dropped_if_and_only_if_it_has_no_z_score(reward, equal):
  batch = losses.make_batch(
    jnp.ones((1, 4, 1), bool), jnp.array([reward], jnp.float32)
  )
  method = losses.chain(
    losses.normalize_by_group(), losses.drop_uniform_groups()
  )
  made, _ = losses.credit(method, batch, method.init())
  assert np.all(np.isfinite(made.advantage))
  assert np.any(made.advantage) == np.any(made.keep) == (not equal)
  assert losses.uniform_groups(batch).tolist() == [equal]


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[pytest.mark.long] * (number % 2))
    for number, name in enumerate(methods.__all__)
  ],
)
def test_rounding_errors_are_no_advantage(name):
  """Rewards that differ by one unit in the last place, and equal ones."""
  entry = next(e for e in cases.METHODS if e.name.split('-')[0] == name)
  # In the shapes of `evaluated`, whose operations are compiled anyway.
  shape = 3, 4, 4, 6
  same, zeros = np.full(shape, -1.0, np.float32), np.zeros(shape, np.float32)
  reward = np.ones(shape[:3], np.float32)  # those of the first are equal
  reward[1:, 0, 0] = np.nextafter(np.float32(1), np.float32(2))
  reward[1:, 1, 2] = np.nextafter(np.float32(1), np.float32(2))
  reward[2, 2, 1] = np.nextafter(np.float32(1), np.float32(0))
  batch = losses.make_batch(
    same < 0,
    reward,
    tokens=np.broadcast_to(np.arange(96).reshape(shape[1:]), shape),
    reward_parts=np.stack([reward, reward], axis=-1),
    entropy_old=-same,
    logp_old=same,
    logp_ref=same,
    logp_sampler=same,
    extras={
      'updates_done': zeros,
      'noise': zeros,
      'logp_teacher': same,
      'teacher_top_logp': np.full((*shape, 16), -4.0, np.float32),
    },
  )
  method = entry.make()
  advantage = jax.vmap(
    lambda batch: cases.prepared(method, batch)[0].advantage
  )(jax.tree.map(jnp.asarray, batch))
  for rounded in advantage[1:]:
    np.testing.assert_allclose(rounded, advantage[0], atol=1e-6)
