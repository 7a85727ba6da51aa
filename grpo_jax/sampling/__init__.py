"""Sampling: an engine protocol, and an engine that shares prompt caches."""

from grpo_jax.sampling._choose import Sampling
from grpo_jax.sampling._choose import choose
from grpo_jax.sampling._engine import LocalEngine
from grpo_jax.sampling._protocol import ENDED
from grpo_jax.sampling._protocol import STOPPED
from grpo_jax.sampling._protocol import TRUNCATED
from grpo_jax.sampling._protocol import Completions
from grpo_jax.sampling._protocol import Engine
from grpo_jax.sampling._protocol import Requests
from grpo_jax.sampling._sampler import sampler_params

__all__ = (
  'Completions',
  'ENDED',
  'Engine',
  'LocalEngine',
  'Requests',
  'STOPPED',
  'Sampling',
  'TRUNCATED',
  'choose',
  'sampler_params',
)
