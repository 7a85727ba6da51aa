"""Sampling on a mesh of its own: more of `tensor`, less of `fsdp`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines.local import prepare
from grpo_jax.mesh import sharding
from grpo_jax.planning import hlo
from tests import drawing
from tests import tiny

SHAPE = dict(num_layers=1, num_heads=8, head_dim=4)
OPTIONS = engines.Sampling(eos_ids=tuple(range(6)))


def learned(model, mesh):
  """Parameters as the learner holds them."""
  params = tiny.params(model)
  place = sharding.param_shardings(mesh, params, model.logical_axes)
  return jax.device_put(params, place)


def engine(model, mesh, params):
  made = engines.LocalEngine(model, (8,), (8, 16), max_rows=32, mesh=mesh)
  made.load(params, version=0)
  return made


def drawn(made):
  """Half of the prompts wait until rows have ended."""
  return drawing.completions(made, tiny.ragged(prompts=16)[0], OPTIONS)


@functools.cache
def on_one_device():
  model = tiny.model(**SHAPE)
  return drawn(engine(model, None, tiny.params(model)))


@pytest.mark.long
@pytest.mark.parametrize(
  'tensor, shape, shards',
  [
    (1, (2, 4, 1, 1, 1), 8),
    (2, (2, 2, 1, 1, 2), 4),
    (4, (2, 1, 1, 1, 4), 8),  # two heads are not divided by 4: caches by rows
    (8, (1, 1, 1, 1, 8), 8),
  ],
)
def test_more_of_tensor_changes_no_token(tensor, shape, shards):
  mesh = sharding.make_mesh(data=2, fsdp=4)
  own = sharding.sampling_mesh(mesh, tensor)
  assert tuple(own.shape.values()) == shape
  model = tiny.model(**SHAPE)
  made = engine(model, own, learned(model, mesh))
  assert made.schedule(8, 4, 8).shards == shards
  found, plain = drawn(made), on_one_device()
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  np.testing.assert_array_equal(found.length, plain.length)
  np.testing.assert_allclose(found.logp, plain.logp, atol=1e-5)
  assert len(set(plain.length.ravel())) > 3  # rows were dropped and refilled


def test_few_prompts_need_no_rows_that_draw_nothing():
  """Their caches are copied over `tensor` instead."""
  model = tiny.model(**SHAPE)
  own = sharding.make_mesh(tensor=8)
  made = engines.LocalEngine(model, (8,), (16,), mesh=own)
  assert made.schedule(3, 4, 8).prompts == 3
  assert made.schedule(11, 4, 8).prompts == 16


@pytest.mark.parametrize(
  'sizes, tensor, slices, shape',
  [
    ((4, 1, 2, 1), 4, 1, (2, 1, 1, 1, 4)),
    ((2, 2, 1, 2), 2, 1, (2, 1, 2, 1, 2)),
    ((1, 8, 1, 1), 4, 1, (1, 2, 1, 1, 4)),
    ((1, 2, 4, 1), 1, 1, (1, 8, 1, 1, 1)),
    ((8, 1, 1, 1), 2, 2, (4, 1, 1, 1, 2)),
    ((2, 2, 2, 1), 0, 1, (2, 2, 1, 1, 2)),
  ],
)
def test_the_samplers_mesh_has_the_same_devices(sizes, tensor, slices, shape):
  mesh = sharding.make_mesh(*sizes[:2], tensor=sizes[2], expert=sizes[3])
  own = sharding.sampling_mesh(mesh, tensor, slices)
  assert tuple(own.shape.values()) == shape
  assert own.devices.ravel().tolist() == mesh.devices.ravel().tolist()
  bare = sharding.sampling_mesh(mesh.abstract_mesh, tensor, slices)
  assert bare.shape == own.shape


@pytest.mark.parametrize('tensor, slices', [(3, 1), (16, 1), (8, 2)])
def test_what_does_not_divide_is_refused(tensor, slices):
  mesh = sharding.make_mesh(data=2, fsdp=4)
  with pytest.raises(ValueError, match=f'tensor={tensor} does not divide the'):
    sharding.sampling_mesh(mesh, tensor, slices)


# Large enough that weights outweigh all other numbers.
WIDE = models.ModelConfig(
  vocab_size=512,
  num_layers=4,
  width=256,
  num_heads=16,
  num_kv_heads=2,
  head_dim=16,
  mlp_width=1024,
)


@functools.cache
def lowering(tensor, program):
  """A program for 16 prompts, learned on fsdp 8; the parameters are shapes."""
  mesh = sharding.make_mesh(fsdp=8)
  model = models.Transformer(WIDE)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  place = sharding.param_shardings(mesh, shapes, model.logical_axes)
  params = jax.tree.map(
    lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at),
    shapes,
    place,
  )
  own = sharding.sampling_mesh(mesh, tensor)
  made = engines.LocalEngine(model, (128,), (64, 128), mesh=own)
  programs = made.lowering(params, 16, 4, engines.Sampling(), 128)
  return made, params, programs[program]()


def sent(compiled):
  """Bytes of the results of collectives on one device."""
  found = hlo.Program(compiled.as_text(), 1, 8).collectives()
  return {one.kind: one.bytes * one.times for one in found}


@pytest.mark.parametrize('program', ['regroup', 'grow'])
def test_rows_move_on_their_device_alone(program):
  *_, lowered = lowering(8, program)
  assert sent(lowered.compile()) == {}


def test_completions_begin_in_the_shortest_cache():
  *_, lowered = lowering(1, 'prefill')
  rows, _ = lowered.out_info
  for cache in jax.tree.leaves(rows.cache):
    assert cache.shape.count(64) == 2  # 64 rows of 64 columns, and not 128


def test_decoding_sends_no_cache():
  """Queries go to the caches, and what they have seen comes back."""
  made, params, lowered = lowering(8, 'decode')
  rows = drawing.abstract_rows(made, params, 16, 4, engines.Sampling(), 128)
  for cache in jax.tree.leaves((rows.prompt_cache, rows.cache)):
    part = cache.sharding.shard_shape(cache.shape)
    assert part == (cache.shape[0] // 8, *cache.shape[1:])
  found = hlo.Program(lowered.compile().as_text(), 1, 8).collectives()
  keys = 16 * 128 * 2 * 16 * 4  # of one layer's prompts, the smallest cache
  assert 0 < max(one.bytes for one in found) < keys


@pytest.mark.parametrize(
  'tensor', [pytest.param(1, marks=pytest.mark.long), 2, 8]
)
def test_weights_go_to_the_sampler_layer_by_layer(tensor):
  """Sent at most once, and with room for one layer on its way."""
  made, params, programs = lowering(tensor, 'prepare')
  calls = [number for _, number in programs]
  assert calls == [1, 1, 1, 4]  # embedding, norm, output layer, four layers
  read = made.decoding_params(params)
  size = lambda tree: sum(
    4 * math.prod(x.sharding.shard_shape(x.shape))
    for x in jax.tree.leaves(tree)
  )
  compiled = [(one.compile(), number) for one, number in programs]
  total = sum(sum(sent(one).values()) * number for one, number in compiled)
  assert 0 < total <= 1.01 * size(read)
  # Inside a layer they come array by array, and a few at a time.
  most = max(one.memory_analysis().temp_size_in_bytes for one, _ in compiled)
  assert most < 1.5 * size(read['layers'][0]) + 4 * 256 * 512 / 8


@pytest.mark.parametrize('tensor', [2, pytest.param(4, marks=pytest.mark.long)])
def test_layers_that_share_keys_draw_the_same_on_a_mesh(tensor):
  model = tiny.model(**tiny.SHARING)
  own = sharding.make_mesh(fsdp=8 // tensor, tensor=tensor)
  found = drawn(engine(model, own, learned(model, own)))
  plain = drawn(engine(model, None, tiny.params(model)))
  np.testing.assert_array_equal(found.tokens, plain.tokens)
  np.testing.assert_allclose(found.logp, plain.logp, atol=1e-5)


@pytest.mark.parametrize(
  'config, second',
  [
    (tiny.EXPERTS, 'expert'),
    (dataclasses.replace(tiny.CONFIG, **tiny.SHARING), 'data'),
  ],
  ids=['experts', 'sharing'],
)
def test_prepared_weights_are_those_of_one_device(config, second):
  model = models.Transformer(
    dataclasses.replace(config, compute_dtype='bfloat16')
  )
  params = tiny.params(model)
  mesh = sharding.make_mesh(fsdp=2, tensor=2, **{second: 2})
  place = sharding.param_shardings(mesh, params, model.logical_axes)
  own = sharding.sampling_mesh(mesh, 4)
  spread = jax.device_put(params, place)
  found = prepare.Preparation(model, spread, own)(spread)
  plain = prepare.Preparation(model, params)(params)
  assert jax.tree.structure(found) == jax.tree.structure(plain)
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(plain), strict=True
  ):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(
      jnp.asarray(one, jnp.float32), jnp.asarray(other, jnp.float32)
    )
