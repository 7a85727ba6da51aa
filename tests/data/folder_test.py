"""Hugging Face folders: which file says what, and what is refused."""

import json

import pytest

from grpo_jax import data
from tests import chat_templates
from tests import hf_folder

ENDS = ('<|im_end|>', '<|endoftext|>')


def _change(folder, file, **changes):
  """Changes fields of a JSON file in a folder; None removes one."""
  path = folder / file
  values = json.loads(path.read_text()) if path.exists() else {}
  values |= changes
  path.write_text(
    json.dumps({k: v for k, v in values.items() if v is not None})
  )


def _tokens(tokenizer, ids):
  return tuple(tokenizer.backend.id_to_token(token_id) for token_id in ids)


def _ends(folder, **named):
  tokenizer = data.Tokenizer.from_folder(folder, **named)
  return _tokens(tokenizer, tokenizer.eos_ids)


def _pad(folder, **named):
  tokenizer = data.Tokenizer.from_folder(folder, **named)
  return _tokens(tokenizer, [tokenizer.pad_id])[0]


def test_text_goes_to_ids_and_back_without_truncation_or_padding(tmp_path):
  made = hf_folder.write_tokenizer(tmp_path)
  made.enable_truncation(2)
  made.enable_padding(length=7)
  made.save(str(tmp_path / 'tokenizer.json'))
  tokenizer = data.Tokenizer.from_folder(tmp_path)
  text = ' What is 12 — é?\n'
  ids = tokenizer.encode(text)
  assert len(ids) > 7
  assert tokenizer.decode([*ids, *tokenizer.eos_ids]) == text
  # The embedding may have more rows than there are tokens.
  assert tokenizer.decode([*ids, 10_000]) == text
  assert tokenizer.encode('<|im_end|>') == [tokenizer.eos_ids[0]]


def test_end_tokens(tmp_path):
  made = hf_folder.write_tokenizer(tmp_path, eos=ENDS)
  one, two, other = (made.token_to_id(t) for t in (*ENDS, '</s>'))
  assert _ends(tmp_path) == ENDS
  _change(tmp_path, 'generation_config.json', eos_token_id=[two, one, two])
  assert _ends(tmp_path) == ENDS[::-1]
  _change(tmp_path, 'generation_config.json', eos_token_id=other)
  assert _ends(tmp_path) == ('</s>',)
  _change(tmp_path, 'generation_config.json', eos_token_id=None)
  assert _ends(tmp_path) == ENDS[:1]  # of tokenizer_config.json
  _change(tmp_path, 'config.json', text_config={'eos_token_id': [two, other]})
  assert _ends(tmp_path) == ('<|endoftext|>', '</s>')
  _change(tmp_path, 'config.json', eos_token_id=two)
  assert _ends(tmp_path) == ENDS[1:]
  assert _ends(tmp_path, eos_tokens=['<eos>', '</s>']) == ('<eos>', '</s>')


def test_padding_token(tmp_path):
  made = hf_folder.write_tokenizer(tmp_path, eos=ENDS, pad='<s>')
  assert _pad(tmp_path) == '<s>'
  assert _pad(tmp_path, pad_token='</s>') == '</s>'
  added = {'__type': 'AddedToken', 'content': '<eos>', 'special': True}
  _change(tmp_path, 'tokenizer_config.json', pad_token=added)
  assert _pad(tmp_path) == '<eos>'
  _change(tmp_path, 'tokenizer_config.json', pad_token=None)
  assert _pad(tmp_path) == ENDS[0]
  _change(tmp_path, 'config.json', pad_token_id=made.token_to_id('</s>'))
  assert _pad(tmp_path) == '</s>'
  # '!' would vanish from every text.
  _change(tmp_path, 'config.json', pad_token_id=made.token_to_id('!'))
  assert _pad(tmp_path) == ENDS[0]
  tokenizer = data.Tokenizer.from_folder(tmp_path)
  assert tokenizer.decode(tokenizer.encode('a!')) == 'a!'
  for file, fields in (
    ('generation_config.json', {'eos_token_id': None}),
    ('tokenizer_config.json', {'eos_token': None}),
  ):
    _change(tmp_path, file, **fields)
  with pytest.raises(ValueError, match='neither a padding nor an end token'):
    data.Tokenizer.from_folder(tmp_path)
  assert data.Tokenizer.from_folder(tmp_path, pad_token='</s>').eos_ids == ()


def test_what_stands_before_a_text(tmp_path):
  made = hf_folder.write_tokenizer(tmp_path, bos='<bos>')
  bos = made.token_to_id('<bos>')
  assert data.Tokenizer.from_folder(tmp_path).bos_ids == (bos,)
  _change(tmp_path, 'tokenizer_config.json', add_bos_token=False)
  assert data.Tokenizer.from_folder(tmp_path).bos_ids == ()
  hf_folder.write_tokenizer(tmp_path)
  assert data.Tokenizer.from_folder(tmp_path).bos_ids == ()
  fields = {'add_bos_token': True, 'bos_token': '<bos>'}
  _change(tmp_path, 'tokenizer_config.json', **fields)
  assert data.Tokenizer.from_folder(tmp_path).bos_ids == (bos,)


def _template(folder):
  template = data.Tokenizer.from_folder(folder).chat_template
  return template and template.source


def test_chat_template(tmp_path):
  hf_folder.write_tokenizer(tmp_path, None)
  assert _template(tmp_path) is None
  _change(tmp_path, 'tokenizer_config.json', chat_template='text')
  assert _template(tmp_path) == 'text'
  named = [
    {'name': 'tool_use', 'template': 'tools'},
    {'name': 'default', 'template': 'plain'},
  ]
  _change(tmp_path, 'tokenizer_config.json', chat_template=named)
  assert _template(tmp_path) == 'plain'
  _change(tmp_path, 'tokenizer_config.json', chat_template=named[:1])
  assert _template(tmp_path) is None
  (tmp_path / 'chat_template.jinja').write_text('file é')
  assert _template(tmp_path) == 'file é'


def test_special_tokens_for_templates(tmp_path):
  hf_folder.write_tokenizer(tmp_path, chat_templates.MISTRAL, eos=['</s>'])
  token = {'content': '<s>', 'lstrip': False}
  _change(tmp_path, 'special_tokens_map.json', bos_token=token, eos_token='?')
  tokenizer = data.Tokenizer.from_folder(
    tmp_path, prompt_format=data.PromptFormat(chat=True)
  )
  ids = tokenizer.encode_prompt('a')
  assert _tokens(tokenizer, ids[:2]) == ('<s>', '[INST]')
  assert tokenizer.chat_template.tokens['eos_token'] == '</s>'


@pytest.mark.parametrize(
  'other, words',
  [
    (None, 'has no tokenizer.json'),
    ('tokenizer.model', 'has tokenizer.model but no tokenizer.json'),
    ('vocab.json', 'has vocab.json but no tokenizer.json'),
  ],
)
def test_a_folder_without_a_fast_tokenizer_is_refused(other, words, tmp_path):
  if other:
    (tmp_path / other).write_text('')
  with pytest.raises(ValueError, match=words):
    data.Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
  'file, content, words',
  [
    ('tokenizer.json', '{', 'tokenizer.json.*cannot be read'),
    ('tokenizer_config.json', '{"a"', 'tokenizer_config.json.* is no JSON'),
    ('config.json', '[' * 100_000, 'config.json.* is no JSON'),
    ('tokenizer.json', '[' * 100_000, 'tokenizer.json.*cannot be read'),
    ('generation_config.json', '[1]', r'holds \[1\], but a JSON object'),
    (
      'generation_config.json',
      '{"eos_token_id": [1, 9999]}',
      r'eos_token_id=\[1, 9999\], but .* has no token 9999',
    ),
  ],
)
def test_broken_files_are_refused(file, content, words, tmp_path):
  hf_folder.write_tokenizer(tmp_path)
  (tmp_path / file).write_text(content)
  with pytest.raises(ValueError, match=words):
    data.Tokenizer.from_folder(tmp_path)


# A field, what it holds, and what the refusal says is needed there.
WRONG = {
  'generation_config.json': [
    ('eos_token_id', 'x', 'a whole number, or a list of them,'),
    ('eos_token_id', [[1]], 'a whole number, or a list of them,'),
    ('eos_token_id', True, 'a whole number, or a list of them,'),
    ('eos_token_id', {'a': 1}, 'a whole number, or a list of them,'),
    ('eos_token_id', 1.0, 'a whole number, or a list of them,'),
    ('pad_token_id', [1], 'a whole number'),
    ('pad_token_id', 'x', 'a whole number'),
  ],
  'config.json': [
    ('text_config', 'x', 'an object with fields'),
    ('pad_token_id', {}, 'a whole number'),
  ],
  'tokenizer_config.json': [
    ('eos_token', 5, 'a text'),
    ('pad_token', {'content': 3}, 'a text'),
    ('bos_token', ['<s>'], 'a text'),
    ('unk_token', False, 'a text'),
    ('add_bos_token', 'yes', 'true or false'),
    ('chat_template', 3, 'a text, or a list of objects'),
    ('chat_template', [1], 'a text, or a list of objects'),
    ('chat_template', [{'name': 'default'}], 'a text, or a list of objects'),
    ('chat_template', {'default': 'x'}, 'a text, or a list of objects'),
  ],
  'special_tokens_map.json': [('eos_token', {}, 'a text')],
}


def test_a_value_that_cannot_be_there_names_its_field(tmp_path):
  hf_folder.write_tokenizer(tmp_path, pad=None, template_file=False)
  for file, rows in WRONG.items():
    path = tmp_path / file
    before = path.read_text() if path.exists() else None
    for field, value, needed in rows:
      fields = {**json.loads(before or '{}'), field: value}
      path.write_text(json.dumps(fields))
      with pytest.raises(ValueError, match=f'{file}. has {field}=') as refused:
        data.Tokenizer.from_folder(tmp_path)
      assert f'but {needed}' in str(refused.value)
    if before is None:
      path.unlink()
    else:
      path.write_text(before)
  # An empty list names none, and others may.
  _change(tmp_path, 'generation_config.json', eos_token_id=[])
  assert _ends(tmp_path) == ('<|im_end|>',)
  (tmp_path / 'chat_template.jinja').write_bytes(b'\xff{{ messages }}')
  with pytest.raises(
    ValueError, match='chat_template.jinja. is no text in UTF'
  ):
    data.Tokenizer.from_folder(tmp_path)


def test_unknown_tokens_are_refused(tmp_path):
  hf_folder.write_tokenizer(tmp_path)
  with pytest.raises(ValueError, match=r"no token '<end>'; pass .*<\|im_end"):
    data.Tokenizer.from_folder(tmp_path, eos_tokens=['<end>'])
  with pytest.raises(ValueError, match="no token '<pad>'"):
    data.Tokenizer.from_folder(tmp_path, pad_token='<pad>')
  with pytest.raises(ValueError, match='sequence of tokens'):
    data.Tokenizer.from_folder(tmp_path, eos_tokens='</s>')
  (tmp_path / 'generation_config.json').unlink()
  _change(tmp_path, 'tokenizer_config.json', eos_token='<end>')
  with pytest.raises(ValueError, match="eos_token='<end>', but .* no such tok"):
    data.Tokenizer.from_folder(tmp_path)
  # Others are named instead: then the wrong one does not matter.
  assert _ends(tmp_path, eos_tokens=['</s>']) == ('</s>',)
