"""The learner on episodes: tokens that nobody chose, and contexts read again.

A hand-made rollout is drawn turn by turn with the engine, so that the sampler's
log-probabilities are of what the policy has read. A bigram model shows what the
learner does with any method, against derivatives of one row after another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import rewards
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes import types
from grpo_jax.learner import gradient
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step
from grpo_jax.mesh import sharding
from grpo_jax.models import attention
from grpo_jax.models import experts
from grpo_jax.rollouts import gathering
from tests import bigram
from tests import drawing
from tests import tiny
from tests import trees
from tests.chosen import chosen
from tests.learning import METHODS
from tests.learning import bigram_learner
from tests.learning import bigram_rollout
from tests.learning import layouts_of
from tests.learning import learned
from tests.learning import make_learner
from tests.learning import make_updater
from tests.learning import score
from tests.learning import spec
from tests.learning import with_top

MODEL = tiny.model(num_layers=1)
PARAMS = tiny.params(MODEL)
GROUP, WIDTH = 2, 16


class Drawing:
  """Episodes that an engine draws, turn by turn."""

  def __init__(self):
    self.prompts = tiny.ragged(prompts=4)[0]
    self.rng = np.random.default_rng(5)
    self.engine = engines.LocalEngine(
      MODEL, prompt_buckets=(8, 24), completion_buckets=(8,)
    )
    self.engine.load(PARAMS, version=3)
    number = len(self.prompts) * GROUP
    self.tokens = [[] for _ in range(number)]  # (id, logp, chosen, turn)
    self.previous = [[] for _ in range(number)]

  def write(self, n, after, ids, logp=None, turn=0):
    """Adds tokens behind a place; the place of the last of them."""
    logp = [0.0] * len(ids) if logp is None else logp
    for token, value in zip(ids, logp, strict=True):
      self.previous[n].append(after)
      self.tokens[n].append((token, value, turn > 0, turn))
      after = len(self.tokens[n]) - 1
    return after

  def read(self, n, last):
    """The ids of a context."""
    places = trees.path(self.previous[n], last)
    ids = [self.tokens[n][place][0] for place in places]
    return [*self.prompts[n // GROUP], *ids]

  def say(self, last, limit, turn):
    """A turn of every episode, behind its place in `last`."""
    read = [self.read(n, place) for n, place in enumerate(last)]
    drawn = drawing.completions(
      self.engine, read, limit=limit, group=1, rollout=turn
    )
    ends = []
    for n, place in enumerate(last):
      size = drawn.length[n, 0]
      ids, logp = drawn.tokens[n, 0, :size], drawn.logp[n, 0, :size]
      ends.append(self.write(n, place, ids.tolist(), logp.tolist(), turn))
    return ends

  def hear(self, last, size):
    """What a tool writes."""
    ids = self.rng.integers(0, 40, (len(last), size))
    return [
      self.write(n, at, row.tolist())
      for n, (at, row) in enumerate(zip(last, ids))
    ]

  def episodes(self):
    """[P][G]."""
    found = []
    for rows, previous in zip(self.tokens, self.previous, strict=True):
      ids, logp, is_chosen, turn = map(np.array, zip(*rows, strict=True))
      straight = np.array_equal(previous, np.arange(-1, len(ids) - 1))
      found.append(
        types.Episode(
          ids=ids,
          chosen=is_chosen,
          logp=logp,
          log_kept=np.zeros(len(ids)),
          version=np.where(is_chosen, 3, 0),
          finish=engines.ENDED,
          turn=np.maximum(turn - 1, 0),
          previous=None if straight else np.array(previous),
        )
      )
    return [found[n : n + GROUP] for n in range(0, len(found), GROUP)]


@functools.cache
def hand_made(branches):
  """Two turns around a tool's answer; if it branches, two more.

  One of these reads the prompt and another text, the other one less of the
  tool's answer than the second turn did.
  """
  with jax.default_matmul_precision('highest'):
    made = Drawing()
    begin = [-1] * len(made.tokens)
    answer = made.hear(made.say(begin, 4, turn=1), 3)
    made.say(answer, 3, turn=2)
    if branches:
      made.say(made.hear(begin, 2), 2, turn=3)
      made.say([place - 1 for place in answer], 2, turn=4)
  episodes = made.episodes()
  reward = np.arange(len(episodes) * GROUP, dtype=np.float32) % 3
  scores = rewards.Scores(reward, reward[:, None], reward >= 0)
  number = len(made.prompts)
  return rollout_lib.make_rollout(
    episodes,
    scores,
    (WIDTH,),
    prompts=made.prompts,
    prompt_texts=[''] * number,
    texts=[[''] * GROUP] * number,
    index=np.arange(number),
  )


def is_drawn(rollout):
  """Something to test: holes, and contexts that are read again."""
  mask, length = rollout.batch.mask, rollout.length
  assert np.all(mask.sum(-1) < length) and mask.any()
  assert np.all(rollout.batch.logp_sampler[mask] < 0)
  assert not rollout.batch.logp_sampler[~mask].any()
  assert not rollout.batch.version[~mask].any()
  return rollout


# Branches share what they have in common, or each has a copy of it.
LAYOUTS = tuple(
  kind + of_branches
  for kind in ('padded', 'packed', 'shared')
  for of_branches in ('', ' copies')
)
MESHES = {1: {}, 8: dict(data=2, fsdp=4)}
CASES = [
  (branches, kind, devices)
  for branches in (False, True)
  for kind in LAYOUTS
  for devices in MESHES
]
SOME = {
  (True, 'shared', 1),
  (True, 'packed', 8),
  (True, 'packed copies', 1),
}


def laid_out(kind, micro_rows=8, pack_tokens=40):
  """The spec of one of `LAYOUTS`."""
  kind, _, copies = kind.partition(' ')
  return dataclasses.replace(
    spec(kind, micro_rows, pack_tokens=pack_tokens), share=not copies
  )


def of_mesh(method, devices):
  return make_learner(
    METHODS[method](), mesh=dict(MESHES[devices]), num_layers=1
  )


@pytest.mark.parametrize('branches, kind, devices', chosen(CASES, SOME))
def test_the_learner_finds_what_the_sampler_said(branches, kind, devices):
  rollout = is_drawn(hand_made(branches))
  learner = of_mesh('grpo', devices)
  made = make_updater(learner, PARAMS, laid_out(kind))
  with jax.default_matmul_precision('highest'):
    found = np.asarray(score(made, PARAMS, rollout).logp)
  mask = rollout.batch.mask
  np.testing.assert_allclose(
    found[mask], rollout.batch.logp_sampler[mask], atol=1e-5
  )


def by_itself(params, rollout):
  """`Scores` [P,G,T] of the chosen tokens, each at the end of a row."""
  mask = rollout.batch.mask
  places = np.argwhere(mask)
  width = 8 + WIDTH
  ids, size = np.zeros((len(places), width), np.int32), []
  for n, (p, g, t) in enumerate(places):
    before = range(t)
    if rollout.previous is not None:
      before = trees.path(rollout.previous[p, g], t)[:-1]
    read = [*rollout.prompts[p], *rollout.batch.tokens[p, g, list(before)]]
    ids[n, : len(read)] = read
    size.append(len(read))
  size = np.array(size)
  positions = jnp.broadcast_to(jnp.arange(width)[None], ids.shape)
  hidden, _ = MODEL.hidden(
    MODEL.unstack(params), ids, positions, attention.over_prompts(size)
  )
  last = jnp.take_along_axis(hidden, (size - 1)[:, None, None], axis=1)
  policy = jax.nn.log_softmax(MODEL.head(params, last)[:, 0])
  target = rollout.batch.tokens[mask][:, None]
  logp = jnp.take_along_axis(policy, target, axis=1)[:, 0]
  entropy = -jnp.sum(jnp.exp(policy) * policy, axis=-1)
  whole = jnp.zeros(mask.shape, jnp.float32)
  at = tuple(places.T)
  return models.Scores(whole.at[at].set(logp), whole.at[at].set(entropy))


def expected_gradient(method, rollout, scores, params):
  """(gradient, d loss / d logp): everything at once, without a layout."""
  method = METHODS[method]()
  batch = jax.tree.map(jnp.asarray, rollout.batch)

  @jax.jit
  def run(params):
    credited, state = losses.credit(method, batch, method.init())
    ready = losses.prepare(method, credited, state)

    def loss(found):
      return losses.surrogate_loss(
        method, found.logp, ready, state, found.entropy, found.top_logp
      )[0]

    found, back = jax.vjp(scores, params)
    slope = jax.grad(loss)(found)
    return back(slope)[0], slope.logp

  return run(params)


def found_gradient(learner, params, rollout, rows):
  made = make_updater(learner, params, rows)
  batch, state, _ = step.credit(learner, rollout.batch, learner.method.init())
  batch = losses.prepare(learner.method, batch, state)
  laid_out, used = layouts_of(made, rollout).stack(
    np.arange(len(rollout.prompts))
  )

  def run(params, batch, laid_out):
    with sharding.use(learner.mesh):
      return gradient.differentiate(
        learner, None, params, state, batch, laid_out, used
      )

  place = step.state_sharding(learner, params).params
  return jax.jit(run)(jax.device_put(params, place), batch, laid_out)


def moved(rollout, seed=0, shape=None):
  """The rollout under an old policy that is not the one that learns."""
  batch, rng = rollout.batch, np.random.default_rng(seed)
  near = batch.logp_sampler + 0.3 * rng.standard_normal(batch.mask.shape)
  old = np.where(batch.mask, near, 0).astype(np.float32)
  return rollout._replace(batch=batch._replace(logp_old=old, logp_ref=old))


@functools.cache
def expected_of_hand_made(method, branches):
  rollout = moved(hand_made(branches))
  scores = lambda params: by_itself(params, rollout)
  return expected_gradient(method, rollout, scores, PARAMS)


@pytest.mark.parametrize(
  'branches, kind, devices',
  chosen(CASES, {(True, 'shared', 1), (True, 'shared copies', 1)}),
)
def test_only_what_the_policy_chose_has_a_gradient(branches, kind, devices):
  """GSPO pools the ratios of a completion, wherever its tokens lie."""
  rollout = moved(is_drawn(hand_made(branches)))
  learner = of_mesh('gspo', devices)
  found = found_gradient(learner, PARAMS, rollout, laid_out(kind))
  expected, slope = expected_of_hand_made('gspo', branches)
  tiny.assert_trees_close(found.grads, expected, 1e-5)
  np.testing.assert_allclose(found.slope, slope, atol=1e-6)
  assert not np.any(np.asarray(found.slope)[~rollout.batch.mask])
  assert np.any(np.asarray(found.slope))


def of_bigram(seed, branches, width=6):
  """A rollout of the bigram model with holes, and with branches."""
  rng = np.random.default_rng(seed)
  # All different, so that a method which ranks tokens ranks them in one way.
  rollout = bigram_rollout(seed, reward=rng.random((4, 4)), width=width)
  shape = rollout.batch.mask.shape
  mask = rollout.batch.mask & (rng.random(shape) < 0.7)
  previous = trees.random_trees(rng, rollout.length, width, branches)
  cut = lambda x: None if x is None else np.where(mask, x, 0).astype(x.dtype)
  batch = rollout.batch._replace(
    mask=mask,
    keep=mask,
    logp_old=cut(rollout.batch.logp_old),
    logp_ref=cut(rollout.batch.logp_ref),
  )
  return with_top(
    rollout._replace(batch=batch, previous=previous), bigram.VOCAB
  )


def of_bigram_by_itself(rollout):
  """Scores by the token that each token follows, and where that stands."""
  tokens, shape = rollout.batch.tokens, rollout.batch.mask.shape
  last, at = np.zeros(shape, int), np.zeros(shape, int)
  for p, g, t in np.argwhere(rollout.batch.mask):
    before = trees.path(rollout.previous[p, g], t)[:-1]
    last[p, g, t] = [*rollout.prompts[p], *tokens[p, g, before]][-1]
    at[p, g, t] = len(rollout.prompts[p]) + len(before) - 1

  def scores(params):
    policy = jax.nn.log_softmax(params['token'][last] + params['position'][at])
    logp = jnp.take_along_axis(policy, tokens[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(policy) * policy, axis=-1)
    ids = rollout.batch.extras['teacher_top_ids']
    top = jnp.take_along_axis(policy, ids, axis=-1)
    logp, entropy = (
      jnp.where(rollout.batch.mask, x, 0) for x in (logp, entropy)
    )
    return models.Scores(logp, entropy, top)

  return scores


BIGRAM_CASES = [
  (method, kind, devices)
  for method in METHODS
  for kind in LAYOUTS
  for devices in MESHES
]


@pytest.mark.parametrize(
  'method, kind, devices',
  chosen(
    BIGRAM_CASES,
    {
      ('gspo', 'shared', 1), ('entropy', 'packed', 8),
      ('gspo', 'shared copies', 8), ('top', 'packed', 8),
    },
  ),
)  # fmt: skip
def test_any_method_learns_from_trees(method, kind, devices):
  learner = bigram_learner(METHODS[method](), mesh=(1, 1, 1))
  learner = bigram.changed(learner, mesh=sharding.make_mesh(**MESHES[devices]))
  position = jnp.pad(bigram.params()['position'], ((0, 2), (0, 0)))
  params = {**bigram.params(), 'position': position}
  for seed, branches in ((0, 0.3), (1, 0.7)):
    # The second time without the completions that have no advantage.
    learner = dataclasses.replace(learner, compute_all=seed == 0)
    rollout = of_bigram(seed, branches, width=8)
    expected, slope = expected_gradient(
      method, rollout, of_bigram_by_itself(rollout), params
    )
    found = found_gradient(learner, params, rollout, laid_out(kind))
    tiny.assert_trees_close(found.grads, expected, 1e-5)
    np.testing.assert_allclose(found.slope, slope, atol=1e-6)


@pytest.mark.parametrize('kind', ['packed', 'packed copies'])
def test_routers_count_a_token_in_one_of_its_slots(kind):
  def score_routed(params, rows, wanted, counted, sampled):
    del sampled
    number = jnp.sum(counted, dtype=jnp.float32)[None, None]
    routed = models.Routed(experts.Statistics(number, number), None)
    return bigram.score(params, rows, wanted), routed

  learner = bigram_learner(METHODS['grpo'](), score_routed=score_routed)
  rollout = of_bigram(0, 0.5)
  rows = laid_out(kind, 2, pack_tokens=30)
  found = found_gradient(learner, bigram.params(), rollout, rows)
  drawn = rollout.drawn[rollout.batch.valid].sum()
  assert found.routed.statistics.load.item() == drawn > 0


@pytest.mark.parametrize('kind', ['packed', 'packed copies'])
def test_an_update_counts_what_the_policy_chose(kind):
  rollout = of_bigram(0, 0.3)
  rollout = rollout._replace(batch=rollout.batch._replace(logp_old=None))
  made = make_updater(
    bigram_learner(METHODS['gspo']()), bigram.params(),
    laid_out(kind, 2, pack_tokens=30), batches=2,
  )  # fmt: skip
  state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
  state, measured = learned(made, state, rollout)
  scalars = metrics.to_scalars(measured)
  valid = rollout.batch.valid
  drawn = rollout.drawn[valid].mean()
  assert drawn < rollout.length[valid].mean()
  assert scalars['length_tokens'] == pytest.approx(drawn)
  assert scalars['needed_tokens'] == 1 and state.step == 2


@pytest.mark.parametrize('kind', chosen(LAYOUTS, {'packed', 'packed copies'}))
def test_trees_that_are_gathered_on_the_devices_are_those_of_one_host(kind):
  rollout = of_bigram(0, 0.5)
  learner = bigram_learner(METHODS['gspo'](), mesh=(2, 2, 1))
  rows = laid_out(kind, 4, pack_tokens=30)
  made = make_updater(learner, bigram.params(), rows, batches=2)
  ends = []
  for holder in None, np.zeros(len(rollout.prompts), np.int64):
    whole = gathering.on_devices(rollout._replace(holder=holder), learner.mesh)
    state = made.compiled.init(jax.tree.map(jnp.copy, bigram.params()))
    state, measured = learned(made, state, whole)
    ends.append((state, metrics.to_scalars(measured)))
  jax.tree.map(np.testing.assert_array_equal, *ends)


def test_a_rollout_without_branches_adds_nothing_to_a_layout():
  rollout = of_bigram(0, 0.0)._replace(previous=None)
  for kind in LAYOUTS:
    rows, _ = micro_batches.cut_rollout(rollout, np.arange(4), laid_out(kind))
    assert rows.first is None and rows.count is None and rows.inside is None
    assert rows.reach is None and rows.own is None
