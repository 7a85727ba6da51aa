"""Completions of an engine, asked for in one line."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax import engines
from grpo_jax.engines.local import lowered
from grpo_jax.engines.local import next_token as next_token_lib

_PLAIN = engines.Sampling()


def requests(
  prompts, sampling=_PLAIN, limit=12, index=None, group=4, rollout=0
):
  """A request for each prompt, of a run with seed 0."""
  index = range(len(prompts)) if index is None else index
  return engines.requests(prompts, index, group, sampling, limit, 0, rollout)


class Completions(NamedTuple):
  """What was sampled as arrays [P,G,T] and [P,G]; 0 past each length."""

  tokens: Any
  length: Any
  finish: Any
  logp: Any
  log_kept: Any
  version: Any
  entropy: Any = None
  routing: Any = None
  holder: Any = None


def arrays(groups, tokens):
  """What `engines.generate` returns, as arrays."""
  every = [one for group in groups for one in group]
  shape = len(groups), len(groups[0])
  length = np.array([len(one.ids) for one in every]).reshape(shape)
  inside = np.arange(tokens) < length[..., None]

  def array(name):
    values = [getattr(one, name) for one in every]
    if values[0] is None:
      return None
    joined = np.zeros(inside.shape, values[0].dtype)
    joined[inside] = np.concatenate(values)
    return joined

  finish = np.array([one.finish for one in every]).reshape(shape)
  holder = [group[0].holder for group in groups]
  return Completions(
    array('ids'),
    length,
    finish,
    *map(array, Completions._fields[3:-1]),
    None if holder[0] is None else np.array(holder),
  )


def generate(engine, asked, *args, **options):
  """`engines.generate`, as arrays."""
  found = engines.generate(engine, asked, *args, **options)
  return arrays(found, max(one.limit for one in asked))


def completions(engine, *args, **options):
  """Of `requests`."""
  return generate(engine, requests(*args, **options))


def abstract_rows(engine, params, prompts, group, sampling, limit):
  """The rows of the largest rollout of a `LocalEngine`, as shapes."""
  choices = next_token_lib.choices_of(
    [sampling], engine.model.config.vocab_size
  )
  schedule = engine.schedule(prompts, group, max(engine.prompt_buckets))
  sampler, columns = engine._sampler(choices, schedule), engine._columns(limit)
  return lowered.abstract_rows(sampler, schedule, params, columns[-1])


def alike(sampling, rows, vocab_size):
  """`Numbers` and `Choices` of rows that are all drawn in one way."""
  samplings = [sampling] * rows
  numbers = next_token_lib.numbers_of(samplings, [1] * rows, vocab_size)
  numbers = jax.tree.map(jnp.asarray, numbers)
  return numbers, next_token_lib.choices_of(samplings, vocab_size)


def next_token(logits, uniform, drawn, sampling):
  """`next_token` where all rows are drawn alike, as one program."""
  return mixed(logits, uniform, drawn, *alike(sampling, *logits.shape))


# One program; each single operation would be one of its own.
mixed = jax.jit(next_token_lib.next_token, static_argnums=4)
