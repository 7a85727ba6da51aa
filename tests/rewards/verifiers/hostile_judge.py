"""The judge of `hostile`, for workers: all that it needs is imported before.

Importing sympy in a call would count as the call's time.
"""

import contextlib

from tests.rewards.verifiers.hostile import judge

with contextlib.suppress(ImportError):
  import math_verify  # noqa: F401

__all__ = ['judge']
