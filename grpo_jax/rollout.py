"""A rollout: prompts -> sample -> reward -> `Batch`, and its `Layout`s.

All of this runs on the host. The ids that were sampled are the ids that are
trained on; text is made for the rewards and never encoded again.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax import layout
from grpo_jax import losses
from grpo_jax import rewards as rewards_lib
from grpo_jax.data import Tokenizer
from grpo_jax.sampling import TRUNCATED
from grpo_jax.sampling import Completions
from grpo_jax.sampling import Engine
from grpo_jax.sampling import Requests
from grpo_jax.sampling import Sampling

# Packed rows are compiled for several shapes; `'auto'` takes them only where
# they are at most this share of the work.
_WORTHWHILE = 0.75


class Rollout(NamedTuple):
  """What one policy version sampled, judged; everything on the host."""

  batch: losses.Batch  # NumPy arrays [P,G,T]
  length: np.ndarray  # i32[P,G], tokens of each completion
  prompts: list[list[int]]  # P lists of ids
  prompt_texts: list[str]  # P
  texts: list[list[str]]  # [P][G] completions, for people
  index: np.ndarray  # i64[P], the global prompt counters
  reward_names: tuple[str, ...] = ()  # of the last axis of batch.reward_parts


@dataclasses.dataclass(frozen=True)
class LayoutSpec:
  """How completions are laid out for the learner.

  Attributes:
    kind: `'shared'`, `'packed'` or `'padded'`, see `layout.py`; or `'auto'`,
      that of the first two which takes less work for the lengths at hand.
    micro_rows: Rows of a micro-batch; 0: as many as `micro_tokens` fill.
    row_completions: Completions in one row of a shared layout; it divides the
      group, and 0 puts the whole group into one row.
    prompt_buckets: Allowed prompt widths, tokens.
    pack_tokens: Least width of a packed row, tokens.
    micro_tokens: See `micro_rows`.
    shards: Rows of a micro-batch are a multiple of this if `micro_rows` is 0.
    key_cost: What a token's attention to one more key costs, as a share of
      everything else that the token costs; for `'auto'`.
    share: See `layout.packed_rows`.
  """

  kind: str
  micro_rows: int
  row_completions: int = 0
  prompt_buckets: Sequence[int] = ()
  pack_tokens: int = 0
  micro_tokens: int = 2048
  shards: int = 1
  key_cost: float = 0.0
  share: bool = True

  def __post_init__(self):
    if self.kind not in ('auto', 'shared', 'packed', 'padded'):
      raise ValueError(
        f"layout={self.kind!r} is none of 'auto', 'shared', 'packed', "
        "'padded'; set config.learner.layout to one of them."
      )

  def rows_of(self, row_tokens: int, rows: int) -> int:
    """Rows of a micro-batch, given their width and how many there may be."""
    if self.micro_rows:
      return self.micro_rows
    on_each = math.ceil(rows / self.shards)
    parts = math.ceil(on_each * row_tokens / self.micro_tokens)
    return math.ceil(on_each / parts) * self.shards


def collect(
  records: Sequence[Mapping[str, Any]],
  engine: Engine,
  tokenizer: Tokenizer,
  rewards: Sequence[rewards_lib.WeightedReward],
  sampling: Sampling,
  group: int,
  rollout: int,
  completion_buckets: Sequence[int],
  purpose: str = 'sample',
) -> Rollout:
  """Samples completions of some prompts and judges them.

  Args:
    records: `P` records with `'prompt'` and `'index'`.
    engine: Draws the completions.
    tokenizer: Text to ids for prompts, ids to text for rewards.
    rewards: Reward functions with weights.
    sampling: How to draw.
    group: Completions per prompt.
    rollout: Number of this rollout.
    completion_buckets: Allowed completion widths; the batch gets the smallest
      that holds its longest completion.
    purpose: See `Requests`.

  Returns:
    A `Rollout`.
  """
  prompts = [tokenizer.encode(record['prompt']) for record in records]
  index = [record['index'] for record in records]
  completions = engine.generate(
    Requests(prompts, index, group, rollout, sampling, purpose)
  )
  texts = [
    [tokenizer.decode(ids[:n]) for ids, n in zip(*row, strict=True)]
    for row in zip(completions.tokens, completions.length, strict=True)
  ]
  scores = _judge(records, completions, texts, rewards)
  return Rollout(
    _batch(completions, scores, completion_buckets),
    completions.length,
    prompts,
    [record['prompt'] for record in records],
    texts,
    np.array(index, np.int64),
    tuple(reward.name for reward in rewards),
  )


def blank(
  prompts: int,
  group: int,
  prompt_tokens: int,
  max_tokens: int,
  rewards: int,
  completion_buckets: Sequence[int],
) -> Rollout:
  """A rollout of zeros, all completions as long as can be.

  Args:
    prompts: `P`.
    group: `G`.
    prompt_tokens: Length of every prompt.
    max_tokens: Length of every completion.
    rewards: Reward functions.
    completion_buckets: See `collect`.

  Returns:
    A `Rollout` with the fields and dtypes of `collect`'s.
  """
  shape = prompts, group, max_tokens
  number = prompts * group
  nothing = np.zeros(shape, np.float32)
  whole = np.zeros(shape, np.int32)
  length = np.full(shape[:2], max_tokens, np.int32)
  drawn = Completions(
    whole, length, nothing, nothing, whole, whole[..., 0], nothing
  )
  reward = np.zeros((number,), np.float32)
  scores = rewards_lib.Scores(
    reward, np.zeros((number, rewards), np.float32), np.ones((number,), bool)
  )
  return Rollout(
    _batch(drawn, scores, completion_buckets),
    length,
    [[0] * prompt_tokens] * prompts,
    [''] * prompts,
    [[''] * group] * prompts,
    np.arange(prompts),
  )


def select(rollout: Rollout, chosen: np.ndarray) -> Rollout:
  """Some groups of a rollout, in the order of `chosen` i32[P']."""
  return rollout._replace(
    batch=jax.tree.map(lambda x: x[chosen], rollout.batch),
    length=rollout.length[chosen],
    prompts=[rollout.prompts[p] for p in chosen],
    prompt_texts=[rollout.prompt_texts[p] for p in chosen],
    texts=[rollout.texts[p] for p in chosen],
    index=rollout.index[chosen],
  )


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
  """The groups of several rollouts; the widest sets the width."""
  rollouts = [part for part in rollouts if part.prompts]
  if len(rollouts) == 1:
    return rollouts[0]
  width = max(part.batch.tokens.shape[-1] for part in rollouts)

  def widen(x: np.ndarray) -> np.ndarray:
    missing = width - x.shape[-1] if x.ndim == 3 else 0
    return np.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, missing)])

  def join(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)

  # The one field with three axes of which none is T.
  parts = join(*(np.asarray(part.batch.reward_parts) for part in rollouts))
  batches = [
    jax.tree.map(widen, part.batch._replace(reward_parts=None))
    for part in rollouts
  ]
  return rollouts[0]._replace(
    batch=jax.tree.map(join, *batches)._replace(reward_parts=parts),
    length=join(*(part.length for part in rollouts)),
    prompts=[ids for part in rollouts for ids in part.prompts],
    prompt_texts=[text for part in rollouts for text in part.prompt_texts],
    texts=[row for part in rollouts for row in part.texts],
    index=join(*(part.index for part in rollouts)),
  )


def _judge(records, completions, texts, rewards) -> rewards_lib.Scores:
  """Scores of all completions, in the order p * G + g."""
  examples = [
    {
      **record,
      'completion_ids': ids[:length].tolist(),
      'truncated': bool(finish == TRUNCATED),
    }
    for record, *row in zip(
      records,
      completions.tokens,
      completions.length,
      completions.finish,
      strict=True,
    )
    for ids, length, finish in zip(*row, strict=True)
  ]
  group = completions.length.shape[1]
  asked = [record['prompt'] for record in records for _ in range(group)]
  flat = [text for row in texts for text in row]
  return rewards_lib.score(rewards, asked, flat, examples)


def _batch(
  completions: Completions, scores: rewards_lib.Scores, buckets: Sequence[int]
) -> losses.Batch:
  """Completions and scores as a `Batch`, no wider than it needs to be."""
  shape = completions.length.shape
  width = layout.bucket(int(completions.length.max()), buckets, 'completion')
  width = min(width, completions.tokens.shape[-1])
  mask = np.arange(width) < completions.length[:, :, None]

  def drawn(x: np.ndarray) -> np.ndarray:  # an engine may leave garbage behind
    return np.where(mask, x[..., :width], 0)

  log_kept = drawn(completions.log_kept)
  extras = {'log_kept': log_kept}
  if completions.entropy is not None:
    extras['entropy_sampler'] = drawn(completions.entropy)
  return losses.Batch(
    tokens=drawn(completions.tokens),
    mask=mask,
    keep=mask,
    valid=scores.judged.reshape(shape),
    reward=scores.reward.reshape(shape),
    reward_parts=scores.parts.reshape(*shape, -1),
    truncated=completions.finish == TRUNCATED,
    version=drawn(completions.version),
    logp_sampler=drawn(completions.logp) - log_kept,
    extras=extras,
  )


def demonstrations(
  records: Sequence[Mapping[str, Any]],
  tokenizer: Tokenizer,
  completion_buckets: Sequence[int],
) -> Rollout:
  """Given answers as a rollout: groups of one, for the method `supervised`.

  Args:
    records: Records with `'prompt'` and `'answer'`.
    tokenizer: Encodes both; the first end token is added to the answer.
    completion_buckets: Allowed completion widths, tokens.

  Returns:
    A `Rollout` with reward 0 and no sampler's log-probabilities.

  Raises:
    ValueError: The tokenizer has no end token.
  """
  if not tokenizer.eos_ids:
    raise ValueError(
      'Demonstrations are answers with an end token, of which this tokenizer '
      'has none; name one in config.data.eos_tokens, or set '
      'config.warm_up.steps=0.'
    )
  answers = [
    [*tokenizer.encode(str(record['answer'])), tokenizer.eos_ids[0]]
    for record in records
  ]
  length = np.array([[len(answer)] for answer in answers], np.int32)
  width = layout.bucket(int(length.max()), completion_buckets, 'completion')
  tokens = np.zeros((len(records), 1, width), np.int32)
  for row, answer in enumerate(answers):
    tokens[row, 0, : len(answer)] = answer
  mask = np.arange(width) < length[:, :, None]
  nothing = np.zeros(length.shape, np.float32)
  batch = losses.Batch(
    tokens=tokens,
    mask=mask,
    keep=mask,
    valid=np.ones(length.shape, bool),
    reward=nothing,
    reward_parts=nothing[..., None],
    truncated=np.zeros(length.shape, bool),
    version=np.zeros(tokens.shape, np.int32),
  )
  asked = [record['prompt'] for record in records]
  return Rollout(
    batch,
    length,
    [tokenizer.encode(text) for text in asked],
    asked,
    [[str(record['answer'])] for record in records],
    np.array([record['index'] for record in records], np.int64),
  )


def micro_batches(
  rollout: Rollout, chosen: np.ndarray, spec: LayoutSpec
) -> tuple[layout.Layout, int]:
  """The layout of one optimizer batch, as a stack of micro-batches.

  Args:
    rollout: See `Rollout`.
    chosen: i32[P'], the prompts of the optimizer batch.
    spec: See `LayoutSpec`.

  Returns:
    A `Layout` [N, micro_rows, ...], and how many of the N hold anything. The
    shapes depend on the buckets; those of packed rows also on a power of two,
    of the completions in one.
  """
  prompts = [rollout.prompts[p] for p in chosen]
  given = prompts, rollout.batch.tokens[chosen], rollout.length[chosen]
  number, group, width = given[1].shape
  prompt_width = layout.bucket(
    max(map(len, prompts)), spec.prompt_buckets, 'prompt'
  )
  kind = 'shared' if spec.kind == 'auto' else spec.kind
  built, most_rows = _built(kind, *given, prompt_width, spec)
  needed = sum(map(len, prompts)) + int(given[2].sum())
  if spec.kind == 'auto' and needed < _WORTHWHILE * built.tokens.size:
    packed = _built('packed', *given, prompt_width, spec)
    if _work(packed[0], number, spec) < _WORTHWHILE * _work(
      built, number, spec
    ):
      built, most_rows = packed
  slots = built.completion.shape[1]
  if built.blocks is None:
    slots = _power_of_two(slots)
  micro_rows = _micro_rows(built, number, spec)
  used = math.ceil(built.tokens.shape[0] / micro_rows)
  whole = math.ceil(most_rows / micro_rows)
  padded = layout.pad_to(built, whole * micro_rows, slots, number * group)
  return layout.split_rows(padded, micro_rows), used


def _built(
  kind: str, prompts, tokens, length, prompt_width: int, spec: LayoutSpec
) -> tuple[layout.Layout, int]:
  """A layout of one kind, and the most rows it has for any lengths."""
  number, group, width = tokens.shape
  row_tokens = prompt_width + width
  if kind == 'padded':
    return layout.padded_rows(prompts, tokens, length, row_tokens), (
      number * group
    )
  if kind == 'packed':
    row_tokens = max(row_tokens, spec.pack_tokens)
    return layout.packed_rows(
      prompts, tokens, length, row_tokens, spec.share
    ), number * group
  per_row = spec.row_completions or group
  if group % per_row:
    raise ValueError(
      f'row_completions={per_row} does not divide the group of {group}; set '
      'config.learner.row_completions to a divisor.'
    )
  split = number * group // per_row
  return layout.shared_prompt(
    [prompt for prompt in prompts for _ in range(group // per_row)],
    tokens.reshape(split, per_row, width),
    length.reshape(split, per_row),
    prompt_width,
  ), split


def _micro_rows(rows: layout.Layout, prompts: int, spec: LayoutSpec) -> int:
  """Rows of a micro-batch; no more than there are prompts, if not given.

  Rows of a group are at least one, and how many there are of packed ones
  depends on the lengths, which the shape of a micro-batch must not.
  """
  return spec.rows_of(rows.tokens.shape[1], prompts)


def _work(rows: layout.Layout, prompts: int, spec: LayoutSpec) -> float:
  """What a layout costs the model, in tokens without attention."""
  number, columns = rows.tokens.shape
  micro_rows = _micro_rows(rows, prompts, spec)
  number = math.ceil(number / micro_rows) * micro_rows
  keys, key_cost = columns, spec.key_cost
  if rows.blocks is not None:
    keys = rows.blocks.prompt_tokens + rows.blocks.completion_tokens
  return number * columns * (1 + key_cost * keys)


def _power_of_two(number: int) -> int:
  """The next one, `number` included."""
  return 1 << (number - 1).bit_length()
