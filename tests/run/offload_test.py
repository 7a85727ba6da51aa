"""Runs whose moments and reference lie in the memory of the host."""

import json

import jax
import numpy as np
import pytest

from grpo_jax.planning import dry_run
from grpo_jax.run import loop
from grpo_jax.run.keep import fingerprints
from tests import runs
from tests.run.resume_test import EVERYTHING

pytestmark = pytest.mark.usefixtures('shared_programs')

AWAY = {'optim.offload': True, 'reference.offload': True}
QUICK = {**EVERYTHING, 'data.heldout': '', 'learner.micro_rows': 4}
SPREAD = {'mesh.data': 2, 'mesh.fsdp': 2}


def arrays(workdir):
  return runs.saved(workdir)[1]


@pytest.mark.long
@pytest.mark.parametrize('changes', [{}, {'lora.rank': 2}])
def test_runs_go_on_with_it_and_without_it_bit_for_bit(tmp_path, changes):
  """One run in one piece; one that gets it midway, and loses it again."""
  usual = QUICK | changes | {'optim.decay': 'constant'}
  loop.train(runs.small(steps=3, **usual), tmp_path / 'whole')
  for steps, offloaded in ((1, {}), (2, AWAY), (3, {})):
    loop.train(
      runs.small(steps=steps, **usual, **offloaded), tmp_path / 'pieces'
    )
  whole, pieces = arrays(tmp_path / 'whole'), arrays(tmp_path / 'pieces')
  assert whole.keys() == pieces.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, pieces[name], err_msg=name)


@pytest.mark.long
def test_a_checkpoint_goes_to_another_mesh(tmp_path):
  usual = QUICK | AWAY | {'optim.decay': 'constant'}
  loop.train(runs.small(steps=1, **usual), tmp_path / 'one')
  loop.train(runs.small(steps=2, **usual, **SPREAD), tmp_path / 'one')
  loop.train(runs.small(steps=2, **usual), tmp_path / 'two')
  one, two = arrays(tmp_path / 'one'), arrays(tmp_path / 'two')
  for name in (name for name in two if 'params' in name):
    np.testing.assert_allclose(one[name], two[name], atol=1e-4, err_msg=name)


def test_a_fingerprint_does_not_depend_on_the_memory():
  x = np.arange(7, dtype=np.float32)
  here = jax.device_put(x)
  there = jax.device_put(x, here.sharding.with_memory_kind('pinned_host'))
  assert fingerprints.compute([here]) == fingerprints.compute([there])


@pytest.mark.long
def test_the_check_tells_the_memory_of_the_host_apart(tmp_path):
  changes = {'learner.method_kwargs': {'kl_coefficient': 0.1}}
  here, there = (
    dry_run.inspect(runs.small(**changes, **more), tmp_path)['memory_gib']
    for more in ({}, AWAY)
  )
  for name in ('optimizer state', 'reference'):
    away = f'{name} (in the memory of the host)'
    assert away not in here
    assert there[name] + there[away] == pytest.approx(here[name])
    assert there[name] < 1e-6
  json.dumps(there)
