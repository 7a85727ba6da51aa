"""Experts: equal to a loop over all experts, on one device and on eight."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.models import experts
from tests.chosen import chosen

NUMBER, PER_TOKEN, WIDTH, HIDDEN = 6, 2, 8, 12


def weights(number=NUMBER, seed=0):
  rng = np.random.default_rng(seed)
  shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
  shapes += (HIDDEN,), (HIDDEN,), (WIDTH,)
  return tuple(
    rng.normal(size=(number, *shape)).astype(np.float32) / 3 for shape in shapes
  )


def tokens(rows=8, length=5, number=NUMBER, skew=0.0, seed=1):
  """x f[B,Q,width], weight and chosen [B,Q,k]; skew: all choose the first."""
  rng = np.random.default_rng(seed)
  shape = rows, length
  x = rng.normal(size=(*shape, WIDTH)).astype(np.float32)
  liking = rng.random((*shape, number)) - skew * np.arange(number)
  chosen = np.argsort(-liking, axis=-1)[..., :PER_TOKEN].astype(np.int32)
  weight = rng.random((*shape, PER_TOKEN)).astype(np.float32)
  return x, weight, chosen


def gated(gate, up):
  return jax.nn.silu(gate) * up


def mixture(x, weight, chosen, *kernels, run=experts.mixture, **options):
  """`experts.mixture` of arrays: three weights, and three biases."""
  return run(
    x, weight, chosen, experts.Kernels(*kernels), gated=gated, **options
  )


def reference(x, weight, chosen, gate, up, down, *biases):
  """The same, one token and one expert at a time."""
  result = np.zeros_like(x)
  for place in np.ndindex(x.shape[:2]):
    for w, e in zip(weight[place], chosen[place], strict=True):
      of_gate, of_up, of_down = (bias[e] for bias in biases)
      inner = x[place] @ gate[e] + of_gate
      hidden = inner / (1 + np.exp(-inner)) * (x[place] @ up[e] + of_up)
      result[place] += w * (hidden @ down[e] + of_down)
  return result


def dense(x, weight, chosen, gate, up, down, *biases):
  """Every expert computes every token; for gradients."""
  of_gate, of_up, of_down = (bias[None, None] for bias in biases)
  hidden = jax.nn.silu(jnp.einsum('bqi,eio->bqeo', x, gate) + of_gate)
  hidden *= jnp.einsum('bqi,eio->bqeo', x, up) + of_up
  output = jnp.einsum('bqeo,eoi->bqei', hidden, down) + of_down
  taken = jax.nn.one_hot(chosen, gate.shape[0]) * weight[..., None]
  return jnp.einsum('bqke,bqei->bqi', taken, output)


CASES = [
  dict(ragged=True),
  dict(ragged=False),
  dict(ragged=False, skew=10.0),
  dict(ragged=True, skew=10.0),
  dict(ragged=False, rows=1, length=1),
  dict(ragged=False, rows=64, length=9),
]


@pytest.mark.parametrize('case', CASES, ids=str)
def test_values_are_those_of_one_token_at_a_time(case):
  case = dict(case)
  run = functools.partial(mixture, ragged=case.pop('ragged'))
  given = *tokens(**case), *weights()
  found = jax.jit(run)(*given)
  np.testing.assert_allclose(found, reference(*given), atol=1e-5)


@pytest.mark.parametrize(
  'share, rows', [(0, 8), (31, 8), (32, 16), (128, 64), (255, 64), (9000, 512)]
)
def test_a_block_has_at_most_half_an_even_share_and_8_to_512_rows(share, rows):
  assert experts._block(share * NUMBER, NUMBER) == rows


@pytest.mark.parametrize('ragged', [True, False])
def test_gradients_forwards_and_backwards_are_those_of_all_experts(ragged):
  x, weight, chosen = tokens()
  given = x, weight, *weights()

  def scalar(run):
    return lambda x, weight, *rest: jnp.sum(
      jnp.sin(run(x, weight, chosen, *rest))
    )

  run = functools.partial(mixture, ragged=ragged)
  every = tuple(range(8))
  found = jax.jit(jax.grad(scalar(run), every))(*given)
  expected = jax.jit(jax.grad(scalar(dense), every))(*given)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)
  _, along = jax.jvp(scalar(run), given, given)
  np.testing.assert_allclose(
    along, sum(np.sum(a * b) for a, b in zip(expected, given)), rtol=1e-4
  )


def test_where_it_is_promised_no_place_is_read_or_written_twice(monkeypatch):
  """On a GPU two such writes may lose one: a part of a gradient."""
  x, weight, chosen = tokens()
  few = weights(NUMBER // 2)  # some pairs' experts are not here
  seen = set()

  def watch(primitive):
    bind = primitive.bind

    def watched(to, index, *rest, **params):
      if params['unique_indices'] and not isinstance(index, jax.core.Tracer):
        assert len(np.unique(index, axis=0)) == len(index)
        seen.add(primitive)
      return bind(to, index, *rest, **params)

    monkeypatch.setattr(primitive, 'bind', watched)

  indexing = lax.gather_p, lax.scatter_p, lax.scatter_add_p
  for primitive in indexing:
    watch(primitive)

  def scalar(x):
    return jnp.sum(mixture(x, weight, chosen, *few, ragged=False))

  jax.grad(scalar)(x)
  assert seen == set(indexing)


@pytest.mark.parametrize(
  'backend, chosen', [('cpu', False), ('gpu', False), ('tpu', True)]
)
def test_ragged_products_are_for_tpus(backend, chosen, monkeypatch):
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  run = functools.partial(mixture)
  program = str(jax.make_jaxpr(run)(*tokens(), *weights()))
  assert ('ragged_dot' in program) == chosen


# Each way to multiply, one device's experts or all, at once and in pieces.
IN_THE_SUITE = {
  (True, 10.0, 1, 100),
  (False, 10.0, 1, 2**18),
  (False, -10.0, 6, 100),
}


@pytest.mark.parametrize(
  'ragged, skew, each, most',
  chosen(
    [
      (ragged, skew, each, most)
      for ragged in (True, False)
      for skew, each in ((0.0, 1), (10.0, 1), (-10.0, 6))
      for most in (2**18, 100)
    ],
    IN_THE_SUITE,
  ),
)
def test_the_parts_of_the_devices_add_up(ragged, skew, each, most, monkeypatch):
  """With skew all pairs are one device's: more than the usual room."""
  monkeypatch.setattr(experts, '_MOST_PAIRS', most)
  x, weight, chosen = tokens(skew=skew, rows=16, length=16)
  whole = weights()
  run = functools.partial(mixture, ragged=ragged, parts=6)

  @jax.jit
  def part(first):
    some = (lax.dynamic_slice_in_dim(one, first, each) for one in whole)
    return run(x, weight, chosen, *some, first=first)

  total = sum(part(first) for first in range(0, 6, each))
  np.testing.assert_allclose(
    total, reference(x, weight, chosen, *whole), atol=1e-4
  )


def test_tokens_fall_into_equal_pieces_of_few_pairs(monkeypatch):
  monkeypatch.setattr(experts, '_MOST_PAIRS', 100)
  found = [experts.pieces(n, 2, parts=6) for n in (1, 50, 51, 256, 53)]
  assert found == [1, 1, 3, 8, 53]
  assert experts.pieces(256, 2, parts=1) == 1


def of_part(most, monkeypatch, dtype='float32', parts=6):
  """Of one of six devices: what it adds, and the gradients, lowered."""
  monkeypatch.setattr(experts, '_MOST_PAIRS', most)
  x, weight, chosen = tokens(rows=16, length=16, skew=0.1)
  given = x.astype(dtype), weight, *(w[:3].astype(dtype) for w in weights())

  def scalar(x, weight, *rest):
    mixed = mixture(x, weight, chosen, *rest, parts=parts, ragged=False)
    return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

  run = jax.jit(jax.grad(scalar, tuple(range(8)), has_aux=True))
  return run.lower(*given), given


@pytest.mark.parametrize(
  'dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.long)]
)
def test_pieces_change_no_gradient(dtype, monkeypatch):
  whole, given = of_part(2**18, monkeypatch, dtype)
  pieces, _ = of_part(100, monkeypatch, dtype)
  error = 1e-5 if dtype == 'float32' else 2e-2
  both = whole.compile()(*given), pieces.compile()(*given)
  for one, other in zip(*map(jax.tree.leaves, both), strict=True):
    np.testing.assert_allclose(
      np.asarray(one, np.float32), np.asarray(other, np.float32),
      atol=error, rtol=error,
    )  # fmt: skip


def test_pieces_take_less_memory(monkeypatch):
  """A device has room for every pair of all tokens that it gets."""
  whole, pieces = (
    of_part(most, monkeypatch)[0].compile().memory_analysis()
    for most in (2**18, 100)
  )
  whole, pieces = whole.temp_size_in_bytes, pieces.temp_size_in_bytes
  assert pieces < 0.6 * whole


def test_a_device_with_all_experts_takes_all_tokens_at_once(monkeypatch):
  whole, pieces = (
    of_part(most, monkeypatch, parts=1)[0].as_text() for most in (2**18, 100)
  )
  assert whole == pieces


MESHES = [
  dict(expert=2),
  dict(expert=8),
  dict(data=2, expert=2, tensor=2),
  dict(fsdp=2, expert=4),
  dict(data=2, fsdp=2, tensor=2),
]


@pytest.mark.parametrize(
  'mesh, dtype, rows, number, most',
  # Three rows do not split over the devices, nor do six experts over four.
  [(MESHES[2], 'float32', 3, 8, 2**18), (MESHES[3], 'float32', 8, 6, 2**18)]
  # In several pieces.
  + [(MESHES[2], 'float32', 8, 8, 16)]
  + [
    pytest.param(*row, 8, 8, 2**18, marks=pytest.mark.long)
    for row in [
      *((mesh, 'float32') for mesh in MESHES),
      (MESHES[2], 'bfloat16'),
    ]
  ],
  ids=str,
)
def test_eight_devices_give_the_result_of_one(
  mesh, dtype, rows, number, most, monkeypatch
):
  monkeypatch.setattr(experts, '_MOST_PAIRS', most)
  x, weight, chosen = tokens(rows=rows, number=number)
  given = x.astype(dtype), weight, *(w.astype(dtype) for w in weights(number))

  def scalar(x, weight, *rest):
    mixed = mixture(x, weight, chosen, *rest, run=experts.over_devices)
    return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

  mesh = sharding.make_mesh(**mesh)

  def traced(*given):
    with sharding.use(mesh):
      return jax.grad(scalar, tuple(range(8)), has_aux=True)(*given)

  alone = jax.jit(jax.grad(scalar, tuple(range(8)), has_aux=True))(*given)
  spread = jax.device_put(given, sharding.replicated(mesh))
  found = jax.jit(traced)(*spread)
  error = 1e-5 if dtype == 'float32' else 0.05
  for one, other in zip(*map(jax.tree.leaves, (found, alone)), strict=True):
    other = np.asarray(other, np.float32)
    scale = max(1, np.abs(other).max())
    np.testing.assert_allclose(
      np.asarray(one, np.float32), other, atol=error * scale
    )
