"""A run of a model with a table that no update changes, without adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_jax
from grpo_jax import models
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models import weights
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build
from grpo_jax.run.build import model as build_model
from tests import runs
from tests.run import export_test

pytestmark = pytest.mark.usefixtures('shared_programs')

LOCAL = models.LayerKind(window_tokens=8, rope_base=50.0)
WIDE = models.LayerKind(rotated=0.5, proportional=True, head_dim=16)
# As Gemma 4 has it: two layers, and two that read their keys and values.
SHAPE = dict(
  num_layers=4,
  pattern=(
    *(LOCAL, WIDE),
    models.LayerKind(8, 50.0, shares_kv=True),
    models.LayerKind(
      rotated=0.5, proportional=True, head_dim=16, shares_kv=True
    ),
  ),
  qk_norm=True,
  value_norm=True,
  tied_embeddings=True,
  activation='gelu_tanh',
  embedding_scale=4.0,
  post_norms=True,
  layer_scales=True,
  layer_inputs=8,
  attention_scale=1.0,
)
TABLE = 'inputs', 'input_table'
CHANGES = {'learner.method_kwargs': {'kl_coefficient': 0.1}}


@pytest.fixture(scope='module')
def trained(shared_programs, tmp_path_factory):
  folder = tmp_path_factory.mktemp('frozen')
  export_test.pretrained(folder / 'gemma4', **SHAPE)
  config = export_test.small(folder / 'gemma4', **CHANGES)
  loop.train(config, folder / 'run')
  return config, folder / 'run'


def of(tree, path):
  return functools.reduce(lambda part, name: part[name], path, tree)


def test_the_table_is_in_no_checkpoint_and_has_no_moments(trained):
  config, workdir = trained
  _, arrays, _ = runs.saved(workdir)
  assert any('input_projection' in name for name in arrays)
  assert not any('input_table' in name for name in arrays)
  records = runs.records(workdir)
  assert all(row['sampler_gap'] < 1e-4 for row in records[1:])
  run = build.run(config)
  parts = build.abstract_params(run)
  assert of(parts.frozen, TABLE).shape[1] == 4 * 8
  assert not run.model.trains(TABLE)
  assert run.model.trains(('inputs', 'input_projection'))
  assert len(jax.tree.leaves(parts.frozen)) == 1
  policies.load(config, workdir)  # refuses another table than the run's


def test_all_else_has_learned_but_for_the_factors_of_the_stream(trained):
  config, workdir = trained
  source = weights.source(config.model.path)
  before = weights.load(source, source.config())
  done = grpo_jax.convert(workdir, workdir.parent / 'out')
  assert done.parameters == sum(x.size for x in jax.tree.leaves(before))
  written = weights.source(workdir.parent / 'out')
  assert written.architecture == 'Gemma4ForCausalLM'
  after = weights.load(written, written.config())
  for path, one in jax.tree_util.tree_leaves_with_path(before):
    names = sharding.path_names(path)
    new = np.asarray(of(after, map(_index, names)))
    stays = names == TABLE or names[-1] == 'layer_scale'
    assert np.array_equal(one, new) == stays, names


def _index(name):
  return int(name) if name.isdecimal() else name


@pytest.mark.long
def test_a_run_in_two_starts_is_the_run_in_one(trained, tmp_path):
  config, workdir = trained
  stopped = export_test.small(config.model.path, **CHANGES, steps=1)
  loop.train(stopped, tmp_path)
  loop.train(config, tmp_path)
  _, expected, _ = runs.saved(workdir)
  _, found, _ = runs.saved(tmp_path)
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_run_may_begin_from_it_with_adapters_or_without(trained):
  config, workdir = trained
  policy = build_model.policy(
    build_model.source(str(workdir)),
    weights.source(config.model.path).config().vocab_size,
    sharding.make_mesh(),
  )
  for changes in {}, {'lora.rank': 2, 'lora.alpha': 4.0}:
    run = build.run(export_test.small(workdir, **changes))
    begun, beside = build.initial_params(run), build.frozen_params(run)
    plain = lora.join(begun, beside)
    if changes:
      plain = lora.merge(plain, run.model.config.lora)
    jax.tree.map(np.testing.assert_array_equal, plain, policy.params)


@pytest.mark.long
def test_each_device_has_its_part_and_the_table_may_be_in_bfloat16(trained):
  config, _ = trained
  run = build.run(config)
  whole = of(build.frozen_params(run), TABLE)
  mesh = sharding.make_mesh(fsdp=4, tensor=2)
  split = build_model.frozen(run.weights, run.model, mesh)
  found = of(split, TABLE)
  np.testing.assert_array_equal(found, whole)
  rows, columns = found.sharding.shard_shape(found.shape)
  assert columns == whole.shape[1] // 4
  assert rows == whole.shape[0] // (1 if whole.shape[0] % 2 else 2)
  halved = export_test.small(
    config.model.path, **CHANGES, **{'lora.base_dtype': 'bfloat16'}
  )
  table = of(build.frozen_params(build.run(halved)), TABLE)
  assert table.dtype == jnp.bfloat16
