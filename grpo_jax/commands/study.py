"""`grpo-jax study`: compares runs, or tests claims of two papers."""

from collections.abc import Mapping
import pathlib
from typing import Any

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.lab import studies


def run(arguments: Arguments) -> None:
  """Does the study, and prints what has come of it."""
  name = arguments.study
  if studies.is_experiment(name):
    from grpo_jax.lab.studies import pages
    from grpo_jax.lab.studies import papers

    out = pathlib.Path(arguments.out)
    found = papers.run(name, out, arguments.full, arguments.run)
    to_json, show = _claims, lambda found: pages.show(found, out)
  else:
    study = studies.module(name)
    found = study.run(
      arguments.config,
      arguments.workdir,
      name=name,
      seeds=arguments.seeds,
      steps=arguments.steps,
      only=arguments.only,
    )
    to_json, show = study.to_json, study.show
  printing.show_json(to_json(found)) if arguments.json else show(found)


def _claims(results: Mapping[str, Any]) -> dict[str, Any]:
  """The claims and their verdicts; the numbers are in `claims.json`."""
  from grpo_jax.lab.studies import pages

  return {
    name: {key: value for key, value in one.items() if key != 'numbers'}
    for name, one in pages.to_json(results).items()
  }
