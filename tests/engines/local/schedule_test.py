"""Who is drawn where: nobody lost, nobody twice, lanes of one prompt."""

import re

import jax
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.engines.local import generation as generation_lib
from grpo_jax.engines.local import sampler
from grpo_jax.engines.local import schedule as schedule_lib
from grpo_jax.mesh import sharding
from tests import drawing
from tests import tiny
from tests.compilations import compiled_programs

EOS = tuple(range(4))  # of 40: lengths of very different size


@pytest.mark.parametrize('group', [1, 4, 6, 8])
@pytest.mark.parametrize('prompt_tokens, shards', [(8, 1), (8, 4), (512, 2)])
@pytest.mark.parametrize('prompts', [16, 20])  # 20: sizes are rounded up
@pytest.mark.parametrize('waiting', [False, True])
def test_every_row_that_goes_on_has_one_place(
  group, prompt_tokens, shards, prompts, waiting
):
  rng = np.random.default_rng(group)
  schedule = schedule_lib.Schedule(group, prompts, prompt_tokens, shards)
  prompt = np.repeat(np.arange(prompts), group)
  used = set()
  for share in np.linspace(0, 1, 21):
    alive = rng.random(prompt.shape) < share
    lanes = schedule.lanes(prompt, alive, waiting)
    if lanes is None:
      continue
    used.add(lanes.size)
    assert lanes.shape[1] == schedule.narrow
    assert lanes.shape[0] % shards == 0
    assert lanes.size < len(prompt)
    of_shards = (np.split(x, shards) for x in (lanes, prompt, alive))
    for its_lanes, its_prompt, its_alive in zip(*of_shards, strict=True):
      moved = its_lanes[its_lanes >= 0]
      np.testing.assert_array_equal(np.sort(moved), np.flatnonzero(its_alive))
      for lane in its_lanes:
        assert len(set(its_prompt[lane[lane >= 0]])) <= 1
  assert used <= set(schedule.sizes)
  assert used if schedule.sizes else not used
  if waiting and used:
    assert used == {schedule.sizes[0]}


def test_it_shrinks_when_the_rows_fit_and_waits_while_they_do_not():
  schedule = schedule_lib.Schedule(group=8, prompts=8, prompt_tokens=8)
  assert schedule.narrow == 2 and schedule.sizes == [32, 16, 8]
  assert schedule.floor(64, 64, waiting=False) == 32
  assert schedule.floor(64, 30, waiting=False) == 26  # not all lanes are full
  assert schedule.floor(32, 32, waiting=False) == 16
  assert schedule.floor(32, 31, waiting=True) == 29
  assert schedule.floor(8, 5, waiting=False) == 0  # no smaller size
  assert schedule_lib.Schedule(2, 2, 8).floor(4, 4, waiting=False) == 0
  prompt = np.repeat(np.arange(8), 8)
  odd = np.arange(64) % 2 == 0  # 4 of each group: lanes are full
  assert schedule.lanes(prompt, odd, False).shape == (16, 2)
  three = np.arange(64) % 8 < 3  # 3 of each group: half of 8 lanes is empty
  assert schedule.lanes(prompt, three, False).shape == (16, 2)
  seven = np.arange(64) % 8 < 7
  assert schedule.lanes(prompt, seven, False) is None


def test_it_asks_again_only_after_more_rows_have_ended():
  """Otherwise the engine would ask for ever."""
  schedule = schedule_lib.Schedule(group=8, prompts=8, prompt_tokens=8)
  assert schedule.floor(64, 33, waiting=False) == 32
  assert schedule.floor(64, 32, waiting=False) == 28
  assert schedule.floor(32, 1, waiting=False) == 0
  few = schedule_lib.Schedule(group=3, prompts=5, prompt_tokens=8)
  assert few.sizes == [8] and few.floor(15, 8, waiting=False) == 7


def test_it_shrinks_at_once_to_the_fewest_rows_and_never_to_as_many():
  schedule = schedule_lib.Schedule(group=8, prompts=8, prompt_tokens=8)
  prompt = np.repeat(np.arange(8), 4)  # 32 rows are left of 64
  one_each = np.arange(32) % 4 == 0
  assert schedule.lanes(prompt, one_each, False).shape == (8, 2)
  one_of_some = one_each & (prompt < 4)
  assert schedule.lanes(prompt, one_of_some, False).shape == (4, 2)
  most = np.arange(32) > 1  # 15 lanes: no fewer than there are
  assert schedule.lanes(prompt, most, False) is None
  # Prompts that wait need the rest, and that the lanes are of the first size.
  assert schedule.admitted == 4
  assert schedule.lanes(prompt, most, True).shape == (16, 2)
  assert schedule.lanes(prompt, one_of_some, True).shape == (16, 2)


def test_the_fullest_shard_decides():
  schedule = schedule_lib.Schedule(
    group=2, prompts=8, prompt_tokens=8, shards=2
  )
  assert schedule.sizes == [8] and schedule.narrow == 1
  prompt = np.repeat(np.arange(8), 2)
  alive = np.arange(16) >= 11  # none on the first shard, 5 on the second
  assert schedule.fullest(alive) == 10
  assert schedule.lanes(prompt, alive, False) is None
  alive[12] = False
  lanes = schedule.lanes(prompt, alive, False)
  assert lanes.ravel().tolist() == [-1] * 4 + [3, 5, 6, 7]
  assert schedule.admitted == 4 and schedule.new_lanes(8).ravel().tolist() == [
    8, 9, 10, 11, 8, 9, 10, 11
  ]  # fmt: skip
  assert schedule.joined(np.arange(4), np.arange(9, 11)).tolist() == [
    0, 1, 9, 2, 3, 10
  ]  # fmt: skip


def test_the_rest_is_for_one_prompt_or_for_none():
  prompt, alive = np.repeat([0, 1], 4), np.ones(8, bool)
  one = schedule_lib.Schedule(group=8, prompts=2, prompt_tokens=8)
  assert one.sizes == [8] and one.admitted == 1
  assert one.lanes(prompt, alive, True).shape == (4, 2)
  none = schedule_lib.Schedule(group=8, prompts=2, prompt_tokens=8, shards=2)
  assert none.sizes == [8] and none.admitted == 0
  assert none.lanes(prompt, alive, True) is None


def test_the_smallest_size_is_an_eighth_and_none_is_the_first():
  assert schedule_lib.Schedule(8, 16, 8).sizes == [64, 32, 16]
  assert schedule_lib.Schedule(2, 8, 8, shards=16).sizes == []


def test_lanes_are_a_quarter_of_a_group_and_a_half_for_long_prompts():
  narrow = [schedule_lib.Schedule(8, 4, size).narrow for size in (8, 255, 256)]
  assert narrow == [2, 2, 4]


def test_new_prompts_fill_lanes_of_the_narrow_width():
  schedule = schedule_lib.Schedule(group=6, prompts=4, prompt_tokens=512)
  assert schedule.narrow == 3 and schedule.sizes == [12]
  assert schedule.admitted == 2  # 12 + 2 x 6 rows are 4 x 6
  np.testing.assert_array_equal(
    schedule.new_lanes(10), 10 + np.arange(12).reshape(4, 3)
  )
  uneven = schedule_lib.Schedule(group=5, prompts=4, prompt_tokens=512)
  assert uneven.narrow == 2 and uneven.sizes == [10]
  assert uneven.admitted == 1  # as 6 rows, one of them for nobody
  assert uneven.new_lanes(0).shape == (3, 2)
  assert np.sum(uneven.new_lanes(0) < 0) == 1


@pytest.mark.parametrize('shards', [1, 4, 8])
@pytest.mark.parametrize('group', [1, 5, 8, 16])
@pytest.mark.parametrize('prompts', [8, 16, 64])
def test_no_more_rows_than_allowed(group, prompts, shards):
  schedule = schedule_lib.Schedule(group, prompts, 8, shards)
  if schedule.admitted:
    rows = schedule.sizes[0] + schedule.new_lanes(0).size
    assert rows <= prompts * group and schedule.admitted % shards == 0
  else:  # prompts that wait do not make it stop early
    number = prompts * group
    still = schedule.floor(number, number, waiting=False)
    assert schedule.floor(number, number, waiting=True) == still


@pytest.fixture(scope='module')
def asked():
  prompts = tiny.ragged(prompts=16)[0]
  return drawing.requests(prompts, engines.Sampling(eos_ids=EOS), 30)


def generate(asked, model=None, **options):
  """Completions, `Generation`, and the sizes that were arranged."""
  model = model or tiny.model(num_layers=2)
  options = {'prompt_buckets': (8,), 'completion_buckets': (32,)} | options
  made = engines.LocalEngine(model, **options)
  made.load(tiny.params(model), version=0)
  seen, loops, run = [], [], generation_lib.Generation.run

  def watched(generation, every_tokens):
    loops.append(generation)
    for _ in run(generation, every_tokens):
      lanes = generation.rows.prompt_length.shape[0]
      seen.append((lanes, len(generation.going) // lanes, generation.room))
      yield

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(generation_lib.Generation, 'run', watched)
    drawn = drawing.generate(made, asked)
  return drawn, loops[0], seen


@pytest.fixture(scope='module')
def plain(asked):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(schedule_lib.Schedule, 'sizes', [])
    drawn, generation, seen = generate(asked)
  assert seen == [(16, 4, 32)] * 2 and generation.clock == 29
  assert len(set(drawn.length.ravel())) > 12
  return drawn


def assert_same(drawn, plain):
  np.testing.assert_array_equal(drawn.tokens, plain.tokens)
  np.testing.assert_array_equal(drawn.length, plain.length)
  np.testing.assert_array_equal(drawn.finish, plain.finish)
  for name in ('logp', 'entropy'):
    found, wanted = getattr(drawn, name), getattr(plain, name)
    np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_dropping_rows_changes_no_token(asked, plain):
  drawn, _, seen = generate(asked)
  assert_same(drawn, plain)
  # The device stops once for each size; before that it reads the prompts.
  assert seen == [
    (16, 4, 32), (16, 4, 32), (32, 1, 32), (16, 1, 32), (8, 1, 32)
  ]  # fmt: skip


def test_nor_do_prompts_that_wait_or_rings_that_come_around(asked, plain):
  drawn, generation, seen = generate(asked, max_rows=16)
  assert_same(drawn, plain)
  assert generation.waiting == 0 and generation.clock > 32
  assert {rows for lanes, width, _ in seen for rows in [lanes * width]} >= {
    16, 8
  }  # fmt: skip


@pytest.mark.long
def test_nor_do_shards_which_exchange_no_rows(asked, plain):
  mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
  options = {'mesh': mesh, 'completion_buckets': (8, 32), 'max_rows': 32}
  moves, regroup = [], sampler.regroup

  def noted(*args):
    moves.append(regroup.lower(*args).compile().as_text())
    return regroup(*args)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sampler, 'regroup', noted)
    drawn, *_ = generate(asked, **options)
  assert_same(drawn, plain)
  own, *_ = generate(asked, **options, shares=True)
  assert own.holder.tolist() == [0] * 16
  jax.tree.map(np.testing.assert_array_equal, own._replace(holder=None), drawn)
  assert len(moves) > 2
  for program in moves:
    found = re.findall(r'all-\w+|collective-\w+|reduce-scatter', program)
    assert not found, set(found)


def test_nor_do_caches_that_grow(asked, plain):
  drawn, _, seen = generate(asked, completion_buckets=(8, 32))
  assert_same(drawn, plain)
  rooms = [room for _, _, room in seen]
  assert rooms == sorted(rooms) and set(rooms) == {8, 32}


@pytest.mark.long
def test_nor_do_caches_that_grow_twice(asked, plain):
  options = {'completion_buckets': (4, 8, 32)}
  drawn, _, seen = generate(asked, **options)
  assert_same(drawn, plain)
  assert {room for _, _, room in seen} == {4, 8, 32}
  drawn, _, seen = generate(asked, **options, max_rows=16)
  assert_same(drawn, plain)


@pytest.mark.long
@pytest.mark.parametrize('changes', [tiny.FANCY, tiny.SHARING])
def test_nor_does_any_of_it_under_windows_or_grouped_heads(asked, changes):
  model = tiny.model(**changes)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(schedule_lib.Schedule, 'sizes', [])
    plain, *_ = generate(asked, model)
  options = {'completion_buckets': (8, 32), 'max_rows': 16}
  assert_same(generate(asked, model, **options)[0], plain)


def test_sizes_of_programs_are_few(asked, plain):
  """A second rollout compiles nothing; nor does one with other lengths."""
  options = {'max_rows': 16, 'completion_buckets': (8, 32)}
  drawn, *_ = generate(asked, **options)  # prompts wait, and caches grow
  assert_same(drawn, plain)
  with compiled_programs() as names:
    prompts = [one.ids for one in asked]
    sampling = asked[0].sampling
    generate(drawing.requests(prompts, sampling, 30, rollout=1), **options)
  assert not {'decode', 'prefill'} & set(names)


def test_completions_so_far_append_what_each_row_drew():
  so_far = generation_lib.CompletionsSoFar(
    sampler.Drawn(np.zeros((3, 4), np.int32), *np.zeros((3, 3, 4))),
    np.zeros((3, 4), np.int32),
    np.array([1, 0, 0], np.int32),
    np.zeros(3, bool),
  )
  token = np.array([[5, 6, 0], [7, 8, 9], [1, 1, 1]])
  drawn = sampler.Drawn(token, token / 2, token / 4, token / 8)
  so_far.write(np.array([2, 0, -1]), drawn, 7, np.array([2, 3, 0]))
  assert so_far.version.tolist() == [[0, 7, 7, 7], [0] * 4, [7, 7, 0, 0]]
  assert so_far.drawn.token.tolist() == [[0, 7, 8, 9], [0] * 4, [5, 6, 0, 0]]
  assert so_far.drawn.entropy[0].tolist() == [0, 7 / 8, 1, 9 / 8]
  assert so_far.length.tolist() == [4, 0, 2]
