"""A tiny model behind a desk, for tests of servers."""

import asyncio
import contextlib
import functools
import json
from typing import NamedTuple
import urllib.error
import urllib.request

import jax
import numpy as np

from grpo_jax import engines
from grpo_jax.commands import serve
from grpo_jax.engines import scoring
from grpo_jax.models import lora
from grpo_jax.run import policy as policies
from grpo_jax.serving import answering
from grpo_jax.serving import app as app_lib
from grpo_jax.serving import desk as desk_lib
from grpo_jax.serving import listening
from tests import runs
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


class Opened(NamedTuple):
  """A policy that is served as an engine.

  Attributes:
    served: The policy.
    desk: Draws.
    service: Answers.
    url: Where.
  """

  served: policies.Served
  desk: desk_lib.Desk
  service: answering.Answering
  url: str


@contextlib.contextmanager
def opened(config, rows=ROWS, as_engine=True):
  """What `grpo-jax serve --as_engine` does, in this process."""
  found = policies.load_to_serve(config, context_tokens=CONTEXT)
  with desk_lib.Desk(found.run.engine, found.scorer, rows) as desk:
    service = serve.service_of(found, desk, config)
    posted = serve.engine_calls_of(found, service) if as_engine else {}
    app = app_lib.app(lambda _: service, hosts=['127.0.0.1'], posted=posted)
    with listening.Listening(app, listening.bound()) as it:
      yield Opened(found, desk, service, it.origin)


def config_to_serve(**changes):
  """A policy of the smallest size, with adapters of rank 2."""
  return runs.small(**{'lora.rank': 2, 'mesh.data': 1, **changes})


def smallest():
  """Such a policy, served; for fixtures."""
  with opened(config_to_serve()) as found:
    yield found


def with_adapters(found, seed):
  """The parameters of a policy, with some adapters that change it."""
  trained, frozen = lora.split(found.served.scorer.params, lora.trains)
  rng = np.random.default_rng(seed)
  drawn = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32) * 0.5, trained
  )
  return lora.join(drawn, frozen)


def ask(url, body=None, timeout=120):
  """The status and what is said; GET without a body."""
  sent = None if body is None else json.dumps(body).encode()
  asked = urllib.request.Request(
    url, sent, {'Content-Type': 'application/json'}
  )
  try:
    with urllib.request.urlopen(asked, timeout=timeout) as answer:
      return answer.status, json.load(answer)
  except urllib.error.HTTPError as error:
    with error:
      return error.code, json.load(error)
