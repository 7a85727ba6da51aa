"""The metadata of a GGUF file, and the tokenizer that it describes.

GGUF is the format of llama.cpp: one file with weights, the shape of the model,
its vocabulary and its chat template. The metadata stand at the beginning, as
pairs of a name and a value; the weights come after them and are not touched
here. They are read without the package `gguf`, whose reader makes an array of
each of the 100,000 strings in a vocabulary: for SmolLM2 it takes 2 s, and this
0.03 s.

References:
  https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import mmap
import os
import struct
from typing import TYPE_CHECKING
from typing import Any

import numpy as np

from grpo_jax.config import gguf_files
from grpo_jax.data import _sentence_pieces
from grpo_jax.data._chat import ChatTemplate
from grpo_jax.data._folder import Loaded

if TYPE_CHECKING:
  import tokenizers


# Type codes of values, and NumPy's letters for those of a fixed size.
_NUMBERS = {
  0: 'u1', 1: 'i1', 2: 'u2', 3: 'i2', 4: 'u4', 5: 'i4', 6: 'f4', 7: 'u1',
  10: 'u8', 11: 'i8', 12: 'f8',
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Types of tokens. Those that llama.cpp looks for in a text before it splits the
# rest into words:
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5

_BYTES, _PIECES = 'gpt2', 'llama'  # kinds of tokenizers: bytes or pieces merge

# Rules that split a text into words differ in how many digits make one, and in
# whether marks that are put onto a letter are letters.
_WORDS = (
  r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
  r'|[^\r\n\p{L}\p{N}]?\p{L}+'
  r'|DIGITS'
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*'
  r'|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_PATTERNS = {
  'qwen2': _WORDS.replace('DIGITS', r'\p{N}'),
  'llama-bpe': _WORDS.replace('DIGITS', r'\p{N}{1,3}'),
}
_PATTERNS['lfm2'] = _PATTERNS['llama-bpe']
_PATTERNS['qwen35'] = (
  _PATTERNS['qwen2']
  .replace(r']?\p{L}+', r']?[\p{L}\p{M}]+')
  .replace(r'[^\s\p{L}\p{N}]+', r'[^\s\p{L}\p{M}\p{N}]+')
)
# Of Llama 3's kind: a token before each text, and words that are tokens.
_LLAMA3 = ('llama-bpe', 'lfm2')
_PRE_TOKENIZERS = ('smollm', 'gpt-2', *_PATTERNS)


def gguf_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
  """All metadata of a GGUF file by name.

  Args:
    path: a file of version 2 or 3, in either byte order.

  Returns:
    Python numbers, bools and strings, and lists of these.

  Raises:
    ValueError: the file is no GGUF file, of another version, or ends too early.
  """
  with open(path, 'rb') as file:
    try:
      buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
      buffer = b''
    if buffer[:4] != b'GGUF':
      raise ValueError(
        f'The file {str(path)!r} is no GGUF file (it begins with'
        f' {bytes(buffer[:4])!r}, not with GGUF); pass another file.'
      )
    # A version is a small number, so a wrong byte order shows in it.
    order = '<' if buffer[4:6] != b'\0\0' else '>'
    version = int.from_bytes(buffer[4:8], 'little' if order == '<' else 'big')
    if version not in (2, 3):
      raise ValueError(
        f'The file {str(path)!r} is GGUF of version {version}, but versions 2'
        ' and 3 can be read; convert the model again with a current llama.cpp.'
      )
    try:
      reader = _Reader(buffer, order)
      _, count = reader.number('u8'), reader.number('u8')  # tensors, pairs
      return dict(reader.pair() for _ in range(count))
    except (struct.error, ValueError) as error:  # also of what is no UTF-8
      raise ValueError(
        f'The metadata of the GGUF file {str(path)!r} cannot be read'
        f' ({error}); the file seems to be cut off or damaged, so copy it'
        ' again.'
      ) from error


class _Reader:
  """Reads values one after the other, from behind the version."""

  def __init__(self, buffer: Any, order: str):
    self.buffer, self.order, self.at = buffer, order, 8
    self.length = struct.Struct(f'{order}Q').unpack_from

  def pair(self) -> tuple[str, Any]:
    (name,) = self.strings(1)
    return name, self.value(self.number('u4'))

  def value(self, kind: int) -> Any:
    if kind == _ARRAY:
      return self.array(self.number('u4'), self.number('u8'))
    return self.array(kind, 1)[0]

  def array(self, kind: int, count: int) -> list[Any]:
    if kind == _STRING:
      return self.strings(count)
    if kind == _ARRAY:
      return [self.value(_ARRAY) for _ in range(count)]
    if kind not in _NUMBERS:
      raise ValueError(f'a value has the unknown type {kind}')
    dtype = np.dtype(self.order + _NUMBERS[kind])
    # Raises a ValueError past the end of the file.
    values = np.frombuffer(self.buffer, dtype, count, self.at)
    self.at += values.nbytes
    return (values.astype(bool) if kind == _BOOL else values).tolist()

  def number(self, letters: str) -> int:
    (value,) = np.frombuffer(self.buffer, self.order + letters, 1, self.at)
    self.at += value.nbytes
    return int(value)

  def strings(self, count: int) -> list[str]:
    # Local names: this loop runs 100,000 times for a vocabulary.
    buffer, length, at, found = self.buffer, self.length, self.at, []
    for _ in range(count):
      (size,) = length(buffer, at)
      found.append(buffer[at + 8 : at + 8 + size])
      at += 8 + size
    if at > len(buffer):  # a slice past the end is short, and no error
      raise ValueError('a text goes on past the end of the file')
    self.at = at
    return [text.decode() for text in found]


def load_gguf(source: str | os.PathLike[str]) -> Loaded:
  """The tokenizer in a GGUF file.

  Ids of the kind 'llama' are SentencePiece's; see `_sentence_pieces`. Those of
  the kind 'gpt2' follow llama.cpp's rules, which the file names
  ('tokenizer.ggml.pre'):
  'smollm' (digits apart, then GPT-2's words), 'gpt-2', 'qwen2', 'qwen35',
  'llama-bpe' and 'lfm2', which is the same.
  For SmolLM2 the tokenizer that transformers 5.23 makes of the same file
  differs from llama.cpp's, and from this one, where spaces stand before digits:
  in 11 of 223 paragraphs. For 'qwen2', the Hugging Face folder of a model
  composes characters first (NFC), which llama.cpp does not.

  End tokens are those of the fields eos_token_id, eot_token_id (end of turn)
  and eom_token_id (end of message).

  Args:
    source: the path of the file, or 'package:NAME'.

  Returns:
    What the file says.

  Raises:
    ValueError: the file cannot be read, or has another kind of tokenizer.
  """
  path = gguf_files.find(source)
  fields = gguf_metadata(path)
  name = f'The GGUF file {str(path)!r}'

  def field(key: str, default: Any = None) -> Any:
    return fields.get(f'tokenizer.ggml.{key}', default)

  kind, rule = field('model'), field('pre')
  if kind != _PIECES and (kind != _BYTES or rule not in _PRE_TOKENIZERS):
    raise ValueError(
      f'{name} has a tokenizer of the kind {kind!r} with the pre-tokenizer'
      f' {rule!r}, but of a GGUF file the kind {_BYTES!r} (byte-level BPE) can'
      f' be read, with one of {", ".join(_PRE_TOKENIZERS)}, and the kind'
      f' {_PIECES!r} (SentencePiece); set config.data.tokenizer to the Hugging'
      ' Face folder of the model.'
    )
  _check_fields(name, fields)
  tokens, types = field('tokens', []), field('token_type', [])
  special = {key: field(f'{key}_token_id') for key in _IDS}
  for key, token_id in special.items():
    if token_id is not None and not 0 <= token_id < len(tokens):
      raise ValueError(
        f'{name} has {key}_token_id={token_id}, but {len(tokens)} tokens; the'
        ' file is damaged, so copy or convert the model again.'
      )
  if kind == _PIECES:
    backend = _sentence_pieces.backend(
      name, tokens, field('scores', []), types, fields
    )
  else:
    merges = field('merges', [])
    backend = _byte_level(name, rule, tokens, types, merges, special.values())
  return _with_special(name, backend, fields, special, tokens)


def _byte_level(
  name: str,
  rule: str,
  tokens: Sequence[str],
  types: Sequence[int],
  merges: Sequence[str],
  special: Iterable[int | None],
) -> 'tokenizers.Tokenizer':
  """The tokenizer of the kind 'gpt2', whose words a rule makes."""
  import tokenizers

  try:
    backend = tokenizers.Tokenizer(
      tokenizers.models.BPE(
        vocab=_vocabulary(tokens, types, merges, special),
        merges=[tuple(merge.split(' ', 1)) for merge in merges],
        # A word that is a token needs no merges that lead to it.
        ignore_merges=rule in _LLAMA3,
      )
    )
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(
      f'{name} has a vocabulary that is no byte-level BPE ({error}); convert'
      ' the model again.'
    ) from error
  backend.pre_tokenizer = _pre_tokenizer(rule)
  backend.decoder = tokenizers.decoders.ByteLevel()
  for marked, kinds in (
    (True, (_CONTROL, _UNKNOWN)),
    (False, (_USER_DEFINED,)),
  ):
    added = [
      tokenizers.AddedToken(token, special=marked, normalized=False)
      for token, kind in zip(tokens, types)
      if kind in kinds
    ]
    (backend.add_special_tokens if marked else backend.add_tokens)(added)
  return backend


_IDS = 'bos', 'eos', 'eot', 'eom', 'padding', 'unknown'


def _check_fields(name: str, fields: Mapping[str, Any]) -> None:
  """Raises a ValueError that names a field which holds something else.

  All entries of a list are of one kind, so the first of them is looked at.
  """
  rows = [
    ('ggml.tokens', list, str, 'a list of texts'),
    ('ggml.merges', list, str, 'a list of texts'),
    ('ggml.token_type', list, int, 'a list of whole numbers'),
    ('ggml.scores', list, float, 'a list of numbers'),
    ('ggml.add_space_prefix', bool, None, 'true or false'),
    ('ggml.add_bos_token', bool, None, 'true or false'),
    ('chat_template', str, None, 'a text'),
    *((f'ggml.{key}_token_id', int, None, 'a whole number') for key in _IDS),
  ]
  for key, kind, of, needed in rows:
    value = fields.get(f'tokenizer.{key}')
    if value is None:
      continue
    fits = type(value) is kind
    if not fits or (kind is list and value and type(value[0]) is not of):
      raise ValueError(
        f'{name} has tokenizer.{key}={value!r:.60}, but {needed} is needed'
        ' there; copy or convert the model again.'
      )
  types, tokens = (
    fields.get(f'tokenizer.ggml.{key}') or []
    for key in ('token_type', 'tokens')
  )
  if types and len(types) != len(tokens):
    raise ValueError(
      f'{name} has tokenizer.ggml.token_type of {len(types)} entries, but'
      f' {len(tokens)} tokens; copy or convert the model again.'
    )


def _vocabulary(
  tokens: Sequence[str],
  types: Sequence[int],
  merges: Sequence[str],
  special: Iterable[int | None],
) -> dict[str, int]:
  """The ids of tokens, without names that fill up the embedding.

  A converter gives each row of the embedding that no token has a name, such as
  '[PAD151665]', and the type "unused".
  """
  ids = {token: token_id for token_id, token in enumerate(tokens)}
  filling = {token for token, kind in zip(tokens, types) if kind == _UNUSED}
  if filling:
    for merge in merges:
      filling -= {*merge.split(' ', 1), merge.replace(' ', '')}
    filling -= {tokens[i] for i in special if i is not None}
  return {token: i for token, i in ids.items() if token not in filling}


def _with_special(
  name: str,
  backend: 'tokenizers.Tokenizer',
  fields: Mapping[str, Any],
  special: Mapping[str, int | None],
  tokens: list[str],
) -> Loaded:
  """The tokenizer with the special ids and the chat template of its file."""
  ends = (special[key] for key in ('eos', 'eot', 'eom'))
  # llama.cpp adds the token for Llama 3, and for SentencePiece, unless the file
  # says otherwise.
  add_bos = fields.get(
    'tokenizer.ggml.add_bos_token',
    fields.get('tokenizer.ggml.model') == _PIECES
    or fields.get('tokenizer.ggml.pre') in _LLAMA3,
  )
  names = {
    'bos_token': special['bos'],
    'eos_token': special['eos'],
    'pad_token': special['padding'],
    'unk_token': special['unknown'],
  }
  template = fields.get('tokenizer.chat_template')
  return Loaded(
    name,
    backend,
    # Each once: two of the fields may name the same token.
    tuple(dict.fromkeys(end for end in ends if end is not None)),
    special['padding'],
    (special['bos'],) if add_bos and special['bos'] is not None else (),
    template
    and ChatTemplate(
      template,
      {key: tokens[id_] for key, id_ in names.items() if id_ is not None},
    ),
  )


def _pre_tokenizer(rule: str) -> Any:
  """What splits a text into the words within which tokens are merged."""
  from tokenizers import Regex
  from tokenizers import pre_tokenizers

  if rule in _PATTERNS:
    first = pre_tokenizers.Split(Regex(_PATTERNS[rule]), 'isolated')
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([first, letters])
  words = pre_tokenizers.ByteLevel(add_prefix_space=False)
  if rule == 'gpt-2':
    return words
  digits = pre_tokenizers.Digits(individual_digits=True)
  return pre_tokenizers.Sequence([digits, words])
