"""Builds the parts of a run without devices, data or weights: to plan it."""

from typing import Any
from typing import NamedTuple

import jax

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.config import Config
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner.updates import Updater
from grpo_jax.mesh import sharding
from grpo_jax.run.build import build
from grpo_jax.run.build import build_foreign
from grpo_jax.run.build import build_limits
from grpo_jax.run.build import build_model
from grpo_jax.run.build import build_updater
from grpo_jax.run.build import marks
from grpo_jax.run.build import widths

_END = (0,)  # which ids end a completion changes nothing in a program's size


class Abstract(NamedTuple):
  """What a run compiles, on a mesh whose devices need not be there."""

  run: build.Run  # without tokenizer, prompts and rewards
  updater: Updater
  model: models.ModelConfig
  engine: engines.LocalEngine

  def example(self) -> Rollout:
    """A rollout of zeros with the largest shapes, which takes their memory."""
    return build.example(self.run)


def abstract(
  config: Config, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> Abstract:
  """The parts of a run on some mesh, from shapes alone.

  Args:
    config: See `grpo_jax.config.Config`. With `model.path` a folder is enough
      that holds a `config.json` and no weights. Data is read only if the
      config leaves the widths of prompts open.
    mesh: `config.mesh` is not read.

  Raises:
    ValueError: A part cannot be built; the message says why.
  """
  path, method = config.model.path, config.learner.method
  if marks.is_mark(path) or build_foreign.is_named(path):
    raise ValueError(
      f'config.model.path={path!r} is a model of your own, whose programs are '
      'not known here; try it with `grpo-jax train --check`.'
    )
  if marks.is_mark(method):
    raise ValueError(
      f'config.learner.method={method!r} is an object, whose programs are not '
      'known here; give the name of a method that reads as much.'
    )
  config = _with_widths(config)
  build_limits.check_schedule(config)
  build_limits.check_rows(config, sharding.row_shards(mesh))
  build_limits.check_context(config)
  # An abstract mesh has all that shapes need; nothing else is asked of it.
  shapes: Any = mesh
  nothing: Any = None
  # The shape comes with its vocabulary, but for another run's.
  named = path and not build_model.is_run(path)
  vocab_size = 0 if named else build.tokenizer_of(config).vocab_size
  model = build_model.transformer(config, vocab_size, needs_weights=False)
  build_limits.check_model(config, model.config, shapes)
  engine = engines.LocalEngine(
    model,
    prompt_buckets=config.data.prompt_buckets,
    completion_buckets=config.data.completion_buckets,
    max_rows=config.sampler.max_rows,
    mesh=sharding.sampling_mesh(
      shapes, config.sampler.tensor, config.mesh.slices
    ),
  )
  run = build.Run(
    config=config,
    tokenizer=nothing,
    prompts=None,
    epoch=0,
    heldout=None,
    rewards=(nothing,) * len(config.rewards),
    mesh=shapes,
    model=model,
    method=build.method_of(config, marks.NOTHING),
    engine=engine,
    peak_flops=None,
    sampling=build.drawing_of(config.sampler, _END),
    given=marks.NOTHING,
    lengths={},
  )
  update = build_updater.updater(run)
  return Abstract(run, update, model.config, engine)


def _with_widths(config: Config) -> Config:
  """The config with widths, which are read from the data if need be."""
  if config.data.prompt_buckets and config.data.completion_buckets:
    return config
  try:
    tokenizer = build.tokenizer_of(config)
    return widths.with_widths(config, tokenizer, marks.NOTHING)
  except (ValueError, OSError) as error:
    raise ValueError(
      f'The widths of prompts and completions follow from data that cannot be '
      f'read here ({error}); give them, as in '
      '--config.data.prompt_buckets="(1024,)" '
      '--config.data.completion_buckets="(4096,)".'
    ) from error
