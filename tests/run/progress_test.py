"""What a checkpoint holds, and the end of a run that cannot be saved."""

import contextlib
import types

import pytest

from grpo_jax.run import progress as progress_lib
from tests.hosts import processes_test

pytestmark = pytest.mark.quick


def test_a_checkpoint_that_cannot_be_saved_fails_in_all_alike(monkeypatch):
  """None has failed alone, so that none is ended by the watch of another."""
  monkeypatch.setattr(progress_lib, 'save', lambda *_: None)

  def body(peers):
    saves = types.SimpleNamespace(
      wait=lambda: None, owed=True, steps=lambda: [3]
    )
    monitor = types.SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    kept = types.SimpleNamespace(saves=saves)
    of_all = types.SimpleNamespace(kept=kept, monitor=monitor, peers=peers)
    try:
      progress_lib.finish(of_all, types.SimpleNamespace(step=5))
    except ValueError as error:
      return str(error), peers.knows(error)

  for said, is_known in processes_test.run(body)[0]:
    assert said.startswith('The checkpoint of rollout 5 could not be saved;')
    assert is_known


def test_a_checkpoint_of_earlier_code_names_the_version_that_reads_it():
  host = {'versions': {'packages': {'grpo_jax': '0.0.9'}}}
  with pytest.raises(ValueError, match='by grpo_jax 0.0.9, an earlier version'):
    progress_lib.abstract(None, host)
