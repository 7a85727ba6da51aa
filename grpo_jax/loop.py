"""The outer loop: sample, judge, learn, repeat."""

from collections.abc import Iterator
import dataclasses
import pathlib
import sys
import time
from typing import Any

import jax
import numpy as np

from grpo_jax import build
from grpo_jax import data
from grpo_jax import keys
from grpo_jax import learner as learner_lib
from grpo_jax import metrics
from grpo_jax import rollout as rollout_lib
from grpo_jax import sharding
from grpo_jax.config import Config
from grpo_jax.learner import Compiled
from grpo_jax.learner import TrainState
from grpo_jax.rollout import LayoutSpec
from grpo_jax.rollout import Rollout


def train(config: Config, workdir: str | pathlib.Path) -> dict[str, float]:
  """Trains a model and says how well it did before and after.

  Args:
    config: See `config.py`.
    workdir: Where `metrics.jsonl` goes.

  Returns:
    `before` and `after`, the held-out greedy accuracies after the warm-up and
    at the end, and `secs`, the time in between and before.
  """
  start = time.monotonic()
  run = build.run(config)
  writer, progress = metrics.Writer(workdir), Progress(config.steps)
  params = warm_up(run, initial_params(run), progress)
  compiled = learner_lib.compiled(build.learner(run), params)
  spec = build.layout_spec(run)
  reference = params if 'logp_ref' in run.method.requires else None
  state = compiled.init(params)
  run.engine.load(state.params, 0)
  before = after = evaluate(run, 0)
  writer.write(0, {'heldout_accuracy': before})
  progress.show(0, {'heldout_accuracy': before})
  for step in range(config.steps):
    rollout, sampled = timed(lambda: collect(run, step))  # noqa: B023
    (state, measured), learned = timed(
      lambda: update(run, compiled, spec, state, rollout, reference, step)  # noqa: B023
    )
    run.engine.load(state.params, step + 1)
    measured |= speed(rollout, sampled, learned)
    if is_due(config, step + 1):
      measured['heldout_accuracy'] = after = evaluate(run, step + 1)
    writer.write(step + 1, measured)
    progress.show(step + 1, measured)
  secs = time.monotonic() - start
  return {'before': before, 'after': after, 'secs': secs}


def initial_params(run: build.Run) -> Any:
  """Random parameters, sharded over the mesh."""
  key = keys.key(run.config.seed, 'init')
  abstract = jax.eval_shape(run.model.init, key)
  place = sharding.of_params(run.mesh, abstract, run.model.logical_axes)
  return jax.jit(run.model.init, out_shardings=place)(key)


def warm_up(run: build.Run, params: Any, progress: 'Progress') -> Any:
  """Supervised steps on demonstrations; returns the parameters."""
  config = run.config.warm_up
  if not config.steps:
    return params
  examples, spec = build.demonstrations(run), build.warm_up_layout(run)
  compiled = learner_lib.compiled(build.warm_up_learner(run), params)
  state = compiled.init(params)
  for step in range(config.steps):
    records = data.take(examples, step * config.examples, config.examples)
    rollout = rollout_lib.demonstrations(
      records, run.tokenizer, run.config.data.completion_buckets
    )
    state, measured = one_update(
      run,
      compiled,
      spec,
      state,
      rollout,
      rollout.batch,
      np.arange(len(records)),
    )
    if (step + 1) % 50 == 0:
      progress.warm_up(step + 1, config.steps, metrics.to_scalars(measured))
  return state.params


def collect(run: build.Run, step: int) -> Rollout:
  """The rollout of one step."""
  config = run.config.sampler
  records = data.take(run.prompts, step * config.prompts, config.prompts)
  rollout = rollout_lib.collect(
    records,
    run.engine,
    run.tokenizer,
    run.rewards,
    run.sampling,
    config.group,
    step,
    run.config.data.completion_buckets,
  )
  if run.config.shuffle_rewards:
    rollout = shuffle_rewards(rollout, generator(run, step, 'shuffle'))
  return rollout


def update(
  run: build.Run,
  compiled: Compiled,
  spec: LayoutSpec,
  state: TrainState,
  rollout: Rollout,
  reference: Any,
  step: int,
) -> tuple[TrainState, dict[str, float]]:
  """All optimizer steps of one rollout."""
  batch = with_policies(run, compiled, spec, state, rollout, reference)
  batch, loss_state, measured = compiled.credit(batch, state.loss_state)
  state = state._replace(loss_state=loss_state)
  first = True
  for chosen in optimizer_batches(run, step):
    state, more = one_update(
      run, compiled, spec, state, rollout, batch, chosen, first
    )
    measured, first = metrics.merge(measured, more), False
  return state, metrics.to_scalars(measured)


def one_update(
  run, compiled, spec, state, rollout, batch, chosen, first=True
) -> tuple[TrainState, dict[str, metrics.Metric]]:
  """One optimizer step on some prompts of a credited rollout."""
  if batch.advantage is None:
    batch, _, _ = compiled.credit(batch, state.loss_state)
  layout, used = rollout_lib.micro_batches(rollout, chosen, spec)
  layout = jax.device_put(layout, sharding.rows(run.mesh, axis=1))
  return compiled.train_step(state, batch, chosen, layout, used, first)


def with_policies(run, compiled, spec, state, rollout, reference):
  """The batch with the log-probabilities that the method asks for."""
  config, batch = run.config.learner, rollout.batch
  updates = config.batches * config.epochs
  if config.anchor == 'sampler':
    batch = batch._replace(logp_old=batch.logp_sampler)
  elif updates > 1 or 'logp_old' in run.method.requires:
    logp = score(run, compiled, spec, state.params, rollout)
    batch = batch._replace(logp_old=logp)
  if reference is not None:
    logp = score(run, compiled, spec, reference, rollout)
    batch = batch._replace(logp_ref=logp)
  return batch


def score(run, compiled, spec, params, rollout) -> np.ndarray:
  """f32[P,G,T], the completions under some parameters."""
  logp = np.zeros(rollout.batch.mask.shape, np.float32)
  for chosen in np.split(np.arange(len(logp)), run.config.learner.batches):
    layout, used = rollout_lib.micro_batches(rollout, chosen, spec)
    layout = jax.device_put(layout, sharding.rows(run.mesh, axis=1))
    shape = (len(chosen), *logp.shape[1:])
    logp[chosen] = compiled.score(params, layout, used, shape)
  return logp


def optimizer_batches(run: build.Run, step: int) -> Iterator[np.ndarray]:
  """The prompts of each optimizer batch, every epoch in another order."""
  config = run.config.learner
  order = np.arange(run.config.sampler.prompts)
  for epoch in range(config.epochs):
    if epoch:
      order = generator(run, step, f'epoch {epoch}').permutation(order)
    yield from np.split(order, config.batches)


def generator(run: build.Run, step: int, purpose: str) -> np.random.Generator:
  """NumPy random numbers of (seed, step, purpose)."""
  key = keys.key(run.config.seed, purpose, step)
  return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def shuffle_rewards(rollout: Rollout, rng: np.random.Generator) -> Rollout:
  """Rewards permuted over the judged completions: nothing to be learned."""
  reward = rollout.batch.reward.copy()
  valid = rollout.batch.valid
  reward[valid] = rng.permutation(reward[valid])
  return rollout._replace(batch=rollout.batch._replace(reward=reward))


def is_due(config: Config, step: int) -> bool:
  """Whether to evaluate after this many rollouts."""
  every = config.evaluation.every_steps
  return step == config.steps or bool(every) and step % every == 0


def evaluate(run: build.Run, step: int) -> float:
  """Mean reward of greedy completions of held-out problems."""
  if run.heldout is None:
    return float('nan')
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
  return float(np.mean(rollout.batch.reward[rollout.batch.valid]))


def timed(function) -> tuple[Any, float]:
  """The result of a call, and its seconds."""
  start = time.monotonic()
  result = function()
  return result, time.monotonic() - start


def speed(rollout: Rollout, sampled: float, learned: float) -> dict[str, float]:
  """Seconds of the two halves of a step, and completion tokens per second."""
  tokens = float(rollout.length.sum())
  return {
    'sample_secs': sampled,
    'learn_secs': learned,
    'sample_tokens_per_sec': tokens / sampled,
    'learn_tokens_per_sec': tokens / learned,
  }


class Progress:
  """One line on the terminal, rewritten; one line each where it is none."""

  def __init__(self, steps: int):
    self._steps, self._start = steps, time.monotonic()

  def warm_up(self, step: int, steps: int, measured: dict[str, float]):
    """Shows a step of the warm-up."""
    self._line(f'warm-up {step}/{steps}  loss {measured["loss"]:.3f}')

  def show(self, step: int, measured: dict[str, float]):
    """Shows a rollout."""
    names = {
      'reward': 'reward',
      'heldout_accuracy': 'held-out',
      'length_tokens': 'length',
      'kl_old': 'kl',
      'grad_norm': 'gradient',
    }
    shown = [
      f'{label} {measured[name]:.3f}'
      for name, label in names.items()
      if name in measured
    ]
    self._line('  '.join([f'step {step}/{self._steps}', *shown]))

  def _line(self, text: str):
    secs = time.monotonic() - self._start
    live = sys.stderr.isatty()
    print(
      f'\r\033[K{text}  {secs:.0f} s' if live else f'{text}  {secs:.0f} s',
      end='' if live else '\n',
      file=sys.stderr,
      flush=True,
    )
