"""Checkpoints: exact, verified, and alive on a full disk."""

import json
import os
import shutil
import time
import types
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint._src.multihost import multihost
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.run.keep import checkpoint
from grpo_jax.run.keep import fingerprints
from grpo_jax.run.keep import host_memory
from grpo_jax.run.keep.checkpoint import Checkpoints
from tests import small_files
from tests.chosen import chosen

pytestmark = pytest.mark.quick


def state_of(number):
  rng = np.random.default_rng(number)
  return {
    'params': jnp.asarray(rng.standard_normal((256, 512)), jnp.float32),
    'half': jnp.asarray(rng.standard_normal(8), jnp.bfloat16),
    'flags': jnp.array([True, False]),
    'step': jnp.int32(number),
    'nothing': (None, ()),
  }


def abstract(mesh=None):
  """Shapes, and the placing wanted: one device, or rows over a mesh."""
  mesh = mesh or sharding.make_mesh(1, 1, 1)

  def describe(x):
    place = sharding.rows(mesh) if x.ndim == 2 else sharding.replicated(mesh)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

  return jax.tree.map(describe, state_of(0))


def assert_equal(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def opened(tmp_path):
  said = []

  def open_again(**changes):
    options = {'keep_last': 2, 'best_metric': 'accuracy', 'warn': said.append}
    return Checkpoints(tmp_path / 'saves', **{**options, **changes})

  return open_again, said, tmp_path / 'saves'


def save_some(saves, metrics=(None, 1.0, 0.5, None)):
  for step, metric in enumerate(metrics):
    saves.save(step, state_of(step), {'position': step}, metric)
  saves.wait()


def test_a_fingerprint_knows_every_bit_and_place_and_no_mesh():
  whole = state_of(1)
  known = fingerprints.compute(whole)
  for place in [(0, 0), (255, 511), (3, 200)]:
    for bit in (0, 22, 31):
      words = np.array(whole['params']).view(np.uint32).copy()
      words[place] ^= np.uint32(1) << bit
      changed = {**whole, 'params': jnp.asarray(words.view(np.float32))}
      assert fingerprints.compute(changed) != known
  swapped = np.array(whole['params'])[:, ::-1].copy()
  assert fingerprints.compute({**whole, 'params': swapped}) != known
  flags = {**whole, 'flags': jnp.array([False, True])}
  assert fingerprints.compute(flags) != known
  mesh = sharding.make_mesh(4, 2, 1)
  spread = jax.device_put(
    whole, jax.tree.map(lambda x: x.sharding, abstract(mesh))
  )
  assert fingerprints.compute(spread) == known


def test_a_fingerprint_is_that_which_older_checkpoints_hold():
  array = np.random.default_rng(0).standard_normal((3, 5), np.float32)
  bits = array.view(np.uint32).reshape(-1).tolist()
  sums = sum((2 * place + 1) * word for place, word in enumerate(bits))
  assert fingerprints.compute([array, array > 0]) == [
    sums % 2**32,
    sum(2 * place + 1 for place in np.flatnonzero(array > 0)),
  ]


def test_an_array_may_have_more_places_than_32_bits_count():
  """By its shape alone; the array itself would have 6 GiB."""
  large = jax.ShapeDtypeStruct((1, 3 * 2**31), jnp.int8)
  (value,) = jax.eval_shape(fingerprints._fingerprints, large)
  assert (value.shape, value.dtype) == ((), jnp.uint32)


def test_arrays_of_one_shape_are_read_in_one_loop():
  """A state has several arrays of each shape; compiling goes by loops."""
  state = [jnp.ones((2, 3)), jnp.ones(4), jnp.ones((2, 3)), jnp.ones(4)]
  program = str(jax.make_jaxpr(fingerprints._fingerprints)(state))
  assert program.count('= reduce') == 2


def test_what_was_saved_comes_back_on_any_mesh(opened):
  open_again, said, _ = opened
  saves = open_again()
  assert saves.restore(abstract()) is None
  state = state_of(7)
  saves.save(7, state, {'position': 3, 'surplus': None})
  # The arrays may be donated as soon as save has returned.
  jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)(state)
  saves.close()
  mesh = sharding.make_mesh(2, 2, 2)
  step, state, host = open_again().restore(abstract(mesh))
  assert (step, host) == (7, {'position': 3, 'surplus': None})
  assert_equal(state, state_of(7))
  assert len(state['params'].sharding.device_set) == 8
  assert state['nothing'] == (None, ()) and not said


class Whole(NamedTuple):
  """A state whose first field may be read alone, as `TrainState` is."""

  state: Any
  moments: Any


def test_the_first_field_alone_comes_back_on_any_mesh(opened):
  open_again, said, directory = opened
  with open_again() as saves:
    for step in (1, 2):
      saves.save(step, Whole(state_of(step), state_of(step + 10)), {'at': step})
  mesh = sharding.make_mesh(2, 2, 2)
  with open_again(read_only=True) as saves:
    step, state, host = saves.restore(abstract(mesh), field='state')
    assert (step, host) == (2, {'at': 2})
    assert_equal(state, state_of(2))
    assert len(state['params'].sharding.device_set) == 8
    of_first = saves.restore(abstract(mesh), 1, 'state')
    assert_equal(of_first.state, state_of(1))
  # All files of arrays: which of them holds which array differs between runs.
  for file in (directory / '2').rglob('ocdbt.process_*/d/*'):
    file.write_bytes(file.read_bytes()[::-1])
  with open_again(read_only=True) as saves:
    assert saves.restore(abstract(mesh), field='state').step == 1
  (sentence,) = said
  assert 'Checkpoint 2' in sentence and '1, the one before' in sentence


def test_another_first_field_than_was_saved_is_noticed(opened, monkeypatch):
  """By the fingerprint, whatever the files say."""
  open_again, _, _ = opened
  with open_again() as saves:
    saves.save(1, Whole(state_of(1), state_of(2)), {})
  real = fingerprints.compute
  monkeypatch.setattr(
    fingerprints, 'compute', lambda tree: [n ^ 1 for n in real(tree)]
  )
  with open_again(read_only=True) as saves:
    with pytest.raises(ValueError, match='not those that were saved'):
      saves.restore(abstract(), field='state')


def test_the_last_and_the_best_are_kept_also_by_the_next_start(opened):
  open_again, _, _ = opened
  with open_again() as saves:
    save_some(saves)
    assert saves.steps() == [1, 2, 3] and saves.best_step() == 1
  with open_again() as saves:
    saves.save(4, state_of(4), {})
    saves.save(5, state_of(5), {}, 0.7)
    saves.wait()
    assert saves.steps() == [1, 4, 5] and saves.best_step() == 1
    saves.save(6, state_of(6), {}, 2.0)
    saves.save(7, state_of(7), {})
    saves.wait()
    assert saves.steps() == [6, 7] and saves.best_step() == 6
  with open_again(keep_last=1, best_metric='') as saves:
    saves.save(8, state_of(8), {}, 1.0)
    saves.wait()
    assert saves.steps() == [8]


def test_metrics_of_different_names_are_not_compared(opened):
  open_again, _, _ = opened
  with open_again(best_metric='length_tokens') as saves:
    save_some(saves, (None, 4.5))
    assert saves.best_step() == 1
  with open_again() as saves:
    assert saves.best_step() is None
    saves.save(2, state_of(2), {}, 0.5)
    saves.save(3, state_of(3), {}, 0.25)
    saves.wait()
    assert saves.best_step() == saves.named('best') == 2


def test_a_checkpoint_before_its_evaluation_is_completed(opened):
  """What lies beside its arrays is written anew, once; its bytes stay."""
  open_again, said, directory = opened
  before = {'unwritten': {'loss': 1}, 'receipt': 1, 'surplus': b'some'}
  with open_again() as saves:
    save_some(saves, (None,))
    saves.save(1, state_of(1), before)
    saves.save(1, state_of(1), before, 0.5)  # nothing new is known
    saves.wait()
    assert saves.best_step() is None
  after = {**before, 'unwritten': None}
  with open_again() as saves:
    # What is drawn ahead by now is not what the arrays belong to.
    saves.save(1, state_of(1), {**after, 'receipt': 2}, 0.25)
    assert saves.best_step() == 1
    written = (directory / '1' / 'host' / 'metadata').read_bytes()
    saves.save(1, state_of(1), {**after, 'more': 2}, 0.75)
    assert (directory / '1' / 'host' / 'metadata').read_bytes() == written
    restored = saves.restore(abstract())
    assert (restored.step, restored.host) == (1, after) and not said
    assert_equal(restored.state, state_of(1))


def bit_flipped(content):
  middle = len(content) // 2
  return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def flip_a_bit(directory):
  path = largest(directory)
  path.write_bytes(bit_flipped(path.read_bytes()))


def cut(directory):
  path = largest(directory)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def largest(directory):
  files = [path for path in directory.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
  'damage',
  [flip_a_bit, lambda d: empty(d / 'host')],
  ids=['bit', 'host'],
)
def test_of_a_corrupt_one_the_one_before_is_used_and_said(damage, opened):
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves)
  damage(directory / '3')
  with open_again() as saves:
    step, state, host = saves.restore(abstract())
    assert step == 2 and host == {'position': 2}
    assert_equal(state, state_of(2))
    assert len(said) == 1 and 'Checkpoint 3' in said[0] and '2,' in said[0]
    assert (directory / 'corrupt' / '3').is_dir()
    assert saves.steps() == [1, 2]
    saves.save(3, state_of(3), {})  # the run comes by once more
    saves.wait()
    assert saves.steps() == [1, 2, 3] and saves.failed == 0


def empty(directory):
  for path in directory.iterdir():
    path.unlink()


DAMAGES = {
  'gone': lambda path, found: path.unlink(),
  'zeros': lambda path, found: path.write_bytes(bytes(len(found))),
  'empty': lambda path, found: path.write_bytes(b''),
  'cut': lambda path, found: path.write_bytes(found[: len(found) // 2]),
  'bit': lambda path, found: path.write_bytes(bit_flipped(found)),
}


# What Orbax could not read, it reports once more where nothing catches it.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize(
  'damage',
  # A file is missing, cannot be read as what it is, or has other contents.
  chosen(DAMAGES, ('gone', 'cut', 'bit')),
)
def test_of_any_file_no_damage_goes_unnoticed(damage, opened):
  """Either nothing that is restored was in the file, or it is set aside."""
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves, (None, None, 1.0, 0.5))
  whole = directory.with_name('whole')
  directory.rename(whole)
  names = [p.relative_to(whole) for p in whole.glob('3/**/*') if p.is_file()]
  noticed = set()
  for name in names:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(whole, directory)
    DAMAGES[damage](directory / name, (whole / name).read_bytes())
    said.clear()
    with open_again() as saves:
      step, state, host = saves.restore(abstract())
      assert_equal(state, state_of(step))
      assert host == {'position': step} and saves.best_step() == 2
    assert (directory / 'corrupt').exists() == bool(said) == (step == 2)
    noticed |= {str(name)} if said else set()
  assert 1 < len(noticed) < len(names)
  assert '3/host/metadata' in noticed and '3/metrics/metrics' not in noticed


def test_what_lies_beside_the_arrays_is_covered(opened):
  """One digit, the metric, the digest, and the number of the checkpoint."""
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves, (None, 0.25, 0.5, 0.75))
  file = directory / '3' / 'host' / 'metadata'
  found = file.read_text()
  digest = json.loads(found)['fingerprint']['host']
  for old, new in (
    ('"position": 3', '"position": 7'),
    ('"value": 0.75', '"value": 0.05'),
    ('"name": "accuracy"', '"name": "accurate"'),
    (digest[:8], '00000000'),
    ('"host": "', '"hist": "'),
  ):
    assert found.count(old) == 1
    file.write_text(found.replace(old, new))
    with open_again(read_only=True) as saves:
      assert saves.restore(abstract()).host == {'position': 2}
      assert saves.best_step() == saves.named('best') == 2
    assert '2, the one before, is used' in said[0]
    assert 'Checkpoint 3' in said[1] and 'may have been the best' in said[1]
    said.clear()
  file.write_text(found)
  (directory / '3').rename(directory / '5')
  with open_again(read_only=True) as saves:
    assert saves.restore(abstract()).step == 2


def test_the_best_that_cannot_be_read_is_set_aside_too(opened):
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves)
  (directory / '1' / 'host' / 'metadata').write_bytes(bytes(20))
  with open_again() as saves:
    assert saves.restore(abstract()).step == 3
    assert saves.steps() == [2, 3] and saves.best_step() == 2
  assert len(said) == 1 and '; 3 is used' in said[0]


def test_a_checkpoint_of_earlier_code_is_refused(opened):
  """Its fingerprint is of the arrays alone."""
  open_again, _, directory = opened
  with open_again() as saves:
    save_some(saves)
  for step in (1, 2, 3):
    file = directory / str(step) / 'host' / 'metadata'
    host = json.loads(file.read_text())
    arrays = host['fingerprint']['arrays']
    file.write_text(json.dumps({**host, 'fingerprint': arrays}))
  with open_again() as saves:
    with pytest.raises(ValueError, match='an earlier version saved it'):
      saves.restore(abstract())


def test_a_stray_file_is_no_checkpoint(opened):
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves)
  (directory / '8').write_text('a file')
  (directory / '9').mkdir()
  with open_again() as saves:
    assert saves.restore(abstract()).step == 3


def test_if_none_can_be_read_nothing_is_moved(opened):
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves)
  for step in (1, 2, 3):
    flip_a_bit(directory / str(step))
  with open_again() as saves:
    with pytest.raises(ValueError, match=r'\[1, 2, 3\].*move them away'):
      saves.restore(abstract())
    assert saves.steps() == [1, 2, 3] and not said


def test_one_step_may_be_asked_for(opened):
  open_again, _, _ = opened
  with open_again() as saves:
    save_some(saves)
    assert saves.restore(abstract(), 1).host == {'position': 1}
    with pytest.raises(ValueError, match=r'no checkpoint of step 9.*1, 2, 3'):
      saves.restore(abstract(), 9)
    for which in ('newest', '-1', '٣'):  # the last is an Arabic 3
      with pytest.raises(ValueError, match="none of 'latest', 'best' or a num"):
        saves.named(which)


def test_leftovers_of_a_killed_save_are_cleared_away(opened):
  open_again, _, directory = opened
  with open_again() as saves:
    save_some(saves)
  leftover = directory / '4.orbax-checkpoint-tmp'
  (leftover / 'state').mkdir(parents=True)
  with open_again(read_only=True) as saves:  # another process may be writing it
    assert saves.restore(abstract()).step == 3
  assert leftover.exists()
  with open_again() as saves:
    assert saves.restore(abstract()).step == 3
  end = time.monotonic() + 60  # Orbax does it in a thread
  while leftover.exists() and time.monotonic() < end:
    time.sleep(0.01)
  assert not leftover.exists()


def test_a_reader_changes_nothing(opened):
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves)
  flip_a_bit(directory / '3')
  with open_again(read_only=True) as saves:
    assert saves.restore(abstract()).step == 2
  assert len(said) == 1 and not (directory / 'corrupt').exists()
  assert (directory / '3').is_dir()


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_corrupt(opened):
  open_again, said, directory = opened
  with open_again() as saves:
    save_some(saves)
  with open_again(read_only=True) as saves:
    assert 3 in saves.steps()
    shutil.rmtree(directory / '3')
    assert saves.restore(abstract()).step == 2
  assert not said


def test_what_writers_have_copied_goes_back_to_the_system(opened, monkeypatch):
  """Without this, a run grows by the size of a state with every save."""
  open_again, _, _ = opened
  calls = []
  with open_again() as saves:
    saves.save(0, state_of(0), {})
    library = types.SimpleNamespace(malloc_trim=calls.append)
    monkeypatch.setattr(host_memory.ctypes, 'CDLL', lambda name: library)
    saves.save(1, state_of(1), {})  # waits for the one before
    assert calls == [0]
    saves.wait()
    assert calls == [0, 0]


def test_another_c_library_is_left_alone(monkeypatch):
  class Other:
    """A library without `malloc_trim`."""

  monkeypatch.setattr(host_memory.ctypes, 'CDLL', lambda name: Other())
  host_memory.give_back()


def test_a_full_disk_is_counted_and_tried_again(opened):
  """No file may grow beyond 64 KiB for a while."""
  open_again, said, directory = opened
  with open_again() as saves:
    assert (saves.failed, saves.owed) == (0, False)
    save_some(saves)
    with small_files.limited(1 << 16):
      saves.save(4, state_of(4), {})
      saves.wait()
      assert (saves.failed, saves.owed) == (1, True)
      saves.save(5, state_of(5), {})
      saves.check()
      saves.wait()
      assert (saves.failed, saves.owed) == (2, True)
    assert len(said) == 2 and 'tries again' in said[0]
    saves.save(6, state_of(6), {'position': 6})
    saves.wait()
    assert (saves.failed, saves.owed) == (2, False)
    assert saves.restore(abstract()).host == {'position': 6}
  assert not [name for name in os.listdir(directory) if 'tmp' in name]


def test_a_save_is_due_after_minutes(tmp_path, monkeypatch):
  now = [0.0]
  clock = types.SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr(checkpoint, 'time', clock)
  with Checkpoints(tmp_path / 'a', every_minutes=2) as saves:
    now[0] = 119.0
    assert not saves.is_due()
    now[0] = 120.0
    assert saves.is_due()
    saves.save(1, {'x': jnp.zeros(2)}, {})
    assert not saves.is_due()
    now[0] = 240.0
    assert saves.is_due()
  with Checkpoints(tmp_path / 'b') as saves:
    now[0] = 1e9
    assert not saves.is_due()


def test_orbax_waits_at_our_barriers_as_long_as_it_says():
  """And behind it at its own."""
  own, met = multihost.sync_global_processes, []
  barrier = lambda **how: met.append(how)
  two = types.SimpleNamespace(number=2)
  with checkpoint._own_barriers(two, barrier):
    multihost.sync_global_processes('a save', timeout=7, processes={0, 1})
    multihost.sync_global_processes('a read')
  assert met == [
    {'key': 'a save', 'timeout_ms': 7_000},
    {'key': 'a read', 'timeout_ms': 1_200_000},
  ]
  assert multihost.sync_global_processes is own
  with checkpoint._own_barriers(types.SimpleNamespace(number=1), barrier):
    assert multihost.sync_global_processes is own
