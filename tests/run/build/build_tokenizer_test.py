"""The tokenizer of a run: by name, with its prompts, or given in Python."""

import contextlib
import dataclasses
import json
import types

import numpy as np
import pytest

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax import engines
from grpo_jax import models
from grpo_jax.engines.local import arrays
from grpo_jax.models import weights
from grpo_jax.run import session
from grpo_jax.run.build import build
from grpo_jax.run.build import build_tokenizer
from grpo_jax.run.build import given as given_lib
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


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  """Base weights: a chat template that ends turns by no end token."""
  path = tmp_path_factory.mktemp('base')
  hf_folder.write_tokenizer(path, eos=('<|endoftext|>',))
  return path


def test_the_end_of_a_turn_becomes_an_end_token_and_is_said(base):
  config = runs.small(**{**CHAT, 'data.tokenizer': str(base)})
  parts = build.sampler(config, build.marks.NOTHING)
  own = data.Tokenizer.from_folder(base)
  (document,), (turn,) = own.encode('<|endoftext|>'), own.encode('<|im_end|>')
  assert own.eos_ids == (document,)
  assert parts.sampling.eos_ids == (document, turn)
  assert parts.tokenizer.answer_end_id() == turn
  said = '<|im_end|> ends a turn, so it is an end token beside <|endoftext|>'
  assert build_tokenizer.turn_end_note(config, parts.tokenizer) == said
  # Without chats nothing has turns, and nothing is said.
  config = runs.small(**{'data.tokenizer': str(base)})
  plain = build.tokenizer_of(config)
  assert plain.eos_ids == (document,) and plain.answer_end_id() == document
  assert build_tokenizer.turn_end_note(config, plain) == ''


def test_the_start_says_which_end_token_it_has_added(base, folder):
  facts = {}
  screen = types.SimpleNamespace(
    phase=lambda _: contextlib.nullcontext(), fact=facts.__setitem__
  )
  for tokenizer, said in (folder, False), (base, True):
    facts.clear()
    changes = {'data.tokenizer': str(tokenizer), 'data.prompt_buckets': (40,)}
    config = runs.small(**CHAT, **changes)
    rows = [{'prompt': '1', 'answer': '1'}]
    config, given = given_lib.put(config, prompts=rows)
    session._built(config, given, screen)
    assert ('ends' in facts) == said
  assert facts['ends'].startswith('<|im_end|> ends a turn, so it is an end')


def test_end_tokens_that_are_named_are_all_there_are(base, folder):
  named = {'data.eos_tokens': ('<|endoftext|>',)}
  config = runs.small(**CHAT, **named, **{'data.tokenizer': str(base)})
  tokenizer = build.tokenizer_of(config)
  assert tokenizer.eos_ids == tuple(tokenizer.encode('<|endoftext|>'))
  said = "<|im_end|> ends a turn, but is no end token: data.eos_tokens names ('"
  assert build_tokenizer.turn_end_note(config, tokenizer).startswith(said)
  # A folder that names it needs no word.
  config = runs.small(**CHAT, **{'data.tokenizer': str(folder)})
  assert build_tokenizer.turn_end_note(config, build.tokenizer_of(config)) == ''


def test_a_tokenizer_from_python_ends_turns_too(base):
  form = data.PromptFormat(chat=True)
  own = data.Tokenizer.from_folder(base, prompt_format=form)
  config, given = given_lib.put(runs.small(), tokenizer=own)
  found = build.tokenizer_of(config, given)
  assert found.eos_ids == (*own.eos_ids, *own.encode('<|im_end|>'))


@pytest.mark.parametrize('end, said', [('### End\n', '### End'), ('', 'user:')])
def test_turns_that_end_by_a_text_are_said(end, said, tmp_path):
  template = (
    '{% for m in messages %}{{ m.role }}: {{ m.content }}\nEND{% endfor %}'
  ).replace('END', end)
  hf_folder.write_tokenizer(tmp_path, template, eos=('</s>',))
  changes = {'data.tokenizer': str(tmp_path), 'data.chat': True}
  config = runs.small(**changes)
  note = build_tokenizer.turn_end_note(config, build.tokenizer_of(config))
  assert (
    note == f'turns end by the text {said!r}, which is no token and no stop'
  )
  config = runs.small(**changes, **{'sampler.stop_strings': (said[:3],)})
  assert build_tokenizer.turn_end_note(config, build.tokenizer_of(config)) == ''


@pytest.mark.parametrize(
  'stops, text, kept',
  [
    (('</think>',), 'a</think>b', 'a</think>'),
    (('<|im_start|>', 'z'), 'ab<|im_start|>c', 'ab<|im_start|>'),
    (('</s>',), 'a</s></s>', 'a</s>'),
    (('<|im_end|>',), 'a<|im_end|>', 'a<|im_end|>'),  # an end token anyway
    (('a</think>',), '</think>a</think>b', '</think>a</think>'),
    (('b', '</think>'), 'a</think>b', 'a</think>'),
    (('b',), 'a</think>bc', 'a</think>b'),  # rewards see no special tokens
    (('ab',), 'a</think>bc', 'a</think>b'),
    (('</think>',), 'abc', 'abc'),
  ],
)
def test_stop_strings_that_are_special_tokens_stop(stops, text, kept, folder):
  changes = {'data.tokenizer': str(folder), 'sampler.stop_strings': stops}
  parts = build.sampler(runs.small(**changes), build.marks.NOTHING)
  ids = parts.tokenizer.encode(text)
  count, finish = arrays.end_of(
    np.array(ids), parts.sampling, parts.engine.decode
  )
  assert ids[:count] == parts.tokenizer.encode(kept)
  assert (finish == engines.STOPPED) == (text != 'abc')


@pytest.mark.parametrize('stops', [('',), ('a', '')])
def test_an_empty_stop_string_is_refused(stops):
  with pytest.raises(ValueError, match='stop_strings=.*the empty text is in'):
    runs.small(**{'sampler.stop_strings': stops})
  with pytest.raises(ValueError, match='stop_strings=.*none of them empty'):
    engines.Sampling(stop_strings=stops)


@pytest.mark.parametrize('stops', ['ab', (3,), (None,)])
def test_stop_strings_are_a_tuple_of_texts(stops):
  with pytest.raises(ValueError, match='it must be a tuple of texts'):
    engines.Sampling(stop_strings=stops)


def test_a_config_with_chats_comes_back_from_its_file(folder):
  values = config_lib.default()
  values.data.tokenizer = str(folder)
  values.data.chat = True
  values.data.chat_kwargs = {'enable_thinking': False, 'tags': ['a']}
  config = config_lib.resolve(values)
  saved = json.loads(json.dumps(dataclasses.asdict(config)))
  assert config_lib.dataclass_from_dict(config_lib.Config, saved, '') == config
