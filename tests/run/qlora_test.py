"""A run whose frozen weights are quantized: read, resumed, written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_jax
from grpo_jax.mesh import sharding
from grpo_jax.models import lora
from grpo_jax.models import quantized
from grpo_jax.models import weights
from grpo_jax.run import export
from grpo_jax.run import loop
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build
from grpo_jax.run.build import model as build_model
from tests import runs
from tests.run import export_test

pytest.importorskip('qwix', reason='qwix is not installed')
pytestmark = pytest.mark.usefixtures('shared_programs')

KINDS = pytest.param('int8', marks=pytest.mark.long), 'nf4'
LORA = {
  'lora.rank': 2,
  'lora.alpha': 4.0,
  'learner.method_kwargs': {'kl_coefficient': 0.1},
  'steps': 4,
}


@pytest.fixture(scope='module', params=KINDS)
def trained(request, shared_programs, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  export_test.pretrained(folder / 'llama')
  config = export_test.small(
    folder / 'llama', **LORA, **{'lora.base_dtype': request.param}
  )
  loop.train(config, folder / 'run')
  return config, folder / 'run'


def test_adapters_learn_and_nothing_else_changes_or_is_kept(trained):
  config, workdir = trained
  records = runs.records(workdir)
  # Sampler and learner read the same codes.
  assert all(row['sampler_gap'] < 1e-4 for row in records[1:])
  assert records[-1]['kl_ref_k3'] > 0 == records[1]['kl_ref_k3']
  _, arrays, _ = runs.saved(workdir)
  kept = {name for name in arrays if "['params']" in name}
  assert kept and all(name.endswith(("_a']", "_b']")) for name in kept)
  # What was read is what the first start was given, and all that codes can be.
  run = build.run(config)
  found, wanted = build.frozen_params(run), build.abstract_params(run).frozen
  for one, like in zip(
    jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
  ):
    assert (one.shape, one.dtype) == (like.shape, like.dtype)
  policies.load(config, workdir)  # refuses other weights than the run's


def test_weights_are_quantized_as_they_are_read_on_any_devices(trained):
  config, _ = trained
  run, kind = build.run(config), config.lora.base_dtype
  found = build.frozen_params(run)
  source = weights.source(config.model.path)
  dense = weights.load(source, source.config())
  one = dense['blocks'][0]['attention']['output'][1]
  expected = quantized.quantize(one, kind, 2)
  layers = jax.tree.map(lambda x: x[1], found['blocks'][0]['attention'])
  jax.tree.map(np.testing.assert_array_equal, layers['output'], expected)
  assert found['embedding'].dtype == jnp.bfloat16
  for mesh in sharding.make_mesh(fsdp=4, tensor=2), sharding.make_mesh(fsdp=8):
    split = build_model.frozen(run.weights, run.model, mesh)
    jax.tree.map(np.testing.assert_array_equal, split, found)


def test_a_run_in_two_starts_is_the_run_in_one(trained, tmp_path):
  config, workdir = trained
  changes = {**LORA, 'lora.base_dtype': config.lora.base_dtype, 'steps': 2}
  stopped = export_test.small(config.model.path, **changes)
  loop.train(stopped, tmp_path)
  loop.train(config, tmp_path)
  _, expected, _ = runs.saved(workdir)
  _, found, _ = runs.saved(tmp_path)
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_what_is_written_is_what_was_trained(trained, tmp_path):
  config, workdir = trained
  kind = config.lora.base_dtype
  done = grpo_jax.convert(workdir, tmp_path / 'merged')
  assert done.dequantized == kind
  merged = weights.source(tmp_path / 'merged')
  policy = build_model.policy(
    build_model.source(str(workdir)),
    merged.config().vocab_size,
    sharding.make_mesh(),
  )
  expected = lora.merge(
    quantized.whole(policy.params), policy.model.config.lora
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    weights.load(merged, merged.config()),
    jax.tree.map(lambda x: x.astype(jnp.float32), expected),
  )
  counted = sum(x.size for x in jax.tree.leaves(expected))
  assert done.parameters == counted
  done = export.convert(str(workdir), tmp_path / 'adapter', adapter=True)
  assert not done.dequantized
  told = json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())
  assert told['base_model_name_or_path'] == config.model.path


def test_a_run_may_begin_from_it_but_not_round_it(trained, tmp_path):
  config, workdir = trained
  after = {}
  begun = build.initial_params(build.run(export_test.small(workdir)))
  assert {x.dtype for x in jax.tree.leaves(begun)} == {jnp.dtype('float32')}
  after['lora.base_dtype'] = config.lora.base_dtype
  rounded = export_test.small(workdir, **LORA, **after)
  with pytest.raises(ValueError, match=f'convert {workdir} FOLDER`, and give'):
    loop.train(rounded, tmp_path / 'rounded')
