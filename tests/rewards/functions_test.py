"""The reward functions of the package, case by case."""

import pytest

from grpo_jax import rewards

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
  'completion, answer, expected',
  [
    ('The total is 72.', '48/2 = 24, 48+24 = 72\n#### 72', 1),
    ('7 + 5 = 12, so 13', '#### 12', 0),
    ('$1,450.00 in all', '#### 1450', 1),
    ('-3', '#### -3', 1),
    ('3', '#### -3', 0),
    ('0.5', '.5 #### 0.50', 1),
    ('no idea', '#### 5', 0),
    ('', '#### 5', 0),
    ('5', 5, 1),
  ],
)
def test_last_number(completion, answer, expected):
  got = rewards.last_number('', completion, {'answer': answer})
  assert got == expected


@pytest.mark.parametrize(
  'completion, answer, expected',
  [
    (r'\boxed{42}', '42', 1),
    (r'\boxed{ 42 }', r'Thus \boxed{42}.', 1),
    (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}', 1),
    (r'\boxed{1/2}', r'\frac{1}{2}', 0),
    (r'first \boxed{1}, then \boxed{2}', '2', 1),
    (r'first \boxed{2}, then \boxed{1}', '2', 0),
    (r'\boxed{\{1, 2\}}', r'\{1,2\}', 1),
    (r'\boxed{12', '12', 0),
    ('42', '42', 0),
    (r'\boxed{$5$}', '5', 1),
  ],
)
def test_boxed_text(completion, answer, expected):
  assert rewards.boxed_text('', completion, {'answer': answer}) == expected


@pytest.mark.parametrize('name', ['exact_match', 'last_number', 'boxed_text'])
def test_without_an_answer_the_field_is_named(name):
  with pytest.raises(ValueError, match=f"{name} requires the field 'answer'"):
    getattr(rewards, name)('', '1', {'prompt': 'a'})


def test_an_answer_without_a_number_is_refused():
  with pytest.raises(ValueError, match="has 'none'; give another reward"):
    rewards.last_number('', '1', {'answer': 'none'})
