"""Runs in a bucket, where nothing is appended to and nothing is locked."""

import dataclasses
import json
import os
import signal
import socket
import threading
import time
import types

import jax
import pytest

import grpo_jax as api
from grpo_jax import config as config_lib
from grpo_jax.engines.http.versions import Versions
from grpo_jax.run import loop
from grpo_jax.run import session
from grpo_jax.run.keep import bucket
from grpo_jax.run.keep import earlier
from grpo_jax.run.keep import workdir
from tests import bucket as stand_in
from tests import cli
from tests import runs

URL = 'stand://bucket/run'


@pytest.fixture
def place(tmp_path, monkeypatch):
  """The folder that `URL` is."""
  monkeypatch.setenv(stand_in.ROOT_VARIABLE, str(tmp_path))
  monkeypatch.setattr(bucket, 'SETTLE_SECS', 0.01)
  monkeypatch.setattr(bucket, 'UPLOAD_SECS', 0.05)
  monkeypatch.setattr(bucket, 'BEAT_SECS', 0.1)
  monkeypatch.setattr(bucket, 'SILENT_SECS', 1.0)
  stand_in.opened.clear()
  return tmp_path / 'bucket' / 'run'


def claim(place, **changes):
  of_nobody = {'owner': 'another', 'beats': 3, 'host': 'far away', 'pid': 1}
  place.mkdir(parents=True, exist_ok=True)
  (place / 'claim.json').write_text(json.dumps(of_nobody | changes))


@pytest.mark.long
def test_a_run_in_a_bucket_is_the_run_in_a_directory(place, tmp_path):
  config = runs.small()
  loop.train(config, tmp_path / 'whole')
  loop.train(runs.small(steps=2), URL)
  assert loop.train(config, URL)['steps'] == 4
  runs.assert_equal(tmp_path / 'whole', place)
  kept = {path.name for path in place.iterdir()}
  assert kept == {path.name for path in (tmp_path / 'whole').iterdir()} - {
    '.lock'
  }
  logged = sorted(path.name for path in (place / 'tensorboard').iterdir())
  assert len(logged) == 2 and not any('parts' in name for name in logged)
  for path, mode in stand_in.opened:
    assert 'a' not in mode, path


def test_what_grows_is_uploaded_in_parts(place, tmp_path):
  local = tmp_path / 'local'
  local.mkdir()
  uploads = bucket._Uploads(local, bucket.place_of(URL))
  lines = local / 'metrics.jsonl'

  def there():
    found = place.rglob('*')
    return {
      str(path.relative_to(place)): path.read_text()
      for path in found
      if path.is_file()
    }

  lines.write_text('one\n')
  (local / 'config.json').write_text('{}')
  (local / '.lock').write_text('')
  (local / 'completions').mkdir()
  (local / 'completions' / 'step_1.parquet').write_text('rows')
  uploads.push()
  parts = {'metrics.jsonl': 'one\n'}
  others = {'config.json': '{}', 'completions/step_1.parquet': 'rows'}
  assert there() == parts | others
  assert not (local / 'completions' / 'step_1.parquet').exists()
  with lines.open('a') as file:
    file.write('two\n')
  uploads.push()
  parts['metrics.jsonl.parts/000000000004'] = 'two\n'
  assert there() == parts | others
  assert bucket._whole(bucket.place_of(URL) / 'metrics.jsonl') == b'one\ntwo\n'
  copy = bucket.read_only(URL)
  assert (copy / 'metrics.jsonl').read_text() == 'one\ntwo\n'
  lines.write_text('one\n3\n')  # cut back, and gone on
  (local / 'config.json').unlink()
  uploads.push()
  assert there() == {
    'metrics.jsonl': 'one\n3\n',
    'completions/step_1.parquet': 'rows',
  }
  with lines.open('a') as file:
    file.write('4\n')
  uploads.push()
  bucket._join_parts(bucket.place_of(URL))
  assert there()['metrics.jsonl'] == 'one\n3\n4\n' and len(there()) == 2


def test_parts_that_are_in_the_file_already_do_not_count_twice(place):
  (place / 'metrics.jsonl.parts').mkdir(parents=True)
  (place / 'metrics.jsonl').write_text('one\ntwo\n')
  for start, text in (4, 'two\n'), (8, 'three\n'), (20, 'of nothing'):
    (place / 'metrics.jsonl.parts' / f'{start:012d}').write_text(text)
  whole = bucket._whole(bucket.place_of(URL) / 'metrics.jsonl')
  assert whole == b'one\ntwo\nthree\n'


def test_who_is_alive_keeps_a_workdir(place):
  with bucket.opened(URL):
    with pytest.raises(ValueError, match=f'process {os.getpid()} on .* is run'):
      with bucket.opened(URL):
        pass
  assert not (place / 'claim.json').exists()


def test_who_is_gone_does_not(place, capsys):
  claim(place)
  with bucket.opened(URL):
    assert json.loads((place / 'claim.json').read_text())['owner'] != 'another'
  assert 'process 1 on far away; waiting' in capsys.readouterr().err
  none = {'pid': 2**22 + 1, 'pids': bucket._pids()}
  claim(place, host=socket.gethostname(), **none)
  with bucket.opened(URL):
    assert not capsys.readouterr().err


def test_who_was_taken_over_touches_nothing(place, monkeypatch):
  for name in 'UPLOAD_SECS', 'BEAT_SECS':  # it notices only at its end
    monkeypatch.setattr(bucket, name, 100.0)
  with bucket.opened(URL) as local:
    (local / 'metrics.jsonl').write_text('mine')
    claim(place)  # this process stood still for too long
  assert not (place / 'metrics.jsonl').exists()
  assert json.loads((place / 'claim.json').read_text())['owner'] == 'another'


def test_who_is_taken_over_leaves_no_copy(place, monkeypatch, capsys):
  ended = threading.Event()

  def leave(code):
    assert code == 2
    ended.set()
    raise OSError  # its thread goes on

  monkeypatch.setattr(bucket.os, '_exit', leave)
  with bucket.opened(URL) as local:
    claim(place)
    assert ended.wait(60)
    assert not local.parent.exists()
    local.mkdir(parents=True)
  assert 'this one ends' in capsys.readouterr().err


def test_a_claim_that_cannot_be_read_is_alive_until_a_minute_is_over(place):
  place.mkdir(parents=True)
  (place / 'claim.json').write_text('{"own')
  begun = time.monotonic()
  with bucket.opened(URL):
    assert time.monotonic() - begun >= bucket.SILENT_SECS


def test_a_claim_read_while_it_is_written_is_read_again(place, monkeypatch):
  claim(place)
  waited = 0

  def wait(secs):
    nonlocal waited
    waited += 1
    if waited == 1:
      (place / 'claim.json').write_text('')
    else:
      claim(place, beats=4)

  monkeypatch.setattr(bucket.time, 'sleep', wait)
  with pytest.raises(ValueError, match='process 1 on far away, which is run'):
    with bucket.opened(URL):
      pass
  assert waited == 2


def test_of_two_starts_at_once_one_gets_it(place, monkeypatch):
  monkeypatch.setattr(bucket.time, 'sleep', lambda secs: claim(place))
  with pytest.raises(ValueError, match='process 1 on far away, which is run'):
    with bucket.opened(URL):
      pass


def test_what_cannot_be_uploaded_is_said_and_stays(place, monkeypatch, capsys):
  monkeypatch.setattr(bucket, 'TRIES', 1)

  def refuse(*_):
    raise OSError('no quota')

  with pytest.raises(ValueError, match='could not be uploaded .*no quota.*are'):
    with bucket.opened(URL) as local:
      (local / 'metrics.jsonl').write_text('one\n')
      monkeypatch.setattr(bucket._Uploads, '_upload', refuse)
  assert (local / 'metrics.jsonl').read_text() == 'one\n'


def test_the_error_of_a_run_is_raised_also_if_nothing_can_be_uploaded(
  place, monkeypatch, capsys
):
  monkeypatch.setattr(bucket, 'TRIES', 1)

  def refuse(*_):
    raise OSError('no quota')

  with pytest.raises(RuntimeError, match='the reward'):
    with bucket.opened(URL) as local:
      (local / 'metrics.jsonl').write_text('one\n')
      monkeypatch.setattr(bucket._Uploads, '_upload', refuse)
      raise RuntimeError('the reward')
  assert 'could not be uploaded' in capsys.readouterr().err
  assert (local / 'metrics.jsonl').exists()


def test_the_word_of_a_run_is_there_before_servers_have_anything(
  place, tmp_path, monkeypatch
):
  """The next start may have to know it, on whichever disk its copy is."""
  monkeypatch.setattr(bucket, 'UPLOAD_SECS', 60.0)
  words = []
  for number in range(2):
    with bucket.opened(URL) as local:
      versions = Versions(tmp_path / f'{number}', lambda path, _: path.mkdir())
      earlier.recognise(local, versions)
      saved = json.loads((place / 'servers.json').read_text())
    assert saved['folder'] == str(tmp_path / f'{number}')
    assert saved['run'] == versions.run
    words.append(versions.run)
  assert words[0] == words[1]


def test_a_profile_of_another_process_than_the_first_gets_there(place):
  place.mkdir(parents=True)
  profile = types.SimpleNamespace(workdir=bucket.read_only(URL))
  with session.profiled(profile, 2, (2, 3)):
    jax.block_until_ready(jax.numpy.zeros(3) + 1)
  assert [*(place / 'profile' / 'step_2').rglob('*.xplane.pb')]


def test_an_unknown_kind_of_bucket_gets_a_sentence():
  with pytest.raises(ValueError, match='nowhere://x cannot be reached'):
    loop.train(runs.small(), 'nowhere://x')


@pytest.mark.long
def test_killed_started_again_and_asked(place, tmp_path, monkeypatch):
  """The commands; the second start finds what the first has left."""
  given = (
    '--config=tests/bucket_config.py',
    f'--workdir={URL}',
    '--config.steps=6',
  )
  process = cli.popen('train', *given)
  cli.wait_until((place / 'checkpoints' / '2').exists, process)
  process.send_signal(signal.SIGKILL)
  process.communicate(timeout=60)
  assert (place / 'claim.json').exists()
  done = cli.command('train', *given)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['steps'] == 6
  assert [r['step'] for r in runs.records(place)] == list(range(7))
  loop.train(runs.small(steps=6), tmp_path / 'whole')
  runs.assert_equal(tmp_path / 'whole', place)
  (sample,) = api.sample(URL, ['47+85='])
  assert sample['prompt'] == '47+85='


def test_the_config_of_a_run_in_a_bucket_is_read_there(place):
  place.mkdir(parents=True)
  saved = runs.small(**{'data.prompt_buckets': (24,)})
  (place / 'config.json').write_text(json.dumps(dataclasses.asdict(saved)))
  config = dataclasses.replace(runs.small(), data=config_lib.Data())
  assert workdir.with_widths(URL, config).data.prompt_buckets == (24,)


def test_other_commands_refuse_a_bucket():
  done = cli.command('study', 'brakes', '--workdir=gs://a/b', cli.CONFIG)
  cli.assert_refused(done, 'gs://a/b is in a bucket, where study cannot write')
