"""Compiles the programs of a run for a topology, each in a process of its own.

The compiler may need minutes, and may end its process, when a check inside XLA
fails. So it runs apart, its results are kept on disk, and whoever waits is told
how it goes. For GPUs there is no compiler here: their programs are lowered
only, which tells whether they can be built and what they multiply.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import IO
from typing import Any
from typing import NamedTuple

from grpo_jax.config import whole_files
from grpo_jax.planning import hlo
from grpo_jax.planning.hlo import Collective

PROGRAMS = (
  'train_step',
  'watched_step',
  'score_all',
  'score_entropy',
  'score_reference',
  'prepare',
  'prefill',
  'decode',
  'grow',
  'regroup',
)
_POLL_SECS = 0.2


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What the compiler says of one program.

  Attributes:
    error: Why it could not be compiled; empty if it could.
    fits: False if the compiler found no room for it in a chip's memory.
    argument_bytes: Of the arguments on one chip.
    output_bytes: Of the results on one chip.
    alias_bytes: Of the results that lie where donated arguments did.
    temporary_bytes: What the program needs besides.
    host_bytes: Of the arguments of one chip that lie in the memory of the host.
    flops: Of matrix products, on one chip, loops multiplied out.
    kernels: How many kernels ran of which no operations are known.
    collectives: Each with its bytes and how often it runs.
    secs: That compiling took, or lowering.
    only_lowered: Whether there is no compiler for the machines. Then `error`,
      `flops`, `kernels` and `secs` are known, and nothing else.
  """

  error: str = ''
  fits: bool = True
  argument_bytes: int = 0
  output_bytes: int = 0
  alias_bytes: int = 0
  temporary_bytes: int = 0
  host_bytes: int = 0
  flops: float = 0.0
  kernels: float = 0.0
  collectives: tuple[Collective, ...] = ()
  secs: float = 0.0
  only_lowered: bool = False

  @property
  def peak_bytes(self) -> int:
    """What the program needs on one chip, its arguments included."""
    held = self.argument_bytes + self.output_bytes - self.alias_bytes
    return held + self.temporary_bytes

  def to_json(self) -> dict[str, Any]:
    """As plain values."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'Compiled':
    """From what `to_json` returned."""
    collectives = tuple(Collective(**one) for one in values['collectives'])
    return cls(**{**values, 'collectives': collectives})


def together(parts: Sequence[Compiled], calls: Sequence[int]) -> Compiled:
  """Several programs as one, whose results are all kept until the end.

  Args:
    parts: The programs; no two have an argument in common.
    calls: How often each is called.
  """
  for one in parts:
    if one.error:
      return one

  def total(name):
    pairs = zip(parts, calls, strict=True)
    return sum(getattr(one, name) * number for one, number in pairs)

  return Compiled(
    argument_bytes=sum(one.argument_bytes for one in parts),
    output_bytes=total('output_bytes'),
    alias_bytes=total('alias_bytes'),
    temporary_bytes=max(one.temporary_bytes for one in parts),
    flops=total('flops'),
    kernels=total('kernels'),
    collectives=tuple(
      dataclasses.replace(found, times=found.times * number)
      for one, number in zip(parts, calls, strict=True)
      for found in one.collectives
    ),
    secs=sum(one.secs for one in parts),
    only_lowered=any(one.only_lowered for one in parts),
  )


@dataclasses.dataclass(frozen=True)
class Request:
  """A program to compile.

  Attributes:
    config: Of the run, as `dataclasses.asdict` makes it.
    topology: Its name, such as `v5p:4x4x4`.
    slices: How many of them.
    program: One of `PROGRAMS`.
  """

  config: dict[str, Any]
  topology: str
  slices: int
  program: str


def compile_all(
  requests: Sequence[Request],
  at_once: int | None = None,
  tell: Callable[[Request, Compiled | None], None] = lambda *_: None,
) -> list[Compiled]:
  """Compiles programs, several at a time.

  Args:
    requests: Which; the first begin first.
    at_once: How many processes; None: one for each core.
    tell: Called when a program begins (with None) and when it is done.

  Returns:
    One for each request.
  """
  waiting = list(enumerate(requests))
  running: dict[int, _Worker] = {}
  done: dict[int, Compiled] = {}
  at_once = at_once or len(os.sched_getaffinity(0))
  try:
    while waiting or running:
      while waiting and len(running) < at_once:
        number, request = waiting.pop(0)
        tell(request, None)
        running[number] = _started(request)
      time.sleep(_POLL_SECS)
      for number, worker in list(running.items()):
        if worker.process.poll() is not None:
          del running[number]
          done[number] = _result(worker)
          tell(worker.request, done[number])
  finally:
    for worker in running.values():
      worker.process.kill()
  return [done[number] for number in range(len(requests))]


class _Worker(NamedTuple):
  """A process that compiles, and the files that it writes to.

  Not pipes: a compiler that says much would wait for someone to read it.
  """

  request: Request
  process: subprocess.Popen
  output: IO[bytes]
  errors: IO[bytes]


def _started(request: Request) -> _Worker:
  output, errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
  process = subprocess.Popen(
    [sys.executable, '-m', 'grpo_jax.planning.worker'],
    stdin=subprocess.PIPE,
    stdout=output,
    stderr=errors,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
  )
  assert process.stdin is not None
  process.stdin.write(json.dumps(dataclasses.asdict(request)).encode())
  process.stdin.close()
  return _Worker(request, process, output, errors)


def _result(worker: _Worker) -> Compiled:
  """What a worker has written, or why it has not."""

  def lines(file):
    with file:
      file.seek(0)
      return file.read().decode(errors='replace').strip().splitlines()

  output, said = lines(worker.output), lines(worker.errors)
  code = worker.process.returncode
  if code == 0 and output:
    return Compiled.from_json(json.loads(output[-1]))
  fatal = [line for line in said if 'Check failed' in line] or said[-1:]
  return Compiled(
    error=f'the compiler ended with code {code}: '
    + (fatal[0][:300] if fatal else 'it said nothing')
  )


def directory() -> pathlib.Path:
  """Where results are kept: in the user's cache directory."""
  cache = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(cache) / 'grpo_jax' / 'plans'


def key(text: str, trips: int, request: Request) -> str:
  """The name under which a result is kept.

  Args:
    text: The program as it is given to the compiler.
    trips: How often a loop runs whose number of trips is data.
    request: What was asked for.
  """
  versions = [f'{name} {_version(name)}' for name in ('jaxlib', 'libtpu')]
  reader = pathlib.Path(hlo.__file__).read_text()  # which counts
  parts = [*versions, request.topology, str(request.slices), str(trips)]
  parts += [reader, text]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:32]


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return ''


def kept(name: str) -> Compiled | None:
  """An earlier result; None if there is none that can be read."""
  try:
    return Compiled.from_json(json.loads((directory() / name).read_text()))
  except (OSError, ValueError, TypeError, KeyError):
    return None


def keep(name: str, result: Compiled) -> None:
  """Keeps a result; without a word if the disk does not let it."""
  try:
    directory().mkdir(parents=True, exist_ok=True)
    text = json.dumps(result.to_json())
    whole_files.write(directory() / name, text.encode())
  except OSError:
    pass
