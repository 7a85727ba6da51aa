"""The engine: the learner's log-probabilities, ends, noise, turns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines.local import arrays
from grpo_jax.engines.local import sampler as sampler_lib
from grpo_jax.mesh import sharding
from grpo_jax.models import layout
from tests import tiny

EOS = (3, 7, 11)
PLAIN = engines.Sampling(max_tokens=12, eos_ids=EOS)
ENDLESS = engines.Sampling(max_tokens=16)
# Decoding compiles every layer apart, so there are few of them.
FANCY = {**tiny.FANCY, 'num_layers': 3}


def small_model(**changes):
  return tiny.model(**{'num_layers': 1, **changes})


def engine(model=None, params=None, **options):
  model = model or small_model()
  options = {'prompt_buckets': (4, 8), 'completion_buckets': (8, 16)} | options
  made = engines.LocalEngine(model, seed=0, **options)
  made.load(tiny.params(model) if params is None else params, version=5)
  return made


def requests(options=PLAIN, prompts=None, index=None, group=4, rollout=0):
  prompts = prompts or tiny.ragged(prompts=4)[0]
  index = range(len(prompts)) if index is None else index
  return engines.Requests(prompts, list(index), group, rollout, options)


def decoded(made, asked):
  """The completions, and how they came about."""
  _, (generation,) = made._asked(asked)
  *_, so_far = generation.run()
  return made._completions(so_far, asked), generation


@pytest.mark.parametrize(
  'temperature, changes',
  [
    pytest.param(1.0, {'num_layers': 2}, marks=pytest.mark.quick),
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
  asked = requests(options)
  with jax.default_matmul_precision('highest'):
    drawn = engine(model, params).generate(asked)
    rows = layout.shared_prompt(asked.prompts, drawn.tokens, drawn.length, 8)
    scores = tiny.score(model, params, rows, temperature, True)
  entropy = tiny.gather(scores.entropy, rows, drawn.length)
  np.testing.assert_allclose(drawn.entropy, entropy, atol=1e-5)
  logp = tiny.gather(scores.logp, rows, drawn.length)
  assert len(set(drawn.length.ravel())) > 3  # ragged
  assert np.any(drawn.finish == engines.ENDED)
  np.testing.assert_allclose(drawn.logp, logp, atol=1e-5)
  np.testing.assert_array_equal(drawn.log_kept, 0)


def test_lengths_ends_and_padding():
  drawn = engine().generate(requests())
  past = np.arange(16) >= drawn.length[:, :, None]
  for field in (drawn.tokens, drawn.logp, drawn.log_kept, drawn.entropy):
    assert not np.any(field[past])
  is_end = np.isin(drawn.tokens, EOS) & ~past
  ended = drawn.finish == engines.ENDED
  np.testing.assert_array_equal(is_end.sum(-1), ended)
  last = np.take_along_axis(is_end, drawn.length[..., None] - 1, -1)[..., 0]
  np.testing.assert_array_equal(last, ended)  # the end token is inside
  assert set(drawn.tokens[is_end]) <= set(EOS)
  assert len(set(drawn.tokens[is_end])) > 1
  assert np.all(drawn.length[~ended] == 12) and np.all(drawn.version == 5)


def test_no_two_steps_prompts_or_completions_share_noise():
  """The same prompt everywhere: what differs is the noise alone."""
  same = [[1, 2, 3]] * 4
  made = engine()
  drawn = [
    made.generate(requests(ENDLESS, same, index, rollout=rollout))
    for rollout, index in ((0, range(4)), (1, range(4)), (0, range(4, 8)))
  ]
  rows = np.concatenate([d.tokens.reshape(-1, 16) for d in drawn])
  assert len(np.unique(rows, axis=0)) == len(rows) == 48
  # Nor do positions share it: no row repeats one token throughout.
  assert all(len(set(row)) > 3 for row in rows)


def test_noise_does_not_depend_on_the_company():
  """Another order, another batch, turns of two prompts: the same tokens."""
  prompts = tiny.ragged(prompts=4)[0]
  whole = engine().generate(requests(prompts=prompts))
  order = [2, 0, 3, 1]
  shuffled = engine().generate(
    requests(prompts=[prompts[i] for i in order], index=order)
  )
  np.testing.assert_array_equal(shuffled.tokens, whole.tokens[order])
  turns = engine(max_rows=8).generate(requests(prompts=prompts))
  np.testing.assert_array_equal(turns.tokens, whole.tokens)
  alone = engine().generate(requests(prompts=prompts[1:2], index=[1]))
  np.testing.assert_array_equal(alone.tokens, whole.tokens[1:2])


def test_a_cache_is_no_longer_than_the_window_of_its_layer():
  kinds = models.LayerKind(3), models.LayerKind(None)
  model = tiny.model(pattern=kinds)
  sampler = sampler_lib.Sampler(model, PLAIN, group=2)
  prompts = sampler_lib.Prompts(
    jnp.ones((1, 6), jnp.int32),
    jnp.array([6]),
    jnp.array([0]),
    jax.random.key(0),
  )
  params = engines.sampler_params(model, tiny.params(model))
  rows, _ = jax.eval_shape(
    lambda p, given, most: sampler.prefill(p, given, most, 8),
    params,
    prompts,
    jnp.array(8),
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
    lambda key: engines.sampler_params(model, model.init(key)),
    jax.random.key(0),
  )
  kinds = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    kinds.setdefault(leaf.dtype.name, set()).add(sharding.path_names(path)[-1])
  assert kinds['float32'] == {'scale', 'router'}
  assert kinds['bfloat16'] >= {'embedding', 'head', 'query', 'down'}


def test_two_engines_are_bitwise_equal():
  first, second = (engine().generate(requests()) for _ in range(2))
  for a, b in zip(first, second, strict=True):
    np.testing.assert_array_equal(a, b)


def test_sampling_in_turns_pads_the_last_turn():
  prompts = tiny.ragged(prompts=4)[0]
  whole = engine().generate(requests(prompts=prompts))
  turns = engine(max_rows=8).generate(requests(prompts=prompts[:3]))
  np.testing.assert_array_equal(turns.tokens, whole.tokens[:3])
  assert turns.tokens.shape[0] == 3


def test_the_loop_ends_when_all_rows_have():
  """With every token an end token nothing is decoded; so few as need be."""
  every = engines.Sampling(max_tokens=16, eos_ids=tuple(range(40)))
  drawn, generation = decoded(engine(), requests(every))
  assert np.all(drawn.length == 1) and generation.clock == 0
  drawn, generation = decoded(engine(), requests())
  assert generation.clock == drawn.length.max() - 1 < 12


def test_padding_does_not_prolong_the_loop():
  """A row that fills the last turn has ended before it starts."""
  few = engines.Sampling(max_tokens=16, eos_ids=tuple(range(20)))
  asked = requests(few, prompts=tiny.ragged(prompts=3)[0])
  drawn, generation = decoded(engine(max_rows=8), asked)
  assert generation.clock == drawn.length[2].max() - 1
  assert drawn.length[2].max() < drawn.length.max() < 16


@pytest.mark.long
@pytest.mark.quick
def test_a_mesh_changes_no_token_and_decoding_gathers_no_parameter():
  model = small_model()
  prompts = tiny.ragged(prompts=3)[0]  # does not split over 4 shards
  plain = engine(model).generate(requests(prompts=prompts))
  made = engine(model, mesh=sharding.make_mesh(2, 2, 2))
  spread = made.generate(requests(prompts=prompts))
  np.testing.assert_array_equal(spread.tokens, plain.tokens)
  np.testing.assert_allclose(spread.logp, plain.logp, atol=1e-5)
  specs = {x.sharding.spec for x in jax.tree.leaves(made._params)}
  axes = {axis for spec in specs for axis in spec if axis is not None}
  assert axes == {'tensor'}


def test_caches_stay_split_over_rows_and_heads():
  """From the prompts on, while decoding, and after rows were dropped."""
  prompts = tiny.ragged(prompts=16)[0]
  options = engines.Sampling(max_tokens=12, eos_ids=tuple(range(4)))
  made = engine(mesh=sharding.make_mesh(2, 2, 2), max_rows=32)
  _, (generation,) = made._asked(requests(options, prompts))
  sizes = set()
  for _ in generation.run():
    rows = generation.rows
    sizes.add(rows.last.shape[0])
    for cache in jax.tree.leaves((rows.cache, rows.prompt_cache)):
      whole, part = cache.shape, cache.sharding.shard_shape(cache.shape)
      assert part == (whole[0] // 4, whole[1] // 2, *whole[2:])
  assert len(sizes) > 1


def test_greedy_equals_the_teacher_forced_argmax():
  model = small_model()
  params = tiny.params(model)
  greedy = engines.Sampling(max_tokens=8, temperature=0.0)
  asked = requests(greedy, group=1)
  drawn = engine(model, params).generate(asked)
  tokens = drawn.tokens
  for place in range(8):
    rows = []
    for token in range(40):
      changed = tokens.copy()
      changed[:, :, place] = token
      rows.append(changed)
    best = []
    for changed in rows:
      lay = layout.padded_rows(
        asked.prompts, changed[..., :8], np.full((4, 1), 8), 16
      )
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
  drawn = engine().generate(requests(options))
  assert drawn.length.min() >= 7
  inside = np.arange(16) < drawn.length[:, :, None]
  assert np.all(drawn.log_kept[inside] < 0)


def test_stop_strings_end_after_the_token_that_completes_them():
  decode = lambda ids: ' '.join(str(int(i)) for i in ids)
  made = engine(decode=decode)
  free = made.generate(requests(ENDLESS))
  stop = str(int(free.tokens[0, 0, 4]))
  cut = made.generate(
    requests(dataclasses.replace(ENDLESS, stop_strings=(stop,)))
  )
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
    engine().generate(
      requests(dataclasses.replace(ENDLESS, stop_strings=('7',)))
    )


@pytest.mark.parametrize('stops', [(), ('7', '12')], ids=['ends', 'stops'])
def test_completions_that_have_ended_are_told_while_others_go_on(stops):
  told, calls = {}, []

  def finished(prompt, completion, ids, finish):
    place = prompt, completion
    assert place not in told
    told[place] = ids.tolist(), finish, len(calls)

  made = engine(
    max_rows=8,
    decode=lambda ids: ' '.join(str(int(i)) for i in ids),
    between=lambda: calls.append(None),
  )
  asked = requests(dataclasses.replace(PLAIN, stop_strings=stops))
  drawn = made.generate(asked._replace(finished=finished))
  assert set(told) == set(np.ndindex(drawn.length.shape))
  for place, (ids, finish, _) in told.items():
    assert ids == drawn.tokens[place][: drawn.length[place]].tolist()
    assert finish == drawn.finish[place]
  at = [call for *_, call in told.values()]
  assert min(at) < len(calls) and len(set(at)) > 2
  assert bool(stops) == (engines.STOPPED in drawn.finish)
  calls.clear()
  again = made.generate(asked)
  np.testing.assert_array_equal(again.tokens, drawn.tokens)


@pytest.mark.parametrize('stop, length', [('a', 1), ('c', 3), ('de', 5)])
def test_a_stop_string_may_end_at_any_token_of_a_completion(stop, length):
  ids = np.array([[[1, 2, 3, 4, 5, 0]]])
  nothing = np.zeros(ids.shape, np.float32)
  whole = engines.Completions(
    ids, np.array([[5]]), nothing, nothing, ids, np.array([[0]]), nothing
  )
  decode = lambda ids: ''.join(' abcde'[i] for i in ids)
  cut = arrays._stop_at_strings(whole, (stop,), decode)
  assert cut.length == length and cut.finish == engines.STOPPED
  inside = np.arange(6) < length
  np.testing.assert_array_equal(cut.tokens, np.where(inside, ids, 0))


def test_a_stream_reports_every_token():
  made = engine()
  *_, whole = reports = list(made.stream(requests()))
  longest = [so_far.length.max() for so_far in reports]
  assert longest == list(range(1, 13))
  for streamed, drawn in zip(whole, made.generate(requests()), strict=True):
    np.testing.assert_array_equal(streamed, drawn)


def test_loading_copies_so_that_donation_is_safe():
  model = small_model()
  params = tiny.params(model)
  made = engine(model, params)
  jax.tree.map(lambda x: x.delete(), params)
  assert made.generate(requests()).tokens.shape == (4, 4, 16)


@pytest.mark.parametrize(
  'dtype, mesh, same',
  [
    ('float32', 1, {'embedding', 'head', 'final_norm'}),
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
  read = made._params
  assert read.keys() == {'embedding', 'head', 'final_norm', 'layers'}
  found = {
    name
    for name in read.keys() - {'layers'}
    if jax.tree.all(jax.tree.map(lambda x, y: x is y, read[name], params[name]))
  }
  assert found == same
  drawn = made.generate(requests())
  whole = engine(model, params, mesh=mesh).generate(requests())
  np.testing.assert_array_equal(drawn.tokens, whole.tokens)
  # Single layers are copies in any case.
  made.unload()
  jax.tree.map(lambda x: x.delete(), params)


@pytest.mark.parametrize(
  'prompts, words', [([[1], []], 'empty'), ([[1] * 9], 'largest bucket')]
)
def test_impossible_prompts_are_refused(prompts, words):
  with pytest.raises(ValueError, match=words):
    engine().generate(requests(prompts=prompts))


def test_an_engine_without_parameters_says_so():
  made = engines.LocalEngine(tiny.model(), 0, (8,), (16,))
  with pytest.raises(ValueError, match='call load first'):
    made.generate(requests())
