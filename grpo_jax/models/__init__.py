"""The transformer, and what it says of completions."""

from grpo_jax.models._config import LayerKind
from grpo_jax.models._config import ModelConfig
from grpo_jax.models._flops import flops_per_token
from grpo_jax.models.scores import Scores
from grpo_jax.models.scores import score
from grpo_jax.models.transformer import Transformer

__all__ = (
  'LayerKind',
  'ModelConfig',
  'Scores',
  'Transformer',
  'flops_per_token',
  'score',
)
