"""The steps of one rollout: ratios, orders, anchors, flags, compilations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax import optim
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import programs
from grpo_jax.learner import step as learner_lib
from grpo_jax.learner import updates
from grpo_jax.models import layout
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.rollouts import gathering
from tests import bigram
from tests import tiny
from tests.compilations import compiled_programs
from tests.learning import MODEL
from tests.learning import PARAMS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import credited
from tests.learning import layouts_of
from tests.learning import learn
from tests.learning import learned
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import score
from tests.learning import spec
from tests.learning import with_policies


def unscored(seed=0, **options):
  """A rollout without log-probabilities of the old policy."""
  rollout = bigram_rollout(seed, **options)
  return rollout._replace(batch=rollout.batch._replace(logp_old=None))


def sampled(log_kept=0.0):
  """As a sampler gives it whose log-probabilities are those of the learner."""
  rollout = unscored(reward=np.eye(4))  # no batch without advantages
  exact = np.asarray(score(of_grpo(), bigram.params(), rollout).logp)
  kept = np.full(exact.shape, log_kept, np.float32)
  batch = rollout.batch._replace(
    logp_sampler=exact - kept, extras={'log_kept': kept}
  )
  return rollout._replace(batch=batch)


def updater(learner, kind='shared', micro_rows=1, **options):
  rows = spec(kind, micro_rows)
  return make_updater(learner, bigram.params(), rows, **options)


@functools.cache
def of_grpo():
  """Two batches and three epochs; several tests call it."""
  learner = bigram_learner(losses.methods.grpo(kl_coefficient=0))
  return updater(learner, micro_rows=2, batches=2, epochs=3)


def begun(made):
  return made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))


def test_the_ratio_is_one_before_the_first_update():
  rollout = unscored()
  learner = bigram_learner(losses.methods.gspo(), optimizer=optax.sgd(0.0))
  for batches, epochs in ((1, 1), (2, 2)):
    made = updater(learner, 'shared', 2, batches=batches, epochs=epochs)
    assert made.spec.forward_passes(0) == 3 * epochs
    state = begun(made)
    state, measured = learned(made, state, rollout, 0)
    scalars = metrics.to_scalars(measured)
    assert scalars['kl_old_k1'] == scalars['kl_old_k3'] == 0
    assert scalars['ratio'] == scalars['ratio_p01'] == scalars['ratio_p99'] == 1
    assert scalars['ratio_max'] == scalars['ratio_min'] == 1
    assert scalars['clipped_high'] == scalars['clipped_low'] == 0
    assert state.step == batches * epochs


@pytest.mark.quick
@pytest.mark.parametrize(
  'kind', ['shared', pytest.param('packed', marks=pytest.mark.long)]
)
def test_the_ratio_is_one_in_bf16_too(kind):
  """Scoring and training are two programs; both round where the model says.

  Master weights and moments stay float32.
  """
  rollout = make_rollout(reward=np.eye(4))
  rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  learner = make_learner(
    losses.methods.gspo(),
    optimizer=optax.adam(0.0),
    compute_dtype='bfloat16',
    unroll=True,
    num_layers=2,
  )
  params = tiny.params(tiny.model(num_layers=2))
  made = make_updater(learner, params, spec(kind, 2), 0, 2, 2)
  state, measured = learned(made, made.compiled.init(params), rollout)
  scalars = metrics.to_scalars(measured)
  assert state.step == 4
  kinds = {
    x.dtype
    for x in jax.tree.leaves((state.params, state.opt_state))
    if jnp.issubdtype(x.dtype, jnp.floating)
  }
  assert kinds == {jnp.dtype('float32')}
  assert np.isfinite(scalars['grad_norm']) and scalars['grad_norm'] > 0
  assert scalars['ratio'] == scalars['ratio_min'] == scalars['ratio_max'] == 1
  assert scalars['kl_old_k3'] == 0
  assert scalars['clipped_high'] == scalars['clipped_low'] == 0


@pytest.mark.parametrize(
  'kind',
  [
    'shared',
    pytest.param('packed', marks=pytest.mark.long),
    pytest.param('padded', marks=pytest.mark.long),
  ],
)
def test_rows_that_are_gathered_on_the_devices_are_the_rows_of_one_host(kind):
  rollout = unscored()
  batch = rollout.batch
  sampler = bigram_rollout().batch.logp_old
  rollout = rollout._replace(batch=batch._replace(logp_sampler=sampler))
  learner = bigram_learner(losses.methods.dapo(), mesh=(2, 2, 1))
  made = updater(learner, kind, 4, batches=2, epochs=2)
  fill, filled, ends = made.compiled.fill, [], []

  def noted(*args):
    filled.append(len(ends))
    return fill(*args)

  functions = dataclasses.replace(made.compiled, fill=noted)
  made = dataclasses.replace(made, compiled=functions)
  for holder in None, np.zeros(len(rollout.prompts), np.int64):
    whole = rollout._replace(holder=holder)
    whole = gathering.on_devices(whole, learner.mesh)
    assert isinstance(whole.batch.tokens, jax.Array) == (holder is not None)
    state, measured = learned(made, begun(made), whole, 0)
    ends.append((state, metrics.to_scalars(measured)))
  assert filled and {*filled} == {1}
  jax.tree.map(np.testing.assert_array_equal, *ends)


def test_several_batches_and_epochs_move_the_ratio():
  rollout, made = sampled(), of_grpo()
  chosen = list(updates.optimizer_batches(made.spec, 4, step=7))
  assert len(chosen) == 6
  for epoch in range(3):
    prompts = np.concatenate(chosen[2 * epoch : 2 * epoch + 2])
    np.testing.assert_array_equal(np.sort(prompts), np.arange(4))
  again = list(updates.optimizer_batches(made.spec, 4, step=7))
  np.testing.assert_array_equal(np.array(chosen), np.array(again))
  orders = {
    tuple(np.concatenate([*updates.optimizer_batches(made.spec, 4, s)]))
    for s in range(8)
  }
  assert len(orders) > 4
  state, measured = learned(made, begun(made), rollout, 0)
  assert state.step == 6
  assert metrics.to_scalars(measured)['kl_old_k3'] > 1e-5


def test_the_anchor_may_be_the_sampler():
  rollout = make_rollout()
  sampler = (rollout.batch.logp_old - 0.5).astype(np.float32)
  rollout = rollout._replace(
    batch=rollout.batch._replace(logp_old=None, logp_sampler=sampler)
  )
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  made = make_updater(learner, PARAMS, spec('shared', 2), anchor='sampler')
  state = learner_lib.init(learner, PARAMS)
  batch, _ = with_policies(made, state, rollout)
  np.testing.assert_array_equal(batch.logp_old, sampler)


def test_a_reference_is_kept_and_scored_only_if_the_method_has_one():
  without = make_learner(losses.methods.grpo(kl_coefficient=0))
  assert learner_lib.init(without, PARAMS).reference is None
  learner = make_learner(losses.methods.grpo())
  rollout = make_rollout()
  made = make_updater(learner, PARAMS, spec())
  state = learner_lib.init(learner, PARAMS)
  moved = jax.tree.map(lambda x: 1.5 * x, PARAMS)
  batch, _ = with_policies(made, state._replace(params=moved), rollout)
  rows = layout.padded_rows(
    rollout.prompts, rollout.batch.tokens, rollout.length, 16
  )
  expected = tiny.gather(
    tiny.score(MODEL, PARAMS, rows).logp, rows, rollout.length
  )
  inside = rollout.batch.mask
  np.testing.assert_allclose(
    batch.logp_ref[inside], expected[inside], atol=1e-5
  )


def test_the_optimizer_hears_of_the_rollout_and_of_clipping():
  heard = []

  def update_fn(grads, state, params=None, **extra):
    names = 'first_of_rollout', 'clipped_share', 'advantage_scale'
    assert set(extra) == set(names)  # and no `outward`, which nobody wants
    jax.debug.callback(
      lambda *args: heard.append([float(x) for x in args]),
      *(extra[name] for name in names),
      ordered=True,
    )
    far = jax.tree.map(lambda g: -50 * g, grads)  # so that some leave the range
    return far, state

  listening = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update_fn
  )
  # Tokens that are not trained leave the range too, but nobody clips them.
  method = losses.chain(
    losses.drop_truncated(), losses.methods.grpo(kl_coefficient=0)
  )
  made = updater(bigram_learner(method, listening), 'padded', 4, epochs=2)
  state, rollout = begun(made), bigram_rollout()
  truncated = np.arange(rollout.length.size).reshape(rollout.length.shape) % 2
  batch = rollout.batch._replace(truncated=truncated == 1)
  rollout = rollout._replace(batch=batch)
  scalars = metrics.to_scalars(learned(made, state, rollout, 0)[1])
  jax.effects_barrier()
  # Each is computed once to look at it, and once to take it.
  assert heard[::2] == heard[1::2]
  first, clipped, scale = zip(*heard[::2], strict=True)
  assert first == (1.0, 0.0)
  share = scalars['clipped_high'] + scalars['clipped_low']
  assert clipped[0] == 0.0 and 0.0 < clipped[1] <= 1.0
  np.testing.assert_allclose(clipped[1], 2 * share, rtol=1e-5)
  batch, _ = losses.credit(method, rollout.batch, method.init())
  kept = np.asarray(batch.advantage)[np.asarray(batch.keep)]
  np.testing.assert_allclose(scale, np.sqrt(np.mean(kept**2)), rtol=1e-6)


def test_a_skipped_first_batch_is_not_the_first_update():
  """The flag goes to the first step that is taken."""
  taken = []

  def update_fn(grads, state, params=None, *, first_of_rollout, **extra):
    del params, extra
    jax.debug.callback(
      lambda first: taken.append(bool(first)), first_of_rollout, ordered=True
    )
    return grads, state

  listening = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update_fn
  )
  learner = bigram_learner(losses.methods.grpo(kl_coefficient=0), listening)
  reward = np.eye(4)
  reward[:2, 0] = [1.0, 1.0]
  reward[0] = 1.0  # nothing to learn in the first of four batches
  rollout = bigram_rollout(reward=reward)
  keep = rollout.batch.keep.copy()
  keep[1] = False  # and in another one no token to learn it from
  rollout = rollout._replace(batch=rollout.batch._replace(keep=keep))
  made = updater(learner, 'padded', 4, batches=4)
  state, _ = learned(made, begun(made), rollout, 0)
  assert (state.step, state.idle) == (2, 2)
  jax.effects_barrier()
  # Each twice; see above. A skipped batch is not seen at all.
  assert taken == [True, True, False, False]


def test_an_optimizer_may_compute_in_another_dtype():
  def update_fn(grads, state, params=None, **extra):
    del params, extra
    half = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    return half, jax.tree.map(jnp.add, state, half)

  halves = optax.GradientTransformationExtraArgs(
    lambda params: jax.tree.map(jnp.zeros_like, params), update_fn
  )
  learner = bigram_learner(losses.methods.grpo(kl_coefficient=0), halves)
  made = updater(learner, 'padded', 4)
  state, measured = learned(
    made, begun(made), bigram_rollout(reward=np.eye(4)), 0
  )
  kinds = {x.dtype for x in jax.tree.leaves((state.params, state.opt_state))}
  assert kinds == {jnp.dtype('float32')} and measured['update_norm'].total > 0


def test_the_sampler_gap_is_neither_filter_nor_drift():
  made = of_grpo()
  _, measured = learned(made, begun(made), sampled(log_kept=-0.7), 0)
  scalars = metrics.to_scalars(measured)
  assert scalars['kl_old_k3'] > 1e-4  # the policy has moved
  assert scalars['sampler_gap_max'] < 1e-4
  assert 1 <= scalars['sampler_gap_exp'] < 1 + 1e-4


@pytest.mark.parametrize(
  'kind',
  [
    'packed',
    pytest.param('shared', marks=pytest.mark.long),
    pytest.param('padded', marks=pytest.mark.long),
  ],
)
def test_compilations_are_bounded_by_the_buckets(kind):
  """Ragged rollouts of any lengths: one program per pair of buckets."""
  learner = bigram.make_learner(losses.methods.grpo(kl_coefficient=0))
  cut = LayoutSpec(kind, 2, 0, (4, 8), 30)
  made = make_updater(learner, bigram.params(), cut)
  state, decided = begun(made), cut
  with compiled_programs() as names:
    for seed in range(8):
      rollout = bigram_rollout(seed)
      state, _, decided = learn(made, decided, state, rollout, seed)
  # Packed rows also bucket their number and the completions in one.
  most = 2 if kind != 'packed' else 6
  assert 1 <= names.count('train_step') <= most, (kind, names)
  assert names.count('credit') == 1


def test_layouts_are_kept_for_one_rollout():
  learner = bigram.make_learner(losses.methods.grpo(kl_coefficient=0))
  made = make_updater(learner, bigram.params(), spec('padded', 4), batches=2)
  for rollout in (make_rollout(0), make_rollout(1)):
    rows = layouts_of(made, rollout)
    later = np.array([2, 0])
    assert rows.stack(later) is not rows.stack(later)  # it is used once
    for chosen in rows.first_epoch():
      found = rows.stack(chosen)
      assert rows.stack(chosen) is found
      wanted, _ = micro_batches.cut_rollout(rollout, chosen, made.layout)
      np.testing.assert_array_equal(found.rows.tokens, wanted.tokens)
      np.testing.assert_array_equal(found.rows.target, wanted.target)


@pytest.mark.parametrize('kind', ['auto', 'packed'])
def test_the_first_rollout_decides_the_layout_of_all(kind):
  learner = bigram.make_learner(losses.methods.grpo(kl_coefficient=0))
  made = make_updater(learner, bigram.params(), spec(kind, 4), batches=2)
  rollout = bigram_rollout()
  first = np.arange(2)
  decided = micro_batches.decided(rollout, first, made.layout)
  assert made.layout.is_open and not decided.is_open
  state, _, kept = learn(made, made.layout, begun(made), rollout, 0)
  assert kept == decided
  mask = np.asarray(rollout.batch.mask) & (np.arange(6) < 1)
  short = rollout._replace(
    length=np.minimum(rollout.length, 1),
    batch=rollout.batch._replace(mask=mask, keep=mask),
  )
  *_, again = learn(made, kept, state, short, 1)
  assert again is kept


@functools.cache
def of_reference():
  """One update, with a reference; several tests call it."""
  return updater(bigram_learner(losses.methods.grpo()), refresh_steps=2)


@pytest.mark.parametrize('weight', [1.0, 0.25])
def test_a_reference_is_refreshed_every_n_rollouts(weight):
  made, first = of_reference(), bigram.params()
  spec = dataclasses.replace(made.spec, refresh_weight=weight)
  made = dataclasses.replace(made, spec=spec)
  state, _ = learned(made, begun(made), bigram_rollout(), 0)
  assert_equal(state.reference, first)  # fixed until it is due
  state, _ = learned(made, state, bigram_rollout(1), 1)
  expected = jax.tree.map(
    lambda old, new: (1 - weight) * old + weight * new, first, state.params
  )
  if weight == 1:
    assert_equal(state.reference, state.params)
  for a, b in zip(
    jax.tree.leaves(state.reference), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
  # The copy was no alias: donation works.
  learned(made, state, bigram_rollout(2), 2)


def assert_equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)


def test_groups_in_stock_are_anchored_on_what_drew_them():
  """Of three versions: only the newest is scored by the learner."""
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  rollout = make_rollout()
  version = np.zeros(rollout.batch.tokens.shape, np.int32)
  version[:2] = 5
  sampler = np.full(version.shape, -3.0, np.float32)
  rollout = rollout._replace(
    batch=rollout.batch._replace(
      version=version,
      logp_old=None,
      logp_sampler=sampler,
      extras={'log_kept': np.full(version.shape, -0.5, np.float32)},
    )
  )
  made = make_updater(learner, PARAMS, spec('shared', 2), stale=True)
  state = learner_lib.init(learner, PARAMS)
  batch, _ = with_policies(made, state, rollout, 5)
  scored = score(made, PARAMS, rollout).logp
  inside = rollout.batch.mask
  np.testing.assert_array_equal(
    batch.logp_old[:2][inside[:2]], scored[:2][inside[:2]]
  )
  np.testing.assert_array_equal(batch.logp_old[2:], -3.5)
  np.testing.assert_array_equal(batch.extras['fresh'], version == 5)
  # Without `log_kept` nothing was filtered.
  bare = rollout._replace(batch=rollout.batch._replace(extras={}))
  batch, _ = with_policies(made, state, bare, 5)
  np.testing.assert_array_equal(batch.logp_old[2:], -3.0)
  plain = make_updater(learner, PARAMS, spec('shared', 2))
  assert with_policies(plain, state, rollout, 5)[0].logp_old is None


def compile_all(made, example, step):
  for lower in programs.lowerings(made, made.layout, example, step).values():
    lower().compile()


@pytest.mark.parametrize(
  'method, options',
  [
    (losses.methods.grpo(), {}),
    (losses.methods.grpo_s(), {'epochs': 2}),
    pytest.param(
      losses.methods.clip_cov(), {'batches': 2}, marks=pytest.mark.quick
    ),
  ],
)
def test_what_is_compiled_ahead_is_what_is_called(method, options):
  """One compilation of each program, whoever comes first."""
  example = bigram_rollout()
  made = updater(bigram_learner(method), **options)
  with compiled_programs() as ahead:
    compile_all(made, example, 0)
  state, rollout = begun(made), bigram_rollout(1)
  with compiled_programs() as later:
    ready = credited(made, state, rollout)
    updates.take_updates(made, state, ready)
  assert {'train_step', 'credit'} <= set(ahead)
  assert ('score_all' in ahead) == (ready.scorings > 0)
  assert not set(ahead) & set(later)


@pytest.mark.long
@pytest.mark.parametrize('step', [0, 1])
def test_the_step_at_which_a_run_goes_on_is_compiled_ahead(step):
  """A step that measures overshoot is another program than other steps."""
  learner = bigram.changed(
    bigram.make_learner(losses.methods.grpo()),
    transform=optim.record_adam_moments(optax.adam(0.1)),
    records=True,
    score_forward=bigram.score,
  )
  made = make_updater(learner, bigram.params(), spec(), watch_steps=2)
  state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
  with compiled_programs() as ahead:
    compile_all(made, make_rollout(), step)
  with compiled_programs() as later:
    learned(made, state, make_rollout(1), step)
  assert 'train_step' in ahead and 'train_step' not in later
