"""Fields of a batch that come from records."""

import fractions
import math

import numpy as np
import pytest

from grpo_jax.episodes import rollout as rollout_lib
from grpo_jax.rollouts import batch_fields
from grpo_jax.rollouts.batch_fields import BatchField

pytestmark = pytest.mark.quick

RECORDS = [{'prompt': 'a', 'weight': 2}, {'prompt': 'b', 'weight': 0.5}]
TOKENS = np.arange(16, dtype=np.int32).reshape(2, 2, 4)
LENGTH = np.array([[3, 4], [1, 2]], np.int32)


def made():
  """Two prompts with two completions each, in rows of 4 and a bit."""
  blank = rollout_lib.blank(2, 2, 1, 4, 1, (4,))
  return blank._replace(
    batch=blank.batch._replace(tokens=TOKENS), length=LENGTH
  )


def by_token(record, ids):
  return [10 * record['weight'] + i for i in ids]


def test_a_number_of_each_record_and_one_of_each_token():
  fields = [BatchField('weight'), BatchField('mine', by_token)]
  before = made()
  got = batch_fields.with_fields(before, RECORDS, fields)
  extras = got.batch.extras
  assert {*extras} == {'weight', 'mine', *before.batch.extras}
  assert extras['weight'].dtype == extras['mine'].dtype == np.float32
  np.testing.assert_array_equal(extras['weight'], [[2, 2], [0.5, 0.5]])
  inside = np.arange(4) < LENGTH[..., None]
  first = np.array([20, 5])[:, None, None]
  np.testing.assert_array_equal(
    extras['mine'], np.where(inside, TOKENS + first, 0)
  )
  shapes = batch_fields.with_ones(before, fields).batch.extras
  for name, x in extras.items():
    assert (x.shape, x.dtype) == (shapes[name].shape, shapes[name].dtype)


def test_a_process_fills_the_tokens_of_its_own_groups():
  """And the numbers of all: every process has the records."""
  held = made()._replace(holder=np.array([1, 0]))
  fields = [BatchField('weight'), BatchField('mine', by_token)]
  extras = batch_fields.with_fields(held, RECORDS, fields).batch.extras
  assert not extras['mine'][0].any() and extras['mine'][1].any()
  assert extras['weight'].all()


def test_a_function_may_change_what_it_is_given():
  def empties(record, ids):
    numbers = [record.pop('weight') for _ in ids[:1]] * len(ids)
    ids.clear()
    return numbers

  records = [dict(record) for record in RECORDS]
  got = batch_fields.with_fields(made(), records, [BatchField('mine', empties)])
  assert records == RECORDS and got.batch.extras['mine'][1, 1, 1] == 0.5


@pytest.mark.parametrize(
  'value, number',
  [
    (3, 3.0), (True, 1.0), (np.float32(0.1), np.float32(0.1)),
    (np.bool_(True), 1.0), (np.int64(-2), -2.0),
    (fractions.Fraction(1, 2), 0.5), (3.4e38, 3.4e38),
  ],
)  # fmt: skip
def test_a_number_may_be_of_any_kind(value, number):
  assert batch_fields.number_of({'weight': value}, 'weight') == number


@pytest.mark.parametrize(
  'record, words',
  [
    ({'prompt': 'b', 'wieght': 1}, "no field 'weight', but prompt, wieght;"),
    ({'weight': 'high'}, "weight is 'high', no number"),
    ({'weight': None}, 'weight is None, no number'),
    ({'weight': [1.0]}, r'weight is \[1.0\], no number'),
    ({'weight': np.ones(1)}, r'weight is array\(\[1.\]\), no number'),
    ({'weight': 1j}, 'weight is 1j, no number'),
    ({'weight': math.nan}, 'weight is nan, which is no finite number'),
    ({'weight': -math.inf}, 'weight is -inf, which is no finite'),
    ({'weight': 1e39}, r'weight is 1e\+39, which is no finite number of float'),
    ({'weight': 10**400}, 'which is no finite number'),
  ],
)
def test_a_record_without_a_number_is_refused(record, words):
  records = [RECORDS[0], {'prompt': 'b', **record}]
  words = f"The record of the prompt 'b' cannot be used: i.*{words}"
  with pytest.raises(ValueError, match=words):
    batch_fields.with_fields(made(), records, [BatchField('weight')])


def raises(record, ids):
  raise KeyError('no answer')


@pytest.mark.parametrize(
  'function, words',
  [
    (raises, "raised KeyError: 'no answer', for the prompt 'a'; correct the"),
    (lambda record, ids: ['x'] * len(ids), 'which are no real numbers'),
    (lambda record, ids: 'x', "returned 'x', which are no real numbers"),
    (lambda record, ids: None, 'returned None, which are no real numbers'),
    (lambda record, ids: np.ones(len(ids), complex), 'no real numbers'),
    (lambda record, ids: np.ones(len(ids), object), 'no real numbers'),
    (lambda record, ids: [[1.0], [1.0, 2.0]], 'raised ValueError: '),
    (lambda record, ids: 1.0, r'an array of shape \(\), for the prompt'),
    (lambda record, ids: ids[1:], r'shape \(2,\), .* a completion of 3 ids'),
    (lambda record, ids: [ids], r'an array of shape \(1, 3\)'),
    (lambda record, ids: [math.nan] * len(ids), 'a number that is not finite'),
    (lambda record, ids: [1e39] * len(ids), 'not finite in float32'),
  ],
)
def test_a_function_that_returns_something_else_is_refused(function, words):
  with pytest.raises(ValueError, match=f"of the field 'mine' .*{words}"):
    batch_fields.with_fields(made(), RECORDS, [BatchField('mine', function)])
