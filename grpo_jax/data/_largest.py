"""The largest of four numbers: a task for a small pretrained model."""

import dataclasses

import numpy as np

_LENGTH = {'train': 10_000, 'heldout': 1_000}
_LEAST, _MOST = 10, 99


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
    if self.split not in _LENGTH:
      raise ValueError(
        f'The task of the largest number has no split {self.split!r}; pass'
        " 'train' or 'heldout'."
      )

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
