"""`grpo-jax convert`: a model as a Hugging Face folder."""

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.run import export


def run(arguments: Arguments) -> None:
  """`grpo-jax convert`."""
  done = export.convert(
    arguments.source,
    arguments.folder,
    arguments.checkpoint,
    arguments.dtype,
    arguments.shard_gb,
    arguments.adapter,
  )
  printing.show_json(done._asdict()) if arguments.json else show(done)


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
