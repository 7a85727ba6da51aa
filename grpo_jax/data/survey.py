"""What there is to say of the data of a run: lengths, duplicates, faults.

A part is one source of a config, or one stage of its curriculum. Up to a number
of records of each part are read, chosen at random. A record leaves a `ROW`
of 44 bytes, so a million records are no burden.
"""

import bisect
import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import itertools
import random
import re
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import data
from grpo_jax.config import plain_text

LAST_TURNS = 'answer', 'beside_answer', 'prefill', 'unknown'
"""What becomes of the last turn of a chat that ends with the assistant.

It is off the prompt, and is the answer; it is off the prompt, and the record
has its answer; it is the end of the prompt; or its role does not say whether it
is an answer, and it stays.
"""
_EXAMPLES = 3  # of duplicates of one kind, and of places of one reason
_MOST_REASONS = 10
_MOST_ROWS = 16  # of a histogram, about
_OWN = re.compile(r"'[^']*'|[0-9]+")  # what a reason says of one record

ROW = np.dtype(
  [
    ('part', 'O'),  # a `Part`
    ('place', 'i8'),  # in the source of the part
    ('tokens', 'i4'),  # of the prompt; -1 where it cannot be encoded
    # Hashes: of the prompt; of the prompt but for white space and case; of the
    # answer. All are 0 for a record without a prompt.
    ('exact', 'u8'),
    ('loose', 'u8'),
    ('answer', 'u8'),
  ]
)
"""What is kept of a record."""

Tell = Callable[[str, int, int], None]
"""Is called with a part's name, and how many of how many records are read."""


class Part(NamedTuple):
  """One source of a config, or one stage of its curriculum."""

  name: str
  split: str  # 'train' or 'heldout'
  source: Any
  share: float | None = None  # of the prompts that are trained on
  # How many prompts are drawn from the source before this stage; None if it has
  # no stages.
  stage: int | None = None

  @property
  def title(self) -> str:
    """The name, and which stage it is."""
    return self.name + ('' if self.stage is None else f' from {self.stage:,}')


class Place(NamedTuple):
  """Where a record stands."""

  part: Part
  place: int


class Unusable(NamedTuple):
  """Records that cannot be used, for one reason."""

  reason: str  # as of the first of them
  records: int
  first: tuple[int, ...]  # the first places


class Read(NamedTuple):
  """What was read of a part."""

  part: Part
  records: int  # in the part, read or not
  rows: np.ndarray  # ROW[N], one for each record that was read
  unusable: tuple[Unusable, ...] = ()
  last_turns: Mapping[str, int] = {}  # how many chats, by `LAST_TURNS`

  @property
  def lengths(self) -> np.ndarray:
    """Tokens of the prompts that can be encoded, i32[N]."""
    tokens = self.rows['tokens']
    return tokens[tokens >= 0]


class Shown(NamedTuple):
  """A prompt as the model reads it, or why it reads none."""

  place: Place
  record: Mapping[str, Any] = {}
  ids: list[int] | None = None
  text: str | None = None  # of the ids, special tokens spelled out
  problem: str = ''


class Duplicates(NamedTuple):
  """Prompts that were met before."""

  exact: int  # records whose prompt is the same as an earlier one
  loose: int  # those, and those that differ in white space and case alone
  # Pairs of an earlier record and a later one; those that are exactly the same
  # come first.
  examples: tuple[tuple[Place, Place], ...]


class Bin(NamedTuple):
  """A row of a histogram."""

  first: int  # tokens of the shortest prompt in it
  last: int  # of the longest
  counts: tuple[int, ...]  # of each split


class Survey(NamedTuple):
  """What there is to say of the data of a config."""

  reads: tuple[Read, ...]  # those to train on come first
  prompts: tuple[Shown, ...]
  widths: tuple[int, ...]  # tokens, ascending; () if not known
  special_tokens: Mapping[int, str]  # by id
  drawn: int  # prompts that the run draws
  widths_problem: str = ''  # why they are not known

  def read_in(self, split: str) -> tuple[Read, ...]:
    """The sources of 'train' or 'heldout'."""
    return tuple(read for read in self.reads if read.part.split == split)

  @property
  def lengths(self) -> dict[str, np.ndarray]:
    """Tokens of the prompts that can be encoded, i32[N], by split."""
    return {
      split: np.concatenate([read.lengths for read in self.read_in(split)])
      for split in ('train', 'heldout')
      if self.read_in(split)
    }

  @property
  def duplicates(self) -> dict[str, Duplicates]:
    """Prompts that occur more than once, by where they do."""
    train, heldout = self.read_in('train'), self.read_in('heldout')
    found = {'within training': duplicates(train)}
    if heldout:
      found['held out, and in training'] = duplicates(heldout, train)
      found['within held out'] = duplicates(heldout)
    return found

  def passes(self, read: Read) -> float | None:
    """How often the run goes through a source; None if it is held out."""
    share = read.part.share
    return None if share is None else self.drawn * share / read.records

  def histogram(self) -> list[Bin]:
    """The lengths of prompts. No row goes over a width of the config.

    Rows are equally wide up to the length that 99% of the prompts have at most;
    the last row holds all that are longer.
    """
    lengths = self.lengths.values()
    every = np.concatenate([*lengths, np.zeros(0, np.int32)])
    if not every.size:
      return []
    least, most = int(every.min()), int(every.max())
    usual = int(np.percentile(every, 99, method='higher'))
    steps = (m * 10**k for k in range(9) for m in (1, 2, 5))
    step = next(s for s in steps if usual // s - least // s < _MOST_ROWS)
    # A row ends with each of these lengths.
    ends = {most, *(width for width in self.widths if least <= width < most)}
    ends |= set(range(-(-least // step) * step, usual + step, step)) - {0}
    ends = sorted(end for end in ends if end <= most)
    firsts = [least, *(end + 1 for end in ends[:-1])]
    return [
      Bin(
        first,
        last,
        tuple(int(np.sum((x >= first) & (x <= last))) for x in lengths),
      )
      for first, last in zip(firsts, ends, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Reader:
  """Looks at records as a run would.

  Attributes:
    tokenizer: The tokenizer of the run, with its prompt format.
    widths: Of prompts, in tokens, ascending; () if not known.
    judges: Verifiers and their arguments. They are tried on an empty
      completion, which tells whether the reference of a record can be used.
    drops: Whether the run drops prompts that are longer than all widths, and
      does not refuse them.
  """

  tokenizer: data.Tokenizer
  widths: tuple[int, ...] = ()
  judges: Sequence[tuple[Callable[..., float], Mapping[str, Any]]] = ()
  drops: bool = False

  def look(self, place: Place) -> Shown:
    """One prompt."""
    try:
      record = data.row_at(place.part.source, place.place)
      ids = data.prompt_ids(self.tokenizer, record)
      text = self.tokenizer.backend.decode(ids, skip_special_tokens=False)
    except ValueError as error:
      return Shown(place, problem=plain_text.said(error))
    return Shown(place, record, ids, text)

  def read(self, part: Part, most: int, tell: Tell) -> Read:
    """Reads a part.

    Args:
      part: The part.
      most: How many records to read; 0 for all.
      tell: Is called before every record.
    """
    places = _places(len(part.source), most)
    rows: Any = np.zeros(len(places), ROW)
    rows['place'], rows['tokens'] = places, -1
    unusable: dict[str, Unusable] = {}
    ends: collections.Counter[str] = collections.Counter()
    for number, row in enumerate(rows):
      place = int(row['place'])
      tell(part.title, number, len(places))
      row['part'] = part
      try:
        record = data.row_at(part.source, place)
        row['exact'], row['loose'], row['answer'] = _hashes(record)
        ends[_last_turn(record)] += 1
        row['tokens'] = len(data.prompt_ids(self.tokenizer, record))
        self._check(record, int(row['tokens']))
      except ValueError as error:
        reason = plain_text.said(error)
        # Those that differ in a number or in what they quote are one.
        kind = _OWN.sub('', reason)
        if kind not in unusable and len(unusable) >= _MOST_REASONS:
          kind = reason = 'other reasons'
        found = unusable.get(kind, Unusable(reason, 0, ()))
        first = (*found.first, place)[:_EXAMPLES]
        unusable[kind] = Unusable(found.reason, found.records + 1, first)
    return Read(
      part,
      len(part.source),
      rows,
      tuple(unusable.values()),
      {name: ends[name] for name in LAST_TURNS},
    )

  def _check(self, record: Mapping[str, Any], tokens: int) -> None:
    """Raises a ValueError if a prompt is too long, or a reward refuses it."""
    if self.widths and tokens > self.widths[-1]:
      raise ValueError(
        f'The prompt is longer than the largest width, {self.widths[-1]} tokens'
        + ('; it is dropped.' if self.drops else '.')
      )
    example = {'completion_ids': [], **record}
    for function, kwargs in self.judges:
      try:
        function(data.prompt_text(record['prompt']), '', example, **kwargs)
      except ValueError:
        raise
      except Exception as error:
        why = f'{plain_text.named(error)}'[:200]
        raise ValueError(f'A reward fails ({why}).') from error


def survey(
  reader: Reader,
  trained: Sequence[tuple[str, Any, float]],
  heldout: Sequence[tuple[str, Any]],
  drawn: int,
  seed: int,
  show: int,
  most: int,
  tell: Tell,
) -> Survey:
  """Reads the data of a run.

  Args:
    reader: Looks at records as the run does.
    trained: Name, records and weight of each source to train on.
    heldout: Name and records of each source that is held out.
    drawn: Prompts that the run draws.
    seed: The seed of the run.
    show: How many prompts to show of each split.
    most: How many records to read of each part; 0 for all.
    tell: Is called before every record.
  """
  weights = [weight for *_, weight in trained]
  stages = [
    _stages(name, source, weight / sum(weights), drawn)
    for name, source, weight in trained
  ]
  held_out = [Part(name, 'heldout', source) for name, source in heldout]
  places = [
    _Places(source, parts)
    for (_, source, _), parts in zip(trained, stages, strict=True)
  ]
  stream = data.mixture([*places], weights, seed)
  first = [row['place'] for row in data.take(stream, 0, show)]
  others = (Place(x, k) for x in held_out for k in range(len(x.source)))
  return Survey(
    tuple(
      reader.read(part, most, tell)
      for part in itertools.chain(*stages, held_out)
    ),
    tuple(map(reader.look, [*first, *itertools.islice(others, show)])),
    reader.widths,
    _special_tokens(reader.tokenizer),
    drawn,
  )


def _stages(name: str, source: Any, share: float, drawn: int) -> list[Part]:
  """A source to train on, in the stages of its curriculum.

  Args:
    name: What the source is called.
    source: The records.
    share: The part of all prompts that comes from it.
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


@dataclasses.dataclass(frozen=True)
class _Places:
  """A source whose records are places, so that no record is read."""

  source: Any
  stages: Sequence[Part]

  def __len__(self) -> int:
    return len(self.source)

  def drawn(self, index: int, number: int) -> dict[str, Any]:
    """As the run draws the record."""
    starts = [part.stage or 0 for part in self.stages]
    part = self.stages[bisect.bisect_right(starts, number) - 1]
    if hasattr(self.source, 'drawn'):
      part = part._replace(source=data.Stage(self.source, number))
    return {'place': Place(part, int(index))}


def duplicates(
  reads: Sequence[Read], earlier: Sequence[Read] = ()
) -> Duplicates:
  """Prompts that occur more than once.

  Args:
    reads: Where to look.
    earlier: Where to look for the first of each pair; nothing for `reads`
      themselves, in which the first of each prompt is no duplicate.
  """
  later, before = _with_prompts(reads), _with_prompts(earlier or reads)
  counts, examples = [], []
  for kind in ('exact', 'loose'):
    # A 0 before them, which is no hash, so that there is one in any case.
    every = np.concatenate([[np.uint64(0)], before[kind]])
    hashes, firsts = np.unique(every, return_index=True)
    found = np.searchsorted(hashes, later[kind]) % len(hashes)
    first = firsts[found] - 1
    is_repeated = hashes[found] == later[kind]
    if not earlier:
      is_repeated &= first != np.arange(len(later))
    pairs = before[first[is_repeated]], later[is_repeated]
    counts.append(len(pairs[0]))
    if kind == 'loose':  # the exact ones are among them, and shown already
      differ = pairs[0]['exact'] != pairs[1]['exact']
      pairs = pairs[0][differ], pairs[1][differ]
    examples += [
      tuple(Place(row['part'], int(row['place'])) for row in pair)
      for pair in zip(pairs[0][:_EXAMPLES], pairs[1][:_EXAMPLES], strict=True)
    ]
  exact, loose = counts
  return Duplicates(exact, loose, tuple(examples))


def contradictions(reads: Sequence[Read]) -> int:
  """How many prompts come with answers that differ from one another."""
  rows = _with_prompts(reads)
  exact = rows['exact']
  # A prompt and an answer in one number; odd, so that no bits are lost.
  both = exact + rows['answer'] * np.uint64(0x9E3779B97F4A7C15)
  _, at = np.unique(both, return_index=True)
  _, counts = np.unique(exact[at], return_counts=True)
  return int(np.sum(counts > 1))


def _with_prompts(reads: Sequence[Read]) -> np.ndarray:
  """The rows of all records with a prompt, ROW[N]."""
  rows = np.concatenate([np.zeros(0, ROW), *(read.rows for read in reads)])
  return rows[rows['exact'] != 0]


def _last_turn(record: Mapping[str, Any]) -> str:
  """Which of `LAST_TURNS` a record counts for; '' for none."""
  prompt = record['prompt']
  if isinstance(prompt, str):
    return ''
  if data.is_by_assistant(prompt[-1]):
    return 'prefill'
  if not data.has_known_role(prompt[-1]):
    return 'unknown'
  if 'last_turn' not in record:
    return ''
  own = record.get('answer') != record['last_turn']
  return 'beside_answer' if own else 'answer'


def _places(number: int, most: int) -> np.ndarray:
  """Places of the records to read, in order; always the same ones."""
  if not most or number <= most:
    return np.arange(number)
  return np.asarray(sorted(random.Random(0).sample(range(number), most)))


def _hashes(record: Mapping[str, Any]) -> tuple[int, int, int]:
  """Hashes of the prompt, of the prompt without its form, of the answer."""
  prompt = record['prompt']
  if not isinstance(prompt, str):
    # Zeros are no white space, so that roles stay apart in the second hash.
    prompt = '\0'.join(f'{one["role"]}\0{one["content"]}' for one in prompt)
  loose = ' '.join(prompt.split()).casefold()
  return _hash(prompt), _hash(loose), _hash(str(record.get('answer')))


def _hash(text: str) -> int:
  """64 bits. Never 0, which is the hash of a record without a prompt."""
  # 'surrogatepass', because JSON may hold half of a surrogate pair.
  digest = hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=8)
  return int.from_bytes(digest.digest(), 'little') or 1


def _special_tokens(tokenizer: data.Tokenizer) -> dict[int, str]:
  known = tokenizer.backend.get_added_tokens_decoder().items()
  special = [number for number, token in known if token.special]
  special += [*tokenizer.eos_ids, *tokenizer.bos_ids, tokenizer.pad_id]
  return {
    number: tokenizer.backend.id_to_token(number) or '' for number in special
  }
