"""What a survey counts: reasons, duplicates, samples."""

import numpy as np
import pytest

from grpo_jax.config import Reward
from grpo_jax.data import ArithmeticSource
from grpo_jax.data import character_tokenizer
from grpo_jax.data import survey
from grpo_jax.data.survey import Part
from grpo_jax.run.build import data_survey

QUIET = lambda *_: None
DIGITS = character_tokenizer('0123456789+= ')


def read(source, longest=None, judges=(), split='train', most=0):
  widths = () if longest is None else (longest,)
  reader = survey.Reader(DIGITS, widths, data_survey.verifiers(judges))
  return reader.read(Part('x', split, source), most, QUIET)


def asked(*prompts, answer='1'):
  return [{'prompt': prompt, 'answer': answer} for prompt in prompts]


class Records(list):
  """A source that fails in its own ways."""

  def __getitem__(self, place):
    record = super().__getitem__(place)
    if isinstance(record, Exception):
      raise record
    return record


def test_every_reason_has_its_places():
  source = Records(
    [
      {'prompt': '1+1=', 'answer': '2'},
      {'answer': '2'},
      {'prompt': ''},
      'text',
      KeyError('gone'),
      ValueError('The line is broken.'),
      {'prompt': 'x', 'answer': '2'},
      {'prompt': '1' * 9, 'answer': '2'},
      {'prompt': '1' * 8, 'answer': '2'},
      {'prompt': '1', 'answer': 'none'},
      {'prompt': '2'},
      {'prompt': [{'role': 'user', 'content': '1'}], 'answer': '1'},
      {'prompt': '1' * 7, 'answer': '2'},  # as long as the width
    ]
  )
  got = read(source, longest=7, judges=[Reward('gsm8k')])
  reasons = {why.first: why.reason for why in got.unusable}
  words = {
    (1,): "no field 'prompt', but ['answer']",
    (2,): 'no usable prompt: it is empty',
    (3,): 'of type str, no dict',
    (4,): "cannot be read (KeyError: 'gone')",
    (5,): 'The line is broken.',
    (6,): 'not in the alphabet',
    (7, 8): 'longer than the largest width, 7 tokens',
    (9,): "gsm8k requires a number in the answer, but the example has 'none'",
    (10,): "gsm8k requires the field 'answer'",
    (11,): 'without a chat template a prompt must be a text',
  }
  assert {*reasons} == {*words}
  for places, reason in words.items():
    assert reason in reasons[places]
  assert [why.records for why in got.unusable if why.first == (7, 8)] == [2]
  assert got.rows['tokens'].tolist() == [
    4,
    -1,
    -1,
    -1,
    -1,
    -1,
    -1,
    9,
    8,
    1,
    1,
    -1,
    7,
  ]


def test_many_reasons_are_counted_together():
  source = Records(ValueError(f"Line {i} has '{i}x'.") for i in range(50))
  assert read(source).unusable == (("Line 0 has '0x'.", 50, (0, 1, 2)),)
  source = Records(ValueError(f'It is {"x" * i}.') for i in range(50))
  got = read(source)
  assert len(got.unusable) == 11
  assert got.unusable[-1] == ('other reasons', 40, (10, 11, 12))
  assert survey.duplicates([got]) == (0, 0, ())


def test_half_a_surrogate_pair_is_a_reason():
  got = read(asked('1', '\ud800', '\ud800'))
  ((reason, records, first),) = got.unusable
  assert (records, first) == (2, (1, 2)) and 'surrogate pair' in reason
  assert survey.duplicates([got]).exact == 0  # they were not read


@pytest.mark.parametrize(
  'judge, refuses',
  [
    (Reward('exact_match'), False),
    (Reward('number', kwargs={'absolute_tolerance': 0.1}), True),
    (Reward('multiple_choice', kwargs={'choices': 'XYZ'}), True),
    (Reward('completion_length', kwargs={'limit': 3}), False),
    (Reward('reasoning_gym'), False),  # needs a confined worker
    (Reward('tests.judges:even'), False),  # is not even imported
    (Reward('tests.no_such_module:even'), False),
    (Reward('grpo_jax.rewards.generated_code:python_tests'), True),
  ],
)
def test_verifiers_are_tried_on_references(judge, refuses):
  assert bool(read(asked('1', answer='W'), judges=[judge]).unusable) == refuses
  good = [{'prompt': '1', 'answer': '1', 'tests': ['assert 1']}]
  if judge.name != 'multiple_choice' or not refuses:
    assert not read(good, judges=[judge]).unusable
  with pytest.raises(ValueError, match="There is no reward 'exact_mach'"):
    read(good, judges=[Reward('exact_mach')])


def test_duplicates_are_exact_or_but_for_spaces_and_case():
  chat = lambda *texts: [{'role': 'user', 'content': text} for text in texts]
  train = read(
    asked(
      '1 + 1', '2', '1 + 1', ' 1  +\n1 ', 'A', 'a', '1 + 1', chat('A b'),
      chat('a\tB'), chat('a', 'b'), chat('ab'),
    )
  )  # fmt: skip
  found = survey.duplicates([train])
  assert (found.exact, found.loose) == (2, 5)
  places = [(one.place, other.place) for one, other in found.examples]
  assert places == [(0, 2), (0, 6), (0, 3), (4, 5), (7, 8)]
  held = read(asked('3', '2', 'a ', ' 2', '1 + 1'), split='heldout')
  found = survey.duplicates([held], [train])
  assert (found.exact, found.loose) == (2, 4)
  places = [(one.place, other.place) for one, other in found.examples]
  assert places == [(1, 1), (0, 4), (4, 2), (1, 3)]
  assert {one.part.split for one, _ in found.examples} == {'train'}
  assert survey.duplicates([held])[:2] == (0, 1)
  assert survey.duplicates([], [train]) == (0, 0, ())


def test_places_of_duplicates_are_those_of_their_own_source():
  one = read(Records([{}, *asked('7', '8')]))
  other = read(Records([KeyError(), *asked('9'), {}, *asked('8')]))
  ((first, later),) = survey.duplicates([one, other]).examples
  assert (first.part, first.place) == (one.part, 2)
  assert (later.part, later.place) == (other.part, 3)


def test_answers_that_differ_are_counted_by_prompt():
  same = asked('1', '1', '2')
  assert survey.contradictions([read(same)]) == 0
  differ = [*same, *asked('1', '1', answer='9'), *asked('3', answer='9')]
  assert survey.contradictions([read(differ)]) == 1
  assert survey.contradictions([]) == 0


def test_a_sample_is_random_and_always_the_same():
  got = read(ArithmeticSource('train'), most=100)
  assert (got.records, len(got.rows)) == (9000, 100)
  assert (np.diff(got.rows['place']) > 0).all()
  assert np.array_equal(
    got.rows['place'], read(ArithmeticSource('train'), most=100).rows['place']
  )
  # Of records in an order, no part is left out and no period is kept.
  assert np.histogram(got.rows['place'], 9, (0, 9000))[0].min() >= 4
  assert len({*np.diff(got.rows['place']).tolist()}) > 50


class Endless:
  """Records that cost nothing; only some are looked at."""

  looked = 0

  def __len__(self):
    return 10**9

  def __getitem__(self, place):
    type(self).looked += 1
    return {'prompt': str(place), 'answer': '1'}


def test_a_sample_of_many_records_is_quick():
  got = read(Endless(), most=500)
  assert Endless.looked == 500 and got.records == 10**9
