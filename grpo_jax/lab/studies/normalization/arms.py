"""The arms of the study: an optimizer, a learning rate, divided or not."""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.lab.studies.papers.normalized_optimizer import Optimizer

METHODS = {
  'divided': 'grpo',
  'plain': 'grpo_jax.losses.contrib:grpo_without_std',
}
"""By arm, the loss: GRPO with advantages divided by their group's standard
deviation, and without."""


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train.

  Attributes:
    optimizer: A name in the plan.
    lr: Peak learning rate.
    method: A name in `METHODS`.
    label: Its name.

  >>> Arm('Adam', 3e-4, 'plain').label
  'Adam-0.0003-plain'
  """

  optimizer: str
  lr: float
  method: str
  label: str = dataclasses.field(init=False)

  def __post_init__(self):
    label = f'{self.optimizer}-{self.lr:g}-{self.method}'
    # A frozen dataclass refuses plain assignment, here too.
    object.__setattr__(self, 'label', label)


class Plan(NamedTuple):
  """What is compared.

  Attributes:
    name: Of the study.
    optimizers: By name.
  """

  name: str
  optimizers: Mapping[str, Optimizer]

  @property
  def arms(self) -> tuple[Arm, ...]:
    """Every optimizer at every rate, both ways beside each other."""
    return tuple(
      Arm(name, rate, method)
      for name, optimizer in self.optimizers.items()
      for rate in optimizer.rates
      for method in METHODS
    )


_OF_ADAM = 5e-5, 1e-4, 2e-4, 5e-4, 1e-3
ARITHMETIC = Plan(
  'normalization',
  {
    'SGD': Optimizer(False, (0.0, 0.0), (5e-3, 1e-2, 2e-2, 5e-2, 0.1)),
    'momentum': Optimizer(False, (0.9, 0.0), (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)),
    'Adam': Optimizer(True, (0.0, 1e-8), _OF_ADAM),
    'AdamW': Optimizer(True, (0.1, 1e-8), _OF_ADAM),
    # Above nearly all entries of the gradient, so that it acts like momentum.
    'AdamW-epsilon-0.01': Optimizer(
      True, (0.1, 0.01), (2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
    ),
  },
)
SMOLLM2 = Plan(
  'normalization_smollm2',
  {
    'momentum': Optimizer(False, (0.9, 0.0), (3e-3, 1e-2, 3e-2)),
    'Adam': Optimizer(True, (0.0, 1e-8), (1e-5, 3e-5, 1e-4)),
  },
)


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of a run: what all arms share, with an arm's loss, and a seed.

  The optimizer is none of the config's; see `study.adjustable`.
  """
  learner = dataclasses.replace(config.learner, method=METHODS[arm.method])
  unused = dataclasses.replace(config.optim, warmup_steps=0)
  return dataclasses.replace(config, seed=seed, learner=learner, optim=unused)
