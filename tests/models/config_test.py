"""Shapes of models that cannot be are refused, and say why."""

import dataclasses

import pytest

from grpo_jax import models
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
      "'mlp/\\*' matches no weight of attention",
    ),
    (dict(head_dim=7), 'head_dim=7'),
    (dict(compute_dtype='float16'), "compute_dtype='float16'"),
    (dict(residual_dtype='bfloat16'), "residual_dtype='bfloat16'"),
  ],
)
def test_impossible_shapes_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(tiny.CONFIG, **changes)


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
