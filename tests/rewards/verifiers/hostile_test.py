"""No completion makes a verifier fail, or work without bound."""

from concurrent import futures
import signal
import time

import pytest

from grpo_jax import rewards
from grpo_jax.rewards import verifiers
from grpo_jax.rewards.verifiers import mathematics
from tests import pace
from tests.rewards.verifiers import golden_test
from tests.rewards.verifiers import hostile

EXAMPLE = {'answer': '5', 'completion_ids': [1]}
ARGUMENTS = {
  'multiple_choice': {'choices': 'ABCDEF'},  # 5 is the last of these
  'regular_expression': {'regex': r'(?<!\d)\d++x$'},
  'completion_length': {'limit': 0, 'margin': 2},
  'json_schema': {'schema': {'type': 'object', 'required': ['x']}},
}


class Reader:
  """math-verify, but it only remembers what it was given to parse."""

  def __init__(self):
    self.texts = []

  def read(self, text):
    self.texts.append(text)
    return text

  def verify(self, wanted, found):
    return False


@pytest.fixture
def reader(monkeypatch):
  mathematics._parsed.cache_clear()
  reader = Reader()
  monkeypatch.setattr(mathematics, '_library', lambda: reader)
  yield reader
  mathematics._parsed.cache_clear()


# They read a number with the code of `gsm8k`, and take most of the time.
LONG = dict.fromkeys(
  ['last_number', 'multiple_choice', 'number'], [pytest.mark.long]
)


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=[golden_test.needs(name), *LONG.get(name, [])])
    for name in verifiers.__all__
    if name not in golden_test.APART
  ],
)
def test_no_completion_raises(name):
  verifier = getattr(rewards, name)
  kept = dict(EXAMPLE)
  verifier('', '5', EXAMPLE, **ARGUMENTS.get(name, {}))  # imports what it needs
  for place, text in enumerate(hostile.ALL.values()):
    marked = f'\\boxed{{{text}}}', f'#### {text}'
    # Some of them too; all would take a quarter of a minute.
    for completion in (text, *marked[: 2 * (place % 3 == 0)]):
      start = time.process_time()
      got = verifier('', completion, EXAMPLE, **ARGUMENTS.get(name, {}))
      assert type(got) is float and 0 <= got <= 1
      # The largest texts take a quarter of it.
      took = time.process_time() - start
      assert took < 15 * pace.counting_secs(), ascii(completion[:80])
  assert EXAMPLE == kept


@golden_test.needs('math_equivalence')
def test_no_completion_without_a_box_raises():
  for text in hostile.ALL.values():
    got = rewards.math_equivalence('', text, EXAMPLE, require_box=False)
    assert type(got) is float


@pytest.mark.parametrize('require_box', [True, False])
def test_what_is_parsed_is_short_and_shallow(reader, require_box):
  for text in hostile.ALL.values():
    for completion in (text, f'\\boxed{{{text}}}'):
      rewards.math_equivalence('', completion, EXAMPLE, require_box=require_box)
  assert len(reader.texts) > 40
  for text in reader.texts:
    assert len(text) <= 1000 and text.count('^') <= 30
    assert max(text.count(brace) for brace in '{([') <= 1000
    assert '{' * 21 not in text and '(' * 21 not in text


@pytest.mark.parametrize(
  'huge',
  [
    '9**9**9**9', '9^9^9', '9^{9^{9}}', '2^{999999}', '10^{10^{10^{10}}}',
    '99999!', '9!!', '(9^9)!', '2^{1,000,000}', '2^{2^{n}}', '3^ { 7 ^ 99 }',
    '1e999999',
  ],
)  # fmt: skip
def test_a_number_too_large_to_write_out_is_not_parsed(reader, huge):
  assert not rewards.math_equivalence('', f'\\boxed{{{huge}}}', EXAMPLE)
  assert reader.texts == []
  if len(huge) < 9:  # the same text is right without a parser
    with pytest.raises(ValueError, match='math_equivalence requires'):
      rewards.math_equivalence('', '\\boxed{5}', {'answer': huge})


@pytest.mark.parametrize(
  'usual',
  ['2^{10}', '2^{1000}', '10^{23}', '7!', '2^{2^3}', 'e^{-x^2}', '5^2!'],
)
def test_usual_powers_are_parsed(reader, usual):
  rewards.math_equivalence('', f'\\boxed{{{usual}}}', EXAMPLE)
  assert usual in reader.texts


@golden_test.needs('math_equivalence')
def test_mathematics_needs_no_signals(monkeypatch):
  """The time limits of math-verify itself, which are alarms, are off."""
  before = signal.getsignal(signal.SIGALRM)
  right = rewards.math_equivalence, '', '\\boxed{0.7}', {'answer': '7/10'}
  with futures.ThreadPoolExecutor(1) as executor:  # has no signals
    assert executor.submit(*right).result() == 1
  alarms = []
  monkeypatch.setattr(signal, 'alarm', alarms.append)
  monkeypatch.setattr(signal, 'setitimer', lambda *of: alarms.append(of))
  mathematics._parsed.cache_clear()
  assert right[0](*right[1:]) == 1 and alarms == []
  assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize(
  'name, right',
  [
    ('gsm8k', '#### 5'),
    ('last_number', '5'),
    ('number', '5'),
    ('boxed_text', '\\boxed{5}'),
    ('multiple_choice', '\\boxed{F}'),
  ],
)
def test_the_last_100_000_characters_are_read(name, right):
  verifier, arguments = getattr(rewards, name), ARGUMENTS.get(name, {})
  most = 100_000 - len(right)
  for spaces, expected in ((most, 1), (most + 6, 0)):
    for front in ('', 'x ' * 60_000):
      completion = front + right + ' ' * spaces
      assert verifier('', completion, EXAMPLE, **arguments) == expected


@pytest.mark.parametrize(
  'name, right, arguments',
  [
    ('format_tags', '<a>1</a>', {'tags': ['a']}),
    ('regular_expression', '5', {'regex': '5'}),
    pytest.param(
      'json_schema',
      '5',
      {'schema': {'type': 'integer'}},
      marks=golden_test.needs('json_schema'),
    ),
  ],
)
def test_longer_completions_have_no_form(name, right, arguments):
  verifier = getattr(rewards, name)
  right = right.ljust(100_000)
  assert verifier('', right, EXAMPLE, **arguments) == 1
  assert verifier('', right + ' ', EXAMPLE, **arguments) == 0


# Each is repeated to fill a completion, alone and behind the marks of answers.
PIECES = (
  ' ', '\n', '$', '*', '#### ', '-', '1', '1,', '.1', '1 ', '1/', '1 / ', '1e',
  '%', '\\boxed{', '\\boxed', '{', '}', 'answer is ', 'answer ', 'B ', 'B or ',
  '<think>', '</think>', '<', '\\text{', '(', '\u2212',
)  # fmt: skip


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=LONG.get(name, []))
    for name in verifiers.__all__
    if rewards.is_bounded(getattr(rewards, name))
  ],
)
def test_bounded_verifiers_take_time_in_proportion(name):
  """A quadratic time would be half a minute: 50,000 characters squared."""
  verifier, arguments = getattr(rewards, name), ARGUMENTS.get(name, {})
  before, slowest = time.process_time(), 0.0
  for front in '', '#### ', 'answer: ', '<think>', '\\boxed{', '1':
    for piece in PIECES:
      text = front + piece * ((50_000 - len(front)) // len(piece))
      verifier('', text, EXAMPLE, **arguments)
      now = time.process_time()
      before, slowest = now, max(slowest, now - before)
      assert slowest < 5 * pace.counting_secs(), (front, piece)


def test_what_is_bounded_is_known():
  bounded = {
    name
    for name in verifiers.__all__
    if rewards.is_bounded(getattr(rewards, name))
  }
  assert set(verifiers.__all__) - bounded == {
    'json_schema', 'math_equivalence', 'reasoning_gym', 'regular_expression',
  }  # fmt: skip
