"""Does dividing by a group's deviation still matter under Adam? Trains runs.

The question of E10 (`papers.normalized_optimizer`) on a language model. Each
optimizer trains it with and without the division, at every rate of a grid and
with several seeds, and both ways are compared at their own best rate.

- `arms`: the optimizers, their rates, and the two losses;
- `study`: does the runs;
- `verdicts`: the claims, and what the runs say of them.

`grpo-jax study normalization_smollm2` is the same with fewer arms, for a model
that takes minutes.
"""

from grpo_jax.lab.studies.normalization.arms import ARITHMETIC
from grpo_jax.lab.studies.normalization.arms import SMOLLM2
from grpo_jax.lab.studies.normalization.arms import Arm
from grpo_jax.lab.studies.normalization.arms import Plan
from grpo_jax.lab.studies.normalization.study import Outcome
from grpo_jax.lab.studies.normalization.study import run
from grpo_jax.lab.studies.normalization.study import show
from grpo_jax.lab.studies.normalization.study import to_json
from grpo_jax.lab.studies.normalization.verdicts import EXPERIMENT

__all__ = (
  'ARITHMETIC',
  'Arm',
  'EXPERIMENT',
  'Outcome',
  'Plan',
  'SMOLLM2',
  'run',
  'show',
  'to_json',
)
