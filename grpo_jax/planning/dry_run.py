"""`grpo-jax train --check`: what a run would be, without training."""

import collections
from collections.abc import Sequence
import dataclasses
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np

from grpo_jax.config import Config
from grpo_jax.learner import programs
from grpo_jax.learner.layouts import Layouts
from grpo_jax.learner.types import TrainState
from grpo_jax.learner.updates import Updater
from grpo_jax.planning import arithmetic
from grpo_jax.run import sampling
from grpo_jax.run.build import build
from grpo_jax.run.build import method as build_method
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import workdir as workdir_lib

GIB = 2**30


def inspect(
  config: Config,
  workdir: str | pathlib.Path,
  allowed: Sequence[str] = (),
) -> dict[str, Any]:
  """Builds everything, samples the first rollout, compiles one update.

  Nothing is written to the workdir and nothing is learned. The rollout is
  sampled from the untrained model, before any warm-up.

  Args:
    config: See `grpo_jax.config.Config`.
    workdir: Must be free, or hold a run of this config.
    allowed: The fields in which that run may differ; see
      `workdir.refuse_another`.

  Returns:
    `config`, `workdir` (what would happen in it), `shapes`, `warnings`,
    `memory_gib` and `first_rollout`, for `show`.

  Raises:
    ValueError: The run could not start; the message says why.
  """
  workdir = bucket.read_only(workdir)
  config = workdir_lib.with_widths(workdir, config)
  workdir_lib.refuse_another(workdir, config, allowed=allowed)
  # The workdir need not exist yet, and this command does not make it.
  existing = workdir
  while not existing.exists():
    existing = existing.parent
  if not existing.is_dir() or not os.access(existing, os.W_OK):
    raise ValueError(
      f'{existing} is no directory that can be written; give another workdir.'
    )
  run = build.run(config)
  if run.warm_up is not None:
    run.warm_up.demonstrations()  # not used here, but it may raise
  frozen = build.frozen_params(run)
  teacher = build.teacher_params(run, frozen)
  updater = build.updater(run, frozen, teacher=teacher)
  with sampling.closing(run):
    sampling.loader(run, updater)(build.initial_params(run), 0)
    rollout = sampling.first(run)
  assert rollout.failures is not None  # its rewards were called
  layouts = Layouts(
    updater.compiled, rollout, updater.layout, updater.spec.batches
  )
  rows, used = layouts.stack(layouts.first_epoch()[0])
  state = updater.compiled.abstract
  batch = rollout.batch
  return {
    'config': dataclasses.asdict(run.config),
    'workdir': 'goes on from a checkpoint'
    if any((bucket.arrays(workdir) / 'checkpoints').glob('*[0-9]'))
    else 'starts anew',
    'shapes': {
      **_devices(run),
      'parameters': _count(state.params),
      'rollout [P, G, T]': list(batch.mask.shape),
      'micro-batches used': used,
      'micro-batch [rows, positions]': list(rows.tokens.shape[1:]),
      'optimizer steps per rollout': updater.spec.batches * updater.spec.epochs,
    },
    'warnings': [
      *build_rewards.warnings(run.rewards),
      *build_method.warnings_of_age(run.learn, run.draw, len(run.rewards)),
      *_warnings_of_heads(run),
    ],
    'memory_gib': _memory_gib(run, state, updater, layouts),
    'first_rollout': {
      # As the model reads them, so that a chat template can be looked at.
      'prompts': [
        run.tokenizer.backend.decode(ids, skip_special_tokens=False)
        for ids in rollout.prompts[:3]
      ],
      'completions': [texts[0] for texts in rollout.texts[:3]],
      'rewards': [float(reward[0]) for reward in batch.reward[:3]],
      'not judged': int(np.sum(~batch.valid)),
      'failed': _failed(rollout.reward_names, rollout.failures),
      'mean reward': float(np.mean(batch.reward, where=batch.valid))
      if batch.valid.any()
      else None,
      'truncated': float(np.mean(batch.truncated)),
    },
  }


def _devices(run: build.Run) -> dict[str, str]:
  """How many devices learn, and how many others sample, if some do."""
  kind = jax.devices()[0].device_kind
  found = {'devices': f'{run.mesh.size} x {kind}'}
  if own := run.config.generator.devices:
    found['devices that sample'] = f'{own} x {kind}'
  return found


def _warnings_of_heads(run: build.Run) -> list[str]:
  """What becomes of key-value heads that a mesh does not divide."""
  heads, found = run.model.kv_heads, []
  tensor = run.mesh.shape['tensor']
  if heads % tensor:
    found.append(
      f'config.mesh.tensor={tensor} does not divide the {heads} key-value '
      'heads, so in an update every device has the weights and the keys and '
      'values of all of them.'
    )
  tensor = run.sampling_mesh.shape['tensor']
  if heads % tensor:
    found.append(
      f'While sampling, tensor={tensor} does not divide the {heads} key-value '
      'heads, so every device has their weights, and caches are split by rows '
      f'over all {run.sampling_mesh.size} devices if there are as many prompts.'
    )
  return found


def _memory_gib(
  run: build.Run,
  state: TrainState,
  updater: Updater,
  layouts: Layouts,
) -> dict[str, float]:
  """GiB by part: of each device, and of its host what lies there."""
  parts = {
    'parameters': state.params,
    'optimizer state': state.opt_state,
    'reference': state.reference,
    'teacher': None if run.teacher and run.teacher.is_base else updater.teacher,
  }
  here = {
    name: arithmetic.on_device(tree) / GIB for name, tree in parts.items()
  }
  if run.draws_ahead:
    apart = bool(run.config.generator.devices)
    # Where they lie, decoding reads one of them on a single device.
    shares = run.sampling_mesh.size == 1 and not run.draw.pace.inflight
    shares = shares and not run.config.generator.listen
    shares = shares and run.config.engine.kind == 'local'
    number = arithmetic.snapshots(run.draw.pace) - shares
    size = arithmetic.on_device(sampling.abstract_snapshot(run, updater))
    name = 'older parameters' + ' (where others sample)' * apart
    here[name] = number * size / GIB
  away = {
    f'{name} (in the memory of the host)': arithmetic.on_host(tree) / GIB
    for name, tree in parts.items()
  }
  needs = programs.memory_gib(updater, layouts.spec, layouts.rollout)
  return {
    **here,
    **{name: gib for name, gib in away.items() if gib},
    **{f'train step, {k}': v for k, v in needs.items()},
  }


def _failed(
  names: Sequence[str], failures: np.ndarray
) -> dict[str, tuple[int, str]]:
  """For each reward that has failed: how often, and why most often."""
  found = {}
  for place, name in enumerate(names):
    reasons = collections.Counter(failures[..., place].flat)
    del reasons['']
    if reasons:
      found[name] = (reasons.total(), reasons.most_common(1)[0][0])
  return found


def _count(tree: Any) -> int:
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))
