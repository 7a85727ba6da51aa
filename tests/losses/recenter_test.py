"""Recentring by the weights, against a loop written from its definition."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases

P, G, T = 6, 5, 7
GIVEN = (
  losses.set_advantage(lambda batch: batch.extras['given_advantage']),
  losses.on_keep(lambda keep, batch: batch.extras['given_keep']),
  losses.set_weight(lambda batch: batch.extras['given_weight']),
)
PLAIN = losses.chain(*GIVEN)
MOVED = {name: losses.chain(*GIVEN, x) for name, x in cases.RECENTER.items()}
both = pytest.mark.parametrize(**{
  'argnames': 'name', 'argvalues': list(cases.RECENTER),
})  # fmt: skip


def batch_of(seed, dtype=jnp.float64):
  """Few ids and ragged lengths, so that prefixes of all kinds are shared.

  Tool output in the middle, dropped tokens, weights of 0, an invalid
  completion, one that keeps nothing, one that is alone, and garbage in the ids
  of the padding.
  """
  rng = np.random.default_rng(seed)
  shape = P, G, T
  tokens = rng.integers(0, 2, shape)
  mask = np.arange(T) < rng.integers(2, T + 1, (P, G, 1))
  mask[3] &= rng.random((G, T)) < 0.7
  keep = rng.random(shape) < np.where(np.arange(P) < 4, 1, 0.8)[:, None, None]
  weight = rng.random(shape) * (rng.random(shape) < 0.9)
  valid = np.ones((P, G), bool)
  valid[0, 1] = False
  valid[1, 1:] = False  # leaves one alone
  valid[4, 2:] = False  # leaves two
  keep[2, 4] = False
  tokens[2, :, :3], weight[2, :, :3] = 1, rng.random((G, 3))  # all share these
  given = {
    'given_advantage': jnp.asarray(rng.normal(size=shape), dtype),
    'given_keep': jnp.asarray(keep),
    'given_weight': jnp.asarray(weight, dtype),
  }
  return losses.make_batch(
    mask,
    jnp.zeros((P, G), dtype),
    tokens=jnp.asarray(tokens),
    valid=jnp.asarray(valid),
    extras=given,
  )


@functools.partial(jax.jit, static_argnums=0)
def prepared(method, batch):
  return cases.prepared(method, batch)[0]


def before_and_after(name, batch):
  """Prepared without and with the transform, NumPy."""
  plain = prepared(PLAIN, batch)
  moved = prepared(MOVED[name], batch)
  np.testing.assert_array_equal(plain.weight, moved.weight)
  pick = ('tokens', 'mask', 'keep', 'weight', 'advantage')
  return [
    [np.asarray(getattr(b, field)) for field in pick] for b in (plain, moved)
  ]


def loop(name, tokens, mask, keep, weight, advantage):
  """A token at a time, straight from the definition."""
  counts = keep & (weight > 0)
  expected = np.zeros(advantage.shape)
  for p in range(P):
    group = [i for i in range(G) if counts[p, i].any()]
    for i in range(G):
      baseline = 0.0
      for t in range(T):
        before = tokens[p, i, :t].tolist()
        sharers = [
          j
          for j in range(G)
          if counts[p, j, t] and tokens[p, j, :t].tolist() == before
        ]
        whole = sharers == group if 'prefix' in name else True
        if whole and len(sharers) >= 2:
          w, a = weight[p, sharers, t], advantage[p, sharers, t]
          baseline = np.sum(w * a) / np.sum(w)
        if mask[p, i, t]:
          expected[p, i, t] = advantage[p, i, t] - baseline
  return expected


@both
@pytest.mark.parametrize('seed', range(3))
def test_against_a_loop(name, seed):
  before, after = before_and_after(name, batch_of(seed))
  expected = loop(name, *before)
  np.testing.assert_allclose(after[-1], expected, rtol=1e-12, atol=1e-14)
  assert np.any(expected != before[-1])


def nodes(tokens, keep, weight):
  """History -> the counted (completion, position, id) after it, per group."""
  for p in range(P):
    after = collections.defaultdict(list)
    for i, t in np.argwhere(keep[p] & (weight[p] > 0)):
      after[tuple(tokens[p, i, :t])].append((i, t, tokens[p, i, t]))
    yield p, after


@both
def test_nothing_is_left_where_they_go_along_in_float32(name):
  """W_agg of a node is 0; of a branching, the sum over its branches is."""
  unanimous = branching = 0
  for seed in range(8):
    before, after = before_and_after(name, batch_of(seed, jnp.float32))
    tokens, _, keep, weight, advantage = after
    assert advantage.dtype == weight.dtype == np.float32
    pull = weight.astype(float) * advantage
    size = np.abs(weight.astype(float) * before[-1])
    for p, after_history in nodes(tokens, keep, weight):
      group = np.sum((keep[p] & (weight[p] > 0)).any(-1))
      for held in after_history.values():
        i, t, ids = map(np.array, zip(*held, strict=True))
        if len(held) < 2 or ('prefix' in name and len(held) < group):
          continue
        limit = 4 * np.finfo(np.float32).eps * size[p, i, t].sum()
        assert abs(pull[p, i, t].sum()) <= limit
        parts = [pull[p, i, t][ids == one].sum() for one in set(ids)]
        if len(parts) == 1:
          unanimous += 1
        else:
          branching += 1
          assert np.abs(parts).max() > 100 * limit  # the choice is taught
  assert unanimous > 10 and branching > 10


def test_constant_weights_subtract_one_number_per_group():
  """Where no tokens are shared at all, too."""
  case = cases.make_case(5)
  plain = losses.chain(
    losses.normalize_by_group(), losses.mean_over_sequences()
  )
  recentred = losses.chain(plain, cases.RECENTER['recenter_shared_prefix'])
  tokens = np.arange(case.tokens.size).reshape(case.tokens.shape)
  given = cases.to_batch(case._replace(tokens=tokens))
  before, _ = cases.prepared(plain, given)
  after, _ = cases.prepared(recentred, given)
  w, a = np.max(before.weight, -1), np.asarray(before.advantage[..., 0])
  baseline = np.sum(w * a, 1) / np.sum(w, 1)
  expected = np.where(before.mask, (a - baseline[:, None])[..., None], 0)
  np.testing.assert_allclose(after.advantage, expected, atol=1e-14)
  assert np.abs(baseline).max() > 0.1


@both
def test_equal_advantages_leave_exactly_zero(name):
  """In float32, whatever the weights; a mean of 0.1 need not be 0.1 there."""
  method = losses.chain(
    losses.constant_advantage(0.1),
    losses.set_weight(lambda batch: batch.extras['given_weight']),
    cases.RECENTER[name],
  )
  rng = np.random.default_rng(0)
  shape = 16, G, T
  weight = rng.random(shape).astype(np.float32) / 7
  assert np.any(np.sum(weight * np.float32(0.1), 1) / np.sum(weight, 1) != 0.1)
  batch = losses.make_batch(
    np.arange(T) < rng.integers(1, T + 1, (*shape[:2], 1)),
    jnp.zeros(shape[:2], jnp.float32),
    tokens=jnp.asarray(rng.integers(0, 2, shape)),
    extras={'given_weight': jnp.asarray(weight)},
  )
  batch = prepared(method, batch)
  assert batch.advantage is not None and batch.advantage.dtype == jnp.float32
  assert not np.any(batch.advantage)


@both
def test_who_is_alone_keeps_its_advantage(name):
  before, after = before_and_after(name, batch_of(0))
  assert before[-1][1].any()
  np.testing.assert_array_equal(after[-1][1], before[-1][1])


def test_a_baseline_lasts_until_the_next_that_qualifies():
  """Two share `1 2`, then go apart; the third leaves at once."""
  tokens = jnp.array([[[1, 2, 3, 5], [1, 2, 4, 6], [7, 2, 3, 5]]])
  given = {
    'given_advantage': jnp.broadcast_to(
      jnp.array([3.0, 0.0, 9.0])[None, :, None], tokens.shape
    ),
    'given_keep': jnp.ones(tokens.shape, bool),
    'given_weight': jnp.array([[[1.0] * 4, [2.0] * 4, [3.0] * 4]]),
  }
  batch = losses.make_batch(
    jnp.ones(tokens.shape, bool), jnp.zeros((1, 3)), tokens=tokens, extras=given
  )
  _, whole = before_and_after('recenter_shared_prefix', batch)
  _, branches = before_and_after('recenter_branches', batch)
  # All: (3 + 0 + 27) / 6 = 5. Those who begin with 1: 3 / 3 = 1.
  np.testing.assert_allclose(
    whole[-1][0], [[-2] * 4, [-5] * 4, [4] * 4], rtol=1e-15
  )
  np.testing.assert_allclose(
    branches[-1][0], [[-2, 2, 2, 2], [-5, -1, -1, -1], [4] * 4], rtol=1e-15
  )
