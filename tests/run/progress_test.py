"""What a checkpoint holds, and the end of a run that cannot be saved."""

import contextlib
import types
from typing import Any

import pytest

from grpo_jax.hosts import stop_signal
from grpo_jax.run import progress as progress_lib
from grpo_jax.run import session
from grpo_jax.run.build import specs
from grpo_jax.run.keep.checkpoint import Checkpoints
from grpo_jax.run.keep.checkpoint import Restored
from tests import runs
from tests.hosts import processes_test

pytestmark = pytest.mark.quick


def test_a_checkpoint_that_cannot_be_saved_fails_in_all_alike():
  """None has failed alone, so that none is ended by the watch of another."""
  phase = lambda _: contextlib.nullcontext()

  def body(peers):
    tries = []
    saves: Any = types.SimpleNamespace(
      wait=lambda: None, owed=True, steps=lambda: [3], _peers=peers
    )
    save = lambda: tries.append(1)
    try:
      Checkpoints.insist(saves, save, 'rollout', 5, phase)
    except ValueError as error:
      return str(error), peers.knows(error), len(tries)

  for said, is_known, tries in processes_test.run(body)[0]:
    assert said.startswith('The checkpoint of rollout 5 could not be saved;')
    assert is_known and tries == 2


def test_a_checkpoint_that_does_not_fit_is_refused_by_all_alike(
  tmp_path, monkeypatch
):
  newest = Restored(9, None, {'replays': False})
  saves: Any = types.SimpleNamespace(restore=lambda _: newest)
  opened = []

  def checkpoints(*args, **kwargs):
    opened.append((*args, kwargs['every_minutes']))
    return contextlib.nullcontext(saves)

  monkeypatch.setattr(session, 'Checkpoints', checkpoints)
  keep = specs.KeepSpec(2, 0.5, 7, 'loss', 0, 0)
  run: Any = types.SimpleNamespace(steps=8, keep=keep)
  one: Any = types.SimpleNamespace(
    phase=lambda _: contextlib.nullcontext(),
    compiled=types.SimpleNamespace(abstract=None),
  )
  config, stop = runs.small(), stop_signal.Stop()

  def body(peers):
    start = session.Start(config, tmp_path, stop, peers=peers)
    try:
      with contextlib.ExitStack() as stack:
        session._restored(stack, one, run, one, start)
    except ValueError as error:
      return str(error), peers.knows(error)

  for said, is_known in processes_test.run(body, 2)[0]:
    assert 'has done 9 rollouts, and config.steps=8' in said and is_known
  assert {*opened} == {(tmp_path / 'checkpoints', 7, 'loss', 0.5)}


def test_a_checkpoint_of_earlier_code_names_the_version_that_reads_it():
  host = {'versions': {'packages': {'grpo_jax': '0.0.9'}}}
  with pytest.raises(ValueError, match='by grpo_jax 0.0.9, an earlier version'):
    progress_lib.abstract(None, lambda: None, host)
