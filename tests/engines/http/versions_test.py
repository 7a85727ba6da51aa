"""Tests of versions as folders."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.engines.http.versions import Versions


def write(folder, params):
  folder.mkdir()
  (folder / 'weights.json').write_text(json.dumps(np.asarray(params).tolist()))


def read(path):
  with open(f'{path}/weights.json') as file:
    return json.load(file)


@pytest.fixture
def folder(tmp_path):
  return tmp_path / 'a' / 'b'


def names(folder):
  return sorted(one.name for one in folder.iterdir())


def test_a_version_is_a_folder_until_nobody_needs_it(folder):
  versions = Versions(folder, write)
  for version in range(4):
    versions.publish(jnp.full(2, version), version)
  assert [read(versions.fetch(n)) for n in range(4)] == [
    [n, n] for n in range(4)
  ]
  versions.drop({1})
  assert len(names(folder)) == 2
  assert [read(versions.fetch(n)) for n in (1, 3)] == [[1, 1], [3, 3]]
  with pytest.raises(KeyError):
    versions.fetch(0)
  versions.drop(())
  assert read(versions.fetch(3)) == [3, 3] and len(names(folder)) == 1
  versions.close()
  assert not folder.exists()
  versions.close()


def test_a_version_that_is_there_is_not_written_again(folder):
  """A server may be reading it."""
  written = []

  def count(where, params):
    written.append(where)
    write(where, params)

  versions = Versions(folder, count)
  for _ in range(3):
    versions.publish(jnp.full(1, 5), 0)
  assert len(written) == 1 and read(versions.fetch(0)) == [5]
  versions.publish(jnp.full(1, 6), 1)
  versions.drop({1})
  versions.publish(jnp.full(1, 5), 0)
  assert len(written) == 3 and read(versions.fetch(0)) == [5]
  versions.close()
  assert not folder.exists()


def test_two_runs_share_a_folder(folder):
  one, other = Versions(folder, write), Versions(folder, write)
  one.publish(jnp.full(1, 5), 0)
  other.publish(jnp.full(1, 6), 0)
  assert read(one.fetch(0)) == [5] and read(other.fetch(0)) == [6]
  one.close()
  assert read(other.fetch(0)) == [6]
  other.close()
  assert not folder.exists()


def test_what_a_checkpoint_keeps_is_a_copy(folder):
  versions = Versions(folder, write, trained='shapes', keeps=True)
  params = jnp.full(2, 3)
  versions.publish(params, 0)
  params.delete()
  assert versions.snapshot(0).tolist() == [3, 3]
  assert versions.abstract() == 'shapes'
  versions.restore(7, versions.snapshot(0))
  assert read(versions.fetch(7)) == [3, 3]
  assert versions.snapshot(7).tolist() == [3, 3]
  versions.drop({7})
  with pytest.raises(KeyError):
    versions.snapshot(0)
  versions.close()
  with pytest.raises(KeyError):
    versions.snapshot(7)


def test_nothing_is_copied_that_nobody_asks_for(folder):
  versions = Versions(folder, write)
  versions.publish(jnp.full(2, 3), 0)
  with pytest.raises(KeyError):
    versions.snapshot(0)


@pytest.mark.parametrize('error', [OSError(28, 'No space left'), ValueError()])
def test_all_or_nothing(folder, error):
  def fails(where, params):
    write(where, params)
    raise error

  versions = Versions(folder, fails)
  with pytest.raises(type(error)) as found:
    versions.publish(jnp.full(2, 3), 0)
  assert not names(folder)
  with pytest.raises(KeyError):
    versions.fetch(0)
  if isinstance(error, OSError):
    for words in ('Version 0', str(folder), 'No space left', 'Make room'):
      assert words in str(found.value)
  versions.close()
  assert not folder.exists()


def test_a_folder_that_is_a_file(tmp_path):
  (tmp_path / 'a').write_text('')
  with pytest.raises(OSError, match='Version 3 cannot be written to'):
    Versions(tmp_path / 'a' / 'b', write).publish(jnp.zeros(1), 3)
