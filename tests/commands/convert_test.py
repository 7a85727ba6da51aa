"""`grpo-jax convert` as it is typed; what it writes is in export_test."""

import json

from grpo_jax.commands import arguments
from grpo_jax.models import weights
from tests.cli import assert_refused
from tests.cli import call
from tests.models.weights import golden


def test_values_without_names_may_stand_anywhere():
  found = arguments.read(
    ['convert', '--adapter', 'a', '-dtype', 'bfloat16', 'b']
  )
  assert (found.source, found.folder) == ('a', 'b')
  assert found.adapter is True and found.dtype == 'bfloat16'


def test_a_folder_is_written_and_told_of(tmp_path):
  done = call(
    'convert', str(golden.folder('qwen3')), str(tmp_path / 'out'),
    '--dtype=bfloat16', '--shard_gb=2e-5', '--json',
  )  # fmt: skip
  assert done.returncode == 0 and done.stderr == '', done.stderr
  told = json.loads(done.stdout)
  files = list((tmp_path / 'out').iterdir())
  assert told['nbytes'] == sum(path.stat().st_size for path in files)
  assert len([path for path in files if path.suffix == '.safetensors']) > 1
  source = weights.source(tmp_path / 'out')
  assert source.config() == weights.source(golden.folder('qwen3')).config()
  assert told['architecture'] == source.architecture == 'Qwen3ForCausalLM'
  dtypes = {str(stored.dtype) for stored in source.stored.values()}
  assert dtypes == {'bfloat16'}
  again = call('convert', str(golden.folder('qwen3')), str(tmp_path / 'out'))
  assert_refused(again, 'out holds a model already; give another folder')


def test_what_is_missing_is_named(tmp_path):
  assert_refused(
    call('convert', str(golden.folder('qwen3'))), 'convert needs a folder'
  )
  out = str(tmp_path / 'out')
  done = call('convert', str(golden.folder('qwen3')), out, '--dtype=float16')
  assert_refused(done, '--dtype=float16; give one of float32, bfloat16.')
  done = call('convert', str(golden.folder('qwen3')), out, '--shard_gb=0')
  assert_refused(done, '--shard_gb=0.0 is no size of a file')
