"""Each check of the hosts fails in its way when something is broken."""

import errno
import os
import types

import jax
import pytest

from grpo_jax.planning import accelerators
from grpo_jax.planning import host_checks
from tests import bucket as stand_in

pytestmark = pytest.mark.quick

JAX = {'Python': '3.12.1', 'jax': '0.10.2', 'jaxlib': '0.10.2'}
CUDA = 'jax-cuda13-plugin'


def of_versions(*of_each, git=('abc', 'abc')):
  told = {
    rank: {'versions': JAX | changed, 'git': revision}
    for rank, (changed, revision) in enumerate(zip(of_each, git))
  }
  return host_checks.judge_versions(told)


@pytest.mark.parametrize(
  'judged, verdict, words',
  [
    (lambda: of_versions({}), 'ok', 'Python 3.12.1, jax 0.10.2, jaxlib'),
    (lambda: of_versions({}, {}), 'ok', 'Python 3.12.1'),
    (
      lambda: of_versions({}, {'jax': '0.11'}),
      'failed',
      'Process 1 has jax 0.11, and the others have 0.10.2; install',
    ),
    (
      lambda: of_versions({}, {'libtpu': '0.0.17'}),
      'failed',
      'Process 1 has libtpu 0.0.17, and the others have (not installed)',
    ),
    (
      lambda: of_versions({}, {}, git=('abc', 'abc-dirty')),
      'failed',
      'Process 1 has git revision abc-dirty',
    ),
    (
      lambda: of_versions({CUDA: '0.10.1'}),
      'failed',
      f'{CUDA} 0.10.1 does not go with jaxlib 0.10.2; install both',
    ),
    (lambda: of_versions({CUDA: '0.10.2'}), 'ok', f'{CUDA} 0.10.2'),
  ],
)
def test_versions(judged, verdict, words):
  found = judged()
  assert found.verdict == verdict and words in found.measured


def test_the_versions_are_those_that_are_installed():
  found = host_checks.versions()['versions']
  assert found['jax'] == jax.__version__
  assert {'Python', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint'} <= {*found}


def of_devices(*of_each, all_devices=None):
  total = sum(map(len, of_each))
  return host_checks.judge_devices(
    {
      rank: {
        'platform': 'tpu',
        'kinds': kinds,
        'all_devices': all_devices or total,
        'unused': '',
        'host': f'host{rank}',
        'on_host': 0,
        'chosen': None,
        'counted': '',
      }
      for rank, kinds in enumerate(of_each)
    }
  )


FOUR = ['TPU v4'] * 4


@pytest.mark.parametrize(
  'judged, verdict, words',
  [
    (lambda: of_devices(FOUR), 'ok', '4 x TPU v4 (tpu) in 1 process'),
    (lambda: of_devices(FOUR, FOUR), 'ok', '8 x TPU v4 (tpu) in 2 processes'),
    (
      lambda: of_devices(FOUR, FOUR, FOUR[1:]),
      'failed',
      'Process 2 has devices: 3 x TPU v4, and the others have 4 x TPU v4',
    ),
    (
      lambda: of_devices(FOUR, ['cpu'] * 4),
      'failed',
      'Process 1 has devices: 4 x cpu',
    ),
    (
      lambda: of_devices(['NVIDIA H100 PCIe', 'NVIDIA L4']),
      'failed',
      'Process 0 has devices of several kinds: NVIDIA H100 PCIe, NVIDIA L4',
    ),
    (
      lambda: of_devices(FOUR, all_devices=16),
      'failed',
      '4 x TPU v4 (tpu) in 1 process, but JAX counts 16',
    ),
  ],
)
def test_devices(judged, verdict, words):
  found = judged()
  assert found.verdict == verdict and words in found.measured


def of_gpus(there, *of_each):
  """Of hosts with so many GPUs, where JAX sees so many."""
  return host_checks.judge_devices(
    {
      rank: {
        'platform': 'gpu',
        'kinds': ['NVIDIA L4'] * number,
        'all_devices': sum(of_each),
        'unused': '',
        'host': f'host{rank}',
        'on_host': there,
        'chosen': None,
        'counted': f'nvidia-smi lists {there}',
      }
      for rank, number in enumerate(of_each)
    }
  )


def test_a_host_with_a_gpu_that_jax_does_not_see_fails():
  assert of_gpus(8, 8, 8).verdict == 'ok'
  # Also where all hosts are alike.
  found = of_gpus(8, 7, 7)
  assert found.verdict == 'failed' and found.expected == '8 GPUs on host0'
  assert found.measured.startswith('JAX sees 7 of 8 GPUs on host0 (nvidia-smi')
  assert 'JAX sees 6 of 8 GPUs on host1' in of_gpus(8, 8, 6).measured


def test_an_accelerator_beside_a_cpu_fails(monkeypatch):
  found = accelerators.Found('here', tpu_files=('/dev/accel0',))
  judged = host_checks.judge_devices({0: host_checks.devices(found)})
  assert judged.verdict == 'failed'
  assert judged.measured.startswith('/dev/accel0 is there, but JAX runs on the')
  judged = host_checks.judge_devices({0: host_checks.devices(NOTHING)})
  assert judged.verdict == 'ok'


NOTHING = accelerators.Found('here')


def device(kind, stats):
  return types.SimpleNamespace(device_kind=kind, memory_stats=stats)


def of_memory(monkeypatch, *devices, found=NOTHING):
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  return host_checks.judge_memory({0: host_checks.memory(found)})


def raises():
  raise NotImplementedError


@pytest.mark.parametrize('stats', [lambda: None, raises, dict])
def test_devices_may_not_tell_their_memory(stats, monkeypatch):
  found = of_memory(monkeypatch, device('cpu', stats))
  assert found.verdict == 'ok' and found.measured.startswith('host: ')
  assert (
    found.expected == 'no figure, because JAX does not tell the memory of cpu'
  )


@pytest.mark.parametrize(
  'kind, limit_gib, used_gib, verdict, words, expected',
  [
    ('TPU v5 lite', 15.75, 0.1, 'ok', '15.8 GiB for JAX', '16 GiB (v5e)'),
    ('TPU7x', 94, 0.1, 'ok', '94 GiB for JAX', '96 GiB (v7x)'),
    ('NVIDIA L4', 16.9, 0, 'ok', '16.9 GiB', '24 GiB (L4)'),
    ('NVIDIA L4', 9, 0, 'slow', '9 GiB', '24 GiB (L4)'),
    ('TPU v5 lite', 15.75, 7, 'slow', '7 GiB are in use', 'nothing in use'),
    (
      'TPU v9',
      64,
      0,
      'ok',
      '64 GiB',
      'grpo_jax/mesh/chips.py has no TPU v9',
    ),
  ],
)
def test_memory(
  kind, limit_gib, used_gib, verdict, words, expected, monkeypatch
):
  stats = {
    'bytes_limit': limit_gib * 2**30,
    'bytes_in_use': used_gib * 2**30,
  }
  found = of_memory(monkeypatch, *[device(kind, lambda: stats)] * 4)
  assert found.verdict == verdict
  assert words in found.measured and expected in found.expected


@pytest.mark.parametrize(
  'used_gib, verdict',
  [(0.6, 'ok'), (9, 'slow'), (19, 'slow'), (21, 'failed'), (78, 'failed')],
)
def test_a_gpu_that_another_process_uses_is_named(
  used_gib, verdict, monkeypatch
):
  """JAX would use 60 of 80 GiB, and says so whatever is free."""
  stats = {'bytes_limit': 60 * 2**30, 'bytes_in_use': 0}
  gpus = [
    accelerators.Gpu(f'GPU {n} (NVIDIA H100)', str(n), f'GPU-{n}', 80, used)
    for n, used in enumerate((0.5, used_gib))
  ]
  judged = of_memory(
    monkeypatch,
    *[device('NVIDIA H100 80GB HBM3', lambda: stats)] * 2,
    found=accelerators.Found('node7', tuple(gpus)),
  )
  assert judged.verdict == verdict
  if verdict != 'ok':
    said = f'{used_gib} of 80 GiB of GPU 1 (NVIDIA H100) on node7 were in use'
    assert said in judged.measured and 'end the process' in judged.measured
    assert judged.expected.startswith('60 GiB free for JAX')


def test_a_container_has_as_much_memory_as_it_may_use(monkeypatch):
  files = {
    '/proc/meminfo': 'MemTotal: 9 kB\nMemAvailable: 1048576 kB\nOther: x',
    '/sys/fs/cgroup/memory.max': str(2**20),
    '/sys/fs/cgroup/memory.current': str(2**19),
  }
  monkeypatch.setattr(accelerators, 'text', lambda path: files.get(path, ''))
  assert host_checks._host_gib() == (2**-10, 2**-11)
  files['/sys/fs/cgroup/memory.max'] = 'max'
  total, free = host_checks._host_gib()
  assert total > 0.1 and free == 1


def test_a_written_file_is_read_and_deleted(tmp_path):
  found = host_checks.written(str(tmp_path), 0)
  assert found['where'] == str(tmp_path) and not list(tmp_path.iterdir())
  assert min(found['write_mb_per_s'], found['read_mb_per_s']) > 0
  assert found['free_gib'] > 0


def full(descriptor):
  raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize(
  'broken, words',
  [
    ({}, r'file cannot be written \(Not a directory\); make room'),
    ({'fsync': full}, 'cannot be written .No space left on device.; make room'),
  ],
)
def test_a_workdir_that_cannot_be_written_is_refused(
  broken, words, tmp_path, monkeypatch
):
  (tmp_path / 'file').write_text('in the way')
  place = tmp_path if broken else tmp_path / 'file' / 'run'
  for name, function in broken.items():
    monkeypatch.setattr(os, name, function)
  with pytest.raises(ValueError, match=words):
    host_checks.written(str(place), 0)
  assert [path.name for path in tmp_path.iterdir()] == ['file']


def test_a_file_with_other_contents_is_noticed(tmp_path, monkeypatch):
  monkeypatch.setattr(type(tmp_path), 'read_bytes', lambda path: b'rotten')
  with pytest.raises(ValueError, match='not hold what was written to it'):
    host_checks.written(str(tmp_path), 0)


def test_a_bucket_is_written_without_the_disk(tmp_path, monkeypatch):
  monkeypatch.setenv(stand_in.ROOT_VARIABLE, str(tmp_path))
  found = host_checks.written('stand://name/run', 1)
  assert found['where'] == 'stand://name/run' and found['free_gib'] is None
  assert not [path for path in tmp_path.rglob('*') if path.is_file()]
  assert 'GiB' not in host_checks.judge_written({0: found}).measured
  with pytest.raises(ValueError, match='cannot be reached'):
    host_checks.written('nowhere://name/run', 0)


@pytest.mark.parametrize(
  'changed, verdict',
  [
    ({}, 'ok'),
    ({'write_mb_per_s': 12.0}, 'slow'),
    ({'free_gib': 0.5}, 'slow'),
    ({'free_gib': None}, 'ok'),
  ],
)
def test_a_slow_or_nearly_full_disk_is_marked(changed, verdict):
  usual = {
    'where': '/runs',
    'write_mb_per_s': 300.0,
    'read_mb_per_s': 2000.0,
    'free_gib': 40.0,
  }
  found = host_checks.judge_written({0: usual, 1: usual | changed})
  assert found.verdict == verdict
  shown = '12 to 300' if 'write_mb_per_s' in changed else '300'
  assert f'16 MB written to /runs at {shown} MB/s' in found.measured


@pytest.mark.parametrize(
  'ahead, verdict, words',
  [
    ([0, 0.004, -0.003], 'ok', 'at most 0.007 s apart'),
    ([0, -90, 0.1], 'slow', 'process 2 is 90.1 s ahead of process 1'),
  ],
)
def test_clocks(ahead, verdict, words):
  told = {
    rank: {'stamps': [1e9 + secs + 0.1 * number for number in range(5)]}
    for rank, secs in enumerate(ahead)
  }
  told[1]['stamps'][2] += 30  # one of the rounds was late
  found = host_checks.judge_clocks(told)
  assert found.verdict == verdict and words in found.measured


def test_the_directory_of_compiled_programs(tmp_path, monkeypatch):
  place = tmp_path / 'programs'
  new = host_checks._kept_in(str(place))
  assert (new['programs'], new['is_writable']) == (0, True)
  place.mkdir()
  (place / 'a-cache').write_bytes(bytes(2**20))
  (place / 'a-atime').write_bytes(b'')
  used = host_checks._kept_in(str(place))
  found = host_checks.judge_compiled({0: used})
  assert found.verdict == 'ok'
  assert found.measured.startswith(f'{place}: 1 program, 1 MiB; ')
  monkeypatch.setattr(os, 'access', lambda path, mode: False)
  closed = host_checks._kept_in(str(place))
  found = host_checks.judge_compiled({0: used, 1: closed})
  assert found.verdict == 'slow'
  assert f'process 1: {place} cannot be written' in found.measured
  bucket = host_checks._kept_in('gs://name/programs')
  assert (
    host_checks.judge_compiled({0: bucket}).measured == 'gs://name/programs'
  )


def test_the_programs_are_kept_where_jax_keeps_them():
  directory = os.environ['JAX_COMPILATION_CACHE_DIR']  # of conftest.py
  assert host_checks.compiled()['directory'] == directory
