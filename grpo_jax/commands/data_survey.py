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

  def said(self, read: int) -> list[str]:
    """Sentences, if there are such chats among so many that were read."""
    found = [self._of_assistant(read)] if any(self[:3]) else []
    if self.unknown:
      found.append(
        f'{self.unknown:,} of {read:,} prompts end with a role that says '
        'neither that it asks nor that it answers; this turn stays in the '
        "prompt. If it answers, call the role 'assistant'."
      )
    return found

  def _of_assistant(self, read: int) -> str:
    end = f'{sum(self[:3]):,} of {read:,} prompts end with the assistant; '
    if self.prefill:
      return f'{end}completions go on where they end (data.last_turn=prefill).'
    became = [f'as the answer of {self.answer:,}'] if self.answer else []
    if self.beside_answer:
      became += [f'beside the answer of {self.beside_answer:,}']
    return f'{end}this turn is taken off the prompt {" and ".join(became)}.'


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
    self._tokenizer = tokenizer
    self._longest = longest
    self._drops = drops
    self._judges = []
    for judge in judges:
      function = _verifier(judge.name)
      if function is not None:
        self._judges.append((function, dict(judge.kwargs)))

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
    number = len(part.source)
    places = _places(number, most)
    tokens = np.full(len(places), -1, np.int32)
    hashes = np.zeros((3, len(places)), np.uint64)
    reasons: dict[str, tuple[str, int, list[int]]] = {}
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
        if kind not in reasons and len(reasons) >= _MOST_REASONS:
          kind = reason = 'other reasons'
        reason, count, first = reasons.get(kind, (reason, 0, []))
        first = first if count >= _EXAMPLES else [*first, int(place)]
        reasons[kind] = reason, count + 1, first
    unusable = (
      Unusable(reason, count, tuple(first))
      for reason, count, first in reasons.values()
    )
    exact, loose, answers = hashes
    last_turns = LastTurns(*(ends[name] for name in LastTurns._fields))
    return Read(
      part,
      number,
      places,
      tokens,
      exact,
      loose,
      answers,
      tuple(unusable),
      last_turns,
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
        raise ValueError(f'A reward fails ({_named(error)}).') from error


def duplicates(
  reads: Sequence[Read], earlier: Sequence[Read] = ()
) -> Duplicates:
  """Prompts that occur more than once.

  Args:
    reads: Where to look.
    earlier: Where to look for the first of each pair; nothing for `reads`
      themselves, in which the first of each prompt is no duplicate.
  """
  pairs: dict[str, list[tuple[int, int]]] = {}
  counts = {}
  for kind in ('exact', 'loose'):
    later = _joined(reads, kind)
    if earlier:
      first, at = np.unique(_joined(earlier, kind), return_index=True)
      found = np.searchsorted(first, later) % max(len(first), 1)
      is_repeated = (
        first[found] == later if len(first) else np.zeros(len(later), bool)
      )
      before = at[found] if len(first) else found
    else:
      _, at, inverse = np.unique(later, return_index=True, return_inverse=True)
      before = at[inverse]
      is_repeated = before != np.arange(len(later))
    counts[kind] = int(np.sum(is_repeated))
    # More than are shown, because the exact ones are among the loose ones.
    rows = np.nonzero(is_repeated)[0]
    if kind == 'loose':
      exact = _joined(reads, 'exact')
      other = _joined(earlier or reads, 'exact')
      rows = rows[exact[rows] != other[before[rows]]]
    pairs[kind] = [(int(before[row]), int(row)) for row in rows[:_EXAMPLES]]
  examples = tuple(
    (_place(earlier or reads, one), _place(reads, other))
    for kind in ('exact', 'loose')
    for one, other in pairs[kind]
  )
  return Duplicates(counts['exact'], counts['loose'], examples)


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


def _named(error: Exception) -> str:
  return plain_text.named(error)[:200]


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
  for read in reads:
    places = read.places[read.exact != 0]
    if row < len(places):
      return Place(read.part, int(places[row]))
    row -= len(places)
  raise IndexError(row)
