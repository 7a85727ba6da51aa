"""How an optimizer batch is cut into micro-batches, and which layout it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import layout
from grpo_jax.models import stack
from grpo_jax.models.layout import LayoutSpec
from tests import trees

pytestmark = pytest.mark.quick

# Behind a prompt of 6 tokens: 5 rows of 40 columns, or 2 of 8 + 4 x 32.
LENGTHS = [20, 20, 20, 3, 20, 20, 3, 3]


def batch(lengths=LENGTHS, prompt_tokens=(6, 6)):
  """2 x 4 completions of at most 32 tokens."""
  length = np.array(lengths, np.int32).reshape(2, 4)
  prompts = [[1] * tokens for tokens in prompt_tokens]
  return prompts, np.ones((2, 4, 32), np.int32), length


def slots_of(length, branches):
  """Of 32 places; None without branches."""
  if not branches:
    return None
  rng = np.random.default_rng(0)
  return layout.whole_trees(length, trees.random_trees(rng, length, 32))


@pytest.mark.parametrize(
  'micro_rows, micro_tokens, shape',
  [(3, 0, (3, 3, 40)), (2, 0, (4, 2, 40)), (0, 80, (4, 2, 40))]
  + [(0, 79, (8, 1, 40)), (0, 10, (8, 1, 40))],
)
def test_a_stack_holds_all_rows_and_no_more(micro_rows, micro_tokens, shape):
  spec = LayoutSpec('padded', micro_rows, 0, (8,), micro_tokens=micro_tokens)
  rows, used = stack.micro_batches(*batch(), spec)
  assert rows.tokens.shape == shape and used == shape[0]


@pytest.mark.parametrize('kind', ['padded', 'packed', 'shared'])
def test_the_longest_prompt_decides_the_width(kind):
  spec = LayoutSpec(kind, 1, 0, (4, 8))
  rows, _ = stack.micro_batches(*batch(prompt_tokens=(3, 7)), spec)
  assert rows.tokens.shape[-1] == (8 + 4 * 32 if kind == 'shared' else 8 + 32)


def test_slots_are_the_most_of_a_row_up_to_a_power_of_two():
  spec = stack.decide(*batch(), LayoutSpec('packed', 1, 0, (8,)))
  assert spec.row_slots == 4  # of 3, in 5 rows


@pytest.mark.parametrize(
  'options, kind',
  [
    (dict(micro_rows=1), 'packed'),  # 5 x 40 < 0.75 x 2 x 136
    (dict(micro_rows=0, micro_tokens=136), 'shared'),  # 6 x 40: two at a time
    (dict(micro_rows=2), 'shared'),  # as above
    (dict(micro_rows=5), 'packed'),  # 5 x 40 < 0.75 x 5 x 136
    (dict(micro_rows=1, key_cost=1.0), 'packed'),  # as many keys in both
  ],
)
def test_auto_counts_padding_and_keys(options, kind):
  spec = LayoutSpec('auto', row_completions=0, prompt_buckets=(8,), **options)
  assert stack.decide(*batch(), spec).kind == kind


@pytest.mark.parametrize('kind', ['padded', 'packed', 'shared'])
@pytest.mark.parametrize('shards', [1, 2, 4])
@pytest.mark.parametrize('branches', [False, True])
def test_each_shard_has_its_part_of_every_micro_batch(kind, shards, branches):
  spec = LayoutSpec(kind, 4, 1 if kind == 'shared' else 0, (8,), shards=shards)
  given = *batch(), spec
  slots = slots_of(given[2], branches)
  whole, used = stack.micro_batches(*given, slots=slots)
  parts = [
    stack.micro_batches(*given, np.arange(shards) == shard, slots)
    for shard in range(shards)
  ]
  assert {number for _, number in parts} == {used}
  of_trees = ('reach', 'own') * branches
  for name in ('tokens', 'position', 'segment', 'column', 'target', *of_trees):
    wanted = getattr(whole, name)
    of_shards = [
      np.split(getattr(part, name), shards, axis=1)[shard]
      for shard, (part, _) in enumerate(parts)
    ]
    np.testing.assert_array_equal(np.concatenate(of_shards, axis=1), wanted)
    # And no more: the rows of other shards cost nothing.
    total = sum(np.abs(getattr(part, name)).sum() for part, _ in parts)
    assert total == np.abs(wanted).sum()


@pytest.mark.parametrize('kind', ['padded', 'packed', 'shared'])
@pytest.mark.parametrize('branches', [False, True])
def test_numbers_are_filled_with_the_ids_they_stand_for(kind, branches):
  prompts, tokens, length = batch()
  prompts = [[0, 5, 2, 7, 1, 3], [9, 0, 0, 4, 8, 6]]  # 0 is an id too
  tokens = np.arange(5, 5 + tokens.size, dtype=np.int32) % 11
  tokens = tokens.reshape(
    length.shape + (-1,)
  )  # the first is not 0, as padding
  spec = LayoutSpec(kind, 1, 0, (8,))
  slots = slots_of(length, branches)
  whole, _ = stack.micro_batches(prompts, tokens, length, spec, slots=slots)
  numbers = stack.number_tokens(prompts, tokens.shape, np.arange(2))
  found, _ = stack.micro_batches(*numbers, length, spec, slots=slots)
  assert not np.array_equal(found.tokens, whole.tokens)
  # Of each slot the ids of its completion, of an empty one anything.
  ids = tokens.reshape(-1, tokens.shape[-1])[found.completion % length.size]
  found = jax.vmap(stack.fill)(found, jnp.asarray(ids))
  for name in ('tokens', 'target', 'column', 'completion'):
    np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))
