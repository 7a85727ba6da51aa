"""The metrics that a person is shown: their words, their units, their order.

`metrics.jsonl` has every metric under its short name. The terminal shows fewer,
in words, and leaves out those that are constant under the config of the run.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import NamedTuple
from typing import TypeVar

from grpo_jax.config import plain_text
from grpo_jax.monitor import formatting

Scalars = Mapping[str, float | None]
_CurveT = TypeVar('_CurveT')

LABEL = 23  # characters of the longest label


class Row(NamedTuple):
  """How one metric is shown."""

  label: str  # at most `LABEL` characters
  unit: str = ''  # '%' shows a share in percent, '#' a whole number
  rank: int = 0  # a low terminal leaves out the rows of the highest rank first
  if_any: bool = False  # shown only while it is above 0


class Shown(NamedTuple):
  """One metric with its value, ready to be printed."""

  label: str
  value: str
  unit: str
  rank: int
  finite: bool


_NATS = 'nats per token'
_SPEED = 'tokens per second'
CLIPPED = {
  'clipped_high': Row('clipped at high ratios', '%'),
  'clipped_low': Row('clipped at low ratios', '%'),
  'clipped_cap': Row('clipped at the cap', '%'),
}
# Every metric that is shown, by heading and name.
GROUPS: dict[str, dict[str, Row]] = {
  'answers': {
    'accuracy': Row('right answers', '%'),
    'uniform_groups': Row('groups of equal rewards', '%'),
    'length_tokens': Row('completion length', 'tokens'),
    'truncated': Row('cut at the token limit', '%', 1),
    'staleness_steps': Row('age of completions', 'rollouts', 1),
    'accuracy_drawn': Row('right of all drawn', '%', 2),
    'prompts_drawn': Row('prompts drawn', '#', 2),
    'prompts_retired': Row('prompts retired', '#', 2),
    'prompts_too_long': Row('prompts too long', '#', 2),
  },
  'episodes': {
    'turns_mean': Row('turns of an episode'),
    'turns_max': Row('most turns', '', 1),
    'branches': Row('branches of an episode', '', 1, if_any=True),
    'episode_tokens': Row('tokens of the policy', 'tokens', 1),
    'context_share': Row('not by the policy', '%', 1),
    'tool_calls': Row('calls of tools', '', 1),
    'tool_errors': Row('errors of tools', if_any=True),
    'parse_errors': Row('faults of replies', if_any=True),
    'ended/done': Row('ended by environment', '%', 1),
    'ended/end': Row('ended the whole chat', '%', 1, if_any=True),
    'ended/length': Row('cut inside a turn', '%', if_any=True),
    'ended/turns': Row('cut at max_turns', '%', if_any=True),
    'ended/tokens': Row('cut at episode_tokens', '%', if_any=True),
    'ended/context': Row('cut at context_tokens', '%', if_any=True),
    'env_secs_p50': Row('median time of one', 'seconds', 2),
    'env_secs_max': Row('longest time of one', 'seconds', 2),
  },
  'policy': {
    'entropy': Row('entropy', _NATS),
    'kl_old_k3': Row('KL from sampling policy', _NATS),
    'kl_ref_k3': Row('KL from reference', _NATS),
    'kl_teacher_k1': Row('KL from teacher', _NATS),
    **CLIPPED,
    'ratio_p01': Row('1st percentile ratio', '', 2),
    'ratio_p99': Row('99th percentile ratio', '', 2),
    'ess_token': Row('effective sample size', '%', 1),
    'prefix_whole_uncancelled': Row('pull on shared prefixes', '%', 2),
    'prefix_turn0_uncancelled': Row('pull on first turns', '%', 2),
  },
  'optimizer': {
    'loss': Row('loss', '', 2),
    'grad_norm': Row('gradient norm'),
    'update_norm': Row('update norm', '', 1),
    'param_norm': Row('parameter norm', '', 2),
    'learning_rate': Row('learning rate', '', 2),
    'adam_carried_norm': Row('update by momentum', '', 2),
    'adam_fresh_norm': Row('update by gradient', '', 2),
    'adam_below_epsilon': Row('weights below epsilon', '%', 2),
  },
  'clipped tokens, per update': {
    'overshoot': Row('moved outward', 'nats'),
    'overshoot_carried': Row('by momentum', 'nats', 1),
    'overshoot_fresh': Row('by the gradient', 'nats', 1),
    'overshoot_predicted': Row('if gradients stopped', 'nats', 1),
    'rollout_outside': Row('outside at rollout end', '%', 1),
  },
  'gradients of prompts': {
    'geometry_cosine_mean': Row('mean cosine', '', 1),
    'geometry_cosine_std': Row('deviation of cosines', '', 1),
    'geometry_cosine_negative': Row('pairs that disagree', '%', 1),
    'geometry_within': Row('depends on draws', '', 2),
  },
  'speed': {
    'sample_tokens_per_sec': Row('sampling', _SPEED),
    'learn_tokens_per_sec': Row('learning', _SPEED),
    'left_out': Row('micro-batches left out', '%', if_any=True),
    'step_secs': Row('one rollout', 'seconds'),
    'judge_secs': Row('waiting for judges', 'seconds', 2),
    'engine_idle_share': Row('rows without a turn', '%', 1),
    'engine_read_share': Row('context read anew', '%', 2),
    'engine_parked_share': Row('caches from the host', '%', 2, if_any=True),
    'ahead_wait_secs': Row('waiting for the rollout', 'seconds', 2),
    'mfu_sample': Row('peak FLOP/s in sampling', '%', 1),
    'mfu_learn': Row('peak FLOP/s in learning', '%', 1),
    'device_peak_gib': Row('device memory, peak', 'GiB', 2),
    'host_peak_gib': Row('host memory, peak', 'GiB', 2),
  },
  'problems': {
    'env_failed': Row('episodes failed', '%', if_any=True),
    'rewards_failed': Row('completions not judged', '#', if_any=True),
    'heldout_failed': Row('held-out failed', '#', if_any=True),
    'heldout_too_long': Row('held-out too long', '#', if_any=True),
    'idle_steps': Row('updates without signal', '#', if_any=True),
    'nonfinite_steps': Row('updates not finite', '#', if_any=True),
    'saves_failed': Row('saves failed', '#', if_any=True),
    'failed_writes': Row('writes failed', '#', if_any=True),
  },
}
# Measured in some rollouts only; in others the terminal shows the last value.
_NOW_AND_THEN = frozenset(
  [
    *GROUPS['clipped tokens, per update'],
    *GROUPS['gradients of prompts'],
    'heldout_graded',
  ]
)
_SHORT = {
  _NATS: 'nats',
  _SPEED: 'tok/s',
  'tokens': 'tok',
  'seconds': 's',
  'rollouts': 'roll.',
}


class Still(NamedTuple):
  """The constant value of a metric, and how far rounding may move it."""

  value: float
  tolerance: float


class About(NamedTuple):
  """What a display knows of a run from its config alone."""

  total_steps: int = 0  # rollouts of the whole run
  still: Mapping[str, Still] = {}  # constant metrics
  note: str = ''  # what a reader of the samples must know of the data


class History(NamedTuple):
  """What a run has measured so far, earlier starts included."""

  elapsed: Callable[[], float]  # seconds of the run
  points: Callable[[str], formatting.Points]  # of a metric, by rollout


def groups(
  scalars: Scalars, fixed: Mapping[str, Still]
) -> dict[str, list[Shown]]:
  """The metrics to show, by heading.

  Args:
    scalars: The metrics of a rollout.
    fixed: The metrics that are constant in the run.

  Returns:
    Headings with at least one metric, in order; reward and held-out accuracy
    are not among the metrics, because `headline` has them.
  """
  table = dict(GROUPS)
  of_each = [name for name in scalars if name.startswith('reward/')]
  rewards = [
    name for name in of_each if not name.endswith(plain_text.REWARD_METRICS)
  ]
  if len(rewards) > 1:  # a single reward is in the headline already
    parts = {name: Row(name.partition('/')[2][-LABEL:]) for name in rewards}
    table = {'rewards': parts, **table}
  failed = {
    name: Row(_label(name), '%', if_any=True)
    for name in of_each
    if name.endswith('_failed')
  }
  table['problems'] = {**table['problems'], **failed}
  shown = {}
  for heading, rows in table.items():
    lines = [
      _shown(row, value)
      for name, row in rows.items()
      if (value := scalars.get(name)) is not None
      and not _hidden(name, row, value, scalars, fixed)
    ]
    if lines:
      shown[heading] = lines
  return shown


def _label(name: str) -> str:
  """'exact_match failed', of 'reward/exact_match_failed'."""
  end = ' failed'
  label = name.partition('/')[2].removesuffix('_failed')
  return label[len(end) - LABEL :] + end


def headline(scalars: Scalars, graded: bool = False) -> dict[str, float | None]:
  """What matters most, by label: reward, held-out accuracy, tokens per second.

  Args:
    scalars: The metrics of a rollout.
    graded: Whether a held-out reward of the run was neither 0 nor 1. Then the
      mean of these rewards is no accuracy, and is not called so.

  Returns:
    Values, None for what was not measured. Held-out accuracy is absent unless
    it was measured, because a run may have no held-out problems. The tokens per
    second are those of sampling and learning together.
  """
  heldout = HELDOUT_REWARD if graded else _HELDOUT
  named = {
    'reward': scalars.get('reward'),
    heldout: scalars.get('heldout_accuracy'),
    'tokens per second': tokens_per_sec(scalars),
  }
  if named[heldout] is None:
    del named[heldout]
  return named


_HELDOUT = 'held-out accuracy'
HELDOUT_REWARD = 'held-out mean reward'
_ORDER = ('reward', _HELDOUT, HELDOUT_REWARD, 'tokens per second')


def without_accuracy(curves: Mapping[str, _CurveT]) -> dict[str, _CurveT]:
  """Curves by label, in which no mean of held-out rewards is an accuracy."""
  return {
    HELDOUT_REWARD if label == _HELDOUT else label: curve
    for label, curve in curves.items()
  }


def order(label: str) -> int:
  """The place of a headline, from left to right."""
  return _ORDER.index(label) if label in _ORDER else -1


def remark(label: str, best: float | None) -> str:
  """What is written beside a number of `headline`: the best accuracy so far.

  Args:
    label: Of the number.
    best: The highest value so far; None if there is none.
  """
  if label not in (_HELDOUT, HELDOUT_REWARD) or best is None:
    return ''
  return f'best {formatting.number(best)}'


def curves(
  points: Callable[[str], Sequence[tuple[float, float]]],
) -> dict[str, list[tuple[float, float]]]:
  """The history of each headline.

  Args:
    points: The history of a metric, (rollout, value), oldest first.

  Returns:
    The history of each label of `headline`, (rollout, value), oldest first.
  """
  by_step: dict[float, dict[str, float]] = {}
  for name in HISTORY:
    for step, value in points(name):
      by_step.setdefault(step, {})[name] = value
  found: dict[str, list[tuple[float, float]]] = {}
  graded = any(values.get('heldout_graded') for values in by_step.values())
  for step in sorted(by_step):
    for label, value in headline(by_step[step], graded).items():
      if value is None:
        continue
      found.setdefault(label, []).append((step, value))
  return found


_THROUGHPUT = ('sample_tokens_per_sec', 'sample_secs', 'step_secs')
# What `curves` asks for.
HISTORY = ('reward', 'heldout_accuracy', 'heldout_graded', *_THROUGHPUT)


def tokens_per_sec(scalars: Scalars) -> float | None:
  """Sampled tokens over the seconds of sampling and learning."""
  speed, sampling, both = map(scalars.get, _THROUGHPUT)
  if speed is None:
    return None
  # The first product is the number of tokens drawn.
  return speed * sampling / both if sampling and both else speed


def warm_up_label(name: str) -> str:
  """A metric of the warm-up, in words."""
  return {
    'loss': 'loss, nats per token',
    'grad_norm': 'gradient norm',
  }.get(name, name)


def with_last(before: Scalars, scalars: Scalars) -> dict[str, float | None]:
  """The metrics, and the last values of those not measured this time."""
  last = {k: v for k, v in before.items() if k in _NOW_AND_THEN}
  return {**last, **{k: v for k, v in scalars.items() if v is not None}}


def short(unit: str) -> str:
  """A unit as it is written where there is little room."""
  return _SHORT.get(unit, unit)


def _shown(row: Row, value: float) -> Shown:
  unit, finite = row.unit, math.isfinite(value)
  number = (formatting.percent if unit == '%' else formatting.number)(value)
  if unit == '#':
    unit, number = '', f'{value:.0f}'
  return Shown(row.label, number, unit, row.rank, finite)


def _hidden(name: str, row: Row, value: float, scalars: Scalars, fixed) -> bool:
  """Whether a metric says nothing new in this rollout."""
  if name == 'accuracy' and value == scalars.get('reward'):
    return True  # the reward is 1 for a right answer and 0 otherwise
  constant = fixed.get(name)
  if constant is not None:
    return abs(value - constant.value) <= constant.tolerance
  return row.if_any and not value > 0
