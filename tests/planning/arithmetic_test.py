"""Arithmetic beside what is there: arrays, layouts, compiled programs."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.learner import layouts
from grpo_jax.mesh import sharding
from grpo_jax.planning import arithmetic
from grpo_jax.planning import compiling
from grpo_jax.planning import hlo
from grpo_jax.planning import plan as plans
from grpo_jax.planning import roofline
from grpo_jax.planning import topologies
from grpo_jax.run.build import build
from grpo_jax.run.build import limits
from grpo_jax.run.build import model as build_model
from tests import drawing
from tests import runs
from tests import tiny
from tests.planning import record

# Wide enough that attention is a small part of the work.
WIDE = {
  'model.width': 128,
  'model.mlp_width': 512,
  'model.num_layers': 2,
  'data.prompt_buckets': (8,),
  'data.completion_buckets': (8,),
  'sampler.max_tokens': 8,
  'learner.micro_rows': 0,
}


def parts(mesh=None, **changes):
  config = runs.small(**changes)
  mesh = mesh or sharding.make_mesh(fsdp=2, tensor=2)
  return build.abstract(config, mesh)


@pytest.mark.quick
@pytest.mark.parametrize(
  'changes',
  [
    pytest.param({}, marks=pytest.mark.long),
    {'learner.method': 'grpo', 'learner.method_kwargs': {'kl_coefficient': 1}},
    pytest.param(
      {'lora.rank': 2, 'lora.base_dtype': 'bfloat16'}, marks=pytest.mark.long
    ),
    pytest.param(
      {'model.tied_embeddings': True, 'model.compute_dtype': 'bfloat16'},
      marks=pytest.mark.long,
    ),
  ],
  ids=['plain', 'reference', 'lora', 'tied'],
)
def test_weights_take_the_bytes_that_they_take(changes):
  made = parts(**changes)
  mesh, model = made.run.mesh, made.run.model
  spec = made.run.weights
  frozen = build_model.frozen(spec, model, mesh)
  update = dataclasses.replace(made.updater, frozen=frozen)
  state = update.compiled.init(build_model.initial(spec, model, mesh))
  made.engine.load(update.joined(state.params), version=0)
  found = arithmetic.count_weights(made)

  def on_first(tree):
    arrays = jax.tree.leaves(tree)
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)

  assert found.trained == on_first(state.params)
  assert found.moments == on_first(state.opt_state)
  assert found.reference == on_first(state.reference)
  assert found.frozen == on_first(update.frozen)
  read, _ = made.engine._held.now
  assert found.gathered == on_first(read)
  assert found.head == on_first(read.get('head', read['embedding']))
  assert found.state == on_first([state[:2], state.reference, update.frozen])


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'data.completion_buckets': (4, 8)},
    {'model.num_kv_heads': 1},  # which two devices cannot split
    {'model.num_layers': 3, 'model.window_tokens': (4, 0)},
    {'sampler.max_rows': 4},
  ],
  ids=['plain', 'buckets', 'one head', 'windows', 'rows'],
)
def test_the_cache_takes_the_bytes_of_its_arrays(changes):
  made = parts(**WIDE | changes)
  counted = arithmetic.Arithmetic(made)
  rows = drawing.abstract_rows(
    made.engine,
    made.updater.joined(made.updater.compiled.abstract.params),
    counted.prompts,
    counted.group,
    made.run.sampling,
    made.run.config.sampler.max_tokens,
  )
  caches = rows.prompt_cache, rows.cache
  assert counted.cache == arithmetic.on_device(caches)


def cache_of(model):
  """Bytes of 24 rows of 10 columns and 6 prompts of 7 tokens, by 3 shards."""
  made = types.SimpleNamespace(
    model=model,
    sampling_mesh=sharding.make_mesh(tensor=2),
    prompt_tokens=7,
    schedule=types.SimpleNamespace(shards=3),
    _compute=4,
  )
  return arithmetic.Arithmetic._cache(made, lanes=6, rows=24, columns=10)


@pytest.mark.quick
def test_layers_of_several_sizes_have_caches_of_theirs():
  """By hand: 12 entries of 2 heads; 1 head of 8 and 4 places; 4 heads of 6."""
  model = dataclasses.replace(tiny.CONFIG, **tiny.UNEVEN)
  found = cache_of(model)
  whole, local = 24 * 10 + 6 * 7, 24 * 4 + 6 * 4
  # One head is not split over two devices; the others are.
  places = 2 * whole * (2 // 2) * 12, 2 * local * 1 * 8, whole * (4 // 2) * 6
  assert found == 2 * 4 * sum(places) / 3


@pytest.mark.quick
def test_layers_that_share_keys_and_values_have_no_cache():
  """By hand: twice 2 heads of 8 and 4 places, and one of 12 entries."""
  model = dataclasses.replace(tiny.CONFIG, **tiny.SHARING)
  made = types.SimpleNamespace(
    model=model,
    sampling_mesh=sharding.make_mesh(),
    prompt_tokens=7,
    schedule=types.SimpleNamespace(shards=1),
    _compute=4,
  )
  found = arithmetic.Arithmetic._cache(made, lanes=6, rows=24, columns=10)
  local, whole = (24 * 4 + 6 * 4) * 2 * 8, (24 * 10 + 6 * 7) * 12
  assert found == 2 * 4 * 2 * (local + whole)


@pytest.mark.quick
def test_rows_have_the_states_of_their_layers_and_prompts_none():
  model = dataclasses.replace(tiny.CONFIG, **tiny.STATES)
  found = cache_of(model)
  # Two layers with the delta rule: two inputs of 2 * 2 * 6 + 4 * 10 numbers,
  # and four states of 6 x 10. One of 32 channels, and one of 2 heads of 8.
  states = 2 * (2 * (24 + 40) + 4 * 60) + 2 * 32
  places = 2 * (24 * 10 + 6 * 7) * 2 * 8
  assert found == 4 * (24 * states + places) / 2 / 3


# An environment whose turns are drawn when they are asked for.
PLAYED = {
  'environment.name': 'tests.run.environments_test:guess',
  'environment.max_turns': 4,
  'environment.context_tokens': 48,
  'rewards': ({'name': 'environment'},),
  'data.chat': True,
  'data.tokenizer': 'configs/words',
  'data.prompt_buckets': (32,),
  'data.completion_buckets': (64,),
  'sampler.max_tokens': 6,
  'sampler.prompts': 2,
  'sampler.group': 4,
}


@pytest.mark.parametrize(
  'changes, parked',
  [
    ({}, 0),
    ({'model.num_kv_heads': 1}, 0),
    ({'model.num_layers': 3, 'model.window_tokens': (4, 0)}, 0),
    ({'sampler.max_rows': 4, 'model.compute_dtype': 'bfloat16'}, 4),
  ],
  ids=['plain', 'one head', 'windows', 'rows'],
)
def test_pools_of_rows_take_the_bytes_of_their_arrays(changes, parked):
  made = parts(**PLAYED | changes)
  counted, engine = arithmetic.Arithmetic(made), made.engine
  params = made.updater.joined(
    made.updater.compiled.init(
      build_model.initial(made.run.weights, made.run.model, made.run.mesh)
    ).params
  )
  engine.load(params, version=0)
  # Two are short, which need no pool of their own.
  keys, sampling = np.zeros((1, 2), np.uint32), made.run.sampling
  for number in range(8):
    ids, limit = ([2], 2) if number < 2 else ([2] * 9, 6)
    engine.submit(engines.Request(ids, keys + number, limit, sampling, calls=8))
  assert len([one for turn in engine.completed() for one in turn]) == 8
  pools, kept = engine._queue._pools, engine._queue._contexts.values()
  assert [*pools] == [(48, 0)] and counted.pool_rows == 8 - parked
  arrays = jax.tree.leaves([pool.cache for pool in pools.values()])
  here = sum(x.addressable_shards[0].data.nbytes for x in arrays)
  assert counted.cache == here
  # What is refused at the start is that pool once for all devices.
  *_, least = limits._pool_bytes(made.run.config, made.run.model.config)
  whole = jax.tree.leaves(pools[48, 0].cache)
  assert least == sum(x.nbytes for x in whole)
  hosts = [one.context.parked for one in kept if one.context.parked is not None]
  assert len(hosts) == parked
  each = {sum(x.nbytes for x in jax.tree.leaves(one)) for one in hosts}
  assert counted.parked == parked * sum(each)


def test_turns_are_drawn_by_programs_of_their_own():
  made = parts(**PLAYED)
  counted, lowerings = arithmetic.Arithmetic(made), compiling.lowerings(made)
  names = ['prepare', 'read', 'decode']
  calls = plans.count_calls(counted)
  assert [*calls][:3] == [*lowerings][:3] == names
  assert not {'prefill', 'regroup', 'grow'} & {*lowerings, *calls}
  for name in names[1:]:
    lowered, _ = lowerings[name]()
    memory = lowered.compile().memory_analysis()
    # What reads needs not all of the weights: it makes no logits.
    given = counted.arguments(name)
    least = given if name == 'decode' else counted.cache
    assert least <= memory.argument_size_in_bytes < given + 4000
  once = parts(**PLAYED | {'environment.max_turns': 1})
  assert arithmetic.Arithmetic(once).parked == 0
  assert 'prefill' in plans.count_calls(arithmetic.Arithmetic(once))


@pytest.mark.parametrize(
  'changes',
  [
    {'learner.layout': 'shared'},
    {'learner.layout': 'shared', 'learner.row_completions': 2},
    {'learner.layout': 'padded'},
    {'learner.layout': 'packed'},
    {'learner.layout': 'packed', 'learner.pack_tokens': 34},
  ],
  ids=['shared', 'halves', 'padded', 'packed', 'packed by three'],
)
def test_rows_are_those_of_the_layout(changes):
  made = parts(**WIDE | changes)
  counted = arithmetic.Arithmetic(made)
  stack, used = layouts.abstract_stack(
    made.updater.compiled,
    made.example(),
    np.arange(counted.prompts),
    made.updater.layout,
  )
  _, rows, columns = stack.tokens.shape
  found = counted.rows
  assert (found.micro, found.rows, found.columns) == (used, rows, columns)
  whole = found.prompts * 8 + found.completions * 8
  assert whole == pytest.approx(columns)
  if 'learner.pack_tokens' in changes:
    assert found.completions > 1  # behind each other in one row


@pytest.mark.parametrize(
  'program, remat',
  [
    ('train_step', 'layer'),
    ('score_all', 'none'),
    ('decode', 'none'),
    ('prefill', 'none'),
    *(
      pytest.param(program, remat, marks=pytest.mark.long)
      for program in ('train_step', 'adapters')
      for remat in ('none', 'layer', 'attention')
      if (program, remat) != ('train_step', 'layer')
    ),
  ],
)
def test_operations_are_those_of_compiled_programs(program, remat):
  changes = {'model.remat': remat, 'learner.epochs': 2}
  if program == 'adapters':
    program, changes = 'train_step', changes | {'lora.rank': 1}
  made = parts(sharding.make_mesh(), **WIDE | changes)
  lowered, trips = compiling.lowerings(made)[program]()
  compiled = hlo.Program(lowered.compile().as_text(), trips)
  counted = arithmetic.Arithmetic(made).work(program).flops
  assert compiled.flops() == pytest.approx(counted, rel=0.03)


RECORDED = record.rows()
FITTING = [row for row in RECORDED if row['fits']]


def recorded_run(row):
  config, topology = record.config_of(row), topologies.named(row['topology'])
  mesh = topologies.abstract_mesh(topology, config.mesh)
  return arithmetic.Arithmetic(build.abstract(config, mesh))


@pytest.mark.parametrize(
  'row',
  [
    pytest.param(row, marks=() if number % 4 == 0 else pytest.mark.long)
    for number, row in enumerate(FITTING)
  ],
  ids=lambda row: ' '.join((row['model'], row['topology'], row['program'])),
)
def test_memory_is_within_15_percent_of_the_compiler(row):
  """The rows are what JAX 0.10.2 with libtpu 0.0.42.1 has compiled."""
  counted, program = recorded_run(row), row['program']
  needed = counted.arguments(program) + sum(counted.memory(program).values())
  assert needed == pytest.approx(row['peak_bytes'], rel=0.15)


def test_what_the_compiler_refused_is_too_large_by_arithmetic():
  """7.6 billion parameters and 16 completions, on eight chips of v5e."""
  (row,) = (row for row in RECORDED if not row['fits'])
  assert (row['model'], row['topology']) == ('Qwen2.5-7B', 'v5e:2x4')
  assert row['config']['sampler.prompts'] * row['config']['sampler.group'] == 16
  one = plans.plan_program(recorded_run(row), row['program'], 1, None)
  assert not one.fits(topologies.named('v5e:2x4').memory_bytes)


def test_seven_billion_parameters_fit_256_small_chips():
  """All programs, each with what lies in memory beside it."""
  of_mesh = [row for row in FITTING if row['topology'] == 'v5e:16x16']
  names = {row['program'] for row in of_mesh}
  assert names == {'train_step', 'prepare', 'prefill', 'decode', 'regroup'}
  for row in of_mesh:
    axes = row['config']['mesh.fsdp'], row['config']['mesh.tensor']
    assert (row['model'], axes) == ('Qwen2.5-7B', (64, 4))
    counted, program = recorded_run(row), row['program']
    given = int(counted.arguments(program))
    besides = row['peak_bytes'] - given
    said = compiling.Compiled(argument_bytes=given, temporary_bytes=besides)
    one = plans.plan_program(counted, program, 1, said)
    assert row['peak_bytes'] <= one.bytes + 1
    assert one.fits(topologies.named('v5e:16x16').memory_bytes)
    assert one.bytes < 15.75 * topologies.GIB


def test_reading_prompts_needs_what_experts_need():
  """The compiler's 5.0 GiB are those of the table in launch/README.md."""
  mesh = {'mesh.data': 1, 'mesh.fsdp': 8, 'mesh.expert': 16, 'mesh.tensor': 4}
  numbers = {'sampler.max_tokens': 4096, 'learner.row_completions': 1}
  counted = recorded_run(
    {
      'model': 'Qwen3-30B-A3B',
      'topology': 'v5p:8x8x8',
      'config': {
        'sampler.prompts': 64,
        'sampler.group': 8,
        'data.prompt_buckets': [1024],
        'data.completion_buckets': [4096],
        **mesh,
        **numbers,
      },
    }
  )
  needed = counted.weights.state + counted.arguments('prefill')
  needed += sum(counted.memory('prefill').values())
  assert needed / 2**30 == pytest.approx(5.0, rel=0.15)


@pytest.mark.parametrize(
  'prompts, waits', [(4, False), (8, True)], ids=['all at once', 'some wait']
)
def test_what_is_regrouped_takes_the_bytes_of_its_arrays(prompts, waits):
  changes = {
    'sampler.prompts': prompts,
    'sampler.group': 4,
    'sampler.max_rows': 16,
    'data.completion_buckets': (4, 8),
  }
  made = parts(sharding.make_mesh(), **WIDE | changes)
  counted = arithmetic.Arithmetic(made)
  names = 'regroup', 'grow'
  assert counted.admits == waits
  for name in names:
    lowered, trips = compiling.lowerings(made)[name]()
    memory = lowered.compile().memory_analysis()
    assert trips == 1
    given = counted.arguments(name)
    assert given <= memory.argument_size_in_bytes < given + 2000
    made_of = sum(counted.memory(name).values())
    assert made_of <= memory.output_size_in_bytes < made_of + 2000


def test_a_bound_is_the_slowest_resource():
  work = roofline.Work(flops=2e12, memory_bytes=1e9, ici_bytes=3e9)
  machine = roofline.Machine(1e12, 1e9, 1e9)
  secs = work.secs(machine)
  assert secs == {'compute': 2.0, 'memory': 1.0, 'ici': 3.0}
  assert roofline.bound(secs) == (3.0, 'ici')
  assert (work * 2 + work).flops == 6e12
