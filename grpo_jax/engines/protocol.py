"""The engine protocol: requests go in, and what was sampled comes out.

`generate` asks any engine for completions of many prompts that are known whole.

Prompts and completions are token ids, never text, so that the ids which were
sampled are exactly those that are trained on.
"""

from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Sequence
import contextlib
import dataclasses
import math
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import numpy as np

from grpo_jax.mesh import random_keys

# How a completion finished: by an end token, its limit, a stop string; or it
# has not finished.
ENDED, TRUNCATED, STOPPED, GOING = 0, 1, 2, 3

# Float32 cannot divide logits by less: quotients overflow, and rounding errors
# become differences of whole nats.
LEAST_TEMPERATURE = 1e-3


# Frozen, so that it can be hashed and compared.
@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn, and what ends a completion before its limit.

  Attributes:
    eos_ids: Ids of the end tokens. An end token is part of its completion.
    temperature: Divides the logits; 0 takes the likeliest token. Numbers
      between 0 and `LEAST_TEMPERATURE` are refused.
    top_k: Draws from the k likeliest tokens, and from any as likely as the last
      of them; 0 draws from all.
    top_p: Draws from the likeliest tokens that together reach this probability;
      1 draws from all.
    min_p: Draws from the tokens that are at least this likely relative to the
      likeliest; 0 draws from all.
    min_tokens: No end token is drawn before a completion has this many tokens.
    stop_strings: Texts that end a completion. The token that completes such a
      text is part of the completion.
  """

  eos_ids: tuple[int, ...] = ()
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  min_tokens: int = 0
  stop_strings: tuple[str, ...] = ()

  def __post_init__(self):
    for name, ok, need in (
      (
        'temperature',
        self.temperature == 0
        or LEAST_TEMPERATURE <= self.temperature < math.inf,
        f'0, which is greedy, or a number from {LEAST_TEMPERATURE} up',
      ),
      ('top_k', self.top_k >= 0, 'at least 0'),
      ('top_p', 0 < self.top_p <= 1, 'in (0, 1]'),
      ('min_p', 0 <= self.min_p <= 1, 'in [0, 1]'),
      ('min_tokens', self.min_tokens >= 0, 'at least 0'),
    ):
      if not ok:
        raise ValueError(
          f'Sampling got {name}={getattr(self, name)}; it must be {need}.'
        )
    stops = self.stop_strings
    whole = (isinstance(stop, str) and stop for stop in stops)
    if isinstance(stops, str) or not all(whole):
      raise ValueError(
        f'Sampling got stop_strings={stops!r}; it must be a tuple of texts, '
        'none of them empty, because the empty text is in every text.'
      )

  @property
  def filters(self) -> bool:
    """Whether some tokens of the policy are never drawn."""
    return bool(
      self.top_k
      or self.top_p < 1
      or self.min_p
      or (self.min_tokens and self.eos_ids)
    )


def check_limit(limit: int, sampling: Sampling) -> None:
  """Raises a ValueError unless completions of a limit can end."""
  if limit <= 0:
    raise ValueError(f'Sampling got max_tokens={limit}; it must be positive.')
  if sampling.min_tokens >= limit:
    raise ValueError(
      f'Sampling got min_tokens={sampling.min_tokens}; it must be in '
      f'[0, max_tokens), and max_tokens={limit}.'
    )


class Request(NamedTuple):
  """A prompt, and how to continue it n times; it is read and stored once.

  Attributes:
    ids: The prompt's ids, at least one.
    keys: u32[n,2], the words of a threefry key for each completion. What a
      completion is drawn with depends on its key and on its place, not on the
      requests beside it.
    limit: The most tokens of a completion, its end token included.
    sampling: How its tokens are drawn.
    name: What messages call the prompt.
    calls: 0 for a request by itself. Of those that may go on from each other,
      the most that are drawn at once: an engine that `queues` begins them
      whenever they come, and keeps what they have read until `forget`.
    follows: The request and the completion that these ids go on from, as far as
      they begin alike; None if from none. It was asked for with `calls`.
  """

  ids: Sequence[int]
  keys: np.ndarray
  limit: int
  sampling: Sampling
  name: str = 'a prompt'
  calls: int = 0
  follows: tuple[int, int] | None = None


class Sampled(NamedTuple):
  """A completion of t tokens, or what there is of it so far; on the host.

  Attributes:
    request: What `submit` has returned.
    number: Which of the completions of the request, from 0.
    ids: i32[t]; the last may be an end token.
    logp: f32[t], log-probability of each token under the policy, nats.
    log_kept: f32[t], log of the probability mass that the filters left. A token
      was drawn with log-probability `logp - log_kept`.
    version: i32[t], the policy version that drew each token.
    finish: ENDED, TRUNCATED, STOPPED or GOING.
    entropy: f32[t], of the policy at each token, nats; see `Capabilities`.
    routing: i32[t], a code of the experts that the pass before each token
      chose, see `models.experts`; see `Capabilities`.
    holder: The process that knows the completion, if not all of them do. In the
      others t is 0, and `finish` does not count.
    read: How many ids of its request were computed for it, because no cache had
      them; None: nobody has counted.
    parked: Whether the cache that it goes on with had been moved to the host.
  """

  request: int
  number: int
  ids: np.ndarray
  logp: np.ndarray
  log_kept: np.ndarray
  version: np.ndarray
  finish: int
  entropy: np.ndarray | None = None
  routing: np.ndarray | None = None
  holder: int | None = None
  read: int | None = None
  parked: bool = False

  @property
  def is_here(self) -> bool:
    """Whether this process knows the completion."""
    return self.holder is None or self.holder == jax.process_index()


class Capabilities(NamedTuple):
  """What an engine does beyond drawing tokens.

  Attributes:
    filters: Whether it knows `log_kept`, without which nothing may be filtered.
    entropy: Whether it knows the entropy.
    routing: Whether it knows which experts were chosen.
    shares: Whether, of several processes, each knows the completions of some
      requests alone; see `Sampled.holder`.
    queues: Whether what is drawn for a request with `calls` depends on neither
      when it comes nor what is beside it.
    rows: How many completions it draws at once, at most; 0: any number.
  """

  filters: bool = True
  entropy: bool = False
  routing: bool = False
  shares: bool = False
  queues: bool = False
  rows: int = 0


class Engine(Protocol):
  """Anything that samples."""

  @property
  def capabilities(self) -> Capabilities:
    """What it does beyond drawing tokens."""
    ...

  def load(self, params: Any, version: int) -> None:
    """Takes new parameters.

    Args:
      params: The learner's parameters.
      version: How many rollouts the policy has learned from.
    """
    ...

  def take(self, params: Any, version: int) -> None:
    """Takes new parameters as decoding reads them; see `handover.Weights`.

    What is being drawn goes on with them, behind what it has read and drawn.

    Args:
      params: On the devices of the engine; they are not copied.
      version: How many rollouts the policy has learned from.
    """
    ...

  def unload(self) -> None:
    """Frees memory until the next `load`; nothing is sampled before it."""
    ...

  def submit(self, request: Request) -> int:
    """Takes a request, also while others are drawn; returns its number."""
    ...

  def forget(self, request: int) -> None:
    """Nothing will follow a request that had `calls`.

    If it has not finished, it is given up, and never will.
    """
    ...

  def completed(
    self, every_tokens: int | None = None
  ) -> Generator[list[Sampled], None, None]:
    """Draws with the parameters that were loaded last, until nothing waits.

    The caller has its turn after every call of the devices. So it can submit
    more, and whoever leaves the iterator gives up all that is not completed.

    Args:
      every_tokens: Reports completions that go on after so many tokens, at
        most, if the engine can; None: only those that have finished.

    Yields:
      What has finished since the last time, which may be nothing; and what
      goes on, if it was asked for. Each completion finishes once, and in every
      process at the same turn.
    """
    ...


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
  finished: Callable[[int, Sampled], None] | None = None,
  check: Callable[[], None] = lambda: None,
) -> list[list[Sampled]]:
  """Samples `G` completions of each of `P` prompts.

  Args:
    engine: With parameters; nothing else is submitted to it.
    asked: From `requests`.
    finished: Called once with the number of the prompt and each completion that
      this process knows, while the engine draws others. It must return soon: no
      device works meanwhile.
    check: Called before the first turn of the engine and after each; what it
      raises ends the sampling. Several processes can agree there whether to go
      on, because they all have the same turns.

  Returns:
    [P][G], the completions in the order of the requests.

  Raises:
    ValueError: The engine cannot do what is asked.
  """
  filters = any(one.sampling.filters for one in asked)
  if filters and not engine.capabilities.filters:
    raise ValueError(
      'This engine does not know what filters leave of the policy; give '
      'top_k=0, top_p=1, min_p=0 and min_tokens=0.'
    )
  check()
  place = {engine.submit(one): p for p, one in enumerate(asked)}
  found: list[dict[int, Sampled]] = [{} for _ in asked]
  with contextlib.closing(engine.completed()) as turns:
    for turn in turns:
      for one in turn:
        p = place[one.request]
        found[p][one.number] = one
        if finished is not None and one.is_here:
          finished(p, one)
      check()
  return [
    [group[g] for g in range(len(one.keys))]
    for group, one in zip(found, asked, strict=True)
  ]
