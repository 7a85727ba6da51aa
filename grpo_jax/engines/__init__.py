"""Sampling completions: the engine protocol, and the engines of this package.

Read in this order:

- `protocol`: what an engine is asked, and what it answers;
- `local.engine`: our engine, `LocalEngine`;
- `local.arrays`: requests as arrays, and arrays as what was sampled;
- `local.generation`: the completions of a batch, a loop on the host;
- `local.schedule`: what that loop decides: which row draws which completion;
- `local.sampler`: the compiled programs that the loop calls;
- `local.calls`: calls of episodes that go on from each other, likewise;
- `local.pools`: which row has which of their contexts, and which are parked;
- `local.contexts`: the compiled programs that read and draw them;
- `local.next_token`: how one token is drawn from logits;
- `plain`: `PlainEngine`, for models of which little is known.
"""

from grpo_jax.engines.local.engine import LocalEngine
from grpo_jax.engines.plain import PlainEngine
from grpo_jax.engines.protocol import ENDED
from grpo_jax.engines.protocol import GOING
from grpo_jax.engines.protocol import STOPPED
from grpo_jax.engines.protocol import TRUNCATED
from grpo_jax.engines.protocol import Capabilities
from grpo_jax.engines.protocol import Engine
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampled
from grpo_jax.engines.protocol import Sampling
from grpo_jax.engines.protocol import check_limit
from grpo_jax.engines.protocol import generate
from grpo_jax.engines.protocol import requests

__all__ = (
  'Capabilities',
  'ENDED',
  'Engine',
  'GOING',
  'LocalEngine',
  'PlainEngine',
  'Request',
  'STOPPED',
  'Sampled',
  'Sampling',
  'TRUNCATED',
  'check_limit',
  'generate',
  'requests',
)
