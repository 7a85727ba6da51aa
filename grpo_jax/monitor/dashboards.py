"""Dashboards beside `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import importlib
import logging
import math
import os
import pathlib
import re
import secrets
import threading
import time
from typing import Any

from grpo_jax.config import plain_text


class TensorBoard:
  """Writes scalars to event files, in this thread.

  tensorboardX's `SummaryWriter` is not used: its thread ends at the first
  failed write, and about ten events later the run waits forever for that
  thread. Here a failed write raises. The next write opens another file, because
  an incomplete record makes the rest of its file unreadable.

  Args:
    directory: Where the event files go; made if there is none.
    first_step: The first rollout that this start writes. TensorBoard hides the
      events of earlier starts from this rollout on.
  """

  def __init__(self, directory: pathlib.Path, first_step: int):
    self._directory = directory
    self._purge_step: int | None = first_step
    self._writer = None

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Writes one event with the scalars that are finite.

    Args:
      step: Rollouts done.
      scalars: Numbers by name.

    Raises:
      OSError: The event could not be written.
    """
    from tensorboardX.proto import event_pb2
    from tensorboardX.proto import summary_pb2

    # Protobuf fills these modules at run time, so a type checker knows no name
    # in them.
    events: Any = event_pb2
    summaries: Any = summary_pb2
    values = [
      summaries.Summary.Value(tag=name, simple_value=value)
      for name, value in _finite(scalars).items()
    ]
    event = events.Event(
      wall_time=time.time(),
      step=step,
      summary=summaries.Summary(value=values),
    )
    try:
      writer = self._writer = self._writer or self._open()
      # If this or the next write fails, the next file begins with it again.
      if self._purge_step is not None:
        start = events.SessionLog(status=events.SessionLog.START)
        writer.write_event(
          events.Event(
            wall_time=time.time(), step=self._purge_step, session_log=start
          )
        )
      writer.write_event(event)
      writer.flush()
    except OSError:
      self.close()
      raise
    self._purge_step = None

  def close(self) -> None:
    """Closes the file; every event in it is on disk already."""
    writer, self._writer = self._writer, None
    with contextlib.suppress(OSError):
      if writer is not None:
        writer.close()

  def _open(self):
    from tensorboardX.event_file_writer import EventsWriter

    self._directory.mkdir(parents=True, exist_ok=True)
    # The name holds the time in seconds. The number makes two files of the same
    # second differ.
    number = len(list(self._directory.iterdir())) + 1
    return EventsWriter(str(self._directory / 'events'), f'.{number}')


_LOGIN_TIMEOUT_SECS = 60.0  # that W&B waits for a key to be typed
_FINISH_TIMEOUT_SECS = 300.0  # for the last upload; the workdir keeps the files


class Wandb:
  """One run of a W&B project. A resumed run continues the same W&B run.

  The id of the W&B run is kept in `wandb_run_id.txt`, and its files in
  `wandb/`. The x-axis is the metric `step`, because W&B's own counter cannot go
  back to the checkpoint that a run continues from.

  Args:
    workdir: The directory of the run.
    project: The project's name.
    mode: 'online' or 'offline'. The files of an offline run can be sent later,
      by `wandb sync`.
    resumed: Whether the run goes on from a checkpoint.
    run_config: The config that the dashboard shows.

  Raises:
    Exception: W&B cannot be imported or reached, or refuses the key.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    project: str,
    mode: str,
    resumed: bool,
    run_config: dict[str, Any],
  ):
    import wandb

    id_file = workdir / 'wandb_run_id.txt'
    known = resumed and id_file.exists()
    run_id = id_file.read_text().strip() if known else secrets.token_hex(4)
    self._run = wandb.init(
      project=project,
      mode=mode,  # pyright: ignore[reportArgumentType]
      dir=workdir,
      id=run_id,
      name=workdir.resolve().name,
      resume='allow' if mode == 'online' else None,
      config=run_config,
      allow_val_change=True,
      # With another value of `console`, W&B would wrap the streams that the
      # display draws on.
      settings=wandb.Settings(
        console='off',
        login_timeout=_LOGIN_TIMEOUT_SECS,
        finish_timeout=_FINISH_TIMEOUT_SECS,
      ),
    )
    try:
      id_file.write_text(run_id + '\n')
      self._run.define_metric('step')
      self._run.define_metric('*', step_metric='step')
    except Exception:
      # Nobody gets this object to close it, and W&B would show the run as
      # running on. The first error is the one to raise.
      with contextlib.suppress(Exception):
        self.close(failed=True)
      raise

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Logs the scalars that are finite.

    Args:
      step: Rollouts done.
      scalars: Numbers by name.
    """
    self._run.log({'step': step, **_finite(scalars)})

  def close(self, failed: bool) -> None:
    """Waits until everything is sent, for some minutes at most.

    Args:
      failed: Whether the run ended by an exception.
    """
    self._run.finish(exit_code=int(failed))


_CLOSE_TIMEOUT_SECS = 60.0  # for what was not sent to MLflow by then
_MOST_METRICS = 1000  # of a request to MLflow
_MOST_PARAMS = 100
_MOST_LETTERS = 500  # of the value of a parameter
# A name and a password in an address, which an error may repeat.
_PASSWORD = re.compile(r'//[^/@\s]*@')
_NO_LETTER = re.compile(r'[^A-Za-z0-9_\-. /]')  # in the name of a metric


class Mlflow:
  """One run of an MLflow experiment. A resumed run continues the same run.

  A thread sends the metrics: a server that does not answer is asked for
  minutes, by the package of MLflow. What could not be sent is sent with the
  next metrics. The id of the MLflow run is kept in `mlflow_run_id.txt`. After a
  kill, rollouts that are done again stand there twice.

  Args:
    workdir: The directory of the run.
    experiment: The experiment's name; it is made if there is none.
    uri: Where it is kept; '': where MLFLOW_TRACKING_URI says, or else
      `mlflow.db` in the workdir.
    resumed: Whether the run goes on from a checkpoint.
    run_config: The config that the dashboard shows.

  Raises:
    ImportError: MLflow is not installed.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    experiment: str,
    uri: str,
    resumed: bool,
    run_config: dict[str, Any],
  ):
    # Not by name: no type checker finds a package that is not installed.
    try:
      self._mlflow = importlib.import_module('mlflow')
    except ImportError as error:
      raise ImportError(
        f"{error}; install it with pip install 'grpo_jax[mlflow]'"
      ) from error
    # It tells of its database, in the middle of what the display draws.
    logging.getLogger('mlflow').setLevel(logging.WARNING)
    entities: Any = importlib.import_module('mlflow.entities')
    self._metric, self._param = entities.Metric, entities.Param
    own = f'sqlite:///{workdir.resolve() / "mlflow.db"}'
    self._uri = uri or os.environ.get('MLFLOW_TRACKING_URI') or own
    self._workdir, self._experiment = workdir, experiment
    self._resumed, self._run_config = resumed, run_config
    self._client: Any = None
    self._run_id = ''
    self._params: list[Any] = []  # that are not sent
    self._status = ''  # of the run, once it ends
    self._lock = threading.Lock()  # of the two below
    self._waiting: list[Any] = []  # metrics that are not sent
    self._error = ''
    self._due = threading.Event()  # there is something to send
    self._thread = threading.Thread(
      target=self._send_all, name='mlflow', daemon=True
    )
    self._thread.start()

  def write(self, step: int, scalars: Mapping[str, float | None]) -> None:
    """Has the scalars sent that are finite.

    Args:
      step: Rollouts done.
      scalars: Numbers by name.

    Raises:
      ConnectionError: Earlier ones could not be sent.
    """
    now = int(time.time() * 1000)
    metrics = [
      self._metric(_NO_LETTER.sub('_', name), value, now, step)
      for name, value in _finite(scalars).items()
    ]
    with self._lock:
      self._waiting += metrics
    self._due.set()
    self._raise()

  def close(self, failed: bool) -> None:
    """Waits until everything is sent, for a minute at most.

    Args:
      failed: Whether the run ended by an exception.

    Raises:
      ConnectionError: Something could not be sent.
      TimeoutError: The server has not answered by then.
    """
    self._status = 'FAILED' if failed else 'FINISHED'
    self._due.set()
    self._thread.join(_CLOSE_TIMEOUT_SECS)
    if self._thread.is_alive():
      raise TimeoutError(
        'it has not taken the last metrics in '
        f'{_CLOSE_TIMEOUT_SECS:.0f} seconds'
      )
    self._raise()

  def _raise(self) -> None:
    with self._lock:
      error, self._error = self._error, ''
    if error:
      raise ConnectionError(error)

  def _send_all(self) -> None:
    """Sends what waits, whenever there is more, until the end."""
    ends = False
    while not ends:
      self._due.wait()
      self._due.clear()
      ends = bool(self._status)
      with self._lock:
        metrics, self._waiting = self._waiting, []
      try:
        # Only here, because opening a run asks the server too.
        self._run_id = self._run_id or self._open()
        while self._params:
          some = self._params[:_MOST_PARAMS]
          self._client.log_batch(self._run_id, params=some)
          self._params = self._params[_MOST_PARAMS:]
        while metrics:
          some = metrics[:_MOST_METRICS]
          self._client.log_batch(self._run_id, metrics=some)
          metrics = metrics[_MOST_METRICS:]
        if ends:
          self._client.set_terminated(self._run_id, self._status)
      except Exception as error:  # of any kind: it is raised in `write`
        said = _PASSWORD.sub('//', plain_text.named(error))
        with self._lock:
          self._waiting = metrics + self._waiting
          self._error = said

  def _open(self) -> str:
    """The id of the run that the metrics belong to, new or an earlier one."""
    client = self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
    id_file = self._workdir / 'mlflow_run_id.txt'
    if self._resumed and id_file.exists():
      run_id = id_file.read_text().strip()
      client.update_run(run_id, status='RUNNING')
      return run_id
    found = client.get_experiment_by_name(self._experiment)
    number = (
      client.create_experiment(self._experiment)
      if found is None
      else found.experiment_id
    )
    name = self._workdir.resolve().name
    run_id = client.create_run(number, run_name=name).info.run_id
    id_file.write_text(run_id + '\n')
    # They cannot be changed later, so a run that goes on leaves them alone.
    self._params = [
      self._param(name, str(value)[:_MOST_LETTERS])
      for name, value in _flat(self._run_config)
    ]
    return run_id


def _flat(values: Mapping[str, Any], name: str = '') -> Iterator[Any]:
  """Pairs of a name, as 'optim.lr', and its value, of nested dicts."""
  for key, value in values.items():
    if isinstance(value, Mapping) and value:
      yield from _flat(value, f'{name}{key}.')
    else:
      yield f'{name}{key}', value


def _finite(scalars: Mapping[str, float | None]) -> dict[str, float]:
  return {
    name: float(value)
    for name, value in scalars.items()
    if value is not None and math.isfinite(value)
  }
