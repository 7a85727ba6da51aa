"""Kernels for accelerators, each beside a portable version of itself.

Nothing here is imported before a program needs it.
"""

from grpo_jax.models.kernels._cudnn import cudnn
from grpo_jax.models.kernels._cudnn import cudnn_suits
from grpo_jax.models.kernels._decode import attend_recent
from grpo_jax.models.kernels._splash import splash
from grpo_jax.models.kernels._splash import splash_suits

__all__ = ('attend_recent', 'cudnn', 'cudnn_suits', 'splash', 'splash_suits')
