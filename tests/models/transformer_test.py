"""The transformer: one tree for training and decoding, options that count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import attention
from grpo_jax.models import layout
from tests import tiny

pytestmark = pytest.mark.quick

ROWS = layout.padded_rows(*tiny.ragged(), 16)


def logp(changes, params=None):
  model = tiny.model(**changes)
  params = tiny.params(model) if params is None else params
  return jax.jit(lambda p: models.score(model, p, ROWS).logp)(params)


@pytest.mark.parametrize(
  'changes',
  [{}, tiny.FANCY, tiny.SHARING],
  ids=['plain', 'fancy', 'sharing'],
)
def test_scanned_unrolled_recomputed_and_unstacked_agree(changes):
  model = tiny.model(**changes)
  expected = logp(changes)
  for option in dict(remat='layer'), dict(unroll=True):
    np.testing.assert_allclose(logp({**changes, **option}), expected, atol=1e-5)
  layers = model.unstack(tiny.params(model))
  assert len(layers['layers']) == model.config.num_layers
  assert 'blocks' not in layers and 'tail' not in layers
  np.testing.assert_allclose(logp(changes, layers), expected, atol=1e-5)


def test_what_layers_share_gets_the_gradients_of_all():
  """Of two stacks as of single layers."""
  model = tiny.model(**tiny.SHARING)

  def gradient(prepare):
    def loss(params):
      return jnp.sum(models.score(model, prepare(params), ROWS).logp)

    return jax.jit(jax.grad(loss))(tiny.params(model))

  found, expected = map(gradient, (lambda x: x, model.unstack))
  tiny.assert_trees_close(found, expected)
  assert all(map(np.any, jax.tree.leaves(found['inputs'])))
  for layer in (*found['blocks'], *found['tail']):
    assert not np.any(layer.pop('layer_scale'))
    assert all(map(np.any, jax.tree.leaves(layer)))


@pytest.mark.parametrize(
  'changes',
  [
    dict(qk_norm=True),
    dict(qkv_bias=True),
    dict(tied_embeddings=True),
    dict(pattern=(models.LayerKind(window_tokens=2),)),
    dict(pattern=(models.LayerKind(rope_base=10.0),)),
    dict(rope_base=10.0),
    dict(rope_scaling=models.RopeScaling('linear', 4.0)),
    dict(rope_scaling=models.RopeScaling('llama3', 8.0, 16)),
    dict(rope_scaling=models.RopeScaling('yarn', 4.0, 16)),
    dict(activation='gelu_tanh'),
    dict(embedding_scale=2.0),
    dict(post_norms=True),
    dict(attention_scale=1.0),
    dict(attention_cap=0.1),
    dict(value_norm=True),
    dict(layer_scales=True),
    dict(layer_inputs=4),
    dict(pattern=(models.LayerKind(keys_as_values=True),)),
    dict(
      pattern=(*(models.LayerKind(),) * 3, models.LayerKind(shares_kv=True))
    ),
    dict(pattern=(models.LayerKind(rotated=0.5, proportional=True),)),
    dict(logit_cap=0.1),
    dict(norm_epsilon=0.1),
    dict(compute_dtype='bfloat16'),
  ],
  ids=lambda changes: next(iter(changes)),
)
def test_every_option_does_something(changes):
  assert np.abs(np.asarray(logp(changes) - logp({}))).max() > 1e-4


def test_the_cap_bends_logits_towards_its_own_size():
  params = tiny.params(tiny.model())
  hidden = 9 * jax.random.normal(jax.random.key(0), (1, 5, 32))
  plain = tiny.model().head(params, hidden)
  assert np.abs(plain).max() > 4
  capped = tiny.model(logit_cap=2.0).head(params, hidden)
  np.testing.assert_allclose(capped, 2 * np.tanh(plain / 2), rtol=1e-5)


def test_scanned_layers_tell_of_every_router_what_unstacked_ones_tell():
  model = models.Transformer(tiny.EXPERTS)
  params = jax.eval_shape(model.init, jax.random.key(0))
  attend = attention.over_layout(ROWS)

  def statistics(params):
    given = params, ROWS.tokens, ROWS.position, attend, None
    counted = jnp.ones(ROWS.tokens.shape)
    return model.hidden_routed(*given, counted)[2].statistics

  scanned = jax.eval_shape(statistics, params)
  assert scanned.load.shape == (3, 8)  # experts are in three of five layers
  layers = jax.eval_shape(model.unstack, params)
  assert scanned == jax.eval_shape(statistics, layers)


def test_parameters_stay_float32_and_bf16_is_close():
  model = tiny.model(compute_dtype='bfloat16')
  params = tiny.params(model)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  wide, narrow = logp({}), logp({'compute_dtype': 'bfloat16'})
  assert narrow.dtype == jnp.float32
  # Measured over four seeds: at most 0.061 nats, 0.023 in the root mean square.
  np.testing.assert_allclose(narrow, wide, atol=0.1)
  assert np.sqrt(np.mean(np.square(narrow - wide))) < 0.03


@pytest.mark.parametrize(
  'residual, least, most',
  [
    ('float32', 0, 0.02),
    pytest.param('bfloat16', 0.02, 0.04, marks=pytest.mark.long),
  ],
)
def test_layers_add_to_a_sum_in_float32(residual, least, most):
  """In bfloat16 each of many layers rounds it: .026 against .015 nats."""
  wide = tiny.model(num_layers=32)
  narrow = tiny.model(
    num_layers=32, compute_dtype='bfloat16', residual_dtype=residual
  )
  errors, init = [], jax.jit(wide.init)
  for seed in range(4):
    params = init(jax.random.key(seed))
    logp = [tiny.score(model, params, ROWS).logp for model in (wide, narrow)]
    errors.append(np.sqrt(np.mean(np.square(logp[0] - logp[1]))))
  assert least < np.mean(errors) < most


def test_parameter_count_and_stacking():
  params = jax.eval_shape(tiny.model().init, jax.random.key(0))
  width, mlp, heads, kv, size = 32, 48, 4, 2, 8
  layer = width * size * (heads + 2 * kv) + heads * size * width
  layer += 3 * width * mlp + 2 * width
  expected = 2 * 40 * width + width + 4 * layer
  leaves = jax.tree.leaves(params)
  assert sum(x.size for x in leaves) == expected
  assert all(x.shape[0] == 4 for x in jax.tree.leaves(params['blocks']))


@pytest.mark.parametrize('changes', [tiny.SHARING, tiny.BESIDE])
def test_factors_do_not_decay_and_only_the_table_is_not_trained(changes):
  model = tiny.model(**changes)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  for path, _ in jax.tree_util.tree_leaves_with_path(shapes):
    names = sharding.path_names(path)
    assert model.decays(names) != names[-1].endswith('scale'), names
    assert model.trains(names) == (names[-1] != 'input_table')
  adapted = tiny.model(**changes, lora=models.LowRank(2, 4.0))
  assert not adapted.trains(('inputs', 'input_table'))


def test_every_parameter_gets_a_gradient():
  model = tiny.model(**{**tiny.FANCY, 'tied_embeddings': False})

  @jax.jit
  @jax.grad
  def gradient(params):
    return jnp.sum(models.score(model, params, ROWS).logp)

  for path, leaf in jax.tree_util.tree_leaves_with_path(
    gradient(tiny.params(model))
  ):
    if 'key_bias' not in str(path):  # a softmax does not see it
      assert np.any(leaf), path
