"""Schedules that are moved: the next update is that of their new place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
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


def own(state):
  """A user's schedule, whose state is no named tuple."""
  return optax.GradientTransformation(
    lambda params: state, lambda updates, state, params=None: (updates, state)
  )


NOISE = optax.add_noise(0.1, 0.55, 0)
DESCENT = optax.sgd(0.05)


@pytest.mark.parametrize(
  ('made', 'moved', 'stay'),
  [
    (NOISE, {'count': PLACE}, 0),
    (own({'count': jnp.array(0)}), {'count': PLACE}, 0),
    # Steps of what is inside are not those of the run.
    (
      optax.conditionally_transform(optax.adam(rate), lambda step: step < 9),
      {'step': PLACE},
      2,
    ),
    (
      optax.conditionally_mask(optax.adam(rate), lambda step: step < 9),
      {'step': PLACE},
      2,
    ),
    (optax.contrib.sam(optax.adam(rate), DESCENT), {}, 2),
    (
      optax.contrib.schedule_free(optax.adam(rate), rate),
      {'step_count': PLACE + 1, 'count': PLACE},
      1,
    ),
    # It corrects its bias by the same count.
    (optax.contrib.prodigy(rate), {}, 1),
    (
      optax.inject_hyperparams(optax.contrib.prodigy)(rate),
      {'count': PLACE},
      1,
    ),
  ],
)
def test_counts_move_with_the_run_or_stay_by_what_they_count(made, moved, stay):
  state = optim.set_schedules(made.init(PARAMS), PLACE)
  named = [
    (str(getattr(path[-1], 'name', getattr(path[-1], 'key', ''))), int(leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if leaf.dtype == jnp.int32
  ]
  counts = [
    pair for pair in named if pair[0] in ('count', 'step', 'step_count')
  ]
  assert {name: n for name, n in counts if n} == moved
  assert sum(n == 0 for _, n in counts) == stay


def test_a_parameter_may_be_called_count():
  tx = optax.adam(0.1)
  state = tx.init({'count': jnp.ones(2)})
  moved = optim.set_schedules(state, PLACE)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, moved, state))


def test_steps_of_several_updates_count_by_themselves():
  tx = optax.MultiSteps(optax.adam(rate), 2)
  state = tx.init(PARAMS)
  moved = optim.set_schedules(state, PLACE)
  assert jax.tree.all(jax.tree.map(jnp.array_equal, moved, state))
