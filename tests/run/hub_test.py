"""A run by names of the Hub, from its first start to an export."""

import dataclasses
import json
import socket

import numpy as np
import pytest

import grpo_jax
from grpo_jax.config import Reward
from grpo_jax.data import hub as hub_lib
from grpo_jax.hosts import processes
from grpo_jax.run import export
from grpo_jax.run.build import pins
from tests import cli
from tests import runs
from tests.data.hub import stand_in
from tests.data.hub.tables_test import table
from tests.run import export_test

MODEL = 'lab/tiny'
DATA = 'lab/sums'
# Two rollouts on records of the Hub.
RUN = {
  'data.train': f'hf:{DATA}',
  'data.heldout': ({'name': DATA, 'kwargs': {'split': 'test'}},),
  'data.prompt_field': 'question',
  'sampler.prompts': 2,
  'evaluation.examples': 2,
  'evaluation.every_steps': 1,
  'checkpoint.best_metric': '',
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
  with stand_in.connected(monkeypatch, tmp_path) as connected:
    folder = export_test.pretrained(tmp_path / 'made')
    stand_in.put(connected.models[MODEL], folder)
    connected.datasets[DATA].commit({'README.md': b'# Sums'})
    connected.datasets[DATA].commit(
      {
        'main/train/0000.parquet': table('1+1', '2+0', '0+2'),
        'main/test/0000.parquet': table('1+1', '2+0'),
      },
      stand_in.CONVERTED,
    )
    yield connected


def configured(**changes):
  return export_test.small(MODEL, **{**RUN, **changes})


@pytest.mark.long
@pytest.mark.usefixtures('shared_programs')
def test_the_whole_way(hub, tmp_path, monkeypatch):
  """By names, killed, on without the Hub, out, and in again by its name."""
  first = hub.models[MODEL].branches['main']
  data = hub.datasets[DATA].branches[stand_in.CONVERTED]
  variables = stand_in.environment(hub, tmp_path)
  with monkeypatch.context() as patch:
    for name, value in {**variables, 'JAX_PLATFORMS': 'cpu'}.items():
      patch.setenv(name, value)
    patch.setenv('HF_HUB_CACHE', str(tmp_path / 'hf'))  # as here
    begun = cli.popen(
      'train',
      '--config=tests/run/hub_config.py',
      f'--workdir={tmp_path / "run"}',
      '--config.steps=6',
      '--config.evaluation.every_steps=1',
    )
  cli.wait_for(tmp_path / 'run', 2, begun)
  begun.kill()
  begun.wait()
  saved = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert saved['model']['path'] == f'{MODEL}@{first}'
  assert saved['data']['train'] == f'{DATA}@{data}'
  assert saved['data']['heldout'][0]['name'] == f'{DATA}@{data}'
  # The branches move, the conversion vanishes, and then nobody can be asked.
  hub.models[MODEL].commit({'config.json': b'{}'})
  hub.datasets[DATA].branches.clear()
  with monkeypatch.context() as patch:
    stand_in.go_offline(patch)
    grpo_jax.train(configured(steps=6), tmp_path / 'run')
  assert runs.records(tmp_path / 'run')[-1]['step'] == 6
  # As a run that was never stopped, by the commits that it names.
  named = {
    'model.path': saved['model']['path'],
    'data.train': saved['data']['train'],
    'data.heldout': tuple(saved['data']['heldout']),
  }
  grpo_jax.train(configured(steps=6, **named), tmp_path / 'whole')
  runs.assert_equal(tmp_path / 'run', tmp_path / 'whole')
  monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
  out = tmp_path / 'out'
  done = cli.call('convert', tmp_path / 'run', out, '--push=me/mine')
  assert f'pushed to {hub.endpoint}/me/mine/commit/' in done.stdout, done
  loaded = export_test.of_folder(hub_lib.local_model('me/mine'))
  np.testing.assert_array_equal(loaded, export_test.of_folder(out))
  text = (out / 'README.md').read_text()
  assert f'base_model: {MODEL}\n' in text and '| rollouts | 6 |' in text


def test_every_name_of_a_config_gets_its_commit(hub, tmp_path):
  commit = hub.models[MODEL].branches['main']
  own = hub.datasets[DATA].commit({'train.jsonl': b'{}'})
  judge = Reward('reward_model', kwargs={'path': f'hf://{MODEL}'})
  config = configured(
    **{
      'data.tokenizer': f'{MODEL}@main',
      'data.train': (
        {'name': f'{DATA}@main'},
        {'name': 'arithmetic'},
      ),
      'warm_up.steps': 1,
      'warm_up.demonstrations': DATA,
    }
  )
  config = dataclasses.replace(config, rewards=(judge, Reward()))
  found = pins.pinned(config, tmp_path / 'run', processes.ALONE)
  converted = hub.datasets[DATA].branches[stand_in.CONVERTED]
  assert found.model.path == f'{MODEL}@{commit}'
  assert found.data.tokenizer == f'{MODEL}@main@{commit}'
  assert found.rewards[0].kwargs['path'] == f'{MODEL}@{commit}'
  assert found.rewards[1] == Reward()
  assert isinstance(found.data.train, tuple)
  names = [source.name for source in found.data.train]
  assert names == [f'{DATA}@main@{own}', 'arithmetic']
  assert found.warm_up.demonstrations == f'{DATA}@{converted}'
  # Pinned once more it stays, and nobody is asked.
  asked = len(hub.asked)
  again = pins.pinned(found, tmp_path / 'run', processes.ALONE)
  assert again == found and len(hub.asked) == asked


def test_a_config_without_names_is_left_alone(tmp_path):
  config = runs.small()
  assert pins.pinned(config, tmp_path, processes.ALONE) is config
  assert not pins.names(config)
  assert pins.names(configured()) == [MODEL, f'hf:{DATA}', DATA]


@pytest.mark.long
def test_an_adapter_names_its_base_on_the_hub(hub, tmp_path):
  commit = hub.models[MODEL].branches['main']
  config = configured(**{'steps': 1, 'lora.rank': 2, 'data.heldout': ''})
  grpo_jax.train(config, tmp_path / 'run')
  export.convert(tmp_path / 'run', tmp_path / 'out', adapter=True)
  described = json.loads((tmp_path / 'out/adapter_config.json').read_text())
  assert described['base_model_name_or_path'] == MODEL
  assert described['revision'] == commit


def test_what_does_not_exist_leaves_no_workdir(hub, tmp_path):
  config = configured(**{'model.path': 'lab/tine'})
  with pytest.raises(ValueError, match='There is no lab/tine here'):
    grpo_jax.train(config, tmp_path / 'run')
  config = configured(
    **{'data.train': ({'name': DATA, 'kwargs': {'split': 'dev'}},)}
  )
  with pytest.raises(ValueError, match="no split 'dev'"):
    grpo_jax.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()


def test_a_run_keeps_the_commit_of_a_split_and_not_of_another(hub, tmp_path):
  """Another split of the same data set may be at another commit."""
  first = pins.pinned(configured(), tmp_path / 'run', processes.ALONE)
  (tmp_path / 'run').mkdir()
  text = json.dumps(dataclasses.asdict(first))
  (tmp_path / 'run' / 'config.json').write_text(text)
  (tmp_path / 'run' / 'versions.json').write_text('[]')
  files = {'main/test/0000.parquet': table('9')}
  moved = hub.datasets[DATA].commit(files, stand_in.CONVERTED)
  again = pins.pinned(configured(), tmp_path / 'run', processes.ALONE)
  assert again == first and moved not in str(again)
  other = ({'name': f'hf:{DATA}', 'kwargs': {'split': 'test'}},)
  config = configured(**{'data.train': other})
  found = pins.pinned(config, tmp_path / 'run', processes.ALONE)
  assert found.data.train[0].name == f'{DATA}@{moved}'
  assert found.data.heldout == first.data.heldout


@pytest.mark.long
def test_two_hosts_read_one_commit_and_push_once(hub, tmp_path, monkeypatch):
  """Each has a cache of its own; the branch moves while they start."""
  commit = hub.models[MODEL].branches['main']
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  both = []
  for rank in (0, 1):
    with monkeypatch.context() as patch:
      variables = stand_in.environment(hub, tmp_path / f'host_{rank}')
      for name, value in {**variables, 'JAX_PLATFORMS': 'cpu'}.items():
        patch.setenv(name, value)
      both.append(
        cli.popen(
          'train',
          '--config=tests/run/hub_config.py',
          f'--workdir={tmp_path / "run"}',
          '--config.export.push_to=me/mine',
          f'--coordinator={address}',
          '--num_processes=2',
          f'--process_id={rank}',
        )
      )
  outs = [one.communicate(timeout=300) for one in both]
  assert [one.returncode for one in both] == [0, 0], outs
  saved = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert saved['model']['path'] == f'{MODEL}@{commit}'
  for rank in (0, 1):
    home = tmp_path / f'host_{rank}' / 'hf_home'
    assert [*home.rglob(f'snapshots/{commit}/model.safetensors')]
  # The first one alone has looked up the commit, and has pushed.
  looked_up = [x for x in hub.asked if x.endswith(f'/{MODEL}/revision/main')]
  pushed = [x for x in hub.asked if '/commit/main' in x]
  assert len(looked_up) == 1 and len(pushed) == 1, hub.asked
  address = json.loads(outs[0][0])['pushed']
  assert address.endswith(hub.models['me/mine'].branches['main'])
  monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
  loaded = export_test.of_folder(hub_lib.local_model('me/mine'))
  assert np.isfinite(loaded).all()
