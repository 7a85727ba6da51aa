"""Brakes: each does what its formula says, and nothing when not needed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import optim
from tests.optim.moments_test import PARAMS
from tests.optim.moments_test import gradients

LR, B1, B2, EPSILON = 0.01, 0.9, 0.95, 1e-3


def adam():
  return optax.adam(LR, B1, B2, EPSILON)


def after(transformation, number=3, **extra):
  """The state after some steps."""
  state = transformation.init(PARAMS)
  update = jax.jit(transformation.update)
  for grads in gradients(number):
    _, state = update(grads, state, PARAMS, **extra)
  return state


def moments(state):
  return next(
    node
    for node in jax.tree.leaves(
      state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
    )
    if isinstance(node, optax.ScaleByAdamState)
  )


def assert_close(actual, expected, rtol=1e-6):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-9),
    actual,
    expected,
  )


@pytest.mark.parametrize('which', ['both', 'first'])
def test_reset_forgets_at_the_first_update_only(which):
  made = optim.reset_moments(adam(), which)
  grads, state = gradients()[-1], after(made, first_of_rollout=False)
  assert_close(moments(state), moments(after(adam())))
  update = jax.jit(made.update)
  later, _ = update(grads, state, PARAMS, first_of_rollout=False)
  plain, _ = adam().update(grads, state, PARAMS)
  assert_close(later, plain)
  first, new = update(grads, state, PARAMS, first_of_rollout=True)
  old = moments(state)
  if which == 'both':
    fresh, expected = adam().update(grads, adam().init(PARAMS), PARAMS)
    assert_close(first, fresh)
    assert_close(moments(new), moments(expected))
  else:
    assert moments(new).count == 4
    expected = jax.tree.map(
      lambda v, g: -LR * (1 - B1) * g / (1 - B1**4)
      / (jnp.sqrt((B2 * v + (1 - B2) * g**2) / (1 - B2**4)) + EPSILON),
      old.nu, grads,
    )  # fmt: skip
    assert_close(first, expected, 1e-4)
    assert_close(moments(new).mu, jax.tree.map(lambda g: (1 - B1) * g, grads))


def test_decay_shrinks_what_is_carried_by_the_clipped_share():
  made = optim.decay_carried(adam())
  state = after(made, clipped_share=0.0)
  assert_close(moments(state), moments(after(adam())))
  grads = gradients()[-1]
  _, new = jax.jit(made.update)(grads, state, PARAMS, clipped_share=0.25)
  expected = jax.tree.map(
    lambda m, g: B1 * 0.75 * m + (1 - B1) * g, moments(state).mu, grads
  )
  assert_close(moments(new).mu, expected)
  plain, _ = adam().update(grads, state, PARAMS)
  braked, _ = made.update(grads, state, PARAMS, clipped_share=1.0)
  fresh = optim.split_update(
    adam(), state, adam().update(grads, state, PARAMS)[1], plain, PARAMS
  ).fresh
  assert_close(braked, fresh, 1e-3)


def projected(outward):
  made = optim.project_outward(adam(), EPSILON)
  grads, state = gradients()[-1], after(adam())
  plain, wanted = adam().update(grads, state, PARAMS)
  braked, new = jax.jit(made.update)(grads, state, PARAMS, outward=outward)
  assert_close(moments(new), moments(wanted))
  return plain, braked, moments(new)


def test_projection_is_the_nearest_step_that_does_not_go_outward():
  outward = gradients(seed=7)[0]
  plain, _, _ = projected(outward)
  if optax.tree.vdot(outward, plain) < 0:
    outward = jax.tree.map(jnp.negative, outward)
  plain, braked, adams = projected(outward)
  assert optax.tree.vdot(outward, plain) > 1e-3
  np.testing.assert_allclose(optax.tree.vdot(outward, braked), 0, atol=1e-7)
  # The correction is D o, where D is what Adam multiplies a gradient by.
  root = lambda v: np.sqrt(np.asarray(v) / (1 - B2**4)) + EPSILON
  factors = [
    (p - b) * root(v) / o
    for p, b, v, o in zip(
      *map(jax.tree.leaves, (plain, braked, adams.nu, outward)), strict=True
    )
  ]
  factors = np.concatenate([np.ravel(x) for x in factors])
  np.testing.assert_allclose(factors, factors[0], rtol=2e-3)
  assert factors[0] > 0


def test_projection_leaves_a_step_that_goes_inward():
  outward = gradients(seed=7)[0]
  plain, _, _ = projected(outward)
  if optax.tree.vdot(outward, plain) > 0:
    outward = jax.tree.map(jnp.negative, outward)
  plain, braked, _ = projected(outward)
  assert_close(braked, plain)
  nothing = jax.tree.map(jnp.zeros_like, outward)
  plain, braked, _ = projected(nothing)
  assert_close(braked, plain)


def test_projection_corrects_only_what_adam_owns():
  parts = {'x': adam(), 'y': optax.sgd(1.0)}
  made = optax.partition(parts, {'a': 'x', 'b': 'y'})
  made = optim.project_outward(made, EPSILON)
  grads = gradients()[0]
  outward = jax.tree.map(jnp.negative, grads)  # both steps go outward
  braked, _ = made.update(grads, made.init(PARAMS), PARAMS, outward=outward)
  np.testing.assert_array_equal(braked['b'], -grads['b'])
  total = optax.tree.vdot(outward, braked)
  np.testing.assert_allclose(total, 0, atol=1e-5)


def test_reward_scale_acts_again():
  """Ten times the advantages: ten times the gradient and the step."""
  made = optim.restore_reward_scale(optax.adam(LR, eps=0.0), reference=2.0)
  plain = optax.adam(LR, eps=0.0)
  results = {}
  for scale in (1.0, 8.0):
    state = made.init(PARAMS)
    for grads in gradients(4):
      grads = jax.tree.map(lambda g: g * scale, grads)  # noqa: B023
      updates, state = jax.jit(made.update)(
        grads, state, PARAMS, advantage_scale=2.0 * scale
      )
    results[scale] = updates
  expected, _ = plain.update(gradients(4)[-1], after(plain, 3), PARAMS)
  assert_close(results[1.0], expected, 1e-5)
  assert_close(results[8.0], jax.tree.map(lambda u: 8 * u, results[1.0]))


BRAKES = {
  'reset_moments': (optim.reset_moments, 'first_of_rollout'),
  'decay_carried': (optim.decay_carried, 'clipped_share'),
  'project_outward': (optim.project_outward, 'outward'),
  'restore_reward_scale': (optim.restore_reward_scale, 'advantage_scale'),
}


@pytest.mark.parametrize('name', BRAKES)
def test_what_is_missing_is_said(name):
  make, needs = BRAKES[name]
  made = make(adam())
  with pytest.raises(ValueError, match=f'{name} needs the extra .*{needs}=...'):
    made.update(gradients()[0], made.init(PARAMS), PARAMS)
  if name != 'restore_reward_scale':
    with pytest.raises(ValueError, match=f'{name} got .* no moments of Adam'):
      make(optax.sgd(0.1)).init(PARAMS)


def test_arguments_out_of_range():
  with pytest.raises(ValueError, match="give 'both' or 'first'"):
    optim.reset_moments(adam(), 'second')
  with pytest.raises(ValueError, match='reference=0'):
    optim.restore_reward_scale(adam(), 0)


def test_brakes_nest_and_pass_on_what_the_inner_ones_need():
  made = adam()
  for make, _ in BRAKES.values():
    made = make(made)
  made = optim.record_adam_moments(made, EPSILON)
  extra = {
    'first_of_rollout': jnp.array(False),
    'clipped_share': jnp.array(0.1),
    'advantage_scale': jnp.array(1.0),
    'outward': gradients(seed=3)[0],
  }
  state = after(made, **extra)
  found = optim.moment_metrics(state)
  assert found['adam_carried_norm'] > 0
  assert jax.tree.structure(state.inner_state) == jax.tree.structure(
    adam().init(PARAMS)
  )


def test_nothing_happens_while_gradients_accumulate():
  """Nor where a gradient is not finite."""
  two = lambda: optax.MultiSteps(adam(), 2).gradient_transformation()
  made = optim.project_outward(two(), EPSILON)
  grads = gradients()[0]
  updates, _ = made.update(grads, made.init(PARAMS), PARAMS, outward=grads)
  assert_close(updates, jax.tree.map(jnp.zeros_like, grads))
  made = optim.decay_carried(two())
  state = made.init(PARAMS)
  for share in (0.0, 0.0, 0.5, 0.5):
    old = moments(state)
    _, state = made.update(grads, state, PARAMS, clipped_share=share)
  # Shrunk once, by the call that took the step.
  expected = jax.tree.map(
    lambda m, g: B1 * 0.5 * m + (1 - B1) * g, old.mu, grads
  )
  assert_close(moments(state).mu, expected, 1e-5)


def test_projection_keeps_the_dtype_of_the_update():
  half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
  params, grads = half(PARAMS), half(gradients()[0])
  outward = jax.tree.map(jnp.negative, grads)
  made = optim.project_outward(adam(), EPSILON)
  plain, _ = adam().update(grads, adam().init(params), params)
  braked, _ = made.update(grads, made.init(params), params, outward=outward)
  assert {x.dtype for x in jax.tree.leaves(braked)} == {jnp.dtype('bfloat16')}
  before, after = (optax.tree.vdot(outward, x) for x in (plain, braked))
  assert float(before) > 0.01 and abs(float(after)) < 0.02 * float(before)
