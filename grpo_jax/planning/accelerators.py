"""Which accelerators a host has: by its files and `nvidia-smi`, without JAX.

JAX cannot report a GPU that it does not see, nor memory that another process
holds. So the doctor looks at the host too, before JAX uses a device: later, JAX
itself holds most of the memory.
"""

from collections.abc import Mapping
import contextlib
from importlib import metadata
import os
import pathlib
import shutil
import socket
import subprocess
from typing import Any
from typing import NamedTuple

PLUGINS = 'libtpu', 'jax-cuda12-plugin', 'jax-cuda13-plugin'
"""Packages with which JAX uses an accelerator: of TPUs, then of GPUs."""

_SMI = 'nvidia-smi'
_SMI_SECS = 30.0  # it takes one; with a driver that hangs it never ends
_COLUMNS = 'index', 'uuid', 'name', 'memory.total', 'memory.used'

# Variables that choose devices; the first that is set counts.
_OF_GPUS = 'JAX_LOCAL_DEVICE_IDS', 'JAX_CUDA_VISIBLE_DEVICES'
_CUDA = 'CUDA_VISIBLE_DEVICES'
_OF_TPUS = 'TPU_VISIBLE_CHIPS', 'TPU_VISIBLE_DEVICES'


class Gpu(NamedTuple):
  """A GPU that `nvidia-smi` lists."""

  name: str  # as in 'GPU 0 (NVIDIA L4)'
  index: str
  uuid: str
  total_gib: float  # 0 if it is not told
  used_gib: float


class Found(NamedTuple):
  """What was found on this host."""

  host: str
  gpus: tuple[Gpu, ...] = ()
  smi_error: str = ''  # what nvidia-smi has said instead of a list
  gpu_files: tuple[str, ...] = ()  # such as /dev/nvidia0
  gpu_cards: int = 0  # of NVIDIA, on the PCI bus
  tpu_files: tuple[str, ...] = ()  # such as /dev/accel0
  variables: Mapping[str, str] = {}  # those that choose devices, if set


def look(root: str = '/', environ: Mapping[str, str] = os.environ) -> Found:
  """Looks at this host. To be called before JAX uses a device.

  Args:
    root: The directory that has `dev` and `sys`.
    environ: Environment variables: `PATH`, where `nvidia-smi` is looked for,
      and those that choose devices.
  """
  top = pathlib.Path(root)
  cards = [
    card
    for card in paths(top / 'sys/bus/pci/devices', '*')
    if text(f'{card}/vendor') == '0x10de'  # NVIDIA
    and text(f'{card}/class').startswith('0x03')  # a display controller
  ]
  gpus, smi_error = _listed(environ)
  names = (*_OF_GPUS, _CUDA, *_OF_TPUS, 'JAX_PLATFORMS')
  return Found(
    host=socket.gethostname(),
    gpus=gpus,
    smi_error=smi_error,
    gpu_files=_gpu_files(top),
    gpu_cards=len(cards),
    tpu_files=_tpu_files(top),
    variables={name: environ[name] for name in names if name in environ},
  )


def device_files(root: str = '/') -> tuple[str, ...]:
  """The files of GPUs and TPUs of this host, such as /dev/nvidia0."""
  top = pathlib.Path(root)
  return (*_gpu_files(top), *_tpu_files(top))


def _gpu_files(top: pathlib.Path) -> tuple[str, ...]:
  return tuple(paths(top / 'dev', 'nvidia[0-9]*'))


def _tpu_files(top: pathlib.Path) -> tuple[str, ...]:
  if files := paths(top / 'dev', 'accel[0-9]*'):
    return tuple(files)
  # Newer TPUs are here. But so may be any other card that a guest system gets.
  if files := paths(top / 'dev/vfio', '[0-9]*'):
    vendors = paths(top / 'sys/bus/pci/devices', '*/vendor')
    if any(text(vendor) == '0x1ae0' for vendor in vendors):  # Google
      return tuple(files)
  return ()


def _listed(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
  """The GPUs that `nvidia-smi` lists, and what else it says."""
  program = shutil.which(_SMI, path=environ.get('PATH'))
  if not program:
    return (), ''
  asked = [f'--query-gpu={",".join(_COLUMNS)}', '--format=csv,noheader,nounits']
  try:
    process = subprocess.Popen(
      [program, *asked],
      env=dict(environ),
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    try:
      out, _ = process.communicate(timeout=_SMI_SECS)
    except subprocess.TimeoutExpired:
      # It is not waited for: where the driver hangs, a killed process stays.
      process.kill()
      return (), f'{_SMI} has not answered within {_SMI_SECS:.0f} s'
  except OSError as error:
    return (), f'{program} cannot be started ({error.strerror})'
  gpus, others = [], []
  for line in out.splitlines():
    fields = [field.strip() for field in line.split(',')]
    if len(fields) == len(_COLUMNS) and fields[0].isdecimal():
      index, uuid, name, total, used = fields
      name = f'GPU {index} ({name})'
      gpus.append(Gpu(name, index, uuid, _gib(total), _gib(used)))
    elif line.strip():
      others.append(line.strip())
  if process.returncode and not others:
    others = [f'{_SMI} has ended with exit code {process.returncode}']
  return tuple(gpus), ' '.join(others)[:300]


def _gib(mib: str) -> float:
  """From MiB; 0 where there is no number, as of a part of a GPU (MIG)."""
  with contextlib.suppress(ValueError):
    return float(mib) / 1024
  return 0.0


def unused(found: Found) -> str:
  """A sentence about an accelerator that JAX, on the CPU, does not use.

  '' if there is none, or if `JAX_PLATFORMS` asks for the CPU.
  """
  if found.variables.get('JAX_PLATFORMS', '').partition(',')[0] == 'cpu':
    return ''
  if found.tpu_files:
    return _without_plugin(found.tpu_files[0], 'tpu', PLUGINS[:1], '')
  if found.gpu_files or found.gpus:
    name = (*found.gpu_files, *(gpu.name for gpu in found.gpus))[0]
    by, chosen = _chosen(found, 'gpu')
    if chosen == []:
      return (
        f'{name} is there, but JAX runs on the CPU, because '
        f'{by}={found.variables[by]} hides it; unset {by}, or set '
        'JAX_PLATFORMS=cpu if the CPU is meant.'
      )
    seen = [f'{_SMI} says: {found.smi_error}'] * bool(found.smi_error)
    seen += [_in_use(gpu) for gpu in found.gpus if gpu.used_gib > 1]
    more = f' ({"; ".join(seen)})' if seen else ''
    return _without_plugin(name, 'cuda', PLUGINS[1:], more)
  if found.gpu_cards:
    return (
      f'This host has GPUs of NVIDIA ({found.gpu_cards} on its PCI bus), but '
      'JAX runs on the CPU, because no driver has made /dev/nvidia0; install '
      'the driver, or start the container with --gpus=all, or set '
      'JAX_PLATFORMS=cpu if the CPU is meant.'
    )
  return ''


def _without_plugin(
  name: str, extra: str, plugins: tuple[str, ...], more: str
) -> str:
  begun = f'{name} is there{more}, but JAX runs on the CPU'
  if installed := [plugin for plugin in plugins if version(plugin)]:
    return (
      f'{begun}, though {installed[0]} is installed; look for its error with '
      f"JAX_PLATFORMS={extra} python -c 'import jax; jax.devices()'."
    )
  return (
    f'{begun}, because no plugin for it is installed; run pip install '
    f"'.[{extra}]'."
  )


def version(package: str) -> str:
  """The version of a package; '' if it is not installed."""
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:
    return ''


def _chosen(found: Found, platform: str) -> tuple[str, list[str] | None]:
  """The variable that chooses devices, and what it names; None for all."""
  names = (*_OF_GPUS, _CUDA) if platform == 'gpu' else _OF_TPUS
  for name in names:
    value = found.variables.get(name)
    # Empty, all but CUDA's mean the same as if they were not set.
    if value is None or value in ('', 'all') and name != _CUDA:
      continue
    return name, _entries(value)
  return '', None


def _entries(value: str) -> list[str]:
  """The devices that a variable names, up to one that cannot be, as in CUDA."""
  entries = [one.strip() for one in value.split(',')]
  known = [one.isdecimal() or one[:4] in ('GPU-', 'MIG-') for one in entries]
  return entries[: known.index(False) if False in known else None]


def counted(found: Found, platform: str) -> dict[str, Any]:
  """How many devices JAX should see on this host, as `missing` takes it.

  Args:
    found: What was found.
    platform: Of the devices that JAX sees: 'gpu', 'tpu' or 'cpu'.
  """
  by, chosen = _chosen(found, platform)
  said, numbers = [], [0]
  if platform == 'gpu':
    numbers = [len(found.gpus), len(found.gpu_files)]
    if numbers[0] or found.smi_error:
      said.append(f'{_SMI} lists {numbers[0]}')
    said.append(f'/dev has {numbers[1]}')
  elif platform == 'tpu':
    numbers = [len(found.tpu_files)]
    said.append(f'/dev has {numbers[0]}')
  if chosen is not None:
    said.append(f'{by}={found.variables[by]} names {len(chosen)}')
  if platform == 'gpu' and found.smi_error:
    said.append(f'{_SMI} says: {found.smi_error}')
  return {
    'host': found.host,
    'on_host': max(numbers),
    'chosen': chosen,
    'counted': ', '.join(said),
  }


def missing(told: Mapping[int, dict[str, Any]]) -> tuple[str, str]:
  """A sentence about devices that a host has and JAX does not see.

  Several processes of a host may share its devices, so they are counted
  together.

  Args:
    told: Of each process, what `counted` returns, and with it `platform` and
      `kinds`, the kind of each of its devices.

  Returns:
    The sentence, '' if no device is missing; and what is expected.
  """
  of_host: dict[str, list[Any]] = {}
  for one in told.values():
    of_host.setdefault(one['host'], []).append(one)
  for host, ones in of_host.items():
    kinds = [kind for one in ones for kind in one['kinds']]
    if any('MIG' in kind for kind in kinds):  # of many parts JAX sees one
      continue
    wanted = max(one['on_host'] for one in ones)
    if all(one['chosen'] is not None for one in ones):
      wanted = len({name for one in ones for name in one['chosen']})
    if len(kinds) >= wanted:
      continue
    is_gpu = ones[0]['platform'] == 'gpu'
    what, by = ('GPUs', _CUDA) if is_gpu else ('TPU chips', _OF_TPUS[0])
    look_at = 'sudo dmesg and nvidia-smi' if is_gpu else 'sudo dmesg'
    return (
      f'JAX sees {len(kinds)} of {wanted} {what} on {host} '
      f'({ones[0]["counted"]}); see what {look_at} say there about the others, '
      f'and restart that host. If fewer are meant, name them in {by}.'
    ), f'{wanted} {what} on {host}'
  return '', ''


def used(found: Found) -> list[dict[str, Any]]:
  """Memory that was in use on each GPU that CUDA may use, in GiB."""
  chosen = _entries(found.variables.get(_CUDA, ''))
  return [
    {'gpu': gpu.name, 'used_gib': gpu.used_gib, 'total_gib': gpu.total_gib}
    for gpu in found.gpus
    if gpu.total_gib
    and (
      _CUDA not in found.variables
      or any(one == gpu.index or gpu.uuid.startswith(one) for one in chosen)
    )
  ]


def _in_use(gpu: Gpu) -> str:
  return f'{gpu.used_gib:.3g} of {gpu.total_gib:.3g} GiB of {gpu.name} in use'


def paths(folder: str | pathlib.Path, pattern: str) -> list[str]:
  """What is in a folder, sorted; nothing if it cannot be read."""
  with contextlib.suppress(OSError):
    return sorted(map(str, pathlib.Path(folder).glob(pattern)))
  return []


def text(path: str) -> str:
  """What a file holds; '' if it cannot be read."""
  with contextlib.suppress(OSError, UnicodeDecodeError):
    return pathlib.Path(path).read_text().strip()
  return ''
