"""Packages that hold the weights of a model, which not everyone has."""

import importlib.util

import pytest


def needed(module: str, installed: str) -> pytest.MarkDecorator:
  """The mark of tests that read the GGUF file in a package.

  Args:
    module: What the package is imported as.
    installed: What pip is told, behind `pip install`.
  """
  missing = [
    name for name in (module, 'gguf') if importlib.util.find_spec(name) is None
  ]
  return pytest.mark.skipif(
    bool(missing),
    reason=f"needs pip install '.[gguf]' and pip install {installed}",
  )
