"""The law of coasting against simulated Adams, and its published numbers."""

import fractions
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax.optim import _coasting_law as _law

pytestmark = pytest.mark.quick

BETAS = [(0.9, 0.95), (0.9, 0.999), (0.5, 0.999), (0.9, 0.8), (0.0, 0.99)]
growing = pytest.mark.filterwarnings('ignore:Adam with b1')


def simulated(gradients, clipped_steps, b1, b2, epsilon=0.0):
  """Adam's steps `[1 + clipped_steps, ...]` from the last live one, and v."""
  m = np.zeros_like(gradients[0])
  v = np.zeros_like(gradients[0])
  steps, roots = [], []
  zeros = [np.zeros_like(gradients[0])] * clipped_steps
  for t, g in enumerate([*gradients, *zeros], start=1):
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    root = np.sqrt(v / (1 - b2**t))
    steps.append(m / (1 - b1**t) / (root + epsilon))
    roots.append(root)
  live = len(gradients) - 1
  return np.array(steps[live:]), roots[live]


@growing
@pytest.mark.parametrize('epsilon', [0.0, 1e-3, 0.7])
@pytest.mark.parametrize('live_steps', [1, 2, 7, 100])
@pytest.mark.parametrize(('b1', 'b2'), BETAS)
def test_any_history_of_gradients(b1, b2, live_steps, epsilon):
  rng = np.random.default_rng(live_steps)
  gradients = rng.normal(1.0, 1.0, (live_steps, 5))  # of both signs
  steps, root = simulated(gradients, 40, b1, b2, epsilon)
  n = np.arange(41)[:, None]
  ratio = _law.coasting_ratio(n, b1, b2, live_steps, epsilon / root)
  np.testing.assert_allclose(ratio, steps / steps[0], rtol=1e-12)
  for num_steps in (0, 1, 40):
    way = _law.coasting_steps(
      b1, b2, num_steps, live_steps, float(epsilon / root[0])
    )
    walked = steps[1 : 1 + num_steps, 0].sum() / steps[0, 0]
    np.testing.assert_allclose(way, walked, rtol=1e-12)


@growing
def test_a_long_history_is_the_limit():
  for b1, b2 in BETAS:
    for eps_ratio in (0.0, 0.3):
      n = np.arange(30)
      long = _law.coasting_ratio(n, b1, b2, 10**6, eps_ratio)
      limit = _law.coasting_ratio(n, b1, b2, None, eps_ratio)
      np.testing.assert_allclose(limit, long, rtol=1e-12)
      np.testing.assert_allclose(
        _law.coasting_steps(b1, b2, 9, None, eps_ratio),
        limit[1:10].sum(),
        rtol=1e-12,
      )


def test_betas_next_to_one():
  """Exact to rounding where 1 - b**n in float64 would lose six digits."""
  b, n, live = 0.999999, 5, 3
  exact = fractions.Fraction(b)
  kept = exact**n * (1 - exact**live) / (1 - exact ** (live + n))
  ratio = float(kept) / math.sqrt(kept)
  got = _law.coasting_ratio(n, b, b, live)
  assert math.isclose(got, ratio, rel_tol=1e-14)
  assert math.isclose(
    _law.coasting_ratio(10**6, b, b), 0.60653065, rel_tol=1e-6
  )
  assert math.isclose(_law.coasting_half_life(b, b), 1.39e6, rel_tol=3e-3)
  assert math.isclose(_law.coasting_steps(b, b), 2e6, rel_tol=1e-6)


@pytest.mark.parametrize(
  ('b2', 'five', 'sixteen', 'whole', 'parts', 'early', 'most', 'half'),
  [
    (0.95, 0.6713, 0.279, 12.05, (3.29, 5.68, 8.69), 5.80, (27, 12.38), 8.7),
    (0.99, 0.6055, 0.201, 9.47, (3.13, 5.23, 7.57), 5.12, (22, 10.45), 6.9),
    (0.999, 0.5920, 0.187, 9.05, (3.10, 5.14, 7.36), 5.01, (22, 10.17), 6.6),
  ],
)
def test_the_numbers_people_quote(
  b2, five, sixteen, whole, parts, early, most, half
):
  assert round(float(_law.coasting_ratio(5, 0.9, b2)), 4) == five
  assert round(float(_law.coasting_ratio(16, 0.9, b2)), 3) == sixteen
  assert round(_law.coasting_steps(0.9, b2), 2) == whole
  for num_steps, part in zip((4, 8, 16), parts):
    assert round(_law.coasting_steps(0.9, b2, num_steps), 2) == part
  # The paper's T counts the first step without a gradient: ours plus 1.
  ways = [_law.coasting_steps(0.9, b2, live_steps=t) for t in range(1, 60)]
  assert round(ways[0], 2) == early
  assert (1 + int(np.argmax(ways)), round(max(ways), 2)) == most
  assert round(_law.coasting_half_life(0.9, b2), 1) == half
  rho = 0.9 / math.sqrt(b2)
  assert math.isclose(rho ** _law.coasting_half_life(0.9, b2), 0.5)


@growing
def test_the_way_without_end():
  assert _law.coasting_steps(0.0, 0.99) == 0.0
  assert _law.coasting_half_life(0.0, 0.99) == 0.0
  for b1, b2 in [(0.9, 0.8), (0.9, 0.9 * 0.9)]:
    assert _law.coasting_steps(b1, b2) == math.inf
    assert _law.coasting_steps(b1, b2, live_steps=5) == math.inf
    assert _law.coasting_half_life(b1, b2) == math.inf
  # The finite part of a diverging way, and one that epsilon ends.
  ratios = _law.coasting_ratio(np.arange(1, 101), 0.9, 0.8)
  assert math.isclose(ratios[0], 1.0062, rel_tol=1e-4)
  way = _law.coasting_steps(0.9, 0.8, 100)
  assert math.isclose(way, ratios.sum(), rel_tol=1e-12)
  assert _law.coasting_steps(0.9, 0.81, 100) == pytest.approx(100)
  assert _law.coasting_steps(0.5, 0.25, 100) == 100  # its log is exactly 0
  with np.errstate(all='raise'):  # it overflows without a word, and soon
    for live_steps in (None, 2):
      assert _law.coasting_steps(0.9, 0.5, 10**12, live_steps) == math.inf
  many = np.arange(1, 5000)
  for b1, b2, live, eps in [(0.9, 0.8, None, 1e-9), (0.9, 0.95, 2, 0.0)]:
    ended = _law.coasting_ratio(many, b1, b2, live, eps).sum()
    way = _law.coasting_steps(b1, b2, None, live, eps)
    assert math.isclose(way, ended, rel_tol=1e-12)
  # Longer than one chunk, and the epsilon that swamps everything.
  for num_steps in (20_001, None):
    terms = _law.coasting_ratio(
      np.arange(1, 600_000 if num_steps is None else 20_002), 0.9999, 0.9999, 3
    )
    way = _law.coasting_steps(0.9999, 0.9999, num_steps, 3)
    assert math.isclose(way, terms.sum(), rel_tol=1e-11)
  way = _law.coasting_steps(0.9, 0.95, eps_ratio=math.inf)
  assert math.isclose(way, 9.0, rel_tol=1e-12)


def test_epsilon_interpolates():
  n = np.arange(40)[:, None]
  eps = np.array([0.0, 1e-6, 1e-2, 1.0, 1e3, 1e9, np.inf])
  ratio = _law.coasting_ratio(n, 0.9, 0.95, eps_ratio=eps)
  assert ratio.shape == (40, 7)
  assert np.all(np.diff(ratio[1:], axis=1) < 0)
  np.testing.assert_allclose(
    ratio[:, 0], (0.9 / math.sqrt(0.95)) ** n[:, 0], rtol=1e-12
  )
  np.testing.assert_allclose(ratio[:, -1], 0.9 ** n[:, 0], rtol=1e-12)
  assert round(float(ratio[5, 3]), 4) == 0.6283


def test_arrays_and_scalars():
  b2 = np.array([0.95, 0.99, 0.999])
  both = _law.coasting_ratio(np.arange(4)[:, None], 0.9, b2, 7)
  assert both.shape == (4, 3)
  np.testing.assert_array_equal(both[0], 1.0)
  one = _law.coasting_ratio(2, 0.9, 0.99, 7)
  assert one == both[2, 1] and np.ndim(one) == 0 and one.dtype == np.float64


def test_only_growing_betas_warn():
  calls = [
    _law.warn_if_growing,
    _law.coasting_half_life,
    _law.coasting_steps,
    lambda b1, b2: _law.coasting_ratio(3, b1, b2),
  ]
  for call in calls:
    with pytest.warns(UserWarning) as caught:
      call(0.9, 0.8)
    (warning,) = caught
    assert warning.filename == __file__  # points at who called
    for part in ('b1=0.9', 'b2=0.8', '1.00623', 'grows', 'b2 >= b1**2'):
      assert part in str(warning.message)
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      for b1, b2 in [(0.9, 0.95), (0.999999, 0.999999), (0.0, 0.5)]:
        call(b1, b2)


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: _law.coasting_ratio(1, 1.0, 0.9), r'b1=1\.0.*\[0, 1\)'),
    (lambda: _law.coasting_ratio(1, -0.1, 0.9), 'b1=-0.1'),
    (lambda: _law.coasting_half_life(math.nan, 0.9), 'b1=nan'),
    (lambda: _law.coasting_steps(0.9, 1.0), r'b2=1\.0.*\(0, 1\)'),
    (lambda: _law.warn_if_growing(0.9, 0.0), r'b2=0\.0'),
    (lambda: _law.coasting_ratio([0, -1], 0.9, 0.95), 'clipped_steps'),
    (lambda: _law.coasting_ratio(math.inf, 0.9, 0.95), 'clipped_steps'),
    (lambda: _law.coasting_ratio(1, 0.9, 0.95, 0), 'live_steps=0'),
    (lambda: _law.coasting_steps(0.9, 0.95, 3, 0.5), 'live_steps=0.5'),
    (lambda: _law.coasting_ratio(1, 0.9, 0.95, 1, -1e-8), 'eps_ratio'),
    (lambda: _law.coasting_steps(0.9, 0.95, -1), 'num_steps=-1'),
    (lambda: _law.coasting_steps(0.9, 0.95, 1.5), 'num_steps=1.5'),
  ],
)
def test_arguments_out_of_range(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def one_logit(optimizer, num_steps=120, p_old=0.3, high=0.2):
  """Ascends ratio * A, A > 0, on a Bernoulli's logit until it is clipped.

  Returns:
    The ratio, the gradient and the logit's update, `[num_steps]`, at and by
    each step, and the final ratio.
  """
  with jax.enable_x64(True):
    logit = jnp.float64(math.log(p_old / (1 - p_old)))

    def step(carry, _):
      logit, state = carry
      p = jax.nn.sigmoid(logit)
      ratio = p / p_old
      slope = jnp.where(ratio > 1 + high, 0.0, ratio * (1 - p))
      update, state = optimizer.update(-slope, state, logit)
      return (logit + update, state), (logit, slope, update)

    run = jax.jit(
      lambda: jax.lax.scan(
        step, (logit, optimizer.init(logit)), length=num_steps
      )
    )
    (last, _), (logits, slopes, updates) = jax.device_get(run())
  return np.append(logits, last), slopes, updates


def ratio_of(logit, p_old=0.3):
  return 1 / (1 + np.exp(-logit)) / p_old


@pytest.mark.parametrize(
  ('b2', 'rate', 'end'),
  [
    (0.95, 0.02, 1.3981),
    (0.999, 0.02, 1.3665),
    (0.95, 0.005, 1.2509),
    (0.999, 0.005, 1.2399),
  ],
)
def test_one_logit_coasts_where_the_law_says(b2, rate, end):
  logits, slopes, updates = one_logit(optax.adam(rate, b1=0.9, b2=b2))
  live = int(np.count_nonzero(slopes))
  assert np.all(slopes[:live]) and not np.any(slopes[live:])
  if (b2, rate) == (0.95, 0.02):
    assert live == 14 and round(ratio_of(logits[live]), 4) == 1.2066
    crude = ratio_of(logits[live] + rate * _law.coasting_steps(0.9, b2))
    assert round(crude, 4) == 1.3976
  way = _law.coasting_steps(0.9, b2, 120 - live, live)
  predicted = ratio_of(logits[live] + updates[live - 1] * way)
  assert round(predicted, 4) == end
  assert round(ratio_of(logits[-1]), 4) == end
  np.testing.assert_allclose(predicted, ratio_of(logits[-1]), rtol=1e-7)


def test_one_logit_without_momentum_stops():
  logits, slopes, _ = one_logit(optax.sgd(0.1))
  live = int(np.count_nonzero(slopes))
  assert round(ratio_of(logits[-1]), 4) == 1.2149
  assert logits[-1] == logits[live]  # not one step over the boundary's
