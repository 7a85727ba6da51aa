"""Does the runs of the study, and keeps what each has measured.

Every arm of a seed begins with the parameters of the same warm-up and sees the
same prompts. A run is a few dozen rollouts with several updates each. What it
measured is one line of `brakes.jsonl` in the workdir; a run that has its line
is not done again, so an interrupted study goes on where it was.
"""

from collections.abc import Sequence
import dataclasses
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config import Config
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.studies import runs
from grpo_jax.studies.brakes.arms import ARMS
from grpo_jax.studies.brakes.arms import Arm
from grpo_jax.studies.brakes.arms import config_of
from grpo_jax.studies.brakes.summary import METRICS
from grpo_jax.studies.brakes.summary import Outcome
from grpo_jax.studies.brakes.summary import Summary
from grpo_jax.studies.brakes.summary import summarise
from grpo_jax.studies.tables import without_nan
from grpo_jax.training import build
from grpo_jax.training import build_rewards
from grpo_jax.training import build_updater
from grpo_jax.training import loop
from grpo_jax.training import workdir as workdir_lib

_COMPILING = 3  # rollouts at the start that compile; their time does not count


def run(
  config: Config,
  workdir: str | pathlib.Path,
  seeds: int = 3,
  steps: int = 30,
  only: Sequence[str] = (),
  arms: Sequence[Arm] = ARMS,
) -> Summary:
  """Does the runs that are not done yet, and compares all of them.

  Args:
    config: What all arms share. An arm sets the brake, the updates per rollout
      and the learning rate; the study sets the group (8 completions), the rise
      of the learning rate (5 rollouts) and how often overshoot is measured
      (every 5th rollout).
    workdir: Directory of the study; its `brakes.jsonl` holds the outcomes.
    seeds: How many runs of each arm; their seeds count up from `config.seed`.
    steps: Rollouts of each run.
    only: Labels of the arms to run and to show; empty: all arms.
    arms: The arms to choose from.

  Returns:
    The `Summary` of these arms, seeds and steps.

  Raises:
    ValueError: A label is unknown, there is less than one seed or rollout, or
      the workdir holds a study of another config; the sentence says what to do.
  """
  for name, number in (('seeds', seeds), ('steps', steps)):
    if number < 1:
      raise ValueError(f'--{name}={number} asks for none; give 1 or more.')
  known = {arm.label: arm for arm in arms}
  if unknown := [label for label in only if label not in known]:
    raise ValueError(
      f'--only has {", ".join(unknown)}, which is no arm; the arms are: '
      f'{", ".join(known)}.'
    )
  chosen = [known[label] for label in known if not only or label in only]
  workdir = pathlib.Path(workdir).absolute()
  config = dataclasses.replace(config, steps=steps)
  with workdir_lib.claimed(workdir, config), runs.compiled_once():
    # Not anew: nothing that an earlier start has left is moved away.
    workdir_lib.record(workdir, config, anew=False)
    file = workdir / 'brakes.jsonl'
    # Seed by seed, so that an interrupted study has whole seeds to compare.
    wanted = [
      (arm, seed)
      for seed in range(config.seed, config.seed + seeds)
      for arm in chosen
    ]
    _run_all(config, wanted, workdir, file)
    done = _read(file, steps)
  return summarise(done[one] for one in wanted)


def _run_all(
  config: Config,
  wanted: Sequence[tuple[Arm, int]],
  workdir: pathlib.Path,
  file: pathlib.Path,
) -> None:
  """Does the runs that the file lacks, and prints a line after each."""
  done = _read(file, config.steps)
  # Parameters of one seed alone are held, since its arms are run in a row.
  warmed: dict[int, Any] = {}
  for number, (arm, seed) in enumerate(wanted, start=1):
    if (arm, seed) in done:
      continue
    if seed not in warmed:
      of_seed = dataclasses.replace(config, seed=seed)
      warmed = {seed: runs.warmed_up(of_seed, workdir)}
    outcome, secs = loop.timed(run_arm, config, arm, seed, warmed[seed])
    line = without_nan(dataclasses.asdict(outcome))
    # Appended at once: an interruption loses only the run that is under way.
    with file.open('a') as lines:
      lines.write(json.dumps(line) + '\n')
    print(
      f'{number}/{len(wanted)}  {arm.label}  seed {seed}  '
      f'reward {outcome.reward:.3f}  overshoot {outcome.overshoot:.3f}  '
      f'kl {outcome.kl_rollout:.3f}  {secs:.0f} s',
      file=sys.stderr,
      flush=True,
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
  with build_rewards.workers(run.config, run.rewards) as workers:
    return _trained(run._replace(workers=workers), arm, seed, params)


def _trained(run: build.Run, arm: Arm, seed: int, params: Any) -> Outcome:
  """The outcome of a run that is built."""
  config = run.config
  update, prompt_state, records = build_updater.updater(run), PromptState(), []
  # `init` donates its argument, and the next arm needs the parameters again.
  state = update.init(jax.tree.map(jnp.copy, params))
  run.engine.load(update.whole(state.params), version=0)
  for step in range(config.steps):
    rollout, prompt_state, _ = loop.sampled(run, prompt_state, step)
    (state, scalars), secs = loop.timed(
      loop.learn, update, state, rollout, step, None
    )
    run.engine.load(update.whole(state.params), version=step + 1)
    # Measuring overshoot takes time too, so the seconds of these rollouts are
    # kept apart.
    kind = 'secs_watched' if update.watches(step) else 'secs_per_update'
    records.append({**scalars, kind: secs / arm.updates})
  accuracy = loop.evaluated(run, config.steps)['heldout_accuracy']
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


def _read(file: pathlib.Path, steps: int) -> dict[tuple[Arm, int], Outcome]:
  """The outcomes in a file of runs with this many rollouts, by arm and seed."""
  found = {}
  lines = file.read_text().splitlines() if file.exists() else []
  for number, line in enumerate(lines, start=1):
    try:
      outcome = _outcome_of(json.loads(line))
    except (
      AttributeError, KeyError, TypeError, ValueError, RecursionError
    ) as error:  # fmt: skip
      raise ValueError(
        f'Line {number} of {file} is no outcome of this study ({error}); '
        'remove the line, and its run is done again.'
      ) from error
    if outcome.steps == steps:
      found[outcome.arm, outcome.seed] = outcome
  return found


def _outcome_of(line: Any) -> Outcome:
  """The outcome that was written as this JSON."""
  values: Any = {k: math.nan if v is None else v for k, v in line.items()}
  arm = values.pop('arm')
  arm = Arm(arm['brake'], arm['updates'], arm['lr'])
  return Outcome(arm, **values)
