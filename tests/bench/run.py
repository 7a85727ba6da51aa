"""Times grpo_jax and its peers in turns, each run in a process of its own.

python tests/bench/run.py --cases A,B,C,D,X,Y,R --peers tunix,trl
python tests/bench/run.py --restart --cases A,B

R is a case of random sizes, another one in each run; it is told as R with a
number, by which it can be had again. Before its turns, each peer tries some
numbers of micro-batches, and what grpo_jax sets for a CPU or not; it takes its
turns with what was fastest.

Prints Markdown: for each quantity a table of cases, what was tried, and what
grpo_jax uses of the machine's limits. The peers' environments are made when
missing. Nothing else should run on the machine meanwhile.
"""

import argparse
from collections.abc import Mapping
import datetime
import json
import math
import os
import pathlib
import platform
import resource
import secrets
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(ROOT)

from tests.bench import cases as cases_lib  # noqa: E402
from tests.bench import config as bench_config  # noqa: E402
from tests.bench import environments  # noqa: E402
from tests.bench import tables  # noqa: E402
from tests.bench import work  # noqa: E402

# What grpo_jax sets for itself, see commands/start.py.
ON_A_CPU = {
  'XLA_FLAGS': '--xla_backend_optimization_level=2',
  'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1',
}
SCRIPTS = {'grpo_jax': 'ours', 'tunix': 'peer_tunix', 'trl': 'peer_trl'}


def main() -> None:
  """Runs what the command line asks for, and prints it."""
  args = arguments()
  if args.restart:
    print(restart(args))
    return
  pythons = {'grpo_jax': sys.executable} | {
    peer: environments.python_of(peer, args.envs) for peer in args.peers
  }
  contenders = [
    *(tables.Contender('grpo_jax', dtype) for dtype in args.dtypes),
    *(tables.Contender(peer, 'float32') for peer in args.peers),
  ]
  limits = run(args, [sys.executable, HERE / 'limits.py'])
  if 'error' in limits:
    sys.exit(f'limits.py failed: {limits["error"]}')
  results, tried = {}, {}
  for name in args.cases:
    best = {}
    for contender in contenders[len(args.dtypes) :]:
      python = pythons[contender.framework]
      found = tries(args, python, name, contender)
      tried[name, contender] = found
      best[contender] = min(found, key=found.__getitem__)
    for turn in range(args.repeats):
      for contender in contenders:
        print(f'{name}, turn {turn + 1}: {contender}', file=sys.stderr)
        result = timed(
          args,
          pythons[contender.framework],
          name,
          contender,
          best.get(contender),
        )
        results.setdefault((name, contender), []).append(result)
        save(args.json, results, limits)
  print(report(results, contenders, limits, tried))


def arguments() -> argparse.Namespace:
  """What the command line says."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  words = lambda text: text.split(',') if text else []
  parser.add_argument('--cases', type=words, default=list(cases_lib.CASES))
  parser.add_argument('--peers', type=words, default=['tunix', 'trl'])
  parser.add_argument(
    '--dtypes',
    type=words,
    default=['float32'],
    help='of grpo_jax; the peers run in float32',
  )
  parser.add_argument('--steps', type=int, help='of each run; see cases.py')
  parser.add_argument(
    '--repeats', type=int, help='turns; 3, and 1 for a single case'
  )
  environments.add_arguments(parser, limit_secs=900.0)
  parser.add_argument(
    '--json', type=pathlib.Path, help='a file for all figures so far'
  )
  parser.add_argument(
    '--restart',
    action='store_true',
    help='time a cold and a warm start of each case instead',
  )
  args = parser.parse_args()
  drawn = f'R{secrets.randbelow(10**5)}'
  args.cases = [drawn if name == 'R' else name for name in args.cases]
  for name in args.cases:
    try:
      cases_lib.find(name)
    except ValueError as error:
      parser.error(str(error))
  for given, known in (
    (args.peers, environments.PACKAGES),
    (args.dtypes, work.FLOAT_BYTES),
  ):
    if unknown := set(given) - set(known):
      parser.error(f'{sorted(unknown)} is none of {", ".join(known)}')
  if tables.OURS.dtype not in args.dtypes:
    parser.error('ratios are to float32; name it in --dtypes too')
  if args.steps is not None and args.steps < 2:
    parser.error('the first step is apart; give --steps=2 or more')
  args.repeats = args.repeats or (1 if len(args.cases) == 1 else 3)
  return args


def tries(args, python, name: str, contender) -> dict[tables.Setting, float]:
  """Seconds of a step of a peer, with each setting; infinite where it fails."""
  settings = [
    *(tables.Setting(parts, True) for parts in cases_lib.find(name).parts),
    tables.Setting(1, False),
  ]
  few = {'steps': max(3, steps_of(args, name) // 3)}
  args = argparse.Namespace(**{**vars(args), **few})
  found = {}
  for setting in settings:
    print(f'{name}, tried: {contender}, {setting}', file=sys.stderr)
    result = timed(args, python, name, contender, setting)
    found[setting] = (
      math.inf if 'error' in result else tables.steady(result, 'step_secs')
    )
  return found


def steps_of(args, name: str) -> int:
  """Steps of a run of a case."""
  return args.steps or cases_lib.find(name).steps


def timed(
  args,
  python,
  name: str,
  contender,
  setting: tables.Setting | None = None,
  *more: str,
) -> tables.Result:
  """One run of one contender, of a peer with a setting; see `run`."""
  script = HERE / f'{SCRIPTS[contender.framework]}.py'
  case = cases_lib.find(name)
  if contender.framework == 'tunix' and case.pretrained:
    return {'error': 'peer_tunix.py has random models alone'}
  if contender.framework == 'trl' and case.pretrained:
    more = (*more, f'--weights={bench_config.pretrained(case)}')
  environment = {}
  if setting is not None:
    more = (*more, f'--parts={setting.parts}')
    environment = ON_A_CPU if setting.as_ours else {}
  return run(
    args,
    [
      python,
      script,
      f'--case={name}',
      f'--steps={steps_of(args, name)}',
      f'--dtype={contender.dtype}',
      *more,
    ],
    environment,
  )


def run(args, command, more: Mapping[str, str] = {}) -> tables.Result:
  """The JSON that a command prints last, or `{'error': why not}`.

  It may use the memory that is free now and no more, so that a case that is too
  large ends there and not in another process. Python keeps the bytecode of the
  checkout, as pip does for the installed peers.
  """
  free = available_bytes()
  environment = {**os.environ, 'PYTHONDONTWRITEBYTECODE': '', **more}

  def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (free, free))

  try:
    done = subprocess.run(
      command,
      capture_output=True,
      text=True,
      timeout=args.limit_secs,
      preexec_fn=limit_memory,
      cwd=ROOT,
      env=environment,
    )
  except subprocess.TimeoutExpired:
    return {'error': f'was stopped after {args.limit_secs:.0f} s'}
  lines = done.stdout.strip().splitlines()
  if done.returncode or not lines:
    last = (done.stderr.strip().splitlines() or ['no word on stderr'])[-1]
    return {'error': f'exit code {done.returncode}: {last[:300]}'}
  return json.loads(lines[-1])


def available_bytes() -> int:
  """Memory that a new process may take without a swap."""
  for line in pathlib.Path('/proc/meminfo').read_text().splitlines():
    name, value = line.split(':')
    if name == 'MemAvailable':
      return int(value.split()[0]) * 1024
  raise ValueError('/proc/meminfo has no line MemAvailable; run this on Linux.')


def save(path: pathlib.Path | None, results: tables.Results, limits) -> None:
  """Writes every figure so far, if there is a path."""
  if path is not None:
    runs = [
      {'case': case, 'contender': str(contender), 'turn': turn, **result}
      for (case, contender), turns in results.items()
      for turn, result in enumerate(turns, 1)
    ]
    path.write_text(json.dumps({'limits': limits, 'runs': runs}, indent=1))


def report(results: tables.Results, contenders, limits, tried) -> str:
  """Everything that is printed."""
  parts = [header(results, limits)]
  for quantity in tables.QUANTITIES:
    parts.append(tables.table(results, contenders, quantity))
  parts.append(tables.tried_table(tried))
  ours = [c for c in contenders if c.framework == 'grpo_jax']
  parts.append(tables.limits_table(results, ours, limits))
  if failed := tables.errors(results):
    parts.append(f'**Failed**\n\n{failed}')
  return '\n\n'.join(parts)


def header(results: tables.Results, limits) -> str:
  """When, where, and with what."""
  versions = {}
  for turns in results.values():
    for result in turns:
      versions |= result.get('versions', {})
  model = platform.processor() or platform.machine()
  for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
    if line.startswith('model name'):
      model = line.split(':')[1].strip()
  cores = len(os.sched_getaffinity(0))
  return (
    f'{datetime.date.today()}, {model}, {cores} cores, '
    f'Python {platform.python_version()}, '
    + ', '.join(f'{name} {version}' for name, version in versions.items())
    + '. The machine: '
    + ', '.join(f'{tables.number(v)} {k}' for k, v in limits.items())
    + '.'
  )


def restart(args) -> str:
  """First steps of each case, cold, and warm with what that has compiled."""
  keys = 'first_step_secs', 'process_to_first_step_secs'
  rows = [['case', 'start', 'first step, s from asking', 's from the process']]
  rows.append(['---'] * 4)
  for name in args.cases:
    with tempfile.TemporaryDirectory(prefix='grpo_jax_bench_cache_') as cache:
      for start in 'cold', 'warm':
        result = timed(
          args, sys.executable, name, tables.OURS, None, f'--cache={cache}'
        )
        if 'error' in result:
          cells = [result['error'], '-']
        else:
          cells = [tables.number(result[key]) for key in keys]
        rows.append([name, start, *cells])
  return tables.markdown(rows)


if __name__ == '__main__':
  main()
