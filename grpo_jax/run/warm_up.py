"""The warm-up: supervised steps on demonstrations, before the first rollout."""

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
    parts: See `build.Run`.
    workdir: The workdir of the run; its folder `warm_up` holds the checkpoints.
    monitor: Shows the loss.
    stop: Called between steps; once it returns True, the warm-up is saved.
    frozen: Parameters that no update changes; see `model.frozen`.
    peers: The processes of the run.

  Returns:
    The trained parameters after the last step, or None if stopped before it.

  Raises:
    ValueError: None of the last ten updates was finite, or none of a warm-up
      that has fewer, and `learner.nonfinite_rollouts` is not 0. It is looked at
      every ten updates and at the end. What was saved before stays, and the
      next start goes on from there.
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
    refused = _Refused(earlier, state.nonfinite)
    compiling = monitor.phase('compiling the warm-up step')
    too_long: set[int] = set()  # places of demonstrations that were dropped
    while step < spec.steps and not stop():
      records = _records(examples, step * spec.examples, spec.examples, parts)
      too_long |= _passed_over(records, step * spec.examples)
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
      refused.add(state.nonfinite)
      if step % _SHOWN_EVERY == 0 or step == spec.steps:
        scalars = metrics.to_scalars(measured)
        # Without the loss of an update that is not finite.
        told = {
          name: scalars[name]
          for name in ('loss', 'grad_norm')
          if name in scalars
        }
        monitor.progress('warm-up', step, spec.steps, told)
        last = refused.last()
        in_a_row = all(last) and len(last) >= min(_SHOWN_EVERY, spec.steps)
        if in_a_row and spec.learn.nonfinite_rollouts:
          # Not saved: the next start would take the warm-up for done.
          raise ValueError(
            f'{_problem(last, scalars)} learner.nonfinite_rollouts=0 goes on '
            'nevertheless.'
          )
        # Since the last multiple of ten, also if another start has done it.
        if any(new := last[-((step - 1) % _SHOWN_EVERY + 1) :]):
          if peers.is_first:
            monitor.warn(_problem(new, scalars))
      if step % spec.save_every_steps == 0 or saves.owed:
        saves.save(step, state, {'refused': refused.last()})
    if too_long:
      said = f'  {len(too_long):,} demonstrations were too long and dropped'
      monitor.line(said)
    # A finished warm-up is not saved here: the run's first checkpoint holds its
    # parameters.
    if step < spec.steps:
      saves.save(step, state, {'refused': refused.last()})
      return None
  return state.params


def _records(
  examples: Any, position: int, number: int, parts: build.Run
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
    raise ValueError(
      'Nearly all demonstrations are longer than the largest of '
      'data.prompt_buckets or data.completion_buckets, and '
      "data.too_long='drop' drops them; give larger widths, or others."
    )
  return records


def _passed_over(records: Sequence[Mapping[str, Any]], start: int) -> set[int]:
  """The places that `_records` has left out, of those from `start` on."""
  taken = {record['index'] for record in records}
  return {*range(start, max(taken) + 1)} - taken


class _Refused:
  """Which of the last ten updates were refused, because they were not finite.

  Args:
    earlier: What `last` returned in an earlier start, from its checkpoint.
    number: i32[], updates refused so far.
  """

  def __init__(self, earlier: Sequence[bool], number: jax.Array):
    self._last = [*earlier]
    # Not read yet, because that waits for the device.
    self._numbers = [jnp.copy(number)]

  def add(self, number: jax.Array) -> None:
    """Takes the number after one more update, which is donated to the next."""
    self._numbers.append(jnp.copy(number))

  def last(self) -> list[bool]:
    """Whether each of the last updates was refused, the oldest first."""
    numbers = [int(number) for number in jax.device_get(self._numbers)]
    new = [after > before for before, after in itertools.pairwise(numbers)]
    self._last = [*self._last, *new][-_SHOWN_EVERY:]
    self._numbers = self._numbers[-1:]
    return self._last


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
