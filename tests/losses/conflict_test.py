"""Conflict tokens: shared at either end by completions of both signs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import losses
from tests.losses import cases


@jax.jit
def conflict_tokens(batch):
  return losses.conflict_tokens(losses.check_batch(batch))


def conflicts(tokens, reward, length=None, **fields):
  tokens = np.asarray(tokens)[None]
  length = (
    np.full(tokens.shape[1], tokens.shape[2]) if length is None else length
  )
  mask = np.arange(tokens.shape[2]) < np.asarray(length)[None, :, None]
  batch = losses.make_batch(
    mask, jnp.asarray([reward], float), tokens=jnp.asarray(tokens), **fields
  )
  return np.asarray(conflict_tokens(batch))[0]


def test_unbroken_runs_from_both_ends():
  """Aligned from the start, and from each completion's own end."""
  found = conflicts(
    [[1, 2, 3, 4, 9, 0], [1, 2, 5, 3, 4, 9], [1, 2, 0, 0, 0, 0]],
    [1, 0, 1],
    length=[5, 6, 2],
  )
  np.testing.assert_array_equal(
    found,
    [
      [1, 1, 1, 1, 1, 0],  # 1 2 leading, 3 4 9 trailing
      [1, 1, 0, 1, 1, 1],
      [1, 1, 0, 0, 0, 0],
    ],
  )


def test_an_island_in_the_middle_is_no_conflict():
  found = conflicts([[1, 5, 2], [3, 5, 4]], [1, 0])
  assert not found.any()


def test_a_token_that_the_policy_did_not_choose_ends_a_run():
  """The third, a tool's output for example."""
  tokens = jnp.array([[[1, 5, 9, 7], [1, 5, 9, 7], [3, 5, 9, 7]]])
  mask = jnp.broadcast_to(jnp.array([True, True, False, True]), (1, 3, 4))
  batch = losses.make_batch(mask, jnp.array([[1.0, 0.0, 0.0]]), tokens=tokens)
  found = conflict_tokens(batch)
  np.testing.assert_array_equal(
    found[0], [[1, 1, 0, 1], [1, 1, 0, 1], [0, 0, 0, 1]]
  )


def test_completions_of_one_sign_are_in_no_conflict():
  same = [[1, 2], [1, 2], [3, 4]]
  found = conflicts(same, [1, 1, 0])
  assert not found.any()
  assert not conflicts(same, [1, 1, 1]).any()


def test_a_completion_at_the_mean_has_no_sign():
  found = conflicts([[1, 2], [1, 2], [3, 4]], [0.5, 1, 0])
  assert not found.any()


def test_an_invalid_completion_is_in_no_conflict():
  valid = jnp.array([[True, False, True]])
  found = conflicts([[1, 2], [1, 2], [3, 4]], [1, 0, 0], valid=valid)
  assert not found.any()


def loop(batch):
  """A token at a time, straight from the definition."""
  tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
  found = np.zeros(mask.shape, bool)
  prompts, group, _ = mask.shape
  for p in range(prompts):
    valid = [g for g in range(group) if batch.valid[p, g]]
    mean = np.mean([batch.reward[p, g] for g in valid])
    sign = {
      g: np.sign(round(float(batch.reward[p, g] - mean), 12)) for g in valid
    }
    text = {g: tokens[p, g][mask[p, g]].tolist() for g in valid}
    for g in valid:
      others = [text[j] for j in valid if sign[j] * sign[g] < 0]
      for order in (1, -1):
        own = text[g][::order]
        for t, token in enumerate(own):
          if not any(x[::order][t : t + 1] == [token] for x in others):
            break
          found[p, g, t if order == 1 else len(own) - 1 - t] = True
  return found


@pytest.mark.parametrize('seed', range(4))
def test_against_a_loop(seed):
  case = cases.make_case(seed)
  tokens = np.random.default_rng(seed).integers(0, 2, case.tokens.shape)
  batch = losses.check_batch(cases.to_batch(case._replace(tokens=tokens)))
  expected = loop(batch)
  np.testing.assert_array_equal(conflict_tokens(batch), expected)
  assert expected.any() and not expected[np.asarray(batch.mask)].all()


def test_where_the_runs_overlap_the_factor_acts_once():
  """Released code multiplies by 2 twice there."""
  tokens = jnp.array([[[7, 7, 7], [7, 7, 7], [7, 8, 9]]])
  batch = losses.make_batch(
    jnp.ones((1, 3, 3), bool), jnp.array([[1.0, 0.0, 0.0]]), tokens=tokens
  )
  method = losses.chain(
    losses.center_by_group(),
    losses.mean_over_tokens(),
    losses.weigh_conflict_tokens(wrong=0.5, right=2.0),
  )
  batch, _ = cases.prepared(method, batch)
  np.testing.assert_allclose(
    batch.weight[0] * 9, [[2, 2, 2], [0.5, 0.5, 0.5], [0.5, 1, 1]]
  )


def test_the_papers_factors_are_the_defaults():
  tokens = jnp.array([[[7, 7], [7, 8]]])
  batch = losses.make_batch(
    jnp.ones((1, 2, 2), bool), jnp.array([[1.0, 0.0]]), tokens=tokens
  )
  method = losses.chain(
    losses.center_by_group(),
    losses.mean_over_tokens(),
    losses.weigh_conflict_tokens(),
  )
  batch, _ = cases.prepared(method, batch)
  np.testing.assert_allclose(batch.weight[0] * 4, [[2, 1], [0, 1]])
