"""What shards exchange, the same whichever way the devices sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards


@pytest.mark.parametrize('axis', [0, 1])
def test_sums_of_whole_arrays_are_those_of_parts(axis, monkeypatch):
  """Values and gradients; and no program between processes on CPUs sums parts.

  Gloo does, and at times waits for ever.
  """
  mesh = sharding.make_mesh(fsdp=4, devices=jax.devices()[:4])
  spec = jax.P(*[None] * axis, 'fsdp')
  keys = jax.random.split(jax.random.key(0))
  x, weight = (jax.random.normal(key, (16, 8)) for key in keys)

  def on_device(x, weight):
    everything = shards.gathered(x, 'fsdp') * (1 + jax.lax.axis_index('fsdp'))
    return shards.sum_scattered(jnp.sin(everything) * weight, 'fsdp', axis)

  def total(x, weight):
    summed = jax.shard_map(
      on_device,
      mesh=mesh,
      in_specs=(jax.P('fsdp'), jax.P()),
      out_specs=spec,
      check_vma=False,
    )(x, weight)
    return (summed * weight).sum(), summed

  found, sums_parts = [], []
  for number in 1, 2:
    monkeypatch.setattr(jax, 'process_count', lambda number=number: number)
    compiled = (
      # A function of its own: JAX would know the other's program.
      jax.jit(jax.value_and_grad(lambda *args: total(*args), (0, 1), True))
      .lower(x, weight)
      .compile()
    )
    found.append(jax.tree.map(np.asarray, compiled(x, weight)))
    sums_parts.append(' reduce-scatter(' in compiled.as_text())
  assert sums_parts == [True, False]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *found
  )
  everything = np.asarray(x)
  wanted = sum(np.sin(everything * (1 + i)) for i in range(4)) * weight
  np.testing.assert_allclose(found[0][0][1], wanted, rtol=1e-5, atol=1e-5)
