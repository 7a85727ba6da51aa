"""A run on problems of reasoning-gym: a mixture, a curriculum, a stop."""

import importlib.util

import pytest

from grpo_jax.rewards import sandbox
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from tests import hf_folder
from tests import runs

pytestmark = [
  pytest.mark.long,
  pytest.mark.skipif(
    importlib.util.find_spec('reasoning_gym') is None
    or bool(sandbox.refusal('landlock')),
    reason='reasoning-gym is not installed, or the system offers no Landlock',
  ),
]
# Of the 4 prompts of a rollout, 3 are sums: the stage changes in the third.
SUMS = {
  'min_terms': 2,
  'max_terms': 2,
  'max_digits': 1,
  'curriculum': ({'from': 0}, {'from': 7, 'min_terms': 4, 'max_terms': 4}),
}


def small(folder, steps):
  return runs.small(
    **{
      'steps': steps,
      'data.train': (
        {'name': 'reasoning_gym:chain_sum', 'weight': 3.0, 'kwargs': SUMS},
        {'name': 'reasoning_gym:gcd', 'kwargs': {'size': 50}},
      ),
      'data.heldout': ({'name': 'reasoning_gym:gcd', 'kwargs': {'size': 4}},),
      'data.tokenizer': str(folder),
      'data.prompt_buckets': (),
      'evaluation.examples': 4,
      # In workers, as a config that says nothing has it.
      'reward': {'name': 'reasoning_gym', 'weight': 1.0, 'where': 'auto'},
    }
  )


def test_a_run_goes_on_across_a_stage_bit_for_bit(tmp_path):
  hf_folder.write_tokenizer(tmp_path / 'tokenizer')
  for name, stops in (('whole', (4,)), ('stops', (2, 4))):
    for steps in stops:
      loop.train(small(tmp_path / 'tokenizer', steps), tmp_path / name)
  runs.assert_equal(tmp_path / 'stops', tmp_path / 'whole')
  rollouts = [
    parquet.read(path) for path in parquet.files(tmp_path / 'stops/completions')
  ]
  assert [list(one.index) for one in rollouts] == [
    [4 * step + n for n in range(4)] for step in range(4)
  ]
  texts = [text for one in rollouts for text in one.prompt_texts]
  # A sum ends with its terms and 'Give ...' or '= ?'; signs stand between.
  sums = [text for text in texts if 'greatest' not in text.lower()]
  assert len(sums) == 12
  signs = [text.count(' + ') + text.count(' - ') for text in sums]
  assert signs == [1] * 7 + [3] * 5
  # All were judged, by the package's verifier.
  assert all((one.failures == '').all() for one in rollouts)
  assert all(one.batch.valid.all() for one in rollouts)
