"""GGUF files: metadata, the four rules that make words, what is refused.

No file here has weights: the tokenizer does not read that far.
"""

import hashlib
import importlib
import os
import pathlib
import shutil
import struct
import sys
import unicodedata

import pytest
import tokenizers

from grpo_jax import data
from grpo_jax.config import gguf_files
from grpo_jax.data import _gguf
from tests import smollm2

ROOT = pathlib.Path(__file__).parent.parent.parent
# Words, digits, contractions, runs of white space at both ends, and letters
# that are numbers in Unicode.
TEXT = " I'LL  pay 1234.5\n\n  to you're²,\tà la  carte: ½!!\r\n  "

_CODES = {bool: (7, '?'), int: (4, 'I'), float: (6, 'f')}


def _string(text, order):
  encoded = text.encode()
  return struct.pack(f'{order}Q', len(encoded)) + encoded


def _value(value, order):
  if isinstance(value, str):
    return struct.pack(f'{order}I', 8) + _string(value, order)
  if isinstance(value, list):
    if isinstance(value[0], str):
      head, items = 8, b''.join(_string(text, order) for text in value)
    elif isinstance(value[0], float):
      head, items = 6, struct.pack(f'{order}{len(value)}f', *value)
    else:
      head, letter = 5, f'{order}{len(value)}i'
      items = struct.pack(letter, *value)
    return struct.pack(f'{order}IIQ', 9, head, len(value)) + items
  code, letter = _CODES[type(value)]
  return struct.pack(f'{order}I{letter}', code, value)


def write(path, fields, order='<', version=3):
  """A GGUF file of metadata alone."""
  pairs = b''.join(
    _string(name, order) + _value(value, order)
    for name, value in fields.items()
  )
  head = struct.pack(f'{order}IQQ', version, 0, len(fields))
  path.write_bytes(b'GGUF' + head + pairs)
  return path


def vocabulary(rule='smollm', **changes):
  """Metadata of a tokenizer; the merges make '12', 'la' and ' pay'."""
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  merges = ['1 2', 'l a', 'Ġ p', 'Ġp a', 'Ġpa y']
  added = ['<|end|>', '<|turn|>', '<tool>', 'Ġpay!']
  tokens = [*added, *letters, *(merge.replace(' ', '') for merge in merges)]
  fields = {
    'general.architecture': 'llama',
    'llama.rope.freq_base': 1e5,
    'tokenizer.chat_template': "{{ bos_token }}{{ messages[0]['content'] }}",
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': rule,
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': [3, 3, 4] + [1] * (len(tokens) - 3),
    'tokenizer.ggml.merges': merges,
    'tokenizer.ggml.eos_token_id': 1,
    'tokenizer.ggml.bos_token_id': 0,
    **{f'tokenizer.ggml.{name}': value for name, value in changes.items()},
  }
  return {name: value for name, value in fields.items() if value is not None}


def _words(rule, text, path):
  """The words of a text, as text again."""
  tokenizer = data.Tokenizer.from_gguf(write(path / 'a.gguf', vocabulary(rule)))
  pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
  decoder = tokenizers.decoders.ByteLevel()
  return [decoder.decode([piece]) for piece, _ in pieces]


@pytest.mark.parametrize('order, version', [('<', 3), ('<', 2), ('>', 3)])
def test_metadata_of_both_byte_orders(order, version, tmp_path):
  fields = vocabulary(add_bos_token=True)
  path = write(tmp_path / 'a.gguf', fields, order, version)
  read = data.gguf_metadata(path)
  assert read == fields
  assert read['tokenizer.ggml.add_bos_token'] is True


def test_metadata_equal_those_of_the_package_gguf(tmp_path):
  gguf = pytest.importorskip('gguf')
  path = write(tmp_path / 'a.gguf', vocabulary(add_bos_token=False))
  fields = gguf.GGUFReader(path).fields
  assert data.gguf_metadata(path) == {
    name: field.contents()
    for name, field in fields.items()
    if not name.startswith('GGUF.')
  }


def test_nested_lists_and_every_kind_of_number(tmp_path):
  kinds = [
    (0, 'B'),
    (1, 'b'),
    (2, 'H'),
    (3, 'h'),
    (10, 'Q'),
    (11, 'q'),
    (12, 'd'),
  ]
  pairs = [
    _string(letter, '<') + struct.pack(f'<I{letter}', code, 7)
    for code, letter in kinds
  ]
  inner = struct.pack('<IQ2I', 4, 2, 5, 6)
  pairs.append(_string('lists', '<') + struct.pack('<IIQ', 9, 9, 1) + inner)
  path = tmp_path / 'a.gguf'
  head = struct.pack('<IQQ', 3, 0, len(pairs))
  path.write_bytes(b'GGUF' + head + b''.join(pairs))
  expected = {letter: 7 for _, letter in kinds} | {'lists': [[5, 6]]}
  assert data.gguf_metadata(path) == expected


WORDS = {
  # Each digit, superscript and fraction is a word before anything else, so the
  # space before it is a word too.
  'smollm': [
    ' I', "'", 'LL', ' ', ' pay', ' ', '1', '2', '3', '4', '.', '5', '\n\n ',
    ' to', ' you', "'re", '²', ',', '\t', 'à', ' la', ' ', ' carte', ':', ' ',
    '½', '!!', '\r\n  ',
  ],
  'gpt-2': [
    ' I', "'", 'LL', ' ', ' pay', ' 1234', '.', '5', '\n\n ', ' to', ' you',
    "'re", '²', ',', '\t', 'à', ' la', ' ', ' carte', ':', ' ½', '!!', '\r\n  ',
  ],
  'qwen2': [
    ' I', "'LL", ' ', ' pay', ' ', '1', '2', '3', '4', '.', '5', '\n\n', ' ',
    ' to', ' you', "'re", '²', ',', '\tà', ' la', ' ', ' carte', ':', ' ', '½',
    '!!\r\n', '  ',
  ],
  'llama-bpe': [
    ' I', "'LL", ' ', ' pay', ' ', '123', '4', '.', '5', '\n\n', ' ', ' to',
    ' you', "'re", '²', ',', '\tà', ' la', ' ', ' carte', ':', ' ', '½',
    '!!\r\n', '  ',
  ],
}  # fmt: skip
WORDS['lfm2'] = WORDS['llama-bpe']
WORDS['qwen35'] = WORDS['qwen2']


@pytest.mark.parametrize('rule', WORDS)
def test_every_rule_makes_the_words_of_llama_cpp(rule, tmp_path):
  words = _words(rule, TEXT, tmp_path)
  assert ''.join(words) == TEXT
  assert words == WORDS[rule]


def test_a_mark_upon_a_letter_is_a_letter_in_qwen35(tmp_path):
  text = ' la\u0300 \u0300!'
  assert _words('qwen2', text, tmp_path) == [' la', '\u0300', ' \u0300!']
  assert _words('qwen35', text, tmp_path) == [' la\u0300', ' \u0300', '!']


def test_ids_end_tokens_and_chat_template(tmp_path):
  path = write(
    tmp_path / 'a.gguf',
    vocabulary(eot_token_id=0, eom_token_id=4, padding_token_id=1),
  )
  tokenizer = data.Tokenizer.from_gguf(path)
  assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1, 0, 4), 1)
  assert tokenizer.bos_ids == ()
  text = 'la 12 pay<|turn|>2<tool> é'
  ids = tokenizer.encode(text)
  # What a user of llama.cpp has defined is text; control tokens are not.
  assert tokenizer.decode(ids) == 'la 12 pay2<tool> é'
  tokens = [tokenizer.backend.id_to_token(token_id) for token_id in ids]
  assert tokens[:5] == ['la', 'Ġ', '1', '2', 'Ġpay']  # no '12': digits apart
  assert tokens[5:8] == ['<|turn|>', '2', '<tool>']
  chat = tokenizer.with_format(data.PromptFormat(chat=True))
  assert chat.encode_prompt('la') == [0, *tokenizer.encode('la')]


@pytest.mark.parametrize('rule', ['llama-bpe', 'lfm2'])
def test_llama_takes_a_word_that_is_a_token_and_puts_a_token_first(
  rule, tmp_path
):
  fields = vocabulary(rule)
  tokens = fields['tokenizer.ggml.tokens']
  fields['tokenizer.ggml.tokens'] = [*tokens, 'Ġcarte']
  fields['tokenizer.ggml.token_type'] += [1]
  llama = data.Tokenizer.from_gguf(write(tmp_path / 'a.gguf', fields))
  assert llama.encode(' carte') == [len(tokens)]  # no merges lead there
  assert llama.encode_prompt('la')[:1] == [0] == list(llama.bos_ids)
  fields['tokenizer.ggml.add_bos_token'] = False
  llama = data.Tokenizer.from_gguf(write(tmp_path / 'b.gguf', fields))
  assert llama.bos_ids == ()
  fields['tokenizer.ggml.pre'] = 'gpt-2'
  other = data.Tokenizer.from_gguf(write(tmp_path / 'c.gguf', fields))
  assert len(other.encode(' carte')) == 6


def test_tokens_by_name_take_the_place_of_the_files(tmp_path):
  path = write(tmp_path / 'a.gguf', vocabulary())
  tokenizer = data.Tokenizer.from_gguf(path, ['<|end|>'], '<tool>')
  assert (tokenizer.eos_ids, tokenizer.pad_id) == ((0,), 2)
  assert data.Tokenizer.from_gguf(path).pad_id == 1  # the end token
  with pytest.raises(ValueError, match=r"no token '<s>'; .*'<\|end\|>'"):
    data.Tokenizer.from_gguf(path, ['<s>'])


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'rule': 'tekken'}, "the pre-tokenizer 'tekken', but .* smollm, gpt-2"),
    ({'model': 't5'}, "of the kind 't5'"),
    ({'pre': None}, 'the pre-tokenizer None'),
    ({'eos_token_id': 10_000}, 'eos_token_id=10000, but 265 tokens'),
    ({'merges': ['x y']}, 'no byte-level BPE'),
    ({'tokens': 'abc'}, "ggml.tokens='abc', but a list of texts is needed"),
    ({'merges': [1, 2]}, r'ggml.merges=\[1, 2\], but a list of texts'),
    ({'token_type': ['a']}, r"ggml.token_type=\['a'\], but a list of whole"),
    ({'token_type': [1, 1]}, 'token_type of 2 entries, but 265 tokens'),
    ({'eos_token_id': 'x'}, "eos_token_id='x', but a whole number is needed"),
    ({'bos_token_id': 1.5}, 'bos_token_id=1.5, but a whole number'),
    ({'add_bos_token': 1}, 'add_bos_token=1, but true or false'),
    (
      {'eos_token_id': None, 'padding_token_id': None},
      'neither a padding nor an end token',
    ),
  ],
)
def test_other_tokenizers_are_refused(fields, words, tmp_path):
  path = write(tmp_path / 'a.gguf', vocabulary(**fields))
  with pytest.raises(ValueError, match=words):
    data.Tokenizer.from_gguf(path)


def test_bad_files_are_refused(tmp_path):
  path = tmp_path / 'a.gguf'
  with pytest.raises(ValueError, match="There is no file '.*a.gguf'"):
    data.Tokenizer.from_gguf(path)
  for content, words in (
    (b'', r"begins with b'', not with GGUF"),
    (b'PK\3\4 and more', 'is no GGUF file'),
    (b'GGUF' + struct.pack('<IQQ', 1, 0, 0), 'GGUF of version 1, but'),
    (b'GGUF' + struct.pack('<IQ', 3, 0), 'cut off or damaged'),
  ):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
      data.gguf_metadata(path)
  # Ends with a text, of which one byte is missing.
  last = {'name': ['a', 'bcd']}
  whole = write(path, {**vocabulary(), **last}).read_bytes()
  for size in (30, 200, len(whole) // 2, len(whole) - 1):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='cut off or damaged'):
      data.gguf_metadata(path)
  path.write_bytes(whole.replace(b'rope', b'\xff\xfe\xff\xfe'))
  with pytest.raises(ValueError, match='cut off or damaged'):
    data.gguf_metadata(path)


def test_the_file_in_a_package(tmp_path, monkeypatch):
  package = tmp_path / 'some_weights'
  package.mkdir()
  (package / '__init__.py').write_text('raise RuntimeError("imported")')
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match=r'holds 0 .gguf files \(none\)'):
    gguf_files.find('package:some_weights')
  path = write(package / 'a.gguf', vocabulary())
  assert gguf_files.find('package:some_weights') == path
  assert 'some_weights' not in sys.modules
  write(package / 'b.gguf', vocabulary())
  with pytest.raises(ValueError, match=r'holds 2 .gguf files \(a.gguf, b'):
    gguf_files.find('package:some_weights')
  for name in ('package:no_such_package', 'package:../weights'):
    with pytest.raises(ValueError, match='is not installed'):
      gguf_files.find(name)


def _is(letter, text, place):
  return place < len(text) and unicodedata.category(text[place])[0] == letter


def _oracle_words(text):
  """llama.cpp's rule 'smollm', read from its source, character by character."""
  start = 0
  for place in range(len(text)):
    if _is('N', text, place):
      yield from _gpt2_words(text[start:place])
      yield text[place]
      start = place + 1
  yield from _gpt2_words(text[start:])


def _gpt2_words(text):
  def is_other(place):
    letter = _is('L', text, place) or _is('N', text, place)
    return place < len(text) and not text[place].isspace() and not letter

  kinds = [lambda k: _is('L', text, k), lambda k: _is('N', text, k), is_other]
  at = 0
  while at < len(text):
    short = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")
    contraction = next((s for s in short if text.startswith(s, at)), '')
    end = at + len(contraction)
    first = at + (text[at] == ' ')  # a space before a word belongs to it
    kind = next((kind for kind in kinds if kind(first)), None)
    if not contraction and kind:
      end = first
      while kind(end):
        end += 1
    elif not contraction:
      while end < len(text) and text[end].isspace():
        end += 1
      if end - at > 1 and end < len(text):
        end -= 1
    yield text[at:end]
    at = end


def _letters():
  """GPT-2's characters for bytes: itself if one sees it, else from 256 on."""
  seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [byte for byte in range(256) if byte not in seen]
  return {byte: chr(byte) for byte in seen} | {
    byte: chr(256 + place) for place, byte in enumerate(hidden)
  }


def _oracle_ids(text, ids, ranks):
  found, letters = [], _letters()
  for word in _oracle_words(text):
    parts = [letters[byte] for byte in word.encode()]
    while len(parts) > 1:
      pairs = list(zip(parts, parts[1:], strict=False))
      rank, place = min(
        (ranks.get(pair, len(ranks)), place) for place, pair in enumerate(pairs)
      )
      if rank == len(ranks):
        break
      parts[place : place + 2] = [''.join(pairs[place])]
    found += [ids[part] for part in parts]
  return found


@smollm2.needed
def test_ids_of_smollm2_follow_the_rule_of_llama_cpp():
  tokenizer = data.Tokenizer.from_gguf(smollm2.PATH)
  assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 2)
  assert tokenizer.vocab_size == 49_152 and tokenizer.bos_ids == ()
  fields = data.gguf_metadata(gguf_files.find(smollm2.PATH))
  ids = {t: i for i, t in enumerate(fields['tokenizer.ggml.tokens'])}
  ranks = {
    tuple(merge.split(' ')): rank
    for rank, merge in enumerate(fields['tokenizer.ggml.merges'])
  }
  paragraphs = (ROOT / 'README.md').read_text().split('\n\n')
  paragraphs += (ROOT / 'LICENSE').read_text().split('\n\n')
  texts = [TEXT, 'x  12  \n', ' ', "'s 's", *paragraphs[:120]]
  assert len(texts) > 60
  for text in texts:
    expected = _oracle_ids(text, ids, ranks)
    assert tokenizer.encode(text) == expected, text
    assert tokenizer.decode(expected) == text


@smollm2.needed
def test_chats_of_smollm2():
  form = data.PromptFormat(
    chat=True, system_prompt='Be brief.', completion_prefix='Answer:'
  )
  tokenizer = data.Tokenizer.from_gguf(smollm2.PATH, prompt_format=form)
  ids = tokenizer.encode_prompt('Largest of 12 and 9?')
  assert tokenizer.backend.decode(ids, skip_special_tokens=False) == (
    '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n'
    'Largest of 12 and 9?<|im_end|>\n<|im_start|>assistant\nAnswer:'
  )
  assert ids[0] == 1 and tokenizer.decode(ids[-2:]) == 'Answer:'


def test_the_rules_are_the_ones_that_are_tested():
  assert set(WORDS) == set(_gguf._PRE_TOKENIZERS)


def test_names_that_fill_up_the_embedding_are_no_tokens(tmp_path):
  """Of the type "unused"; one that a merge makes is a token all the same."""
  fields = vocabulary()
  tokens = fields['tokenizer.ggml.tokens']
  number, made = len(tokens), tokens.index('la')
  tokens += ['[PAD0]', '[PAD1]', '[PAD2]']
  types = fields['tokenizer.ggml.token_type'] + [5, 5, 5]
  types[made] = 5
  fields['tokenizer.ggml.token_type'] = types
  fields['tokenizer.ggml.padding_token_id'] = number + 1
  found = data.Tokenizer.from_gguf(write(tmp_path / 'a.gguf', fields))
  assert found.vocab_size == number + 2 and found.pad_id == number + 1
  assert found.unused_ids(number + 3) == (
    (number, number + 1), (number + 2, number + 3),
  )  # fmt: skip
  assert found.encode('la') == [made]


@pytest.fixture
def in_pieces(tmp_path, monkeypatch):
  """A package, two that it requires with a piece of its file, and the file."""
  monkeypatch.syspath_prepend(str(tmp_path / 'site'))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  whole = write(tmp_path / 'a.gguf', vocabulary()).read_bytes()
  half = len(whole) // 2
  contents = {
    'cut_weights': {
      'SHA256SUMS': f'{hashlib.sha256(whole).hexdigest()}  a.gguf\n'.encode()
    },
    'cut_weights_part1': {'a.gguf.part00': whole[:half]},
    'cut_weights_part2': {'a.gguf.part01': whole[half:]},
  }
  for package, files in contents.items():
    folder = tmp_path / 'site' / package
    (folder / 'data').mkdir(parents=True)
    (folder / '__init__.py').write_text('raise RuntimeError("imported")')
    for name, content in files.items():
      (folder / 'data' / name).write_bytes(content)
  about = tmp_path / 'site' / 'cut_weights-1.0.dist-info'
  about.mkdir()
  (about / 'METADATA').write_text(
    'Metadata-Version: 2.1\nName: cut-weights\nVersion: 1.0\n'
    'Requires-Dist: cut-weights-part1==1.0\n'
    'Requires-Dist: cut-weights-part2==1.0\nRequires-Dist: numpy>=1\n'
  )
  return tmp_path / 'site', whole


def test_the_file_of_several_packages(in_pieces):
  site, whole = in_pieces
  for name in ('cut_weights', 'cut-weights'):
    path = gguf_files.find(f'package:{name}')
    assert path.read_bytes() == whole and path.name == 'a.gguf'
  assert len(list(path.parent.parent.rglob('*'))) == 2  # once, and no more
  tokenizer = data.Tokenizer.from_gguf('package:cut_weights')
  assert tokenizer.eos_ids == (1,)
  # Other pieces are not those that were joined.
  part = site / 'cut_weights_part2' / 'data' / 'a.gguf.part01'
  damaged = bytearray(part.read_bytes())
  damaged[-1] ^= 1
  part.write_bytes(damaged)
  os.utime(part, ns=(1, 1))
  with pytest.raises(ValueError, match='have the SHA-256 .* is needed'):
    gguf_files.find('package:cut_weights')
  assert len(list(path.parent.parent.rglob('*'))) == 3  # one empty folder


def test_pieces_that_are_missing(in_pieces):
  site, _ = in_pieces
  part = site / 'cut_weights_part1' / 'data' / 'a.gguf.part00'
  content = part.read_bytes()
  part.rename(part.with_name('a.gguf.part03'))
  with pytest.raises(ValueError, match='part01, a.gguf.part03, which are not'):
    gguf_files.find('package:cut_weights')
  part.with_name('a.gguf.part03').unlink()
  (site / 'cut_weights' / 'b.gguf.part00').write_bytes(content)
  with pytest.raises(ValueError, match='are not all pieces of one file'):
    gguf_files.find('package:cut_weights')
  shutil.rmtree(site / 'cut_weights_part2')
  importlib.invalidate_caches()
  with pytest.raises(ValueError, match='cut-weights-part2 is missing; run'):
    gguf_files.find('package:cut_weights')
