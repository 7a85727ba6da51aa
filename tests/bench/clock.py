"""What every framework under test is asked, and the line that it answers.

Plain Python: it is imported in environments that have nothing of ours.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import resource
import time

START = time.perf_counter()  # of the process: import this before heavy things


def parser(description: str | None) -> argparse.ArgumentParser:
  """The arguments that all frameworks take."""
  parser = argparse.ArgumentParser(description=description)
  parser.add_argument('--case', required=True, help='see `cases.find`')
  parser.add_argument('--steps', type=int, default=6)
  parser.add_argument('--dtype', default='float32', help='of the arithmetic')
  return parser


def peer_parser(description: str | None) -> argparse.ArgumentParser:
  """Those, and what is tried for peers alone."""
  found = parser(description)
  found.add_argument(
    '--parts', type=int, default=1, help='micro-batches of an update'
  )
  return found


@dataclasses.dataclass
class Clock:
  """Seconds of every part of every step, the first step included.

  Attributes:
    imported: When the imports were done.
    asked: When the first step was asked for.
    ends: When each step was done.
    sample_secs: Generation alone.
    update_secs: Reference scores and the update.
    tokens: Completion tokens that were sampled.
    peak_rss_mib: Most memory that the process has held until the last step.
  """

  imported: float = dataclasses.field(default_factory=time.perf_counter)
  asked: float = 0.0
  ends: list[float] = dataclasses.field(default_factory=list)
  sample_secs: list[float] = dataclasses.field(default_factory=list)
  update_secs: list[float] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)
  peak_rss_mib: int = 0

  def end_step(self) -> None:
    """A step is done: everything that it changed is ready."""
    self.ends.append(time.perf_counter())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    self.peak_rss_mib = peak // 1024

  def step_secs(self) -> list[float]:
    """From the end of each step to the end of the next."""
    return [b - a for a, b in zip([self.asked, *self.ends], self.ends)]

  def answer(self, framework: str, args, packages: tuple[str, ...]) -> str:
    """One line of JSON, for `run.py`.

    Args:
      framework: Its name in the tables.
      args: What `parser` parsed.
      packages: Whose versions to tell.

    Returns:
      Lists over steps `step_secs` (from the end of a step to the end of the
      next), `sample_secs`, `update_secs` and `tokens`; and single numbers.
    """
    told = {
      'framework': framework,
      'case': args.case,
      'dtype': args.dtype,
      'versions': {name: importlib.metadata.version(name) for name in packages},
      'step_secs': self.step_secs(),
      'sample_secs': self.sample_secs,
      'update_secs': self.update_secs,
      'tokens': self.tokens,
      'import_secs': self.imported - START,
      'first_step_secs': self.ends[0] - self.asked,
      'process_to_first_step_secs': self.ends[0] - START,
      'peak_rss_mib': self.peak_rss_mib,
    }
    return json.dumps(told)
