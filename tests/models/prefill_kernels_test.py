"""Accelerators' attention over right-padded prompts, in the place of scores."""

import functools
import re

import jax
from jax._src.cudnn import fused_attention_stablehlo
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import engines
from grpo_jax.mesh import sharding
from grpo_jax.models import attention
from grpo_jax.models import kernels
from grpo_jax.models import layout
from grpo_jax.models import scores
from tests import drawing
from tests import tiny
from tests.models.lowering import lowered

pytestmark = pytest.mark.quick

# Of one token and of all; a batch is filled up with prompts of one token.
LENGTH = jnp.array([5, 1, 150, 128, 129, 1])
WIDTH = 150  # of no whole number of tiles
SCORES = r'tensor<[\dx]*512x512x\w+>'


def qkv(dtype=jnp.float32, heads=4, kv_heads=2, size=8, width=WIDTH):
  rng = np.random.default_rng(0)
  return tuple(
    jnp.asarray(rng.standard_normal((len(LENGTH), width, n, size)), dtype)
    for n in (heads, kv_heads, kv_heads)
  )


def run(implementation, arrays, window, cap=None, mesh=None, **sinks):
  def call(*arrays):
    with sharding.use(mesh):
      attend = attention.over_prompts(LENGTH, implementation, interpret=True)
      output, cache = attend(*arrays, None, window, cap, **sinks)
      # The caches lie in different orders.
      axes = attention.cache_axes(implementation).positions
      return output, [*map(jnp.moveaxis, cache, axes, (1, 1))]

  return jax.device_get(jax.jit(call)(*arrays))


@pytest.mark.parametrize(
  'implementation, window, cap',
  [
    ('splash', None, None),
    ('splash', 3, None),
    ('splash', 130, 0.5),
    ('cudnn', None, None),
    ('cudnn', 3, None),
    ('cudnn', None, 0.5),  # which cuDNN has not
  ],
)
def test_prompts_have_the_portable_output_and_cache(
  implementation, window, cap
):
  got, got_cache = run(implementation, qkv(), window, cap)
  expected, expected_cache = run('xla', qkv(), window, cap)
  inside = np.arange(WIDTH)[None] < LENGTH[:, None]
  np.testing.assert_allclose(got[inside], expected[inside], atol=2e-6)
  assert np.all(np.isfinite(got))
  for x, y in zip(got_cache, expected_cache, strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('implementation', ['splash', 'cudnn'])
def test_prompts_lose_to_sinks_whatever_computes_them(implementation):
  sinks = jnp.array([-0.5, 2.0, 0.3, 1.0])
  got, _ = run(implementation, qkv(), 3, sinks=sinks)
  expected, _ = run('xla', qkv(), 3, sinks=sinks)
  plain, _ = run('xla', qkv(), 3)
  inside = np.arange(WIDTH)[None] < LENGTH[:, None]
  np.testing.assert_allclose(got[inside], expected[inside], atol=2e-6)
  assert np.abs(plain - expected)[inside].max() > 0.1


@pytest.mark.parametrize('implementation', ['splash', 'cudnn'])
def test_what_stands_behind_a_prompt_is_not_seen(implementation):
  arrays = qkv()
  behind = (np.arange(WIDTH)[None] >= LENGTH[:, None])[..., None, None]
  others = [jnp.where(behind, 7.0, x) for x in arrays]
  got, expected = (run(implementation, x, None)[0] for x in (arrays, others))
  inside = ~behind[..., 0, 0]
  np.testing.assert_array_equal(got[inside], expected[inside])


def test_each_device_does_its_own_prompts_and_heads():
  mesh = sharding.make_mesh(2, 1, 2)
  expected, _ = run('xla', qkv(), None)
  inside = np.arange(WIDTH)[None] < LENGTH[:, None]
  given = jax.device_put(qkv(), sharding.rows(mesh))
  for implementation in ('splash', 'cudnn'):
    got, _ = run(implementation, given, None, mesh=mesh)
    np.testing.assert_allclose(got[inside], expected[inside], atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize(
  'changes',
  [{}, {**tiny.FANCY, 'num_layers': 3}, tiny.FANCY, tiny.ROUTED],
  ids=['plain', 'fancy', 'deep', 'sinks'],
)
def test_prefill_agrees_with_the_learner_whatever_computes_it(
  changes, monkeypatch
):
  """The prompt's last output and caches, then scores of what was drawn."""
  used, splash = [], kernels.splash
  monkeypatch.setattr(
    kernels, 'splash', lambda *x, **y: used.append(x) or splash(*x, **y)
  )
  for module, name in ((attention, 'over_prompts'), (scores, 'over_layout')):
    interpreted = functools.partial(getattr(module, name), interpret=True)
    monkeypatch.setattr(module, name, interpreted)
  model = tiny.model(**changes, attention='splash')
  params = tiny.params(model)
  prompts = tiny.ragged(prompts=4)[0]
  with jax.default_matmul_precision('highest'):
    engine = engines.LocalEngine(model, (4, 8), (8,))
    engine.load(params, version=0)
    drawn = drawing.completions(engine, prompts, limit=8, group=2)
    assert used
    rows = layout.padded_rows(prompts, drawn.tokens, drawn.length, 16)
    given = tiny.score(model, params, rows)
  logp = tiny.gather(given.logp, rows, drawn.length)
  np.testing.assert_allclose(drawn.logp, logp, atol=1e-5)


@pytest.mark.parametrize(
  'implementation, platform',
  [('auto', 'tpu'), ('auto', 'cuda'), ('xla', 'tpu')],
)
@pytest.mark.parametrize('window', [None, 100])
def test_no_scores_are_held(implementation, platform, window, monkeypatch):
  library = fused_attention_stablehlo
  # What cuDNN would answer on a GPU; JAX asks while it traces.
  monkeypatch.setattr(library, 'check_cudnn_version', lambda: 91000)
  monkeypatch.setattr(library, 'check_compute_capability', lambda _: True)

  def call(*arrays):
    attend = attention.over_prompts(LENGTH, implementation)
    return attend(*arrays, None, window)

  arrays = qkv(jnp.bfloat16, 14, 2, 64, width=512)
  text = lowered(call, arrays, platform)
  kernel = 'tpu_custom_call' if platform == 'tpu' else '__cudnn$fmhaSoftmax'
  assert (kernel in text) == (implementation == 'auto')
  assert bool(re.search(SCORES, text)) == (implementation == 'xla')


@pytest.mark.parametrize('implementation', ['auto', 'xla'])
def test_prefill_for_a_tpu_holds_no_scores(implementation):
  model = tiny.model(attention=implementation)
  params = jax.eval_shape(lambda: model.unstack(model.init(jax.random.key(0))))
  tokens = jax.ShapeDtypeStruct((6, 512), jnp.int32)

  def hidden(params, tokens):
    place = jnp.broadcast_to(jnp.arange(512), tokens.shape)
    attend = attention.over_prompts(LENGTH, implementation)
    return model.hidden(params, tokens, place, attend)

  text = lowered(hidden, (params, tokens), 'tpu')
  assert ('tpu_custom_call' in text) == (implementation == 'auto')
  assert bool(re.search(SCORES, text)) == (implementation == 'xla')
