"""SentencePiece's byte-pair encoding, from the pieces that a GGUF file holds.

A text is cut into characters, and of two neighbours that make a piece together
those are joined first whose piece has the highest score. `tokenizers` joins by
a list of pairs instead; it is made here: all ways to cut a piece in two, in the
order of the scores of the pieces. Scores must differ, because the order of
equal ones is that of their places in the text, which no list can say.

References:
  https://github.com/google/sentencepiece/blob/master/src/bpe_model.cc
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
  import tokenizers

SPACE = '▁'
"""What stands for a space in a piece."""

# Types of pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def backend(
  name: str,
  pieces: Sequence[str],
  scores: Sequence[float],
  types: Sequence[int],
  fields: Mapping[str, Any],
) -> 'tokenizers.Tokenizer':
  """The tokenizer of these pieces.

  Control pieces that a text spells out become their own ids, as chat templates
  need it; so do pieces that a user has defined, which SentencePiece looks for
  too. All else follows SentencePiece without a normalization of its own.

  Args:
    name: What a message calls the file.
    pieces: The text of each, by its id.
    scores: Of each.
    types: Of each.
    fields: Metadata of the file.

  Raises:
    ValueError: The lists have different lengths, a byte has no piece, two
      scores are the same, or a space is to be put before a text.
  """
  import tokenizers

  _check(name, pieces, scores, types, fields)
  normal = {
    piece for piece, kind in zip(pieces, types, strict=True) if kind == NORMAL
  }
  # From two characters on; one character is joined of nothing.
  long = [
    (-score, piece)
    for piece, score, kind in zip(pieces, scores, types, strict=True)
    if kind == NORMAL and len(piece) > 1
  ]
  result = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocab={
        piece: number
        for number, (piece, kind) in enumerate(zip(pieces, types, strict=True))
        if kind != UNUSED
      },
      merges=[pair for _, piece in sorted(long) for pair in cut(piece, normal)],
      byte_fallback=True,
    )
  )
  result.normalizer = tokenizers.normalizers.Replace(' ', SPACE)
  result.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace(SPACE, ' '),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  _add(result, pieces, types)
  return result


def cut(piece: str, known: set[str]) -> list[tuple[str, str]]:
  """All ways to cut a piece into two others.

  >>> cut('abc', {'a', 'b', 'c', 'ab', 'bc'})
  [('a', 'bc'), ('ab', 'c')]
  """
  return [
    (piece[:place], piece[place:])
    for place in range(1, len(piece))
    if piece[:place] in known and piece[place:] in known
  ]


def _add(
  result: 'tokenizers.Tokenizer', pieces: Sequence[str], types: Sequence[int]
):
  """Adds the pieces that are looked for before a text is cut.

  Those of a user are looked for where spaces are already written as in pieces.
  """
  import tokenizers

  def added(*kinds: int, special: bool) -> list[Any]:
    return [
      tokenizers.AddedToken(piece, special=special, normalized=not special)
      for piece, kind in zip(pieces, types, strict=True)
      if kind in kinds
    ]

  result.add_special_tokens(added(CONTROL, UNKNOWN, special=True))
  result.add_tokens(added(USER_DEFINED, special=False))


def _check(
  name: str,
  pieces: Sequence[str],
  scores: Sequence[float],
  types: Sequence[int],
  fields: Mapping[str, Any],
):
  """Raises a ValueError if ids would differ from SentencePiece's."""
  if not len(pieces) == len(scores) == len(types):
    raise ValueError(
      f'{name} has {len(pieces)} tokens, {len(scores)} scores and'
      f' {len(types)} types of tokens; copy or convert the model again.'
    )
  if fields.get('tokenizer.ggml.add_space_prefix', True):
    raise ValueError(
      f'{name} has a tokenizer that puts a space before each text'
      ' (tokenizer.ggml.add_space_prefix), which is not done here; set'
      ' config.data.tokenizer to the Hugging Face folder of the model.'
    )
  bytes_ = {p for p, kind in zip(pieces, types, strict=True) if kind == BYTE}
  missing = [f'<0x{byte:02X}>' for byte in range(256)]
  missing = [piece for piece in missing if piece not in bytes_]
  if missing:
    raise ValueError(
      f'{name} has no token for {len(missing)} of the 256 bytes'
      f' ({missing[0]}), so that not every text has ids; give a model that has'
      ' them.'
    )
  joined = [
    score
    for piece, score, kind in zip(pieces, scores, types, strict=True)
    if kind == NORMAL and len(piece) > 1
  ]
  if len(set(joined)) != len(joined):
    raise ValueError(
      f'{name} has tokens with the same score, whose order nothing says; set'
      ' config.data.tokenizer to the Hugging Face folder of the model.'
    )
