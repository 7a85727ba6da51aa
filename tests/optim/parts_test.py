"""An update's parts beside NumPy in float64, and what has none is refused."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from grpo_jax import optim

PARAMS = {'a': jnp.array([0.5, -1.5, 2.0]), 'b': jnp.array([-0.25, 1.0])}
FLAT = np.array([0.5, -1.5, 2.0, -0.25, 1.0])
A = np.array([1.0, 1.0, 1.0, 0.0, 0.0])  # the coordinates of `a`
STEPS, RATE, DECAY, CLIP = 4, 0.02, 0.3, 0.6
B1, B2, EPSILON = 0.9, 0.95, 1e-3
BETAS = {'b1': B1, 'b2': B2, 'eps': EPSILON}


def numbers(seed=0):
  return np.random.default_rng(seed).normal(size=(STEPS, 5))


def tree(flat):
  return {
    'a': jnp.asarray(flat[:3], jnp.float32),
    'b': jnp.asarray(flat[3:], jnp.float32),
  }


def flat(of_tree):
  return np.concatenate([np.asarray(of_tree[name]) for name in 'ab'])


class Adam:
  """Adam on sums of a carried, a fresh and a decayed part, f64[3, 5]."""

  def __init__(self, b1=B1, largest=False):
    self.m, self.v, self.top, self.t = np.zeros(5), np.zeros(5), np.zeros(5), 0
    self.b1, self.largest = b1, largest

  def __call__(self, given):
    self.t += 1
    parts = np.array([self.b1 * self.m, *((1 - self.b1) * given[1:])])
    self.m = parts.sum(0)
    self.v = B2 * self.v + (1 - B2) * given.sum(0) ** 2
    self.v_hat = self.v / (1 - B2**self.t)
    self.top = np.maximum(self.top, self.v_hat)
    if self.largest:
      self.v_hat = self.top
    correction = 1 - self.b1**self.t
    return parts / correction / (np.sqrt(self.v_hat) + EPSILON)


def of_gradient(g):
  return np.array([0 * g, g, 0 * g])


def of_params(p, by=DECAY):
  return np.array([0 * p, 0 * p, by * p])


def clipped(x, most=CLIP):
  return x * min(1.0, most / np.linalg.norm(x.sum(0)))


def trusted(x, p):
  """Each leaf as long as its parameters."""
  for leaf in (A == 1, A == 0):
    size = np.linalg.norm(p[leaf]) / np.linalg.norm(x.sum(0)[leaf])
    x[:, leaf] *= size
  return x


def bounded(x, most=0.2):
  total = x.sum(0)
  return x * np.clip(total, -most, most) / total


def momentum(memory, x, by=0.5):
  """The same with a trace of former updates, which are carried."""
  x = x + np.array([by * memory['trace'], *np.zeros((2, 5))])
  memory['trace'] = x.sum(0)
  return x


decay = optax.add_decayed_weights(DECAY)
adam = optax.scale_by_adam(**BETAS)
clip = optax.clip_by_global_norm(CLIP)
down = optax.scale(-RATE)
falling = optax.linear_schedule(DECAY, 0.0, 8)

# Each as an optax chain, and as a function of Adam, gradient, parameters, step
# and a memory, which returns the parts before the learning rate.
CHAINS = {
  'adamw': (
    lambda: optax.adamw(RATE, weight_decay=DECAY, **BETAS),
    lambda adam, g, p, t, m: adam(of_gradient(g)) + of_params(p),
  ),
  'in front of adam': (
    lambda: optax.chain(decay, adam, down),
    lambda adam, g, p, t, m: adam(of_gradient(g) + of_params(p)),
  ),
  'in front of a clip, then adam': (
    lambda: optax.chain(decay, clip, adam, down),
    lambda adam, g, p, t, m: adam(clipped(of_gradient(g) + of_params(p))),
  ),
  'between a clip and adam': (
    lambda: optax.chain(clip, decay, adam, down),
    lambda adam, g, p, t, m: adam(clipped(of_gradient(g)) + of_params(p)),
  ),
  'between adam and a clip': (
    lambda: optax.chain(adam, decay, clip, down),
    lambda adam, g, p, t, m: clipped(adam(of_gradient(g)) + of_params(p)),
  ),
  'after adam and a clip': (
    lambda: optax.chain(adam, clip, decay, down),
    lambda adam, g, p, t, m: clipped(adam(of_gradient(g))) + of_params(p),
  ),
  'after the learning rate': (
    lambda: optax.chain(adam, down, optax.add_decayed_weights(-RATE * DECAY)),
    lambda adam, g, p, t, m: adam(of_gradient(g)) + of_params(p),
  ),
  'masked': (
    lambda: optax.adamw(
      RATE, weight_decay=DECAY, mask={'a': True, 'b': False}, **BETAS
    ),
    lambda adam, g, p, t, m: adam(of_gradient(g)) + of_params(A * p),
  ),
  'of a schedule, injected': (
    lambda: optax.inject_hyperparams(optax.adamw)(
      RATE, weight_decay=falling, **BETAS
    ),
    lambda adam, g, p, t, m: (
      adam(of_gradient(g)) + of_params(p, DECAY * (1 - t / 8))
    ),
  ),
  'beside momentum, in a partition': (
    lambda: optax.partition(
      {
        'x': optax.adamw(RATE, weight_decay=DECAY, **BETAS),
        'y': optax.chain(decay, optax.sgd(RATE, momentum=0.5)),
      },
      {'a': 'x', 'b': 'y'},
    ),
    lambda adam, g, p, t, m: (
      A * (adam(of_gradient(g)) + of_params(p))
      + (1 - A) * momentum(m, of_gradient(g) + of_params(p))
    ),
  ),
  'every gradient finite': (
    lambda: optax.apply_if_finite(
      optax.adamw(RATE, weight_decay=DECAY, **BETAS), 2
    ),
    lambda adam, g, p, t, m: adam(of_gradient(g)) + of_params(p),
  ),
  'in front of momentum': (
    lambda: optax.chain(adam, decay, optax.trace(0.5), down),
    lambda adam, g, p, t, m: momentum(m, adam(of_gradient(g)) + of_params(p)),
  ),
  'lamb': (
    lambda: optax.lamb(RATE, **BETAS),
    lambda adam, g, p, t, m: trusted(adam(of_gradient(g)), p),
  ),
  'lamb, with decay': (
    lambda: optax.lamb(RATE, weight_decay=DECAY, **BETAS),
    lambda adam, g, p, t, m: trusted(adam(of_gradient(g)) + of_params(p), p),
  ),
  'each coordinate clipped': (
    lambda: optax.chain(adam, decay, optax.clip(0.2), down),
    lambda adam, g, p, t, m: bounded(adam(of_gradient(g)) + of_params(p)),
  ),
  'times the norm of the parameters': (
    lambda: optax.chain(
      adam,
      optax.stateless(
        lambda u, p: jax.tree.map(lambda u, p: jnp.linalg.norm(p) * u, u, p)
      ),
      down,
    ),
    lambda adam, g, p, t, m: (
      adam(of_gradient(g))
      * np.where(A == 1, np.linalg.norm(p[:3]), np.linalg.norm(p[3:]))
    ),
  ),
  'one of each left out, behind a transform and its inverse': (
    lambda: optax.chain(
      adam,
      decay,
      optax.stateless(
        lambda u, p: jax.tree.map(
          lambda u: jnp.fft.ifft(jnp.fft.fft(u)).real.at[0].set(0.0), u
        )
      ),
      down,
    ),
    lambda adam, g, p, t, m: (
      np.array([0, 1, 1, 0, 1]) * (adam(of_gradient(g)) + of_params(p))
    ),
  ),
  'without memory': (
    lambda: optax.adamw(RATE, 0.0, B2, EPSILON, weight_decay=DECAY),
    lambda adam, g, p, t, m: adam(of_gradient(g)) + of_params(p),
  ),
  'amsgrad': (
    lambda: optax.amsgrad(RATE, **BETAS),
    lambda adam, g, p, t, m: adam(of_gradient(g)),
  ),
}
KINDS = {'without memory': {'b1': 0.0}, 'amsgrad': {'largest': True}}


LONG = ('after the learning rate', 'lamb', 'in front of momentum')


def by_hand(name):
  """The parts of the last update in float64, [3, 5], and its Adam."""
  step, own = CHAINS[name][1], Adam(**KINDS.get(name, {}))
  params, memory = FLAT, {'trace': np.zeros(5)}
  for t, g in enumerate(numbers()):
    parts = -RATE * step(own, g, params, t, memory)
    params = params + parts.sum(0)
  return parts, own


def last_step(made, given=None, params=PARAMS, **extra):
  """What the last of some updates was given, and what it made."""
  state = made.init(params)
  given = [tree(g) for g in numbers()] if given is None else given
  for gradient in given:
    before, old = state, params
    updates, state = made.update(gradient, state, params, **extra)
    params = optax.apply_updates(params, updates)
  return gradient, before, state, updates, old


# They are refused without the gradient, as the clip reads it.
NEEDS_GRADIENT = ('in front of a clip, then adam',)
ALSO_WITHOUT = (
  *('between a clip and adam', 'between adam and a clip'),
  *('beside momentum, in a partition', 'every gradient finite'),
)


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=pytest.mark.long if name in LONG else ())
    for name in CHAINS
  ],
)
def test_parts_are_those_written_out_in_numpy(name):
  made = CHAINS[name][0]()
  gradient, *step = last_step(made)
  wanted, _ = by_hand(name)
  parts = optim.split_update(made, *step, gradient=gradient)
  actual = np.array([flat(part) for part in parts])
  np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=1e-8)
  if name in NEEDS_GRADIENT:
    with pytest.raises(ValueError, match='without its gradient.*gradient=...'):
      optim.split_update(made, *step)
  elif name in ALSO_WITHOUT:
    parts = optim.split_update(made, *step)
    actual = np.array([flat(part) for part in parts])
    np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=1e-8)


def recorded(made, given=None, params=PARAMS, **extra):
  made = optim.record_adam_moments(made)
  with jax.disable_jit():
    state = last_step(made, given, params, **extra)[2]
  return {k: float(v) for k, v in optim.moment_metrics(state).items()}


@pytest.mark.parametrize(
  'name', [pytest.param('lamb', marks=pytest.mark.long), 'amsgrad']
)
def test_the_record_has_their_norms(name):
  found = recorded(CHAINS[name][0]())
  wanted, own = by_hand(name)
  for part, value in zip(('carried', 'fresh', 'decayed'), wanted, strict=True):
    norm = np.linalg.norm(value)
    assert found[f'adam_{part}_norm'] == pytest.approx(norm, rel=1e-4, abs=1e-9)
  # AMSGrad's is the largest that there was, which it divides by.
  norm = np.linalg.norm(own.v_hat)
  assert found['adam_v_hat_norm'] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
  'made',
  [
    optax.adamax(RATE),
    optax.yogi(RATE),
    optax.contrib.adopt(RATE),
    optax.partition(
      {'x': optax.adam(RATE), 'y': optax.adamaxw(RATE)}, {'a': 'x', 'b': 'y'}
    ),
  ],
)
def test_other_moments_in_the_state_of_adam_are_refused(made):
  with pytest.raises(ValueError, match='not those of Adam: .*Use optax'):
    recorded(made)
  braked = optim.project_outward(made)
  with pytest.raises(ValueError, match='not those of Adam'):
    braked.update(tree(FLAT), braked.init(PARAMS), PARAMS, outward=tree(FLAT))


def anchored(by):
  """Adam, and a pull to the first parameters, which a state remembers."""

  def update(updates, state, params):
    pull = jax.tree.map(lambda p, q: by * (p - q), params, state)
    return jax.tree.map(jnp.add, updates, pull), state

  pull = optax.GradientTransformation(lambda params: params, update)
  return optax.chain(adam, pull, down)


class Following(NamedTuple):
  count: jax.Array
  z: dict[str, jax.Array]  # as schedule-free's, by name


def following(renewed):
  """SGD, and a pull to an anchor that follows the parameters.

  Args:
    renewed: `(steps, anchor, parameters) -> anchor`, after every step.
  """

  def update(updates, state, params):
    step = jax.tree.map(
      lambda g, p, q: -RATE * g - 0.1 * (p - q), updates, params, state.z
    )
    count = state.count + 1
    z = jax.tree.map(
      lambda q, p, u: renewed(count, q, p + u), state.z, params, step
    )
    return step, Following(count, z)

  return optax.GradientTransformation(
    lambda params: Following(jnp.int32(0), params), update
  )


ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))


def test_two_adams_of_a_parameter_are_refused():
  with pytest.raises(ValueError, match='the moments of two Adams'):
    recorded(optax.chain(adam, optax.adam(RATE)))


@pytest.mark.parametrize(
  ('made', 'message'),
  [
    (
      optax.contrib.schedule_free(optax.adam(3e-4), 3e-4),
      'keeps parameters in its state.*; record inside',
    ),
    (
      optax.contrib.sam(optax.adam(3e-4), ascent),
      'keeps parameters in its state.*; record inside',
    ),
    (anchored(0.1), 'keeps parameters in its state.*; record inside'),
    (
      optax.contrib.mechanize(optax.adamw(RATE)),
      'keeps parameters in its state.*; record inside',
    ),
    (
      optax.chain(adam, optax.scale_by_sign(), down),
      "no sum of a part.*'sign' makes",
    ),
    (
      optax.chain(
        adam, optax.stateless(lambda u, _: jax.tree.map(jnp.tanh, u))
      ),
      "no sum of a part.*'tanh' makes",
    ),
  ],
)
def test_what_has_no_such_parts_is_refused(made, message):
  with pytest.raises(ValueError, match=f'record_adam_moments got .*{message}'):
    recorded(made)


def test_lookahead_is_refused():
  pairs = optax.LookaheadParams.init_synced(PARAMS)
  made = optax.lookahead(optax.adam(RATE), 2, 0.5)
  for run in (
    lambda: optim.record_adam_moments(made).init(pairs),
    lambda: optim.coast(made, made.init(pairs), pairs, 2),
  ):
    with pytest.raises(ValueError, match='optax.LookaheadParams, two sets'):
      run()


def test_inside_sam_the_record_is_that_of_adam():
  inner = optim.record_adam_moments(optax.adamw(RATE, **BETAS))
  made = optax.contrib.sam(inner, ascent)
  with jax.disable_jit():
    state = last_step(made)[2]
  found = optim.moment_metrics(state)
  own = Adam()
  # Adam steps every second time, with the second gradient.
  for g in numbers()[1::2]:
    parts = -RATE * own(of_gradient(g))
  norm = np.linalg.norm(parts[0])
  np.testing.assert_allclose(found['adam_carried_norm'], norm, rtol=1e-4)


@pytest.mark.parametrize(
  'where',
  # Noise takes long to compile.
  [
    pytest.param('in front', marks=pytest.mark.long),
    pytest.param('behind', marks=pytest.mark.long),
    'plateau',
  ],
)
def test_a_state_that_is_no_memory_stays(where):
  """Keys of noise and scales act as they do, and are no decay."""
  plain = optax.adam(RATE, **BETAS)
  noise = optax.add_noise(0.1, 0.55, 0)
  made, extra = {
    'in front': (optax.chain(noise, plain), {}),
    'behind': (optax.chain(plain, noise), {}),
    'plateau': (
      optax.chain(
        plain, optax.contrib.reduce_on_plateau(0.5, 1, accumulation_size=1)
      ),
      {'value': 1.0},
    ),
  }[where]
  gradient, *step = last_step(made, **extra)
  parts = optim.split_update(made, *step, gradient=gradient, **extra)
  assert not np.any(flat(parts.decayed))
  coasted = optim.coast(made, step[0], step[3], 2, **extra)
  assert not np.any(flat(coasted.decayed))
  if where != 'in front':
    own = Adam()
    for g in numbers():
      wanted = -RATE * own(of_gradient(g))[0]
    scale = step[1][1].scale if where == 'plateau' else 1.0
    assert where != 'plateau' or scale < 1
    wanted = wanted * np.asarray(scale)
    np.testing.assert_allclose(flat(parts.carried), wanted, rtol=1e-4)


def test_moments_of_two_wrapped_optimizers_count_once():
  """A gradient that is accumulated is fresh, half of each."""
  made = optax.MultiSteps(optax.adamw(RATE, weight_decay=DECAY, **BETAS), 2)
  made = made.gradient_transformation()
  gradient, *step = last_step(made)
  own, params = Adam(), FLAT
  for pair in numbers().reshape(2, 2, 5):
    wanted = -RATE * (own(of_gradient(pair.mean(0))) + of_params(params))
    params = params + wanted.sum(0)
  for given in (gradient, None):
    parts = optim.split_update(made, *step, gradient=given)
    actual = np.array([flat(part) for part in parts])
    np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=1e-8)


def test_coasting_in_front_of_adam_splits_decay_as_numpy_does():
  """L2: what a step adds is decay, what the moments remember is motion."""
  made = optax.chain(decay, adam, down)
  _, _, state, _, _ = last_step(made)
  own, params = Adam(), FLAT
  for g in numbers():
    params = params - RATE * own(of_gradient(g) + of_params(params)).sum(0)
  start = params
  moved = decayed = 0.0
  for _ in range(3):
    parts = -RATE * own(of_params(params))
    moved, decayed = moved + parts[0] + parts[1], decayed + parts[2]
    params = params + parts.sum(0)
  coasted = optim.coast(made, state, tree(start), 3)
  np.testing.assert_allclose(flat(coasted.moved), moved, rtol=2e-4)
  np.testing.assert_allclose(flat(coasted.decayed), decayed, rtol=2e-4)


@pytest.mark.parametrize(
  'made',
  [
    anchored(0.1),
    optax.contrib.sam(optax.sgd(0.1), ascent),
    optax.contrib.mechanize(optax.sgd(0.1)),
    optax.contrib.madgrad(0.1),
    optax.contrib.cocob(),
    # In its state behind a condition.
    optax.MultiSteps(anchored(0.1), 2).gradient_transformation(),
    following(lambda step, anchor, params: 0.999 * anchor + 0.001 * params),
    following(
      lambda step, anchor, params: jnp.where(step % 1000, anchor, params)
    ),
    # What a schedule-free optimizer is given to average is no `z`.
    optax.contrib.schedule_free(
      following(lambda step, anchor, params: 0.9 * anchor + 0.1 * params), RATE
    ),
  ],
)
def test_coasting_towards_an_anchor_is_refused(made):
  with pytest.raises(ValueError, match='coast got .*; give coast the optim'):
    optim.coast(made, made.init(PARAMS), PARAMS, 2)


def test_coasting_of_lamb_scales_its_decay_by_the_trust_ratio():
  made = optax.lamb(RATE, weight_decay=DECAY, **BETAS)
  _, _, state, _, _ = last_step(made)
  own, params = Adam(), FLAT
  for g in numbers():
    step = own(of_gradient(g)) + of_params(params)
    params = params - RATE * trusted(step, params).sum(0)
  parts = -RATE * trusted(own(0 * of_gradient(g)) + of_params(params), params)
  coasted = optim.coast(made, state, tree(params), 1)
  np.testing.assert_allclose(flat(coasted.decayed), parts[2], rtol=2e-4)
  np.testing.assert_allclose(flat(coasted.moved), parts[0], rtol=2e-4)


@pytest.mark.parametrize(
  'kind', ['adam', pytest.param('lamb', marks=pytest.mark.long)]
)
def test_a_complex_number_counts_as_two(kind):
  """Of 3 + 4j the norm is 5."""
  params = {'w': jnp.array([3 + 4j, 0j])}
  made = {'adam': optax.adamw(1.0, weight_decay=1.0), 'lamb': optax.lamb(1.0)}
  found = recorded(made[kind], [params] * 2, params)
  assert found['adam_grad_norm'] == pytest.approx(5)
  assert found['adam_m_hat_norm'] == pytest.approx(5)
  assert found['adam_v_hat_norm'] == pytest.approx(25, rel=1e-4)
  if kind == 'adam':
    # The first step took 1 from the length, and the decay all of the rest.
    assert found['adam_decayed_norm'] == pytest.approx(1, rel=1e-4)
  share = found['adam_carried_norm'] / found['adam_fresh_norm']
  assert share == pytest.approx(0.9, rel=1e-4)
  assert found['adam_grad_carried_cosine'] == pytest.approx(-1)


def test_the_way_of_a_complex_number_is_as_long_as_of_two():
  params = {'w': jnp.array([3 + 4j])}
  made = optax.sgd(1.0, momentum=0.5)
  _, state = made.update(params, made.init(params), params)
  coasted = optim.coast(made, state, params, 2)
  np.testing.assert_allclose(coasted.norms, [2.5, 1.25])


def test_hyper_parameters_that_begin_with_zero_are_no_memory():
  """Here one rate for each coordinate, which is set later."""
  made = optax.inject_hyperparams(
    lambda rate: optax.chain(
      adam, optax.stateless(lambda u, _: {'a': -rate * u['a']})
    )
  )(rate=np.zeros(3, np.float32))
  params = {'a': PARAMS['a']}
  gradient, state = {'a': tree(numbers()[0])['a']}, made.init(params)
  own, rates = Adam(), np.array([0.1, 0.2, 0.3])
  for _ in range(2):
    state = state._replace(
      hyperparams={'rate': jnp.asarray(rates, jnp.float32)}
    )
    before = state
    updates, state = made.update(gradient, state, params)
    wanted = -rates * own(of_gradient(numbers()[0]))[0][:3]
  parts = optim.split_update(made, before, state, updates, params)
  np.testing.assert_allclose(parts.carried['a'], wanted, rtol=2e-4)


def test_first_moments_in_bfloat16_have_their_rates():
  """In bfloat16 1 - 0.9 is 0.102, and the moment two per cent too small."""
  gradient = {'w': jnp.array([1.0, -2.0, 0.5])}
  found = recorded(
    optax.adam(RATE, mu_dtype=jnp.bfloat16), [gradient], gradient
  )
  norm = float(optax.tree.norm(gradient))
  assert found['adam_m_hat_norm'] == pytest.approx(norm, rel=4e-3)


def test_rates_are_read_where_decay_stands_in_front():
  """Decay is a gradient to Adam, and not a part of its rates."""
  found = recorded(CHAINS['in front of adam'][0]())
  own, params = Adam(), FLAT
  for g in numbers():
    params = params - RATE * own(of_gradient(g) + of_params(params)).sum(0)
  m_hat = np.linalg.norm(own.m / (1 - B1**STEPS))
  assert found['adam_m_hat_norm'] == pytest.approx(m_hat, rel=1e-4)
