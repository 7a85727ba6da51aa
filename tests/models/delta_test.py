"""The gated delta rule against its formulas, token by token in float64.

One test compares with transformers, and needs torch:

  pip install torch transformers
  pytest -m reference tests/models/delta_test.py
"""

import functools

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import delta
from grpo_jax.models import layout

CHUNK = 8
COLUMNS = 60  # most rows have as many, as every width is compiled
NAMES = 'query', 'key', 'value', 'rate', 'decay'
run = jax.jit(
  functools.partial(delta.recur, chunk=CHUNK), static_argnames='chunk'
)
usual = jax.jit(delta.recur)
step = jax.jit(delta.step)


def drawn(rows, columns, keys=1, heads=2, size=4, width=3, seed=0, fast=1.0):
  """Arguments of `recur` by name, and a state."""
  rng = np.random.default_rng(seed)
  shape = rows, columns
  arrays = dict(
    query=rng.normal(size=(*shape, keys, size)),
    key=rng.normal(size=(*shape, keys, size)),
    value=rng.normal(size=(*shape, heads, width)),
    rate=rng.uniform(size=(*shape, heads)),
    decay=-rng.uniform(0, fast, (*shape, heads)),
    state=rng.normal(size=(rows, heads, size, width)),
  )
  return {name: x.astype(np.float32) for name, x in arrays.items()}


def take(given, columns, **others):
  """The same arguments of some columns."""
  return {name: given[name][:, columns] for name in NAMES} | others


def expected(given, path=None, xp=np):
  """The formulas, one token after another: outputs, and the last state.

  A path has the state of its own segment, or that of the one it continues.
  """
  given = {name: xp.asarray(x, xp.float64) for name, x in given.items()}
  query, key, value, rate, decay = (given[name] for name in NAMES)
  rows, columns, heads, width = value.shape
  keys, size = key.shape[2:]
  query, key = (
    xp.repeat(
      x / xp.sqrt(xp.sum(x**2, -1, keepdims=True) + 1e-6), heads // keys, 2
    )
    for x in (query, key)
  )
  outputs, last = [], []
  for row in range(rows):
    state = given.get('state', xp.zeros((rows, heads, size, width)))[row]
    states, zeros = {}, xp.zeros((heads, size, width))
    for column in range(columns):
      at = row, column
      own, above = (int(x[at]) for x in path) if path else (1, 0)
      if not own:
        outputs.append(xp.zeros((heads, width)))
        continue
      begins = states[above] if above else zeros if path else state
      state = states.get(own, begins) * xp.exp(decay[at])[:, None, None]
      answer = xp.einsum('hde,hd->he', state, key[at])
      fix = rate[at][:, None] * (value[at] - answer)
      state = state + key[at][:, :, None] * fix[:, None]
      states[own] = state
      outputs.append(xp.einsum('hde,hd->he', state, query[at]) / size**0.5)
    last.append(state)
  outputs = xp.stack(outputs).reshape(rows, columns, heads, width)
  return outputs, xp.stack(last)


def error(found, wanted):
  """The largest error, relative to the largest entry."""
  assert found.shape == wanted.shape
  return np.abs(found - wanted).max() / np.abs(wanted).max()


def assert_near(found, wanted, most=2e-6):
  for mine, one in zip(found, wanted):
    assert error(mine, one) < most


def packed(*segments, columns=COLUMNS):
  """A `Path` of one row from (columns, parent) of its segments; None: padding.

  Segments are numbered from 1 as they come, without the padding. What is left
  of the row is padding too.
  """
  path, start, number = np.zeros((2, 1, columns), np.int32), 0, 0
  for width, above in segments:
    end = start + width
    if above is not None:
      number += 1
      path[:, 0, start:end] = [[number], [above]]
    start = end
  assert start <= columns
  return delta.Path(*path)


PATHS = {
  'one prompt': packed((COLUMNS, 0)),
  'borders inside chunks': packed((5, 0), (7, 0), (9, 0)),
  'a child in the chunk': packed((3, 0), (4, 1)),
  'children in the chunk': packed((2, 0), (2, 1), (2, 1), (1, 0), (1, 4)),
  'children in the next chunk': packed((6, 0), (3, 1), (4, 1), (5, 1)),
  'children chunks away': packed((5, 0), (30, 1), (21, 1), (3, 1)),
  'a prompt that ends at the border': packed((8, 0), (3, 1), (9, 1)),
  'a segment that ends at the border': packed((4, 0), (4, 1), (8, 1), (4, 0)),
  'a prompt of several chunks': packed((27, 0), (3, 1), (20, 1)),
  'several prompts': packed(
    (5, 0), (7, 1), (6, 1), (11, 0), (3, 4), (9, 4), (2, 0), (2, 7)
  ),
  'another prompt behind the chunk': packed((5, 0), (9, 1), (12, 0), (9, 3)),
  'single tokens': packed((1, 0), (1, 1), (1, 1), (1, 0), (1, 4), (9, 4)),
  'no padding behind': packed((5, 0), (40, 1), (15, 1)),
  'padding between': packed(
    (5, 0), (12, None), (3, 1), (6, None), (9, 1), (3, None)
  ),
  'padding in front': packed((11, None), (3, 0), (9, 1)),
  'children of a prompt before the last one': packed(
    (3, 0), (6, 0), (2, 2), (9, 2)
  ),
}


@pytest.mark.parametrize(
  'columns, keys', [(1, 1), (5, 2), (8, 1), (13, 2), (40, 4)]
)
def test_chunks_give_what_the_formulas_give(columns, keys):
  given = drawn(2, columns, keys=keys, heads=4)
  assert_near(run(**given), expected(given))


def test_chunks_of_the_usual_size():
  given = drawn(1, 130, size=8)
  assert_near(usual(**given), expected(given))


@pytest.mark.parametrize('keys', [1, 2])
def test_steps_give_what_the_formulas_give(keys):
  given = drawn(2, 9, keys=keys, heads=4)
  state, outputs = given['state'], []
  for column in range(9):
    output, state = step(**take(given, column), state=state)
    outputs.append(output)
  assert_near((np.stack(outputs, 1), state), expected(given))


def test_without_a_state_it_is_zero():
  given = drawn(1, 11)
  del given['state']
  zeros = np.zeros((1, 2, 4, 3), np.float32)
  for found, wanted in zip(run(**given), run(**given, state=zeros)):
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize('first', [8, 13])
def test_a_state_passed_on_continues_the_row(first):
  given = drawn(2, 30)
  begun, state = run(**take(given, slice(first), state=given['state']))
  ended, state = run(**take(given, slice(first, None), state=state))
  found = np.concatenate([begun, ended], 1), state
  assert_near(found, expected(given))


# Chunks of one size, with padding and without: others round otherwise.
@pytest.mark.parametrize('columns, padding', [(5, 3), (8, 8), (13, 20)])
def test_padding_leaves_the_state_to_the_bit(columns, padding):
  given = drawn(2, columns + padding)
  for name in ('rate', 'decay'):
    given[name][:, columns:] = 0
  kept = take(given, slice(columns), state=given['state'])
  np.testing.assert_array_equal(run(**given)[1], run(**kept)[1])
  alone = take(given, slice(columns, None), state=given['state'])
  np.testing.assert_array_equal(run(**alone)[1], given['state'])
  alone = take(given, columns, state=given['state'])
  np.testing.assert_array_equal(step(**alone)[1], given['state'])


@pytest.mark.parametrize('name', PATHS)
def test_segments_have_the_states_of_their_paths(name):
  path = PATHS[name]
  given = drawn(1, COLUMNS)
  assert_near(run(**given, path=path), expected(given, path))


def test_each_row_has_its_own_path():
  paths = [
    packed((5, 0), (11, 1), (9, 1), columns=30),
    packed((9, None), (21, 0), columns=30),
    packed((17, 0), (2, 0), (11, 2), columns=30),
  ]
  path = delta.Path(*(np.concatenate(x) for x in zip(*paths)))
  given = drawn(3, 30, keys=2, heads=4)
  assert_near(run(**given, path=path), expected(given, path))


@pytest.mark.parametrize('kind', ['packed', 'shared', 'padded'])
def test_paths_of_layouts_are_those_of_separate_rows(kind):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(1, 30, size).tolist() for size in (3, 10, 6)]
  tokens = rng.integers(1, 30, (3, 3, 7)).astype(np.int32)
  length = rng.integers(1, 8, (3, 3)).astype(np.int32)
  rows = {
    'packed': lambda: layout.packed_rows(prompts, tokens, length, 37),
    'shared': lambda: layout.shared_prompt(prompts, tokens, length, 12),
    'padded': lambda: layout.padded_rows(prompts, tokens, length, 20),
  }[kind]()
  table = drawn(1, 30, seed=1)
  given = {name: table[name][0][rows.tokens] for name in NAMES}
  found, _ = run(**given, path=delta.Path(rows.segment, rows.parent))
  number = 0
  for row, slot in np.ndindex(rows.completion.shape):
    p, g = divmod(int(rows.completion[row, slot]), 3)
    if p == len(prompts):
      continue
    own = tokens[p, g, : length[p, g]]
    ids = np.array([*prompts[p], *own])[None]
    wanted, _ = expected({name: table[name][0][ids] for name in NAMES})
    before = len(prompts[p]) - 1
    columns = rows.column[row, slot, : len(own)]
    read = found[row, columns]
    assert error(read, wanted[0, before:-1]) < 2e-6
    number += 1
  assert number == 9


@pytest.mark.parametrize('name', ['several prompts', 'padding between'])
def test_nothing_leaks_from_what_is_not_on_the_path(name):
  path = PATHS[name]
  given = drawn(1, COLUMNS)
  segment, parent = path.segment[0], path.parent[0]
  before = run(**given, path=path)[0][0]
  other = drawn(1, COLUMNS, seed=5, fast=9.0)
  for changed in range(segment.max() + 1):
    mixed = {
      name: np.where(
        (segment == changed).reshape(1, -1, *[1] * (given[name].ndim - 2)),
        other[name],
        given[name],
      )
      for name in NAMES
    }
    after = run(**mixed, path=path)[0][0]
    reads = (segment == changed) | (parent == changed)
    same = np.flatnonzero(~reads | (segment == 0))
    np.testing.assert_array_equal(after[same], before[same])
    if changed:
      assert (after != before)[reads].all()


@pytest.mark.parametrize('has_path', [False, True])
def test_the_gradient_is_that_of_the_formulas(has_path):
  path = None
  if has_path:
    segments = (3, 0), (6, 1), (2, None), (2, 1), (4, 0), (2, 4)
    path = packed(*segments, columns=20)
  given = drawn(1, 20 if has_path else 13)
  rng = np.random.default_rng(3)
  weights = [
    rng.normal(size=shape).astype(np.float32)
    for shape in (given['value'].shape, given['state'].shape)
  ]
  if path:  # with a path no state is read
    weights[1][:] = 0
    del given['state']

  def loss(recur, given):
    return sum(jnp.sum(x * w) for x, w in zip(recur(given), weights))

  found = jax.jit(
    jax.grad(lambda given: loss(lambda x: run(**x, path=path), given))
  )(given)
  with jax.enable_x64(True):
    doubled = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), given)
    wanted = jax.grad(
      lambda given: loss(lambda x: expected(x, path, jnp), given)
    )(doubled)
  for name in given:
    assert error(found[name], np.asarray(wanted[name])) < 5e-6, name


def test_only_the_arguments_are_kept_for_the_backward_pass():
  given = drawn(1, 64)
  kept = jax.eval_shape(lambda x: jax.vjp(lambda y: run(**y), x)[1], given)
  size = sum(x.size for x in jax.tree.leaves(kept))
  assert size <= sum(x.size for x in given.values())


def test_a_chunk_of_keys_that_are_all_the_same():
  """Powers of their products reach 1e17, which no inverse may be made of."""
  given = drawn(1, 130, size=8)
  given['key'][:] = given['key'][:, :1]
  given['rate'][:] = 1
  given['decay'][:] = 0
  assert_near(usual(**given), expected(given))


def test_heads_that_forget_fast_beside_tokens_that_do_not():
  given = drawn(1, 130, size=8)
  slow = np.arange(130) % 8 > 3
  given['decay'] = np.where(slow[:, None], 1e-3, 1) * given['decay'] * 400
  assert_near(usual(**given), expected(given))


def test_fast_decay_gives_no_infinities_nor_nans():
  given = drawn(1, 20, fast=1e4)
  outputs = run(**given)
  slopes = jax.grad(lambda x: jnp.sum(run(**x)[0]))(given)
  assert_near(outputs[:1], expected(given)[:1])
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))


def test_arguments_in_bfloat16():
  """What is rounded are the arguments and the output; all else is float32."""
  given = drawn(2, 40, keys=2, heads=4, size=16, width=16)
  half = {
    name: jnp.asarray(x, jnp.bfloat16) if name in NAMES[:4] else x
    for name, x in given.items()
  }
  rounded = {name: np.asarray(x, np.float32) for name, x in half.items()}
  outputs, state = run(**half)
  assert (outputs.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  wanted = expected(rounded)
  assert error(np.asarray(outputs, np.float32), wanted[0]) < 2**-8
  assert error(state, wanted[1]) < 2e-6
  exact = expected(given)
  norm = np.linalg.norm(np.asarray(outputs, np.float64) - exact[0])
  assert norm / np.linalg.norm(exact[0]) < 0.01
  output, state = step(**take(half, 0), state=half['state'])
  assert (output.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_one_trace_for_all_paths_of_a_shape():
  traces = []

  @jax.jit
  def traced(given, path):
    traces.append(1)
    return delta.recur(**given, path=path, chunk=CHUNK)

  for seed, name in enumerate(PATHS):
    traced(drawn(1, COLUMNS, seed=seed), PATHS[name])
  assert len(traces) == 1


def test_the_same_bits_each_time():
  path = PATHS['several prompts']
  given = drawn(1, COLUMNS)
  first, second = (run(**given, path=path)[0] for _ in range(2))
  np.testing.assert_array_equal(first, second)


def products(jaxpr):
  """The ranks of all arrays that are multiplied as matrices."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      yield from (x.aval.ndim for x in (*equation.invars, *equation.outvars))
    for inner in jax_core.jaxprs_in_params(equation.params):
      yield from products(inner)


def test_products_have_no_more_axes_than_a_cpu_can_pack():
  given, path = drawn(2, 20, heads=4), packed((9, 0), (11, 1), columns=20)
  path = delta.Path(*(np.repeat(x, 2, 0) for x in path))
  jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(run(**x, path=path)[0])))(
    given
  )
  ranks = list(products(jaxpr.jaxpr))
  assert len(ranks) > 100
  assert max(ranks) <= 5


def test_rows_and_heads_on_many_devices_need_nothing_of_each_other():
  kinds = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((4, 2), ('rows', 'heads'), axis_types=kinds)
  given = drawn(4, 20, keys=2, heads=4)
  given = {
    name: jax.device_put(
      x,
      jax.NamedSharding(
        mesh, jax.P('rows', *[None] * (name in NAMES), 'heads')
      ),
    )
    for name, x in given.items()
  }
  path = delta.Path(
    *(np.repeat(x, 4, 0) for x in packed((9, 0), (11, 1), columns=20))
  )
  path = jax.device_put(path, jax.NamedSharding(mesh, jax.P('rows')))
  slopes = jax.jit(
    jax.grad(lambda x, path: jnp.sum(run(**x, path=path)[0] ** 2))
  )
  text = slopes.lower(given, path).compile().as_text()
  for moved in ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute'):
    assert f' {moved}(' not in text
    assert f' {moved}-start(' not in text


@pytest.mark.reference
@pytest.mark.parametrize('columns', [1, 50, 64, 150])
def test_transformers_computes_what_we_do(columns):
  torch = pytest.importorskip('torch', reason='needs torch')
  theirs = pytest.importorskip(
    'transformers.models.qwen3_5.modeling_qwen3_5',
    reason='needs transformers 5',
  )
  given = drawn(2, columns, keys=4, heads=4, size=16, width=16)
  names = dict(rate='beta', decay='g', state='initial_state')
  told = {names.get(name, name): torch.tensor(x) for name, x in given.items()}
  told |= dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
  for reference in (
    theirs.torch_chunk_gated_delta_rule,
    theirs.torch_recurrent_gated_delta_rule,
  ):
    wanted = [x.numpy() for x in reference(**told)]
    assert_near(delta.recur(**given), wanted, 5e-6)
