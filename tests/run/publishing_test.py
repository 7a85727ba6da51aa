"""A run that pushes its last policy to the Hub."""

import dataclasses
import json
import types
from typing import Any

import pytest

from grpo_jax import data
from grpo_jax.run import export
from grpo_jax.run import loop
from grpo_jax.run import progress as progress_lib
from grpo_jax.run.build import names
from tests import runs
from tests.data.hub import stand_in
from tests.run.export_test import Exporting

TO = 'me/sums'


@pytest.fixture
def hub(monkeypatch, tmp_path):
  with stand_in.connected(monkeypatch, tmp_path) as connected:
    monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
    yield connected


class Pushing(Exporting):
  """A run that is over, in a workdir with its config and its metrics."""

  def __init__(self, workdir, **changes):
    changes = {'export.every_saves': 0, 'export.push_to': TO, **changes}
    super().__init__(workdir, **changes)
    self.push = export.pusher(
      self.run.export, self.export, workdir, self.warned.append
    )
    workdir.mkdir()
    config = dataclasses.asdict(runs.small(**changes))
    (workdir / 'config.json').write_text(json.dumps(config))
    self.over(4)

  def over(self, step):
    self.progress = self.progress._replace(step=step)
    with (self.workdir / 'metrics.jsonl').open('a') as file:
      file.write(
        json.dumps(
          {'step': step, 'heldout_accuracy': 0.75, 'heldout_judged': 20}
        )
        + '\n'
      )

  def pushed(self):
    session: Any = self
    return progress_lib.push(session, self.progress)


def test_the_model_goes_there_with_its_card_once(hub, tmp_path):
  run = Pushing(tmp_path / 'run')
  address = run.pushed()
  one = hub.models[TO]
  commit = one.branches['main']
  assert address == f'{hub.endpoint}/{TO}/commit/{commit}' and one.private
  files = one.commits[commit]
  assert {'config.json', 'tokenizer.json', 'model.safetensors'} <= set(files)
  assert b'| 4 | 20 | 0.750 | 0.531 to 0.888 |' in files['README.md']
  assert not [*run.workdir.glob('.push*')] and not [*run.workdir.glob('exp*')]
  # The same command again has nothing to do; more rollouts are another policy.
  asked = len(hub.asked)
  assert run.pushed() == address and len(hub.asked) == asked
  run.over(6)
  assert run.pushed() != address
  assert b'after 6 rollouts' in one.commits[one.branches['main']]['README.md']


def test_what_fails_is_tried_again_by_the_next_start(
  hub, tmp_path, monkeypatch
):
  run = Pushing(tmp_path / 'run')
  with monkeypatch.context() as patch:
    stand_in.go_offline(patch)
    with pytest.raises(ValueError, match='over and saved; the same command'):
      run.pushed()
  assert not (run.workdir / 'pushed.json').exists()
  assert not [*run.workdir.glob('.push*')]
  assert run.pushed()


def test_the_hub_is_asked_before_anything_is_trained(
  hub, tmp_path, monkeypatch
):
  hub.models[TO].commit({'theirs.bin': b''})
  hub.models[TO].private = True
  config = runs.small(**{'export.push_to': TO})
  with pytest.raises(ValueError, match='not pushed from here .theirs.bin'):
    loop.train(config, tmp_path / 'run')
  assert not (tmp_path / 'run').exists()
  hub.models[TO].private = False
  told: list[str] = []
  run = Exporting(tmp_path).run
  pusher = lambda spec: export.pusher(
    spec, print, tmp_path / 'none', told.append
  )
  run.export = config.export
  with pytest.raises(ValueError, match='config.export.public=True'):
    pusher(run.export)
  monkeypatch.delenv('HF_TOKEN')
  with pytest.raises(ValueError, match='without a token'):
    pusher(run.export)
  # A run that goes on, and needs the Hub at its end alone, is told.
  assert not told
  stand_in.go_offline(monkeypatch)
  (tmp_path / 'none').mkdir()
  (tmp_path / 'none' / 'config.json').write_text('{}')
  assert pusher(run.export)
  assert 'HF_HUB_OFFLINE is set' in told[0] and 'asks again at its' in told[0]
  run.export = dataclasses.replace(run.export, push_to='')
  assert pusher(run.export) is None


@pytest.mark.parametrize('name', ['sums', 'me/sums@v1', './me/sums'])
def test_a_name_that_is_none_is_refused_before_jax(name):
  with pytest.raises(ValueError, match='owner/name'):
    names.check(runs.small(**{'export.push_to': name}))


def test_an_adapter_alone_needs_adapters_and_a_model():
  config = runs.small(**{'export.adapter': True, 'export.every_saves': 1})
  run: Any = types.SimpleNamespace(
    export=config.export,
    weights=types.SimpleNamespace(path='', has_adapters=False),
    model=Exporting.model(config, data.character_tokenizer(data.ALPHABET)),
  )
  with pytest.raises(ValueError, match='config.lora.rank and config.model.pa'):
    export.writer(run)
