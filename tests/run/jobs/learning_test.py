"""What a learner tells and wants of generators."""

import pathlib

import pytest

from grpo_jax import config as config_lib
from grpo_jax.engines import offering
from grpo_jax.run.jobs import learning
from grpo_jax.run.keep import bucket

pytestmark = pytest.mark.quick


def test_a_secret_is_long_enough(tmp_path):
  file = tmp_path / 'secret'
  file.write_text(f'{"x" * 16}\n')
  assert learning.secret_of(str(file)) == b'x' * 16
  assert learning.secret_of('') == b''
  file.write_text('short')
  with pytest.raises(ValueError, match='a secret of 5 bytes; give at least 16'):
    learning.secret_of(str(file))


def test_configs_that_differ_are_other_runs():
  word = learning.run_word({'a': 1, 'b': {'c': 2}})
  assert word == learning.run_word({'b': {'c': 2}, 'a': 1})
  assert word != learning.run_word({'a': 1, 'b': {'c': 3}})


@pytest.mark.parametrize(
  'name, grave',
  [
    ('the version of jax', True),
    ('the version of jaxlib', True),
    ('the version of grpo_jax', True),
    ('the version of numpy', False),
    ('the SHA-256 of the module of mine:judge', True),
    ('the SHA-256 of models/config.json', True),
    ('git', False),
    ('XLA_FLAGS', False),
  ],
)
def test_what_draws_other_bits_may_not_draw(name, grave, monkeypatch):
  same = {'git': "'a'", 'the version of jax': "'1'"}
  ours, theirs = {**same, name: "'x'"}, {**same, name: "'y'"}
  assert learning.differences(ours, ours) == ([], [])
  found = learning.differences(theirs, ours)
  assert found == (([name], []) if grave else ([], [name]))
  said = []
  about = {'same': theirs, 'kind': 'cpu', 'devices': 1}
  refused = learning._refused(ours, said.append, about)
  shown = f"{name}='y', and the learner has 'x'"
  assert (shown in refused) == grave and (shown in ''.join(said)) != grave
  about = {'same': ours, 'kind': 'TPU v9', 'devices': 1}
  assert not learning._refused(ours, said.append, about)
  assert 'devices of another kind, TPU v9' in said[-1]


def test_flags_of_the_compiler_are_told_and_those_of_devices_are_not(
  monkeypatch,
):
  monkeypatch.setenv(
    'XLA_FLAGS', '--xla_force_host_platform_device_count=8 --xla_b=1 --xla_a=2'
  )
  needed = learning.needed(config_lib.Config())
  assert needed['XLA_FLAGS'] == '--xla_a=2 --xla_b=1'
  assert not [name for name in needed if name.startswith('config.')]
  assert 'the version of jax' in needed


def test_a_host_is_reached_where_it_listens():
  assert learning.reached_at('127.0.0.1') == '127.0.0.1'
  assert learning.reached_at('localhost') == '127.0.0.1'
  assert learning.address_of('[::1]:80') == ('::1', 80)
  assert learning.reached_at('0.0.0.0').count('.') == 3


def test_weights_go_by_transfer_or_through_a_folder_that_all_see(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('PJRT_NPROC', '2')
  made = learning._way('auto', '127.0.0.1', tmp_path)
  assert isinstance(made, offering.Transfer)
  monkeypatch.setenv('PJRT_NPROC', '1')  # nothing is sent beside a program
  assert learning._way('auto', '127.0.0.1', tmp_path).name == 'files'
  monkeypatch.setenv('PJRT_NPROC', '2')
  assert learning._way('files', '127.0.0.1', tmp_path).name == 'files'

  def cannot(host):
    raise RuntimeError('not on these')

  monkeypatch.setattr(offering, 'Transfer', cannot)
  assert learning._way('auto', '127.0.0.1', tmp_path).name == 'files'
  with pytest.raises(ValueError, match='cannot transfer from these devices'):
    learning._way('transfer', '127.0.0.1', tmp_path)
  away = lambda workdir: pathlib.PurePosixPath('gs:/name/run')
  monkeypatch.setattr(bucket, 'arrays', away)
  with pytest.raises(ValueError, match='the workdir is in a bucket'):
    learning._way('files', '127.0.0.1', tmp_path)
