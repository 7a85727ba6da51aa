"""`grpo-jax data`: what the model will see.

Neither the model nor a device is needed for it.
"""

import bisect
from collections.abc import Iterator
from collections.abc import Sequence
import itertools
import sys
import time
from typing import Any

from grpo_jax import data
from grpo_jax.commands import data_survey
from grpo_jax.commands import data_tables
from grpo_jax.commands import printing
from grpo_jax.commands.arguments import Arguments
from grpo_jax.commands.data_survey import Part
from grpo_jax.commands.data_survey import Place
from grpo_jax.commands.data_survey import Shown
from grpo_jax.commands.data_survey import Survey
from grpo_jax.config import Config
from grpo_jax.config import plain_text

_SILENT_SECS = 2.0  # before a line says how far the reading is
_BEAT_SECS = 10.0  # between two such lines


def run(arguments: Arguments) -> None:
  """`grpo-jax data`.

  Raises:
    ValueError: There is no config, a number is negative, or the tokenizer or a
      source cannot be used.
  """
  if arguments.config is None:
    raise ValueError(
      'data needs a config, as in data --config=configs/arithmetic.py.'
    )
  for name, value in (('show', arguments.show), ('records', arguments.records)):
    if value < 0:
      raise ValueError(f'--{name}={value}; give 0 or more.')
  found = survey(
    arguments.config, arguments.show, arguments.records, _Progress()
  )
  if arguments.json:
    printing.show_json(data_tables.to_json(found))
  else:
    printing.show(*data_tables.parts(found))


def survey(
  config: Config, show: int, records: int, tell: data_survey.Tell
) -> Survey:
  """Reads the data of a config; see `run`."""
  # Only now, because it imports JAX.
  from grpo_jax.run.build import data as build_data

  tokenizer = build_data.tokenizer_of(config)
  asked = build_data.listed(config.data.train)
  weights = [source.weight for source in asked]
  shares = [weight / sum(weights) for weight in weights]
  drawn = config.steps * config.sampler.prompts
  trained = [build_data.named(config, source, 'train') for source in asked]
  stages = [
    _stages(source.name, records, share, drawn)
    for source, records, share in zip(asked, trained, shares, strict=True)
  ]
  parts = list(itertools.chain(*stages))
  parts += [
    Part(
      source.name,
      'heldout',
      build_data.named(config, source, 'heldout'),
    )
    for source in build_data.listed(config.data.heldout)
  ]
  problem, widths = '', config.data.prompt_buckets
  if not widths:
    try:
      given = build_data.with_widths(config, tokenizer)
      widths = given.data.prompt_buckets
    except ValueError as error:
      problem = plain_text.said(error)
  widths = tuple(sorted(widths))
  longest = widths[-1] if widths else None
  drops = config.data.too_long == 'drop'
  reader = data_survey.Reader(tokenizer, longest, config.rewards, drops)
  stream = data.mixture([*map(_Places, trained, stages)], weights, config.seed)
  shown = tuple(_shown(reader, stream, parts, show))
  reads = tuple(reader.read(part, records, tell) for part in parts)
  special = _special_tokens(tokenizer)
  return Survey(reads, shown, widths, problem, special, drawn)


def _stages(name: str, source: Any, share: float, drawn: int) -> list[Part]:
  """A source to train on, in the stages of its curriculum.

  Args:
    name: Of the source.
    source: The records.
    share: Of this source, of all prompts.
    drawn: All prompts that the run draws.
  """
  stages = data.stages(source)
  if len(stages) == 1:
    return [Part(name, 'train', source, share)]
  starts = [start for start, _ in stages]
  ends = [min(start, drawn * share) for start in [*starts, drawn * share]]
  return [
    Part(name, 'train', records, (end - begin) / max(drawn, 1), start)
    for (start, records), begin, end in zip(
      stages, ends, ends[1:], strict=False
    )
  ]


class _Places:
  """A source whose records are places, so that no record is read.

  Args:
    source: The source.
    stages: Its parts.
  """

  def __init__(self, source: Any, stages: Sequence[Part]):
    self._source, self._stages = source, stages

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return self.drawn(index, 0)

  def drawn(self, index: int, number: int) -> dict[str, Any]:
    """As the run draws the record."""
    starts = [part.stage or 0 for part in self._stages]
    part = self._stages[bisect.bisect_right(starts, number) - 1]
    if hasattr(self._source, 'drawn'):
      part = part._replace(source=data.Stage(self._source, number))
    return {'place': Place(part, int(index))}


def _shown(
  reader: data_survey.Reader, stream: Any, parts: Sequence[Part], number: int
) -> Iterator[Shown]:
  """The first prompts of a run, and the first that are held out.

  Args:
    reader: Looks at them.
    stream: Of places. Their order depends on the lengths of the sources, the
      weights and the seed alone.
    parts: Of these, the prompts that are held out are shown.
    number: How many of each.
  """
  held_out = [part for part in parts if part.split == 'heldout']
  rows = data.take(stream, 0, number)
  places = [row['place'] for row in rows]
  for part in held_out:
    left = number - len(places) + len(rows)
    places += [Place(part, i) for i in range(min(left, len(part.source)))]
  for place in places:
    try:
      yield Shown(place, reader.look(*place))
    except ValueError as error:
      yield Shown(place, None, plain_text.said(error))


def _special_tokens(tokenizer: data.Tokenizer) -> dict[int, str]:
  known = tokenizer.backend.get_added_tokens_decoder().items()
  special = [number for number, token in known if token.special]
  special += [*tokenizer.eos_ids, *tokenizer.bos_ids, tokenizer.pad_id]
  return {
    number: tokenizer.backend.id_to_token(number) or '' for number in special
  }


class _Progress:
  """Says on standard error how far the reading is, if it takes long."""

  def __init__(self):
    self._next: float | None = None

  def __call__(self, name: str, done: int, total: int) -> None:
    if self._next is None:  # what came before is no reading
      self._next = time.monotonic() + _SILENT_SECS
    if time.monotonic() < self._next:
      return
    self._next = time.monotonic() + _BEAT_SECS
    said = f'reading {name}: {done:,} of {total:,} records'
    print(plain_text.printable(said), file=sys.stderr, flush=True)
