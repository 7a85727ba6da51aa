"""Checkpoints on Orbax: saved while training goes on, verified when read.

A checkpoint is a pytree of arrays (a `TrainState`) and a JSON object (`host`:
where the prompts stand and whatever else is no array). A fingerprint of the
arrays is taken on the devices when they are saved and again when they are
read, so that a damaged file is noticed whatever was damaged in it. Nothing
about the mesh is kept: a state is restored onto the shardings it is asked for.
"""

from collections.abc import Callable
import contextlib
import math
import pathlib
import shutil
import sys
from typing import Any
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

Array = jax.Array


class Restored(NamedTuple):
  """What a checkpoint holds."""

  step: int  # the number it was saved under
  state: Any
  host: dict[str, Any]


@jax.jit
def _fingerprints(tree: Any) -> list[Array]:
  """u32[] per leaf: the sum of its words, each times an odd place number."""

  def of_leaf(x: Array) -> Array:
    size = jnp.dtype(x.dtype).itemsize
    words = x
    if x.dtype != bool:
      words = lax.bitcast_convert_type(x, f'uint{8 * size}')
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):  # no reshape, which would move sharded arrays
      stride = math.prod(x.shape[axis + 1 :]) % 2**32
      index = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
      place += index * jnp.uint32(stride)
    return jnp.sum(words.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)

  return [of_leaf(leaf) for leaf in jax.tree.leaves(tree)]


def fingerprint(tree: Any) -> list[int]:
  """One number per array; equal trees have equal ones on any mesh.

  Integer sums modulo 2**32, so the order of summation does not matter. Any one
  changed bit changes it.

  Args:
    tree: Arrays of at most 32 bits per element.

  Returns:
    One integer per leaf, in the order of `jax.tree.leaves`.
  """
  return [int(value) for value in jax.device_get(_fingerprints(tree))]


class Checkpoints:
  """The checkpoints in one directory.

  Saving is asynchronous and never raises because of the disk: a save that
  fails is counted, said, cleared away, and owed until one succeeds. As a
  context manager it is closed at the end.

  Args:
    directory: Made if it is not there. What a killed save has left in it is
      removed.
    keep_last: How many of the newest to keep.
    keep_best: Keep the one with the highest `metric` too.
    warn: Is told, in one sentence, of what went wrong and what was done.
    read_only: Change nothing: the run may be going on in another process.

  Attributes:
    failed: Saves that have failed.
    owed: Whether the last save has failed, so that another should be tried.
  """

  def __init__(
    self,
    directory: str | pathlib.Path,
    keep_last: int = 1,
    keep_best: bool = False,
    warn: Callable[[str], None] = lambda text: print(
      f'warning: {text}', file=sys.stderr
    ),
    read_only: bool = False,
  ):
    self._read_only = read_only
    self._directory = pathlib.Path(directory).absolute()
    self._keep_last, self._keep_best = keep_last, keep_best
    self.warn, self.failed, self.owed = warn, 0, False
    self._manager = self._open()

  def _open(self):
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies

    def metric(metrics):
      return metrics['metric']

    keep: list[Any] = [policies.LatestN(self._keep_last)]
    if self._keep_best:
      keep.append(
        policies.BestN(
          get_metric_fn=metric, n=1, keep_checkpoints_without_metrics=False
        )
      )
    return ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        create=not self._read_only,
        read_only=self._read_only,
        cleanup_tmp_directories=not self._read_only,
        best_fn=metric,
        preservation_policy=policies.AnyPreservationPolicy(keep),
      ),
    )

  def steps(self) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    return sorted(self._manager.all_steps())

  def best_step(self) -> int | None:
    """The step with the highest metric, None if none has one."""
    return self._manager.best_step()

  def save(
    self,
    step: int,
    state: Any,
    host: dict[str, Any],
    metric: float | None = None,
  ) -> None:
    """Begins to save; returns as soon as the arrays may be donated.

    Args:
      step: Number of the checkpoint; one that exists is left as it is.
      state: A pytree of arrays.
      host: What JSON can hold.
      metric: The higher, the better; None if it was not measured.
    """
    import orbax.checkpoint as ocp

    self.check()
    if step in self._manager.all_steps():
      return
    host = {**host, 'fingerprint': fingerprint(state)}
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host)
    )
    measured = None if metric is None else {'metric': float(metric)}
    self.owed = False
    with self._surviving(f'The save of checkpoint {step} has failed'):
      self._manager.save(step, args=items, metrics=measured)

  def check(self) -> None:
    """Notices a save that has failed in the background."""
    with self._surviving('A save has failed'):
      self._manager.check_for_errors()

  def wait(self) -> None:
    """Returns when what was begun is on the disk, or has failed."""
    with self._surviving('A save has failed'):
      self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and lets go of the directory."""
    self.wait()
    self._manager.close()

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  @contextlib.contextmanager
  def _surviving(self, what: str):
    try:
      yield
    except Exception as error:  # of many kinds, some of them bare
      self.failed, self.owed = self.failed + 1, True
      with contextlib.suppress(Exception):  # raises the same error once more
        self._manager.close()
      if jax.process_index() == 0:  # leave the room to what comes next
        for leftover in self._directory.glob('*.orbax-checkpoint-tmp'):
          shutil.rmtree(leftover, ignore_errors=True)
      self._manager = self._open()
      self.warn(
        f'{what} ({_first_line(error)}); training goes on, and the next step '
        'tries again.'
      )

  def restore(
    self, abstract: Any, step: int | None = None, field: str | None = None
  ) -> Restored | None:
    """The newest checkpoint that can be read.

    One that cannot be read is moved into the folder `corrupt`, if an earlier
    one can, and that is said.

    Args:
      abstract: A pytree of `jax.ShapeDtypeStruct`, with the shardings wanted.
      step: Of that step only; None takes the newest.
      field: The name of the first field of the state, to read that field alone.
        `abstract` is then of this field, and so is the state that is returned.

    Returns:
      A `Restored`; None if the directory holds no checkpoint at all.

    Raises:
      ValueError: There are checkpoints and none can be read, or none of that
        step exists.
    """
    steps = self.steps()
    if step is not None and step not in steps:
      raise ValueError(
        f'There is no checkpoint of step {step} in {self._directory}; there '
        f'are {steps or "none"}.'
      )
    problems: dict[int, str] = {}
    for tried in reversed(steps if step is None else [step]):
      try:
        restored = self._read(tried, abstract, field)
      except Exception as error:  # of many kinds, some of them bare
        if not (self._directory / str(tried)).is_dir():
          self._manager.reload()  # gone meanwhile: the run is going on
          return self.restore(abstract, step, field)
        problems[tried] = _first_line(error)
        continue
      for bad, problem in problems.items():
        self._set_aside(bad)
        self.warn(
          f'Checkpoint {bad} in {self._directory} cannot be read ({problem}); '
          f'{tried}, the one before, is used.'
        )
      return restored
    if problems:
      raise ValueError(
        f'Of the checkpoints {steps} in {self._directory}, {sorted(problems)} '
        f'cannot be read ({problems[max(problems)]}); choose another, or move '
        'them away to start anew.'
      )
    return None

  def _read(self, step: int, abstract: Any, field: str | None) -> Restored:
    import orbax.checkpoint as ocp

    how: Any = ocp.args.StandardRestore(abstract)
    if field:
      part = {field: abstract}
      how = ocp.args.PyTreeRestore(
        part,
        restore_args=ocp.checkpoint_utils.construct_restore_args(part),
        partial_restore=True,
      )
    items = ocp.args.Composite(state=how, host=ocp.args.JsonRestore())
    read = self._manager.restore(step, args=items)
    state, host = read['state'][field] if field else read['state'], read['host']
    host, found = dict(host), fingerprint(state)
    # One number per array, in the order of the fields: those of the first field
    # come first.
    if host.pop('fingerprint')[: len(found) if field else None] != found:
      raise ValueError('its arrays are not those that were saved')
    return Restored(step, state, host)

  def _set_aside(self, step: int) -> None:
    if jax.process_index() == 0 and not self._read_only:
      aside = self._directory / 'corrupt'
      aside.mkdir(exist_ok=True)
      shutil.rmtree(aside / str(step), ignore_errors=True)
      (self._directory / str(step)).rename(aside / str(step))
    self._manager.reload()


def _first_line(error: Exception) -> str:
  """What went wrong, without the thousand lines that may follow."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return lines[0][:200]
