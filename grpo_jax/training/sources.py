"""The sources of prompts that a config names, and the widths that they need."""

from collections.abc import Sequence
import dataclasses
from typing import Any

from grpo_jax import config as config_lib
from grpo_jax import data
from grpo_jax.data import JsonlSource
from grpo_jax.training.marks import Given

Config = config_lib.Config


def train(config: Config, given: Given) -> tuple[list[Any], list[float]]:
  """The sources of prompts to train on, and their weights in the mixture."""
  several = config.data.train
  if isinstance(several, str):
    several = (config_lib.Source(several),)
  found = [named(config, source.name, 'train', given) for source in several]
  return found, [source.weight for source in several]


def heldout(config: Config, given: Given) -> Any:
  """The source of held-out records, or None if the config names none."""
  name = config.data.heldout
  return named(config, name, 'heldout', given) if name else None


def named(config: Config, name: str, split: str, given: Given) -> Any:
  """The records that a name stands for; see `grpo_jax.data`."""
  if name in given.objects:
    return given.objects[name]
  if name == 'arithmetic':
    return data.ArithmeticSource(split)
  if name == 'largest':
    return data.LargestSource(split)
  fields = config.data
  return data.JsonlSource(
    name, fields.prompt_field, fields.answer_field or None
  )


def demonstrations(config: Config, given: Given) -> Any:
  """The source of demonstrations for the warm-up, with an answer in each.

  Raises:
    ValueError: A record of a JSONL file has no answer. The file itself checks
      it only if the config names a field for the answers.
  """
  name = config.warm_up.demonstrations
  source = named(config, name, 'train', given)
  if name not in given.objects and not config.data.answer_field:
    for number, record in enumerate(_records([source]), start=1):
      if record.get('answer') is None:
        raise ValueError(
          f'Record {number} of warm_up.demonstrations={name!r} has the fields '
          f"{sorted(record)}, but the warm-up needs an 'answer' in each; add "
          'it, name the field that holds it in data.answer_field, or set '
          'warm_up.steps=0.'
        )
  return source


def with_widths(
  config: Config, tokenizer: data.Tokenizer, given: Given
) -> Config:
  """The config with a width wherever it leaves one open.

  Prompts get the length of the longest one, and completions the larger of
  `sampler.max_tokens` and the longest demonstration. Every record is read, and
  encoded, for that. Where the config has widths, nothing is read.

  Args:
    config: Perhaps without `data.prompt_buckets` or `data.completion_buckets`.
    tokenizer: Of the run.
    given: The objects that the marks in the config stand for.

  Returns:
    A config with both.
  """
  fields, changes = config.data, {}
  shown: list[Any] = []
  if config.warm_up.steps and not (
    fields.prompt_buckets and fields.completion_buckets
  ):
    # The arithmetic ones are as long as right answers are.
    shown = [demonstrations(config, given)]
  if not fields.prompt_buckets:
    last = heldout(config, given)
    asked = [*train(config, given)[0], *([] if last is None else [last])]
    lengths = (
      len(tokenizer.encode_prompt(record['prompt']))
      for record in _records([*asked, *shown])
    )
    # A source without records is refused where it is read.
    changes['prompt_buckets'] = (max(lengths, default=1),)
  if not fields.completion_buckets:
    lengths = (
      len(tokenizer.encode(str(record['answer']))) + 1  # the end token
      for record in _records(shown)
    )
    longest = max(lengths, default=0)
    changes['completion_buckets'] = (max(longest, config.sampler.max_tokens),)
  if not changes:
    return config
  fields = dataclasses.replace(fields, **changes)
  return dataclasses.replace(config, data=fields)


def _records(sources: Sequence[Any]):
  """The records of finite sources, one after the other."""
  for source in sources:
    # A file is opened only once so. Of data of a user's own, no more than the
    # length and the places need to work.
    if isinstance(source, JsonlSource):
      yield from source
    else:
      for place in range(len(source)):
        yield source[place]
