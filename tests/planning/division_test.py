"""Devices that sample and others that learn: their memory, and how many."""

import dataclasses
import json
import math

import jax
import pytest

from grpo_jax.commands import plan as command
from grpo_jax.engines import handover
from grpo_jax.mesh import sharding
from grpo_jax.planning import arithmetic
from grpo_jax.planning import division
from grpo_jax.planning import plan as plans
from grpo_jax.planning import topologies
from grpo_jax.planning.division import Reached
from grpo_jax.planning.plan import LEARNING
from grpo_jax.run.build import build
from tests import cli
from tests import runs

WIDE = {
  'model.num_layers': 2,
  'model.width': 64,
  'model.num_heads': 8,
  'model.num_kv_heads': 4,
  'model.compute_dtype': 'bfloat16',
  'sampler.prompts': 8,
  'learner.micro_rows': 0,
  'sampler.ahead': 2,
}


def config_of(**changes):
  return runs.small(**{**WIDE, **changes})


def of_topology(config, name='v5p:2x2x2'):
  return plans.plan(config, topologies.named(name), estimate=True)


def on_first(tree, mesh):
  """Bytes on the first device of a mesh."""
  first = mesh.devices.flat[0]
  return sum(
    shard.data.nbytes
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
    if shard.device == first
  )


@pytest.mark.parametrize(
  'own, changes',
  [
    (4, {'mesh.fsdp': 4}),
    (2, {'mesh.fsdp': 2, 'mesh.data': 3, 'sampler.tensor': 2}),
    (6, {'mesh.tensor': 2, 'sampler.tensor': 1}),
    (4, {'mesh.fsdp': 4, 'lora.rank': 2}),
    (1, {}),
  ],
)
def test_versions_take_the_bytes_that_they_take(own, changes):
  """Of a + 1 that are there, and of the one that decoding reads."""
  config = config_of(**changes, **{'generator.devices': own})
  devices = jax.devices()
  mesh = sharding.make_mesh(
    **dataclasses.asdict(config.mesh), devices=devices[:-own]
  )
  parts = build.abstract(config, mesh, devices[-own:])
  counted = arithmetic.Arithmetic(parts)
  run = build.run(config)
  frozen = build.frozen_params(run)
  updater = build.updater(run, frozen)
  params = updater.compiled.init(build.initial_params(run)).params
  weights = handover.Put(run.model, params, run.mesh, run.sampling_mesh, frozen)
  for version in range(3):
    weights.publish(params, version)
  read = weights.fetch(0)
  assert on_first(read, run.sampling_mesh) == counted.weights.sampled
  landed = [weights._snapshots[version] for version in range(3)]
  there = {id(x) for x in jax.tree.leaves(read)}
  more = [x for x in jax.tree.leaves(landed) if id(x) not in there]
  assert on_first(more, run.sampling_mesh) == counted.weights.older
  whole = sum(x.nbytes for x in jax.tree.leaves(landed[0]))
  assert whole == counted.weights.published


def test_each_side_holds_what_its_own_programs_need():
  config = config_of(**{'mesh.data': -1, 'generator.devices': 4})
  apart = of_topology(config)
  turn = of_topology(config_of(**{'mesh.data': -1, 'sampler.ahead': 0}))
  assert apart.counted.mesh.size == apart.counted.sampling_mesh.size == 4
  for one in apart.programs:
    if one.name in LEARNING:
      assert {'parameters', 'moments'} <= one.memory.keys()
      assert not {'sampler weights', 'cache', 'older parameters'} & {
        *one.memory
      }
    else:
      assert {'older parameters'} <= one.memory.keys()
      assert not {'parameters', 'moments', 'reference'} & {*one.memory}
  assert 'prepare' not in {one.name for one in apart.programs}
  assert apart.bound_secs == max(apart.draw_secs, apart.learn_secs)
  assert turn.bound_secs == pytest.approx(turn.draw_secs + turn.learn_secs)
  # Half as many devices for each.
  secs = {one.name: one.work.flops for one in turn.programs}
  for one in apart.programs:
    if one.name in ('decode', 'train_step'):
      assert one.work.flops == pytest.approx(2 * secs[one.name], rel=0.01)
  decode = [
    one.memory['cache'] for x in (turn, apart) for one in x.programs
    if one.name == 'decode'
  ]  # fmt: skip
  assert decode[1] == 2 * decode[0]


def test_a_division_is_as_fast_as_the_slower_side():
  found = division.divide(
    config_of(), topologies.named('v5e:2x4'), Reached(0.5, 0.25)
  )
  assert {one.sampling for one in found} == {*range(8)}
  ranked = [(not one.plan.fits, one.step_secs) for one in found]
  assert ranked == sorted(ranked)
  for one in found:
    assert one.draw_secs == pytest.approx(2 * one.plan.draw_secs)
    assert one.learn_secs == pytest.approx(4 * one.plan.learn_secs)
    both = one.draw_secs, one.learn_secs
    if not one.sampling:
      assert one.waits == '' and one.step_secs == sum(both)
      assert one.config.sampler.ahead == 0
      continue
    assert one.step_secs == max(both) + one.sync_secs and one.sync_secs > 0
    slower = 'learning' if both[0] > both[1] else 'sampling'
    assert one.waits == slower
    assert one.config.sampler.ahead == 2
    number = math.prod(one.plan.mesh.values())
    assert number + one.sampling == 8
    tensor = one.plan.counted.sampling_mesh.shape['tensor']
    assert tensor == one.config.sampler.tensor
  # More that sample draw faster, and fewer learn.
  by_number = {one.sampling: one for one in found}
  assert by_number[6].draw_secs < by_number[2].draw_secs
  assert by_number[6].learn_secs > by_number[2].learn_secs


def test_of_several_slices_whole_ones_sample():
  topology = topologies.named('v5e:2x4', 3)
  found = division.divide(config_of(), topology)
  assert {one.sampling for one in found} == {0, 8, 16}
  slices = {one.sampling: one.config.mesh.slices for one in found}
  assert slices == {0: 3, 8: 2, 16: 1}


def test_a_version_goes_over_the_slow_links_between_slices():
  near, far = (
    of_topology(
      config_of(**{'generator.devices': 8, 'mesh.data': 8}),
      name,
    )
    for name in ('v5e:4x4', 'h100-sxm:2x8')
  )
  for one in near, far:
    chip = one.topology.chip
    published = one.counted.weights.published
    link = chip.ici_gb_per_s if one is near else chip.dcn_gb_per_s
    assert division.sync_secs(one) >= published / 8 / (link * 1e9)


def test_the_command_says_how_to_divide():
  done = cli.command(
    'plan', cli.SMALL, '--topology=v5e:2x2', '--split', '--json'
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout)
  assert {one['sampling_devices'] for one in found} == {0, 1, 2, 3}
  for one in found:
    assert (
      f'--config.generator.devices={one["sampling_devices"]}' in (one['flags'])
    )


@pytest.mark.parametrize('typed', ['0.5', '0,1', '0.5,2', 'a,b', '0.5,0.5,0.5'])
def test_shares_that_are_none_are_refused(typed):
  with pytest.raises(ValueError, match='are no two shares; give numbers'):
    command._reached(typed)
  assert command._reached('0.25,1') == Reached(0.25, 1.0)


def test_more_devices_than_there_are_are_refused():
  config = config_of(**{'generator.devices': 8})
  with pytest.raises(ValueError, match='has 8 devices, .*; give at most 7'):
    of_topology(config)
