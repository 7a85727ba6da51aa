"""The mesh, and where parameters lie on it."""

from importlib import metadata

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice
from jax.sharding import AbstractMesh
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.mesh import host_arrays
from grpo_jax.mesh import sharding
from tests import tiny

pytestmark = pytest.mark.quick


def test_the_mesh_has_auto_axes_and_one_device_is_a_mesh():
  mesh = sharding.make_mesh()
  assert mesh.shape == {
    'data': 1,
    'fsdp': 1,
    'expert': 1,
    'context': 1,
    'tensor': 1,
  }
  assert set(mesh.axis_types) == {AxisType.Auto}
  wide = sharding.make_mesh(data=-1, fsdp=2, tensor=2)
  assert wide.shape == {
    'data': 2,
    'fsdp': 2,
    'expert': 1,
    'context': 1,
    'tensor': 2,
  }
  assert sharding.row_shards(wide) == 4
  mixed = sharding.make_mesh(data=-1, expert=4)
  assert mixed.shape == {
    'data': 2,
    'fsdp': 1,
    'expert': 4,
    'context': 1,
    'tensor': 1,
  }
  assert sharding.row_shards(mixed) == 8


@pytest.mark.parametrize(
  'sizes, least',
  [((3, 3, 1), 9), ((-1, 16, 1), 16), ((-1, 3, 3), 9), ((2, 2, 2, 2), 16)],
)
def test_a_mesh_that_does_not_fit_is_refused(sizes, least):
  words = f'data={sizes[0]} .*needs {least} devices.*, but 8 are present'
  with pytest.raises(ValueError, match=words):
    sharding.make_mesh(*sizes)


def test_several_processes_leave_no_device_out(monkeypatch):
  assert sharding.make_mesh(data=4).size == 4
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  assert sharding.make_mesh(data=-1).size == 8
  with pytest.raises(ValueError, match='leaves 4 of the 8 devices of 2 proc'):
    sharding.make_mesh(data=4)


def test_slices_are_the_outer_part_of_data():
  mesh = sharding.make_mesh(data=-1, fsdp=2, slices=2)
  assert mesh.shape == {
    'data': 4,
    'fsdp': 2,
    'expert': 1,
    'context': 1,
    'tensor': 1,
  }
  half = {device.id for device in mesh.devices[:2].flat}
  assert half == {0, 1, 2, 3}  # of the first slice alone
  with pytest.raises(ValueError, match='slices=3 x data=1 .*needs 12 devices'):
    sharding.make_mesh(fsdp=4, slices=3)


def test_devices_that_lie_in_slices_are_not_mixed():
  class Device:
    platform = 'tpu'

    def __init__(self, number):
      self.number, self.slice_index = number, number % 2

  devices = [Device(number) for number in range(8)]
  parts = sharding._slices(devices, 2)
  assert [[d.number for d in part] for part in parts] == [
    [0, 2, 4, 6],
    [1, 3, 5, 7],
  ]
  with pytest.raises(ValueError, match='lie in 2 slices, and the mesh has 1'):
    sharding._slices(devices, 1)
  for device in devices:  # each of two machines with GPUs has its own index
    device.platform, device.process_index = 'gpu', device.number % 2
  (all_of_them,) = sharding._slices(devices, 1)
  assert len(all_of_them) == 8


class _OfProcess:
  """A device as far as `process_index` goes."""

  def __init__(self, process_index):
    self.process_index = process_index


class _Mesh:
  """A mesh of such devices, with `tensor` as its last axis."""

  def __init__(self, processes):
    self.devices = np.vectorize(_OfProcess)(processes)
    self.shape = dict(
      zip(('data', 'fsdp', 'expert', 'tensor'), self.devices.shape)
    )


@pytest.mark.parametrize(
  'processes, holders, own',
  [
    (
      [[[[0]], [[0]]], [[[1]], [[1]]]],
      [0, 0, 1, 1],
      [True, True, False, False],
    ),
    # Two processes share each shard, and hold them by turns.
    ([[[[0, 1]], [[0, 1]]]], [0, 1], [True, True]),
    ([[[[1, 2]], [[3, 3]]]], [1, 3], [False, False]),
  ],
)
def test_who_holds_the_rows_of_a_shard(processes, holders, own):
  mesh = _Mesh(processes)
  assert host_arrays.holders(mesh).tolist() == holders
  assert host_arrays.own_shards(mesh).tolist() == own  # those of process 0


@pytest.mark.parametrize('rows', [1, 3, 21])
def test_gathered_rows_lie_where_they_are_to(rows):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  given = {
    'a': np.arange(rows * 6.0).reshape(rows, 2, 3),
    'b': np.arange(rows) % 2 == 0,
    'none': None,
  }
  holder = np.zeros(rows, np.int64)  # the only process
  specs = {'a': PartitionSpec(None, 'fsdp'), 'b': PartitionSpec(), 'none': None}
  found = host_arrays.gather(given, holder, mesh, specs)
  assert found['none'] is None
  for name in 'ab':
    place = NamedSharding(mesh, specs[name])
    assert found[name].sharding.is_equivalent_to(place, found[name].ndim)
    np.testing.assert_array_equal(found[name], given[name])


def test_rows_on_the_host_are_those_of_own_devices():
  mesh = sharding.make_mesh(data=4, tensor=2)
  x = np.arange(24).reshape(8, 3)
  there = jax.device_put(x, sharding.rows(mesh))
  np.testing.assert_array_equal(host_arrays.rows_to_host(there), x)


@pytest.mark.parametrize(
  'sizes',
  [(0, 1, 1, 1), (-2, 1, 1, 1), (1, 0, 1, 1), (-1, 1, -1, 1), (1, 1, 1, 0)],
)
def test_a_mesh_of_no_size_is_refused(sizes):
  names = 'data={} x fsdp={} x tensor={} x expert={}; give 1 or more'
  with pytest.raises(ValueError, match=names.format(*sizes)):
    sharding.make_mesh(*sizes)


def test_parameters_are_split_where_the_axis_divides():
  model = tiny.model(**{**tiny.FANCY, 'num_kv_heads': 1, 'num_heads': 3})
  params = jax.eval_shape(model.init, jax.random.key(0))
  place = sharding.param_shardings(
    sharding.make_mesh(1, 4, 2), params, model.logical_axes
  )
  assert place['embedding'].spec == jax.P('tensor', 'fsdp')
  block = place['blocks'][0]
  assert block['mlp']['gate'].spec == jax.P(None, 'fsdp', 'tensor')
  assert block['mlp']['down'].spec == jax.P(None, 'tensor', 'fsdp')
  # One key-value head and three query heads do not split in two.
  assert block['attention']['key'].spec == jax.P(None, 'fsdp', None, None)
  assert block['attention']['query'].spec == jax.P(None, 'fsdp', None, None)
  assert block['mlp_norm']['scale'].spec == jax.P(None, None)


def test_experts_lie_on_their_own_axis():
  model = models.Transformer(tiny.EXPERTS)
  params = jax.eval_shape(model.init, jax.random.key(0))
  mesh = sharding.make_mesh(1, 2, 2, 2)
  place = sharding.param_shardings(mesh, params, model.logical_axes)
  block = place['blocks'][0]['experts']
  assert block['gate'].spec == jax.P(None, 'expert', 'fsdp', 'tensor')
  assert block['down'].spec == jax.P(None, 'expert', 'tensor', 'fsdp')
  assert block['router'].spec == jax.P(None, 'fsdp', None)
  assert model.decays(('blocks', '0', 'experts', 'gate'))


def test_programs_are_compiled_with_less_optimization_on_a_cpu_alone():
  tpu = AbstractMesh(
    (1,),
    ('data',),
    (AxisType.Auto,),
    abstract_device=AbstractDevice(
      device_kind='TPU v5 lite', num_cores=1, platform='tpu'
    ),
  )
  assert sharding.quickly(tpu) == sharding.COMPILER_OPTIONS
  quick = sharding.quickly(sharding.make_mesh())
  assert quick.items() > sharding.COMPILER_OPTIONS.items()
  # A jaxlib that does not know an option refuses it here.
  assert jax.jit(jnp.sin, compiler_options=quick)(0.0) == 0


@pytest.mark.parametrize(
  'version, older', [('0.10.2', True), ('0.11.0', False)]
)
def test_loops_of_a_cpu_are_made_the_older_way_where_there_is_one(
  version, older, monkeypatch
):
  monkeypatch.setattr(metadata, 'version', lambda name: version)
  name, mesh = 'xla_cpu_use_fusion_emitters', sharding.make_mesh()
  for options in (sharding.leanly(mesh), sharding.quickly(mesh)):
    assert options.get(name, True) is not older
  device = AbstractDevice('TPU v5', 4, 'tpu')
  tpu = sharding.make_mesh().abstract_mesh.update(abstract_device=device)
  assert sharding.leanly(tpu) == sharding.COMPILER_OPTIONS
