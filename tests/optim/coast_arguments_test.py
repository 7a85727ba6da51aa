"""The dtypes that `coast` takes, what it passes on, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from grpo_jax.optim import _coast

pytestmark = pytest.mark.quick


def test_half_precision_adds_up_in_single():
  params = jnp.ones((64,), jnp.bfloat16)
  optimizer = optax.sgd(1e-4, momentum=0.999)
  _, state = optimizer.update(params, optimizer.init(params), params)
  coasted = _coast.coast(optimizer, state, params, 300)
  assert coasted.moved.dtype == np.float32
  assert coasted.norms.dtype == np.float32
  # In bfloat16 the sum would stall, as the parameters of this path do.
  updates = coasted.norms / 8
  np.testing.assert_allclose(coasted.moved, -updates.sum(), rtol=1e-5)
  assert coasted.params.dtype == jnp.bfloat16
  assert np.all(coasted.params == 1)


def test_updates_wider_than_the_parameters():
  params = jnp.ones(4, jnp.float16)
  with jax.enable_x64(True):
    wider = optax.stateless(
      lambda g, _: jax.tree.map(lambda x: x.astype(jnp.float64) + 0.5, g)
    )
    coasted = _coast.coast(wider, optax.EmptyState(), params, 3)
  assert coasted.params.dtype == jnp.float16
  assert coasted.decayed.dtype == coasted.moved.dtype == np.float32
  np.testing.assert_array_equal(coasted.params, np.full(4, 2.5))


def test_extra_arguments_reach_the_update():
  def update(gradients, state, params=None, *, pull, **extra_args):
    return jax.tree.map(lambda g: g + pull, gradients), state

  optimizer = optax.chain(
    optax.GradientTransformationExtraArgs(lambda _: (), update),
    optax.sgd(0.5),
  )
  params = jnp.ones(4)
  coasted = _coast.coast(optimizer, optimizer.init(params), params, 3, pull=2.0)
  np.testing.assert_allclose(coasted.params, np.full(4, 1 - 3 * 0.5 * 2.0))
  # What a transformation without extra arguments does not know, it ignores.
  plain = optax.GradientTransformation(*optax.sgd(0.5))
  coasted = _coast.coast(plain, plain.init(params), params, 3, pull=2.0)
  np.testing.assert_array_equal(coasted.params, params)


@pytest.mark.parametrize(
  ('optimizer', 'message'),
  [
    (optax.lbfgs(), "'value', 'grad', and 'value_fn'"),
    (optax.polyak_sgd(), "'value'"),
    (
      optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
      "'value'",
    ),
  ],
)
def test_optimizers_that_need_more(optimizer, message):
  params = jnp.ones(4)
  state = optimizer.init(params)
  for num_steps in (0, 3):
    with pytest.raises(ValueError, match=f'also needs {message}; leave out'):
      _coast.coast(optimizer, state, params, num_steps)
  with pytest.raises(ValueError, match=message):
    jax.jit(lambda s, p: _coast.coast(optimizer, s, p, 3))(state, params)


def test_other_type_errors_are_not_hidden():
  def helper(*, beta):
    return beta

  def own(gradients, state, params=None):
    return helper(), state

  def other(gradients, state, params=None):
    raise TypeError('the lattice is dual')

  def lost_update(gradients, state, params=None, *, value):
    return own(gradients, state), value

  params = jnp.ones(4)
  for update, message, extra in [
    (own, 'helper.. missing 1 required', {}),
    (other, 'the lattice is dual', {}),
    # Given, but lost between here and there: not the caller's to mend.
    (lost_update, 'lost_update.. missing', {'value': 1.0}),
  ]:
    optimizer = optax.GradientTransformation(lambda _: (), update)
    with pytest.raises(TypeError, match=message):
      _coast.coast(optimizer, (), params, 2, **extra)


@pytest.mark.parametrize('num_steps', [-1, 2.0, None, 'all'])
def test_the_number_of_steps_is_a_static_int(num_steps):
  optimizer = optax.sgd(0.1)
  params = jnp.ones(4)
  with pytest.raises(ValueError, match=f'num_steps={num_steps}; give a static'):
    _coast.coast(optimizer, optimizer.init(params), params, num_steps)
  with pytest.raises(ValueError, match='give a static'):
    jax.jit(lambda n: _coast.coast(optimizer, (), params, n))(3)
