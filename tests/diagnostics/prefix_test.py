"""The trie over sampled ids, against one made of dicts; W_agg of methods."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from grpo_jax import sharding
from grpo_jax.diagnostics import _prefix
from grpo_jax.diagnostics import _probe

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
  shared = jax.jit(_prefix.shared_prefix_weight)(tokens, mask, garbage)
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
  shared = _prefix.shared_prefix_weight(tokens, mask, coefficient)
  summary = jax.jit(_prefix.prefix_summary)(shared)
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
  shared = _prefix.shared_prefix_weight(tokens, mask, jnp.zeros(tokens.shape))
  summary = _prefix.prefix_summary(shared)
  assert summary['whole_uncancelled'] == (0, 0)
  assert float(summary['whole_tokens'][0]) == pytest.approx(2)


def test_nothing_as_large_as_all_pairs_is_made():
  shapes = [
    jax.ShapeDtypeStruct((P, G, T), dtype)
    for dtype in (jnp.int32, jnp.bool_, jnp.float32)
  ]
  program = jax.make_jaxpr(_prefix.shared_prefix_weight)(*shapes)
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
  here = _prefix.shared_prefix_weight(*arrays)
  there = jax.jit(_prefix.shared_prefix_weight)(*split)
  for one, other in zip(here, there):
    assert other.sharding.is_equivalent_to(place, 3)
    np.testing.assert_array_equal(one, other)


def method(*links):
  return losses.chain(
    losses.center_by_group(),
    losses.sum_over_tokens(),
    *links,
    losses.score_function(),
  )


@pytest.mark.parametrize('name', ['dr_grpo', 'rloo', 'dapo'])
def test_a_uniform_weight_cancels_on_the_prefix_of_a_group(name):
  bias = _prefix.prefix_bias(getattr(losses.methods, name)())
  assert bias.whole < 1e-12 and bias.uneven < 1e-12
  assert bias.part > 0.3  # a subset's advantages do not add up to 0


def test_the_factor_is_the_weight():
  assert _prefix.prefix_bias(method()).factor == pytest.approx(1 / 16)


def test_grpo_moves_a_group_by_the_correlation_of_reward_and_inverse_length():
  r"""W_agg = Corr(r, 1/L) std(1/L), over the group alone: B = G."""
  probe, sharing = _prefix._sharing_probe(None)
  c = _probe.read(losses.methods.grpo(), probe).coefficient[:, 0, :, 0]
  whole = np.all(sharing, axis=1)
  reward = probe.batch.reward[whole, 0]
  inverse = 1 / np.sum(probe.batch.mask[whole, 0], axis=-1)
  want = [np.corrcoef(r, x)[0, 1] * np.std(x) for r, x in zip(reward, inverse)]
  got = np.sum(c[whole], axis=1) * 2  # the batch holds two groups
  assert len({f'{w:.6f}' for w in want}) == len(want) == 10
  np.testing.assert_allclose(got, want, atol=1e-12)
  bias = _prefix.prefix_bias(losses.methods.grpo())
  assert bias.whole > 0.1 and bias.uneven > 0.1


def test_only_those_who_share_have_the_same_first_id():
  probe, sharing = _prefix._sharing_probe(None)
  first = np.asarray(probe.batch.tokens)[:, 0, :, 0]
  assert len(np.unique(sharing, axis=0)) == 2**8 - 8 - 1
  for ids, shares in zip(first, sharing):
    assert len(set(ids[shares])) == 1
    assert len(set(ids)) == 1 + np.sum(~shares)
  for array in (probe.logp, probe.batch.entropy_old):  # one policy
    ranges = np.ptp(np.where(sharing, array[:, 0, :, 0], np.nan), axis=1)
    assert not np.any(ranges > 0)


def test_a_weight_by_the_ids_is_measured_as_it_would_act():
  """Twice the weight for a shared first token: one factor for all who share."""

  def double(weight, batch):
    same = batch.tokens[:, :, None, 0] == batch.tokens[:, None, :, 0]
    return weight * (1 + (jnp.sum(same, axis=-1) > 1))[..., None]

  bias = _prefix.prefix_bias(method(losses.on_weight(double)))
  assert bias.factor == pytest.approx(2 / 16)
  assert bias.uneven < 1e-12


def test_noise_is_no_difference_between_subsets():
  """Random factors, the same in every subset: W(S) is a sum of ten numbers."""
  noisy = method(
    losses.on_weight(
      lambda w, batch: w * batch.extras['noise'], requires=('noise',)
    )
  )
  probe, sharing = _prefix._sharing_probe(None)
  c = _probe.read(noisy, probe).coefficient[:247, 0, :, 0]
  assert np.max(np.ptp(c, axis=0)) < 1e-12
  assert _prefix.prefix_bias(noisy).uneven > 0.1


def test_a_method_without_gradient_has_no_bias_and_results_are_plain():
  zero = method(losses.on_advantage(lambda a, batch: 0 * a))
  bias = _prefix.prefix_bias(zero)
  assert bias == (None, None, None, None)  # not 0: nothing was measured
  assert json.loads(json.dumps(bias._asdict())) == bias._asdict()


def test_a_first_token_that_is_not_trained_is_not_said_to_cancel():
  late = losses.on_keep(lambda keep, batch: keep.at[..., 0].set(False))
  bias = _prefix.prefix_bias(losses.chain(late, losses.methods.rloo()))
  assert bias == (None, None, None, None)


def test_what_a_method_requires_can_be_given():
  needy = method(
    losses.on_weight(
      lambda w, batch: w * batch.extras['mine'], requires=('mine',)
    )
  )
  with pytest.raises(ValueError, match="'mine'"):
    _prefix.prefix_bias(needy)
  bias = _prefix.prefix_bias(
    needy, lambda batch: {'mine': 0.5 + 0 * batch.mask}
  )
  assert bias.factor == pytest.approx(0.5 / 16)
