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
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.learner import gradient as gradient_lib
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step as learner_lib
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import bigram
from tests import tiny
from tests.learning import METHODS
from tests.learning import MODEL
from tests.learning import PARAMS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import layouts_of
from tests.learning import learned
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
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
    scores = models.score(MODEL, params, rows, 1.0, models.Wanted(entropy=True))
    logp = tiny.gather(scores.logp, rows, rollout.length)
    entropy = tiny.gather(scores.entropy, rows, rollout.length)
    return losses.surrogate_loss(method, logp, batch, state, entropy)[0]

  return jax.jit(jax.value_and_grad(loss))(PARAMS)


CUTS = [
  spec('shared', 2, row_completions=2),  # inside groups
  spec('packed', 2),
]
MORE = [
  spec('padded', 3),  # an all-padding tail
  spec('padded', 16),
  spec('padded', 1),
  spec('shared', 4),
  spec('shared', 1),
  spec('packed', 1),
]
of_cut = lambda s: f'{s.kind}-{s.micro_rows}-{s.row_completions}'


@pytest.mark.parametrize('cut', CUTS, ids=of_cut)
def test_the_gradient_does_not_depend_on_micro_batches(cut):
  is_that_of_the_whole('entropy', cut)


@pytest.mark.long
@pytest.mark.parametrize(
  'name, cut',
  [('entropy', cut) for cut in MORE] + [('grpo', cut) for cut in CUTS + MORE],
  ids=lambda x: x if isinstance(x, str) else of_cut(x),
)
def test_nor_does_it_in_other_rows_or_with_a_reference(name, cut):
  is_that_of_the_whole(name, cut)


def is_that_of_the_whole(name, cut):
  learner, rollout = make_learner(METHODS[name]()), make_rollout()
  batch, state, _ = learner_lib.credit(learner, rollout.batch, _state(learner))
  batch = losses.prepare(learner.method, batch, state)
  rows, used = micro_batches.cut_rollout(rollout, np.arange(4), cut)
  found = jax.jit(
    lambda *args: gradient_lib.differentiate(learner, None, *args)
  )(PARAMS, state, batch, rows, used)
  expected_loss, expected = whole(name)
  tiny.assert_trees_close(found.grads, expected, 1e-6 * 5)
  np.testing.assert_allclose(found.loss, expected_loss, rtol=1e-5, atol=1e-6)


def _state(learner):
  return learner.method.init()


def fresh(made, params):
  """A state that may be donated."""
  return made.compiled.init(jax.tree.map(jnp.copy, params))


def one_step(learner, rollout, params=PARAMS, cut=None):
  made = make_updater(learner, params, cut or spec('padded', 8))
  return learned(made, fresh(made, params), rollout, 0)


OPTIMIZERS = {
  'adam': optim.adamw(1e-2),
  # 0 / 0 where a token or position is not used.
  'epsilon': optax.adam(1e-2, eps=0.0),
  'rate': optax.sgd(np.inf),
  # The parameters stay finite, and a moment does not.
  'moment': optax.chain(optax.sgd(0.0), optax.trace(np.inf)),
}


@functools.cache
def of_reinforce(optimizer):
  """What several tests call."""
  learner = bigram_learner(losses.methods.reinforce(), OPTIMIZERS[optimizer])
  return make_updater(learner, bigram.params(), spec('padded', 8))


@pytest.mark.quick
def test_eight_devices_give_the_result_of_one():
  """data x fsdp x tensor = 2 x 2 x 2 against 1 x 1 x 1."""

  def make(mesh):
    return bigram_learner(METHODS['grpo'](), optax.sgd(0.1), mesh)

  eight_are_one(make, bigram.params(), bigram_rollout())


@pytest.mark.long
@pytest.mark.parametrize('takes_shards', [True, False])
def test_so_they_do_with_a_transformer(takes_shards):
  def make(mesh):
    # Plain descent: Adam's first step is a sign, which amplifies rounding.
    return make_learner(
      METHODS['grpo'](), mesh, optax.sgd(0.1), takes_shards=takes_shards
    )

  eight_are_one(make, PARAMS, make_rollout())


def eight_are_one(make, params, rollout):
  results = []
  for mesh in ((1, 1, 1), (2, 2, 2)):
    state, measured = one_step(
      make(mesh), rollout, params, cut=spec('shared', 4)
    )
    results.append((jax.device_get(state.params), metrics.to_scalars(measured)))
  spread = jax.tree.leaves(state.params)
  assert any(len(x.sharding.device_set) == 8 for x in spread)
  assert any(x.sharding.shard_shape(x.shape) != x.shape for x in spread)
  tiny.assert_trees_close(results[1][0], results[0][0], 1e-6)
  for metric, value in results[0][1].items():
    np.testing.assert_allclose(
      results[1][1][metric], value, rtol=1e-4, atol=1e-5
    )
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), results[0][0], params)
  assert max(jax.tree.leaves(moved)) > 1e-4


def test_moments_lie_beside_their_parameters():
  learner = make_learner(METHODS['grpo'](), (2, 2, 2))
  place = learner_lib.state_sharding(learner, PARAMS)
  flat = jax.tree.leaves(place.params)
  moments = [x for x in jax.tree.leaves(place.opt_state) if x.spec != jax.P()]
  assert len(moments) == 2 * sum(x.spec != jax.P() for x in flat) > 0


@pytest.mark.quick
def test_a_step_with_a_nonfinite_gradient_changes_nothing():
  rollout = bigram_rollout()
  poisoned = rollout._replace(
    batch=rollout.batch._replace(
      reward=np.where(rollout.batch.valid, np.inf, 0).astype(np.float32)
    )
  )
  made = of_reinforce('adam')
  state, _ = learned(made, fresh(made, bigram.params()), rollout, 0)
  before = jax.device_get(state)
  state, measured = learned(made, state, poisoned, 1)
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
  jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
  assert (before.step, before.nonfinite) == (1, 0)
  assert (after.step, after.nonfinite, after.idle) == (1, 1, 0)
  found = metrics.to_scalars(measured)
  assert found['nonfinite_steps'] == 1
  assert found['nonfinite_loss'] + found['nonfinite_gradient'] == 1
  assert found['nonfinite_update'] == 0
  state, _ = learned(made, state, rollout, 2)  # and training goes on
  assert (state.step, state.nonfinite) == (2, 1)


@pytest.mark.parametrize(
  'optimizer',
  [pytest.param('epsilon', marks=pytest.mark.quick), 'rate', 'moment'],
)
def test_an_update_that_is_not_finite_is_not_taken(optimizer):
  made, params = of_reinforce(optimizer), bigram.params()
  state, measured = learned(made, fresh(made, params), bigram_rollout(), 0)
  jax.tree.map(np.testing.assert_array_equal, state.params, params)
  begun = made.compiled.learner.optimizer.transform.init(params)
  jax.tree.map(np.testing.assert_array_equal, state.opt_state, begun)
  assert (state.step, state.nonfinite) == (0, 1)
  found = metrics.to_scalars(measured)
  assert (found['nonfinite_update'], found['nonfinite_gradient']) == (1, 0)
  assert found['grad_norm'] > 0 and found['update_norm'] == 0


@pytest.mark.quick
def test_a_skipped_batch_is_not_shown_to_the_optimizer():
  """Which might fail on a gradient of 0, as here: 0 times infinity."""
  nothing = bigram_rollout(reward=np.zeros((4, 4)))
  made = of_reinforce('rate')
  state, measured = learned(made, fresh(made, bigram.params()), nothing, 0)
  assert (state.step, state.nonfinite, state.idle) == (0, 0, 1)
  assert metrics.to_scalars(measured)['nonfinite_update'] == 0


def test_an_optimizer_may_begin_with_infinity():
  best = optax.GradientTransformation(
    lambda params: jnp.array(np.inf), lambda updates, best, _: (updates, best)
  )
  optimizer = optax.chain(best, optax.sgd(0.1))
  learner = bigram_learner(losses.methods.reinforce(), optimizer)
  state, _ = one_step(learner, bigram_rollout(), bigram.params())
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
  begun = _state(learner)
  spoilt = credit(np.inf, begun)
  jax.tree.map(np.testing.assert_array_equal, spoilt, begun)
  assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(spoilt))
  followed = jax.tree.leaves(credit(2.0, spoilt))
  assert any(np.any(x == 2.0) for x in followed)


@pytest.mark.parametrize('policy', ['skip', 'step'])
def test_a_batch_without_advantages_follows_the_policy(policy):
  learner = bigram_learner(
    losses.methods.grpo(kl_coefficient=0), on_zero_advantage=policy
  )
  made = make_updater(learner, bigram.params(), spec('padded', 8))
  state, _ = learned(made, fresh(made, bigram.params()), bigram_rollout(), 0)
  before = jax.device_get(state)
  state, _ = learned(
    made, state, bigram_rollout(reward=np.full((4, 4), 0.1)), 1
  )
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


def collectives(mesh):
  """Shapes that the compiled step moves between devices, without axes of 1."""
  changes = dict(vocab_size=1009, unroll=True, num_layers=1)
  learner = make_learner(METHODS['grpo'](), mesh, optax.sgd(0.1), **changes)
  model = tiny.model(**changes)
  params = jax.eval_shape(model.init, jax.random.key(0))
  made = make_updater(learner, params, spec('padded', 8))
  rollout = make_rollout()
  rows, used = layouts_of(made, rollout).stack(np.arange(4))
  functions, loss_state = made.compiled, learner.method.init()
  batch, loss_state, _ = functions.credit(rollout.batch, loss_state)
  lowered = functions.step.lower(
    None,
    functions.abstract,
    batch,
    np.arange(4),
    rows,
    used,
    np.int32(0),
    np.int32(0),
  )
  moves = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
  return [
    tuple(size for size in map(int, shape.split(',')) if size > 1)
    for line in lowered.compile().as_text().splitlines()
    if (found := re.search(rf' = (.*?) (?:{moves})(?:-start)?\(', line))
    for shape in re.findall(r'\w+\[([\d,]+)\]', found[1])
  ]


@pytest.mark.long
@pytest.mark.parametrize('mesh', [(2, 4, 1), (1, 4, 1), (4, 1, 1)])
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
  zero = jax.tree.map(np.zeros_like, params)
  init_and_update = jax.jit(lambda p: adam.update(zero, adam.init(p), p))
  updates, _ = init_and_update(params)
  for path, moved in jax.tree_util.tree_leaves_with_path(updates):
    name = sharding.path_names(path)[-1]
    matrix = name != 'scale' and 'bias' not in name
    assert bool(np.any(moved)) == matrix, path


def test_the_given_state_is_donated():
  made = of_reinforce('adam')
  state = fresh(made, bigram.params())
  learned(made, state, bigram_rollout(), 0)
  assert all(x.is_deleted() for x in jax.tree.leaves(state.params))


def test_an_unknown_policy_is_refused():
  with pytest.raises(ValueError, match="'maybe'"):
    make_learner(losses.methods.grpo(), on_zero='maybe')
