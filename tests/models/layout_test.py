"""Three layouts of the same completions say the same of them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import layout
from grpo_jax.models import stack
from tests import tiny
from tests import trees
from tests.chosen import chosen


def build(kind, prompts, tokens, length):
  if kind == 'shared':
    return layout.shared_prompt(prompts, tokens, length, 9)
  if kind == 'packed':
    return layout.packed_rows(prompts, tokens, length, 30)
  if kind == 'copied':
    return layout.packed_rows(prompts, tokens, length, 30, share=False)
  return layout.padded_rows(prompts, tokens, length, 16)


@functools.cache
def scores_and_gradient(kind, is_fancy, group=4):
  model = tiny.model(**(tiny.FANCY if is_fancy else {}))
  prompts, tokens, length = tiny.ragged(group=group)
  rows = build(kind, prompts, tokens, length)

  def loss(params):
    scores = tiny.score(model, params, rows, 0.7, models.Wanted(entropy=True))
    logp = tiny.gather(scores.logp, rows, length)
    entropy = tiny.gather(scores.entropy, rows, length)
    return jnp.sum(jnp.sin(logp)) + jnp.sum(entropy), (logp, entropy)

  return jax.jit(jax.grad(loss, has_aux=True))(tiny.params(model))


@pytest.mark.parametrize(
  'kind, is_fancy, group',
  [
    pytest.param('packed', True, 4, marks=pytest.mark.long),
    pytest.param('shared', True, 4, marks=pytest.mark.long),
    pytest.param('shared', False, 1, marks=pytest.mark.long),
    pytest.param('packed', False, 1, marks=pytest.mark.long),
    pytest.param('copied', True, 4, marks=pytest.mark.long),
    pytest.param('packed', False, 4, marks=pytest.mark.long),
    ('shared', False, 4),
  ],
)
def test_layouts_agree_with_padded_rows(kind, is_fancy, group):
  gradient, scores = scores_and_gradient(kind, is_fancy, group)
  expected, expected_scores = scores_and_gradient('padded', is_fancy, group)
  assert np.abs(expected_scores[0]).max() > 1
  tiny.assert_trees_close(scores, expected_scores)
  tiny.assert_trees_close(gradient, expected)


def test_scores_are_those_of_one_sequence_at_a_time():
  """Against the plainest way: one prompt, one completion, all positions."""
  model = tiny.model()
  params = tiny.params(model)
  prompts, tokens, length = tiny.ragged()
  rows = build('shared', prompts, tokens, length)
  logp = tiny.gather(tiny.score(model, params, rows).logp, rows, length)

  @jax.jit  # of one shape: what follows a token cannot change it
  def plain(ids, size):
    causal = models.attention.over_prompts(size[None])
    place = jnp.arange(ids.size)[None]
    hidden, _ = model.hidden(model.unstack(params), ids[None], place, causal)
    return jax.nn.log_softmax(model.head(params, hidden)[0])

  for p, g in np.ndindex(length.shape):
    ids = np.array([*prompts[p], *tokens[p, g, : length[p, g]]])
    everything = np.asarray(
      plain(np.pad(ids, (0, 16 - ids.size)), np.array(ids.size))
    )
    first = len(prompts[p])
    expected = [everything[i - 1, ids[i]] for i in range(first, ids.size)]
    np.testing.assert_allclose(
      logp[p, g, : length[p, g]], np.array(expected), atol=2e-5
    )


def test_packing_saves_rows_and_loses_nothing():
  prompts, tokens, length = tiny.ragged(prompts=5)
  padded = build('padded', prompts, tokens, length)
  copied = build('copied', prompts, tokens, length)
  packed = build('packed', prompts, tokens, length)
  sizes = [rows.tokens.shape[0] for rows in (packed, copied, padded)]
  assert sizes == sorted(set(sizes))
  assert np.sum(copied.segment > 0) == np.sum(padded.segment > 0)
  assert (packed.parents, copied.parents, padded.parents) == (
    True,
    False,
    False,
  )
  # Every token once; a prompt once in each row that holds some of its group.
  assert np.sum(packed.parent > 0) == np.sum(length)
  rows_of = [
    set(np.nonzero(packed.completion // 4 == p)[0].tolist()) for p in range(5)
  ]
  copies = sum(len(r) * len(ids) for r, ids in zip(rows_of, prompts))
  assert np.sum((packed.parent == 0) & (packed.segment > 0)) == copies
  for rows in (packed, copied):
    seen = np.sort(rows.completion[rows.completion < 20])
    np.testing.assert_array_equal(seen, np.arange(20))


@pytest.mark.parametrize(
  'share, room, rows',
  [(True, 8, 1), (True, 7, 2), (False, 10, 1), (False, 9, 2)],
)
def test_what_fits_exactly_opens_no_row(share, room, rows):
  """A prompt of two tokens and two completions of three."""
  tokens, length = np.ones((1, 2, 3), np.int32), np.array([[3, 3]])
  packed = layout.packed_rows([[1, 2]], tokens, length, room, share)
  assert packed.tokens.shape == (rows, room)
  # Of two groups too: their bundles are put into rows apart.
  twice = np.repeat(tokens, 2, 0), np.repeat(length, 2, 0)
  packed = layout.packed_rows([[1, 2]] * 2, *twice, 2 * room, share)
  assert packed.tokens.shape[0] == rows


def test_segments_do_not_see_each_other():
  """Changing one packed completion changes no other's scores."""
  model = tiny.model()
  params = tiny.params(model)
  prompts, tokens, length = tiny.ragged()
  other = tokens.copy()
  other[1, 2] = (other[1, 2] + 1) % 40
  for kind in ('packed', 'shared'):
    before, after = (
      tiny.gather(tiny.score(model, params, rows).logp, rows, length)
      for rows in (
        build(kind, prompts, tokens, length),
        build(kind, prompts, other, length),
      )
    )
    changed = np.abs(np.asarray(before - after)).max(-1) > 0
    expected = np.zeros_like(changed)
    expected[1, 2] = True
    np.testing.assert_array_equal(changed, expected)


def test_many_short_completions_in_a_row():
  """Fewer columns than slots for tokens: the columns are scored instead."""
  model = tiny.model()
  params = tiny.params(model)
  prompts, tokens, length = tiny.ragged(tokens=20)
  length = np.minimum(length, 3)
  packed = layout.packed_rows(prompts, tokens, length, 40)
  slots = packed.completion.shape[1]
  assert packed.tokens.shape[1] < slots * 20
  padded = layout.padded_rows(prompts, tokens, length, 16)
  got, expected = (
    tiny.gather(tiny.score(model, params, rows).logp, rows, length)
    for rows in (packed, padded)
  )
  np.testing.assert_allclose(got, expected, atol=1e-5)


def test_padding_rows_slots_and_columns_changes_nothing():
  model = tiny.model()
  params = tiny.params(model)
  prompts, tokens, length = tiny.ragged()
  rows = build('packed', prompts, tokens, length)
  wide = stack.pad_to(
    rows,
    rows.tokens.shape[0] + 3,
    rows.completion.shape[1] + 2,
    length.size,
    columns=7,
  )
  assert wide.tokens.shape[1] % 7 == 0 != rows.tokens.shape[1] % 7
  plain, padded = (
    tiny.gather(tiny.score(model, params, x).logp, x, length)
    for x in (rows, wide)
  )
  np.testing.assert_allclose(padded, plain, atol=1e-5)


@pytest.mark.parametrize(
  'rows, row_tokens, shards, expected',
  [
    (4, 160, 1, 4),
    (8, 544, 1, 2),
    (9, 544, 1, 3),
    (8, 1088, 1, 2),
    (3, 9999, 1, 1),
  ]
  + [(9, 544, 2, 6), (1, 10, 4, 4)],
)
def test_micro_batches_suit_the_device(rows, row_tokens, shards, expected):
  spec = layout.LayoutSpec('auto', 0, micro_tokens=2048, shards=shards)
  assert spec.rows_of(row_tokens, rows) == expected
  given = dataclasses.replace(spec, micro_rows=7)
  assert given.rows_of(row_tokens, rows) == 7


@pytest.mark.parametrize('kind', ['padded', 'packed', 'shared'])
def test_what_does_not_fit_is_refused(kind):
  prompts, tokens, length = tiny.ragged()
  with pytest.raises(ValueError, match='largest bucket'):
    build(kind, [prompts[0], [1] * 40, prompts[2]], tokens, length)
  with pytest.raises(ValueError, match='Prompt 1 is empty'):
    build(kind, [prompts[0], [], prompts[2]], tokens, length)


def of_trees(kind, prompts, tokens, length, slots):
  if kind == 'shared':
    return layout.shared_prompt(prompts, tokens, length, 9, slots=slots)
  if kind in ('packed', 'copied'):
    return layout.packed_rows(
      prompts, tokens, length, 30, kind == 'packed', slots=slots
    )
  return layout.padded_rows(prompts, tokens, length, 16, slots=slots)


def slots_of(rng, length, previous, whole, cut):
  """Each tree in one slot, or in some, or in more than it needs."""
  if whole:
    return layout.whole_trees(length, previous)
  slots = layout.slots_of_trees(length, previous)
  return trees.cut(rng, slots) if cut else slots


def scored(rows, length):
  """bool[R,C,T], which tokens are scored in a slot."""
  if rows.inside is not None:
    return np.asarray(rows.inside)
  size = np.append(length.reshape(-1), 0)[rows.completion]
  return np.arange(rows.target.shape[-1]) < size[..., None]


def read_by(rows, r, column):
  """What the token in a column reads, itself last: (ids, positions)."""
  own, parent = rows.segment[r, column], rows.parent[r, column]
  seen = np.isin(rows.segment[r], [own, parent] if parent else [own])
  seen &= rows.position[r] <= rows.position[r, column]
  if rows.reach is not None:
    back = column - np.arange(rows.reach.shape[1])
    seen = (back >= 0) & (back <= rows.reach[r])
  order = np.argsort(rows.position[r, seen], kind='stable')
  return rows.tokens[r, seen][order], rows.position[r, seen][order]


@pytest.mark.quick
@pytest.mark.parametrize('branches', [0.0, 0.3, 0.9])
def test_behind_a_token_come_those_that_have_read_it(branches):
  rng = np.random.default_rng(3)
  for size in (*range(30), 200):
    previous = trees.random_tree(rng, size, branches)
    column, depth, reach = layout.order_tree(previous)
    assert sorted(column) == [*range(size)]
    paths = [trees.path(previous, place) for place in range(size)]
    assert [len(path) - 1 for path in paths] == depth.tolist()
    for place in range(size):
      readers = sorted(column[n] for n in range(size) if place in paths[n])
      first = column[place]
      assert readers == [*range(first, first + reach[place] + 1)]
    if not branches:
      np.testing.assert_array_equal(column, np.arange(size))


@pytest.mark.quick
@pytest.mark.parametrize('whole', [False, True])
@pytest.mark.parametrize('kind', ['padded', 'packed', 'copied', 'shared'])
def test_every_token_of_a_tree_is_scored_once_behind_what_it_follows(
  kind, whole
):
  rng = np.random.default_rng(7)
  for seed in range(40):
    prompts, tokens, length = tiny.ragged(seed)
    tokens = rng.permutation(tokens.size).reshape(tokens.shape)  # all differ
    previous = trees.random_trees(rng, length, tokens.shape[-1])
    slots = slots_of(rng, length, previous, whole, cut=seed % 2)
    rows = of_trees(kind, prompts, tokens.astype(np.int32), length, slots)
    times = np.zeros((length.size, tokens.shape[-1]), int)
    inside = scored(rows, length)
    for r, c, t in np.argwhere(inside):
      p, g = divmod(rows.completion[r, c], length.shape[1])
      times[rows.completion[r, c], t] += 1
      assert rows.target[r, c, t] == tokens[p, g, t]
      ids, positions = read_by(rows, r, rows.column[r, c, t])
      before = trees.path(previous[p, g], t)[:-1]
      assert ids.tolist() == [*prompts[p], *tokens[p, g, before]]
      np.testing.assert_array_equal(positions, np.arange(len(ids)))
    once = np.arange(tokens.shape[-1]) < length.reshape(-1, 1)
    np.testing.assert_array_equal(times, once)
    assert not np.any(rows.target[~inside])
    if whole:  # as without branches: each token in one column, in as many rows
      assert rows.first is None and rows.count is None
      lines = of_trees(kind, prompts, tokens.astype(np.int32), length, None)
      for name in ('segment', 'parent', 'completion', 'target'):
        np.testing.assert_array_equal(getattr(rows, name), getattr(lines, name))
      at = np.argwhere(inside)
      own = rows.own[tuple(at.T)]
      assert len({*zip(at[:, 0], own)}) == length.sum()
      np.testing.assert_array_equal(
        rows.tokens[at[:, 0], own], rows.target[tuple(at.T)]
      )


def test_a_tree_has_as_few_slots_as_there_are_branches():
  length = np.array([[5, 4, 0]], np.int32)
  previous = np.array([[[-1, 0, 1, 0, 3], [-1, 0, -1, 1, 0], [0] * 5]])
  slots = layout.slots_of_trees(length, previous.astype(np.int32))
  assert [slot[:3] for slot in slots] == [
    (0, 0, 3), (0, 3, 2), (1, 0, 2), (1, 2, 1), (1, 3, 1), (2, 0, 0),
  ]  # fmt: skip
  contexts = [slot.context.tolist() for slot in slots]
  assert contexts == [[], [0], [], [], [0, 1], []]
  for bad in ([-1, 2, 1], [-1, 0, -2], [0, 0, 1]):
    with pytest.raises(AssertionError):
      layout.slots_of_trees(np.array([[3]]), np.array([[bad]]))


def test_a_chosen_token_in_no_slot_or_in_two_is_noticed():
  length = np.array([[4, 3]], np.int32)
  by_policy = np.arange(5) < length[..., None]
  layout.check_slots(by_policy, length, None)
  with pytest.raises(AssertionError):
    layout.check_slots(np.ones_like(by_policy), length, None)
  whole = [layout.Slot(0, 0, 4, np.zeros(0, int))]
  other = layout.Slot(1, 0, 3, np.zeros(0, int))
  layout.check_slots(by_policy, length, [*whole, other])
  for slots in (
    whole,
    [*whole, other, other],
    [*whole, other._replace(count=2)],
  ):
    with pytest.raises(AssertionError):
      layout.check_slots(by_policy, length, slots)
  # What nobody chose may be scored in none.
  by_policy[0, 0, 2] = False
  halves = [whole[0]._replace(count=2), whole[0]._replace(first=3, count=1)]
  layout.check_slots(by_policy, length, [*halves, other])


TREE_MODEL = tiny.model(num_layers=1)


@jax.jit
def of_rows(params, ids, size):
  """f32[N,V]: log-probabilities behind each of N rows, one by one."""
  causal = models.attention.over_prompts(size)
  place = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
  hidden, _ = TREE_MODEL.hidden(TREE_MODEL.unstack(params), ids, place, causal)
  last = jnp.take_along_axis(hidden, (size - 1)[:, None, None], axis=1)
  return jax.nn.log_softmax(TREE_MODEL.head(params, last)[:, 0])


@pytest.mark.parametrize(
  'kind, whole',
  chosen(
    itertools.product(('padded', 'packed', 'copied', 'shared'), (False, True)),
    {('packed', False), ('packed', True), ('shared', True)},
  ),
)
def test_a_token_of_a_tree_has_the_score_of_a_row_by_itself(kind, whole):
  params, rng = tiny.params(TREE_MODEL), np.random.default_rng(8)
  for seed in range(6):
    prompts, tokens, length = tiny.ragged(seed)
    width = tokens.shape[-1]
    previous = trees.random_trees(rng, length, width)
    slots = slots_of(rng, length, previous, whole, cut=seed % 2)
    rows = of_trees(kind, prompts, tokens, length, slots)
    rows = stack.pad_to(rows, 40, 16, length.size, 1)  # one program
    logp = tiny.score(TREE_MODEL, params, rows).logp
    found, inside = np.zeros((length.size, width)), scored(rows, length)
    for r, c, t in np.argwhere(inside):
      found[rows.completion[r, c], t] += logp[r, c, t]
    places = np.argwhere(np.arange(width) < length[..., None])
    ids, size = np.zeros((72, 16), np.int32), np.ones(72, np.int32)
    for n, (p, g, t) in enumerate(places):
      before = trees.path(previous[p, g], t)[:-1]
      read = [*prompts[p], *tokens[p, g, before]]
      ids[n, : len(read)], size[n] = read, len(read)
    expected = np.asarray(of_rows(params, ids, size))
    for n, (p, g, t) in enumerate(places):
      np.testing.assert_allclose(
        found[p * length.shape[1] + g, t],
        expected[n, tokens[p, g, t]],
        atol=1e-5,
      )
