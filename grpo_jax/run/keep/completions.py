"""The completions that a run has kept, read from its workdir."""

import pathlib

import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import pass_at_k


def files(workdir: pathlib.Path, kind: str) -> list[pathlib.Path]:
  """The files of 'completions' or 'evaluations', by their rollouts."""
  return parquet.files(workdir / kind)


def read(file: pathlib.Path) -> Rollout:
  """The rollout in a file; see `parquet.read`."""
  return parquet.read(file)


def first_rewards(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
  """What an evaluation reads; see `pass_at_k.first_rewards`."""
  return pass_at_k.first_rewards(rollout)
