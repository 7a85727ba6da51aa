"""What routers did: codes, balance, and their sums over completion tokens."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import experts as experts_lib
from grpo_jax.models import layout
from tests import tiny
from tests.chosen import chosen


def config(number=8, per_token=2, layers=4, **changes):
  return dataclasses.replace(
    tiny.CONFIG,
    num_layers=layers,
    pattern=(models.LayerKind(experts=True),),
    experts=models.Experts(number, per_token, 12),
    **changes,
  )


def code(shape, chosen):
  """The code i32[N] of chosen experts [L,N,k]."""
  experts = shape.experts
  zeros = jnp.zeros((*chosen.shape[:-1], experts.number))
  layers = [
    experts_lib.layer_routing(experts, x[None], jnp.asarray(c)[None], None)
    for x, c in zip(zeros, chosen, strict=True)
  ]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
  return experts_lib.model_routing(stacked, shape).code[0]


def drawn(rng, layers, tokens, number, per_token):
  return np.argsort(rng.random((layers, tokens, number)), -1)[..., :per_token]


def test_the_order_of_experts_does_not_count_and_their_choice_does():
  shape, rng = config(), np.random.default_rng(0)
  chosen = drawn(rng, 4, 50, 8, 2)
  one = code(shape, chosen)
  np.testing.assert_array_equal(code(shape, chosen[..., ::-1]), one)
  assert not np.any(experts_lib.disagreement(shape, one, one))
  # Eight bits per layer tell all experts apart: one other is always seen.
  other = chosen.copy()
  other[1, :, 0] = [min(set(range(8)) - set(c)) for c in chosen[1]]
  np.testing.assert_allclose(
    experts_lib.disagreement(shape, one, code(shape, other)), 1 / 4
  )


def test_scores_of_sigmoids_are_shares_in_the_statistics():
  """As those of a softmax are, so that balance means the same of both."""
  rng = np.random.default_rng(0)
  x, router = rng.normal(size=(1, 5, 3)), rng.normal(size=(3, 8))
  experts = models.Experts(8, 2, 12, scores='sigmoid')
  shares, weight, _ = experts_lib.route(
    jnp.array(x), jnp.array(router), experts
  )
  score = 1 / (1 + np.exp(-x @ router))
  expected = score / score.sum(-1, keepdims=True)
  np.testing.assert_allclose(shares, expected, rtol=1e-5)
  np.testing.assert_allclose(weight.sum(-1), 1, rtol=1e-5)


def test_of_a_single_expert_nobody_can_choose_another():
  shape = config(number=1, per_token=1)
  one = code(shape, np.zeros((4, 5, 1), int))
  np.testing.assert_array_equal(experts_lib.disagreement(shape, one, one), 0)


# Layers have from eight bits of the code to less than one each.
IN_THE_SUITE = {
  (4, 1, 0.9),
  (8, 3, 0.1),
  (8, 24, 0.9),
  (8, 32, 0.1),
  (8, 48, 0.9),
  (128, 3, 0.9),
}


@pytest.mark.parametrize(
  'number, layers, share',
  chosen(
    itertools.product((4, 8, 128), (1, 3, 24, 32, 48), (0.1, 0.9)),
    IN_THE_SUITE,
  ),
)
def test_disagreement_is_right_on_average(number, layers, share):
  """Where one expert of some (token, layer) is another."""
  rng = np.random.default_rng(layers)
  shape = config(number, 2, layers)
  tokens = 4000
  chosen = drawn(rng, layers, tokens, number, 3)
  other = chosen[..., :2].copy()
  changed = rng.random((layers, tokens)) < share
  other[changed, 1] = chosen[changed, 2]
  found = experts_lib.disagreement(
    shape, code(shape, chosen[..., :2]), code(shape, other)
  )
  np.testing.assert_allclose(np.mean(found), np.mean(changed), rtol=0.07)


def test_balance_is_one_if_even_and_grows_with_the_router():
  even = experts_lib.Statistics(jnp.full((3, 8), 5.0), jnp.full((3, 8), 10.0))
  np.testing.assert_allclose(models.balance(even), 1)
  np.testing.assert_allclose(models.load_max(even), 1)
  one = jnp.zeros((3, 8)).at[:, 2].set(40.0)
  collapsed = experts_lib.Statistics(one, 2 * one)
  np.testing.assert_allclose(models.balance(collapsed), 8)
  np.testing.assert_allclose(models.load_max(collapsed), 8)
  nothing = jax.tree.map(jnp.zeros_like, even)
  assert models.balance(nothing) == models.load_max(nothing) == 0


IDS, TOKENS, LENGTH = tiny.ragged()
BUILT = {
  'padded': layout.padded_rows(IDS, TOKENS, LENGTH, 16),
  'packed': layout.packed_rows(IDS, TOKENS, LENGTH, 30),
  'copied': layout.packed_rows(IDS, TOKENS, LENGTH, 40, share=False),
  'shared': layout.shared_prompt(IDS, TOKENS, LENGTH, 8),
}


def routed(rows, model, params, sampled=None):
  mask = np.arange(TOKENS.shape[-1]) < LENGTH[:, :, None]
  flat = np.concatenate([mask.reshape(-1, mask.shape[-1]), mask[0, :1] & False])
  counted = flat[rows.completion]
  if sampled is not None:
    more = np.zeros((1, mask.shape[-1]), np.int32)
    sampled = np.concatenate([sampled.reshape(-1, mask.shape[-1]), more])
    sampled = sampled[rows.completion]
  return jax.jit(
    lambda p: models.score_routed(model, p, rows, counted, sampled)
  )(params)


@pytest.mark.parametrize(
  'kinds, changes',
  [
    (('padded', 'shared'), {}),
    pytest.param(('packed', 'copied'), {}, marks=pytest.mark.long),
    pytest.param(
      ('padded', 'shared'), dict(unroll=True), marks=pytest.mark.long
    ),
    pytest.param(
      ('padded', 'shared'), dict(remat='layer'), marks=pytest.mark.long
    ),
  ],
  ids=str,
)
def test_statistics_are_of_completions_however_they_lie(kinds, changes):
  """In three of five layers."""
  shape = dataclasses.replace(tiny.EXPERTS, **changes)
  model = models.Transformer(shape)
  params = tiny.params(model)
  expected, tokens = None, LENGTH.sum()
  for rows in map(BUILT.get, kinds):
    scores, found = routed(rows, model, params)
    assert found.disagreement is None
    statistics = found.statistics
    assert statistics.load.shape == (3, 8)
    np.testing.assert_allclose(statistics.load.sum(1), 2 * tokens)
    np.testing.assert_allclose(statistics.mass.sum(1), tokens, rtol=1e-5)
    plain = jax.jit(lambda p, r=rows: models.score(model, p, r))(params)
    np.testing.assert_allclose(plain.logp, scores.logp, atol=1e-5)
    expected = expected or statistics
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
      statistics,
      expected,
    )
  # One layer after another, as in decoding.
  _, found = routed(BUILT['padded'], model, model.unstack(params))
  np.testing.assert_allclose(found.statistics.load, expected.load)
