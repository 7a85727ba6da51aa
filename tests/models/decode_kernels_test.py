"""The decoding kernels against the portable version, and lowered from here."""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.models import kernels
from grpo_jax.models import softmax
from grpo_jax.models.kernels import decode
from tests.models.lowering import lowered

pytestmark = pytest.mark.quick

DECODE = {'tpu': ('TPU', decode.on_tpu), 'cuda': ('GPU', decode.on_gpu)}
# B, Q, H, K, D, N: heads that share lanes, that fill them, and odd sizes.
SIZES = [
  (4, 3, 14, 2, 64, 70),
  (3, 1, 6, 2, 128, 32),
  (2, 9, 8, 4, 24, 21),
  (3, 2, 3, 1, 16, 5),
]


def ring(sizes, dtype=jnp.float32, seed=0):
  rows, queries, heads, kv_heads, size, places = sizes
  rng = np.random.default_rng(seed)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  count = rng.integers(1, places + 4, (rows, queries))
  count[0, 0] = 0
  count[1:] = np.minimum(count[1:], 1 + places // 4)  # some blocks unseen
  return (
    normal(rows, queries, heads, size),
    normal(rows, places, kv_heads, size),
    normal(rows, places, kv_heads, size),
    jnp.asarray(rng.integers(0, places, rows), jnp.int32),
    jnp.asarray(count, jnp.int32),
  )


portable = jax.jit(kernels.attend_recent)  # on a CPU


def by_xla(query, key, value, newest, count):
  key, value = jnp.moveaxis(key, 1, 3), jnp.moveaxis(value, 1, 2)
  return softmax.attend_recent(query, key, value, newest, count)


def test_the_portable_version_follows_the_definition():
  arrays = ring((3, 2, 2, 1, 4, 6))
  got = jax.device_get(portable(*arrays))
  query, key, value, newest, count = jax.device_get(arrays)
  for b, q, h in np.ndindex(3, 2, 2):
    seen = [j for j in range(6) if (newest[b] - j) % 6 < count[b, q]]
    mass = np.exp(key[b, seen, 0] @ query[b, q, h] / 2)
    if not seen:
      assert not np.any(got.output[b, q]) and np.all(got.log_mass[b, q] < -1e29)
      continue
    np.testing.assert_allclose(
      got.output[b, q, h], mass @ value[b, seen, 0] / mass.sum(), atol=1e-5
    )
    np.testing.assert_allclose(
      got.log_mass[b, q, h], np.log(mass.sum()), atol=1e-5
    )


@pytest.mark.parametrize('platform', DECODE)
@pytest.mark.parametrize(
  'sizes',
  [
    SIZES[0],
    SIZES[2],
    pytest.param(SIZES[1], marks=pytest.mark.long),
    pytest.param(SIZES[3], marks=pytest.mark.long),
  ],
)
def test_decode_kernels_are_the_portable_version(sizes, platform, monkeypatch):
  letters, kernel = DECODE[platform]
  monkeypatch.setattr(decode, f'_{letters}_KEYS', 16)
  monkeypatch.setattr(decode, f'_{letters}_QUERIES', 16)
  arrays = ring(sizes)
  compared(kernel, portable, arrays)


@pytest.mark.parametrize('platform', DECODE)
def test_scores_under_a_cap_are_the_portable_ones(platform):
  arrays = ring(SIZES[1])
  capped = functools.partial(DECODE[platform][1], cap=0.5)
  with_cap = jax.jit(functools.partial(kernels.attend_recent, cap=0.5))
  compared(capped, with_cap, arrays)
  free, bound = portable(*arrays).log_mass, with_cap(*arrays).log_mass
  assert np.max(np.abs(free - bound)) > 0.1


def compared(kernel, portable, arrays):
  got = jax.jit(functools.partial(kernel, interpret=True))(*arrays)
  expected = portable(*arrays)
  for x, y in zip(got, expected, strict=True):
    assert x.shape == y.shape and x.dtype == y.dtype
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('platform', DECODE)
def test_blocks_that_nobody_sees_are_not_read(platform, monkeypatch):
  letters, kernel = DECODE[platform]
  monkeypatch.setattr(decode, f'_{letters}_KEYS', 16)
  # The first sees from place 32 on, where a block begins.
  newest, count = np.array([37, 40, 4, 9]), np.array([6, 20, 30, 0])
  places = 70
  query, key, value, *_ = ring((4, 2, 4, 2, 16, places))
  place = np.arange(places)
  seen = (newest[:, None] - place) % places < count[:, None]
  read = np.stack([np.isin(place // 16, place[row] // 16) for row in seen])
  assert (~read).any(axis=1).all()
  rest = newest, np.stack([count, count // 2], axis=1)
  expected = portable(query, key, value, *rest)
  broken = (jnp.where(read[:, :, None, None], x, jnp.nan) for x in (key, value))
  got = jax.jit(functools.partial(kernel, interpret=True))(
    query, *broken, *rest
  )
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


def called(kernel, arrays, monkeypatch):
  """The options of `pallas_call`, and what the kernel then gets."""
  calls, call = [], pl.pallas_call

  def watched(*args, **options):
    run = call(*args, **options)
    return lambda *given: calls.append((options, given)) or run(*given)

  with monkeypatch.context() as patch:
    patch.setattr(pl, 'pallas_call', watched)
    kernel(*arrays, interpret=True)
  (found,) = calls
  return found


@pytest.mark.parametrize(
  'heads, size, width',
  [(4, 64, 128), pytest.param(2, 128, 128, marks=pytest.mark.long)],
)
def test_as_many_heads_as_fill_the_lanes_are_read(
  heads, size, width, monkeypatch
):
  arrays = ring((2, 1, heads, heads, size, 16))
  options, _ = called(decode.on_tpu, arrays, monkeypatch)
  _, query, key, value = options['grid_spec'].in_specs
  for spec in query, key, value:
    assert spec.block_shape[-1] == width


@pytest.mark.parametrize('platform', DECODE)
def test_every_block_lies_in_its_array(platform, monkeypatch):
  """Interpreted, a block past the end is moved inside; on a device it is not.

  The keys of a GPU are read by the kernel itself, which masks them.
  """
  letters, kernel = DECODE[platform]
  monkeypatch.setattr(decode, f'_{letters}_KEYS', 16)
  monkeypatch.setattr(decode, f'_{letters}_QUERIES', 16)
  arrays = ring((2, 5, 8, 2, 64, 40))
  options, given = called(kernel, arrays, monkeypatch)
  grid = options.get('grid_spec')
  first = grid.num_scalar_prefetch if grid else 0
  part = vars(grid) if grid else options
  specs = [*part['in_specs'], *part['out_specs']]
  whole = [*given[first:], *options['out_shape']]
  for spec, array in zip(specs, whole, strict=True):
    numbers = [
      -(-size // edge) if edge else size
      for size, edge in zip(array.shape, spec.block_shape, strict=True)
    ]
    for place in np.ndindex(*part['grid']):
      block = np.asarray(spec.index_map(*place, *given[:first]))
      assert np.all((0 <= block) & (block < numbers)), (spec, place, block)


def test_the_gpu_kernel_masks_what_it_reads(monkeypatch):
  """Interpreted, a read past the end stays inside; on a GPU it does not."""
  masks, load = [], decode.plgpu.load

  def watched(ref, mask=None, other=None):
    masks.append(mask)
    return load(ref, mask=mask, other=other)

  monkeypatch.setattr(decode.plgpu, 'load', watched)
  jax.eval_shape(decode.on_gpu, *ring(SIZES[0]))
  assert [mask.shape for mask in masks] == [(64, 64)] * 2


def test_interpret_names_the_tpu_kernel_and_bfloat16_stays():
  arrays = ring(SIZES[0], jnp.bfloat16)
  got = jax.jit(lambda *a: kernels.attend_recent(*a, interpret=True))(*arrays)
  expected = portable(*arrays)
  assert got.output.dtype == jnp.bfloat16
  assert got.log_mass.dtype == jnp.float32
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(
      x.astype(jnp.float32), y.astype(jnp.float32), atol=0.02
    )


CALLS = {'tpu': 'tpu_custom_call', 'cuda': 'xla.gpu.triton'}
# JAX 0.12 warns of its Triton backend; see `kernels.decode`.
deprecated_triton = pytest.mark.filterwarnings(
  'ignore:The Pallas Triton backend is deprecated:DeprecationWarning'
)


@deprecated_triton
@pytest.mark.parametrize(
  'sizes, dtype',
  [
    ((3, 8, 14, 2, 64, 1536), jnp.bfloat16),
    (SIZES[2], jnp.float32),
    *(
      pytest.param(*row, marks=pytest.mark.long)
      for row in (
        ((3, 8, 14, 2, 64, 1536), jnp.float32),
        (SIZES[2], jnp.bfloat16),
      )
    ),
  ],
)
def test_decode_is_lowered_for_each_platform(sizes, dtype):
  arrays = ring(sizes, dtype)
  run = lambda *arrays: kernels.attend_recent(*arrays)
  for platform in ('tpu', 'cuda', 'cpu'):
    text = lowered(run, arrays, platform)
    found = {p for p, call in CALLS.items() if call in text}
    assert found == {platform} & set(CALLS)


@deprecated_triton
def test_on_cuda_large_heads_are_left_to_the_portable_version():
  run = lambda *arrays: kernels.attend_recent(*arrays)
  for size, kernel in (256, True), (512, False):
    arrays = ring((3, 1, 4, 1, size, 64), jnp.bfloat16)
    text = lowered(run, arrays, 'cuda')
    assert (CALLS['cuda'] in text) == kernel
    assert CALLS['tpu'] in lowered(run, arrays, 'tpu')


@pytest.mark.parametrize(
  'rows, kv_heads, share',
  [
    (4, 2, '1,10,1,16'),
    # What does not split over 4 shards of rows and 2 of heads stays whole.
    (4, 3, '1,10,3,16'),
    (6, 2, '6,10,1,16'),
    pytest.param(4, 1, '1,10,1,16', marks=pytest.mark.long),
  ],
)
def test_each_device_does_its_own_rows_and_heads(rows, kv_heads, share):
  mesh = sharding.make_mesh(2, 2, 2)
  given = ring((rows, 3, 2 * kv_heads, kv_heads, 16, 10))
  expected = portable(*given)
  given = jax.device_put(given, sharding.replicated(mesh))

  def on_mesh(*arrays):
    with sharding.use(mesh):
      return kernels.attend_recent(*arrays)

  for x, y in zip(jax.jit(on_mesh)(*given), expected, strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6)
  text = str(jax.make_jaxpr(on_mesh)(*given))
  assert 'shard_map[' in text and f'f32[{share}]' in text


@deprecated_triton
@pytest.mark.parametrize('platform', CALLS)
def test_a_devices_share_is_lowered(platform):
  arrays = ring((4, 3, 4, 2, 16, 10))
  run = lambda *arrays: kernels.attend_recent(*arrays)
  text = lowered(run, arrays, platform, data=2, fsdp=2, tensor=2)
  assert CALLS[platform] in text and 'tensor<1x10x1x16xf32>' in text


@pytest.mark.skipif(
  jax.default_backend() == 'cpu',
  reason='needs a TPU or a GPU: JAX_PLATFORMS=tpu (or cuda) pytest -n 0',
)
def test_on_the_device_itself():
  """What the other tests can only lower, run."""
  arrays = ring((3, 8, 14, 2, 64, 1536), jnp.bfloat16)
  got = jax.jit(lambda *a: kernels.attend_recent(*a))(*arrays)
  for x, y in zip(got, by_xla(*arrays), strict=True):
    np.testing.assert_allclose(
      x.astype(jnp.float32), y.astype(jnp.float32), atol=0.03
    )
