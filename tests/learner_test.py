"""The learner: one gradient however it is cut up, and steps not taken."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import layout
from grpo_jax import learner as learner_lib
from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import models
from grpo_jax import optim
from grpo_jax import rollout as rollout_lib
from grpo_jax import sharding
from grpo_jax import update
from tests import tiny

MODEL = tiny.model()
PARAMS = tiny.params(MODEL)


def entropy_method():
  """Reads the entropy, so that its pull-back is exercised too."""
  bonus = losses.add_penalty(
    lambda terms, batch: -0.1 * terms.entropy, requires=('entropy',)
  )
  return losses.chain(losses.methods.dapo(), bonus)


METHODS = {
  'grpo': losses.methods.grpo,
  'gspo': functools.partial(losses.methods.gspo, low=0.05, high=0.05),
  'kl_cov': functools.partial(losses.methods.kl_cov, share=0.2),
  'entropy': entropy_method,
}


def make_learner(
  method, mesh=(1, 1, 1), optimizer=None, on_zero='skip', **changes
):
  model = tiny.model(**changes)

  def score(params, rows, with_entropy):
    return models.score(model, params, rows, 1.0, with_entropy)

  return learner_lib.Learner(
    score=score,
    method=method,
    optimizer=optimizer or optim.adamw(1e-2),
    on_zero_advantage=on_zero,
    mesh=sharding.make_mesh(*mesh),
    logical_axes=model.logical_axes,
  )


def make_rollout(seed=0, prompts=4, group=4, reward=None):
  ids, tokens, length = tiny.ragged(seed, prompts, group)
  rng = np.random.default_rng(seed)
  mask = np.arange(tokens.shape[-1]) < length[:, :, None]
  valid = np.ones(length.shape, bool)
  valid[1, 1] = False
  reward = rng.integers(0, 2, length.shape) if reward is None else reward
  rows = layout.padded_rows(ids, tokens, length, 16)
  logp = tiny.gather(tiny.score(MODEL, PARAMS, rows).logp, rows, length)
  logp = np.asarray(logp) + 0.4 * rng.standard_normal(tokens.shape)
  batch = losses.Batch(
    tokens=tokens,
    mask=mask,
    keep=mask,
    valid=valid,
    reward=np.asarray(reward, np.float32),
    reward_parts=np.asarray(reward, np.float32)[..., None],
    truncated=length == tokens.shape[-1],
    version=np.zeros(tokens.shape, np.int32),
    logp_old=logp.astype(np.float32),
    logp_ref=(logp + 0.3).astype(np.float32),
  )
  return rollout_lib.Rollout(batch, length, ids, [])


def spec(kind='shared', micro_rows=1, row_completions=0, pack_tokens=30):
  return rollout_lib.LayoutSpec(
    kind, micro_rows, row_completions, (8,), pack_tokens
  )


@functools.cache
def whole(name):
  """The gradient and metrics by one `value_and_grad` through everything."""
  method, rollout = METHODS[name](), make_rollout()
  batch, state = losses.credit(
    method, jax.tree.map(jnp.asarray, rollout.batch), method.init()
  )
  batch = losses.prepare(method, batch, state)
  rows = layout.padded_rows(rollout.prompts, batch.tokens, rollout.length, 16)

  def loss(params):
    scores = models.score(MODEL, params, rows, 1.0, True)
    logp = tiny.gather(scores.logp, rows, rollout.length)
    entropy = tiny.gather(scores.entropy, rows, rollout.length)
    return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

  return jax.jit(jax.value_and_grad(loss))(PARAMS)


@pytest.mark.parametrize(
  'cut',
  [
    spec('padded', 16),
    spec('padded', 1),
    spec('padded', 3),  # an all-padding tail
    spec('shared', 4),
    spec('shared', 1),
    spec('shared', 2, row_completions=2),  # inside groups
    spec('packed', 1),
    spec('packed', 2),
  ],
  ids=lambda s: f'{s.kind}-{s.micro_rows}-{s.row_completions}',
)
@pytest.mark.parametrize('name', METHODS)
def test_the_gradient_does_not_depend_on_micro_batches(name, cut):
  learner, rollout = make_learner(METHODS[name]()), make_rollout()
  batch, state, _ = learner_lib.credit(learner, rollout.batch, _state(learner))
  batch = losses.prepare(learner.method, batch, state)
  rows, used = rollout_lib.micro_batches(rollout, np.arange(4), cut)
  gradient, loss, _ = jax.jit(
    lambda *args: learner_lib.gradient(learner, *args)
  )(PARAMS, state, batch, rows, used)
  expected_loss, expected = whole(name)
  tiny.assert_trees_close(gradient, expected, 1e-6 * 5)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)


def _state(learner):
  return learner.method.init()


def test_metrics_do_not_depend_on_micro_batches():
  learner, rollout = make_learner(METHODS['grpo']()), make_rollout(1)
  batch, state, _ = learner_lib.credit(learner, rollout.batch, _state(learner))
  batch = losses.prepare(learner.method, batch, state)
  scalars = []
  for cut in (spec('padded', 16), spec('shared', 1), spec('packed', 1)):
    rows, used = rollout_lib.micro_batches(rollout, np.arange(4), cut)
    _, _, measured = learner_lib.gradient(
      learner, PARAMS, state, batch, rows, used
    )
    scalars.append(metrics.to_scalars(measured))
  assert scalars[0]['clipped_high'] > 0 and scalars[0]['clipped_low'] > 0
  for other in scalars[1:]:
    assert other.keys() == scalars[0].keys()
    for name, value in other.items():
      np.testing.assert_allclose(value, scalars[0][name], rtol=1e-4, atol=1e-6)


def one_step(learner, rollout, params=PARAMS, state=None, cut=None):
  made = update.Updater(
    learner, params, cut or spec('padded', 8), reference=PARAMS
  )
  state = made.compiled.init(jax.tree.map(jnp.copy, params))
  return made(state, rollout, 0)


@pytest.mark.parametrize('name', ['grpo', 'kl_cov'])
def test_eight_devices_give_the_result_of_one(name):
  """data x fsdp x tensor = 2 x 2 x 2 against 1 x 1 x 1."""
  results = []
  for mesh in ((1, 1, 1), (2, 2, 2)):
    # Plain descent: Adam's first step is a sign, which amplifies rounding.
    learner = make_learner(METHODS[name](), mesh, optax.sgd(0.1))
    state, measured = one_step(learner, make_rollout(), cut=spec('shared', 4))
    results.append((jax.device_get(state.params), metrics.to_scalars(measured)))
  spread = jax.tree.leaves(state.params)
  assert any(len(x.sharding.device_set) == 8 for x in spread)
  assert any(x.sharding.shard_shape(x.shape) != x.shape for x in spread)
  tiny.assert_trees_close(results[1][0], results[0][0], 1e-6)
  for metric, value in results[0][1].items():
    np.testing.assert_allclose(
      results[1][1][metric], value, rtol=1e-4, atol=1e-5
    )
  moved = jax.tree.map(
    lambda a, b: np.abs(a - b).max(), *results[0][:1], PARAMS
  )
  assert max(jax.tree.leaves(moved)) > 1e-4


def test_moments_lie_beside_their_parameters():
  learner = make_learner(METHODS['grpo'](), (2, 2, 2))
  place = learner_lib.state_sharding(learner, PARAMS)
  flat = jax.tree.leaves(place.params)
  moments = [x for x in jax.tree.leaves(place.opt_state) if x.spec != jax.P()]
  assert len(moments) == 2 * sum(x.spec != jax.P() for x in flat) > 0


def test_a_step_with_a_nonfinite_gradient_changes_nothing():
  rollout = make_rollout()
  poisoned = rollout._replace(
    batch=rollout.batch._replace(
      reward=np.where(rollout.batch.valid, np.inf, 0).astype(np.float32)
    )
  )
  learner = make_learner(losses.methods.reinforce())
  made = update.Updater(learner, PARAMS, spec('padded', 8))
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  state, _ = made(state, rollout, 0)
  before = jax.device_get(state)
  state, measured = made(state, poisoned, 1)
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
  assert (before.step, before.nonfinite) == (1, 0)
  assert (after.step, after.nonfinite, after.idle) == (1, 1, 0)
  assert metrics.to_scalars(measured)['steps_nonfinite'] == 1
  state, _ = made(state, rollout, 2)  # and training goes on
  assert (state.step, state.nonfinite) == (2, 1)


@pytest.mark.parametrize('policy', ['skip', 'step'])
def test_a_batch_without_advantages_follows_the_policy(policy):
  learner = make_learner(losses.methods.grpo(kl_coefficient=0), on_zero=policy)
  made = update.Updater(learner, PARAMS, spec('padded', 8))
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  state, _ = made(state, make_rollout(), 0)
  before = jax.device_get(state)
  state, _ = made(state, make_rollout(reward=np.full((4, 4), 0.1)), 1)
  after = jax.device_get(state)
  equal = [
    np.array_equal(a, b)
    for a, b in zip(
      jax.tree.leaves((after.params, after.opt_state)),
      jax.tree.leaves((before.params, before.opt_state)),
      strict=True,
    )
  ]
  assert all(equal) if policy == 'skip' else not any(equal)
  assert (after.step, after.idle) == ((1, 1) if policy == 'skip' else (2, 0))


def test_the_ratio_is_one_before_the_first_update():
  rollout = make_rollout()
  rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  learner = make_learner(losses.methods.gspo(), optimizer=optax.sgd(0.0))
  for batches, epochs in ((1, 1), (2, 2)):
    made = update.Updater(
      learner, PARAMS, spec('shared', 2), 0, batches, epochs
    )
    state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
    state, measured = made(state, rollout, 0)
    scalars = metrics.to_scalars(measured)
    assert scalars['kl_old'] == 0 and scalars['ratio'] == 1
    assert scalars['clipped_high'] == scalars['clipped_low'] == 0
    assert state.step == batches * epochs


@pytest.mark.parametrize('kind', ['shared', 'packed'])
def test_the_ratio_is_one_in_bf16_too(kind):
  """Scoring and training are two programs; both round where the model says."""
  rollout = make_rollout(reward=np.eye(4))
  rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  learner = make_learner(
    losses.methods.gspo(),
    optimizer=optax.sgd(0.0),
    compute_dtype='bfloat16',
    unroll=True,
  )
  made = update.Updater(learner, PARAMS, spec(kind, 2), 0, 2, 2)
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  state, measured = made(state, rollout, 0)
  scalars = metrics.to_scalars(measured)
  assert state.step == 4
  assert scalars['ratio'] == 1 and scalars['kl_old'] == 0
  assert scalars['clipped_high'] == scalars['clipped_low'] == 0


def collectives(mesh, vocab=1009):
  """Shapes that the compiled step moves between devices."""
  learner = make_learner(
    METHODS['grpo'](), mesh, optax.sgd(0.1), vocab_size=vocab, unroll=True
  )
  model = tiny.model(vocab_size=vocab, unroll=True)
  params = jax.eval_shape(model.init, jax.random.key(0))
  made = update.Updater(learner, params, spec('padded', 8), reference=params)
  rollout = make_rollout()
  rows, used = made.layout(rollout, np.arange(4))
  batch, loss_state, _ = made.compiled.credit(
    rollout.batch, learner.method.init()
  )
  state = jax.eval_shape(lambda p: learner_lib.init(learner, p), params)
  place = learner_lib.state_sharding(learner, params)
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    place,
  )
  lowered = made.compiled.train_step.lower(
    state, batch, np.arange(4), rows, used, np.int32(0)
  )
  moves = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
  return [
    tuple(map(int, shape.split(',')))
    for line in lowered.compile().as_text().splitlines()
    if (found := re.search(rf' = (.*?) (?:{moves})(?:-start)?\(', line))
    for shape in re.findall(r'\w+\[([\d,]+)\]', found[1])
  ]


@pytest.mark.parametrize('mesh', [(1, 4, 1), (4, 1, 1), (2, 4, 1)])
def test_data_shards_move_weights_and_not_activations(mesh):
  """8 rows of 14 positions, width 32: none of these move, weights do."""
  moved = collectives(mesh)
  assert len(moved) > 4
  logits = [shape for shape in moved if shape[-1] == 1009]
  assert set(logits) <= {(32, 1009)}  # the output layer itself
  activations = [
    shape for shape in moved if 14 in shape and math.prod(shape) >= 2 * 14 * 32
  ]
  assert not activations, activations


def test_several_batches_and_epochs_move_the_ratio():
  rollout = make_rollout(reward=np.eye(4))  # no batch without advantages
  rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  made = update.Updater(learner, PARAMS, spec('shared', 2), 0, 2, 3)
  chosen = list(made.optimizer_batches(rollout, step=7))
  assert len(chosen) == 6
  for epoch in range(3):
    prompts = np.concatenate(chosen[2 * epoch : 2 * epoch + 2])
    np.testing.assert_array_equal(np.sort(prompts), np.arange(4))
  again = list(made.optimizer_batches(rollout, step=7))
  np.testing.assert_array_equal(np.array(chosen), np.array(again))
  orders = {
    tuple(np.concatenate(list(made.optimizer_batches(rollout, s))))
    for s in range(8)
  }
  assert len(orders) > 4
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  state, measured = made(state, rollout, 0)
  assert state.step == 6
  assert metrics.to_scalars(measured)['kl_old'] > 1e-5


def test_the_anchor_may_be_the_sampler():
  rollout = make_rollout()
  sampler = (rollout.batch.logp_old - 0.5).astype(np.float32)
  rollout = rollout._replace(
    batch=rollout.batch._replace(logp_old=None, logp_sampler=sampler)
  )
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  made = update.Updater(learner, PARAMS, spec('shared', 2), anchor='sampler')
  batch = made.with_policies(PARAMS, rollout)
  np.testing.assert_array_equal(batch.logp_old, sampler)


def test_a_reference_is_asked_for_and_scored():
  learner = make_learner(losses.methods.grpo())
  with pytest.raises(ValueError, match='reference policy'):
    update.Updater(learner, PARAMS, spec())
  rollout = make_rollout()
  made = update.Updater(learner, PARAMS, spec(), reference=PARAMS)
  batch = made.with_policies(PARAMS, rollout)
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

  def update_fn(grads, state, params=None, *, first_of_rollout, clipped_share):
    jax.debug.callback(
      lambda *args: heard.append([float(x) for x in args]),
      first_of_rollout,
      clipped_share,
      ordered=True,
    )
    return grads, state

  listening = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update_fn
  )
  learner = make_learner(
    losses.methods.grpo(kl_coefficient=0), optimizer=listening
  )
  made = update.Updater(learner, PARAMS, spec('padded', 4), epochs=2)
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  rollout = make_rollout()
  made(state, rollout, 0)[0].step.block_until_ready()
  jax.effects_barrier()
  assert [first for first, _ in heard] == [1.0, 0.0]
  assert heard[0][1] == 0.0 and 0.0 <= heard[1][1] <= 1.0


def test_a_skipped_first_batch_is_not_the_first_update():
  """The flag goes to the first step that is taken."""
  taken = []

  def update_fn(grads, state, params=None, *, first_of_rollout, clipped_share):
    del params, clipped_share
    jax.debug.callback(
      lambda first: taken.append(bool(first)), first_of_rollout, ordered=True
    )
    return grads, state

  listening = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update_fn
  )
  learner = make_learner(
    losses.methods.grpo(kl_coefficient=0), optimizer=listening
  )
  reward = np.eye(4)
  reward[:2, 0] = [1.0, 1.0]
  reward[0] = 1.0  # nothing to learn in the first of four batches
  made = update.Updater(learner, PARAMS, spec('padded', 4), batches=4)
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  state, _ = made(state, make_rollout(reward=reward), 0)
  assert (state.step, state.idle) == (3, 1)
  jax.effects_barrier()
  assert taken == [True, True, False, False]  # the first of these was skipped


def test_weight_decay_spares_norms_and_biases():
  model = tiny.model(**tiny.FANCY)
  params = tiny.params(model)

  def decays(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: model.decays(sharding.path_names(path)), params
    )

  adam = optim.adamw(0.1, weight_decay=0.5, decays=decays)
  zero = jax.tree.map(jnp.zeros_like, params)
  updates, _ = adam.update(zero, adam.init(params), params)
  for path, moved in jax.tree_util.tree_leaves_with_path(updates):
    name = sharding.path_names(path)[-1]
    matrix = name != 'scale' and 'bias' not in name
    assert bool(np.any(moved)) == matrix, path


def test_kl_old_estimates_kl_of_old_to_policy():
  """Its mean over tokens drawn from old, by enumeration of three outcomes."""
  old, new = np.log([0.6, 0.3, 0.1]), np.log([0.2, 0.3, 0.5])
  mask = np.ones((1, 3, 1), bool)
  batch = losses.make_batch(
    mask, jnp.zeros((1, 3)), logp_old=jnp.array(old)[None, :, None]
  )
  terms = losses.SurrogateTerms(
    jnp.array(new)[None, :, None], None, None, None, None, {}
  )
  total = 0.0
  for outcome in range(3):
    one = batch._replace(keep=jnp.arange(3)[None, :, None] == outcome)
    measured = learner_lib._term_metrics(terms, one)
    total += np.exp(old[outcome]) * measured['kl_old'].total
  np.testing.assert_allclose(
    total, np.sum(np.exp(old) * (old - new)), rtol=1e-5
  )


def test_the_sampler_gap_is_neither_filter_nor_drift():
  rollout = make_rollout(reward=np.eye(4))
  batch = rollout.batch._replace(logp_old=None)
  rows = layout.padded_rows(rollout.prompts, batch.tokens, rollout.length, 16)
  exact = tiny.score(MODEL, PARAMS, rows).logp
  exact = np.asarray(tiny.gather(exact, rows, rollout.length))
  log_kept = np.full(exact.shape, -0.7, np.float32)
  batch = batch._replace(
    logp_sampler=exact - log_kept, extras={'log_kept': log_kept}
  )
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  made = update.Updater(learner, PARAMS, spec('shared', 2), 0, 2, 2)
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  _, measured = made(state, rollout._replace(batch=batch), 0)
  scalars = metrics.to_scalars(measured)
  assert scalars['kl_old'] > 1e-4  # the policy has moved
  assert scalars['sampler_gap_max'] < 1e-4


def test_the_given_state_is_donated():
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  made = update.Updater(learner, PARAMS, spec('padded', 8))
  state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
  made(state, make_rollout(), 0)
  assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_master_weights_and_moments_stay_float32_under_bf16():
  learner = make_learner(
    losses.methods.grpo(kl_coefficient=0), compute_dtype='bfloat16'
  )
  state, measured = one_step(learner, make_rollout())
  kinds = {
    x.dtype
    for x in jax.tree.leaves((state.params, state.opt_state))
    if jnp.issubdtype(x.dtype, jnp.floating)
  }
  assert kinds == {jnp.dtype('float32')}
  assert np.isfinite(metrics.to_scalars(measured)['grad_norm'])


def test_compilations_are_bounded_by_the_buckets():
  """Ragged rollouts of any lengths: one program per pair of buckets."""
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  for kind in ('shared', 'packed', 'padded'):
    cut = rollout_lib.LayoutSpec(kind, 2, 0, (4, 8), 30)
    made = update.Updater(learner, PARAMS, cut)
    state = made.compiled.init(jax.tree.map(jnp.copy, PARAMS))
    for seed in range(8):
      state, _ = made(state, make_rollout(seed), seed)
    sizes = made.compiled.train_step._cache_size()
    # Packed rows also bucket their number and the completions in one.
    assert sizes <= (2 if kind != 'packed' else 6), (kind, sizes)
    assert made.compiled.credit._cache_size() == 1


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="'maybe'"):
    make_learner(losses.methods.grpo(), on_zero='maybe')
