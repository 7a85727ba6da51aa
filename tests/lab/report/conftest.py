"""What tests of pages share."""

import pytest

from grpo_jax.lab.report import sections


@pytest.fixture
def quick_audit(monkeypatch):
  """An audit takes seconds, and few tests are about it."""

  def quick(method):
    raise ValueError('No audit in this test.')

  monkeypatch.setattr(sections.diagnostics, 'audit', quick)
