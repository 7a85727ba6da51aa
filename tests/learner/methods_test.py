"""The learner and every kind of method: one gradient, however it is cut up.

A bigram model stands for the transformer, whose layouts have tests of their
own: what is compared here is what the learner does with any scores.
"""

from collections.abc import Callable
import dataclasses
import functools
import types
from typing import Any
from typing import NamedTuple

import jax
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax.learner import gradient as gradient_lib
from grpo_jax.learner import metrics
from grpo_jax.learner import micro_batches
from grpo_jax.learner import step as learner_lib
from grpo_jax.learner import step_metrics
from grpo_jax.losses import methods
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import bigram
from tests import oracles
from tests import tiny
from tests.chosen import chosen
from tests.learning import spec


def controlled():
  """Controllers, a correction, and the gradient of the entropy."""
  return losses.chain(
    losses.normalize_by_group(),
    losses.truncate_sequence_importance(1.2, self_normalized=True),
    losses.mean_over_tokens(),
    losses.ppo_clip(),
    losses.add_entropy_bonus(losses.entropy_target(9.0, initial=0.1)),
    losses.add_kl(losses.adaptive_kl(0.3, 0.1)),
  )


def thinned():
  """Couples the batch, of which not every token is trained."""
  return losses.chain(
    losses.drop_truncated(),
    methods.clip_cov(share=0.1, low_covariance=0.1, high_covariance=2.0),
  )


class Entry(NamedTuple):
  make: Callable[[], losses.LossTransform]
  acts: tuple[str, ...]  # metrics that are positive where the method is at work


clipped = ('clipped_high', 'clipped_low', 'outside_high', 'outside_low')
METHODS = {
  'deepseek_v3_2': Entry(
    functools.partial(
      methods.deepseek_v3_2, 0.05, kl_coefficient=0.3, policy='sampler'
    ),
    (*clipped, 'off_policy', 'sampler_gap', 'kl_ref_k3'),
  ),
  'gtpo_conflict': Entry(methods.gtpo_conflict, ('ratio',)),
  'gtpo_entropy': Entry(methods.gtpo_entropy, clipped),
  'forking_tokens': Entry(
    functools.partial(methods.forking_tokens, share=0.6), clipped
  ),
  'clip_cov': Entry(thinned, (*clipped, 'detached')),
  'prompt_mean': Entry(
    functools.partial(methods.prompt_mean, low=0.2, high=0.2),
    ('capped_high', 'capped_low'),
  ),
  'reinforce_pp': Entry(
    functools.partial(methods.reinforce_pp, kl_coefficient=0.7), clipped
  ),
  'gdpo': Entry(functools.partial(methods.gdpo, weights=(2.0, -0.5)), clipped),
  'positive_nll': Entry(methods.positive_nll, clipped),
  'grpo_s': Entry(
    functools.partial(methods.grpo_s, low=0.05, high=0.1), clipped
  ),
  'vespo': Entry(methods.vespo, ('ratio',)),
  'controlled': Entry(controlled, (*clipped, 'kl_ref', 'kl_ref_k3')),
}

# Of what the learner treats differently: they need the sampler, the whole batch
# at once, or everything. The tests of losses compare each method with its loop,
# and add it up from parts.
SOME = {'deepseek_v3_2', 'clip_cov', 'controlled'}


def rows(names):
  return chosen(names, SOME)


# Layouts of one shape share a program, for compiling is what takes the time.
CUTS = [
  spec('padded'),
  spec('shared'),  # one row is masked all through
  spec('shared', row_completions=2),  # inside groups
  spec('packed'),
]


def cuts(micro_rows):
  """(label, Layout of one shape for all cuts, its micro-batches)."""
  for cut in CUTS:
    cut = dataclasses.replace(cut, micro_rows=micro_rows)
    rows, used = micro_batches.cut_rollout(
      bigram.rollout(), np.arange(bigram.PROMPTS), cut
    )
    label = f'{cut.kind}-{micro_rows}-{cut.row_completions}'
    yield label, grown(rows), used


def grown(rows):
  """A stack of micro-batches with room for any cut."""

  def grow(x, *shape, value=0):
    widths = [(0, to - size) for to, size in zip(shape, x.shape)]
    return np.pad(x, widths, constant_values=value)

  stack, size = bigram.PROMPTS * bigram.GROUP, rows.tokens.shape[1]
  columns = ('tokens', 'position', 'segment', 'parent')
  fields = {k: grow(getattr(rows, k), stack, size, 40) for k in columns}
  for name in ('column', 'target'):
    fields[name] = grow(getattr(rows, name), stack, size, 8, bigram.TOKENS)
  nobody = bigram.PROMPTS * bigram.GROUP
  fields['completion'] = grow(rows.completion, stack, size, 8, value=nobody)
  return layout.Layout(**fields)


class Found(NamedTuple):
  grads: dict[str, jax.Array]
  loss: jax.Array
  measured: dict[str, metrics.Metric]


@functools.cache
def expected(name):
  """(batch, state, `Found`), by derivatives of the whole batch at once."""
  method = METHODS[name].make()
  learner = bigram.make_learner(method)
  rows = layout.padded_rows(
    bigram.rollout().prompts,
    bigram.rollout().batch.tokens,
    bigram.rollout().length,
    16,
  )

  def scored(params):
    scores = bigram.score(params, rows, learner.wanted(None))
    put = lambda x: tiny.gather(x, rows, bigram.rollout().length)
    return jax.tree.map(put, scores)

  def of_scores(scores, batch, state):
    return losses.surrogate_loss(
      method, scores.logp, batch, state, scores.entropy
    )

  @jax.jit
  def compute(params, batch):
    batch, state, _ = learner_lib.credit(learner, batch, method.init())
    batch = losses.prepare(method, batch, state)
    scores, pull_back = jax.vjp(scored, params)
    pull = jax.value_and_grad(of_scores, has_aux=True)
    (loss, terms), slopes = pull(scores, batch, state)
    unmoved = batch._replace(logp_old=scores.logp, logp_sampler=scores.logp)
    _, intended = pull(scores, unmoved, state)
    measured = step_metrics.metrics_of_terms(terms, batch)
    measured |= step_metrics.metrics_of_prefixes(
      batch, -slopes.logp, -intended.logp
    )
    return batch, state, Found(pull_back(slopes)[0], loss, measured)

  return compute(bigram.params(), bigram.rollout().batch)


def by_hand(name):
  """The method's oracle on the rollout: two Results and the gradient.

  The policy as it is, and as if it had never moved; the gradient of the first
  in the parameters, through a softmax in float64.
  """
  rollout, params = bigram.rollout(), bigram.params()
  table, places = (
    np.asarray(params[k], np.float64) for k in ('token', 'position')
  )
  batch = rollout.batch
  logp, entropy = np.zeros((2, *batch.mask.shape))
  slopes = np.zeros((*batch.mask.shape, bigram.VOCAB))  # of logp in its logits
  before = np.zeros((*batch.mask.shape, 2), int)  # last token, its position
  for p, g, t in np.argwhere(batch.mask):
    ids = [*rollout.prompts[p], *batch.tokens[p, g]]
    at = len(rollout.prompts[p]) + t - 1
    logits = table[ids[at]] + places[at]
    log_share = logits - np.log(np.sum(np.exp(logits)))
    share = np.exp(log_share)
    before[p, g, t] = ids[at], at
    logp[p, g, t] = log_share[ids[at + 1]]
    entropy[p, g, t] = -np.sum(share * log_share)
    slopes[p, g, t] = np.eye(bigram.VOCAB)[ids[at + 1]] - share
  fields = {
    field: np.asarray(getattr(batch, field), np.float64)
    for field in ('logp_old', 'logp_ref', 'logp_sampler', 'entropy_old')
  }
  case = oracles.Case(
    logp=logp,
    entropy=entropy,
    mask=batch.mask,
    valid=batch.valid,
    reward=np.asarray(batch.reward, np.float64),
    reward_parts=np.asarray(batch.reward_parts, np.float64),
    truncated=batch.truncated,
    tokens=batch.tokens,
    noise=batch.extras['noise'],
    **fields,
  )
  make: Any = METHODS[name].make
  given = getattr(make, 'args', ()), getattr(make, 'keywords', {})

  def oracle(case):
    return oracles.METHODS[name](case, *given[0], **given[1])

  found = oracle(case)
  unmoved = oracle(case._replace(logp_old=logp, logp_sampler=logp))
  gradient = {'token': np.zeros_like(table), 'position': np.zeros_like(places)}
  for place in map(tuple, np.argwhere(batch.mask)):
    slope = found[1][place] * slopes[place]
    for k, row in zip(('token', 'position'), before[place], strict=True):
      gradient[k][row] += slope
  return found, unmoved, gradient


@pytest.mark.parametrize(
  'name', rows(sorted(set(METHODS) & set(oracles.METHODS) - {'clip_cov'}))
)
def test_the_whole_is_what_a_loop_in_numpy_finds(name):
  """Value, gradient of the parameters, and slopes at a ratio of 1."""
  (loss, slope), (_, intended), gradient = by_hand(name)
  batch, state, wanted = expected(name)
  np.testing.assert_allclose(wanted.loss, loss, rtol=1e-5, atol=1e-7)
  tiny.assert_trees_close(wanted.grads, gradient, 1e-5)
  assert np.abs(slope - intended).max() > 1e-4  # the policy has moved
  learner = bigram.make_learner(METHODS[name].make())
  if name == 'reinforce_pp':
    return  # its credit holds the KL of the policy that drew the rollout
  found: Any = types.SimpleNamespace(scores=scores_of(learner))
  unmoved = gradient_lib.slope_at_ratio_one(learner, found, batch, state)
  np.testing.assert_allclose(unmoved, intended, rtol=1e-4, atol=1e-7)


def scores_of(learner):
  """Scores [P,G,T] of the rollout, by the learner's model."""
  rollout = bigram.rollout()
  rows = layout.padded_rows(
    rollout.prompts, rollout.batch.tokens, rollout.length, 16
  )
  scores = bigram.score(bigram.params(), rows, learner.wanted(None))
  return jax.tree.map(lambda x: tiny.gather(x, rows, rollout.length), scores)


def of_gradient(learner, params, state, batch, rows, used):
  """What the learner finds, and what it measures afterwards."""
  found = gradient_lib.differentiate(
    learner, None, params, state, batch, rows, used
  )
  intended = gradient_lib.slope_at_ratio_one(learner, found, batch, state)
  measured = step_metrics.metrics_of_terms(found.terms, batch)
  measured |= step_metrics.metrics_of_prefixes(batch, -found.slope, -intended)
  return Found(found.grads, found.loss, measured)


def assert_equal(found: Found, wanted: Found, label: str):
  tiny.assert_trees_close(found.grads, wanted.grads, 1e-6)
  # All are sums or means of terms of order 1, some of which cancel.
  scalars, others = (
    {'loss': x.loss, **metrics.to_scalars(x.measured)} for x in (wanted, found)
  )
  assert scalars.keys() == others.keys(), label
  for name, value in scalars.items():
    np.testing.assert_allclose(
      others[name], value, rtol=2e-6, atol=2e-7, err_msg=f'{label}: {name}'
    )


@pytest.mark.parametrize('name', rows(METHODS))
def test_any_layout_row_by_row_gives_what_the_whole_does(name):
  batch, state, wanted = expected(name)
  learner = bigram.make_learner(METHODS[name].make())
  gradient = jax.jit(functools.partial(of_gradient, learner))
  for label, rows, used in cuts(1):
    found = gradient(bigram.params(), state, batch, rows, used)
    assert_equal(found, wanted, label)


@pytest.mark.parametrize('name', chosen(METHODS, SOME - {'clip_cov'}))
def test_so_do_several_rows_or_all_on_eight_devices(name):
  """data x fsdp x tensor = 2 x 2 x 2; 8 rows are all or several."""
  batch, state, wanted = expected(name)
  learner = bigram.make_learner(METHODS[name].make(), (2, 2, 2))
  place = learner_lib.state_sharding(learner, bigram.params()).params
  split = jax.device_put(bigram.params(), place)

  @jax.jit
  def gradient(*args):
    with sharding.use(learner.mesh):
      return of_gradient(learner, *args)

  for label, rows, used in cuts(8):
    rows = jax.device_put(rows, sharding.rows(learner.mesh, axis=1))
    found = gradient(split, state, batch, rows, used)
    assert_equal(found, wanted, label)
  assert len(jax.tree.leaves(found.grads)[0].sharding.device_set) == 8


def test_the_cuts_cut():
  micro = {label: (rows, used) for label, rows, used in (*cuts(1), *cuts(8))}
  used = {label: used for label, (_, used) in micro.items()}
  assert [used[f'padded-{n}-0'] for n in (1, 8)] == [20, 3]  # a tail of padding
  assert [used[f'shared-{n}-0'] for n in (1, 8)] == [5, 1]  # one row, and all
  assert [used[f'shared-{n}-2'] for n in (1, 8)] == [10, 2]
  assert used['packed-1-0'] > 2
  batch, _, _ = expected('clip_cov')
  masked = ~np.any(batch.mask, axis=-1).reshape(-1)
  whole_row = micro['shared-1-0'][0].completion[2, 0, : bigram.GROUP]
  assert np.all(masked[whole_row]) and np.sum(masked) > bigram.GROUP
  assert not masked[-1]  # which an empty slot must not read


@pytest.mark.parametrize('name', rows(METHODS))
def test_every_part_of_the_method_is_at_work(name):
  """So that what is compared is not two zeros."""
  scalars = metrics.to_scalars(expected(name)[2].measured)
  for metric in METHODS[name].acts:
    assert scalars[metric] > 0, metric
  for kind in ('whole', 'part'):
    measured, intended = (
      scalars[f'prefix_{kind}_weight{suffix}'] for suffix in ('', '_expected')
    )
    assert abs(measured - intended) > 1e-5
