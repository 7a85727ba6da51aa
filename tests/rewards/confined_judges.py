"""Judges that do what a completion says, for tests of confined workers."""

import fcntl  # noqa: F401  a completion may name it
import os
import socket  # noqa: F401
import sys  # noqa: F401
import time

from grpo_jax import rewards

PREPARED = []  # in a worker: examples that `prepare` has seen


def prepare(example):
  PREPARED.append(example)
  time.sleep(example.get('prepare_secs', 0))
  if example.get('unusable'):
    raise ValueError('no such task')


@rewards.confined(prepare=prepare)
def evaluates(prompt, completion, example, unused=None):
  return eval(completion)


@rewards.confined(prepare=prepare, bounds=(0, 1))
def from_0_to_1(prompt, completion, example):
  return eval(completion)


@rewards.confined(prepare=prepare)
@rewards.batched
def evaluates_all(prompts, completions, examples):
  return [eval(completion) for completion in completions]


def unmarked(prompt, completion, example):
  return float('SECRET_KEY' in os.environ)
