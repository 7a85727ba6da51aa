"""Reward functions of every kind, and a short way to score with them."""

import asyncio
import functools

import numpy as np

from grpo_jax import rewards


def score_rows(*terms, size=3, **options):
  """Scores completions '0', '1', ... of functions or WeightedRewards."""
  terms = [
    term
    if isinstance(term, rewards.WeightedReward)
    else rewards.WeightedReward(f'term_{i}', term)
    for i, term in enumerate(terms)
  ]
  rows = range(size)
  return rewards.score(
    terms,
    [f'prompt {i}' for i in rows],
    [str(i) for i in rows],
    [{'index': 100 + i} for i in rows],
    **options,
  )


def value(prompt, completion, example):
  assert prompt == f'prompt {completion}'
  assert example['index'] == 100 + int(completion)
  return float(completion)


async def async_value(prompt, completion, example):
  await asyncio.sleep(0)
  return value(prompt, completion, example)


@rewards.batched
def batched_value(prompts, completions, examples):
  return [
    value(*row) for row in zip(prompts, completions, examples, strict=True)
  ]


@rewards.batched
async def async_batched_value(prompts, completions, examples):
  await asyncio.sleep(0)
  return np.asarray(batched_value(prompts, completions, examples))


class Awaitable:
  def __init__(self, coroutine):
    self.coroutine = coroutine

  def __await__(self):
    return self.coroutine.__await__()


class CallableReward:
  async def __call__(self, prompt, completion, example):
    return await async_value(prompt, completion, example)


KINDS = [
  value,
  async_value,
  batched_value,
  async_batched_value,
  CallableReward(),
  functools.partial(async_value),
  functools.partial(batched_value),
  lambda *row: async_value(*row),
  lambda *row: Awaitable(async_value(*row)),
]
