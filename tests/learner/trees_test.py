"""Branches that share their context, against copies of it for each of them.

Gradients and log-probabilities are the same for every kind of model, on meshes
too; less is computed, and no tree needs a program of its own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import models
from grpo_jax.learner import gradient
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step
from grpo_jax.learner.types import Scoring
from grpo_jax.mesh import sharding
from tests import bigram
from tests import tiny
from tests import trees
from tests.chosen import chosen
from tests.compilations import compiled_programs
from tests.learning import METHODS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import layouts_of
from tests.learning import learned
from tests.learning import make_learner
from tests.learning import make_rollout
from tests.learning import make_updater
from tests.learning import spec

WIDTH = 8
SPECS = {
  'padded': spec('padded', 8),
  'packed': spec('packed', 8, pack_tokens=40),
  'dense': spec('packed', 8, pack_tokens=24),  # every column is scored
  'shared': spec('shared', 8),
  'parts of groups': spec('shared', 8, row_completions=2),
}
SMALL = dict(num_layers=2)
CHANGES = {
  'plain': SMALL,
  # Windows of three tokens, which branches reach over too.
  'fancy': {**tiny.FANCY, 'vocab_size': 64, 'num_layers': 4},
  'experts': dict(
    num_layers=2,
    pattern=tiny.EXPERTS.pattern,
    experts=tiny.EXPERTS.experts,
  ),
  'attention': dict(SMALL, remat='attention'),
  'layer': dict(SMALL, remat='layer'),
}


@functools.cache
def rollout_of(width=WIDTH, seed=0, branches=0.5):
  """Forks of forks, some before anything was said; and tokens of others."""
  rollout = make_rollout(seed, width=width)
  rng = np.random.default_rng(seed)
  previous = trees.random_trees(rng, rollout.length, width, branches)
  mask = rollout.batch.mask & (rng.random(rollout.batch.mask.shape) < 0.8)
  batch = rollout.batch._replace(mask=mask, keep=mask)
  rollout = rollout._replace(batch=batch, previous=previous)
  place = np.arange(width)
  is_there = place < rollout.length[..., None]
  assert np.any(is_there & (previous == -1) & (place > 0))
  assert max(depth_of_forks(rollout)) > 1
  return rollout


def depth_of_forks(rollout):
  for at in np.ndindex(rollout.length.shape):
    own = rollout.previous[at][: rollout.length[at]]
    forks = own != np.arange(-1, len(own) - 1)
    for place in range(len(own)):
      yield sum(bool(forks[x]) for x in trees.path(own, place))


@functools.cache
def found(kind, layout, copies, mesh=()):
  """What `differentiate` finds for a kind of model and of rows."""
  learner = make_learner(METHODS['gspo'](), mesh=dict(mesh), **CHANGES[kind])
  model = tiny.model(**CHANGES[kind])
  if kind == 'experts':
    learner = with_experts(learner, model)
  rows = dataclasses.replace(
    SPECS[layout],
    share=not copies,
    shards=sharding.row_shards(learner.mesh),
    parts=learner.mesh.shape['context'],
  )
  params, rollout = tiny.params(model), rollout_of()
  made = make_updater(learner, params, rows)
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  rows, used = layouts_of(made, rollout).stack(np.arange(4))
  assert (rows.reach is None) == copies and (rows.first is None) != copies

  def run(params, batch, rows):
    with sharding.use(learner.mesh):
      return gradient.differentiate(
        learner, None, params, state, batch, rows, used
      )

  place = step.state_sharding(learner, params).params
  with jax.default_matmul_precision('highest'):
    result = jax.jit(run)(jax.device_put(params, place), batch, rows)
  return jax.device_get(result)


def with_experts(learner, model):
  def score_routed(params, rows, wanted, counted, sampled):
    return models.score_routed(
      model, params, rows, counted, sampled, 1.0, wanted
    )

  scoring = Scoring(
    learner.scoring.score, score_routed=score_routed, takes_shards=True
  )
  learner = bigram.changed(learner, score_routed=score_routed)
  return dataclasses.replace(learner, scoring=scoring, expert_balance=0.5)


ONE = ()
CUT = (('fsdp', 2), ('context', 2), ('tensor', 2))
CASES = [
  (kind, layout, mesh)
  for kind in CHANGES
  for layout in SPECS
  for mesh in (
    ONE, CUT, (('context', 8),), (('data', 2), ('fsdp', 4)),
  )
]  # fmt: skip
SOME = {
  ('fancy', 'shared', ONE),
  ('fancy', 'dense', ONE),
  ('fancy', 'packed', CUT),
  ('plain', 'shared', CUT),
  ('experts', 'packed', ONE),
  ('layer', 'padded', ONE),
}


@pytest.mark.parametrize('kind, layout, mesh', chosen(CASES, SOME))
def test_what_branches_share_has_the_gradient_of_its_copies(kind, layout, mesh):
  got = found(kind, layout, False, mesh)
  expected = found(kind, 'padded', True)
  mask = rollout_of().batch.mask
  tiny.assert_trees_close(got.grads, expected.grads, 1e-5)
  np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
  for one, other in (
    (got.scores.logp, expected.scores.logp),
    (got.slope, expected.slope),
  ):
    np.testing.assert_allclose(one[mask], other[mask], atol=1e-5)
  assert np.abs(expected.slope).max() > 1e-3
  if kind == 'experts':
    jax.tree.map(
      lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5),
      got.routed.statistics,
      expected.routed.statistics,
    )


@pytest.mark.parametrize('layout', SPECS)
def test_every_token_is_computed_once(layout):
  rollout = rollout_of()
  few, many = (
    micro_batches.cut_rollout(
      rollout,
      np.arange(4),
      dataclasses.replace(SPECS[layout], share=share),
    )[0]
    for share in (True, False)
  )
  line, _ = micro_batches.cut_rollout(
    rollout._replace(previous=None), np.arange(4), SPECS[layout]
  )
  used = [np.count_nonzero(rows.segment) for rows in (few, line, many)]
  assert used[0] == used[1] < used[2]
  assert few.tokens.shape == line.tokens.shape


@pytest.mark.parametrize('layout', ['shared', 'packed'])
def test_a_model_that_reads_no_branches_shares_prompts_all_the_same(layout):
  spec = dataclasses.replace(SPECS[layout], branches=False)
  rows, _ = micro_batches.cut_rollout(rollout_of(), np.arange(4), spec)
  assert rows.reach is None and rows.first is not None and rows.parents


def test_a_program_of_trees_says_so():
  """To who wonders why it was compiled."""
  learner, rollout = bigram_learner(METHODS['grpo']()), rollout_of()
  said = []
  for share in (True, False):
    rows = dataclasses.replace(SPECS['padded'], share=share)
    made = make_updater(learner, bigram.params(), rows)
    for one in (rollout, rollout._replace(previous=None)):
      said.append(layouts_of(made, one).shapes()['branches'])
  assert said == ['some', 'none', 'some', 'none']


@pytest.mark.parametrize('layout', ['shared', 'packed', 'padded'])
def test_no_tree_has_a_program_of_its_own(layout):
  rows = SPECS[layout]
  if layout == 'packed':  # what is left open is decided by one rollout
    rows = dataclasses.replace(rows, row_slots=4)
  made = make_updater(bigram_learner(METHODS['gspo']()), bigram.params(), rows)
  state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
  rollout = bigram_rollout(width=WIDTH)
  rng = np.random.default_rng(0)

  def learn(state, number, branches):
    previous = trees.random_trees(rng, rollout.length, WIDTH, branches)
    return learned(made, state, rollout._replace(previous=previous), number)[0]

  state = learn(state, 0, 0.3)
  with compiled_programs() as names:
    for number, branches in enumerate((0.0, 0.1, 0.9, 0.5), start=1):
      state = learn(state, number, branches)
  assert not names


@pytest.mark.parametrize('layout', ['dense', 'shared'])
def test_the_vocabulary_meets_columns_or_tokens(layout, monkeypatch):
  """Whichever are fewer; and no column is added for where branches begin."""
  model = tiny.model(num_layers=1)
  rows, _ = micro_batches.cut_rollout(rollout_of(), np.arange(4), SPECS[layout])
  rows = jax.tree.map(lambda x: x[0], rows)
  _, slots, width = rows.target.shape
  seen = tiny.scored_positions(model, rows, monkeypatch)
  assert seen == [24 if layout == 'dense' else slots * width]
  assert layout == 'shared' or 24 < slots * width


@pytest.mark.parametrize('copies', [False, True])
def test_a_tree_takes_no_pass_more_than_a_line(copies, monkeypatch):
  """Slots of one completion are coupled, and scored once more beforehand."""
  learner, rollout = bigram_learner(METHODS['gspo']()), rollout_of()
  rows = dataclasses.replace(SPECS['shared'], share=not copies)
  rows, used = micro_batches.cut_rollout(rollout, np.arange(4), rows)
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  passes, score_all = [], gradient.score_all

  def counted(*args):
    passes.append(args)
    return score_all(*args)

  monkeypatch.setattr(gradient, 'score_all', counted)
  jax.eval_shape(
    lambda params: (
      gradient.differentiate(
        learner, None, params, state, batch, rows, used
      ).grads
    ),
    bigram.params(),
  )
  assert len(passes) == copies
