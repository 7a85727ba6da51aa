"""The learner: one gradient however it is cut up, and steps not taken.

With the transformer; `learner_methods_test.py` has all kinds of methods.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import losses
from grpo_jax import metrics
from grpo_jax import models
from grpo_jax import optim
from grpo_jax import sharding
from grpo_jax.learner import gradient as gradient_lib
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step as learner_lib
from grpo_jax.learner import updates
from grpo_jax.models import layout
from tests import tiny
from tests.learning import METHODS
from tests.learning import MODEL
from tests.learning import PARAMS
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import spec


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
@pytest.mark.parametrize('name', ['grpo', 'entropy'])
def test_the_gradient_does_not_depend_on_micro_batches(name, cut):
  learner, rollout = make_learner(METHODS[name]()), make_rollout()
  batch, state, _ = learner_lib.credit(learner, rollout.batch, _state(learner))
  batch = losses.prepare(learner.method, batch, state)
  rows, used = micro_batches.of_rollout(rollout, np.arange(4), cut)
  found = jax.jit(lambda *args: gradient_lib.of_batch(learner, *args))(
    PARAMS, state, batch, rows, used
  )
  expected_loss, expected = whole(name)
  tiny.assert_trees_close(found.grads, expected, 1e-6 * 5)
  np.testing.assert_allclose(found.loss, expected_loss, rtol=1e-5, atol=1e-6)


def _state(learner):
  return learner.method.init()


def one_step(learner, rollout, params=PARAMS, state=None, cut=None):
  made = updates.Updater(learner, params, cut or spec('padded', 8))
  state = made.init(jax.tree.map(jnp.copy, params))
  return made(state, rollout, 0)


@pytest.mark.parametrize(
  'takes_shards', [pytest.param(True, marks=pytest.mark.quick), False]
)
def test_eight_devices_give_the_result_of_one(takes_shards):
  """data x fsdp x tensor = 2 x 2 x 2 against 1 x 1 x 1."""
  results = []
  for mesh in ((1, 1, 1), (2, 2, 2)):
    # Plain descent: Adam's first step is a sign, which amplifies rounding.
    learner = make_learner(
      METHODS['grpo'](), mesh, optax.sgd(0.1), takes_shards=takes_shards
    )
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


@pytest.mark.quick
def test_a_step_with_a_nonfinite_gradient_changes_nothing():
  rollout = make_rollout()
  poisoned = rollout._replace(
    batch=rollout.batch._replace(
      reward=np.where(rollout.batch.valid, np.inf, 0).astype(np.float32)
    )
  )
  learner = make_learner(losses.methods.reinforce())
  made = updates.Updater(learner, PARAMS, spec('padded', 8))
  state = made.init(jax.tree.map(jnp.copy, PARAMS))
  state, _ = made(state, rollout, 0)
  before = jax.device_get(state)
  state, measured = made(state, poisoned, 1)
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
  assert (before.step, before.nonfinite) == (1, 0)
  assert (after.step, after.nonfinite, after.idle) == (1, 1, 0)
  found = metrics.to_scalars(measured)
  assert found['nonfinite_steps'] == 1
  assert found['nonfinite_loss'] + found['nonfinite_gradient'] == 1
  assert found['nonfinite_update'] == 0
  state, _ = made(state, rollout, 2)  # and training goes on
  assert (state.step, state.nonfinite) == (2, 1)


@pytest.mark.parametrize(
  'optimizer',
  [
    # 0 / 0 where a token's embedding is not used.
    pytest.param(optax.adam(1e-2, eps=0.0), marks=pytest.mark.quick),
    optax.sgd(np.inf),
    # The parameters stay finite, and a moment does not.
    optax.chain(optax.sgd(0.0), optax.trace(np.inf)),
  ],
  ids=['epsilon', 'rate', 'moment'],
)
def test_an_update_that_is_not_finite_is_not_taken(optimizer):
  learner = make_learner(losses.methods.reinforce(), optimizer=optimizer)
  state, measured = one_step(learner, make_rollout())
  jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)
  fresh = learner.optimizer.init(PARAMS)
  jax.tree.map(np.testing.assert_array_equal, state.opt_state, fresh)
  assert (state.step, state.nonfinite) == (0, 1)
  found = metrics.to_scalars(measured)
  assert (found['nonfinite_update'], found['nonfinite_gradient']) == (1, 0)
  assert found['grad_norm'] > 0 and found['update_norm'] == 0


@pytest.mark.quick
def test_a_skipped_batch_is_not_shown_to_the_optimizer():
  """Which might fail on a gradient of 0, as here: 0 times infinity."""
  rollout = make_rollout()
  nothing = rollout._replace(
    batch=rollout.batch._replace(reward=np.zeros((4, 4), np.float32))
  )
  method, optimizer = losses.methods.reinforce(), optax.sgd(np.inf)
  state, measured = one_step(make_learner(method, optimizer=optimizer), nothing)
  assert (state.step, state.nonfinite, state.idle) == (0, 0, 1)
  assert metrics.to_scalars(measured)['nonfinite_update'] == 0


def test_an_optimizer_may_begin_with_infinity():
  best = optax.GradientTransformation(
    lambda params: jnp.array(np.inf), lambda updates, best, _: (updates, best)
  )
  optimizer = optax.chain(best, optax.sgd(0.1))
  learner = make_learner(losses.methods.reinforce(), optimizer=optimizer)
  state, _ = one_step(learner, make_rollout())
  assert (state.step, state.nonfinite) == (1, 0)


def test_a_controller_does_not_follow_what_is_not_finite():
  controller = losses.first_entropy()
  method = losses.chain(
    losses.methods.reinforce(), losses.add_entropy_bonus(controller)
  )
  learner = make_learner(method)
  batch = make_rollout().batch
  entropy = np.ones(batch.mask.shape, np.float32)
  credit = lambda value, state: learner_lib.credit(
    learner, batch._replace(entropy_old=value * entropy), state
  )[1]
  fresh = _state(learner)
  spoilt = credit(np.inf, fresh)
  jax.tree.map(np.testing.assert_array_equal, spoilt, fresh)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(spoilt))
  followed = jax.tree.leaves(credit(2.0, spoilt))
  assert any(np.any(x == 2.0) for x in followed)


@pytest.mark.parametrize('policy', ['skip', 'step'])
def test_a_batch_without_advantages_follows_the_policy(policy):
  learner = make_learner(losses.methods.grpo(kl_coefficient=0), on_zero=policy)
  made = updates.Updater(learner, PARAMS, spec('padded', 8))
  state = made.init(jax.tree.map(jnp.copy, PARAMS))
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


def collectives(mesh, vocab=1009):
  """Shapes that the compiled step moves between devices, without axes of 1."""
  learner = make_learner(
    METHODS['grpo'](), mesh, optax.sgd(0.1), vocab_size=vocab, unroll=True
  )
  model = tiny.model(vocab_size=vocab, unroll=True)
  params = jax.eval_shape(model.init, jax.random.key(0))
  made = updates.Updater(learner, params, spec('padded', 8))
  rollout = make_rollout()
  rows, used = made.layout(rollout, np.arange(4))
  batch, loss_state, _ = made.credit(rollout.batch, learner.method.init())
  state = jax.eval_shape(lambda p: learner_lib.init(learner, p), params)
  place = learner_lib.state_sharding(learner, params)
  state = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    state,
    place,
  )
  lowered = made.train_step.lower(
    None, state, batch, np.arange(4), rows, used, np.int32(0)
  )
  moves = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
  return [
    tuple(size for size in map(int, shape.split(',')) if size > 1)
    for line in lowered.compile().as_text().splitlines()
    if (found := re.search(rf' = (.*?) (?:{moves})(?:-start)?\(', line))
    for shape in re.findall(r'\w+\[([\d,]+)\]', found[1])
  ]


@pytest.mark.parametrize(
  'mesh',
  [(1, 4, 1), (4, 1, 1), pytest.param((2, 4, 1), marks=pytest.mark.quick)],
)
def test_data_shards_move_weights_and_not_activations(mesh):
  """8 rows of 14 positions, width 32: none of these move, weights do."""
  moved = collectives(mesh)
  assert len(moved) > 4
  logits = [shape for shape in moved if shape[-1:] == (1009,)]
  # The output layer itself, and each shard's part of its gradient.
  assert set(logits) <= {(32, 1009), (32 // mesh[1], 1009)}
  activations = [
    shape for shape in moved if 14 in shape and math.prod(shape) >= 2 * 14 * 32
  ]
  assert not activations, activations


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


def test_the_given_state_is_donated():
  learner = make_learner(losses.methods.grpo(kl_coefficient=0))
  made = updates.Updater(learner, PARAMS, spec('padded', 8))
  state = made.init(jax.tree.map(jnp.copy, PARAMS))
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


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="'maybe'"):
    make_learner(losses.methods.grpo(), on_zero='maybe')
