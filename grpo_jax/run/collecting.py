"""Completions, or episodes with the environment of a run, judged."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

from grpo_jax import engines
from grpo_jax import rewards as rewards_lib
from grpo_jax.environments import sessions
from grpo_jax.episodes import meeting
from grpo_jax.episodes import playing
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.engine_use import EngineUse
from grpo_jax.episodes.types import Rollout
from grpo_jax.run.build import build
from grpo_jax.run.build import environment as build_environment


def collect(
  run: build.Sampler,
  records: Sequence[Mapping[str, Any]],
  rewards: Sequence[rewards_lib.WeightedReward],
  sampling: engines.Sampling,
  max_tokens: int,
  group: int,
  step: int,
  purpose: str,
  judging: rollout_lib.Judging = rollout_lib.judged_alone,
  workers: rewards_lib.Workers | None = None,
  player: sessions.Player | None = None,
  check: Callable[[], None] = lambda: None,
  hosts: meeting.Hosts = meeting.ALONE,
  use: EngineUse | None = None,
) -> Rollout:
  """A group of completions or episodes of each record.

  Args:
    run: Its engine has the policy.
    records: `P` records with `'prompt'` and `'index'`.
    rewards: Judge what was sampled.
    sampling: How tokens are drawn.
    max_tokens: The longest completion, or turn of an episode.
    group: Completions of each record, `G`.
    step: The number of the rollout.
    purpose: See `engines.requests`.
    judging: See `rollout.collect`.
    workers: Likewise.
    player: Plays episodes, if the run has an environment.
    check: See `rollout.collect`.
    hosts: The processes that play; see `play.play`.
    use: Likewise.
  """
  spec, buckets = run.environment, run.data.completion_buckets
  if spec is None:
    return rollout_lib.collect(
      records,
      run.engine,
      run.tokenizer,
      rewards,
      sampling,
      max_tokens,
      group,
      run.draw.seed,
      step,
      buckets,
      purpose=purpose,
      judging=judging,
      workers=workers,
      check=check,
    )
  assert player is not None  # of the spec
  play = functools.partial(
    build_environment.play,
    spec,
    player,
    run.engine,
    run.tokenizer,
    sampling,
    max_tokens,
    group=group,
    seed=run.draw.seed,
    rollout=step,
    purpose=purpose,
    check=check,
    hosts=hosts,
    use=use,
  )
  return playing.collect(
    records, play, run.tokenizer, rewards, buckets, judging, workers
  )
