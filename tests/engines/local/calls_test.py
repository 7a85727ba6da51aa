"""Calls that go on from each other: the same bits whenever they come."""

import gc
import itertools
import random
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import calls
from grpo_jax.engines.local import contexts
from grpo_jax.engines.local import generation
from grpo_jax.mesh import sharding
from tests import compilations
from tests import drawing
from tests import tiny

SAMPLING = engines.Sampling(eos_ids=(3, 7, 11))
FANCY = {**tiny.FANCY, 'num_layers': 3}
STATES = {**tiny.STATES, 'num_layers': 3}
# Of each call: the one that it follows, how much of its end is left out, what
# is new, and the most tokens.
TREE = (
  (None, 0, (5, 6, 7, 8, 9, 5, 6), 6),
  (0, 0, (20, 21), 8),
  (1, 0, (22,), 5),
  (0, 0, (30, 31, 32, 33, 34, 35), 6),  # a fork
  (2, 3, (8,) * 25, 9),  # rewritten from some place on
  (None, 0, (5, 6, 7, 8, 9, 5, 6), 6),  # another of the group
  (5, 0, (9,), 4),
  (None, 0, (12,), 7),
  (7, 0, (13, 14, 15), 30),
)


def model(**changes):
  return tiny.model(**{'num_layers': 2, **changes})


def engine(made=None, **options):
  made = made or model()
  widths = {'prompt_buckets': (8,), 'completion_buckets': (8, 24, 64)}
  options = widths | options  # pools of 24, 64 and 72
  found = engines.LocalEngine(made, **options)
  params = tiny.params(made)
  if found.mesh is not None:
    place = sharding.param_shardings(found.mesh, params, made.logical_axes)
    params = jax.device_put(params, place)
  found.load(params, version=5)
  return found


def draw(
  made, order=lambda ready: ready, tree=TREE, calls=4, sampling=SAMPLING
):
  """Asks for a tree of calls, of those that are ready in an order."""
  found, numbers, asked, places = {}, {}, {}, {}
  turns = iter(())
  while len(found) < len(tree):
    ready = [
      n
      for n, (parent, *_) in enumerate(tree)
      if n not in asked and (parent is None or parent in found)
    ]
    for n in order(ready):
      parent, less, new, limit = tree[n]
      ids, follows = [], None
      if parent is not None:
        ids = [*asked[parent].ids, *found[parent].ids.tolist()]
        ids, follows = ids[: len(ids) - less], (places[parent], 0)
      key = np.array([[17, n]], np.uint32)
      asked[n] = engines.Request(
        [*ids, *new], key, limit, sampling, calls=calls, follows=follows
      )
      places[n] = made.submit(asked[n])
      numbers[places[n]] = n
    if (turn := next(turns, None)) is None:
      turns = made.completed()
      continue
    for one in turn:
      found[numbers[one.request]] = one
  for number in numbers:
    made.forget(number)
  return [asked[n] for n in sorted(asked)], [found[n] for n in sorted(found)]


def bits(found):
  return [
    (one.ids.tobytes(), one.logp.tobytes(), one.entropy.tobytes(), one.finish)
    for one in found
  ]


def shuffled(seed):
  draw = random.Random(seed)

  def order(ready):
    return draw.sample(ready, draw.randint(min(1, len(ready)), len(ready)))

  return order


@pytest.fixture(scope='module')
def reference():
  made = engine()
  asked, found = draw(made)
  return made, asked, found, bits(found)


@pytest.mark.quick
@pytest.mark.parametrize('seed', range(6))
def test_bits_do_not_depend_on_when_calls_come(reference, seed):
  made, _, _, expected = reference
  assert bits(draw(made, shuffled(seed))[1]) == expected


def test_a_call_draws_what_a_request_by_itself_draws(reference):
  _, asked, found, _ = reference
  alone = [one._replace(calls=0, follows=None) for one in asked]
  made = engine(prompt_buckets=(64,))
  for (one,), other in zip(engines.generate(made, alone), found, strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.version, other.version)
    assert one.finish == other.finish
    for name in 'logp', 'log_kept', 'entropy':
      ours, theirs = getattr(one, name), getattr(other, name)
      np.testing.assert_allclose(theirs, ours, atol=1e-5)


@pytest.mark.parametrize(
  'made',
  [
    model(**FANCY),
    model(**tiny.SHARING),
    models.Transformer(tiny.EXPERTS),
    model(**STATES),
  ],
  ids=['windows', 'sharing', 'experts', 'states'],
)
@pytest.mark.long
def test_other_models_do_so_too(made):
  first = engine(made)
  asked, found = draw(first)
  for seed in range(3):
    assert bits(draw(first, shuffled(seed))[1]) == bits(found)
  alone = [one._replace(calls=0, follows=None) for one in asked]
  whole = engine(made, prompt_buckets=(64,))
  for (one,), other in zip(engines.generate(whole, alone), found, strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
    if one.routing is not None:
      np.testing.assert_array_equal(one.routing, other.routing)


@pytest.mark.quick
def test_a_layer_that_shares_keys_has_no_cache_where_it_draws():
  made = model(**tiny.SHARING)
  shapes = jax.eval_shape(made.init, jax.random.key(0))
  drawer = engine(made, mesh=sharding.make_mesh())
  drawn = drawing.abstract_rows(drawer, shapes, 2, 4, SAMPLING, 8)
  read = jax.eval_shape(made.unstack, shapes)
  pool = contexts.Programs(made).shapes(read, 3, 24)
  for layers in drawn.cache, drawn.prompt_cache, pool:
    assert [len(layer) for layer in layers] == [2] * 4 + [0] * 3


def test_caches_in_the_order_of_accelerators_do_so_too(reference):
  found = draw(engine(model(attention='splash')))[1]
  for one, other in zip(found, reference[2], strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)


def test_what_waits_without_a_row_is_parked_and_comes_back_unchanged():
  made = engine(max_rows=2)
  assert made.capabilities.rows == 2
  orders = [lambda ready: ready, *map(shuffled, range(4))]
  found = [draw(made, order)[1] for order in orders]
  assert all(bits(one) == bits(found[0]) for one in found)
  assert sum(one.parked for one in itertools.chain(*found)) > 4
  assert sum(one.parked for one in found[0]) > 1


@pytest.mark.parametrize('max_rows', [8, 2])
def test_pools_that_draw_at_once_draw_the_same(
  reference, monkeypatch, max_rows
):
  monkeypatch.setattr(generation, '_LEAST_WORK', 0)
  made = engine(cores=2, max_rows=max_rows)
  real, drawing_now, most = contexts.decode, set(), 0

  def decode(*args):
    nonlocal most
    drawing_now.add(threading.get_ident())
    time.sleep(0.01)
    most = max(most, len(drawing_now))
    drawing_now.remove(threading.get_ident())
    return real(*args)

  monkeypatch.setattr(contexts, 'decode', decode)
  given = watch_rows(monkeypatch)
  found = [draw(made, order)[1] for order in (list, *map(shuffled, range(3)))]
  assert all(bits(one) == bits(found[0]) for one in found)
  for one, other in zip(found[0], reference[2], strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
  assert any(one.parked for one in found[0]) == (max_rows == 2)
  assert most == 2 and {part for part, _ in given} == {0, 1}
  # Both ways of getting a row were seen, or all rows were free.
  assert {is_free for _, is_free in given} == {True, max_rows == 8}


def watch_rows(monkeypatch):
  """Which part gave each row, and whether it was free; the right one did."""
  real, given = calls.Queue._find_row, []

  def find_row(queue, width):
    parts = queue._pools_of(width)
    free = [part for part, one in enumerate(parts) if one.free_row is not None]
    drawn = [len(one.drawn_on) for one in parts]
    since = [
      one.waits_longest and one.waits_longest.waits_since for one in parts
    ]
    found = real(queue, width)
    if found is None:
      assert not free and since == [None] * len(parts)
    elif free:
      assert found[0] in free
      assert drawn[found[0]] == min(drawn[part] for part in free)
    else:
      some = [one for one in since if one is not None]
      assert since[found[0]] == min(some)
    given.extend([] if found is None else [(found[0], bool(free))])
    return found

  monkeypatch.setattr(calls.Queue, '_find_row', find_row)
  return given


def test_an_error_in_one_of_several_pools_ends_all(monkeypatch):
  monkeypatch.setattr(generation, '_LEAST_WORK', 0)
  made, real, count = engine(cores=2), contexts.decode, itertools.count()

  def decode(*args):
    if next(count) == 3:
      raise ValueError('no memory')
    return real(*args)

  expected = bits(draw(made)[1])
  monkeypatch.setattr(contexts, 'decode', decode)
  with pytest.raises(ValueError, match='no memory'):
    draw(made)
  assert made._queue is None
  assert bits(draw(made)[1]) == expected


@pytest.mark.parametrize('cores', [1, 2])
def test_caches_are_freed_with_what_drew(monkeypatch, cores):
  """At once, and not when Python next looks for cycles."""
  monkeypatch.setattr(generation, '_LEAST_WORK', 0)
  made = engine(cores=cores)
  keys, ids = np.zeros((1, 2), np.uint32), [5, 6, 7]
  ended = [
    lambda turns: made.unload(),
    lambda turns: made.load(tiny.params(made.model), version=6),
    lambda turns: turns.close(),  # in the midst
  ]
  gc.disable()
  try:
    for end in ended:
      made.load(tiny.params(made.model), version=5)
      for n, limit in enumerate((2, 40)):  # one is kept, one is drawn
        endless = engines.Sampling()
        made.submit(engines.Request(ids, keys + n, limit, endless, calls=4))
      turns = made.completed()
      while not made._queue._contexts:
        next(turns)
      pools = made._queue._pools.values()
      caches = [*map(weakref.ref, jax.tree.leaves([x.cache for x in pools]))]
      del pools
      end(turns)
      turns.close()
      assert caches and not any(one() is not None for one in caches)
  finally:
    gc.enable()


def test_rows_are_in_as_many_pools_as_divide_them(monkeypatch):
  monkeypatch.setattr(generation, '_LEAST_WORK', 0)
  made = engine(cores=4)
  for rows, parts in (1, 1), (2, 2), (6, 3), (7, 1), (8, 4), (9, 3):
    assert made._parts_of_calls(rows) == parts


def test_a_shorter_turn_goes_on_from_a_wider_row():
  tree = (None, 0, (5, 6, 7, 8, 9, 5, 6), 50), (0, 0, (20,), 4), (1, 0, (4,), 5)
  asked, found = draw(engine(), tree=tree)
  sizes = [len(one.ids) + one.limit for one in asked]
  assert sizes[0] > 24 and max(sizes[1:]) <= 24
  one_width = draw(engine(completion_buckets=(64,)), tree=tree)[1]
  for one, other in zip(found, one_width, strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)
  assert [one.read for one in found[1:]] == [2, 2]


def test_a_turn_reads_only_what_is_new(monkeypatch):
  made, turns, new = engine(completion_buckets=(256,)), 8, (9,) * 5
  counts, read = [], contexts.read

  def counted(programs, params, cache, rows, tokens, start, count):
    counts.append(int(np.sum(count)))
    return read(programs, params, cache, rows, tokens, start, count)

  monkeypatch.setattr(contexts, 'read', counted)
  prompt = (5, 6, 7, 8) * 10
  line = [(None, 0, prompt, 6)]
  line += [(n, 0, new, 6) for n in range(turns - 1)]
  group = [
    (None if parent is None else parent + g * turns, *rest)
    for g in range(4)
    for parent, *rest in line
  ]
  endless = engines.Sampling()
  _, found = draw(made, tree=group, sampling=endless)
  assert {len(one.ids) for one in found} == {6}
  # The last token of each is read by the pass that draws behind it.
  read_between = 4 * (turns - 1) * (1 + len(new) - 1)
  assert sum(counts) == len(prompt) - 1 + read_between
  context = len(prompt) + 4 * (turns - 1) * len(new)
  whole = sum(len(prompt) + n * (6 + len(new)) for n in range(turns)) * 4
  assert sum(counts) + 4 * turns < 1.3 * context and whole > 10 * context
  # Each says how much of it is its own; one of a group has read the prompt.
  line_reads = [1 + len(new)] * (turns - 1)
  assert [one.read for one in found] == [
    n for first in (len(prompt), 1, 1, 1) for n in (first, *line_reads)
  ]
  assert not any(one.parked for one in found)


def test_nothing_is_kept_of_what_is_forgotten(reference):
  made, asked, *_ = reference
  assert made._queue is None  # not its caches either
  numbers = [made.submit(one._replace(follows=None)) for one in asked[:3]]
  assert [len(turn) for turn in made.completed()]
  queue = made._queue
  made.forget(numbers[0])
  assert sum(any(pool.contexts) for pool in queue._pools.values())
  for number in numbers[1:]:
    made.forget(number)
  assert made._queue is None and not queue._prompts
  assert not any(any(pool.contexts) for pool in queue._pools.values())


def test_a_second_tree_compiles_nothing(reference, monkeypatch):
  made, *_ = reference
  monkeypatch.setattr(calls.Queue, '_try', None)  # not even to see
  with compilations.compiled_programs() as programs:
    draw(made, shuffled(9))
  assert not programs


def test_whoever_leaves_gives_up_what_is_drawn(reference):
  made, asked, *_ = reference
  made.submit(asked[0])
  turns = made.completed()
  next(turns)
  turns.close()
  assert not [*made.completed()]
  assert bits(draw(made)[1]) == reference[3]


def test_a_stop_string_ends_a_call(reference):
  _, asked, found, _ = reference
  made = engine(decode=lambda ids: ' '.join(map(str, ids)))
  stop = ' '.join(map(str, found[0].ids[1:3]))
  sampling = engines.Sampling(SAMPLING.eos_ids, stop_strings=(stop,))
  tree = TREE[0], (0, 0, (20, 21), 8)
  (first, second), (one, _) = draw(made, tree=tree, sampling=sampling)
  assert one.finish == engines.STOPPED
  np.testing.assert_array_equal(one.ids, found[0].ids[:3])
  assert second.ids == [*first.ids, *one.ids.tolist(), 20, 21]
  without = engine()
  with pytest.raises(ValueError, match='need an engine with decode='):
    draw(without, tree=tree, sampling=sampling)


def test_calls_that_cannot_be_drawn_are_refused(reference):
  made, asked, *_ = reference
  with pytest.raises(ValueError, match='is empty; give at least one token'):
    made.submit(asked[0]._replace(ids=[]))
  with pytest.raises(ValueError, match='largest bucket is 72'):
    made.submit(asked[0]._replace(ids=[5] * 70))
  assert not made._queue.live
  made._queue = None


def test_narrow_numbers_are_copied_between_data_shards():
  mesh = sharding.make_mesh(fsdp=2, tensor=4)
  narrow = model(compute_dtype='bfloat16')
  tree = TREE[:2] + ((0, 0, (30,), 6),)  # two go on from the same row
  found = draw(engine(narrow, mesh=mesh), tree=tree, calls=2)[1]
  again = draw(engine(narrow, mesh=mesh), shuffled(0), tree=tree, calls=2)[1]
  assert bits(again) == bits(found)


@pytest.mark.parametrize('tensor', [1, 2, 4, 8])
def test_over_data_shards_the_same_is_drawn(reference, tensor):
  mesh = sharding.make_mesh(fsdp=8 // tensor, tensor=tensor)
  made = engine(mesh=mesh)
  found = draw(made, calls=8)[1]
  assert bits(draw(made, shuffled(0), calls=8)[1]) == bits(found)
  with compilations.compiled_programs() as programs:
    assert bits(draw(made, shuffled(1), calls=8)[1]) == bits(found)
  assert not programs  # its pools are new
  for one, other in zip(found, reference[2], strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)


@pytest.mark.parametrize('shards', [1, 2])
def test_the_first_tree_compiles_what_others_of_its_width_need(shards):
  wide = model(width=24)  # of no other test
  options = {'prompt_buckets': (1,), 'completion_buckets': (256,)}
  if shards > 1:
    options['mesh'] = sharding.make_mesh(fsdp=shards, tensor=8 // shards)
  made = engine(wide, max_rows=2, **options)
  short = (None, 0, (5, 6), 4), (0, 0, (4,), 4)
  with compilations.compiled_programs() as programs:
    draw(made, tree=short)
  # By four pieces, none of which is longer than a context may be.
  others = 'pick_context', 'place_context', 'decode_contexts'
  counts = [programs.count(x) for x in ('read_contexts', *others)]
  # What comes back from the host lies on no mesh.
  assert counts == [4, 1, shards, 1]
  long = (
    (None, 0, (5,) * 150, 30),
    (None, 0, (6,) * 70, 30),  # two are parked, and come back
    (None, 0, (5,) * 150, 30),
    *((n, 0, (7,) * (9 + n), 20) for n in range(3)),
  )
  with compilations.compiled_programs() as programs:
    found = draw(made, tree=long)[1]
  assert any(one.parked for one in found) and not programs


@pytest.mark.quick
def test_how_much_is_read_at_once_depends_on_the_parameters():
  shapes = lambda size: {'w': jax.ShapeDtypeStruct((size,), np.float32)}
  (least, most), flops = calls._READ_TOKENS['cpu'], calls._READ_FLOPS
  middle = flops // (2 * 1000)  # takes as many operations for 1000 tokens
  for size, tokens in ((1, most), (middle, 1000), (flops, least)):
    assert calls.tokens_at_once(shapes(size), None) == tokens
  for fsdp, some in ((1, 4), (2, 4), (4, 4), (8, 8)):
    mesh = sharding.make_mesh(fsdp=fsdp, tensor=8 // fsdp)
    assert calls.longest_read(shapes(1), mesh, 32) == (some, 1024)
  # No more than there are, and at least one of each shard.
  assert calls.rows_at_once(4096, 4, rows=8, shards=2) == 4
  assert calls.rows_at_once(64, 64, rows=8, shards=2) == 1


@pytest.mark.quick
def test_most_of_a_piece_is_no_padding():
  queue = calls.Queue(model(), arrays.Held(({}, 0)), [64], 2)
  vars(queue)['_most_tokens'] = 256
  assert calls.pieces_of(256) == [4, 16, 64, 256]
  for count, piece in (
    (1, 4), (4, 4), (7, 4), (8, 16), (17, 16), (31, 16), (32, 64), (64, 64),
    (127, 64), (128, 256), (999, 256),
  ):  # fmt: skip
    assert queue._piece(count) == piece


def test_a_row_that_has_ended_does_not_wait_for_all_others(reference):
  made, asked, found, _ = reference
  some = [asked[n]._replace(follows=None) for n in (0, 5, 7)]
  assert min(len(found[n].ids) for n in (0, 5, 7)) > 4
  first, *others = map(made.submit, (some[0]._replace(limit=2), *some))
  turns = made.completed()
  assert [one.request for one in next(turns)] == [first]
  assert sum(map(len, turns)) == 3
  for number in first, *others:
    made.forget(number)


def test_who_has_waited_longest_is_parked():
  # The first has spoken again when the fourth needs a row.
  begin = [(None, 0, (n,), 4) for n in (5, 6, 8)]
  follow = [(n, 0, (9,), 4) for n in (0, 2, 1)]
  tree = (*begin[:2], follow[0], begin[2], *follow[1:])
  found = draw(engine(max_rows=2), lambda ready: ready[:1], tree)[1]
  assert [one.parked for one in found] == [False] * 5 + [True]


def test_the_caches_of_a_pool_are_written_where_they_are(reference):
  made, asked, *_ = reference
  number = made.submit(asked[0])
  (pool,) = made._queue._pools.values() or made._queue._pools_of(24)
  before = jax.tree.leaves(pool.cache)
  ((one,),) = made.completed()
  assert one.request == number
  assert all(x.is_deleted() for x in before)
  made.forget(number)


def test_the_longest_row_holds_what_a_call_may_read_and_draw():
  for most, widths in ((72, [24, 64, 72]), (64, [24, 64]), (40, [24, 40])):
    made = engine(context_tokens=most)
    assert made._widths_of_calls == widths
    draw(made, tree=((None, 0, (5,) * (most - 6), 6),))
    with pytest.raises(ValueError, match=f'{most + 1} tokens'):
      draw(made, tree=((None, 0, (5,) * (most - 6), 7),))


def test_a_width_that_is_needed_later_changes_nothing_that_is_drawn():
  tree = (None, 0, (5, 6, 7, 8), 8), (None, 0, (9, 9, 7), 40), (0, 0, (4,), 6)
  expected = bits(draw(engine(), tree=tree)[1])
  assert engine()._widths_of_calls == [24, 64, 72]  # none of 8
  for late in range(3):
    order = lambda ready, late=late: [n for n in ready if n != late] or ready
    assert bits(draw(engine(), order, tree=tree)[1]) == expected


def test_what_goes_on_is_reported_too(reference):
  made, asked, *_ = reference
  endless = engines.Sampling()
  one = asked[8]._replace(follows=None, sampling=endless)
  whole = {}
  for every in (None, 1, 3, 100):
    number, turns = made.submit(one), []
    for turn in made.completed(every):
      turns += turn
    *going, last = turns
    made.forget(number)
    assert last.finish != engines.GOING
    assert {report.finish for report in going} <= {engines.GOING}
    for report in going:  # each holds all that was drawn so far
      for name in ('ids', 'logp', 'entropy'):
        so_far = getattr(report, name)
        np.testing.assert_array_equal(
          so_far, getattr(last, name)[: len(so_far)]
        )
    counts = [0, *(len(report.ids) for report in turns)]
    steps = np.diff(counts)
    assert len(last.ids) == 30 and (steps > 0).all()
    if every is None:
      assert not going
    else:
      assert steps.max() <= min(every, contexts.STEPS)
    whole[every] = bits([last])
  assert len({str(x) for x in whole.values()}) == 1


def test_a_stop_string_is_no_report(reference):
  _, asked, found, _ = reference
  made = engine(decode=lambda ids: ' '.join(map(str, ids)))
  stop = ' '.join(map(str, found[8].ids[4:6]))
  sampling = engines.Sampling(SAMPLING.eos_ids, stop_strings=(stop,))
  made.submit(asked[8]._replace(follows=None, sampling=sampling))
  *going, last = itertools.chain.from_iterable(made.completed(1))
  assert [len(one.ids) for one in going] == [1, 2, 3, 4, 5]
  assert last.finish == engines.STOPPED and len(last.ids) == 6


@pytest.mark.parametrize('turns', [0, 1, 3])
def test_what_is_given_up_leaves_nothing_and_changes_nothing(reference, turns):
  made, asked, found, expected = reference
  others = [made.submit(asked[n]._replace(follows=None)) for n in (0, 7)]
  gone = made.submit(asked[8]._replace(follows=None))
  drawn = made.completed(1)
  seen = list(itertools.chain.from_iterable(itertools.islice(drawn, turns)))
  made.forget(gone)
  rest = list(itertools.chain.from_iterable(drawn))
  assert gone not in {one.request for one in rest}
  over = {x.request: x for x in (*seen, *rest) if x.finish != engines.GOING}
  assert bits([over[n] for n in others]) == [expected[0], expected[7]]
  queue = made._queue
  for number in others:
    made.forget(number)
  assert made._queue is None and not queue._prompts
  assert not any(any(pool.contexts) for pool in queue._pools.values())


def test_a_context_lives_on_without_a_turn_that_is_given_up(reference):
  made, asked, _, expected = reference
  first = made.submit(asked[0])
  assert [one.finish for (one,) in filter(None, made.completed())]
  gone = made.submit(asked[1]._replace(follows=(first, 0)))
  drawn = made.completed(1)
  next(drawn), next(drawn)
  made.forget(gone)
  assert not [*drawn]
  again = made.submit(asked[1]._replace(follows=(first, 0)))
  ((one,),) = filter(None, made.completed())
  assert bits([one]) == [expected[1]]
  for number in (first, again):
    made.forget(number)
  assert made._queue is None


def test_calls_of_another_kind_wait_no_longer_than_for_what_is_drawn():
  made = engine(max_rows=4)
  filtered = engines.Sampling(SAMPLING.eos_ids, top_k=2)

  def submit(number, sampling=SAMPLING, limit=24):
    key = np.array([[17, number]], np.uint32)
    return made.submit(
      engines.Request([5, 6, number], key, limit, sampling, calls=4)
    )

  order, number = [], 0
  numbers = {submit(0): 'usual'}
  drawn = made.completed(1)
  next(drawn)
  numbers[submit(1, filtered, 2)] = 'filtered'
  for turn in drawn:
    number += 1
    if number < 30:  # others come all the time
      numbers[submit(number + 1, limit=4)] = 'usual'
    order += [numbers[x.request] for x in turn if x.finish != engines.GOING]
  assert order.index('filtered') == 1 and len(order) == len(numbers)
