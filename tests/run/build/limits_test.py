"""What a run is refused for although each of its fields may have its value."""

import dataclasses
import json
import types

import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import engines
from grpo_jax.mesh import sharding
from grpo_jax.models import weights
from grpo_jax.run import policy as policies
from grpo_jax.run.build import build
from grpo_jax.run.build import limits
from grpo_jax.run.build import model as build_model
from tests import tiny
from tests.run import export_test

LLAMA = {
  'architectures': ['LlamaForCausalLM'],
  'vocab_size': 14,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'rope_theta': 1e4,
}
GEMMA3 = {
  'architectures': ['Gemma3ForConditionalGeneration'],
  'text_config': {
    **LLAMA,
    'num_key_value_heads': 1,
    'max_position_embeddings': 96,
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
  },
}


def rope(kind, factor, original=None, **more):
  told = {'rope_type': kind, 'factor': factor, **more}
  if original is not None:
    told['original_max_position_embeddings'] = original
  return told


# What a config.json has, and the tokens that prompt and completion may have.
CONTEXTS = [
  ({'max_position_embeddings': 64}, 64),
  ({}, None),
  ({'max_position_embeddings': None}, None),
  (
    {'max_position_embeddings': 64, 'rope_scaling': rope('linear', 2.0)},
    64,
  ),
  (
    {'max_position_embeddings': 128, 'rope_scaling': rope('llama3', 8.0, 8)},
    128,
  ),
  ({'rope_scaling': rope('llama3', 8.0, 8)}, 64),
  # As Qwen's pages switch YaRN on: the trained length stays where it is.
  (
    {'max_position_embeddings': 32, 'rope_scaling': rope('yarn', 4.0, 32)},
    128,
  ),
  ({'max_position_embeddings': 32, 'rope_scaling': rope('yarn', 4.0)}, 128),
  (
    {'max_position_embeddings': 128, 'rope_scaling': rope('yarn', 4.0, 32)},
    128,
  ),
  (
    {
      'max_position_embeddings': 64,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4},
    },
    64,
  ),
  (
    {
      'max_position_embeddings': 32,
      'original_max_position_embeddings': 16,
      'rope_parameters': {'full_attention': rope('yarn', 3.0)},
    },
    48,
  ),
]


@pytest.mark.parametrize('fields, most', CONTEXTS)
def test_how_many_tokens_a_model_was_made_for(fields, most, tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(LLAMA | fields))
  found = weights.source(tmp_path, needs_weights=False)
  assert found.context_tokens == most


def test_of_a_model_in_a_model_too(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(GEMMA3))
  assert weights.source(tmp_path, needs_weights=False).context_tokens == 96


def config(folder, prompt=(24, 8), tokens=8, buckets=(8,), **changes):
  values = config_lib.default()
  values.update_from_flattened_dict(
    {
      'model.path': str(folder),
      'data.tokenizer': 'arithmetic',
      'data.prompt_buckets': prompt,
      'data.completion_buckets': buckets,
      'sampler.max_tokens': tokens,
      **changes,
    }
  )
  return config_lib.resolve(values)


def check_length(given):
  spec = build_model.weights_spec(given, None)
  limits.check_length(spec, *limits.longest(given))


@pytest.fixture
def folder(tmp_path):
  fields = LLAMA | {'max_position_embeddings': 32}
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  return tmp_path


@pytest.mark.parametrize(
  'changes, tokens',
  [
    (dict(prompt=(25, 8)), (25, 8, 33)),
    (dict(tokens=9, buckets=(9,)), (24, 9, 33)),
    (dict(prompt=(8, 32)), (32, 8, 40)),
    # What a demonstration may have, beside what is drawn.
    (dict(buckets=(8, 16), **{'warm_up.steps': 1}), (24, 16, 40)),
  ],
)
def test_longer_rows_than_the_model_was_made_for_are_refused(
  changes, tokens, folder
):
  prompt, completion, both = tokens
  given = config(folder, **changes)
  with pytest.raises(ValueError) as refused:
    check_length(given)
  assert str(refused.value) == (
    f'A prompt of {prompt} tokens and a completion of {completion} have {both} '
    f'tokens together, but the model in {folder} was made for 32 '
    '(max_position_embeddings in its config.json); give shorter ones '
    '(data.prompt_buckets, max_tokens), or config.model.beyond_context=True if '
    'this is meant.'
  )
  meant = config(folder, **changes, **{'model.beyond_context': True})
  check_length(meant)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    # A wide bucket of completions that are never as long.
    dict(buckets=(8, 64)),
    {'model.path': ''},
  ],
)
def test_rows_that_fit_are_not(changes, folder):
  check_length(config(folder, **changes))


@pytest.mark.parametrize('scaling', ['linear', ['linear'], 2.0])
def test_a_scaling_that_is_no_object_is_a_sentence(scaling, tmp_path):
  fields = LLAMA | {'max_position_embeddings': 32, 'rope_scaling': scaling}
  (tmp_path / 'config.json').write_text(json.dumps(fields))
  words = 'rope_scaling=.* no object with fields'
  with pytest.raises(ValueError, match=words):
    check_length(config(tmp_path))  # which comes first in a run
  with pytest.raises(ValueError, match=words):
    weights.source(tmp_path, needs_weights=False).config()


def test_a_longer_completion_than_the_runs_own_is_refused_too(folder):
  run = types.SimpleNamespace(
    **build.sampler_specs(config(folder, buckets=(8, 64))),
    tokenizer=data.character_tokenizer(data.ALPHABET),
    sampling=engines.Sampling(),
    environment=None,
    engine=types.SimpleNamespace(capabilities=engines.Capabilities()),
  )
  policy = policies.Policy(run, 1, data.ArithmeticSource('heldout'))
  words = 'prompt of 3 tokens and a completion of 30 .* made for 32'
  with pytest.raises(ValueError, match=words):
    list(policies.sample(policy, ['1+2'], max_tokens=30))
  with pytest.raises(AttributeError, match='submit'):  # it begins to sample
    list(policies.sample(policy, ['1+2'], 2, max_tokens=29))
  words = 'prompt of 6 tokens and a completion of 27 .* made for 32'
  with pytest.raises(ValueError, match=words):
    policies.evaluate(policy, 2, 1, [1], max_tokens=27)


def test_a_learning_rate_that_rises_for_longer_than_the_run_is_refused(
  tmp_path,
):
  folder = export_test.pretrained(tmp_path / 'base')
  fields = {
    'steps': 3, 'learner.batches': 2, 'learner.epochs': 2, 'sampler.prompts': 2,
  }  # fmt: skip

  def rising(steps):
    return export_test.small(folder, **fields, **{'optim.warmup_steps': steps})

  for allowed in (0, 12):
    limits.check_work(rising(allowed), sharding.make_mesh())
  made = rising(13)
  words = 'warmup_steps=13, but 3 rollouts have 12 optimizer steps'
  with pytest.raises(ValueError, match=words):
    build.run(made)
  with pytest.raises(ValueError, match=words):
    build.abstract(made, sharding.make_mesh())
  limits.check_work(dataclasses.replace(made, steps=0), sharding.make_mesh())


def test_runs_and_plans_are_refused_then(tmp_path):
  folder = export_test.pretrained(tmp_path / 'base')  # of 512 tokens
  long = export_test.small(folder, **{'data.prompt_buckets': (509,)})
  words = 'made for 512 .*beyond_context=True'
  with pytest.raises(ValueError, match=words):
    build.run(long)
  with pytest.raises(ValueError, match=words):  # as `sample` and `eval` do
    build.sampler(long)
  with pytest.raises(ValueError, match=words):
    build.abstract(long, sharding.make_mesh())
  fits = export_test.small(folder, **{'data.prompt_buckets': (508,)})
  made = build.sampler(fits)
  # Its embedding has six rows more than its tokenizer has tokens.
  first = made.tokenizer.vocab_size
  assert made.model.config.vocab_size == first + 6
  assert made.model.config.unused_ids == ((first, first + 6),)


def test_a_row_takes_its_states_however_long_it_is(monkeypatch):
  shape = dataclasses.replace(tiny.CONFIG, **tiny.STATES)
  monkeypatch.setattr(limits, 'longest', lambda config: (8, 16))
  place = 2 * 2 * 8 * 4  # of the one layer with attention
  states = 4 * (2 * (2 * (24 + 40) + 4 * 60) + 2 * 32)
  found = limits._row_bytes(config_lib.Config(), shape)
  assert found == (8 + 16) * place + states
