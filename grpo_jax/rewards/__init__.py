"""Rewards: plain Python on strings and token ids. No jax.

A reward is a function

    def my_reward(prompt: str, completion: str, example: dict) -> float | None

It may be `async`, and it may take lists if it is marked by `@batched`. None
means 'not judged': training then ignores the completion. A function that a
config names runs in worker processes with limits, unless it is marked by
`@bounded`. `prompt` is the text
of the prompt; if the prompt is a list of messages, it is the last one by a
user, and `example['prompt']` has them all. `completion` is what was sampled,
without `config.data.completion_prefix`. `example` is the record of the data
source, with three more fields:

- 'index': int, the global prompt counter (a field of this name in the source
  is called 'record_index' here);
- 'completion_ids': list[int], the sampled tokens, end token included;
- 'truncated': bool, whether the completion was cut before an end token.

The functions that come with the package, called verifiers, are in the table of
rewards/README.md; they take keyword arguments besides these three. `http_judge`
asks another language model.

In the place of a number a function may return an `Outcome`, which says why it
has failed: a server that gave no answer, say.

All reward functions get the same `example`, so they must not change it. There
is no base class and no registry: a config names a function in a file of your
own as 'my_lab.rewards:my_reward'.
"""

from grpo_jax.rewards._base import REWARD_MODEL
from grpo_jax.rewards._base import Outcome
from grpo_jax.rewards._base import RewardError
from grpo_jax.rewards._base import WeightedReward
from grpo_jax.rewards._base import batched
from grpo_jax.rewards._base import bounded
from grpo_jax.rewards._base import check_arguments
from grpo_jax.rewards._base import checked
from grpo_jax.rewards._base import confined
from grpo_jax.rewards._base import find
from grpo_jax.rewards._base import imports
from grpo_jax.rewards._base import is_bounded
from grpo_jax.rewards._base import resolve
from grpo_jax.rewards._environment import environment
from grpo_jax.rewards._score import Scores
from grpo_jax.rewards._score import Scoring
from grpo_jax.rewards._score import score
from grpo_jax.rewards.model_judge import HttpJudge
from grpo_jax.rewards.model_judge import http_judge
from grpo_jax.rewards.verifiers import boxed_text
from grpo_jax.rewards.verifiers import completion_length
from grpo_jax.rewards.verifiers import exact_match
from grpo_jax.rewards.verifiers import format_tags
from grpo_jax.rewards.verifiers import gsm8k
from grpo_jax.rewards.verifiers import json_schema
from grpo_jax.rewards.verifiers import last_number
from grpo_jax.rewards.verifiers import math_equivalence
from grpo_jax.rewards.verifiers import multiple_choice
from grpo_jax.rewards.verifiers import number
from grpo_jax.rewards.verifiers import reasoning_gym
from grpo_jax.rewards.verifiers import regular_expression
from grpo_jax.rewards.verifiers._shared import answers
from grpo_jax.rewards.verifiers._shared import shown_answer
from grpo_jax.rewards.workers import Workers

__all__ = (
  'HttpJudge',
  'Outcome',
  'REWARD_MODEL',
  'RewardError',
  'Scores',
  'Scoring',
  'WeightedReward',
  'Workers',
  'answers',
  'batched',
  'bounded',
  'boxed_text',
  'check_arguments',
  'checked',
  'completion_length',
  'confined',
  'environment',
  'exact_match',
  'find',
  'format_tags',
  'gsm8k',
  'is_bounded',
  'http_judge',
  'imports',
  'json_schema',
  'last_number',
  'math_equivalence',
  'multiple_choice',
  'number',
  'reasoning_gym',
  'regular_expression',
  'resolve',
  'score',
  'shown_answer',
)
