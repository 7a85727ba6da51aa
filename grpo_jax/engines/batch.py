"""A batch that is known whole: completions of many prompts, as arrays."""

from collections.abc import Callable
from collections.abc import Container
from collections.abc import Sequence
import contextlib
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.engines.protocol import Engine
from grpo_jax.engines.protocol import Request
from grpo_jax.engines.protocol import Sampling
from grpo_jax.engines.protocol import check_limit
from grpo_jax.mesh import random_keys

Finished = Callable[[int, int, np.ndarray, int], None]
"""`(prompt, number in its group, ids i32[t], finish)` of a completion."""


# The arrays [P,G,T] beside `tokens`.
_OF_TOKENS = {
  'logp': np.float32,
  'log_kept': np.float32,
  'version': np.int32,
  'entropy': np.float32,
  'routing': np.int32,
  'chosen': np.bool_,
  'turn': np.int32,
  'previous': np.int32,
}


class Completions(NamedTuple):
  """What was sampled, as host arrays; zero past each completion's length.

  See `Sampled` for the fields that have the same names. A completion may also
  hold tokens that its policy did not choose; see `episodes.types.Episode`.

  Attributes:
    tokens: i32[P,G,T], the ids.
    length: i32[P,G], tokens of each completion, its end token included.
    logp: f32[P,G,T].
    log_kept: f32[P,G,T].
    version: i32[P,G,T].
    finish: i32[P,G], ENDED, TRUNCATED or STOPPED.
    entropy: f32[P,G,T]; None if the engine does not know it.
    routing: i32[P,G,T]; None if the engine does not know it.
    chosen: bool[P,G,T], the policy chose the token; None: it chose all.
    turn: i32[P,G,T], see `Episode`; None: each completion is one turn.
    previous: i32[P,G,T], see `Episode`; None: nothing branches.
    holder: i64[P], the process that knows a prompt's completions, if not all
      processes know all. In the others the arrays [P,G,T] are 0 there, and
      `length` and `finish` do not count, until `Judging` has told them.
  """

  tokens: np.ndarray
  length: np.ndarray
  logp: np.ndarray
  log_kept: np.ndarray
  version: np.ndarray
  finish: np.ndarray
  entropy: np.ndarray | None = None
  routing: np.ndarray | None = None
  chosen: np.ndarray | None = None
  turn: np.ndarray | None = None
  previous: np.ndarray | None = None
  holder: np.ndarray | None = None

  @property
  def known(self) -> Sequence[int]:
    """The prompts whose completions this process knows, ascending."""
    if self.holder is None:
      return range(len(self.length))
    return np.flatnonzero(self.holder == jax.process_index()).tolist()

  @classmethod
  def nothing(
    cls, shape: tuple[int, int, int], without: Container[str]
  ) -> 'Completions':
    """The arrays before anything is written.

    Args:
      shape: (P, G, T).
      without: Names of the arrays [P,G,T] that are None.
    """
    arrays: dict[str, Any] = {
      name: None if name in without else np.zeros(shape, dtype)
      for name, dtype in _OF_TOKENS.items()
    }
    whole, each = np.zeros(shape, np.int32), np.zeros(shape[:2], np.int32)
    return cls(tokens=whole, length=each, finish=each.copy(), **arrays)

  def write(self, p: int, g: int, one: Any) -> None:
    """Puts a completion in its place.

    Args:
      p: Its prompt.
      g: Its number in the group.
      one: Has `ids` i32[t], `finish`, and for each array [P,G,T] that is there
        one of t entries by the same name.
    """
    number = len(one.ids)
    self.length[p, g], self.finish[p, g] = number, one.finish
    self.tokens[p, g, :number] = one.ids
    for name in _OF_TOKENS:
      if (to := getattr(self, name)) is not None:
        to[p, g, :number] = getattr(one, name)


def requests(
  prompts: Sequence[Sequence[int]],
  index: Sequence[int],
  group: int,
  sampling: Sampling,
  limit: int,
  seed: int,
  rollout: int,
  purpose: str = 'sample',
) -> list[Request]:
  """A request for each of `P` prompts.

  The random keys of a completion are those of its seed, purpose, rollout,
  prompt and number alone.

  Args:
    prompts: Each a list of ids.
    index: For each prompt its global counter, which says where in the stream of
      prompts it stands.
    group: Completions per prompt, `G`.
    sampling: How tokens are drawn.
    limit: The most tokens of a completion.
    seed: Of the run.
    rollout: Its number.
    purpose: What the completions are for. Another purpose gets independent
      random numbers.

  Raises:
    ValueError: No completion could end before the limit; see `check_limit`.
  """
  check_limit(limit, sampling)
  keys = random_keys.folded(seed, purpose, rollout, index, range(group))
  return [
    Request(ids, its, limit, sampling, f'the prompt with index {place}')
    for ids, its, place in zip(prompts, keys, index, strict=True)
  ]


def generate(
  engine: Engine,
  asked: Sequence[Request],
  finished: Finished | None = None,
  check: Callable[[], None] = lambda: None,
) -> Completions:
  """Samples `G` completions of each of `P` prompts.

  Args:
    engine: With parameters; nothing else is submitted to it.
    asked: See `requests`.
    finished: Called once with each completion that this process knows, while
      the engine draws others. It must return soon: no device works meanwhile.
    check: Called before the first turn of the engine and after each; what it
      raises ends the sampling. Several processes can agree there whether to go
      on, because they all have the same turns.

  Returns:
    The completions in the order of the requests; T is the largest limit.

  Raises:
    ValueError: The engine cannot do what is asked.
  """
  can = engine.capabilities
  if not can.filters and any(one.sampling.filters for one in asked):
    raise ValueError(
      'This engine does not know what filters leave of the policy; give '
      'top_k=0, top_p=1, min_p=0 and min_tokens=0.'
    )
  without = {'chosen', 'turn', 'previous'}
  without |= {name for name in ('entropy', 'routing') if not getattr(can, name)}
  most = max(one.limit for one in asked)
  whole = Completions.nothing((len(asked), len(asked[0].keys), most), without)
  if can.shares:
    whole = whole._replace(holder=np.zeros(len(asked), np.int64))
  check()
  place = {engine.submit(one): p for p, one in enumerate(asked)}
  with contextlib.closing(engine.completed()) as turns:
    for turn in turns:
      for one in turn:
        p, g = place[one.request], one.number
        if one.holder is None or one.holder == jax.process_index():
          whole.write(p, g, one)
          if finished is not None:
            finished(p, g, one.ids, one.finish)
        if whole.holder is not None:
          whole.holder[p] = one.holder
      check()
  return whole
