"""`grpo-jax study EXPERIMENT|all`: runs it and prints the claims table."""

from collections.abc import Mapping
import pathlib
from typing import Any

from grpo_jax.studies import pages
from grpo_jax.studies import papers
from grpo_jax.studies import tables

_NOTES = """\
holds, fails: the whole 95 % interval of what was measured lies inside, or
outside, of what the claim expects. Exact numbers have no interval."""


def run(name: str, out: str, full: bool) -> dict[str, pages.Result]:
  """Does one experiment or all of them; see `papers.run`."""
  return papers.run(name, pathlib.Path(out), full)


def to_json(results: Mapping[str, pages.Result]) -> dict[str, Any]:
  """The claims and their verdicts; the numbers are in `claims.json`."""
  answer = pages.to_json(results)
  for one in answer.values():
    del one['numbers']
  return answer


def show(results: Mapping[str, pages.Result], out: str) -> None:
  """Prints a table of claims for each experiment.

  Args:
    results: What `run` returned.
    out: Where the files are.
  """
  shown = {}
  for done in results.values():
    experiment = done.experiment
    title = f'{experiment.label}: {experiment.title} ({done.seconds:.1f} s)'
    shown[title] = [pages.cells(row) for row in done.rows]
  counts = [
    f'{number} {kind}' for kind, number in pages.counts(results).items()
  ]
  files = f'{pathlib.Path(out) / "claims.html"}: {", ".join(counts)}.'
  tables.show(shown, f'{_NOTES}\n{files}')
