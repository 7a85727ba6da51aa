"""The stand-in as a fixture."""

from collections.abc import Iterator

import pytest

from tests.data.hub import stand_in


@pytest.fixture
def hub(monkeypatch, tmp_path) -> Iterator[stand_in.Hub]:
  """A stand-in that this process asks, with an empty cache."""
  with stand_in.connected(monkeypatch, tmp_path) as connected:
    yield connected
