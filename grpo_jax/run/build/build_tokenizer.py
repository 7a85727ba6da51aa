"""The tokenizer of a run, its end tokens and its stop strings."""

from collections.abc import Callable
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.run.build import build_foreign
from grpo_jax.run.build import marks
from grpo_jax.run.build.marks import Given

Config = config_lib.Config


def tokenizer_of(
  config: Config, given: Given = marks.NOTHING
) -> data.Tokenizer:
  """The tokenizer of a run.

  The end of a turn by its chat template is one of its end tokens, unless the
  config names the end tokens.

  Raises:
    ValueError: It cannot be read, or its prompts cannot be written as the
      config says.
  """
  found = _tokenizer_as_named(config, given)
  named = tuple(config.data.eos_tokens) not in ((), data.EOS_TOKENS)
  return found if named else found.with_turn_end()


def _tokenizer_as_named(config: Config, given: Given) -> data.Tokenizer:
  """`tokenizer_of`, with the end tokens that its files name."""
  fields = config.data
  prompts = data.PromptFormat(
    fields.chat,
    fields.system_prompt,
    fields.chat_kwargs,
    fields.completion_prefix,
  )
  if fields.tokenizer in given.objects:
    tokenizer = given.objects[fields.tokenizer]
    # A tokenizer may come with a format of its own, which a config that says
    # nothing leaves alone.
    if prompts == data.PromptFormat():
      return tokenizer
    return tokenizer.with_format(prompts)
  path = config.model.path
  if path in given.objects or build_foreign.is_named(path):
    if not fields.tokenizer:
      raise ValueError(
        'config.data.tokenizer is empty, which means the tokenizer of the '
        'model, but a model of your own brings none; give tokenizer=... or set '
        'the field.'
      )
    path = ''
  return data.tokenizer_from(
    fields.tokenizer,
    path,
    fields.eos_tokens,
    fields.pad_token,
    prompts,
  )


def decode_of_stops(
  config: config_lib.Sampler, tokenizer: data.Tokenizer
) -> Callable[[Any], str]:
  """What makes the text that stop strings are looked for in."""
  # Otherwise as rewards see a completion, without special tokens.
  if any(map(tokenizer.hides, config.stop_strings)):
    return tokenizer.decode_whole
  return tokenizer.decode


def turn_end_note(config: Config, tokenizer: data.Tokenizer) -> str:
  """What the start says of the end of a turn; '' if the files name it.

  Args:
    config: Of the run.
    tokenizer: Of `tokenizer_of`.
  """
  text = lambda ids: ', '.join(
    str(tokenizer.backend.id_to_token(token_id)) for token_id in ids
  )
  end = tokenizer.turn_end_id()
  if end is None:
    words = tokenizer.turn_end_text()
    if not words or any(stop in words for stop in config.sampler.stop_strings):
      return ''
    return f'turns end by the text {words!r:.60}, which is no token and no stop'
  named = [i for i in tokenizer.eos_ids if i not in tokenizer.added_eos_ids]
  beside = text(named) or 'no other end token'
  if end in tokenizer.added_eos_ids:
    return f'{text([end])} ends a turn, so it is an end token beside {beside}'
  if end not in tokenizer.eos_ids:
    return (
      f'{text([end])} ends a turn, but is no end token: data.eos_tokens names '
      f'{tuple(config.data.eos_tokens)}'
    )
  return ''
