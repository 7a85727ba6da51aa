"""What draws in a generator: an engine, judges and environments of its own."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any

import jax

from grpo_jax.config import Config
from grpo_jax.config import dataclass_from_dict
from grpo_jax.config import plain_text
from grpo_jax.engines import fetching
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.rollouts import gathering
from grpo_jax.run import drawing
from grpo_jax.run import judging
from grpo_jax.run.build import build
from grpo_jax.run.build import environment as build_environment
from grpo_jax.run.build import rewards as build_rewards
from grpo_jax.run.jobs import calls
from grpo_jax.run.jobs import learning
from grpo_jax.run.jobs import wire
from grpo_jax.run.jobs.desk import Job
from grpo_jax.run.keep import fingerprints


class Here:
  """`generating.Draws` by the devices of this job.

  Args:
    run: Draws.
    fetch: Fetches the parameters of a version.
    peers: The processes of this job.
  """

  def __init__(
    self,
    run: build.Drawing,
    fetch: fetching.Fetch,
    peers: processes.Processes = processes.ALONE,
  ):
    self._run, self._fetch, self._peers = run, fetch, peers
    # Of the learner's start, and the version.
    self._loaded: tuple[str, int] | None = None
    self._landed_as: tuple[str, int] | None = None
    self._landed: Any = None

  def fetch(self, version: int, start: str) -> None:
    """See `Draws`."""
    if self._loaded != (start, version) != self._landed_as:
      self._landed = self._landed_as = None
      self._landed = self._fetch.land(version)
      self._landed_as = start, version

  def load(self, version: int, start: str) -> None:
    """See `Draws`."""
    if self._loaded == (start, version):
      return
    self._loaded = None
    self._run.engine.unload()
    params = self._fetch.place(self._landed)
    self._landed = self._landed_as = None
    self._run.engine.take(params, version)
    self._loaded = start, version

  def draw(
    self,
    job: Job,
    check: Callable[[], None],
    newest: Callable[[], int | None],
  ) -> drawing.Collected:
    """See `Draws`."""

    def checked():
      check()
      if self._run.draw.pace.inflight:
        self._refresh(self._peers.from_first(newest()))

    run = dataclasses.replace(self._run, check=checked)
    part = drawing.collect_part(run, job.records, job.step, job.purpose)
    if self._peers.number > 1:
      decode = run.tokenizer.decode if self._peers.is_first else None
      part = part._replace(
        rollout=gathering.whole(part.rollout, run.mesh, decode)
      )
    return part

  def _refresh(self, version: int | None) -> None:
    """Goes on by a newer version, between two turns of the engine."""
    assert self._loaded is not None
    start, loaded = self._loaded
    if version is None or version <= loaded:
      return
    why = ''
    try:
      self.fetch(version, start)
    except (wire.Refused, OSError) as error:  # there is a newer one already
      why = plain_text.first_line(error)
    if not any(self._peers.exchange(why)):
      params = self._fetch.place(self._landed)
      self._landed = self._landed_as = None
      self._run.engine.take(params, version)
      self._loaded = start, version


@contextlib.contextmanager
def opened(
  learner: calls.Learner,
  hello: Mapping[str, Any],
  peers: processes.Processes,
  stop: stop_signal.Stop,
  devices: Sequence[Any] | None = None,
) -> Iterator[tuple[Here, dict[str, Any]]]:
  """What draws for a run, and what it says of itself when it joins.

  Args:
    learner: Is asked for parameters.
    hello: What it has told of its run.
    peers: The processes of this job.
    stop: Asked by signals.
    devices: That draw; None: all of them.

  Raises:
    ValueError: What the run needs is not here, or is another one.
  """
  config = dataclass_from_dict(Config, hello['config'], 'config')
  about = {
    'same': learning.needed(config),
    'kind': jax.devices()[0].device_kind,
    'devices': jax.device_count(),
  }
  grave, _ = learning.differences(about['same'], hello['same'])
  if grave:  # before anything is built of it
    name = grave[0]
    raise ValueError(
      f'This machine has {name}={about["same"].get(name)}, and the learner at '
      f'{learner.address} has {hello["same"].get(name)}; install and copy the '
      'same for both.'
    )
  run = build.drawing(config, peers.number > 1, devices)
  parameters = build.abstract_params(run)
  frozen = None
  if parameters.frozen is not None:
    frozen = build.frozen_params(run)
  if fingerprints.compute(frozen) != hello['fingerprints']:
    raise ValueError(
      f'The weights in {config.model.path}, which are not trained, are not '
      'those that the learner has; copy the same for both.'
    )

  every = [learner, *map(learner.beside, hello['doors'][1:])]

  def ask(process: int, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
      return every[process].ask('/weights', wanted)
    except calls.Away:
      # It may have started again, where its processes have other addresses.
      every[:] = learner.all()
      raise

  with contextlib.ExitStack() as stack:
    if peers.number > 1:
      run = dataclasses.replace(
        run,
        judging=judging.shared(peers, stop),
        hosts=judging.hosts(peers, stop),
      )
    run = dataclasses.replace(
      run,
      workers=stack.enter_context(
        build_rewards.workers(run.limits, run.rewards)
      ),
      player=stack.enter_context(build_environment.player(run.environment)),
    )
    fetch = fetching.Fetch(
      run.model,
      parameters.trained,
      run.sampling_mesh,
      frozen,
      hello['weights'],
      ask,
      learner.own_host,
    )
    yield Here(run, fetch, peers), about
