"""Schedules that are moved: the next update is that of their new place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import optim

PARAMS = {'w': jnp.array([1.0, -2.0])}
GRADS = {'w': jnp.array([0.5, 0.25])}
PLACE = 7


def rate(count):
  return 0.1 * (count + 1)


def of_place(made):
  """What the first update is where all schedules are constants."""
  tx = made(rate(PLACE))
  updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
  return updates


ADAMW = {
  'ours': lambda x: optim.adamw(x, weight_decay=0.5),
  'sgd': optax.sgd,
  'decay': lambda x: optax.chain(
    optax.add_decayed_weights(x), optax.scale_by_adam()
  ),
  'injected': lambda x: optax.inject_hyperparams(optax.adam)(learning_rate=x),
  'inside injected': lambda x: optax.inject_hyperparams(
    lambda b1: (
      optax.chain(optax.scale_by_adam(b1), optax.scale_by_schedule(x))
      if callable(x)
      else optax.chain(optax.scale_by_adam(b1), optax.scale(x))
    )
  )(b1=0.9),
  'masked': lambda x: optax.masked(optax.adam(x), {'w': True}),
  'parts': lambda x: optax.partition({'a': optax.adam(x)}, {'w': 'a'}),
  'recorded': lambda x: optim.record_adam_moments(
    optim.reset_moments(optax.adam(x))
  ),
}


@pytest.mark.parametrize('name', ADAMW)
def test_the_next_update_is_that_of_the_place(name):
  tx = ADAMW[name](rate)
  state = optim.set_schedules(tx.init(PARAMS), PLACE)
  more = {'first_of_rollout': False} if name == 'recorded' else {}
  updates, after = optax.with_extra_args_support(tx).update(
    GRADS, state, PARAMS, **more
  )
  expected = 0.8 * np.array(GRADS['w']) * -1
  if name == 'sgd':
    np.testing.assert_allclose(updates['w'], expected, rtol=1e-6)
  elif name != 'recorded':
    np.testing.assert_allclose(
      updates['w'], of_place(ADAMW[name])['w'], rtol=1e-6
    )
  else:
    size = -0.8 * np.sign(GRADS['w'])
    np.testing.assert_allclose(updates['w'], size, rtol=1e-5)
  # From there on it counts by itself.
  again = optim.set_schedules(after, PLACE + 1)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, after, again))


def test_moments_and_their_counts_stay():
  tx = optax.adam(rate)
  _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
  moved = optim.set_schedules(state, PLACE)
  assert moved[0] == state[0] and moved[0].count == 1
  assert moved[1].count == PLACE and state[1].count == 1
  assert moved[1].count.dtype == state[1].count.dtype


def test_steps_of_several_updates_count_by_themselves():
  tx = optax.MultiSteps(optax.adam(rate), 2)
  state = tx.init(PARAMS)
  moved = optim.set_schedules(state, PLACE)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, moved, state))
