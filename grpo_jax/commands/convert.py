"""`grpo-jax convert`: a model as a Hugging Face folder."""

import json
import os
import pathlib

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.data import hub
from grpo_jax.lab.report import read
from grpo_jax.run import export
from grpo_jax.run.build import card
from grpo_jax.run.keep import metrics_file

_UNFINISHED = '.push_again.json'  # in a folder that is not pushed yet


def run(arguments: Arguments) -> None:
  """`grpo-jax convert`."""
  to, public = arguments.push, arguments.public
  if to:  # before the model is read
    to = hub.check_push(to, public, arguments.overwrite)
  elif public or arguments.overwrite:
    flag = '--public' if public else '--overwrite'
    raise ValueError(f'{flag} is of what is pushed; give --push=owner/name.')
  folder = pathlib.Path(arguments.folder).expanduser()
  done = _unfinished(folder, arguments) if to else None
  if done is None:
    done = export.convert(
      arguments.source,
      arguments.folder,
      arguments.checkpoint,
      arguments.dtype,
      arguments.shard_gb,
      arguments.adapter,
    )
  pushed = {}
  if to:
    pushed['pushed'] = _push(folder, to, done, arguments)
  if arguments.json:
    printing.show_json(done._asdict() | pushed)
    return
  show(done)
  if to:
    printing.say(f'pushed to {pushed["pushed"]}')


def _push(
  folder: pathlib.Path, to: str, done: export.Written, arguments: Arguments
) -> str:
  """Pushes what was written, with a card; the address of the commit."""
  run = None if done.checkpoint is None else read.run(arguments.source)
  card.write(
    folder,
    to,
    run and run.config,
    run.metrics if run else metrics_file.NONE,
    done.checkpoint,
    arguments.adapter,
    '' if run else arguments.source,
  )
  mark = folder / _UNFINISHED
  asked = {'asked': _asked(arguments), 'written': done._asdict()}
  mark.write_text(json.dumps(asked))
  message = 'A model' if run is None else f'{done.checkpoint} rollouts'
  try:
    commit = hub.push(folder, to, arguments.public, message)
  except ValueError as error:
    raise ValueError(
      f'{error} {folder} holds the model; the same command pushes it.'
    ) from error
  mark.unlink()
  return commit


def _unfinished(
  folder: pathlib.Path, arguments: Arguments
) -> export.Written | None:
  """What the same command has written before, if it could not push it."""
  try:
    found = json.loads((folder / _UNFINISHED).read_text())
  except (OSError, ValueError):
    return None
  if found['asked'] != _asked(arguments):
    return None
  return export.Written(**found['written'])


def _asked(arguments: Arguments) -> list[str]:
  """What says which model is written."""
  return [
    os.path.abspath(arguments.source),
    str(arguments.checkpoint),
    arguments.dtype,
    str(arguments.shard_gb),
    str(arguments.adapter),
  ]


def show(done: export.Written) -> None:
  """Prints what was written."""
  what = done.architecture or 'adapter for peft'
  learned = ''
  if done.checkpoint is not None:
    learned = f', learned from {done.checkpoint} rollouts'
  printing.say(
    f'{done.folder}: {what}, {done.parameters:,} parameters, '
    f'{done.nbytes / 1e9:,.3g} GB{learned}'
  )
  if done.dequantized:
    printing.say(
      f'The adapters were trained beside weights in {done.dequantized}, and '
      'are added to what these stand for; --adapter writes them alone, for '
      'other weights.'
    )
