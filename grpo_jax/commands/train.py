"""`grpo-jax train`."""

from grpo_jax import monitor
from grpo_jax.commands import printing
from grpo_jax.commands import together
from grpo_jax.commands.arguments import Arguments
from grpo_jax.run import about
from grpo_jax.run.keep import host_memory


def run(arguments: Arguments) -> int:
  """Trains a model; returns the exit code."""
  config, workdir, stop = arguments.config, arguments.workdir, together.STOP
  steps = _step_range(arguments.profile_steps, config.steps)
  if arguments.check:
    with together.joined(arguments) as peers:
      _check(arguments, peers.is_first)
    return 0
  is_first = together.join(arguments)
  start = about.start if is_first else monitor.quiet
  with start(config, workdir) as screen:
    with screen.phase('loading JAX'):  # only now: it takes seconds
      from grpo_jax.run import loop
    result = loop.train(
      config, workdir, stop, arguments.replay, steps, screen=screen
    )
  if is_first:
    result = {**result, 'peak_memory_gib': host_memory.peak_gib()}
    printing.show_json(
      {
        name: value if value is None else round(value, 4)
        for name, value in result.items()
      }
    )
  return 0 if stop.signal is None else 128 + stop.signal


def _check(arguments: Arguments, is_first: bool) -> None:
  """`grpo-jax train --check`."""
  start = about.start if is_first else monitor.quiet
  with start(arguments.config, arguments.workdir) as screen:
    with screen.phase('loading JAX'):
      from grpo_jax.commands import dry_run
    with screen.phase('building, sampling and compiling, without training'):
      report = dry_run.inspect(arguments.config, arguments.workdir)
  (printing.show_json if arguments.json else dry_run.show)(report)


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
