"""Calls that go on from each other: the same bits whenever they come."""

import random

import numpy as np

from grpo_jax import engines
from tests import tiny

SAMPLING = engines.Sampling(eos_ids=(3, 7, 11))
FANCY = {**tiny.FANCY, 'num_layers': 3}
# Of each call: the one that it follows, how much of its end is left out, what
# is new, and the most tokens.
TREE = (
  (None, 0, (5, 6, 7, 8, 9, 5, 6), 6),
  (0, 0, (20, 21), 8),
  (1, 0, (22,), 5),
  (0, 0, (30, 31, 32, 33, 34, 35), 6),  # a fork
  (2, 3, (8,) * 25, 9),  # rewritten from some place on
  (None, 0, (5, 6, 7, 8, 9, 5, 6), 6),  # another of the group
  (5, 0, (9,), 4),
  (None, 0, (12,), 7),
  (7, 0, (13, 14, 15), 30),
)


def model(**changes):
  return tiny.model(**{'num_layers': 2, **changes})


def engine(made=None, **options):
  made = made or model()
  options = {'prompt_buckets': (8,), 'completion_buckets': (24, 64)} | options
  found = engines.LocalEngine(made, **options)
  found.load(tiny.params(made), version=5)
  return found


def draw(
  made, order=lambda ready: ready, tree=TREE, calls=4, sampling=SAMPLING
):
  """Asks for a tree of calls, of those that are ready in an order."""
  found, numbers, asked, places = {}, {}, {}, {}
  turns = iter(())
  while len(found) < len(tree):
    ready = [
      n
      for n, (parent, *_) in enumerate(tree)
      if n not in asked and (parent is None or parent in found)
    ]
    for n in order(ready):
      parent, less, new, limit = tree[n]
      ids, follows = [], None
      if parent is not None:
        ids = [*asked[parent].ids, *found[parent].ids.tolist()]
        ids, follows = ids[: len(ids) - less], (places[parent], 0)
      key = np.array([[17, n]], np.uint32)
      asked[n] = engines.Request(
        [*ids, *new], key, limit, sampling, calls=calls, follows=follows
      )
      places[n] = made.submit(asked[n])
      numbers[places[n]] = n
    if (turn := next(turns, None)) is None:
      turns = made.completed()
      continue
    for one in turn:
      found[numbers[one.request]] = one
  for number in numbers:
    made.forget(number)
  return [asked[n] for n in sorted(asked)], [found[n] for n in sorted(found)]


def bits(found):
  return [
    (one.ids.tobytes(), one.logp.tobytes(), one.entropy.tobytes(), one.finish)
    for one in found
  ]


def shuffled(seed):
  draw = random.Random(seed)

  def order(ready):
    return draw.sample(ready, draw.randint(min(1, len(ready)), len(ready)))

  return order
