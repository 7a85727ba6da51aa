"""What one start of a run knows of those before it."""

import json
import shutil

import pytest

from grpo_jax.engines.http.versions import Versions
from grpo_jax.run.keep import earlier


def started(workdir, folder):
  """The versions of a start, as a folder for each."""
  workdir.mkdir(exist_ok=True)
  versions = Versions(folder, lambda path, params: path.mkdir())
  earlier.recognise(workdir, versions)
  return versions


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_starts_of_a_run_have_one_word_and_versions_of_their_own(tmp_path):
  run, folder = tmp_path / 'run', tmp_path / 'weights'
  first = started(run, folder)
  first.publish(None, 3)
  (before,) = names(folder)
  second = started(run, folder)
  assert second.run == first.run and not names(folder)
  second.publish(None, 3)
  (after,) = names(folder)
  assert before != after
  assert all(name.startswith(f'{first.run}-') for name in (before, after))


def test_folders_of_other_runs_and_others_files_stay(tmp_path):
  folder = tmp_path / 'weights'
  one, other = started(tmp_path / 'a', folder), started(tmp_path / 'b', folder)
  assert one.run != other.run
  for versions in (one, other):
    versions.publish(None, 0)
  (folder / f'{one.run}x-0').mkdir()
  started(tmp_path / 'a', folder)
  assert names(folder) == sorted([f'{one.run}x-0', *others(other)])


def others(versions):
  return [path.name for path in versions._paths.values()]


def test_a_run_is_known_by_any_path_of_its_workdir(tmp_path):
  run, folder, link = (tmp_path / x for x in ('run', 'weights', 'link'))
  link.symlink_to(tmp_path)
  first = started(run, folder)
  for other in (tmp_path / 'weights/../run', link / 'run', run):
    folder.mkdir(exist_ok=True)
    assert started(other, folder).run == first.run


def test_what_was_half_written_is_removed(tmp_path):
  run, folder = tmp_path / 'run', tmp_path / 'weights'
  first = started(run, folder)
  first.publish(None, 0)
  (folder / f'{names(folder)[0]}.tmp').mkdir()
  started(run, folder)
  assert not names(folder)


def test_a_folder_that_is_not_used_any_more_is_cleared(tmp_path):
  run, before = tmp_path / 'run', tmp_path / 'before'
  started(run, before).publish(None, 0)
  started(run, tmp_path / 'after')
  assert not before.exists()
  # Unless something else lies there.
  started(run, before).publish(None, 0)
  (before / 'mine').write_text('')
  started(run, tmp_path / 'after')
  assert names(before) == ['mine']


def test_a_copy_of_a_workdir_is_another_run(tmp_path):
  """Both may go on at the same time, with the same servers and folder."""
  run, copy, folder = (tmp_path / x for x in ('run', 'copy', 'weights'))
  first = started(run, folder)
  first.publish(None, 0)
  shutil.copytree(run, copy)
  other = started(copy, folder)
  assert other.run != first.run and names(folder) == others(first)
  assert started(copy, folder).run == other.run


@pytest.mark.parametrize('text', ['', '{', '[]', '7', '{}', '{"run": "a"}'])
def test_a_file_that_says_nothing_is_written_anew(tmp_path, text):
  run, folder = tmp_path / 'run', tmp_path / 'weights'
  first = started(run, folder)
  (run / 'servers.json').write_text(text)
  again = started(run, folder)
  assert again.run != first.run
  assert json.loads((run / 'servers.json').read_text())['run'] == again.run


@pytest.mark.parametrize(
  'change',
  [
    {'run': None}, {'run': 3}, {'run': ''}, {'run': '*'}, {'run': 'a/b'},
    {'run': ['ab']}, {'run': 'mine'}, {'run': '0a1b2c3d*'},
    {'folder': None}, {'folder': 7},
  ],
)  # fmt: skip
def test_a_file_that_says_something_else_removes_nothing(tmp_path, change):
  """It may be damaged, or written by a later version."""
  run, folder = tmp_path / 'run', tmp_path / 'weights'
  first = started(run, folder)
  (folder / 'mine-a').mkdir(parents=True)
  file = run / 'servers.json'
  said = json.loads(file.read_text())
  for name, value in change.items():
    file.write_text(json.dumps(said | {name: value}))
    again = started(run, folder)
    assert (again.run != first.run) == (name == 'run')
    assert again.run.isalnum()
    del said[name]
    file.write_text(json.dumps(said))
    started(run, folder).publish(None, 0)
  assert 'mine-a' in names(folder) and len(names(folder)) == 2
  assert json.loads(file.read_text()).keys() == {'run', 'folder', 'workdir'}


def test_a_file_that_cannot_be_read_does_not_end_a_start(tmp_path):
  run, folder = tmp_path / 'run', tmp_path / 'weights'
  (run / 'servers.json').mkdir(parents=True)
  started(run, folder).publish(None, 0)


def test_a_disk_that_is_full_does_not_end_a_start(tmp_path, monkeypatch):
  def full(file, values):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(earlier.records, 'write', full)
  started(tmp_path / 'run', tmp_path / 'weights').publish(None, 0)
