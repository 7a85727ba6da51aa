"""Properties that every transform and every method must have.

The tests of one entry run one after another (`cases.by_name`), and share what
`evaluated` has found.
"""

import functools

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
from tests.losses import evaluated

# With a newer JAX each method is asked once.
QUICK = pytest.mark.quick

everything = pytest.mark.parametrize(**cases.by_name(cases.TABLE))
once_each = pytest.mark.parametrize(**cases.by_name(cases.ONCE_EACH))
every_method = pytest.mark.parametrize(**cases.by_name(cases.METHODS))
# A method once: its other arguments run the same lines in another dtype too.
REPEATED = [e for e in cases.METHODS if e not in cases.ONCE_EACH]
# So do transforms that take no exponential of a log-ratio.
PLAIN = [
  e
  for e in cases.TRANSFORMS
  if e.name not in cases.CORRECTIONS and 'kl' not in e.name
]
rowwise = pytest.mark.parametrize(
  **cases.by_name([e for e in cases.TABLE if e.make().scope == 'row'])
)
close = dict(rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('seed', [pytest.param(0, marks=QUICK), 1, 2])
@pytest.mark.parametrize(**cases.by_name(cases.METHODS + cases.PARTS))
def test_value_and_gradient(entry, seed):
  """Those of a loop in NumPy."""
  found = evaluated.found(entry, seed)
  expected_loss, expected_gradient = entry.oracle(found.case)
  assert np.abs(expected_gradient).max() > 1e-4  # the oracle is not idle
  np.testing.assert_allclose(found.loss, expected_loss, **close)
  np.testing.assert_allclose(found.gradient, expected_gradient, **close)


@pytest.mark.parametrize(
  'value', [60.0, -60.0, pytest.param(np.inf, marks=QUICK)]
)
@every_method
def test_garbage_where_nobody_owns_the_place(entry, value):
  found = evaluated.found(entry, ('garbage', value))
  expected_gradient = entry.oracle(cases.make_case(5))[1]
  np.testing.assert_allclose(found.gradient, expected_gradient, **close)


@everything
def test_padding_is_inert(entry):
  found = evaluated.found(entry, 1)
  clean = evaluated.found(entry, 'clean')
  assert found.loss == clean.loss
  np.testing.assert_array_equal(found.gradient, clean.gradient)
  owned = found.case.mask & found.case.valid[:, :, None]
  assert not np.any(found.gradient[~owned])
  assert np.any(found.gradient[owned])


@everything
def test_an_invalid_completion_is_as_if_absent(entry):
  """One in each group, with garbage in it."""
  found = evaluated.found(entry, 'invalid')
  without = type(found.case)(*(np.delete(x, 2, axis=1) for x in found.case))
  if entry.oracle:
    loss, gradient = entry.oracle(without)
  else:
    loss, gradient = cases.loss_and_gradient(entry.make(), without)
  np.testing.assert_allclose(found.loss, loss, **close)
  np.testing.assert_allclose(
    np.delete(found.gradient, 2, axis=1), gradient, **close
  )
  assert not np.any(found.gradient[:, 2])


@pytest.mark.parametrize(
  # Of equal advantages it keeps the earlier.
  **cases.by_name([e for e in cases.TABLE if 'pruning' not in e.name])
)
def test_permutations_permute_the_gradient(entry):
  found = evaluated.found(entry, 3)
  _, reordered = evaluated.shuffled(found.case)
  permuted = evaluated.found(entry, 'shuffled').gradient
  np.testing.assert_allclose(permuted, reordered(found.gradient), **close)


@rowwise
def test_micro_batches_split_inside_groups_add_up(entry):
  """Rows in any order, three at a time; all of the last three are masked."""
  found, method = evaluated.found(entry, 4), entry.make()
  empty = ~np.any(found.case.mask, axis=-1).reshape(-1)
  order = np.random.default_rng(0).permutation(16)
  order = order[np.argsort(empty[order], stable=True)]
  assert empty.sum() == 1  # it is in no micro-batch with others

  def pieces(x):  # [P,G,...] to [6,3,1,...], filled up by padding
    rows = np.reshape(x, (16, 1, *np.shape(x)[2:]))[order]
    padding = np.zeros((2, *rows.shape[1:]), rows.dtype)
    return np.concatenate([rows, padding]).reshape(6, 3, *rows.shape[1:])

  @jax.vmap
  @jax.value_and_grad
  def piece_loss(logp, batch, entropy):
    top = cases.logp_top(logp, batch)
    return losses.surrogate_loss(
      method, logp, batch, found.state, entropy, top
    )[0]

  values, slopes = piece_loss(
    *jax.tree.map(pieces, (found.case.logp, found.batch, found.case.entropy))
  )
  gradient = np.zeros((16, 6))
  gradient[order] = slopes.reshape(18, 6)[:16]
  np.testing.assert_allclose(np.sum(values), found.loss, **close)
  np.testing.assert_allclose(
    gradient.reshape(found.gradient.shape), found.gradient, **close
  )


def loss_and_gradient(method, batch, logp, entropy):
  batch, state = cases.prepared(method, batch)

  def objective(logp):
    top = cases.logp_top(logp, batch)
    return losses.surrogate_loss(method, logp, batch, state, entropy, top)[0]

  return jax.value_and_grad(objective)(logp)


@functools.cache
def four(axis_type):
  return jax.make_mesh(
    (4,), ('data',), axis_types=(axis_type,), devices=jax.devices()[:4]
  )


@functools.cache
def spread(axis_type, seed):
  """Arguments for `loss_and_gradient`: one prompt on each of four devices."""
  case = cases.make_case(seed)
  given = (
    cases.to_batch(case),
    jnp.asarray(case.logp),
    jnp.asarray(case.entropy),
  )
  sharding = NamedSharding(four(axis_type), PartitionSpec('data'))
  return jax.device_put(given, sharding)


@once_each
def test_one_trace_over_sharded_prompts_is_right_for_every_case(entry):
  """Each operation says what becomes of what is sharded."""
  method, traces = entry.make(), []

  @jax.jit
  def run(*given):
    traces.append(None)
    return loss_and_gradient(method, *given)

  with jax.set_mesh(four(AxisType.Explicit)):
    for seed in range(3):
      loss, gradient = run.eval_shape(*spread(AxisType.Explicit, seed))
      assert loss.sharding.spec == PartitionSpec()
      assert gradient.sharding.spec == PartitionSpec('data', None, None)
  assert len(traces) == 1
  assert len({float(evaluated.found(entry, s).loss) for s in range(3)}) == 3


# Who sorts, loops over, or compares what is sharded, and who only adds it up.
SPLIT = (
  'kl_cov', 'clip_cov', 'forking_tokens', 'gtpo_conflict', 'recenter_branches',
  'passk', 'stages',
)  # fmt: skip


@pytest.mark.parametrize(
  'axis_type, entry',
  # The compiler itself splits what is `Auto`; only of what couples prompts can
  # anything be asked there.
  [
    pytest.param(
      axis_type,
      entry,
      id=f'{axis_type.name}-{entry.name}',
      marks=[pytest.mark.long] * (not entry.name.startswith(SPLIT)),
    )
    for axis_type in (AxisType.Auto, AxisType.Explicit)
    for entry in cases.ONCE_EACH
    if axis_type == AxisType.Explicit or entry.make().scope == 'batch'
  ],
)
def test_sharded_over_prompts(axis_type, entry):
  found, method = evaluated.found(entry, 6), entry.make()
  with jax.set_mesh(four(axis_type)):
    run = jax.jit(lambda *given: loss_and_gradient(method, *given))
    loss, gradient = run(*spread(axis_type, 6))
  np.testing.assert_allclose(loss, found.loss, **close)
  np.testing.assert_allclose(gradient, found.gradient, **close)


@everything
def test_autodiff_equals_frozen_differences(entry, monkeypatch):
  """Finite differences with each `stop_gradient` argument held constant."""
  found, method = evaluated.found(entry, 7), entry.make()
  owned = found.case.mask & found.case.valid[:, :, None]
  logp = np.where(owned, found.case.logp, 0)
  entropy = np.where(owned, found.case.entropy, 0)
  places = np.argwhere(owned)
  places = places[:: max(1, len(places) // 10)]
  shifted = np.stack([logp] * (1 + 2 * len(places)))
  for n, index in enumerate(map(tuple, places)):
    shifted[1 + 2 * n][index] += 1e-5
    shifted[2 + 2 * n][index] -= 1e-5

  # Everywhere that of the first, which is not shifted.
  constant = lambda x: lax.all_gather(x, 'shift')[0]
  freeze = lambda x: jax.tree.map(constant, x)
  monkeypatch.setattr(lax, 'stop_gradient', freeze)

  def loss(logp):
    top = cases.logp_top(logp, found.batch)
    return losses.surrogate_loss(
      method, logp, found.batch, found.state, entropy, top
    )[0]

  values = np.asarray(jax.vmap(loss, axis_name='shift')(shifted))
  slopes = (values[1::2] - values[2::2]) / 2e-5
  np.testing.assert_allclose(
    slopes, found.gradient[tuple(places.T)], rtol=1e-5, atol=1e-9
  )


@pytest.mark.parametrize(**cases.by_name(cases.TABLE, long=REPEATED + PLAIN))
@pytest.mark.parametrize(
  'gap', [100.0, pytest.param(-100.0, marks=pytest.mark.long)]
)
def test_extreme_log_ratios_stay_finite_in_float32(entry, gap):
  found = evaluated.found(entry, ('gap', gap), jnp.float32)
  assert found.loss.dtype == found.gradient.dtype == jnp.float32
  assert np.isfinite(found.loss) and np.all(np.isfinite(found.gradient))


@pytest.mark.parametrize(**cases.by_name(cases.METHODS, long=REPEATED))
def test_float32_matches_float64(entry):
  wide = evaluated.found(entry, 9).gradient
  narrow = evaluated.found(entry, 9, jnp.float32).gradient
  np.testing.assert_allclose(narrow, wide, rtol=1e-4, atol=1e-6)
