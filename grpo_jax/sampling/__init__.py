"""Sampling: an engine protocol, and an engine that shares prompt caches."""

from grpo_jax.sampling._choose import Sampling
from grpo_jax.sampling._choose import choose
from grpo_jax.sampling._engine import ENDED
from grpo_jax.sampling._engine import STOPPED
from grpo_jax.sampling._engine import TRUNCATED
from grpo_jax.sampling._engine import Completions
from grpo_jax.sampling._engine import Engine
from grpo_jax.sampling._engine import LocalEngine
from grpo_jax.sampling._engine import Requests
from grpo_jax.sampling._sampler import Sampler
from grpo_jax.sampling._sampler import SamplingState
from grpo_jax.sampling._sampler import sampler_params

__all__ = (
  'Completions',
  'ENDED',
  'Engine',
  'LocalEngine',
  'Requests',
  'STOPPED',
  'Sampler',
  'Sampling',
  'SamplingState',
  'TRUNCATED',
  'choose',
  'sampler_params',
)
