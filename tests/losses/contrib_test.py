"""The brakes of `contrib`, against closed forms in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.losses import contrib
from tests.losses import cases

RATIO = np.array([0.3, 0.79, 0.81, 0.93, 1.0, 1.09, 1.19, 1.21, 1.7, 4.0])
T = len(RATIO)


def measured(objective, ratio=RATIO, done=0):
  """(f, df/ds, metrics) for A of +2 and of -2, [2,T]."""
  ratio = jnp.broadcast_to(jnp.asarray(ratio, float), (1, 2, len(ratio)))
  batch = losses.make_batch(
    jnp.ones(ratio.shape, bool),
    jnp.array([[2.0, -2.0]]),
    logp_old=jnp.full(ratio.shape, -3.0),
    extras={
      'updates_done': jnp.broadcast_to(jnp.asarray(done, float), ratio.shape)
    },
  )
  method = losses.chain(
    losses.use_reward(), losses.mean_over_sequence_sums(), objective
  )
  batch, state = cases.prepared(method, batch)

  def total(logp):
    _, terms = losses.surrogate_loss(method, logp, batch, state)
    assert terms.objective is not None
    return jnp.sum(terms.objective), terms

  gradient, terms = jax.grad(total, has_aux=True)(jnp.log(ratio) - 3)
  metrics = {k: np.asarray(v)[0] for k, v in terms.metrics.items()}
  return (
    np.asarray(terms.objective)[0],
    np.asarray(gradient / ratio)[0],
    metrics,
  )


def test_rollback_has_the_opposite_slope_outside():
  low, high, slope = 0.2, 0.1, 0.4
  value, gradient, metrics = measured(contrib.rollback_clip(low, high, slope))
  up = RATIO > 1 + high
  positive = np.where(up, 1 + high - slope * (RATIO - 1 - high), RATIO)
  down = RATIO < 1 - low
  negative = np.where(down, 1 - low - slope * (RATIO - 1 + low), RATIO)
  np.testing.assert_allclose(value, [2 * positive, -2 * negative], rtol=1e-12)
  np.testing.assert_allclose(
    gradient,
    [2 * np.where(up, -slope, 1), -2 * np.where(down, -slope, 1)],
    rtol=1e-12,
  )
  np.testing.assert_array_equal(metrics['clipped_high'], [up, 0 * up])
  np.testing.assert_array_equal(metrics['clipped_low'], [0 * down, down])
  _, _, expected = measured(losses.ppo_clip(low, high))
  assert metrics.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(metrics[name], array)


def test_rollback_is_continuous_at_its_bounds():
  bounds = np.repeat([0.8, 1.2], 2)
  ratio = bounds * (1 + 1e-9 * np.array([-1, 1, -1, 1]))
  value, gradient, _ = measured(contrib.rollback_clip(0.2, 0.2, 5.0), ratio)
  np.testing.assert_allclose(value, 2 * np.array([bounds, -bounds]), rtol=1e-8)
  np.testing.assert_allclose(gradient, [[2, 2, 2, -10], [10, -2, -2, -2]])


def test_rollback_without_a_slope_is_the_clip():
  for one, other in zip(
    measured(contrib.rollback_clip(0.1, 0.3, 0))[:2],
    measured(losses.ppo_clip(0.1, 0.3))[:2],
    strict=True,
  ):
    np.testing.assert_array_equal(one, other)


LAWS = {
  'adam': (0.9, 0.999),
  'short': (0.9, 0.95),
  'growing': (0.9, 0.5),
  'even': (0.5, 0.25),  # rho is 1
  'none': (0.0, 0.999),
}


@pytest.mark.parametrize('law', LAWS)
def test_coasting_ends_at_the_range(law):
  """Whoever is clipped right at the bound coasts to 1 + high or 1 - low."""
  b1, b2 = LAWS[law]
  low, high, updates = 0.2, 0.3, 5
  for done in range(1, updates):
    coasts = sum((b1 / b2**0.5) ** n for n in range(1, updates - done + 1))
    factor = 1 + coasts / done
    ends = np.array([np.log(1 - low), np.log(1 + high)])
    bounds = np.repeat(np.exp(ends / factor), 2)
    ratio = bounds * (1 + 1e-9 * np.array([-1, 1, -1, 1]))
    value, gradient, metrics = measured(
      contrib.coasting_clip(low, high, updates, b1, b2), ratio, done
    )
    np.testing.assert_array_equal(
      gradient != 0, [[True, True, True, False], [False, True, True, True]]
    )
    np.testing.assert_allclose(
      value, 2 * np.array([bounds, -bounds]), rtol=1e-8
    )
    np.testing.assert_allclose(metrics['clip_high'], bounds[2] - 1, rtol=1e-12)
    np.testing.assert_array_equal(
      metrics['clipped_high'], [[0, 0, 0, 1], [0] * 4]
    )
    np.testing.assert_array_equal(
      metrics['clipped_low'], [[0] * 4, [1, 0, 0, 0]]
    )
    if law == 'even' and done == updates - 1:  # one more step like the last
      np.testing.assert_allclose(factor, 1 + 1 / 4)


@pytest.mark.parametrize('updates, done', [(8, 0), (1, 0), (1, np.nan), (3, 3)])
def test_coasting_is_the_clip_where_nothing_is_left_to_coast(updates, done):
  """Before the first update, with a single one, and after the last."""
  got = measured(contrib.coasting_clip(0.2, 0.3, updates), RATIO, done)
  want = measured(losses.ppo_clip(0.2, 0.3), RATIO)
  for one, other in zip(got[:2], want[:2], strict=True):
    np.testing.assert_array_equal(one, other)
  np.testing.assert_array_equal(got[2].pop('clip_high'), np.full((2, T), 0.3))
  assert got[2].keys() == want[2].keys()


def test_coasting_depends_on_the_token():
  _, gradient, metrics = measured(
    contrib.coasting_clip(updates=4), [1.16, 1.16, 1.16], [0.0, 1.0, 3.0]
  )
  np.testing.assert_array_equal(gradient[0] == 0, [False, True, True])
  assert np.all(np.diff(metrics['clip_high'][0][1:]) > 0)


@pytest.mark.parametrize(
  'one, defaults',
  [
    (contrib.rollback_clip, {'slope': 0.3}),
    (contrib.coasting_clip, {'b1': 0.9, 'b2': 0.999}),
    (contrib.rollback_grpo, {'slope': 0.3, 'kl_coefficient': 0.0}),
    (contrib.coasting_grpo, {'b1': 0.9, 'b2': 0.999, 'kl_coefficient': 0.0}),
  ],
)
def test_the_defaults_are_those_of_grpo_and_adam(one, defaults):
  """With one update by default, and no KL term."""
  defaults = {'low': 0.2, 'high': 0.2, **defaults}
  several = {'updates': 4} if 'b1' in defaults else {}
  made = [one(**several), one(**several, **defaults)]
  if several:
    made += [one(), one(updates=1)]
  plain = losses.normalize_by_group(), losses.mean_over_sequences()
  if 'clip' in one.__name__:
    made = [losses.chain(*plain, objective) for objective in made]
  case = cases.make_case(4, tokens=40)
  got = [cases.loss_and_gradient(method, case)[1] for method in made]
  for left, right in zip(got[::2], got[1::2], strict=True):
    np.testing.assert_array_equal(left, right)
  assert 'logp_ref' not in made[0].requires


def test_a_second_decay_of_one_is_heavy_ball_momentum():
  _, _, metrics = measured(contrib.coasting_clip(updates=2, b2=1.0), done=1)
  expected = 1.2 ** (1 / 1.9) - 1
  np.testing.assert_allclose(metrics['clip_high'], expected, rtol=1e-12)


def test_a_low_of_one_is_no_bound():
  _, gradient, _ = measured(
    contrib.coasting_clip(1.0, 0.2, 4), [1e-6, 0.5], done=2
  )
  np.testing.assert_allclose(gradient, [[2, 2], [-2, -2]], rtol=1e-12)


def test_the_methods_are_grpo_with_another_objective():
  case = cases.make_case(3)
  for kl in (0.0, 0.3):
    grpo = losses.methods.grpo(0.1, 0.3, kl)
    _, want = cases.loss_and_gradient(grpo, case)
    for method, same in (
      (contrib.rollback_grpo(0.1, 0.3, 0.0, kl), True),
      (contrib.rollback_grpo(0.1, 0.3, 0.5, kl), False),
      (contrib.coasting_grpo(0.1, 0.3, 1, kl_coefficient=kl), True),
      (contrib.coasting_grpo(0.1, 0.3, 4, kl_coefficient=kl), False),
      (contrib.coasting_grpo(0.1, 0.3, 4, 0.0, 0.9, kl), True),
    ):
      assert ('logp_ref' in method.requires) == (kl > 0)
      _, got = cases.loss_and_gradient(method, case)
      difference = np.abs(got - want).max()
      assert difference < 1e-12 if same else difference > 1e-3


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda: contrib.rollback_clip(low=-0.1), 'low=-0.1'),
    (lambda: contrib.rollback_clip(slope=-0.1), 'slope=-0.1'),
    (lambda: contrib.coasting_clip(high=-1), 'high=-1'),
    (lambda: contrib.coasting_clip(low=1.5), 'low=1.5'),
    (lambda: contrib.coasting_clip(updates=0), 'updates=0'),
    (lambda: contrib.coasting_clip(updates=2.5), 'updates=2.5'),
    (lambda: contrib.coasting_clip(b1=1.0), 'b1=1.0'),
    (lambda: contrib.coasting_clip(b2=0.0), 'b2=0.0'),
    (lambda: contrib.coasting_grpo(b2=1.1), 'b2=1.1'),
  ],
)
def test_what_is_no_range_is_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


def test_the_learner_is_asked_for_the_updates():
  method = contrib.coasting_grpo(updates=4)
  assert method.requires == {'updates_done'} and method.scope == 'row'
  batch = losses.make_batch(jnp.ones((1, 2, 3), bool), jnp.zeros((1, 2)))
  with pytest.raises(ValueError, match="'updates_done'"):
    losses.credit(method, batch, method.init())


def test_grpo_without_std_is_grpo_times_the_deviation():
  """Group by group: the advantage alone differs, by the standard deviation."""
  rng = np.random.default_rng(0)
  mask = np.arange(5) < rng.integers(1, 6, (3, 4))[..., None]
  reward = rng.normal(size=(3, 4)).astype(np.float32)
  logp = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
  batch = losses.make_batch(mask, reward)

  def advantage(method):
    return cases.credited(method, batch).advantage

  without = contrib.grpo_without_std(kl_coefficient=0.0)
  plain = advantage(losses.methods.grpo(kl_coefficient=0.0))
  scale = np.std(reward, axis=1)[:, None, None]
  np.testing.assert_allclose(advantage(without), plain * scale, rtol=1e-5)
  value, *_ = cases.terms_and_gradient(without, batch, logp)
  centered = (reward - reward.mean(1, keepdims=True))[..., None]
  expected = -np.mean(np.sum(centered * mask, -1) / np.maximum(mask.sum(-1), 1))
  np.testing.assert_allclose(value, expected, atol=1e-6)
