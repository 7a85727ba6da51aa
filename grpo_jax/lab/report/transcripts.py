"""Completions of a run, from its Parquet files: some that tell the most."""

from collections.abc import Callable
from collections.abc import Sequence
import math
import pathlib
from typing import NamedTuple

import numpy as np

from grpo_jax.lab.report import words
from grpo_jax.lab.report.types import Completion
from grpo_jax.lab.report.types import Completions
from grpo_jax.lab.report.types import Token
from grpo_jax.rollouts import parquet
from grpo_jax.rollouts import pass_at_k

MOST_TOKENS = 400  # of a completion; what is between head and tail is left out
MOST_CHARACTERS = 3000  # of a text
_CONTEXT = 12  # tokens that are decoded with one, for characters of several
_EFFECTS = 'coefficient', 'log_ratio_after'
_EACH = 3  # pairs to show of each kind

Decode = Callable[[Sequence[int]], str]


class Answer(NamedTuple):
  """A row of a file: one completion."""

  index: int  # of the prompt
  prompt: str
  answer: str | None
  completion: str
  reward: float  # NaN if it was not judged
  first: float  # the first reward function's; NaN likewise
  ids: Sequence[int]
  coefficient: Sequence[float]  # empty if it was not measured
  log_ratio: Sequence[float]


class Outcomes(NamedTuple):
  """What became of problems between two evaluations."""

  steps: tuple[int, int]
  became_right: int
  became_wrong: int
  stayed_right: int
  stayed_wrong: int
  shown: list[Completions]


def read(file: pathlib.Path) -> list[Answer]:
  """The completions of a file; none if it cannot be read.

  Args:
    file: As `rollouts.parquet` writes it.
  """
  try:
    rollout = parquet.read(file)
    effects = _effects(file)
  except (ValueError, OSError):
    return []
  first, counts = pass_at_k.first_rewards(rollout)
  batch, found = rollout.batch, []
  tokens, valid = np.asarray(batch.tokens), np.asarray(batch.valid)
  reward, group = np.asarray(batch.reward), valid.shape[1]
  for p, prompt in enumerate(rollout.prompt_texts):
    for g in range(group):
      found.append(
        Answer(
          int(rollout.index[p]),
          prompt,
          rollout.answers[p] if rollout.answers else None,
          rollout.texts[p][g],
          float(reward[p, g]) if valid[p, g] else math.nan,
          float(first[p, g]) if counts[p, g] else math.nan,
          tokens[p, g, : rollout.length[p, g]].tolist(),
          *(values[p * group + g] for values in effects),
        )
      )
  return found


def _effects(file: pathlib.Path) -> list[Sequence[Sequence[float]]]:
  """`coefficient` and `log_ratio_after` of every row, [] where unknown."""
  from pyarrow import parquet as pq

  with pq.ParquetFile(file) as opened:
    names = [x for x in _EFFECTS if x in opened.schema_arrow.names]
    table = opened.read(names)
    nothing = [()] * opened.metadata.num_rows
  return [
    table[name].to_pylist() if name in names else nothing for name in _EFFECTS
  ]


def of_training(
  file: pathlib.Path, decode: Decode | None, prompts: int, most: int = 4
) -> list[Completions]:
  """Some groups of a rollout, those whose rewards differ most.

  Args:
    file: Of the rollout.
    decode: Turns ids into text; None if the tokenizer cannot be had. Tokens are
      then shown as numbers.
    prompts: How many groups.
    most: Completions of each: the best and the worst.
  """
  groups: dict[int, list[Answer]] = {}
  for one in read(file):
    groups.setdefault(one.index, []).append(one)

  def spread(group):
    rewards = [one.reward for one in group if math.isfinite(one.reward)]
    return float(np.std(rewards)) if rewards else -1.0

  chosen = sorted(groups.values(), key=spread, reverse=True)[:prompts]
  shown = []
  for group in chosen:
    best = sorted(group, key=lambda one: -np.nan_to_num(one.reward, nan=-9e9))
    few = best
    if len(best) > most:
      few = best[: most - most // 2] + best[-(most // 2) :]
    completions = [_completion(one, '', decode) for one in few]
    shown.append(Completions(group[0].prompt, group[0].answer, completions))
  return shown


def between(
  first: pathlib.Path, last: pathlib.Path, right_reward: float
) -> Outcomes | None:
  """What became of the problems that two evaluations share.

  Args:
    first: The file of the earlier one.
    last: Of the later one.
    right_reward: The least first reward of a right answer.

  Returns:
    None if they share none.
  """
  before = {one.index: one for one in read(first)}
  after = {one.index: one for one in read(last)}
  kinds: dict[tuple[bool, bool], list[int]] = {}
  for index in sorted(before.keys() & after.keys()):
    pair = before[index], after[index]
    if not any(math.isnan(one.first) for one in pair):
      was, now = (one.first >= right_reward for one in pair)
      kinds.setdefault((was, now), []).append(index)
  if not kinds:
    return None
  steps = tuple(int(path.stem.rpartition('_')[2]) for path in (first, last))
  shown = []
  for kind in ((False, True), (True, False), (False, False)):
    for index in kinds.get(kind, [])[:_EACH]:
      pair = before[index], after[index]
      labels = [
        f'{_when(step)}: {_verdict(right)}' for step, right in zip(steps, kind)
      ]
      shown.append(
        Completions(
          pair[0].prompt,
          pair[0].answer,
          [_completion(one, label, None) for one, label in zip(pair, labels)],
          beside=True,
        )
      )
  counts = {kind: len(found) for kind, found in kinds.items()}
  return Outcomes(
    (steps[0], steps[1]),
    became_right=counts.get((False, True), 0),
    became_wrong=counts.get((True, False), 0),
    stayed_right=counts.get((True, True), 0),
    stayed_wrong=counts.get((False, False), 0),
    shown=shown,
  )


def _when(step: int) -> str:
  if not step:
    return 'before the first rollout'
  return f'after {words.plural(step, "rollout")}'


def _verdict(right: bool) -> str:
  return 'right' if right else 'wrong'


def _completion(one: Answer, label: str, decode: Decode | None) -> Completion:
  measured = len(one.coefficient) == len(one.log_ratio) == len(one.ids) > 0
  text, note = one.completion, ''
  if not measured:
    if len(text) > MOST_CHARACTERS:
      cut = len(text) - MOST_CHARACTERS
      half = MOST_CHARACTERS // 2
      note = f'{words.plural(cut, "character")} in the middle left out.'
      text = f'{text[:half]} […] {text[-half:]}'
    return Completion(label, text, one.reward, note=note)
  places = list(range(len(one.ids)))
  if len(places) > MOST_TOKENS:
    cut = len(places) - MOST_TOKENS
    note = f'{words.plural(cut, "token")} in the middle left out.'
    half = MOST_TOKENS // 2
    places = places[:half] + places[-half:]
  tokens = [
    Token(
      _piece(one.ids, k, decode),
      float(one.coefficient[k]),
      float(one.log_ratio[k]),
    )
    for k in places
  ]
  return Completion(label, text, one.reward, tokens, note)


def _piece(ids: Sequence[int], k: int, decode: Decode | None) -> str:
  """What token k adds to the text, as far as one token adds a text.

  The tokens before it are decoded too: a tokenizer may write a token otherwise
  at the beginning of a text, and a character may need several tokens.
  """
  if decode is None:
    return f'{ids[k]} '
  start = max(0, k - _CONTEXT)
  before, after = decode(ids[start:k]), decode(ids[start : k + 1])
  if after.startswith(before):
    return after[len(before) :]
  # The bytes of the last character are complete only now.
  whole = before.rstrip('\ufffd')
  return after[len(whole) :] if after.startswith(whole) else decode([ids[k]])
