"""The loss tests run in float64; those about float32 ask for it by dtype."""

import jax
import pytest


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield
