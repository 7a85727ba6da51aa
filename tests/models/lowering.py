"""Programs lowered for accelerators that this machine does not have.

Since JAX 0.11 a Triton kernel is lowered for one kind of GPU, and JAX asks the
mesh in use for that kind, then the default device. On a machine with a CPU
alone, only an abstract mesh of abstract devices can answer.
"""

import jax
from jax.sharding import AbstractDevice
from jax.sharding import AbstractMesh
from jax.sharding import AxisType

_DEVICES = {
  'cpu': AbstractDevice(device_kind='cpu', num_cores=None, platform='cpu'),
  'cuda': AbstractDevice(
    device_kind='NVIDIA H100', num_cores=132, platform='gpu'
  ),
  'tpu': AbstractDevice(device_kind='TPU v5 lite', num_cores=1, platform='tpu'),
}


def lowered(
  function, arrays, platform, data=1, fsdp=1, tensor=1, expert=1
) -> str:
  """The StableHLO of a function on a mesh of one platform's devices.

  Args:
    function: Of the arrays; not compiled.
    arrays: Its arguments, or their shapes.
    platform: 'cpu', 'cuda' or 'tpu'.
    data: As in `sharding.make_mesh`, like the next three.
    fsdp: See `data`.
    tensor: See `data`.
    expert: See `data`.
  """
  mesh = AbstractMesh(
    (data, fsdp, expert, tensor),
    ('data', 'fsdp', 'expert', 'tensor'),
    (AxisType.Auto,) * 4,
    abstract_device=_DEVICES[platform],
  )
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()
