"""Tests of the arithmetic task: answers, split, demonstrations."""

import pickle

import numpy as np
import pytest

from grpo_jax import data


def _parse(record):
  prompt = record['prompt']
  assert len(prompt) == 6 and prompt[2] == '+' and prompt[5] == '='
  return int(prompt[:2]), int(prompt[3:5])


def _records(source):
  return [source[i] for i in range(len(source))]


@pytest.mark.parametrize('split, size', [('train', 9000), ('heldout', 1000)])
def test_every_answer_is_the_reversed_sum(split, size):
  records = _records(data.ArithmeticSource(split))
  assert len(records) == size
  for record in records:
    assert int(record['answer'][::-1]) == sum(_parse(record))
    assert record['answer'] == '0' or not record['answer'].endswith('0')


def test_splits_are_disjoint_and_cover_all_pairs():
  train, heldout = (
    {_parse(record) for record in _records(data.ArithmeticSource(split))}
    for split in ('train', 'heldout')
  )
  assert (len(train), len(heldout)) == (9000, 1000)
  assert len(train | heldout) == 10_000


def test_the_split_never_changes():
  train = data.ArithmeticSource('train')
  assert [train[i]['prompt'] for i in (0, 1, -1)] == [
    '35+77=',
    '89+25=',
    '59+92=',
  ]
  assert data.ArithmeticSource('heldout')[0]['prompt'] == '26+52='


def test_source_is_a_finite_sequence_and_pickles():
  source = pickle.loads(pickle.dumps(data.ArithmeticSource('heldout')))
  assert source == data.ArithmeticSource('heldout')
  assert len([record for record in source]) == 1000
  with pytest.raises(IndexError):
    source[1000]


def test_unknown_split_is_refused():
  with pytest.raises(ValueError, match="no split 'test'"):
    data.ArithmeticSource('test')


def _without_carries(first, second):
  digits = [
    (int(x) + int(y)) % 10
    for x, y in zip(f'{first:02}', f'{second:02}', strict=True)
  ]
  return str(int(''.join(map(str, digits))))[::-1]


@pytest.mark.parametrize('share', [0.0, 0.7, 1.0])
def test_the_given_share_of_demonstrations_drops_both_carries(share):
  demonstrations = data.arithmetic_demonstrations(4000, share, seed=3)
  dropped = kept = 0
  for record in _records(demonstrations):
    first, second = _parse(record)
    right = str(first + second)[::-1]
    wrong = _without_carries(first, second)
    assert record['answer'] in (right, wrong)
    if right != wrong:
      dropped += record['answer'] == wrong
      kept += record['answer'] == right
  deviation = (share * (1 - share) / (dropped + kept)) ** 0.5
  assert abs(dropped / (dropped + kept) - share) <= 4 * deviation


def test_dropping_carries_by_example():
  answers = {
    record['prompt']: record['answer']
    for record in _records(data.arithmetic_demonstrations(30_000, 1.0))
  }
  assert answers['47+85='] == '22'
  assert answers['05+03='] == '8'
  assert answers['50+50='] == '0'
  assert answers['12+34='] == '64'


def test_demonstrations_come_from_the_train_split_evenly():
  train = {record['prompt'] for record in data.ArithmeticSource('train')}
  demonstrations = data.arithmetic_demonstrations(20_000)
  drawn = [record['prompt'] for record in _records(demonstrations)]
  assert set(drawn) <= train
  expected = 9000 * (1 - np.exp(-20_000 / 9000))  # draws with replacement
  assert abs(len(set(drawn)) - expected) < 150


def test_a_pair_is_shown_both_ways():
  answers = {}
  for record in _records(data.arithmetic_demonstrations(40_000, 0.5)):
    answers.setdefault(record['prompt'], set()).add(record['answer'])
  assert np.mean([len(found) == 2 for found in answers.values()]) > 0.3


def test_a_draw_depends_on_seed_and_index_alone():
  short = data.arithmetic_demonstrations(50, seed=1)
  long = data.arithmetic_demonstrations(500, seed=1)
  assert [short[i] for i in reversed(range(50))] == [
    long[i] for i in reversed(range(50))
  ]
  other = data.arithmetic_demonstrations(50, seed=2)
  same = sum(short[i] == other[i] for i in range(50))
  assert same < 3
  shifted = sum(short[i + 1] == other[i] for i in range(49))
  assert shifted < 3  # no seed is another one moved by a draw


def test_demonstrations_end():
  demonstrations = data.arithmetic_demonstrations(5)
  assert len([record for record in demonstrations]) == 5
  with pytest.raises(IndexError):
    demonstrations[5]


@pytest.mark.parametrize(
  'arguments, message',
  [
    ({'num_draws': 0}, 'num_draws is 0'),
    ({'num_draws': 5, 'carry_free_share': 1.1}, 'carry_free_share is 1.1'),
    ({'num_draws': 5, 'seed': -1}, 'seed is -1'),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    data.arithmetic_demonstrations(**arguments)
