"""Ids that no token has are never drawn, and have no probability."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import data
from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines.local import next_token as next_token_lib
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from grpo_jax.models import scores
from tests import drawing
from tests import own_module
from tests import tiny

VOCAB, UNUSED = 40, ((0, 1), (5, 9), (31, 40))
NEVER = np.concatenate([np.arange(*run) for run in UNUSED])


def logits(rows=2048):
  """Those of unused ids are the largest by far."""
  drawn = np.random.default_rng(0).normal(size=(rows, VOCAB)) * 2
  drawn[:, NEVER] += 50
  return drawn.astype(np.float32)


def policy(given, temperature):
  """Log-probabilities over the ids that have tokens, f64[B,V], by NumPy."""
  scaled = given.astype(np.float64) / (temperature or 1)
  scaled[:, NEVER] = -np.inf
  top = scaled.max(axis=1, keepdims=True)
  return scaled - top - np.log(np.exp(scaled - top).sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
  'options',
  [
    dict(),
    dict(temperature=0.0),
    dict(temperature=1e-3),
    dict(temperature=50.0),
    dict(top_k=3),
    dict(top_k=30),  # more than there are tokens
    dict(top_k=39),
    dict(top_p=0.5),
    dict(top_p=0.9999999),
    dict(min_p=1e-30),
    dict(eos_ids=tuple(range(1, 5)), min_tokens=4),
    dict(top_k=35, top_p=0.99999, min_p=1e-20, temperature=3.0),
  ],
  ids=str,
)
def test_no_sampling_draws_them(options):
  given = logits()
  uniform = np.linspace(0, 1, len(given), endpoint=False, dtype=np.float32)
  uniform[-1] = np.nextafter(np.float32(1), np.float32(0))
  made = engines.Sampling(**options)
  token, logp, log_kept, entropy = drawing.next_token(
    scores.without_ids(jnp.asarray(given), UNUSED),
    uniform,
    np.zeros(len(given), np.int32),
    made,
  )
  assert not np.isin(token, NEVER).any()
  wanted = policy(given, made.temperature)
  rows = np.arange(len(given))
  # Float32 rounds what it divides by a thousandth.
  tolerance = 1e-2 if made.temperature == 1e-3 else 2e-5
  np.testing.assert_allclose(logp, wanted[rows, token], atol=tolerance)
  log_terms = np.where(np.isfinite(wanted), wanted, 0)
  np.testing.assert_allclose(
    entropy, -(np.exp(wanted) * log_terms).sum(axis=1), atol=tolerance
  )
  assert np.isfinite(log_kept).all()


def test_nor_where_the_vocabulary_is_split():
  mesh = sharding.make_mesh(data=2, tensor=4)
  given = logits(64)
  numbers, choices = drawing.alike(engines.Sampling(top_k=35), 64, VOCAB)
  uniform = np.linspace(0, 1, 64, endpoint=False, dtype=np.float32)

  def draw(on, x):
    with sharding.use(on):
      return next_token_lib.next_token(
        scores.without_ids(x, UNUSED),
        uniform,
        jnp.zeros(64, jnp.int32),
        numbers,
        choices,
      )

  spec = jax.sharding.PartitionSpec(sharding.ROW_AXES, 'tensor')
  lies = jax.sharding.NamedSharding(mesh, spec)
  whole = jax.jit(functools.partial(draw, None))(given)
  split = jax.jit(functools.partial(draw, mesh), in_shardings=lies)(given)
  assert not np.isin(whole[0], NEVER).any()
  np.testing.assert_array_equal(split[0], whole[0])
  np.testing.assert_allclose(split[1], whole[1], atol=1e-5)


@functools.cache
def model():
  return tiny.model(num_layers=1, unused_ids=UNUSED)


def params():
  """The output layer wants unused ids alone."""
  found = tiny.params(model())
  found['head'] = found['head'].at[:, NEVER].multiply(40.0)
  return found


OPTIONS = engines.Sampling(eos_ids=(3, 11), temperature=0.8)
PROMPTS = [[1, 2, 3], [9, 10], [4, 20, 21, 22]]


@pytest.mark.parametrize('kind', ['transformer', 'foreign'])
def test_sampler_and_learner_agree_without_them(kind):
  with jax.default_matmul_precision('highest'):
    if kind == 'foreign':
      own = own_module.made('no cache', vocab_size=VOCAB)
      own = own._replace(
        model=dataclasses.replace(own.model, unused_ids=UNUSED)
      )
      engine = engines.PlainEngine(own.model, (8,), (16,))
      engine.load(own.params, version=0)
      drawn = drawing.completions(engine, PROMPTS, OPTIONS, group=8)
      rows = layout.padded_rows(PROMPTS, drawn.tokens, drawn.length, 16)
      of_rows = own.model.score
      score = jax.jit(lambda *given: of_rows(*given, 0.8, models.Wanted(True)))
      scores = score(own.params, rows)
    else:
      engine = engines.LocalEngine(model(), (8,), (16,))
      engine.load(params(), version=0)
      drawn = drawing.completions(engine, PROMPTS, OPTIONS, group=8)
      rows = layout.shared_prompt(PROMPTS, drawn.tokens, drawn.length, 8)
      scores = tiny.score(model(), params(), rows, 0.8, models.Wanted(True))
  here = np.arange(drawn.tokens.shape[-1]) < drawn.length[:, :, None]
  assert not np.isin(drawn.tokens[here], NEVER).any()
  for name in ('logp', 'entropy'):
    wanted = tiny.gather(getattr(scores, name), rows, drawn.length)
    np.testing.assert_allclose(getattr(drawn, name), wanted, atol=1e-5)


def test_they_get_no_gradient():
  _, drawn, length = tiny.ragged(prompts=1)
  drawn = np.where(np.isin(drawn, NEVER), 10, drawn)
  rows = layout.shared_prompt([[1, 2]], drawn, length, 8)

  def loss(head):
    scores = tiny.score(
      model(),
      {**params(), 'head': head},
      rows,
      wanted=models.Wanted(entropy=True),
    )
    return jnp.sum(scores.logp) + jnp.sum(scores.entropy)

  gradient = np.asarray(jax.grad(loss)(params()['head']))
  assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0
  np.testing.assert_array_equal(gradient[:, NEVER], 0)


def test_a_tokenizer_knows_the_ids_that_it_lacks():
  import tokenizers

  vocab = {'<pad>': 1, '<eos>': 2, 'a': 4, 'b': 9}
  made = data.Tokenizer(
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])), (2,), 1
  )
  assert made.vocab_size == 10
  assert made.unused_ids(12) == ((0, 1), (3, 4), (5, 9), (10, 12))
  assert made.unused_ids(10) == ((0, 1), (3, 4), (5, 9))
  assert made.unused_ids(7) == ((0, 1), (3, 4), (5, 7))
  assert data.character_tokenizer('ab').unused_ids(4) == ()
