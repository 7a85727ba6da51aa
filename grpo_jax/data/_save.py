"""A tokenizer as the files of a Hugging Face folder."""

import json
import os
import pathlib
from typing import TYPE_CHECKING
from typing import Any

from grpo_jax.data import _folder
from grpo_jax.data._tokenizer import Tokenizer

if TYPE_CHECKING:
  import tokenizers


def save_tokenizer(
  tokenizer: Tokenizer, folder: str | os.PathLike[str]
) -> None:
  """Writes a tokenizer as the files that `transformers` reads.

  - tokenizer.json: the vocabulary, and the tokens before a text;
  - tokenizer_config.json: the special tokens;
  - chat_template.jinja, if there is a chat template;
  - generation_config.json: all end tokens.

  `Tokenizer.from_folder` reads the same tokenizer from them. The format of
  prompts is that of a run, and is not written.

  Args:
    tokenizer: from any source.
    folder: where to; it is made if it does not exist.
  """
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  # Not by its own `save`, which raises no OSError when the disk is full.
  text = _with_bos(tokenizer).to_str(pretty=True)
  (folder / 'tokenizer.json').write_text(text, encoding='utf-8')
  template = tokenizer.chat_template
  named = dict(template.tokens) if template else {}
  for name, ids in (
    ('bos_token', tokenizer.bos_ids),
    ('eos_token', tokenizer.eos_ids),
    ('pad_token', (tokenizer.pad_id,)),
  ):
    if ids and name not in named:
      named[name] = str(tokenizer.backend.id_to_token(ids[0]))
  fields = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'clean_up_tokenization_spaces': False,  # it would change decoded texts
    **named,
  }
  _write(folder / 'tokenizer_config.json', fields)
  if template:
    path = folder / 'chat_template.jinja'
    path.write_text(template.source, encoding='utf-8')
  save_ends(tokenizer, folder)


def save_ends(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
  """Writes the end tokens into generation_config.json, unless they are there.

  What else is in that file stays.

  Args:
    tokenizer: whose end tokens a model was trained with.
    folder: where the files of the model lie.
  """
  path = pathlib.Path(folder) / 'generation_config.json'
  values = _folder.read_json(path)
  named = values.get('eos_token_id')
  ends = named if isinstance(named, list) else [named]
  if not tokenizer.eos_ids or set(ends) == set(tokenizer.eos_ids):
    return
  values['eos_token_id'] = list(tokenizer.eos_ids)
  values.setdefault('pad_token_id', tokenizer.pad_id)
  if tokenizer.bos_ids:
    values.setdefault('bos_token_id', tokenizer.bos_ids[0])
  _write(path, values)


def is_in_folder(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> bool:
  """Whether the files of a folder hold this tokenizer.

  The end tokens that it trains with are not compared (see `save_ends`), nor is
  the padding token: a config may name others than the files do.
  """
  if not (pathlib.Path(folder) / 'tokenizer.json').is_file():
    return False
  theirs = _folder.load_folder(folder, read_ends=False)
  return (
    theirs.backend.to_str() == tokenizer.backend.to_str()
    and theirs.chat_template == tokenizer.chat_template
  )


def _with_bos(tokenizer: Tokenizer) -> 'tokenizers.Tokenizer':
  """The backend, which also puts `bos_ids` before a text.

  In a GGUF file a field says so. In a tokenizer.json it is a part of the
  tokenizer, its post-processor.
  """
  import tokenizers

  backend, bos = tokenizer.backend, list(tokenizer.bos_ids)
  if not bos or backend.encode('a').ids[: len(bos)] == bos:
    return backend
  copy = tokenizers.Tokenizer.from_str(backend.to_str())
  tokens = [(str(copy.id_to_token(one)), one) for one in bos]
  copy.post_processor = tokenizers.processors.TemplateProcessing(
    single=[*(token for token, _ in tokens), '$A'], special_tokens=tokens
  )
  return copy


def _write(path: pathlib.Path, values: dict[str, Any]) -> None:
  text = json.dumps(values, indent=2, ensure_ascii=False) + '\n'
  path.write_text(text, encoding='utf-8')
