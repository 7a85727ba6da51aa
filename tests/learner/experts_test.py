"""Models with experts: balance and metrics in the update, and their devices."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.engines import LocalEngine
from grpo_jax.engines import Sampling
from grpo_jax.engines import generate
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.types import episode_of
from grpo_jax.learner import gradient as gradient_lib
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step as learner_lib
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import Optimizer
from grpo_jax.learner.types import Placement
from grpo_jax.learner.types import Scoring
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import bigram
from tests import drawing
from tests import tiny
from tests.learning import METHODS
from tests.learning import learned
from tests.learning import lowered_gradient
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec
from tests.learning import with_top

MODEL = models.Transformer(tiny.EXPERTS)
ONE = dataclasses.replace(
  tiny.EXPERTS, num_layers=1, pattern=(models.LayerKind(experts=True),)
)
BALANCE = 0.5


def make_learner(method='grpo', balance=BALANCE, mesh=None, model=MODEL):
  def score(params, rows, wanted, forward_mode=False):
    return models.score(
      model, params, rows, 1.0, wanted, forward_mode=forward_mode
    )

  def score_routed(params, rows, wanted, counted, sampled):
    return models.score_routed(
      model, params, rows, counted, sampled, 1.0, wanted
    )

  forward = functools.partial(score, forward_mode=True)
  return Learner(
    METHODS[method](),
    Scoring(score, forward, score_routed, takes_shards=True),
    # Adam's first step is a sign, which amplifies rounding, but not so with a
    # large epsilon.
    Optimizer(optim.adamw(0.1, epsilon=1.0)),
    Placement(sharding.make_mesh(**(mesh or {})), model.logical_axes),
    expert_balance=balance,
  )


@functools.cache
def whole(balance):
  """Gradient and balance by one `value_and_grad` through everything."""
  method, rollout = METHODS['kl_cov'](), make_rollout()
  batch, state = losses.credit(
    method, jax.tree.map(jnp.asarray, rollout.batch), method.init()
  )
  batch = losses.prepare(method, batch, state)
  rows = layout.padded_rows(rollout.prompts, batch.tokens, rollout.length, 16)
  counted = batch.mask.reshape(-1, 1, batch.mask.shape[-1])

  def loss(params):
    scores, routed = models.score_routed(MODEL, params, rows, counted)
    logp = tiny.gather(scores.logp, rows, rollout.length)
    value = losses.surrogate_loss(method, logp, batch, state, None)[0]
    uneven = models.balance(routed.statistics)
    return value + balance * uneven, uneven

  return jax.jit(jax.grad(loss, has_aux=True))(tiny.params(MODEL))


@pytest.mark.long
@pytest.mark.parametrize(
  'cut',
  [spec('padded', 3), spec('shared', 1), spec('packed', 2)],
  ids=lambda s: f'{s.kind}-{s.micro_rows}',
)
def test_the_balance_does_not_depend_on_micro_batches(cut):
  learner, rollout = make_learner('kl_cov'), make_rollout()
  state = learner.method.init()
  batch, state, _ = learner_lib.credit(learner, rollout.batch, state)
  batch = losses.prepare(learner.method, batch, state)
  rows, used = micro_batches.cut_rollout(rollout, np.arange(4), cut)
  found = jax.jit(
    lambda *args: gradient_lib.differentiate(learner, None, *args)
  )(tiny.params(MODEL), state, batch, rows, used)
  expected, uneven = whole(BALANCE)
  tiny.assert_trees_close(found.grads, expected, 1e-5)
  np.testing.assert_allclose(
    models.balance(found.routed.statistics), uneven, rtol=1e-5
  )
  router = lambda tree: np.asarray(tree['blocks'][0]['experts']['router'])
  without = router(whole(0.0)[0])
  assert np.abs(router(expected) - without).max() > 1e-3
  assert uneven > 1.01


def one_step(method, mesh=None):
  """Without the odd layer at the end, which takes long to compile."""
  model = models.Transformer(dataclasses.replace(tiny.EXPERTS, num_layers=4))
  learner = make_learner(method, mesh=mesh, model=model)
  params, rollout = tiny.params(model), make_rollout()
  if method == 'top':
    rollout = with_top(rollout, model.vocab_size)
  made = make_updater(learner, params, spec('padded', 8), watch_steps=1)
  state = made.compiled.init(params)
  state, measured = learned(made, state, rollout, 0)
  return state.params, metrics.to_scalars(measured)


@pytest.mark.long
@pytest.mark.parametrize('method', ['grpo', 'top'])
def test_eight_devices_give_the_result_of_one(method):
  expected, measured = one_step(method)
  found, on_eight = one_step(method, dict(fsdp=2, expert=4))
  gate = found['blocks'][0]['experts']['gate']
  assert gate.sharding.shard_shape(gate.shape) == (2, 2, 16, 20)
  tiny.assert_trees_close(jax.device_get(found), expected, 1e-5)
  names = {'expert_balance', 'expert_load_max'}
  names |= {'overshoot_fresh'} if method == 'grpo' else {'kl_teacher_top'}
  assert measured.keys() >= names
  assert 'router_disagreement' not in measured  # nobody has sampled
  for metric, value in measured.items():
    np.testing.assert_allclose(
      on_eight[metric], value, rtol=1e-4, atol=1e-5, err_msg=metric
    )


def gradient_of(model, mesh):
  """The program of a gradient, lowered."""
  learner = make_learner(mesh=mesh, model=model)
  params = jax.eval_shape(model.init, jax.random.key(0))
  return lowered_gradient(learner, params, spec('padded', 8), make_rollout())


def moved(mesh):
  """Shapes that the program moves between devices, without axes of 1."""
  model = models.Transformer(dataclasses.replace(ONE, vocab_size=1009))
  lowered = gradient_of(model, mesh)
  names = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
  return [
    tuple(size for size in map(int, shape.split(',')) if size > 1)
    for line in lowered.compile().as_text().splitlines()
    if (found := re.search(rf' = (.*?) (?:{names})(?:-start)?\(', line))
    for shape in re.findall(r'\w+\[([\d,]+)\]', found[1])
  ]


@pytest.mark.parametrize(
  'mesh',
  [
    pytest.param(dict(fsdp=2, expert=2), marks=pytest.mark.long),
    pytest.param(dict(data=2, expert=4), marks=pytest.mark.long),
  ],
  ids=str,
)
def test_devices_along_the_axis_of_experts_move_no_weights_of_experts(mesh):
  """A layer has 8 experts of 3 x 32 x 20: what moves is of those held alone."""
  shapes = moved(mesh)
  held = 8 // mesh['expert']
  of_experts = [shape for shape in shapes if {20, 32} <= {*shape[-2:]}]
  assert all(math.prod(shape) <= held * 20 * 32 for shape in of_experts)
  if 'fsdp' in mesh or 'data' in mesh:  # gathered weights, or summed gradients
    assert of_experts
  # The output layer itself, and each shard's part of its gradient.
  logits = [shape for shape in shapes if shape[-1:] == (1009,)]
  assert set(logits) <= {(32, 1009), (32 // mesh.get('fsdp', 1), 1009)}


@pytest.mark.parametrize(
  'remat', [pytest.param('none', marks=pytest.mark.long), 'layer']
)
def test_shards_send_weights_in_bfloat16_and_routers_in_float32(remat):
  half = dataclasses.replace(
    ONE, compute_dtype='bfloat16', width=48, remat=remat
  )
  text = gradient_of(models.Transformer(half), dict(fsdp=4)).as_text()
  sent = re.findall(r'all_gather.*-> tensor<([\dx]+)x(\w+)>', text)
  of = lambda size: {dtype for shape, dtype in sent if shape.endswith(size)}
  assert of('48x8') == {'f32'} and of('8x48x20') == {'bf16'}


@functools.cache
def sampled(config, mesh=None):
  """A rollout that the engine has drawn, with random rewards."""
  model = models.Transformer(config)
  params = tiny.params(model)
  ids = tiny.ragged(prompts=4)[0]
  engine = LocalEngine(model, (8,), (3, 6), max_rows=8, mesh=mesh)
  engine.load(params, version=0)
  groups = generate(engine, drawing.requests(ids, Sampling(eos_ids=(7,)), 6))
  drawn = drawing.arrays(groups, 6)
  scores = make_rollout().batch.reward
  judged = rollout_lib.rewards_lib.Scores(
    scores.reshape(-1), scores.reshape(-1, 1), np.ones((16,), bool)
  )
  described = make_rollout()
  rollout = rollout_lib.make_rollout(
    [[episode_of(one) for one in group] for group in groups],
    judged,
    (6,),
    prompts=ids,
    prompt_texts=described.prompt_texts,
    texts=described.texts,
    index=described.index,
  )
  return model, params, drawn, rollout


@functools.cache
def balancing(config):
  """An updater for what was sampled."""
  model, params, _, _ = sampled(config)
  learner = make_learner(balance=10.0, model=model)
  return make_updater(learner, params, spec('shared', 4))


def disagreements(config, *trees):
  """Of the learner with each of the parameters, and the sampler's gap."""
  made, rollout = balancing(config), sampled(config)[3]
  for params in trees:
    state = made.compiled.init(jax.tree.map(jnp.copy, params))
    measured = metrics.to_scalars(learned(made, state, rollout, 0)[1])
    yield measured['router_disagreement'], measured['sampler_gap']


def test_the_routers_of_sampler_and_learner_agree_until_one_is_changed():
  _, params, drawn, _ = sampled(ONE)
  assert drawn.routing.dtype == np.int32
  assert len(np.unique(drawn.routing)) > 15
  past = np.arange(6) >= drawn.length[..., None]
  assert past.any() and not drawn.routing[past].any()
  other = jax.tree_util.tree_map_with_path(
    lambda path, x: -x if 'router' in str(path) else x, params
  )
  (share, gap), changed = disagreements(ONE, params, other)
  assert share == 0 and gap < 1e-5
  assert 0.7 < changed[0] <= 1


def test_enough_balance_makes_the_load_even():
  """The coefficient has the right sign, and reaches the routers."""
  _, params, _, rollout = sampled(ONE)
  made = balancing(ONE)
  state = made.compiled.init(jax.tree.map(jnp.copy, params))
  seen = []
  for step in range(8):
    state, measured = learned(made, state, rollout, step)
    seen.append(metrics.to_scalars(measured)['expert_balance'])
  assert seen[-1] < 1 + 0.5 * (seen[0] - 1), seen


HALF = dataclasses.replace(ONE, compute_dtype='bfloat16')


def test_the_sampler_keeps_routers_in_float32():
  model = models.Transformer(HALF)
  engine = LocalEngine(model, (8,), (3,))
  engine.load(tiny.params(model), version=0)
  block = engine._held.now[0]['layers'][0]['experts']
  assert block['router'].dtype == jnp.float32
  assert block['gate'].dtype == jnp.bfloat16


@pytest.mark.long
def test_so_in_bfloat16_few_choices_differ():
  """Those between equal experts."""
  ((share, gap),) = disagreements(HALF, sampled(HALF)[1])
  assert share < 0.05 and gap < 0.05


@pytest.mark.long
def test_decoding_on_eight_devices_draws_what_one_draws():
  alone = sampled(tiny.EXPERTS)[2]
  mesh = sharding.make_mesh(data=2, expert=2, tensor=2)
  spread = sampled(tiny.EXPERTS, mesh)[2]
  np.testing.assert_array_equal(alone.tokens, spread.tokens)
  np.testing.assert_array_equal(alone.routing, spread.routing)
  np.testing.assert_allclose(alone.logp, spread.logp, atol=1e-5)


@pytest.mark.quick
def test_programs_are_compiled_ahead_for_what_is_sampled():
  like = functools.partial(rollout_lib.blank, 4, 4, 8, 6, 1, (6,))
  known = sampled(ONE)[3].batch
  ahead = like(routed=True).batch
  assert ahead.extras.keys() == known.extras.keys()
  for name, value in known.extras.items():
    assert ahead.extras[name].dtype == value.dtype
  assert 'routing_sampler' not in like().batch.extras


@pytest.mark.quick
def test_balance_without_experts_is_refused():
  with pytest.raises(ValueError, match='expert_balance=0.1 needs a model with'):
    bigram.changed(bigram.make_learner(METHODS['grpo']()), expert_balance=0.1)
