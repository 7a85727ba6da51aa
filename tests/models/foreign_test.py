"""A model of the user's own: its record, its scores, what is refused."""

import functools
import typing

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines import plain as plain_lib
from grpo_jax.engines.local import sampler
from grpo_jax.mesh import sharding
from grpo_jax.models import foreign
from grpo_jax.models import layout
from tests import drawing
from tests import own_module
from tests import tiny
from tests import trees

EOS = (3, 7, 10)
OPTIONS = engines.Sampling(eos_ids=EOS, temperature=0.7)
PROMPTS = [[1, 2, 3, 4, 5], [6], [2, 9, 4], [8, 8, 1, 1]]


def engine(own, **options):
  made = engines.PlainEngine(own.model, (4, 8), (8, 16), **options)
  made.load(own.params, version=5)
  return made


def generate(made, first=0, group=3):
  index = [4, 5, 6, 9][first:]
  return drawing.completions(
    made, PROMPTS[first:], OPTIONS, 7, index, group=group, rollout=2
  )


def test_branches_read_one_context_if_the_mask_is_obeyed():
  """And copies of it otherwise; both have the scores of our own layouts."""
  prompts, tokens, length = tiny.ragged()
  previous = trees.random_trees(np.random.default_rng(0), length, 6, 0.5)
  found = {}
  for kind in own_module.KINDS:
    own = own_module.made(kind, vocab_size=40)
    whole = own.model.shares_prompts('cpu')
    assert whole == (kind != 'causal')
    slots_of = layout.whole_trees if whole else layout.slots_of_trees
    rows = layout.padded_rows(
      prompts, tokens, length, 16, slots=slots_of(length, previous)
    )
    with jax.default_matmul_precision('highest'):
      logp = own.model.score(own.params, rows).logp
    if rows.inside is not None:
      logp = jnp.where(rows.inside, logp, 0)
    at, each = rows.completion[:, 0], np.asarray(logp)[:, 0]
    found[kind] = np.zeros((length.size, 6))
    np.add.at(found[kind], at, each)
  is_there = np.arange(6) < length.reshape(-1, 1)
  expected = found['causal'][is_there]
  assert expected.min() < -1 and expected.max() < 0
  for kind in ('mask', 'no cache'):
    np.testing.assert_allclose(found[kind][is_there], expected, atol=1e-5)


@functools.cache
def drawn(kind):
  own = own_module.made(kind, vocab_size=12)
  with jax.default_matmul_precision('highest'):
    return own, generate(engine(own))


@pytest.mark.parametrize('kind', own_module.KINDS)
def test_sampler_and_learner_agree(kind):
  own, found = drawn(kind)
  rows = layout.padded_rows(PROMPTS, found.tokens, found.length, 16)
  with jax.default_matmul_precision('highest'):
    scores = own.model.score(own.params, rows, 0.7, models.Wanted(True))
  assert len(set(found.length.ravel())) > 3  # ragged
  for name in ('logp', 'entropy'):
    expected = tiny.gather(getattr(scores, name), rows, found.length)
    np.testing.assert_allclose(getattr(found, name), expected, atol=1e-5)
  past = np.arange(found.version.shape[-1]) >= found.length[..., None]
  np.testing.assert_array_equal(found.version, np.where(past, 0, 5))


@pytest.mark.parametrize('kind', own_module.KINDS)
def test_every_kind_of_cache_draws_the_same_tokens(kind):
  found, expected = drawn(kind)[1], drawn('no cache')[1]
  for name in ('tokens', 'length', 'finish'):
    np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
  np.testing.assert_allclose(found.logp, expected.logp, atol=1e-5)


@pytest.mark.parametrize(
  'kind',
  [
    pytest.param('mask', marks=pytest.mark.long),
    pytest.param('causal', marks=pytest.mark.long),
    pytest.param('no cache', marks=pytest.mark.long),
  ],
)
def test_tokens_do_not_depend_on_company(kind):
  own, found = drawn(kind)
  alone = generate(engine(own, max_rows=3))  # one prompt at a time
  np.testing.assert_array_equal(alone.tokens, found.tokens)
  mesh = sharding.make_mesh(2, 2, 1)
  spread = generate(engine(own, mesh=mesh))
  np.testing.assert_array_equal(spread.tokens, found.tokens)
  fewer = generate(engine(own), first=2, group=2)
  same = found.tokens[2:, :2, : fewer.tokens.shape[-1]]
  np.testing.assert_array_equal(fewer.tokens, same)


@pytest.mark.parametrize(
  'max_rows, shards, expected',
  [
    (4096, 1, [4]),
    (12, 1, [4]),
    (11, 1, [3, 3]),
    (6, 1, [2, 2]),
    (3, 1, [1] * 4),
    (1, 1, [1] * 4),  # no less than a group
    (3, 2, [2, 2]),
    (4096, 8, [8]),
  ],
)
def test_as_many_prompts_at_once_as_rows_are_allowed(
  max_rows, shards, expected, monkeypatch
):
  own = own_module.made(vocab_size=12)
  seen = []

  def run(program, params, prompts):
    del params
    seen.append(len(prompts.length))
    assert prompts.tokens.shape == (seen[-1], 8)  # the bucket of five tokens
    rows = seen[-1] * program.group
    return sampler.Drawn(*np.zeros((4, rows, 8))), np.ones(rows, np.int32)

  monkeypatch.setattr(plain_lib, '_run', run)
  mesh = sharding.make_mesh(data=shards) if shards > 1 else None
  made = engine(own, max_rows=max_rows, mesh=mesh)
  assert generate(made).tokens.shape == (4, 3, 7)
  assert seen == expected


def test_the_random_numbers_are_those_of_the_local_engine():
  """Our transformer as a foreign model draws what LocalEngine draws."""
  model = tiny.model(num_layers=1)
  params = tiny.params(model)

  class Wrapped(nnx.Module):
    def __init__(self):
      self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def __call__(self, tokens, positions, cache, mask):
      from grpo_jax.models import attention

      del cache
      tree = jax.tree.map(
        lambda x: x.get_value(),
        self.params,
        is_leaf=lambda x: isinstance(x, nnx.Param),
      )
      length = jnp.full((tokens.shape[0],), tokens.shape[1])
      hidden, _ = model.hidden(
        model.unstack(tree),
        tokens,
        positions,
        attention.over_prompts(length, 'xla'),
      )
      return model.head(tree, hidden), None

  ours = engines.LocalEngine(model, (4, 8), (8, 16))
  ours.load(params, version=5)
  plain = engine(foreign.from_nnx(Wrapped()))
  expected, found = (generate(made, group=2) for made in (ours, plain))
  np.testing.assert_array_equal(found.tokens, expected.tokens)
  np.testing.assert_allclose(found.logp, expected.logp, atol=1e-5)


def test_parameters_are_float32_and_the_module_keeps_its_dtype():
  class Half(nnx.Module):
    def __init__(self):
      self.table = nnx.Param(jnp.ones((4, 4), jnp.bfloat16))

    def __call__(self, tokens, positions, cache, mask):
      assert self.table.get_value().dtype == jnp.bfloat16
      return self.table.get_value()[tokens], cache

  model, params = foreign.from_nnx(Half())
  assert params['table'].dtype == jnp.float32
  assert model.bytes_per_token == 3 * 16  # three times four float32
  assert model.sampler_params(params)['table'].dtype == jnp.bfloat16
  # Nothing that the module writes while it is traced is kept.
  own = own_module.made()
  tokens = jnp.ones((1, 2), jnp.int32)
  mask = foreign.causal_mask(1, 2)
  first, _ = own.model.logits(own.params, tokens, tokens, None, mask)
  second, _ = own.model.logits(own.params, tokens, tokens, None, mask)
  np.testing.assert_array_equal(first, second)
  module = own.model.module(own.params)
  again, _ = module(tokens, tokens, None, mask)
  np.testing.assert_allclose(again, first, atol=1e-6)
  assert module.calls.get_value() == 1


def test_decay_and_axes():
  model, _ = own_module.made()
  assert model.decays(('attention', '0', 'qkv', 'kernel'))
  assert not model.decays(('norms', '0', 'scale'))
  assert model.logical_axes(('embed', 'embedding'), 2) == (None, 'width')
  assert model.matrix_axes(('mlp', '0', 'kernel'), 2) == ((-2,), (-1,), True)
  qkv = model.matrix_axes(('attention', '0', 'qkv', 'kernel'), 4)
  assert qkv.inputs == ()  # [inputs, 3, heads, size]: it cannot be known
  assert not model.matrix_axes(('embed', 'embedding'), 2).hidden
  model, _ = own_module.made(
    decays=lambda path, shape: path[0] == 'norms',
    logical_axes=lambda path, shape: ('vocab', *(None,) * (len(shape) - 1)),
    matrix_axes=lambda path, shape: models.MatrixAxes((-1,), (-2,)),
  )
  assert model.matrix_axes(('mlp', '0', 'kernel'), 2) == ((-1,), (-2,), True)
  assert model.decays(('norms', '0', 'scale'))
  assert model.logical_axes(('embed', 'embedding'), 2) == ('vocab', None)


class Own(nnx.Module):
  def __init__(self, result):
    self.result = result

  def __call__(self, tokens, positions, cache, mask):
    return self.result(tokens, cache)


def logits(tokens):
  return jnp.zeros((*tokens.shape, 5))


def test_scores_are_at_temperature_1_and_without_entropy_unless_asked():
  twice = lambda tokens, cache: (2 * jax.nn.one_hot(tokens, 5), cache)
  model, params = foreign.from_nnx(Own(twice))
  rows = layout.padded_rows([[1, 2]], np.array([[[2, 3]]]), [[2]], 4)
  plain = model.score(params, rows)
  assert plain.entropy is None  # of a large vocabulary it takes memory
  expected = np.array([2, 0]) - np.log(np.exp(2) + 4)
  np.testing.assert_allclose(plain.logp[0, 0], expected, rtol=1e-6)
  wanted = models.Wanted(True, ids=np.array([[[[2, 0], [3, 0]]]]))
  warm = model.score(params, rows, 2.0, wanted)
  mass = np.exp(1) + 4
  expected = np.array([1, 0]) - np.log(mass)
  np.testing.assert_allclose(warm.logp[0, 0], expected, rtol=1e-6)
  np.testing.assert_array_equal(warm.top_logp[..., 0], warm.logp)
  np.testing.assert_allclose(warm.top_logp[..., 1], -np.log(mass), rtol=1e-6)
  np.testing.assert_allclose(
    warm.entropy[0, 0], np.log(mass) - np.exp(1) / mass, rtol=1e-6
  )


@pytest.mark.parametrize(
  'result, options, words',
  [
    (
      lambda tokens, cache: logits(tokens),
      {},
      r'For tokens \[2, 3\] the call of Own returned float32\[2, 3, 5\], but a '
      r'pair \(logits, cache\)',
    ),
    (
      lambda tokens, cache: (logits(tokens)[:, -1], cache),
      {},
      r'returned \(float32\[2, 5\], None\), but a pair',
    ),
    (
      lambda tokens, cache: (logits(tokens)[:, -1:], cache),
      {},
      r'returned \(float32\[2, 1, 5\], None\), but a pair',
    ),
    (
      lambda tokens, cache: (logits(tokens), None),
      dict(init_cache=lambda module, rows, columns: jnp.zeros((rows, columns))),
      r'got the cache float32\[2, 4\] and returned None; return the cache with',
    ),
    (
      lambda tokens, cache: (logits(tokens), cache),
      dict(call=lambda module, tokens: module(tokens)),
      r'The call of Own failed \(.*takes 2 positional.*give from_nnx\(module, ',
    ),
    (
      lambda tokens, cache: (logits(tokens), cache),
      dict(attention='sliding'),
      "attention='sliding'; give 'mask'",
    ),
  ],
  ids=['no pair', 'no axis', 'last token', 'cache', 'arguments', 'attention'],
)
def test_a_module_that_cannot_be_used(result, options, words):
  with pytest.raises(ValueError, match=words):
    foreign.from_nnx(Own(result), **options)


def test_what_is_no_module():
  with pytest.raises(ValueError, match='of type int; give an instance of a'):
    foreign.from_nnx(typing.cast(typing.Any, 3))
  with pytest.raises(ValueError, match='no parameters yet; call load first'):
    own = own_module.made()
    generate(engines.PlainEngine(own.model, (8,), (8,)))
