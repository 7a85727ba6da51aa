"""A replay reads the rollout of its step, and refuses one that does not fit."""

import types

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.rollouts import parquet
from grpo_jax.run import replay
from tests.rollouts import parquet_test

STATE = object()


@pytest.fixture
def drawn(tmp_path):
  """Draws rollout 5 of 2 prompts with 3 completions, changed at will."""

  def draw(step=4, prompts=2, group=3, vocab_size=10, token=9, prompt_id=9):
    rollout = parquet_test.make(2, 3, 4)
    tokens = np.where(rollout.batch.mask, token, 0).astype(np.int32)
    rollout = rollout._replace(
      batch=rollout.batch._replace(tokens=tokens), prompts=[[1], [2, prompt_id]]
    )
    parquet.write(parquet.path_of(tmp_path, 5), rollout, 5)
    run = types.SimpleNamespace(
      draw=types.SimpleNamespace(prompts=prompts, group=group),
      tokenizer=data.character_tokenizer('abcdefghijk'[: vocab_size - 2]),
    )
    return rollout, replay.draw(tmp_path, run, STATE, step)

  return draw


def test_the_rollout_after_so_many_is_read(drawn):
  rollout, (found, state, counts) = drawn()
  parquet_test.assert_same(found, rollout)
  assert state is STATE and counts == {}


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'step': 5}, r'of rollout 6 in .*step_00000006.parquet; it has 1 files'),
    ({'prompts': 3}, '2 prompts with 3 completions .*prompts=3 .*group=3;'),
    ({'group': 2}, '2 prompts with 3 completions .*prompts=2 .*group=2;'),
    ({'token': 10}, 'has the token 10, but the vocabulary ends at 9;'),
    ({'prompt_id': 10}, 'has the token 10, but the vocabulary ends at 9;'),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_what_does_not_fit_is_refused(changes, words, drawn):
  with pytest.raises(ValueError, match=words):
    drawn(**changes)


def test_a_folder_holds_completions_or_is_refused(drawn, tmp_path):
  with pytest.raises(ValueError, match='no completions to replay in'):
    replay.folder(tmp_path)
  with pytest.raises(ValueError, match='--replay is empty'):
    replay.folder('')
  drawn()
  assert replay.folder(str(tmp_path)) == tmp_path
