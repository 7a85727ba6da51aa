"""The widths of prompts and completions, where a config leaves them open.

They follow from the data: from all of it where it is small, otherwise from a
sample. How large the sample is depends on the data alone, never on the time
that it takes, so that all processes of a run find the same widths. What was
measured in files is kept in the user's cache directory, so that the next start
need not encode them again.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
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
# Of records that a program makes: reasoning-gym takes up to 170 ms for one.
_MOST_MADE = 300
_LEAST_MADE = 30  # of each source
_QUICK = (
  data.ArithmeticDemonstrations,
  data.ArithmeticSource,
  data.FileSource,
  data.JsonlSource,
  data.LargestSource,
)


def with_widths(
  config: Config, tokenizer: data.Tokenizer, given: Given
) -> Config:
  """The config with a width wherever it leaves one open.

  Prompts get the length of the longest one, and completions the larger of
  `sampler.max_tokens` and the longest demonstration. Up to 20,000 records are
  encoded for that, of a curriculum in every stage. Of more records a sample of
  about 2,000 is encoded, and the width is a quarter larger than the longest of
  them; `data.too_long` says what becomes of records that are longer still. The
  same holds of records that a program makes, as reasoning-gym and functions of
  the user do, but of more than 300 about 300 are encoded. Where the config has
  widths, nothing is read.

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


def heldout_records(
  config: Config, tokenizer: data.Tokenizer, heldout: Any, most: int
) -> tuple[list[dict[str, Any]], dict[str, float]]:
  """The first held-out records, and how many were too long.

  Args:
    config: With widths.
    tokenizer: Of the run.
    heldout: The source.
    most: How many records are wanted.

  Returns:
    The records, and the metric `heldout_too_long`, if data.too_long='drop' has
    dropped any of those up to the last of them.
  """
  records = data.take_fitting(heldout, 0, most, fits(config, tokenizer))
  looked_at = len(heldout)
  if records and len(records) == most:
    looked_at = records[-1]['index'] + 1
  dropped = looked_at - len(records)
  return records, {'heldout_too_long': float(dropped)} if dropped else {}


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
    shown = _in_stages([sources.demonstrations(config, given)])
  asked: list[Any] = []
  if not config.data.prompt_buckets:
    asked = _in_stages(sources.train(config, given)[0])
    last = sources.heldout(config, given)  # which is read by index
    asked += [] if last is None else [last]
  numbers = _numbers([*asked, *shown])
  # A source without records is refused where it is read.
  prompt, completion, is_sample = 1, 0, False
  for place, source in enumerate([*asked, *shown]):
    is_sample |= numbers[place] < len(source)
    for _, record in sources.some(source, numbers[place]):
      prompt = max(prompt, len(tokenizer.encode_prompt(record['prompt'])))
      if place >= len(asked):
        completion = max(completion, _answer_tokens(tokenizer, record))
  if is_sample:
    prompt, completion = _with_margin(prompt), _with_margin(completion)
  return {'prompt': prompt, 'completion': completion}


def _in_stages(found: Sequence[Any]) -> list[Any]:
  return [stage for source in found for _, stage in data.stages(source)]


def _numbers(found: Sequence[Any]) -> list[int]:
  """How many records of each source are encoded."""
  quick = [_is_quick(source) for source in found]
  totals = {True: 0, False: 0}
  for source, is_quick in zip(found, quick, strict=True):
    totals[is_quick] += len(source)
  numbers = []
  for source, is_quick in zip(found, quick, strict=True):
    number = len(source)
    if is_quick and totals[True] > MOST_RECORDS:
      number = max(_LEAST_SAMPLE, _SAMPLE * number // totals[True])
    elif not is_quick and totals[False] > _MOST_MADE:
      number = max(_LEAST_MADE, _MOST_MADE * number // totals[False])
    numbers.append(min(number, len(source)))
  return numbers


def _is_quick(source: Any) -> bool:
  """Whether the records are built in, in files or in memory."""
  if isinstance(source, data.Joined):
    return all(map(_is_quick, source.sources))
  return type(source) in (list, tuple) or isinstance(source, _QUICK)


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
