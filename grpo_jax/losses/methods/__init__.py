"""The named methods, a table of contents of the field.

Each is a `chain` of two to six transforms; its docstring has the formula, the
source, and every choice that the paper leaves open as an argument.
"""

from grpo_jax.losses.methods._credit import gdpo
from grpo_jax.losses.methods._credit import gtpo_conflict
from grpo_jax.losses.methods._credit import passk
from grpo_jax.losses.methods._entropy import clip_cov
from grpo_jax.losses.methods._entropy import forking_tokens
from grpo_jax.losses.methods._entropy import grpo_s
from grpo_jax.losses.methods._entropy import gtpo_entropy
from grpo_jax.losses.methods._entropy import kl_cov
from grpo_jax.losses.methods._reinforce import gpg
from grpo_jax.losses.methods._reinforce import maxrl
from grpo_jax.losses.methods._reinforce import opo
from grpo_jax.losses.methods._reinforce import positive_nll
from grpo_jax.losses.methods._reinforce import reinforce
from grpo_jax.losses.methods._reinforce import reinforce_pp
from grpo_jax.losses.methods._reinforce import reinforce_pp_baseline
from grpo_jax.losses.methods._reinforce import rloo
from grpo_jax.losses.methods._reinforce import supervised
from grpo_jax.losses.methods._sequence import gcpo
from grpo_jax.losses.methods._sequence import gmpo
from grpo_jax.losses.methods._sequence import gspo
from grpo_jax.losses.methods._sequence import gspo_token
from grpo_jax.losses.methods._sequence import luspo
from grpo_jax.losses.methods._sequence import vespo
from grpo_jax.losses.methods._token import cppo
from grpo_jax.losses.methods._token import dapo
from grpo_jax.losses.methods._token import deepseek_v3_2
from grpo_jax.losses.methods._token import dr_grpo
from grpo_jax.losses.methods._token import dual_clip_grpo
from grpo_jax.losses.methods._token import grpo
from grpo_jax.losses.methods._token import lite_ppo
from grpo_jax.losses.methods._token import two_sided_grpo
from grpo_jax.losses.methods._trust import cispo
from grpo_jax.losses.methods._trust import dppo_kl
from grpo_jax.losses.methods._trust import dppo_tv
from grpo_jax.losses.methods._trust import dro
from grpo_jax.losses.methods._trust import importance_sampling
from grpo_jax.losses.methods._trust import prompt_mean
from grpo_jax.losses.methods._trust import sapo

__all__ = (
  'cispo',
  'clip_cov',
  'cppo',
  'dapo',
  'deepseek_v3_2',
  'dppo_kl',
  'dppo_tv',
  'dr_grpo',
  'dro',
  'dual_clip_grpo',
  'forking_tokens',
  'gcpo',
  'gdpo',
  'gmpo',
  'gpg',
  'grpo',
  'grpo_s',
  'gspo',
  'gspo_token',
  'gtpo_conflict',
  'gtpo_entropy',
  'importance_sampling',
  'kl_cov',
  'lite_ppo',
  'luspo',
  'maxrl',
  'opo',
  'passk',
  'positive_nll',
  'prompt_mean',
  'reinforce',
  'reinforce_pp',
  'reinforce_pp_baseline',
  'rloo',
  'sapo',
  'supervised',
  'two_sided_grpo',
  'vespo',
)
