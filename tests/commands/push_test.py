"""What `grpo-jax convert --push` sends to the Hub, and what it does not."""

import os

import pytest

from grpo_jax.data import hub as hub_lib
from tests import cli
from tests.data.hub import stand_in
from tests.run import export_test

TO = 'me/sums'
SECRET = 'made-of-my-own'
CARD = hub_lib.sealed('---\ntags:\n- made-with-grpo_jax\n---\nBy us\n').encode()


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


def test_a_folder_is_one_commit_and_replaces_the_one_before(hub, tmp_path):
  folder = tmp_path / 'out'
  (folder / 'more').mkdir(parents=True)
  files = {
    'README.md': CARD,
    'model.safetensors': b'weights' * 1000,
    'more/old.txt': b'x',
  }
  for name, contents in files.items():
    (folder / name).write_bytes(contents)
  hub_lib.push(folder, hub_lib.check_push(TO), False, 'first')
  one = hub.models[TO]
  assert one.private
  assert one.commits[one.branches['main']] == {'.gitattributes': b'', **files}
  # Weights of the push before go; what somebody has added stays.
  (folder / 'model.safetensors').rename(folder / 'model-1.safetensors')
  theirs = {'m.gguf': b'quantized', 'eval/results.json': b'{}'}
  one.commit({**one.commits[one.branches['main']], **theirs})
  url = hub_lib.push(folder, hub_lib.check_push(TO), False, 'again')
  files['model-1.safetensors'] = files.pop('model.safetensors')
  found = one.commits[one.branches['main']]
  assert found == {'.gitattributes': b'', **files, **theirs}
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
  one.commit({'README.md': CARD.replace(b'By', b'Edited by')})
  refused('another README.md')
  one.commit({'README.md': CARD})
  assert hub_lib.check_push(f'hf://{TO}') == TO
  refused('makes no private repository public', public=True)
  one.private = False
  refused('is public; give --public')
  assert hub_lib.check_push(TO, public=True) == TO
  hub.role = 'read'
  refused('set it to one that may write there')
  hub.role = 'write'
  hub.faults.api = [403]
  refused('set it to one that may write there')
  monkeypatch.delenv('HF_TOKEN')
  refused('without a token; set HF_TOKEN')
  stand_in.go_offline(monkeypatch)
  refused('HF_HUB_OFFLINE is set')


@pytest.mark.long
def test_a_push_that_fails_is_done_by_the_same_command(
  hub, model, tmp_path, monkeypatch
):
  out, push = tmp_path / 'out', hub_lib.push

  def fail(*_):
    raise hub_lib.Unreachable('the Hub has gone away.')

  with monkeypatch.context() as patch:
    patch.setattr(hub_lib, 'push', fail)
    done = cli.call('convert', model, out, f'--push={TO}')
  cli.assert_refused(done, 'holds the model; the same command pushes it.')
  written = (out / 'model.safetensors').stat().st_mtime_ns
  done = cli.call('convert', model, out, '--dtype=bfloat16', f'--push={TO}')
  cli.assert_refused(done, 'holds a model already')
  assert push is hub_lib.push
  done = cli.call('convert', model, out, f'--push={TO}')
  assert done.returncode in (0, None), done.stderr
  assert (out / 'model.safetensors').stat().st_mtime_ns == written
  files = hub.models[TO].commits[hub.models[TO].branches['main']]
  assert 'model.safetensors' in files
  assert not [name for name in files if name.startswith('.push')]
  assert not [*out.glob('.push*')]


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
