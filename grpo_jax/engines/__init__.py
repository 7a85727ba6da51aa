"""Sampling completions: the engine protocol, and the engines of this package.

Read in this order:

- `protocol`: what an engine is given and what it returns;
- `local.engine`: our engine, `LocalEngine`;
- `local.arrays`: requests as arrays, and arrays as completions;
- `local.generation`: one call of the engine, a loop on the host;
- `local.schedule`: what that loop decides: which row draws which completion;
- `local.sampler`: the compiled programs that the loop calls;
- `local.next_token`: how one token is drawn from logits;
- `local.vocabulary`: what it reduces over a vocabulary that may be split;
- `plain`: `PlainEngine`, for models of which little is known.
"""

from grpo_jax.engines.local.engine import LocalEngine
from grpo_jax.engines.local.next_token import Sampling
from grpo_jax.engines.local.next_token import next_token
from grpo_jax.engines.local.prepare import sampler_params
from grpo_jax.engines.plain import PlainEngine
from grpo_jax.engines.protocol import ENDED
from grpo_jax.engines.protocol import STOPPED
from grpo_jax.engines.protocol import TRUNCATED
from grpo_jax.engines.protocol import Completions
from grpo_jax.engines.protocol import Engine
from grpo_jax.engines.protocol import Requests

__all__ = (
  'Completions',
  'ENDED',
  'Engine',
  'LocalEngine',
  'PlainEngine',
  'Requests',
  'STOPPED',
  'Sampling',
  'TRUNCATED',
  'next_token',
  'sampler_params',
)
