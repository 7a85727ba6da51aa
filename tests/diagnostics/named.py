"""The methods that many tests audit, each made once.

JAX compiles a method for each time that it is made.
"""

import functools

from grpo_jax import losses


@functools.cache
def method(name: str) -> losses.LossTransform:
  """The method of this name with its defaults."""
  return getattr(losses.methods, name)()
