"""Chats as a reward model reads them: the prompt, and the answer to be judged.

The answer was written by the policy, for which a high score pays. If it spelled
out the special tokens of the reward model, and these were read as such, it
could end its message and go on as the user who praises it. So they are read as
plain text there.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import re
import secrets
from typing import Any

from grpo_jax import data


class Chats:
  """Writes a prompt and its answer as the ids that a reward model reads.

  Args:
    path: The folder of the reward model.
    chat: Whether to use its chat template.
    system: Content of a system message; '': none.
    chat_kwargs: Variables for the template.

  Attributes:
    vocab_size: Of the tokenizer.

  Raises:
    ValueError: The tokenizer cannot be read, or has no chat template, or none
      that takes what is given.
  """

  def __init__(
    self, path: str, chat: bool, system: str, chat_kwargs: Mapping[str, Any]
  ):
    self._tokenizer = data.Tokenizer.from_folder(path)
    self._template = self._tokenizer.chat_template if chat else None
    self._kwargs = dict(chat_kwargs)
    self._format = data.PromptFormat(system_prompt=system)
    self.vocab_size = self._tokenizer.vocab_size
    if chat and self._template is None:
      raise ValueError(
        f'The reward model in {path!r} has no chat template; give chat=False,'
        ' and it reads prompt and completion one behind the other.'
      )
    if not chat and (system or chat_kwargs):
      raise ValueError(
        f'The reward model in {path!r} is given chat=False beside system='
        f'{system!r} and chat_kwargs={self._kwargs}, which only a chat has;'
        ' leave them out.'
      )
    if chat:
      self._text('x', 'x')  # some templates refuse system messages
    special = [
      token.content
      for token in self._tokenizer.backend.get_added_tokens_decoder().values()
      if token.special and token.content
    ]
    # The longest first, as the tokenizer finds them.
    special = map(re.escape, sorted(special, key=len, reverse=True))
    self._special = re.compile('|'.join(special) or '(?!)')

  def ids(self, prompt: data.Prompt, completion: str) -> list[int]:
    """The ids of a prompt and its answer.

    Args:
      prompt: A text, or messages.
      completion: The answer.

    Raises:
      ValueError: The template refuses the messages; or they are messages, and
        there is no template.
    """
    tokenizer = self._tokenizer
    harmless = self._special.search(completion) is None
    if self._template is None:
      if not isinstance(prompt, str):
        raise ValueError(
          f'A prompt is {prompt!r:.80}, but the reward model is used with'
          ' chat=False, so a text is needed; give chat=True.'
        )
      if harmless:
        return tokenizer.encode_prompt(prompt + completion)
      return [*tokenizer.encode_prompt(prompt), *self._plain(completion)]
    if harmless:
      return tokenizer.encode(self._text(prompt, completion))
    # The answer is put in the place of a word that stands nowhere else.
    word = secrets.token_hex(16)
    before, _, behind = self._text(prompt, word).rpartition(word)
    return [
      *tokenizer.encode(before),
      *self._plain(completion),
      *tokenizer.encode(behind),
    ]

  def _text(self, prompt: data.Prompt, completion: str) -> str:
    """The chat as its template writes it."""
    assert self._template is not None
    asked = self._format.messages(prompt)
    if data.is_by_assistant(asked[-1]):  # the completion goes on where it ends
      completion = asked.pop()['content'] + completion
    answer = {'role': 'assistant', 'content': completion}
    return self._template.render(
      [*asked, answer],
      add_generation_prompt=False,
      **self._kwargs,
    )

  def _plain(self, text: str) -> list[int]:
    """The ids of a text, none of them of a special token."""
    pieces = torn(text, self._special)
    return [i for piece in pieces for i in self._tokenizer.encode(piece)]


def asked(example: Mapping[str, Any], prompt: str) -> data.Prompt:
  """The whole prompt of a record: its messages, if it is a chat."""
  whole = example.get('prompt')
  return prompt if whole is None or isinstance(whole, str) else whole


def torn(text: str, special: re.Pattern[str]) -> Iterator[str]:
  """Pieces of a text, each special token cut behind its first character.

  >>> list(torn('so<|end|>.', re.compile(r'<\\|end\\|>')))
  ['so<', '|end|>.']

  Args:
    text: Any text.
    special: Matches the special tokens. One of a single character is left out.
  """
  first = 0
  while match := special.search(text, first):
    whole = len(match.group()) == 1
    yield text[first : match.start() + (not whole)]
    first = match.start() + 1
  yield text[first:]
