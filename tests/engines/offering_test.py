"""Parameters that go to jobs; here both sides are one process."""

import functools
import os
import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.engines import fetching
from grpo_jax.engines import offering
from grpo_jax.engines.local import prepare
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from tests import tiny

# Axes that 4 and 6 divide, others that they do not, and two groups of layers.
SHAPE = dict(
  width=24,
  num_heads=4,
  num_layers=3,
  compute_dtype='bfloat16',
  **{k: v for k, v in tiny.FANCY.items() if k not in ('num_layers',)},
)
SIZES = {
  1: {},
  2: {'fsdp': 2},
  4: {'fsdp': 2, 'tensor': 2},
  6: {'data': 3, 'fsdp': 2},
}


def mesh_of(number, last=False):
  devices = jax.devices()[-number:] if last else jax.devices()[:number]
  return sharding.make_mesh(**SIZES[number], devices=devices)


def placed(model, mesh, seed=0):
  params = tiny.params(model, seed)
  at = sharding.param_shardings(mesh, params, model.logical_axes)
  return jax.device_put(params, at)


def way_of(name, folder):
  if name == 'files':
    return offering.Files(folder / 'weights')
  return offering.Transfer('127.0.0.1')


def offers_of(model, mesh, params, name, folder):
  trained = jax.eval_shape(lambda x: x, params)
  trained = jax.tree.map(
    lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y.sharding),
    trained,
    params,
  )
  made = offering.Offers(model, trained, mesh)
  made.way = way_of(name, folder)
  return made


def fetch_of(model, params, mesh, offers, frozen=None, asked=None):
  def ask(process, wanted):
    assert process == 0
    if asked is not None:
      asked.append(wanted)
    return offers.offer(wanted)

  shapes = jax.eval_shape(lambda x: x, params)
  made = fetching.Fetch(
    model, shapes, mesh, frozen, offers.described(), ask, '127.0.0.1'
  )
  return lambda version: made.place(made.land(version))


def assert_equal(found, wanted):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for path, x in jax.tree_util.tree_leaves_with_path(found):
    other = functools.reduce(lambda at, key: at[_key(key)], path, wanted)
    assert x.dtype == other.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(other), str(path))


def _key(key):
  return getattr(key, 'key', getattr(key, 'idx', None))


@pytest.mark.parametrize('name', ['transfer', 'files'])
@pytest.mark.parametrize(
  'near, far', [(1, 1), (1, 2), (2, 1), (4, 2), (2, 4), (6, 2), (4, 6), (6, 4)]
)
def test_what_arrives_is_what_decoding_reads(near, far, name, tmp_path):
  model = tiny.model(**SHAPE)
  params = placed(model, mesh_of(near))
  offers = offers_of(model, mesh_of(near), params, name, tmp_path)
  mesh, asked = mesh_of(far, last=True), []
  fetch = fetch_of(model, params, mesh, offers, asked=asked)
  offers.publish(params, 7)
  offers.publish(jax.tree.map(lambda x: x + 1, params), 8)
  place = prepare.decoding_shardings(model, params, mesh)
  for version, more in ((7, 0), (8, 1)):
    wanted = jax.tree.map(lambda x, more=more: x + more, params)
    found = fetch(version)
    assert_equal(found, prepare.sampler_params(model, wanted))
    for x, at in zip(
      jax.tree.leaves(found), jax.tree.leaves(place), strict=True
    ):
      assert x.sharding.is_equivalent_to(at, x.ndim)
  # Each piece once.
  pieces = [(w['version'], *one) for w in asked for one in w['pieces']]
  assert len(pieces) == len(set(pieces))
  every = sum(leaf.parts for leaf in offers.leaves)
  assert len(pieces) == 2 * every
  offers.close()


def test_what_was_published_does_not_change_with_what_is_donated(tmp_path):
  model, mesh = tiny.model(**SHAPE), mesh_of(2)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'transfer', tmp_path)
  fetch = fetch_of(model, params, mesh_of(1, last=True), offers)
  wanted = jax.tree.map(np.asarray, prepare.sampler_params(model, params))
  offers.publish(params, 0)
  update = jax.jit(
    lambda params: jax.tree.map(lambda x: x * 0 - 1, params), donate_argnums=0
  )
  jax.block_until_ready(update(params))
  assert_equal(fetch(0), wanted)


def test_adapters_alone_travel(tmp_path):
  model = tiny.model(**SHAPE, lora=models.LowRank(2, 4.0, ('mlp/*',)))
  near, far = mesh_of(2), mesh_of(2, last=True)
  trained, frozen = lora.split(placed(model, near), model.trains)
  offers = offers_of(model, near, trained, 'transfer', tmp_path)
  held = lora.split(placed(model, far), model.trains)[1]
  fetch = fetch_of(model, trained, far, offers, frozen=held)
  offers.publish(trained, 0)
  wanted = prepare.sampler_params(model, lora.join(trained, frozen))
  assert_equal(fetch(0), wanted)
  sent = sum(np.prod(leaf.shape) for leaf in offers.leaves)
  assert sent == sum(x.size for x in jax.tree.leaves(trained))


@pytest.mark.parametrize('name', ['transfer', 'files'])
def test_what_is_dropped_is_gone(name, tmp_path):
  model, mesh = tiny.model(**SHAPE), mesh_of(1)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, name, tmp_path)
  fetch = fetch_of(model, params, mesh, offers)
  for version in range(3):
    offers.publish(params, version)
    fetch(version)
  offers.drop({2})
  with pytest.raises(offering.Dropped, match='no version 1 now'):
    fetch(1)
  fetch(2)
  files = [*(tmp_path / 'weights').glob('*')]
  assert len(files) == (name == 'files')
  offers.close()
  assert not (tmp_path / 'weights').exists()


def test_what_an_earlier_start_has_left_is_removed(tmp_path):
  folder = tmp_path / 'weights'
  folder.mkdir()
  (folder / 'ab12-0-3.weights.npz').write_bytes(b'x')
  (folder / 'ab12-0-4.weights.npz.tmp').write_bytes(b'x')
  (folder / 'ab12-1-3.weights.npz').write_bytes(b'x')  # of another process
  (folder / 'mine.txt').write_bytes(b'x')
  offering.Files(folder)
  assert {path.name for path in folder.iterdir()} == {
    'ab12-1-3.weights.npz', 'mine.txt',
  }  # fmt: skip


def test_a_disk_that_is_full_hurts_no_other_version(tmp_path, monkeypatch):
  model, mesh = tiny.model(**SHAPE), mesh_of(1)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'files', tmp_path)
  fetch = fetch_of(model, params, mesh, offers)
  offers.publish(params, 0)

  def full(*_):
    raise OSError(28, 'No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(os, 'fsync', full)
    with pytest.raises(OSError, match='No space left'):
      fetch(0)
    assert not [*(tmp_path / 'weights').iterdir()]
  assert_equal(fetch(0), prepare.sampler_params(model, params))


@pytest.mark.parametrize(
  'pieces', [[[999, 0]], [[-1, 0]], [[0, 2]], [[0, -1]], [[0, 1], [10**9, 0]]]
)
def test_pieces_that_are_not_there_are_refused(pieces, tmp_path):
  model, mesh = tiny.model(**SHAPE), mesh_of(2)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'transfer', tmp_path)
  offers.publish(params, 0)
  with pytest.raises(ValueError, match='no such piece'):
    offers.offer({'version': 0, 'pieces': pieces})


def test_parameters_of_another_model_are_refused(tmp_path):
  model, mesh = tiny.model(**SHAPE), mesh_of(1)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'transfer', tmp_path)
  other = tiny.model(**{**SHAPE, 'mlp_width': 16})
  with pytest.raises(ValueError, match='not those that the model of its'):
    fetch_of(other, tiny.params(other), mesh, offers)


def test_a_pull_of_what_is_not_offered_ends(tmp_path, monkeypatch):
  monkeypatch.setattr(fetching, 'PULL_SECS', 0.3)
  model, mesh = tiny.model(**SHAPE), mesh_of(1)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'transfer', tmp_path)
  fetch = fetch_of(model, params, mesh, offers)
  offers.publish(params, 0)
  offer = offers.offer
  lies = lambda wanted: {**offer(wanted), 'uuid': 1}
  monkeypatch.setattr(offers, 'offer', lies)
  with pytest.raises(fetching.Late, match='No weights have come within'):
    fetch(0)
  monkeypatch.undo()
  assert_equal(fetch(0), prepare.sampler_params(model, params))


def test_offers_that_nobody_takes_leak_nothing(tmp_path, monkeypatch):
  """1,000 versions, of which one in ten is pulled."""
  monkeypatch.setattr(offering, 'OFFER_SECS', 0.05)
  model = tiny.model(vocab_size=4096, width=64)  # 2 MiB
  mesh = mesh_of(1)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'transfer', tmp_path)
  size = sum(x.nbytes for x in jax.tree.leaves(params)) / 2**20
  fetch = fetch_of(model, params, mesh, offers)
  every = [
    [n, part]
    for n, leaf in enumerate(offers.leaves)
    for part in range(leaf.parts)
  ]
  before, arrays = 0.0, 0
  for version in range(1000):
    offers.publish(params, version)
    offers.drop({version})
    offers.offer({'version': version, 'pieces': every})
    if version % 10 == 0:
      monkeypatch.setattr(offering, 'OFFER_SECS', 60)
      fetch(version)
      monkeypatch.setattr(offering, 'OFFER_SECS', 0.05)
    time.sleep(0.002)
    if version == 200:
      before, arrays = _resident_mib(), len(jax.live_arrays())
  grown = _resident_mib() - before
  assert 800 * size > 1500  # what a leak would be, in MiB
  assert grown < 300, (grown, size)
  assert len(jax.live_arrays()) < arrays + 500


def _resident_mib():
  with open('/proc/self/statm') as file:
    return int(file.read().split()[1]) * os.sysconf('SC_PAGESIZE') / 2**20


def test_threads_fetch_while_the_learner_publishes(tmp_path):
  model, mesh = tiny.model(**SHAPE), mesh_of(2)
  params = placed(model, mesh)
  offers = offers_of(model, mesh, params, 'transfer', tmp_path)
  fetch = fetch_of(model, params, mesh_of(2, last=True), offers)
  offers.publish(params, 0)
  wanted, errors = prepare.sampler_params(model, params), []

  def fetches():
    try:
      for _ in range(10):
        assert_equal(fetch(0), wanted)
    except BaseException as error:
      errors.append(error)

  thread = threading.Thread(target=fetches)
  thread.start()
  version = 0
  while thread.is_alive():
    version += 1
    offers.publish(params, version)
    offers.drop({0, version})
  thread.join()
  assert not errors and version > 3
