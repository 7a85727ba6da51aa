"""The tokenizer of a run: by name, with its prompts, or given in Python."""

import dataclasses
import json

import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import models
from grpo_jax.models import weights
from grpo_jax.training import build
from grpo_jax.training import given as given_lib
from tests import hf_folder
from tests import runs
from tests import tiny

CHAT = {'data.chat': True, 'data.chat_kwargs': {'enable_thinking': False}}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('model')
  hf_folder.write_tokenizer(path)
  return path


def test_a_folder_with_chats(folder):
  config = runs.small(**{**CHAT, 'data.tokenizer': str(folder)})
  parts = build.sampler(config, build.marks.NOTHING)
  own = data.Tokenizer.from_folder(folder)
  assert parts.tokenizer.vocab_size == own.vocab_size
  assert parts.model.config.vocab_size == own.vocab_size
  assert parts.sampling.eos_ids == own.eos_ids and len(own.eos_ids) == 2
  text = '<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n'
  expected = own.encode(text + '<think>\n\n</think>\n\n')
  assert parts.tokenizer.encode_prompt('1') == expected


def test_the_tokenizer_of_the_model(folder):
  changes = {'data.tokenizer': '', 'model.path': str(folder)}
  changes['data.completion_prefix'] = ':'
  config = runs.small(**changes)
  tokenizer = build.tokenizer_of(config, build.marks.NOTHING)
  assert tokenizer.encode_prompt('1') == tokenizer.encode('1:')
  named = {'data.eos_tokens': ('</s>',), 'data.pad_token': '<s>'}
  config = runs.small(**changes, **named)
  tokenizer = build.tokenizer_of(config, build.marks.NOTHING)
  ids = (*tokenizer.eos_ids, tokenizer.pad_id)
  assert ids == tuple(tokenizer.encode('</s><s>'))


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder, tmp_path):
  shape = tiny.model(vocab_size=100).config
  weights.save(tmp_path, shape, tiny.params(models.Transformer(shape)))
  values = (
    config_lib.default()
  )  # its shape of a model is no shape that was given
  values.data.tokenizer, values.model.path = str(folder), str(tmp_path)
  with pytest.raises(ValueError, match='embedding of the model has 100 rows'):
    build.sampler(config_lib.resolve(values), build.marks.NOTHING)


def test_a_tokenizer_from_python_keeps_its_format_unless_told_otherwise(folder):
  form = data.PromptFormat(chat=True)
  own = data.Tokenizer.from_folder(folder, prompt_format=form)
  config, given = given_lib.put(runs.small(), tokenizer=own)
  assert build.tokenizer_of(config, given) is own
  fields = dataclasses.replace(config.data, completion_prefix='A')
  config = dataclasses.replace(config, data=fields)
  changed = build.tokenizer_of(config, given)
  assert changed.prompt_format == data.PromptFormat(completion_prefix='A')


def test_a_config_with_chats_comes_back_from_its_file(folder):
  values = config_lib.default()
  values.data.tokenizer = str(folder)
  values.data.chat = True
  values.data.chat_kwargs = {'enable_thinking': False, 'tags': ['a']}
  config = config_lib.resolve(values)
  saved = json.loads(json.dumps(dataclasses.asdict(config)))
  assert config_lib.dataclass_from_dict(config_lib.Config, saved, '') == config
