"""Times grpo_jax on one case; prints one line of JSON.

python tests/bench/ours.py --case C --steps 4
"""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  from grpo_jax.commands import start

  start.prepare()  # as the command does

from tests.bench import clock as clock_lib  # noqa: E402  isort: skip

import jax  # noqa: E402

from grpo_jax import config as config_lib  # noqa: E402
from grpo_jax import engines  # noqa: E402
from grpo_jax.monitor import Monitor  # noqa: E402
from grpo_jax.run import loop  # noqa: E402
from tests.bench import config as bench_config  # noqa: E402


def main() -> None:
  """Trains, and says how long each part of each step took."""
  print(run(arguments()))


def run(args) -> str:
  """Trains, and returns what `Clock.answer` says of it."""
  clock = clock_lib.Clock()
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  measure(clock)
  with tempfile.TemporaryDirectory(prefix='grpo_jax_bench_') as folder:
    # Of its own, unless one is given: what an earlier run has compiled would
    # make the first step a warm one.
    cache = args.cache or f'{folder}/cache'
    jax.config.update('jax_compilation_cache_dir', cache)
    workdir, config = args.workdir or f'{folder}/run', config_of(args)
    clock.asked = time.perf_counter()
    loop.train(config, workdir, profile_steps=tuple(args.profile_steps))
  return clock.answer('grpo_jax', args, ('jax', 'flax', 'optax'))


def arguments(given=None):
  """What the command line says, or a list like it."""
  parser = clock_lib.parser(__doc__)
  parser.add_argument(
    '--cache', help="folder of JAX's compilation cache; default: a new one"
  )
  parser.add_argument('--workdir', help='is kept; without it a temporary one')
  parser.add_argument(
    '--profile_steps', type=int, nargs=2, default=(0, 0), metavar='STEP'
  )
  parser.add_argument(
    '--set', action='append', default=[], metavar='learner.micro_rows=2'
  )
  return parser.parse_args(given)


def config_of(args) -> config_lib.Config:
  """The config of the case, with what the command line changes."""
  config = bench_config.get_config(args.case)
  config.steps = args.steps
  config.model.compute_dtype = args.dtype
  for change in args.set:
    name, value = change.split('=', 1)
    with contextlib.suppress(json.JSONDecodeError):  # then it is a text
      value = json.loads(value)
    config.update_from_flattened_dict({name: value})
  return config_lib.resolve(config)


def measure(clock: clock_lib.Clock) -> None:
  """Puts clocks around what a step calls.

  A step ends when its metrics are written, which waits for the device. What
  `learn_secs` measures is that too.
  """
  write, generate = Monitor.write, engines.generate

  def write_timed(self, step, scalars, *rest):
    if step:  # 0 is what was known before the first
      clock.update_secs.append(scalars['learn_secs'])
      clock.end_step()
    return write(self, step, scalars, *rest)

  def generate_timed(*args):
    start = time.perf_counter()
    completions = generate(*args)
    clock.sample_secs.append(time.perf_counter() - start)
    clock.tokens.append(
      sum(len(one.ids) for group in completions for one in group)
    )
    return completions

  Monitor.write, engines.generate = write_timed, generate_timed


if __name__ == '__main__':
  main()
