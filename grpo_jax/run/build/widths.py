"""The widths of prompts and completions, where a config leaves them open.

They follow from the data: from all of it where it is small, otherwise from a
sample. The same pass over the data finds rows that no run can use, so that they
are named at the start and not in the middle of a run. How large the sample is
depends on the data alone, never on the time that it takes, so that all
processes of a run find the same widths. What was measured in files is kept in
the user's cache directory, so that the next start need not encode them again.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

from grpo_jax import data
from grpo_jax.config import Config
from grpo_jax.config import whole_files
from grpo_jax.episodes import rollout
from grpo_jax.run.build import marks
from grpo_jax.run.build import provenance
from grpo_jax.run.build import sources
from grpo_jax.run.build.marks import Given

# Encoding a chat takes 0.1 to 0.2 ms, so this many take a few seconds.
MOST_RECORDS = 20_000
_SAMPLE = 2_000  # of more records
_LEAST_SAMPLE = 100  # of each source
# Of records that a program makes: reasoning-gym takes up to 170 ms for one.
_MOST_MADE = 300
_LEAST_MADE = 30  # of each source
# Where the widths are given, of each larger source; of problems that programs
# of this package make, which can all be written, of any.
_MOST_CHECKED_MADE = 30
_BUILT_IN = (
  data.ArithmeticDemonstrations,
  data.ArithmeticSource,
  data.LargestSource,
)
_QUICK = (*_BUILT_IN, data.FileSource, data.JsonlSource)


class _Rows(NamedTuple):
  """Records that are encoded."""

  source: Any
  name: str  # of the field in the config, and of the source
  is_shown: bool  # as demonstrations, whose answers are encoded too
  checks_alone: bool  # whether no width follows from them


def with_widths(
  config: Config,
  tokenizer: data.Tokenizer,
  given: Given,
  checks: bool = False,
) -> Config:
  """The config with a width wherever it leaves one open.

  Prompts get the length of the longest one, and completions the larger of
  `sampler.max_tokens` and the longest demonstration. Up to 20,000 records are
  encoded for that, of a curriculum in every stage. Of more records a sample of
  about 2,000 is encoded, and the width is a quarter larger than the longest of
  them; `data.too_long` says what becomes of records that are longer still. The
  same holds of records that a program makes, as reasoning-gym and functions of
  the user do, but of more than 300 about 300 are encoded. Where the config has
  widths, nothing is read, unless the data are to be checked: then as many are
  encoded, but 30 of each source whose records a program makes, unless it is the
  user's and has no more than 300.

  Args:
    config: Perhaps without `data.prompt_buckets` or `data.completion_buckets`.
    tokenizer: Of the run.
    given: The objects that the marks in the config stand for.
    checks: Whether to look for rows that cannot be used, for a run that will
      read them: those whose prompt cannot be encoded, and with
      data.too_long='refuse' those that are longer than the config's widths.

  Returns:
    A config with both.

  Raises:
    ValueError: A row that was read cannot be used; the message names it.
  """
  fields = config.data
  if fields.prompt_buckets and fields.completion_buckets and not checks:
    return config
  limits = _limits(config) if checks else {}
  key = _key(config, tokenizer, checks, limits)
  longest = _read(key)
  if longest is None:
    longest = _measured(config, tokenizer, given, checks, limits)
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
  # And the end token.
  return len(tokenizer.encode(rollout.shown_answer(record))) + 1


def _limits(config: Config) -> dict[str, int]:
  """The most tokens of 'prompt' and 'completion', where more are refused."""
  if config.data.too_long == 'drop':
    return {}
  buckets = {
    'prompt': config.data.prompt_buckets,
    'completion': config.data.completion_buckets,
  }
  return {name: max(widths) for name, widths in buckets.items() if widths}


def _measured(
  config: Config,
  tokenizer: data.Tokenizer,
  given: Given,
  checks: bool,
  limits: Mapping[str, int],
) -> dict[str, int]:
  """The widths that prompts and demonstrations need.

  Args:
    config: See `with_widths`.
    tokenizer: See `with_widths`.
    given: See `with_widths`.
    checks: Whether prompts are read though their width is given.
    limits: Of `_limits`; a row that is longer is refused.
  """
  shown = _shown(config, given, checks)
  asked: list[_Rows] = []
  if checks or not config.data.prompt_buckets:
    asked = _asked(config, given)
  rows = [*asked, *shown]
  numbers = _numbers(rows)
  # A source without records is refused where it is read.
  longest = {'prompt': 1, 'completion': 0}
  is_sample = False
  for one, number in zip(rows, numbers, strict=True):
    is_sample |= number < len(one.source) and not one.checks_alone
    for place, lengths in _lengths(one, number, tokenizer):
      for kind, length in lengths.items():
        if length > limits.get(kind, length):
          raise ValueError(_too_long(one, place, kind, length, limits[kind]))
        longest[kind] = max(longest[kind], length)
  if is_sample:
    longest = {kind: _with_margin(length) for kind, length in longest.items()}
  return longest


def _asked(config: Config, given: Given) -> list[_Rows]:
  """The prompts of a run, in every stage, and those that are held out."""
  alone = bool(config.data.prompt_buckets)
  found = [
    _Rows(stage, f'data.train={source.name!r}', False, alone)
    for source, records in zip(
      sources.listed(config.data.train),
      sources.train(config, given)[0],
      strict=True,
    )
    for _, stage in data.stages(records)
  ]
  heldout = sources.heldout(config, given)  # which is read by index
  if heldout is not None:
    found.append(_Rows(heldout, 'data.heldout', False, alone))
  return found


def _shown(config: Config, given: Given, checks: bool) -> list[_Rows]:
  """The demonstrations; none without a warm-up.

  Args:
    config: Of the run.
    given: Objects of the user.
    checks: Whether the rows are read to be checked. Then demonstrations may be
      missing: a run whose warm-up is over needs none.
  """
  name = config.warm_up.demonstrations
  if not config.warm_up.steps:
    return []
  fields = config.data
  alone = checks and bool(fields.prompt_buckets and fields.completion_buckets)
  if alone:
    if marks.is_mark(name) and name not in given.objects:
      return []
    try:
      source = sources.demonstrations(config, given)
    except OSError:
      return []
  else:
    # The arithmetic ones are as long as right answers are.
    source = sources.demonstrations(config, given)
  return [
    _Rows(stage, f'warm_up.demonstrations={name!r}', True, alone)
    for _, stage in data.stages(source)
  ]


def _lengths(
  rows: _Rows, number: int, tokenizer: data.Tokenizer
) -> Iterator[tuple[int, dict[str, int]]]:
  """Tokens of the prompts, and of the answers that are shown, by place."""
  some = sources.some_rows(rows.source, number, rows.name)
  for place, record in some:
    try:
      lengths = {'prompt': len(data.prompt_ids(tokenizer, record))}
      if rows.is_shown:
        lengths['completion'] = _answer_tokens(tokenizer, record)
    except ValueError as error:
      named = data.row_name(rows.source, place, rows.name)
      raise ValueError(f'{named} cannot be used: {error}') from error
    yield place, lengths


def _too_long(
  rows: _Rows, place: int, kind: str, length: int, limit: int
) -> str:
  """The message about a row that is longer than the widths of the config."""
  of = 'prompt' if kind == 'prompt' else 'answer'
  return (
    f'{data.row_name(rows.source, place, rows.name)} cannot be used: its {of} '
    f'needs {length} tokens, but the largest bucket is {limit}; give a larger '
    f"one in data.{kind}_buckets, or data.too_long='drop'."
  )


def _numbers(found: Sequence[_Rows]) -> list[int]:
  """How many records of each source are encoded."""
  quick = [_is_quick(one.source) for one in found]
  totals = {True: 0, False: 0}
  for one, is_quick in zip(found, quick, strict=True):
    totals[is_quick] += len(one.source)
  numbers = []
  for one, is_quick in zip(found, quick, strict=True):
    number = len(one.source)
    is_made = not is_quick or isinstance(one.source, _BUILT_IN)
    few = number <= _MOST_MADE and not _takes_long(one.source)
    if one.checks_alone and is_made and not few:
      number = _MOST_CHECKED_MADE
    elif is_quick and totals[True] > MOST_RECORDS:
      number = max(_LEAST_SAMPLE, _SAMPLE * number // totals[True])
    elif not is_quick and totals[False] > _MOST_MADE:
      number = max(_LEAST_MADE, _MOST_MADE * number // totals[False])
    numbers.append(min(number, len(one.source)))
  return numbers


def _takes_long(source: Any) -> bool:
  """Whether a program of this package makes each record."""
  while isinstance(source, data.WithoutLastTurns | data.Stage):
    source = source.source
  if isinstance(source, data.Joined):
    return any(map(_takes_long, source.sources))
  return isinstance(source, (*_BUILT_IN, data.ReasoningGymSource))


def _is_quick(source: Any) -> bool:
  """Whether the records are built in, in files or in memory."""
  if isinstance(source, data.WithoutLastTurns):
    source = source.source
  if isinstance(source, data.Joined):
    return all(map(_is_quick, source.sources))
  return type(source) in (list, tuple) or isinstance(source, _QUICK)


def _with_margin(longest: int) -> int:
  """A quarter more, as a multiple of 8."""
  return -(-longest * 5 // 32) * 8


def _key(
  config: Config,
  tokenizer: data.Tokenizer,
  checks: bool,
  limits: Mapping[str, int],
) -> pathlib.Path | None:
  """The file that keeps the widths of some data; None for data in no file."""
  asks = checks or not config.data.prompt_buckets
  reads = asks or config.warm_up.steps
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
    'form': 3,  # of this dict, and of how widths follow from data
    'sources': dataclasses.asdict(fields)['train'],
    'heldout': dataclasses.asdict(fields)['heldout'],
    'demonstrations': config.warm_up.steps > 0
    and config.warm_up.demonstrations,
    'fields': [
      fields.prompt_field,
      fields.answer_field,
      fields.last_turn,
    ],
    'open': asks,
    'limits': dict(limits),
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
