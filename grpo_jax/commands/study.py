"""`grpo-jax study`: compares runs, or tests claims of two papers."""

import pathlib

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.lab import studies


def run(arguments: Arguments) -> None:
  """Does the study, and prints what has come of it."""
  is_experiment = studies.is_experiment(arguments.study)
  _experiment(arguments) if is_experiment else _train(arguments)


def _experiment(arguments: Arguments) -> None:
  from grpo_jax.lab.studies import pages
  from grpo_jax.lab.studies import papers

  out = pathlib.Path(arguments.out)
  found = papers.run(arguments.study, out, arguments.full, arguments.run)
  if arguments.json:
    printing.show_json(pages.verdicts_to_json(found))
  else:
    pages.show_told(found, out)


def _train(arguments: Arguments) -> None:
  from grpo_jax.lab.studies import sweeps

  study = studies.study(arguments.study)
  found = sweeps.conduct(
    study,
    arguments.config,
    arguments.workdir,
    arguments.seeds,
    arguments.steps,
    arguments.only,
  )
  if arguments.json:
    printing.show_json(study.to_json(found))
  else:
    study.show(found)
