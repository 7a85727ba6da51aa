"""Rollouts of an earlier run in place of sampled ones: `train --replay`."""

from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from grpo_jax.data import Tokenizer
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts.sources import Delivery
from grpo_jax.rollouts.sources import Source
from grpo_jax.rollouts.sources import Wait


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


def _shared(prompts: int) -> np.ndarray:
  """The process that reads each prompt's completions: equally many each."""
  return np.arange(prompts) * jax.process_count() // prompts


@dataclasses.dataclass
class Replay(Source):
  """The rollouts of an earlier run; the engine draws evaluations alone.

  Attributes:
    directory: The folder `completions` of the earlier run.
    tokenizer: Of this run; the rollouts must fit it.
    prompts: Of each rollout.
    group: Completions of each prompt.
    load: `(params, version)`: gives the engine trained parameters.
    unload: Takes them from it.
    wait: See `Wait`.
  """

  directory: pathlib.Path
  tokenizer: Tokenizer
  prompts: int
  group: int
  load: Callable[[Any, int], None]
  unload: Callable[[], None]
  wait: Wait = contextlib.nullcontext

  def publish(self, params: Any, version: int) -> None:
    """See `Source`."""
    self.load(params, version)

  def next(self, version: int) -> Delivery:
    """See `Source`.

    Raises:
      ValueError: There is no such rollout, or it does not fit.
    """
    begun = time.monotonic()
    with self.wait():
      rollout = self._read(version)
      secs = time.monotonic() - begun
    self.unload()  # an update needs the memory, and moves the parameters
    return Delivery(rollout, self.receipt, {}, secs)

  def _read(self, step: int) -> Rollout:
    path = parquet.path_of(self.directory, step + 1)
    if not path.exists():
      raise ValueError(
        f'There are no completions of rollout {step + 1} in {path.parent} (no '
        f'{path.name}; it has {len(parquet.files(self.directory))} files); '
        'replay a run that had log.completions_every_steps=1, and no more '
        'steps than it took.'
      )
    rollout = parquet.read(path, _shared if jax.process_count() > 1 else None)
    shape = rollout.batch.mask.shape[:2]
    if shape != (self.prompts, self.group):
      raise ValueError(
        f'{path} has {shape[0]} prompts with {shape[1]} completions each, but '
        f'sampler.prompts={self.prompts} and sampler.group={self.group}; '
        'replay it with the config of its run.'
      )
    # Indexing in a compiled program clamps an id that is too large, so the
    # model would read another token without an error.
    assert rollout.batch.tokens is not None  # a file has them
    drawn = np.unique(np.asarray(rollout.batch.tokens)[rollout.batch.mask])
    used = {*drawn.tolist(), *(i for ids in rollout.prompts for i in ids)}
    largest = max(used, default=0)
    unused = self.tokenizer.unused_ids(largest + 1)
    strange = [i for i in sorted(used) if any(a <= i < b for a, b in unused)]
    if strange:
      known = self.tokenizer.vocab_size
      why = f'the vocabulary ends at {known - 1}'
      if strange[0] < known:
        why = 'the tokenizer has no token of this id'
      raise ValueError(
        f'{path} has the token {strange[0]}, but {why}; replay it with the '
        'tokenizer of its run.'
      )
    return rollout
