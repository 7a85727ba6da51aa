"""Reward functions for runs of a second: rewards that differ, and bad ones."""

import ctypes
import os
import pathlib
import sys
import threading
import time

from grpo_jax import rewards


@rewards.bounded
def even(prompt, completion, example):
  """1 if the sampled ids have an even sum: about half of them, in any model."""
  del prompt, completion
  return float(sum(example['completion_ids']) % 2 == 0)


@rewards.bounded
def even_of_odd(prompt, completion, example):
  """`even`, but all of a group get 0 where the prompt's sum is even."""
  odd = sum(map(int, filter(str.isdecimal, prompt))) % 2
  return odd * even(prompt, completion, example)


@rewards.bounded
def always(prompt, completion, example):
  return 1.0


@rewards.bounded
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


@rewards.bounded
def refuses(prompt, completion, example):
  """Raises in rollouts, in the process whose environment says so; notes it."""
  if 'REFUSED' in os.environ and example['index'] < 10_000:
    pathlib.Path(os.environ['REFUSED']).touch()
    raise KeyError('no such answer')
  return even(prompt, completion, example)


def slow(prompt, completion, example):
  """Says that it has begun, and takes five minutes.

  It says so while it sleeps: of a signal that comes in the moment before,
  Python would tell nobody until the sleep is over.
  """
  begun = pathlib.Path(os.environ['JUDGING'])
  threading.Timer(0.2, begun.touch).start()
  time.sleep(300)
  return 0.0


def kind(ids):
  """What `unruly` does with a completion; about half of them are judged."""
  kinds = ('hangs', 'exits', 'segfaults', 'eats', 'raises')
  place = sum(ids) % 10
  return kinds[place] if place < len(kinds) else ''


def unruly(prompt, completion, example, worth=1.0):
  """A judge that fails on some completions in each of the ways there are."""
  does = kind(example['completion_ids'])
  while does == 'hangs':
    time.sleep(1)
  if does == 'exits':
    os._exit(3)
  if does == 'segfaults':
    ctypes.string_at(0)
  if does == 'eats':
    bytearray(64 << 30)  # at once: the limit of time is short
  if does == 'raises':
    raise KeyError('gold')
  return worth * even(prompt, completion, example)


def raises(prompt, completion, example):
  raise KeyError('gold')


def slow_late(prompt, completion, example):
  """As `slow`, from the third rollout of four prompts on."""
  if 8 <= example['index'] < 10_000:
    return slow(prompt, completion, example)
  return even(prompt, completion, example)
