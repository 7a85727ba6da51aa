"""What looks ill in a run's numbers, in sentences."""

from collections.abc import Callable
from collections.abc import Mapping
import math
from typing import NamedTuple

from grpo_jax import config

_REARM_STEPS = 10  # rollouts without the condition before it may alarm again
_ALL = 0.999  # a share that is everything


class _Alarm(NamedTuple):
  """A condition on one metric."""

  metric: str
  is_ill: Callable[[float], bool]
  sentence: Callable[[float, Mapping[str, float | None]], str]


class Alarms:
  """Says when a condition begins; again only after it was gone for a while.

  Args:
    log: Its `kl_alarm` and `entropy_alarm` are the limits, nats per token.
  """

  def __init__(self, log: config.Log):
    self._alarms = _table(log)
    # Rollouts until the alarm is armed again; 0: it is armed.
    self._waits = [0] * len(self._alarms)

  def __call__(self, scalars: Mapping[str, float | None]) -> list[str]:
    """Judges one rollout.

    Args:
      scalars: Its metrics; one that is absent or None changes nothing.

    Returns:
      One sentence for every condition that has just begun.
    """
    sentences = []
    for index, alarm in enumerate(self._alarms):
      value = scalars.get(alarm.metric)
      if value is None:
        continue
      if not alarm.is_ill(value):
        self._waits[index] = max(0, self._waits[index] - 1)
        continue
      if not self._waits[index]:
        sentences.append(alarm.sentence(value, scalars))
      self._waits[index] = _REARM_STEPS
    return sentences


def _table(log: config.Log) -> list[_Alarm]:
  """Every alarm; sentences say what was measured and what one may do."""

  def kl(whom: str, advice: str):
    return lambda value, _: (
      f'KL to the {whom} is {value:.3g} nats per token, above log.kl_alarm='
      f'{log.kl_alarm:g}: the policy runs away; {advice}.'
    )

  runs_away = lambda value: not value <= log.kl_alarm  # true of NaN too
  return [
    _Alarm(
      'kl_old_k3', runs_away, kl('old policy', 'lower optim.lr or the epochs')
    ),
    _Alarm(
      'kl_ref_k3', runs_away, kl('reference', 'raise beta or lower optim.lr')
    ),
    _Alarm(
      'entropy',
      lambda value: value < log.entropy_alarm,
      lambda value, _: (
        f'Entropy is {value:.3g} nats per token, below log.entropy_alarm='
        f'{log.entropy_alarm:g}: completions of a prompt hardly differ; if the '
        'accuracy is not yet good, raise sampler.temperature or lower optim.lr.'
      ),
    ),
    _Alarm(
      'truncated',
      lambda value: value >= _ALL,
      lambda value, _: (
        f'{value:.1%} of the completions were cut at sampler.max_tokens: no '
        'answer is finished; raise sampler.max_tokens.'
      ),
    ),
    _Alarm('uniform_groups', lambda value: value >= _ALL, _uniform),
    _Alarm('loss', _not_finite, _broken('loss')),
    _Alarm('grad_norm', _not_finite, _broken('grad_norm')),
  ]


def _uniform(value: float, scalars: Mapping[str, float | None]) -> str:
  """Why nothing is learned, as far as the accuracy tells."""
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


def _not_finite(value: float) -> bool:
  return not math.isfinite(value)


def _broken(name: str):
  return lambda value, _: (
    f'{name} is {value}: the numbers of this run are no longer meaningful; go '
    'back to a checkpoint with a lower optim.lr.'
  )
