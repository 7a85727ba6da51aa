"""The config of an earlier run."""

from typing import TYPE_CHECKING
from typing import Any

from grpo_jax import config
from grpo_jax.run.keep import records

if TYPE_CHECKING:
  from ml_collections import ConfigDict


def get_config(directory: str) -> 'ConfigDict':
  """The resolved config in a workdir, to be overridden like any other."""
  saved = config.default()
  # method_kwargs may hold names that its default, an empty dict, does not have.
  saved.unlock()
  saved.update(_tuples(records.config_of(directory)))
  saved.lock()
  return saved


def _tuples(value: Any) -> Any:
  """JSON's lists as the tuples that they were."""
  if isinstance(value, dict):
    return {name: _tuples(inner) for name, inner in value.items()}
  return tuple(map(_tuples, value)) if isinstance(value, list) else value
