"""The arms of the study of brakes: each is one way to train."""

import dataclasses

from grpo_jax.config import Config

BASE_UPDATES = 8
_GROUP = 8  # completions per prompt
# Rollouts over which the learning rate rises linearly from 0: a third of a
# short training, and no more than this.
_RISE = 5
_MEASURED_EVERY = 5  # rollouts from one measurement of overshoot to the next
_LOSSES = {  # the brakes that are losses; the others are values of optim.brake
  'narrow': 'grpo_jax.losses.contrib:coasting_grpo',
  'rollback': 'grpo_jax.losses.contrib:rollback_grpo',
}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One way to train.

  Attributes:
    brake: A value of `config.optim.brake`, or 'narrow' or 'rollback', which are
      losses.
    updates: Updates per rollout, each on the whole rollout.
    lr: Peak learning rate.
    label: Its name: the brake, then what differs from the base, which has
      `BASE_UPDATES` updates and the default learning rate.

  >>> Arm('project', lr=1e-4).label
  'project-lr0.0001'
  """

  brake: str = 'none'
  updates: int = BASE_UPDATES
  lr: float = 3e-4
  label: str = dataclasses.field(init=False)

  def __post_init__(self):
    updates = f'-mu{self.updates}' if self.updates != BASE_UPDATES else ''
    lr = f'-lr{self.lr:g}' if self.lr != Arm.lr else ''
    # A frozen dataclass refuses plain assignment, here too.
    object.__setattr__(self, 'label', f'{self.brake}{updates}{lr}')


# The first arm is the base. A brake also makes the policy move less, which a
# lower learning rate or fewer updates would do too. So there are arms without a
# brake at lower rates and with half the updates, to compare a brake with an arm
# that moves as little.
ARMS = (
  *(
    Arm(brake)
    for brake in (
      'none', 'reset', 'reset_first', 'decay', 'project', 'narrow', 'rollback',
    )
  ),
  Arm(updates=4),
  *(
    Arm(brake, updates, lr)
    for lr in (1e-4, 5e-5)
    for brake, updates in (
      ('none', 8), ('none', 4), ('decay', 8), ('project', 8), ('narrow', 8),
      ('rollback', 8),
    )
  ),
)  # fmt: skip


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of one run.

  Args:
    config: What all arms share.
    arm: Sets brake, updates and learning rate.
    seed: Of the run.

  Returns:
    The config, with the group, the rise of the learning rate and the
    measurements of overshoot that this study fixes.
  """
  optimizer = dataclasses.replace(
    config.optim,
    lr=arm.lr,
    # In updates, so that the rise takes as many rollouts in every arm.
    warmup_steps=min(_RISE, config.steps // 3) * arm.updates,
    brake='none' if arm.brake in _LOSSES else arm.brake,
    overshoot_every_steps=_MEASURED_EVERY,
  )
  # One batch, so that an update is a step on the whole rollout.
  learner = dataclasses.replace(config.learner, batches=1, epochs=arm.updates)
  if arm.brake in _LOSSES:
    learner = dataclasses.replace(
      learner, method=_LOSSES[arm.brake], method_kwargs={}
    )
  return dataclasses.replace(
    config,
    seed=seed,
    sampler=dataclasses.replace(config.sampler, group=_GROUP),
    optim=optimizer,
    learner=learner,
  )
