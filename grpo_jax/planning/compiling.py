"""The programs of a run, lowered and compiled for machines that are not there.

The compiler may need minutes, and may end its process, when a check inside XLA
fails. So each program is compiled in a process of its own, which is this module
as a program, `python -m grpo_jax.planning.compiling`: it reads a `Request` as
JSON from standard input, and prints a `Compiled` as JSON. Results are kept on
disk, and whoever waits is told how it goes. For GPUs there is no compiler here:
their programs are lowered only, which tells whether they can be built and what
they multiply.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any
from typing import NamedTuple

import jax

from grpo_jax.config import Config
from grpo_jax.config import dataclass_from_dict
from grpo_jax.config import importing
from grpo_jax.config import plain_text
from grpo_jax.config import whole_files
from grpo_jax.learner import layouts
from grpo_jax.learner import programs
from grpo_jax.learner import updates
from grpo_jax.planning import accelerators
from grpo_jax.planning import hlo
from grpo_jax.planning import topologies
from grpo_jax.run.build import build

PROGRAMS = (
  'train_step',
  'watched_step',
  'score_all',
  'score_entropy',
  'score_reference',
  'score_teacher',
  'prepare',
  'prefill',
  'read',
  'decode',
  'grow',
  'regroup',
)


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
  collectives: tuple[hlo.Collective, ...] = ()
  secs: float = 0.0
  only_lowered: bool = False

  @property
  def peak_bytes(self) -> int:
    """What the program needs on one chip, its arguments included."""
    held = self.argument_bytes + self.output_bytes - self.alias_bytes
    return held + self.temporary_bytes

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> 'Compiled':
    """From what `dataclasses.asdict` returned."""
    collectives = tuple(hlo.Collective(**one) for one in values['collectives'])
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
    tell: Called when a program begins (with None) and when it is done, in the
      thread that waits for it.

  Returns:
    One for each request.
  """
  running: list[subprocess.Popen] = []
  pool = futures.ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0)))

  def compiled(request: Request) -> Compiled:
    tell(request, None)
    result = _in_a_process(request, running)
    tell(request, result)
    return result

  try:
    return list(pool.map(compiled, requests))
  finally:
    pool.shutdown(wait=False, cancel_futures=True)
    for process in running:
      process.kill()  # does nothing to one that has ended


def _in_a_process(
  request: Request, running: list[subprocess.Popen]
) -> Compiled:
  """What a process says of a program, or why it has not; it joins `running`."""
  process = subprocess.Popen(
    # With our folders, so that it finds a method of the user's own.
    [
      sys.executable,
      '-m',
      'grpo_jax.planning.compiling',
      *filter(None, sys.path),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    errors='replace',
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
  )
  running.append(process)
  output, errors = process.communicate(json.dumps(dataclasses.asdict(request)))
  if process.returncode == 0 and output.strip():
    return Compiled.from_json(json.loads(output.strip().splitlines()[-1]))
  said = errors.strip().splitlines()
  fatal = [line for line in said if 'Check failed' in line] or said[-1:]
  return Compiled(
    error=f'the compiler ended with code {process.returncode}: '
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
  packages = 'jaxlib', 'libtpu'
  versions = [f'{name} {accelerators.version(name)}' for name in packages]
  reader = pathlib.Path(hlo.__file__).read_text()  # which counts
  parts = [*versions, request.topology, str(request.slices), str(trips)]
  parts += [reader, text]
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:32]


def kept(name: str) -> Compiled | None:
  """An earlier result; None if there is none that can be read."""
  try:
    return Compiled.from_json(json.loads((directory() / name).read_text()))
  except (OSError, ValueError, TypeError, KeyError):
    return None


def keep(name: str, result: Compiled) -> None:
  """Keeps a result; without a word if the disk does not let it."""
  with contextlib.suppress(OSError):
    directory().mkdir(parents=True, exist_ok=True)
    text = json.dumps(dataclasses.asdict(result))
    whole_files.write(directory() / name, text.encode())


class Lowered(NamedTuple):
  """A program that is ready to be compiled.

  Attributes:
    lowered: Of JAX; a list of pairs (lowered, calls), if what has one name here
      is several programs, one after another.
    trips: How often a loop runs whose number of trips is data.
  """

  lowered: Any
  trips: int

  @property
  def parts(self) -> list[tuple[Any, int]]:
    """Each program of which this consists, and how often it is called."""
    one = self.lowered
    return one if isinstance(one, list) else [(one, 1)]


def lowered(
  config: Config, topology: topologies.Topology, program: str
) -> Lowered:
  """Lowers one program.

  Args:
    config: Of the run; its mesh lies over the topology.
    topology: See `topologies.named`.
    program: One of `PROGRAMS`.

  Raises:
    ValueError: It cannot be built; the message says why.
  """
  own = config.generator.devices
  mesh, devices = topologies.mesh(topology, config.mesh, own)
  return lowerings(build.abstract(config, mesh, devices))[program]()


def lowerings(parts: build.Abstract) -> dict[str, Callable[[], Lowered]]:
  """For each program of a run a function that lowers it.

  The loop over micro-batches and the loop over tokens run as often as the
  largest rollout needs. What the warm-up runs is left out.
  """
  run, update, example = parts.run, parts.updater, parts.example()
  sampler = run.draw
  params = update.joined(update.compiled.abstract.params)
  environment, drawn = run.config.environment, sampler.prompts // sampler.parts
  if run.config.engine.kind == 'http':
    drawing = {}
  elif environment.name and environment.max_turns > 1:
    number = drawn * sampler.group
    drawing = parts.engine.lowering_of_calls(params, number, run.sampling)
  else:
    drawing = parts.engine.lowering(
      params, drawn, sampler.group, run.sampling, sampler.max_tokens
    )
  trips = {'decode': sampler.max_tokens}  # the others have no such loop
  found: dict[str, Callable[[], Lowered]] = {
    name: lambda name=name, lower=lower: Lowered(lower(), trips.get(name, 1))
    for name, lower in drawing.items()
  }
  # If a run measures overshoot in some rollouts, it does so in rollout 0.
  lower = functools.partial(programs.lowerings, update, update.layout, example)
  learning = lower(1)
  if update.spec.watch_steps > 1:
    watched = lower(0)
    learning['watched_step'] = watched['train_step']
  chosen = next(updates.optimizer_batches(update.spec, sampler.prompts, 0))
  _, used = layouts.abstract_stack(
    update.compiled, example, chosen, update.layout
  )
  found |= {
    name: lambda lower=lower: Lowered(lower(), used)
    for name, lower in learning.items()
  }
  return found


_CUDNN = 91000  # a version that has all that is asked for


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
  """Inside, JAX lowers for CUDA as if cuDNN were there; in the whole process.

  JAX refuses this for two reasons, neither of which concerns what is lowered:
  it asks the installed cuDNN for its version, and it takes every program that
  may be split by a partitioner of its own to need devices. Here attention is
  split by hand before (see `models/kernels/rows.py`), so no partitioner runs.

  It changes private parts of JAX, so it is meant for a process that does
  nothing else, as those of `compile_all` do.
  """
  # Private: a later JAX may have them elsewhere, which `tests` would show.
  from jax._src import dispatch
  from jax._src.cudnn import fused_attention_stablehlo

  library: Any = fused_attention_stablehlo
  asked, need = (
    library.check_cudnn_version,
    set(dispatch.prim_requires_devices_during_lowering),
  )
  attention = {
    one
    for one in need
    if one.name == 'custom_partitioning' or 'dot_product_attention' in one.name
  }
  library.check_cudnn_version = lambda: _CUDNN
  dispatch.prim_requires_devices_during_lowering -= attention
  try:
    yield
  finally:
    library.check_cudnn_version = asked
    dispatch.prim_requires_devices_during_lowering |= attention


def answer(request: Request) -> Compiled:
  """Lowers and compiles the program of a request; for GPUs it only lowers."""
  config = dataclass_from_dict(Config, request.config, 'config')
  topology = topologies.named(request.topology, request.slices)
  if not topology.is_tpu:
    return _only_lowered(config, topology, request.program)
  found = lowered(config, topology, request.program)
  several = found.parts
  text = '\0'.join(f'{calls} {one.as_text()}' for one, calls in several)
  name = key(text, found.trips, request)
  result = kept(name)
  if result is None:
    parts = [_compiled(one, found.trips, topology) for one, _ in several]
    result = together(parts, [calls for _, calls in several])
    if not result.error or not result.fits:  # else it may go well next time
      keep(name, result)
  return result


def _compiled(
  program: Any, trips: int, topology: topologies.Topology
) -> Compiled:
  """What the compiler says."""
  start = time.monotonic()
  try:
    compiled = program.compile()
  except Exception as error:  # of one type, whatever is wrong
    said = ' '.join(plain_text.said(error).split())
    place = said.find('RESOURCE_EXHAUSTED')  # what follows is of memory
    full = place >= 0
    return Compiled(
      error=said[place : place + 300] if full else said[:400],
      fits=not full,
      secs=time.monotonic() - start,
    )
  secs = time.monotonic() - start
  counted = hlo.Program(compiled.as_text(), trips, topology.joined)
  memory = compiled.memory_analysis()
  return Compiled(
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    alias_bytes=memory.alias_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    host_bytes=memory.host_argument_size_in_bytes,
    flops=counted.flops(),
    kernels=counted.kernels(),
    collectives=tuple(counted.collectives()),
    secs=secs,
  )


def _only_lowered(
  config: Config, topology: topologies.Topology, program: str
) -> Compiled:
  """What the program tells before it is compiled."""
  start = time.monotonic()
  mesh, _ = topologies.mesh(topology, config.mesh, config.generator.devices)
  parts = []
  try:
    with without_a_gpu():
      found = lowered(config, topology, program)
    for one, _ in found.parts:
      module = one.compiler_ir('stablehlo')
      flops, kernels = hlo.lowered_work(module, mesh.shape, found.trips)
      parts.append(Compiled(flops=flops, kernels=kernels, only_lowered=True))
  except Exception as error:  # of many types, whatever JAX or a kernel refuses
    said = ' '.join(plain_text.named(error).split())[:400]
    return Compiled(
      error=f'cannot be lowered for CUDA: {said}',
      secs=time.monotonic() - start,
      only_lowered=True,
    )
  whole = together(parts, [calls for _, calls in found.parts])
  return dataclasses.replace(whole, secs=time.monotonic() - start)


if __name__ == '__main__':
  # JAX's own cache keeps programs that run; these it could write, but not read.
  jax.config.update('jax_enable_compilation_cache', False)
  for folder in sys.argv[1:]:
    importing.add_folder(folder)
  found = answer(Request(**json.load(sys.stdin)))
  print(json.dumps(dataclasses.asdict(found)))
