"""What a plan says of copies, and of devices that have nothing to do."""

import pytest

from grpo_jax.planning import waste
from tests.planning.estimates import estimate


def told(name='v5p:4x4x4', model='Qwen2.5-7B', **changes):
  """The sentences of a plan with this mesh."""
  made = estimate(name, model, **changes)
  return waste.sentences(made.counted, made.topology.number)


def test_heads_that_tensor_does_not_divide_are_told_with_their_size():
  learner, sampling = told(**{'mesh.tensor': 8})
  assert learner == (
    'The learner: tensor=8 divides neither 28 heads nor 4 heads of keys and '
    'values, so these weights are replicated: each device holds 6.23 GiB of '
    'weights, and not 3.55.'
  )
  # In bfloat16. There are prompts enough to split the cache by rows.
  assert sampling.endswith('holds 3.11 GiB of weights, and not 1.77.')


def test_a_mesh_that_divides_all_wastes_nothing():
  assert told(**{'mesh.tensor': 4, 'mesh.fsdp': 16}) == []


def test_few_prompts_leave_a_cache_whole_and_devices_idle():
  *_, cache = told(**{'mesh.tensor': 8, 'sampler.prompts': 8})
  assert '8 does not divide 4 heads of keys and values, so their ca' in cache
  (idle,) = told(**{'mesh.fsdp': 64, 'sampler.prompts': 8})
  assert idle.startswith(
    'Idle: 8 prompts lie on 64 data shards, so that 88% of'
  )


def test_devices_outside_the_mesh_are_told():
  changes = {'mesh.data': 1, 'mesh.fsdp': 4}
  (idle,) = told('v5e:2x4', 'Qwen2.5-0.5B', **changes)
  assert idle.startswith('Idle: 4 of 8 devices are not in the mesh')


@pytest.mark.parametrize(
  'sizes, said',
  [
    ([28], 'does not divide 28 heads'),
    ([4, 28], 'divides neither 28 heads nor 4 heads'),
  ],
)
def test_what_does_not_divide_is_named(sizes, said):
  found = waste._not_divided(
    waste._Whole('tensor', size, 'heads') for size in sizes
  )
  assert found == said
