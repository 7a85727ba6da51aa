"""The one object through which a run shows and records its numbers."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import pathlib
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.monitor import alarms
from grpo_jax.monitor import dashboards
from grpo_jax.monitor import jsonl
from grpo_jax.monitor import screen as screen_lib
from grpo_jax.monitor import table
from grpo_jax.monitor.formatting import Sample


class Options(NamedTuple):
  """What is shown, where it goes, and when a number alarms."""

  display: str = 'auto'  # see `screen.choose`
  samples: int = 3  # completions that are shown
  tensorboard: bool = True
  wandb_project: str = ''  # '': nothing goes to Weights & Biases
  wandb_mode: str = 'online'  # or 'offline'
  mlflow_experiment: str = ''  # '': nothing goes to MLflow
  mlflow_uri: str = ''  # '': see `dashboards.Mlflow`
  limits: alarms.Limits = alarms.Limits()


class _Sink(NamedTuple):
  """A place besides `metrics.jsonl` that the metrics are sent to."""

  write: Callable[[int, Mapping[str, float | None]], None]
  close: Callable[[], None]


class Monitor:
  """Shows a run on the terminal and writes its metrics; a context manager.

  A full disk, a service that does not answer or an error of the display leads
  to one warning, a terminal that breaks to none, and the run goes on. Lines of
  `metrics.jsonl` that could not be written wait in memory; meanwhile the metric
  `failed_writes` says how many tries in a row have failed.

  Args:
    options: What to show and to write.
    workdir: Where `metrics.jsonl`, `tensorboard/` and `wandb/` go.
    total_steps: Rollouts of the whole run.
    resumed_step: Rollouts done at the checkpoint that the run goes on from;
      later lines of `metrics.jsonl` are dropped, since these rollouts are done
      again. None for a fresh start, which keeps an earlier `metrics.jsonl`
      under another name.
    run_config: The whole config as nested dicts, for Weights & Biases and
      MLflow.
    screen: What `start` returned, to be used further; None makes a new one.
    replays: Whether saved rollouts take the place of sampling.
  """

  def __init__(
    self,
    options: Options,
    workdir: str | pathlib.Path,
    total_steps: int,
    resumed_step: int | None,
    run_config: dict[str, Any],
    screen: screen_lib.Screen | None = None,
    replays: bool = False,
  ):
    workdir = pathlib.Path(workdir)
    self._step, self._failed, self._closed = resumed_step, False, False
    self._most_samples = options.samples
    self._alarms = alarms.Alarms(options.limits, replays)
    self._warned: set[str] = set()  # sinks
    self._screen = screen or screen_lib.Screen(
      screen_lib.display_for(options.display, table.About(total_steps))
    )
    self._lines = jsonl.Lines(
      workdir / 'metrics.jsonl', resumed_step, self.warn, table.HISTORY
    )
    history = self._lines.take_history()
    points = lambda name: history.get(name, ())
    self._screen.remember(table.History(self._lines.elapsed, points))
    self._sinks = self._open_sinks(options, workdir, resumed_step, run_config)

  def __enter__(self) -> 'Monitor':
    return self

  def __exit__(self, kind, value, traceback) -> None:
    self._failed = kind is not None
    self.close()

  def write(
    self,
    step: int,
    scalars: Mapping[str, float | None],
    samples: Sequence[Sample] = (),
  ) -> None:
    """One rollout is done: writes its metrics, shows them, raises alarms.

    Args:
      step: Rollouts done; 0 for what was measured before the first.
      scalars: Numbers by name; those that are not finite become null.
      samples: Completions, of which the first `options.samples` are shown.
    """
    self._step = step
    sentences = self._alarms(scalars)
    if self._lines.failed_writes:
      scalars = {**scalars, 'failed_writes': self._lines.failed_writes}
    self._lines.write(step, scalars)
    for name, sink in self._sinks.items():
      with self._warning_once(name):
        sink.write(step, scalars)
    self._screen.write(step, scalars, samples[: self._most_samples])
    # Below the numbers that they are about.
    for sentence in sentences:
      self.warn(sentence)

  def line(self, text: str) -> None:
    """Shows something to know, in one line or several."""
    self._screen.line(text)

  def phase(self, doing: str, first: str = '') -> Any:
    """Says what is being done while a context lasts; see `Screen.phase`."""
    return self._screen.phase(doing, first)

  def progress(
    self,
    label: str,
    step: int,
    total: int,
    scalars: Mapping[str, float | None],
  ) -> None:
    """Shows one step of something not counted in rollouts, as the warm-up.

    Args:
      label: What is counted.
      step: How many steps are done.
      total: How many steps there are; a plain log has at most about ten lines.
      scalars: Numbers by name; they are shown and not written.
    """
    self._screen.progress(label, step, total, scalars)

  def warn(self, text: str) -> None:
    """Shows a warning, with the rollout after which it came; it stays visible.

    Args:
      text: What is wrong; line breaks in it become spaces.
    """
    self._screen.warn(self._step, text)

  def heldout(self) -> list[tuple[int, float]]:
    """Every held-out accuracy so far, oldest first, of earlier starts too.

    Each stands behind the number of rollouts that were done before it.
    """
    return list(self._lines.heldout)

  def close(self) -> None:
    """Writes the waiting lines, closes every file, and frees the terminal."""
    if self._closed:
      return
    self._closed = True
    self._lines.close()
    # The terminal comes first, because an upload to a service may take minutes.
    self._screen.close()
    for name, sink in self._sinks.items():
      with self._warning_once(name):
        sink.close()

  def _open_sinks(self, options, workdir, resumed_step, run_config):
    sinks: dict[str, _Sink] = {}
    if options.tensorboard:
      with self._warning_once('TensorBoard'):
        first = 0 if resumed_step is None else resumed_step + 1
        board = dashboards.TensorBoard(workdir / 'tensorboard', first)
        sinks['TensorBoard'] = _Sink(board.write, board.close)
    if options.wandb_project:
      with self._warning_once('Weights & Biases'):
        run = dashboards.Wandb(
          workdir,
          options.wandb_project,
          options.wandb_mode,
          resumed_step is not None,
          run_config,
        )
        # A lambda, because only at the end is it known whether the run failed.
        sinks['Weights & Biases'] = _Sink(
          run.write, lambda: run.close(self._failed)
        )
    if options.mlflow_experiment:
      with self._warning_once('MLflow'):
        sent = dashboards.Mlflow(
          workdir,
          options.mlflow_experiment,
          options.mlflow_uri,
          resumed_step is not None,
          run_config,
        )
        sinks['MLflow'] = _Sink(sent.write, lambda: sent.close(self._failed))
    return sinks

  @contextlib.contextmanager
  def _warning_once(self, name: str):
    """Turns the first exception of a sink into a warning, and drops others."""
    try:
      yield
    except Exception as error:  # of any kind: no dashboard is worth a run
      if name not in self._warned:
        self._warned.add(name)
        self.warn(
          f'{name} does not work ({plain_text.named(error)}); the run '
          'goes on, and these metrics will be missing there.'
        )


class Quiet(Monitor):
  """The `Monitor` of a process that is not the first: it only passes warnings.

  Args:
    warn: Takes them to the first process.
  """

  def __init__(self, warn: Callable[[str], None]):
    self._screen, self._tell = screen_lib.Screen(screen_lib.Nothing()), warn

  def __exit__(self, kind, value, traceback) -> None:
    pass

  def write(
    self,
    step: int,
    scalars: Mapping[str, float | None],
    samples: Sequence[Sample] = (),
  ) -> None:
    """The first process writes the same numbers."""

  def warn(self, text: str) -> None:
    """The first process shows it."""
    self._tell(text)

  def heldout(self) -> list[tuple[int, float]]:
    """Only the first process reads what earlier starts have measured."""
    return []

  def close(self) -> None:
    """Nothing is open."""
