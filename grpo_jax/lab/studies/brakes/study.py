"""Does the runs of the study, and keeps what each has measured.

A run is a few dozen rollouts with several updates each.
"""

from collections.abc import Sequence
import math
import pathlib
import statistics
import time
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import sweeps
from grpo_jax.lab.studies.brakes.arms import ARMS
from grpo_jax.lab.studies.brakes.arms import Arm
from grpo_jax.lab.studies.brakes.arms import config_of
from grpo_jax.lab.studies.brakes.summary import METRICS
from grpo_jax.lab.studies.brakes.summary import Outcome
from grpo_jax.lab.studies.brakes.summary import Summary
from grpo_jax.lab.studies.brakes.summary import summarise
from grpo_jax.lab.studies.brakes.verdicts import experiment
from grpo_jax.lab.studies.brakes.verdicts import numbers
from grpo_jax.run import bare
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import rewards as build_rewards

_COMPILING = 3  # rollouts at the start that compile; their time does not count


class Compared(NamedTuple):
  """What a study returns.

  Attributes:
    summary: The comparison of the arms.
    results: The verdict on each claim, by the name of the study.
    folder: Where the page of the claims is.
  """

  summary: Summary
  results: dict[str, pages.Result]
  folder: pathlib.Path


def run(
  config: Config,
  workdir: str | pathlib.Path,
  seeds: int = 3,
  steps: int = 30,
  only: Sequence[str] = (),
  arms: Sequence[Arm] = ARMS,
  name: str = 'brakes',
) -> Compared:
  """Does the runs that are not done yet, and compares all of them.

  Args:
    config: What all arms share. An arm sets the brake, the updates per rollout
      and the learning rate; the study sets the group (8 completions), the rise
      of the learning rate (5 rollouts) and how often overshoot is measured
      (every 5th rollout).
    workdir: Directory of the study; its NAME.jsonl holds the outcomes, its
      folder `claims` the table of claims and the figure.
    seeds: See `sweeps.run`.
    steps: Rollouts of each run.
    only: Labels of the arms to run and to show; empty: all arms.
    arms: The arms to choose from.
    name: Of the study.

  Returns:
    The comparison of these arms, seeds and steps.

  Raises:
    ValueError: See `sweeps.run`.
  """
  begun = time.monotonic()
  sweep = sweeps.Sweep(name, arms, Arm, Outcome, run_arm, _told)
  outcomes = sweeps.run(sweep, config, workdir, seeds, steps, only)
  return compared(name, outcomes, workdir, time.monotonic() - begun)


def compared(
  name: str,
  outcomes: Sequence[Outcome],
  workdir: str | pathlib.Path,
  secs: float = 0.0,
) -> Compared:
  """Compares runs that are done, and writes the page of the claims.

  Args:
    name: Of the study.
    outcomes: One per arm and seed.
    workdir: Directory of the study.
    secs: What the runs took.
  """
  made, found = experiment([one.arm for one in outcomes]), numbers(outcomes)
  results = {name: pages.Result(made, found, claims.check(made, found), secs)}
  folder = pathlib.Path(workdir) / 'claims'
  pages.write(results, folder)
  return Compared(summarise(outcomes), results, folder)


def _told(outcome: Outcome) -> str:
  return (
    f'reward {outcome.reward:.3f}  overshoot {outcome.overshoot:.3f}  '
    f'kl {outcome.kl_rollout:.3f}'
  )


def run_arm(config: Config, arm: Arm, seed: int, params: Any) -> Outcome:
  """Trains one arm from given parameters.

  Args:
    config: What all arms share; `steps` is the number of rollouts.
    arm: How to train.
    seed: Of the sampling and of the order of the prompts.
    params: The parameters to begin with; they are not changed.

  Returns:
    An `Outcome`.
  """
  run = build.run(config_of(config, arm, seed))
  with build_rewards.workers(run.limits, run.rewards) as workers:
    return _trained(run._replace(workers=workers), arm, seed, params)


def _trained(run: build.Run, arm: Arm, seed: int, params: Any) -> Outcome:
  """The outcome of a run that is built."""
  updater, records = build.updater(run), []
  # `init` donates its argument, and the next arm needs the parameters again.
  state = updater.compiled.init(jax.tree.map(jnp.copy, params))
  done = bare.trained(run, updater, state)
  for step, (_, scalars, secs, _) in enumerate(done):
    # Measuring overshoot takes time too, so the seconds of these rollouts are
    # kept apart.
    kind = 'secs_watched' if updater.spec.watches(step) else 'secs_per_update'
    records.append({**scalars, kind: secs / arm.updates})
  accuracy = sampling.evaluated(run, run.steps)['heldout_accuracy']
  return _outcome(arm, seed, records, accuracy)


def _outcome(
  arm: Arm, seed: int, records: list[dict[str, float]], accuracy: float | None
) -> Outcome:
  """The outcome of a run from its records, one for each rollout."""
  measured = {}
  for name in METRICS:
    values = [record[name] for record in records if name in record]
    measured[name] = float(np.mean(values)) if values else math.nan
  # Rounded up, so that even a run of one rollout has a last third.
  last = records[-math.ceil(len(records) / 3) :]
  secs = [
    record['secs_per_update']
    for record in records[_COMPILING:]
    if 'secs_per_update' in record
  ]
  measured |= {
    'reward_last': float(np.mean([record['reward'] for record in last])),
    'accuracy': math.nan if accuracy is None else accuracy,
    'secs_per_update': statistics.median(secs) if secs else math.nan,
  }
  return Outcome(arm, seed, len(records), **measured)
