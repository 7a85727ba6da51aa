"""The tokenizer of a model in a Hugging Face folder."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
from typing import TYPE_CHECKING
from typing import Any
from typing import NamedTuple

from grpo_jax.data._chat import ChatTemplate

if TYPE_CHECKING:
  import tokenizers


# What is read of a folder but its weights. Each may be missing.
FILES = (
  'config.json',
  'generation_config.json',
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
)


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


# What folders hold that were saved without a tokenizer.json.
_SLOW = ('tokenizer.model', 'tekken.json', 'vocab.json', 'vocab.txt')


def load_folder(path: str | os.PathLike[str], read_ends: bool = True) -> Loaded:
  """Reads the tokenizer of a model from its Hugging Face folder.

  ======================= ====================================================
  the vocabulary          tokenizer.json
  end tokens              generation_config.json ('eos_token_id', a number or
                          a list, as in Llama 3 and Gemma 3), else config.json,
                          else the 'eos_token' of tokenizer_config.json
  padding token           tokenizer_config.json ('pad_token'), else
                          generation_config.json or config.json
                          ('pad_token_id'), if they name a special token
  before a text           what tokenizer.json puts there (its post-processor),
                          unless 'add_bos_token' in tokenizer_config.json says
                          otherwise
  the chat template       chat_template.jinja, else the 'chat_template' of
                          tokenizer_config.json: a text, or of a list of named
                          templates the one that is called 'default'
  ======================= ====================================================

  Args:
    path: the folder. Only tokenizer.json is required.
    read_ends: whether to look for end tokens at all; not if others are named
      instead, which then helps a folder whose own are wrong.

  Returns:
    What the files say.

  Raises:
    ValueError: there is no tokenizer.json, a file is no JSON, or the files name
      an end token that the vocabulary does not have.
  """
  folder = pathlib.Path(path)
  if not (folder / 'tokenizer.json').is_file():
    slow = [name for name in _SLOW if (folder / name).is_file()]
    holds = f'has {slow[0]} but ' if slow else 'has '
    raise ValueError(
      f'The folder {str(path)!r} {holds}no tokenizer.json, the one format that'
      ' can be read; write it there with transformers,'
      ' AutoTokenizer.from_pretrained(folder).save_pretrained(folder), or set'
      ' config.data.tokenizer to a folder that has it.'
    )
  loaded = load_file(folder / 'tokenizer.json')
  # Older folders keep special tokens in a file of their own.
  fields = {}
  for name in ('special_tokens_map.json', 'tokenizer_config.json'):
    values = read_json(folder / name)
    _check_tokens(folder / name, values)
    fields |= values
  tokens = {
    name: text
    for name, token in fields.items()
    if name.endswith('_token') and isinstance(text := _token_text(token), str)
  }
  model = read_json(folder / 'config.json')
  generation = folder / 'generation_config.json'
  configs = [
    (generation, read_json(generation)),
    (folder / 'config.json', model),
    # A model of text and images has the fields of its text part in there.
    (folder / 'config.json', _text_part(folder / 'config.json', model)),
  ]
  ids = loaded.backend.get_vocab()
  return loaded._replace(
    eos_ids=_eos_ids(ids, configs, tokens, folder) if read_ends else (),
    pad_id=_pad_id(loaded.backend, configs, tokens),
    bos_ids=_bos_ids(
      loaded.backend, fields, ids.get(tokens.get('bos_token', ''))
    ),
    chat_template=_chat_template(folder, fields, tokens),
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file; empty if there is no such file."""
  if not path.is_file():
    return {}
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  # What is no UTF-8 raises it too; lists in lists, thousands, a RecursionError.
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'The file {str(path)!r} is no JSON ({error}); copy it again from where'
      ' the model came from.'
    ) from error
  if not isinstance(values, dict):
    raise ValueError(
      f'The file {str(path)!r} holds {values!r:.40}, but a JSON object is'
      ' needed; copy it again from where the model came from.'
    )
  return values


def shards(index: pathlib.Path) -> list[str]:
  """The files that an index of safetensors names, sorted; perhaps none.

  Raises:
    ValueError: it is no JSON object.
  """
  named = read_json(index).get('weight_map')
  return sorted({*map(str, named.values())}) if isinstance(named, dict) else []


def _wrong(
  path: pathlib.Path, field: str, value: Any, needed: str
) -> ValueError:
  return ValueError(
    f'{str(path)!r} has {field}={value!r:.60}, but {needed} is needed there;'
    ' correct the file, or copy it again from where the model came from.'
  )


_SPECIAL = 'bos_token', 'eos_token', 'pad_token', 'unk_token'


def _check_tokens(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Raises a ValueError that names a field which holds something else."""
  for field in _SPECIAL:
    token = values.get(field)
    if token is not None and not isinstance(_token_text(token), str):
      raise _wrong(path, field, token, 'a text')
  adds = values.get('add_bos_token')
  if adds is not None and not isinstance(adds, bool):
    raise _wrong(path, 'add_bos_token', adds, 'true or false')
  template = values.get('chat_template')
  listed = template if isinstance(template, list) else []
  usable = template is None or isinstance(template, str | list)
  if not usable or not all(map(_is_template, listed)):
    raise _wrong(
      path,
      'chat_template',
      template,
      "a text, or a list of objects with the texts 'name' and 'template',",
    )


def _is_template(entry: Any) -> bool:
  texts = 'name', 'template'
  return isinstance(entry, dict) and all(
    isinstance(entry.get(field), str) for field in texts
  )


def _text_part(path: pathlib.Path, model: Mapping[str, Any]) -> dict[str, Any]:
  part = model.get('text_config') or {}
  if not isinstance(part, dict):
    raise _wrong(path, 'text_config', part, 'an object with fields')
  return part


def _token_text(token: Any) -> Any:
  """The text of a token, which may be a dict that says how it is matched."""
  return token.get('content') if isinstance(token, dict) else token


def _eos_ids(
  ids: Mapping[str, int],
  configs: Iterable[tuple[pathlib.Path, Mapping[str, Any]]],
  tokens: Mapping[str, str],
  folder: pathlib.Path,
) -> tuple[int, ...]:
  known = set(ids.values())
  for path, values in configs:
    named = values.get('eos_token_id')
    if named is None:
      continue
    ends = named if isinstance(named, list) else [named]
    if not all(type(end) is int for end in ends):
      raise _wrong(
        path, 'eos_token_id', named, 'a whole number, or a list of them,'
      )
    if not ends:  # names none
      continue
    for end in ends:
      if end not in known:
        raise ValueError(
          f'{str(path)!r} has eos_token_id={named}, but the tokenizer.json'
          f' beside it has no token {end!r}; name the end tokens in'
          ' config.data.eos_tokens, or correct the file.'
        )
    return tuple(dict.fromkeys(ends))
  token = tokens.get('eos_token')
  if token is None:
    return ()
  if token not in ids:
    raise ValueError(
      f'{str(folder / "tokenizer_config.json")!r} has eos_token={token!r}, but'
      ' the tokenizer.json beside it has no such token; name the end tokens in'
      ' config.data.eos_tokens, or correct the file.'
    )
  return (ids[token],)


def _pad_id(
  backend: 'tokenizers.Tokenizer',
  configs: Iterable[tuple[pathlib.Path, Mapping[str, Any]]],
  tokens: Mapping[str, str],
) -> int | None:
  token_id = backend.token_to_id(tokens.get('pad_token', ''))
  if token_id is not None:
    return token_id
  # Some files have a 0 here that stands for nothing. Token 0 may be '!', which
  # would then be missing from every text that is decoded.
  special = backend.get_added_tokens_decoder()
  for path, values in configs:
    named = values.get('pad_token_id')
    if named is not None and type(named) is not int:
      raise _wrong(path, 'pad_token_id', named, 'a whole number')
    if named in special:
      return named
  return None


def _bos_ids(
  backend: 'tokenizers.Tokenizer',
  fields: Mapping[str, Any],
  bos_id: int | None,
) -> tuple[int, ...]:
  if fields.get('add_bos_token') is not None:
    return (bos_id,) if fields['add_bos_token'] and bos_id is not None else ()
  # The post-processor can only be run, not read.
  plain = backend.encode('a', add_special_tokens=False).ids
  ids = backend.encode('a').ids
  for place in range(len(ids)):
    if ids[place : place + len(plain)] == plain:
      return tuple(ids[:place])
  return ()


def _chat_template(
  folder: pathlib.Path, fields: Mapping[str, Any], tokens: Mapping[str, str]
) -> ChatTemplate | None:
  path = folder / 'chat_template.jinja'
  if path.is_file():
    try:
      return ChatTemplate(path.read_text(encoding='utf-8'), tokens)
    except UnicodeDecodeError as error:
      raise ValueError(
        f'The file {str(path)!r} is no text in UTF-8 ({error}); copy it again'
        ' from where the model came from.'
      ) from error
  source = fields.get('chat_template')
  if isinstance(source, list):
    named = {entry.get('name'): entry.get('template') for entry in source}
    source = named.get('default')
  return ChatTemplate(source, tokens) if source else None
