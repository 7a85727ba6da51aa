"""Where a run gets its rollouts: from a `Source`, one after another.

A source draws by parameters that the learner has published. What it draws is a
function of its `Receipt` and of those parameters. A checkpoint keeps the
receipt, so that a run which is stopped, or killed, draws the same rollouts
again.

`AtOnce` draws a rollout when it is asked for. `Ahead` draws it, and has it
judged, in a thread while the learner updates the policy. It is paced, and drops
nothing: rollout k is learned by version k and drawn by versions that are at
most a older, and the learner takes rollouts in their order. So no token is
older, and slow episodes are as frequent as they are in the data. Waits go one
way: the learner waits for rollout k, whoever draws it for version k - a at the
latest.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import queue
import threading
import time
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.config import waits
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.types import Rollout
from grpo_jax.rollouts import dynamic_sampling
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts.dynamic_sampling import Drawn
from grpo_jax.rollouts.dynamic_sampling import PromptState

_JUDGING_SECS = 2.0  # that a reward function may take when a run has ended

Draw = Callable[[PromptState, int], Drawn]
"""`(prompts, version)` -> the rollout that this version will learn from."""
Wait = Callable[[], contextlib.AbstractContextManager[None]]
"""Gives a context in which a signal need not wait: it raises there."""


class Finished(NamedTuple):
  """A rollout that was drawn.

  Attributes:
    rollout: See `Rollout`.
    prompts: Where the next one finds its prompts.
    counts: Metrics of the drawing.
    secs: What drawing and judging took.
  """

  rollout: Rollout
  prompts: PromptState
  counts: dict[str, float]
  secs: float


class Receipt(NamedTuple):
  """What the rollouts that are still to come are drawn from.

  Attributes:
    prompts: Where the first of them finds its prompts that is not drawn yet.
    finished: Those that are drawn, and that nobody has learned from.
    versions: Those of the parameters of earlier updates by which others are
      still to be drawn, ascending.
    params: For each of these what `Weights.snapshot` returned.
  """

  prompts: PromptState = PromptState()
  finished: tuple[Finished, ...] = ()
  versions: tuple[int, ...] = ()
  params: tuple[Any, ...] = ()

  def to_json(self, whole: Callable[[Rollout], Rollout]) -> dict[str, Any]:
    """All but the parameters, as a dict of what JSON can hold, and of bytes.

    Args:
      whole: Makes a rollout whole that other processes know a part of.
    """
    blobs: dict[str, bytes] = {}

    def kept(prompts, name):
      surplus = prompts.surplus
      surplus = surplus and whole(surplus)
      values = dynamic_sampling.to_json(prompts._replace(surplus=surplus))
      if values['surplus'] is not None:
        blobs[f'surplus{name}'] = values['surplus']
      return {**values, 'surplus': None}

    finished = []
    for number, one in enumerate(self.finished):
      blobs[f'finished_{number}'] = parquet.to_bytes(whole(one.rollout), 0)
      prompts = kept(one.prompts, f'_{number}')
      finished.append(
        {'prompts': prompts, 'counts': one.counts, 'secs': one.secs}
      )
    return {
      'receipt': {
        'prompts': kept(self.prompts, ''),
        'finished': finished,
        'versions': list(self.versions),
      },
      **blobs,
    }


def receipt_from_json(values: dict[str, Any], params: Any) -> Receipt:
  """The `Receipt` whose `to_json` has returned these values."""
  saved = values['receipt']

  def prompts(of, name):
    return dynamic_sampling.from_json(
      {**of, 'surplus': values.get(f'surplus{name}')}
    )

  finished = [
    Finished(
      parquet.from_bytes(values[f'finished_{number}']),
      prompts(one['prompts'], f'_{number}'),
      one['counts'],
      one['secs'],
    )
    for number, one in enumerate(saved['finished'])
  ]
  return Receipt(
    prompts(saved['prompts'], ''),
    tuple(finished),
    tuple(saved['versions']),
    tuple(params),
  )


class Delivery(NamedTuple):
  """A rollout to learn from, and what its source tells of it.

  Attributes:
    rollout: See `Rollout`.
    counts: Metrics of the drawing.
    secs: What drawing and judging took.
    waited_secs: How many of these the learner waited for; None: all.
    tokens: Completion tokens that were drawn in `secs`; None: those of the
      rollout. Dynamic sampling may draw more or fewer.
  """

  rollout: Rollout
  counts: dict[str, float]
  secs: float
  waited_secs: float | None = None
  tokens: float | None = None


class Source(Protocol):
  """Gives the rollouts of a run, each once and in their order."""

  def restore(self, receipt: Receipt, version: int) -> None:
    """Goes on from a receipt; called before the first `publish` of a start.

    Args:
      receipt: That of a checkpoint; `Receipt()` before the first rollout.
      version: Rollouts learned from.
    """
    ...

  def receipt(self) -> Receipt:
    """What draws the rollouts again that `next` has not given yet."""
    ...

  def publish(self, params: Any, version: int) -> None:
    """Takes parameters that later rollouts may be drawn by.

    A source may begin to use them late, and may skip some.

    Args:
      params: Trained parameters. They stay as they are until `next` has
        returned; after that the learner donates them.
      version: How many rollouts they have learned from.
    """
    ...

  def next(self, version: int) -> Delivery:
    """The rollout that a version will learn from; waits until it is drawn.

    When it returns, the memory of the devices is free for an update, but for
    what the source needs to go on drawing. If it raises, or a signal ends its
    wait, the receipt is as before.

    Args:
      version: That of the parameters that were published last.
    """
    ...

  def prepare(self, version: int) -> None:
    """Makes ready what `next(version)` needs of the host; devices learn now."""
    ...

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """In it nothing is drawn, and the engine has the newest parameters."""
    ...

  def close(self) -> None:
    """Gives up what is being drawn."""
    ...


def _timed(
  draw: Draw, prompts: PromptState, version: int
) -> tuple[Drawn, float]:
  """What `draw` returns, and how many seconds it took."""
  begun = time.monotonic()
  return draw(prompts, version), time.monotonic() - begun


@dataclasses.dataclass
class AtOnce:
  """Draws a rollout when it is asked for, by the policy that learns from it.

  Attributes:
    draw: Samples and judges, or reads what was drawn.
    load: `(params, version)`: gives the engine trained parameters.
    unload: Takes them from it; an update needs the memory, and moves them.
    wait: See `Wait`.
    rollouts: How many the run has; for more than these nothing is done.
    fill: `(position)`: reads the prompts of a rollout early.
  """

  draw: Draw
  load: Callable[[Any, int], None]
  unload: Callable[[], None]
  wait: Wait = contextlib.nullcontext
  rollouts: int = 0
  fill: Callable[[int], None] = lambda position: None

  def __post_init__(self):
    self._prompts = PromptState()

  def restore(self, receipt: Receipt, version: int) -> None:
    """See `Source`."""
    del version
    self._prompts = receipt.prompts

  def receipt(self) -> Receipt:
    """See `Source`."""
    return Receipt(self._prompts)

  def publish(self, params: Any, version: int) -> None:
    """See `Source`."""
    self.load(params, version)

  def next(self, version: int) -> Delivery:
    """See `Source`."""
    with self.wait():
      drawn, secs = _timed(self.draw, self._prompts, version)
    rollout, self._prompts, counts = drawn
    self.unload()
    return Delivery(rollout, counts, secs, None, counts.get('tokens_drawn'))

  def prepare(self, version: int) -> None:
    """See `Source`."""
    if version < self.rollouts:
      self.fill(self._prompts.position)

  def paused(self) -> contextlib.AbstractContextManager[None]:
    """See `Source`."""
    return contextlib.nullcontext()

  def close(self) -> None:
    """See `Source`; nothing is being drawn."""


class GivenUp(KeyboardInterrupt):
  """Nobody waits any more for what a thread draws.

  It is no `Exception`, so that an `except Exception` in an event loop or a
  reward function does not swallow it.
  """


@dataclasses.dataclass
class Lease:
  """The time in which somebody waits for what a thread draws.

  Attributes:
    has_ended: Nobody waits any more.
    is_judging: Rewards are being called, which may take as long as they like.
    refresh: Called by `check`.
  """

  has_ended: bool = False
  is_judging: bool = False
  refresh: Callable[[], None] | None = None

  def check(self) -> None:
    """Raises `GivenUp` once it has ended; for engine, rewards and workers."""
    if self.has_ended:
      raise GivenUp
    if self.refresh is not None:
      self.refresh()

  def judging(
    self, judge: rollout_lib.Judge, episodes: rollout_lib.Episodes
  ) -> tuple[rollout_lib.Episodes, Any]:
    """The `Judging` of the thread."""
    self.is_judging = True
    try:
      return rollout_lib.judged_alone(judge, episodes, self.check)
    finally:
      self.is_judging = False


@dataclasses.dataclass(frozen=True)
class Pace:
  """Which version draws a rollout.

  Attributes:
    ahead: How many versions older it may be than the one that learns, at most.
    every: Each so many-th version draws, at most `ahead + 1`.
    inflight: Whether newer versions are taken while a rollout is drawn.
  """

  ahead: int = 0
  every: int = 1
  inflight: bool = False

  def version(self, rollout: int) -> int:
    """The version that a rollout waits for.

    >>> [Pace(ahead=2).version(k) for k in range(5)]
    [0, 0, 0, 1, 2]
    >>> [Pace(ahead=2, every=2).version(k) for k in range(7)]
    [0, 0, 0, 2, 2, 4, 4]
    """
    oldest = max(rollout - self.ahead, 0)
    return -(-oldest // self.every) * self.every

  def newest(self, version: int) -> int:
    """The last version up to this one that draws.

    >>> [Pace(ahead=2, every=2).newest(version) for version in range(5)]
    [0, 0, 2, 2, 4]
    """
    return version - version % self.every

  def needed(self, rollout: int, newest: int) -> set[int]:
    """The versions that this rollout and later ones are drawn by.

    Args:
      rollout: The first that is not drawn yet.
      newest: The last version there is; later ones are left out.
    """
    if self.inflight:
      return {self.newest(newest)}
    after = range(rollout, newest + self.ahead + 1)
    return {v for v in map(self.version, after) if v <= newest}


class Sampling(Protocol):
  """What draws rollouts for `Ahead`, by versions that it is told."""

  def publish(self, params: Any, version: int) -> None:
    """See `handover.Weights`."""
    ...

  def load(self, version: int, goes_on: bool = False) -> None:
    """Draws by a version from now on.

    Args:
      version: Was published, and is not dropped.
      goes_on: Whether something is being drawn, which goes on with it.
    """
    ...

  def draw(self, prompt_state: PromptState, step: int, /) -> Drawn:
    """Draws a rollout, and has it judged."""
    ...

  def drop(self, needed: set[int]) -> None:
    """Frees all versions but some."""
    ...

  def snapshot(self, version: int) -> Any:
    """See `handover.Weights`."""
    ...

  def restore(self, version: int, snapshot: Any) -> None:
    """See `handover.Weights`."""
    ...


class Ahead:
  """Draws rollouts before they are asked for, as far as their versions allow.

  A thread draws all of them. At the end, what is being drawn is given up, and
  the thread has ended. Only a reward function that is called in this process
  cannot be ended: after two seconds its thread is left alone, and calls no
  other.

  Args:
    sampling: Draws. It calls `lease.check` as often as it can, and has
      completions judged by `lease.judging`.
    pace: Which version draws which rollout.
    lease: Ends when the source is closed.
    rollouts: How many the run has.
    wait: See `Wait`.
    fill: `(position)`: reads prompts from there on, before the thread needs
      them: some bear no other thread than the one that publishes.
    agree: With several processes, of which the first draws a rollout before the
      others hear of it: makes its number that of all. None: there is one.
  """

  def __init__(
    self,
    sampling: Sampling,
    pace: Pace,
    lease: Lease,
    rollouts: int,
    wait: Wait = contextlib.nullcontext,
    fill: Callable[[int], None] = lambda position: None,
    agree: Callable[[int], int] | None = None,
  ):
    self._agree = agree
    self._sampling, self._pace, self._lease = sampling, pace, lease
    self._rollouts, self._wait, self._fill = rollouts, wait, fill
    # All that follows is guarded by it. `next` reads without it, and waits at
    # `_news`: a signal may raise there, which must leave no lock behind.
    self._changed = threading.Condition()
    self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
    self._newest: tuple[Any, int] | None = None
    self._learned = 0  # the rollout that is asked for next
    self._begun = 0  # the one that is drawn now, or next
    self._prompts = PromptState()  # of that one
    self._earlier = PromptState()  # of the last that was learned from
    self._finished: dict[int, Finished] = {}
    self._error: BaseException | None = None  # of the one that is drawn now
    self._loaded: int | None = None  # the version that the engine has
    self._loading: int | None = None  # the one that it is about to have
    self._pauses, self._is_drawing = False, False
    self._kept: int | None = None  # the first rollout that a receipt may need
    self._thread: threading.Thread | None = None

  def restore(self, receipt: Receipt, version: int) -> None:
    """See `Source`."""
    self._learned, self._prompts = version, receipt.prompts
    self._earlier = receipt.prompts
    self._finished = dict(enumerate(receipt.finished, version))
    self._begun = version + len(receipt.finished)
    for number, params in zip(receipt.versions, receipt.params, strict=True):
      self._sampling.restore(number, params)

  def receipt(self) -> Receipt:
    """See `Source`; what is being drawn is drawn again."""
    agreed = None
    if self._agree is not None:
      with self._changed:
        self._kept = self._known_to_all()
      # The threads go on. Once all are here, all keep what is needed from now.
      self._agree(0)
      agreed = self._agree(self._begun)
    with self._changed:
      self._kept = None
      while agreed and self._begun < agreed and self._error is None:
        self._changed.wait()  # the first process has told of it
      begun = self._begun if agreed is None else min(agreed, self._begun)
      finished = [self._finished[n] for n in range(self._learned, begun)]
      prompts, newest = self._prompts, self._learned
      if begun < self._begun:  # another one has not heard of the last one
        prompts = finished[-1].prompts if finished else self._earlier
      # Those of the newest are in the checkpoint anyway.
      versions = sorted(self._pace.needed(begun, newest) - {newest})
      # Here, because the thread drops what it does not need any more.
      params = tuple(map(self._sampling.snapshot, versions))
    return Receipt(prompts, tuple(finished), tuple(versions), params)

  def publish(self, params: Any, version: int) -> None:
    """See `Source`."""
    if self._pace.newest(version) == version:
      self._sampling.publish(params, version)
    with self._changed:
      self._newest = params, version
      self._drop()
      position = self._prompts.position
      self._changed.notify_all()
    if version < self._rollouts:
      self._fill(position)
    if self._thread is None and not self._lease.has_ended:
      self._lease.refresh = self._refresh if self._pace.inflight else None
      # A daemon, because a second Ctrl-C ends the program without waiting for
      # a reward function.
      self._thread = threading.Thread(
        target=self._run, name='ahead', daemon=True
      )
      self._thread.start()

  def next(self, version: int) -> Delivery:
    """See `Source`; `ahead_wait_secs` is how long this has taken."""
    begun = time.monotonic()
    with self._wait():
      while version not in self._finished and self._error is None:
        waits.take(self._news)
    # From here on no signal ends it.
    with self._changed:
      if version not in self._finished:
        assert self._error is not None
        raise self._error
      finished = self._finished.pop(version)
      self._learned, self._earlier = version + 1, finished.prompts
    waited = time.monotonic() - begun
    counts = {**finished.counts, 'ahead_wait_secs': waited}
    return Delivery(
      finished.rollout,
      counts,
      finished.secs,
      waited,
      counts.get('tokens_drawn'),
    )

  def prepare(self, version: int) -> None:
    """See `Source`; the thread draws it already."""

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """See `Source`; what is being drawn is drawn to its end before."""
    with self._changed:
      self._pauses = True
      while self._is_drawing:
        self._changed.wait()
    try:
      assert self._newest is not None  # the learner is done with it
      params, version = self._newest
      if self._pace.newest(version) != version:
        self._sampling.publish(params, version)
      self._load(version)
      yield
    finally:
      with self._changed:
        self._pauses = False
        self._drop()
        self._changed.notify_all()

  def close(self) -> None:
    """See `Source`."""
    self._lease.has_ended, secs = True, _JUDGING_SECS
    with self._changed:
      self._changed.notify_all()
    while self._thread is not None and self._thread.is_alive() and secs > 0:
      self._thread.join(0.1)
      secs -= 0.1 * self._lease.is_judging

  def _known_to_all(self) -> int:
    """The first rollout that may not be drawn yet in another process."""
    if self._agree is None:
      return self._begun
    return max(self._begun - 1, self._learned)

  def _drop(self) -> None:
    """Frees the versions that nothing is drawn by any more."""
    assert self._newest is not None
    begun = self._known_to_all() if self._kept is None else self._kept
    needed = self._pace.needed(begun, self._newest[1]) | {self._newest[1]}
    if self._loading is not None:
      needed.add(self._loading)
    self._sampling.drop(needed)

  def _refresh(self) -> None:
    """Draws by the newest version from now on, if this is the thread."""
    if threading.current_thread() is not self._thread:
      return
    with self._changed:
      self._loading = version = self._wanted(self._begun)
    self._load(version, goes_on=True)

  def _wanted(self, rollout: int) -> int:
    """The version that draws a rollout from now on."""
    if not self._pace.inflight:
      return self._pace.version(rollout)
    assert self._newest is not None
    return self._pace.newest(self._newest[1])

  def _load(self, version: int, goes_on: bool = False) -> None:
    """Draws by a version, whose snapshot is not dropped before it is there."""
    try:
      if self._loaded != version:
        self._loaded = None
        self._sampling.load(version, goes_on)
        self._loaded = version
    finally:
      self._loading = None

  def _may_draw(self) -> bool:
    """Whether the next rollout may begin."""
    assert self._newest is not None
    due = self._pace.version(self._begun) <= self._newest[1]
    return due and not self._pauses and self._begun < self._rollouts

  def _run(self) -> None:
    """Draws rollout after rollout, until one raises."""
    while True:
      with self._changed:
        while not (self._lease.has_ended or self._may_draw()):
          self._changed.wait()
        if self._lease.has_ended:
          return
        self._is_drawing = True
        prompts, rollout = self._prompts, self._begun
        self._loading = version = self._wanted(rollout)
      error: BaseException | None = None
      try:
        self._load(version)
        drawn, secs = _timed(self._sampling.draw, prompts, rollout)
      except BaseException as raised:  # `next` raises it
        error = raised
      with self._changed:
        self._is_drawing, self._error = False, error
        if error is None:
          made, self._prompts, counts = drawn
          self._finished[rollout] = Finished(made, self._prompts, counts, secs)
          self._begun += 1
          self._drop()
        self._changed.notify_all()
      self._news.put(None)
      if error is not None:
        return
