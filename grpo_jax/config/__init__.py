"""The configuration: every field, its default and its unit.

Config files (configs/*.py) change the ConfigDict that `default` returns. The
command line may override any field of it. `resolve` turns the ConfigDict into
frozen dataclasses once, and refuses what they do not know. Past that point
nothing reads a ConfigDict and nothing has another default.
"""

import dataclasses
from typing import TYPE_CHECKING

from grpo_jax.config.changes import check_allowed
from grpo_jax.config.changes import is_allowed
from grpo_jax.config.changes import is_free
from grpo_jax.config.changes import kind_of
from grpo_jax.config.fields import Agent
from grpo_jax.config.fields import Checkpoint
from grpo_jax.config.fields import Config
from grpo_jax.config.fields import Data
from grpo_jax.config.fields import EarlyStop
from grpo_jax.config.fields import Engine
from grpo_jax.config.fields import Environment
from grpo_jax.config.fields import Evaluation
from grpo_jax.config.fields import Learner
from grpo_jax.config.fields import Log
from grpo_jax.config.fields import Lora
from grpo_jax.config.fields import Mesh
from grpo_jax.config.fields import Model
from grpo_jax.config.fields import Optim
from grpo_jax.config.fields import Reference
from grpo_jax.config.fields import Reward
from grpo_jax.config.fields import Sampler
from grpo_jax.config.fields import Source
from grpo_jax.config.fields import WarmUp
from grpo_jax.config.fields import Workers
from grpo_jax.config.from_dict import dataclass_from_dict
from grpo_jax.config.from_dict import flat
from grpo_jax.config.from_dict import within
from grpo_jax.config.plain_text import REWARD_METRICS

if TYPE_CHECKING:
  import ml_collections

__all__ = [
  'Agent', 'Checkpoint', 'Config', 'Data', 'EarlyStop', 'Engine', 'Environment',
  'Evaluation', 'Learner', 'Log', 'Lora', 'Mesh', 'Model', 'Optim',
  'REWARD_METRICS', 'Reference', 'Reward', 'Sampler', 'Source', 'WarmUp',
  'Workers', 'check_allowed', 'dataclass_from_dict', 'default', 'flat',
  'is_allowed', 'is_free', 'kind_of', 'resolve', 'within',
]  # fmt: skip


_TWO_TYPES = ('data', 'train'), ('data', 'heldout'), ('model', 'remat')


def default() -> 'ml_collections.ConfigDict':
  """Every field with its default, for a config file to change.

  Returns:
    A `ConfigDict`, which refuses fields that it does not have.
  """
  import ml_collections

  values = dataclasses.asdict(Config())
  # A ConfigDict fixes the type of a field by its first value, and these fields
  # have two: a text, or a tuple of sources, or a bool of earlier configs.
  for group, name in _TWO_TYPES:
    values[group][name] = ml_collections.FieldReference(
      values[group][name], field_type=object
    )
  return ml_collections.ConfigDict(values)


def resolve(config: 'ml_collections.ConfigDict') -> Config:
  """Checks a ConfigDict against the dataclasses.

  Args:
    config: What a config file's `get_config` returned, with overrides.

  Returns:
    A `Config`.

  Raises:
    ValueError: An unknown field (the nearest known one is named), or a value
      of the wrong type or outside its range.
  """
  return dataclass_from_dict(Config, config.to_dict(), 'config')
