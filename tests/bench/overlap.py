"""What share of a step compiled code takes; the rest is the host alone.

python tests/bench/overlap.py B S

Trains on each case, and records two rollouts with the JAX profiler. A line of
the table is a rollout: from the first event of the record to its end, and the
part of it in which at least one compiled program runs. The profiler records
Python's calls too, and slows them, so the share is rather higher without it.
Nothing else should run on the machine meanwhile.
"""

from collections.abc import Iterable
import os
import pathlib
import sys
import tempfile

if __name__ == '__main__':  # else the folder of this file comes first
  sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')

from jax.profiler import ProfileData  # noqa: E402

from tests.bench import ours  # noqa: E402
from tests.bench import tables  # noqa: E402

STEPS = 6, 7  # what is compiled is mostly compiled before
HEAD = 'case', 'rollout', 'seconds', 'in compiled code'
_PROGRAM = 'ThunkExecutor::Execute'  # how XLA's names for a program begin
_END = ' stop_trace'

Span = tuple[float, float]  # begin and end, ns


def main() -> None:
  """Prints the table."""
  lines = [HEAD, ['---'] * len(HEAD)]
  with tempfile.TemporaryDirectory(prefix='grpo_jax_bench_') as folder:
    for case in sys.argv[1:] or ('B', 'S'):
      for step, (whole, compiled) in recorded(case, folder).items():
        cells = case, str(step), f'{whole:.3g}', f'{compiled / whole:.1%}'
        lines.append(cells)
        print(*cells, file=sys.stderr, flush=True)
  print(tables.markdown(lines))


def recorded(case: str, folder: str) -> dict[int, tuple[float, float]]:
  """By rollout its seconds, and those in compiled code."""
  workdir, (first, last) = f'{folder}/{case}', STEPS
  # One more rollout, which also saves, and so is not recorded.
  given = ['--case', case, '--steps', str(last + 1), '--workdir', workdir]
  given += ['--cache', f'{folder}/cache']
  given += ['--profile_steps', str(first), str(last)]
  ours.run(ours.arguments(given))
  found = {}
  for step in range(first, last + 1):
    place = pathlib.Path(workdir, 'profile', f'step_{step}')
    (file,) = place.rglob('*.xplane.pb')
    events = events_of(file)
    begins = min(begin for _, (begin, _) in events)
    # The profiler records how it is ended, too.
    ends = min(begin for name, (begin, _) in events if _END in name)
    programs = [span for name, span in events if name.startswith(_PROGRAM)]
    found[step] = (ends - begins) / 1e9, covered(programs) / 1e9
  return found


def events_of(file: pathlib.Path) -> list[tuple[str, Span]]:
  """All events of the host, with their names."""
  return [
    (event.name, (event.start_ns, event.start_ns + event.duration_ns))
    for plane in ProfileData.from_file(str(file)).planes
    if plane.name == '/host:CPU'
    for line in plane.lines
    for event in line.events
  ]


def covered(spans: Iterable[Span]) -> float:
  """How much of the line the spans cover together.

  >>> covered([(0, 2), (1, 3), (5, 6)])
  4.0
  """
  total, reached = 0.0, float('-inf')
  for begin, end in sorted(spans):
    total += max(0.0, end - max(begin, reached))
    reached = max(reached, end)
  return total


if __name__ == '__main__':
  main()
