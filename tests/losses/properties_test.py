"""Properties that every transform and every method must have."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

everything = pytest.mark.parametrize(**cases.by_name(cases.TABLE))
once_each = pytest.mark.parametrize(**cases.by_name(cases.ONCE_EACH))
rowwise = pytest.mark.parametrize(
  **cases.by_name([e for e in cases.TABLE if e.make().scope == 'row'])
)
close = dict(rtol=1e-9, atol=1e-12)


@everything
def test_padding_is_inert(entry):
  case = cases.make_case(1)
  loss, gradient = cases.loss_and_gradient(entry.make(), case)
  clean, expected = cases.loss_and_gradient(
    entry.make(), cases.garbage(case, 0.25)
  )
  assert loss == clean
  np.testing.assert_array_equal(gradient, expected)
  owned = case.mask & case.valid[:, :, None]
  assert not np.any(gradient[~owned])
  assert np.any(gradient[owned])


@everything
def test_an_invalid_completion_is_as_if_absent(entry):
  """One in each group, with garbage in it."""
  case = cases.make_case(2)
  valid = case.valid.copy()
  valid[:, 2] = False
  case = cases.garbage(case._replace(valid=valid), np.nan)
  loss, gradient = cases.loss_and_gradient(entry.make(), case)
  without = type(case)(*(np.delete(x, 2, axis=1) for x in case))
  expected_loss, expected = cases.loss_and_gradient(entry.make(), without)
  np.testing.assert_allclose(loss, expected_loss, **close)
  np.testing.assert_allclose(np.delete(gradient, 2, axis=1), expected, **close)
  assert not np.any(gradient[:, 2])


@pytest.mark.parametrize(
  # Of equal advantages it keeps the earlier.
  **cases.by_name([e for e in cases.TABLE if 'pruning' not in e.name])
)
def test_permutations_permute_the_gradient(entry):
  case = cases.make_case(3)
  _, gradient = cases.loss_and_gradient(entry.make(), case)
  rng = np.random.default_rng(0)
  prompts, group = rng.permutation(4), rng.permutation(4)
  shuffled = type(case)(*(x[prompts][:, group] for x in case))
  _, permuted = cases.loss_and_gradient(entry.make(), shuffled)
  np.testing.assert_allclose(permuted, gradient[prompts][:, group], **close)


@rowwise
def test_micro_batches_split_inside_groups_add_up(entry):
  """Rows in any order, three at a time; the last one alone and masked."""
  case, method = cases.make_case(4), entry.make()
  loss, gradient = cases.loss_and_gradient(method, case)
  batch, state = cases.prepared(method, cases.to_batch(case))
  rows = lambda x: np.reshape(x, (16, 1, *x.shape[2:]))
  given = jax.tree.map(rows, (case.logp, batch, case.entropy))
  order = np.random.default_rng(0).permutation(16)
  empty = ~np.any(case.mask, axis=-1).reshape(-1)[order]
  alone, others = order[empty], order[~empty].reshape(5, 3)

  @jax.jit
  @jax.value_and_grad
  def piece_loss(logp, batch, entropy):
    return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

  total, pieces = 0.0, np.zeros((16, 1, 6))
  for index in (*others, alone):
    value, pieces[index] = piece_loss(
      *jax.tree.map(lambda x: x[index], given)  # noqa: B023
    )
    total += value
  np.testing.assert_allclose(total, loss, **close)
  np.testing.assert_allclose(pieces.reshape(gradient.shape), gradient, **close)


@pytest.mark.parametrize(
  'axis_type, entry',
  # The compiler itself splits what is `Auto`; only of what couples prompts can
  # anything be asked there.
  [
    pytest.param(axis_type, entry, id=f'{axis_type.name}-{entry.name}')
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for entry in cases.ONCE_EACH
    if axis_type == AxisType.Explicit or entry.make().scope == 'batch'
  ],
)
def test_sharded_over_prompts(axis_type, entry):
  case, method = cases.make_case(6), entry.make()
  loss, gradient = cases.loss_and_gradient(method, case)
  devices = jax.devices()[:4]  # one prompt on each
  mesh = jax.make_mesh(
    (4,), ('data',), axis_types=(axis_type,), devices=devices
  )
  with jax.set_mesh(mesh):
    spread = NamedSharding(mesh, PartitionSpec('data'))
    batch = jax.device_put(cases.to_batch(case), spread)
    logp, entropy = jax.device_put(
      (jnp.asarray(case.logp), jnp.asarray(case.entropy)), spread
    )

    @jax.jit
    def run(batch, logp, entropy):
      batch, state = cases.prepared(method, batch)

      def objective(logp):
        return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

      return jax.value_and_grad(objective)(logp)

    sharded_loss, sharded = run(batch, logp, entropy)
  np.testing.assert_allclose(sharded_loss, loss, **close)
  np.testing.assert_allclose(sharded, gradient, **close)


@once_each
def test_compiles_once(entry):
  method, traces = entry.make(), []

  @jax.jit
  def run(batch, logp):
    traces.append(None)
    batch, state = cases.prepared(method, batch)
    return losses.surrogate_loss(method, logp, batch, state, logp)[0]

  values = []
  for seed in range(3):
    case = cases.make_case(seed)
    values.append(run(cases.to_batch(case), jnp.asarray(case.logp)))
  assert len(traces) == 1
  assert len({float(value) for value in values}) == 3


@everything
def test_autodiff_equals_frozen_differences(entry, monkeypatch):
  """Finite differences with each `stop_gradient` argument held constant."""
  case, method = cases.make_case(7), entry.make()
  batch, state = cases.prepared(method, cases.to_batch(case))
  _, gradient = cases.loss_and_gradient(method, case)
  owned = case.mask & case.valid[:, :, None]
  logp = np.where(owned, case.logp, 0)
  entropy = np.where(owned, case.entropy, 0)
  frozen = []

  def record(x):
    frozen.append(x)
    return x

  monkeypatch.setattr(lax, 'stop_gradient', record)
  losses.surrogate_loss(method, jnp.asarray(logp), batch, state, entropy)

  def perturbed(index, step):
    replay = iter(frozen)
    monkeypatch.setattr(lax, 'stop_gradient', lambda _: next(replay))
    shifted = logp.copy()
    shifted[index] += step
    value, _ = losses.surrogate_loss(method, shifted, batch, state, entropy)
    return float(value)

  places = np.argwhere(owned)
  for index in map(tuple, places[:: max(1, len(places) // 10)]):
    slope = (perturbed(index, 1e-5) - perturbed(index, -1e-5)) / 2e-5
    np.testing.assert_allclose(slope, gradient[index], rtol=1e-5, atol=1e-9)


@everything
@pytest.mark.parametrize('gap', [100.0, -100.0])
def test_extreme_log_ratios_stay_finite_in_float32(entry, gap):
  case = cases.make_case(8)
  case = case._replace(logp_old=case.logp - gap, logp_ref=case.logp + gap)
  loss, gradient = cases.loss_and_gradient(entry.make(), case, jnp.float32)
  assert loss.dtype == jnp.float32 and gradient.dtype == jnp.float32
  assert np.isfinite(loss) and np.all(np.isfinite(gradient))


def test_float32_matches_float64():
  for entry in cases.METHODS:
    case = cases.make_case(9)
    _, wide = cases.loss_and_gradient(entry.make(), case)
    _, narrow = cases.loss_and_gradient(entry.make(), case, jnp.float32)
    np.testing.assert_allclose(narrow, wide, rtol=1e-4, atol=1e-6)
