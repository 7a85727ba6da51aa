"""Reward functions for runs of a second: rewards that differ, and bad ones."""

import os
import pathlib
import sys
import time

from grpo_jax import rewards


def even(prompt, completion, example):
  """1 if the sampled ids have an even sum: about half of them, in any model."""
  del prompt, completion
  return float(sum(example['completion_ids']) % 2 == 0)


def always(prompt, completion, example):
  return 1.0


def never(prompt, completion, example):
  return 0.0


def exits(prompt, completion, example):
  sys.exit(0)


def raises_late(prompt, completion, example):
  """Raises from the third rollout of four prompts on."""
  if example['index'] >= 8 and example['index'] < 10_000:
    raise RuntimeError('out of judges')
  return even(prompt, completion, example)


def huge(prompt, completion, example):
  """Finite; the square of a gradient that is scaled by it is not."""
  return 1e30 * even(prompt, completion, example)


def none(prompt, completion, example):
  return None


def nan(prompt, completion, example):
  return float('nan')


@rewards.batched
def too_few(prompts, completions, examples):
  return [1.0]


def wanders(prompt, completion, example):
  """Leaves the directory that the command was started in."""
  os.chdir(os.environ['ELSEWHERE'])
  return even(prompt, completion, example)


def slow(prompt, completion, example):
  """Says that it has begun, and takes five minutes."""
  pathlib.Path(os.environ['JUDGING']).touch()
  time.sleep(300)
  return 0.0
