"""The engine protocol: what an engine is given, and what it returns.

Prompts and completions are token ids, never text, so that the ids which were
sampled are exactly those that are trained on.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

import jax
import numpy as np

from grpo_jax.engines.local.next_token import Sampling

Finished = Callable[[int, int, np.ndarray, int], None]

# How a completion finished: by an end token, the length limit, a stop string.
ENDED, TRUNCATED, STOPPED = 0, 1, 2


class Requests(NamedTuple):
  """What to sample.

  Attributes:
    prompts: P prompts, each a list of ids.
    index: For each of the P prompts its global counter, which says where in the
      stream of prompts it stands.
    group: Completions per prompt, `G`.
    rollout: Number of the rollout. Like `index`, it decides the random numbers.
    sampling: How tokens are drawn.
    purpose: What the completions are for. Requests of another purpose get
      independent random numbers.
    finished: Called with each completion that has ended while others go on:
      the number of its prompt, its own number in the group, its ids i32[n] and
      its `finish`; or None. An engine may call it as often as it likes, in any
      order, but once for each completion, and with none that another process
      holds. It must return soon: no device works meanwhile.
  """

  prompts: Sequence[Sequence[int]]
  index: Sequence[int]
  group: int
  rollout: int
  sampling: Sampling
  purpose: str = 'sample'
  finished: Finished | None = None


class Completions(NamedTuple):
  """What was sampled, as host arrays; zero past each completion's length.

  Attributes:
    tokens: i32[P,G,T], the ids; the last may be an end token.
    length: i32[P,G], tokens of each completion, its end token included.
    logp: f32[P,G,T], log-probability of each token under the policy, nats.
    log_kept: f32[P,G,T], log of the probability mass that the filters of
      `Sampling` left. A token was drawn with log-probability `logp - log_kept`.
    version: i32[P,G,T], the policy version that drew each token.
    finish: i32[P,G], ENDED, TRUNCATED or STOPPED.
    entropy: f32[P,G,T], of the policy at each token, nats; None if the engine
      does not know it.
    routing: i32[P,G,T], a code of the experts that the pass before each token
      chose, see `models.routing`; None if the model has no experts or the
      engine does not know them.
    holder: i64[P], the process that knows a prompt's completions, if not all
      processes know all. In the others the arrays [P,G,T] are 0 there, and
      `length` and `finish` do not count.
  """

  tokens: np.ndarray
  length: np.ndarray
  logp: np.ndarray
  log_kept: np.ndarray
  version: np.ndarray
  finish: np.ndarray
  entropy: np.ndarray | None = None
  routing: np.ndarray | None = None
  holder: np.ndarray | None = None

  @property
  def known(self) -> Sequence[int]:
    """The prompts whose completions this process knows, ascending."""
    if self.holder is None:
      return range(len(self.length))
    return np.flatnonzero(self.holder == jax.process_index()).tolist()


class Engine(Protocol):
  """Anything that samples: `LocalEngine`, or an adapter to another engine."""

  def load(self, params: Any, version: int) -> None:
    """Takes new parameters.

    Args:
      params: The learner's parameters.
      version: How many rollouts the policy has learned from.
    """
    ...

  def unload(self) -> None:
    """Frees memory until the next `load`; nothing is sampled before it."""
    ...

  def generate(self, requests: Requests) -> Completions:
    """Samples completions with the parameters that were loaded last.

    Args:
      requests: See `Requests`.

    Returns:
      `group` completions of each prompt, in the order of the prompts.
    """
    ...
