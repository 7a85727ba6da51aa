"""A tokenizer that is written and read again is the same."""

import json

import pytest

from grpo_jax import data
from tests import hf_folder
from tests.data import gguf_test

TEXTS = ('12 la pay!', gguf_test.TEXT, '<|turn|>12', '')


@pytest.mark.parametrize('rule', ['smollm', 'gpt-2', 'qwen2', 'llama-bpe'])
def test_that_of_a_gguf_file_becomes_files(rule, tmp_path):
  fields = gguf_test.vocabulary(rule, eot_token_id=2)
  path = gguf_test.write(tmp_path / 'a.gguf', fields)
  one = data.Tokenizer.from_gguf(path)
  assert bool(one.bos_ids) == (rule == 'llama-bpe')
  data.save_tokenizer(one, tmp_path / 'out')
  again = data.Tokenizer.from_folder(tmp_path / 'out')
  for text in TEXTS:
    ids = one.encode_prompt(text)
    assert again.encode_prompt(text) == ids
    assert again.backend.encode(text).ids == ids
    assert again.decode(ids) == one.decode(ids)
  for name in ('eos_ids', 'pad_id', 'bos_ids', 'vocab_size'):
    assert getattr(again, name) == getattr(one, name)
  messages = [{'role': 'user', 'content': 'la'}]
  assert again.chat_template.render(messages) == (
    one.chat_template.render(messages)
  )


def test_without_a_template_or_ends(tmp_path):
  one = data.character_tokenizer('0123')
  data.save_tokenizer(one, tmp_path)
  assert not (tmp_path / 'chat_template.jinja').exists()
  again = data.Tokenizer.from_folder(tmp_path)
  assert (again.eos_ids, again.pad_id) == (one.eos_ids, one.pad_id)
  assert again.encode('0231') == one.encode('0231')


def test_ends_are_written_where_they_differ(tmp_path):
  hf_folder.write_tokenizer(tmp_path)
  path = tmp_path / 'generation_config.json'
  told = {**json.loads(path.read_text()), 'temperature': 0.5}
  path.write_text(json.dumps(told))
  same = data.Tokenizer.from_folder(tmp_path)
  data.save_ends(same, tmp_path)
  assert json.loads(path.read_text()) == told
  other = data.Tokenizer.from_folder(tmp_path, ('<eos>',))
  data.save_ends(other, tmp_path)
  assert json.loads(path.read_text()) == {
    'eos_token_id': list(other.eos_ids),
    'pad_token_id': other.pad_id,
    'temperature': 0.5,
  }
  assert data.Tokenizer.from_folder(tmp_path).eos_ids == other.eos_ids


def test_whether_a_folder_holds_a_tokenizer(tmp_path):
  template = "{{ messages[0]['content'] }}"
  for name, changes in (
    ('one', {}),
    ('eos', {'eos': ('<eos>',)}),  # which a template may write
    ('template', {'template': template}),
    ('smaller', {'vocab_size': 300}),
  ):
    hf_folder.write_tokenizer(tmp_path / name, **changes)
  one = data.Tokenizer.from_folder(tmp_path / 'one')
  found = {
    path.name: data.is_in_folder(one, path)
    for path in [*tmp_path.iterdir(), tmp_path / 'nothing']
  }
  assert found == {
    'one': True, 'eos': False, 'template': False, 'smaller': False,
    'nothing': False,
  }  # fmt: skip
