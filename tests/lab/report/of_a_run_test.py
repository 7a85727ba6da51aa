"""From a run to its page: what training writes is what the page reads."""

import pytest

from grpo_jax.lab import report
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from tests import runs


@pytest.mark.long
def test_the_page_of_a_run_has_tokens_and_problems(tmp_path):
  config = runs.small(**{'steps': 2, 'log.token_effects': True})
  loop.train(config, tmp_path / 'run')
  names = {
    folder: [path.name for path in parquet.files(tmp_path / 'run' / folder)]
    for folder in ('completions', 'evaluations')
  }
  steps = [f'step_{step:08d}.parquet' for step in range(3)]
  assert names == {'completions': steps[1:], 'evaluations': steps[::2]}
  text = report.as_html(report.make_page([str(tmp_path / 'run')]))
  assert text.count('<pre class="tokens"') == 2 * 3 * 4  # 3 prompts, 4 each
  assert 'of 20 problems became right' in text
  assert 'host_peak_gib' in text and 'zero above 1.2 for A' in text
  # A replay reads files with these columns as it reads others.
  again = parquet.read(parquet.path_of(tmp_path / 'run' / 'completions', 1))
  assert not {'coefficient', 'log_ratio_after'} & again.batch.extras.keys()
