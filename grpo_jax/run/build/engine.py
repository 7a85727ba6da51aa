"""Servers of others that sample for a run: `config.engine`."""

import dataclasses
import pathlib
import secrets
import tempfile
from typing import Any

import jax

from grpo_jax import models
from grpo_jax.config import Config
from grpo_jax.config import Engine
from grpo_jax.config import http_client
from grpo_jax.engines.http import conformance
from grpo_jax.engines.http.dialects import Dialect
from grpo_jax.engines.http.engine import HttpEngine
from grpo_jax.engines.http.servers import Servers
from grpo_jax.engines.http.sglang import Sglang
from grpo_jax.engines.http.texts import TextScores
from grpo_jax.engines.http.versions import Versions
from grpo_jax.engines.http.vllm import Vllm
from grpo_jax.models import weights
from grpo_jax.run.build import model as build_model

FAILED = conformance.FAILED
_BACKOFF_SECS = 1.0
_LONGEST_WAIT_SECS = 60.0
_MOST_BYTES = 64 << 20  # of an answer; ids and log-probabilities are its bulk


def http_engine(
  config: Config, model: models.Model, mesh: jax.sharding.Mesh
) -> HttpEngine:
  """The engine of a run that servers sample for.

  Raises:
    ValueError: There are several processes, the key is missing, or the model
      cannot be written as others read it.
  """
  if jax.process_count() > 1:
    raise ValueError(
      f"config.engine.kind='http' in a run of {jax.process_count()} processes, "
      'but one asks the servers; start one process.'
    )
  if not isinstance(model, models.Transformer):
    raise ValueError(
      "config.engine.kind='http' with a model of your own, which servers do "
      "not know; give 'local', or a model that this package reads."
    )
  adapters = model.config.lora is not None
  return HttpEngine(
    servers(config),
    dialect(config, adapters),
    _versions(config, model, mesh, adapters),
    adapters,
  )


def teacher(config: Config, top: int) -> TextScores | None:
  """The servers that are the teacher of a run; None if none are.

  Args:
    config: Of the run.
    top: How many of the teacher's likeliest tokens its method reads.

  Raises:
    ValueError: There are several processes, or the key is missing.
  """
  fields = config.teacher
  if not fields.urls:
    return None
  if jax.process_count() > 1:
    raise ValueError(
      f'config.teacher.urls in a run of {jax.process_count()} processes, but '
      'one asks the servers; start one process, or give teacher.path.'
    )
  asked = Engine(
    kind='http',
    dialect=fields.dialect,
    urls=fields.urls,
    model=fields.model,
    key_env=fields.key_env,
  )
  alone = dataclasses.replace(config, engine=asked)
  return TextScores(
    servers(alone, 'config.teacher.urls'),
    dialect(alone, adapters=True),
    top=top,
  )


def servers(config: Config, who: str = "config.engine.kind='http'") -> Servers:
  """The servers of a config; messages name who asks them."""
  fields = config.engine
  client = http_client.Client(
    who,
    fields.key_env,
    fields.timeout_secs,
    fields.retries,
    _BACKOFF_SECS,
    _LONGEST_WAIT_SECS,
    http_client.Limits(0.0, fields.concurrency),
    _MOST_BYTES,
  )
  return Servers(fields.urls, client, fields.concurrency)


def dialect(config: Config, adapters: bool) -> Dialect:
  """How the servers of a config are asked."""
  if config.engine.dialect == 'sglang':
    return Sglang(adapters)
  name = config.engine.model or config.model.path
  return Vllm(name, adapters)


def suite(fields: Engine, policy: str) -> conformance.Suite:
  """The checks of a server.

  Args:
    fields: How it is asked.
    policy: The name of its model; '' where it has one alone.
  """
  config = Config(engine=fields)
  return conformance.Suite(
    servers(config),
    dialect(config, adapters=True),
    dialect(config, adapters=False),
    policy,
  )


def _versions(
  config: Config,
  model: models.Transformer,
  mesh: jax.sharding.Mesh,
  adapters: bool,
) -> Versions:
  """What writes parameters for the servers."""
  fields = config.engine
  # One of its own is made with its first version: what ends before leaves none.
  own = f'{tempfile.gettempdir()}/grpo_jax_weights_{secrets.token_hex(8)}'
  origin = build_model.origin_of(config.model.path)
  base = build_model.adapter_base(config.model.path, origin)

  def write(folder: pathlib.Path, params: Any) -> None:
    if adapters:
      weights.save_adapter(
        folder, model.config, params, dtype=fields.dtype, **base
      )
    else:
      weights.save(folder, model.config, params, fields.dtype, origin)

  trained = build_model.abstract(model, mesh).trained
  return Versions(
    pathlib.Path(fields.folder or own).absolute(),
    write,
    trained,
    keeps=config.sampler.ahead > 0,
    mode=0o777 if fields.folder else 0o700,
  )
