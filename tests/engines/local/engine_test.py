"""The engine: the learner's log-probabilities, ends, noise, turns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import prepare
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import compilations
from tests import drawing
from tests import tiny

EOS = (3, 7, 11)
PLAIN = engines.Sampling(eos_ids=EOS)
ENDLESS = engines.Sampling()
# Decoding compiles every layer apart, so there are few of them.
FANCY = {**tiny.FANCY, 'num_layers': 3}


def small_model(**changes):
  return tiny.model(**{'num_layers': 1, **changes})


def engine(model=None, params=None, **options):
  model = model or small_model()
  options = {'prompt_buckets': (4, 8), 'completion_buckets': (8, 16)} | options
  made = engines.LocalEngine(model, **options)
  made.load(tiny.params(model) if params is None else params, version=5)
  return made


def generate(made, sampling=PLAIN, prompts=None, limit=12, **options):
  prompts = prompts or tiny.ragged(prompts=4)[0]
  return drawing.completions(made, prompts, sampling, limit, **options)


def generation(made, sampling=PLAIN, prompts=None, limit=12):
  """The loop that draws completions, run to its end."""
  prompts = prompts or tiny.ragged(prompts=4)[0]
  asked = drawing.requests(prompts, sampling, limit)
  _, (loop,) = made._begun(arrays.Batch(range(len(asked)), asked))
  for _ in loop.run():
    pass
  return loop


@pytest.mark.parametrize(
  'temperature, changes',
  [
    pytest.param(1.0, {'num_layers': 2}, marks=pytest.mark.long),
    pytest.param(2.0, FANCY, marks=pytest.mark.quick),
    pytest.param(0.5, {}, marks=pytest.mark.long),
    pytest.param(1.0, tiny.FANCY, marks=pytest.mark.long),
  ],
  ids=['plain', 'fancy, warmer', 'colder', 'fancy'],
)
def test_sampler_and_learner_agree(temperature, changes):
  model = small_model(**changes)
  params = tiny.params(model)
  options = dataclasses.replace(PLAIN, temperature=temperature)
  prompts = tiny.ragged(prompts=4)[0]
  with jax.default_matmul_precision('highest'):
    drawn = generate(engine(model, params), options)
    rows = layout.shared_prompt(prompts, drawn.tokens, drawn.length, 8)
    scores = tiny.score(
      model, params, rows, temperature, models.Wanted(entropy=True)
    )
  entropy = tiny.gather(scores.entropy, rows, drawn.length)
  np.testing.assert_allclose(drawn.entropy, entropy, atol=1e-5)
  logp = tiny.gather(scores.logp, rows, drawn.length)
  assert len(set(drawn.length.ravel())) > 3  # ragged
  assert np.any(drawn.finish == engines.ENDED)
  np.testing.assert_allclose(drawn.logp, logp, atol=1e-5)
  np.testing.assert_array_equal(drawn.log_kept, 0)


def test_lengths_ends_and_padding():
  drawn = generate(engine())
  past = np.arange(12) >= drawn.length[:, :, None]
  for field in (drawn.tokens, drawn.logp, drawn.log_kept, drawn.entropy):
    assert not np.any(field[past])
  is_end = np.isin(drawn.tokens, EOS) & ~past
  ended = drawn.finish == engines.ENDED
  np.testing.assert_array_equal(is_end.sum(-1), ended)
  last = np.take_along_axis(is_end, drawn.length[..., None] - 1, -1)[..., 0]
  np.testing.assert_array_equal(last, ended)  # the end token is inside
  assert set(drawn.tokens[is_end]) <= set(EOS)
  assert len(set(drawn.tokens[is_end])) > 1
  assert np.all(drawn.length[~ended] == 12)
  np.testing.assert_array_equal(drawn.version, np.where(past, 0, 5))


def test_no_two_steps_prompts_or_completions_share_noise():
  """The same prompt everywhere: what differs is the noise alone."""
  same = [[1, 2, 3]] * 4
  made = engine()
  drawn = [
    generate(made, ENDLESS, same, 16, index=index, rollout=rollout)
    for rollout, index in ((0, range(4)), (1, range(4)), (0, range(4, 8)))
  ]
  rows = np.concatenate([d.tokens.reshape(-1, 16) for d in drawn])
  assert len(np.unique(rows, axis=0)) == len(rows) == 48
  # Nor do positions share it: no row repeats one token throughout.
  assert all(len(set(row)) > 3 for row in rows)


def test_noise_does_not_depend_on_the_company():
  """Another order, another batch, turns of two prompts: the same tokens."""
  prompts = tiny.ragged(prompts=4)[0]
  whole = generate(engine())
  order = [2, 0, 3, 1]
  some = [prompts[i] for i in order]
  shuffled = generate(engine(), prompts=some, index=order)
  np.testing.assert_array_equal(shuffled.tokens, whole.tokens[order])
  turns = generate(engine(max_rows=8))
  np.testing.assert_array_equal(turns.tokens, whole.tokens)
  alone = generate(engine(), prompts=prompts[1:2], index=[1])
  np.testing.assert_array_equal(alone.tokens, whole.tokens[1:2])


def test_a_cache_is_no_longer_than_the_window_of_its_layer():
  kinds = models.LayerKind(3), models.LayerKind(None)
  model = tiny.model(pattern=kinds)
  numbers, choices = drawing.alike(PLAIN, 1, model.config.vocab_size)
  sampler = sampler_lib.Sampler(model, choices, group=2)
  prompts = sampler_lib.Prompts(
    jnp.ones((1, 6), jnp.int32),
    jnp.array([6]),
    jnp.zeros((1, 2, 2), jnp.uint32),
    numbers,
  )
  params = prepare.sampler_params(model, tiny.params(model))
  rows, _ = jax.eval_shape(
    lambda p, given: sampler.prefill(p, given, 8), params, prompts
  )
  axes = sampler._axes.positions
  for caches, full in ((rows.cache, 8), (rows.prompt_cache, 6)):
    places = [
      {x.shape[axis] for x, axis in zip(layer, axes, strict=True)}
      for layer in caches
    ]
    assert places[0] == {3} and places[1] == {full}


def test_scales_and_routers_stay_float32_in_the_sampler():
  config = dataclasses.replace(tiny.EXPERTS, compute_dtype='bfloat16')
  model = models.Transformer(config)
  shapes = jax.eval_shape(
    lambda key: prepare.sampler_params(model, model.init(key)),
    jax.random.key(0),
  )
  kinds = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    kinds.setdefault(leaf.dtype.name, set()).add(sharding.path_names(path)[-1])
  assert kinds['float32'] == {'scale', 'router'}
  assert kinds['bfloat16'] >= {'embedding', 'head', 'query', 'down'}


def test_two_engines_are_bitwise_equal():
  first, second = (generate(engine()) for _ in range(2))
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)


def test_sampling_in_turns_pads_the_last_turn():
  prompts = tiny.ragged(prompts=4)[0]
  whole = generate(engine())
  turns = generate(engine(max_rows=8), prompts=prompts[:3])
  np.testing.assert_array_equal(turns.tokens, whole.tokens[:3])
  assert turns.tokens.shape[0] == 3


def test_the_loop_ends_when_all_rows_have():
  """With every token an end token nothing is decoded; so few as need be."""
  every = engines.Sampling(eos_ids=tuple(range(40)))
  loop = generation(engine(), every, limit=16)
  assert np.all(loop.so_far.length == 1) and loop.clock == 0
  loop = generation(engine())
  assert loop.clock == loop.so_far.length.max() - 1 < 12


def test_padding_does_not_prolong_the_loop():
  """A row that fills the last turn has ended before it starts."""
  few = engines.Sampling(eos_ids=tuple(range(20)))
  loop = generation(engine(max_rows=8), few, tiny.ragged(prompts=3)[0], 16)
  length = loop.so_far.length.reshape(3, 4)
  assert loop.clock == length[2].max() - 1
  assert length[2].max() < length.max() < 16


@pytest.mark.long
@pytest.mark.quick
def test_a_mesh_changes_no_token_and_decoding_gathers_no_parameter():
  model = small_model()
  prompts = tiny.ragged(prompts=3)[0]  # does not split over 4 shards
  plain = generate(engine(model), prompts=prompts)
  made = engine(model, mesh=sharding.make_mesh(2, 2, 2))
  spread = generate(made, prompts=prompts)
  np.testing.assert_array_equal(spread.tokens, plain.tokens)
  np.testing.assert_allclose(spread.logp, plain.logp, atol=1e-5)
  specs = {x.sharding.spec for x in jax.tree.leaves(made._held.now[0])}
  axes = {axis for spec in specs for axis in spec if axis is not None}
  assert axes == {'tensor'}


@pytest.mark.long
def test_caches_stay_split_over_rows_and_heads():
  """From the prompts on, while decoding, and after rows were dropped."""
  prompts = tiny.ragged(prompts=16)[0]
  options = engines.Sampling(eos_ids=tuple(range(4)))
  made = engine(mesh=sharding.make_mesh(2, 2, 2), max_rows=32)
  asked = drawing.requests(prompts, options)
  _, (loop,) = made._begun(arrays.Batch(range(16), asked))
  sizes = set()
  for _ in loop.run():
    rows = loop.rows
    sizes.add(rows.last.shape[0])
    for cache in jax.tree.leaves((rows.cache, rows.prompt_cache)):
      whole, part = cache.shape, cache.sharding.shard_shape(cache.shape)
      assert part == (whole[0] // 4, whole[1] // 2, *whole[2:])
  assert len(sizes) > 1


def test_greedy_equals_the_teacher_forced_argmax():
  model = small_model()
  params = tiny.params(model)
  greedy, prompts = engines.Sampling(temperature=0.0), tiny.ragged(prompts=4)[0]
  tokens = generate(engine(model, params), greedy, limit=8, group=1).tokens
  for place in range(8):
    rows = []
    for token in range(40):
      changed = tokens.copy()
      changed[:, :, place] = token
      rows.append(changed)
    best = []
    for changed in rows:
      lay = layout.padded_rows(prompts, changed, np.full((4, 1), 8), 16)
      scores = tiny.score(model, params, lay).logp
      best.append(
        np.asarray(tiny.gather(scores, lay, np.full((4, 1), 8)))[:, 0, place]
      )
    if place in (0, 7):
      np.testing.assert_array_equal(np.argmax(best, 0), tokens[:, 0, place])


def test_a_group_that_is_larger_than_all_rows_is_drawn_alone():
  assert engine(max_rows=2).schedule(3, 4, 5).prompts == 1


def test_min_tokens_and_top_k_reach_the_engine():
  options = dataclasses.replace(PLAIN, min_tokens=6, top_k=5)
  drawn = generate(engine(), options)
  assert drawn.length.min() >= 7
  inside = np.arange(12) < drawn.length[:, :, None]
  assert np.all(drawn.log_kept[inside] < 0)


def test_stop_strings_end_after_the_token_that_completes_them():
  decode = lambda ids: ' '.join(str(int(i)) for i in ids)
  made = engine(decode=decode)
  free = generate(made, ENDLESS, limit=16)
  stop = str(int(free.tokens[0, 0, 4]))
  cut = generate(made, engines.Sampling(stop_strings=(stop,)), limit=16)
  assert cut.finish[0, 0] == engines.STOPPED
  length = cut.length[0, 0]
  assert 0 < length <= 5
  assert stop in decode(cut.tokens[0, 0, :length])
  assert stop not in decode(cut.tokens[0, 0, : length - 1])
  np.testing.assert_array_equal(
    cut.tokens[0, 0, :length], free.tokens[0, 0, :length]
  )
  for field in (cut.logp, cut.entropy):
    assert np.any(field[0, 0, :length]) and not np.any(field[0, 0, length:])
  with pytest.raises(ValueError, match='decode'):
    generate(engine(), engines.Sampling(stop_strings=('7',)))


@pytest.mark.parametrize('stops', [(), ('7', '12')], ids=['ends', 'stops'])
def test_completions_that_have_ended_are_told_while_others_go_on(stops):
  made = engine(
    max_rows=8, decode=lambda ids: ' '.join(str(int(i)) for i in ids)
  )
  options = dataclasses.replace(PLAIN, stop_strings=stops)
  asked = drawing.requests(tiny.ragged(prompts=4)[0], options)
  place = {made.submit(one): p for p, one in enumerate(asked)}
  turns = list(made.completed())
  told = [(place[x.request], x.number) for turn in turns for x in turn]
  assert sorted(told) == list(np.ndindex(4, 4))
  assert len(turns) > sum(map(bool, turns)) > 2  # the caller has its turn
  drawn = generate(made, options)
  for one in (one for turn in turns for one in turn):
    at = place[one.request], one.number
    length = drawn.length[at]
    assert one.finish == drawn.finish[at] and len(one.ids) == length
    for name in ('logp', 'log_kept', 'entropy', 'version'):
      found = getattr(drawn, name)[at]
      np.testing.assert_array_equal(getattr(one, name), found[:length])
      assert not found[length:].any()
    np.testing.assert_array_equal(one.ids, drawn.tokens[at][:length])
  assert bool(stops) == (engines.STOPPED in drawn.finish)


@pytest.mark.parametrize('stop, length', [('a', 1), ('c', 3), ('de', 5)])
def test_a_stop_string_may_end_at_any_token_of_a_completion(stop, length):
  decode = lambda ids: ''.join(' abcde'[i] for i in ids)
  sampling = engines.Sampling(stop_strings=(stop,))
  ends = arrays.end_of(np.array([1, 2, 3, 4, 5]), sampling, decode)
  assert ends == (length, engines.STOPPED)
  ends = arrays.end_of(np.array([1, 2, 3])[: length - 1], sampling, decode)
  assert ends == (min(3, length - 1), engines.TRUNCATED)


@pytest.mark.parametrize('stops', [(), ('7',)], ids=['ends', 'stops'])
def test_a_completion_that_goes_on_is_reported_token_by_token(stops):
  made = engine(decode=lambda ids: ' '.join(str(int(i)) for i in ids))
  options = dataclasses.replace(PLAIN, stop_strings=stops)
  (asked,) = drawing.requests([[1, 2, 3]], options, group=3)
  made.submit(asked)
  so_far, finished = {}, {}
  for turn in made.completed(every_tokens=1):
    for one in turn:
      assert one.number not in finished
      before = so_far.get(one.number, [])
      assert one.ids[: len(before)].tolist() == before
      assert len(one.ids) == len(before) + (len(one.ids) > len(before))
      so_far[one.number] = one.ids.tolist()
      if one.finish != engines.GOING:
        finished[one.number] = one
  drawn = generate(made, options, [[1, 2, 3]], group=3)
  assert finished.keys() == {0, 1, 2}
  for g, one in finished.items():
    assert one.finish == drawn.finish[0, g]
    np.testing.assert_array_equal(one.ids, drawn.tokens[0, g, : len(one.ids)])
    assert len(one.ids) == drawn.length[0, g]


def test_requests_may_differ_in_all_and_come_while_others_are_drawn():
  """Each gets what it gets alone, if as many rows are drawn."""
  made = engine()
  prompts = tiny.ragged(prompts=4)[0]
  ways = [
    (PLAIN, 12, 4),
    (dataclasses.replace(PLAIN, temperature=0.0), 5, 4),
    (dataclasses.replace(PLAIN, top_k=3, temperature=0.5), 9, 4),
    (engines.Sampling(), 12, 2),  # other end tokens, another group
  ]
  asked = []
  for index, (sampling, limit, group) in enumerate(ways):
    (one,) = drawing.requests(
      [prompts[index]], sampling, limit, [index], group=group
    )
    asked.append(one)
  place = {made.submit(one): p for p, one in enumerate(asked[:3])}
  found = {}
  for turn in made.completed():
    if len(place) == 3:
      place[made.submit(asked[3])] = 3
    found |= {(place[one.request], one.number): one for one in turn}
  assert len(found) == 3 * 4 + 2
  for p, (_, limit, group) in enumerate(ways):
    drawn = drawing.generate(made, asked[p : p + 1])
    for g in range(group):
      one, length = found[p, g], drawn.length[0, g]
      assert len(one.ids) == length <= limit
      np.testing.assert_array_equal(one.ids, drawn.tokens[0, g, :length])
      np.testing.assert_allclose(one.logp, drawn.logp[0, g, :length], atol=1e-5)


@pytest.mark.parametrize('taken', [0, 1])
def test_whoever_leaves_gives_up_what_is_not_completed(taken):
  made = engine()
  for one in drawing.requests(tiny.ragged(prompts=4)[0]):
    made.submit(one)
  turns = made.completed()
  for _ in range(taken):
    next(turns)
  turns.close()
  assert list(made.completed()) == []
  assert generate(made).length.all()


def test_what_is_loaded_between_two_turns_draws_nothing_of_a_round():
  """Its tokens are labelled with the version that has drawn them."""
  made = engine(max_rows=8)
  whole, found = generate(made), {}
  place = {made.submit(one): p for p, one in enumerate(
    drawing.requests(tiny.ragged(prompts=4)[0], PLAIN)
  )}  # fmt: skip
  for turn in made.completed():
    found |= {(place[one.request], one.number): one for one in turn}
    made.load(tiny.params(made.model, seed=1), version=6)
  assert len(found) == whole.length.size
  for (p, g), one in found.items():
    assert set(one.version) == {5}
    np.testing.assert_array_equal(one.ids, whole.tokens[p, g, : len(one.ids)])
  assert np.max(generate(made).version) == 6


def test_sampling_asks_before_each_turn_whether_to_go_on():
  calls = []

  class Stopped(BaseException):
    pass

  def check():
    calls.append(None)
    if len(calls) == 3:
      raise Stopped

  made = engine(max_rows=8)
  asked = drawing.requests(tiny.ragged(prompts=4)[0], PLAIN)
  with pytest.raises(Stopped):
    drawing.generate(made, asked, check=check)
  assert len(calls) == 3 and list(made.completed()) == []
  plain = generate(made)
  whole = drawing.generate(made, asked, check=lambda: None)
  np.testing.assert_array_equal(whole.tokens, plain.tokens)


def test_other_numbers_of_sampling_compile_nothing():
  """Temperatures, limits and thresholds are data of the programs."""
  made = engine()

  def draw(limit, **numbers):
    return generate(made, engines.Sampling(eos_ids=EOS, **numbers), limit=limit)

  with compilations.compiled_programs() as names:
    first = draw(12, temperature=1.0), draw(12, top_p=0.5, top_k=4, min_p=0.1)
    compiled = len(names)
    assert {'prefill', 'decode'} <= set(names)
    again = draw(9, temperature=0.6), draw(10, top_p=0.9, top_k=4, min_p=0.2)
    draw(12, temperature=1.3, top_k=4, top_p=0.7, min_p=0.01)
    assert len(names) == compiled
  for one, other in zip(first, again, strict=True):
    assert other.length.max() < one.length.max() == 12
    assert not np.array_equal(one.tokens[..., :9], other.tokens[..., :9])


def test_loading_copies_so_that_donation_is_safe():
  model = small_model()
  params = tiny.params(model)
  made = engine(model, params)
  jax.tree.map(lambda x: x.delete(), params)
  assert generate(made).tokens.shape == (4, 4, 12)


@pytest.mark.parametrize(
  'dtype, mesh, same',
  [
    pytest.param(
      'float32', 1, {'embedding', 'head', 'final_norm'}, marks=pytest.mark.long
    ),
    pytest.param('bfloat16', None, {'final_norm'}, marks=pytest.mark.long),
    pytest.param(
      'float32',
      None,
      {'embedding', 'head', 'final_norm'},
      marks=pytest.mark.long,
    ),
    pytest.param('bfloat16', 1, {'final_norm'}, marks=pytest.mark.long),
  ],
)
def test_without_copies_only_what_must_change_is_made_anew(dtype, mesh, same):
  model = small_model(compute_dtype=dtype)
  assert not model.config.tied_embeddings
  mesh = mesh and sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  params = tiny.params(model)
  made = engine(model, params, copies=False, mesh=mesh)
  read = made._held.now[0]
  assert read.keys() == {'embedding', 'head', 'final_norm', 'layers'}
  found = {
    name
    for name in read.keys() - {'layers'}
    if jax.tree.all(jax.tree.map(lambda x, y: x is y, read[name], params[name]))
  }
  assert found == same
  drawn = generate(made)
  whole = generate(engine(model, params, mesh=mesh))
  np.testing.assert_array_equal(drawn.tokens, whole.tokens)
  # Single layers are copies in any case.
  made.unload()
  jax.tree.map(lambda x: x.delete(), params)


@pytest.mark.parametrize(
  'prompts, words', [([[1], []], 'empty'), ([[1] * 9], 'largest bucket')]
)
def test_impossible_prompts_are_refused(prompts, words):
  with pytest.raises(ValueError, match=words):
    generate(engine(), prompts=prompts)


def test_an_engine_without_parameters_says_so():
  made = engines.LocalEngine(tiny.model(), (8,), (16,))
  with pytest.raises(ValueError, match='call load first'):
    generate(made)
