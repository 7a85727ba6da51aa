"""What `grpo-jax convert --push` sends to the Hub, and what it does not."""

import os

import pytest

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


def test_the_licence_of_the_base_is_copied(hub, monkeypatch):
  hub.models['lab/tiny'].commit({'config.json': b'{}'})
  hub.models['lab/tiny'].card = {'license': 'apache-2.0'}
  assert hub_lib.licence('lab/tiny') == 'apache-2.0'
  hub.models['lab/tiny'].card = {}
  assert hub_lib.licence('lab/tiny') == hub_lib.licence('runs/a/b') == ''
