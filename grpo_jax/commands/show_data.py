"""`grpo-jax data`: what the model will see, for a person and as JSON."""

from collections.abc import Iterator
from collections.abc import Mapping
import json
import sys
import textwrap
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import data
from grpo_jax.commands import printing
from grpo_jax.commands import show_file
from grpo_jax.commands.arguments import Arguments
from grpo_jax.data import survey
from grpo_jax.data.survey import LAST_TURNS
from grpo_jax.data.survey import Survey
from grpo_jax.run.build import data_survey

SPLITS = {'train': 'training', 'heldout': 'held out'}
_MOST_IDS = 64  # that are printed; JSON has all
_MOST_TEXT = 4000  # characters of a prompt that are printed
_MOST_SHORT = 200  # characters of an answer, or of an example


def run(arguments: Arguments) -> None:
  """`grpo-jax data`.

  Raises:
    ValueError: There is neither a config nor a file, or both; a number is
      negative, or the tokenizer or a source cannot be used.
  """
  for name, value in (('show', arguments.show), ('records', arguments.records)):
    if value < 0:
      raise ValueError(f'--{name}={value}; give 0 or more.')
  if arguments.file:
    show_file.run(arguments)
    return
  if arguments.config is None:
    raise ValueError(
      'data needs a config, as in data --config=configs/arithmetic.py, or a '
      'file to look at, as in data train.parquet.'
    )
  for name in ('prompt_field', 'answer_field'):
    if (value := getattr(arguments, name)) is not None:
      raise ValueError(
        f'--{name}={value} is of a file that is looked at without a config; '
        f'give --config.data.{name}={value}.'
      )
  data.import_grain_alone()
  found = data_survey.survey(
    arguments.config, arguments.show, arguments.records, _Progress()
  )
  if arguments.json:
    printing.show_json(to_json(found))
    return
  encoding = str(getattr(sys.stdout, 'encoding', '') or '').lower()
  draws = sys.stdout.isatty() and 'utf' in encoding
  terminal = Terminal(max(printing.columns(), 40), draws)
  printing.show(*parts(found, terminal))


class _Progress:
  """Says on standard error how far the reading is, if it takes long."""

  def __init__(self):
    self._beat: printing.Beat | None = None

  def __call__(self, name: str, done: int, total: int) -> None:
    self._beat = self._beat or printing.Beat()  # what came before is no reading
    if self._beat.is_due():
      printing.say(
        f'reading {name}: {done:,} of {total:,} records', file=sys.stderr
      )


class Terminal(NamedTuple):
  """Where a report is printed."""

  columns: int
  draws: bool  # whether it is a terminal, with colours and blocks


def parts(found: Survey, terminal: Terminal) -> list[Any]:
  """The report for a person: texts and tables of rich."""
  from rich import text

  sections = {
    'Sources': list(_sources(found, terminal)),
    'Prompts, as the model reads them': list(_prompts(found, terminal)),
    'Tokens of a prompt': list(_lengths(found, terminal)),
    'Prompts that occur more than once': list(_repeated(found)),
    'Records that cannot be used': list(_unusable(found)),
  }
  if not found.prompts:
    del sections['Prompts, as the model reads them']
  shown: list[Any] = []
  for title, lines in sections.items():
    shown += ['', text.Text(title, style='bold'), *lines]
  return shown[1:]


def to_json(found: Survey) -> dict[str, Any]:
  """The report for a program to read."""
  lengths = found.lengths
  return {
    'sources': [
      {
        'split': read.part.split,
        'name': read.part.name,
        'stage': read.part.stage,
        'records': read.records,
        'read': len(read.rows),
        'share': read.part.share,
        'passes': found.passes(read),
        'last_turns': read.last_turns,
        'unusable': [
          {**one._asdict(), 'first': list(one.first)} for one in read.unusable
        ],
      }
      for read in found.reads
    ],
    'prompts': [
      {
        'split': one.place.part.split,
        'name': one.place.part.name,
        'stage': one.place.part.stage,
        'record': one.place.place,
        'text': one.text,
        'ids': one.ids,
        # A user's own source may return values of any type.
        'answer': json.loads(json.dumps(one.record.get('answer'), default=str)),
        'problem': one.problem,
      }
      for one in found.prompts
    ],
    'prompt_buckets': list(found.widths),
    'tokens': {split: _numbers(x) for split, x in lengths.items()},
    'histogram': [
      {
        'first': row.first,
        'last': row.last,
        **dict(zip(lengths, row.counts, strict=True)),
      }
      for row in found.histogram()
    ],
    'longer_than_all_buckets': {
      split: int(np.sum(x > found.widths[-1])) if found.widths else None
      for split, x in lengths.items()
    },
    'duplicates': {
      name: {
        'exact': one.exact,
        'but_for_spaces_and_case': one.loose,
        'examples': [
          [{'name': p.part.name, 'record': p.place} for p in pair]
          for pair in one.examples
        ],
      }
      for name, one in found.duplicates.items()
    },
    'prompts_with_several_answers': survey.contradictions(
      found.read_in('train')
    ),
  }


def _numbers(lengths: np.ndarray) -> dict[str, float] | None:
  if not lengths.size:
    return None
  return {
    'mean': float(np.mean(lengths)),
    'median': float(np.median(lengths)),
    'p99': float(np.percentile(lengths, 99, method='higher')),
    'longest': int(lengths.max()),
  }


def _sources(found: Survey, terminal: Terminal) -> Iterator[Any]:
  """A table; in a narrow terminal, sentences."""
  names = '', 'source', 'records', 'read', 'share', 'passes'
  shown = printing.table(names, left=2)
  for column in shown.columns:
    column.no_wrap = column.header != 'source'
  shown.columns[1].overflow = 'fold'
  for read in found.reads:
    share, passes = read.part.share, found.passes(read)
    is_whole = len(read.rows) == read.records
    row = [
      SPLITS[read.part.split],
      _visible(read.part.title),
      f'{read.records:,}',
      'all' if is_whole else f'{len(read.rows):,}',
      '' if share is None else _percent(share),
      '' if passes is None else f'{passes:.3g}',
    ]
    shown.add_row(*row)
    if terminal.columns < 60:
      yield (
        f'{row[0]}: {row[1]}, {row[2]} records, {row[3]} of them read'
        + (f', share {row[4]}, {row[5]} passes' if row[4] else '')
      )
  if terminal.columns >= 60:
    yield shown
  for read in found.reads:
    for sentence in _last_turns(read.last_turns, len(read.rows)):
      yield f'{_visible(read.part.title)}: {sentence}'
  if found.read_in('train'):
    yield (
      'Passes are how often the run goes through a source, with '
      f'{found.drawn:,} prompts.'
    )
  if any(read.part.stage is not None for read in found.reads):
    yield (
      "A source 'from 100' is the stage of its curriculum that begins once 100 "
      'prompts were drawn from it.'
    )


def _last_turns(turns: Mapping[str, int], read: int) -> Iterator[str]:
  """Sentences, if some of the chats that were read end with an answer."""
  answer, beside, prefill, unknown = (turns.get(x, 0) for x in LAST_TURNS)
  became = [f'as the answer of {answer:,}'] * bool(answer)
  became += [f'beside the answer of {beside:,}'] * bool(beside)
  what = f'this turn is taken off the prompt {" and ".join(became)}.'
  if prefill:
    what = 'completions go on where they end (data.last_turn=prefill).'
  if number := answer + beside + prefill:
    yield f'{number:,} of {read:,} prompts end with the assistant; {what}'
  if unknown:
    yield (
      f'{unknown:,} of {read:,} prompts end with a role that says '
      'neither that it asks nor that it answers; this turn stays in the '
      "prompt. If it answers, call the role 'assistant'."
    )


def _prompts(found: Survey, terminal: Terminal) -> Iterator[Any]:
  """Each prompt as text and ids."""
  from rich import text

  for one in found.prompts:
    part, place = one.place
    title = f'{SPLITS[part.split]}: record {place} of {_visible(part.title)}'
    if one.ids is None or one.text is None:
      yield from ('', f'{title} cannot be used: {_visible(one.problem)}')
      continue
    ids, answer = one.ids, _short(repr(one.record.get('answer')))
    yield from ('', f'{title}, {len(ids)} tokens, answer {answer}')
    special = found.special_tokens
    marks = [special[i] for i in ids if i in special]
    for line in _folded(_cut(one.text), terminal.columns - 4):
      shown = text.Text(f'  {line}', style='green')
      shown.highlight_words(marks, 'bold magenta')
      yield shown
    numbers = [f'{i}*' if i in special else str(i) for i in ids]
    if len(numbers) > _MOST_IDS:
      left = f'...\xa0{len(numbers) - _MOST_IDS}\xa0more\xa0...'
      half = _MOST_IDS // 2
      numbers = [*numbers[:half], left, *numbers[-half:]]
    for line in textwrap.wrap(' '.join(numbers), terminal.columns - 4):
      line = line.replace('\xa0', ' ')
      yield text.Text(f'  {line}', style='dim')
  yield ''
  yield (
    'A | begins each line of a prompt; what has no | goes on with the line '
    r'before it. \n is a line end, \x20 a space at the end of the text; * '
    'marks the ids of special tokens.'
  )


def _cut(text: str) -> str:
  """A text without its middle, if it is long."""
  if len(text) <= _MOST_TEXT:
    return text
  left = f'\n... {len(text) - _MOST_TEXT:,} more characters ...\n'
  return text[: _MOST_TEXT - 1000] + left + text[-1000:]


def _short(text: str) -> str:
  """The beginning of a text."""
  return text if len(text) <= _MOST_SHORT else f'{text[:_MOST_SHORT]}...'


def _folded(text: str, columns: int) -> Iterator[str]:
  """The lines of a text, with marks for what is not seen otherwise."""
  from rich import cells

  bare = text.rstrip(' ')
  text = bare + r'\x20' * (len(text) - len(bare))
  lines = text.split('\n')
  for number, line in enumerate(lines):
    line = _visible(line) + (r'\n' if number < len(lines) - 1 else '')
    start = '| '
    while cells.cell_len(line) > columns - 2:
      end = len(line[: columns - 2])
      while cells.cell_len(line[:end]) > columns - 2:
        end -= 1
      # Behind a space, unless that would leave half of the line empty.
      space = line.rfind(' ', end // 2, end) + 1
      yield start + line[: space or end]
      start, line = '  ', line[space or end :]
    yield start + line


def _visible(text: str) -> str:
  r"""A text without control characters, which move the cursor or hide text.

  >>> _visible('a\tb\x1b[2Jé')
  'a\\tb\\x1b[2Jé'
  """
  return ''.join(
    c if c.isprintable() else c.encode('unicode_escape').decode() for c in text
  )


def _percent(share: float) -> str:
  """A share; never 0 or 100% where that is not exact.

  >>> [_percent(share) for share in (0, 1e-9, 0.1234, 0.99999, 1)]
  ['0%', '<0.1%', '12.3%', '>99.9%', '100%']
  """
  if share in (0, 1):
    return f'{share:.0%}'
  if share < 0.001:
    return '<0.1%'
  return '>99.9%' if share > 0.999 else f'{share:.1%}'


def _lengths(found: Survey, terminal: Terminal) -> Iterator[Any]:
  """The histogram, a block of bars for each split."""
  from rich import text

  rows, lengths = found.histogram(), found.lengths
  if not rows:
    yield 'No prompt can be encoded.'
    return
  block, rule = ('█', '─') if terminal.draws else ('#', '-')
  names = [
    f'{row.first:,}-{row.last:,}' if row.first < row.last else f'{row.last:,}'
    for row in rows
  ]
  left = max(map(len, names))
  room = min((terminal.columns - left) // len(lengths) - 2, 70)
  bar = room - 7  # the rest is for the share
  heads = [f'{SPLITS[split]} ({len(x):,})' for split, x in lengths.items()]
  yield text.Text(
    (' ' * left + ''.join(f'  {head:{room}}' for head in heads)).rstrip(),
    style='italic',
  )
  tops = [max(*counts, 1) for counts in zip(*(row.counts for row in rows))]
  widths = list(found.widths)
  for name, row in zip(names, rows, strict=True):
    while widths and widths[0] < row.first:
      yield _rule(widths.pop(0), found, left, room, rule)
    line = f'{name:>{left}}'
    for count, top, every in zip(row.counts, tops, lengths.values()):
      # What is there has a block at least.
      size = max(round(bar * count / top), min(count, 1))
      share = _percent(count / max(len(every), 1)) if count else ''
      line += f'  {block * size:{bar}}{share:>7}'
    too_long = found.widths and row.first > found.widths[-1]
    yield text.Text(line.rstrip(), style='red' if too_long else 'blue')
  for width in widths:
    yield _rule(width, found, left, room, rule)
  yield ''
  yield from _sentences(found)


def _rule(width: int, found: Survey, left: int, room: int, rule: str) -> Any:
  """A line across the histogram where a width ends."""
  from rich import text

  line = ' ' * left
  for lengths in found.lengths.values():
    fit = float(np.mean(lengths <= width)) if lengths.size else 0.0
    said = f'{rule * 2} width {width:,}: {_percent(fit)} fit '
    line += f'  {said:{rule}<{room}}'
  return text.Text(line, style='yellow')


def _sentences(found: Survey) -> Iterator[str]:
  for split, lengths in found.lengths.items():
    numbers = _numbers(lengths)
    if numbers is None:
      continue
    said = (
      f'{SPLITS[split]}: mean {numbers["mean"]:,.1f}, median '
      f'{numbers["median"]:,.0f}, 99% have at most {numbers["p99"]:,.0f}, '
      f'longest {numbers["longest"]:,}'
    )
    if found.widths:
      longer = int(np.sum(lengths > found.widths[-1]))
      said += (
        f'; {longer:,} of {len(lengths):,} ({_percent(longer / len(lengths))}) '
        f'are longer than the largest width, {found.widths[-1]:,}'
      )
    yield f'{said}.'
  if not found.widths:
    yield f'The widths are not known: {_visible(found.widths_problem)}'


def _repeated(found: Survey) -> Iterator[Any]:
  """A table of duplicates, and examples."""
  repeated = found.duplicates
  names = 'records with an earlier prompt', 'exactly', 'but for spaces and case'
  shown = printing.table(names)
  for name, one in repeated.items():
    shown.add_row(name, f'{one.exact:,}', f'{one.loose:,}')
  yield shown
  for one in repeated.values():
    for pair in one.examples:
      yield ' = '.join(
        f'{_visible(place.part.title)}[{place.place}]' for place in pair
      )
      records = (place.part.source[place.place] for place in pair)
      texts = (data.prompt_text(record['prompt']) for record in records)
      yield from (f'  {_short(repr(x))}' for x in dict.fromkeys(texts))
  if several := survey.contradictions(found.read_in('train')):
    yield f'Prompts to train on that come with different answers: {several:,}.'
  partly = [r for r in found.reads if len(r.rows) < r.records]
  if partly:
    read = sum(len(r.rows) for r in found.reads)
    yield (
      f'Looked for in {read:,} of {sum(r.records for r in found.reads):,} '
      'records, chosen at random, so that there may be more; --records=0 reads '
      'all.'
    )


def _unusable(found: Survey) -> Iterator[str]:
  """Why records cannot be used, and which ones."""
  number = read = 0
  for one in found.reads:
    read += len(one.rows)
    for why in one.unusable:
      number += why.records
      places = ', '.join(map(str, why.first))
      more = ', ...' if why.records > len(why.first) else ''
      yield (
        f'{_visible(one.part.title)}[{places}{more}], {why.records:,} of '
        f'{len(one.rows):,}: {_visible(why.reason):.300}'
      )
  yield f'{number:,} of {read:,} records that were read cannot be used.'
