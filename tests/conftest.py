"""Eight fake CPU devices, set before jax is imported; strict broadcasting."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=8'
)

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
