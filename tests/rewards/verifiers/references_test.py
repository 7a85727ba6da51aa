"""References that are lists, numbers and dicts, and lack of memory."""

import datetime
import decimal
from fractions import Fraction
import math

import numpy as np
import pytest

from grpo_jax import rewards
from grpo_jax.rewards.verifiers import mathematics
from tests.rewards.verifiers import golden_test

needs_math = golden_test.needs('math_equivalence')


@pytest.mark.parametrize(
  'name, answer, completion, reward',
  [
    ('exact_match', ['72', 'seventy-two'], 'seventy-two', 1),
    ('exact_match', ['72', 'seventy-two'], 'seventy', 0),
    ('exact_match', (72.0, 73), '73', 1),
    ('exact_match', np.array(['a', 'b']), 'b', 1),
    ('boxed_text', ['\\frac12', '0.5'], '\\boxed{0.5}', 1),
    ('boxed_text', ['\\frac12', '0.5'], '\\boxed{1/2}', 0),
    ('gsm8k', ['72', 'seventy-two'], '#### 72', 1),
    ('gsm8k', [71, 72], '#### 73', 0),
    ('last_number', [71, 72.0], 'It is 72.', 1),
    ('number', ['1/3', 0.5], '50%', 1),
    ('number', ['1/3', 0.5], '0.25', 0),
    ('multiple_choice', ['A', 'C'], 'The answer is C.', 1),
    ('multiple_choice', ['A', 'C'], 'The answer is B.', 0),
    pytest.param(
      'math_equivalence', ['x=1', '50\\%'], '\\boxed{0.5}', 1, marks=needs_math
    ),
    pytest.param(
      'math_equivalence', ['x=1', 'x=2'], '\\boxed{x=3}', 0, marks=needs_math
    ),
    pytest.param(
      'json_schema', [{'type': 'null'}, {'type': 'integer'}], '5', 1,
      marks=golden_test.needs('json_schema'),
    ),
    pytest.param(
      'json_schema', [{'type': 'null'}, {'type': 'integer'}], '"5"', 0,
      marks=golden_test.needs('json_schema'),
    ),
  ],
)  # fmt: skip
def test_any_item_of_a_list_is_right(name, answer, completion, reward):
  got = getattr(rewards, name)('', completion, {'answer': answer})
  assert (type(got), got) == (float, reward)


@pytest.mark.parametrize(
  'answer',
  [
    72, 72.0, 7.2e1, np.float32(72), np.int64(72), np.array(72.0),
    decimal.Decimal('72.00'), Fraction(144, 2), '72', b'72', [b'72'],
  ],
  ids=repr,
)  # fmt: skip
def test_numbers_are_numbers(answer):
  for name, completion in (
    ('exact_match', '72'),
    ('boxed_text', '\\boxed{72}'),
    ('gsm8k', '#### 72'),
    ('last_number', '72'),
    ('number', '72'),
  ):
    verifier = getattr(rewards, name)
    assert verifier('', completion, {'answer': answer}) == 1, name
    wrong = completion.replace('72', '73')
    assert verifier('', wrong, {'answer': answer}) == 0, name


def test_a_small_float_is_no_number_with_an_exponent():
  example = {'answer': 0.1 + 0.2}
  assert rewards.gsm8k('', '#### 0.30000000000000004', example) == 1
  assert rewards.last_number('', '0.000015', {'answer': 1.5e-05}) == 1
  assert rewards.exact_match('', '1e5', {'answer': 100000.0}) == 1
  for huge in '1e999999999', '7_2', 'nan', '٧٢', '9' * 500:
    assert rewards.exact_match('', huge, {'answer': 72.0}) == 0


@pytest.mark.parametrize('answer', [True, np.bool_(True), [True], '[x]'])
def test_truth_values_are_written_in_two_ways(answer):
  for name, form in ('exact_match', '{}'), ('boxed_text', '\\boxed{{{}}}'):
    for word in 'True', 'true', 'False', '1':
      wanted = answer != '[x]' and word.casefold() == 'true'
      verifier = getattr(rewards, name)
      assert verifier('', form.format(word), {'answer': answer}) == wanted


LONG = '123456789012345678901234567890.125'


@pytest.mark.parametrize(
  'answer, completion',
  [
    (10**400, str(10**400)),  # which is no float
    (decimal.Decimal(LONG), LONG),  # more digits than Python's decimal keeps
    (decimal.Decimal('1E+30'), '1' + '0' * 30),
  ],
)
def test_numbers_of_any_length_are_exact(answer, completion):
  assert rewards.exact_match('', completion, {'answer': answer}) == 1
  assert rewards.exact_match('', completion[:-1] + '7', {'answer': answer}) == 0
  assert rewards.answers('', {'answer': answer})[0].text == completion


@pytest.mark.parametrize('answer', [' B ', '1 ', 1.0, b'B', [' C', 1]])
def test_a_choice_may_be_a_number_or_have_white_space_around_it(answer):
  assert (
    rewards.multiple_choice('', 'The answer is B.', {'answer': answer}) == 1
  )
  assert (
    rewards.multiple_choice('', 'The answer is D.', {'answer': answer}) == 0
  )


@golden_test.needs('json_schema')
def test_true_and_false_are_schemas():
  assert rewards.json_schema('', '5', {'answer': True}) == 1
  assert rewards.json_schema('', '5', {'answer': False}) == 0
  for no_schema in 5, '[]', '"a"':
    with pytest.raises(ValueError, match='not valid: it is no object'):
      rewards.json_schema('', '5', {'answer': no_schema})


@pytest.mark.parametrize(
  'answer, message',
  [
    (decimal.Decimal('sNaN'), 'a finite number'),
    (decimal.Decimal('1e999999999'), 'a finite number'),
    (
      {'style': 'rule', 'ground_truth': '72'},
      r"a dict with the fields \['ground_truth', 'style'\]; name the one.*in"
      r" config.data.answer_field.*'answer.ground_truth'",
    ),
    ([{'text': '72'}], r"a dict with the fields \['text'\]"),
    ([], r'at least one item.*\[\]'),
    (None, 'a text, a number or a list of these.*None'),
    ([['72']], r"a text, a number or a list of these.*\['72'\]"),
    (math.nan, 'a finite number.*nan'),
    (math.inf, 'a finite number.*inf'),
    (datetime.date(2026, 1, 1), 'a text, a number or a list of these'),
  ],
)
def test_what_is_no_reference_is_refused(answer, message):
  for name in 'exact_match', 'gsm8k', 'number', 'multiple_choice', 'boxed_text':
    with pytest.raises(ValueError, match=f'{name} requires.*{message}'):
      getattr(rewards, name)('', '72', {'answer': answer})


class Scarce:
  """math-verify on a machine whose memory is short at first."""

  def __init__(self, library, shortage):
    self.library, self.shortage = library, list(shortage)

  def read(self, text):
    for kind in self.shortage[:1]:
      self.shortage.pop(0)
      raise kind
    return self.library.read(text)

  def __getattr__(self, name):
    return getattr(self.library, name)


@needs_math
@pytest.mark.parametrize('kind', [MemoryError, RecursionError])
def test_a_lack_of_memory_is_not_remembered(monkeypatch, kind):
  scarce = Scarce(mathematics._library(), [kind, kind])
  monkeypatch.setattr(mathematics, '_library', lambda: scarce)
  mathematics._parsed.cache_clear()
  example = {'answer': '\\frac{3}{14}'}
  for _ in range(2):  # the reference could not be read
    if kind is MemoryError:  # and the completion is not wrong for that
      with pytest.raises(MemoryError):
        rewards.math_equivalence('', '\\boxed{6/28}', example)
    else:
      assert rewards.math_equivalence('', '\\boxed{6/28}', example) == 0
  assert rewards.math_equivalence('', '\\boxed{6/28}', example) == 1
  scarce.shortage.append(MemoryError)  # now of the completion
  assert rewards.math_equivalence('', '\\boxed{9/42}', example) == 0
  assert rewards.math_equivalence('', '\\boxed{9/42}', example) == 1


@needs_math
def test_the_module_of_others_is_left_alone():
  import math_verify
  from math_verify import grader
  import sympy

  mathematics._library()
  small = sympy.Float('1e-9'), sympy.Float('2e-9')
  assert grader.sympy_numeric_eq.__module__ == 'math_verify.grader'
  assert math_verify.verify(*small)  # as it always was
