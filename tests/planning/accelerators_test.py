"""What a host has, by its files and a stand-in for `nvidia-smi`."""

import os
import re
import time

import pytest

from grpo_jax.planning import accelerators
from tests.launch import scripts

pytestmark = pytest.mark.quick

CUDA = 'jax-cuda13-plugin'
EIGHT = [f'{n}, GPU-{n}{n}, NVIDIA L4, 23034, 500' for n in range(8)]


class Host:
  """A directory that looks like a host's, and its `nvidia-smi`."""

  def __init__(self, place):
    self.place = place
    self.environ = {'PATH': f'{place}/bin:{os.environ["PATH"]}'}

  def has(self, *files):
    for file in files:
      path = self.place / file.lstrip('/')
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()
    return self

  def has_card(self, name, vendor, kind='0x030200'):
    folder = self.place / 'sys/bus/pci/devices' / name
    folder.mkdir(parents=True)
    (folder / 'vendor').write_text(f'{vendor}\n')
    (folder / 'class').write_text(f'{kind}\n')
    return self

  def lists(self, lines, code=0):
    text = ''.join(f"echo '{line}'\n" for line in lines)
    scripts.stand_in(self.place / 'bin', 'nvidia-smi', f'{text}exit {code}')
    return self

  def sets(self, **variables):
    self.environ |= variables
    return self

  def look(self):
    return accelerators.look(str(self.place), self.environ)


@pytest.fixture
def host(tmp_path, monkeypatch):
  real = accelerators.shutil.which

  def of_the_stand_in(name, path=None):  # this machine may have a real one
    found = real(name, path=path)
    return found if found and found.startswith(str(tmp_path)) else None

  monkeypatch.setattr(accelerators.shutil, 'which', of_the_stand_in)
  return Host(tmp_path)


def files(number):
  return [f'/dev/nvidia{n}' for n in range(number)]


def test_gpus_are_read_from_the_list(host):
  odd = '2, GPU-22, NVIDIA H100 MIG, [N/A], [Insufficient Permissions]'
  found = host.lists([*EIGHT[:2], odd]).has(*files(3), '/dev/nvidiactl').look()
  assert [gpu.name for gpu in found.gpus[::2]] == [
    'GPU 0 (NVIDIA L4)', 'GPU 2 (NVIDIA H100 MIG)'
  ]  # fmt: skip
  assert found.gpus[0].total_gib == pytest.approx(22.49, abs=0.01)
  assert found.gpus[2].total_gib == 0 and found.smi_error == ''
  assert len(found.gpu_files) == 3
  assert [one['gpu'][:5] for one in accelerators.used(found)] == [
    'GPU 0', 'GPU 1'
  ]  # fmt: skip


def test_a_list_that_does_not_come_is_not_waited_for(host, monkeypatch):
  monkeypatch.setattr(accelerators, '_SMI_SECS', 0.2)
  host.lists([])
  scripts.stand_in(host.place / 'bin', 'nvidia-smi', 'exec sleep 600')
  began = time.monotonic()
  found = host.has(*files(1)).look()
  assert time.monotonic() - began < 120
  assert found.smi_error == 'nvidia-smi has not answered within 0 s'
  assert 'has not answered within' in accelerators.unused(found)


@pytest.mark.parametrize(
  'make, installed, words',
  [
    (
      lambda host: host.has('/dev/accel0'),
      (),
      "/dev/accel0 is there.*no plugin.*'.\\[tpu\\]'",
    ),
    (
      lambda host: host.has('/dev/accel0'),
      ('libtpu',),
      'though libtpu is installed',
    ),
    (
      lambda host: host.has('/dev/vfio/0').has_card('tpu', '0x1ae0'),
      (),
      "/dev/vfio/0 is there.*'.\\[tpu\\]'",
    ),
    # Some other card that a guest system gets.
    (lambda host: host.has('/dev/vfio/0').has_card('disk', '0x1af4'), (), ''),
    (
      lambda host: host.has(*files(1)),
      (),
      "/dev/nvidia0 is there.*no plugin.*'.\\[cuda\\]'",
    ),
    (
      lambda host: host.has(*files(1)),
      (CUDA,),
      f'though {CUDA} is installed.*JAX_PLATFORMS=cuda',
    ),
    # In Windows's Linux there are no such files.
    (lambda host: host.lists(EIGHT[:1]), (), r'GPU 0 \(NVIDIA L4\) is there'),
    (
      lambda host: host.lists(['NVIDIA-SMI has failed because'], 9).has(
        *files(1)
      ),
      (CUDA,),
      r'/dev/nvidia0 is there \(nvidia-smi says: NVIDIA-SMI has failed',
    ),
    # An image with the program, on a machine without a GPU.
    (lambda host: host.lists(['NVIDIA-SMI has failed because'], 9), (), ''),
    (
      lambda host: host.lists(['0, GPU-0, NVIDIA L4, 23034, 22000']),
      (CUDA,),
      r'21.5 of 22.5 GiB of GPU 0 \(NVIDIA L4\) in use',
    ),
    (
      lambda host: host.has(*files(1)).sets(CUDA_VISIBLE_DEVICES=''),
      (CUDA,),
      'because CUDA_VISIBLE_DEVICES= hides it; unset',
    ),
    (
      lambda host: host.has(*files(1)).sets(CUDA_VISIBLE_DEVICES='-1'),
      (CUDA,),
      'because CUDA_VISIBLE_DEVICES=-1 hides it',
    ),
    (
      lambda host: host.has_card('a', '0x10de').has_card('b', '0x10de'),
      (),
      r'has GPUs of NVIDIA \(2 on its PCI bus\).*no driver has made',
    ),
    # NVIDIA's network card, and somebody else's display.
    (
      lambda host: host.has_card('a', '0x10de', '0x020000').has_card(
        'b', '0x8086', '0x030000'
      ),
      (),
      '',
    ),
    (lambda host: host, (), ''),
  ],
)
def test_an_accelerator_that_is_not_used_is_named(
  make, installed, words, host, monkeypatch
):
  version = lambda name: '1' if name in installed else ''
  monkeypatch.setattr(accelerators, 'version', version)
  said = accelerators.unused(make(host).look())
  assert re.search(words, said) if words else said == ''
  host.sets(JAX_PLATFORMS='cpu')  # then it is meant so
  assert accelerators.unused(host.look()) == ''


def told(host, *of_each, kind='NVIDIA L4', platform='gpu'):
  """Of processes of one host with so many devices each."""
  counted = accelerators.counted(host.look(), platform)
  return {
    rank: {'platform': platform, 'kinds': [kind] * number, **counted}
    for rank, number in enumerate(of_each)
  }


@pytest.mark.parametrize(
  'make, seen, words',
  [
    (lambda host: host.lists(EIGHT).has(*files(8)), (8,), ''),
    (
      lambda host: host.lists(EIGHT).has(*files(8)),
      (7,),
      r'JAX sees 7 of 8 GPUs on .* \(nvidia-smi lists 8, /dev has 8\)',
    ),
    (
      lambda host: host.lists(
        [*EIGHT[:7], 'Unable to determine the device handle: GPU is lost'], 15
      ).has(*files(8)),
      (7,),
      'nvidia-smi lists 7, /dev has 8, nvidia-smi says: Unable to determine',
    ),
    (lambda host: host.has(*files(8)), (7,), r'7 of 8 GPUs.*\(/dev has 8\)'),
    (lambda host: host.lists(EIGHT), (7,), 'nvidia-smi lists 8, /dev has 0'),
    # One process for each GPU, and one of them is missing.
    (lambda host: host.lists(EIGHT), (1,) * 8, ''),
    (lambda host: host.lists(EIGHT), (1,) * 7, 'JAX sees 7 of 8 GPUs'),
    (
      lambda host: host.lists(EIGHT).sets(CUDA_VISIBLE_DEVICES='0,3,GPU-55'),
      (3,),
      '',
    ),
    (
      lambda host: host.lists(EIGHT).sets(CUDA_VISIBLE_DEVICES='0,3,5'),
      (2,),
      'CUDA_VISIBLE_DEVICES=0,3,5 names 3',
    ),
    (
      lambda host: host.lists(EIGHT).sets(CUDA_VISIBLE_DEVICES='0,-1,5'),
      (1,),
      '',
    ),
    (lambda host: host.lists(EIGHT).sets(JAX_LOCAL_DEVICE_IDS='0,1'), (2,), ''),
    (
      lambda host: host.lists(EIGHT).sets(JAX_LOCAL_DEVICE_IDS='0,1'),
      (1,),
      'JAX sees 1 of 2 GPUs',
    ),
    (
      lambda host: host.lists(EIGHT).sets(JAX_CUDA_VISIBLE_DEVICES='all'),
      (4,),
      'JAX sees 4 of 8',
    ),
  ],
)
def test_a_gpu_that_is_missing_is_counted(make, seen, words, host):
  said, expected = accelerators.missing(told(make(host), *seen))
  assert re.search(words, said) if words else said == ''
  assert not words or expected.split()[:2] == [said.split()[4], 'GPUs']


def test_of_the_parts_of_a_gpu_jax_sees_one(host):
  of_parts = told(host.lists(EIGHT), 1, kind='NVIDIA H100 MIG 1g.10gb')
  assert accelerators.missing(of_parts) == ('', '')


@pytest.mark.parametrize(
  'number, seen, variables, missing',
  [
    (4, 4, {}, False),
    (4, 8, {}, False),  # two cores in a chip
    (4, 3, {}, True),
    (4, 2, {'TPU_VISIBLE_CHIPS': '0,1'}, False),
    (0, 4, {}, False),  # in a container without the files
  ],
)
def test_a_tpu_that_is_missing_is_counted(
  number, seen, variables, missing, host
):
  host.has(*[f'/dev/accel{n}' for n in range(number)]).sets(**variables)
  of_tpus = told(host, seen, kind='TPU v5 lite', platform='tpu')
  said, _ = accelerators.missing(of_tpus)
  assert said.startswith('JAX sees 3 of 4 TPU chips') if missing else not said


def test_on_a_cpu_nothing_is_missing(host):
  host.lists(EIGHT)
  on_cpu = told(host, 1, kind='cpu', platform='cpu')
  assert accelerators.missing(on_cpu) == ('', '')


@pytest.mark.parametrize(
  'chosen, names',
  [
    ({}, '01'),
    ({'CUDA_VISIBLE_DEVICES': '1'}, '1'),
    ({'CUDA_VISIBLE_DEVICES': 'GPU-0'}, '0'),
    ({'CUDA_VISIBLE_DEVICES': ''}, ''),
  ],
)
def test_memory_in_use_is_that_of_the_gpus_that_cuda_may_use(
  chosen, names, host
):
  found = host.lists(EIGHT[:2]).sets(**chosen).look()
  assert ''.join(one['gpu'][4] for one in accelerators.used(found)) == names


def test_the_files_of_devices_are_those_of_gpus_and_tpus(host):
  assert accelerators.device_files(str(host.place)) == ()
  host.has(*files(2), '/dev/nvidiactl', '/dev/accel0')
  found = accelerators.device_files(str(host.place))
  assert [name.rpartition('/')[2] for name in found] == [
    'nvidia0', 'nvidia1', 'accel0',
  ]  # fmt: skip
