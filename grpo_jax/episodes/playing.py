"""Rollouts of episodes that were played with environments."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
import time
from typing import Any

import numpy as np

from grpo_jax import engines
from grpo_jax import rewards as rewards_lib
from grpo_jax.data import Tokenizer
from grpo_jax.data import prompt_text
from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.episodes.play import Played
from grpo_jax.episodes.types import Rollout

EPISODE = 'episode'
"""The field of an example in which rewards find what an environment told."""

Play = Callable[
  [Sequence[Mapping[str, Any]], Sequence[int]],
  tuple[list[list[int]], list[list[Played]]],
]
"""`(records, index)`: plays a group for each record; see `play.play`."""


def collect(
  records: Sequence[Mapping[str, Any]],
  play: Play,
  tokenizer: Tokenizer,
  rewards: Sequence[rewards_lib.WeightedReward],
  completion_buckets: Sequence[int],
  judging: rollout_lib.Judging = rollout_lib.judged_alone,
  workers: rewards_lib.Workers | None = None,
) -> Rollout:
  """Plays episodes of some records, and has the rewards judge them.

  Args:
    records: `P` records with `'prompt'` and `'index'`.
    play: Plays them.
    tokenizer: Turns ids into text.
    rewards: Reward functions with weights. Their completion is what the policy
      has said last; `example['episode']` tells the rest.
    completion_buckets: Allowed widths behind the first prompt, tokens.
    judging: See `rollout.collect`.
    workers: Likewise.

  Returns:
    A `Rollout`. An episode that failed is not valid.
  """
  index = [record['index'] for record in records]
  prompts, played = play(records, index)
  episodes = [[one.episode for one in group] for group in played]
  # Before judging, after which those of other processes have lengths too.
  texts = [[tokenizer.decode(one.ids) for one in group] for group in episodes]
  with rewards_lib.Scoring(rewards, workers) as scoring:
    judge = _Judge(records, played, scoring, rewards)
    episodes, scores = judging(judge, episodes)
  return rollout_lib.make_rollout(
    episodes,
    scores,
    completion_buckets,
    prompts=prompts,
    prompt_texts=[prompt_text(record['prompt']) for record in records],
    texts=texts,
    index=np.array(index, np.int64),
    reward_names=tuple(reward.name for reward in rewards),
    answers=[rollout_lib.answer_text(one.get('answer')) for one in records],
  )


class _Judge:
  """Has the episodes of P groups judged; see `rollout.Judge`."""

  def __init__(
    self,
    records: Sequence[Mapping[str, Any]],
    played: Sequence[Sequence[Played]],
    scoring: rewards_lib.Scoring,
    rewards: Sequence[rewards_lib.WeightedReward],
  ):
    self.began = math.inf
    self._records, self._played, self._scoring = records, played, scoring
    # A run may say what an episode is worth that has failed.
    self._is_worth_something = any(
      reward.failed is not None and reward.imported_as == 'environment'
      for reward in rewards
    )

  def __call__(
    self, chosen: Sequence[int], check: Callable[[], None] = lambda: None
  ) -> rewards_lib.Scores:
    """The scores of some groups, in the order p * G + g."""
    self.began = min(self.began, time.monotonic())
    every = [(p, one) for p in chosen for one in self._played[p]]
    rows = [
      self._scoring.add(
        prompt_text(self._records[p]['prompt']),
        one.account.last_text,
        rollout_lib.copied(self._records[p]) | _more(one),
      )
      for p, one in every
    ]
    scores = self._scoring.scores(rows, check)
    failed = np.array([bool(one.failure) for _, one in every])
    if self._is_worth_something:
      return scores
    return scores._replace(
      judged=scores.judged & ~failed,
      reward=np.where(failed, 0, scores.reward).astype(np.float32),
    )


def _more(one: Played) -> dict[str, Any]:
  """What an example has beside its record: of all turns together."""
  episode = one.episode
  return {
    'completion_ids': episode.ids[episode.chosen].tolist(),
    'truncated': episode.finish == engines.TRUNCATED,
    EPISODE: _told(one),
  }


def _told(one: Played) -> dict[str, Any]:
  """What rewards are told of an episode: its account, and more."""
  told = one.account
  found = {
    **told._asdict(),
    'messages': [*told.messages],
    'turns': told.turns,
    'turn_rewards': [*(told.turn_rewards or ())],
    'reward': one.reward,
  }
  del found['last_text']  # which is the completion
  if math.isnan(told.secs):
    del found['secs']
  return found
