"""Attention by kernels for TPUs and GPUs.

Each kernel computes what a portable function of `models.attention` computes.
`models.attention` imports this package only when a run uses a kernel, because
importing Pallas takes a while.
"""

from grpo_jax.models.kernels.decode import attend_recent
from grpo_jax.models.kernels.rows import cudnn
from grpo_jax.models.kernels.rows import cudnn_causal
from grpo_jax.models.kernels.rows import cudnn_suits
from grpo_jax.models.kernels.rows import splash
from grpo_jax.models.kernels.rows import splash_suits

__all__ = (
  'attend_recent',
  'cudnn',
  'cudnn_causal',
  'cudnn_suits',
  'splash',
  'splash_suits',
)
