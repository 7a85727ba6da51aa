"""The tokenizer that a config names."""

from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any

from grpo_jax.config import gguf_files
from grpo_jax.data import _folder
from grpo_jax.data import _models
from grpo_jax.data._chat import PLAIN
from grpo_jax.data._chat import PromptFormat
from grpo_jax.data._tasks import ALPHABET
from grpo_jax.data._tokenizer import Tokenizer
from grpo_jax.data._tokenizer import character_tokenizer

# The end and padding tokens that a config names where nobody has set them. They
# are those of a tokenizer.json, which names none itself.
EOS_TOKENS = ('<eos>',)
PAD_TOKEN = '<pad>'


def tokenizer_from(
  source: str,
  model_path: str = '',
  eos_tokens: Sequence[str] = EOS_TOKENS,
  pad_token: str = PAD_TOKEN,
  prompt_format: PromptFormat = PLAIN,
) -> Tokenizer:
  """The tokenizer that a config names.

  >>> tokenizer_from('arithmetic')
  Tokenizer(eos_ids=(1,), pad_id=0, vocab_size=14)

  Args:
    source: one of

      - 'arithmetic', the characters of the built-in task;
      - '' for the tokenizer of the model in `model_path`;
      - the Hugging Face folder of a model;
      - the path of a .gguf file, or 'package:NAME' for the single one in an
        installed package;
      - the workdir of a run, for that run's tokenizer;
      - the path of a tokenizer.json.
    model_path: `config.model.path`: any of these but 'arithmetic' and
      tokenizer.json, or ''.
    eos_tokens: the tokens that end a completion, as text. A folder, a GGUF file
      and a run name their own, which are taken if this is empty or
      `EOS_TOKENS`. For a tokenizer.json they are taken as they are.
    pad_token: the same for the token that fills unused positions.
    prompt_format: how prompts are written.

  Returns:
    A `Tokenizer`.

  Raises:
    ValueError: nothing is named, or what is named cannot be used; see
      `Tokenizer.from_folder`, `from_gguf` and `from_file`.
  """
  if source == 'arithmetic':
    characters = character_tokenizer(ALPHABET)
    model_path = _models.local(model_path, 'tokenizer')
    if model_path := os.path.expanduser(model_path):
      _refuse_arithmetic(characters, model_path)
    return characters.with_format(prompt_format)
  if not source and not model_path:
    raise ValueError(
      'config.data.tokenizer is empty, which means the tokenizer of the model,'
      ' but config.model.path is empty too; set one of them.'
    )
  source = os.path.expanduser(_models.local(source or model_path, 'tokenizer'))
  own_eos = () if tuple(eos_tokens) == EOS_TOKENS else eos_tokens
  own_pad = '' if pad_token == PAD_TOKEN else pad_token
  if gguf_files.is_named(source):
    return Tokenizer.from_gguf(source, own_eos, own_pad, prompt_format)
  if pathlib.Path(source).is_dir():
    if run := _run_in(source):
      return tokenizer_from(
        _named_in(run, source),
        run['model'].get('path', ''),
        own_eos or run['data'].get('eos_tokens', EOS_TOKENS),
        own_pad or run['data'].get('pad_token', PAD_TOKEN),
        prompt_format,
      )
    return Tokenizer.from_folder(source, own_eos, own_pad, prompt_format)
  return Tokenizer.from_file(source, eos_tokens, pad_token).with_format(
    prompt_format
  )


def _refuse_arithmetic(characters: Tokenizer, model_path: str):
  """Raises a ValueError if a model that has a tokenizer would get another."""
  file = pathlib.Path(model_path) / 'tokenizer.json'
  if file.is_file():
    own = _folder.load_file(file).backend.get_vocab()
    # A model that was trained on sums here, and exported, has the same one.
    if own == characters.backend.get_vocab():
      return
  elif not gguf_files.is_named(model_path):
    return  # a run, or weights without a tokenizer
  raise ValueError(
    f'config.model.path={model_path!r} has a tokenizer of its own, but'
    " config.data.tokenizer='arithmetic' would give the model ids that mean"
    " something else to it; set config.data.tokenizer=''."
  )


def _run_in(folder: str) -> dict[str, Any] | None:
  """The config of the run in a folder, or None if it is no workdir.

  A Hugging Face folder has a config.json too, but of other fields.
  """
  path = pathlib.Path(folder) / 'config.json'
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError, RecursionError):
    return None
  groups = ('data', 'model', 'sampler')
  if not isinstance(values, dict):
    return None
  is_run = all(isinstance(values.get(group), dict) for group in groups)
  return values if is_run else None


def _named_in(run: dict[str, Any], folder: str) -> str:
  """What the run in a folder has as `data.tokenizer`."""
  named = run['data'].get('tokenizer', 'arithmetic')
  if named.startswith('<'):  # words for an object from Python
    raise ValueError(
      f'The run in {folder!r} was given its tokenizer in Python ({named}); give'
      ' it again, as in grpo_jax.train(config, workdir, tokenizer=...), or set'
      ' config.data.tokenizer.'
    )
  return named
