"""The record of Adam's moments: nothing is changed, and the parts are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import optim
from tests import cli

pytestmark = pytest.mark.quick

PARAMS = {'a': jnp.linspace(-1.0, 1.0, 12).reshape(4, 3), 'b': jnp.ones(5)}
ONLY_A = {'a': True, 'b': False}
WRAPPED = {
  'adam': lambda: optax.adam(1e-2),
  'adamw': lambda: optax.adamw(1e-2, weight_decay=0.1, mask=ONLY_A),
  'nadam': lambda: optax.nadam(1e-2),
  'amsgrad': lambda: optax.amsgrad(1e-2),
  'lamb': lambda: optax.lamb(1e-2),
  'ours': lambda: optim.adamw(optax.linear_schedule(0.0, 1e-2, 3)),
  'named_chain': lambda: optax.named_chain(
    ('clip', optax.clip_by_global_norm(1.0)),
    ('adam', optax.scale_by_adam(b1=0.8)),
    ('lr', optax.scale(-1e-2)),
  ),
  'masked': lambda: optax.masked(optax.adam(1e-2), ONLY_A),
  'partition': lambda: optax.partition(
    {'x': optax.adam(1e-2, b1=0.7), 'y': optax.sgd(1e-2, momentum=0.5)},
    {'a': 'x', 'b': 'y'},
  ),
  'MultiSteps': lambda: optax.MultiSteps(
    optax.adam(1e-2), 2
  ).gradient_transformation(),
  'inject': lambda: optax.inject_hyperparams(optax.adamw)(
    optax.linear_schedule(1e-2, 0.0, 9)
  ),
  'apply_if_finite': lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
}


def gradients(number=5, seed=0, scale=1.0):
  rng = np.random.default_rng(seed)
  return [
    jax.tree.map(
      lambda x: jnp.asarray(scale * rng.normal(size=x.shape), x.dtype), PARAMS
    )
    for _ in range(number)
  ]


# As people compile; the tests' quick flags leave rounding to chance.
DEFAULTS = {
  'xla_backend_optimization_level': 3,
  'xla_llvm_disable_expensive_passes': False,
}
if any('fusion_emitters' in flag for flag in cli.QUICK):
  DEFAULTS['xla_cpu_use_fusion_emitters'] = True


def jitted(transformation, options=None):
  @functools.partial(jax.jit, compiler_options=options)
  def step(params, state, grads):
    updates, state = transformation.update(grads, state, params)
    return optax.apply_updates(params, updates), state, updates

  return step


def metrics_after(transformation, grads, params=PARAMS, **options):
  """The record's metrics after some steps, and the last step's pieces."""
  made = optim.record_adam_moments(transformation, **options)
  step, state, params = jitted(made), made.init(params), params
  for grad in grads:
    before, old = state, params
    params, state, updates = step(params, state, grad)
  found = {k: float(v) for k, v in optim.moment_metrics(state).items()}
  return found, before.inner_state, state.inner_state, updates, old


@pytest.mark.parametrize(
  'name',
  # Each compiles two programs with all of XLA's optimizations.
  [
    'ours',
    pytest.param('partition', marks=pytest.mark.long),
    'MultiSteps',
    pytest.param('apply_if_finite', marks=pytest.mark.long),
  ],
)
def test_updates_stay_what_they_were_bit_by_bit(name):
  plain = WRAPPED[name]()
  recorded = optim.record_adam_moments(WRAPPED[name]())
  steps = jitted(plain, DEFAULTS), jitted(recorded, DEFAULTS)
  states = plain.init(PARAMS), recorded.init(PARAMS)
  params = [PARAMS, PARAMS]
  states = list(states)
  for grads in gradients():
    updates = [None, None]
    for i in range(2):
      params[i], states[i], updates[i] = steps[i](params[i], states[i], grads)
    jax.tree.map(
      np.testing.assert_array_equal,
      (params[0], updates[0], states[0]),
      (params[1], updates[1], states[1].inner_state),
    )
  record = optim.moment_metrics(states[1])
  assert record['adam_carried_norm'] > 0 and record['adam_fresh_norm'] > 0


@pytest.mark.parametrize('name', WRAPPED)
def test_the_parts_add_up_to_the_update(name):
  made = WRAPPED[name]()
  state, params = made.init(PARAMS), PARAMS
  step = jitted(made)
  for grads in gradients(4):
    before, old = state, params
    params, state, updates = step(params, state, grads)
  parts = optim.split_update(made, before, state, updates, old)
  total = jax.tree.map(lambda *x: sum(x), *parts)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-8),
    total,
    updates,
  )


def numpy_adamw(grads, lr, b1, b2, epsilon, decay):
  """Last step of AdamW in float64: what the parts must be."""
  m = v = 0.0
  params = np.asarray(PARAMS['a'], np.float64)
  for t, grad in enumerate(grads, 1):
    grad = np.asarray(grad['a'], np.float64)
    carried, m = b1 * m, b1 * m + (1 - b1) * grad
    v = b2 * v + (1 - b2) * grad**2
    m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
    size = -lr / (1 - b1**t) / (np.sqrt(v_hat) + epsilon)
    old = params
    params = params + size * m - lr * decay * params
  return {
    'carried': size * carried,
    'fresh': size * (1 - b1) * grad,
    'decayed': -lr * decay * old,
    'grad': grad,
    'm_hat': m_hat,
    'v_hat': v_hat,
    'update': params - old,
  }


@pytest.mark.parametrize('b1', [0.9, 0.5, 0.0])
def test_every_field_is_that_of_adam_written_out(b1):
  epsilon, grads = 0.9, gradients(6)
  only_a = [{'a': g['a']} for g in grads]
  made = optax.adamw(0.01, b1=b1, b2=0.95, eps=epsilon, weight_decay=0.1)
  found, before, after, updates, old = metrics_after(
    made, only_a, {'a': PARAMS['a']}, epsilon=epsilon
  )
  wanted = numpy_adamw(grads, 0.01, b1, 0.95, epsilon, 0.1)
  parts = optim.split_update(made, before, after, updates, old)
  for name in ('carried', 'fresh', 'decayed'):
    actual = getattr(parts, name)['a']
    np.testing.assert_allclose(actual, wanted[name], rtol=3e-4, atol=1e-7)
  for name in (
    'grad',
    'update',
    'm_hat',
    'v_hat',
    'carried',
    'fresh',
    'decayed',
  ):
    norm = np.linalg.norm(wanted[name])
    np.testing.assert_allclose(found[f'adam_{name}_norm'], norm, rtol=1e-4)
  for one, other in (
    ('grad', 'update'),
    ('grad', 'carried'),
    ('carried', 'update'),
  ):
    x, y = wanted[one].ravel(), wanted[other].ravel()
    size = np.linalg.norm(x) * np.linalg.norm(y)
    cosine = x @ y / size if size else 0.0
    actual = found[f'adam_{one}_{other}_cosine']
    np.testing.assert_allclose(actual, cosine, rtol=1e-3, atol=1e-6)
  root = np.sqrt(wanted['v_hat'])
  assert found['adam_below_epsilon'] == pytest.approx(np.mean(root < epsilon))
  assert 0 < found['adam_below_epsilon'] < 1


def test_the_histogram_counts_where_epsilon_stands():
  """Roots of 2^-1, 2^-9 and 0 against an epsilon of 2^-4."""
  made = optax.adam(1.0, b1=0.0, b2=0.0)
  grads = {'a': jnp.array([0.5] * 6 + [2.0**-9] * 3 + [0.0])}
  found, *_ = metrics_after(made, [grads], grads, epsilon=2.0**-4)
  assert found['adam_below_epsilon'] == pytest.approx(0.4)
  assert found['adam_epsilon_log2_p01'] == -2.0  # log2 = -3
  assert found['adam_epsilon_log2_p50'] == -2.0
  assert found['adam_epsilon_log2_p99'] == 34.0
  state = optim.record_adam_moments(made, 2.0**-4)
  _, state = state.update(grads, state.init(grads), grads)
  counts = np.asarray(state.record[''].epsilon_counts)
  edges = np.append(np.arange(-32, 33, 4), np.inf)  # upper ends
  expected = np.zeros(len(edges))
  expected[edges == 0], expected[edges == 8] = 6, 3
  expected[-1] = 1
  np.testing.assert_array_equal(counts, expected)


def test_groups_are_told_apart():
  grads = gradients(3)
  labels = lambda params: {name: name for name in params}
  found, *_ = metrics_after(optax.adam(1e-2), grads, labels=labels)
  for name in PARAMS:
    alone, *_ = metrics_after(
      optax.adam(1e-2), [{name: g[name]} for g in grads], {name: PARAMS[name]}
    )
    for field, value in alone.items():
      among = found[field.replace('adam_', f'adam_{name}_')]
      assert among == pytest.approx(value, rel=1e-5)
  tree, *_ = metrics_after(optax.adam(1e-2), grads, labels={'a': 'a', 'b': 'b'})
  assert tree == found


def test_the_record_is_of_the_last_step_that_adam_took():
  gathering = optax.MultiSteps(optax.adam(1e-2), 3).gradient_transformation()
  grads = gradients(7)
  at_six, *_ = metrics_after(gathering, grads[:6])
  at_seven, *_ = metrics_after(gathering, grads)
  assert at_six == at_seven and at_six['adam_carried_norm'] > 0
  # Its carried part is that of Adam on the two means.
  means = [
    jax.tree.map(lambda *x: sum(x) / 3, *grads[i : i + 3]) for i in (0, 3)
  ]
  plain, *_ = metrics_after(optax.adam(1e-2), means)
  for name in ('carried', 'fresh', 'm_hat', 'v_hat', 'update'):
    np.testing.assert_allclose(
      at_six[f'adam_{name}_norm'], plain[f'adam_{name}_norm'], rtol=1e-5
    )
  broken = jax.tree.map(lambda x: x * jnp.nan, grads[0])
  guarded = optax.apply_if_finite(optax.adam(1e-2), 3)
  before, *_ = metrics_after(guarded, grads[:3])
  after, *_ = metrics_after(guarded, [*grads[:3], broken])
  assert before == after


def test_the_same_on_eight_devices():
  mesh = jax.make_mesh((8,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  place = jax.NamedSharding(mesh, jax.P('x'))
  params = {'a': jnp.arange(16.0)}
  rng = np.random.default_rng(0)
  grads = [{'a': jnp.asarray(rng.normal(size=16), jnp.float32)} for _ in '123']
  alone, *_ = metrics_after(optax.adamw(1e-2), grads, params)
  spread = [jax.device_put(g, place) for g in grads]
  shared, *_ = metrics_after(
    optax.adamw(1e-2), spread, jax.device_put(params, place)
  )
  for name, value in alone.items():
    assert shared[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize('made', [optax.sgd(0.1), optax.adafactor(0.1)])
def test_without_adam_there_is_one_sentence(made):
  with pytest.raises(ValueError, match='no moments of Adam; wrap one made of'):
    optim.record_adam_moments(made).init(PARAMS)
  with pytest.raises(ValueError, match=r'without a record; give that of'):
    optim.moment_metrics(made.init(PARAMS))


def run(scale, epsilon, lr=0.1, steps=6):
  made = optim.record_adam_moments(optax.adam(lr, eps=epsilon), epsilon)
  state, params, step = made.init(PARAMS), PARAMS, jitted(made)
  for grads in gradients(steps):
    grads = jax.tree.map(lambda g: g * scale, grads)  # noqa: B023
    params, state, _ = step(params, state, grads)
  moved = jax.tree.map(lambda x, y: np.asarray(x - y), params, PARAMS)
  return moved, optim.moment_metrics(state)


def test_reward_scale_does_nothing_where_epsilon_is_zero():
  """Proposition 2, bit by bit for a power of 2."""
  moved, _ = run(1.0, 0.0)
  scaled, found = run(2.0**10, 0.0)
  jax.tree.map(np.testing.assert_array_equal, scaled, moved)
  assert found['adam_below_epsilon'] == 0


def test_reward_scale_is_all_where_epsilon_is_large():
  """Adam is momentum SGD with learning rate lr / epsilon."""
  moved, found = run(1.0, 1e6, lr=1e6)
  scaled, _ = run(2.0**5, 1e6, lr=1e6)
  assert found['adam_below_epsilon'] == 1
  assert found['adam_epsilon_log2_p50'] > 0
  for x, y in zip(*map(jax.tree.leaves, (scaled, moved)), strict=True):
    np.testing.assert_allclose(x, 32 * y, rtol=1e-3, atol=1e-4)


def test_the_smallest_moments_have_a_norm():
  """Squares of squares of 1e-11 are out of float32's range."""
  grads = [{'a': jnp.array([3e-11, 4e-11])}] * 2
  found, *_ = metrics_after(optax.adam(1.0), grads, grads[0])
  assert found['adam_v_hat_norm'] == pytest.approx(np.hypot(9, 16) * 1e-22)
  assert found['adam_below_epsilon'] == 1


def test_bfloat16_parameters_and_empty_ones():
  half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
  grads = gradients(3)
  empty = {'none': jnp.zeros((0,), jnp.bfloat16)}
  halved = [{**half(g), **empty} for g in grads]
  params = {**half(PARAMS), **empty}
  single, *_ = metrics_after(optax.adam(1e-2), grads)
  found, *_ = metrics_after(optax.adam(1e-2), halved, params)
  for name in ('m_hat_norm', 'v_hat_norm', 'carried_norm', 'fresh_norm'):
    assert found[f'adam_{name}'] == pytest.approx(
      single[f'adam_{name}'], rel=0.03
    )


def test_behind_a_brake_the_moments_are_those_that_act():
  """A reset forgets Adam's count too: its bias correction is that of step 1."""
  grads = gradients(3)
  for made, extra in (
    (optim.reset_moments(optax.adam(1e-2)), {'first_of_rollout': True}),
    (optim.decay_carried(optax.adam(1e-2)), {'clipped_share': 1.0}),
  ):
    recorded = optim.record_adam_moments(made)
    update = jax.jit(functools.partial(recorded.update, **extra))
    state = recorded.init(PARAMS)
    for grad in grads:
      _, state = update(grad, state, PARAMS)
    found = optim.moment_metrics(state)
    count = 1 if 'first_of_rollout' in extra else 3
    m_hat = 0.1 * optax.tree.norm(grads[-1]) / (1 - 0.9**count)
    assert found['adam_m_hat_norm'] == pytest.approx(float(m_hat), rel=1e-4)
    assert found['adam_carried_norm'] < 1e-6


def test_moments_that_lie_elsewhere_are_refused():
  made = optim.record_adam_moments(optax.flatten(optax.adam(1e-2)))
  with pytest.raises(ValueError, match='do not lie along the parameters'):
    made.update(gradients()[0], made.init(PARAMS), PARAMS)


@pytest.mark.long
def test_explicit_meshes():
  """Two sharded axes; also the coasting path and the projection."""
  kind = jax.sharding.AxisType.Explicit
  mesh = jax.make_mesh((2, 2), ('x', 'y'), axis_types=(kind, kind))
  with jax.set_mesh(mesh):
    params = {'a': jax.device_put(jnp.ones((4, 4)), jax.P('x', 'y'))}
    grads = {'a': jax.device_put(jnp.full((4, 4), 0.5), jax.P('x', 'y'))}
    made = optim.record_adam_moments(optim.project_outward(optax.adam(1e-2)))
    update = jax.jit(made.update)
    state = made.init(params)
    for _ in range(2):
      braked, state = update(grads, state, params, outward=grads)
    # The step goes down the gradient, so `outward` is met by no projection.
    assert float(jnp.max(braked['a'])) < 0
    opposite = jax.tree.map(jnp.negative, grads)
    braked, _ = update(grads, state, params, outward=opposite)
    np.testing.assert_allclose(braked['a'], 0, atol=1e-8)
    adam = optax.adam(1e-2)
    _, state = adam.update(grads, adam.init(params), params)
    coasted = jax.jit(optim.coast, static_argnums=(0, 3))(
      adam, state, params, 2
    )
    assert float(coasted.norms[0]) > float(coasted.norms[1]) > 0
