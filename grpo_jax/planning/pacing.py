"""How fast rollouts follow each other where some sample while others learn.

A step takes as long as the slower side, if rollouts are drawn ahead. To its own
work each side adds what a version costs it on its way: devices of one process
send it between two updates, jobs fetch it between two rollouts, and whoever has
got its parts puts them together.
"""

import math
from typing import Any
from typing import NamedTuple

from grpo_jax.planning.arithmetic import Arithmetic
from grpo_jax.planning.roofline import Machine

_ROUNDS = 40  # of versions, in which a pace has become steady


class Sync(NamedTuple):
  """What a version costs on its way to whoever samples, at least.

  Attributes:
    bytes: Of it, in the dtypes in which decoding reads it: adapters alone,
      where these alone are trained.
    link: Over which it goes: 'ici', also for NVLink and PCIe, or 'dcn'.
    learning_secs: In which no update runs.
    sampling_secs: In which nothing is drawn.
    is_known: Whether the table of chips has a figure for the link. Without one
      it counts nothing.
  """

  bytes: float = 0.0
  link: str = ''
  learning_secs: float = 0.0
  sampling_secs: float = 0.0
  is_known: bool = True

  @property
  def secs(self) -> float:
    """From the end of an update to the first token."""
    return self.learning_secs + self.sampling_secs


class Step(NamedTuple):
  """A rollout with its updates, of many.

  Attributes:
    secs: Between the ends of two.
    sampling_waits: In which whoever samples waits for a version, seconds.
    learning_waits: In which the learner waits for a rollout, seconds.
  """

  secs: float
  sampling_waits: float = 0.0
  learning_waits: float = 0.0


def handed_over(counted: Arithmetic, machine: Machine) -> Sync:
  """Of devices of one process, which are those of one host.

  A version is cut into as many parts as both sides have devices for, and each
  is sent once. The devices that hold the same part copy it from the first of
  them, and then all send each other what each lacks.

  Args:
    counted: The run.
    machine: One device.
  """
  weights = counted.weights
  near, far = counted.mesh.size, counted.sampling_mesh.size
  cut = math.gcd(near, far)
  sent = weights.published / cut * (far // cut)
  lacked = weights.renewed * (1 - 1 / cut)
  link = machine.ici_bytes
  return Sync(
    float(weights.published),
    'ici',
    _secs(sent, link),
    _secs(lacked, link),
    bool(link),
  )


def fetched(
  counted: Arithmetic, drawing: Arithmetic, number: int, machine: Machine
) -> Sync:
  """Of jobs, each of which fetches all parts of a version once, at one time.

  Args:
    counted: The learner.
    drawing: A job.
    number: How many jobs there are.
    machine: One device; its share in the network of its host.
  """
  size, far = counted.weights.published, drawing.mesh.size
  sides = number * size / counted.mesh.size, size / far
  inside = drawing.weights.renewed * (1 - 1 / far)
  secs = _secs(max(sides), machine.dcn_bytes) + _secs(inside, machine.ici_bytes)
  is_known = bool(machine.dcn_bytes and (machine.ici_bytes or not inside))
  return Sync(float(size), 'dcn', 0.0, secs, is_known)


def _secs(size: float, speed: float | None) -> float:
  return size / speed if speed else 0.0


def step(draw_secs: float, learn_secs: float, sync: Sync, pace: Any) -> Step:
  """How fast rollouts follow each other in the end.

  Args:
    draw_secs: Of each rollout.
    learn_secs: Of its updates.
    sync: Of a version.
    pace: A `sources.Pace`: which version draws which rollout.
  """
  published, drawn, learned = {0: 0.0}, [0.0], [0.0]
  loaded, worked = 0, [0.0]
  number = _ROUNDS * pace.every * (pace.ahead + 1)
  for rollout in range(2 * number):
    version = pace.version(rollout)
    own = draw_secs + sync.sampling_secs * (version != loaded)
    loaded = version
    worked.append(worked[-1] + own)
    drawn.append(max(drawn[-1], published[version]) + own)
    made = rollout + 1
    sends = sync.learning_secs * (pace.newest(made) == made)
    learned.append(max(learned[-1], drawn[-1]) + learn_secs + sends)
    published[made] = learned[-1]
  secs, own = ((ends[-1] - ends[number]) / number for ends in (learned, worked))
  busy = learn_secs + sync.learning_secs / pace.every
  return Step(secs, max(0.0, secs - own), max(0.0, secs - busy))
