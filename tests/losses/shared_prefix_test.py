"""The trie over sampled ids, against one made of dicts."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import diagnostics
from grpo_jax import losses
from grpo_jax.mesh import sharding

P, G, T = 8, 5, 6


def sampled(holes):
  """Few ids and many completions: prefixes of all kinds are shared."""
  random = np.random.default_rng(3)
  tokens = random.integers(0, 2, (P, G, T)).astype(np.int32)
  mask = np.arange(T) < random.integers(1, T + 1, (P, G, 1))
  mask[0, 2] = False  # an invalid completion
  mask[1, 1:] = False  # one that is alone
  if holes:
    mask &= random.random((P, G, T)) < 0.6
  tokens[2, :, :2], mask[2, :, :2] = 1, True  # the whole group shares these
  coefficient = random.normal(size=(P, G, T)).astype(np.float32)
  coefficient[:, 0, 0] = 0
  return tokens, mask, coefficient


def tries(tokens, mask, coefficient):
  """One dict for each group: prefix -> [(completion, coefficient)]."""
  groups = []
  for p in range(P):
    nodes = collections.defaultdict(list)
    for i in range(G):
      for t in range(T):
        if mask[p, i, t]:
          prefix = tuple(tokens[p, i, : t + 1].tolist())
          nodes[prefix].append((i, float(coefficient[p, i, t])))
    groups.append(nodes)
  return groups


@pytest.mark.parametrize('holes', [False, True])
def test_every_token_finds_its_node(holes):
  tokens, mask, coefficient = sampled(holes)
  garbage = np.where(mask, coefficient, np.nan)  # read inside the mask only
  shared = jax.jit(losses.shared_prefix_weight)(tokens, mask, garbage)
  want = [np.zeros((P, G, T)) for _ in range(3)]
  for p, nodes in enumerate(tries(tokens, mask, coefficient)):
    for prefix, held in nodes.items():
      pulls = [c for _, c in held]
      for i, _ in held:
        at = p, i, len(prefix) - 1
        want[0][at] = len(held)
        want[1][at], want[2][at] = sum(pulls), sum(map(abs, pulls))
  assert shared.sharers.dtype == jnp.int32
  assert np.max(want[0]) == G  # the draw has what is to be tested
  for got, expected in zip(shared, want):
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize('holes', [False, True])
def test_the_summary_counts_each_node_once(holes):
  tokens, mask, coefficient = sampled(holes)
  shared = losses.shared_prefix_weight(tokens, mask, coefficient)
  summary = jax.jit(losses.prefix_summary)(shared)
  want = collections.defaultdict(lambda: [0.0, 0.0])
  for p, nodes in enumerate(tries(tokens, mask, coefficient)):
    size = int(np.sum(np.any(mask[p], axis=-1)))
    for kind in ('whole', 'part'):
      want[f'{kind}_tokens'][1] += size >= 2
    for held in nodes.values():
      if len(held) < 2:
        continue
      kind = 'whole' if len(held) == size else 'part'
      pull = sum(c for _, c in held)
      total = sum(abs(c) for _, c in held)
      want[f'{kind}_tokens'][0] += 1
      want[f'{kind}_weight'][0] += pull
      want[f'{kind}_weight'][1] += 1
      if total > 0:
        want[f'{kind}_uncancelled'][0] += abs(pull) / total
        want[f'{kind}_uncancelled'][1] += 1
  assert set(summary) == set(want)
  for name, pair in summary.items():
    np.testing.assert_allclose(pair, want[name], rtol=1e-5, err_msg=name)


def test_a_prefix_without_pull_does_not_count_as_cancelled():
  tokens = jnp.zeros((1, 3, 2), jnp.int32)
  mask = jnp.ones(tokens.shape, bool)
  shared = losses.shared_prefix_weight(tokens, mask, jnp.zeros(tokens.shape))
  summary = losses.prefix_summary(shared)
  assert summary['whole_uncancelled'] == (0, 0)
  assert float(summary['whole_tokens'][0]) == pytest.approx(2)


@pytest.mark.parametrize('devices, loops', [(1, 2), (8, 16)])
def test_only_one_device_takes_the_sums_of_a_summary_in_one_loop(
  devices, loops
):
  """The positions, then the rest; compiling goes by loops.

  Several devices take eight sums one by one, because XLA would gather what one
  loop reads.
  """
  shared = diagnostics.shared_prefix_weight(*sampled(False))
  with sharding.use(sharding.make_mesh(devices)):
    program = str(jax.make_jaxpr(diagnostics.prefix_summary)(shared))
  assert program.count('= reduce[') == loops


def test_a_summary_gathers_nothing_where_the_mesh_is_not_known():
  """As in a training loop that is not ours."""
  shared = diagnostics.shared_prefix_weight(*sampled(False))
  split = jax.tree.map(
    lambda x: jnp.concatenate([x] * 8), shared
  )  # whole prompts on each device
  split = jax.device_put(split, sharding.rows(sharding.make_mesh(8)))
  program = jax.jit(diagnostics.prefix_summary).lower(split).compile()
  assert 'all-reduce' in program.as_text()
  assert 'all-gather' not in program.as_text()


def test_nothing_as_large_as_all_pairs_is_made():
  shapes = [
    jax.ShapeDtypeStruct((P, G, T), dtype)
    for dtype in (jnp.int32, jnp.bool_, jnp.float32)
  ]
  program = jax.make_jaxpr(losses.shared_prefix_weight)(*shapes)
  largest, todo = 0, [program.jaxpr]
  while todo:
    jaxpr = todo.pop()
    for equation in jaxpr.eqns:
      largest = max([largest, *(v.aval.size for v in equation.outvars)])
      todo += [v.jaxpr for v in equation.params.values() if hasattr(v, 'jaxpr')]
  assert 0 < largest <= P * G * T


def test_prompts_may_lie_on_several_devices():
  arrays = sampled(holes=True)
  place = sharding.rows(sharding.make_mesh(data=8))
  split = [jax.device_put(x, place) for x in arrays]
  here = losses.shared_prefix_weight(*arrays)
  there = jax.jit(losses.shared_prefix_weight)(*split)
  for one, other in zip(here, there):
    assert other.sharding.is_equivalent_to(place, 3)
    np.testing.assert_array_equal(one, other)


def test_the_audits_have_it_under_the_same_names():
  assert diagnostics.shared_prefix_weight is losses.shared_prefix_weight
  assert diagnostics.prefix_summary is losses.prefix_summary
