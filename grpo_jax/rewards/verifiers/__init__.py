"""Verifiers: reward functions that compare a completion with a rule.

One module per family. None raises an error on any completion but
`reasoning_gym`, which runs in confined workers only; and each reads a bounded
number of characters of it. README.md beside this folder has a table.
"""

from grpo_jax.rewards.verifiers.choice import multiple_choice
from grpo_jax.rewards.verifiers.form import completion_length
from grpo_jax.rewards.verifiers.form import format_tags
from grpo_jax.rewards.verifiers.form import json_schema
from grpo_jax.rewards.verifiers.form import regular_expression
from grpo_jax.rewards.verifiers.gym import reasoning_gym
from grpo_jax.rewards.verifiers.mathematics import math_equivalence
from grpo_jax.rewards.verifiers.numbers import gsm8k
from grpo_jax.rewards.verifiers.numbers import last_number
from grpo_jax.rewards.verifiers.numbers import number
from grpo_jax.rewards.verifiers.text import boxed_text
from grpo_jax.rewards.verifiers.text import exact_match

__all__ = (
  'boxed_text',
  'completion_length',
  'exact_match',
  'format_tags',
  'gsm8k',
  'json_schema',
  'last_number',
  'math_equivalence',
  'multiple_choice',
  'number',
  'reasoning_gym',
  'regular_expression',
)
