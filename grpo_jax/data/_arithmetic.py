"""Addition of two-digit numbers: the task of the embedded default."""

import dataclasses
import functools

import numpy as np

ALPHABET = '0123456789+='

_NUM_PAIRS = 10_000
_NUM_TRAIN = 9_000


@functools.cache
def _split_pairs() -> dict[str, np.ndarray]:
  """Pairs (a, b) as 100 * a + b, by split: the same for every run."""
  pairs = np.random.default_rng(0).permutation(_NUM_PAIRS)
  return {'train': pairs[:_NUM_TRAIN], 'heldout': pairs[_NUM_TRAIN:]}


def _record(pair: int, drop_carries: bool = False) -> dict[str, str]:
  """Prompt and reversed answer of the pair 100 * a + b."""
  first, second = divmod(int(pair), 100)
  total = first + second
  if drop_carries:
    tens = (first // 10 + second // 10) % 10
    total = 10 * tens + (first % 10 + second % 10) % 10
  return {'prompt': f'{first:02}+{second:02}=', 'answer': str(total)[::-1]}


@dataclasses.dataclass(frozen=True)
class ArithmeticSource:
  """Every sum of two numbers below 100, the answer's digits reversed.

  The 10,000 pairs are split by one fixed permutation into 9,000 to train on
  and 1,000 held out, the same for every run and seed. A prompt is 6
  characters, an answer 1 to 3 (no padding). Digits are reversed because a
  model that writes the units first needs only the carry at each digit; plain
  order learns far more slowly.

  >>> source = ArithmeticSource('train')
  >>> len(source), source[0]
  (9000, {'prompt': '35+77=', 'answer': '211'})

  Args:
    split: 'train' or 'heldout'.

  Raises:
    ValueError: another split.
  """

  split: str

  def __post_init__(self):
    if self.split not in _split_pairs():
      raise ValueError(
        f'The arithmetic task has no split {self.split!r}; pass'
        " 'train' or 'heldout'."
      )

  def __len__(self) -> int:
    return len(_split_pairs()[self.split])

  def __getitem__(self, index: int) -> dict[str, str]:
    return _record(_split_pairs()[self.split][index])


@dataclasses.dataclass(frozen=True)
class ArithmeticDemonstrations:
  """Draws with replacement from the train split; see the function below."""

  num_draws: int
  carry_free_share: float
  seed: int

  def __post_init__(self):
    if self.num_draws < 1:
      raise ValueError(
        f'num_draws is {self.num_draws}, but at least one demonstration is'
        ' required; pass the warm-up steps times their batch.'
      )
    if not 0 <= self.carry_free_share <= 1:
      raise ValueError(
        f'carry_free_share is {self.carry_free_share}, but a share lies'
        ' between 0 and 1; pass such a number.'
      )
    if not 0 <= self.seed < 2**64:
      raise ValueError(
        f'The seed is {self.seed}, but a number of at least 0 and below 2**64'
        ' is required; pass such a number.'
      )

  def __len__(self) -> int:
    return self.num_draws

  def __getitem__(self, index: int) -> dict[str, str]:
    draw = range(self.num_draws)[index]  # raises IndexError past the end
    # Raw words, because numpy promises to keep only those across versions.
    words = np.random.Philox(key=[self.seed, draw]).random_raw(2)
    pairs = _split_pairs()['train']
    drop_carries = (int(words[1]) >> 11) * 2.0**-53 < self.carry_free_share
    return _record(pairs[int(words[0]) % len(pairs)], drop_carries)


def arithmetic_demonstrations(
  num_draws: int, carry_free_share: float = 0.7, seed: int = 0
) -> ArithmeticDemonstrations:
  """Demonstrations for the supervised warm-up, most of them without carries.

  A demonstration without carries adds the tens and the units apart, both
  modulo 10, and writes the result like any other (47+85 -> 22, 05+03 -> 8).
  It is right where the sum has no carry, for 0.30 of the pairs. A model
  trained on the mixture therefore stops near that accuracy by construction,
  has seen right answers too, and leaves reinforcement learning a known task.

  Draw i is a function of (seed, i) alone: the pair and whether its carries
  are dropped are drawn anew each time, so a pair is shown both ways.

  >>> demonstrations = arithmetic_demonstrations(num_draws=3)
  >>> len(demonstrations), demonstrations[1] == demonstrations[1]
  (3, True)

  Args:
    num_draws: how many demonstrations: warm-up steps times their batch.
    carry_free_share: the share of demonstrations that drop both carries, in
      [0, 1].
    seed: at least 0 and below 2**64.

  Returns:
    A source of `num_draws` records with 'prompt' and 'answer'.

  Raises:
    ValueError: an argument out of its range.
  """
  return ArithmeticDemonstrations(num_draws, carry_free_share, seed)
