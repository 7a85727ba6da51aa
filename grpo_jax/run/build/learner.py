"""Builds what updates the policy: the learner, its optimizer, its layouts."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax import models
from grpo_jax import optim
from grpo_jax.learner import compiled
from grpo_jax.learner import updates
from grpo_jax.learner.instruments.geometry import Geometry
from grpo_jax.learner.instruments.hook import Instrument
from grpo_jax.learner.instruments.rollout_end import RolloutEnd
from grpo_jax.learner.instruments.token_effects import TokenEffects
from grpo_jax.learner.types import Learner
from grpo_jax.learner.types import Measuring
from grpo_jax.learner.types import Optimizer
from grpo_jax.learner.types import Placement
from grpo_jax.learner.types import Scoring
from grpo_jax.learner.types import Teacher
from grpo_jax.learner.types import UpdateSpec
from grpo_jax.mesh import sharding
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.run.build import optimizer
from grpo_jax.run.build.model import Parameters
from grpo_jax.run.build.specs import LearnSpec
from grpo_jax.run.build.specs import MeasureSpec
from grpo_jax.run.build.specs import TeacherSpec
from grpo_jax.run.build.specs import WarmUpSpec

Config = config_lib.Config


def learn_spec(
  config: Config,
  model: models.Model,
  mesh: jax.sharding.Mesh,
  method: losses.LossTransform,
  teacher: TeacherSpec | None = None,
) -> LearnSpec:
  """How the rollouts of a run become updates."""
  fields, course = config.learner, config.optim
  schedule = optim.learning_rate(
    course.lr,
    course.warmup_steps,
    course.decay,
    # The schedule counts updates, and a rollout gets several.
    config.steps * fields.batches * fields.epochs,
    course.decay_share,
  )
  learner = _learner(
    config,
    model,
    mesh,
    method,
    schedule,
    config.sampler.temperature,
    fields.on_zero_advantage,
    braked=True,
    expert_balance=fields.expert_balance,
    compute_all=fields.compute_all,
    ages=config.sampler.ahead,
    teacher=teacher,
  )
  update = UpdateSpec(
    config.seed,
    fields.batches,
    fields.epochs,
    fields.anchor,
    config.reference.refresh_steps,
    config.reference.refresh_weight,
    course.overshoot_every_steps,
    # Only dynamic sampling keeps groups that an earlier policy has drawn.
    stale=config.sampler.resample_rounds > 0,
  )
  layout = _layout(
    config,
    model,
    mesh,
    fields.layout,
    fields.micro_rows,
    teacher and teacher.model,
    row_completions=fields.row_completions,
    pack_tokens=fields.pack_tokens,
  )
  at_most = fields.nonfinite_rollouts
  return LearnSpec(fields.method, learner, update, layout, at_most)


def warm_up_spec(
  config: Config,
  model: models.Model,
  mesh: jax.sharding.Mesh,
  demonstrations: Callable[[], Any],
) -> WarmUpSpec | None:
  """The warm-up of a run, one supervised update per batch; None without one."""
  fields = config.warm_up
  if not fields.steps:
    return None
  schedule = optim.learning_rate(
    fields.lr, decay='linear', total_steps=fields.steps
  )
  method = losses.methods.supervised()
  learn = LearnSpec(
    'supervised',
    _learner(config, model, mesh, method, schedule, 1.0, 'step'),
    UpdateSpec(config.seed),
    _layout(config, model, mesh, 'padded', fields.micro_rows),
    config.learner.nonfinite_rollouts,
  )
  every = config.checkpoint.every_warm_up_steps
  return WarmUpSpec(fields.steps, fields.examples, every, demonstrations, learn)


def updater(
  spec: LearnSpec,
  params: Parameters,
  frozen: Any,
  transform: Any = None,
  teacher: Any = None,
) -> updates.Updater:
  """What turns rollouts into updates of the policy.

  Args:
    spec: Says how.
    params: Shapes, dtypes and shardings.
    frozen: The parameters that no update changes; see `updates.Updater`.
    transform: An optax transformation in place of that of the learner.
    teacher: The teacher's parameters, or their shapes; None: there is none.
  """
  learner = spec.learner
  if transform is not None:
    learner = dataclasses.replace(
      learner,
      optimizer=dataclasses.replace(learner.optimizer, transform=transform),
      measuring=dataclasses.replace(learner.measuring, learning_rate=None),
    )
  functions = compiled.jit_functions(learner, params.trained)
  return updates.Updater(functions, spec.update, spec.layout, frozen, teacher)


def _layout(
  config: Config,
  model: models.Model,
  mesh: jax.sharding.Mesh,
  kind: str,
  micro_rows: int,
  teacher: models.Model | None = None,
  **options: Any,
) -> LayoutSpec:
  """How to lay out rows for the model, and a teacher, on their devices."""
  readers = [model] if teacher is None else [model, teacher]
  # Larger micro-batches are slower on a CPU, whose caches hold about 2048
  # tokens of a small model; an accelerator is idle in smaller ones.
  most_tokens, memory = 16384, 2**33
  platform = sharding.platform(mesh)
  if platform == 'cpu':
    most_tokens, memory = 2048, 3 * 2**28
  most_tokens = max(1, min(most_tokens, memory // model.bytes_per_token))
  common = functools.partial(
    LayoutSpec,
    micro_rows=micro_rows,
    prompt_buckets=config.data.prompt_buckets,
    micro_tokens=most_tokens,
    shards=sharding.row_shards(mesh),
    share=all(one.shares_prompts(platform) for one in readers),
    branches=all(one.reads_branches for one in readers),
    parts=mesh.shape['context'],
    part_columns=128 if platform == 'tpu' else 1,  # the tiles of its kernel
  )
  if model.key_cost is None:
    return common('padded')
  return common(kind, key_cost=model.key_cost, **options)


def instruments(
  spec: MeasureSpec, updater: updates.Updater
) -> list[Instrument]:
  """What measures the updates of a run.

  Args:
    spec: Says which rollouts are measured.
    updater: With the frozen parameters.
  """
  return [
    TokenEffects(updater, spec.effects_every_steps),
    Geometry(updater, spec.seed, spec.geometry_every_steps),
    RolloutEnd(updater),
  ]


def _learner(
  config: Config,
  model: models.Model,
  mesh: jax.sharding.Mesh,
  method: losses.LossTransform,
  schedule: Any,
  temperature: float,
  on_zero_advantage: str,
  braked: bool = False,
  expert_balance: float = 0.0,
  compute_all: bool = True,
  ages: int = 0,
  teacher: TeacherSpec | None = None,
) -> Learner:
  score = _score(model, temperature)

  def score_routed(params, layout, wanted, counted, sampled):
    assert model.score_routed is not None
    return model.score_routed(
      params, layout, counted, sampled, temperature, wanted
    )

  fields = config.optim
  return Learner(
    method=method,
    scoring=Scoring(
      score=score,
      # `jax.jvp` cannot pass through the faster code for attention.
      score_forward=functools.partial(score, forward_mode=True),
      score_routed=score_routed if model.score_routed else None,
      takes_shards=model.takes_shards,
    ),
    optimizer=Optimizer(
      transform=optimizer.make_optimizer(fields, model, schedule, braked),
      on_zero_advantage=on_zero_advantage,
      # A further backward pass, which only this brake needs.
      with_outward=braked and fields.brake == 'project',
    ),
    placement=Placement(
      mesh=mesh,
      logical_axes=model.logical_axes,
      offload_moments=fields.offload,
      offload_reference=config.reference.offload,
    ),
    measuring=Measuring(
      coast_steps=config.learner.batches * config.learner.epochs,
      records=braked and fields.moments,
      expects_prefixes=config.log.expected_prefixes,
      ages=ages,
      learning_rate=schedule,
    ),
    expert_balance=expert_balance,
    compute_all=compute_all,
    teacher=teacher
    and Teacher(
      Scoring(
        _score(teacher.model, temperature),
        takes_shards=teacher.model.takes_shards,
      ),
      teacher.model.logical_axes,
    ),
  )


def _score(model: models.Model, temperature: float) -> Callable[..., Any]:
  """How a model scores rows; see `Scoring`."""

  def score(params, layout, wanted, forward_mode=False):
    return model.score(
      params, layout, temperature, wanted, forward_mode=forward_mode
    )

  return score


def decided(spec: LayoutSpec, earlier: dict[str, Any]) -> LayoutSpec:
  """The spec with what an earlier start has decided, if that still fits it.

  It fits if all else in the spec is as it was, because the decision depends on
  all of it: on `pack_tokens`, say, which may change between two starts. If not,
  the next rollout decides anew.

  Args:
    spec: Of this start, nothing decided.
    earlier: What `spec_json` returned.
  """
  if spec.kind not in ('auto', earlier['kind']):
    return spec
  whole = dataclasses.replace(
    spec, kind=earlier['kind'], row_slots=earlier['row_slots']
  )
  return whole if spec_json(whole) == earlier else spec


def spec_json(spec: LayoutSpec) -> dict[str, Any]:
  """A spec as a checkpoint holds it, with lists for tuples."""
  return {**dataclasses.asdict(spec), 'prompt_buckets': [*spec.prompt_buckets]}
