"""What `grpo-jax convert --push` sends to the Hub, and what it does not."""

import dataclasses
import json
import os
import re

import pytest

from grpo_jax import config as config_lib
from grpo_jax.commands import card
from grpo_jax.data import hub as hub_lib
from tests import cli
from tests.data.hub import stand_in
from tests.run import export_test

TO = 'me/sums'
SECRET = 'made-of-my-own'


@pytest.fixture
def hub(monkeypatch, tmp_path):
  with stand_in.connected(monkeypatch, tmp_path) as connected:
    monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
    yield connected


@pytest.fixture
def model(tmp_path):
  return export_test.pretrained(tmp_path / SECRET)


def workdir(folder, **changes):
  """What a run leaves that a card reads."""
  folder.mkdir()
  values = {
    'model.path': 'lab/tiny@' + 40 * 'a',
    'data.train': (
      {'name': 'hf:lab/sums'},
      {'name': f'/home/{SECRET}/a.jsonl'},
    ),
    'data.tokenizer': '',
    'rewards': (
      {'name': f'{SECRET.replace("-", "_")}.judge:score', 'weight': 1.0},
    ),
    'data.chat': True,
    'data.system_prompt': SECRET,
    'evaluation.examples': 100,
    **changes,
  }
  config = config_lib.default()
  config.update_from_flattened_dict(values)
  saved = dataclasses.asdict(config_lib.resolve(config))
  (folder / 'config.json').write_text(json.dumps(saved))
  (folder / 'versions.json').write_text('[]')
  lines = [
    {'step': step, 'reward': step / 8, 'heldout_accuracy': share}
    for step, share in ((0, 0.25), (1, None), (2, 0.5), (4, 0.75))
  ]
  text = '\n'.join(map(json.dumps, lines))
  (folder / 'metrics.jsonl').write_text(text + '\n')
  return folder


@pytest.mark.long
def test_a_model_is_pushed_and_loaded_by_its_name(hub, model, tmp_path):
  done = cli.call('convert', model, tmp_path / 'out', f'--push={TO}')
  assert done.returncode in (0, None), done.stderr
  one = hub.models[TO]
  files = one.commits[one.branches['main']]
  commit = one.branches['main']
  assert f'pushed to {hub.endpoint}/{TO}/commit/{commit}' in done.stdout
  assert one.private
  assert {'config.json', 'tokenizer.json', 'model.safetensors'} <= set(files)
  card_text = files['README.md'].decode()
  assert '- made-with-grpo_jax\n' in card_text and SECRET not in card_text
  folder = hub_lib.local_model(TO)
  for name in ('config.json', 'model.safetensors'):
    with open(os.path.join(folder, name), 'rb') as file:
      assert file.read() == files[name]


def test_a_folder_is_one_commit_and_what_is_gone_here_is_gone_there(
  hub, tmp_path
):
  folder = tmp_path / 'out'
  (folder / 'more').mkdir(parents=True)
  files = {
    'README.md': b'---\ntags:\n- made-with-grpo_jax\n---\n',
    'model.safetensors': b'weights' * 1000,
    'more/old.txt': b'x',
  }
  for name, contents in files.items():
    (folder / name).write_bytes(contents)
  hub_lib.push(folder, hub_lib.check_push(TO), False, 'first')
  one = hub.models[TO]
  assert one.private
  assert one.commits[one.branches['main']] == {'.gitattributes': b'', **files}
  (folder / 'more' / 'old.txt').unlink()
  url = hub_lib.push(folder, hub_lib.check_push(TO), False, 'again')
  del files['more/old.txt']
  assert one.commits[one.branches['main']] == {'.gitattributes': b'', **files}
  assert url == f'{hub.endpoint}/{TO}/commit/{one.branches["main"]}'
  commits = [path for path in hub.asked if '/commit/main' in path]
  assert commits == 2 * [f'POST /api/models/{TO}/commit/main']


def refused(words, **given):
  with pytest.raises(ValueError, match=words) as error:
    hub_lib.check_push(given.pop('to', TO), **given)
  text = str(error.value)
  assert '\n' not in text and stand_in.TOKEN not in text


def test_where_nothing_is_pushed_to(hub, monkeypatch):
  refused('is no name on the Hugging Face Hub', to='sums')
  refused('is no repository', to='me/sums@v1')
  one = hub.models[TO]
  one.private = True
  one.commit({'README.md': b'---\nlicense: mit\n---\n', 'a.bin': b''})
  refused('was not pushed from here (.a.bin.); give --overwrite')
  assert hub_lib.check_push(TO, overwrite=True) == TO
  one.commit({'README.md': b'---\ntags:\n- made-with-grpo_jax\n---\n'})
  assert hub_lib.check_push(f'hf://{TO}') == TO
  one.private = False
  refused('is public; give --public')
  assert hub_lib.check_push(TO, public=True) == TO
  monkeypatch.delenv('HF_TOKEN')
  refused('without a token; set HF_TOKEN')
  stand_in.go_offline(monkeypatch)
  refused('HF_HUB_OFFLINE is set')


@pytest.mark.long
def test_public_is_said(hub, model, tmp_path):
  done = cli.call('convert', model, tmp_path / 'o', f'--push={TO}', '--public')
  assert done.returncode in (0, None) and not hub.models[TO].private


def test_flags_of_a_push_need_one(tmp_path):
  done = cli.call('convert', 'nothing', tmp_path / 'p', '--public')
  cli.assert_refused(done, 'give --push=owner/name')
  assert not (tmp_path / 'p').exists()


def test_a_card_says_what_was_learned_and_nothing_private(hub, tmp_path):
  base = hub.models['lab/tiny']
  base.commits[40 * 'a'] = {'config.json': b'{}'}
  folder = tmp_path / 'out'
  folder.mkdir()
  run = workdir(tmp_path / 'run')
  card.write(folder, TO, str(run), 4, adapter=True)
  text = (folder / 'README.md').read_text()
  for words in (
    'base_model: lab/tiny\n',
    'library_name: peft\n',
    'datasets:\n- lab/sums\n',
    'after 4 rollouts',
    '| prompts | lab/sums, data of its owner |',
    '| rewards | a function of its owner |',
    '| method | grpo |',
    '| advantage | (r - mean)/std |',
    '| 0 | 0.250 | 0.175 to 0.343 |',
    '| 4 | 0.750 | 0.657 to 0.825 |',
    f'![Learning curve]({card.CURVE})',
  ):
    assert words in text, (words, text)
  assert SECRET not in text and str(tmp_path) not in text
  assert not re.search(r'made.of.my.own', text)
  assert (folder / card.CURVE).read_bytes()[1:4] == b'PNG'
  # Of an earlier checkpoint, what was measured until then.
  card.write(folder, TO, str(run), 2, adapter=False)
  text = (folder / 'README.md').read_text()
  assert '| 2 | 0.500 |' in text and '0.750' not in text
  assert 'library_name: transformers' in text


def test_a_card_of_a_run_without_figures(hub, tmp_path):
  run = workdir(tmp_path / 'run', **{'model.path': f'/home/{SECRET}'})
  (run / 'metrics.jsonl').write_text('')
  card.write(tmp_path, TO, str(run), 0, adapter=False)
  text = (tmp_path / 'README.md').read_text()
  assert 'a model of its owner' in text and 'base_model' not in text
  assert SECRET not in text and card.CURVE not in text


def test_the_licence_of_the_base_is_copied(hub, monkeypatch):
  hub.models['lab/tiny'].commit({'config.json': b'{}'})
  hub.models['lab/tiny'].card = {'license': 'apache-2.0'}
  assert hub_lib.licence('lab/tiny') == 'apache-2.0'
  hub.models['lab/tiny'].card = {}
  assert hub_lib.licence('lab/tiny') == hub_lib.licence('runs/a/b') == ''
