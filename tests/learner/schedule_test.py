"""The learning rate is that of an update's number, whatever was skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.learner import metrics
from tests import bigram
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import learned
from tests.learning import make_updater
from tests.learning import spec

PEAK, ROLLOUTS, BATCHES = 0.25, 6, 2


def test_a_decay_ends_with_the_run_though_updates_are_skipped():
  total = ROLLOUTS * BATCHES
  schedule = optim.learning_rate(PEAK, 2, 'linear', total)
  # Each entry moves by exactly the learning rate.
  tx = optax.chain(
    optax.scale_by_sign(), optax.scale_by_learning_rate(schedule)
  )
  learner = bigram_learner(losses.methods.grpo(), tx, learning_rate=schedule)
  updater = make_updater(
    learner, bigram.params(), spec('padded', 16), batches=BATCHES
  )
  state = updater.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
  silent = np.zeros((4, 4))
  moved, rates = [], []
  for step in range(ROLLOUTS):
    before = jax.device_get(state.params)
    rollout = bigram_rollout(step, reward=silent if step in (0, 2, 3) else None)
    state, measured = learned(updater, state, rollout, step)
    change = jax.tree.map(
      lambda x, y: np.abs(x - y).max(), before, jax.device_get(state.params)
    )
    moved.append(max(jax.tree.leaves(change)))
    rates.append(metrics.to_scalars(measured))
  assert int(state.idle) == 3 * BATCHES
  # By hand: up over two updates, then down over the other ten.
  by_hand = PEAK * np.array([0, 0.5, *np.arange(10, 0, -1) / 10])
  by_hand = by_hand.reshape(ROLLOUTS, BATCHES)
  for step, (rate, pair) in enumerate(zip(rates, by_hand, strict=True)):
    np.testing.assert_allclose(rate['learning_rate'], pair.mean(), rtol=1e-6)
    np.testing.assert_allclose(rate['learning_rate_max'], pair.max(), rtol=1e-6)
    np.testing.assert_allclose(rate['learning_rate_min'], pair.min(), rtol=1e-6)
    if step in (0, 2, 3):
      assert moved[step] == 0
    else:  # both ways are taken by some entry
      np.testing.assert_allclose(moved[step], pair.sum(), rtol=1e-5)


def test_adam_corrects_its_bias_by_the_updates_it_took():
  schedule = optim.learning_rate(PEAK, 0, 'linear', 8)
  learner = bigram_learner(
    losses.methods.grpo(), optim.adamw(schedule), learning_rate=schedule
  )
  updater = make_updater(learner, bigram.params(), spec('padded', 16))
  state = updater.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
  silent = bigram_rollout(reward=np.zeros((4, 4)))
  for step in range(3):
    state, _ = learned(updater, state, silent, step)
  state, _ = learned(updater, state, bigram_rollout(), 3)
  adam = optax.tree.get_all_with_path(state.opt_state, 'count')
  assert sorted(int(count) for _, count in adam) == [1, 4]
