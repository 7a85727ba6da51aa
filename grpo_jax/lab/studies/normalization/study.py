"""Does the runs: one program for all rates and seeds of an optimizer's kind.

A learning rate is a constant in a program, as a rule, so that every other one
is compiled anew. Here rate, decay and epsilon lie in the optimizer's state. So
four programs do for all runs: SGD or Adam, with or without the division.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import pathlib
import time
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_jax.config import Config
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.normalization import verdicts
from grpo_jax.lab.studies.normalization.arms import ARITHMETIC
from grpo_jax.lab.studies.normalization.arms import Arm
from grpo_jax.lab.studies.normalization.arms import Plan
from grpo_jax.lab.studies.normalization.arms import config_of
from grpo_jax.run import bare
from grpo_jax.run.build import build
from grpo_jax.run.build import rewards as build_rewards

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
    settings, rise, of_inner = state
    step, of_inner = inner(settings).update(updates, of_inner, params)
    count = rise.count + 1
    rate = settings.rate * jnp.minimum(1, count / _RISE)
    after = settings, rise._replace(count=count), of_inner
    return jax.tree.map(lambda x: -rate * x, step), after

  return optax.GradientTransformationExtraArgs(init, update)


class _Trainer:
  """Trains arms; keeps the parts of a seed, and the compiled programs."""

  def __init__(self, plan: Plan):
    self._plan = plan
    self._updaters: dict[tuple[bool, str], Any] = {}
    self._run: build.Run | None = None

  def __call__(
    self, config: Config, arm: Arm, seed: int, params: Any
  ) -> Outcome:
    """Trains one arm from given parameters; see `sweeps.Sweep.train`."""
    if self._run is None or self._run.draw.seed != seed:
      self._run = build.run(config_of(config, arm, seed))
    of_kind = self._plan.optimizers[arm.optimizer]
    key = of_kind.adaptive, arm.method
    if key not in self._updaters:
      self._updaters[key] = build.updater(
        build.run(config_of(config, arm, seed)),
        lambda decays: adjustable(of_kind.adaptive, decays),
      )
    updater = self._updaters[key]
    # `init` donates its argument, and the next arm needs the parameters again.
    state = updater.compiled.init(jax.tree.map(jnp.copy, params))
    settings, *rest = state.opt_state
    given = Settings(arm.lr, *of_kind.settings)  # pyright: ignore
    # Added to what lies there, that they lie in the same place.
    settings = jax.tree.map(jnp.add, settings, given)
    state = state._replace(opt_state=(settings, *rest))
    run = self._run
    with build_rewards.workers(run.limits, run.rewards) as workers:
      run = run._replace(workers=workers)
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


def sweep(plan: Plan) -> sweeps.Sweep:
  """The runs of a plan."""

  def told(outcome):
    return (
      f'failure {outcome.failure:.3f}  last third {outcome.failure_last:.3f}'
    )

  return sweeps.Sweep(plan.name, plan.arms, Arm, Outcome, _Trainer(plan), told)


def run(
  config: Config,
  workdir: str | pathlib.Path,
  seeds: int = 5,
  steps: int = 30,
  only: Sequence[str] = (),
  plan: Plan = ARITHMETIC,
) -> tuple[dict[str, pages.Result], pathlib.Path]:
  """Does the runs that are not done yet, and gives a verdict on each claim.

  Args:
    config: What all arms share. An arm sets the loss, and the optimizer in
      place of `config.optim`.
    workdir: Directory of the study; its NAME.jsonl holds the outcomes, its
      folder `claims` the table of claims and the figure.
    seeds: See `sweeps.run`.
    steps: Rollouts of each run.
    only: Labels of the arms to run; empty: all arms. An optimizer of which some
      arm is left out has no verdict.
    plan: The optimizers and their rates.

  Returns:
    The result by the name of the study, and the folder of its files.

  Raises:
    ValueError: See `sweeps.run`.
  """
  begun = time.monotonic()
  outcomes = sweeps.run(sweep(plan), config, workdir, seeds, steps, only)
  numbers = verdicts.numbers(plan, outcomes)
  made = verdicts.experiment(plan)
  done = pages.Result(
    made, numbers, claims.check(made, numbers), time.monotonic() - begun
  )
  folder = pathlib.Path(workdir) / 'claims'
  pages.write({plan.name: done}, folder)
  return {plan.name: done}, folder


def show(summary: tuple[dict[str, pages.Result], pathlib.Path]) -> None:
  """Prints what `run` returned, for a person."""
  pages.show(*summary)


def to_json(
  summary: tuple[dict[str, pages.Result], pathlib.Path],
) -> dict[str, Any]:
  """What `run` returned, as JSON can hold it."""
  return pages.to_json(summary[0])
