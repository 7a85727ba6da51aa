"""What was read and written in an episode, as a tree of token ids.

The ids of a call of the engine are those of a path in the tree, and there is no
other way to make one: nothing that was sampled is decoded and encoded again.
Every sampled token lies in one node, however many contexts it is read in.

A chat template may write a chat otherwise once it is longer. Then a context
goes on behind the beginning that both have: it branches off from what it was,
and keeps its name. So does a context that begins with a chat of its own.

A context is a place in the tree that grows. It has a path as a name: () is the
first one, and `path + (n, k)` is the k-th that was forked behind the n-th turn
of the context `path`. So names do not depend on who comes when, nor does what
is made of them: the keys of calls, and the order of the tree.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from grpo_jax import engines
from grpo_jax.episodes.types import Episode
from grpo_jax.mesh import random_keys

Path = tuple[int, ...]


@dataclasses.dataclass
class Context:
  """A place where an episode goes on.

  Attributes:
    keys: u32[2] each, of its calls; the last is that of the next one.
    start: How many parts of the context it was forked from it begins with.
    parts: What was added in it, in order: ids that were read, or a turn.
    forks: How many contexts without a number of their own were forked since its
      last turn.
  """

  keys: list[np.ndarray]
  start: int = 0
  parts: list['Part'] = dataclasses.field(default_factory=list)
  forks: int = 0

  @property
  def key(self) -> np.ndarray:
    """u32[2], of its next call."""
    return self.keys[-1]

  @property
  def turns(self) -> int:
    """How many turns were added in it."""
    return len(self.keys) - 1


@dataclasses.dataclass(frozen=True)
class Read:
  """Ids that the policy did not choose.

  Attributes:
    ids: i32[n].
    messages: What is new in them.
    kept: How many ids of what came before they follow; None: all of them.
    chat: The whole chat that the context is with them, if it begins with one of
      its own; else ().
  """

  ids: np.ndarray
  messages: tuple[Mapping[str, Any], ...] = ()
  kept: int | None = None
  chat: tuple[Mapping[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Turn:
  """What the policy has said: what was sampled, and its number as it was told.

  Attributes:
    sampled: By the engine.
    number: Of the turns of the episode, in the order in which they were drawn.
    text: All of it but end tokens, for people.
    message: What a chat template is given of it, if it is rendered anew.
  """

  sampled: engines.Sampled
  number: int
  text: str = ''
  message: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  kept = None  # see `Read`

  @property
  def ids(self) -> np.ndarray:
    """i32[n]."""
    return self.sampled.ids


Part = Read | Turn


class Transcript:
  """The tree of one episode.

  Attributes:
    contexts: By their paths.
    turns: How many were drawn.
    left_out: The numbers of those that are not learned from.
    key: u32[2], of the first call.
  """

  def __init__(self, key: np.ndarray):
    """Nothing is read yet.

    Args:
      key: u32[2], of the first call.
    """
    self.contexts: dict[Path, Context] = {(): Context([key])}
    self.turns = 0
    self.left_out: set[int] = set()
    self.key = key

  def read(
    self,
    path: Path,
    ids: Sequence[int] | np.ndarray,
    messages: Sequence[Mapping[str, Any]] = (),
    kept: int | None = None,
    chat: Sequence[Mapping[str, Any]] = (),
  ) -> None:
    """Adds what the next turn of a context will read; see `Read`."""
    if len(ids):
      ids = np.asarray(ids, np.int32)
      read = Read(ids, tuple(messages), kept, tuple(chat))
      self.contexts[path].parts.append(read)

  def add(
    self,
    path: Path,
    sampled: engines.Sampled,
    text: str = '',
    message: Mapping[str, Any] | None = None,
  ) -> int:
    """Adds a turn to a context; returns its number."""
    context, number = self.contexts[path], self.turns
    context.parts.append(Turn(sampled, number, text, message or {}))
    context.keys.append(random_keys.fold(context.key, 0))
    context.forks = 0
    self.turns += 1
    return number

  def fork(
    self, path: Path, turns: int | None = None, number: int | None = None
  ) -> Path:
    """Another context that begins as this one stands; returns its path.

    Args:
      path: Of the context.
      turns: Behind how many of its turns; None: behind all that is in it.
      number: Of the new context among those that were forked there; None: the
        next one.
    """
    context = self.contexts[path]
    if number is None:
      context.forks += 1
      number = context.forks
    start = len(context.parts)
    if turns is not None:
      ends = [n for n, x in enumerate(context.parts, 1) if isinstance(x, Turn)]
      start = ends[turns - 1] if turns else 0
    else:
      turns = context.turns
    forked = (*path, turns, number)
    key = random_keys.fold(context.keys[turns], number)
    self.contexts[forked] = Context([key], start)
    return forked

  def ids(self, path: Path) -> np.ndarray:
    """i32[n], all that the next turn of a context reads."""
    return _way((part, part.ids) for part in self.parts(path))

  def kept(self, path: Path, ids: np.ndarray) -> int:
    """How many of a context's ids stay if it is to read others as a whole.

    They are those with which both begin. Of a turn all stay or none, and at
    least one id is new.

    Args:
      path: Of the context.
      ids: i32[n], what it is to read from its beginning on.
    """
    before = self.ids(path)
    same = shared(before, ids[:-1])
    if same == len(before):
      return same
    # Of each place the turn that it lies in; -1: in none.
    turns = _way(
      (part, np.full(len(part.ids), getattr(part, 'number', -1)))
      for part in self.parts(path)
    )
    is_cut = turns[same] >= 0
    return int(np.argmax(turns == turns[same])) if is_cut else same

  def last(self, path: Path) -> Turn | None:
    """The last turn that a context has in it; None before the first one."""
    turns = [part for part in self.parts(path) if isinstance(part, Turn)]
    return turns[-1] if turns else None

  def drawn(self) -> int:
    """How many tokens were sampled."""
    parts = [part for one in self.contexts.values() for part in one.parts]
    return sum(len(part.ids) for part in parts if isinstance(part, Turn))

  def size(self) -> int:
    """How many tokens it has, each counted once."""
    contexts = self.contexts.values()
    return sum(len(part.ids) for one in contexts for part in one.parts)

  def parts(self, path: Path, number: int | None = None) -> list[Part]:
    """All parts from the root on, with the first `number` of a context."""
    context = self.contexts[path]
    above = self.parts(path[:-2], context.start) if path else []
    return above + context.parts[:number]

  def placed(self) -> Iterator[tuple[int, Part]]:
    """Every part once, in the order of the tree: by the paths of contexts.

    Yields:
      Of each part the place of the token that its first one follows, -1 for
      none; and the part. The tokens have their places in this order.
    """
    own: dict[int, np.ndarray] = {}  # the places of a part
    size = 0
    for path in sorted(self.contexts):
      way = _way((part, own[id(part)]) for part in self.parts(path, 0))
      for part in self.contexts[path].parts:
        way = way[: part.kept]
        yield int(way[-1]) if len(way) else -1, part
        own[id(part)] = np.arange(size, size + len(part.ids))
        way = np.concatenate([way, own[id(part)]])
        size += len(part.ids)

  def beginnings(self) -> Iterator[list[Part]]:
    """The parts of each context that begins with nothing before it."""
    for path, context in self.contexts.items():
      if context.parts and not self.parts(path, 0):
        yield context.parts

  def turn_places(self) -> dict[int, int]:
    """Of each turn its place among those of the tree, by its number."""
    contexts = (self.contexts[path] for path in sorted(self.contexts))
    parts = itertools.chain.from_iterable(one.parts for one in contexts)
    turns = [part for part in parts if isinstance(part, Turn)]
    return {part.number: place for place, part in enumerate(turns)}


def messages(transcript: Transcript) -> tuple[Mapping[str, Any], ...]:
  """What was said, in the order of the tree; see `types.Account`."""
  found, turns = [], transcript.turn_places()
  for path, context in sorted(transcript.contexts.items()):
    branch = {'context': [*path]} if path else {}
    for part in context.parts:
      if isinstance(part, Read):
        said = [{**one, 'by': 'environment', **branch} for one in part.messages]
        found += said
        continue
      turn = {'by': 'policy', 'turn': turns[part.number], **branch}
      found.append({'role': 'assistant', 'content': part.text, **turn})
  return tuple(found)


def common_ids(transcripts: Sequence[Transcript]) -> list[int]:
  """What all of a group's episodes read before they sample anything.

  A context that was forked before anything was read begins like a first one.
  What a context reads otherwise later is not among it.
  """
  first = [
    _joined(
      [part.ids for part in itertools.takewhile(_is_read, parts)], np.int32
    )
    for one in transcripts
    for parts in one.beginnings()
  ]
  contexts = (x for one in transcripts for x in one.contexts.values())
  kept = [x.kept for one in contexts for x in one.parts if x.kept is not None]
  shortest = min([*map(len, first), *kept])
  rows = np.stack([ids[:shortest] for ids in first])
  same = (rows == rows[0]).all(axis=0)
  return rows[0, : int(np.cumprod(same).sum())].tolist()


def episode(transcript: Transcript, prompt: int, finish: int) -> Episode:
  """A transcript as tokens behind a prompt.

  Args:
    transcript: Of an episode that is over.
    prompt: How many ids are the prompt of its group, with which each context
      begins that has nothing before it. They are left out.
    finish: `engines.TRUNCATED` if a limit has cut it.

  Returns:
    An `Episode`; its `account` is left to the caller.
  """
  placed = [*transcript.placed()]
  parts = [part for _, part in placed]
  turns = [part for part in parts if isinstance(part, Turn)]
  number = {id(part): n for n, part in enumerate(turns)}
  is_learned = {
    id(part): isinstance(part, Turn) and part.number not in transcript.left_out
    for part in parts
  }
  starts = np.cumsum([0, *(len(part.ids) for part in parts)])
  keep = np.ones(starts[-1], bool)
  for (last, _), start in zip(placed, starts):
    if last < 0:
      keep[start : start + prompt] = False

  def array(name: str, dtype: Any) -> Any:
    """What the engine has said of each token; 0 where it has not drawn it."""
    if not turns and name in ('logp', 'log_kept', 'version'):
      return np.zeros(keep.sum(), dtype)  # every engine tells these
    if all(getattr(one.sampled, name) is None for one in turns):
      return None
    values = [
      getattr(part.sampled, name)
      if isinstance(part, Turn) and is_learned[id(part)]
      else np.zeros(len(part.ids))
      for part in parts
    ]
    return _joined(values, dtype)[keep]

  previous = _joined(
    [
      [last, *range(start, start + len(part.ids) - 1)]
      for (last, part), start in zip(placed, starts)
    ],
    np.int32,
  )
  # A place of -1 is that of what was left out: the end of the prompt.
  place = np.append(np.where(keep, np.cumsum(keep) - 1, -1), -1)
  previous = place[previous[keep]].astype(np.int32)
  is_line = np.array_equal(previous, np.arange(-1, len(previous) - 1))
  turn = [np.full(len(x.ids), number.get(id(x), 0)) for x in parts]
  chosen = [np.full(len(x.ids), is_learned[id(x)]) for x in parts]
  return Episode(
    ids=_joined([part.ids for part in parts], np.int32)[keep],
    chosen=_joined(chosen, bool)[keep],
    logp=array('logp', np.float32),
    log_kept=array('log_kept', np.float32),
    version=array('version', np.int32),
    entropy=array('entropy', np.float32),
    routing=array('routing', np.int32),
    turn=_joined(turn, np.int32)[keep],
    previous=None if is_line else previous,
    finish=finish,
  )


def shared(one: np.ndarray, other: np.ndarray) -> int:
  """With how many equal ids two lists begin."""
  length = min(len(one), len(other))
  differ = np.flatnonzero(one[:length] != other[:length])
  return int(differ[0]) if len(differ) else length


def _is_read(part: Part) -> bool:
  return isinstance(part, Read)


def _way(parts: Iterable[tuple[Part, np.ndarray]]) -> np.ndarray:
  """i[n], what lies along parts that have a number for each of their ids."""
  found: list[np.ndarray] = []
  for part, numbers in parts:
    if part.kept is not None:
      found = [_joined(found, np.int32)[: part.kept]]
    found.append(numbers)
  return _joined(found, np.int32)


def _joined(parts: Sequence[Any], dtype: Any) -> np.ndarray:
  return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)
