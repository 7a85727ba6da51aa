"""Group-based RL post-training in JAX: one surrogate equation, in parts.

- `train`, `evaluate`, `sample` and `convert` are the commands of `grpo-jax`.
- `config` has every field of a run and its default; `load_config` reads a file
  of them.
- `losses` has the methods and their parts, `rewards` and `data` what a run is
  given, `optim` Adam under clipping, `diagnostics` audits of a loss.

`import grpo_jax` alone imports nothing. Each of these names is imported when it
is first used, so `grpo_jax.losses` needs jax and nothing else.
"""

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
  from grpo_jax import config
  from grpo_jax import data
  from grpo_jax import diagnostics
  from grpo_jax import losses
  from grpo_jax import optim
  from grpo_jax import rewards
  from grpo_jax.run.from_python import convert
  from grpo_jax.run.from_python import evaluate
  from grpo_jax.run.from_python import load_config
  from grpo_jax.run.from_python import sample
  from grpo_jax.run.from_python import train

__version__ = '0.1.0'  # pyproject.toml reads it here

__all__ = [
  'config',
  'convert',
  'data',
  'diagnostics',
  'evaluate',
  'load_config',
  'losses',
  'optim',
  'rewards',
  'sample',
  'train',
]


def __getattr__(name: str) -> Any:
  """Imports a name of `__all__`, or the module that has it, on first use."""
  if name in ('convert', 'evaluate', 'load_config', 'sample', 'train'):
    from grpo_jax.run import from_python

    return getattr(from_python, name)
  if name in __all__:
    return importlib.import_module(f'grpo_jax.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
