"""Text to token ids and back."""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
from typing import TYPE_CHECKING
from typing import SupportsInt

if TYPE_CHECKING:
  import tokenizers


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A `tokenizers.Tokenizer`, and the special ids that sampling must know.

  `vocab_size` is the largest id plus one. This may be more than the number of
  tokens: some files leave ids out, and an embedding table needs a row for every
  id. A `Tokenizer` can be pickled.

  >>> tokenizer = character_tokenizer('0123456789+=')
  >>> tokenizer.encode('47+85=')
  [6, 9, 12, 10, 7, 13]
  >>> tokenizer.decode([4, 5, 3, 1])
  '231'

  Args:
    backend: the tokenizer that does the work.
    eos_ids: the ids that end a completion. A chat model often has two, one for
      the turn and one for the document. Without any, every completion has the
      length limit.
    pad_id: the id that fills unused positions. It may be one of `eos_ids`,
      because masks come from lengths and never from ids.
    alphabet: the characters that `encode` accepts, or None for any text.

  Raises:
    ValueError: an end token is given twice, or an id is not in the vocabulary.
  """

  backend: 'tokenizers.Tokenizer' = dataclasses.field(repr=False)
  eos_ids: tuple[int, ...]
  pad_id: int
  alphabet: frozenset[str] | None = dataclasses.field(default=None, repr=False)
  vocab_size: int = dataclasses.field(init=False)

  def __post_init__(self):
    ids = set(self.backend.get_vocab().values())
    if len(set(self.eos_ids)) != len(self.eos_ids):
      raise ValueError(
        f'The end tokens {self.eos_ids!r} name an id twice; pass each id once.'
      )
    for token_id in (*self.eos_ids, self.pad_id):
      if token_id not in ids:
        raise ValueError(
          f'The id {token_id!r} is not in the vocabulary of {len(ids)} tokens;'
          ' pass end and padding ids that the tokenizer has.'
        )
    object.__setattr__(self, 'vocab_size', max(ids) + 1)

  def encode(self, text: str) -> list[int]:
    """Token ids of a text; nothing is put before or after it.

    A special token that is spelled out in the text, such as '<|im_start|>',
    becomes its own id, which chat templates rely on. (`character_tokenizer`
    has no such tokens.)

    Args:
      text: the text.

    Returns:
      Ids, one per token.

    Raises:
      ValueError: the text has a character outside `alphabet`.
    """
    if self.alphabet is not None:
      for character in text:
        if character not in self.alphabet:
          raise ValueError(
            f'The text {text[:80]!r} holds the character {character!r}, which'
            f' is not in the alphabet {"".join(sorted(self.alphabet))!r};'
            ' remove it or build the tokenizer with it.'
          )
    return self.backend.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """The text of token ids, without end, padding and other special tokens.

    Args:
      ids: token ids, such as a list or an array of integers.

    Returns:
      The text.
    """
    # Removed here too, because not every file marks these tokens as special.
    hidden = {*self.eos_ids, self.pad_id}
    kept = [token_id for token_id in map(int, ids) if token_id not in hidden]
    return self.backend.decode(kept, skip_special_tokens=True)

  @classmethod
  def from_file(
    cls, path: str, eos_tokens: Sequence[str], pad_token: str
  ) -> 'Tokenizer':
    """Reads a `tokenizer.json` in the format of Hugging Face.

    A file may ask for truncation and padding. Both are switched off: they would
    change prompts without a word.

    Args:
      path: the file.
      eos_tokens: the tokens that end a completion, as text.
      pad_token: the token that fills unused positions, as text.

    Returns:
      The tokenizer.

    Raises:
      ValueError: the file cannot be read, or does not have one of the tokens.
    """
    import tokenizers

    if isinstance(eos_tokens, str):
      raise ValueError(
        f'eos_tokens is the text {eos_tokens!r}, but a sequence of tokens is'
        f' required; pass ({eos_tokens!r},).'
      )
    try:
      backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
      raise ValueError(
        f'The tokenizer file {str(path)!r} cannot be read ({error}); pass the'
        ' path of a tokenizer.json.'
      ) from error
    backend.no_truncation()
    backend.no_padding()
    ids = backend.get_vocab()
    for token in (*eos_tokens, pad_token):
      if token not in ids:
        # Special tokens are among those that were added to the vocabulary.
        added = backend.get_added_tokens_decoder().values()
        raise ValueError(
          f'The tokenizer file {str(path)!r} has no token {token!r}; pass one'
          f' that it has, such as {[entry.content for entry in added][:8]}.'
        )
    return cls(
      backend, tuple(ids[token] for token in eos_tokens), ids[pad_token]
    )


def character_tokenizer(alphabet: str) -> Tokenizer:
  """A tokenizer with one token per character.

  Id 0 is '<pad>', id 1 is '<eos>', and character i of the alphabet, counted
  from 0, has id i + 2. The text '<eos>' in a prompt is five characters and
  never the end token.

  >>> character_tokenizer('ab').encode('ba')
  [3, 2]
  >>> character_tokenizer('ab')
  Tokenizer(eos_ids=(1,), pad_id=0, vocab_size=4)

  Args:
    alphabet: the characters, each once.

  Returns:
    A tokenizer that refuses every other character.

  Raises:
    ValueError: the alphabet is empty, or has a character twice.
  """
  import tokenizers

  if not alphabet or len(set(alphabet)) != len(alphabet):
    raise ValueError(
      f'The alphabet {alphabet!r} must hold at least one character and none'
      ' twice; remove the repeated characters.'
    )
  vocabulary = {'<pad>': 0, '<eos>': 1}
  vocabulary |= {character: i + 2 for i, character in enumerate(alphabet)}
  # Byte-pair encoding joins characters by its merges; without any, every token
  # is a single character.
  backend = tokenizers.Tokenizer(
    tokenizers.models.BPE(vocab=vocabulary, merges=[])
  )
  backend.decoder = tokenizers.decoders.Fuse()
  return Tokenizer(backend, (1,), 0, frozenset(alphabet))
