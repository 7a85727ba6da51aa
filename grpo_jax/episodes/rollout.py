"""Makes a rollout: samples completions of prompts, and has them judged.

All of this runs on the host. The ids that were sampled are the ids that are
trained on. Text is made of them for the rewards, and is never encoded again.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
import time
from typing import Any
from typing import Protocol

import jax
import numpy as np

from grpo_jax import engines
from grpo_jax import losses
from grpo_jax import rewards as rewards_lib
from grpo_jax.data import Tokenizer
from grpo_jax.data import prompt_text
from grpo_jax.episodes.types import Account
from grpo_jax.episodes.types import Episode
from grpo_jax.episodes.types import Rollout
from grpo_jax.episodes.types import episode_of
from grpo_jax.episodes.types import holders
from grpo_jax.models import layout


class Judge(Protocol):
  """Judges the completions of some prompts, of which it gets the numbers.

  Attributes:
    began: When the first completion was given to a judge, as `time.monotonic`
      counts; infinity before that.
  """

  began: float

  def __call__(
    self, chosen: Sequence[int], check: Callable[[], None] = lambda: None
  ) -> rewards_lib.Scores:
    """The scores of these prompts' completions.

    `check` is called between calls of the rewards; what it raises ends them.
    """
    ...


Episodes = Sequence[Sequence[Episode]]
"""[P][G]: G episodes of each of P prompts."""
Judging = Callable[[Judge, Episodes], tuple[Episodes, rewards_lib.Scores]]
"""`(judge, episodes)` -> the episodes, of which every process then knows the
`types.outline`, and the scores of all, from a call of `judge`."""


def judged_alone(
  judge: Judge, episodes: Episodes, check: Callable[[], None] = lambda: None
) -> tuple[Episodes, rewards_lib.Scores]:
  """The `Judging` of a single process: all at once; see `Judge` for `check`."""
  return episodes, judge(range(len(episodes)), check)


def collect(
  records: Sequence[Mapping[str, Any]],
  engine: engines.Engine,
  tokenizer: Tokenizer,
  rewards: Sequence[rewards_lib.WeightedReward],
  sampling: engines.Sampling,
  limit: int,
  group: int,
  seed: int,
  rollout: int,
  completion_buckets: Sequence[int],
  purpose: str = 'sample',
  judging: Judging = judged_alone,
  workers: rewards_lib.Workers | None = None,
  check: Callable[[], None] = lambda: None,
) -> Rollout:
  """Samples completions of some prompts, and has the rewards judge them.

  Args:
    records: `P` records with `'prompt'` and `'index'`.
    engine: Draws the completions.
    tokenizer: Turns prompts into ids, by its `prompt_format`, and completions
      into text.
    rewards: Reward functions with weights.
    sampling: How to draw.
    limit: The most tokens of a completion.
    group: Completions per prompt.
    seed: Of the run.
    rollout: Number of this rollout.
    completion_buckets: Allowed completion widths, tokens. The batch gets the
      smallest that holds its longest completion.
    purpose: See `engines.requests`.
    judging: How the prompts are judged: by default all at once. Several
      processes each judge some of them.
    workers: For the rewards that are called in workers.
    check: Called between two turns of the engine; what it raises ends it all.

  Returns:
    A `Rollout`.
  """
  prompts = [tokenizer.encode_prompt(record['prompt']) for record in records]
  index = [record['index'] for record in records]
  with rewards_lib.Scoring(rewards, workers) as scoring:
    judged = _Judged(records, group, tokenizer, scoring)
    early = judged.add if _is_judged_early(engine, rewards) else None
    asked = engines.requests(
      prompts, index, group, sampling, limit, seed, rollout, purpose
    )
    sampled = engines.generate(engine, asked, early, check)
    judged.decode(sampled)
    drawn = [[episode_of(one) for one in group] for group in sampled]
    episodes, scores = judging(judged, drawn)
  return make_rollout(
    episodes,
    scores,
    completion_buckets,
    prompts=prompts,
    prompt_texts=[prompt_text(record['prompt']) for record in records],
    texts=judged.texts,
    index=np.array(index, np.int64),
    reward_names=tuple(reward.name for reward in rewards),
    answers=[answer_text(record.get('answer')) for record in records],
  )


def answer_text(answer: Any) -> str | None:
  """A reference answer for people to read; what is no text, as JSON."""
  if answer is None or isinstance(answer, str):
    return answer
  return json.dumps(answer, ensure_ascii=False, default=str)


def blank(
  prompts: int,
  group: int,
  prompt_tokens: int,
  max_tokens: int,
  rewards: int,
  completion_buckets: Sequence[int],
  routed: bool = False,
  turns: bool = False,
) -> Rollout:
  """A rollout of zeros whose completions all have the length `max_tokens`.

  Programs are compiled for it, and memory is measured with it, before anything
  has been sampled.

  Args:
    prompts: `P`.
    group: `G`.
    prompt_tokens: Length of every prompt.
    max_tokens: Length of every completion.
    rewards: Number of reward functions.
    completion_buckets: Allowed completion widths, tokens.
    routed: Whether the model has experts.
    turns: Whether completions are episodes, whose turns have numbers.

  Returns:
    A `Rollout` with the fields and dtypes of one from `collect`.
  """
  number = prompts * group
  nothing = np.zeros((max_tokens,), np.float32)
  ids = np.zeros((max_tokens,), np.int32)
  episode = Episode(
    ids,
    chosen=np.ones((max_tokens,), bool),
    logp=nothing,
    log_kept=nothing,
    version=ids,
    finish=engines.ENDED,
    entropy=nothing,
    routing=ids if routed else None,
    turn=ids if turns else None,
  )
  reward = np.zeros((number,), np.float32)
  scores = rewards_lib.Scores(
    reward, np.zeros((number, rewards), np.float32), np.ones((number,), bool)
  )
  return make_rollout(
    [[episode] * group] * prompts,
    scores,
    completion_buckets,
    prompts=[[0] * prompt_tokens] * prompts,
    prompt_texts=[''] * prompts,
    texts=[[''] * group] * prompts,
    index=np.arange(prompts),
  )


def _is_judged_early(
  engine: engines.Engine, rewards: Sequence[rewards_lib.WeightedReward]
) -> bool:
  """Whether completions are judged while the engine draws others.

  Not if no worker judges, nor if several processes all draw all completions:
  then each judges some of them, of which `Judging` decides.
  """
  alone = jax.process_count() == 1 or engine.capabilities.shares
  return alone and any(reward.where == 'workers' for reward in rewards)


class _Judged:
  """Completions of P prompts as text, and their scores.

  A `Judge`, once all are there.

  Attributes:
    texts: [P][G]; '' where this process does not know the completion.
    began: See `Judge`.
  """

  def __init__(
    self,
    records: Sequence[Mapping[str, Any]],
    group: int,
    tokenizer: Tokenizer,
    scoring: rewards_lib.Scoring,
  ):
    self.texts = [[''] * group for _ in records]
    self.began = math.inf
    self._records = records
    self._tokenizer, self._scoring = tokenizer, scoring
    self._rows: dict[tuple[int, int], int] = {}

  def add(self, p: int, one: engines.Sampled) -> None:
    """Has a completion of prompt p judged; see `engines.generate`."""
    self.texts[p][one.number] = self._tokenizer.decode(one.ids)
    self._judge(p, one)

  def decode(self, sampled: Sequence[Sequence[engines.Sampled]]) -> None:
    """Takes all completions, and makes text of those not added before."""
    self._sampled = sampled
    for p, group in enumerate(sampled):
      for g, one in enumerate(group):
        if one.is_here and (p, g) not in self._rows:
          self.texts[p][g] = self._tokenizer.decode(one.ids)

  def __call__(
    self, chosen: Sequence[int], check: Callable[[], None] = lambda: None
  ) -> rewards_lib.Scores:
    """The scores of some prompts' completions, in the order p * G + g."""
    places = [(p, g) for p in chosen for g in range(len(self.texts[p]))]
    for p, g in places:
      if (p, g) not in self._rows:
        self._judge(p, self._sampled[p][g])
    rows = [self._rows[place] for place in places]
    return self._scoring.scores(rows, check)

  def _judge(self, p: int, one: engines.Sampled) -> None:
    self.began = min(self.began, time.monotonic())
    example = {
      **copied(self._records[p]),
      'completion_ids': one.ids.tolist(),
      'truncated': one.finish == engines.TRUNCATED,
    }
    self._rows[p, one.number] = self._scoring.add(
      prompt_text(self._records[p]['prompt']),
      self.texts[p][one.number],
      example,
    )


def copied(value: Any) -> Any:
  """A record of its own for a judge, which may sort or empty what it holds.

  No `copy.deepcopy`: what a record holds beside lists, dicts and sets may be
  large, or something that cannot be copied.
  """
  if isinstance(value, Mapping):
    return {key: copied(one) for key, one in value.items()}
  if isinstance(value, list):
    return [copied(one) for one in value]
  return set(value) if isinstance(value, set) else value


def make_rollout(
  episodes: Episodes,
  scores: rewards_lib.Scores,
  completion_buckets: Sequence[int],
  **described: Any,
) -> Rollout:
  """Episodes and their scores as a rollout, as wide as the longest needs.

  Args:
    episodes: Of P prompts, G each. An engine that knows the entropy or the
      routing knows it in all of them.
    scores: Of all of them, in the order p * G + g.
    completion_buckets: Allowed completion widths, tokens.
    **described: Further fields of the `Rollout`: prompts, texts, names.
  """
  every = [one for group in episodes for one in group]
  shape = len(episodes), len(episodes[0])
  length = np.array([len(one.ids) for one in every], np.int32).reshape(shape)
  # A bucket and not the longest length itself, because each width is compiled.
  width = layout.bucket(int(length.max()), completion_buckets, 'completion')
  inside = np.arange(width) < length[:, :, None]

  def array(name: str, dtype: Any, lacking: Any = np.zeros) -> Any:
    """An array of all episodes, [P,G,T]; None if no episode has it."""
    values = [getattr(one, name) for one in every]
    if all(x is None for x in values):
      return None
    joined = np.zeros(inside.shape, dtype)
    joined[inside] = np.concatenate(
      [
        lacking(len(one.ids)) if x is None else x
        for one, x in zip(every, values, strict=True)
      ]
    )
    return joined

  def by_reward(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else x.reshape(*shape, -1)

  mask, log_kept = array('chosen', bool), array('log_kept', np.float32)
  extras = {
    'log_kept': log_kept,
    'entropy_sampler': array('entropy', np.float32),
    'routing_sampler': array('routing', np.int32),
    'turn': array('turn', np.int32),
  }
  finish = np.array([one.finish for one in every], np.int32).reshape(shape)
  batch = losses.Batch(
    tokens=array('ids', np.int32),
    mask=mask,
    keep=mask,
    valid=scores.judged.reshape(shape),
    reward=scores.reward.reshape(shape),
    reward_parts=scores.parts.reshape(*shape, -1),
    truncated=finish == engines.TRUNCATED,
    version=array('version', np.int32),
    # Of the distribution that tokens were drawn from: the policy after filters.
    logp_sampler=array('logp', np.float32) - log_kept,
    extras={name: x for name, x in extras.items() if x is not None},
  )
  return Rollout(
    batch,
    length,
    failures=by_reward(scores.failures),
    judge_secs=by_reward(scores.secs),
    holder=holders(episodes),
    previous=array('previous', np.int32, lambda n: np.arange(-1, n - 1)),
    accounts=_accounts(episodes),
    **described,
  )


def _accounts(episodes: Episodes) -> Sequence[Sequence[Account]]:
  """[P][G], what is told of episodes; () of those that nobody has played."""
  told = [
    [one.account for one in group if one.account is not None]
    for group in episodes
  ]
  return told if told[0] else ()


def demonstrations(
  records: Sequence[Mapping[str, Any]],
  tokenizer: Tokenizer,
  completion_buckets: Sequence[int],
) -> Rollout:
  """Given answers as a rollout, for the supervised warm-up.

  Each answer is the only completion of its group. The method `supervised` makes
  every token of it more likely.

  Args:
    records: Records with `'prompt'` and `'answer'`; see `rewards.shown_answer`.
    tokenizer: Encodes both, prompts by its `prompt_format`. Its `answer_end_id`
      is added to the answer.
    completion_buckets: Allowed completion widths, tokens.

  Returns:
    A `Rollout`. Its rewards are 0, and it has no log-probabilities of a
    sampler.

  Raises:
    ValueError: The tokenizer has no end token, or see `rewards.shown_answer`.
  """
  end = tokenizer.answer_end_id()
  texts = [rewards_lib.shown_answer(record) for record in records]
  answers = [[*tokenizer.encode(text), end] for text in texts]
  length = np.array([[len(answer)] for answer in answers], np.int32)
  width = layout.bucket(int(length.max()), completion_buckets, 'completion')
  tokens = np.zeros((len(records), 1, width), np.int32)
  for row, answer in enumerate(answers):
    tokens[row, 0, : len(answer)] = answer
  mask = np.arange(width) < length[:, :, None]
  # The method `supervised` reads no rewards.
  nothing = np.zeros(length.shape, np.float32)
  batch = losses.Batch(
    tokens=tokens,
    mask=mask,
    keep=mask,
    valid=np.ones(length.shape, bool),
    reward=nothing,
    reward_parts=nothing[..., None],
    truncated=np.zeros(length.shape, bool),
    version=np.zeros(tokens.shape, np.int32),  # no policy drew them
  )
  prompts = [record['prompt'] for record in records]
  return Rollout(
    batch,
    length,
    [tokenizer.encode_prompt(prompt) for prompt in prompts],
    [prompt_text(prompt) for prompt in prompts],
    [[text] for text in texts],
    np.array([record['index'] for record in records], np.int64),
  )


def shuffle_rewards(rollout: Rollout, rng: np.random.Generator) -> Rollout:
  """Permutes the rewards of the judged completions across all prompts.

  Nothing can be learned from such a rollout. A run that improves nevertheless
  improves for another reason than its rewards. Only what is trained on is
  permuted, `batch.reward` and with each its `turn_reward`; `reward_parts`,
  which are reported, stay.
  """
  reward, valid = rollout.batch.reward.copy(), rollout.batch.valid
  order = rng.permutation(np.count_nonzero(valid))
  reward[valid] = reward[valid][order]
  extras = {**rollout.batch.extras}
  if 'turn_reward' in extras:
    of_turns = extras['turn_reward'].copy()
    of_turns[valid] = of_turns[valid][order]
    # What an episode with more turns has earned later goes to the last turn.
    turns = np.array([[one.turns for one in row] for row in rollout.accounts])
    place = np.arange(of_turns.shape[-1])
    extras['turn_reward'] = np.where(
      place < np.maximum(turns, 1)[..., None], of_turns, np.float32(0)
    )
  batch = rollout.batch._replace(reward=reward, extras=extras)
  return rollout._replace(batch=batch)
