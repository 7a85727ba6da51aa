"""SentencePiece's ids: against its algorithm, step by step, and the package."""

import math
import random

import pytest

from grpo_jax import data
from grpo_jax.config import gguf_files
from tests import gemma3
from tests.data.gguf_test import write

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
LETTERS = 'abcdeﬁé'
WORDS = (
  '▁a ab ba aa aaaa aaab ▁ab ▁aba bc abc ▁the cd cde bcde eb ▁▁c éa ▁é dd ddd'
)
CONTROLS = '<pad>', '<eos>', '<bos>', '<unk>', '<turn>'
OF_USERS = '\n', '\n\n', '  ', '   ', '<td>', 'bad'


def fields(**changes):
  """Metadata of a small tokenizer."""
  rows = [(piece, -1000.0, CONTROL) for piece in CONTROLS]
  rows[3] = ('<unk>', 0.0, UNKNOWN)
  rows += [(piece, -1000.0, USER) for piece in OF_USERS]
  rows += [(f'<0x{byte:02X}>', 0.0, BYTE) for byte in range(256)]
  rows += [
    (piece, -float(rank), NORMAL) for rank, piece in enumerate(WORDS.split())
  ]
  rows += [
    (letter, -100.0 - rank, NORMAL) for rank, letter in enumerate('▁' + LETTERS)
  ]
  rows += [('<unused>', 0.0, UNUSED)]
  pieces, scores, types = zip(*rows, strict=True)
  values = {
    'model': 'llama',
    'pre': 'default',
    'tokens': list(pieces),
    'scores': list(scores),
    'token_type': list(types),
    'bos_token_id': 2,
    'eos_token_id': 1,
    'eot_token_id': 4,
    'padding_token_id': 0,
    'unknown_token_id': 3,
    'add_space_prefix': False,
    **changes,
  }
  return {
    'general.architecture': 'gemma3',
    'tokenizer.chat_template': (
      '{{ bos_token }}{% for m in messages %}<turn>{{ m.role }}\n'
      '{{ m.content | trim }}<turn>\n{% endfor %}<turn>model'
    ),
    **{f'tokenizer.ggml.{k}': v for k, v in values.items() if v is not None},
  }


def reference(values, text):
  """Ids by SentencePiece's algorithm: the best pair of neighbours is joined.

  Control pieces are looked for as those of users are, because a text spells
  them out here.
  """
  get = values.__getitem__
  pieces = [
    piece.replace(' ', '▁') if kind == USER else piece
    for piece, kind in zip(
      get('tokenizer.ggml.tokens'),
      get('tokenizer.ggml.token_type'),
      strict=True,
    )
  ]
  types = get('tokenizer.ggml.token_type')
  scores = get('tokenizer.ggml.scores')
  ids = {piece: number for number, piece in enumerate(pieces)}
  found = {
    p for p, kind in zip(pieces, types, strict=True) if kind in (2, 3, 4)
  }
  first = {}
  for piece in sorted(found, key=len, reverse=True):
    first.setdefault(piece[0], []).append(piece)
  merges = {
    p: -s for p, s, k in zip(pieces, scores, types, strict=True) if k == NORMAL
  }
  text, at, symbols = text.replace(' ', '▁'), 0, []
  while at < len(text):
    here = first.get(text[at], ())
    whole = next((p for p in here if text.startswith(p, at)), None)
    symbols.append((whole or text[at], whole is not None))
    at += len(symbols[-1][0])
  while True:
    best = min(
      (
        (merges.get(left + right, math.inf), place)
        for place, ((left, fixed), (right, also)) in enumerate(
          zip(symbols, symbols[1:], strict=False)
        )
        if not fixed and not also
      ),
      default=(math.inf, 0),
    )
    if best[0] == math.inf:
      break
    place = best[1]
    joined = symbols[place][0] + symbols[place + 1][0]
    symbols[place : place + 2] = [(joined, False)]
  result = []
  for symbol, fixed in symbols:
    if fixed or symbol in merges:
      result.append(ids[symbol])
    else:
      result += [ids[f'<0x{byte:02X}>'] for byte in symbol.encode()]
  return result


def texts(number, parts, seed=0):
  draw = random.Random(seed)
  for _ in range(number):
    yield ''.join(draw.choices(parts, k=draw.randrange(14)))


PARTS = [
  *CONTROLS, *OF_USERS, *LETTERS, *'  ▁\n\t', 'the', 'abc', 'aaaa', 'abab',
  'ddd', '<0x41>', 'ß', '🙂', '中', '\0',
]  # fmt: skip


@pytest.fixture
def small(tmp_path):
  return data.Tokenizer.from_gguf(write(tmp_path / 'a.gguf', fields()))


def test_ids_and_texts_of_small_pieces(small):
  values, seen = fields(), set()
  for text in texts(3000, PARTS):
    ids = reference(values, text)
    assert small.encode(text) == ids, text
    seen |= set(ids)
    plain = text.replace('▁', ' ')
    assert small.backend.decode(ids, skip_special_tokens=False) == plain
  tokens = values['tokenizer.ggml.tokens']
  missed = {tokens[i] for i in range(len(tokens)) if i not in seen}
  assert '<unused>' in missed and not missed & {*CONTROLS, *OF_USERS, *LETTERS}


def test_ends_and_chats_of_small_pieces(small):
  assert (small.eos_ids, small.pad_id, small.bos_ids) == ((1, 4), 0, (2,))
  assert small.encode_prompt('ab') == [2, *small.encode('ab')]
  chat = small.with_format(data.PromptFormat(chat=True))
  expected = '<bos><turn>user\nab<turn>\n<turn>model'
  assert chat.encode_prompt(' ab') == small.encode(expected)
  assert chat.encode_prompt(' ab')[:2] == [2, 4]
  last = small.vocab_size  # the piece of the type "unused"
  assert small.unused_ids(last + 1) == ((last, last + 1),)
  assert len(fields()['tokenizer.ggml.tokens']) == last + 1


@pytest.mark.parametrize(
  'changes, said',
  [
    (dict(add_space_prefix=None), 'puts a space before each text'),
    (dict(add_space_prefix=True), 'puts a space before each text'),
    (dict(scores=[1.0]), 'tokens, 1 scores and'),
    (dict(scores=None), 'tokens, 0 scores and'),
    (dict(scores=[1, 2]), 'a list of numbers is needed'),
    (dict(add_space_prefix=1), 'true or false is needed'),
  ],
)
def test_pieces_that_are_refused(changes, said, tmp_path):
  path = write(tmp_path / 'a.gguf', fields(**changes))
  with pytest.raises(ValueError, match=said):
    data.Tokenizer.from_gguf(path)


def test_bytes_without_a_piece_and_equal_scores_are_refused(tmp_path):
  values = fields()
  types = list(values['tokenizer.ggml.token_type'])
  types[types.index(BYTE)] = UNUSED
  values['tokenizer.ggml.token_type'] = types
  path = write(tmp_path / 'a.gguf', values)
  with pytest.raises(ValueError, match=r'1 of the 256 bytes \(<0x00>\)'):
    data.Tokenizer.from_gguf(path)
  values = fields()
  tokens = values['tokenizer.ggml.tokens']
  values['tokenizer.ggml.scores'][tokens.index('aa')] = 0.0
  with pytest.raises(ValueError, match='the same score'):
    data.Tokenizer.from_gguf(write(tmp_path / 'a.gguf', values))


@gemma3.needed
def test_ids_of_gemma3():
  tokenizer = data.Tokenizer.from_gguf(gemma3.PATH)
  assert tokenizer.vocab_size == 262_144 and tokenizer.bos_ids == (2,)
  assert (tokenizer.eos_ids, tokenizer.pad_id) == ((1,), 0)
  values = data.gguf_metadata(gguf_files.find(gemma3.PATH))
  parts = [
    *('<start_of_turn>', '<end_of_turn>', '<bos>', '</td>', '\n', '  ', '\t'),
    *(
      ' the',
      ' Reward',
      'Привет',
      ' мир',
      '今日は',
      '天気',
      ' مرحبا',
      '🙂👩‍👩‍👧',
      'é',
    ),
    *(
      'def f(x):',
      '==',
      '----',
      'aaa',
      ' 1234',
      '\0',
      '\u200b',
      '𠀀',
      '▁',
      "'s",
    ),
  ]
  for text in texts(60, parts):
    ids = reference(values, text)
    assert tokenizer.encode(text) == ids, text
    found = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert found == text.replace('▁', ' ')
