"""Names of machines, and meshes over machines that are not there."""

import pytest

from grpo_jax.config import Mesh
from grpo_jax.mesh import sharding
from grpo_jax.planning import cloud
from grpo_jax.planning import topologies

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  'name, slices, number, platform',
  [
    ('v5p:4x4x4', 1, 64, 'tpu'),
    ('v5e:16x16', 2, 512, 'tpu'),
    ('v7x:2x2x1', 1, 8, 'tpu'),  # two devices in each chip
    ('H100-SXM:2x8', 1, 16, 'gpu'),
    ('h100-sxm:8', 1, 8, 'gpu'),
    # As clouds call them. A number of v4 and v5p is of cores, two in a chip.
    ('v4-8', 1, 4, 'tpu'),
    ('v5p-64', 2, 64, 'tpu'),
    ('v5p-12288', 1, 6144, 'tpu'),
    ('v5litepod-16', 1, 16, 'tpu'),
    ('v5e-256', 1, 256, 'tpu'),
    ('V6E-8', 1, 8, 'tpu'),
    ('a3-highgpu-8g', 1, 8, 'gpu'),
    ('a2-ultragpu-4g:3', 1, 12, 'gpu'),
    ('p5.48xlarge:2', 1, 16, 'gpu'),
    ('Standard_ND96isr_H100_v5', 1, 8, 'gpu'),
  ],
)
def test_a_name_tells_the_devices(name, slices, number, platform):
  found = topologies.named(name, slices)
  assert (found.number, found.platform) == (number, platform)


@pytest.mark.parametrize(
  'name, slices, said',
  [
    ('v5p:4x4', 1, 'v5p:4x4x4'),
    ('v5e:4x4x4', 1, 'v5e:4x4'),
    ('v5e', 1, 'v5e:4x4'),
    ('v5e:0x4', 1, 'v5e:4x4'),
    ('v5e:axb', 1, 'v5e:4x4'),
    ('h100-sxm:2x8x4', 1, 'h100-sxm:2x8'),
    ('v3:4x4', 1, 'v5e'),
    ('m1:8', 1, "no chip 'm1'"),
    ('v5e:4x4', 0, 'num_slices'),
    ('v5p-63', 1, 'v5p comes with 8, 16, 32, .* TensorCores'),
    ('v6e-9', 1, 'v6e comes with 1, 4, 8, .* chips .* v6e:4x4'),
    ('a3-highgpu-8g:x', 1, 'a number of machines behind the colon'),
    ('a9-highgpu-8g', 1, 'a cloud says it: v5p-64'),
  ],
)
def test_a_name_that_is_none_is_refused(name, slices, said):
  with pytest.raises(ValueError, match=said):
    topologies.named(name, slices)


def test_every_name_of_a_cloud_is_a_topology():
  for name in (*cloud._GPUS, 'v4-4096', 'v5litepod-1', 'v6e-256'):
    assert topologies.named(name).number
  assert topologies.named('v5p-64') == topologies.named('v5p:2x4x4')
  assert topologies.named('a3-highgpu-8g:4') == topologies.named('h100-sxm:4x8')


def test_a_mesh_of_shapes_knows_what_it_is_for():
  mesh = topologies.abstract_mesh(
    topologies.named('v5p:4x4x4'), Mesh(data=-1, fsdp=16)
  )
  assert dict(mesh.shape) == {
    'data': 4,
    'fsdp': 16,
    'expert': 1,
    'context': 1,
    'tensor': 1,
  }
  assert sharding.platform(mesh) == 'tpu'
  with sharding.use(mesh):
    assert sharding.platform() == 'tpu'
  assert sharding.platform() == 'cpu'


def test_slices_are_the_outer_part_of_the_mesh():
  found = topologies.named('v5e:4x4', 2)
  mesh = topologies.abstract_mesh(found, Mesh(data=2, fsdp=8, slices=2))
  assert mesh.shape['data'] == 4
  assert found.joined == 16


def test_a_mesh_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match='needs 128 devices, but 64'):
    topologies.abstract_mesh(topologies.named('v5p:4x4x4'), Mesh(fsdp=128))


def test_without_libtpu_the_extra_is_named(monkeypatch):
  monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"pip install 'grpo_jax\[tpu\]'"):
    topologies.mesh(topologies.named('v5e:4x4'), Mesh(fsdp=16))
