"""How much work a case is: arithmetic and bytes, by counting."""

import dataclasses

import numpy as np

from grpo_jax import models
from tests.bench.cases import Case

FLOAT_BYTES = {'float32': 4, 'bfloat16': 2}


def model_config(case: Case) -> models.ModelConfig:
  """The shape of the model."""
  return models.ModelConfig(
    vocab_size=case.vocab,
    num_layers=case.layers,
    width=case.width,
    num_heads=case.heads,
    num_kv_heads=case.kv_heads,
    head_dim=case.head_dim,
    mlp_width=case.mlp_width,
  )


def forward_flops(case: Case, tokens: float) -> float:
  """FLOPs of one pass over a rollout, each prompt computed once.

  Args:
    case: The workload.
    tokens: Completion tokens of the rollout; all are taken to be of the mean
      length.

  Returns:
    The matrix products that no implementation can do without; what is computed
    twice, or for padding, does not count.
  """
  config = model_config(case)
  mean = max(1, round(tokens / case.rows))
  prompt = models.flops_per_token(
    config, np.arange(case.prompt_tokens) + 1, with_head=False
  )
  completion = models.flops_per_token(
    config, case.prompt_tokens + 1 + np.arange(mean)
  )
  return float(case.prompts * prompt.sum() + tokens * completion.mean())


def unshared(case: Case) -> float:
  """How many times the operations are where completions share no prompt.

  Args:
    case: Its completions are taken to have their greatest length.
  """
  apart = dataclasses.replace(case, prompts=case.rows, group=1)
  tokens = case.rows * case.max_tokens
  return forward_flops(apart, tokens) / forward_flops(case, tokens)


def learn_flops(case: Case, tokens: float) -> float:
  """FLOPs of the reference scores, if there are any, and the update."""
  passes = 3 + (case.kl_coefficient > 0)  # a backward pass counts as two
  return passes * forward_flops(case, tokens)


def decode_bytes(case: Case, tokens: float, dtype: str) -> float:
  """Bytes that decoding one rollout reads at least.

  Args:
    case: The workload.
    tokens: Completion tokens of the rollout.
    dtype: Of parameters and cache.

  Returns:
    For each position of the mean length every matrix once, the cache of each
    prompt once for its group, and each completion's own cache.
  """
  config = model_config(case)
  mean = tokens / case.rows
  matrices = models.flops_per_token(config, 0) / 2
  per_token = 2 * case.layers * case.kv_heads * case.head_dim  # keys, values
  cached = case.prompts * case.prompt_tokens + case.rows * mean / 2
  numbers = mean * (matrices + per_token * cached)
  return float(numbers) * FLOAT_BYTES[dtype]
