"""What `grpo-jax data` counts: lengths, duplicates, records of no use.

A part is one source of a config, or one stage of its curriculum. Up to a number
of records of each part are read, chosen at random. Of a record no more is kept
than its place, the length of its prompt and three hashes, 36 bytes together, so
a million records are no burden.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import random
import re
from typing import Any
from typing import NamedTuple

import numpy as np

from grpo_jax import data
from grpo_jax import rewards
from grpo_jax.config import Reward
from grpo_jax.config import plain_text

_EXAMPLES = 3  # of duplicates of one kind, and of places of one reason
_MOST_REASONS = 10
_OWN = re.compile(r"'[^']*'|[0-9]+")  # what a reason says of one record

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


class Looked(NamedTuple):
  """A prompt as the model reads it."""

  ids: list[int]
  text: str  # of the ids, special tokens spelled out
  record: Mapping[str, Any]


class Unusable(NamedTuple):
  """Records that cannot be used, for one reason."""

  reason: str  # as of the first of them
  records: int
  first: tuple[int, ...]  # the first places


class LastTurns(NamedTuple):
  """How many chats end with the assistant, by what becomes of that turn."""

  answer: int = 0  # it is off the prompt, and is the answer
  beside_answer: int = 0  # it is off the prompt, and the record has its answer
  prefill: int = 0  # it is the end of the prompt
  unknown: int = 0  # its role does not say whether it is an answer; it stays


class Read(NamedTuple):
  """What was read of a part, by record; all arrays are [N]."""

  part: Part
  records: int  # in the part, read or not
  places: np.ndarray  # i64
  tokens: np.ndarray  # i32, of the prompt; -1 where it cannot be encoded
  exact: np.ndarray  # u64, a hash of the prompt
  loose: np.ndarray  # u64, of the prompt but for white space and case
  answers: np.ndarray  # u64, of the answer
  unusable: tuple[Unusable, ...]
  last_turns: LastTurns = LastTurns()

  @property
  def lengths(self) -> np.ndarray:
    """Of the prompts that can be encoded."""
    return self.tokens[self.tokens >= 0]


class Place(NamedTuple):
  """Where a record stands."""

  part: Part
  place: int


class Shown(NamedTuple):
  """A prompt as the model reads it, or why it reads none."""

  place: Place
  looked: Looked | None
  problem: str = ''


class Survey(NamedTuple):
  """What there is to say of the data of a config."""

  reads: tuple[Read, ...]  # those to train on come first
  prompts: tuple[Shown, ...]
  widths: tuple[int, ...]  # tokens, ascending; () if not known
  widths_problem: str  # why they are not known
  special_tokens: Mapping[int, str]  # by id
  drawn: int  # prompts that the run draws

  def of(self, split: str) -> tuple[Read, ...]:
    """The sources of 'train' or 'heldout'."""
    return tuple(read for read in self.reads if read.part.split == split)

  @property
  def lengths(self) -> dict[str, np.ndarray]:
    """Of the prompts that can be encoded, [N], by split."""
    return {
      split: np.concatenate([read.lengths for read in self.of(split)])
      for split in ('train', 'heldout')
      if self.of(split)
    }

  @property
  def duplicates(self) -> dict[str, 'Duplicates']:
    """Prompts that occur more than once, by where they do."""
    train, heldout = self.of('train'), self.of('heldout')
    found = {'within training': duplicates(train)}
    if heldout:
      found['held out, and in training'] = duplicates(heldout, train)
      found['within held out'] = duplicates(heldout)
    return found

  def passes(self, read: Read) -> float | None:
    """How often the run goes through a source; None if it is held out."""
    share = read.part.share
    return None if share is None else self.drawn * share / read.records


class Duplicates(NamedTuple):
  """Prompts that were met before."""

  exact: int  # records whose prompt is the same as an earlier one
  loose: int  # those, and those that differ in white space and case alone
  # Pairs of an earlier record and a later one; those that are exactly the same
  # come first.
  examples: tuple[tuple[Place, Place], ...]


class Reader:
  """Looks at records as a run would.

  Args:
    tokenizer: Of the run, with its prompt format.
    longest: Tokens of the longest prompt that fits; None if not known.
    judges: The rewards of the run. Those of this package that compare with a
      rule are tried on an empty completion, which tells whether the reference
      of a record can be used.
    drops: Whether the run drops prompts that are longer, and does not refuse
      them.
  """

  def __init__(
    self,
    tokenizer: data.Tokenizer,
    longest: int | None,
    judges: Sequence[Reward] = (),
    drops: bool = False,
  ):
    self._tokenizer, self._longest = tokenizer, longest
    self._drops = drops
    self._judges = [
      (function, dict(judge.kwargs))
      for judge in judges
      if (function := _verifier(judge.name)) is not None
    ]

  def look(self, part: Part, place: int) -> Looked:
    """One prompt.

    Raises:
      ValueError: The record has none that can be encoded; the message says why.
    """
    record = data.row_at(part.source, place)
    ids = data.prompt_ids(self._tokenizer, record)
    text = self._tokenizer.backend.decode(ids, skip_special_tokens=False)
    return Looked(ids, text, record)

  def read(self, part: Part, most: int, tell: Tell) -> Read:
    """Reads a part.

    Args:
      part: The part.
      most: How many records to read; 0 for all.
      tell: Is called before every record.
    """
    places = _places(len(part.source), most)
    tokens = np.full(len(places), -1, np.int32)
    hashes = np.zeros((3, len(places)), np.uint64)
    unusable: dict[str, Unusable] = {}
    ends: collections.Counter[str] = collections.Counter()
    for row, place in enumerate(places):
      tell(part.title, row, len(places))
      try:
        record = data.row_at(part.source, int(place))
        hashes[:, row] = _hashes(record)
        ends[_last_turn(record)] += 1
        tokens[row] = len(data.prompt_ids(self._tokenizer, record))
        self._check(record, int(tokens[row]))
      except ValueError as error:
        reason = plain_text.said(error)
        # Those that differ in a number or in what they quote are one.
        kind = _OWN.sub('', reason)
        if kind not in unusable and len(unusable) >= _MOST_REASONS:
          kind = reason = 'other reasons'
        found = unusable.get(kind, Unusable(reason, 0, ()))
        first = (*found.first, int(place))[:_EXAMPLES]
        unusable[kind] = Unusable(found.reason, found.records + 1, first)
    exact, loose, answers = hashes
    return Read(
      part,
      len(part.source),
      places,
      tokens,
      exact,
      loose,
      answers,
      tuple(unusable.values()),
      LastTurns(**{name: ends[name] for name in LastTurns._fields}),
    )

  def _check(self, record: Mapping[str, Any], tokens: int) -> None:
    """Raises a ValueError if a prompt is too long, or a reward refuses it."""
    if self._longest is not None and tokens > self._longest:
      raise ValueError(
        f'The prompt is longer than the largest width, {self._longest} tokens'
        + ('; it is dropped.' if self._drops else '.')
      )
    example = {'completion_ids': [], **record}
    for function, kwargs in self._judges:
      try:
        function(data.prompt_text(record['prompt']), '', example, **kwargs)
      except ValueError:
        raise
      except Exception as error:
        why = f'{plain_text.named(error)}'[:200]
        raise ValueError(f'A reward fails ({why}).') from error


def duplicates(
  reads: Sequence[Read], earlier: Sequence[Read] = ()
) -> Duplicates:
  """Prompts that occur more than once.

  Args:
    reads: Where to look.
    earlier: Where to look for the first of each pair; nothing for `reads`
      themselves, in which the first of each prompt is no duplicate.
  """
  counts, examples = [], []
  exact, other = _joined(reads, 'exact'), _joined(earlier or reads, 'exact')
  for kind in ('exact', 'loose'):
    later = _joined(reads, kind)
    # A 0 before them, which is no hash, so that there is one in any case.
    every = np.concatenate([[np.uint64(0)], _joined(earlier or reads, kind)])
    hashes, firsts = np.unique(every, return_index=True)
    found = np.searchsorted(hashes, later) % len(hashes)
    before = firsts[found] - 1
    is_repeated = hashes[found] == later
    if not earlier:
      is_repeated &= before != np.arange(len(later))
    rows = np.nonzero(is_repeated)[0]
    counts.append(len(rows))
    if kind == 'loose':  # the exact ones are among them, and shown already
      rows = rows[exact[rows] != other[before[rows]]]
    examples += [
      (_place(earlier or reads, int(before[row])), _place(reads, int(row)))
      for row in rows[:_EXAMPLES]
    ]
  exactly, loosely = counts
  return Duplicates(exactly, loosely, tuple(examples))


def contradictions(reads: Sequence[Read]) -> int:
  """How many prompts come with answers that differ from one another."""
  exact, answers = _joined(reads, 'exact'), _joined(reads, 'answers')
  # A prompt and an answer in one number; odd, so that no bits are lost.
  both = exact + answers * np.uint64(0x9E3779B97F4A7C15)
  _, at = np.unique(both, return_index=True)
  _, counts = np.unique(exact[at], return_counts=True)
  return int(np.sum(counts > 1))


def _verifier(name: str) -> Callable[..., float] | None:
  """A reward that can be tried on an empty completion at no cost.

  Raises:
    ValueError: This package has no such reward.
  """
  if ':' in name and not name.startswith('grpo_jax.'):
    return None  # a user's own, which may do anything
  function = rewards.resolve(name)
  if function is rewards.reasoning_gym:
    return None  # which needs a process of its own for each record
  module = str(getattr(function, '__module__', ''))
  tried = ('grpo_jax.rewards.verifiers', 'grpo_jax.rewards.generated_code')
  return function if module.startswith(tried) else None


def _last_turn(record: Mapping[str, Any]) -> str:
  """Which of `LastTurns` a record counts for; '' for none."""
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
  """Of the prompt, of the prompt without its form, and of the answer."""
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


def _joined(reads: Sequence[Read], name: str) -> np.ndarray:
  """The hashes of all records that have a prompt."""
  parts = [getattr(read, name)[read.exact != 0] for read in reads]
  return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _place(reads: Sequence[Read], row: int) -> Place:
  """Where the record stands that is a row of `_joined`."""
  places = _joined(reads, 'places')
  ends = np.cumsum([np.count_nonzero(read.exact) for read in reads])
  number = int(np.searchsorted(ends, row, side='right'))
  return Place(reads[number].part, int(places[row]))
