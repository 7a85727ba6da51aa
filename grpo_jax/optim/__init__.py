"""Adam under clipping: optax transformations for any training loop.

- `record_adam_moments` wraps an optimizer and records what Adam's moments do;
  `moment_metrics` reads the record.
- `coasting_ratio`, `coasting_steps` and `coasting_half_life` say how far Adam
  still moves a parameter once its gradient is zero; `coast` runs any optimizer
  on zero gradients; `split_update` splits one update into its parts.
- `reset_moments`, `decay_carried` and `project_outward` are brakes: wrappers
  that keep momentum from moving clipped tokens further out.
  `restore_reward_scale` undoes what Adam does to the scale of the rewards.
- `adamw` and `learning_rate` are what a run uses by default; `adafactor`,
  `lion`, `muon` and `sgd` take its place. `Matrix` says which axes of a stacked
  parameter make a matrix. `set_schedules` moves schedules to where a run is,
  past updates that were not taken.

The package needs jax and optax alone, and works on any tree of parameters,
under jit, on any sharding.
"""

from grpo_jax.optim._adafactor import adafactor
from grpo_jax.optim._adam import Split
from grpo_jax.optim._adam import split as split_update
from grpo_jax.optim._adamw import adamw
from grpo_jax.optim._adamw import learning_rate
from grpo_jax.optim._brakes import decay_carried
from grpo_jax.optim._brakes import project_outward
from grpo_jax.optim._brakes import reset_moments
from grpo_jax.optim._brakes import restore_reward_scale
from grpo_jax.optim._coast import Coasted
from grpo_jax.optim._coast import coast
from grpo_jax.optim._coasting_law import coasting_half_life
from grpo_jax.optim._coasting_law import coasting_ratio
from grpo_jax.optim._coasting_law import coasting_steps
from grpo_jax.optim._coasting_law import warn_if_growing
from grpo_jax.optim._matrices import Matrix
from grpo_jax.optim._moments import MomentRecord
from grpo_jax.optim._moments import moment_metrics
from grpo_jax.optim._moments import record_adam_moments
from grpo_jax.optim._named import clip_first
from grpo_jax.optim._named import lion
from grpo_jax.optim._named import muon
from grpo_jax.optim._named import sgd
from grpo_jax.optim._schedules import set_schedules

__all__ = (
  'Coasted',
  'Matrix',
  'MomentRecord',
  'Split',
  'adafactor',
  'adamw',
  'clip_first',
  'coast',
  'coasting_half_life',
  'coasting_ratio',
  'coasting_steps',
  'decay_carried',
  'learning_rate',
  'lion',
  'moment_metrics',
  'muon',
  'project_outward',
  'record_adam_moments',
  'reset_moments',
  'restore_reward_scale',
  'set_schedules',
  'sgd',
  'split_update',
  'warn_if_growing',
)
