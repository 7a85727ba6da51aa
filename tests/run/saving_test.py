"""The end of a run that cannot be saved, as several processes know of it."""

import contextlib
import types

import pytest

from grpo_jax.run import saving
from tests.hosts import processes_test

pytestmark = pytest.mark.quick


def test_a_checkpoint_that_cannot_be_saved_fails_in_all_alike(monkeypatch):
  """None has failed alone, so that none is ended by the watch of another."""
  monkeypatch.setattr(saving, 'save', lambda *_: None)

  def body(peers):
    saves = types.SimpleNamespace(
      wait=lambda: None, owed=True, steps=lambda: [3]
    )
    monitor = types.SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    kept = types.SimpleNamespace(saves=saves)
    of_all = types.SimpleNamespace(kept=kept, monitor=monitor, peers=peers)
    try:
      saving.finish(of_all, types.SimpleNamespace(step=5))
    except ValueError as error:
      return str(error), peers.knows(error)

  for said, is_known in processes_test.run(body)[0]:
    assert said.startswith('The checkpoint of rollout 5 could not be saved;')
    assert is_known
