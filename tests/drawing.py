"""Completions of an engine, asked for in one line."""

import jax
import jax.numpy as jnp

from grpo_jax import engines
from grpo_jax.engines.local import next_token as next_token_lib

_PLAIN = engines.Sampling()


def requests(
  prompts, sampling=_PLAIN, limit=12, index=None, group=4, rollout=0
):
  """A request for each prompt, of a run with seed 0."""
  index = range(len(prompts)) if index is None else index
  return engines.requests(prompts, index, group, sampling, limit, 0, rollout)


def completions(engine, *args, **options):
  """Of `requests`."""
  return engines.generate(engine, requests(*args, **options))


def alike(sampling, rows, vocab_size):
  """`Numbers` and `Choices` of rows that are all drawn in one way."""
  samplings = [sampling] * rows
  numbers = next_token_lib.numbers_of(samplings, [1] * rows, vocab_size)
  numbers = jax.tree.map(jnp.asarray, numbers)
  return numbers, next_token_lib.choices_of(samplings, vocab_size)


def next_token(logits, uniform, drawn, sampling):
  """`engines.next_token` where all rows are drawn alike, as one program."""
  return mixed(logits, uniform, drawn, *alike(sampling, *logits.shape))


# One program; each single operation would be one of its own.
mixed = jax.jit(engines.next_token, static_argnums=4)
