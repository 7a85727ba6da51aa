"""Accelerators' attention over rows: the portable one's value and gradient."""

import dataclasses
import functools
import re

import jax
from jax._src.cudnn import fused_attention_stablehlo
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import config
from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.mesh import shards
from grpo_jax.models import attention
from grpo_jax.models import kernels
from grpo_jax.models import layout
from grpo_jax.models import scores
from grpo_jax.models import stack
from grpo_jax.models.kernels.rows import BlocksMask
from tests import tiny
from tests import trees
from tests.models.lowering import lowered

pytestmark = pytest.mark.quick

ROWS = {
  'packed': layout.packed_rows(*tiny.ragged(), 41, share=False),
  'padded': layout.padded_rows(*tiny.ragged(), 15),
  'shared': layout.shared_prompt(*tiny.ragged(), 8),
  'long': layout.shared_prompt(*tiny.ragged(tokens=45), 9),  # several tiles
}


_, _, LENGTH = tiny.ragged(tokens=12)
WHOLE = dict(
  slots=layout.whole_trees(
    LENGTH, trees.random_trees(np.random.default_rng(0), LENGTH, 12, 0.5)
  )
)
TREES = {
  'packed trees': layout.packed_rows(*tiny.ragged(tokens=12), 41, **WHOLE),
  'padded trees': layout.padded_rows(*tiny.ragged(tokens=12), 21, **WHOLE),
  'shared trees': layout.shared_prompt(*tiny.ragged(tokens=12), 8, **WHOLE),
}
ROWS |= TREES


def qkv(rows, dtype=jnp.float32, heads=4, kv_heads=2, size=8):
  rng = np.random.default_rng(0)
  shape = rows.tokens.shape
  return tuple(
    jnp.asarray(rng.standard_normal((*shape, n, size)), dtype)
    for n in (heads, kv_heads, kv_heads)
  )


SINKS = jnp.array([-0.5, 2.0, 0.3, 1.0])


def value_and_gradient(rows, implementation, window, cap=None, sinks=None):
  run = attention.over_layout(rows, implementation, interpret=True)
  used = (rows.segment > 0)[:, :, None, None]

  def loss(query, key, value, sinks):
    more = {} if sinks is None else {'sinks': sinks}
    found, _ = run(query, key, value, None, window, cap, **more)
    output = jnp.where(used, found, 0)
    return jnp.sum(jnp.sin(output) * jnp.cos(output.shape[1] + output)), output

  which = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
  return jax.jit(jax.grad(loss, which, has_aux=True))(*qkv(rows), sinks)


@pytest.mark.parametrize(
  'name, implementation, window',
  [
    ('packed', 'splash', 3),
    ('long', 'splash', None),
    ('shared', 'splash', 3),
    ('padded', 'cudnn', None),
    ('shared', 'cudnn', 3),
    ('packed trees', 'cudnn', 3),
    ('padded trees', 'cudnn', None),
    ('shared trees', 'cudnn', 3),
    *(
      pytest.param(*row, marks=pytest.mark.long)
      for row in (
        ('packed', 'splash', None),
        ('packed', 'cudnn', 3),
        ('padded', 'cudnn', 3),
        ('shared', 'cudnn', None),
        ('packed trees', 'cudnn', None),
        ('padded trees', 'cudnn', 3),
        ('shared trees', 'cudnn', None),
      )
    ),
  ],
)
def test_rows_have_the_portable_value_and_gradient(
  name, implementation, window
):
  got = value_and_gradient(ROWS[name], implementation, window)
  expected = value_and_gradient(ROWS[name], 'xla', window)
  tiny.assert_trees_close(got, expected, 2e-6)


@pytest.mark.parametrize(
  'name, implementation, window',
  [
    ('long', 'splash', None),
    pytest.param('packed', 'splash', 3, marks=pytest.mark.long),
    ('shared', 'splash', 3),  # which is left to the portable code
    ('shared', 'cudnn', None),  # likewise
  ],
)
def test_sinks_take_of_the_softmax_whatever_computes_it(
  name, implementation, window
):
  got = value_and_gradient(ROWS[name], implementation, window, sinks=SINKS)
  expected = value_and_gradient(ROWS[name], 'xla', window, sinks=SINKS)
  tiny.assert_trees_close(got, expected, 2e-6)
  (*_, of_sinks), output = expected
  assert np.abs(of_sinks).min() > 1e-2
  plain = value_and_gradient(ROWS[name], 'xla', window)[1]
  assert np.abs(output - plain).max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize(
  'name, window, context',
  [('shared', None, 2), ('packed', None, 2), ('packed', 3, 4)],
)
def test_rows_that_are_cut_have_the_value_and_gradient_of_whole_ones(
  name, window, context
):
  """Each device has the queries of one part, and a mask of its own."""
  rows = ROWS[name]
  columns = 128 * context  # each part is a tile
  rows = stack.pad_to(
    rows, *rows.completion.shape, rows.completion.size, columns
  )
  mesh = sharding.make_mesh(context=context, tensor=2)
  whole, cut = jax.P(), jax.P(None, 'context')
  of_rows = dict.fromkeys(('tokens', 'position', 'segment', 'parent'), cut)
  others = dict.fromkeys(('column', 'target', 'completion'), whole)
  specs = dataclasses.replace(rows, **of_rows, **others)
  used = (rows.segment > 0)[:, :, None, None]

  def of_part(rows, *arrays):
    run = attention.over_layout(rows, 'splash', interpret=True)
    return run(*arrays, None, window, None)[0]

  def loss(*arrays):
    with sharding.use(mesh):
      run = shards.call(of_part, (specs, cut, cut, cut), cut)
      output = jnp.where(used, run(rows, *arrays), 0)
    return jnp.sum(jnp.sin(output) * jnp.cos(output.shape[1] + output)), output

  given = jax.device_put(qkv(rows), sharding.replicated(mesh))
  got = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*given)
  masked = dataclasses.replace(rows, blocks=None)  # for columns behind blocks
  expected = value_and_gradient(masked, 'xla', window)
  tiny.assert_trees_close(got, expected, 2e-6)


@pytest.mark.parametrize(
  'name, window',
  [('packed', 3), pytest.param('shared', None, marks=pytest.mark.long)],
)
def test_scores_under_a_cap_have_the_portable_value_and_gradient(name, window):
  got = value_and_gradient(ROWS[name], 'splash', window, cap=0.5)
  expected = value_and_gradient(ROWS[name], 'xla', window, cap=0.5)
  tiny.assert_trees_close(got, expected, 2e-6)
  free = value_and_gradient(ROWS[name], 'xla', window)
  assert np.max(np.abs(free[1] - expected[1])) > 1e-2


def test_cudnn_has_no_cap(monkeypatch):
  with pytest.raises(ValueError, match='attention_cap=30.0'):
    models.ModelConfig(
      1, attention='cudnn', compute_dtype='bfloat16', attention_cap=30.0
    )
  # Nor where 'auto' would choose it.
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(kernels, 'cudnn', lambda *_: 'cudnn')
  run = attention.over_layout(ROWS['shared'], 'auto')
  arrays = qkv(ROWS['shared'], jnp.bfloat16)
  assert run(*arrays, None, None) == ('cudnn', None)
  output, _ = run(*arrays, None, None, 0.5)
  assert output.shape == arrays[0].shape


def test_the_mask_of_blocks_is_that_of_the_segments():
  prompts, tokens, _ = tiny.ragged()
  full = np.full(tokens.shape[:2], tokens.shape[2])
  rows = layout.shared_prompt([[1] * 5] * len(prompts), tokens, full, 5)
  segment, parent = rows.segment[0], rows.parent[0]
  related = segment[:, None] == segment[None]
  related |= parent[:, None] == segment[None]
  columns = segment.size
  expected = related & np.tri(columns, dtype=bool)
  mask = BlocksMask(rows.blocks, columns, columns)
  np.testing.assert_array_equal(mask[:, :], expected)
  tile = mask[3:17, 10:20]
  np.testing.assert_array_equal(tile, expected[3:17, 10:20])


@pytest.mark.parametrize(
  'name, implementation, platform',
  [
    (name, *where)
    for name in ('packed', 'padded', 'long')
    for where in (('splash', 'tpu'), ('cudnn', 'cuda'))
  ]
  + [(name, 'cudnn', 'cuda') for name in TREES],
)
def test_rows_are_lowered_with_their_gradient(
  name, implementation, platform, monkeypatch
):
  # What cuDNN would answer on a GPU; JAX asks while it traces.
  library = fused_attention_stablehlo
  monkeypatch.setattr(library, 'check_cudnn_version', lambda: 91000)
  monkeypatch.setattr(library, 'check_compute_capability', lambda _: True)
  rows = ROWS[name]
  run = attention.over_layout(rows, implementation)

  def loss(*arrays):
    return jnp.sum(run(*arrays, None, None)[0].astype(jnp.float32))

  arrays = qkv(rows, jnp.bfloat16, 14, 2, 64)
  text = lowered(jax.grad(loss, (0, 1, 2)), arrays, platform)
  if platform == 'tpu':
    assert text.count('tpu_custom_call') >= 3  # forward, dq, dkv
  else:
    biased = 'ScaleBias' if name == 'packed' or name in TREES else ''
    calls = {f'fmha{biased}Softmax', f'fmha{biased}SoftmaxBackward'}
    assert set(re.findall(r'__cudnn\$(\w+)', text)) == calls


def test_each_device_does_its_own_rows_and_heads():
  mesh = sharding.make_mesh(2, 2, 2)
  rows, given = ROWS['padded'], qkv(ROWS['padded'])
  assert rows.tokens.shape[0] % 4 == 0
  used = (rows.segment > 0)[:, :, None, None]

  def run(*arrays, implementation):
    attend = attention.over_layout(rows, implementation, interpret=True)
    return jnp.where(used, attend(*arrays, None, None)[0], 0)

  expected = jax.jit(functools.partial(run, implementation='xla'))(*given)
  given = jax.device_put(given, sharding.rows(mesh))
  for implementation in ('splash', 'cudnn'):

    def on_mesh(*arrays, implementation=implementation):
      with sharding.use(mesh):
        return run(*arrays, implementation=implementation)

    got = jax.jit(on_mesh)(*given)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    text = str(jax.make_jaxpr(on_mesh)(*given))
    assert text.count('shard_map[') == 1
    # A fourth of the rows, half of the heads.
    assert re.search(r'f32\[3,1[56],1,8\]', text)


@pytest.mark.parametrize(
  'backend, name, window, dtype, chosen',
  [
    ('cpu', 'shared', None, jnp.bfloat16, 'xla'),
    ('tpu', 'shared', None, jnp.float32, 'splash'),
    ('tpu', 'shared', 3, jnp.float32, 'xla'),
    ('tpu', 'packed', 3, jnp.bfloat16, 'splash'),
    ('tpu', 'shared trees', None, jnp.bfloat16, 'xla'),
    ('tpu', 'padded trees', 3, jnp.bfloat16, 'xla'),
    ('gpu', 'shared', 3, jnp.bfloat16, 'cudnn'),
    ('gpu', 'shared trees', 3, jnp.bfloat16, 'cudnn'),
    ('gpu', 'packed', None, jnp.float32, 'xla'),
    ('gpu', 'wide', None, jnp.bfloat16, 'xla'),
  ],
)
def test_auto_chooses(backend, name, window, dtype, chosen, monkeypatch):
  # A long prompt with short completions: unfolding would cost too much.
  wide = layout.shared_prompt(*tiny.ragged(group=8), 100)
  rows = {**ROWS, 'wide': wide}[name]
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  for name in ('splash', 'cudnn'):
    monkeypatch.setattr(kernels, name, lambda *_, name=name, **__: name)
  for name in ('_over_blocks', '_over_segments'):
    monkeypatch.setattr(attention, name, lambda *_: lambda *_: ('xla', None))
  run = attention.over_layout(rows, 'auto')
  assert run(*qkv(rows, dtype), None, window) == (chosen, None)


@pytest.mark.parametrize('tokens, suited', [(8, False), (9, True)])
def test_cudnn_suits_rows_that_unfold_into_four_times_the_work(tokens, suited):
  """Work is counted in pairs of a query and a key, masked ones included."""
  prompt, group = 100, 8
  unfolded = group * (prompt + tokens) ** 2
  # Each completion's queries see the prompt, and prompts need not see them.
  folded = prompt**2 + group * ((prompt + tokens) ** 2 - prompt**2)
  assert (unfolded <= 4 * folded) == suited
  rows = dataclasses.replace(
    ROWS['shared'], blocks=layout.Blocks(prompt, group, tokens)
  )
  query = jax.ShapeDtypeStruct((1, 1, 1, 64), jnp.bfloat16)
  assert kernels.cudnn_suits(query, rows.blocks) == suited


def test_the_config_says_which(monkeypatch):
  asked = []

  def over_layout(rows, implementation, forward_mode):
    assert not forward_mode
    asked.append(implementation)
    return attention.over_layout(rows)

  monkeypatch.setattr(scores, 'over_layout', over_layout)
  model = tiny.model(attention='splash')
  jax.eval_shape(lambda p: models.score(model, p, ROWS['padded']), {
    **jax.eval_shape(model.init, jax.random.key(0))
  })  # fmt: skip
  assert asked == ['splash']
  assert config.Model().attention == models.ModelConfig(1).attention == 'auto'
  assert config.is_free('model.attention', config.Config())
  for changes, problem in (
    (dict(attention='flash'), "attention='flash' is none of"),
    (dict(attention='cudnn'), "compute_dtype='float32'"),
  ):
    with pytest.raises(ValueError, match=problem):
      models.ModelConfig(1, **changes)


@pytest.mark.skipif(
  jax.default_backend() == 'cpu',
  reason='needs a TPU or a GPU: JAX_PLATFORMS=tpu (or cuda) pytest -n 0',
)
@pytest.mark.parametrize('name', ['packed', 'padded', 'long'])
def test_on_the_device_itself(name):
  """What the other tests can only lower, run."""
  rows, arrays = ROWS[name], qkv(ROWS[name], jnp.bfloat16, 14, 2, 64)
  used = (rows.segment > 0)[:, :, None, None]

  def gradient(implementation):
    def loss(*arrays):
      run = attention.over_layout(rows, implementation)
      output = run(*arrays, None, None)[0].astype(jnp.float32)
      return jnp.sum(jnp.where(used, jnp.sin(output), 0))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)

  best = {'tpu': 'splash', 'gpu': 'cudnn'}[jax.default_backend()]
  wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
  tiny.assert_trees_close(wide(gradient(best)), wide(gradient('xla')), 0.03)
