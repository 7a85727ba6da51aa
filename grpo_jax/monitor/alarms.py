"""Alarms: when the numbers of a run look wrong, and what can be done then."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

_REARM_STEPS = 10  # rollouts without the condition before it may alarm again
_LEAST_ESS = 0.5  # effective sample size, over sample size
_ALL = 0.999  # a share from which on it counts as all


class Limits(NamedTuple):
  """From where on numbers look wrong, nats per token."""

  kl: float = 1.0
  entropy: float = 0.01
  sampler_gap: float = 0.05
  narrow: tuple[str, ...] = ()  # fields with a dtype narrower than float32
  oldest: int = 0  # age of the oldest policy that draws, in versions


class _Alarm(NamedTuple):
  """A condition on one metric, and the warning when it begins."""

  metric: str
  is_ill: Callable[[float], bool]
  sentence: Callable[[float, Mapping[str, float | None]], str]


class Alarms:
  """Warns when a condition begins.

  It warns again only after ten rollouts in which the condition did not hold.

  Args:
    limits: When to alarm.
    replays: Whether saved rollouts take the place of sampling. Then the policy
      may be another than the one that has drawn them, so a difference between
      sampler and learner says nothing, nor does their age.
  """

  def __init__(self, limits: Limits, replays: bool = False):
    of_samplers = 'sampler_gap', _oldest_ess(limits)
    self._alarms = [
      alarm
      for alarm in _table(limits)
      if not (replays and alarm.metric in of_samplers)
    ]
    # Rollouts until an alarm may speak again; at 0 it may.
    self._waits = [0] * len(self._alarms)

  def __call__(self, scalars: Mapping[str, float | None]) -> list[str]:
    """The sentences of `begun`."""
    return [sentence for _, sentence in self.begun(scalars)]

  def begun(self, scalars: Mapping[str, float | None]) -> list[tuple[str, str]]:
    """Judges one rollout.

    Args:
      scalars: The metrics of the rollout. An alarm whose metric is absent or
        None stays as it is.

    Returns:
      For each condition that has just begun, its metric and a sentence.
    """
    begun = []
    for index, alarm in enumerate(self._alarms):
      value = scalars.get(alarm.metric)
      if value is None:
        continue
      if not alarm.is_ill(value):
        self._waits[index] = max(0, self._waits[index] - 1)
        continue
      sentence = alarm.sentence(value, scalars)
      if not sentence:  # another alarm says why
        continue
      if not self._waits[index]:
        begun.append((alarm.metric, sentence))
      self._waits[index] = _REARM_STEPS
    return begun


def _oldest_ess(limits: Limits) -> str:
  """The metric of the oldest tokens; absent if nothing is drawn ahead."""
  return f'age_{limits.oldest}_ess'


def _table(limits: Limits) -> list[_Alarm]:
  """All alarms. Each sentence says what was measured and what can be done."""

  def kl(other: str, advice: str):
    return lambda value, _: (
      f'KL from the {other} is {value:.3g} nats per token, above log.kl_alarm='
      f'{limits.kl:g}: the policy changes too fast; {advice}.'
    )

  too_far = lambda value: not value <= limits.kl  # true of NaN too
  return [
    _Alarm(
      'kl_old_k3',
      too_far,
      kl('sampling policy', 'lower optim.lr or learner.epochs'),
    ),
    _Alarm(
      'kl_ref_k3',
      too_far,
      kl('reference', 'lower optim.lr or raise the weight of the KL'),
    ),
    _Alarm(
      'entropy',
      lambda value: value < limits.entropy,
      lambda value, _: (
        f'Entropy is {value:.3g} nats per token, below log.entropy_alarm='
        f'{limits.entropy:g}: completions of a prompt hardly differ; if the '
        'accuracy is not yet good, raise sampler.temperature or lower optim.lr.'
      ),
    ),
    _Alarm(
      'sampler_gap',
      lambda value: not value <= limits.sampler_gap,
      lambda value, _: (
        f'Sampler and learner differ by {value:.3g} nats per token, above '
        f'log.sampler_gap_alarm={limits.sampler_gap:g}: '
        f'{_agree(limits.narrow)}, or add losses.truncate_token_importance.'
      ),
    ),
    _Alarm(
      _oldest_ess(limits),
      lambda value: value < _LEAST_ESS,
      lambda value, _: (
        f'Tokens drawn {limits.oldest} rollout{"s" * (limits.oldest > 1)} ago '
        f'are worth {value:.0%} as many drawn now: the policy moves away from '
        'what it learns from; lower sampler.ahead, optim.lr or learner.epochs.'
      ),
    ),
    _Alarm(
      'truncated',
      lambda value: value >= _ALL,
      _cut,
    ),
    _Alarm('uniform_groups', lambda value: value >= _ALL, _uniform),
    _Alarm('nonfinite_loss', _any, _refused('loss', 'the method or a reward')),
    _Alarm('nonfinite_gradient', _any, _refused('gradient', 'the method')),
    _Alarm(
      'nonfinite_update',
      _any,
      _refused('update', 'optim.lr, optim.epsilon or the optimizer'),
    ),
    _Alarm(
      'judged',
      lambda value: value == 0,
      lambda _, scalars: (
        'No completion was judged, so there is nothing to learn from: '
        + (
          'every episode has failed; look at the environment.'
          if scalars.get('env_failed') == 1
          else 'a reward function returned None for every one, or failed on '
          'it; look at the reward functions.'
        )
      ),
    ),
  ]


_LIMITS = {
  'ended/length': 'sampler.max_tokens (or what the environment gives a turn)',
  'ended/turns': 'environment.max_turns',
  'ended/tokens': 'environment.episode_tokens',
  'ended/context': 'environment.context_tokens and data.completion_buckets',
}


def _cut(value: float, scalars: Mapping[str, float | None]) -> str:
  """What to do if no answer, or no episode, comes to its end."""
  shares = {name: scalars.get(name) or 0.0 for name in _LIMITS}
  most = max(shares, key=shares.__getitem__)
  if not shares[most]:
    return (
      f'{value:.1%} of the completions were cut at sampler.max_tokens: no '
      'answer is finished; raise sampler.max_tokens.'
    )
  fields = _LIMITS[most]
  return (
    f'{value:.1%} of the episodes were cut, {shares[most]:.1%} at {fields}: '
    f'none comes to its end; raise {fields}.'
  )


def _agree(narrow: Sequence[str]) -> str:
  """How sampler and learner can come to agree, as far as dtypes tell."""
  if narrow:
    return f'use float32 in {" and ".join(narrow)}'
  return "in float32 they agree, so look at the model's cache or the engine"


def _uniform(value: float, scalars: Mapping[str, float | None]) -> str:
  """Why nothing can be learned, as far as the accuracy tells."""
  if scalars.get('judged') == 0:
    return ''
  # A teacher is learned from whatever the rewards are, unless it is a penalty
  # beside them: updates without any advantage are skipped.
  skipped = scalars.get('advantage_abs') == 0 and scalars.get('idle_steps')
  if 'kl_teacher_k1' in scalars and not skipped:
    return ''
  # Exactly 1 or 0: groups of equal rewards can be right in one and wrong in the
  # next.
  accuracy = scalars.get('accuracy')
  if accuracy == 1:
    why = 'all answers are right; give harder prompts'
  elif accuracy == 0:
    why = (
      'all answers are wrong; give easier prompts, more warm-up or a larger '
      'sampler.group'
    )
  else:
    why = 'raise sampler.group or sampler.temperature'
  return (
    f'{value:.1%} of the groups have equal rewards, so there is nothing to '
    f'learn from: {why}.'
  )


def _any(share: float) -> bool:
  return share > 0


def _refused(part: str, cause: str):
  return lambda share, _: (
    f'The {part} of {share:.0%} of the updates is not finite. Such updates are '
    f'refused: nothing is learned from them; look at {cause}.'
  )
