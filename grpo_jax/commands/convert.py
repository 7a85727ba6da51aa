"""`grpo-jax convert`: a model as a Hugging Face folder."""

import pathlib

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.data import hub
from grpo_jax.lab.report import read
from grpo_jax.run import export
from grpo_jax.run.build import card
from grpo_jax.run.keep import metrics_file


def run(arguments: Arguments) -> None:
  """`grpo-jax convert`."""
  to, public = arguments.push, arguments.public
  if to:  # before the model is read
    to = hub.check_push(to, public, arguments.overwrite)
  elif public or arguments.overwrite:
    flag = '--public' if public else '--overwrite'
    raise ValueError(f'{flag} is of what is pushed; give --push=owner/name.')
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
    is_run = done.checkpoint is not None
    run = read.run(arguments.source) if is_run else None
    card.write(
      pathlib.Path(done.folder),
      to,
      run and run.config,
      run.metrics if run else metrics_file.NONE,
      done.checkpoint,
      arguments.adapter,
    )
    message = f'{done.checkpoint} rollouts' if is_run else 'A model'
    pushed['pushed'] = hub.push(done.folder, to, public, message)
  if arguments.json:
    printing.show_json(done._asdict() | pushed)
    return
  show(done)
  if to:
    printing.say(f'pushed to {pushed["pushed"]}')


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
