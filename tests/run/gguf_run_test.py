"""Runs whose weights, tokenizer and chat template are one GGUF file."""

import dataclasses
import os
import pathlib
import runpy

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import config as config_lib
from grpo_jax import losses
from grpo_jax import models
from grpo_jax.models import weights
from grpo_jax.run import loop
from grpo_jax.run.build import build
from grpo_jax.run.build import method as build_method
from tests import runs
from tests import smollm2
from tests.data import gguf_test as tokenizers
from tests.models.weights import golden

pytestmark = pytest.mark.usefixtures('shared_programs')

pytest.importorskip('gguf', reason="needs `pip install '.[gguf]'`")

CONFIGS = runs.ROOT / 'configs'
SMOLLM2 = 'runs the real SmolLM2 for minutes; set GRPO_JAX_SMOLLM2=1'


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  """A random Llama of two layers, with the tokenizer of `tokenizers`."""
  from safetensors import numpy as safetensors

  from tests.models.weights import gguf_test

  folder = tmp_path_factory.mktemp('gguf')
  fields = {
    name: value
    for name, value in tokenizers.vocabulary().items()
    if name.startswith('tokenizer.')
  }
  size = len(fields['tokenizer.ggml.tokens'])
  shape = dataclasses.replace(gguf_test.CONFIG, vocab_size=size)
  weights.save(folder / 'hf', shape, golden.random_params(shape))
  tensors = safetensors.load_file(folder / 'hf' / 'model.safetensors')
  return gguf_test.write(folder / 'model.gguf', shape, tensors, tokens=fields)


def config(file, **changes):
  return runs.small(
    **{
      'reward': 'tests.judges:even',
      'model.path': str(file),
      'model.num_layers': 3,  # the default: the shape comes with the file
      'model.width': 128,
      'model.mlp_width': 256,
      'model.num_heads': 4,
      'model.rope_base': 10_000.0,
      'model.unroll': False,
      'data.train': 'largest',
      'data.heldout': '',
      'data.tokenizer': '',
      'data.chat': True,
      'data.completion_prefix': '12',
      'data.prompt_buckets': (64,),
      'model.beyond_context': True,  # of 64 tokens
      'warm_up.steps': 0,
      'steps': 1,
      'optim.warmup_steps': 0,  # else the first update would change nothing
      **changes,
    }
  )


@pytest.mark.long
def test_weights_tokenizer_and_template_come_from_the_file(file, tmp_path):
  asked = config(file)
  run = build.run(asked)
  ids = run.tokenizer.encode_prompt('la')
  assert run.tokenizer.decode(ids).endswith('la12')
  assert run.model.config.num_layers == 2
  result = loop.train(asked, tmp_path)
  assert result['steps'] == 1
  records = runs.records(tmp_path)
  assert records[-1]['update_norm'] > 0
  assert all(row['sampler_gap'] < 1e-4 for row in records[1:])


def test_a_shape_that_the_file_does_not_have_is_refused(file):
  with pytest.raises(ValueError, match='model.num_layers=5, but the model in'):
    build.run(config(file, **{'model.num_layers': 5}))


def test_a_path_that_is_nothing_is_refused(tmp_path):
  with pytest.raises(ValueError, match='There is no .*nothing.gguf'):
    build.run(config(tmp_path / 'nothing.gguf'))


@pytest.mark.parametrize('name', ['smollm2', 'distill'])
def test_the_configs_of_smollm2_are_as_large_as_the_real_one(
  name, file, monkeypatch
):
  """All fields but the paths are used, on a small model."""
  monkeypatch.syspath_prepend(CONFIGS)  # as the command does
  fields = runpy.run_path(str(CONFIGS / f'{name}.py'))['get_config']()
  fields.model.path = str(file)
  assert bool(fields.teacher.path) == (name == 'distill')
  if fields.teacher.path:
    fields.teacher.path = str(file)
  fields.data.prompt_buckets = (96,)  # of a tokenizer that knows no words
  fields.model.beyond_context = True  # of 64 tokens
  run = build.run(config_lib.resolve(fields))
  assert isinstance(run.model, models.Transformer)
  record = run.heldout[0]
  prompt = run.tokenizer.decode(run.tokenizer.encode_prompt(record['prompt']))
  assert prompt.endswith('Answer:')
  numbers = [
    int(part)
    for part in ''.join(
      c if c.isdigit() else ' ' for c in record['prompt']
    ).split()
  ]
  assert record['answer'] == str(max(numbers)) and len(numbers) == 4
  assert (run.teacher is not None) == (name == 'distill')


def test_rewards_play_no_part_in_the_config_of_distill(monkeypatch):
  monkeypatch.syspath_prepend(CONFIGS)
  fields = runpy.run_path(str(CONFIGS / 'distill.py'))['get_config']()
  learner = config_lib.resolve(fields).learner
  method = build_method.make_method(learner.method, learner.method_kwargs)
  gap = jnp.array([[[0.5, -2.0], [1.0, 0.0]]])  # [P,G,T]
  for reward in ([[0.0, 0.0]], [[0.0, 1.0]]):
    batch = losses.make_batch(
      jnp.ones((1, 2, 2), bool),
      jnp.array(reward),
      logp_old=jnp.full((1, 2, 2), -3.0),
      extras={'logp_teacher': gap - 3.0},
    )
    credited, _ = losses.credit(method, batch, method.init())
    np.testing.assert_array_equal(credited.advantage, gap)


@pytest.mark.smollm2
@pytest.mark.skipif('GRPO_JAX_SMOLLM2' not in os.environ, reason=SMOLLM2)
@smollm2.needed
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_smollm2_learns(seed, tmp_path):
  path = pathlib.Path(runs.ROOT / 'configs' / 'smollm2.py')
  fields = runpy.run_path(str(path))['get_config']()
  fields.seed = seed
  result = loop.train(config_lib.resolve(fields), tmp_path)
  measured = accuracies(tmp_path)
  assert result['before'] < 0.35 and result['after'] > 0.9
  assert result['after'] >= np.max(measured) - 0.05


@pytest.mark.smollm2
@pytest.mark.skipif('GRPO_JAX_SMOLLM2' not in os.environ, reason=SMOLLM2)
@smollm2.needed
def test_with_shuffled_rewards_smollm2_does_not(tmp_path):
  path = pathlib.Path(runs.ROOT / 'configs' / 'smollm2.py')
  fields = runpy.run_path(str(path))['get_config']()
  fields.shuffle_rewards = True
  loop.train(config_lib.resolve(fields), tmp_path)
  measured = np.array(accuracies(tmp_path))
  assert len(measured) == 4 and np.all(np.abs(measured - measured[0]) < 0.1)


def accuracies(workdir):
  rows = runs.records(workdir)
  return [r['heldout_accuracy'] for r in rows if 'heldout_accuracy' in r]
