"""Two processes of two devices each do what one process of four does."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from grpo_jax.episodes import rollout
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from tests import cli
from tests import runs
from tests.data import formats
from tests.run import many_processes_program as program
from tests.run import played

pytestmark = pytest.mark.long

PROBLEMS = [
  {'prompt': f'{n:02}+0{n % 7}=', 'answer': f'#### {n + n % 7}'}
  for n in range(12)
]
SILENT_SECS = 300  # a case takes 3 to 30 on two idle cores


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Where two processes have gone through all cases, one after another."""
  folder = tmp_path_factory.mktemp('many')
  if importlib.util.find_spec('tensorflow_datasets'):
    formats.tfds(folder / 'tfds', PROBLEMS)
  with socket.socket() as free:
    free.bind(('localhost', 0))
    address = f'localhost:{free.getsockname()[1]}'
  environment = cli.environment()
  environment['XLA_FLAGS'] += ' --xla_force_host_platform_device_count=2'
  both = []
  for rank in '01':
    with (folder / f'log.{rank}').open('w') as log:
      one = subprocess.Popen(
        [sys.executable, '-m', program.__name__, address, '2', rank, folder],
        env=environment,
        stdout=log,
        stderr=log,
      )
    both.append(one)
  try:
    wait_for(both, folder)
  finally:
    for one in both:
      one.kill()
  codes = [one.wait() for one in both]
  if codes != [0, 0]:
    pytest.fail(f'exit codes {codes}; {last_said(folder)}')
  return folder


def wait_for(both, folder):
  """Until both have ended or one has failed; a case has `SILENT_SECS`."""
  told, since = [], time.monotonic()
  while None in (codes := [one.poll() for one in both]) and not any(codes):
    now = sorted(each.name for each in folder.glob('*.json'))
    if now != told:
      told, since = now, time.monotonic()
    if time.monotonic() - since > SILENT_SECS:
      pytest.fail(f'silent after {told}; {last_said(folder)}')
    time.sleep(0.5)


def last_said(folder):
  """The ends of both logs, and where each was in a case that took long."""
  files = sorted(folder.glob('*.[01]'))  # log.0, where.1
  ends = [f'{file.name}: {file.read_text()[-4000:]}' for file in files]
  return '\n'.join(ends)


def told(folder, case):
  """What both processes have ended with."""
  return [
    json.loads((folder / f'{case}.{rank}.json').read_text()) for rank in '01'
  ]


def columns(workdir, step):
  """The completions of a rollout, in NumPy."""
  return parquet.read(parquet.path_of(workdir / 'completions', step))


def assert_close(workdir, other, relative):
  """The same completions; metrics and parameters that differ by rounding."""
  (step, arrays, _), (other_step, others, _) = map(runs.saved, (workdir, other))
  assert step == other_step == 4
  for name, array in arrays.items():
    if 'params' in name or 'reference' in name:
      size = np.abs(others[name]).max()
      np.testing.assert_allclose(
        array, others[name], rtol=0, atol=relative * size, err_msg=name
      )
  for step in range(1, 5):
    mine, theirs = columns(workdir, step), columns(other, step)
    np.testing.assert_array_equal(mine.batch.tokens, theirs.batch.tokens)
    np.testing.assert_array_equal(mine.batch.reward, theirs.batch.reward)
    np.testing.assert_array_equal(mine.index, theirs.index)


def written(workdir):
  """All that lies in a workdir, but for what Orbax has in an item."""
  names = []
  for path in workdir.rglob('*'):
    *folders, name = path.relative_to(workdir).parts
    if folders[:1] == ['checkpoints'] and len(folders) > 2:
      continue
    if name.startswith('events.'):  # the moment, the host and the process
      name = 'events'
    names.append('/'.join([*folders, name]))
  return sorted(names)


def run_here(workdir, **mesh):
  loop.train(runs.small(**{**program.EVERYTHING, **mesh}), workdir)


def test_programs_do_not_wait_for_each_other(folder):
  """With a thread of XLA for each of two cores they do, after some programs."""
  for end in told(folder, 'in_flight'):
    assert end['means'] == [3.0 * i for i in range(24)]


def test_as_one_process_on_the_same_mesh(folder, tmp_path):
  run_here(tmp_path)
  assert_close(folder / 'whole', tmp_path, 1e-6)
  first, second = told(folder, 'whole')
  assert first['steps'] == second['steps'] == 4
  assert written(folder / 'whole') == written(tmp_path)
  for mine, theirs in zip(
    runs.records(folder / 'whole'), runs.records(tmp_path), strict=True
  ):
    mine, theirs = runs.without_times(mine), runs.without_times(theirs)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
      if value is not None and not name.startswith('sampler_gap'):
        np.testing.assert_allclose(
          value, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_gsm8k_goes_on_in_the_middle_of_an_epoch(folder):
  """12 problems, 8 in a rollout: three rollouts are two epochs."""
  pytest.importorskip('tensorflow_datasets')
  for case, steps in (('gsm8k', 1), ('gsm8k_goes_on', 3)):
    assert [end['steps'] for end in told(folder, case)] == [steps] * 2
  parts = [columns(folder / 'gsm8k', step) for step in (1, 2, 3)]
  drawn = [text for part in parts for text in part.prompt_texts]
  asked = sorted(problem['prompt'] for problem in PROBLEMS)
  assert sorted(drawn[:12]) == sorted(drawn[12:]) == asked
  assert [n for part in parts for n in part.index] == [*range(24)]


def test_two_evaluate_and_sample_as_one_does(folder):
  first, second = told(folder, 'evaluated')
  alone = program.answers(folder / 'whole', rollout.judged_alone)
  for end in first, second:
    assert end['told'] == alone['told'] and len(end['told']) == 2
    assert end['summary'] == json.loads(json.dumps(alone['summary']))


def test_both_fill_the_fields_of_a_method(folder):
  for step in 1, 2, 3:
    batch = columns(folder / 'own_fields', step).batch
    np.testing.assert_array_equal(
      batch.extras['of_tokens'], batch.mask * (1 + batch.tokens % 2)
    )
    weights = np.unique(batch.extras['my_weight'])
    assert len(weights) > 1 and weights.all()


def test_both_go_on_with_another_learning_rate(folder):
  assert [end['steps'] for end in told(folder, 'changed')] == [3, 3]
  rates = [x['learning_rate'] for x in runs.records(folder / 'own_fields')[1:]]
  assert rates[-1] == pytest.approx(1e-5) != rates[0]
  starts = json.loads((folder / 'own_fields' / 'versions.json').read_text())
  assert starts[-1]['changed']['optim.lr'][1] == 1e-5


def test_a_change_that_one_alone_allows_ends_both(folder):
  for end in told(folder, 'allowed_by_one'):
    assert "1 has --allow_changed=['optim.lr'], and the" in end['text']


def test_what_one_judges_at_random_both_train_on(folder):
  first, second = (end['rewards'] for end in told(folder, 'random_reward'))
  assert first == second and set(first) == {0.0, 1.0}


def test_each_knows_the_groups_that_its_devices_have_drawn(folder):
  for first, second in zip(
    *(end['unknown'] for end in told(folder, 'random_reward')), strict=True
  ):
    assert first and second and sorted(first + second) == [*range(8)]


def test_a_mesh_whose_rows_lie_on_both_draws_the_same(folder):
  whole, found = (
    columns(folder / name, 1) for name in ('whole', 'tensor_across')
  )
  np.testing.assert_array_equal(found.batch.tokens, whole.batch.tokens)
  assert found.texts == whole.texts


def test_meshes_of_the_sampler_draw_the_same(folder):
  """Runs of two rollouts; `whole` has another learning rate after the first."""
  names = 'sampler_tensor_2', 'sampler_tensor_4'
  for name in names:
    assert [end['steps'] for end in told(folder, name)] == [2, 2]
  for step, *same in ((1, 'whole', *names), (2, *names)):
    first, *others = (columns(folder / name, step) for name in same)
    for found in others:
      np.testing.assert_array_equal(found.batch.tokens, first.batch.tokens)
      assert found.texts == first.texts


def test_slices_of_one_process_each_learn_the_same(folder):
  assert [end['steps'] for end in told(folder, 'slices')] == [4, 4]
  assert_close(folder / 'whole', folder / 'slices', 1e-3)


def test_a_replay_learns_the_same_and_a_function_sees_all_of_it(folder):
  first, second = (end['seen'] for end in told(folder, 'replayed'))
  assert [step for step, *_ in first] == [1, 2, 3, 4] and not second
  for step, texts, tokens in first:
    whole = columns(folder / 'whole', step)
    assert texts == whole.texts and tokens == whole.batch.tokens.tolist()
  (_, arrays, _), (_, others, _) = (
    runs.saved(folder / each) for each in ('whole', 'replayed')
  )
  jax.tree.map(np.testing.assert_array_equal, arrays, others)


def test_a_signal_to_one_stops_both_and_all_is_saved(folder):
  for end in told(folder, 'stopped'):
    assert end['signal'] == 'SIGTERM' and end['steps'] == 2
  assert [end['steps'] for end in told(folder, 'goes_on')] == [4, 4]
  runs.assert_equal(folder / 'whole', folder / 'stopped')


@pytest.mark.parametrize(
  'name, mesh', [('four', {}), ('one', {'mesh.fsdp': 1})]
)
def test_what_two_have_saved_goes_on_in_one(folder, tmp_path, name, mesh):
  """With groups that were drawn for the next rollout."""
  shutil.move(folder / name, tmp_path / name)
  assert 'surplus' in runs.saved(tmp_path / name)[2]['sha256']
  run_here(tmp_path / name, **mesh)
  assert_close(folder / 'whole', tmp_path / name, 1e-3)


def test_a_reward_that_raises_in_one_ends_both_saved(folder):
  first, second = told(folder, 'raises')
  assert first['raised'] == 'PeerError'
  assert first['text'] == f'Process 1: {second["raised"]}: {second["text"]}'
  assert "KeyError: 'no such answer'" in second['text']
  assert told(folder, 'goes_on_after_it')[0]['steps'] == 4
  runs.assert_equal(folder / 'whole', folder / 'raises')


def test_another_config_in_one_is_named_in_both(folder):
  for end in told(folder, 'started_differently'):
    assert end['raised'] == 'ValueError'
    assert 'Process 1 has config.seed=1, and the others have 0' in end['text']
  assert not (folder / 'started_differently').exists()


def test_what_one_cannot_read_both_leave_aside(folder):
  assert [end['steps'] for end in told(folder, 'unreadable')] == [4, 4]
  said = (folder / 'log.0').read_text()
  assert 'cannot be read (process 1: [Errno 5] Input/output error); 2' in said
  assert (folder / 'unreadable' / 'checkpoints' / 'corrupt' / '4').is_dir()
  runs.assert_equal(folder / 'whole', folder / 'unreadable')


@pytest.mark.parametrize(
  'name, rank', [('disk_full', 1), ('disk_full_first', 0)]
)
def test_a_disk_that_is_full_in_one_ends_nothing(folder, name, rank):
  assert [end['steps'] for end in told(folder, name)] == [4, 4]
  assert runs.records(folder / name)[-1]['saves_failed'] >= 1
  said = (folder / 'log.0').read_text()
  assert f'A save has failed (process {rank}: ' in said
  (_, arrays, _), (_, others, _) = (
    runs.saved(folder / each) for each in ('whole', name)
  )
  jax.tree.map(np.testing.assert_array_equal, arrays, others)


def test_a_disk_that_stays_full_in_one_ends_both_alike(folder):
  for end in told(folder, 'disk_stays_full'):
    assert end['raised'] == 'ValueError'
    assert 'The checkpoint of rollout 2 could not be saved;' in end['text']
    assert 'goes on from the checkpoint of rollout 0.' in end['text']
  assert [end['steps'] for end in told(folder, 'room_again')] == [2, 2]
  assert runs.checkpoints(folder / 'disk_stays_full')[-1] == 2


def test_the_first_process_alone_writes_and_shows(folder):
  said = (folder / 'log.1').read_text()
  assert 'rollout' not in said and 'warning' not in said, said


def test_two_play_the_episodes_that_one_plays(folder, tmp_path):
  played.train(tmp_path, **program.EPISODES)
  assert_close(folder / 'episodes', tmp_path, 1e-6)
  first, second = told(folder, 'episodes')
  assert first['steps'] == second['steps'] == 4
  assert first['waits'] > 10 and second['waits'] > 10
  assert written(folder / 'episodes') == written(tmp_path)
  for step in range(1, 5):
    found, alone = (
      columns(each, step) for each in (folder / 'episodes', tmp_path)
    )
    assert found.texts == alone.texts and found.prompts == alone.prompts
    for name in 'mask', 'valid', 'version', 'truncated':
      np.testing.assert_array_equal(
        getattr(found.batch, name), getattr(alone.batch, name)
      )


def test_where_episodes_are_played_by_two_is_no_matter(folder):
  assert [end['steps'] for end in told(folder, 'episodes_in_workers')] == [4, 4]
  runs.assert_equal(folder / 'episodes', folder / 'episodes_in_workers')


def test_episodes_on_a_mesh_whose_rows_lie_on_both(folder):
  whole, found = (
    columns(folder / name, 1) for name in ('episodes', 'episodes_over_all')
  )
  np.testing.assert_array_equal(found.batch.tokens, whole.batch.tokens)
  assert found.texts == whole.texts


def test_a_signal_to_one_stops_both_also_while_one_plays(folder):
  for end in told(folder, 'episodes_stopped'):
    assert end['signal'] == 'SIGTERM' and end['steps'] < 4
  assert [end['steps'] for end in told(folder, 'episodes_go_on')] == [4, 4]
  runs.assert_equal(folder / 'episodes', folder / 'episodes_stopped')


def test_a_player_that_raises_in_one_ends_both_saved(folder):
  first, second = told(folder, 'episodes_raise')
  assert first['raised'] == 'PeerError'
  assert first['text'] == 'Process 1: ValueError: no room for a worker'
  assert second['text'] == 'no room for a worker'
  assert told(folder, 'episodes_go_on_after_it')[0]['steps'] == 4
  runs.assert_equal(folder / 'episodes', folder / 'episodes_raise')
