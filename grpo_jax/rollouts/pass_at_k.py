"""What a model can do: pass@k, majority@k and lengths, with intervals.

The functions take NumPy arrays [P,n]: P prompts by n samples of each. Every
statistic is the mean over prompts of an unbiased estimate for each prompt. Its
confidence interval comes from a bootstrap over prompts and not over samples,
because another evaluation of the same task would have other prompts.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import math
import numbers
from typing import Any

import numpy as np

from grpo_jax.episodes.types import Rollout
from grpo_jax.mesh import random_keys

_CHUNK = 2**22  # numbers that the bootstrap draws at once, 32 MiB


def check_ks(ks: Sequence[int], samples: int) -> None:
  """Refuses a k that cannot be estimated, before anything is sampled.

  Args:
    ks: The k of pass@k and majority@k.
    samples: How many completions of each prompt there will be.

  Raises:
    ValueError: A `k` is less than 1 or more than `samples`.
  """
  for k in ks:
    if not isinstance(k, numbers.Integral) or not 1 <= k <= samples:
      raise ValueError(
        f'k={k!r} with {samples} samples per prompt; give a k from 1 to '
        f'{samples}, or draw more samples.'
      )


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
  r"""The chance that at least one of `k` samples is right.

  .. math:: 1 - \binom{n - c}{k} / \binom{n}{k}
    = 1 - \prod_{j < k} \frac{n - c - j}{n - j}

  with `c` of `n` samples right: the share of the subsets of `k` samples that
  hold a right one. This estimate is unbiased; :math:`1 - (1 - c/n)^k` would be
  too small. Where `k > n - c`, a factor of the product is 0.

  Args:
    right: bool[P,n], which samples are right.
    k: How many samples may be tried.

  Returns:
    f64[P].

  Raises:
    ValueError: `k` is less than 1 or more than `n`.

  References:
    Chen et al., `Evaluating Large Language Models Trained on Code
    <https://arxiv.org/abs/2107.03374>`_, 2021

  >>> pass_at_k(np.array([[True, False, False, False]]), 2).tolist()
  [0.5]
  """
  check_ks([k], right.shape[1])
  # As a product, because the binomials themselves overflow from n = 1030 on.
  samples, drawn = right.shape[1], np.arange(k)
  wrong = samples - right.sum(1, dtype=np.int64)
  return 1 - np.prod((wrong[:, None] - drawn) / (samples - drawn), axis=1)


def majority_at_k(
  answers: Sequence[Sequence[str]],
  right: np.ndarray,
  k: int,
  rng: np.random.Generator,
  subsets: int = 1000,
) -> np.ndarray:
  """The chance that the most frequent of `k` answers is right.

  This is a mean over subsets of `k` samples. It is exact, a mean over all such
  subsets, if there are at most `subsets` of them; otherwise it is a mean over
  `subsets` random ones, the same for every prompt. Several answers that are
  equally frequent share the vote.

  Args:
    answers: [P][n] texts, compared without white space at both ends.
    right: bool[P,n], which samples are right. Equal answers may differ in
      this, if a reward looks at more than the answer; an answer then counts as
      right by the share of its drawn samples that are.
    k: How many samples vote.
    rng: Draws the subsets.
    subsets: How many subsets to average over, at most.

  Returns:
    f64[P].

  Raises:
    ValueError: `k` is less than 1 or more than `n`.

  >>> majority_at_k([['4', '4 ', '5']], np.array([[True, True, False]]), 3,
  ...               np.random.default_rng(0)).tolist()
  [1.0]
  """
  check_ks([k], right.shape[1])
  drawn = _subsets(right.shape[1], k, subsets, rng)
  shares = np.zeros(len(answers))
  for row, (texts, correct) in enumerate(zip(answers, right, strict=True)):
    _, label = np.unique([text.strip() for text in texts], return_inverse=True)
    is_answer = np.eye(label.max() + 1)[label]  # [n, distinct answers]
    votes = drawn @ is_answer  # [subsets, distinct answers]
    correct_share = (
      drawn @ (is_answer * correct[:, None]) / np.maximum(votes, 1)
    )
    # Votes are whole numbers in float64, so equal ones compare as equal.
    wins = votes == votes.max(1, keepdims=True)
    shares[row] = np.mean((correct_share * wins).sum(1) / wins.sum(1))
  return shares


def bootstrap_interval(
  values: np.ndarray,
  rng: np.random.Generator,
  confidence: float = 0.95,
  resamples: int = 10_000,
) -> tuple[float, float]:
  """The bootstrap's percentile interval of a mean over prompts.

  Args:
    values: f64[P], one value per prompt.
    rng: Draws the prompts, with replacement.
    confidence: Share of the resampled means that lie inside.
    resamples: How often the prompts are drawn again.

  Returns:
    The lower and the upper end; of a single value, the value twice.

  Raises:
    ValueError: There are no values.

  >>> bootstrap_interval(np.ones(5), np.random.default_rng(0))
  (1.0, 1.0)
  """
  number = len(values)
  if not number:
    raise ValueError('A bootstrap got no values; give one value or more.')
  if number == 1:  # which scipy refuses: nothing varies
    return float(values[0]), float(values[0])
  from scipy import stats  # takes a second to import

  drawn = stats.bootstrap(
    (values,),
    np.mean,
    n_resamples=resamples,
    batch=max(1, _CHUNK // number),  # bounds the memory
    confidence_level=confidence,
    method='percentile',
    rng=rng,
  )
  low, high = drawn.confidence_interval
  return float(low), float(high)


def first_rewards(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
  """What an evaluation reads: the first reward, and where it counts.

  An answer on which it has failed has not earned it: it counts, as 0. Where
  only another reward has failed, the first one counts as it is. An episode
  whose environment has failed does not count.

  Args:
    rollout: See `Rollout`.

  Returns:
    f64[P,n], and bool[P,n]: False for completions that the first reward has not
    judged. There the reward is 0.
  """
  failed = rollout.failed
  reward = np.asarray(rollout.batch.reward_parts, np.float64)[..., 0]
  reward = np.where(failed[..., 0], 0.0, reward)
  counts = np.asarray(rollout.batch.valid, bool) | failed.any(-1)
  counts &= ~np.isnan(reward)
  if rollout.accounts:
    counts &= [[not one.failure for one in row] for row in rollout.accounts]
  return np.where(counts, reward, 0.0), counts


def summarize(
  rollout: Rollout,
  ks: Sequence[int],
  right_reward: float,
  seed: int,
  answer: Callable[[str], str] | None = None,
) -> dict[str, Any]:
  """What `grpo-jax eval` reports of the completions of held-out prompts.

  A completion that was not judged counts as neither right nor wrong; one on
  which the first reward has failed counts as wrong. The estimate
  for a prompt uses its judged completions only. A prompt without a judged
  completion is left out of the means, and a prompt with fewer than `k` of them
  is left out of pass@k and majority@k; `prompts_left_out@k` then says how many
  were.

  Args:
    rollout: See `Rollout`.
    ks: The k of pass@k and majority@k, each at most the samples per prompt.
    right_reward: A completion is right if its first reward is at least this.
    seed: Of the intervals and of majority@k.
    answer: Takes from a completion the answer that majority@k counts; None: the
      whole completion.

  Returns:
    Plain numbers by name, None where there is nothing to average:

    - `examples` and `samples_per_prompt`;
    - `mean` (of the first reward, where it has not failed), `accuracy`,
      `pass@k` and `majority@k`, and the 95 % interval of each as
      `NAME_interval`;
    - `length_tokens_mean`, `_median`, `_p95` and `_max` of all completions;
    - `length_tokens_right` and `length_tokens_wrong`, mean lengths;
    - `truncated`, a share of all completions, and two counts: `not_judged`, and
      `failed`, on which a reward has failed.

  Raises:
    ValueError: A `k` is less than 1 or more than the samples per prompt.
  """
  reward, judged = first_rewards(rollout)
  has_value = judged & ~rollout.failed[..., 0]
  right = has_value & (reward >= right_reward)
  check_ks(ks, judged.shape[1])
  values = {
    'mean': _share(np.where(has_value, reward, 0), has_value),
    'accuracy': _share(right, judged),
  }
  left_out = {}
  texts = rollout.texts
  if rollout.accounts:  # what was said last
    texts = [[one.last_text for one in row] for row in rollout.accounts]
  if answer is not None:
    texts = [[answer(text) for text in row] for row in texts]
  for k in ks:
    # A generator for each purpose, so that no number depends on the other ks.
    rng = random_keys.generator(seed, f'majority@{k}', 0)
    passed, voted = _at_k(texts, right, judged, k, rng)
    values |= {f'pass@{k}': passed, f'majority@{k}': voted}
    if len(passed) < len(judged):
      left_out[f'prompts_left_out@{k}'] = len(judged) - len(passed)
  summary = {'examples': len(judged), 'samples_per_prompt': judged.shape[1]}
  for name, per_prompt in values.items():
    summary[name] = _mean(per_prompt)
    summary[f'{name}_interval'] = None
    if len(per_prompt):
      rng = random_keys.generator(seed, f'interval of {name}', 0)
      interval = bootstrap_interval(per_prompt, rng)
      summary[f'{name}_interval'] = list(interval)
  return summary | left_out | _lengths(rollout, right, judged)


def _share(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """For each prompt the mean over what counts, without prompts of nothing."""
  some = counts.any(1)
  return values.sum(1)[some] / counts.sum(1)[some]


def _subsets(samples: int, k: int, most: int, rng) -> np.ndarray:
  """f64[subsets, samples]: subsets of `k` samples, 1 for each member.

  All of them if there are at most `most`; otherwise `most` random ones.
  """
  if math.comb(samples, k) <= most:
    chosen = np.array(list(itertools.combinations(range(samples), k)))
  else:  # the places of the k smallest of random numbers are a random subset
    chosen = np.argsort(rng.random((most, samples)), axis=1)[:, :k]
  members = np.zeros((len(chosen), samples))
  np.put_along_axis(members, chosen, 1, axis=1)
  return members


def _at_k(texts, right, judged, k, rng) -> tuple[np.ndarray, np.ndarray]:
  """pass@k and majority@k of each prompt with `k` or more judged samples."""
  # Prompts with equally many judged samples are estimated together: both
  # functions take rectangular arrays.
  count = judged.sum(1)
  passed, voted = np.zeros(len(count)), np.zeros(len(count))
  for number in np.unique(count[count >= k]):
    rows = np.flatnonzero(count == number)
    correct = right[rows][judged[rows]].reshape(-1, number)
    answers = [list(itertools.compress(texts[p], judged[p])) for p in rows]
    passed[rows] = pass_at_k(correct, k)
    voted[rows] = majority_at_k(answers, correct, k, rng)
  return passed[count >= k], voted[count >= k]


def _lengths(rollout, right, judged) -> dict[str, Any]:
  """What `summarize` says of lengths, and of completions not judged."""
  length = np.asarray(rollout.drawn, np.float64)
  truncated = np.asarray(rollout.batch.truncated, np.float64)
  return {
    'length_tokens_mean': _mean(length),
    'length_tokens_median': float(np.median(length)),
    'length_tokens_p95': float(np.quantile(length, 0.95)),
    'length_tokens_max': int(length.max()),
    'length_tokens_right': _mean(length[right]),
    'length_tokens_wrong': _mean(length[judged & ~right]),
    'truncated': _mean(truncated),
    'not_judged': int((~judged).sum()),
    'failed': int(rollout.failed.any(-1).sum()),
  }


def _mean(values: np.ndarray) -> float | None:
  return float(values.mean()) if values.size else None
