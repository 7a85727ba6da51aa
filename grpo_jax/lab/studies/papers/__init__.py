"""Experiments on the claims of two papers: `grpo-jax study NAME|all --out=DIR`.

The papers are Fontana et al. (arXiv 2601.05002) on what group-based methods
optimise, and Ge et al. (arXiv 2601.23135) on why GRPO normalises. A module has
the experiments on one subject, each with its claims, a function that measures,
one that reads from the numbers what the claims are about, and one that draws.
The optimizers, losses and audits are those that runs use.
"""

from collections.abc import Sequence
import importlib
import pathlib
import time

from grpo_jax.lab.studies import EXPERIMENTS
from grpo_jax.lab.studies import claims
from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import trained

__all__ = ('experiment', 'run')


def experiment(name: str) -> claims.Experiment:
  """The experiment of this name, one of `EXPERIMENTS`.

  >>> experiment('curvature').label
  'E8b'
  """
  # Only when it is asked for: some import JAX.
  module = importlib.import_module(f'{__name__}.{EXPERIMENTS[name]}')
  return module.EXPERIMENTS[name]


def run(
  name: str,
  out: pathlib.Path,
  full: bool = False,
  workdirs: Sequence[str] = (),
) -> dict[str, pages.Result]:
  """Does one experiment, or all, and writes their pages and figures.

  Args:
    name: One of `EXPERIMENTS`, or 'all'.
    out: Folder to write into; see `pages.write`.
    full: Take more seeds or longer runs, where an experiment has them.
    workdirs: Of studies that have trained runs; what these measured stands on
      the pages too. See `trained.read`.

  Returns:
    The results by name, those of the workdirs last. If an experiment fails or
    is interrupted, what was done before it is written all the same.

  Raises:
    OSError: The folder cannot be written to; before anything is measured.
    ValueError: A workdir cannot be used, see `trained.read`; likewise.
  """
  of_runs = trained.read(workdirs)
  pages.prepare(out)
  results = {}
  try:
    for one in EXPERIMENTS if name == 'all' else (name,):
      made, begun = experiment(one), time.monotonic()
      numbers = made.run(full)
      seconds = time.monotonic() - begun
      rows = claims.check(made, numbers)
      results[one] = pages.Result(made, numbers, rows, seconds)
  finally:
    if results:
      results |= of_runs
      pages.write(results, out, with_story=True)
  return results
