"""A tiny model behind a desk, for tests of servers."""

import asyncio
import contextlib
import functools
from typing import NamedTuple

import numpy as np

from grpo_jax import engines
from grpo_jax.engines import scoring
from grpo_jax.serving import answering
from grpo_jax.serving import desk as desk_lib
from tests import tiny
from tests.episodes import made_episodes

TOKENIZER = made_episodes.TOKENIZER
CONTEXT = 192
ROWS = 4


class Served(NamedTuple):
  desk: desk_lib.Desk
  engine: engines.LocalEngine
  service: answering.Answering
  scorer: scoring.Scorer
  params: object


@functools.cache
def model(vocab_size=TOKENIZER.vocab_size):
  return tiny.model(num_layers=2, vocab_size=vocab_size)


@contextlib.contextmanager
def desk(tokenizer=TOKENIZER, rows=ROWS, **service):
  """A desk that works, and what is around it."""
  made = model(tokenizer.vocab_size)
  params = tiny.params(made)
  engine = engines.LocalEngine(
    made,
    prompt_buckets=(64, 128),
    completion_buckets=(64,),
    decode=tokenizer.decode,
    max_rows=rows,
  )
  engine.load(params, version=7)
  scorer = scoring.Scorer(made, params, CONTEXT)
  with desk_lib.Desk(engine, scorer, rows) as found:
    options = dict(
      tokenizer=tokenizer,
      name='policy@7',
      sampling=engines.Sampling(tokenizer.eos_ids),
      max_tokens=24,
      context_tokens=CONTEXT,
      call_format=answering.call_format('hermes', tokenizer),
    )
    made = answering.Answering(desk=found, **options | service)
    yield Served(found, engine, made, scorer, params)


def generated(ids, limit, sampling, key=(0, 0), tokenizer=TOKENIZER, calls=0):
  """What `engines.generate` draws, by an engine of its own.

  Bits depend on shapes, which are those of a desk if `calls` are its rows.
  """
  made = model(tokenizer.vocab_size)
  engine = engines.LocalEngine(
    made, (64, 128), (64,), decode=tokenizer.decode, max_rows=ROWS
  )
  engine.load(tiny.params(made), version=7)
  keys = np.array([key], np.uint32)
  request = engines.Request(ids, keys, limit, sampling, calls=calls)
  ((one,),) = engines.generate(engine, [request])
  return one


def run(coroutine):
  return asyncio.run(coroutine)
