"""What processes tell each other: in threads over a store, and for real."""

from concurrent import futures
import contextlib
import functools
import os
import re
import signal
import socket
import threading
import time

import jax
import pytest

from grpo_jax.hosts import joining
from grpo_jax.hosts import processes
from grpo_jax.hosts import stop_signal
from grpo_jax.hosts import watch
from grpo_jax.hosts.store import Store
from tests import forks as forks_lib


class Client:
  """The part of the store of `jax.distributed` that is used."""

  def __init__(self):
    self.values, self.changed = {}, threading.Condition()

  def key_value_set_bytes(self, key, value):
    with self.changed:
      assert key not in self.values
      self.values[key] = value
      self.changed.notify_all()

  def key_value_set(self, key, value, allow_overwrite):
    with self.changed:
      self.values[key] = value

  def key_value_delete(self, key):
    with self.changed:  # a folder too
      for name in [n for n in self.values if f'{n}/'.startswith(f'{key}/')]:
        del self.values[name]

  def blocking_key_value_get_bytes(self, key, milliseconds):
    with self.changed:
      if not self.changed.wait_for(
        lambda: key in self.values, milliseconds / 1e3
      ):
        raise RuntimeError('DEADLINE_EXCEEDED: so the real one says')
      return self.values[key]

  def key_value_dir_get(self, folder):
    with self.changed:
      return [kv for kv in self.values.items() if kv[0].startswith(folder)]


def run(body, number=3):
  """What `body(processes)` returns or raises, of each process."""
  client = Client()
  store = Store(client, 'run')
  with futures.ThreadPoolExecutor(number) as pool:
    jobs = [
      pool.submit(body, processes.Processes(store, number, rank))
      for rank in range(number)
    ]
    return [job.exception(120) or job.result() for job in jobs], client


def test_every_process_gets_what_all_have_said():
  def body(peers):
    heard = [peers.exchange((peers.rank, n)) for n in range(5)]
    return heard, peers.from_first(f'of {peers.rank}')

  told, client = run(body)
  for heard, first in told:
    assert heard == [[(rank, n) for rank in range(3)] for n in range(5)]
    assert first == 'of 0'
  assert len(client.values) == 3  # of the last; what was read is removed


def test_alone_nothing_is_exchanged():
  alone = processes.Processes()
  assert alone.exchange('all') == ['all'] and alone.is_first
  with alone, pytest.raises(OSError, match='here'), alone.together():
    raise OSError('here')


def failing(error, rank=1):
  def body(peers):
    stop = stop_signal.Stop()
    stop.signal = signal.SIGTERM if peers.rank == rank else None
    peers.pass_on(stop)
    with peers.together():
      if peers.rank == rank:
        raise error
    return 'went on'

  return run(body)[0]


def test_an_error_of_one_is_one_of_all():
  first, own, last = failing(OSError('disk full\nand more'))
  assert isinstance(own, OSError)
  for error in (first, last):
    assert isinstance(error, processes.PeerError)
    assert str(error) == 'Process 1: OSError: disk full'


def test_a_stop_of_one_is_one_of_all():
  assert [type(e) for e in failing(stop_signal.Stopped())] == [
    stop_signal.Stopped
  ] * 3


def test_the_signal_that_stops_one_is_that_of_all():
  stops = [stop_signal.Stop() for _ in range(3)]
  stops[1].signal = signal.SIGTERM

  def body(peers):
    peers.pass_on(stops[peers.rank])
    with peers.together():
      if peers.rank == 1:
        raise stop_signal.Stopped()

  run(body)
  assert [stop.signal for stop in stops] == [signal.SIGTERM] * 3


def test_one_that_fails_elsewhere_is_heard_at_the_next_exchange():
  def body(peers):
    try:
      with peers.together():  # which does not fail a second time
        if peers.rank == 1:
          raise OSError('disk full')
        peers.exchange('far from it')
    except (OSError, processes.PeerError) as error:
      peers.fail(error)
      return str(error), peers.exchange('saves')

  first, own, last = run(body)[0]
  assert own == ('disk full', ['saves'] * 3)
  assert first == last == ('Process 1: OSError: disk full', ['saves'] * 3)


def test_all_stop_where_one_was_asked_to():
  def body(peers, asked):
    stop = stop_signal.Stop()
    stop.signal = signal.SIGTERM if peers.rank == asked else None
    peers.pass_on(stop)
    return peers.is_stopped(), stop.signal

  told = run(functools.partial(body, asked=1))[0]
  assert told == [(True, signal.SIGTERM)] * 3
  assert run(functools.partial(body, asked=None))[0] == [(False, None)] * 3


def test_an_error_wins_over_a_stop():
  def body(peers):
    with peers.together():
      raise [stop_signal.Stopped(), OSError('full')][peers.rank]

  stopped, failed = run(body, 2)[0]
  assert isinstance(failed, OSError)
  assert isinstance(stopped, processes.PeerError)


def test_a_barrier_is_passed_by_all_or_left_by_all():
  def body(peers):
    for _ in range(3):
      peers.barrier('a', 120_000, 'a save')
    if peers.rank == 1:
      peers.leave('a save')
      return 'failed'
    peers.barrier('b', 120_000, 'a save')

  first, failed, last = run(body)[0]
  assert failed == 'failed'
  assert isinstance(first, TimeoutError) and isinstance(last, TimeoutError)


def test_who_waits_at_another_barrier_is_not_awaited(monkeypatch):
  monkeypatch.setattr(processes, 'ELSEWHERE_SECS', 0.2)

  def body(peers):
    peers.barrier('a', 120_000, 'a save')
    if peers.rank == 1:  # longer than what counts as elsewhere: it is late
      time.sleep(0.6)
    peers.barrier('b', 120_000, 'a save')
    began = time.monotonic()
    with pytest.raises(TimeoutError):
      peers.barrier('c' if peers.rank else 'd', 120_000, 'a save')
    return time.monotonic() - began

  told, client = run(body)
  assert max(told) < 60
  assert not [key for key in client.values if '/barrier/a save/b ' in key]


def test_who_was_started_differently_is_named():
  def body(peers):
    values = {'jax': '0.10', 'config.seed': int(peers.rank == 2)}
    peers.check_equal(values)

  for error in run(body)[0]:
    assert isinstance(error, ValueError)
    assert 'Process 2 has config.seed=1, and the others have 0' in str(error)


def test_one_that_has_a_file_that_others_lack_is_named():
  def body(peers):
    peers.check_equal({'jax': '0.10'} | ({'a': 1} if peers.rank == 2 else {}))

  for error in run(body)[0]:
    assert isinstance(error, ValueError)
    assert 'Process 2 has a=1, and the others have None' in str(error)


def test_warnings_reach_the_first_process_with_who_gave_them():
  def body(peers):
    if not peers.is_first:
      peers.warn('the clock is wrong')
    if peers.rank == 2:
      peers.warn('the disk is slow')
    peers.exchange()
    return peers.warnings(), peers.warnings()

  first, *others = run(body)[0]
  assert first == (
    ['process 1, 2: the clock is wrong', 'process 2: the disk is slow'],
    [],
  )
  assert others == [([], [])] * 2


@pytest.mark.parametrize(
  'given, words',
  [
    (('host:1', None, None), 'belong together'),
    (('', 2, 0), 'belong together'),
    (('host:1', 2, 2), '--process_id=2 with --num_processes=2'),
    (('host:1', 0, 0), 'give numbers from 0'),
  ],
)
def test_half_of_the_flags_is_refused(given, words):
  with pytest.raises(ValueError, match=words):
    joining.initialize(*given)


def test_slurm_tells_how_many_there_are(monkeypatch):
  monkeypatch.setattr(os, 'environ', {**os.environ})  # is added to
  monkeypatch.delenv('KUBERNETES_SERVICE_HOST', raising=False)
  assert joining.initialize()  # alone
  step = {
    'SLURM_JOB_ID': '1',
    'SLURM_STEP_NODELIST': 'here',
    'SLURM_PROCID': '0',
    'SLURM_LOCALID': '0',
    'SLURM_STEP_NUM_NODES': '1',
  }
  joined = []
  monkeypatch.setattr(
    jax.distributed, 'initialize', lambda *args, **_: joined.append(args)
  )
  for name, value in step.items():
    monkeypatch.setenv(name, value)
  assert joining.initialize() and not joined  # an interactive job
  monkeypatch.setenv('SLURM_NTASKS', '1')
  assert joining.initialize() and not joined
  monkeypatch.setenv('SLURM_NTASKS', '2')
  assert joining.initialize() and joined == [(None, None, None)]


SLURM = {
  'SLURM_JOB_ID': '7',
  'SLURM_NTASKS': '16',
  'SLURM_STEP_NODELIST': 'here',
  'SLURM_PROCID': '0',
  'SLURM_LOCALID': '0',
}


@pytest.mark.parametrize(
  'changes, words',
  [
    # In an allocation of salloc, or in a batch script, without srun.
    (
      dict.fromkeys(('SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID')),
      'The job 7 of Slurm has 16 tasks, but this process is none of them (no '
      'SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NODELIST); start it by srun',
    ),
    ({'SLURM_STEP_NODELIST': None}, 'of them (no SLURM_STEP_NODELIST); start'),
    (
      {'SLURM_JOB_ID': None},
      'There is no job of Slurm here (no SLURM_JOB_ID), but SLURM_NTASKS=16',
    ),
    ({'SLURM_NTASKS': 'x'}, "SLURM_NTASKS='x', which is no number of tasks"),
    ({'SLURM_NTASKS': '0'}, "SLURM_NTASKS='0', which is no number of tasks"),
    ({'SLURM_NTASKS': '-2'}, "SLURM_NTASKS='-2', which is no number"),
  ],
)
def test_half_of_an_environment_of_slurm_is_refused(
  changes, words, monkeypatch
):
  given = {k: v for k, v in (SLURM | changes).items() if v is not None}
  monkeypatch.setattr(os, 'environ', given)
  with pytest.raises(ValueError, match=re.escape(words)):
    joining.initialize()
  assert joining.initialize(number=1)  # alone, whatever Slurm says


@pytest.mark.parametrize(
  'changes',
  [
    {'SLURM_NTASKS': None},
    {'SLURM_NTASKS': '1', 'SLURM_PROCID': None},
    dict.fromkeys(SLURM),
  ],
)
def test_one_task_of_slurm_trains_alone(changes, monkeypatch):
  given = {k: v for k, v in (SLURM | changes).items() if v is not None}
  monkeypatch.setattr(os, 'environ', given)
  assert joining.initialize()


@pytest.mark.parametrize(
  'cores, given, threads',
  [
    (2, {}, {'PJRT_NPROC': '16'}),
    (15, {}, {'PJRT_NPROC': '16'}),
    (16, {}, {}),
    (2, {'NPROC': '4'}, {'NPROC': '4'}),
    (2, {'PJRT_NPROC': '4'}, {'PJRT_NPROC': '4'}),
  ],
)
def test_threads_of_xla(cores, given, threads, monkeypatch):
  monkeypatch.setattr(os, 'environ', dict(given))
  monkeypatch.setattr(joining, 'own_cores', lambda: cores)
  monkeypatch.setattr(jax.distributed, 'initialize', lambda *args, **_: None)
  assert joining.initialize(number=1) and os.environ == given  # alone
  joining.initialize('localhost:1', 2, 0)
  assert os.environ == threads


PROGRAM = """
import os, signal, sys, time
import jax
from grpo_jax.hosts import joining, processes, stop_signal, watch
address, rank, case = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# One that is there may be silent for long where the machine is busy.
is_gone = 'dies' in case or 'hangs' in case
watch.SILENT_SECS, watch.BEAT_SECS = 4.0 if is_gone else 100.0, .2
watch.GRACE_SECS, watch.FAIL_SECS = 1.0, 2.0
joining.initialize(address, 2, rank)
peers, stop = joining.joined(), stop_signal.Stop()
print(f'{rank} of {peers.number}', flush=True)
with stop, peers:
  peers.pass_on(stop)
  peers.exchange('here')
  if rank == (0 if case.startswith('first') else 1) and 'end' not in case:
    if case.endswith('dies'):
      os.kill(os.getpid(), signal.SIGKILL)
    if case.endswith('hangs'):
      os.kill(os.getpid(), signal.SIGSTOP)
    if case.endswith('raises'):
      raise ValueError('it refuses')
    if case.endswith('fails far off'):
      peers.fail(ValueError('nobody comes'))
    if case == 'raises before the other':
      time.sleep(0.5)
      raise peers.fail(ValueError('it refuses'))
  if case == 'dies in a program':
    if rank == 1:
      os.kill(os.getpid(), signal.SIGKILL)
    with peers.together():
      raise jax.errors.JaxRuntimeError('INTERNAL: Gloo: Connection closed')
  if case == 'raises before the other':
    with peers.patient():
      time.sleep(6)  # a judge that takes its time
    try:
      peers.exchange()
    except processes.PeerError as error:
      print(error, flush=True)
      raise
  if rank == 1 and case == 'is stopped':
    os.kill(os.getpid(), signal.SIGTERM)
  if case == 'is stopped':
    while not stop():
      time.sleep(0.01)
  elif case not in ('goes well', 'at its end hangs'):
    time.sleep(100)  # as in a program of the devices that waits for the other
  print(peers.exchange(stop.signal), flush=True)
  if rank == 1 and case == 'at its end hangs':
    os.kill(os.getpid(), signal.SIGSTOP)
"""


HANGS = """
import ctypes, sys, time
import jax
from grpo_jax.hosts import joining, watch
joining.DEVICES_SECS, watch.STUCK_SECS = .2, .5
jax.distributed.initialize = lambda *args, **options: None
# `PyDLL` keeps the lock of the interpreter while a function of C runs.
hang = {'waits': time.sleep, 'keeps the lock': ctypes.PyDLL(None).sleep}
jax.process_index = lambda: hang[sys.argv[1]](60)
joining.initialize('host:1', 2, 0, late_code=2)
"""


IMPORTS = """
import jax
from grpo_jax.hosts import joining, processes, stop_signal, watch
"""


@pytest.fixture(scope='module')
def forks(tmp_path_factory):
  with contextlib.closing(
    forks_lib.Forks(IMPORTS, tmp_path_factory.mktemp('forks'))
  ) as forks:
    yield forks


@pytest.mark.parametrize('case, code', [('waits', 2), ('keeps the lock', 1)])
def test_devices_that_do_not_come_are_not_waited_for(case, code, forks):
  """Also where a driver hangs, and with it every thread of Python."""
  process = forks.start(HANGS, case)
  words = 'JAX has not found the devices of '
  _, said = process.communicate(said=words)
  assert process.returncode == code, said
  assert words in said
  assert said.count('grpo-jax: ') == 1 == len(said.splitlines())


def test_what_ends_in_time_is_not_disturbed():
  late = []
  with watch.limited(60, lambda: late.append(1), 'never said'):
    pass
  with pytest.raises(KeyError), watch.limited(60, lambda: None, ''):
    raise KeyError
  assert not late


def started(case, forks):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  return [forks.start(PROGRAM, address, str(rank), case) for rank in range(2)]


AGAIN, KILLED = processes.START_AGAIN, -signal.SIGKILL


@pytest.mark.parametrize(
  'case, codes, speaker, words',
  [
    ('dies', (AGAIN, KILLED), 0, 'Process 1 on '),
    pytest.param(
      'dies in a program',
      (AGAIN, KILLED),
      0,
      'Process 1 on ',
      marks=pytest.mark.long,
    ),
    pytest.param(
      'hangs',
      (AGAIN, None),
      0,
      'has been silent for 4 s',
      marks=pytest.mark.long,
    ),
    pytest.param(
      'first hangs',
      (None, AGAIN),
      1,
      'Process 0 does not answer',
      marks=pytest.mark.long,
    ),
    ('raises', (2, 2), 0, 'Process 1 has failed: ValueError: it refuses'),
    ('first raises', (2, 2), 1, 'Process 0 has failed: ValueError: it refu'),
    pytest.param(
      'fails far off',
      (2, 2),
      0,
      'Process 1 has failed: ValueError: nobody',
      marks=pytest.mark.long,
    ),
    pytest.param(
      'first fails far off',
      (2, 2),
      1,
      'Process 0 has failed: ValueError: nob',
      marks=pytest.mark.long,
    ),
  ],
)
def test_what_happens_to_one_ends_the_other(case, codes, speaker, words, forks):
  both, said = started(case, forks), {}
  for rank in speaker, 1 - speaker:  # what hangs ends when it is killed
    if codes[rank] is None:
      both[rank].kill()
    out, said[rank] = both[rank].communicate()
    assert out == f'{rank} of 2\n'
    assert codes[rank] in (both[rank].returncode, None), said
  assert words in said[speaker]
  assert said[speaker].count('grpo-jax: ') == 1
  if case in ('raises', 'fails far off'):
    assert 'The traceback of process 1:\n' in said[0]


@pytest.mark.long
def test_one_that_has_failed_waits_for_who_takes_its_time(forks):
  first, second = started('raises before the other', forks)
  out, said = first.communicate()
  assert out.splitlines()[1:] == ['Process 1: ValueError: it refuses'], said
  second.communicate()
  assert (first.returncode, second.returncode) == (1, 1)


@pytest.mark.long
def test_one_that_hangs_at_its_end_is_noticed_too(forks):
  """By the watch; JAX would abort the other."""
  first, second = started('at its end hangs', forks)
  out, said = first.communicate()
  assert out.splitlines()[1:] == ['[None, None]']
  assert first.returncode == AGAIN, said
  assert 'Process 1 on ' in said and 'silent for 4 s' in said
  second.kill()


@pytest.mark.quick
def test_the_others_end_with_the_first(forks):
  """By the watch, or by JAX, whose client aborts."""
  both = started('first dies', forks)
  both[1].communicate()
  assert both[1].returncode in (AGAIN, -signal.SIGABRT)


def test_a_signal_to_one_stops_both(forks):
  for one in started('is stopped', forks):
    out, said = one.communicate()
    assert one.returncode == 0, said
    assert out.splitlines()[1:] == [str([signal.SIGTERM] * 2)]


@pytest.mark.quick
def test_without_a_fault_both_end_well(forks):
  for one in started('goes well', forks):
    out, said = one.communicate()
    assert one.returncode == 0 and '[None, None]' in out, said
    assert 'grpo-jax' not in said
