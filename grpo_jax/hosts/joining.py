"""How the processes of a run find each other."""

import contextlib
import functools
import itertools
import os
import socket
import sys
from typing import Any

from grpo_jax.hosts import processes
from grpo_jax.hosts import watch
from grpo_jax.hosts.store import Store

JOIN_SECS = 300.0  # until all processes have been started
# Until JAX has found the devices. Where JAX itself waits for other hosts, it
# ends after 300 s at most, and says more.
DEVICES_SECS = 330.0
# On CPUs a thread of XLA waits in each sum or gather between processes. By
# default there is one thread for each core. JAX starts a program before the
# last one has ended. On few cores the sums of one program can then take all
# threads, while another process waits for a sum of another program: both wait
# for ever, or until Gloo gives up. With 16 threads two processes of 2 devices
# each, and of 8, did not.
_LEAST_THREADS = 16
_THREADS = 'PJRT_NPROC', 'NPROC'  # the first one that is set is taken

_joins = itertools.count()  # runs of this process, one after another


def own_cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def threads() -> int:
  """How many threads XLA has on a CPU."""
  given = next(filter(None, map(os.environ.get, _THREADS)), '')
  return int(given) if given.isdecimal() else own_cores()


def initialize(
  coordinator: str = '',
  number: int | None = None,
  rank: int | None = None,
  late_code: int = watch.START_AGAIN,
) -> bool:
  """Joins the processes of a run, if it has several; before devices are used.

  Without arguments, JAX finds out on Cloud TPU, Slurm, Kubernetes and Open MPI
  by itself, and what it finds there is taken.

  Args:
    coordinator: `host:port` of the first process, where the port is free.
    number: Of processes.
    rank: The number of this process, from 0.
    late_code: The exit code if the other processes, or the devices, have not
      come within the time limit.

  Returns:
    Whether this is the first process, which writes for all.

  Raises:
    ValueError: Only some of the arguments are given, they make no sense, Slurm
      has several tasks and this process is none of them, the others cannot be
      reached, or JAX finds no devices here.
  """
  if number == 1:  # alone, whatever a cluster says
    return True
  given = [bool(coordinator), number is not None, rank is not None]
  if any(given) and not all(given):
    raise ValueError(
      '--coordinator, --num_processes and --process_id belong together; give '
      'all three, or none where Cloud TPU, Slurm or Kubernetes tell them.'
    )
  if number is not None and rank is not None:
    if number < 1 or not 0 <= rank < number:
      raise ValueError(
        f'--process_id={rank} with --num_processes={number}; give numbers from '
        '0 to one less than the number of processes.'
      )
  else:
    _check_slurm()
    if not _in_a_cluster():
      return True
  if not any(map(os.environ.get, _THREADS)) and own_cores() < _LEAST_THREADS:
    os.environ[_THREADS[0]] = str(_LEAST_THREADS)
  import jax

  # It would swallow SIGTERM, which `stop_signal` handles.
  jax.config.update('jax_enable_preemption_service', False)
  advice = 'start all of them, with the same --coordinator and --num_processes.'
  text = f'The other processes have not come within {JOIN_SECS:.0f} s; {advice}'
  try:
    # At its time limit JAX aborts, with a stack of C++ calls.
    late = functools.partial(watch.leave, text, late_code)
    with watch.limited(JOIN_SECS, late, text):
      jax.distributed.initialize(
        coordinator or None,
        number,
        rank,
        initialization_timeout=int(2 * JOIN_SECS),
      )
  except Exception as error:  # of many types, some plain Exception
    why = processes.first_line(error)
    raise ValueError(
      f'The processes of this run could not join ({why}); {advice}'
    ) from error
  text = (
    f'JAX has not found the devices of {socket.gethostname()} within '
    f'{DEVICES_SECS:.0f} s; see whether all hosts of the run are up, and '
    'whether the driver answers (nvidia-smi on GPUs); restart the host that '
    'hangs.'
  )
  try:
    late = functools.partial(watch.leave, text, late_code)
    with watch.limited(DEVICES_SECS, late, text):
      return jax.process_index() == 0
  except RuntimeError as error:  # now it looks for devices
    raise ValueError(
      f'JAX finds no devices on this host ({processes.first_line(error)}); see '
      'whether the plugin for them is installed and nothing else uses them.'
    ) from error


def _check_slurm() -> None:
  """Raises a ValueError if Slurm has set only a part of what tells a task.

  Each process would train alone, all in one workdir, or one of many on the
  first node, while the others are paid for.
  """
  job, tasks = map(os.environ.get, ('SLURM_JOB_ID', 'SLURM_NTASKS'))
  of_task = 'SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_STEP_NODELIST'
  missing = [name for name in of_task if name not in os.environ]
  advice = (
    'start it by srun in a job (launch/slurm.sbatch does), or give '
    '--num_processes=1 to train with one process alone.'
  )
  if tasks is None:  # an interactive job, or none
    return
  if not tasks.isdecimal() or int(tasks) < 1:
    raise ValueError(
      f'Slurm has set SLURM_NTASKS={tasks!r}, which is no number of tasks; '
      f'{advice}'
    )
  if int(tasks) == 1:
    return
  if not job:
    raise ValueError(
      f'There is no job of Slurm here (no SLURM_JOB_ID), but SLURM_NTASKS='
      f'{tasks}; {advice} Or unset the variables of Slurm.'
    )
  if missing:
    raise ValueError(
      f'The job {job} of Slurm has {tasks} tasks, but this process is none of '
      f'them (no {", ".join(missing)}); {advice}'
    )


def _in_a_cluster() -> bool:
  """Whether JAX finds several processes in this machine's surroundings."""
  hints = 'SLURM_JOB_ID', 'KUBERNETES_SERVICE_HOST', 'OMPI_COMM_WORLD_SIZE'
  devices = '/dev/accel0', '/dev/vfio/0'  # of a TPU
  if not (any(map(os.environ.get, hints)) or any(map(os.path.exists, devices))):
    return False  # and JAX, which takes a second, is not imported yet
  from jax._src.clusters import ClusterEnv

  for cluster in ClusterEnv._cluster_types:
    # Such as that a variable is missing in an interactive job of Slurm.
    with contextlib.suppress(Exception):
      if not cluster.opt_in_only_method and cluster.is_env_present():
        return cluster.get_process_count() > 1
  return False


def are_joined() -> bool:
  """Whether `initialize` has joined several processes."""
  jax: Any = sys.modules.get('jax')
  if not jax:  # importing it would take a second
    return False
  # Not by counting alone, which would begin by looking for devices.
  return jax.distributed.is_initialized() and jax.process_count() > 1


def check_joined(peers: processes.Processes) -> None:
  """Raises a ValueError if there are several that nothing has joined."""
  import jax

  if peers.number != jax.process_count():
    raise ValueError(
      f'There are {jax.process_count()} processes, which were not joined by '
      'jax.distributed.initialize(); call it before all else.'
    )


def joined() -> processes.Processes:
  """The processes that `initialize` has joined."""
  if not are_joined():
    return processes.ALONE
  import jax
  from jax._src import distributed

  store = Store(distributed.global_state.client, f'grpo_jax/{next(_joins)}')
  return processes.Processes(store, jax.process_count(), jax.process_index())
