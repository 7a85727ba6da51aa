"""What is known of a text: what the learner says of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.engines import scoring
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import compilations
from tests import tiny

IDS = [5, 30, 7, 7, 12, 39, 0, 21]


def own_scores(model, params, ids, temperature):
  """By the function that learners call, in a row of another width."""
  tokens = np.array([[ids[1:]]], np.int32)
  length = np.full((1, 1), len(ids) - 1, np.int32)
  rows = layout.padded_rows([ids[:1]], tokens, length, 40)
  return np.asarray(models.score(model, params, rows, temperature).logp)[0, 0]


@pytest.mark.parametrize('fancy', [False, True])
def test_scores_are_those_of_the_learner(fancy):
  model = tiny.model(**(tiny.FANCY if fancy else {}))
  params = tiny.params(model)
  scorer = scoring.Scorer(model, params, 100)
  for ids in (IDS, IDS * 5, IDS[:2]):
    for temperature in (1.0, 0.7):
      known = scorer(ids, 3, temperature)
      expected = own_scores(model, params, ids, temperature)
      np.testing.assert_allclose(known.logp, expected, atol=1e-5)
      assert known.top_ids.shape == known.top_logp.shape == (len(ids) - 1, 3)


def test_the_likeliest_have_the_bits_of_the_chosen():
  model = tiny.model()
  scorer = scoring.Scorer(model, tiny.params(model), 64)
  known = scorer(IDS, 20)
  hits = 0
  for n, token in enumerate(IDS[1:]):
    top = dict(zip(known.top_ids[n].tolist(), known.top_logp[n].tolist()))
    assert len(top) == 20
    assert known.top_logp[n].tolist() == sorted(top.values(), reverse=True)
    if token in top:
      hits += 1
      assert top[token] == known.logp[n].item()
  assert hits >= 2
  # Each text that goes on with the likeliest token has it as its chosen one.
  best = known.top_ids[-1, 0].item()
  again = scorer([*IDS[:-1], best], 1)
  assert (
    again.top_ids[-1, 0] == best and again.logp[-1] == again.top_logp[-1, 0]
  )


def test_all_tokens_have_the_mass_of_one():
  model = tiny.model(vocab_size=20)
  known = scoring.Scorer(model, tiny.params(model), 64)(IDS[2:5], 20)
  mass = np.exp(known.top_logp).sum(axis=1)
  np.testing.assert_allclose(mass, 1, atol=1e-5)


def test_short_and_long_texts():
  model = tiny.model()
  scorer = scoring.Scorer(model, tiny.params(model), 24)
  assert scorer([5], 2).top_ids.shape == (0, 2) and not len(scorer([5]).logp)
  with pytest.raises(ValueError, match='give at least one'):
    scorer([])
  with pytest.raises(ValueError, match='largest bucket is 24'):
    scorer([5] * 25)
  assert len(scorer([5] * 24).logp) == 23


def test_programs_are_few():
  model = tiny.model(width=24)  # of no other test
  scorer = scoring.Scorer(model, tiny.params(model), 64)
  with compilations.compiled_programs() as programs:
    for length in range(2, 40):
      scorer([5] * length, length % 2, 0.5 + length)
  assert programs.count('_score') == 3  # 16, 32 and 64 tokens


def test_over_a_mesh_the_scores_are_the_same():
  model = tiny.model()
  params = tiny.params(model)
  alone = scoring.Scorer(model, params, 32)(IDS, 5)
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  place = sharding.param_shardings(mesh, params, model.logical_axes)
  params = jax.device_put(params, place)
  found = scoring.Scorer(model, params, 32, mesh)(IDS, 5)
  np.testing.assert_allclose(found.logp, alone.logp, atol=1e-5)
  np.testing.assert_allclose(found.top_logp, alone.top_logp, atol=1e-5)


def test_many_positions_are_scored_in_chunks(monkeypatch):
  model = tiny.model()
  params = tiny.params(model)
  whole = scoring.Scorer(model, params, 128)(IDS * 16, 5)
  monkeypatch.setattr('grpo_jax.models.scores._CHUNK_FLOATS_CPU', 1)
  rows = layout.padded_rows(
    [IDS[:1]],
    np.array([[(IDS * 32)[1:]]], np.int32),
    np.full((1, 1), 255, np.int32),
    256,
  )
  found = models.score(
    model, params, rows, jnp.float32(1), models.Wanted(likeliest=5)
  )
  np.testing.assert_allclose(found.logp[0, 0, :127], whole.logp, atol=1e-5)
  np.testing.assert_array_equal(found.top_ids[0, 0, :127], whole.top_ids)
