"""Weights & Biases."""

from collections.abc import Mapping
import contextlib
import math
import pathlib
import secrets
from typing import Any

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
    finite = {
      name: float(value)
      for name, value in scalars.items()
      if value is not None and math.isfinite(value)
    }
    self._run.log({'step': step, **finite})

  def close(self, failed: bool) -> None:
    """Waits until everything is sent, for some minutes at most.

    Args:
      failed: Whether the run ended by an exception.
    """
    self._run.finish(exit_code=int(failed))
