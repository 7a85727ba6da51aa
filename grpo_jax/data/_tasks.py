"""Tasks that need no files: two-digit sums, and the largest of four numbers."""

import dataclasses
import functools
from typing import Any

import numpy as np

ALPHABET = '0123456789+='

_NUM_PAIRS = 10_000
_NUM_TRAIN = 9_000

# For the largest of four numbers.
_LENGTH = {'train': 10_000, 'heldout': 1_000}
_LEAST, _MOST = 10, 99


@functools.cache
def _split_pairs() -> dict[str, np.ndarray]:
  """The pairs (a, b) of each split, as 100 * a + b; the same for every run."""
  pairs = np.random.default_rng(0).permutation(_NUM_PAIRS)
  return {'train': pairs[:_NUM_TRAIN], 'heldout': pairs[_NUM_TRAIN:]}


def _record(pair: int, drop_carries: bool = False) -> dict[str, str]:
  """Prompt and reversed answer of the pair 100 * a + b.

  Args:
    pair: The two numbers.
    drop_carries: Whether the answer is the wrong one that forgets to carry.
  """
  first, second = divmod(int(pair), 100)
  total = first + second
  if drop_carries:  # units and tens are added apart, each modulo 10
    tens = (first // 10 + second // 10) % 10
    total = 10 * tens + (first % 10 + second % 10) % 10
  return {'prompt': f'{first:02}+{second:02}=', 'answer': str(total)[::-1]}


def _require_split(subject: str, split: str) -> None:
  """Raises a ValueError unless a split is one of the two."""
  if split not in _LENGTH:
    raise ValueError(
      f"{subject} no split {split!r}; pass 'train' or 'heldout'."
    )


@dataclasses.dataclass(frozen=True)
class ArithmeticSource:
  """Every sum of two numbers below 100, the answer's digits reversed.

  47 + 85 is the record `{'prompt': '47+85=', 'answer': '231'}`. The digits of
  the sum are reversed because a model that writes the units first needs only
  the carry from one digit to the next; it learns the plain order far more
  slowly. A prompt has 6 characters; an answer has 1 to 3, without padding.

  A fixed permutation splits the 10,000 pairs into 9,000 to train on and 1,000
  held out. It is the same for every run and every seed.

  >>> source = ArithmeticSource('train')
  >>> len(source), source[0]
  (9000, {'prompt': '35+77=', 'answer': '211'})

  Args:
    split: 'train' or 'heldout'.

  Raises:
    ValueError: there is no such split.
  """

  split: str

  def __post_init__(self):
    _require_split('The arithmetic task has', self.split)

  def __len__(self) -> int:
    return len(_split_pairs()[self.split])

  def __getitem__(self, index: int) -> dict[str, str]:
    return _record(_split_pairs()[self.split][index])


@dataclasses.dataclass(frozen=True)
class ArithmeticDemonstrations:
  """Demonstrations for the supervised warm-up, most of which forget the carry.

  A demonstration without carries adds the tens and the units apart, both modulo
  10: 47+85 gives 22, and 05+03 gives 8. It is right for 0.30 of the pairs,
  those whose sum has no carry. A model that is trained on such answers and some
  right ones stops near this accuracy. So reinforcement learning begins with a
  model that gives right answers sometimes, and has something to teach it: the
  carry.

  Draw i is a function of (seed, i) alone. It chooses a pair and whether to drop
  its carries, so one pair is shown both ways.

  >>> demonstrations = arithmetic_demonstrations(num_draws=3)
  >>> len(demonstrations), demonstrations[1] == demonstrations[1]
  (3, True)

  Args:
    num_draws: how many demonstrations there are: the number of warm-up steps
      times the examples of each.
    carry_free_share: the share of demonstrations without carries, in [0, 1].
    seed: at least 0 and below 2**64.

  Raises:
    ValueError: an argument is outside its range.
  """

  num_draws: int
  carry_free_share: float = 0.7
  seed: int = 0

  def __post_init__(self):
    if self.num_draws < 1:
      raise ValueError(
        f'num_draws is {self.num_draws}, but at least one demonstration is'
        ' required; pass the number of warm-up steps times the examples of'
        ' each.'
      )
    if not 0 <= self.carry_free_share <= 1:
      raise ValueError(
        f'carry_free_share is {self.carry_free_share}, but a share lies'
        ' between 0 and 1; pass a number from 0 to 1.'
      )
    if not 0 <= self.seed < 2**64:
      raise ValueError(
        f'The seed is {self.seed}, but the random generator takes 64 bits;'
        ' pass a number that is at least 0 and below 2**64.'
      )

  def __len__(self) -> int:
    return self.num_draws

  def __getitem__(self, index: int) -> dict[str, str]:
    draw = range(self.num_draws)[index]  # raises IndexError past the end
    # Raw words: numpy promises to keep these from version to version, but not
    # what its functions make of them.
    # Philox is keyed, so draw i needs none of the draws before it.
    words = np.random.Philox(key=[self.seed, draw]).random_raw(2)
    pairs = _split_pairs()['train']
    # The upper 53 bits, as many as a float holds, as a number in [0, 1).
    drop_carries = (int(words[1]) >> 11) * 2.0**-53 < self.carry_free_share
    return _record(pairs[int(words[0]) % len(pairs)], drop_carries)


arithmetic_demonstrations = ArithmeticDemonstrations


@dataclasses.dataclass(frozen=True)
class LargestSource:
  """Questions for the largest of four different two-digit numbers.

  A model of 135M parameters that follows instructions answers about one in four
  rightly, mostly by repeating one of the numbers; so almost every group of
  completions holds right and wrong ones, and there is something to learn from.

  A record depends on its split and its index alone. No question of one split,
  in whatever order of its numbers, is in the other.

  >>> source = LargestSource('train')
  >>> len(source), source[0]['answer']
  (10000, '78')

  Args:
    split: 'train' or 'heldout'.

  Raises:
    ValueError: there is no such split.
  """

  split: str

  def __post_init__(self):
    _require_split('The task of the largest number has', self.split)

  def __len__(self) -> int:
    return _LENGTH[self.split]

  def __getitem__(self, index: int) -> dict[str, str]:
    index = range(len(self))[index]  # raises IndexError past the end
    words = np.random.Philox(key=[index, 0]).random_raw(64)
    drawn = (int(word % (_MOST - _LEAST + 1)) + _LEAST for word in words)
    heldout, numbers = self.split == 'heldout', []
    for number in drawn:
      numbers = [*(n for n in numbers if n != number), number][-4:]
      # A tenth of all questions is held out, by the sum of the four.
      if len(numbers) == 4 and (sum(numbers) % 10 == 0) == heldout:
        break
    *first, last = numbers
    asked = ', '.join(map(str, first)) + f' and {last}'
    return {
      'prompt': f'Which of these numbers is the largest: {asked}?',
      'answer': str(max(numbers)),
    }


@dataclasses.dataclass(frozen=True)
class EpisodesSource:
  """Numbers, for an environment that needs nothing else to begin.

  What differs between two records of a game is the seed of their episodes. The
  prompt is what people read, and no environment need read it.

  >>> source = EpisodesSource('heldout')
  >>> len(source), source[0]
  (1000, {'prompt': 'Episode 10000', 'number': 10000})

  Args:
    split: 'train' or 'heldout'.

  Raises:
    ValueError: there is no such split.
  """

  split: str

  def __post_init__(self):
    _require_split('Numbers of episodes have', self.split)

  def __len__(self) -> int:
    return _LENGTH[self.split]

  def __getitem__(self, index: int) -> dict[str, Any]:
    number = range(len(self))[index]  # raises IndexError past the end
    number += _LENGTH['train'] * (self.split == 'heldout')
    return {'prompt': f'Episode {number}', 'number': number}
