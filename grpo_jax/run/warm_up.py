"""The warm-up: supervised steps on demonstrations, before the first rollout."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import itertools
import pathlib
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp

from grpo_jax import data
from grpo_jax.episodes import rollout
from grpo_jax.hosts import processes
from grpo_jax.learner import metrics
from grpo_jax.learner import updates
from grpo_jax.monitor import Monitor
from grpo_jax.run.build import build
from grpo_jax.run.build import data as build_data
from grpo_jax.run.build.specs import WarmUpSpec
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep.checkpoint import Checkpoints

_MOST_LOOKED_AT = 100  # demonstrations for each that fits
_SHOWN_EVERY = 10  # steps; reading a metric waits for the device


def run(
  parts: build.Run,
  workdir: pathlib.Path,
  monitor: Monitor,
  stop: Callable[[], bool],
  frozen: Any,
  peers: processes.Processes = processes.ALONE,
) -> Any:
  """Trains on demonstrations, or continues from a checkpoint of the warm-up.

  Args:
    parts: Those of the run.
    workdir: The workdir of the run; its folder `warm_up` holds the checkpoints.
    monitor: Shows the loss.
    stop: Called between steps; once it returns True, the warm-up is saved.
    frozen: Parameters that no update changes.
    peers: The processes of the run.

  Returns:
    The trained parameters after the last step, or None if stopped before it.

  Raises:
    ValueError: None of the last ten updates was finite, or none of a warm-up
      that has fewer, and `learner.nonfinite_rollouts` is not 0. It is looked at
      every ten updates and at the end. What was saved before stays, and the
      next start goes on from there. Also if nearly all demonstrations are too
      long, or a warm-up that is stopped cannot be saved.
  """
  spec = parts.warm_up
  drawing = 'drawing the initial parameters'
  if parts.weights.path:
    drawing = 'reading the weights'
  if spec is None:
    with monitor.phase(drawing):
      return build.initial_params(parts)
  examples = spec.demonstrations()
  updater = build.warm_up_updater(parts, frozen)
  with Checkpoints(
    bucket.arrays(workdir) / 'warm_up', 1, warn=monitor.warn, peers=peers
  ) as saves:
    saved = saves.restore(updater.compiled.abstract)
    if saved is None:
      with monitor.phase(drawing):
        state = updater.compiled.init(build.initial_params(parts))
        step = 0
    else:
      step, state = saved.step, saved.state
      monitor.line(f'  goes on from warm-up step {step}')
    earlier = saved.host.get('refused', []) if saved else []
    # Copies, because the state is donated to the next update.
    numbers = collections.deque([jnp.copy(state.nonfinite)], _SHOWN_EVERY + 1)
    compiling = monitor.phase('compiling the warm-up step')
    too_long: set[int] = set()  # places of demonstrations that were dropped
    while step < spec.steps and not stop():
      position = step * spec.examples
      records = _records(examples, position, spec.examples, parts, peers)
      too_long |= _passed_over(records, position)
      batch = rollout.demonstrations(
        records, parts.tokenizer, parts.data.completion_buckets
      )
      with compiling:
        credited = updates.credit_rollout(
          updater, updater.layout, state, batch, step
        )
        state, measured = updates.take_updates(updater, state, credited)
      compiling = contextlib.nullcontext()  # the first step has compiled
      step += 1
      numbers.append(jnp.copy(state.nonfinite))
      if step % _SHOWN_EVERY == 0 or step == spec.steps:
        scalars = metrics.to_scalars(measured)
        # Without the loss of an update that is not finite.
        losses = {
          name: scalars[name]
          for name in ('loss', 'grad_norm')
          if name in scalars
        }
        monitor.progress('warm-up', step, spec.steps, losses)
        # Not saved: the next start would take the warm-up for done.
        last = _last_refused(earlier, numbers)
        _check_finite(last, scalars, step, spec, monitor, peers)
      if step % spec.save_every_steps == 0 or saves.owed:
        host = {'refused': _last_refused(earlier, numbers)}
        saves.save(step, state, host)
    if too_long:
      said = f'  {len(too_long):,} demonstrations were too long and dropped'
      monitor.line(said)
    # A finished warm-up is not saved here: the run's first checkpoint holds its
    # parameters.
    if step < spec.steps:
      host = {'refused': _last_refused(earlier, numbers)}
      saves.insist(
        lambda: saves.save(step, state, host),
        'warm-up step',
        step,
        monitor.phase,
      )
      return None
  return state.params


def _records(
  examples: Any,
  position: int,
  number: int,
  parts: build.Run,
  peers: processes.Processes,
) -> list[dict[str, Any]]:
  """The demonstrations of an update.

  With data.too_long='drop' the next ones that fit take the places of those that
  do not; the next update then sees them again. So the position of an update
  follows from its number, and the warm-up can go on from any.
  """
  fits = build_data.shown_fits(parts.data, parts.tokenizer)
  records = data.take_fitting(
    examples, position, number, fits, _MOST_LOOKED_AT * number
  )
  if len(records) < number:
    error = ValueError(
      'Nearly all demonstrations are longer than the largest of '
      'data.prompt_buckets or data.completion_buckets, and '
      "data.too_long='drop' drops them; give larger widths, or others."
    )
    raise peers.fail(error)  # which all raise
  return records


def _passed_over(records: Sequence[Mapping[str, Any]], start: int) -> set[int]:
  """The places that `_records` has left out, of those from `start` on."""
  taken = {record['index'] for record in records}
  return {*range(start, max(taken) + 1)} - taken


def _last_refused(
  earlier: Sequence[bool], numbers: Sequence[jax.Array]
) -> list[bool]:
  """Whether each of the last ten updates was refused, the oldest first.

  An update is refused if it is not finite.

  Args:
    earlier: The same of an earlier start, from its checkpoint.
    numbers: i32[] each: updates refused by the beginning of this start, or ten
      updates ago, and after each one since. To read them waits for the device.
  """
  counts = map(int, jax.device_get(list(numbers)))
  new = [after > before for before, after in itertools.pairwise(counts)]
  return [*earlier, *new][-_SHOWN_EVERY:]


def _check_finite(
  last: Sequence[bool],
  scalars: Mapping[str, float | None],
  step: int,
  spec: WarmUpSpec,
  monitor: Monitor,
  peers: processes.Processes,
) -> None:
  """Warns of updates that were refused.

  Args:
    last: Whether each of the last ten updates was.
    scalars: The metrics of the last of them.
    step: Updates done.
    spec: Of the warm-up: how long it is, and whether it may end early.
    monitor: Shows the warning.
    peers: The processes of the run.

  Raises:
    ValueError: All of them were; in all processes.
  """
  in_a_row = all(last) and len(last) >= min(_SHOWN_EVERY, spec.steps)
  if in_a_row and spec.learn.nonfinite_rollouts:
    error = ValueError(
      f'{_problem(last, scalars)} learner.nonfinite_rollouts=0 goes on '
      'nevertheless.'
    )
    raise peers.fail(error)
  # Since the last multiple of ten, also if another start has done it.
  new = last[-((step - 1) % _SHOWN_EVERY + 1) :]
  if any(new) and peers.is_first:
    monitor.warn(_problem(new, scalars))


def _problem(
  refused: Sequence[bool], scalars: Mapping[str, float | None]
) -> str:
  """A sentence about updates that were refused.

  Args:
    refused: Whether each of the last updates was.
    scalars: The metrics of the last of them.
  """
  parts = 'loss', 'gradient', 'update'
  first = [part for part in parts if scalars.get(f'nonfinite_{part}')]
  why = f' (of the last one, the {first[0]})' if first else ''
  return (
    f'{sum(refused)} of the last {len(refused)} updates of the warm-up were '
    f'not finite{why}, and are refused; look at warm_up.lr, the model and the '
    'demonstrations.'
  )


def forget(workdir: pathlib.Path) -> None:
  """Removes the warm-up's checkpoints; call it once the run has its own."""
  if jax.process_index() == 0:
    with contextlib.suppress(OSError):
      epath.Path(bucket.arrays(workdir) / 'warm_up').rmtree(missing_ok=True)
