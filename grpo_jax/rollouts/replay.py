"""Rollouts of an earlier run in place of sampled ones: `train --replay`."""

from collections.abc import Collection
import pathlib

import jax
import numpy as np

from grpo_jax.data import Tokenizer
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState
from grpo_jax.rollouts.turn_fields import NO_TURNS
from grpo_jax.rollouts.turn_fields import TurnFields
from grpo_jax.rollouts.turn_fields import with_turns


def folder(directory: str | pathlib.Path) -> pathlib.Path:
  """The absolute path of a folder of completions.

  Raises:
    ValueError: It holds none, which is said before a run begins; or no name
      was given, as by `--replay=$UNSET`.
  """
  if not str(directory):  # else it would be the current directory
    raise ValueError(
      '--replay is empty; give the folder completions in the workdir of an '
      'earlier run, or leave the flag out to sample.'
    )
  path = pathlib.Path(directory).absolute()
  if not parquet.files(path):
    raise ValueError(
      f'There are no completions to replay in {path}; give the folder '
      'completions in the workdir of a run that had '
      'log.completions_every_steps=1.'
    )
  return path


def require_fields(directory: pathlib.Path, names: Collection[str]) -> None:
  """Raises a ValueError if completions lack fields that a method reads.

  Args:
    directory: What `folder` returned.
    names: Of fields that come from records, which a replay does not read.
  """
  path = parquet.files(directory)[0]
  missing = sorted({*names} - parquet.extras_in(path)) if names else []
  if missing:
    raise ValueError(
      f'{path} has no field {missing[0]!r}, which the method reads; replay a '
      'run whose method requires it, so that its files hold it.'
    )


def draw(
  directory: pathlib.Path,
  tokenizer: Tokenizer,
  prompts: int,
  group: int,
  state: PromptState,
  step: int,
  turns: TurnFields = NO_TURNS,
) -> Drawn:
  """The rollout that an earlier run had at this step.

  Args:
    directory: The folder `completions` of the earlier run.
    tokenizer: Of this run; the rollout must fit it.
    prompts: Of each rollout of this run.
    group: Completions of each prompt.
    state: Returned as it is, because no prompts are drawn.
    step: Rollouts done before this one.
    turns: What the loss reads of turns. It is made of what the file tells of
      episodes, unless the earlier run has written it.

  Raises:
    ValueError: There is no such rollout, or it does not fit.
  """
  path = parquet.path_of(directory, step + 1)
  if not path.exists():
    raise ValueError(
      f'There are no completions of rollout {step + 1} in {path.parent} (no '
      f'{path.name}; it has {len(parquet.files(directory))} files); '
      'replay a run that had log.completions_every_steps=1, and no more '
      'steps than it took.'
    )
  processes = jax.process_count()  # which read equally many completions each
  share = lambda number: np.arange(number) * processes // number
  rollout = parquet.read(path, share if processes > 1 else None)
  shape = rollout.batch.mask.shape[:2]
  if shape != (prompts, group):
    raise ValueError(
      f'{path} has {shape[0]} prompts with {shape[1]} completions each, but '
      f'sampler.prompts={prompts} and sampler.group={group}; '
      'replay it with the config of its run.'
    )
  # Indexing in a compiled program clamps an id that is too large, so the
  # model would read another token without an error.
  assert rollout.batch.tokens is not None  # a file has them
  # Those that somebody else wrote are read too.
  width = rollout.batch.mask.shape[2]
  there = np.arange(width) < rollout.length[..., None]
  ids = np.unique(np.asarray(rollout.batch.tokens)[there])
  used = {*ids.tolist(), *(i for ids in rollout.prompts for i in ids)}
  largest = max(used, default=0)
  unused = tokenizer.unused_ids(largest + 1)
  strange = [i for i in sorted(used) if any(a <= i < b for a, b in unused)]
  if strange:
    size = tokenizer.vocab_size
    why = f'the vocabulary ends at {size - 1}'
    if strange[0] < size:
      why = 'the tokenizer has no token of this id'
    raise ValueError(
      f'{path} has the token {strange[0]}, but {why}; replay it with the '
      'tokenizer of its run.'
    )
  return with_turns(rollout, turns), state, {}
