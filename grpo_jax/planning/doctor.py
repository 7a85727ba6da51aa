"""The doctor: are these hosts healthy? The first thing to run on new ones.

Every process measures, and tells the others what it has measured. Then each of
them judges by the measurements of all. So all have the same report, and the
first process prints it. A check that fails does not end the others.

A process that is gone is noticed by the watch of `hosts/watch.py`. A check
that does not come back, because devices cannot reach each other for example,
ends the command after `LIMIT_SECS`.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import functools
import time
import traceback
from typing import Any
from typing import NamedTuple

from grpo_jax.config import plain_text
from grpo_jax.hosts import processes
from grpo_jax.hosts import watch
from grpo_jax.planning import accelerators
from grpo_jax.planning import device_checks
from grpo_jax.planning import host_checks
from grpo_jax.planning.host_checks import FAILED
from grpo_jax.planning.host_checks import SKIPPED
from grpo_jax.planning.host_checks import Judged
from grpo_jax.planning.host_checks import Measured

LIMIT_SECS = 300.0  # for one check

_LATE_DEVICES = (
  'JAX waits for a driver, or for another host of the slice; see whether all '
  'hosts are up and whether the driver answers (nvidia-smi on GPUs); '
  'restart the host that hangs.'
)
_LATE_FILES = (
  'A file system or a bucket does not answer; see whether it can be read and '
  'written from this host, or give another directory.'
)


class Line(NamedTuple):
  """One line of the report; the same in all processes but for its times."""

  name: str
  verdict: str
  measured: str = ''
  expected: str = ''
  secs: float = 0.0  # from beginning to end, the wait for other processes too
  compile_secs: float = 0.0  # how much of it this process has compiled
  values: tuple[Measured | None, ...] = ()  # by process; None if it has failed
  failures: tuple[tuple[int, str], ...] = ()  # process, and a sentence
  trace: str = ''  # the traceback of this process, if it has failed


class Check(NamedTuple):
  """One check.

  Attributes:
    name: As the report shows it.
    measure: Measures in this process. What it raises makes the check fail.
    judge: From the measurements, by the numbers of processes that have not
      failed, to what is said of them. It is called in all processes, and says
      the same in all. An error of it makes the check fail too.
    left_out: From the lines so far, by the names of their checks, to the reason
      why the check is left out, '' if it is not; the same in all processes.
    is_joint: Whether the processes wait for each other while they measure.
    late: What may be wrong, and what to do, if it does not come back.
  """

  name: str
  measure: Callable[[], Measured]
  judge: Callable[[Mapping[int, Measured]], Judged]
  left_out: Callable[[Mapping[str, Line]], str] = lambda lines: ''
  is_joint: bool = False
  late: str = (
    'A device hangs, or devices of different hosts cannot reach each other; '
    'restart the host of the device, or look at the network.'
  )


def examine(
  peers: processes.Processes,
  workdir: str | None,
  tell: Callable[[Line], None],
  give_up: Callable[[Line], None],
  sizes: device_checks.Sizes | None = None,
  found: accelerators.Found | None = None,
  learner: tuple[str, str] | None = None,
) -> list[Line]:
  """Makes all checks, one after another.

  Args:
    peers: The processes, all of which must call it.
    workdir: Where to write a file, a directory or an address such as `gs://`;
      None to write nowhere.
    tell: Called with each line of the report as soon as it is known.
    give_up: Called in another thread with a line for a check that does not come
      back. It is to end this process.
    sizes: Of what is measured; None chooses them by the kind of device.
    found: What was found on this host before JAX has used a device; None looks
      now.
    learner: The address of one to draw for, and the file of its secret; None
      asks none.

  Returns:
    The lines.
  """
  lines: dict[str, Line] = {}
  for check in checks(peers, workdir, sizes, found, learner):
    if why := check.left_out(lines):
      line = Line(check.name, SKIPPED, why)
    else:
      line = _line(check, peers, give_up)
    lines[check.name] = line
    tell(line)
  return list(lines.values())


def checks(
  peers: processes.Processes,
  workdir: str | None = None,
  sizes: device_checks.Sizes | None = None,
  found: accelerators.Found | None = None,
  learner: tuple[str, str] | None = None,
) -> list[Check]:
  """All checks, in their order; for the arguments see `examine`."""
  before, where = found or accelerators.look(), workdir or ''
  here, on = host_checks, device_checks
  alone = '' if peers.number > 1 else 'there is one process'

  def no_devices(lines: Mapping[str, Line]) -> str:
    return 'JAX has no devices' if lines['devices'].failures else ''

  def no_common_devices(lines: Mapping[str, Line]) -> str:
    if not alone and lines['devices'].verdict == FAILED:
      return 'the check of the devices has failed'
    return no_devices(lines)

  def not_shared(lines: Mapping[str, Line]) -> str:
    is_written = lines['workdir'].verdict not in (FAILED, SKIPPED)
    return alone if is_written else 'the workdir was not written'

  def on_devices(name: str, measure: Callable[..., Any], judge: Any) -> Check:
    return Check(name, functools.partial(measure, sizes), judge, no_devices)

  asks = Check(
    'learner',
    functools.partial(here.learner, *(learner or ('', ''))),
    here.judge_learner,
    late=_LATE_FILES,
  )
  return [
    Check('versions', here.versions, here.judge_versions, late=_LATE_FILES),
    Check(
      'devices',
      functools.partial(here.devices, before),
      here.judge_devices,
      late=_LATE_DEVICES,
    ),
    Check(
      'memory',
      functools.partial(here.memory, before),
      here.judge_memory,
      no_devices,
    ),
    on_devices('matrix product', on.matrix_product, on.judge_matrix_product),
    on_devices('memory bandwidth', on.bandwidth, on.judge_bandwidth),
    Check(
      'collective',
      functools.partial(on.collective, sizes),
      on.judge_collective,
      no_common_devices,
      is_joint=True,
    ),
    on_devices('host to device', on.transfer, on.judge_transfer),
    Check(
      'workdir',
      functools.partial(here.written, where, peers.rank),
      here.judge_written,
      lambda _: (
        '' if where else 'no --workdir was given, so nothing was written'
      ),
      late=_LATE_FILES,
    ),
    Check(
      'shared workdir',
      functools.partial(here.shared, where, peers),
      functools.partial(here.judge_shared, peers.number),
      not_shared,
      is_joint=True,
      late=_LATE_FILES,
    ),
    Check(
      'clocks',
      functools.partial(here.clocks, peers),
      here.judge_clocks,
      lambda _: alone,
      is_joint=True,
    ),
    Check(
      'compiled programs', here.compiled, here.judge_compiled, late=_LATE_FILES
    ),
    *([asks] if learner else []),
  ]


def _line(
  check: Check, peers: processes.Processes, give_up: Callable[[Line], None]
) -> Line:
  """Makes one check, in all processes."""
  began = time.monotonic()
  with _limited(check, give_up):
    mine, problem, trace = _tried(check.measure)
    # In a joint check the others may wait for this process in a program of the
    # devices. The watch then ends them.
    with peers.failing(problem if check.is_joint else ''):
      told = peers.exchange((mine, problem))
  failures = tuple((rank, why) for rank, (_, why) in enumerate(told) if why)
  known = {rank: one for rank, (one, _) in enumerate(told) if one is not None}
  line = Line(
    check.name,
    FAILED,
    secs=time.monotonic() - began,
    compile_secs=(mine or {}).get('compile_secs', 0.0),
    values=tuple(one for one, _ in told),
    failures=failures,
    trace=trace,
  )
  if not known:
    return line
  judged, problem, trace = _tried(functools.partial(check.judge, known))
  if judged is None:
    return line._replace(measured=problem, trace=trace)
  verdict = FAILED if failures else judged.verdict
  return line._replace(
    verdict=verdict, measured=judged.measured, expected=judged.expected
  )


def _tried(body: Callable[[], Any]) -> tuple[Any, str, str]:
  """What it returns, or what is wrong in a sentence, and the traceback."""
  try:
    return body(), '', ''
  except processes.PeerError:  # the process that it came from tells it
    return None, '', ''
  except Exception as error:
    return None, _sentence(error), traceback.format_exc()


def _sentence(error: Exception) -> str:
  if isinstance(error, OSError) and error.strerror:
    named = isinstance(error.filename, str)
    what = error.filename if named else 'What was asked of the system'
    return f'{what} cannot be used ({error.strerror}).'
  said = processes.first_line(error)
  if said and isinstance(error, ValueError):
    return said
  return f'{plain_text.kind(error)}: {said or "no text"}.'.replace('..', '.')


def _limited(
  check: Check, give_up: Callable[[Line], None]
) -> contextlib.AbstractContextManager[None]:
  """Gives up once the body has not come back within `LIMIT_SECS`."""
  why = f'It has not come back within {LIMIT_SECS:.0f} s. {check.late}'
  line = Line(check.name, FAILED, why, secs=LIMIT_SECS)
  return watch.limited(
    LIMIT_SECS, lambda: give_up(line), f'{check.name}: {why}'
  )
