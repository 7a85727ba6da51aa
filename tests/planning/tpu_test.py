"""Plans beside the compiler for TPUs, which needs libtpu and no TPU.

`.ci/run` makes an environment with libtpu for these tests. Their portable
counterparts are the other tests of this folder.
"""

import dataclasses
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import pytest

from grpo_jax.config import Mesh
from grpo_jax.planning import compiling
from grpo_jax.planning import hlo
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from tests import runs
from tests.cli import command
from tests.planning import by_hand
from tests.planning import record

pytestmark = [
  pytest.mark.libtpu,
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason="libtpu is not installed; pip install -e '.[dev,tpu]'",
  ),
]

V5E = topologies.named('v5e:2x4')
MESH = Mesh(data=2, fsdp=2, tensor=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))


def config():
  # Four prompts are less than a row for each of four data shards allows.
  return dataclasses.replace(
    runs.small(**{'learner.micro_rows': 4, 'sampler.prompts': 8}), mesh=MESH
  )


# The same model, written down once more.
FIELDS = {
  'vocab_size': 14,
  'num_layers': 1,
  'width': 32,
  'mlp_width': 32,
  'rope_base': 100.0,
  'unroll': True,
}
PROGRAMS = 'prefill', 'decode', 'train_step'


def test_a_plan_is_what_compiling_by_hand_finds():
  given = dataclasses.replace(
    config(),
    learner=dataclasses.replace(config().learner, layout='shared'),
  )
  case = by_hand.Case(FIELDS, given, V5E.name, PROGRAMS)
  made = {one.name: one for one in plans.plan(given, V5E).programs}
  assert made.keys() == {*PROGRAMS, 'prepare', 'regroup'}
  for name in PROGRAMS:
    expected, found = by_hand.by_hand(case, name), made[name].compiled
    assert found is not None and found.fits and expected.fits
    assert found.peak_bytes == pytest.approx(expected.memory, rel=0.02)
    sent = sum(one.bytes * one.times for one in found.collectives)
    assert sent == expected.collectives > 0


def test_gradients_cross_to_the_other_slice():
  topology = topologies.named('v5e:2x2', 2)
  mesh = Mesh(data=1, fsdp=4, slices=2)
  changes = {'learner.micro_rows': 8, 'sampler.prompts': 8}
  two = dataclasses.replace(runs.small(**changes), mesh=mesh)
  made = plans.plan(two, topology)
  update = next(one for one in made.programs if one.name == 'train_step')
  assert update.collectives is not None
  crossing = [one for one in update.collectives if one.crosses]
  # All slices compute as many micro-batches: they agree in a number, which is
  # filled up to a register.
  sums = [one for one in crossing if one.dtype != 's32']
  (number,) = (one for one in crossing if one not in sums)
  assert number.bytes <= 512 and number.times == 1
  # Once for an update, however many micro-batches it has, and in float32.
  assert {(one.kind, one.dtype, one.times) for one in sums} == {
    ('all-reduce', 'f32', 1)
  }
  # All gradients; such small arrays are filled up to whole registers.
  by_arithmetic = made.counted.work('train_step').dcn_bytes
  assert by_arithmetic == made.counted.weights.trained
  assert by_arithmetic <= update.work.dcn_bytes < 5 * by_arithmetic


def test_moments_on_the_host_are_not_in_the_memory_of_chips():
  here, there = (
    compiling._compiled(
      compiling.lowered(made, V5E, 'train_step').lowered, 1, V5E
    )
    for made in (
      config(),
      dataclasses.replace(
        config(), optim=dataclasses.replace(config().optim, offload=True)
      ),
    )
  )
  assert not here.error and not there.error
  assert here.host_bytes == 0
  moved = here.argument_bytes - there.argument_bytes
  # Small arrays are padded, and not by the same on both sides.
  assert moved == pytest.approx(there.host_bytes, rel=0.1)
  # Two numbers of float32 for each parameter, of which fsdp has one half.
  assert there.host_bytes > 0.3 * here.argument_bytes


def test_collectives_are_those_that_were_written():
  """Bytes of a program whose author knows them, in a loop and outside."""
  mesh, _ = topologies.mesh(V5E, Mesh(data=2, fsdp=4))
  rows = PartitionSpec(('data', 'fsdp'))

  def of_device(x):  # bf16[32,256]
    def body(_, x):
      whole = jax.lax.all_gather(x, 'fsdp', tiled=True)  # bf16[128,256]
      square = jnp.dot(whole.T, whole, preferred_element_type=jnp.float32)
      summed = jax.lax.psum(jnp.tanh(square), 'data')  # f32[256,256]
      # In float32 to the end, or the compiler sums in bfloat16.
      more = jnp.tanh(summed).reshape(8, *x.shape).sum(0)
      return jnp.tanh(x + more).astype(x.dtype)

    return jax.lax.fori_loop(0, 5, body, x)

  program = jax.jit(
    jax.shard_map(of_device, mesh=mesh, in_specs=rows, out_specs=rows)
  )
  given = jax.ShapeDtypeStruct(
    (256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, rows)
  )
  found = hlo.Program(
    program.lower(given).compile().as_text(), 1, V5E.number
  ).collectives()
  sizes = {}
  for one in found:
    size = sizes.setdefault((one.kind, one.group), [0, 0.0])
    size[0] += one.bytes * one.times
    size[1] += one.sent[0]
  assert sizes == {
    ('all-gather', 4): [5 * 2 * 128 * 256, 5 * 2 * 128 * 256 * 3 / 4],
    ('all-reduce', 2): [5 * 4 * 256**2, 5 * 4 * 256**2],
  }


@pytest.mark.parametrize(
  'name, chip',
  [(f'{k}:2x2', k) for k in ('v5e', 'v6e')]
  + [(f'{k}:2x2x1', k) for k in ('v4', 'v5p', 'v7x')],
)
def test_the_table_says_what_the_compiler_leaves_to_programs(name, chip):
  topology = topologies.named(name)
  mesh, _ = topologies.mesh(topology, Mesh(data=topology.number))
  place = NamedSharding(mesh, PartitionSpec('data'))
  much = jax.ShapeDtypeStruct((2**38,), jnp.float32, sharding=place)
  found = compiling._compiled(jax.jit(jnp.sin).lower(much), 1, topology)
  assert not found.fits
  told = re.search(r'exceeds available HBM \(([\d.]+)G\)', found.error)
  # One release of libtpu leaves 0.01 GiB less than another.
  assert float(told[1]) == pytest.approx(topology.chip.usable_gib, abs=0.011)


def test_what_was_compiled_is_kept(monkeypatch):
  request = compiling.Request(
    dataclasses.asdict(config()), V5E.name, 1, 'prepare'
  )
  first = compiling.answer(request)
  monkeypatch.setattr(
    compiling, '_compiled', lambda *_: pytest.fail('it was compiled again')
  )
  assert compiling.answer(request) == first


def test_the_command_prints_a_plan():
  done = command(
    'plan',
    '--config=tests/small_config.py',
    '--config.learner.micro_rows=4',
    '--config.sampler.prompts=8',
    '--topology=v5e:2x4',
    '--mesh=data=2,fsdp=2,tensor=2',
    '--json',
    quick=False,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert found['fits']
  assert all(one['compiled'] for one in found['programs'].values())
  assert 'train_step: compiled in' in done.stderr


def test_the_verdict_is_the_compilers():
  mesh, _ = topologies.mesh(V5E, MESH)
  whole = NamedSharding(mesh, PartitionSpec())
  number = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)

  def wide(x):  # 64 GiB on each chip, which has 16
    rows = jnp.arange(2**17, dtype=jnp.float32)[:, None] * x
    square = jnp.sort(jnp.sin(rows + rows.T), axis=0)
    return jnp.sort(square, axis=1)[::7, ::5]

  found = compiling._compiled(jax.jit(wide).lower(number), 1, V5E)
  assert not found.fits
  assert 'RESOURCE_EXHAUSTED' in found.error


def test_seven_billion_parameters_do_not_fit_eight_small_chips():
  """16 completions; what compiled.json has recorded, asked again."""
  (row,) = (row for row in record.rows() if not row['fits'])
  assert (row['model'], row['topology']) == ('Qwen2.5-7B', 'v5e:2x4')
  answer = compiling.answer(record.request(row))
  assert not answer.fits
  assert 'exceeds available HBM (15.75G)' in answer.error


def test_an_axis_may_be_longer_than_a_side_of_the_slice():
  found, _ = topologies.mesh(
    topologies.named('v5e:16x16'), Mesh(fsdp=64, tensor=4)
  )
  assert dict(found.shape) == {
    'data': 1, 'fsdp': 64, 'expert': 1, 'context': 1, 'tensor': 4,
  }  # fmt: skip


def test_slices_have_devices_of_their_own():
  topology = topologies.named('v5e:2x2', 2)
  found, _ = topologies.mesh(topology, Mesh(data=2, fsdp=2, slices=2))
  slices = [device.slice_index for device in found.devices.flat]
  assert slices == [0] * 4 + [1] * 4


def test_a_topology_that_does_not_exist_is_refused():
  with pytest.raises(ValueError, match='knows no'):
    topologies.mesh(topologies.named('v5e:3x7'), Mesh(fsdp=21))
