"""Layers that keep a state: the same in all layouts, and nothing leaks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import attention
from grpo_jax.models import layout
from grpo_jax.models import states
from tests import tiny
from tests import trees
from tests.models import meshed

MODEL = tiny.model(**tiny.STATES)
KINDS = 'packed', 'copied', 'shared'


def rows_of(kind, *rollout, slots=None):
  if kind == 'shared':
    return layout.shared_prompt(*rollout, 9, slots=slots)
  if kind == 'padded':
    return layout.padded_rows(*rollout, 16, slots=slots)
  share = kind == 'packed'
  return layout.packed_rows(*rollout, 30, share=share, slots=slots)


@functools.cache
def differentiated(kind):
  """A gradient, and the log-probabilities."""
  prompts, tokens, length = tiny.ragged()
  rows = rows_of(kind, prompts, tokens, length)

  def loss(params):
    logp = tiny.gather(tiny.score(MODEL, params, rows).logp, rows, length)
    return jnp.sum(jnp.sin(logp)), logp

  with jax.default_matmul_precision('highest'):
    return jax.jit(jax.grad(loss, has_aux=True))(tiny.params(MODEL))


@pytest.mark.parametrize('kind', KINDS)
def test_layouts_agree_with_padded_rows(kind):
  gradient, logp = differentiated(kind)
  expected, expected_logp = differentiated('padded')
  assert np.abs(expected_logp).max() > 1
  tiny.assert_trees_close(logp, expected_logp)
  tiny.assert_trees_close(gradient, expected)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    assert np.any(leaf), path  # the states matter


@pytest.mark.parametrize('kind', [*KINDS, 'padded'])
def test_branches_read_copies(kind):
  """Each run of tokens as behind the prompt and all that it has read."""
  prompts, tokens, length = tiny.ragged()
  rng, width = np.random.default_rng(1), tokens.shape[-1]
  previous = trees.random_trees(rng, length, width, 0.5)
  slots = layout.slots_of_trees(length, previous)
  assert len(slots) > length.size
  rows = rows_of(kind, prompts, tokens, length, slots=slots)
  alone = [
    (slot, trees.path(previous[divmod(slot.completion, 4)], slot.first + i))
    for slot in slots
    for i in range(slot.count)
  ]
  lines = np.zeros((len(alone), 1, width), np.int32)
  for line, (slot, path) in zip(lines, alone, strict=True):
    line[0, : len(path)] = tokens[divmod(slot.completion, 4)][path]
  sizes = np.array([[len(path)] for _, path in alone])
  own = layout.padded_rows(
    [prompts[slot.completion // 4] for slot, _ in alone], lines, sizes, 16
  )
  params = tiny.params(MODEL)
  with jax.default_matmul_precision('highest'):
    logp = np.asarray(tiny.score(MODEL, params, rows).logp)
    expected = np.asarray(tiny.score(MODEL, params, own).logp)
  last = np.take_along_axis(expected[:, 0], sizes - 1, axis=1)[:, 0]
  found = np.zeros(tokens.shape).reshape(-1, width)
  inside = np.asarray(rows.inside)
  for at in np.argwhere(inside):
    found[np.asarray(rows.completion)[tuple(at[:2])], at[2]] = logp[tuple(at)]
  where = [(slot.completion, path[-1]) for slot, path in alone]
  tiny.assert_trees_close(np.array([found[x] for x in where]), last)


@pytest.mark.parametrize('kind', KINDS)
def test_nothing_leaks_over_the_border_of_a_segment(kind):
  """Other tokens in one completion change no bit of the others."""
  prompts, tokens, length = tiny.ragged()
  params, found = tiny.params(MODEL), []
  for changed in (tokens, np.array(tokens)):
    if changed is not tokens:
      changed[1, 1] = (changed[1, 1] + 7) % 40
    rows = rows_of(kind, prompts, changed, length)
    logp = tiny.gather(tiny.score(MODEL, params, rows).logp, rows, length)
    found.append(np.array(logp))
  one, other = found
  assert np.all(one[1, 1, : length[1, 1]] != other[1, 1, : length[1, 1]])
  one[1, 1] = other[1, 1]
  np.testing.assert_array_equal(one, other)


def read(tokens, attend, cache=None):
  """Hidden states and the caches, behind some tokens at once."""
  params = MODEL.unstack(tiny.params(MODEL))
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)

  @jax.jit
  def hidden(params, tokens, positions, cache):
    return MODEL.hidden(params, tokens, positions, attend, cache)

  return hidden(params, tokens, positions, cache)


def test_what_stands_in_the_padding_changes_no_bit_of_a_state():
  length = jnp.array([3, 7, 1])
  tokens = np.random.default_rng(0).integers(0, 40, (3, 7)).astype(np.int32)
  is_padding = np.arange(7) >= np.asarray(length)[:, None]
  other = np.where(is_padding, (tokens + 5) % 40, tokens)
  first, second = (
    read(x, attention.over_prompts(length))[1] for x in (tokens, other)
  )
  for kind, one, two in zip(MODEL.config.kinds, first, second, strict=True):
    if kind.mixer != 'attention':
      for a, b in zip(one, two, strict=True):
        assert np.any(a)
        np.testing.assert_array_equal(a, b)


def test_what_is_kept_of_a_row_has_the_bytes_that_are_planned():
  lengths = attention.over_prompts(jnp.array([3, 7]))
  for dtype in 'float32', 'bfloat16':
    model = tiny.model(**tiny.STATES, compute_dtype=dtype)
    made = jax.eval_shape(
      lambda model=model: model.hidden(
        model.unstack(tiny.params(model)),
        jnp.zeros((2, 7), jnp.int32),
        jnp.zeros((2, 7), jnp.int32),
        lengths,
      )
    )[1]
    for kind, layer in zip(model.config.kinds, made, strict=True):
      size = sum(x.size * x.dtype.itemsize for x in layer)
      if kind.mixer != 'attention':
        assert models.state_bytes(model.config, kind) == size // 2 > 0
      else:
        assert not models.state_bytes(model.config, kind)


def test_more_keys_cost_only_layers_with_attention():
  assert MODEL.key_cost == tiny.model().key_cost / 4


@pytest.mark.parametrize(
  'mesh, kind',
  [
    # The two key heads lie on two parts of each row.
    (dict(fsdp=2, context=2, tensor=2), 'shared'),
    pytest.param(dict(context=2, fsdp=4), 'packed', marks=pytest.mark.long),
    # They do not divide.
    (dict(context=4, data=2), 'packed'),
    pytest.param(dict(context=8), 'padded', marks=pytest.mark.long),
    pytest.param(dict(fsdp=8), 'packed', marks=pytest.mark.long),
    pytest.param(dict(tensor=8), 'shared', marks=pytest.mark.long),
  ],
)
def test_one_gradient_on_one_device_and_on_eight(mesh, kind):
  model = tiny.model(**tiny.STATES, vocab_size=64)
  params = tiny.params(model)
  expected = meshed.differentiated(model, params, dict(data=1), kind)
  found = meshed.differentiated(model, params, mesh, kind)
  np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
  tiny.assert_trees_close(found.grads, expected.grads)


def test_rows_begin_go_on_or_stay_as_they_are():
  """Whatever a cache holds where a row begins, and where nothing is new."""
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  start, count = jnp.array([0, 3, 3]), jnp.array([2, 2, 0])
  over = states.over_contexts(start, count)
  x, taps, full = drawn(3, 4, 6), drawn(3, 6), drawn(3, 2, 6)
  found = []
  for kept in full, jnp.zeros_like(full):
    (last,) = over.load([kept])
    output, last = over.convolve(x, taps, last)
    found.append((output, *over.store([last], [kept])))
  (one, its), (other, others) = found
  np.testing.assert_array_equal(one[0, :2], other[0, :2])
  assert np.all(one[1, :2] != other[1, :2])
  for row in 0, 1:  # the two that are new
    np.testing.assert_array_equal(its[row], x[row, :2])
    np.testing.assert_array_equal(others[row], x[row, :2])
  np.testing.assert_array_equal(its[2], full[2])


def test_a_state_begins_goes_on_or_stays_as_it_is():
  rng = np.random.default_rng(0)
  drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  over = states.over_contexts(jnp.array([0, 3, 3]), jnp.array([2, 2, 0]))
  arrays = drawn(3, 4, 2, 6), drawn(3, 4, 2, 6), drawn(3, 4, 4, 5)
  arrays += jax.nn.sigmoid(drawn(3, 4, 4)), -jnp.exp(drawn(3, 4, 4))
  full, found = drawn(3, 4, 6, 5), []
  for kept in full, jnp.zeros_like(full):
    (state,) = over.load([kept])
    output, state = over.recur(arrays, state)
    found.append((output, *over.store([state], [kept])))
  (one, its), (other, others) = found
  np.testing.assert_array_equal(one[0, :2], other[0, :2])
  np.testing.assert_array_equal(its[0], others[0])
  assert np.all(one[1, :2] != other[1, :2]) and np.all(its[1] != others[1])
  np.testing.assert_array_equal(its[2], full[2])
