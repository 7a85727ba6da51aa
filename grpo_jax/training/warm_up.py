"""The warm-up: supervised steps on demonstrations, before the first rollout."""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import pathlib
import shutil
from typing import Any

import jax

from grpo_jax import data
from grpo_jax import metrics
from grpo_jax.monitor import Monitor
from grpo_jax.rollouts import rollout
from grpo_jax.training import build
from grpo_jax.training import build_updater
from grpo_jax.training.checkpoint import Checkpoints

_SHOWN_EVERY = 10  # steps; reading a metric waits for the device


def run(
  parts: build.Run,
  workdir: pathlib.Path,
  monitor: Monitor,
  stop: Callable[[], bool],
  frozen: Any = None,
) -> Any:
  """Trains on demonstrations, or continues from a checkpoint of the warm-up.

  Args:
    parts: See `build.Run`.
    workdir: The workdir of the run; its folder `warm_up` holds the checkpoints.
    monitor: Shows the loss.
    stop: Called between steps; once it returns True, the warm-up is saved.
    frozen: Parameters that no update changes; see `build_model.frozen`.

  Returns:
    The trained parameters after the last step, or None if stopped before it.

  Raises:
    ValueError: Several updates in a row were not finite. What was saved before
      stays, and the next start goes on from there.
  """
  config = parts.config.warm_up
  drawing = 'drawing the initial parameters'
  if parts.config.model.path:
    drawing = 'reading the weights'
  if not config.steps:
    with monitor.phase(drawing):
      return build.initial_params(parts)
  examples = build.demonstrations(parts)
  update = build_updater.warm_up_updater(parts)
  update.frozen = frozen
  with Checkpoints(workdir / 'warm_up', 1, warn=monitor.warn) as saves:
    saved = saves.restore(update.abstract)
    if saved is None:
      with monitor.phase(drawing):
        step, state = 0, update.init(build.initial_params(parts))
    else:
      step, state = saved.step, saved.state
      monitor.line(f'  goes on from warm-up step {step}')
    shown, refused = step, int(state.nonfinite)
    compiling = monitor.phase('compiling the warm-up step')
    while step < config.steps and not stop():
      records = data.take(examples, step * config.examples, config.examples)
      batch = rollout.demonstrations(
        records, parts.tokenizer, parts.config.data.completion_buckets
      )
      with compiling:
        state, measured = update(state, batch, step)
      compiling = contextlib.nullcontext()  # the first step has compiled
      step += 1
      if step % _SHOWN_EVERY == 0 or step == config.steps:
        scalars = metrics.to_scalars(measured)
        # Without the loss of an update that is not finite.
        told = {
          name: scalars[name]
          for name in ('loss', 'grad_norm')
          if name in scalars
        }
        monitor.progress('warm-up', step, config.steps, told)
        before, refused = refused, int(state.nonfinite)
        if problem := _refused(refused - before, step - shown, scalars):
          # The first may have been finite, and have made the others not so.
          if refused - before >= max(1, step - shown - 1):
            # Not saved: the next start would take the warm-up for done.
            raise ValueError(problem)
          monitor.warn(problem)
        shown = step
      if step % parts.config.checkpoint.every_warm_up_steps == 0 or saves.owed:
        saves.save(step, state, {})
    # A finished warm-up is not saved here: the run's first checkpoint holds its
    # parameters.
    if step < config.steps:
      saves.save(step, state, {})
      return None
  return state.params


def _refused(
  number: int, updates: int, scalars: Mapping[str, float | None]
) -> str:
  """A sentence, if some of the last updates were refused; else ''.

  Args:
    number: Of them that were refused.
    updates: How many there were.
    scalars: The metrics of the last of them.
  """
  if not number:
    return ''
  parts = 'loss', 'gradient', 'update'
  first = [part for part in parts if scalars.get(f'nonfinite_{part}')]
  why = f' (of the last one, the {first[0]})' if first else ''
  return (
    f'{number} of the last {updates} updates of the warm-up were not finite'
    f'{why}, and are refused; look at warm_up.lr, the model and the '
    'demonstrations.'
  )


def forget(workdir: pathlib.Path) -> None:
  """Removes the warm-up's checkpoints; call it once the run has its own."""
  if jax.process_index() == 0:
    shutil.rmtree(workdir / 'warm_up', ignore_errors=True)
