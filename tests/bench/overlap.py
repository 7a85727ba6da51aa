"""What share of a step compiled code takes; the rest is the host alone.

python tests/bench/overlap.py B S

Trains on each case, and records two rollouts with the JAX profiler. A line of
the table is a rollout: from the first to the last event of the record, and the
part of it in which at least one compiled program runs. The profiler records
Python's calls too, and slows them, so the share is rather higher without it.
Nothing else should run on the machine meanwhile.
"""

from collections.abc import Iterable
from collections.abc import Iterator
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

STEPS = 3, 4  # what is compiled is compiled in the first two
HEAD = 'case', 'rollout', 'seconds', 'in compiled code'
_PROGRAM = 'ThunkExecutor::Execute (wait for completion)'  # as XLA names it

Span = tuple[float, float]  # begin and end, ns


def main() -> None:
  """Prints the table."""
  lines = [HEAD, ['---'] * len(HEAD)]
  for case in sys.argv[1:] or ('B', 'S'):
    for step, (whole, compiled) in recorded(case).items():
      cells = case, str(step), f'{whole:.3g}', f'{compiled / whole:.1%}'
      lines.append(cells)
      print(*cells, file=sys.stderr, flush=True)
  print(tables.markdown(lines))


def recorded(case: str) -> dict[int, tuple[float, float]]:
  """By rollout its seconds, and those in compiled code."""
  with tempfile.TemporaryDirectory(prefix='grpo_jax_bench_') as folder:
    last = str(STEPS[1] + 1)  # which also saves, and so is not recorded
    given = ['--case', case, '--steps', last, '--workdir', folder]
    steps = map(str, STEPS)
    ours.run(ours.arguments([*given, '--profile_steps', *steps]))
    found = {}
    for step in range(STEPS[0], STEPS[1] + 1):
      place = pathlib.Path(folder, 'profile', f'step_{step}')
      (file,) = place.rglob('*.xplane.pb')
      spans = dict(spans_of(file))
      whole = max(end for _, end in spans['all']) - min(
        begin for begin, _ in spans['all']
      )
      found[step] = whole / 1e9, covered(spans['programs']) / 1e9
    return found


def spans_of(file: pathlib.Path) -> Iterator[tuple[str, list[Span]]]:
  """All events of the host, and those that are whole programs."""
  events = [
    (event.name, (event.start_ns, event.start_ns + event.duration_ns))
    for plane in ProfileData.from_file(str(file)).planes
    if plane.name == '/host:CPU'
    for line in plane.lines
    for event in line.events
  ]
  yield 'all', [span for _, span in events]
  yield 'programs', [span for name, span in events if name == _PROGRAM]


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
