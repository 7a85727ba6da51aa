"""Does dividing by a group's deviation still matter under Adam? Trains runs.

The question of E10 (`papers.normalized_optimizer`) on a language model. Each
optimizer trains it with and without the division, at every rate of a grid and
with several seeds, and both ways are compared at their own best rate.

`grpo-jax study normalization_smollm2` is the same with fewer arms, for a model
that takes minutes.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import Config
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.claims import GE
from grpo_jax.lab.studies.claims import Claim
from grpo_jax.lab.studies.claims import Experiment
from grpo_jax.lab.studies.claims import Measured
from grpo_jax.lab.studies.papers import normalized_optimizer
from grpo_jax.lab.studies.papers.normalized_optimizer import Optimizer
from grpo_jax.run import bare
from grpo_jax.run.build import build
from grpo_jax.run.build import rewards as build_rewards

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
    label: Of its experiment; see `claims.Experiment`.
    title: Likewise.
    optimizers: By name.
  """

  name: str
  label: str
  title: str
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
  'E10b',
  'dividing by the deviation on a language model',
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
  'E10c',
  'dividing by the deviation on SmolLM2-135M',
  {
    'SGD': Optimizer(False, (0.0, 0.0), (1e-3, 3e-3, 1e-2, 3e-2)),
    'Adam': Optimizer(True, (0.0, 1e-8), (1e-5, 3e-5, 1e-4, 3e-4)),
    'Adam-epsilon-0.01': Optimizer(True, (0.0, 0.01), (1e-4, 3e-4, 1e-3, 3e-3)),
  },
)


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of a run: what all arms share, with an arm's loss, and a seed.

  The optimizer is none of the config's; see `study.adjustable`.
  """
  learner = dataclasses.replace(config.learner, method=METHODS[arm.method])
  unused = dataclasses.replace(config.optim, warmup_steps=0)
  return dataclasses.replace(config, seed=seed, learner=learner, optim=unused)


_TENTH = 0.1375  # log2 of 1.1
_LOG2 = (
  'log2 of those without it / with it, in doublings; failures are 1 - mean '
  'reward of a training; rates are chosen on the same seeds'
)

_GENERAL = {
  'unequal': Claim(
    'Prompts are of unequal difficulty (deviation over prompts of the mean '
    'reward of a group, first rollout).',
    'wanted of a fair comparison',
    low=0.2,
  ),
  'adam_same': Claim(
    'Adam, on a language model: with each way at its best rate, dividing by '
    'the deviation changes the failures by less than a tenth, either way '
    f'({_LOG2}).',
    'derived',
    -_TENTH,
    _TENTH,
  ),
  'inside': Claim(
    'No best rate lies at an end of its grid (share of them).',
    'wanted of a fair comparison',
    1.0,
    1.0,
  ),
}


def numbers(plan: Plan, outcomes: Iterable[Any]) -> dict[str, Any]:
  """The failures of each optimizer of which all arms were run.

  Args:
    plan: The optimizers and their rates.
    outcomes: One per arm and seed.

  Returns:
    `failure[optimizer][method]`, [R,S], at the rates `rates[optimizer]`;
    `spread`, one for each seed; and `asked`, all optimizers of the plan.
  """
  by_arm: dict[Any, dict[int, Any]] = {}
  spread = {}
  for one in outcomes:
    by_arm.setdefault(one.arm, {})[one.seed] = one
    # All arms of a seed begin alike, so their first rollouts are the same.
    spread[one.seed] = one.spread
  missing = {arm.optimizer for arm in plan.arms if arm not in by_arm}
  rates = {
    name: list(optimizer.rates)
    for name, optimizer in plan.optimizers.items()
    if name not in missing
  }
  failure = {
    name: {
      method: [
        [one.failure for _, one in sorted(by_arm[arm].items())]
        for arm in plan.arms
        if (arm.optimizer, arm.method) == (name, method)
      ]
      for method in METHODS
    }
    for name in rates
  }
  return {
    'asked': [*plan.optimizers],
    'rates': rates,
    'failure': failure,
    'spread': [*spread.values()],
  }


def measure(numbers) -> dict[str, Measured]:
  """See `Experiment`."""
  failure = numbers['failure']
  gains = {
    name: normalized_optimizer.gain(arms) for name, arms in failure.items()
  }
  return {
    'unequal': claims.over_seeds(numbers['spread']),
    **{
      name.lower(): gains.get(name, claims.UNKNOWN) for name in numbers['asked']
    },
    'adam_same': gains.get('Adam', claims.UNKNOWN),
    'inside': normalized_optimizer.inside(numbers['rates'], failure),
  }


def draw(numbers, found, figure, colors) -> str:
  """See `Experiment`."""
  left, right = figure.subplots(1, 2)
  names = list(numbers['failure'])
  normalized_optimizer.draw_rates(
    left, numbers['rates'], numbers['failure'], names, colors
  )
  gains = [normalized_optimizer.gain(numbers['failure'][k]) for k in names]
  normalized_optimizer.draw_gains(right, names, gains, colors['first'])
  right.axvline(0, color=colors['faint'], lw=1)
  right.set_title('each at its best rate; 95 % intervals')
  adam = found['adam']
  return (
    'Dividing by the deviation under Adam, on a language model: log2 of the '
    f'failures without / with it is {claims.value(adam)}'
  )


def experiment(plan: Plan) -> Experiment:
  """The claims on the optimizers of a plan, and how to test them."""
  asked = {
    name.lower(): Claim(
      f'{name}, on a language model: with each way at its best rate, dividing '
      f'by the deviation lowers the failures ({_LOG2}).',
      f'asked by {GE}',
      low=claims.ABOVE_0,
    )
    for name in plan.optimizers
  }
  return Experiment(plan.label, plan.title, _GENERAL | asked, measure, draw)


_RISE = 3  # updates over which the learning rate rises linearly


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run has measured.

  Attributes:
    arm: How it was trained.
    seed: Of everything random, the warm-up included.
    steps: Rollouts.
    failure: 1 - reward, the mean over all rollouts.
    failure_last: The mean over the last third of them.
    spread: The standard deviation, over the prompts of the first rollout, of
      the mean reward of a group: how unequal the prompts are.
  """

  arm: Arm
  seed: int
  steps: int
  failure: float
  failure_last: float
  spread: float


class Settings(NamedTuple):
  """What differs between runs of one program, f32[] each."""

  rate: jax.Array
  decay: jax.Array  # of weights, or of the momentum
  epsilon: jax.Array


def adjustable(
  adaptive: bool, decays: Callable[[Any], Any] | None = None
) -> optax.GradientTransformationExtraArgs:
  """An optimizer whose state holds its settings, all 0 at first.

  The rate rises linearly over the first 3 updates. The gradient is not clipped:
  clipping would divide by the scale that the two ways differ in.

  Args:
    adaptive: AdamW with betas (0.9, 0.99), or SGD with momentum.
    decays: From the parameters to a tree of bools: which of them decay.

  Returns:
    A transformation with the state `(Settings, count of the rise, state of the
    optimizer)`. A run moves the count; see `optim.set_schedules`.
  """

  def inner(settings):
    if adaptive:
      return optax.chain(
        optax.scale_by_adam(0.9, 0.99, eps=settings.epsilon),
        optax.add_decayed_weights(settings.decay, decays),
      )
    return optax.trace(settings.decay)

  def init(params):
    settings = Settings(*(jnp.zeros(()) for _ in Settings._fields))
    rise = optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))
    return settings, rise, inner(settings).init(params)

  def update(updates, state, params=None, **unused):
    del unused
    settings, rise, within = state
    step, within = inner(settings).update(updates, within, params)
    count = rise.count + 1
    rate = settings.rate * jnp.minimum(1, count / _RISE)
    after = settings, rise._replace(count=count), within
    return jax.tree.map(lambda x: -rate * x, step), after

  return optax.GradientTransformationExtraArgs(init, update)


class _Trainer:
  """Trains arms; keeps the parts of a seed, and the compiled programs."""

  def __init__(self, plan: Plan):
    self._plan = plan
    self._updaters: dict[tuple[bool, str], Any] = {}
    self._run: build.Run | None = None
    self._frozen: Any = None  # parameters of this run that no update changes

  def __call__(
    self, config: Config, arm: Arm, seed: int, params: Any
  ) -> Outcome:
    """Trains one arm from given parameters; see `sweeps.Sweep.train`."""
    if self._run is None or self._run.draw.seed != seed:
      self._run = build.run(config_of(config, arm, seed))
      self._frozen = build.frozen_params(self._run)
    optimizer = self._plan.optimizers[arm.optimizer]
    key = optimizer.adaptive, arm.method
    if key not in self._updaters:
      self._updaters[key] = build.updater(
        build.run(config_of(config, arm, seed)),
        self._frozen,
        lambda decays: adjustable(optimizer.adaptive, decays),
      )
    # Made for an earlier seed, perhaps.
    updater = dataclasses.replace(self._updaters[key], frozen=self._frozen)
    # `init` donates its argument, and the next arm needs the parameters again.
    state = updater.compiled.init(jax.tree.map(jnp.copy, params))
    settings, *rest = state.opt_state
    given = Settings(arm.lr, *optimizer.settings)  # pyright: ignore
    # Added to what lies there, that they lie in the same place.
    settings = jax.tree.map(jnp.add, settings, given)
    state = state._replace(opt_state=(settings, *rest))
    run = self._run
    with build_rewards.workers(run.limits, run.rewards) as workers:
      run = dataclasses.replace(run, workers=workers)
      done = list(bare.trained(run, updater, state))
    # What the first of all rollouts has decided serves the other arms too.
    self._updaters[key] = dataclasses.replace(updater, layout=done[-1].layout)
    failures = [1 - one.rollout.batch.reward.mean() for one in done]
    first = done[0].rollout.batch.reward
    third = -(-len(done) // 3)
    return Outcome(
      arm,
      seed,
      len(done),
      float(np.mean(failures)),
      float(np.mean(failures[-third:])),
      float(np.std(np.mean(first, axis=1))),
    )


def study(name: str) -> sweeps.Study:
  """A study of a plan, by the name of it."""
  return study_of({plan.name: plan for plan in (ARITHMETIC, SMOLLM2)}[name])


def study_of(plan: Plan) -> sweeps.Study:
  """The study of a plan."""
  sweep = sweeps.Sweep(
    plan.name,
    plan.arms,
    Arm,
    Outcome,
    _Trainer(plan),
    lambda one: f'failure {one.failure:.3f}  last third {one.failure_last:.3f}',
  )
  return sweeps.Study(sweep, experiment(plan), functools.partial(numbers, plan))
