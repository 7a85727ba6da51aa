"""Episodes, and rollouts of them, which are taken apart and put together."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
import math
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import engines
from grpo_jax.losses import OF_TURNS
from grpo_jax.losses import Batch as Batch

KNOWN_TO_ALL = ('mask', 'keep', 'version', 'previous')
"""The arrays [P,G,T] of a rollout that every process knows of all groups, from
the `outline` of each episode."""


ENDS = 'done', 'end', 'length', 'turns', 'tokens', 'context', 'failed'
"""What ends an episode that is played: its environment; a token that ends the
whole chat; a limit of a turn, of turns, of tokens or of the context; a failure
of the environment."""


class Account(NamedTuple):
  """What is told of an episode that was played, beside its tokens.

  Attributes:
    messages: What was said, in the order of the tree: messages of a chat, with
      a field `by`, which is 'environment' or 'policy'. A message of the policy
      is all that it wrote but end tokens, and has the number of its `turn`; one
      that was said in a branch has the path of its `context`.
    turn_rewards: What the environment gave for each turn, exact in float32;
      None: nothing.
    ended: One of `ENDS`.
    failure: Why it failed; '' if it did not.
    last_text: What the policy has said last in its first context, without
      reasoning and calls; if it has only spoken in others, in the last of them.
    tool_calls: How many calls the environment has made for the policy.
    tool_errors: How many of them went wrong, or could not be read.
    parse_errors: How much else of the replies could not be read.
    secs: What the environment took itself; NaN if that is not known.
    counts: What else the environment has counted, by names.
  """

  messages: tuple[Mapping[str, Any], ...] = ()
  turn_rewards: tuple[float, ...] | None = None
  ended: str = 'done'
  failure: str = ''
  last_text: str = ''
  tool_calls: int = 0
  tool_errors: int = 0
  parse_errors: int = 0
  secs: float = math.nan
  counts: Mapping[str, int] = {}

  @property
  def turns(self) -> int:
    """How many turns the policy had."""
    return sum(message['by'] == 'policy' for message in self.messages)


class Episode(NamedTuple):
  """What was read and written after a first prompt: t tokens in n turns.

  A single turn is an episode whose tokens are all chosen. An episode branches
  if a turn reads a context that is not all that came before. Its tokens then
  lie in the order of the tree, each once: what a branch adds follows what was
  there, and the context that it reads again does not.

  Attributes:
    ids: i32[t].
    chosen: bool[t], the policy chose the token. All others were written by
      somebody else; in the next five arrays they are 0.
    logp: f32[t], see `engines.Sampled`.
    log_kept: f32[t], likewise.
    version: i32[t], likewise.
    finish: How the last turn finished, likewise.
    entropy: f32[t], likewise.
    routing: i32[t], likewise.
    turn: i32[t], the number of the turn; None: there is one.
    previous: i32[t], the place of the token that each token follows, or -1 for
      the end of the first prompt; None: each follows the one before it.
    account: What else is told of it; None: nobody has played it.
    holder: The process that knows the episode, see `engines.Sampled`.
  """

  ids: np.ndarray
  chosen: np.ndarray
  logp: np.ndarray
  log_kept: np.ndarray
  version: np.ndarray
  finish: int
  entropy: np.ndarray | None = None
  routing: np.ndarray | None = None
  turn: np.ndarray | None = None
  previous: np.ndarray | None = None
  account: Account | None = None
  holder: int | None = None


def episode_of(one: engines.Sampled) -> Episode:
  """What was sampled, as an episode of a single turn."""
  shared = {name: getattr(one, name) for name in _OF_SAMPLED}
  return Episode(chosen=np.ones(len(one.ids), bool), **shared)


_OF_SAMPLED = tuple(x for x in Episode._fields if x in engines.Sampled._fields)
# What every process is told of an episode, beside how many tokens it has.
_TOLD = 'finish', 'version', 'chosen', 'previous'


def outline(episode: Episode) -> tuple[int, dict[str, Any]]:
  """What the process that knows an episode tells the others."""
  told = {name: getattr(episode, name) for name in _TOLD}
  return len(episode.ids), told


def outlined(episode: Episode, length: int, told: dict[str, Any]) -> Episode:
  """An episode that another process knows, with what its `outline` says.

  All else of it is 0.
  """
  nothing = {
    name: np.zeros(length, x.dtype)
    for name, x in episode._asdict().items()
    if isinstance(x, np.ndarray)
  }
  return episode._replace(**{**nothing, **told})


def holders(episodes: Sequence[Sequence[Episode]]) -> np.ndarray | None:
  """i64[P], the process that knows each group; None: every one knows all."""
  holder = [group[0].holder for group in episodes]
  return None if holder[0] is None else np.array(holder, np.int64)


class Rollout(NamedTuple):
  """P groups of G completions that one policy version sampled, and rewards.

  A completion is an `Episode`: `batch.mask` says which of its tokens the policy
  chose, and `length` how many it has in all.

  Everything lies on the host, but for what `gathering.on_devices` has moved.

  Attributes:
    batch: What losses read: NumPy arrays [P,G,T].
    length: i32[P,G], tokens of each completion.
    prompts: P lists of ids.
    prompt_texts: The P prompts as a person sees them (`data.prompt_text`).
    texts: [P][G], the completions as text, for rewards and for people.
    index: i64[P], the global prompt counter of each prompt.
    reward_names: Names along the last axis of `batch.reward_parts`.
    answers: P reference answers as text, None for a prompt that has none; ()
      if nobody has asked for them.
    failures: object[P,G,K], texts: why a reward function failed on a completion
      in a worker process, '' where it did not; None if none was called.
    judge_secs: f32[P,G,K], how long the call of the function took; NaN where
      that is not known, None if it is known nowhere.
    holder: i64[P], the process that knows a group's tokens. In the others
      `texts` are '', and of the arrays [P,G,T] only those `KNOWN_TO_ALL`
      count. None: every process knows all. See `gathering.py`.
    previous: i32[P,G,T], see `Episode`; None: nothing branches.
    accounts: [P][G], what is told of each episode; () if none was played.
  """

  batch: Batch
  length: np.ndarray
  prompts: list[list[int]]
  prompt_texts: list[str]
  texts: list[list[str]]
  index: np.ndarray
  reward_names: tuple[str, ...] = ()
  answers: Sequence[str | None] = ()
  failures: np.ndarray | None = None
  judge_secs: np.ndarray | None = None
  holder: np.ndarray | None = None
  previous: np.ndarray | None = None
  accounts: Sequence[Sequence[Account]] = ()

  @property
  def drawn(self) -> np.ndarray:
    """i64[P,G], how many tokens of each completion the policy chose."""
    return np.asarray(self.batch.mask).sum(axis=-1)

  @property
  def failed(self) -> np.ndarray:
    """bool[P,G,K]: whether a reward function failed on a completion."""
    if self.failures is None:
      return np.zeros(np.shape(self.batch.reward_parts), bool)
    return self.failures != ''

  @property
  def judged(self) -> np.ndarray:
    """bool[P,G]: whether the first reward has judged a completion."""
    first = np.asarray(self.batch.reward_parts)[..., 0]
    return np.asarray(self.batch.valid) & ~np.isnan(first)

  def right(self, right_reward: float) -> np.ndarray:
    """bool[P,G]: whether the first reward was judged, and is at least this."""
    first = np.asarray(self.batch.reward_parts)[..., 0]
    return self.judged & (first >= right_reward)

  @property
  def own_groups(self) -> Sequence[int]:
    """The numbers of the groups that this process knows, ascending."""
    if self.holder is None:
      return range(len(self.prompts))
    return np.flatnonzero(self.holder == jax.process_index()).tolist()


def with_extras(rollout: Rollout, arrays: Mapping[str, np.ndarray]) -> Rollout:
  """A rollout whose batch has some arrays more, [P,G,...] by name."""
  batch = rollout.batch
  return rollout._replace(
    batch=batch._replace(extras={**batch.extras, **arrays})
  )


def select(rollout: Rollout, chosen: np.ndarray) -> Rollout:
  """Some groups of a rollout.

  Args:
    rollout: A rollout of P groups.
    chosen: i32[P'], numbers of the groups; the result has them in this order.
  """

  def some(values: Any) -> Any:
    if isinstance(values, np.ndarray):
      return values[chosen]
    return [values[p] for p in chosen] if values else values

  kept = {name: some(getattr(rollout, name)) for name in _OF_GROUPS}
  batch = jax.tree.map(lambda x: x[chosen], rollout.batch)
  return rollout._replace(batch=batch, **kept)


_OF_GROUPS = tuple(
  name for name in Rollout._fields if name not in ('batch', 'reward_names')
)
# What stands for a field that a rollout lacks, beside rollouts that have it.
_LACKING: dict[str, Callable[[Rollout], Any]] = {
  'answers': lambda part: [None] * len(part.prompts),
  'accounts': lambda part: [[Account()] * len(row) for row in part.texts],
  'failures': lambda part: np.full(part.batch.reward_parts.shape, '', object),
  'judge_secs': lambda part: np.full(
    part.batch.reward_parts.shape, np.nan, np.float32
  ),
  # What all processes know, each of them holds by turns.
  'holder': lambda part: np.arange(len(part.prompts)) % jax.process_count(),
  'previous': lambda part: straight(part),
}


def straight(rollout: Rollout) -> np.ndarray:
  """The `previous` of completions that do not branch; 0 behind each end."""
  place = np.arange(rollout.batch.mask.shape[-1], dtype=np.int32)
  return np.where(place < rollout.length[..., None], place - 1, 0)


def _with_turns(rollout: Rollout) -> Rollout:
  """The rollout, in which a completion without turns is a single one."""
  if 'turn' in rollout.batch.extras:
    return rollout
  turn = np.zeros(rollout.batch.mask.shape, np.int32)
  return with_extras(rollout, {'turn': turn})


def _parted(batch: Batch) -> tuple[dict[str, np.ndarray], Batch]:
  """The arrays of three axes whose last is not T, and a batch without them."""
  by_turn = {
    name: np.asarray(x)
    for name, x in batch.extras.items()
    if name in OF_TURNS and name != 'turn'
  }
  rest = {name: x for name, x in batch.extras.items() if name not in by_turn}
  parts = {'reward_parts': np.asarray(batch.reward_parts), **by_turn}
  return parts, batch._replace(reward_parts=None, extras=rest)


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
  """The groups of several rollouts as one rollout, as wide as the widest."""
  rollouts = [part for part in rollouts if part.prompts]
  if len(rollouts) == 1:
    return rollouts[0]
  if any('turn' in part.batch.extras for part in rollouts):
    rollouts = [_with_turns(part) for part in rollouts]
  # Each rollout is as wide as its own longest completion needs.
  width = max(part.batch.mask.shape[-1] for part in rollouts)

  def widen(x: np.ndarray) -> np.ndarray:
    if x.ndim < 3:
      return x
    ends = [(0, 0)] * x.ndim
    ends[2] = 0, width - x.shape[2]  # [P,G,T,...]
    return np.pad(x, ends)

  def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)

  narrow, wide = zip(*(_parted(part.batch) for part in rollouts), strict=True)
  batches = [jax.tree.map(widen, part) for part in wide]
  joined = {}
  for name in _OF_GROUPS:
    parts = [getattr(part, name) for part in rollouts]
    known = [part is not None and len(part) > 0 for part in parts]
    if not any(known):
      continue
    for place in np.flatnonzero(~np.array(known)):
      parts[place] = _LACKING[name](rollouts[place])
    if name == 'previous':
      parts = map(widen, parts)
    arrays = isinstance(getattr(rollouts[known.index(True)], name), np.ndarray)
    joined[name] = join(*parts) if arrays else [*itertools.chain(*parts)]
  batch, by_turn = jax.tree.map(join, *batches), jax.tree.map(join, *narrow)
  batch = batch._replace(reward_parts=by_turn.pop('reward_parts'))
  return with_extras(rollouts[0]._replace(batch=batch, **joined), by_turn)
