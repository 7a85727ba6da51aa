"""Studies of many runs: every arm with every seed, and on where they stopped.

An arm is one way to train, a frozen dataclass with a `label`. Every arm of a
seed begins with the parameters of the same warm-up and sees the same prompts.
What a run measured is its outcome, a frozen dataclass that begins with `arm`,
`seed` and `steps`. It is one line of a file in the workdir. A run that has its
line is not done again, so an interrupted study goes on where it was.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from typing import Any
from typing import NamedTuple

from grpo_jax.config import Config
from grpo_jax.config import plain_text
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.run import bare
from grpo_jax.run.keep import workdir as workdir_lib


class Sweep(NamedTuple):
  """What a study of arms and seeds consists of.

  Attributes:
    name: Of the study. Its file is NAME.jsonl.
    arms: The arms to choose from, in the order in which they are run.
    arm: The type of an arm.
    outcome: The type of an outcome.
    train: `(config, arm, seed, params) -> outcome`. Trains one arm from given
      parameters, which it does not change; `config.steps` rollouts.
    progress: What the line of progress says of an outcome.
    check: Raises a ValueError about a config that the study cannot use.
  """

  name: str
  arms: Sequence[Any]
  arm: type
  outcome: type
  train: Callable[..., Any]
  progress: Callable[[Any], str]
  check: Callable[[Config], None] = lambda config: None


class Done(NamedTuple):
  """A run that is done.

  Attributes:
    outcome: What it measured.
    secs: What it took; NaN if its line does not say, as of earlier code.
  """

  outcome: Any
  secs: float


class Study(NamedTuple):
  """Arms and seeds, and what their outcomes say.

  Attributes:
    sweep: The runs.
    experiment: Claims on all of its arms.
    numbers: From outcomes to what `experiment.measure` reads.
    summary: From outcomes to what is shown of them beside the claims.
    show: Prints what `conduct` returns, for a person.
    to_json: Makes it a dict that JSON can hold.
  """

  sweep: Sweep
  experiment: claims.Experiment
  numbers: Callable[[Sequence[Any]], dict[str, Any]]
  summary: Callable[[Sequence[Any]], Any] = lambda outcomes: None
  show: Callable[[pages.Judged], None] = pages.show_judged
  to_json: Callable[[pages.Judged], dict[str, Any]] = pages.judged_to_json


def conduct(
  study: Study,
  config: Config,
  workdir: str | pathlib.Path,
  seeds: int,
  steps: int,
  only: Sequence[str] = (),
) -> pages.Judged:
  """Does the runs that are not done yet, and gives a verdict on each claim.

  Args:
    study: What is run, and what is claimed. A claim on an arm that is left out
      has no verdict, or is not made.
    config: See `run`.
    workdir: See `run`; its folder `claims` gets the pages.
    seeds: See `run`.
    steps: See `run`.
    only: See `run`.

  Returns:
    See `judge`.

  Raises:
    ValueError: See `run`.
  """
  done = run(study.sweep, config, workdir, seeds, steps, only)
  outcomes, secs = zip(*done, strict=True)
  return judge(study, outcomes, workdir, sum(secs))


def judge(
  study: Study,
  outcomes: Sequence[Any],
  workdir: str | pathlib.Path,
  seconds: float = math.nan,
) -> pages.Judged:
  """Gives a verdict on each claim, and writes the pages.

  Args:
    study: What is claimed.
    outcomes: One per arm and seed.
    workdir: Of the study; its folder `claims` gets the pages.
    seconds: That the runs took, in whatever starts of the study; NaN if that is
      not known.
  """
  numbers = study.numbers(outcomes)
  experiment = claims.asked(study.experiment, numbers)
  rows = claims.check(experiment, numbers)
  results = {study.sweep.name: pages.Result(experiment, numbers, rows, seconds)}
  folder = pathlib.Path(workdir) / 'claims'
  pages.write(results, folder)
  return pages.Judged(results, folder, study.summary(outcomes))


def run(
  sweep: Sweep,
  config: Config,
  workdir: str | pathlib.Path,
  seeds: int,
  steps: int,
  only: Sequence[str] = (),
) -> list[Done]:
  """Does the runs that are not done yet.

  Args:
    sweep: The study.
    config: What all arms share.
    workdir: Directory of the study.
    seeds: How many runs of each arm; their seeds count up from `config.seed`.
    steps: Rollouts of each run.
    only: Labels of the arms to run; empty: all arms.

  Returns:
    The runs of these arms, seeds and steps, seed by seed.

  Raises:
    ValueError: A label is unknown, there is less than one seed or rollout, the
      study cannot use the config, or the workdir holds a study of another one;
      the sentence says what to do.
  """
  for name, number in (('seeds', seeds), ('steps', steps)):
    if number < 1:
      raise ValueError(f'--{name}={number} asks for none; give 1 or more.')
  if config.sampler.ahead:
    raise ValueError(
      f'sampler.ahead={config.sampler.ahead} in a study, whose runs sample and '
      'learn in turn; give sampler.ahead=0.'
    )
  sweep.check(config)
  known = {arm.label: arm for arm in sweep.arms}
  if unknown := [label for label in only if label not in known]:
    raise ValueError(
      f'--only has {", ".join(unknown)}, which is no arm; the arms are: '
      f'{", ".join(known)}.'
    )
  chosen = [known[label] for label in known if not only or label in only]
  workdir = pathlib.Path(workdir).absolute()
  config = dataclasses.replace(config, steps=steps)
  with workdir_lib.claimed(workdir, config):
    # Not anew: nothing that an earlier start has left is moved away.
    workdir_lib.record(workdir, config, anew=False)
    _end_last_line(_file(sweep, workdir))
    # Seed by seed, so that an interrupted study has whole seeds to compare.
    wanted = [
      (arm, seed)
      for seed in range(config.seed, config.seed + seeds)
      for arm in chosen
    ]
    _run_all(sweep, config, wanted, workdir)
    done = read(sweep, workdir, steps)
  return [done[one] for one in wanted]


def _run_all(
  sweep: Sweep,
  config: Config,
  wanted: Sequence[tuple[Any, int]],
  workdir: pathlib.Path,
) -> None:
  """Does the runs that the file lacks, and prints a line after each."""
  done = read(sweep, workdir, config.steps)
  # Parameters of one seed alone are held, since its arms are run in a row.
  warmed: dict[int, Any] = {}
  for number, (arm, seed) in enumerate(wanted, start=1):
    if (arm, seed) in done:
      continue
    if seed not in warmed:
      seeded = dataclasses.replace(config, seed=seed)
      warmed = {seed: bare.warmed_up(seeded, workdir)}
    begun = time.monotonic()
    outcome = sweep.train(config, arm, seed, warmed[seed])
    secs = time.monotonic() - begun
    line = pages.without_nan(dataclasses.asdict(outcome))
    line['secs'] = round(secs, 1)
    # Appended at once: an interruption loses only the run that is under way.
    with _file(sweep, workdir).open('a') as lines:
      lines.write(json.dumps(line) + '\n')
    print(
      f'{number}/{len(wanted)}  {plain_text.printable(arm.label)}  '
      f'seed {seed}  {sweep.progress(outcome)}  {secs:.0f} s',
      file=sys.stderr,
      flush=True,
    )


def _end_last_line(file: pathlib.Path) -> None:
  """Removes half a line, which an interruption has left at the end."""
  text = file.read_text() if file.exists() else ''
  whole, newline, rest = text.rpartition('\n')
  if not rest:
    return
  try:
    json.loads(rest)
  except ValueError:
    # In place: a full disk must not take the lines before it.
    os.truncate(file, len((whole + newline).encode()))
    print(
      plain_text.printable(
        f'The last line of {file} was cut off; its run is done again.'
      ),
      file=sys.stderr,
    )
  else:
    with file.open('a') as lines:
      lines.write('\n')


def _file(sweep: Sweep, workdir: pathlib.Path) -> pathlib.Path:
  return workdir / f'{sweep.name}.jsonl'


def read(
  sweep: Sweep, workdir: pathlib.Path, steps: int
) -> dict[tuple[Any, int], Done]:
  """The runs with this many rollouts so far, by arm and seed.

  Raises:
    ValueError: A line of the file is no outcome of this study.
  """
  found, file = {}, _file(sweep, workdir)
  lines = file.read_text().splitlines() if file.exists() else []
  for number, line in enumerate(lines, start=1):
    try:
      fields = json.loads(line)
      secs = float(fields.pop('secs', math.nan))
      outcome = outcome_of(sweep.arm, sweep.outcome, fields)
    except (
      AttributeError, KeyError, TypeError, ValueError, RecursionError
    ) as error:  # fmt: skip
      raise ValueError(
        f'Line {number} of {file} is no outcome of this study ({error}); '
        'remove the line, and its run is done again.'
      ) from error
    if outcome.steps == steps:
      found[outcome.arm, outcome.seed] = Done(outcome, secs)
  return found


def outcome_of(arm_type: type, type_: type, line: Mapping[str, Any]) -> Any:
  """The outcome that was written as this JSON.

  Args:
    arm_type: See `Sweep.arm`.
    type_: See `Sweep.outcome`.
    line: Its fields; None stands for NaN.
  """
  values: dict[str, Any] = claims.known(line)
  arm = values.pop('arm')
  given = [field.name for field in dataclasses.fields(arm_type) if field.init]
  return type_(arm_type(**{name: arm[name] for name in given}), **values)
