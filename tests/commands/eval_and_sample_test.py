"""`grpo-jax eval` and `sample`: what they read, and what they print."""

import numpy as np
import pytest

from grpo_jax.commands import eval_and_sample
from grpo_jax.rollouts import pass_at_k
from tests.rollouts import pass_at_k_test


def test_the_table_fits_a_terminal(capsys, monkeypatch):
  pytest.importorskip('rich')
  monkeypatch.setenv('COLUMNS', '80')
  valid = np.array([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
  rollout = pass_at_k_test.made(valid)
  summary = pass_at_k.summarize(rollout, [1, 4], 1.0, seed=0)
  summary |= {'tokens_mean': 9.99, 'tokens_p90': 10.0}
  eval_and_sample.show(summary)
  text = capsys.readouterr().out
  assert max(map(len, text.splitlines())) <= 60
  assert '3 prompts, 4 completions each' in text
  row = next(line for line in text.splitlines() if 'pass@1' in line)
  assert '0.583' in row and '0.500 to 0.667' in row
  assert ' 9.990 ' in text and ' 10.0 ' in text
  assert 'majority@4' in text and 'prompts left out@4' in text
  assert 'interval ' not in text.replace('95 % interval', '')


def test_without_standard_input_prompts_are_asked_for(monkeypatch):
  monkeypatch.setattr(eval_and_sample.sys, 'stdin', None)
  assert list(eval_and_sample.prompts(['a'], None)) == ['a']
  for file in (None, '-'):
    with pytest.raises(ValueError, match='standard input is closed; give'):
      list(eval_and_sample.prompts([], file))
