"""What stands below a chart can be understood without the code."""

import re

import pytest

from grpo_jax.lab.report import words

NAMES = sorted(words._MEANINGS)


@pytest.mark.parametrize('name', ['clipped_high', 'clipped_low', 'clipped_cap'])
def test_the_ratio_is_explained_where_tokens_are_clipped_by_it(name):
  said = words.measured(name)
  assert 'how many times as probable a token is now as when it was' in said


def test_effective_sample_size_says_what_is_counted():
  assert words.label('ess_token') == 'effective sample size'
  said = words.measured('ess_token')
  assert said.startswith('How many tokens of equal weight would tell as much')


@pytest.mark.parametrize(
  'end, unit',
  [
    ('share', '%'),
    ('log_ratio', 'nats per token'),
    ('kl', 'nats per token'),
    ('clipped', '%'),
    ('ess', '%'),
  ],
)
def test_a_metric_of_an_age_says_who_drew(end, unit):
  labels = set()
  for age, who in (
    (0, 'the policy that learns'),
    (1, 'a policy one rollout older'),
    (12, 'a policy 12 rollouts older'),
  ):
    name = f'age_{age}_{end}'
    assert words.label(name).endswith(f', age {age}')
    labels.add(words.label(name))
    assert words.unit(name) == unit
    said = words.measured(name)
    assert f'Of tokens that {who} has drawn.' in said
    assert said.endswith('In nats per token.') == (unit != '%')
  assert len(labels) == 3


def test_a_metric_of_ones_own_has_its_own_name():
  assert words.label('age_of_records') == 'age of records'
  assert words.label('age_1_other') == 'age 1 other'
  assert words.measured('age_1_other') == ''


def test_the_difference_of_halves_says_what_it_is_for():
  assert words.label('geometry_within').startswith('dependence on')
  said = words.measured('geometry_within')
  assert said.startswith('How much the gradient of a prompt depends on which')


@pytest.mark.parametrize('name', NAMES)
def test_a_name_of_a_paper_stands_with_the_paper_and_its_meaning(name):
  said = words.measured(name)
  for short in re.findall(r'\b[AR]\d\b|\bM\b', said):
    assert 'Ge et al. (arXiv:2601.23135) is that' in said, short
  if 'assumption' in words.label(name):
    assert 'Ge et al.' in said
