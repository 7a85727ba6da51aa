"""The arms of the study: an optimizer, a learning rate, divided or not."""

from collections.abc import Mapping
import dataclasses
import math
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.studies.papers.normalized_optimizer import Optimizer

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


def _rates(first: float, number: int) -> tuple[float, ...]:
  """Rates from the first on, such as 0.3, 1, 3, 10, with one digit each.

  >>> _rates(0.3, 4)
  (0.3, 1.0, 3.0, 10.0)
  """
  start = round(2 * math.log10(first))  # in half powers of ten
  powers = range(start, start + number)
  return tuple(float(f'{(1, 3)[k % 2]}e{k // 2}') for k in powers)


ARITHMETIC = Plan(
  'normalization',
  {
    'SGD': Optimizer(False, (0.0, 0.0), _rates(3e-3, 5)),
    'momentum': Optimizer(False, (0.9, 0.0), _rates(3e-4, 5)),
    'Adam': Optimizer(True, (0.0, 1e-8), _rates(3e-5, 5)),
    'AdamW': Optimizer(True, (0.1, 1e-8), _rates(3e-5, 5)),
    # Above nearly all entries of the gradient, so that it acts like momentum.
    'AdamW-epsilon-0.01': Optimizer(True, (0.1, 0.01), _rates(1e-4, 5)),
  },
)
SMOLLM2 = Plan(
  'normalization_smollm2',
  {
    'momentum': Optimizer(False, (0.9, 0.0), _rates(3e-3, 3)),
    'Adam': Optimizer(True, (0.0, 1e-8), _rates(1e-5, 3)),
  },
)


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of a run: what all arms share, with an arm's loss, and a seed.

  The optimizer is none of the config's; see `study.adjustable`.
  """
  learner = dataclasses.replace(config.learner, method=METHODS[arm.method])
  return dataclasses.replace(config, seed=seed, learner=learner)
