"""`grpo-jax convert`: a model as a Hugging Face folder."""

import math
import os

from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.run import export


def run(arguments: Arguments) -> None:
  """`grpo-jax convert`."""
  done = convert(
    arguments.source,
    arguments.folder,
    arguments.checkpoint,
    arguments.dtype,
    arguments.shard_gb,
    arguments.adapter,
  )
  printing.show_json(done._asdict()) if arguments.json else show(done)


def convert(
  source: str | os.PathLike,
  folder: str | os.PathLike,
  checkpoint: str = 'latest',
  dtype: str = 'float32',
  shard_gb: float = 5.0,
  adapter: bool = False,
) -> export.Written:
  """Writes a model, or the adapter of a run, as a Hugging Face folder.

  Args:
    source: What `config.model.path` takes: the workdir of a run, a Hugging Face
      folder, a GGUF file or `'package:NAME'`.
    folder: Where to; it may exist if it is empty.
    checkpoint: Of a run: `'latest'`, `'best'` or a number of rollouts.
    dtype: Of the weights in the folder, `'float32'` or `'bfloat16'`.
    shard_gb: Largest file of weights, in GB (10^9 bytes).
    adapter: Whether to write the adapter of a run alone, for `peft`. Otherwise
      it is added to the weights.

  Returns:
    What was written: the folder, the architecture, parameters and bytes.

  Raises:
    ValueError: Something that was given cannot be used.
  """
  if not 0 < shard_gb < math.inf:
    raise ValueError(
      f'--shard_gb={shard_gb} is no size of a file; give a number above 0.'
    )
  if dtype not in ('float32', 'bfloat16'):
    raise ValueError(f'--dtype={dtype}; give one of float32, bfloat16.')
  shard_bytes = int(shard_gb * 1e9)
  return export.convert(
    os.fspath(source), folder, checkpoint, dtype, shard_bytes, adapter
  )


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
