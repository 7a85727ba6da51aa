"""`grpo-jax train`."""

import dataclasses
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax.commands import printing
from grpo_jax.commands import together
from grpo_jax.commands.arguments import Arguments
from grpo_jax.run.build import about
from grpo_jax.run.keep import host_memory


def run(arguments: Arguments) -> int:
  """Trains a model; returns the exit code."""
  config, workdir, stop = arguments.config, arguments.workdir, together.STOP
  steps = _step_range(arguments.profile_steps, config.steps)
  allowed = config_lib.check_allowed(arguments.allow_changed)
  if arguments.check:
    with together.joined(arguments) as peers:
      _check(arguments, peers.is_first)
    return 0
  is_first = together.join(arguments)
  with about.start(config, workdir, is_first) as screen:
    with screen.phase('loading JAX'):  # only now: it takes seconds
      from grpo_jax.run import loop
    result = loop.train(
      config,
      workdir,
      stop,
      arguments.replay,
      steps,
      screen=screen,
      allowed=allowed,
    )
  if is_first:
    result = {**result, 'peak_memory_gib': host_memory.peak_gib()}
    printing.show_json(
      {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in result.items()
      }
    )
  return 0 if stop.signal is None else 128 + stop.signal


def _check(arguments: Arguments, is_first: bool) -> None:
  """`grpo-jax train --check`."""
  with about.start(arguments.config, arguments.workdir, is_first) as screen:
    with screen.phase('loading JAX'):
      from grpo_jax.planning import dry_run
    with screen.phase('building, sampling and compiling, without training'):
      report = dry_run.inspect(
        arguments.config, arguments.workdir, arguments.allow_changed
      )
  (printing.show_json if arguments.json else show_check)(report)


def show_check(report: dict[str, Any]) -> None:
  """Prints what `dry_run.inspect` returned."""
  from rich import table

  rollout = report['first_rollout']
  samples = zip(
    rollout['prompts'],
    rollout['completions'],
    rollout['rewards'],
    strict=True,
  )
  now, usual = (
    config_lib.flat(values)
    for values in (report['config'], dataclasses.asdict(config_lib.Config()))
  )
  rows = {
    'config, where it differs from the defaults': {
      name: repr(value) for name, value in now.items() if value != usual[name]
    },
    'shapes': {name: str(value) for name, value in report['shapes'].items()},
    'memory of each device': {
      name: _size(gib) for name, gib in report['memory_gib'].items()
    },
    'first rollout, of the untrained model': {
      'mean reward': str(rollout['mean reward']),
      'not judged': str(rollout['not judged']),
      **{
        f'{name} failed': f'{number}, most often by: {reason}'
        for name, (number, reason) in rollout['failed'].items()
      },
      'truncated': f'{rollout["truncated"]:.1%}',
      **{
        f'sample {number}': f'{prompt!r} -> {text!r}  reward {reward:.3f}'
        for number, (prompt, text, reward) in enumerate(samples, start=1)
      },
    },
  }
  shown = []
  for title, lines in rows.items():
    made = table.Table(title=title, title_justify='left', show_header=False)
    for name, value in lines.items():
      made.add_row(name, value)
    shown.append(made)
  shown += [f'warning: {warning}' for warning in report['warnings']]
  printing.show(
    *shown, f'The workdir: {report["workdir"]}. Nothing was trained.'
  )


def _size(gib: float) -> str:
  """In GiB from 0.1 GiB on, and in MiB below."""
  return f'{gib:.2f} GiB' if gib >= 0.1 else f'{gib * 1024:.2f} MiB'


def _step_range(steps: tuple[int, ...], last: int) -> tuple[int, int]:
  """First and last step of a run that has `last`; (0, 0) for none."""
  if not steps:
    return 0, 0
  typed = f'--profile_steps={",".join(map(str, steps))}'
  if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
    raise ValueError(
      f'{typed} is no range; give the first and the last rollout, as in '
      '--profile_steps=3,5.'
    )
  if steps[0] > last:
    raise ValueError(
      f'{typed} begins behind the last rollout (config.steps={last}); give '
      'earlier ones.'
    )
  return steps[0], steps[1]
