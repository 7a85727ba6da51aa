"""What was drawn, read as an answer: whole, or part by part.

A part that was sent cannot be taken back. So what might still become something
else is held back: the beginning of a stop string or of a mark, a character of
which some bytes are missing, white space at the end, and whatever a call of a
tool may begin with.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import re
from typing import NamedTuple

import numpy as np

from grpo_jax.data import Tokenizer
from grpo_jax.environments import formats
from grpo_jax.environments.base import ToolCall
from grpo_jax.serving import wire

_HALF = '\ufffd'  # stands for bytes that are no character yet
_BYTE = re.compile(r'<0x([0-9A-Fa-f]{2})>')


class Said(NamedTuple):
  """What a turn says."""

  text: str
  reasoning: str = ''
  calls: tuple[ToolCall, ...] = ()


Read = Callable[[np.ndarray, bool], Said]
"""Reads ids; the second argument is whether they were cut, or go on."""


class Turns:
  """Reads turns of chats.

  Args:
    tokenizer: Turns ids into text.
    format: How the model writes calls.
    tools: That it may call; without any, nothing is a call.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    format: formats.Format,
    tools: Sequence = (),
  ):
    if not tools:
      format = format._replace(pairs=(), bare=None, quotes=(), own=None)
    self._tokenizer, self._format, self._tools = tokenizer, format, tools
    self._opened = tokenizer.opens_reasoning()
    added = tokenizer.backend.get_added_tokens_decoder().values()
    self._special = [token.content for token in added]
    first = [mark for mark, _ in format.pairs]
    self._first = re.compile('|'.join(map(re.escape, first)) or '(?!)')
    self.marks = (*first, *itertools.chain(*format.reasoning))
    # Without marks any text may turn out to be a call.
    self._is_clear = format.bare is None and format.own is None

  def __call__(self, ids: np.ndarray, cut: bool) -> Said:
    """See `Read`. White space around texts is left out."""
    parsed = self._parsed(self._tokenizer.turn_pieces(ids), cut)
    return Said(parsed.text.strip(), parsed.reasoning.strip(), parsed.calls)

  def so_far(self, ids: np.ndarray) -> Said:
    """What is clear of a turn that goes on."""
    pieces = []
    for text, is_special in self._tokenizer.turn_pieces(ids):
      mark = self._first.search(text)
      pieces.append((text[: mark.start()] if mark else text, is_special))
      if mark:
        break
    parsed = self._parsed(pieces, cut=True)
    text = parsed.text.lstrip() if self._is_clear else ''
    return Said(text, parsed.reasoning)

  def _parsed(self, pieces, cut: bool) -> formats.Parsed:
    return formats.parse(
      self._format, pieces, self._opened, cut, self._tools, self._special
    )


class Texts:
  """Reads completions, which are texts alone.

  Args:
    tokenizer: Turns ids into text.
  """

  marks: tuple[str, ...] = ()

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer

  def __call__(self, ids: np.ndarray, cut: bool) -> Said:
    """See `Read`."""
    return Said(self._tokenizer.decode(ids))

  def so_far(self, ids: np.ndarray) -> Said:
    """What there is of a completion that goes on."""
    return self(ids, True)


class Parts:
  """Turns what is drawn of an answer into parts, and the whole.

  Args:
    read: Reads ids.
    stops: Texts that end the answer, and are no part of it.
    strips: Whether white space at the end is no part of the answer.
  """

  def __init__(self, read: Turns | Texts, stops: Sequence[str], strips: bool):
    self._read, self._stops, self._strips = read, stops, strips
    self._held = (*read.marks, *stops)
    self._text = self._reasoning = ''
    self._tokens = 0

  def part(self, ids: np.ndarray) -> tuple[wire.Piece, int]:
    """What is new and clear; and how many tokens came before."""
    said = self._read.so_far(ids)
    return self._new(
      Said(self._clear(said.text), self._clear(said.reasoning)), ids
    )

  def whole(self, ids: np.ndarray, cut: bool) -> Said:
    """All that was said."""
    said = self._read(ids, cut)
    return Said(self._cut(said.text), self._cut(said.reasoning), said.calls)

  def rest(self, said: Said, ids: np.ndarray) -> tuple[wire.Piece, int]:
    """What no part has had; see `part`."""
    piece, before = self._new(said, ids)
    return piece._replace(calls=said.calls), before

  def _new(self, said: Said, ids: np.ndarray) -> tuple[wire.Piece, int]:
    text = said.text.startswith(self._text) and said.text[len(self._text) :]
    thought = (
      said.reasoning.startswith(self._reasoning)
      and (said.reasoning[len(self._reasoning) :])
    )
    self._text += text or ''
    self._reasoning += thought or ''
    before, self._tokens = self._tokens, len(ids)
    new = tuple(int(x) for x in ids[before:])
    return wire.Piece(text or '', thought or '', ids=new), before

  def _cut(self, text: str) -> str:
    """A text up to its first stop string."""
    places = [text.find(stop) for stop in self._stops]
    end = min((place for place in places if place >= 0), default=len(text))
    return text[:end].rstrip() if self._strips else text[:end]

  def _clear(self, text: str) -> str:
    """What of a text that goes on cannot become anything else."""
    text = self._cut(text).rstrip(_HALF)
    for mark in self._held:
      for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
          text = text[:-size]
          break
    return text.rstrip() if self._strips else text


def scored(
  tokenizer: Tokenizer,
  ids: Sequence[int],
  logp: Sequence[float | None],
  tops: Sequence[Sequence[tuple[int, float]]] = (),
  previous: int | None = None,
  offset: int = 0,
) -> list[wire.Scored]:
  """Tokens with what is known of each.

  Args:
    tokenizer: Turns ids into text.
    ids: Of the tokens.
    logp: Of each.
    tops: For each the likeliest ids, with their log-probabilities; () without.
    previous: The id before the first.
    offset: Where the first begins, in characters.
  """
  found = []
  for n, token in enumerate(ids):
    text = _text(tokenizer, token, previous)
    likely = tuple(
      wire.Likely(
        _text(tokenizer, x, previous), _data(tokenizer, x), float(p), int(x)
      )
      for x, p in (tops[n] if tops else ())
    )
    value = logp[n]
    found.append(
      wire.Scored(
        text,
        _data(tokenizer, token),
        None if value is None else float(value),
        likely,
        offset,
        int(token),
      )
    )
    offset += len(text)
    previous = token
  return found


def _text(tokenizer: Tokenizer, token: int, previous: int | None) -> str:
  """The text of a token, behind another: alone it may lose its space."""
  if previous is None:
    return tokenizer.decode_whole([token])
  before = tokenizer.decode_whole([previous])
  both = tokenizer.decode_whole([previous, token])
  if both.startswith(before):
    return both[len(before) :]
  return tokenizer.decode_whole([token])  # it ends a character


def _data(tokenizer: Tokenizer, token: int) -> bytes:
  """The bytes of a token, which may be a part of a character."""
  text = tokenizer.decode_whole([token])
  written = tokenizer.backend.id_to_token(int(token)) or text
  if found := _BYTE.fullmatch(written):
    return bytes([int(found[1], 16)])
  if _HALF in text and all(character in _BYTES for character in written):
    return bytes(_BYTES[character] for character in written)
  return text.encode()


def _byte_characters() -> dict[str, int]:
  """The characters that stand for bytes in vocabularies of bytes, as GPT-2's.

  >>> _BYTES['A'], _BYTES['\u0120']
  (65, 32)
  """
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [byte for byte in range(256) if byte not in shown]
  found = {chr(byte): byte for byte in shown}
  return found | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_characters()
