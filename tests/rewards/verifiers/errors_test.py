"""What verifiers refuse: references they cannot use, and wrong parameters."""

import socket
import sys
import urllib.request

import pytest

from grpo_jax import rewards
from grpo_jax.rewards.verifiers import choice
from grpo_jax.rewards.verifiers import form
from grpo_jax.rewards.verifiers import mathematics
from grpo_jax.rewards.verifiers import numbers
from tests.rewards.verifiers import golden_test

WITH_ANSWER = [
  'exact_match',
  'last_number',
  'boxed_text',
  'gsm8k',
  'number',
  'multiple_choice',
  pytest.param('math_equivalence', marks=golden_test.needs('math_equivalence')),
  pytest.param('json_schema', marks=golden_test.needs('json_schema')),
]


@pytest.mark.parametrize('name', WITH_ANSWER)
@pytest.mark.parametrize('completion', ['', '5', '\\boxed{5}'])
def test_without_an_answer_the_field_is_named(name, completion):
  with pytest.raises(ValueError, match=f"{name} requires the field 'answer'"):
    getattr(rewards, name)('', completion, {'prompt': 'a'})


@pytest.mark.parametrize(
  'name, answer, message',
  [
    ('gsm8k', 'none', "gsm8k requires a number in.*'none'"),
    ('gsm8k', '9' * 401, 'gsm8k requires a number'),
    ('last_number', '', 'last_number requires a number'),
    ('number', '1/0', "number requires a number.*'1/0'"),
    ('number', '\\boxed{}', 'number requires a number'),
    ('boxed_text', ' ', 'boxed_text requires a text that is not empty'),
    ('boxed_text', '\\boxed{}', 'boxed_text requires'),
    ('multiple_choice', 'E', "one of the choices A, B, C, D in.*'E'"),
    ('multiple_choice', '4', 'one of the choices'),
    ('multiple_choice', 'A or B', 'one of the choices'),
  ],
)
def test_an_unusable_answer_is_refused(name, answer, message):
  with pytest.raises(ValueError, match=message):
    getattr(rewards, name)('', '5', {'answer': answer})


@golden_test.needs('math_equivalence')
@pytest.mark.parametrize('answer', ['', '$$', '1' * 1001, '{' * 21, '9^9^9^9'])
def test_an_unusable_answer_of_mathematics_is_refused(answer):
  with pytest.raises(ValueError, match='math_equivalence requires an expr'):
    rewards.math_equivalence('', '\\boxed{5}', {'answer': answer})


@golden_test.needs('math_equivalence')
def test_an_answer_that_cannot_be_parsed_is_compared_as_text():
  example = {'answer': '\\frac{1}{'}
  assert rewards.math_equivalence('', '\\boxed{5}', example) == 0


@pytest.mark.parametrize(
  'name, arguments, message',
  [
    ('number', {'absolute_tolerance': -1}, 'absolute_tolerance of.* is -1'),
    ('number', {'absolute_tolerance': float('inf')}, 'tolerance of.* is inf'),
    ('number', {'relative_tolerance': float('nan')}, 'relative_tol.* is nan'),
    ('multiple_choice', {'choices': ['A', 'B']}, 'different capital letters'),
    ('multiple_choice', {'choices': ''}, "choices of the reward.*''"),
    ('multiple_choice', {'choices': 'abc'}, 'different capital letters'),
    ('multiple_choice', {'choices': 'AAB'}, 'different capital letters'),
    ('format_tags', {'tags': 'think'}, "tags of the reward.* are 'think'"),
    ('format_tags', {'tags': []}, 'one or more different names'),
    ('format_tags', {'tags': ['a', 'a']}, 'one or more different names'),
    ('format_tags', {'tags': ['<a>']}, 'one or more different names'),
    ('completion_length', {}, 'limit=None and target=None'),
    ('completion_length', {'limit': 1, 'target': 0}, 'limit=1 and target=0'),
    ('completion_length', {'limit': -1}, 'a length of -1'),
    ('completion_length', {'limit': 1, 'margin': -2}, 'margin=-2'),
    ('completion_length', {'limit': 1, 'unit': 'words'}, "'words'"),
    ('completion_length', {'limit': 1}, "requires the field 'completion_ids'"),
    ('regular_expression', {'regex': '('}, 'not valid'),
    ('regular_expression', {'regex': 'a', 'flags': 'q'}, 'q is unknown'),
    ('regular_expression', {'regex': '(a+)+$'}, 'exponential'),
    ('regular_expression', {'regex': '(?:a|ab)*$'}, 'exponential'),
    ('regular_expression', {'regex': r'((\w*) ?)*$'}, 'exponential'),
    ('regular_expression', {'regex': '(a{1,9})*$'}, 'exponential'),
    ('regular_expression', {'regex': '(a?a?){9}$'}, 'exponential'),
    ('regular_expression', {'regex': '(a+){1,99}$'}, 'exponential'),
    ('regular_expression', {'regex': '(?=(a*)*b)'}, 'exponential'),
    ('regular_expression', {'regex': '((a?b){2})*$'}, 'exponential'),
    ('regular_expression', {'regex': '(?>(a+)+)'}, 'exponential'),
    ('regular_expression', {'regex': '(x)?(?(1)(a*)*|b)'}, 'exponential'),
  ],
)
def test_wrong_parameters_are_refused(name, arguments, message):
  with pytest.raises(ValueError, match=message):
    getattr(rewards, name)('', 'a', {'answer': '1'}, **arguments)


@pytest.mark.parametrize(
  'name, cache, arguments',
  [
    ('number', numbers._tolerances, {'absolute_tolerance': 0.125}),
    ('multiple_choice', choice._patterns, {'choices': 'ABC'}),
    ('format_tags', form._form, {'tags': ['a', 'b']}),
    (
      'completion_length',
      form._check_length,
      {'limit': 17, 'unit': 'characters'},
    ),
    ('regular_expression', form._compile, {'regex': 'a+b', 'flags': 'i'}),
    pytest.param(
      'json_schema',
      form._validator,
      {'schema': {'type': 'null'}},
      marks=golden_test.needs('json_schema'),
    ),
  ],
)
def test_parameters_are_checked_once(name, cache, arguments):
  answer = 'A' if name == 'multiple_choice' else '1'
  cache.cache_clear()
  for completion in ('1', 'A', '<a>1</a>'):
    getattr(rewards, name)('', completion, {'answer': answer}, **arguments)
  assert cache.cache_info().misses == 1 and cache.cache_info().hits >= 2


@pytest.mark.parametrize(
  'regex',
  [
    'a+b+',
    '(a++)+',
    '(?>a+)*',
    '(ab)+',
    '(a{1,9}+)*',
    '(a{2})*',
    '(a?b){2}|a',
    '(?>a|bc)*',
    '[ab]*',
    '(a|b)',
  ],
)
def test_other_repetitions_are_allowed(regex):
  assert rewards.regular_expression('', 'ab', {}, regex=regex) == 1


@golden_test.needs('json_schema')
@pytest.mark.parametrize(
  'schema, message',
  [
    ({'type': 'number '}, "'number ' is not valid"),
    ({'$ref': 'http://127.0.0.1:9/a.json'}, 'Unresolvable'),
    ({'$ref': '#/nothing'}, 'PointerToNowhere|Unresolvable'),
    ({'pattern': '('}, "is not a 'regex'"),
    ({'x': object()}, 'TypeError'),
  ],
)
def test_wrong_schemas_are_refused(monkeypatch, schema, message):
  reached = []
  # What jsonschema raises for it is the same as without a network.
  connect = lambda *arguments: reached.append(arguments)
  monkeypatch.setattr(socket.socket, 'connect', connect)
  monkeypatch.setattr(urllib.request, 'urlopen', connect)
  with pytest.raises(ValueError, match=f'json_schema is not valid.*{message}'):
    rewards.json_schema('', '"a"', {}, schema=schema)
  assert not reached


@golden_test.needs('json_schema')
def test_the_answer_may_be_the_schema():
  for answer in ({'type': 'integer'}, '{"type": "integer"}'):
    assert rewards.json_schema('', '5', {'answer': answer}) == 1
    assert rewards.json_schema('', '"5"', {'answer': answer}) == 0
  with pytest.raises(ValueError, match='json_schema is not valid'):
    rewards.json_schema('', '5', {'answer': '{'})


@pytest.mark.parametrize(
  'name, package, extra, cache',
  [
    ('math_equivalence', 'math_verify', 'math', mathematics._library),
    ('json_schema', 'jsonschema', 'json', form._validator),
  ],
)
def test_a_missing_package_is_named(monkeypatch, name, package, extra, cache):
  cache.cache_clear()
  monkeypatch.setitem(sys.modules, package, None)
  message = f"{name} requires.*pip install 'grpo_jax.{extra}.'"
  try:
    with pytest.raises(ValueError, match=message):
      getattr(rewards, name)('', '5', {'answer': '5'})
  finally:
    cache.cache_clear()


def test_verifiers_are_found_by_name():
  for name in rewards.verifiers.__all__:
    assert rewards.resolve(name) is getattr(rewards, name)
