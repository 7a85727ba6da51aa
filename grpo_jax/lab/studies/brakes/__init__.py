"""The study of brakes: what each does to the overshoot of clipped tokens.

A token that the trust region has clipped has no gradient, but Adam's momentum
still moves it: it overshoots. A brake is a change of the optimizer or of the
loss that acts against this. The study trains a small model with each brake, and
without one, at several learning rates and numbers of updates per rollout.

An arm is one way to train: a brake, a learning rate, a number of updates.

- `arms`: the arms that are compared;
- `study`: does the runs and keeps what they measured;
- `summary`: compares the arms;
- `verdicts`: the claims, and what the runs say of them;
- `table`: shows the comparison.
"""

from grpo_jax.lab.studies.brakes.arms import ARMS
from grpo_jax.lab.studies.brakes.arms import Arm
from grpo_jax.lab.studies.brakes.study import Compared
from grpo_jax.lab.studies.brakes.study import run
from grpo_jax.lab.studies.brakes.summary import Outcome
from grpo_jax.lab.studies.brakes.summary import Summary
from grpo_jax.lab.studies.brakes.summary import summarise
from grpo_jax.lab.studies.brakes.table import show
from grpo_jax.lab.studies.brakes.table import to_json
from grpo_jax.lab.studies.brakes.verdicts import experiment

__all__ = (
  'ARMS',
  'Arm',
  'Compared',
  'Outcome',
  'Summary',
  'experiment',
  'run',
  'show',
  'summarise',
  'to_json',
)
