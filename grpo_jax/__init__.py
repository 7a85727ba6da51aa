"""Group-based RL post-training in JAX: one surrogate equation, in parts.

`grpo_jax.losses` needs jax alone; import what you need, nothing is imported
here.
"""

__version__ = '0.1.0'
