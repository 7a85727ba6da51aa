"""Checkpoints on Orbax: saved while training goes on, verified when read.

A checkpoint is a pytree of arrays (a `TrainState`) and a JSON object, `host`,
which holds the position in the prompts and all else that is no array. A
fingerprint of the arrays is computed on the devices when they are saved and
again when they are read, so that damaged files are noticed. A SHA-256 covers
the JSON object, and the number under which the checkpoint is saved. The mesh is
not recorded: a state is restored onto the shardings that the caller asks for.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
import threading
import time
from typing import Any
from typing import NamedTuple

from etils import epath
import numpy as np

from grpo_jax.config import plain_text
from grpo_jax.config import whole_files
from grpo_jax.hosts import processes
from grpo_jax.run.keep import fingerprints
from grpo_jax.run.keep import host_memory

_BLOBS = 'sha256'  # where the JSON has the hashes of bytes beside it
_BARRIER_SECS = 1200  # that Orbax waits for other processes by default
_HOST = 'host/metadata'  # in the folder of a checkpoint: that JSON


class Restored(NamedTuple):
  """What a checkpoint holds."""

  step: int  # the number it was saved under
  state: Any
  host: dict[str, Any]


def _sha256(step: int, host: dict[str, Any]) -> str:
  """A hash of all that lies beside the arrays, as JSON has it."""
  text = json.dumps([step, json.loads(json.dumps(host))], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _sealed(
  step: int, host: dict[str, Any], arrays: list[int]
) -> dict[str, Any]:
  """What is written beside arrays of these fingerprints: `host`, verified."""
  found = {'arrays': arrays}
  digest = _sha256(step, {**host, 'fingerprint': found})
  return {**host, 'fingerprint': {**found, 'host': digest}}


class Checkpoints:
  """The checkpoints in one directory.

  Saving is asynchronous, and a save that fails does not raise: it is counted in
  `failed`, reported to `warn`, its files are removed, and `owed` becomes True.
  Used as a context manager, this object is closed at the end.

  Args:
    directory: Made if it is not there. It may be in a bucket, as a path of
      `etils`. What a killed save has left in it is removed.
    keep_last: How many of the newest checkpoints to keep.
    best_metric: The name of the metric that `save` is given. The checkpoint
      with its highest value is kept too; values of other names, which an
      earlier start may have saved, do not count. '': none is kept.
    warn: Called with a sentence that says what went wrong and what was done.
    read_only: Whether to change nothing in the directory, because the run may
      be going on in another process.
    every_minutes: After how many a save is due; 0: it never is.
    peers: The processes that save and read together. Whether a save has failed,
      and which checkpoint can be read, is the same in all of them.

  Attributes:
    failed: How many saves have failed.
    owed: Whether the last save has failed, so that another should be tried.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    keep_last: int = 1,
    best_metric: str = '',
    warn: Callable[[str], None] = lambda text: print(
      f'warning: {plain_text.printable(text)}', file=sys.stderr
    ),
    read_only: bool = False,
    every_minutes: float = 0.0,
    peers: processes.Processes = processes.ALONE,
  ):
    self._read_only, self._peers = read_only, peers
    self._alone = peers.number == 1
    self._every_secs, self._begun = 60 * every_minutes, time.monotonic()
    if isinstance(directory, str | pathlib.Path):  # no path in a bucket
      directory = os.path.abspath(directory)
    self._directory = epath.Path(directory)
    self._keep_last, self._best_metric = keep_last, best_metric
    self.warn, self.failed, self.owed = warn, 0, False
    # How often what all do together has failed; whether a save may go on.
    self._failures, self._is_writing = 0, False
    self._manager = self._opened()

  def _opened(self):
    """Orbax's manager, once all processes have one."""
    # One process alone keeps the error of its system.
    return self._open() if self._alone else self._together(self._open)

  def _open(self):
    import orbax.checkpoint as ocp
    from orbax.checkpoint import checkpoint_managers as policies

    measured = self._measured

    class Manager(ocp.CheckpointManager):
      """Takes each metric from the part of a checkpoint that is verified.

      Orbax reads files of its own when it opens the directory. One of them that
      is damaged would make every checkpoint unusable.
      """

      def metrics(self, step: int) -> dict[str, float] | None:
        return measured(step)

    def metric(metrics):
      return metrics['metric']

    keep: list[Any] = [policies.LatestN(self._keep_last)]
    if self._best_metric:
      keep.append(
        # By default Orbax would keep every checkpoint that has no metric too.
        policies.BestN(
          get_metric_fn=metric, n=1, keep_checkpoints_without_metrics=False
        )
      )
    return Manager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        create=not self._read_only,
        read_only=self._read_only,
        cleanup_tmp_directories=not self._read_only,
        best_fn=metric,
        preservation_policy=policies.AnyPreservationPolicy(keep),
        async_options=ocp.AsyncOptions(
          # Under the name of now, whenever its thread gets there.
          barrier_sync_fn=None
          if self._alone
          else functools.partial(self._barrier, failures=self._failures),
          # Else one whose disk is full would be waited for, for five minutes.
          create_directories_asynchronously=self._alone,
        ),
      ),
    )

  def _barrier(
    self, *, key: str, timeout_ms: int, failures: int | None = None
  ) -> None:
    """In place of Orbax's, at which one that has failed is awaited for long."""
    in_main = threading.current_thread() is threading.main_thread()
    self._peers.barrier(key, timeout_ms, self._work(in_main, failures))

  def _work(self, in_main: bool, failures: int | None = None) -> str:
    """A name of what waits at barriers, other after each failure."""
    number = self._failures if failures is None else failures
    return f'{self._directory.name} {number} {in_main}'

  def _leave(self) -> None:
    """Ends the waits of other processes for this one, which has failed."""
    for in_main in (True, False):
      self._peers.leave(self._work(in_main))

  def _together(self, function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, if it raises in no process.

    Raises:
      ValueError: It has raised in one; the message is the same in all.
    """
    result, problem = None, ''
    with _own_barriers(self._peers, self._barrier):
      try:
        result = function(*args)
      except (
        Exception
      ) as error:  # Orbax raises many types, some plain Exception
        problem = _first_line(_cause(error))
        self._leave()
      problems = self._peers.exchange(problem)
    if not any(problems):
      return result
    self._failures += 1
    # Rather one that has failed than one that has waited for it.
    rank = min(
      (rank for rank, one in enumerate(problems) if one),
      key=lambda rank: problems[rank].startswith(processes.WAITED),
    )
    several = self._peers.number > 1
    raise ValueError(
      f'process {rank}: {problems[rank]}' if several else problems[rank]
    )

  def steps(self) -> list[int]:
    """The steps of the complete checkpoints, oldest first."""
    return self._peers.from_first(sorted(self._manager.all_steps()))

  def best_step(self) -> int | None:
    """The step with the highest `best_metric`, None if none has one."""
    return self._peers.from_first(self._manager.best_step())

  def named(self, which: str) -> int | None:
    """The step of the checkpoint that somebody asks for.

    Args:
      which: `'latest'`, `'best'`, or the number of rollouts.

    Returns:
      None for the newest.

    Raises:
      ValueError: It is none of these, or no checkpoint is the best.
    """
    if which == 'latest':
      return None
    if which == 'best':
      for step, problem in self._peers.from_first(self._damaged()).items():
        self._tell(
          f'Checkpoint {step} in {self._directory} cannot be read ({problem}); '
          'it may have been the best.'
        )
      if (best := self.best_step()) is None:
        raise ValueError(
          'No checkpoint has a value of config.checkpoint.best_metric; give '
          "'latest' or the number of a rollout."
        )
      return best
    if not (which.isascii() and which.isdecimal()):
      raise ValueError(
        f"--checkpoint={which} is none of 'latest', 'best' or a number of "
        f'rollouts; there are {self.steps()}.'
      )
    return int(which)

  def save(
    self,
    step: int,
    state: Any,
    host: dict[str, Any],
    metric: float | None = None,
  ) -> None:
    """Begins to save; returns as soon as the arrays may be donated.

    Args:
      step: Number of the checkpoint; one that exists is left as it is, unless
        it was saved before its evaluation. Its host has then something under
        'unwritten', and once `host` has nothing there, takes its place.
      state: A pytree of arrays.
      host: What JSON can hold; also bytes, which are kept beside the JSON.
      metric: `best_metric`, the higher, the better; None if it was not
        measured.
    """
    import orbax.checkpoint as ocp

    # Else the error of an earlier save would be raised by this one.
    self.wait()
    measured = self._metric(metric)
    if step in self.steps():
      self.owed = False
      complete = functools.partial(self._complete, step, host, measured)
      self._survive(f'The save of checkpoint {step} has failed', complete)
      return
    blobs = {k: v for k, v in host.items() if isinstance(v, bytes)}
    hashes = {k: hashlib.sha256(v).hexdigest() for k, v in blobs.items()}
    host = {**host, **dict.fromkeys(blobs), _BLOBS: hashes}
    host = _sealed(
      step, {**host, 'metric': measured}, fingerprints.compute(state)
    )
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(state),
      host=ocp.args.JsonSave(host),
      **{
        name: ocp.args.ArraySave(np.frombuffer(blob, np.uint8))
        for name, blob in blobs.items()
      },
    )
    self.owed, self._is_writing, self._begun = False, True, time.monotonic()
    save = functools.partial(
      self._manager.save,
      step,
      args=items,
      metrics=measured and {'metric': measured['value']},
    )
    self._survive(f'The save of checkpoint {step} has failed', save)

  def _metric(self, value: float | None) -> dict[str, Any] | None:
    """A metric as a checkpoint holds it."""
    if value is None:
      return None
    return {'name': self._best_metric, 'value': float(value)}

  def _complete(
    self, step: int, host: dict[str, Any], measured: dict[str, Any] | None
  ) -> None:
    """Writes beside the arrays what was not known before the evaluation.

    The arrays stay, because an evaluation changes none.
    """
    if self._peers.is_first:
      saved, arrays = self._host(step)
      if saved.get('unwritten') is None or host.get('unwritten') is not None:
        return
      known = {k: v for k, v in host.items() if not isinstance(v, bytes)}
      # What else is drawn from by now is not among the arrays.
      known.pop('receipt', None)
      host = _sealed(step, {**saved, **known, 'metric': measured}, arrays)
      file, text = self._directory / str(step) / _HOST, json.dumps(host)
      if '://' in os.fspath(file):
        file.write_text(text)  # an object of a bucket is there whole, or not
      else:
        whole_files.write(file, text.encode())
    self._manager.reload()  # it knows the metrics that it has read

  def insist(
    self,
    save: Callable[[], Any],
    what: str,
    step: int,
    phase: Callable[[str], contextlib.AbstractContextManager[Any]],
  ) -> None:
    """Saves and waits until the checkpoint is on the disk; tries twice.

    Args:
      save: Calls `save` of this object.
      what: A word for `step`, such as 'rollout'.
      step: Number of the checkpoint.
      phase: Shows what is being done.

    Raises:
      ValueError: The checkpoint cannot be saved; in all processes.
    """
    for _ in range(2):
      save()
      with phase('waiting for the checkpoint to be written'):
        self.wait()
      if not self.owed:
        return
    error = ValueError(
      f'The checkpoint of {what} {step} could not be saved; make room and give '
      'the same command again, which goes on from the checkpoint of '
      f'{what} {max(self.steps(), default=None)}.'
    )
    raise self._peers.fail(error)  # all know of it, and none has failed alone

  def is_due(self) -> bool:
    """Whether so many minutes have gone by since the last save was begun."""
    if not self._every_secs:
      return False
    secs = time.monotonic() - self._begun
    return self._peers.from_first(secs >= self._every_secs)

  def check(self) -> None:
    """Notices a save that has failed in the background."""
    self._survive('A save has failed', self._manager.check_for_errors)

  def wait(self) -> None:
    """Waits until the save that was begun is on the disk, or has failed."""
    if not self._is_writing:
      return
    self._survive('A save has failed', self._manager.wait_until_finished)
    self._is_writing = False  # last: a wait may be interrupted
    host_memory.give_back()

  def close(self) -> None:
    """Waits for the last save, and closes Orbax's manager."""
    self.wait()
    self._manager.close()

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind, error, traceback) -> None:
    # If this process fails alone, it must not wait for the others.
    if error is None or self._peers.knows(error):
      self.close()
    else:
      self._leave()

  def _survive(self, what: str, function: Callable[[], Any]) -> None:
    """Calls a function that saves; if it raises anywhere, all go on without."""
    try:
      self._together(function)
    except processes.PeerError:  # of something else
      raise
    except ValueError as error:
      self.failed, self.owed = self.failed + 1, True
      # A manager keeps the error and raises it again, here and in every later
      # call. So it is replaced by a new one.
      with contextlib.suppress(Exception):
        self._manager.close()
      if self._peers.is_first:  # frees the disk for the next try
        for leftover in self._directory.glob('*.orbax-checkpoint-tmp'):
          with contextlib.suppress(OSError):
            leftover.rmtree()
      self._manager = self._opened()
      self._tell(
        f'{what} ({error}); as long as training goes on, the next step tries '
        'again.'
      )

  def _tell(self, text: str) -> None:
    """Warns, in one process, of what all know."""
    if self._peers.is_first:
      self.warn(text)

  def restore(
    self, abstract: Any, step: int | None = None, field: str | None = None
  ) -> Restored | None:
    """The newest checkpoint that can be read.

    If a checkpoint cannot be read and another one can, the former is moved into
    the folder `corrupt`, unless `read_only`, and `warn` is called.

    Args:
      abstract: A pytree of `jax.ShapeDtypeStruct`, with the shardings wanted;
        or a function that makes it from the `host` of the checkpoint.
      step: The step of the checkpoint to read; None: the newest.
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
      except processes.PeerError:  # of something else
        raise
      except ValueError as error:
        there = (self._directory / str(tried)).exists()
        if not self._peers.from_first(there):
          # The run, in another process, has meanwhile deleted this checkpoint
          # and written a newer one.
          self._manager.reload()
          return self.restore(abstract, step, field)
        problems[tried] = plain_text.said(error)
        continue
      # Only now that one could be read: if none can, the cause may be a config
      # of other shapes, and the files may be whole.
      if step is None:
        # Such as the best, which is not the newest.
        problems |= self._peers.from_first(self._damaged())
      for bad, problem in problems.items():
        self._set_aside(bad)
        which = f'{tried}, the one before,' if bad > tried else f'{tried}'
        self._tell(
          f'Checkpoint {bad} in {self._directory} cannot be read ({problem}); '
          f'{which} is used.'
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
    """A checkpoint that all processes can read; else a ValueError in all."""
    import orbax.checkpoint as ocp

    host, arrays = self._together(self._host, step)
    if callable(abstract):
      abstract = abstract(host)
    how: Any = ocp.args.StandardRestore(abstract)
    if field:
      # A standard restore reads the whole tree; only a PyTree restore reads a
      # part, and it takes the shardings from `restore_args`.
      part = {field: abstract}
      how = ocp.args.PyTreeRestore(
        part,
        restore_args=ocp.checkpoint_utils.construct_restore_args(part),
        partial_restore=True,
      )
    hashes = host.pop(_BLOBS, {})
    if field:  # nobody asks for what lies beside it
      hashes = {}
    items = ocp.args.Composite(
      state=how, **{name: ocp.args.ArrayRestore() for name in hashes}
    )

    def restore():
      found = self._manager.restore(step, args=items)
      for name, digest in hashes.items():
        host[name] = np.asarray(found[name]).tobytes()
        if hashlib.sha256(host[name]).hexdigest() != digest:
          raise ValueError(f'its {name} is not what was saved')
      return found['state']

    state = self._together(restore)
    # What it calls on the devices needs all processes.
    state = state[field] if field else state
    found = fingerprints.compute(state)
    # One number per array, in the order of the fields: those of the first field
    # come first.
    if arrays[: len(found) if field else None] != found:
      raise ValueError('its arrays are not those that were saved')
    del host['metric']
    return Restored(step, state, host)

  def _host(self, step: int) -> tuple[dict[str, Any], list[int]]:
    """What a checkpoint holds beside its arrays, verified.

    Returns:
      What `save` was given, with the `metric`; and the fingerprint of the
      arrays.
    """
    folder = self._directory / str(step)
    # Not by Orbax's manager, which calls this method while it opens.
    host = json.loads((folder / _HOST).read_text())
    fingerprints = host['fingerprint']
    if isinstance(fingerprints, list):  # of the arrays alone
      raise ValueError('an earlier version saved it, which alone reads it')
    digest = fingerprints.pop('host')
    if _sha256(step, host) != digest:
      raise ValueError('what lies beside its arrays is not what was saved')
    return host, host.pop('fingerprint')['arrays']

  def _measured(self, step: int) -> dict[str, float] | None:
    """`best_metric` of a checkpoint, as Orbax wants it; None if it has none."""
    with contextlib.suppress(Exception):  # `restore` and `named` say of what
      metric = self._host(step)[0]['metric']
      if metric is not None and metric['name'] == self._best_metric:
        return {'metric': metric['value']}
    return None

  def _damaged(self) -> dict[int, str]:
    """The checkpoints whose metric cannot be read, each with the reason."""
    problems = {}
    for step in self.steps():
      try:
        self._host(step)
      except Exception as error:  # Orbax raises many types, as above
        if (self._directory / str(step)).exists():  # not deleted by the run
          problems[step] = _first_line(error)
    return problems

  def _set_aside(self, step: int) -> None:
    if self._peers.is_first and not self._read_only:
      aside = self._directory / 'corrupt'
      aside.mkdir(exist_ok=True)
      (aside / str(step)).rmtree(missing_ok=True)
      (self._directory / str(step)).rename(aside / str(step))
    self._peers.exchange()
    self._manager.reload()


@contextlib.contextmanager
def _own_barriers(
  peers: processes.Processes, barrier: Callable[..., None]
) -> Iterator[None]:
  """In it Orbax meets the other processes at our barriers, which can be left.

  Its own are programs of the devices, which wait for ever for a process that
  has failed.
  """
  if peers.number == 1:
    yield
    return
  from orbax.checkpoint._src.multihost import multihost

  def sync(name: str, *, timeout: int | None = None, **_: Any) -> None:
    barrier(key=name, timeout_ms=1000 * (timeout or _BARRIER_SECS))

  original, multihost.sync_global_processes = (
    multihost.sync_global_processes,
    sync,
  )
  try:
    yield
  finally:
    multihost.sync_global_processes = original


def _cause(error: BaseException) -> BaseException:
  """The error after which this process has waited for the others in vain."""
  while str(error).startswith(processes.WAITED) and error.__context__:
    error = error.__context__
  return error


def _first_line(error: BaseException) -> str:
  """The first line of an error, which may have a thousand lines."""
  return plain_text.first_line(error)[:200] or plain_text.kind(error)
