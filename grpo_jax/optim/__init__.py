"""Optimizers and schedules: optax transformations, for any training loop."""

from grpo_jax.optim._adamw import adamw
from grpo_jax.optim._adamw import learning_rate

__all__ = ('adamw', 'learning_rate')
