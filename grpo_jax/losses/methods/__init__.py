"""The named methods, a table of contents of the field.

Each is a `chain` of two to six transforms; its docstring has the formula, the
source, and every choice that the paper leaves open as an argument.
"""

from grpo_jax.losses.methods._entropy import kl_cov
from grpo_jax.losses.methods._reinforce import reinforce
from grpo_jax.losses.methods._reinforce import rloo
from grpo_jax.losses.methods._reinforce import supervised
from grpo_jax.losses.methods._sequence import gmpo
from grpo_jax.losses.methods._sequence import gspo
from grpo_jax.losses.methods._token import dapo
from grpo_jax.losses.methods._token import dr_grpo
from grpo_jax.losses.methods._token import grpo

__all__ = (
  'dapo',
  'dr_grpo',
  'gmpo',
  'grpo',
  'gspo',
  'kl_cov',
  'reinforce',
  'rloo',
  'supervised',
)
