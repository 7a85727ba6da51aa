"""States of rows: forked from a prompt, moved, parked, and never mixed up."""

import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.engines.local import schedule as schedule_lib
from grpo_jax.mesh import sharding
from tests import drawing
from tests import tiny
from tests.engines import mesh_test
from tests.engines.local import calls_test
from tests.engines.local import schedule_test

MODEL = tiny.model(**{**tiny.STATES, 'num_layers': 3})


@pytest.fixture(scope='module')
def asked():
  prompts = tiny.ragged(prompts=16)[0]
  sampling = engines.Sampling(eos_ids=schedule_test.EOS)
  return drawing.requests(prompts, sampling, 30)


@pytest.fixture(scope='module')
def plain(asked):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(schedule_lib.Schedule, 'sizes', [])
    return schedule_test.generate(asked, MODEL)[0]


def test_rows_that_move_take_their_states_with_them(asked, plain):
  """Prompts wait, rows are dropped, and caches grow."""
  options = {'completion_buckets': (8, 32), 'max_rows': 16}
  drawn, _, seen = schedule_test.generate(asked, MODEL, **options)
  schedule_test.assert_same(drawn, plain)
  assert len(set(seen)) == 4


@pytest.mark.parametrize('tensor', [2, pytest.param(4, marks=pytest.mark.long)])
def test_over_data_shards_and_heads_the_same_is_drawn(asked, plain, tensor):
  """Two key heads: over four devices caches are split by rows."""
  own = sharding.make_mesh(fsdp=8 // tensor, tensor=tensor)
  options = {'completion_buckets': (8, 32), 'max_rows': 32}
  made = engines.LocalEngine(MODEL, (8,), mesh=own, **options)
  made.load(mesh_test.learned(MODEL, own), version=0)
  assert made.schedule(16, 4, 8).shards == (8 if tensor == 4 else 4)
  schedule_test.assert_same(drawing.generate(made, asked), plain)


@pytest.fixture(scope='module')
def reference():
  made = calls_test.engine(MODEL)
  return calls_test.draw(made)


def test_what_waits_without_a_row_comes_back_unchanged():
  made = calls_test.engine(MODEL, max_rows=2)
  orders = (lambda ready: ready, *map(calls_test.shuffled, range(3)))
  found = [calls_test.draw(made, order)[1] for order in orders]
  for one in found[1:]:
    assert calls_test.bits(one) == calls_test.bits(found[0])
  assert sum(turn.parked for one in found for turn in one) > 4


def test_two_go_on_from_one_whose_row_has_gone_on(reference):
  """The second finds what was kept where the first began, and reads no more."""
  tree = *calls_test.TREE[:2], (0, 0, (20, 21), 8), (0, 0, (30,), 6)
  late = lambda ready: ready[:1]  # one at a time
  made = calls_test.engine(MODEL)
  together = calls_test.draw(made, tree=tree)[1]
  apart = calls_test.draw(made, late, tree=tree)[1]
  assert calls_test.bits(apart) == calls_test.bits(together)
  assert [one.read for one in apart[1:]] == [3, 3, 2]


def test_what_is_rewritten_is_read_from_its_beginning(reference):
  asked, found = reference
  whole = [one.read == len(ids.ids) for one, ids in zip(found, asked)]
  assert whole == [True, False, False, False, True, False, False, True, False]


@pytest.mark.parametrize('tensor', [1, 2])
def test_calls_over_data_shards(reference, tensor):
  made = calls_test.engine(
    MODEL, mesh=sharding.make_mesh(fsdp=8 // tensor, tensor=tensor)
  )
  found = calls_test.draw(made, calls=8)[1]
  again = calls_test.draw(made, calls_test.shuffled(0), calls=8)[1]
  assert calls_test.bits(again) == calls_test.bits(found)
  for one, other in zip(found, reference[1], strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)


def test_what_follows_a_stop_string_has_not_read_what_was_cut(reference):
  _, found = reference
  stop = ' '.join(map(str, found[0].ids[:2]))  # drawn on behind it
  sampling = engines.Sampling(stop_strings=(stop,))
  made = calls_test.engine(MODEL, decode=lambda ids: ' '.join(map(str, ids)))
  tree = calls_test.TREE[0], (0, 0, (20, 21), 8)
  asked, (one, other) = calls_test.draw(made, tree=tree, sampling=sampling)
  assert one.finish == engines.STOPPED and len(one.ids) == 2
  alone = [asked[1]._replace(follows=None, calls=0)]
  whole = calls_test.engine(MODEL, prompt_buckets=(64,), decode=made.decode)
  ((expected,),) = engines.generate(whole, alone)
  np.testing.assert_array_equal(other.ids, expected.ids)
  np.testing.assert_allclose(other.logp, expected.logp, atol=1e-5)
