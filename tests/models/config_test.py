"""Shapes of models that cannot be are refused, and say why."""

import dataclasses

import jax
import pytest

from grpo_jax import models
from grpo_jax.models import config as config_lib
from tests import tiny

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(num_layers=3, pattern=(models.LayerKind(),) * 4), 'num_layers=3'),
    (dict(activation='relu'), "activation='relu'"),
    (dict(pattern=(models.LayerKind(experts=True),)), 'not described'),
    (dict(num_kv_heads=3), 'num_kv_heads=3'),
    (
      dict(
        pattern=(models.LayerKind(experts=True),),
        experts=models.Experts(4, 2, 12),
        lora=models.LowRank(4, 8, ('mlp/*',)),
      ),
      "'mlp/\\*' matches no weight of the model",
    ),
    (dict(head_dim=7), 'head_dim=7'),
    (dict(pattern=(models.LayerKind(head_dim=6, rotated=0.5),)), 'head_dim=6'),
    (
      dict(pattern=(models.LayerKind(num_kv_heads=3),)),
      'multiple of num_kv_heads=3',
    ),
    (dict(qk_norm_joint=True), 'qk_norm=False'),
    (dict(activation='relu'), "'clamped_swiglu'"),
    (dict(attention='cudnn', compute_dtype='bfloat16', sinks=True), 'sinks'),
    (
      dict(
        rope_scaling=models.RopeScaling('yarn', 4.0, 64),
        pattern=(models.LayerKind(rotated=0.5),),
      ),
      'YaRN scales whole queries',
    ),
    (
      dict(pattern=(models.LayerKind(shares_kv=True),) * 4),
      'layer 0 shares keys and values of 2 heads of size 8',
    ),
    (
      dict(
        pattern=(
          *(models.LayerKind(),) * 3,
          models.LayerKind(window_tokens=4, shares_kv=True),
        )
      ),
      'layer 3 shares keys .* with window_tokens=4 has last',
    ),
    (
      dict(
        pattern=(
          *(models.LayerKind(),) * 3,
          models.LayerKind(num_kv_heads=1, shares_kv=True),
        )
      ),
      'layer 3 shares keys and values of 1 heads',
    ),
    (
      dict(pattern=(models.LayerKind(), models.LayerKind(shares_kv=True))),
      'layer 2 has keys and values',
    ),
    (dict(taps=3), 'taps=3 comes with layers of attention'),
    (
      dict(
        pattern=(models.LayerKind(mixer='convolution'), models.LayerKind()),
        taps=1,
      ),
      'taps=1 comes with layers of attention, convolution; give 2 or more',
    ),
    (
      dict(pattern=(models.LayerKind(mixer='convolution'),), taps=3),
      'give a pattern with a layer of attention',
    ),
    (dict(delta=models.DeltaHeads(1, 2, 4, 4)), 'no layer kind has them'),
    (
      dict(lora=models.LowRank(4, 8, ('delta/query',))),
      "'delta/query' matches no weight of the model",
    ),
    (dict(compute_dtype='float16'), "compute_dtype='float16'"),
    (dict(residual_dtype='bfloat16'), "residual_dtype='bfloat16'"),
  ],
)
def test_impossible_shapes_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(tiny.CONFIG, **changes)


@pytest.mark.parametrize(
  'make, words',
  [
    (lambda: models.LayerKind(mixer='mamba'), "mixer='mamba'; give one of"),
    (
      lambda: models.LayerKind(mixer='delta', window_tokens=4),
      "mixer='delta' has window_tokens=4, which is of attention",
    ),
    (lambda: models.DeltaHeads(2, 3, 4, 4), 'num_heads=2, num_value_heads=3'),
    (lambda: models.DeltaHeads(2, 4, 0, 4), 'key_dim=0'),
  ],
)
def test_impossible_layers_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize('per_token', [0, 5])
def test_a_token_is_given_to_at_least_one_expert_and_at_most_all(per_token):
  with pytest.raises(ValueError, match=f'per_token={per_token} and number=4'):
    models.Experts(4, per_token, 12)
  for possible in (1, 4):
    assert models.Experts(4, possible, 12).per_token == possible


@pytest.mark.parametrize('tokens', [0, -3])
def test_a_window_without_tokens_is_refused(tokens):
  with pytest.raises(ValueError, match=f'window_tokens={tokens}; give 1 or'):
    models.LayerKind(window_tokens=tokens)


@pytest.mark.parametrize(
  'changes, said',
  [
    (dict(scores='top'), "scores='top'"),
    (dict(groups=4), 'groups=4'),
    (dict(groups=3, groups_per_token=4), 'groups_per_token=4'),
    (dict(groups=6), 'groups of 1'),
    (dict(groups=3, per_token=3), 'per_token=3'),
    (dict(shared_gate=True), 'shared_width=0'),
  ],
)
def test_impossible_routers_are_refused(changes, said):
  with pytest.raises(ValueError, match=said) as refused:
    models.Experts(**{**dict(number=6, per_token=2, width=8), **changes})
  assert str(refused.value).endswith('.')


def test_an_mlp_beside_experts_may_have_adapters():
  low = models.LowRank(2, 4.0, ('mlp/*',))
  shape = dataclasses.replace(tiny.CONFIG, **tiny.BESIDE, lora=low)
  shapes = jax.eval_shape(models.Transformer(shape).init, jax.random.key(0))
  assert {'up_a', 'up_b'} <= shapes['blocks'][0]['mlp'].keys()


def test_a_layer_that_shares_has_no_keys_for_values():
  with pytest.raises(ValueError, match='keys_as_values=True and shares_kv'):
    models.LayerKind(keys_as_values=True, shares_kv=True)


def test_layers_that_share_are_a_stack_of_their_own():
  first = models.LayerKind(window_tokens=4), models.LayerKind()
  last = [dataclasses.replace(kind, shares_kv=True) for kind in first]
  kinds = (*first, *first, first[0], last[1], last[0], last[1], last[1])
  config = dataclasses.replace(tiny.CONFIG, num_layers=9, pattern=kinds)
  assert config.stacks == (
    config_lib.Stack(0, first, 5),
    config_lib.Stack(5, (last[1], last[0], last[1]), 4),
  )
  assert config.blocks == [
    (first[0], range(0, 4, 2)),
    (first[1], range(1, 5, 2)),
    (last[1], range(5, 8, 3)),
    (last[0], range(6, 9, 3)),
    (last[1], range(7, 10, 3)),
  ]
  assert config.tail == [(first[0], 4), (last[1], 8)]
  assert config.sources == [0, 1, 2, 3, 4, 3, 4, 3, 3]
  assert config.shared_windows == [None, 4]


@pytest.mark.parametrize('rotated', [-0.5, 1.5])
def test_a_share_is_from_0_to_1(rotated):
  with pytest.raises(ValueError, match=f'rotated={rotated}; give a share'):
    models.LayerKind(rotated=rotated)


def test_an_axis_divides_the_heads_of_all_layers_or_of_none():
  kinds = (
    models.LayerKind(),
    models.LayerKind(num_kv_heads=6),
    models.LayerKind(num_kv_heads=4),
  )
  config = models.ModelConfig(8, num_heads=12, num_kv_heads=12, pattern=kinds)
  assert config.shared_kv_heads == 2
  assert models.Transformer(config).kv_heads == 2
