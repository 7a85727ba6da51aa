"""The widths of prompts and completions, where a config leaves them open.

They follow from the data: from all of it where it is small, otherwise from a
sample. What was measured in files is kept in the user's cache directory, so
that the next start need not encode them again.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from grpo_jax import data
from grpo_jax import whole_files
from grpo_jax.config import Config
from grpo_jax.training import provenance
from grpo_jax.training import sources
from grpo_jax.training.marks import Given

# Encoding a chat takes 0.1 to 0.2 ms, so this many take a few seconds.
MOST_RECORDS = 20_000
_SAMPLE = 2_000  # of more records
_LEAST_SAMPLE = 100  # of each source


def with_widths(
  config: Config, tokenizer: data.Tokenizer, given: Given
) -> Config:
  """The config with a width wherever it leaves one open.

  Prompts get the length of the longest one, and completions the larger of
  `sampler.max_tokens` and the longest demonstration. Up to 20,000 records are
  encoded for that. Of more records a sample of about 2,000 is encoded, and the
  width is a quarter larger than the longest of them; `data.too_long` says what
  becomes of records that are longer still. Where the config has widths, nothing
  is read.

  Args:
    config: Perhaps without `data.prompt_buckets` or `data.completion_buckets`.
    tokenizer: Of the run.
    given: The objects that the marks in the config stand for.

  Returns:
    A config with both.
  """
  fields = config.data
  if fields.prompt_buckets and fields.completion_buckets:
    return config
  key = _key(config, tokenizer)
  longest = _read(key)
  if longest is None:
    longest = _measured(config, tokenizer, given)
    _write(key, longest)
  changes = {}
  if not fields.prompt_buckets:
    changes['prompt_buckets'] = (longest['prompt'],)
  if not fields.completion_buckets:
    width = max(longest['completion'], config.sampler.max_tokens)
    changes['completion_buckets'] = (width,)
  fields = dataclasses.replace(fields, **changes)
  return dataclasses.replace(config, data=fields)


def fits(
  config: Config, tokenizer: data.Tokenizer
) -> Callable[[Mapping[str, Any]], bool] | None:
  """Whether the prompt of a record is no longer than the largest width.

  Args:
    config: With widths.
    tokenizer: Of the run.

  Returns:
    A function of a record; None if prompts that are too long are refused, as
    the engine does.
  """
  if config.data.too_long == 'refuse':
    return None
  width = max(config.data.prompt_buckets)
  return lambda record: len(tokenizer.encode_prompt(record['prompt'])) <= width


def shown_fits(
  config: Config, tokenizer: data.Tokenizer
) -> Callable[[Mapping[str, Any]], bool] | None:
  """As `fits`, of a demonstration: its answer is a completion."""
  asked_fits = fits(config, tokenizer)
  if asked_fits is None:
    return None
  width = max(config.data.completion_buckets)
  return lambda record: (
    asked_fits(record) and _answer_tokens(tokenizer, record) <= width
  )


def _answer_tokens(tokenizer: data.Tokenizer, record: Mapping[str, Any]) -> int:
  return len(tokenizer.encode(str(record['answer']))) + 1  # the end token


def _measured(
  config: Config, tokenizer: data.Tokenizer, given: Given
) -> dict[str, int]:
  """The widths that prompts and demonstrations need."""
  shown: list[Any] = []
  if config.warm_up.steps:
    # The arithmetic ones are as long as right answers are.
    shown = [sources.demonstrations(config, given)]
  asked: list[Any] = []
  if not config.data.prompt_buckets:
    last = sources.heldout(config, given)
    asked = sources.train(config, given)[0] + ([] if last is None else [last])
  total = sum(map(len, [*asked, *shown]))

  def records(source):
    most = len(source)
    if total > MOST_RECORDS:
      most = max(_LEAST_SAMPLE, _SAMPLE * most // total)
    return (record for _, record in sources.some(source, most))

  # A source without records is refused where it is read.
  prompt, completion = 1, 0
  for source in asked:
    for record in records(source):
      prompt = max(prompt, len(tokenizer.encode_prompt(record['prompt'])))
  for source in shown:
    for record in records(source):
      prompt = max(prompt, len(tokenizer.encode_prompt(record['prompt'])))
      completion = max(completion, _answer_tokens(tokenizer, record))
  if total > MOST_RECORDS:
    prompt, completion = _with_margin(prompt), _with_margin(completion)
  return {'prompt': prompt, 'completion': completion}


def _with_margin(longest: int) -> int:
  """A quarter more, as a multiple of 8."""
  return -(-longest * 5 // 32) * 8


def _key(config: Config, tokenizer: data.Tokenizer) -> pathlib.Path | None:
  """The file that keeps the widths of some data; None for data in no file."""
  reads = not config.data.prompt_buckets or config.warm_up.steps
  found = sources.files(config) if reads else {}
  # Built-in sources are fast, and of others there is no telling whether they
  # have changed.
  if not found or not all(found.values()):
    return None
  fields = config.data
  paths = [path for files in found.values() for path in files]
  try:
    modified = [os.stat(path).st_mtime_ns for path in paths]
    contents = data.fingerprint(paths)
  except OSError:  # said where the file is opened
    return None
  told = {
    'form': 1,  # of this dict, and of how widths follow from data
    'sources': dataclasses.asdict(fields)['train'],
    'heldout': dataclasses.asdict(fields)['heldout'],
    'demonstrations': config.warm_up.steps > 0
    and config.warm_up.demonstrations,
    'fields': [fields.prompt_field, fields.answer_field],
    'open': not fields.prompt_buckets,
    'files': paths,
    'modified': modified,
    'contents': contents,
    'tokenizer': provenance.of_tokenizer(tokenizer)['sha256'],
  }
  name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
  return data.cache_directory() / 'widths' / f'{name[:32]}.json'


def _read(path: pathlib.Path | None) -> dict[str, int] | None:
  """The widths in a file of the cache; None if it is not there, or damaged."""
  if path is None:
    return None
  try:
    known = json.loads(path.read_text())
    widths = {name: known[name] for name in ('prompt', 'completion')}
  except (OSError, ValueError, KeyError, TypeError):
    return None
  whole = all(type(width) is int for width in widths.values())
  return widths if whole and widths['prompt'] >= 1 else None


def _write(path: pathlib.Path | None, widths: dict[str, int]) -> None:
  if path is None:
    return
  with contextlib.suppress(OSError):  # without it, the next start measures
    path.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write(path, json.dumps(widths).encode())
