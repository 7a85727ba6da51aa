"""A run that trains adapters alone: its checkpoints, its end, its successor."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build
from grpo_jax.run.build import model as build_model
from tests import runs

pytestmark = pytest.mark.usefixtures('shared_programs')

LORA = {
  'reward': 'tests.judges:even',
  'lora.rank': 2,
  'lora.alpha': 4.0,
  'learner.method_kwargs': {'kl_coefficient': 0.1},
}


@pytest.fixture(scope='module')
def trained(shared_programs, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('lora') / 'run'
  config = runs.small(**LORA)
  loop.train(config, workdir)
  return config, workdir


def test_adapters_learn_and_nothing_else_is_kept(trained):
  config, workdir = trained
  records = runs.records(workdir)
  # The sampler has the adapters of the last update: the learner finds its
  # log-probabilities again.
  assert all(row['sampler_gap'] < 1e-4 for row in records[1:])
  assert records[-1]['kl_ref_k3'] > 0 == records[1]['kl_ref_k3']
  _, arrays, _ = runs.saved(workdir)
  kept = {name for name in arrays if "['params']" in name}
  assert kept and all(name.endswith(("_a']", "_b']")) for name in kept)
  assert all(
    np.any(arrays[name]) for name in kept if name.endswith("query_b']")
  )


@pytest.mark.long
def test_a_run_in_two_starts_is_the_run_in_one(trained, tmp_path):
  config, workdir = trained
  loop.train(runs.small(**LORA, steps=2), tmp_path)
  loop.train(config, tmp_path)
  _, expected, _ = runs.saved(workdir)
  _, found, _ = runs.saved(tmp_path)
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_other_weights_beside_the_adapters_are_refused(
  trained, tmp_path, monkeypatch
):
  config, workdir = trained
  shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
  frozen = build_model.frozen

  def changed(*args):
    return jax.tree.map(lambda x: x + 1e-3, frozen(*args))

  monkeypatch.setattr(build_model, 'frozen', changed)
  with pytest.raises(ValueError, match='not those that this run began with'):
    loop.train(config, tmp_path)
  with pytest.raises(ValueError, match='not those that this run began with'):
    policies.load(config, tmp_path)


def test_eval_reads_the_whole_policy_and_a_run_may_begin_from_it(
  trained, tmp_path
):
  config, workdir = trained
  policy = policies.load(config, workdir, to_evaluate=True)
  found = policies.evaluate(policy, 20, 1, [1], temperature=0.0)
  assert found['mean'] == pytest.approx(
    runs.records(workdir)[-1]['heldout_accuracy']
  )
  # Weights alone: no adapters, and the adapted policy from the start.
  after = runs.small(**{'model.path': str(workdir), 'warm_up.steps': 0})
  run = build.run(after)
  params = build.initial_params(run)
  assert run.model.config.lora is None
  theirs = build.run(config)
  whole = lora.join(policy_params(config, workdir), build.frozen_params(theirs))
  merged = lora.merge(whole, theirs.model.config.lora)
  jax.tree.map(np.testing.assert_array_equal, params, merged)
  begun = {**LORA, 'model.path': str(workdir), 'data.heldout': ''}
  loop.train(runs.small(steps=1, **begun), tmp_path)


@pytest.mark.long
def test_the_weights_beside_adapters_may_be_bfloat16(tmp_path):
  config = runs.small(**LORA, **{'lora.base_dtype': 'bfloat16', 'steps': 2})
  loop.train(config, tmp_path / 'run')
  run = build.run(config)
  found = build.frozen_params(run)
  for path, x in jax.tree_util.tree_leaves_with_path(found):
    is_matrix = run.model.decays(sharding.path_names(path))
    assert x.dtype == (jnp.bfloat16 if is_matrix else jnp.float32), path
  _, arrays, _ = runs.saved(tmp_path / 'run')
  kept = [x for name, x in arrays.items() if "['params']" in name]
  assert kept and all(x.dtype == np.float32 for x in kept)
  records = runs.records(tmp_path / 'run')
  assert all(row['sampler_gap'] < 1e-4 for row in records[1:])
  # A successor has all that the adapters have learned, in float32.
  after = {'model.path': str(tmp_path / 'run'), 'warm_up.steps': 0}
  whole = lora.join(policy_params(config, tmp_path / 'run'), found)
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), whole)
  jax.tree.map(
    np.testing.assert_array_equal,
    build.initial_params(build.run(runs.small(**after))),
    lora.merge(wide, run.model.config.lora),
  )
  rounded = runs.small(**LORA, **after, **{'lora.base_dtype': 'bfloat16'})
  with pytest.raises(ValueError, match='most of what it has learned'):
    loop.train(rounded, tmp_path / 'rounded')


def policy_params(config, workdir):
  from grpo_jax.run.keep.checkpoint import Checkpoints

  wanted = build.abstract_params(build.run(config)).trained
  with Checkpoints(workdir / 'checkpoints', read_only=True) as saves:
    return saves.restore(wanted, field='params').state


def test_a_shape_beside_a_path_is_refused(trained):
  _, workdir = trained
  wider = runs.small(**{'model.path': str(workdir), 'model.width': 64})
  with pytest.raises(ValueError, match='model.width=64, but the model in'):
    build.run(wider)
