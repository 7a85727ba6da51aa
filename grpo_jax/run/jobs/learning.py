"""The learner's side: its door is open while a run goes on."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import socket
import time
from typing import Any

import jax

from grpo_jax.config import plain_text
from grpo_jax.engines import offering
from grpo_jax.hosts import joining
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.run import drawing
from grpo_jax.run.build import build
from grpo_jax.run.build import identity
from grpo_jax.run.jobs import desk as desk_lib
from grpo_jax.run.jobs import door as door_lib
from grpo_jax.run.jobs import shared
from grpo_jax.run.jobs import wire
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import objects as objects_lib
from grpo_jax.serving import listening

LEAVE_SECS = 15.0
"""In which generators hear that a run is done."""
# What a generator is given in Python cannot go to another process.
_DRAWS = 'rewards', 'tokenizer', 'model', 'environment', 'agent'


def check(config: build.Config) -> None:
  """Raises a ValueError if jobs cannot draw what a config asks for."""
  found = [
    argument
    for argument in objects_lib.standing(config).values()
    if argument in _DRAWS
  ]
  if found:
    raise ValueError(
      f'The run was given {", ".join(dict.fromkeys(found))} in Python, which '
      'cannot go to its jobs (config.generator.listen); name it in the config '
      "as 'module:function', or let the run sample itself."
    )


def secret_of(path: str) -> bytes:
  """The secret in a file; b'' without one.

  Raises:
    ValueError: The file holds none.
  """
  if not path:
    return b''
  found = pathlib.Path(path).expanduser().read_bytes().strip()
  if len(found) < 16:
    raise ValueError(
      f'{path} holds a secret of {len(found)} bytes; give at least 16, such as '
      'those of `openssl rand -hex 32`.'
    )
  return found


def run_word(config: Mapping[str, Any]) -> str:
  """Tells runs apart: a hash of a config as JSON has it."""
  text = json.dumps(config, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:32]


def address_of(listen: str) -> tuple[str, int]:
  """Host and port in `config.generator.listen`."""
  host, _, port = listen.rpartition(':')
  return host.strip('[]'), int(port)


def reached_at(host: str) -> str:
  """An address of this machine at which others reach it.

  Args:
    host: At which it listens; may stand for all addresses.
  """
  if host not in ('0.0.0.0', '::', ''):
    return str(socket.getaddrinfo(host, None)[0][4][0])
  # No packet is sent: the system tells which address it would use.
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
    try:
      found.connect(('192.0.2.1', 9))
      return found.getsockname()[0]
    except OSError:
      return '127.0.0.1'


def collect(
  desk: shared.Shared,
  run: build.Run,
  check: Callable[[], None],
  records: drawing.Records,
  step: int,
  purpose: str,
) -> drawing.Collected:
  """As `drawing.collect`, by generators; the parts at the same time."""
  wire.check_records(records)
  parts = drawing.in_parts(records, run.draw.parts)
  assert desk.newest is not None  # the source has told
  jobs = [
    desk_lib.Job(purpose, step, n, len(parts), part, desk.newest)
    for n, part in enumerate(parts)
  ]
  return drawing.joined(desk.draw(jobs, check), at_once=True)


def elsewhere(
  desk: shared.Shared | None,
  run: build.Run,
  check: Callable[[], None] = lambda: None,
) -> build.Run:
  """The run, for which generators draw, if there is a desk.

  Args:
    desk: The desk.
    run: The run.
    check: Called while somebody waits for them; not all processes do equally
      often.
  """
  if desk is None:
    return run
  draws = functools.partial(collect, desk, run, check)
  return dataclasses.replace(run, collect=draws)


@contextlib.contextmanager
def opened(
  run: build.Run,
  offers: offering.Offers,
  fingerprints: list[int],
  workdir: pathlib.Path,
  tell: Callable[[str], None],
  stop: stop_signal.Stop,
  peers: processes.Processes = processes.ALONE,
) -> Iterator[shared.Shared]:
  """A desk, whose door is open.

  At the end of a run, and if nothing has stopped it, generators are told that
  it is done.

  Args:
    run: The run.
    offers: Has the snapshots that generators draw by.
    fingerprints: Of what no update changes.
    workdir: Through which weights go that go through files.
    tell: Shows a line.
    stop: Asked by signals.
    peers: The processes of the learner. The first has the desk, and each has a
      door at which generators get what its devices have of the weights.

  Raises:
    ValueError: The address, or the secret, cannot be used.
  """
  fields = run.jobs
  check(run.config)
  signer = wire.Signer(secret_of(fields.secret))
  host, port = address_of(fields.listen)
  if not peers.is_first:
    host, port = host if listening.is_loopback(host) else '', 0
  desk = desk_lib.Desk(fields.wait_secs, tell, inflight=run.draw.pace.inflight)
  with contextlib.ExitStack() as stack:
    with peers.together():
      offers.way = _way(fields.weights, reached_at(host), workdir)
      stack.callback(offers.close)
      listener = listening.bound(host, port)
      stack.callback(listener.close)
    address = f'{_bracketed(reached_at(host))}:{listener.getsockname()[1]}'
    hello = _hello(run, offers, fingerprints) | {
      'doors': peers.exchange(address)
    }
    door = door_lib.Door(
      desk,
      signer,
      hello,
      functools.partial(_refused, needed(run.config), tell),
      functools.partial(_offered, offers, tell),
    )
    it = stack.enter_context(listening.Listening(door, listener))
    stack.callback(lambda: setattr(door, 'is_closing', True))
    if peers.is_first:
      tell(
        f'generators: `grpo-jax generate --learner={_shown(*it.address)}`; '
        f'weights by {offers.way.name}'
      )
    yield shared.Shared(desk, peers, stop)
    if not stop():
      desk.is_done = True
      until = time.monotonic() + LEAVE_SECS
      while desk.generators() and time.monotonic() < until:
        time.sleep(0.05)


def _hello(
  run: build.Run, offers: offering.Offers, fingerprints: list[int]
) -> dict[str, Any]:
  """What a generator must know of a run."""
  config = json.loads(json.dumps(dataclasses.asdict(run.config)))
  return {
    'run': run_word(config),
    'config': config,
    'same': needed(run.config),
    'fingerprints': fingerprints,
    'weights': offers.described(),
  }


def _bracketed(host: str) -> str:
  return f'[{host}]' if ':' in host else host


def _shown(host: str, port: int) -> str:
  if host in ('0.0.0.0', '::'):
    host = socket.gethostname()
  return f'{_bracketed(host)}:{port}'


def _way(name: str, host: str, workdir: pathlib.Path) -> offering.Way:
  """How weights go to generators; see `config.Generator`."""
  if name == 'transfer' or (name == 'auto' and not _has_one_thread()):
    try:
      return offering.Transfer(host)
    except Exception as error:  # JAX has no type for it
      if name == 'transfer':
        raise ValueError(
          "config.generator.weights='transfer', but JAX cannot transfer from "
          f'these devices ({plain_text.first_line(error)}); give '
          "'files', and a workdir that all see."
        ) from error
  if str(bucket.arrays(workdir)) != str(workdir):
    raise ValueError(
      "Weights go through files (config.generator.weights='files', or JAX "
      'cannot transfer from these devices), and the workdir is in a bucket, '
      'whose copy on this disk no job sees; give a workdir on a disk that all '
      'see.'
    )
  return offering.Files(workdir / 'weights')


def _has_one_thread() -> bool:
  """Whether JAX has one thread, which sends nothing while it computes."""
  is_cpu = jax.local_devices()[0].platform == 'cpu'
  return is_cpu and joining.threads() == 1


def needed(config: build.Config) -> dict[str, str]:
  """What must be the same where a run learns and where it draws, by name."""
  # How programs are compiled, and not how many devices a CPU pretends to be.
  flags = os.environ.get('XLA_FLAGS', '').split()
  flags = sorted(x for x in flags if '_device_count=' not in x)
  return {'XLA_FLAGS': ' '.join(flags)} | {
    name: repr(value)
    for name, value in identity.compared(config).items()
    if not name.startswith('config.') and ' data.' not in name
  }


def differences(
  theirs: Mapping[str, str], ours: Mapping[str, str]
) -> tuple[list[str], list[str]]:
  """What differs: names for which nobody may draw, and names to warn of."""
  names = [
    name
    for name in dict.fromkeys([*theirs, *ours])
    if theirs.get(name) != ours.get(name)
  ]
  grave = [name for name in names if _is_grave(name)]
  return grave, [name for name in names if name not in grave]


def _is_grave(name: str) -> bool:
  """Whether another one draws other bits."""
  if name.startswith('the version of '):
    return name.split()[-1] in ('grpo_jax', 'jax', 'jaxlib')
  return name.startswith('the SHA-256')


def _refused(
  ours: Mapping[str, str],
  tell: Callable[[str], None],
  about: Mapping[str, Any],
) -> str:
  """Why a generator may not draw; '' if it may."""
  theirs = about['same']
  grave, others = differences(theirs, ours)
  if grave:
    name = grave[0]
    return (
      f'The generator has {name}={theirs.get(name)}, and the learner has '
      f'{ours.get(name)}; install and copy the same for both.'
    )
  if others:
    name = others[0]
    tell(
      f'a generator has {name}={theirs.get(name)}, and the learner has '
      f'{ours.get(name)}'
    )
  kind = jax.devices()[0].device_kind
  if about['kind'] != kind:
    tell(
      f'a generator has devices of another kind, {about["kind"]}, which draw '
      f'other bits than {kind}'
    )
  return ''


def _offered(
  offers: offering.Offers,
  tell: Callable[[str], None],
  wanted: Mapping[str, Any],
) -> Mapping[str, Any]:
  """What a generator is told that asks for weights."""
  try:
    return offers.offer(wanted)
  except offering.Dropped as error:
    raise wire.Refused(410, plain_text.said(error)) from error
  except OSError as error:
    text = (
      f'The weights cannot be written for generators ({error.strerror or error}'
      '); make room in the workdir.'
    )
    tell(text)
    raise wire.Refused(507, text) from error
