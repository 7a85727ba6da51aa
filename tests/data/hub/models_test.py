"""Models of the Hub: what is asked for, what goes wrong, and what then."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import traceback
import types

from huggingface_hub import constants
import pytest

from grpo_jax.config import gguf_files
from grpo_jax.data import hub as hub_lib
from grpo_jax.data.hub import _asking
from tests.data.hub import stand_in

NAME = 'lab/tiny'
INDEX = 'model.safetensors.index.json'
FILES = {
  'config.json': b'{"model_type": "llama"}',
  'tokenizer.json': b'{}',
  'tokenizer_config.json': b'{}',
  'chat_template.jinja': b'{{ messages }}',
  INDEX: json.dumps(
    {'weight_map': {'a': 'model-1.safetensors', 'b': 'model-2.safetensors'}}
  ).encode(),
  'model-1.safetensors': b'first' * 100,
  'model-2.safetensors': b'second' * 100,
  'consolidated.safetensors': b'the same again',
  'original/consolidated.00.pth': b'and again',
  'pytorch_model.bin': b'and again',
  'README.md': b'# tiny',
}
NEEDED = {
  'config.json', 'tokenizer.json', 'tokenizer_config.json',
  'chat_template.jinja', INDEX, 'model-1.safetensors', 'model-2.safetensors',
}  # fmt: skip
IN_A_PROCESS = """
import sys
from grpo_jax.data import hub
print(hub.local_model(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def waits(monkeypatch):
  """The seconds that were waited, which take none."""
  waited = []
  clock = types.SimpleNamespace(sleep=waited.append)
  monkeypatch.setattr(_asking, 'time', clock)
  return waited


@pytest.fixture
def tiny(hub):
  hub.models[NAME].commit(FILES)
  return hub.models[NAME]


def files_in(folder):
  folder = pathlib.Path(folder)
  return {
    path.relative_to(folder).as_posix()
    for path in folder.rglob('*')
    if path.is_file()
  }


def test_only_what_is_needed_is_downloaded(hub, tiny):
  folder = hub_lib.local_model(NAME, 'shape')
  assert files_in(folder) == {'config.json'}
  assert hub_lib.local_model(NAME, 'tokenizer') == folder
  assert files_in(folder) == {
    name for name in NEEDED if 'safetensors' not in name
  }
  assert hub_lib.local_model(NAME) == folder
  assert files_in(folder) == NEEDED
  for name in NEEDED:
    assert (pathlib.Path(folder) / name).read_bytes() == FILES[name]
  assert len([one for one in hub.asked if '/api/models/' in one]) == 1


def test_a_model_in_one_file_has_no_index(hub):
  files = {'config.json': b'{}', 'model.safetensors': b'all'}
  hub.models[NAME].commit({**files, 'consolidated.safetensors': b'x'})
  assert files_in(hub_lib.local_model(NAME)) == set(files)


def test_one_file_of_a_repository(hub):
  hub.models[NAME].commit({'q4/a.gguf': b'GGUF', 'q8/b.gguf': b'GGUF'})
  path = hub_lib.local_model(f'{NAME}:q4/a.gguf')
  assert path.endswith('q4/a.gguf')
  assert pathlib.Path(path).read_bytes() == b'GGUF'
  with pytest.raises(ValueError, match=r"no 'c.gguf'; it has q4/a.gguf, q8/b"):
    hub_lib.local_model(f'{NAME}:c.gguf')


def test_revisions_and_commits(hub, tiny):
  first = tiny.branches['main']
  second = tiny.commit({**FILES, 'config.json': b'{"v": 2}'}, 'v2')
  assert hub_lib.model_commit(hub_lib.Name(NAME)) == first
  assert hub_lib.model_commit(hub_lib.Name(NAME, 'v2')) == second
  for text, expected in (
    (NAME, first),
    (f'{NAME}@v2', second),
    (f'{NAME}@{second}', second),
    (f'{NAME}@v2@{first}', first),  # v2 has moved since
    (f'hf://{NAME}', first),
  ):
    assert pathlib.Path(hub_lib.local_model(text)).name == expected, text


def test_a_commit_that_is_here_asks_nobody(hub, tiny):
  name = f'{NAME}@{tiny.branches["main"]}'
  folder = hub_lib.local_model(name)
  hub.close()
  stand_in._repository.find.cache_clear()
  assert hub_lib.local_model(name) == folder
  assert hub_lib.local_model(NAME) == folder  # one failed try, then the cache


def test_offline(hub, tiny, monkeypatch):
  folder = hub_lib.local_model(NAME)
  asked = len(hub.asked)
  stand_in.go_offline(monkeypatch)
  assert hub_lib.local_model(NAME) == folder
  assert len(hub.asked) == asked
  with pytest.raises(
    hub_lib.Unreachable, match='nor in the cache .* HF_HUB_OFFLINE is'
  ):
    hub_lib.local_model('lab/another')


def test_what_another_program_has_downloaded_is_read_offline(
  hub, tiny, monkeypatch, tmp_path
):
  folder = hub_lib.local_model(NAME)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another'))
  refs = pathlib.Path(folder).parents[1] / 'refs'
  refs.mkdir(exist_ok=True)
  (refs / 'main').write_text(tiny.branches['main'])
  stand_in.go_offline(monkeypatch)
  assert hub_lib.local_model(NAME) == folder


def test_a_part_of_what_another_program_has_downloaded_says_so(
  hub, tiny, monkeypatch, tmp_path
):
  folder = pathlib.Path(hub_lib.local_model(NAME))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another'))
  stand_in.go_offline(monkeypatch)
  name = f'{NAME}@{tiny.branches["main"]}'
  load = lambda: hub_lib.local_model(name)
  for lost in 'model-1.safetensors', INDEX, 'config.json':
    (folder / lost).unlink()
    stand_in._repository.find.cache_clear()
    text = refused(load, 'Only a part of lab/tiny is in the cache', 'unset it')
    assert f'in {folder}' in text and f'({lost}' not in text


def test_one_part_of_a_gguf_file_is_no_model(hub, tmp_path):
  parts = {f'q-0000{n}-of-00002.gguf': b'GGUF' for n in (1, 2)}
  hub.models[NAME].commit(parts)
  (part, _) = parts
  name = hub_lib.Name(NAME, file=part)
  for read in (
    lambda: hub_lib.local_model(str(name)),
    lambda: hub_lib.model_commit(name),
    lambda: gguf_files.find(tmp_path / part),
  ):
    (tmp_path / part).write_bytes(b'GGUF')
    refused(read, 'one of several files', 'in one file', kind=ValueError)
  assert 'q-' not in refused(
    lambda: hub_lib.local_model(NAME), 'no config.json'
  )
  hub.models[NAME].commit({**parts, 'whole.gguf': b'GGUF'})
  refused(lambda: hub_lib.local_model(NAME), f"'{NAME}:whole.gguf'.")


def refused(call, *words, kind: type[Exception] = hub_lib.HubError):
  with pytest.raises(kind) as caught:
    call()
  text = str(caught.value)
  assert '\n' not in text and stand_in.TOKEN not in text
  for word in words:
    assert word in text, text
  return text


def test_what_is_not_there(hub, tiny, monkeypatch):
  private, gated = hub.models['lab/private'], hub.models['lab/gated']
  for one in (private, gated):
    one.commit(FILES)
  private.private = gated.gated = True
  load = lambda text: lambda: hub_lib.local_model(text)
  refused(load('lab/tine'), 'no lab/tine here', 'correct the name', 'HF_TOKEN')
  refused(load('lab/private'), 'read without HF_TOKEN', 'may read it')
  refused(load(f'{NAME}@v9'), "no revision 'v9'; give main, or a commit")
  refused(load(f'{NAME}@{40 * "9"}'), 'no commit 9999999', f'{hub.endpoint}/')
  refused(load(f'{NAME}@{40 * "9"}'), 'no commit 9999999', f'{hub.endpoint}/')
  refused(load('lab/gated'), 'gated', 'accept its terms at', 'HF_TOKEN')
  monkeypatch.setenv('HF_TOKEN', 'hf_of_somebody')
  text = refused(load('lab/gated'), 'gated', 'cannot be read with the token of')
  assert 'hf_of_somebody' not in text
  monkeypatch.setenv('HF_TOKEN', stand_in.TOKEN)
  for name in ('lab/private', 'lab/gated'):
    assert files_in(hub_lib.local_model(name)) == NEEDED


def test_no_secret_is_said(hub, tiny, monkeypatch, waits, capsys):
  """Neither by an error, nor by its traceback, nor on the way to it."""
  said = []

  def refused(*words):
    with pytest.raises(ValueError) as caught:
      hub_lib.local_model(NAME)
    said.append(''.join(traceback.format_exception(caught.value)))
    assert all(word in str(caught.value) for word in words), caught.value

  for damage in '\x0b', '\x01', ' ', '\u2026':
    monkeypatch.setenv('HF_TOKEN', f'hf_s3cret{damage}s3cret')
    refused('The token of HF_TOKEN has', 'copy it again')
  assert not waits
  monkeypatch.delenv('HF_TOKEN')
  secret = hub.endpoint.replace('http://', 'http://alice:s3cret@')
  monkeypatch.setattr(constants, 'ENDPOINT', secret)
  tiny.gated = True
  refused('is gated', f'terms at {hub.endpoint}/{NAME} and')
  del hub.models[NAME]
  refused('correct the name')
  hub.faults.api = [503] * _asking.TRIES
  refused('answered 503')
  nobody = 'http://alice:s3cret@127.0.0.1:1'
  monkeypatch.setattr(constants, 'ENDPOINT', nobody)
  refused('is not here', 'whether http://127.0.0.1:1 can be reached')
  said += [capsys.readouterr().err]
  assert len(said) == 9 and 's3cret' not in ''.join(said)


def test_an_expired_link_is_no_matter_of_tokens(hub, tiny, waits):
  hub.faults.links = [403] * 9
  load = lambda: hub_lib.local_model(NAME)
  text = refused(load, 'localhost, which sends its files', '403', 'the clock')
  assert 'HF_TOKEN' not in text and waits
  hub.faults.links = [403]  # a new try has a new link
  assert files_in(load()) == NEEDED


@pytest.mark.parametrize('page', [b'<html>log in</html>', b'{}', b'[]'])
def test_what_answers_may_not_be_the_hub(hub, tiny, page):
  hub.faults.page = page
  load = lambda: hub_lib.local_model(NAME)
  refused(load, 'is not the Hub', 'asks you to log in', 'HF_ENDPOINT')


def test_the_page_of_a_data_set_is_named(hub):
  one = hub.datasets[NAME]
  one.commit({'train.jsonl': b'{}'})
  one.commit({'train.jsonl': b'{}'}, 'v2')
  load = lambda text: lambda: hub_lib.data_files(text, '', 'train')
  page = f'{hub.endpoint}/datasets/{NAME}'
  refused(load(f'{NAME}@v9'), "no revision 'v9'; give main, v2, or", page)
  one.gated = True
  refused(load(NAME), f'accept its terms at {page}')


@pytest.mark.parametrize(
  'files, words',
  [
    ({'README.md': b''}, ['has no config.json']),
    ({'a.gguf': b'', 'b.gguf': b''}, ['GGUF files', "'lab/other:a.gguf'", 'b']),
    (
      {'config.json': b'{}', 'a.gguf': b''},
      ['GGUF files', "'lab/other:a.gguf'"],
    ),
    (
      {'config.json': b'{}', 'pytorch_model.bin': b''},
      ['has pytorch_model.bin', 'safetensors are needed', '@refs/pr/NUMBER'],
    ),
    ({'config.json': b'{}'}, ['has no weights']),
    ({'adapter_config.json': b'{}'}, ['is an adapter', 'merge_and_unload']),
    (
      {'config.json': b'{}', INDEX: b'{"weight_map": {"a": "x.safetensors"}}'},
      ["has no 'x.safetensors'"],
    ),
    ({'config.json': b'{}', INDEX: b'{"weight_map": 3}'}, ['names no files']),
    (
      {'config.json': b'{}', INDEX: b'{"weight_map": {"a": "../../x"}}'},
      ["has no '../../x'"],
    ),
  ],
)
def test_repositories_that_hold_no_model_to_read(hub, files, words):
  hub.models['lab/other'].commit(files)
  refused(lambda: hub_lib.local_model('lab/other'), *words)


def test_paths_that_leave_the_folder_are_not_there(hub):
  hub.models[NAME].commit({**FILES, '../../evil.gguf': b'', '/x.gguf': b''})
  for path in ('../../evil.gguf', '/x.gguf'):
    with pytest.raises(ValueError):
      hub_lib.local_model(f'{NAME}:{path}')
  assert files_in(hub_lib.local_model(NAME)) == NEEDED


def test_it_asks_again_for_a_file(hub, tiny):
  """As huggingface_hub itself does."""
  hub.faults.files.append(503)
  assert files_in(hub_lib.local_model(NAME)) == NEEDED


@pytest.mark.parametrize('codes', [[429], [503], [429, 500, 502]])
def test_it_asks_again(hub, tiny, waits, codes, capsys):
  hub.faults.api.extend(codes)
  assert files_in(hub_lib.local_model(NAME)) == NEEDED
  assert [secs >= 1 for secs in waits] == [True] * len(codes)
  assert f'{NAME}: the Hub has' in capsys.readouterr().err


def test_it_does_not_ask_for_ever(hub, tiny, waits):
  hub.faults.api.extend([503] * 99)
  load = lambda: hub_lib.local_model(NAME)
  refused(load, 'answered 503', 'try again later')
  assert len(waits) == _asking.TRIES - 1
  assert waits[-1] > waits[0]
  hub.faults.api[:] = [429] * 99
  refused(load, 'too many requests (429)')


def test_a_server_that_is_gone(hub, tiny, waits):
  hub.close()
  text = refused(
    lambda: hub_lib.local_model(NAME),
    'lab/tiny is not here',
    'correct the name if it is a path',
    kind=hub_lib.Unreachable,
  )
  assert hub.endpoint in text
  assert len(waits) < 3


def test_a_connection_that_is_cut(hub, tiny):
  hub.faults.cut['model-1.safetensors'] = 100
  folder = pathlib.Path(hub_lib.local_model(NAME))
  file = folder / 'model-1.safetensors'
  assert file.read_bytes() == FILES[file.name]


def test_wrong_bytes_of_the_right_size(hub, tiny, capsys):
  hub.faults.wrong['model-2.safetensors'] = 1
  folder = pathlib.Path(hub_lib.local_model(NAME))
  file = folder / 'model-2.safetensors'
  assert file.read_bytes() == FILES[file.name]
  assert 'is damaged; it is downloaded again' in capsys.readouterr().err


def test_wrong_bytes_twice(hub, tiny):
  hub.faults.wrong['model-2.safetensors'] = 2
  load = lambda: hub_lib.local_model(NAME)
  refused(load, 'model-2.safetensors', 'SHA-256', 'proxy')
  assert files_in(load()) == NEEDED  # nothing wrong was left behind


def test_damage_in_the_cache_is_seen_and_hashes_are_made_once(
  hub, tiny, monkeypatch
):
  folder = pathlib.Path(hub_lib.local_model(NAME))
  hashed = []
  digest = stand_in._repository.hashlib.file_digest
  monkeypatch.setattr(
    stand_in._repository.hashlib,
    'file_digest',
    lambda file, kind: hashed.append(file.name) or digest(file, kind),
  )
  hub_lib.local_model(NAME)
  assert not hashed
  blob = (folder / 'model-1.safetensors').resolve()
  blob.write_bytes(b'F' + blob.read_bytes()[1:])
  os.utime(blob, ns=(1, 1))
  hub_lib.local_model(NAME)
  file = folder / 'model-1.safetensors'
  assert hashed and file.read_bytes() == FILES[file.name]


def test_a_disk_that_is_too_small(hub, tiny, monkeypatch):
  usage = stand_in._repository.shutil.disk_usage('/')
  monkeypatch.setattr(
    stand_in._repository.shutil,
    'disk_usage',
    lambda place: usage._replace(free=1000),
  )
  text = refused(
    lambda: hub_lib.local_model(NAME), 'set HF_HOME', 'GB free', kind=OSError
  )
  assert constants.HF_HUB_CACHE in text


def test_what_is_large_is_announced(hub, tiny, monkeypatch):
  said = []
  tiny.commit({**FILES, 'model-1.safetensors': b'x' * 2_000_000})
  with hub_lib.telling(said.append):
    hub_lib.local_model(NAME)
  assert said == [
    f'Downloading 2 files of {NAME}, 0.002 GB, to {constants.HF_HUB_CACHE}.'
  ]


def test_threads_at_once(hub, tiny):
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    folders = set(pool.map(hub_lib.local_model, [NAME] * 4))
  assert len(folders) == 1 and files_in(folders.pop()) == NEEDED


def test_two_processes_at_once_and_the_environment(hub, tiny, tmp_path):
  """HF_ENDPOINT, HF_HOME and HF_TOKEN are read by a process of its own."""
  tiny.private = True
  environment = {**os.environ, **stand_in.environment(hub, tmp_path)}
  started = [
    subprocess.Popen(
      [sys.executable, '-c', IN_A_PROCESS, NAME],
      env=environment,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(2)
  ]
  folders = {one.communicate(timeout=120)[0].strip() for one in started}
  assert len(folders) == 1
  (folder,) = folders
  assert folder.startswith(environment['HF_HOME'])
  assert files_in(folder) == NEEDED
