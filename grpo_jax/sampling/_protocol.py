"""The engine protocol: ids in, ids out, as host arrays."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Protocol

import numpy as np

from grpo_jax.sampling._choose import Sampling

ENDED, TRUNCATED, STOPPED = 0, 1, 2  # by end token, length limit, stop string


class Requests(NamedTuple):
  """What to sample. Ids, never text: nothing is encoded twice."""

  prompts: Sequence[Sequence[int]]  # P lists of ids
  index: Sequence[int]  # P global prompt counters
  group: int  # completions per prompt
  rollout: int  # which rollout this is, for the noise
  sampling: Sampling
  purpose: str = 'sample'  # noise of another purpose is independent


class Completions(NamedTuple):
  """What was sampled, as host arrays; zero past each completion's length."""

  tokens: np.ndarray  # i32[P,G,T], the end token included
  length: np.ndarray  # i32[P,G]
  logp: np.ndarray  # f32[P,G,T], under the policy, nats
  log_kept: np.ndarray  # f32[P,G,T], log of the mass the filters left
  version: np.ndarray  # i32[P,G,T], the policy version that drew each token
  finish: np.ndarray  # i32[P,G], ENDED, TRUNCATED or STOPPED
  entropy: np.ndarray | None = None  # f32[P,G,T], nats; None: not known


class Engine(Protocol):
  """Anything that samples: ours, or an adapter to another."""

  def load(self, params: Any, version: int) -> None:
    """Takes the learner's parameters, whose version this is."""
    ...

  def generate(self, requests: Requests) -> Completions:
    """Samples; see `Requests` and `Completions`."""
    ...
