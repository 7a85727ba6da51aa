"""Random episodes that branch, and what their tokens follow."""

import numpy as np

from grpo_jax.models import layout


def random_tree(rng, size, branches=0.3):
  """i32[size]: the place of the token that each token follows, or -1."""
  straight = np.arange(-1, size - 1)
  elsewhere = [rng.integers(-1, max(place, 1)) for place in range(size)]
  branch = (rng.random(size) < branches) & (straight >= 0)
  return np.where(branch, elsewhere, straight).astype(np.int32)


def random_trees(rng, length, width, branches=0.3):
  """i32[P,G,T] of completions of these lengths, 0 behind them."""
  found = np.zeros((*length.shape, width), np.int32)
  for place in np.ndindex(length.shape):
    size = length[place]
    found[place][:size] = random_tree(rng, size, branches)
  return found


def path(previous, place):
  """The places from the prompt to a token, which is the last of them."""
  found = []
  while place >= 0:
    found.append(place)
    place = previous[place]
  return found[::-1]


def cut(rng, slots, share=0.3):
  """The same tokens in more slots, each behind a longer context."""
  found = []
  for slot in slots:
    inner = np.arange(1, slot.count)
    begins = [0, *inner[rng.random(len(inner)) < share], slot.count]
    for first, end in zip(begins, begins[1:]):
      before = slot.first + np.arange(first)
      found.append(
        layout.Slot(
          slot.completion,
          slot.first + int(first),
          int(end - first),
          np.concatenate([slot.context, before]).astype(np.int32),
        )
      )
  return found
