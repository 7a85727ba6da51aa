"""A run whose sampler splits weights over more devices than its updates do."""

import pyarrow.parquet
import pytest

from grpo_jax.planning import dry_run
from grpo_jax.rollouts import parquet
from grpo_jax.run import loop
from grpo_jax.run.build import build
from tests import runs

SPREAD = {
  'steps': 2,
  'mesh.data': 2,
  'mesh.fsdp': 4,
  'sampler.prompts': 8,
  'learner.micro_rows': 8,
  'model.num_heads': 8,
  'model.num_kv_heads': 2,
}


def drawn(folder, **changes):
  """The ids of all completions of a run, rollout by rollout."""
  loop.train(runs.small(**SPREAD, **changes), folder)
  tables = map(
    pyarrow.parquet.read_table, parquet.files(folder / 'completions')
  )
  return [table['completion_ids'].to_pylist() for table in tables]


@pytest.mark.long
def test_the_completions_are_those_of_the_learners_mesh(tmp_path):
  plain = drawn(tmp_path / 'plain')
  assert len(plain) == 2 and plain[0] != plain[1]
  assert drawn(tmp_path / 'spread', **{'sampler.tensor': 4}) == plain


def test_what_does_not_divide_the_devices_is_refused():
  with pytest.raises(ValueError, match='config.sampler.tensor=3 does not'):
    build.run(runs.small(**SPREAD, **{'sampler.tensor': 3}))


def test_a_check_says_what_becomes_of_heads_that_are_not_divided():
  changes = {'mesh.data': 1, 'mesh.fsdp': 2, 'mesh.tensor': 4}
  run = build.run(runs.small(**SPREAD | changes))
  update, sampler = dry_run._warnings_of_heads(run)
  assert 'mesh.tensor=4 does not divide the 2 key-value heads' in update
  assert 'split by rows over all 8 devices' in sampler
  changes |= {'mesh.fsdp': 4, 'mesh.tensor': 2, 'sampler.tensor': 8}
  (sampler,) = dry_run._warnings_of_heads(
    build.run(runs.small(**SPREAD | changes))
  )
  assert sampler.startswith('While sampling, tensor=8 does not divide')
  assert not dry_run._warnings_of_heads(build.run(runs.small(**SPREAD)))
