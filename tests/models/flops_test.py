"""FLOPs by formula against the compiler's count of a forward pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import models
from grpo_jax.models import attention
from tests import tiny

pytestmark = pytest.mark.quick

CONFIG = dict(
  vocab_size=512, num_layers=2, width=256, head_dim=64, mlp_width=512
)


@pytest.mark.parametrize('with_head', [True, False])
@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'num_kv_heads': 2},
    {'pattern': (models.LayerKind(keys_as_values=True),)},
    {'pattern': (models.LayerKind(), models.LayerKind(shares_kv=True))},
    {'layer_inputs': 128},
  ],
)
def test_the_formula_is_what_the_compiler_counts(changes, with_head):
  """Attention is computed over whole rows and masked: context 128 for all."""
  config = models.ModelConfig(**CONFIG, **changes)
  model = models.Transformer(config)
  params = jax.eval_shape(lambda: model.unstack(model.init(jax.random.key(0))))

  def forward(params, tokens):
    position = jnp.broadcast_to(jnp.arange(128), tokens.shape)
    everything = attention.over_prompts(jnp.full((2,), 128))
    hidden, _ = model.hidden(params, tokens, position, everything)
    return model.head(params, hidden) if with_head else hidden

  tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
  analysis = jax.jit(forward).lower(params, tokens).cost_analysis()
  expected = models.flops_per_token(config, np.full((2, 128), 128), with_head)
  assert expected.shape == (2, 128)
  np.testing.assert_allclose(expected.sum(), analysis['flops'], rtol=0.02)


def test_a_state_costs_the_same_wherever_a_token_stands():
  """Counted by the compiler where each token is alone in its row."""
  config = models.ModelConfig(
    **CONFIG | dict(num_layers=3),
    taps=4,
    head_gates=True,
    pattern=(
      models.LayerKind(mixer='delta'),
      models.LayerKind(mixer='convolution'),
      models.LayerKind(),
    ),
    delta=models.DeltaHeads(2, 4, 64, 32),
  )
  model = models.Transformer(config)
  params = jax.eval_shape(lambda: model.unstack(model.init(jax.random.key(0))))

  def forward(params, tokens):
    alone = attention.over_prompts(jnp.ones(64, jnp.int32))
    hidden, _ = model.hidden(params, tokens, jnp.zeros_like(tokens), alone)
    return model.head(params, hidden)

  tokens = jax.ShapeDtypeStruct((64, 1), jnp.int32)
  analysis = jax.jit(forward).lower(params, tokens).cost_analysis()
  expected = models.flops_per_token(config, 1)
  np.testing.assert_allclose(64 * expected, analysis['flops'], rtol=0.03)
  near, far = models.flops_per_token(config, np.array([1, 101]))
  np.testing.assert_allclose(far - near, 100 * 4 * config.num_heads * 64)


def test_of_experts_those_count_that_a_token_is_given_to():
  """Two of 40 with half of the MLP's width cost as much, and the router."""
  kinds = models.LayerKind(experts=True), models.LayerKind()
  mixed = models.ModelConfig(
    **CONFIG, pattern=kinds, experts=models.Experts(40, 2, 256)
  )
  more = models.flops_per_token(mixed, 8) - models.flops_per_token(
    models.ModelConfig(**CONFIG), 8
  )
  np.testing.assert_allclose(more, 2 * 256 * 40)


def test_layers_of_several_sizes_count_as_they_are():
  """Each against a model of its kind alone."""
  kinds = (
    models.LayerKind(head_dim=32, mlp_width=128),
    models.LayerKind(num_kv_heads=1, window_tokens=4),
  )
  uneven = models.ModelConfig(**CONFIG, pattern=kinds)
  first = models.ModelConfig(**CONFIG | dict(head_dim=32, mlp_width=128))
  second = models.ModelConfig(
    **CONFIG, num_kv_heads=1, pattern=(models.LayerKind(window_tokens=4),)
  )
  at = models.flops_per_token
  np.testing.assert_allclose(at(uneven, 9), (at(first, 9) + at(second, 9)) / 2)
  kept = models.bytes_per_token(uneven)
  alone = map(models.bytes_per_token, (first, second))
  np.testing.assert_allclose(kept, sum(alone) / 2)


def test_what_every_token_passes_counts_for_all():
  kinds = (models.LayerKind(experts=True),)
  both = [
    models.ModelConfig(
      **CONFIG,
      pattern=kinds,
      experts=models.Experts(8, 2, 64, shared_width=shared),
    )
    for shared in (0, 96)
  ]
  less, more = (models.flops_per_token(one, 8) for one in both)
  np.testing.assert_allclose(more - less, 2 * 2 * 3 * 256 * 96)


def test_a_layer_that_shares_keeps_no_keys_and_values():
  """Three times four heads of 64 entries, and as many values."""
  kinds = models.LayerKind(), models.LayerKind(shares_kv=True)
  plain, shared = (
    models.bytes_per_token(models.ModelConfig(**CONFIG, pattern=pattern))
    for pattern in (kinds[:1], kinds)
  )
  assert plain - shared == 3 * 2 * 4 * 64 * 4


def test_an_mlp_beside_experts_counts_too():
  kinds = (models.LayerKind(experts=True),)
  experts = models.Experts(8, 2, 64)
  beside = dataclasses.replace(experts, beside_mlp=True)
  less, more = (
    models.flops_per_token(
      models.ModelConfig(**CONFIG, pattern=kinds, experts=one), 8
    )
    for one in (experts, beside)
  )
  np.testing.assert_allclose(more - less, 2 * 2 * 3 * 256 * 512)


def test_windows_bound_the_context():
  window = (models.LayerKind(window_tokens=8), models.LayerKind())
  plain = models.ModelConfig(**CONFIG)
  mixed = models.ModelConfig(**CONFIG, pattern=window)
  at = models.flops_per_token
  assert at(mixed, 8) == at(plain, 8)
  np.testing.assert_allclose(
    at(mixed, 100), (at(plain, 8) + at(plain, 100)) / 2
  )


@pytest.mark.parametrize(
  'remat, expected',
  [
    ('none', 3 * 624),
    ('layer', 720),
    ('attention', 720 + 3 * 2 * (8 * 2 + 4)),
    ('offload', 624 + 2 * 32),
  ],
)
def test_activations_are_those_that_the_docstring_counts(remat, expected):
  """Of a layer 2 * 8 * 4 bytes and 2 * (4 * 8 + 3 * 4 * 8 + 4 * 38)."""
  config = models.ModelConfig(
    vocab_size=7,
    num_layers=3,
    width=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=38,
    compute_dtype='bfloat16',
    residual_dtype='float32',
    remat=remat,
  )
  assert models.bytes_per_token(config) == expected
  # Three inputs of each layer, 2 * 5 bytes; in one, two more of each.
  told = dataclasses.replace(config, layer_inputs=5)
  layers = 3 if remat == 'none' else 1
  assert models.bytes_per_token(told) == expected + 30 + layers * 20
  # On two devices: half of all, and 2 * 8 * 2 bytes that are read whole.
  shared = {'none': 3 * 344, 'layer': 392, 'attention': 452, 'offload': 376}
  assert models.bytes_per_token(config, tensor=2) == shared[remat]


def test_activations_are_about_what_a_backward_pass_keeps():
  """Of one more token, and within a factor of two."""
  config = dataclasses.replace(
    tiny.CONFIG, width=64, mlp_width=128, num_layers=8
  )
  model = models.Transformer(config)
  params = jax.eval_shape(model.init, jax.random.key(0))

  def temporary(rows):
    tokens = jax.ShapeDtypeStruct((rows, 32), jnp.int32)

    def loss(params, tokens):
      position = jnp.broadcast_to(jnp.arange(32)[None], tokens.shape)
      length = jnp.full((rows,), 32)
      hidden, _ = model.hidden(
        params, tokens, position, attention.over_prompts(length)
      )
      return jnp.sum(hidden.astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  measured = (temporary(64) - temporary(32)) / (32 * 32)
  assert measured / 2 < models.bytes_per_token(config) < 2 * measured
  less = dataclasses.replace(config, remat='layer')
  assert models.bytes_per_token(less) < models.bytes_per_token(config) / 4
