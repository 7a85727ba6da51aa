"""Makes a rollout: samples completions of prompts, and has them judged.

All of this runs on the host. The ids that were sampled are the ids that are
trained on. Text is made of them for the rewards, and is never encoded again.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
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
from grpo_jax.episodes.types import Rollout
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


Judging = Callable[
  [Judge, engines.Completions], tuple[engines.Completions, rewards_lib.Scores]
]
"""`(judge, completions)` -> the completions, of which every process then knows
`length`, `finish`, `version`, `chosen` and `previous`, and the scores of all,
from a call of `judge`."""


def judged_alone(
  judge: Judge,
  completions: engines.Completions,
  check: Callable[[], None] = lambda: None,
) -> tuple[engines.Completions, rewards_lib.Scores]:
  """The `Judging` of a single process: all at once; see `Judge` for `check`."""
  return completions, judge(range(len(completions.length)), check)


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
    check: See `engines.generate`.

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
    completions = engines.generate(engine, asked, early, check)
    judged.decode(completions)
    completions, scores = judging(judged, completions)
  return make_rollout(
    completions,
    scores,
    completion_buckets,
    prompts=prompts,
    prompt_texts=[prompt_text(record['prompt']) for record in records],
    texts=judged.texts,
    index=np.array(index, np.int64),
    reward_names=tuple(reward.name for reward in rewards),
    answers=[_answer_text(record.get('answer')) for record in records],
  )


def _answer_text(answer: Any) -> str | None:
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
    completion_buckets: See `collect`.
    routed: Whether the model has experts.

  Returns:
    A `Rollout` with the fields and dtypes of one from `collect`.
  """
  shape = prompts, group, max_tokens
  number = prompts * group
  nothing = np.zeros(shape, np.float32)
  whole = np.zeros(shape, np.int32)
  length = np.full(shape[:2], max_tokens, np.int32)
  drawn = engines.Completions(
    whole,
    length,
    nothing,
    nothing,
    whole,
    whole[..., 0],
    nothing,
    whole if routed else None,
  )
  reward = np.zeros((number,), np.float32)
  scores = rewards_lib.Scores(
    reward, np.zeros((number, rewards), np.float32), np.ones((number,), bool)
  )
  return make_rollout(
    drawn,
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
    self._records, self._group = records, group
    self._tokenizer, self._scoring = tokenizer, scoring
    self._rows: dict[tuple[int, int], int] = {}

  def add(self, p: int, g: int, ids: np.ndarray, finish: int) -> None:
    """Has completion g of prompt p judged; see `engines.generate`."""
    self.texts[p][g] = self._tokenizer.decode(ids)
    self._judge(p, g, ids, finish)

  def decode(self, completions: engines.Completions) -> None:
    """Takes all completions, and makes text of those not added before."""
    self._completions = completions
    for p, g in itertools.product(completions.known, range(self._group)):
      if (p, g) not in self._rows:
        ids = completions.tokens[p, g, : completions.length[p, g]]
        self.texts[p][g] = self._tokenizer.decode(ids)

  def __call__(
    self, chosen: Sequence[int], check: Callable[[], None] = lambda: None
  ) -> rewards_lib.Scores:
    """The scores of some prompts' completions, in the order p * G + g."""
    completions = self._completions
    places = list(itertools.product(chosen, range(self._group)))
    for p, g in places:
      if (p, g) not in self._rows:
        ids = completions.tokens[p, g, : completions.length[p, g]]
        self._judge(p, g, ids, completions.finish[p, g])
    return self._scoring.scores([self._rows[place] for place in places], check)

  def _judge(self, p: int, g: int, ids: np.ndarray, finish: int) -> None:
    self.began = min(self.began, time.monotonic())
    example = {
      **_copied(self._records[p]),
      'completion_ids': ids.tolist(),
      'truncated': bool(finish == engines.TRUNCATED),
    }
    self._rows[p, g] = self._scoring.add(
      prompt_text(self._records[p]['prompt']), self.texts[p][g], example
    )


def _copied(value: Any) -> Any:
  """A record of its own for a judge, which may sort or empty what it holds.

  No `copy.deepcopy`: what a record holds beside lists, dicts and sets may be
  large, or something that cannot be copied.
  """
  if isinstance(value, Mapping):
    return {key: _copied(one) for key, one in value.items()}
  if isinstance(value, list):
    return [_copied(one) for one in value]
  return set(value) if isinstance(value, set) else value


def make_rollout(
  completions: engines.Completions,
  scores: rewards_lib.Scores,
  completion_buckets: Sequence[int],
  **described: Any,
) -> Rollout:
  """Completions and their scores as a rollout, as wide as the longest needs.

  Args:
    completions: Of P prompts, G each.
    scores: Of all of them, in the order p * G + g.
    completion_buckets: See `collect`.
    **described: Further fields of the `Rollout`: prompts, texts, names.
  """
  shape, longest = completions.length.shape, int(completions.length.max())
  # A bucket and not the longest length itself, because each width is compiled.
  width = layout.bucket(longest, completion_buckets, 'completion')

  def widened(x: np.ndarray) -> np.ndarray:
    x = x[..., :width]
    return np.pad(x, [(0, 0)] * 2 + [(0, width - x.shape[-1])])

  def of_rewards(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else x.reshape(*shape, -1)

  mask, previous = completions.chosen, completions.previous
  if mask is None:
    mask = np.arange(width) < completions.length[:, :, None]
  extras = {
    'log_kept': completions.log_kept,
    'entropy_sampler': completions.entropy,
    'routing_sampler': completions.routing,
    'turn': completions.turn,
  }
  mask = widened(mask)
  batch = losses.Batch(
    tokens=widened(completions.tokens),
    mask=mask,
    keep=mask,
    valid=scores.judged.reshape(shape),
    reward=scores.reward.reshape(shape),
    reward_parts=scores.parts.reshape(*shape, -1),
    truncated=completions.finish == engines.TRUNCATED,
    version=widened(completions.version),
    # Of the distribution that tokens were drawn from: the policy after filters.
    logp_sampler=widened(completions.logp - completions.log_kept),
    extras={name: widened(x) for name, x in extras.items() if x is not None},
  )
  return Rollout(
    batch,
    completions.length,
    failures=of_rewards(scores.failures),
    judge_secs=of_rewards(scores.secs),
    holder=completions.holder,
    previous=None if previous is None else widened(previous),
    **described,
  )


def shown_answer(record: Mapping[str, Any]) -> str:
  """The text that a demonstration shows as the answer of a record.

  >>> shown_answer({'answer': [72.0, 'seventy-two']})
  '72'

  Args:
    record: With 'answer'. Of several that are right, the first is shown.

  Raises:
    ValueError: The answer is no text, no number and no list of these.
  """
  return rewards_lib.answers('A demonstration', record)[0].text


def demonstrations(
  records: Sequence[Mapping[str, Any]],
  tokenizer: Tokenizer,
  completion_buckets: Sequence[int],
) -> Rollout:
  """Given answers as a rollout, for the supervised warm-up.

  Each answer is the only completion of its group. The method `supervised` makes
  every token of it more likely.

  Args:
    records: Records with `'prompt'` and `'answer'`; see `shown_answer`.
    tokenizer: Encodes both, prompts by its `prompt_format`. Its `answer_end_id`
      is added to the answer.
    completion_buckets: Allowed completion widths, tokens.

  Returns:
    A `Rollout`. Its rewards are 0, and it has no log-probabilities of a
    sampler.

  Raises:
    ValueError: The tokenizer has no end token, or see `shown_answer`.
  """
  end = tokenizer.answer_end_id()
  texts = [shown_answer(record) for record in records]
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
  asked = [record['prompt'] for record in records]
  return Rollout(
    batch,
    length,
    [tokenizer.encode_prompt(prompt) for prompt in asked],
    [prompt_text(prompt) for prompt in asked],
    [[text] for text in texts],
    np.array([record['index'] for record in records], np.int64),
  )


def shuffle_rewards(rollout: Rollout, rng: np.random.Generator) -> Rollout:
  """Permutes the rewards of the judged completions across all prompts.

  Nothing can be learned from such a rollout. A run that improves nevertheless
  improves for another reason than its rewards. Only `batch.reward`, which is
  trained on, is permuted; `reward_parts`, which are reported, stay.
  """
  reward, valid = rollout.batch.reward.copy(), rollout.batch.valid
  reward[valid] = rng.permutation(reward[valid])
  return rollout._replace(batch=rollout.batch._replace(reward=reward))
