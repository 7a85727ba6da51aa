"""What each alarm takes for ill, when it speaks, and what it says."""

import math

import pytest

from grpo_jax.monitor import alarms as alarms_lib
from grpo_jax.run.build import about
from tests import runs

LIMITS = alarms_lib.Limits(kl=0.5, entropy=0.1, sampler_gap=0.25, oldest=2)
WELL = {
  'kl_old_k3': 0.5,
  'kl_ref_k3': 0.5,
  'entropy': 0.1,
  'sampler_gap': 0.25,
  'truncated': 0.99,
  'uniform_groups': 0.99,
  'nonfinite_loss': 0.0,
  'nonfinite_gradient': 0.0,
  'nonfinite_update': 0.0,
  'judged': 0.01,
  'age_2_ess': 0.5,
}


@pytest.mark.parametrize(
  'ill, words',
  [
    ({'kl_old_k3': 0.75}, ['sampling policy', '0.75 ', 'log.kl_alarm=0.5']),
    ({'kl_ref_k3': 0.75}, ['reference', '0.75 ', 'log.kl_alarm=0.5']),
    ({'kl_ref_k3': math.nan}, ['reference', 'nan']),
    ({'kl_old_k3': math.inf}, ['sampling policy', 'inf']),
    ({'entropy': 0.04}, ['0.04 ', 'log.entropy_alarm=0.1']),
    ({'sampler_gap': 0.5}, ['0.5 nats', 'log.sampler_gap_alarm=0.25']),
    ({'sampler_gap': math.nan}, ['nan', 'float32']),
    ({'sampler_gap': 0.5}, ['float32 they agree', 'truncate_token_importance']),
    ({'truncated': 0.9995}, ['100.0%', 'raise sampler.max_tokens']),
    ({'uniform_groups': 1.0, 'accuracy': 1.0}, ['100.0%', 'all answers are r']),
    ({'uniform_groups': 1.0, 'accuracy': 0.0}, ['100.0%', 'all answers are w']),
    ({'uniform_groups': 1.0, 'accuracy': 0.5}, ['sampler.temperature']),
    ({'uniform_groups': 1.0}, ['sampler.temperature']),
    ({'nonfinite_loss': 0.5}, ['loss of 50% of the updates', 'a reward']),
    ({'nonfinite_gradient': 1.0}, ['gradient of 100%', 'the method']),
    ({'nonfinite_update': 0.25}, ['update of 25%', 'optim.lr']),
    ({'age_2_ess': 0.499}, ['2 rollouts ago', '50%', 'lower sampler.ahead']),
    ({'judged': 0.0, 'uniform_groups': 1.0}, ['No completion was judged']),
  ],
)
def test_one_sentence_when_it_begins(ill, words):
  alarms = alarms_lib.Alarms(LIMITS)
  assert alarms(WELL) == []
  (sentence,) = alarms({**WELL, **ill})
  for word in words:
    assert word in sentence
  assert sentence.endswith('.') and len(sentence) < 200
  for _ in range(30):
    assert alarms({**WELL, **ill}) == []


@pytest.mark.parametrize(
  'dtypes',
  [
    {'residual_dtype': 'bfloat16', 'compute_dtype': 'bfloat16'},
    {'compute_dtype': 'bfloat16'},
  ],
)
def test_float32_is_advised_where_another_dtype_is_set(dtypes):
  limits = about.monitored(
    runs.small(**{f'model.{k}': v for k, v in dtypes.items()})
  ).limits
  (sentence,) = alarms_lib.Alarms(limits)({'sampler_gap': 0.5})
  fields = [
    name
    for name in ('residual_dtype', 'compute_dtype')
    if f'model.{name}' in sentence
  ]
  assert fields == list(dtypes) and 'use float32 in model.' in sentence
  assert sentence.endswith('.') and len(sentence) < 200


def test_in_a_replay_sampler_and_learner_may_differ():
  alarms = alarms_lib.Alarms(LIMITS, replays=True)
  (sentence,) = alarms({'sampler_gap': 9.0, 'age_2_ess': 0, 'entropy': 0.0})
  assert 'Entropy' in sentence


def test_of_ages_the_oldest_alone_alarms():
  """Metrics of ages are there only if something is drawn ahead."""
  for ahead in (1, 4):
    limits = about.monitored(runs.small(**{'sampler.ahead': ahead})).limits
    low = {f'age_{n}_ess': 0.1 for n in range(ahead)}
    alarms = alarms_lib.Alarms(limits)
    assert alarms(low) == []
    (sentence,) = alarms({**low, f'age_{ahead}_ess': 0.1})
    ago = {1: '1 rollout ago', 4: '4 rollouts ago'}[ahead]
    assert f'Tokens drawn {ago} are worth 10% as many' in sentence


def test_what_another_alarm_says_is_said_once_that_is_gone():
  alarms = alarms_lib.Alarms(LIMITS)
  equal = {'uniform_groups': 1.0, 'accuracy': 0.0}
  (unjudged,) = alarms({**equal, 'judged': 0.0})
  (uniform,) = alarms({**equal, 'judged': 1.0})
  assert 'judged' in unjudged and 'equal rewards' in uniform


@pytest.mark.parametrize(
  'taught, speaks',
  [
    # An earlier rollout may have had no advantage.
    ({'advantage_abs': 1.0, 'idle_steps': 3.0}, False),
    ({'advantage_abs': 0.0, 'idle_steps': 0.0}, False),  # none is skipped
    ({'advantage_abs': 0.0, 'idle_steps': 1.0}, True),
    ({}, False),
  ],
)
def test_equal_rewards_do_not_matter_to_what_a_teacher_gives(taught, speaks):
  """As long as updates are taken: a penalty beside equal rewards has none."""
  equal = {'uniform_groups': 1.0, 'judged': 1.0}
  alarms = alarms_lib.Alarms(LIMITS)
  said = alarms({**equal, **taught, 'kl_teacher_k1': 0.5})
  assert bool(said) == speaks
  assert alarms_lib.Alarms(LIMITS)({**equal, **taught})


def test_two_at_once_are_two_sentences():
  sentences = alarms_lib.Alarms(LIMITS)({'kl_old_k3': 9.0, 'entropy': 0.0})
  assert len(sentences) == 2


@pytest.mark.parametrize('healthy, speaks', [(9, False), (10, True)])
def test_again_only_after_it_was_gone_for_a_while(healthy, speaks):
  alarms = alarms_lib.Alarms(LIMITS)
  assert alarms({'entropy': 0.0})
  for value in [0.2] * 9 + [0.0] + [0.2] * healthy:
    assert alarms({'entropy': value}) == []
  assert bool(alarms({'entropy': 0.0})) == speaks


@pytest.mark.parametrize('absent', [{}, {'entropy': None}])
def test_what_was_not_measured_changes_nothing(absent):
  alarms = alarms_lib.Alarms(LIMITS)
  assert alarms(absent) == []
  assert alarms({'entropy': 0.0})
  for _ in range(30):
    assert alarms(absent) == []
  assert alarms({'entropy': 0.0}) == []
