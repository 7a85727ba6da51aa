"""What every source of a tokenizer is read into, and ids of tokens by name."""

from collections.abc import Sequence
import os
from typing import TYPE_CHECKING
from typing import NamedTuple

from grpo_jax.data._chat import ChatTemplate

if TYPE_CHECKING:
  import tokenizers


class Loaded(NamedTuple):
  """A tokenizer as its files describe it.

  Attributes:
    name: what errors call it, as in "The tokenizer file 'a/tokenizer.json'".
    backend: the tokenizer that does the work.
    eos_ids: the end tokens that the files name, perhaps none.
    pad_id: the padding token that they name, or None.
    bos_ids: what the files put before a text.
    chat_template: or None if there is none.
  """

  name: str
  backend: 'tokenizers.Tokenizer'
  eos_ids: tuple[int, ...] = ()
  pad_id: int | None = None
  bos_ids: tuple[int, ...] = ()
  chat_template: ChatTemplate | None = None


def load_file(path: str | os.PathLike[str]) -> Loaded:
  """Reads a `tokenizer.json`, without its truncation and padding.

  Raises:
    ValueError: the file cannot be read.
  """
  import tokenizers

  name = f'The tokenizer file {str(path)!r}'
  try:
    backend = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the library raises nothing narrower
    raise ValueError(
      f'{name} cannot be read ({error}); pass the path of a tokenizer.json.'
    ) from error
  backend.no_truncation()
  backend.no_padding()
  return Loaded(name, backend)


def ids_of(loaded: Loaded, tokens: Sequence[str]) -> tuple[int, ...]:
  """The ids of tokens that are given as text.

  Raises:
    ValueError: the vocabulary does not have one of them; some that it has are
      named.
  """
  ids = loaded.backend.get_vocab()
  for token in tokens:
    if token not in ids:
      # Special tokens are among those that were added to the vocabulary.
      added = loaded.backend.get_added_tokens_decoder().values()
      raise ValueError(
        f'{loaded.name} has no token {token!r}; pass one that it has, such as'
        f' {[entry.content for entry in added][:8]}.'
      )
  return tuple(ids[token] for token in tokens)
