"""How `grpo-jax data` prints what it has found, and writes it as JSON."""

from collections.abc import Iterator
from collections.abc import Sequence
import json
import shutil
import sys
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import data
from grpo_jax.commands import data_survey
from grpo_jax.commands.data_survey import Duplicates
from grpo_jax.commands.data_survey import Read
from grpo_jax.commands.data_survey import Shown
from grpo_jax.commands.data_survey import Survey

SPLITS = {'train': 'training', 'heldout': 'held out'}
_MOST_ROWS = 16  # of a histogram, about
_MOST_IDS = 64  # that are printed; JSON has all
_MOST_TEXT = 4000  # characters of a prompt that are printed
_MOST_SHORT = 200  # characters of an answer, or of an example


class Bin(NamedTuple):
  """A row of the histogram."""

  first: int  # tokens of the shortest prompt in it
  last: int  # of the longest
  counts: tuple[int, ...]  # of each split


class Terminal(NamedTuple):
  """Where a report is printed."""

  columns: int
  draws: bool  # whether it is a terminal, with colours and blocks

  @classmethod
  def of_stdout(cls) -> 'Terminal':
    """That of this process; a pipe has 80 columns."""
    columns = shutil.get_terminal_size((80, 24)).columns
    encoding = str(getattr(sys.stdout, 'encoding', '') or '').lower()
    return cls(max(columns, 40), sys.stdout.isatty() and 'utf' in encoding)


def parts(found: Survey, terminal: Terminal | None = None) -> list[Any]:
  """The report for a person, as `printing.show` takes it."""
  from rich import text

  terminal = terminal or Terminal.of_stdout()
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


def histogram(found: Survey) -> list[Bin]:
  """The lengths of prompts. No row goes over a width of the config.

  Rows are equally wide up to the length that 99% of the prompts have at most;
  the last row holds all that are longer.
  """
  lengths = {split: _of(found.of(split)) for split in _splits(found)}
  every = np.concatenate([*lengths.values(), np.zeros(0, np.int32)])
  if not every.size:
    return []
  least, most = int(every.min()), int(every.max())
  usual = int(np.percentile(every, 99, method='higher'))
  steps = (m * 10**k for k in range(9) for m in (1, 2, 5))
  step = next(s for s in steps if usual // s - least // s < _MOST_ROWS)
  # A row ends with each of these lengths.
  ends = {most, *(width for width in found.widths if least <= width < most)}
  ends |= set(range(-(-least // step) * step, usual + step, step)) - {0}
  ends = sorted(end for end in ends if end <= most)
  firsts = [least, *(end + 1 for end in ends[:-1])]
  return [
    Bin(
      first,
      last,
      tuple(
        int(np.sum((of >= first) & (of <= last))) for of in lengths.values()
      ),
    )
    for first, last in zip(firsts, ends, strict=True)
  ]


def to_json(found: Survey) -> dict[str, Any]:
  """The report for a program to read."""
  longest = found.widths[-1] if found.widths else None
  return {
    'sources': [
      {
        'split': read.part.split,
        'name': read.part.name,
        'stage': read.part.stage,
        'records': read.records,
        'read': len(read.places),
        'share': read.part.share,
        'passes': _passes(found, read),
        'last_turns': read.last_turns._asdict(),
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
        'text': one.looked and one.looked.text,
        'ids': one.looked and one.looked.ids,
        'answer': _plain(_answer(one)),
        'problem': one.problem,
      }
      for one in found.prompts
    ],
    'prompt_buckets': list(found.widths),
    'tokens': {split: _numbers(found, split) for split in _splits(found)},
    'histogram': [
      {
        'first': row.first,
        'last': row.last,
        **dict(zip(_splits(found), row.counts, strict=True)),
      }
      for row in histogram(found)
    ],
    'longer_than_all_buckets': {
      split: None
      if longest is None
      else int(np.sum(_of(found.of(split)) > longest))
      for split in _splits(found)
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
      for name, one in _all_duplicates(found).items()
    },
    'prompts_with_several_answers': data_survey.contradictions(
      found.of('train')
    ),
  }


def _splits(found: Survey) -> list[str]:
  return [split for split in SPLITS if found.of(split)]


def _of(reads: Sequence[Read]) -> np.ndarray:
  """The lengths of all prompts of some parts."""
  lengths = [read.lengths for read in reads]
  return np.concatenate([*lengths, np.zeros(0, np.int32)])


def _numbers(found: Survey, split: str) -> dict[str, float] | None:
  lengths = _of(found.of(split))
  if not lengths.size:
    return None
  return {
    'mean': float(np.mean(lengths)),
    'median': float(np.median(lengths)),
    'p99': float(np.percentile(lengths, 99, method='higher')),
    'longest': int(lengths.max()),
  }


def _passes(found: Survey, read: Read) -> float | None:
  """How often the run goes through a source."""
  if read.part.share is None:
    return None
  return found.drawn * read.part.share / read.records


def _answer(one: Shown) -> Any:
  return one.looked.record.get('answer') if one.looked else None


def _plain(value: Any) -> Any:
  """A value as JSON has it; a user's own source may return any."""
  return json.loads(json.dumps(value, default=str))


def _sources(found: Survey, terminal: Terminal) -> Iterator[Any]:
  """A table; in a narrow terminal, sentences."""
  from rich import box
  from rich import table

  shown = table.Table(box=box.SIMPLE, pad_edge=False)
  shown.add_column('', no_wrap=True)
  shown.add_column('source', overflow='fold')
  for name in ('records', 'read', 'share', 'passes'):
    shown.add_column(name, justify='right', no_wrap=True)
  for read in found.reads:
    share, passes = read.part.share, _passes(found, read)
    is_whole = len(read.places) == read.records
    number = 'all' if is_whole else f'{len(read.places):,}'
    row = [SPLITS[read.part.split], _visible(read.part.title)]
    row += [f'{read.records:,}', number]
    row += ['' if share is None else _percent(share)]
    row += ['' if passes is None else f'{passes:.3g}']
    shown.add_row(*row)
    if terminal.columns < 60:
      yield (
        f'{row[0]}: {row[1]}, {row[2]} records, {row[3]} of them read'
        + (f', share {row[4]}, {row[5]} passes' if row[4] else '')
      )
  if terminal.columns >= 60:
    yield shown
  for read in found.reads:
    for sentence in read.last_turns.said(len(read.places)):
      yield f'{_visible(read.part.title)}: {sentence}'
  if found.of('train'):
    yield (
      'Passes are how often the run goes through a source, with '
      f'{found.drawn:,} prompts.'
    )
  if any(read.part.stage is not None for read in found.reads):
    yield (
      "A source 'from 100' is the stage of its curriculum that begins once 100 "
      'prompts were drawn from it.'
    )


def _prompts(found: Survey, terminal: Terminal) -> Iterator[Any]:
  """Each prompt as text and ids."""
  from rich import text

  for one in found.prompts:
    part, place = one.place
    title = f'{SPLITS[part.split]}: record {place} of {_visible(part.title)}'
    if one.looked is None:
      yield from ('', f'{title} cannot be used: {_visible(one.problem)}')
      continue
    ids = one.looked.ids
    answer = _short(repr(_answer(one)))
    yield ''
    yield f'{title}, {len(ids)} tokens, answer {answer}'
    special = found.special_tokens
    marks = [special[i] for i in ids if i in special]
    for line in _folded(_cut(one.looked.text), terminal.columns - 4):
      shown = text.Text(f'  {line}', style='green')
      shown.highlight_words(marks, 'bold magenta')
      yield shown
    numbers = [f'{i}*' if i in special else str(i) for i in ids]
    if len(numbers) > _MOST_IDS:
      left = f'... {len(numbers) - _MOST_IDS} more ...'
      half = _MOST_IDS // 2
      numbers = [*numbers[:half], left, *numbers[-half:]]
    for line in _words(numbers, terminal.columns - 4):
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


def _words(words: Sequence[str], columns: int) -> Iterator[str]:
  """Words in lines."""
  line = ''
  for word in words:
    if line and len(line) + 1 + len(word) > columns:
      yield line
      line = ''
    line = f'{line} {word}' if line else word
  yield line


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

  rows, splits = histogram(found), _splits(found)
  if not rows:
    yield 'No prompt can be encoded.'
    return
  block, rule = ('█', '─') if terminal.draws else ('#', '-')
  of_split = [_of(found.of(split)) for split in splits]
  names = [
    f'{row.first:,}-{row.last:,}' if row.first < row.last else f'{row.last:,}'
    for row in rows
  ]
  left = max(map(len, names))
  room = min((terminal.columns - left) // len(splits) - 2, 70)
  bar = room - 7  # the rest is for the share
  heads = [f'{SPLITS[s]} ({len(n):,})' for s, n in zip(splits, of_split)]
  yield text.Text(
    (' ' * left + ''.join(f'  {head:{room}}' for head in heads)).rstrip(),
    style='italic',
  )
  tops = [
    max(max(row.counts[i] for row in rows), 1) for i in range(len(splits))
  ]
  widths = list(found.widths)
  largest = widths[-1] if widths else None
  for name, row in zip(names, rows, strict=True):
    while widths and widths[0] < row.first:
      yield _rule(widths.pop(0), of_split, left, room, rule)
    line = f'{name:>{left}}'
    for i, count in enumerate(row.counts):
      # What is there has a block at least.
      size = max(round(bar * count / tops[i]), min(count, 1))
      share = _percent(count / max(len(of_split[i]), 1)) if count else ''
      line += f'  {block * size:{bar}}{share:>7}'
    too_long = largest is not None and row.first > largest
    yield text.Text(line.rstrip(), style='red' if too_long else 'blue')
  for width in widths:
    yield _rule(width, of_split, left, room, rule)
  yield ''
  yield from _sentences(found, splits, of_split)


def _rule(
  width: int, of_split: Sequence[np.ndarray], left: int, room: int, rule: str
) -> Any:
  """A line across the histogram where a width ends."""
  from rich import text

  line = ' ' * left
  for lengths in of_split:
    fit = float(np.mean(lengths <= width)) if lengths.size else 0.0
    said = f'{rule * 2} width {width:,}: {_percent(fit)} fit '
    line += f'  {said:{rule}<{room}}'
  return text.Text(line, style='yellow')


def _sentences(
  found: Survey, splits: Sequence[str], of_split: Sequence[np.ndarray]
) -> Iterator[str]:
  largest = found.widths[-1] if found.widths else None
  for split, lengths in zip(splits, of_split, strict=True):
    numbers = _numbers(found, split)
    if numbers is None:
      continue
    said = (
      f'{SPLITS[split]}: mean {numbers["mean"]:,.1f}, median '
      f'{numbers["median"]:,.0f}, 99% have at most {numbers["p99"]:,.0f}, '
      f'longest {numbers["longest"]:,}'
    )
    if largest is not None:
      longer = int(np.sum(lengths > largest))
      said += (
        f'; {longer:,} of {len(lengths):,} ({_percent(longer / len(lengths))}) '
        f'are longer than the largest width, {largest:,}'
      )
    yield f'{said}.'
  if largest is None:
    yield f'The widths are not known: {_visible(found.widths_problem)}'


def _all_duplicates(found: Survey) -> dict[str, Duplicates]:
  train, heldout = found.of('train'), found.of('heldout')
  all_of = {'within training': data_survey.duplicates(train)}
  if heldout:
    all_of |= {
      'held out, and in training': data_survey.duplicates(heldout, train),
      'within held out': data_survey.duplicates(heldout),
    }
  return all_of


def _repeated(found: Survey) -> Iterator[Any]:
  """A table of duplicates, and examples."""
  from rich import box
  from rich import table

  all_of = _all_duplicates(found)
  shown = table.Table(box=box.SIMPLE, pad_edge=False)
  shown.add_column('records with an earlier prompt')
  for name in ('exactly', 'but for spaces and case'):
    shown.add_column(name, justify='right')
  for name, one in all_of.items():
    shown.add_row(name, f'{one.exact:,}', f'{one.loose:,}')
  yield shown
  for one in all_of.values():
    for pair in one.examples:
      yield ' = '.join(
        f'{_visible(place.part.title)}[{place.place}]' for place in pair
      )
      texts = dict.fromkeys(map(_prompt_of, pair))
      yield from (f'  {_short(repr(text))}' for text in texts)
  if several := data_survey.contradictions(found.of('train')):
    yield f'Prompts to train on that come with different answers: {several:,}.'
  partly = [r for r in found.reads if len(r.places) < r.records]
  if partly:
    read = sum(len(r.places) for r in found.reads)
    yield (
      f'Looked for in {read:,} of {sum(r.records for r in found.reads):,} '
      'records, chosen at random, so that there may be more; --records=0 reads '
      'all.'
    )


def _prompt_of(place: data_survey.Place) -> str:
  return data.prompt_text(place.part.source[place.place]['prompt'])


def _unusable(found: Survey) -> Iterator[str]:
  """Why records cannot be used, and which ones."""
  number = read = 0
  for one in found.reads:
    read += len(one.places)
    for why in one.unusable:
      number += why.records
      places = ', '.join(map(str, why.first))
      more = ', ...' if why.records > len(why.first) else ''
      yield (
        f'{_visible(one.part.title)}[{places}{more}], {why.records:,} of '
        f'{len(one.places):,}: {_visible(why.reason):.300}'
      )
  yield f'{number:,} of {read:,} records that were read cannot be used.'
