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
from grpo_jax.learner.types import UpdateSpec
from grpo_jax.mesh import sharding
from grpo_jax.models.layout import LayoutSpec
from grpo_jax.run import ahead
from grpo_jax.run.build import build


def warm_up_updater(run: build.Run) -> updates.Updater:
  """The updater of the warm-up: one supervised update per batch."""
  config = run.config
  schedule = optim.learning_rate(
    config.warm_up.lr, decay='linear', total_steps=config.warm_up.steps
  )
  learner = _learner(run, losses.methods.supervised(), schedule, 1.0, 'step')
  params = build.abstract_params(run)
  return updates.Updater(
    compiled.jit_functions(learner, params.trained),
    UpdateSpec(config.seed),
    _layout(run, 'padded', config.warm_up.micro_rows),
    params.frozen,
  )


def _layout(
  run: build.Run, kind: str, micro_rows: int, **options: Any
) -> LayoutSpec:
  """How to lay out rows for the model on its devices."""
  # Larger micro-batches are slower on a CPU, whose caches hold about 2048
  # tokens of a small model; an accelerator is idle in smaller ones.
  most_tokens, memory = 16384, 2**33
  platform = sharding.platform(run.mesh)
  if platform == 'cpu':
    most_tokens, memory = 2048, 3 * 2**28
  most_tokens = max(1, min(most_tokens, memory // run.model.bytes_per_token))
  common = functools.partial(
    LayoutSpec,
    micro_rows=micro_rows,
    prompt_buckets=run.config.data.prompt_buckets,
    micro_tokens=most_tokens,
    shards=sharding.row_shards(run.mesh),
    parts=run.mesh.shape['context'],
    part_columns=128 if platform == 'tpu' else 1,  # the tiles of its kernel
  )
  if run.model.key_cost is None:
    return common('padded')
  return common(
    kind,
    key_cost=run.model.key_cost,
    share=run.model.shares_prompts(platform),
    **options,
  )


def updater(
  run: build.Run, optimizer: Callable[[Any], Any] | None = None
) -> updates.Updater:
  """What turns rollouts into updates of the policy.

  Args:
    run: The parts of the run.
    optimizer: Makes an optax transformation to take in place of that of
      `config.optim`. It gets a function from the parameters to a tree of bools,
      which says which of them decay.

  Raises:
    ValueError: Rollouts cannot be drawn ahead; see `ahead.check`.
  """
  ahead.check(run.config, run.mesh)
  config = run.config.learner
  asked = run.config.optim
  schedule = optim.learning_rate(
    asked.lr,
    asked.warmup_steps,
    asked.decay,
    # The schedule counts updates, and a rollout gets several.
    run.config.steps * config.batches * config.epochs,
  )
  params = build.abstract_params(run)
  learner = _learner(
    run,
    run.method,
    schedule,
    run.config.sampler.temperature,
    config.on_zero_advantage,
    braked=True,
    expert_balance=config.expert_balance,
    compute_all=config.compute_all,
    own_optimizer=optimizer,
  )
  spec = UpdateSpec(
    run.config.seed,
    config.batches,
    config.epochs,
    config.anchor,
    run.config.reference.refresh_steps,
    run.config.reference.refresh_weight,
    asked.overshoot_every_steps,
    # Only dynamic sampling keeps groups that an earlier policy has drawn.
    stale=run.config.sampler.resample_rounds > 0,
  )
  layout = _layout(
    run,
    config.layout,
    config.micro_rows,
    row_completions=config.row_completions,
    pack_tokens=config.pack_tokens,
  )
  functions = compiled.jit_functions(learner, params.trained)
  return updates.Updater(functions, spec, layout, params.frozen)


def instruments(
  config: config_lib.Config, updater: updates.Updater
) -> list[Instrument]:
  """What measures the updates of a run.

  Args:
    config: Says which rollouts are measured.
    updater: With the frozen parameters.
  """
  log = config.log
  effects_every = log.completions_every_steps if log.token_effects else 0
  return [
    TokenEffects(updater, effects_every),
    Geometry(updater, config.seed, log.geometry_every_steps),
    RolloutEnd(updater),
  ]


def _learner(
  run,
  method,
  schedule,
  temperature,
  on_zero_advantage,
  braked=False,
  expert_balance=0.0,
  compute_all=True,
  own_optimizer=None,
):
  model: models.Model = run.model

  def score(params, layout, with_entropy, forward_mode=False):
    return model.score(
      params, layout, temperature, with_entropy, forward_mode=forward_mode
    )

  def score_routed(params, layout, with_entropy, counted, sampled):
    assert model.score_routed is not None
    return model.score_routed(
      params, layout, counted, sampled, temperature, with_entropy
    )

  config = run.config.optim
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
      transform=_transform(run, schedule, braked, own_optimizer),
      on_zero_advantage=on_zero_advantage,
      # A further backward pass, which only this brake needs.
      with_outward=braked and config.brake == 'project',
    ),
    placement=Placement(
      mesh=run.mesh,
      logical_axes=model.logical_axes,
      offload_moments=config.offload,
      offload_reference=run.config.reference.offload,
    ),
    measuring=Measuring(
      coast_steps=run.config.learner.batches * run.config.learner.epochs,
      records=braked and config.moments,
      expects_prefixes=run.config.log.expected_prefixes,
      learning_rate=schedule if own_optimizer is None else None,
    ),
    expert_balance=expert_balance,
    compute_all=compute_all,
  )


def _transform(run, schedule, braked, own_optimizer):
  """The optax transformation of the config, or that of a caller."""

  def decays(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: run.model.decays(sharding.path_names(path)), params
    )

  config = run.config.optim
  optimizer = optim.adamw(
    schedule,
    b1=config.b1,
    b2=config.b2,
    epsilon=config.epsilon,
    weight_decay=config.weight_decay,
    clip_norm=config.clip_norm or None,  # the config has 0 for None
    decays=decays,
  )
  if own_optimizer is not None:
    return own_optimizer(decays)
  return _braked(optimizer, config) if braked else optimizer


def _braked(optimizer, config: config_lib.Optim):
  """The optimizer, wrapped in what the config asks for.

  From the inside out: a brake, the scaling of updates by the scale of rewards,
  and the recording of Adam's moments.
  """
  brakes = {
    'none': lambda: optimizer,
    'reset': lambda: optim.reset_moments(optimizer),
    'reset_first': lambda: optim.reset_moments(optimizer, 'first'),
    'decay': lambda: optim.decay_carried(optimizer),
    'project': lambda: optim.project_outward(optimizer, config.epsilon),
  }
  optimizer = brakes[config.brake]()
  if config.reward_scale:
    optimizer = optim.restore_reward_scale(optimizer, config.reward_scale)
  if config.moments:
    optimizer = optim.record_adam_moments(optimizer, config.epsilon)
  return optimizer


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
