"""Group-based RL post-training in JAX: one surrogate equation, in parts.

- `train`, `evaluate`, `sample` and `convert` are the commands of `grpo-jax`.
- `config` has every field of a run and its default; `load_config` reads a file
  of them.
- `losses` has the methods and their parts, `rewards` and `data` what a run is
  given, `optim` Adam under clipping, `diagnostics` audits of a loss.

`import grpo_jax` alone imports nothing. Each of these names is imported when it
is first used, so `grpo_jax.losses` needs jax and nothing else. Type checkers
read `__init__.pyi`.
"""

# pyright: reportUnsupportedDunderAll=false

import importlib
from typing import Any

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
# Where the functions among them are; the others are folders.
_FUNCTIONS = {
  'convert': 'grpo_jax.run.export',
  'evaluate': 'grpo_jax.run.from_python',
  'load_config': 'grpo_jax.config.load',
  'sample': 'grpo_jax.run.from_python',
  'train': 'grpo_jax.run.from_python',
}


def __getattr__(name: str) -> Any:
  """Imports a name of `__all__`, or the module that has it, on first use."""
  if name in _FUNCTIONS:
    return getattr(importlib.import_module(_FUNCTIONS[name]), name)
  if name in __all__:
    return importlib.import_module(f'grpo_jax.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
