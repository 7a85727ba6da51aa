"""GRPO without the division by the group's standard deviation."""

from grpo_jax.losses._base import LossTransform
from grpo_jax.losses._base import chain
from grpo_jax.losses._credit import center_by_group
from grpo_jax.losses._objective import ppo_clip
from grpo_jax.losses._penalty import maybe_kl
from grpo_jax.losses._weight import mean_over_sequences


def grpo_without_std(low=0.2, high=0.2, kl_coefficient=0.04) -> LossTransform:
  r"""GRPO whose advantage is :math:`A_i = r_i - \bar r`, and nothing else new.

  The arm "no std" of the second paper, beside `losses.methods.grpo`. Dr. GRPO
  leaves out the division too, but weights tokens differently.

  Args:
    low, high, kl_coefficient: See `help(losses.methods)`.
  """
  return chain(
    center_by_group(),
    mean_over_sequences(),
    ppo_clip(low, high),
    *maybe_kl(kl_coefficient),
  )
