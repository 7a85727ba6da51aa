"""The study of brakes: what each does to the overshoot of clipped tokens.

Every arm of a seed begins with the same warm-up and sees the same prompts; a
run is a few dozen rollouts with several updates each. What a run has measured
is a line of `brakes.jsonl` in the workdir, and no run is done twice.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np

from grpo_jax import build
from grpo_jax import loop
from grpo_jax import monitor
from grpo_jax import warm_up
from grpo_jax import workdir as workdir_lib
from grpo_jax.config import Config
from grpo_jax.config import Log
from grpo_jax.resample import Supply
from grpo_jax.studies._summary import METRICS
from grpo_jax.studies._summary import Arm
from grpo_jax.studies._summary import Outcome
from grpo_jax.studies._summary import Summary
from grpo_jax.studies._summary import summarise
from grpo_jax.studies._summary import without_nan

_GROUP = 8  # completions per prompt
_RISE = 5  # rollouts of the learning rate's linear rise
_MEASURED_EVERY = 5  # rollouts
_COMPILING = 3  # rollouts at the start whose time is not counted
_LOSSES = {  # brakes that are losses; the others are of config.optim
  'narrow': 'grpo_jax.losses.contrib:coasting_grpo',
  'rollback': 'grpo_jax.losses.contrib:rollback_grpo',
}

# The base is the first. At further learning rates, and with half the updates,
# so that an arm without a brake can be found that moves as little.
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


def brakes(
  config: Config,
  workdir: str | pathlib.Path,
  seeds: int = 3,
  steps: int = 30,
  only: Sequence[str] = (),
  arms: Sequence[Arm] = ARMS,
) -> Summary:
  """Does the runs that are not done yet, and sums all of them up.

  Args:
    config: What all arms share; the arms say the brake, the updates and the
      learning rate, and this study the group (8), the rise of the learning rate
      (5 rollouts) and how often overshoot is measured (every 5th rollout).
    workdir: Its `brakes.jsonl` has the outcomes; an interrupted study goes on.
    seeds: Runs of each arm, with the seeds from `config.seed` on.
    steps: Rollouts of each run.
    only: Labels of the arms to run and to show; empty: all.
    arms: To choose from.

  Returns:
    The `Summary` of these arms, seeds and steps.

  Raises:
    ValueError: An unknown label, less than one seed or rollout, or a workdir of
      another config; the sentence says what to do.
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
  workdir = pathlib.Path(workdir)
  config = dataclasses.replace(config, steps=steps)
  with workdir_lib.claimed(workdir, config), _compiled_once():
    workdir_lib.record(workdir, config, anew=False)
    file = workdir / 'brakes.jsonl'
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
  """Does what is missing in the file, and says so line by line."""
  done = _read(file, config.steps)
  warmed: dict[int, Any] = {}  # the parameters of one seed
  for number, (arm, seed) in enumerate(wanted, start=1):
    if (arm, seed) in done:
      continue
    if seed not in warmed:
      warmed = {seed: _warm_up(dataclasses.replace(config, seed=seed), workdir)}
    outcome, secs = loop.timed(run_arm, config, arm, seed, warmed[seed])
    line = without_nan(dataclasses.asdict(outcome))
    with file.open('a') as lines:
      lines.write(json.dumps(line) + '\n')
    print(
      f'{number}/{len(wanted)}  {arm.label}  seed {seed}  '
      f'reward {outcome.reward:.3f}  overshoot {outcome.overshoot:.3f}  '
      f'kl {outcome.kl_rollout:.3f}  {secs:.0f} s',
      file=sys.stderr,
      flush=True,
    )


def _warm_up(config: Config, workdir: pathlib.Path) -> Any:
  """The parameters that all arms of a seed begin with."""
  place = workdir / f'seed_{config.seed}'
  silent = Log(display='none', tensorboard=False)
  with monitor.Monitor(silent, place, 0, None, {}) as shown:
    return warm_up.run(build.run(config), place, shown, lambda: False)


def config_of(config: Config, arm: Arm, seed: int) -> Config:
  """The config of one run."""
  optimizer = dataclasses.replace(
    config.optim,
    lr=arm.lr,
    warmup_steps=_RISE * arm.updates,
    brake='none' if arm.brake in _LOSSES else arm.brake,
    overshoot_every_steps=_MEASURED_EVERY,
  )
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


def run_arm(config: Config, arm: Arm, seed: int, params: Any) -> Outcome:
  """Trains one arm.

  Args:
    config: What all arms share; `steps` is the number of rollouts.
    arm: How to train.
    seed: Of the sampling and of the order of the prompts.
    params: To begin with; left as they are.

  Returns:
    An `Outcome`.
  """
  run = build.run(config_of(config, arm, seed))
  update, supply, records = build.updater(run), Supply(), []
  state = update.compiled.init(jax.tree.map(jnp.copy, params))
  run.engine.load(state.params, version=0)
  for step in range(config.steps):
    rollout, supply, _ = loop.sampled(run, supply, step)
    (state, scalars), secs = loop.timed(
      loop.learn, update, state, rollout, step
    )
    run.engine.load(state.params, version=step + 1)
    kind = 'secs_watched' if update.watches(step) else 'secs_per_update'
    records.append({**scalars, kind: secs / arm.updates})
  accuracy = loop.heldout_accuracy(run, config.steps)
  return _outcome(arm, seed, records, accuracy)


def _outcome(
  arm: Arm, seed: int, records: list[dict[str, float]], accuracy: float | None
) -> Outcome:
  """What the rollouts of a run have measured, one record each."""
  measured = {}
  for name in METRICS:
    values = [record[name] for record in records if name in record]
    measured[name] = float(np.mean(values)) if values else math.nan
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
  """The outcomes of runs of so many rollouts in a file, by arm and seed."""
  found = {}
  lines = file.read_text().splitlines() if file.exists() else []
  for number, line in enumerate(lines, start=1):
    try:
      outcome = _outcome_of(json.loads(line))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      raise ValueError(
        f'Line {number} of {file} is no outcome of this study ({error}); '
        'remove the line, and its run is done again.'
      ) from error
    if outcome.steps == steps:
      found[outcome.arm, outcome.seed] = outcome
  return found


def _outcome_of(line: Any) -> Outcome:
  """What was written as a line."""
  values: Any = {k: math.nan if v is None else v for k, v in line.items()}
  arm = values.pop('arm')
  arm = Arm(arm['brake'], arm['updates'], arm['lr'])
  return Outcome(arm, **values)


@contextlib.contextmanager
def _compiled_once() -> Iterator[None]:
  """Compiles the same program once for all seeds.

  In JAX's cache on disk, in a temporary directory unless it has one. The
  learning rate is part of a program, the seed is not.
  """
  before = {
    name: getattr(jax.config, name)
    for name in (
      'jax_compilation_cache_dir',
      'jax_persistent_cache_min_compile_time_secs',
    )
  }
  if before['jax_compilation_cache_dir']:
    yield
    return
  with tempfile.TemporaryDirectory() as directory:
    for name, value in zip(before, (directory, 0), strict=True):
      jax.config.update(name, value)
    compilation_cache.reset_cache()  # else it is too late for this process
    try:
      yield
    finally:
      for name, value in before.items():
        jax.config.update(name, value)
      compilation_cache.reset_cache()
