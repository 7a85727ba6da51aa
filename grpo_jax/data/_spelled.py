"""Contents of messages that spell special tokens, encoded as plain text.

A chat template writes whose turn it is by special tokens such as '<|im_end|>'.
Encoded in one piece with the template's own, the same words in a user's message
or a tool's result would become that token too: a page of the web could end the
turn and begin one of the system. So such words are set aside before the
template is rendered. In its text, all special tokens are then the template's
own. They get names that nobody can know, the words come back, and a tokenizer
that knows the tokens by these names alone encodes the whole.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import re
import secrets
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple
from typing import Protocol

from grpo_jax.data._chat import Message
from grpo_jax.data._chat import is_by_assistant
from grpo_jax.data._chat import leaves

if TYPE_CHECKING:
  import tokenizers

# Who writes these is the one who trains: they may spell what they like.
_TRUSTED = 'system', 'developer'


class Encodes(Protocol):
  """What is read of a `Tokenizer`."""

  @property
  def backend(self) -> 'tokenizers.Tokenizer': ...
  @property
  def eos_ids(self) -> tuple[int, ...]: ...
  @property
  def pad_id(self) -> int: ...
  def encode(self, text: str) -> list[int]: ...


class Renamed(NamedTuple):
  """A tokenizer whose special tokens have other names.

  Attributes:
    backend: That tokenizer.
    names: The name of each special token, by its text.
    pattern: Finds the texts of the special tokens, the longest first.
    secret: Stands in all names, and nowhere else.
  """

  backend: 'tokenizers.Tokenizer'
  names: Mapping[str, str]
  pattern: re.Pattern[str]
  secret: str


class SetAside(NamedTuple):
  """Messages without what they spell of special tokens.

  Attributes:
    messages: With a name in the place of each special token that was spelled.
    spelled: What each of these names stands for. (There may be none, where a
      text is a special token only after the tokenizer's normalization.)
    renamed: What encodes the rendered messages; None if they spell no special
      token.
  """

  messages: Sequence[Message]
  spelled: Mapping[str, str] = {}
  renamed: Renamed | None = None


def set_aside(
  tokenizer: Encodes,
  messages: Sequence[Message],
  sampled: Collection[int] = (),
  marks: Collection[str] = (),
) -> SetAside:
  """Takes special tokens out of what users, tools and models have written.

  Args:
    tokenizer: The one that will encode the chat.
    messages: They stay as they are.
    sampled: The numbers of those that a model has sampled.
    marks: Special tokens that stay in these.
  """
  special = _special(tokenizer)
  theirs = [
    place in sampled
    or (not is_by_assistant(one) and one.get('role') not in _TRUSTED)
    for place, one in enumerate(messages)
  ]
  texts = [
    leaf
    for message, untrusted in zip(messages, theirs, strict=True)
    for leaf in leaves({**message, 'tools': None} if untrusted else ())
    if isinstance(leaf, str)
  ]
  if not any(_spells(tokenizer, special, text) for text in texts):
    return SetAside(messages)
  renamed = _renamed(tokenizer.backend, special)
  spelled: dict[str, str] = {}

  def name(match: re.Match[str], stays: Collection[str]) -> str:
    if match[0] in stays:
      return match[0]
    spelled[found := f'{renamed.secret}n{len(spelled)}n'] = match[0]
    return found

  def replacing(stays: Collection[str]) -> Callable[[str], str]:
    named = functools.partial(name, stays=stays)
    return lambda text: renamed.pattern.sub(named, text)

  stay = [marks if place in sampled else () for place in range(len(messages))]
  replaced = [
    {
      field: value
      if field in ('role', 'tools') or not untrusted
      else _replaced(value, replace)
      for field, value in message.items()
    }
    for message, untrusted, replace in zip(
      messages, theirs, map(replacing, stay), strict=True
    )
  ]
  return SetAside(replaced, spelled, renamed)


def encode(tokenizer: Encodes, text: str, aside: SetAside) -> list[int]:
  """Token ids of a rendered chat, in which names stand for what was set aside.

  Without special tokens in the messages they are those of `Tokenizer.encode`.
  """
  if (renamed := aside.renamed) is None:
    return tokenizer.encode(text)
  text = renamed.pattern.sub(lambda match: renamed.names[match[0]], text)
  text = re.sub(
    rf'{renamed.secret}n\d+n', lambda match: aside.spelled[match[0]], text
  )
  return renamed.backend.encode(text, add_special_tokens=False).ids


def _spells(
  tokenizer: Encodes, special: Sequence[tuple[str, int]], text: str
) -> bool:
  """Whether encoding a text gives one of the special tokens."""
  if not special:
    return False
  # Encoding is surer than a search: tokens may match after normalization.
  return not {token_id for _, token_id in special}.isdisjoint(
    tokenizer.encode(text)
  )


def _special(tokenizer: Encodes) -> tuple[tuple[str, int], ...]:
  """The tokens that no user may write, as (text, id).

  A token that a file does not mark as special, such as '<think>' in many, is a
  word like others: prompts ask for it by its name. One that matches between
  spaces alone might not do so under another name; no chat template has any.
  """
  ends = {*tokenizer.eos_ids, tokenizer.pad_id}
  return tuple(
    (token.content, token_id)
    for token_id, token in sorted(
      tokenizer.backend.get_added_tokens_decoder().items()
    )
    if (token.special or token_id in ends) and not token.single_word
  )


@functools.lru_cache(maxsize=2)  # each holds a whole vocabulary
def _renamed(
  backend: 'tokenizers.Tokenizer', special: tuple[tuple[str, int], ...]
) -> Renamed:
  import tokenizers

  # It is in no id that comes out, so that runs are equal all the same.
  secret = f'q{secrets.token_hex(8)}q'
  names = {text: f'{secret}t{token_id}t' for text, token_id in special}
  values = json.loads(backend.to_str())
  for one in values['added_tokens']:
    one['content'] = names.get(one['content'], one['content'])
  values['post_processor'] = None  # it has tokens by name, and is not used
  model = values['model']
  # The vocabulary may hold them too; then they must keep their ids, and no
  # merge may lead to them.
  if isinstance(model['vocab'], dict):
    model['vocab'] = {names.get(t, t): i for t, i in model['vocab'].items()}
  else:  # of a unigram model: pairs of a piece and its score
    model['vocab'] = [[names.get(t, t), s] for t, s in model['vocab']]
  if 'merges' in model:
    model['merges'] = [
      pair
      for pair in model['merges']
      if names.keys().isdisjoint((*pair, ''.join(pair)))
    ]
  if unknown := model.get('unk_token'):
    model['unk_token'] = names.get(unknown, unknown)
  made = tokenizers.Tokenizer.from_str(json.dumps(values))
  made.no_truncation()
  made.no_padding()
  for text, token_id in special:
    assert made.token_to_id(names[text]) == token_id, text
  longest_first = sorted(names, key=len, reverse=True)
  pattern = re.compile('|'.join(map(re.escape, longest_first)))
  return Renamed(made, names, pattern, secret)


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
  """A value like another, with other texts."""
  if isinstance(value, Mapping):
    return {key: _replaced(item, replace) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_replaced(item, replace) for item in value]
  return replace(value) if isinstance(value, str) else value
