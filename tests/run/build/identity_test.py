"""What must be the same in all processes: also what lies in their files."""

import dataclasses
import os

from grpo_jax.run.build import identity
from tests import runs


def hashes(config):
  found = identity.compared(config)
  return {k: v for k, v in found.items() if k.startswith('the SHA-256')}


def of_model(folder):
  """A config that names a model, which is not built."""
  small = runs.small()
  model = dataclasses.replace(small.model, path=str(folder))
  return dataclasses.replace(small, model=model)


def test_processes_compare_the_contents_of_their_files(tmp_path):
  for name in ('a.parquet', 'b.parquet', 'c.jsonl'):
    (tmp_path / name).write_text(name)
  changes = {
    'data.train': ({'name': f'{tmp_path}/*.parquet'}, {'name': 'arithmetic'}),
    'data.heldout': f'{tmp_path}/c.jsonl',
  }
  config = runs.small(**changes)
  found = hashes(config)
  assert list(found) == [
    f'the SHA-256 of {tmp_path}/*.parquet',
    f'the SHA-256 of {tmp_path}/c.jsonl',
  ]
  assert hashes(config) == found
  (tmp_path / 'b.parquet').write_text('d.parquet')
  now = hashes(config)
  assert [k for k in now if now[k] != found[k]] == [
    f'the SHA-256 of {tmp_path}/*.parquet'
  ]
  assert not hashes(runs.small())


def test_weights_of_equal_sizes_are_told_apart_by_their_file(tmp_path):
  """As a fine-tune of the same shapes is; also in a file that is not hashed
  as a whole."""
  folder, shard = tmp_path / 'model', 'model-1.safetensors'
  folder.mkdir()
  (folder / 'config.json').write_text('{}')
  with (folder / shard).open('wb') as file:
    file.truncate(2**27)  # it takes no room on the disk
  config = of_model(folder)
  found = hashes(config)
  assert f'the SHA-256 of {folder}/{shard}' in found and len(found) == 2
  for place in 0, 2**27 - 1:  # and one part in each 64th
    with (folder / shard).open('r+b') as file:
      file.seek(place)
      file.write(b'x')
    now = hashes(config)
    assert [k for k in now if now[k] != found[k]] == [
      f'the SHA-256 of {folder}/{shard}'
    ]
    found = now
  with (folder / shard).open('r+b') as file:
    file.seek(2**26)
    file.write(os.urandom(2**21))  # a 64th
  assert hashes(config) != found


def test_the_policy_of_another_run_is_told_by_its_newest_checkpoint(tmp_path):
  for step in 9, 10:
    (tmp_path / f'checkpoints/{step}/host').mkdir(parents=True)
    (tmp_path / f'checkpoints/{step}/host/metadata').write_text(str(step))
  (tmp_path / 'checkpoints/11.orbax-checkpoint-tmp').mkdir()
  (tmp_path / 'metrics.jsonl').write_text('it may go on')
  (tmp_path / 'config.json').write_text('{}')
  files = [*identity._model_files(of_model(tmp_path))]
  assert [str(file.relative_to(tmp_path)) for file in files] == [
    'checkpoints/10/host/metadata',
    'config.json',
  ]


def test_the_files_of_a_reward_model_are_compared(tmp_path):
  (tmp_path / 'model.safetensors').write_text('of a classifier')
  reward = {'name': 'reward_model', 'kwargs': {'path': str(tmp_path)}}
  config = runs.small(reward={**reward, 'weight': 1.0})
  assert [*hashes(config)] == [f'the SHA-256 of {tmp_path}/model.safetensors']


def test_the_source_of_a_reward_function_is_compared(tmp_path, monkeypatch):
  module = tmp_path / 'of_this_host.py'
  monkeypatch.syspath_prepend(tmp_path)
  name = 'the SHA-256 of the module of of_this_host:judge'
  found = []
  for worth in 1, 2:
    module.write_text(f'def judge(*_):\n  return {worth}.0\n')
    found.append(hashes(runs.small(reward='of_this_host:judge')))
  assert [*found[0]] == [*found[1]] == [name]
  assert found[0][name] != found[1][name]


def test_so_are_the_functions_of_the_fields_of_a_batch(tmp_path, monkeypatch):
  (tmp_path / 'of_fields.py').write_text('by_token = None\n')
  monkeypatch.syspath_prepend(tmp_path)
  found = hashes(runs.small(**{'learner.fields': {'mine': 'of_fields:by'}}))
  assert [*found] == ['the SHA-256 of the module of of_fields:by']


def test_so_is_the_source_of_an_optimizer(tmp_path, monkeypatch):
  (tmp_path / 'of_optimizers.py').write_text('mine = None\n')
  monkeypatch.syspath_prepend(tmp_path)
  found = hashes(runs.small(**{'optim.name': 'of_optimizers:mine'}))
  assert [*found] == ['the SHA-256 of the module of of_optimizers:mine']
