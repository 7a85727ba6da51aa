"""Tests of prompt streams: random access, epochs, proportions, position."""

import pytest

from grpo_jax import data

pytestmark = pytest.mark.quick


class Letters:
  """A source of dicts that counts its reads."""

  def __init__(self, letters):
    self.letters = letters
    self.reads = 0

  def __len__(self):
    return len(self.letters)

  def __getitem__(self, index):
    self.reads += 1
    return {'prompt': self.letters[index]}


def _text(stream, start, stop):
  return ''.join(stream[i]['prompt'] for i in range(start, stop))


def test_every_epoch_is_another_permutation():
  stream = data.prompt_stream(Letters('abcdefghij'), seed=0)
  epochs = [_text(stream, 10 * k, 10 * k + 10) for k in range(20)]
  assert all(sorted(epoch) == list('abcdefghij') for epoch in epochs)
  assert len(set(epochs)) > 18


def test_rows_depend_on_seed_and_index_alone():
  def stream(seed):
    return data.prompt_stream(data.ArithmeticSource('train'), seed)

  places = [20_001, 5, 2**40, 9000, 0]
  forwards = [stream(7)[i] for i in sorted(places)]
  assert [stream(7)[i] for i in reversed(sorted(places))] == forwards[::-1]
  assert [stream(8)[i] for i in sorted(places)] != forwards


def test_the_next_seed_is_not_the_next_epoch():
  first, second = (data.prompt_stream(Letters('abcdefghij'), s) for s in (0, 1))
  assert _text(first, 10, 20) != _text(second, 0, 10)


def test_a_row_is_read_without_the_rows_before_it():
  source = Letters('abc')
  data.take(data.prompt_stream(source, seed=0), 10**12, 2)
  assert source.reads == 2


@pytest.mark.parametrize(
  'weights, share',
  [([3, 1], 0.75), ([0.5, 0.5], 0.5), ([0.2, 0.8], 0.2), ([5, 0.05], 0.99)],
)
def test_mixture_keeps_proportions_in_every_stretch(weights, share):
  # Not tiny: grain shuffles a source of n rows by 65536 / n tries per row.
  stream = data.mixture([Letters('a' * 300), Letters('b' * 500)], weights, 0)
  for start in (0, 137, 10**9):
    count = _text(stream, start, start + 400).count('a')
    assert abs(count - 400 * share) <= 1.5


def test_mixture_holds_every_row_of_each_source_once_per_epoch():
  stream = data.mixture([Letters('abcd'), Letters('wxyz')], [1, 1], seed=3)
  assert sorted(_text(stream, 0, 8)) == sorted('abcdwxyz')
  assert sorted(_text(stream, 8, 16)) == sorted('abcdwxyz')


def test_sources_of_a_mixture_are_shuffled_apart():
  letters = 'abcdefghijklmnopqrst'
  stream = data.mixture(
    [Letters(letters), Letters(letters.upper())], [1, 1], seed=0
  )
  text = _text(stream, 0, 40)
  lower = [letter for letter in text if letter.islower()]
  upper = [letter.lower() for letter in text if letter.isupper()]
  assert sorted(lower) == sorted(upper) and lower != upper


def test_mixture_depends_on_the_seed():
  def text(seed):
    return _text(data.mixture([Letters('abcdefghij')] * 2, [1, 1], seed), 0, 20)

  assert text(0) == text(0) != text(1)


def test_a_mixture_of_one_source_is_its_stream():
  letters = Letters('abcdefghij')
  one = data.mixture([letters], [0.3], seed=5)
  assert _text(one, 0, 30) == _text(data.prompt_stream(letters, 5), 0, 30)


def test_weights_are_rounded_and_not_cut():
  """0.21 beside 0.07 is 3 to 1, though 0.21 * (100 / 0.07) is below 300."""
  sources = [Letters('a' * 300), Letters('b' * 300)]
  stream = data.mixture(sources, [0.21, 0.07], seed=0)
  even = data.mixture(sources, [3, 1], seed=0)
  assert _text(stream, 2**30, 2**30 + 900) == _text(even, 2**30, 2**30 + 900)


@pytest.mark.parametrize(
  'letters, weights',
  [
    (['abcdefgh'], [2]),
    (['abcd', 'wxyz'], [1, 1]),
    (['abcd', 'vwxyz'], [5, 0.05]),
    # In these, grain's rounding puts the last source behind its share.
    (['a', 'bc', 'defghij'], [7, 3, 0.6432777]),
    (['abcde', 'fghi', 'jklm', 'nopqrst'], [2, 3, 1, 1.7]),
  ],
)
def test_an_epoch_of_a_mixture_holds_every_record(
  letters, weights, monkeypatch
):
  """From the start on; and twice as many rows do from anywhere."""
  import grain

  def unshuffled(source, seed):  # to shuffle a few rows, grain takes long
    return grain.MapDataset.source(source).repeat(None)

  monkeypatch.setattr('grpo_jax.data._prompts.prompt_stream', unshuffled)
  sources = [Letters(some) for some in letters]
  stream = data.mixture(sources, weights, seed=1)
  epoch = data.epoch_rows(sources, weights)
  assert set(_text(stream, 0, epoch)) == set(''.join(letters))
  for start in (1, 7, 10**9 + 3):
    # One record less than two rounds of a source hold a whole one of any order.
    text = _text(stream, start, start + 2 * epoch)
    for some in letters:
      assert sum(letter in some for letter in text) >= 2 * len(some) - 1
  if len(letters) == 1:
    assert epoch == len(letters[0])


def test_take_continues_where_it_stopped():
  stream = data.prompt_stream(Letters('abcdefg'), seed=0)
  whole = data.take(stream, 0, 30)
  assert whole == data.take(stream, 0, 11) + data.take(stream, 11, 19)
  assert [row['index'] for row in whole] == list(range(30))
  assert [row['prompt'] for row in whole] == list(_text(stream, 0, 30))
  assert type(data.take(stream, 2**40, 1)[0]['index']) is int


def test_a_field_record_index_of_the_source_stays():
  (row,) = data.take([{'prompt': 'a', 'index': 7, 'record_index': 'x'}], 0, 1)
  assert row == {'prompt': 'a', 'index': 0, 'record_index': 'x'}


def test_take_leaves_the_record_of_the_source_alone():
  records = [{'prompt': 'a'}]
  data.take(records, 0, 1)[0]['extra'] = 1
  assert records == [{'prompt': 'a'}]


@pytest.mark.parametrize('start, count', [(-1, 1), (0, 4), (3, 1), (0, -1)])
def test_take_refuses_rows_outside_a_finite_dataset(start, count):
  import grain

  dataset = grain.MapDataset.source(Letters('abc'))  # wraps round by itself
  with pytest.raises(ValueError, match=f'Rows {start} to .* of 3 rows'):
    data.take(dataset, start, count)


def test_take_refuses_records_that_it_cannot_number():
  with pytest.raises(ValueError, match='Row 1 .* of type str'):
    data.take([{'prompt': 'a'}, 'b'], 0, 2)


def test_bad_streams_are_refused():
  with pytest.raises(ValueError, match='is empty'):
    data.prompt_stream([], seed=0)
  with pytest.raises(ValueError, match='seed of a prompt stream is -1'):
    data.prompt_stream(['a'], seed=-1)
  with pytest.raises(ValueError, match='is 4294967296'):
    data.mixture([['a']], [1], seed=2**32)


@pytest.mark.parametrize(
  'sources, weights, message',
  [
    ([], [], '0 sources'),
    ([['a'], ['b']], [1], '2 sources was given 1 weights'),
    ([['a'], ['b']], [1, 0], 'positive and finite'),
    ([['a'], ['b']], [1, float('nan')], 'positive and finite'),
    ([['a'], []], [1, 1], 'is empty'),
  ],
)
def test_bad_mixtures_are_refused(sources, weights, message):
  with pytest.raises(ValueError, match=message):
    data.mixture(sources, weights, seed=0)
  if 'empty' not in message:
    with pytest.raises(ValueError, match=message):
      data.epoch_rows(sources, weights)
