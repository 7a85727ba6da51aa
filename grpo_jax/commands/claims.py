"""`grpo-jax study EXPERIMENT|all`: runs it and prints the claims table."""

from collections.abc import Mapping
import pathlib
from typing import Any

from grpo_jax.lab.studies import pages
from grpo_jax.lab.studies import papers


def run(name: str, out: str, full: bool) -> dict[str, pages.Result]:
  """Does one experiment or all of them; see `papers.run`."""
  return papers.run(name, pathlib.Path(out), full)


def to_json(results: Mapping[str, pages.Result]) -> dict[str, Any]:
  """The claims and their verdicts; the numbers are in `claims.json`."""
  answer = pages.to_json(results)
  for one in answer.values():
    del one['numbers']
  return answer


show = pages.show
