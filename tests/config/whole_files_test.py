"""Files that are written whole, and what is no file."""

import os
import stat
import threading

import pytest

from grpo_jax.config import whole_files
from grpo_jax.rollouts import parquet

pytestmark = pytest.mark.quick


def test_a_link_stays_a_link(tmp_path):
  (tmp_path / 'far').mkdir()
  (tmp_path / 'link').symlink_to(tmp_path / 'far' / 'file')
  for contents in (b'one', b'two'):
    whole_files.write(tmp_path / 'link', contents)
    assert (tmp_path / 'far' / 'file').read_bytes() == contents
  assert (tmp_path / 'link').is_symlink()
  assert os.listdir(tmp_path / 'far') == ['file']


def test_what_is_no_file_is_not_replaced(tmp_path, monkeypatch):
  """A pipe here, as tests must not risk a device."""
  monkeypatch.setattr(parquet, 'to_bytes', lambda *_: b'contents')
  pipe = tmp_path / 'pipe'
  os.mkfifo(pipe)
  read = []
  reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
  reader.start()
  parquet.write(pipe, None, 0)
  reader.join(10)
  assert read == [b'contents'] and stat.S_ISFIFO(pipe.stat().st_mode)
  assert os.listdir(tmp_path) == ['pipe']
  with pytest.raises(IsADirectoryError):
    whole_files.write(tmp_path, b'contents')


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
  file = tmp_path / 'file'
  file.write_bytes(b'old')

  def fail(*_):
    raise OSError('no room')

  for call in ('fsync', 'replace'):
    with monkeypatch.context() as patch:
      patch.setattr(whole_files.os, call, fail)
      with pytest.raises(OSError, match='no room'):
        whole_files.write(file, b'new')
    assert file.read_bytes() == b'old' and os.listdir(tmp_path) == ['file']
