"""The outer loop: sample, judge, learn, repeat."""

from collections.abc import Callable
import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from grpo_jax import build
from grpo_jax import data
from grpo_jax import keys
from grpo_jax import metrics
from grpo_jax import rollout as rollout_lib
from grpo_jax import sharding
from grpo_jax.config import Config
from grpo_jax.rollout import Rollout


def train(
  config: Config, workdir: str | pathlib.Path
) -> dict[str, float | None]:
  """Trains a model and says how well it did before and after.

  Args:
    config: See `config.py`.
    workdir: Where `metrics.jsonl` goes.

  Returns:
    `before` and `after`, the held-out greedy accuracies after the warm-up and
    at the end (None without held-out problems), and `secs`, the whole time.
  """
  start = time.monotonic()
  run = build.run(config)
  writer = metrics.Writer(workdir)
  progress = metrics.Progress(config.steps)

  params = warm_up(run, initial_params(run), progress)
  update = build.updater(run, params)
  state = update.compiled.init(params)
  run.engine.load(state.params, version=0)
  before = after = evaluate(run, 0)
  writer.write(0, {'heldout_accuracy': before})
  progress.show(0, {'heldout_accuracy': before})

  for step in range(config.steps):
    rollout, sample_secs = timed(collect, run, step)
    (state, measured), learn_secs = timed(learn, update, state, rollout, step)
    run.engine.load(state.params, version=step + 1)
    measured |= reward_parts(rollout)
    measured |= speed(rollout, sample_secs, learn_secs)
    if is_due(config, step + 1):
      measured['heldout_accuracy'] = after = evaluate(run, step + 1)
    writer.write(step + 1, measured)
    progress.show(step + 1, measured)

  progress.close()
  return {'before': before, 'after': after, 'secs': time.monotonic() - start}


def initial_params(run: build.Run) -> Any:
  """Random parameters, sharded over the mesh."""
  key = keys.key(run.config.seed, 'init')
  abstract = jax.eval_shape(run.model.init, key)
  place = sharding.of_params(run.mesh, abstract, run.model.logical_axes)
  return jax.jit(run.model.init, out_shardings=place)(key)


def warm_up(run: build.Run, params: Any, progress: metrics.Progress) -> Any:
  """Supervised steps on demonstrations; returns the parameters."""
  config = run.config.warm_up
  if not config.steps:
    return params
  examples = build.demonstrations(run)
  update = build.warm_up_updater(run, params)
  state = update.compiled.init(params)
  for step in range(config.steps):
    records = data.take(examples, step * config.examples, config.examples)
    rollout = rollout_lib.demonstrations(
      records, run.tokenizer, run.config.data.completion_buckets
    )
    state, measured = update(state, rollout, step)
    if (step + 1) % 50 == 0:
      loss = metrics.to_scalars(measured)['loss']
      progress.line(f'warm-up {step + 1}/{config.steps}  loss {loss:.3f}')
  return state.params


def collect(run: build.Run, step: int) -> Rollout:
  """The rollout of one step: row i of step n is prompt n * P + i."""
  config = run.config.sampler
  rollout = rollout_lib.collect(
    data.take(run.prompts, step * config.prompts, config.prompts),
    run.engine,
    run.tokenizer,
    run.rewards,
    run.sampling,
    config.group,
    step,
    run.config.data.completion_buckets,
  )
  if run.config.shuffle_rewards:
    rng = keys.generator(run.config.seed, 'shuffle rewards', step)
    rollout = shuffle_rewards(rollout, rng)
  return rollout


def learn(update, state, rollout: Rollout, step: int):
  """The new state, and plain numbers: waits for the device."""
  state, measured = update(state, rollout, step)
  return state, metrics.to_scalars(measured)


def shuffle_rewards(rollout: Rollout, rng: np.random.Generator) -> Rollout:
  """Rewards permuted over the judged completions: nothing to be learned."""
  reward, valid = rollout.batch.reward.copy(), rollout.batch.valid
  reward[valid] = rng.permutation(reward[valid])
  return rollout._replace(batch=rollout.batch._replace(reward=reward))


def is_due(config: Config, step: int) -> bool:
  """Whether to evaluate after this many rollouts."""
  every = config.evaluation.every_steps
  return step == config.steps or bool(every) and step % every == 0


def evaluate(run: build.Run, step: int) -> float | None:
  """Mean of the first reward over greedy answers to held-out problems.

  None if there are none. For a reward of 0 or 1 this is the accuracy.
  """
  if run.heldout is None:
    return None
  number = min(run.config.evaluation.examples, len(run.heldout))
  rollout = rollout_lib.collect(
    data.take(run.heldout, 0, number),
    run.engine,
    run.tokenizer,
    run.rewards,
    dataclasses.replace(run.sampling, temperature=0.0),
    1,
    step,
    run.config.data.completion_buckets,
    purpose='evaluate',
  )
  return float(np.mean(rollout.batch.reward_parts[rollout.batch.valid, 0]))


def timed(function: Callable[..., Any], *args) -> tuple[Any, float]:
  """The result of a call, and its seconds."""
  start = time.monotonic()
  result = function(*args)
  return result, time.monotonic() - start


def reward_parts(rollout: Rollout) -> dict[str, float]:
  """The mean of each reward function over the judged completions."""
  parts = rollout.batch.reward_parts[rollout.batch.valid]
  means = parts.mean(axis=0) if len(parts) else []
  names = rollout.reward_names[: len(means)]
  return {
    f'reward/{name}': float(mean)
    for name, mean in zip(names, means, strict=True)
  }


def speed(
  rollout: Rollout, sample_secs: float, learn_secs: float
) -> dict[str, float]:
  """Seconds of the two halves of a step, and completion tokens per second."""
  tokens = float(rollout.length.sum())
  return {
    'sample_secs': sample_secs,
    'learn_secs': learn_secs,
    'sample_tokens_per_sec': tokens / sample_secs,
    'learn_tokens_per_sec': tokens / learn_secs,
  }
