"""Parts of a rollout, or of an evaluation: drawn and judged, here or elsewhere.

The prompts of a rollout fall into `DrawSpec.parts` equal parts, each of which
is drawn by itself. What is drawn depends on how many rows are drawn together,
so it depends on the number of parts, and not on who draws them, nor on when.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import time
from typing import Any
from typing import NamedTuple

from grpo_jax import engines
from grpo_jax.episodes import types
from grpo_jax.episodes.engine_use import EngineUse
from grpo_jax.episodes.types import Rollout
from grpo_jax.learner import speed
from grpo_jax.run import collecting
from grpo_jax.run.build import build

Records = Sequence[Mapping[str, Any]]


class Collected(NamedTuple):
  """What was drawn of some records.

  Attributes:
    rollout: Judged.
    waited_secs: How long nothing was drawn for the judges.
    judging_secs: From the first call of a judge to the last answer.
    use: What `EngineUse.sums` returned.
  """

  rollout: Rollout
  waited_secs: float
  judging_secs: float
  use: Mapping[str, float]


def in_parts(records: Records, number: int) -> list[Records]:
  """Records in so many parts, or fewer, as equal as they can be.

  >>> in_parts([1, 2, 3, 4, 5], 2)
  [[1, 2, 3], [4, 5]]
  """
  number = min(number, len(records))
  size, more = divmod(len(records), number)
  parts, begin = [], 0
  for part in range(number):
    end = begin + size + (part < more)
    parts.append(records[begin:end])
    begin = end
  return parts


def joined(parts: Sequence[Collected], at_once: bool) -> Collected:
  """What was drawn in parts, one after another or at the same time."""
  if len(parts) == 1:
    return parts[0]
  use, sums = EngineUse(), max if at_once else sum
  for part in parts:
    use.add(part.use)
  return Collected(
    types.concatenate([part.rollout for part in parts]),
    sums(part.waited_secs for part in parts),
    sums(part.judging_secs for part in parts),
    use.sums(),
  )


def collect(
  run: build.Drawing, records: Records, step: int, purpose: str
) -> Collected:
  """Draws all parts of some records in this process, one after another."""
  parts = in_parts(records, run.draw.parts)
  found = [collect_part(run, part, step, purpose) for part in parts]
  return joined(found, at_once=False)


def collect_part(
  run: build.Drawing, records: Records, step: int, purpose: str
) -> Collected:
  """Completions or episodes of some records by the engine of a run, judged.

  Args:
    run: Its engine has the policy.
    records: `P` records with `'prompt'` and `'index'`.
    step: The number of the rollout.
    purpose: 'sample', or 'evaluate' for one greedy answer to each.
  """
  waited, secs, use = 0.0, 0.0, EngineUse()

  def judging(judge, episodes):
    nonlocal waited, secs
    judged, took = speed.timed(run.judging, judge, episodes)
    now = time.monotonic()
    # Workers may have begun while others were still being sampled.
    waited, secs = waited + took, secs + now - min(judge.began, now - took)
    return judged

  sampling, group = asked(run, purpose)
  rollout = collecting.collect(
    run,
    records,
    run.rewards,
    sampling,
    run.draw.max_tokens,
    group,
    step,
    purpose,
    judging,
    run.workers,
    run.player,
    run.check,
    run.hosts,
    use,
  )
  return Collected(rollout, waited, secs, use.sums())


def asked(run: build.Sampler, purpose: str) -> tuple[engines.Sampling, int]:
  """How tokens are drawn, and how many completions of each record."""
  if purpose == 'evaluate':
    return dataclasses.replace(run.sampling, temperature=0.0), 1
  return run.sampling, run.draw.group
