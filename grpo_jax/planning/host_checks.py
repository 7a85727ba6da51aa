"""Checks of the hosts: versions, devices, memory, workdir, clocks, programs.

Of each there is a function that measures in this process, and one that judges
by the measurements of all processes, by their numbers.
"""

from collections.abc import Mapping
import contextlib
import itertools
import os
import pathlib
import platform
import shutil
import statistics
import time
from typing import Any
from typing import NamedTuple
import uuid

from grpo_jax.hosts import processes
from grpo_jax.mesh import chips
from grpo_jax.planning import accelerators
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import records
from grpo_jax.run.keep import workdir as workdirs

OK, SLOW, FAILED, SKIPPED = 'ok', 'slow', 'failed', 'skipped'
"""Verdicts of a check."""

Measured = dict[str, Any]
"""What one process has measured: numbers, texts, and lists of them."""

GIB = 2**30
FILE_MB = 16  # of the file that is written to the workdir

LEAST_WRITE_MB_PER_S = 20.0  # a checkpoint of 7B takes more than an hour below
LEAST_FREE_GIB = 1.0
LEAST_MEMORY = 0.6  # of the chip's; JAX takes three quarters of a GPU's
MOST_MEMORY_IN_USE = 0.1  # of what JAX may use, before anything runs
MOST_CLOCK_SECS = 1.0

_CACHE = 'jax_compilation_cache_dir'  # in the config of JAX
_CLOCK_ROUNDS = 5


class Judged(NamedTuple):
  """What is said of the measurements of all processes."""

  measured: str
  expected: str = ''  # the figure to compare with, in words
  verdict: str = OK


def versions() -> Measured:
  """The versions of Python and of the packages that are installed."""
  packages = *records.PACKAGES, *accelerators.PLUGINS
  found = {package: accelerators.version(package) for package in packages}
  installed = {name: version for name, version in found.items() if version}
  return {
    'versions': {'Python': platform.python_version(), **installed},
    'git': records.git_revision(),
  }


def judge_versions(told: Mapping[int, Measured]) -> Judged:
  """Whether they are equal in all processes, and go together."""
  of_each = {rank: one['versions'] for rank, one in told.items()}
  first = of_each[min(of_each)]
  listed = ', '.join(f'{name} {version}' for name, version in first.items())
  expected = 'the same in all processes' if len(told) > 1 else ''
  of_name = {
    name: {r: one.get(name, '(not installed)') for r, one in of_each.items()}
    for name in itertools.chain(*of_each.values())
  }
  # A run refuses another revision too.
  of_name['git revision'] = {rank: one['git'] for rank, one in told.items()}
  for name, mine in of_name.items():
    if odd := _odd(name, mine):
      said = f'{odd}; install the same everywhere.'
      return Judged(said, expected, FAILED)
  # JAX does not use one of another version.
  for plugin in accelerators.PLUGINS[1:]:
    if plugin in first and first[plugin] != first.get('jaxlib'):
      return Judged(
        f'{plugin} {first[plugin]} does not go with jaxlib '
        f"{first.get('jaxlib')}; install both anew: pip install '.[cuda]'.",
        expected,
        FAILED,
      )
  return Judged(listed, expected)


def _odd(name: str, of_each: Mapping[int, Any]) -> str:
  """Which processes have another value than most; '' if none has."""
  values = list(of_each.values())
  usual = max(values, key=values.count)
  odd = [rank for rank, value in of_each.items() if value != usual]
  if not odd:
    return ''
  return (
    f'Process {", ".join(map(str, odd))} has {name} {of_each[odd[0]]}, and the '
    f'others have {usual}'
  )


def devices(found: accelerators.Found) -> Measured:
  """The devices of this process, and accelerators that JAX does not use.

  Args:
    found: What was found on this host before JAX has used a device.
  """
  import jax

  mine = jax.local_devices()
  platform = mine[0].platform
  return {
    'platform': platform,
    'kinds': [device.device_kind for device in mine],
    'all_devices': jax.device_count(),
    'unused': '' if platform != 'cpu' else accelerators.unused(found),
    **accelerators.counted(found, platform),
  }


def judge_devices(told: Mapping[int, Measured]) -> Judged:
  """Whether the processes use all devices, and have as many of one kind."""
  first = told[min(told)]
  kind, number = first['kinds'][0], len(first['kinds'])
  total = sum(len(one['kinds']) for one in told.values())
  processes_of = f'{len(told)} process{"es" * (len(told) > 1)}'
  measured = f'{total} x {kind} ({first["platform"]}) in {processes_of}'
  expected = f'{number} in each process' if len(told) > 1 else ''
  for rank, one in told.items():
    if one['unused']:
      where = f'process {rank}: ' if len(told) > 1 else ''
      return Judged(f'{where}{one["unused"]}', expected, FAILED)
    if len(set(one['kinds'])) > 1:
      kinds = ', '.join(sorted(set(one['kinds'])))
      said = f'Process {rank} has devices of several kinds: {kinds}.'
      return Judged(said, expected, FAILED)
  missing, wanted = accelerators.missing(told)
  if missing:
    return Judged(missing, wanted, FAILED)
  shown = {
    r: f'{len(one["kinds"])} x {one["kinds"][0]}' for r, one in told.items()
  }
  if odd := _odd('devices:', shown):
    said = f'{odd}; look at those hosts, or start again without them.'
    return Judged(said, expected, FAILED)
  if any(one['all_devices'] != total for one in told.values()):
    said = f'{measured}, but JAX counts {first["all_devices"]} in all of them.'
    return Judged(said, expected, FAILED)
  return Judged(measured, expected)


def memory(found: accelerators.Found) -> Measured:
  """Memory of each device, where JAX tells it, and of the host, in GiB.

  Args:
    found: What was found on this host before JAX has used a device.
  """
  import jax

  told = []
  for device in jax.local_devices():
    try:
      told.append(device.memory_stats() or {})
    except Exception:  # of plugins that cannot tell it
      told.append({})
  known = [stats for stats in told if stats.get('bytes_limit')]
  total, free = _host_gib()
  return {
    'kind': jax.local_devices()[0].device_kind,
    'limit_gib': [stats['bytes_limit'] / GIB for stats in known],
    'in_use_gib': [stats.get('bytes_in_use', 0) / GIB for stats in known],
    'before': accelerators.used(found),
    'host': found.host,
    'host_gib': total,
    'host_free_gib': free,
  }


def _host_gib() -> tuple[float, float]:
  """Memory of the host, and how much of it is free; 0 if it is not told."""
  total, free = 0.0, 0.0
  with contextlib.suppress(OSError, ValueError):
    total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB
  for line in accelerators.text('/proc/meminfo').splitlines():
    if line.startswith('MemAvailable:'):
      free = int(line.split()[1]) * 1024 / GIB
  limit = accelerators.text('/sys/fs/cgroup/memory.max')  # of a container
  if limit.isdigit() and int(limit) / GIB < total:
    total = int(limit) / GIB
    used = accelerators.text('/sys/fs/cgroup/memory.current')
    free = min(free, total - int(used) / GIB) if used.isdigit() else free
  return total, free


def judge_memory(told: Mapping[int, Measured]) -> Judged:
  """Beside the memory of the chip; and whether anything else uses it."""
  limits = [gib for one in told.values() for gib in one['limit_gib']]
  in_use = [gib for one in told.values() for gib in one['in_use_gib']]
  hosts = [one['host_gib'] for one in told.values()]
  free = [one['host_free_gib'] for one in told.values()]
  host = f'host: {spread(hosts)} GiB'
  if all(free):
    host += f', {spread(free)} GiB of it free'
  first = told[min(told)]
  if not limits:
    kind = first['kind']
    return Judged(
      host, f'no figure, because JAX does not tell the memory of {kind}'
    )
  measured = f'{spread(limits)} GiB for JAX on each device; {host}'
  if any(used > MOST_MEMORY_IN_USE * gib for used, gib in zip(in_use, limits)):
    said = f'{measured}; up to {max(in_use):.3g} GiB are in use already'
    return Judged(said, 'nothing in use', SLOW)
  if taken := _taken(told, min(limits)):
    return taken._replace(measured=f'{measured}; {taken.measured}')
  chip = chips.find(first['kind'])
  if chip is None:
    return Judged(measured, not_in_the_table(first['kind']))
  expected = f'{chip.device_memory_gib:g} GiB ({chip.name})'
  enough = min(limits) >= LEAST_MEMORY * chip.device_memory_gib
  return Judged(measured, expected, OK if enough else SLOW)


def _taken(told: Mapping[int, Measured], limit_gib: float) -> Judged | None:
  """What is said of a GPU that another process uses; None if there is none.

  JAX says that it may use a share of all the memory, whatever others use. So
  this is judged by what was in use before JAX began.

  Args:
    told: The measurements.
    limit_gib: Memory that JAX may use on a GPU.
  """
  of_all = [
    (gpu, one['host']) for one in told.values() for gpu in one['before']
  ]
  if not of_all:
    return None
  gpu, host = max(
    of_all, key=lambda one: one[0]['used_gib'] / one[0]['total_gib']
  )
  used, total = gpu['used_gib'], gpu['total_gib']
  if used <= MOST_MEMORY_IN_USE * total:
    return None
  said = (
    f'{used:.3g} of {total:.3g} GiB of {gpu["gpu"]} on {host} were in use '
    'before JAX began; end the process that uses them (nvidia-smi lists it), '
    'or name the other GPUs in CUDA_VISIBLE_DEVICES'
  )
  expected = f'{limit_gib:.3g} GiB free for JAX, and little in use by others'
  return Judged(said, expected, FAILED if total - used < limit_gib else SLOW)


def not_in_the_table(kind: str) -> str:
  """That there is nothing to compare with."""
  if kind == 'cpu':
    return 'no figure for a CPU'
  return f'no figure, because grpo_jax/mesh/chips.py has no {kind}'


def spread(figures: list[float]) -> str:
  """The smallest and the largest of some figures, as text.

  >>> spread([0.0512, 0.0512]), spread([15.75, 31.25, 20.0])
  ('0.0512', '15.8 to 31.2')
  """
  # Three digits, and never an exponent.
  low, high = (
    f'{figure:,.0f}' if figure >= 100 else f'{figure:.3g}'
    for figure in (min(figures), max(figures))
  )
  return low if low == high else f'{low} to {high}'


def written(workdir: str, rank: int) -> Measured:
  """Writes a file to the workdir, reads it again, and deletes it.

  A directory that is not there yet is not made; the file is then written to the
  nearest one above it.

  Args:
    workdir: As it was typed.
    rank: The number of this process.

  Raises:
    ValueError: The file cannot be written, or holds something else than what
      was written to it, or a bucket cannot be reached.
  """
  where, is_bucket = _where(workdir), bucket.is_bucket(workdir)
  shown = workdir if is_bucket else str(where)
  data = os.urandom(1_000_000) * FILE_MB
  file = where / f'.doctor.{uuid.uuid4().hex}.{rank}'
  try:
    began = time.perf_counter()
    with file.open('wb') as out:
      out.write(data)
      if not is_bucket:
        out.flush()
        os.fsync(out.fileno())
    wrote = time.perf_counter()
    same = file.read_bytes() == data
    read = time.perf_counter()
  except OSError as error:
    raise ValueError(
      f'{shown} cannot be written ({error.strerror or error}); make room, or '
      'give another workdir.'
    ) from error
  finally:
    with contextlib.suppress(Exception):  # the first error counts
      file.unlink()
  if not same:
    raise ValueError(
      f'A file in {shown} does not hold what was written to it; give a workdir '
      'on another disk.'
    )
  return {
    'where': shown,
    'write_mb_per_s': FILE_MB / (wrote - began),
    'read_mb_per_s': FILE_MB / (read - wrote),
    'free_gib': None if is_bucket else shutil.disk_usage(where).free / GIB,
  }


def _where(workdir: str) -> Any:
  """The workdir, or the nearest directory above it that exists."""
  if bucket.is_bucket(workdir):
    return bucket.place_of(workdir)
  path = pathlib.Path(workdir).absolute()
  return next(one for one in (path, *path.parents) if one.exists())


def judge_written(told: Mapping[int, Measured]) -> Judged:
  """Whether it is fast, and whether there is room."""
  first = told[min(told)]
  write = [one['write_mb_per_s'] for one in told.values()]
  read = [one['read_mb_per_s'] for one in told.values()]
  free = [one['free_gib'] for one in told.values()]
  free = [gib for gib in free if gib is not None]  # of a bucket
  measured = (
    f'{FILE_MB} MB written to {first["where"]} at {spread(write)} MB/s, and '
    f'read back unchanged at {spread(read)} MB/s'
  )
  expected = f'{LEAST_WRITE_MB_PER_S:g} MB/s or more'
  is_slow = min(write) < LEAST_WRITE_MB_PER_S
  if free:
    measured += f'; {spread(free)} GiB free'
    expected += f', and {LEAST_FREE_GIB:g} GiB free'
    is_slow = is_slow or min(free) < LEAST_FREE_GIB
  return Judged(measured, expected, SLOW if is_slow else OK)


def shared(workdir: str, peers: processes.Processes) -> Measured:
  """Whether this process sees in the workdir what the first one writes.

  Raises:
    ValueError: It does not.
  """
  began = time.perf_counter()
  with peers.together():
    where = _where(workdir)
  workdirs.check_shared(where, peers)
  return {'where': str(where), 'seen_secs': time.perf_counter() - began}


def judge_shared(number: int, told: Mapping[int, Measured]) -> Judged:
  """Says it."""
  secs = max(one['seen_secs'] for one in told.values())
  return Judged(
    f'all {number} processes see what process 0 writes, within {secs:.2g} s',
    f'within {workdirs.SHARED_SECS:g} s',
  )


def clocks(peers: processes.Processes) -> Measured:
  """The time of day in this process, read some times when all have met."""
  stamps = []
  for _ in range(_CLOCK_ROUNDS):
    peers.exchange()
    stamps.append(time.time())
  return {'stamps': stamps}


def judge_clocks(told: Mapping[int, Measured]) -> Judged:
  """How far the clocks are apart."""
  first = told[min(told)]['stamps']
  ahead = {
    rank: statistics.median(a - b for a, b in zip(one['stamps'], first))
    for rank, one in told.items()
  }
  low = min(ahead, key=ahead.__getitem__)
  high = max(ahead, key=ahead.__getitem__)
  apart = ahead[high] - ahead[low]
  measured = f'at most {apart:.2g} s apart'
  expected = f'{MOST_CLOCK_SECS:g} s or less'
  if apart <= MOST_CLOCK_SECS:
    return Judged(measured, expected)
  said = (
    f'process {high} is {apart:.3g} s ahead of process {low}; set the clocks'
  )
  return Judged(said, expected, SLOW)


def compiled() -> Measured:
  """The directory of compiled programs, and what is in it."""
  import jax

  from grpo_jax.run.build import compiled_programs

  given = getattr(jax.config, _CACHE)
  return _kept_in(str(given or compiled_programs.default_directory()))


def _kept_in(directory: str) -> Measured:
  if '://' in directory:
    return {'directory': directory, 'is_writable': True, 'programs': None}
  path = pathlib.Path(directory).absolute()
  files = [
    file for file in accelerators.paths(directory, '*') if os.path.isfile(file)
  ]
  above = next(one for one in (path, *path.parents) if one.exists())
  return {
    'directory': directory,
    'is_writable': above.is_dir() and os.access(above, os.W_OK | os.X_OK),
    'programs': sum(not file.endswith('-atime') for file in files),
    'mib': sum(os.path.getsize(file) for file in files) / 2**20,
    'free_gib': shutil.disk_usage(above).free / GIB,
  }


def judge_compiled(told: Mapping[int, Measured]) -> Judged:
  """Whether programs will be kept there."""
  first = told[min(told)]
  measured = first['directory']
  if first['programs'] is not None:
    number = first['programs']
    measured += f': {number} program{"s" * (number != 1)}'
    measured += f', {first["mib"]:.3g} MiB; {first["free_gib"]:.3g} GiB free'
  expected = 'a directory that can be written'
  for rank, one in told.items():
    if not one['is_writable']:
      where = f'process {rank}: ' if len(told) > 1 else ''
      said = (
        f'{where}{one["directory"]} cannot be written, so every start compiles '
        'anew; set JAX_COMPILATION_CACHE_DIR or config.compilation_cache'
      )
      return Judged(said, expected, SLOW)
  return Judged(measured, expected)


def learner(address: str, secret: str) -> Measured:
  """How a learner answers, and how this host differs from it.

  Args:
    address: Of the learner, HOST:PORT.
    secret: The file with its secret; '': it has none.
  """
  from grpo_jax.config import Config
  from grpo_jax.config import dataclass_from_dict
  from grpo_jax.run.jobs import generating
  from grpo_jax.run.jobs import learning

  found = generating.learner_at(address, secret)
  begun = time.monotonic()
  hello = found.hello()
  secs = time.monotonic() - begun
  for door in hello['doors'][1:]:  # at which its other processes offer weights
    found.beside(door).hello()
  config = dataclass_from_dict(Config, hello['config'], 'config')
  ours = learning.needed(config)
  grave, others = learning.differences(ours, hello['same'])
  return {
    'answer_secs': secs,
    'weights': hello['weights']['way'],
    'grave': [_unlike(name, ours, hello['same']) for name in grave],
    'others': [_unlike(name, ours, hello['same']) for name in others],
  }


def _unlike(name: str, ours: Mapping[str, str], theirs: Any) -> str:
  return f'{name}: {ours.get(name)} here, {theirs.get(name)} there'


def judge_learner(told: Mapping[int, Measured]) -> Judged:
  """Whether all processes could draw for it."""
  expected = 'the same versions and files as here'
  for rank, one in told.items():
    if one['grave']:
      said = f'Process {rank} has {one["grave"][0]}; install and copy the same.'
      return Judged(said, expected, FAILED)
  slowest = max(one['answer_secs'] for one in told.values())
  others = [text for one in told.values() for text in one['others']]
  weights = told[min(told)]['weights']
  said = f'answers within {1000 * slowest:.0f} ms; weights by {weights}'
  return Judged('; '.join([said, *dict.fromkeys(others)]), expected)
